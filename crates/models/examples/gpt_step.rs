//! One measurement of the `gpt` workload for `benchmarks/gpt_step.py`: builds the pipeline, runs the steps,
//! and prints one line of JSON: losses, the milliseconds of each step and of its parts, what the simulator makes of
//! the step before the last, and bytes.
//!
//! Usage: gpt_step [stages=2] [micro_batches=8] [schedule=1f1b] [remat=never] [steps=3] [kernels=fastest|aten]
//!        [dtype=float32|bfloat16] [balance=cost] [samples=32] [device=cpu] [folder=DIR]
//! With `folder` the initial weights and the tokens are written there, for the peers to start from.
#![allow(clippy::print_stdout)]

use std::collections::HashMap;

use gpipe::{Adam, CrossEntropy, Device, Kernels, Pipeline, StageReport, StepReport, TensorSpec};
use gpipe_models::Transformer;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

const VOCABULARY: i64 = 8192;
const LENGTH: i64 = 128;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    gpipe::keep_freed_memory();
    let mut given = HashMap::new();
    for argument in std::env::args().skip(1) {
        let (key, value) = argument.split_once('=').ok_or("write arguments as key=value")?;
        given.insert(key.to_owned(), value.to_owned());
    }
    let mut take = |key: &str, default: &str| given.remove(key).unwrap_or_else(|| default.into());
    let model = Transformer {
        vocabulary: VOCABULARY,
        positions: LENGTH,
        features: 512,
        heads: 8,
        hidden: 2048,
        blocks: 8,
        dropout: 0.0,
        attention_dropout: 0.0,
        tied: false,
        split_blocks: true,
    };
    let (stages, samples): (usize, i64) =
        (take("stages", "2").parse()?, take("samples", "32").parse()?);
    let micro_batches: usize = take("micro_batches", "8").parse()?;
    let device: Device = take("device", "cpu").parse()?;
    let shape = [(samples / micro_batches as i64).max(1), LENGTH];
    let mut pipeline = Pipeline::builder(model.build()?, TensorSpec::new(shape, Kind::Int64))
        .devices(vec![device; stages])
        .micro_batches(micro_batches)
        .schedule(take("schedule", "1f1b").parse()?)
        .remat(take("remat", "never").parse()?)
        .balance(take("balance", "cost").parse()?)
        .kernels(match take("kernels", "fastest").as_str() {
            "fastest" => Kernels::fastest(),
            "aten" => Kernels::Aten,
            other => return Err(format!("kernels={other}: use fastest or aten").into()),
        })
        .kind(match take("dtype", "float32").as_str() {
            "float32" => Kind::Float,
            "bfloat16" => Kind::BFloat16,
            other => return Err(format!("dtype={other}: use float32 or bfloat16").into()),
        })
        .seed(1)
        .loss(CrossEntropy::default())
        .optimizer(Adam { lr: 1e-4, ..Adam::default() })
        .build()?;
    let (steps, folder): (usize, String) = (take("steps", "3").parse()?, take("folder", ""));
    if let Some(key) = given.keys().next() {
        return Err(format!("there is no argument '{key}'").into());
    }
    let (inputs, targets) = batch(samples)?;
    if !folder.is_empty() {
        let mut tensors = pipeline.parameters()?;
        tensors.push(("inputs".into(), inputs.shallow_clone()));
        tensors.push(("targets".into(), targets.shallow_clone()));
        Tensor::write_safetensors(&tensors, format!("{folder}/gpt.safetensors"))?;
    }
    let reports = (0..steps)
        .map(|_| pipeline.train_step(&inputs, &targets))
        .collect::<Result<Vec<StepReport>, _>>()?;
    println!("{}", json(&mut pipeline, &reports)?);
    Ok(())
}

/// The same tokens in every run: a fixed function of nothing.
fn batch(samples: i64) -> Result<(Tensor, Tensor), Failure> {
    let mut state = 1_u64;
    let mut token = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as i64 % VOCABULARY
    };
    let mut tensor = || {
        let tokens: Vec<i64> = (0..samples * LENGTH).map(|_| token()).collect();
        Tensor::f_from_slice(&tokens)?.f_reshape([samples, LENGTH])
    };
    Ok((tensor()?, tensor()?))
}

fn json(pipeline: &mut Pipeline, reports: &[StepReport]) -> Result<Value, Failure> {
    // The costs of one step predict the next: a prediction from its own measurement would count for nothing.
    let simulated = match reports {
        [.., before, _] => Some(pipeline.simulate(&[&before.timeline])?),
        _ => None,
    };
    let parts = |report: &StepReport| {
        let by_stage =
            |part: fn(&StageReport) -> f64| report.stages.iter().map(part).collect::<Vec<_>>();
        json!({
            "forward": by_stage(|stage| stage.forward.as_ms()),
            "recompute": by_stage(|stage| stage.recompute.as_ms()),
            "backward": by_stage(|stage| stage.backward.as_ms()),
            "optimizer": by_stage(|stage| stage.optimizer.as_ms()),
            "wait": by_stage(|stage| stage.wait.as_ms()),
        })
    };
    let last = reports.last().ok_or("at least one step")?;
    Ok(json!({
        "loss": reports.iter().map(|report| report.loss).collect::<Vec<_>>(),
        "step_ms": reports.iter().map(|report| report.time.as_ms()).collect::<Vec<_>>(),
        "bubble": last.bubble,
        "simulated_last_ms": simulated.as_ref().map(|timeline| timeline.makespan.as_ms()),
        "simulated_bubble": simulated.as_ref().map(|timeline| timeline.bubble()),
        "balance": pipeline.balance(),
        "peak_bytes": last.stages.iter().map(|stage| stage.peak.0).collect::<Vec<_>>(),
        "live_bytes": last.stages.iter().map(|stage| stage.live.0).collect::<Vec<_>>(),
        "parts_ms": reports.iter().map(parts).collect::<Vec<_>>(),
    }))
}
