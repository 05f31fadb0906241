//! The records of a run: plain data, filled by whoever trains, one JSON object per line of
//! `metrics.jsonl`.
//!
//! Reading is lenient, so that older and newer files can be read: fields that are not there are 0
//! (empty, absent), unknown ones are ignored. JSON has no NaN: a number that is not finite is
//! written as `null`, and `null` is read as NaN.

mod file;
mod lines;
mod number;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use file::{FILE_BYTES_MAX, FileError, LINE_BYTES_MAX, RECORDS_MAX, Writer, read, scan};

/// One line of the file; its field `kind` says which, and a line without it is a step.
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
    /// The number of this update, from 1; of the last one if this step was skipped.
    pub step: u64,
    /// Whether the update was left out, because float16 gradients overflowed, or a value was not
    /// finite.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The mini-batch loss, per token or sample.
    #[serde(with = "number")]
    pub loss: f64,
    /// The user's own metrics, by name.
    #[serde(with = "number::map", skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Tokens (or whatever the loss counts) of this step.
    #[serde(deserialize_with = "number::count")]
    pub tokens: u64,
    /// Samples of this step.
    pub samples: u64,
    /// Tokens of the run so far, this step's included.
    pub tokens_total: u64,
    /// Samples of the run so far, this step's included.
    pub samples_total: u64,
    /// `tokens` over `step_ms`.
    #[serde(with = "number")]
    pub tokens_per_s: f64,
    /// From the start of the step to the last stage's end.
    #[serde(with = "number")]
    pub step_ms: f64,
    /// Waiting for the batch before the step; 0 where it was there.
    #[serde(with = "number")]
    pub data_wait_ms: f64,
    /// The learning rate.
    #[serde(with = "number")]
    pub lr: f64,
    /// The global gradient norm, before clipping.
    #[serde(with = "number")]
    pub grad_norm: f64,
    /// What the gradients were multiplied by: less than 1 where the norm was clipped.
    #[serde(with = "number")]
    pub clip_scale: f64,
    /// What the loss was multiplied by; only in mixed precision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// The share of devices x `step_ms` in which a device was not busy, but communicated or waited:
    /// 0 to 1.
    #[serde(with = "number")]
    pub bubble: f64,
    /// By stage.
    pub stages: Vec<Stage>,
}

impl Step {
    /// What all stages spend in one part, as a share of stages x `step_ms`; 0 where there is
    /// nothing to share.
    pub fn share(&self, part_ms: fn(&Stage) -> f64) -> f64 {
        let area_ms = self.stages.len() as f64 * self.step_ms;
        if area_ms == 0.0 { 0.0 } else { self.stages.iter().map(part_ms).sum::<f64>() / area_ms }
    }
}

/// One stage's share of a step: the eight parts from `forward_ms` to `stalls_ms` sum to `step_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Stage {
    /// In forwards.
    #[serde(with = "number")]
    pub forward_ms: f64,
    /// In re-materialization.
    #[serde(with = "number")]
    pub recompute_ms: f64,
    /// In backwards.
    #[serde(with = "number")]
    pub backward_ms: f64,
    /// In tied weights, norms and the update.
    #[serde(with = "number")]
    pub optimizer_ms: f64,
    /// In transfers that waited for nobody.
    #[serde(with = "number")]
    pub communication_ms: f64,
    /// Waiting that the schedule makes even if all stages were equally fast.
    #[serde(with = "number")]
    pub fill_drain_ms: f64,
    /// Waiting that stages of unequal speed or work add to it.
    #[serde(with = "number")]
    pub imbalance_ms: f64,
    /// The rest of the waiting: times that vary, and the machine.
    #[serde(with = "number")]
    pub stalls_ms: f64,
    /// All waiting: `fill_drain_ms`, `imbalance_ms` and `stalls_ms`. Files that have only this
    /// count communication in it.
    #[serde(with = "number")]
    pub idle_ms: f64,
    /// Most bytes of tensors allocated at once.
    pub peak_bytes: u64,
    /// Bytes of activations and gradients sent to other stages.
    pub sent_bytes: u64,
}

/// An evaluation on held-out data.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Evaluation {
    /// Training steps done before it.
    pub step: u64,
    /// Tokens trained on before it.
    pub tokens_total: u64,
    /// The loss per token or sample.
    #[serde(with = "number")]
    pub loss: f64,
    /// Of text: the loss per byte, in bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// The user's own metrics, by name.
    #[serde(with = "number::map", skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Tokens or samples that the loss counted.
    #[serde(deserialize_with = "number::count")]
    pub count: u64,
}

/// What a run's file holds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Run {
    /// What a legend calls it.
    pub name: String,
    /// The training steps, in the order of the file.
    pub steps: Vec<Step>,
    /// The evaluations, in the order of the file.
    pub evaluations: Vec<Evaluation>,
}

impl Run {
    /// Sorts `records` by kind.
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
}
