//! Runs one trial of `benchmarks/memory.py`: whether two training steps of a network, by RMSProp
//! with momentum, fit under a cap in bytes that the allocator enforces. Prints one line of JSON
//! with the memory of the steps, or `refused`.
//!
//! ```text
//! Usage: memory network=amoeba [cells=18] [filters=64] [size=64], or
//!        memory network=transformer [blocks=3] [features=256] [vocabulary=4000] [length=128]
//!        each with [cap=BYTES, of each stage], and as `amoeba_step` [stages=2] [samples=32]
//!        [micro_batches=8] [schedule=1f1b] [remat=never] [kernels=fastest|aten]
//!        [dtype=float32|bfloat16] [balance=cost] [device=cpu]
//! ```
//!
//! Freed memory is not kept in the C library, so that the resident bytes are what the steps need.

use std::error::Error;

use gpipe::{
    Bytes, CrossEntropy, LayerError, Pipeline, PipelineBuilder, RmsProp, Sequence, StepReport,
};
use gpipe_drivers::{Arguments, Failure, Measurement, Numbers};
use gpipe_models::{AmoebaNet, Transformer, Variant};
use serde_json::{Value, json};
use tch::Tensor;

/// The first step creates the optimizer's state, and the second uses it.
const STEPS: usize = 2;
/// Bytes of a float32.
const FLOAT: i64 = 4;

/// Channels and classes of images.
const CHANNELS: i64 = 3;
const CLASSES: i64 = 10;
/// Features per head, and the ratio of a block's inner features to its features, as in the paper
/// (Huang et al. 2019, table 1).
const HEAD: i64 = 64;
const INNER: i64 = 4;

/// A network with a mini-batch.
struct Work {
    model: Sequence,
    /// The size that is varied: filters or blocks.
    size: i64,
    inputs: Tensor,
    targets: Tensor,
}

impl Work {
    fn read(arguments: &mut Arguments, samples: i64) -> Result<Self, Failure> {
        let network: String = arguments.take("network", "amoeba")?;
        match network.as_str() {
            "amoeba" => Self::amoeba(arguments, samples),
            "transformer" => Self::transformer(arguments, samples),
            other => Err(format!("network={other}: use amoeba or transformer").into()),
        }
    }

    fn amoeba(arguments: &mut Arguments, samples: i64) -> Result<Self, Failure> {
        let model = AmoebaNet {
            variant: Variant::D,
            cells: arguments.take("cells", "18")?,
            filters: arguments.take("filters", "64")?,
            channels: CHANNELS,
            classes: CLASSES,
            drop_path: 0.0,
            auxiliary: false,
        };
        let pixels: i64 = arguments.take("size", "64")?;
        let mut numbers = Numbers::default();
        Ok(Self {
            size: model.filters,
            inputs: numbers.uniform(&[samples, CHANNELS, pixels, pixels])?,
            targets: numbers.below(CLASSES, &[samples])?,
            model: model.build()?,
        })
    }

    fn transformer(arguments: &mut Arguments, samples: i64) -> Result<Self, Failure> {
        let features: i64 = arguments.take("features", "256")?;
        let (vocabulary, length) =
            (arguments.take("vocabulary", "4000")?, arguments.take("length", "128")?);
        let model = Transformer {
            vocabulary,
            positions: length,
            features,
            heads: (features / HEAD).max(1),
            hidden: INNER * features,
            blocks: arguments.take("blocks", "3")?,
            dropout: 0.0,
            attention_dropout: 0.0,
            tied: false,
            split_blocks: false,
            gelu: Default::default(),
        };
        let mut numbers = Numbers::default();
        let mut tokens = || numbers.below(vocabulary, &[samples, length]);
        let (inputs, targets) = (tokens()?, tokens()?);
        Ok(Self { size: model.blocks as i64, inputs, targets, model: model.build()? })
    }
}

