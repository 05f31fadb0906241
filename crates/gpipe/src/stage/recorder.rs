//! Time and memory of each layer while a stage works. Used only for profiling: it resets the memory
//! peak around every layer, and waits for the GPU.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use gpipe_core::{Bytes, MicroBatch, Nanos};
use serde::{Deserialize, Serialize};

use super::{device::StageDevice, step::Statistics};
use crate::error::LayerError;

/// The operation that was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum ProfiledOp {
    /// A forward that discards its activations.
    Forward,
    /// A forward that keeps its activations.
    ForwardKept,
    /// A re-materialization.
    Rematerialize,
    /// A whole backward. `kept` if the forward kept its activations, else after a
    /// re-materialization.
    Backward { kept: bool },
    /// The first half of a split backward.
    BackwardInput { kept: bool },
    /// The second half of a split backward.
    BackwardWeight,
    /// The norm of the whole stage. Belongs to no layer.
    Norm,
    /// The update of the whole stage. Belongs to no layer.
    Update,
}

/// One measured run of a layer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Position in the sequence. The loss comes after the last layer.
    pub layer: usize,
    pub work: ProfiledOp,
    /// The micro-batch; the first one for operations that run once per step.
    pub micro_batch: MicroBatch,
    pub time: Nanos,
    /// Bytes that the stage held before the run.
    pub before: Bytes,
    /// Bytes that the stage held after the run.
    pub after: Bytes,
    /// The most bytes during the run.
    pub peak: Bytes,
}

/// Bytes that a layer of a stage holds between steps. Tied weights count at their first use on the
/// stage only.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct LayerBytes {
    pub parameters: u64,
    /// Bytes of the gradients. They do not exist between steps; this is their size during a step.
    pub gradients: u64,
    /// Batch norm statistics of one micro-batch.
    pub statistics: u64,
    /// Optimizer state and averages.
    pub optimizer: u64,
    /// Tied weights, which are not included in `parameters` and `optimizer`.
    pub tied_parameters: u64,
    pub tied_optimizer: u64,
    /// Whether the layer's backward could not be split.
    pub unsplit: bool,
    /// The part of `gradients` that the first half of a split backward computes.
    pub early: u64,
    /// Outputs of the layer's products for one micro-batch, if they are kept for
    /// re-materialization.
    pub products: u64,
}

/// The profile of one step of a stage.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StageProfile {
    pub samples: Vec<Sample>,
    /// By layer of the stage.
    pub layers: Vec<LayerBytes>,
}

/// Collects the measurements of a step.
#[derive(Default)]
pub(crate) struct Recorder {
    samples: RefCell<Vec<Sample>>,
    /// Batch norm statistics of one micro-batch in bytes, by layer of the stage.
    statistics: RefCell<Vec<u64>>,
    /// Kept outputs of products for one micro-batch in bytes, by layer of the stage.
    products: RefCell<BTreeMap<usize, u64>>,
    /// Layers of the stage whose backward could not be split.
    unsplit: RefCell<BTreeSet<usize>>,
    /// Gradient sums in bytes after the first half of the step's first backward, by layer of the
    /// stage.
    early: RefCell<BTreeMap<usize, u64>>,
    /// The step's peak so far. Measuring a layer resets the device's peak, so it is kept here.
    peak: RefCell<u64>,
}

/// The start of a measurement.
pub(crate) struct Begun {
    at: Instant,
    before: u64,
}

impl Recorder {
    /// Starts a measurement, before a layer runs.
    pub(super) fn begin(&self, device: &StageDevice) -> Result<Begun, LayerError> {
        device.synchronize()?;
        let before = self.see_peak(device)?;
        Ok(Begun { at: Instant::now(), before })
    }

    /// Ends a measurement, after the layer has run.
    pub(super) fn end(
        &self,
        device: &StageDevice,
        begun: Begun,
        layer: usize,
        work: ProfiledOp,
        micro_batch: MicroBatch,
    ) -> Result<(), LayerError> {
        device.synchronize()?;
        let time = u64::try_from(begun.at.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let memory = device.memory()?;
        self.samples.borrow_mut().push(Sample {
            layer,
            work,
            micro_batch,
            time: Nanos(time),
            before: Bytes(begun.before),
            after: Bytes(memory.live),
            peak: Bytes(memory.peak),
        });
        Ok(())
    }

    /// Saves the peak so far and starts a new one. Returns the live bytes.
    fn see_peak(&self, device: &StageDevice) -> Result<u64, LayerError> {
        let memory = device.memory()?;
        let mut peak = self.peak.borrow_mut();
        *peak = memory.peak.max(*peak);
        device.reset_peak(true)?;
        Ok(memory.live)
    }

    /// Records the size of each layer's batch norm statistics for one micro-batch.
    pub(super) fn statistics(&self, layers: usize, statistics: &Statistics) {
        let mut bytes = vec![0; layers];
        for (&(layer, _), seen) in statistics {
            let own = seen.first().map_or(0, |(_, seen)| seen.bytes());
            bytes.get_mut(layer).into_iter().for_each(|sum| *sum += own);
        }
        *self.statistics.borrow_mut() = bytes;
    }

    /// Records that `bytes` of the outputs of a layer's products are kept.
    pub(super) fn products(&self, position: usize, bytes: u64) {
        let mut all = self.products.borrow_mut();
        let most = all.entry(position).or_default();
        *most = bytes.max(*most);
    }

    /// The most bytes of products kept for the layer at `position`.
    pub(super) fn products_of(&self, position: usize) -> u64 {
        self.products.borrow().get(&position).copied().unwrap_or(0)
    }

    /// Records that the backward of the layer at `position` cannot be split.
    pub(super) fn whole(&self, position: usize) {
        self.unsplit.borrow_mut().insert(position);
    }

    /// Whether the backward of the layer at `position` could not be split.
    pub(super) fn is_whole(&self, position: usize) -> bool {
        self.unsplit.borrow().contains(&position)
    }

    /// Records the gradient bytes that the first half of the step's first backward of the layer at
    /// `position` computed.
    pub(super) fn early(&self, position: usize, bytes: u64) {
        self.early.borrow_mut().insert(position, bytes);
    }

    /// The gradient bytes that the first half computed for the layer at `position`.
    pub(super) fn early_of(&self, position: usize) -> u64 {
        self.early.borrow().get(&position).copied().unwrap_or(0)
    }

    /// Takes the size of the batch norm statistics, by layer of the stage.
    pub(super) fn take_statistics(&mut self) -> Vec<u64> {
        std::mem::take(self.statistics.get_mut())
    }

    /// Takes the step's samples, and its peak. `peak` is the peak since the last sample.
    pub(super) fn take(&mut self, peak: u64) -> (Vec<Sample>, u64) {
        let before = std::mem::take(self.peak.get_mut());
        (std::mem::take(self.samples.get_mut()), peak.max(before))
    }
}
