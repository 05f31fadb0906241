//! Profiling: the observer that records the time and memory of each layer while a stage works, and
//! what only the stage itself knows of its layers.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use gpipe_core::{Bytes, MicroBatch, Nanos, Op};
use serde::{Deserialize, Serialize};

use super::step::Statistics;
use crate::{
    error::LayerError,
    observer::{ActionEvent, DeviceMemory, LayerEvent, Observer, Pass, When},
};

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

impl ProfiledOp {
    /// The pass of a layer in this operation.
    pub(super) fn pass(self) -> Pass {
        match self {
            ProfiledOp::Rematerialize => Pass::Recompute,
            ProfiledOp::Backward { .. } => Pass::Backward,
            ProfiledOp::BackwardInput { .. } => Pass::BackwardInput,
            ProfiledOp::BackwardWeight => Pass::BackwardWeight,
            ProfiledOp::Forward
            | ProfiledOp::ForwardKept
            | ProfiledOp::Norm
            | ProfiledOp::Update => Pass::Forward,
        }
    }

    /// Whether the forward keeps, or kept, its activations.
    pub(super) fn keeps(self) -> bool {
        match self {
            ProfiledOp::ForwardKept => true,
            ProfiledOp::Backward { kept } | ProfiledOp::BackwardInput { kept } => kept,
            _ => false,
        }
    }

    fn of(event: &LayerEvent) -> Self {
        match (event.pass, event.keeps) {
            (Pass::Forward, true) => Self::ForwardKept,
            // A forward that discards leaves the loss to the re-materialization.
            (Pass::Forward, false) if event.is_loss => Self::Rematerialize,
            (Pass::Forward, false) => Self::Forward,
            (Pass::Recompute, _) => Self::Rematerialize,
            (Pass::Backward, kept) => Self::Backward { kept },
            (Pass::BackwardInput, kept) => Self::BackwardInput { kept },
            (Pass::BackwardWeight, _) => Self::BackwardWeight,
        }
    }
}

/// What profiling collects in a step.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(super) samples: Samples,
    /// Batch norm statistics of one micro-batch in bytes, by layer of the stage.
    statistics: RefCell<Vec<u64>>,
    /// Kept outputs of products for one micro-batch in bytes, by layer of the stage.
    products: RefCell<BTreeMap<usize, u64>>,
    /// Layers of the stage whose backward could not be split.
    unsplit: RefCell<BTreeSet<usize>>,
    /// Gradient sums in bytes after the first half of the step's first backward, by layer of the
    /// stage.
    early: RefCell<BTreeMap<usize, u64>>,
}

/// The observer that measures layers.
#[derive(Default)]
pub(super) struct Samples {
    /// The position of the stage's first layer in the sequence.
    first: usize,
    measured: Mutex<Measured>,
}

#[derive(Default)]
struct Measured {
    samples: Vec<Sample>,
    /// Bytes that were held when the latest event before a pass or an action happened.
    before: Bytes,
}

impl Samples {
    fn measured(&self) -> MutexGuard<'_, Measured> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, event: (When, DeviceMemory), layer: usize, work: ProfiledOp, m: MicroBatch) {
        let ((when, memory), mut measured) = (event, self.measured());
        let before = measured.before;
        match when {
            When::Before => measured.before = memory.live,
            When::After(time) => measured.samples.push(Sample {
                layer,
                work,
                micro_batch: m,
                time,
                before,
                after: memory.live,
                peak: memory.peak,
            }),
        }
    }
}

impl Observer for Samples {
    fn action(&self, event: &ActionEvent) -> Result<(), LayerError> {
        let work = match event.action.op {
            Op::Norm => ProfiledOp::Norm,
            Op::Update => ProfiledOp::Update,
            _ => return Ok(()),
        };
        self.record((event.when, event.memory), self.first, work, MicroBatch(0));
        Ok(())
    }

    fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
        let micro_batch = MicroBatch::from_index(event.micro_batch);
        self.record((event.when, event.memory), event.index, ProfiledOp::of(event), micro_batch);
        Ok(())
    }
}

impl Recorder {
    /// For a stage whose first layer has this position in the sequence.
    pub(super) fn new(first: usize) -> Self {
        Self { samples: Samples { first, ..Samples::default() }, ..Self::default() }
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

    /// Takes the step's samples.
    pub(super) fn take(&self) -> Vec<Sample> {
        std::mem::take(&mut self.samples.measured().samples)
    }
}