fn main() -> Result<(), Failure> {
    let mut arguments = Arguments::read()?;
    let cap: u64 = arguments.take("cap", &u64::MAX.to_string())?;
    let samples = arguments.peek("samples", "32")?;
    let work = Work::read(&mut arguments, samples)?;
    let mut measurement = Measurement::new(arguments)?;
    let sample = work.inputs.size()[1..].to_vec();
    let builder = measurement
        .builder(work.model, &sample, work.inputs.kind())?
        .loss(CrossEntropy::default())
        .optimizer(RmsProp::default());
    let builder = if cap == u64::MAX { builder } else { builder.memory_cap([Bytes(cap)]) };
    let before = resident("VmRSS")?;
    let mut line = match steps(builder, &work.inputs, &work.targets) {
        Ok(line) => line,
        Err(error) if over_the_cap(&error) => json!({ "refused": error.to_string() }),
        Err(error) => return Err(error.into()),
    };
    line["size"] = work.size.into();
    line["resident_before_bytes"] = before.into();
    line["resident_peak_bytes"] = resident("VmHWM")?.into();
    println!("{line}");
    Ok(())
}

/// Builds the pipeline and runs the steps.
fn steps(builder: PipelineBuilder, inputs: &Tensor, targets: &Tensor) -> gpipe::Result<Value> {
    let mut pipeline = builder.build()?;
    let reports = (0..STEPS)
        .map(|_| pipeline.train_step(inputs, targets))
        .collect::<gpipe::Result<Vec<StepReport>>>()?;
    Ok(held(&pipeline, &reports))
}

/// The memory of the steps. Parameters comprise weights, buffers and optimizer state, which outlive
/// a step, and gradient accumulators, which do not. The rest of the peak counts as activations.
fn held(pipeline: &Pipeline, reports: &[StepReport]) -> Value {
    let layers = pipeline.outline();
    let trained = layers.iter().flat_map(|layer| &layer.parameters);
    let trained = trained.filter(|parameter| !parameter.optimizer.is_empty());
    let sizes: Vec<i64> = trained.map(|parameter| parameter.shape.iter().product()).collect();
    let bytes = |part: fn(&gpipe::DeviceReport) -> u64| {
        let of_step = |report: &StepReport| report.devices.iter().map(part).sum::<u64>();
        reports.iter().map(of_step).collect::<Vec<_>>()
    };
    let (peaks, lives) = (bytes(|stage| stage.peak.0), bytes(|stage| stage.live.0));
    let parameters: i64 = sizes.iter().sum();
    let gradients = (parameters * FLOAT) as u64;
    let (peak, live) = (peaks.iter().max().copied(), lives.last().copied());
    let parameter_bytes = live.unwrap_or(0) + gradients;
    json!({
        "parameters": parameters,
        "largest_parameter": sizes.iter().max(),
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": gradients,
        "activation_bytes": peak.unwrap_or(0).saturating_sub(parameter_bytes),
        "peak_bytes": peaks,
        "live_bytes": lives,
        "loss": reports.iter().map(|report| report.loss).collect::<Vec<_>>(),
        "grad_norm": reports.iter().map(|report| report.grad_norm).collect::<Vec<_>>(),
        "step_ms": reports.iter().map(|report| report.time.as_ms()).collect::<Vec<_>>(),
    })
}

/// Whether the cap caused `error`, not a lack of system memory.
fn over_the_cap(error: &(dyn Error + 'static)) -> bool {
    match error.downcast_ref() {
        Some(LayerError::OutOfMemory(refusal)) => refusal.cap.is_some(),
        _ => error.source().is_some_and(over_the_cap),
    }
}

/// Memory of this process as counted by the kernel, in bytes: currently resident (`VmRSS`) or the
/// peak (`VmHWM`).
fn resident(field: &str) -> Result<u64, Failure> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let number = line.and_then(|line| line.split_whitespace().next());
    let kib: u64 = number.ok_or("no such line in /proc/self/status")?.parse()?;
    Ok(kib * 1024)
}
