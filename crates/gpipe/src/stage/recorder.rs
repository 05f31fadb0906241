//! What each layer takes and holds, layer by layer, while a stage works: only in a pipeline that is
//! being profiled, because the peak of the memory is looked at around every layer, and a GPU waited
//! for.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use gpipe_core::{Bytes, MicroBatch, Nanos};
use serde::{Deserialize, Serialize};

use super::{device::StageDevice, step::Statistics};
use crate::error::LayerError;

/// What was run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum ProfiledOp {
    /// A forward that discards.
    Forward,
    /// A forward that keeps.
    ForwardKept,
    /// A re-materialization.
    Rematerialize,
    /// A backward; `kept` if its forward kept, else after a re-materialization.
    Backward { kept: bool },
    /// The first half of one.
    BackwardInput { kept: bool },
    /// The second half of one.
    BackwardWeight,
    /// The norm of the whole stage; of no layer.
    Norm,
    /// The update of the whole stage; of no layer.
    Update,
}

/// One layer, run once.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Its position in the sequence; after the last one comes the loss.
    pub layer: usize,
    pub work: ProfiledOp,
    /// Of which micro-batch; for what is once per step, the first.
    pub micro_batch: MicroBatch,
    pub time: Nanos,
    /// Bytes of the stage before it.
    pub before: Bytes,
    /// And after it.
    pub after: Bytes,
    /// And at most, meanwhile.
    pub peak: Bytes,
}

/// What a layer of a stage holds between steps; what is tied, at its first use on the stage only.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct LayerBytes {
    pub parameters: u64,
    /// Gradients are not there between steps: this is what they will be.
    pub gradients: u64,
    /// What its batch norms saw of one micro-batch.
    pub statistics: u64,
    /// Optimizer state and averages.
    pub optimizer: u64,
    /// Of `parameters` and `optimizer`, what belongs to tied weights.
    pub tied_parameters: u64,
    pub tied_optimizer: u64,
    /// Whether its backward was to be split and could not be.
    pub unsplit: bool,
    /// Of `gradients`, what the first half of a split backward found.
    pub early: u64,
    /// What its products gave of a micro-batch, where that is kept for a re-materialization.
    pub products: u64,
}

/// A step of a stage that is being profiled.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StageProfile {
    pub samples: Vec<Sample>,
    /// By layer of the stage.
    pub layers: Vec<LayerBytes>,
}

/// Gathers the samples of a step.
#[derive(Default)]
pub(crate) struct Recorder {
    samples: RefCell<Vec<Sample>>,
    /// By layer of the stage: what its batch norms saw of one micro-batch.
    statistics: RefCell<Vec<u64>>,
    /// By layer of the stage: what is kept of its products' values of one micro-batch.
    products: RefCell<BTreeMap<usize, u64>>,
    /// The layers of the stage whose backward was not split.
    unsplit: RefCell<BTreeSet<usize>>,
    /// By layer of the stage: the sums of gradients that the step's first half backward began.
    early: RefCell<BTreeMap<usize, u64>>,
    /// The step's peak, which looking at the layers' resets.
    peak: RefCell<u64>,
}

/// The beginning of a sample.
pub(crate) struct Begun {
    at: Instant,
    before: u64,
}

impl Recorder {
    /// Before a layer.
    pub(super) fn begin(&self, device: &StageDevice) -> Result<Begun, LayerError> {
        device.synchronize()?;
        let before = self.see_peak(device)?;
        Ok(Begun { at: Instant::now(), before })
    }

    /// After it.
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

    /// Keeps the peak so far, and starts a new one; what lives now.
    fn see_peak(&self, device: &StageDevice) -> Result<u64, LayerError> {
        let memory = device.memory()?;
        let mut peak = self.peak.borrow_mut();
        *peak = memory.peak.max(*peak);
        device.reset_peak(true)?;
        Ok(memory.live)
    }

    /// What the batch norms of each layer saw of a micro-batch.
    pub(super) fn statistics(&self, layers: usize, statistics: &Statistics) {
        let mut bytes = vec![0; layers];
        for (&(layer, _), seen) in statistics {
            let own = seen.first().map_or(0, |(_, seen)| seen.bytes());
            bytes.get_mut(layer).into_iter().for_each(|sum| *sum += own);
        }
        *self.statistics.borrow_mut() = bytes;
    }

    /// So many bytes of the values of a layer's products are kept.
    pub(super) fn products(&self, position: usize, bytes: u64) {
        let mut all = self.products.borrow_mut();
        let most = all.entry(position).or_default();
        *most = bytes.max(*most);
    }

    /// What was most of the layer at `position`.
    pub(super) fn products_of(&self, position: usize) -> u64 {
        self.products.borrow().get(&position).copied().unwrap_or(0)
    }

    /// The layer at `position` cannot be split.
    pub(super) fn whole(&self, position: usize) {
        self.unsplit.borrow_mut().insert(position);
    }

    /// Whether that was so of the layer at `position`.
    pub(super) fn is_whole(&self, position: usize) -> bool {
        self.unsplit.borrow().contains(&position)
    }

    /// The first half of the step's first backward of the layer at `position` made so many bytes of
    /// its gradients.
    pub(super) fn early(&self, position: usize, bytes: u64) {
        self.early.borrow_mut().insert(position, bytes);
    }

    /// What that was of the layer at `position`.
    pub(super) fn early_of(&self, position: usize) -> u64 {
        self.early.borrow().get(&position).copied().unwrap_or(0)
    }

    /// By layer of the stage.
    pub(super) fn take_statistics(&mut self) -> Vec<u64> {
        std::mem::take(self.statistics.get_mut())
    }

    /// The step's samples, and its peak if it is higher than `peak`, which was seen since the last
    /// sample.
    pub(super) fn take(&mut self, peak: u64) -> (Vec<Sample>, u64) {
        let before = std::mem::take(self.peak.get_mut());
        (std::mem::take(self.samples.get_mut()), peak.max(before))
    }
}
