//! The outputs of a forward that runs alone, and which forwards are open.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use gpipe_core::{Bytes, simulate::Timeline};
use gpipe_runtime::Errands;
use tch::Tensor;

use crate::{
    spec::TensorSpec,
    stage::{Stage, feed::Slice},
};

/// The outputs of [`Pipeline::forward`](crate::Pipeline::forward), and the right to go back through
/// them once.
///
/// The stages keep what that backward needs. Dropping the outputs frees it.
pub struct Outputs {
    pub(super) tensors: Vec<Tensor>,
    pub(super) number: u64,
    /// The first sample within the mini-batch.
    pub(super) first: usize,
    pub(super) slices: Vec<Slice>,
    /// By micro-batch and output, its first size, which need not be the number of samples.
    pub(super) rows: Vec<Vec<i64>>,
    /// Shapes of each micro-batch's inputs.
    pub(super) specs: Vec<Vec<TensorSpec>>,
    /// The caller's inputs, with their versions: a recomputation needs them as they were.
    pub(super) given: Vec<(Tensor, i64)>,
    /// Each micro-batch's inputs, if some have names: a recomputation needs those.
    pub(super) inputs: Vec<Vec<Tensor>>,
    pub(super) timeline: Timeline,
    pub(super) held: Vec<Bytes>,
    pub(super) open: OpenForwards,
    pub(super) errands: Errands<Stage>,
}

impl Outputs {
    /// The outputs in sample order, as [`Pipeline::predict`](crate::Pipeline::predict) returns
    /// them, but in training mode.
    ///
    /// They are leaves of autograd that require gradients. Compute a loss from them, call its
    /// `backward`, and pass [`Outputs::gradients`] to
    /// [`Pipeline::backward`](crate::Pipeline::backward). With replicas, they cover only this
    /// replica's samples.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The gradients that autograd has accumulated in [`Outputs::tensors`]. `None` for an output
    /// that has none.
    pub fn gradients(&self) -> Vec<Option<Tensor>> {
        // Only an undefined tensor has no answer to this.
        let grad = |tensor: &Tensor| tensor.f_grad().ok().filter(Tensor::defined);
        self.tensors.iter().map(grad).collect()
    }

    /// The samples of the mini-batch that the outputs cover: all of them, or with replicas this
    /// replica's.
    pub fn samples(&self) -> Range<usize> {
        let count: usize = self.slices.iter().map(|slice| slice.count).sum();
        self.first..self.first + count
    }

    /// Bytes that this forward added to what each device holds, until its backward.
    pub fn held(&self) -> &[Bytes] {
        &self.held
    }

    /// The actions of the forward, with their times.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }
}

impl Drop for Outputs {
    fn drop(&mut self) {
        if !self.open.close(self.number) {
            return;
        }
        self.open.with(|open| open.dropped = true);
        let number = self.number;
        self.errands.send_all(|| {
            move |stages: &mut [Stage]| {
                stages.iter_mut().for_each(|stage| stage.pending().close(number));
            }
        });
    }
}

/// The forwards whose backward may still run.
#[derive(Clone, Default)]
pub(super) struct OpenForwards(Arc<Mutex<Open>>);

#[derive(Default)]
pub(super) struct Open {
    pub(super) numbers: BTreeSet<u64>,
    /// Whether outputs were dropped since the last run, so that stages may still be freeing memory.
    pub(super) dropped: bool,
}

impl OpenForwards {
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut Open) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether `other` is of the same pipeline.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns whether the forward was open.
    pub(super) fn close(&self, number: u64) -> bool {
        self.with(|open| open.numbers.remove(&number))
    }
}
