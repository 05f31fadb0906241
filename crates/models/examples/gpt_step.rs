//! One measurement of the `gpt` workload for `benchmarks/gpt_step.py`: builds the pipeline, runs the steps,
//! and prints one line of JSON: losses, and the milliseconds of each step and of its parts.
//!
//! Usage: gpt_step STAGES MICRO_BATCHES SCHEDULE REMAT STEPS [FOLDER]
//! With FOLDER the initial weights and the tokens are written there, for the peer to start from.
#![allow(clippy::print_stdout)]

use gpipe::{Adam, CrossEntropy, Pipeline, StepReport, TensorSpec};
use gpipe_models::Transformer;
use tch::{Kind, Tensor};

const VOCABULARY: i64 = 8192;
const MINI_BATCH: i64 = 32;
const LENGTH: i64 = 128;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [stages, micro_batches, schedule, remat, steps, folder @ ..] = &arguments[..] else {
        return Err("usage: gpt_step STAGES MICRO_BATCHES SCHEDULE REMAT STEPS [FOLDER]".into());
    };
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
    let mut pipeline = Pipeline::builder(model.build()?, TensorSpec::new([4, LENGTH], Kind::Int64))
        .stages(stages.parse()?)
        .micro_batches(micro_batches.parse()?)
        .schedule(schedule.parse()?)
        .remat(remat.parse()?)
        .seed(1)
        .loss(CrossEntropy::default())
        .optimizer(Adam { lr: 1e-4, ..Adam::default() })
        .build()?;
    let (inputs, targets) = batch()?;
    if let Some(folder) = folder.first() {
        let mut tensors = pipeline.parameters()?;
        tensors.push(("inputs".into(), inputs.shallow_clone()));
        tensors.push(("targets".into(), targets.shallow_clone()));
        Tensor::write_safetensors(&tensors, format!("{folder}/gpt.safetensors"))?;
    }
    let reports = (0..steps.parse()?)
        .map(|_| pipeline.train_step(&inputs, &targets))
        .collect::<Result<Vec<StepReport>, _>>()?;
    println!("{}", json(&reports));
    Ok(())
}

/// The same tokens in every run: a fixed function of nothing.
fn batch() -> Result<(Tensor, Tensor), Failure> {
    let mut state = 1_u64;
    let mut token = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as i64 % VOCABULARY
    };
    let mut tensor = || {
        let tokens: Vec<i64> = (0..MINI_BATCH * LENGTH).map(|_| token()).collect();
        Tensor::f_from_slice(&tokens)?.f_reshape([MINI_BATCH, LENGTH])
    };
    Ok((tensor()?, tensor()?))
}

fn json(reports: &[StepReport]) -> String {
    let list = |value: fn(&StepReport) -> f64| {
        let values: Vec<String> = reports.iter().map(|report| value(report).to_string()).collect();
        format!("[{}]", values.join(","))
    };
    let total = |part: fn(&gpipe::StageReport) -> f64, report: &StepReport| -> f64 {
        report.stages.iter().map(part).sum()
    };
    let parts: Vec<String> = reports
        .iter()
        .map(|report| {
            format!(
                "{{\"forward\":{},\"recompute\":{},\"backward\":{},\"optimizer\":{},\"wait\":{}}}",
                total(|s| s.forward.as_ms(), report),
                total(|s| s.recompute.as_ms(), report),
                total(|s| s.backward.as_ms(), report),
                total(|s| s.optimizer.as_ms(), report),
                total(|s| s.wait.as_ms(), report)
            )
        })
        .collect();
    format!(
        "{{\"loss\":{},\"step_ms\":{},\"bubble\":{},\"peak_bytes\":{},\"parts_ms\":[{}]}}",
        list(|report| report.loss),
        list(|report| report.time.as_ms()),
        list(|report| report.bubble),
        list(|report| report.stages.iter().map(|stage| stage.peak.0 as f64).fold(0.0, f64::max)),
        parts.join(",")
    )
}
