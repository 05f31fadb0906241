//! The records of a run: plain data, filled by the training program, and stored as one JSON object
//! per line of `metrics.jsonl`.
//!
//! Reading is lenient, so that files of older and newer versions can be read. Missing fields are 0
//! (empty, absent), and unknown fields are ignored. JSON has no NaN, so a non-finite number is
//! written as `null`, and `null` is read as NaN.

mod file;
mod lines;
mod number;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use file::{FILE_BYTES_MAX, FileError, LINE_BYTES_MAX, RECORDS_MAX, Writer, read, scan};

/// One line of the file. Its field `kind` names the variant; a line without `kind` is a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Record {
    /// A training step.
    Step(Step),
    /// An evaluation on held-out data.
    Evaluation(Evaluation),
}

/// A training step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Step {
    /// The number of this update, from 1. A skipped step has the number of the last update.
    pub step: u64,
    /// Whether the update was skipped, because float16 gradients overflowed or a value was not
    /// finite.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Whether it ran on simulated GPUs, whose times say nothing about real ones.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub simulated_gpus: bool,
    /// The mini-batch loss per token or sample.
    #[serde(with = "number")]
    pub loss: f64,
    /// The user's own metrics, by name.
    #[serde(with = "number::map", skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Tokens (or whatever the loss counts) in this step.
    #[serde(deserialize_with = "number::count")]
    pub tokens: u64,
    /// Samples in this step.
    pub samples: u64,
    /// Tokens of the run so far, including this step.
    pub tokens_total: u64,
    /// Samples of the run so far, including this step.
    pub samples_total: u64,
    /// `tokens` over `step_ms`.
    #[serde(with = "number")]
    pub tokens_per_s: f64,
    /// Milliseconds from the start of the step to the end of the last stage.
    #[serde(with = "number")]
    pub step_ms: f64,
    /// Milliseconds spent waiting for the batch before the step; 0 if the batch was ready.
    #[serde(with = "number")]
    pub data_wait_ms: f64,
    /// The learning rate.
    #[serde(with = "number")]
    pub lr: f64,
    /// The global gradient norm before clipping.
    #[serde(with = "number")]
    pub grad_norm: f64,
    /// The factor applied to the gradients; less than 1 if the norm was clipped.
    #[serde(with = "number")]
    pub clip_scale: f64,
    /// The factor applied to the loss; present only in mixed precision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Idle device time as a fraction of devices x `step_ms`, 0 to 1. Communication counts as idle.
    #[serde(with = "number")]
    pub bubble: f64,
    /// Times and memory of each stage.
    pub stages: Vec<Stage>,
}

impl Step {
    /// The time that all stages spent in one part, as a fraction of stages x `step_ms`; 0 if the
    /// step has no stages or no duration.
    pub fn share(&self, part_ms: fn(&Stage) -> f64) -> f64 {
        let area_ms = self.stages.len() as f64 * self.step_ms;
        if area_ms == 0.0 { 0.0 } else { self.stages.iter().map(part_ms).sum::<f64>() / area_ms }
    }
}

/// One stage's part of a step. The eight times from `forward_ms` to `stalls_ms` sum to `step_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Stage {
    /// Time in forwards.
    #[serde(with = "number")]
    pub forward_ms: f64,
    /// Time in re-materialization.
    #[serde(with = "number")]
    pub recompute_ms: f64,
    /// Time in backwards.
    #[serde(with = "number")]
    pub backward_ms: f64,
    /// Time in tied weights, norms and the update.
    #[serde(with = "number")]
    pub optimizer_ms: f64,
    /// Time in transfers, without waiting.
    #[serde(with = "number")]
    pub communication_ms: f64,
    /// Waiting inherent in the schedule, even if all stages were equally fast.
    #[serde(with = "number")]
    pub fill_drain_ms: f64,
    /// Waiting added by stages of unequal speed or work.
    #[serde(with = "number")]
    pub imbalance_ms: f64,
    /// The remaining waiting, caused by varying times and the machine.
    #[serde(with = "number")]
    pub stalls_ms: f64,
    /// All waiting: the sum of `fill_drain_ms`, `imbalance_ms` and `stalls_ms`. In files without
    /// these fields, it includes communication.
    #[serde(with = "number")]
    pub idle_ms: f64,
    /// Peak bytes of allocated tensors.
    pub peak_bytes: u64,
    /// Bytes of activations and gradients sent to other stages.
    pub sent_bytes: u64,
    /// Bytes of saved activations that were offloaded and read back. Present only if a stage
    /// offloads.
    #[serde(skip_serializing_if = "is_zero")]
    pub offloaded_bytes: u64,
    /// The part of `forward_ms` and `recompute_ms` in which the stage waited for offload.
    /// Present with `offloaded_bytes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload_wait_ms: Option<f64>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// An evaluation on held-out data.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Evaluation {
    /// Training steps done before the evaluation.
    pub step: u64,
    /// Tokens trained on before the evaluation.
    pub tokens_total: u64,
    /// The loss per token or sample.
    #[serde(with = "number")]
    pub loss: f64,
    /// For text, the loss in bits per byte.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// The user's own metrics, by name.
    #[serde(with = "number::map", skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Number of tokens or samples in the loss.
    #[serde(deserialize_with = "number::count")]
    pub count: u64,
}

/// The content of a run's metrics file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Run {
    /// The run's name in a legend.
    pub name: String,
    /// The training steps, in file order.
    pub steps: Vec<Step>,
    /// The evaluations, in file order.
    pub evaluations: Vec<Evaluation>,
    /// What the loss counts, such as `token` or `image`, if it is known.
    pub unit: Option<String>,
}

impl Run {
    /// Groups `records` by kind.
    pub fn new(name: impl Into<String>, records: Vec<Record>) -> Self {
        let mut run = Self { name: name.into(), ..Self::default() };
        for record in records {
            match record {
                Record::Step(step) => run.steps.push(step),
                Record::Evaluation(evaluation) => run.evaluations.push(evaluation),
            }
        }
        run
    }

    /// What the loss counts: tokens, where it is not known.
    pub fn unit(&self) -> &str {
        self.unit.as_deref().unwrap_or("token")
    }

    /// Sets what the loss counts.
    #[must_use]
    pub fn counting(mut self, unit: impl Into<String>) -> Self {
        self.unit = Some(unit.into());
        self
    }
}
