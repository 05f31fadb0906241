//! Mini-batches: their checks, and their cut into micro-batches.

use tch::Tensor;

use super::Pipeline;
use crate::{
    error::{Error, Result},
    spec::TensorSpec,
    stage::feed::{Group, Slice, split},
};

/// How many shapes are remembered.
pub(super) const SHAPES_MAX: usize = 64;

/// A mini-batch, checked and cut into micro-batches.
#[derive(Default)]
pub(super) struct MiniBatch {
    /// Per micro-batch.
    pub inputs: Vec<Vec<Tensor>>,
    pub targets: Vec<Vec<Tensor>>,
    /// Shapes of the inputs.
    pub specs: Vec<Vec<TensorSpec>>,
    /// Gradients of the outputs, where backwards run alone.
    pub output_grads: Vec<Vec<Option<Tensor>>>,
    pub slices: Vec<Slice>,
    /// While decoding: the group of each micro-batch.
    pub groups: Vec<Group>,
    pub begins: bool,
}

impl Pipeline {
    /// Checks a mini-batch and cuts it into micro-batches. With `only_own`, cuts only this
    /// replica's samples.
    pub(super) fn check(
        &mut self,
        inputs: Vec<Tensor>,
        targets: Option<&[Tensor]>,
        only_own: bool,
    ) -> Result<MiniBatch> {
        if targets.is_some_and(<[Tensor]>::is_empty) {
            return Err(Error::Input("there is no target tensor: give at least one".into()));
        }
        // A GPU tensor may still be computed on a stream that the stages do not know.
        let here = |tensors: &[Tensor]| -> Result<Vec<Tensor>> {
            tensors.iter().map(|tensor| Ok(tensor.f_to(tch::Device::Cpu)?)).collect()
        };
        let trims = targets.is_some();
        let (inputs, targets) = (here(&inputs)?, here(targets.unwrap_or_default())?);
        let samples = |tensor: &Tensor| tensor.size().first().copied().unwrap_or(0);
        let Some(count) = inputs.first().map(samples) else {
            return Err(Error::Input("there is no input tensor: give at least one".into()));
        };
        if inputs.len() != self.model.inputs {
            return Err(Error::Input(format!(
                "{} input tensors, the pipeline was built for {}: give as many as the builder was \
                told",
                inputs.len(),
                self.model.inputs
            )));
        }
        let scalar = |tensors: &[Tensor]| tensors.iter().position(|tensor| tensor.dim() == 0);
        for (what, at) in [("input", scalar(&inputs)), ("target", scalar(&targets))] {
            if let Some(at) = at {
                return Err(Error::Input(format!(
                    "{what} {at} is a scalar, which has no samples: give it the number of samples \
                    as its first size"
                )));
            }
        }
        if count == 0 {
            return Err(Error::Input(
                "the mini-batch has no samples (N = 0): give at least 1".into(),
            ));
        }
        if let Some(other) = inputs.iter().chain(&targets).find(|t| samples(t) != count) {
            return Err(Error::Input(format!(
                "the first input has {count} samples, another tensor {:?}: inputs and targets \
                need the same first size",
                other.size()
            )));
        }
        let specs = |tensors: &[Tensor]| tensors.iter().map(TensorSpec::of).collect::<Vec<_>>();
        let shapes = (specs(&inputs), specs(&targets));
        if !self.caches.shapes.contains(&shapes) {
            self.model.check_shapes(&shapes.0, &shapes.1)?;
            if self.caches.shapes.len() >= SHAPES_MAX {
                self.caches.shapes.remove(0);
            }
            self.caches.shapes.push(shapes);
        }
        let own = if only_own { self.own_samples(count as usize)? } else { 0..count as usize };
        let slices = split(own.len(), self.engine.micro_batches).into_iter();
        // Sample numbers count from the start of the whole mini-batch, so that dropout does not
        // depend on the number of replicas.
        let slices = slices.map(|slice| Slice { first: own.start + slice.first, ..slice });
        let mut batch = MiniBatch { slices: slices.collect(), ..MiniBatch::default() };
        for slice in &batch.slices {
            let (mut inputs, mut targets) = (narrow(&inputs, *slice)?, narrow(&targets, *slice)?);
            // Not when predicting: outputs that are joined must have one length.
            if let Some(padding) = self.model.padding.as_ref().filter(|_| trims) {
                padding.trim(&mut inputs, &mut targets)?;
            }
            batch.specs.push(inputs.iter().map(TensorSpec::of).collect());
            batch.inputs.push(inputs);
            batch.targets.push(targets);
        }
        Ok(batch)
    }
}

fn narrow(tensors: &[Tensor], slice: Slice) -> Result<Vec<Tensor>> {
    let (first, count) = (slice.first as i64, slice.count as i64);
    tensors.iter().map(|tensor| Ok(tensor.f_narrow(0, first, count)?)).collect()
}
