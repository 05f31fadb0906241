//! What the driver gives a stage for a step, and what the stage returns.

use gpipe_bridge::memory::Stats;
use gpipe_core::{MicroBatch, lower::Part};
use gpipe_runtime::Verdict;
use tch::Tensor;

use super::{offload::Moved, recorder::StageProfile};

/// The purpose of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mode {
    /// Training: dropout applies, and backwards follow.
    #[default]
    Train,
    /// Computes only the loss and metrics.
    Evaluate,
    /// Computes only the outputs.
    Predict,
    /// Computes the outputs of new positions; layers keep what they need of earlier ones.
    Decode,
}

/// A group of samples in a decoding step. Its micro-batch may change from step to step.
#[derive(Debug)]
pub(crate) struct Group {
    pub id: usize,
    /// Number of earlier positions.
    pub past: i64,
    /// For each sample, the sample of the previous step that it continues; `None` if they are the
    /// same.
    pub rows: Option<Tensor>,
    /// Whether only the output of the last position is wanted.
    pub only_last: bool,
}

impl Clone for Group {
    fn clone(&self) -> Self {
        Self { rows: self.rows.as_ref().map(Tensor::shallow_clone), ..*self }
    }
}

/// The samples of one micro-batch within the mini-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Slice {
    pub first: usize,
    pub count: usize,
}

/// Cuts `samples` into at most `micro_batches` slices whose sizes differ by at most one, larger
/// ones first. With fewer samples than micro-batches there are fewer slices; no slice is empty.
pub(crate) fn split(samples: usize, micro_batches: usize) -> Vec<Slice> {
    let count = micro_batches.min(samples);
    let mut first = 0;
    (0..count)
        .map(|m| {
            let size = samples / count + usize::from(m < samples % count);
            first += size;
            Slice { first: first - size, count: size }
        })
        .collect()
}

/// The input of one stage for a step.
#[derive(Debug)]
pub(crate) struct Feed {
    pub mode: Mode,
    /// The part of a training step that runs.
    pub part: Part,
    /// The number of the forward that this part runs or goes back through.
    pub forward: u64,
    pub step: u64,
    pub slices: Vec<Slice>,
    /// By micro-batch. The first stage has them, the last one if a loss takes them, and every stage
    /// if some have names.
    pub inputs: Vec<Vec<Tensor>>,
    /// By micro-batch; only the last stage has them.
    pub targets: Vec<Vec<Tensor>>,
    /// By micro-batch; only the last stage has them, where a part runs backwards alone.
    pub output_grads: Vec<Vec<Option<Tensor>>>,
    /// The numbers that the sums of the mini-batch's losses are divided by.
    pub denominators: Vec<f64>,
    pub lr: f64,
    /// The factor of the loss before the backward. In the update, the number by which gradients
    /// are divided.
    pub loss_scale: f64,
    /// Whether the first stage returns the gradients of the inputs.
    pub input_grads: bool,
    /// Whether to check every value, in order to name the layer after a failure.
    pub check_finite: bool,
    /// While decoding: the group of each micro-batch.
    pub groups: Vec<Group>,
    /// Whether a decoding begins. Caches of an earlier decoding are then dropped.
    pub begins: bool,
}

impl Feed {
    pub(crate) fn inputs(&self, micro_batch: MicroBatch) -> &[Tensor] {
        self.inputs.get(micro_batch.index()).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn targets(&self, micro_batch: MicroBatch) -> Option<&[Tensor]> {
        self.targets.get(micro_batch.index()).map(Vec::as_slice)
    }

    pub(crate) fn output_grads(&self, micro_batch: MicroBatch) -> Option<&[Option<Tensor>]> {
        self.output_grads.get(micro_batch.index()).map(Vec::as_slice)
    }

    pub(crate) fn group(&self, micro_batch: MicroBatch) -> Option<&Group> {
        self.groups.get(micro_batch.index())
    }

    pub(crate) fn slice(&self, micro_batch: MicroBatch) -> Slice {
        self.slices.get(micro_batch.index()).copied().unwrap_or_default()
    }
}

/// What a stage returns after a step.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The last stage's sums of losses, by micro-batch and loss.
    pub loss_sums: Vec<Vec<f64>>,
    /// The last stage's sums of metrics, by micro-batch.
    pub metric_sums: Vec<Vec<f64>>,
    /// The last stage's outputs, when predicting or decoding, or of forwards alone.
    pub outputs: Vec<Vec<Tensor>>,
    /// The first stage's gradients of the inputs, where the feed asks for them.
    pub input_grads: Vec<Vec<Option<Tensor>>>,
    /// The decision about the update.
    pub verdict: Option<Verdict>,
    /// Memory of the device: live now, and the peak of the step.
    pub memory: Stats,
    /// Live bytes before each of the stage's actions.
    pub levels: Vec<u64>,
    /// What was offloaded.
    pub moved: Moved,
    /// Measurements of the layers, if they are profiled.
    pub profile: Option<StageProfile>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_every_sample_is_in_one_slice() {
        for samples in 1..40 {
            for micro_batches in 1..12 {
                let slices = split(samples, micro_batches);
                assert_eq!(slices.len(), micro_batches.min(samples));
                let mut next = 0;
                for slice in &slices {
                    assert_eq!(slice.first, next);
                    next += slice.count;
                }
                assert_eq!(next, samples);
                let counts = slices.iter().map(|slice| slice.count);
                assert!(counts.clone().max().unwrap() - counts.min().unwrap() <= 1);
            }
        }
    }
}
