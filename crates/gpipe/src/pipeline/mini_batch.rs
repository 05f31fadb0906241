//! Mini-batches: their checks, and their cut into micro-batches.

use tch::Tensor;

use super::Pipeline;
use crate::{
    arguments::{Arguments, if_defined},
    error::{Error, Result},
    spec::TensorSpec,
    stage::feed::{Group, Slice, split},
};

/// How many shapes are remembered.
pub(super) const SHAPES_MAX: usize = 64;

/// A mini-batch, checked and cut into micro-batches.
#[derive(Default)]
pub(super) struct MiniBatch {
    /// Samples of the whole mini-batch.
    pub samples: usize,
    /// The inputs of the whole mini-batch.
    pub whole: Vec<Tensor>,
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
            let here = |tensor: &Tensor| Ok(tensor.f_to(tch::Device::Cpu)?);
            tensors.iter().map(|tensor| if_defined(tensor, here)).collect()
        };
        let trims = targets.is_some();
        let (inputs, targets) = (here(&inputs)?, here(targets.unwrap_or_default())?);
        if inputs.is_empty() {
            return Err(Error::Input("there is no input tensor: give at least one".into()));
        }
        let given = self.model.sequence.inputs.positional(inputs.len());
        if given != self.model.inputs {
            return Err(Error::Input(format!(
                "{given} input tensors, the pipeline was built for {}: give as many as the builder \
                was told",
                self.model.inputs
            )));
        }
        let count = self.count_samples(&inputs, &targets)?;
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
        let (slices, samples) = (slices.collect(), count as usize);
        let mut batch = MiniBatch { slices, samples, ..MiniBatch::default() };
        let (own_inputs, own_targets) = (&self.model.sequence.inputs, &self.model.targets);
        for slice in &batch.slices {
            let mut inputs = narrow(&inputs, *slice, own_inputs)?;
            let mut targets = narrow(&targets, *slice, own_targets)?;
            // Not when predicting: outputs that are joined must have one length.
            if let Some(padding) = self.model.padding.as_ref().filter(|_| trims) {
                padding.trim(&mut inputs, &mut targets)?;
            }
            batch.specs.push(inputs.iter().map(TensorSpec::of).collect());
            batch.inputs.push(inputs);
            batch.targets.push(targets);
        }
        batch.whole = inputs;
        Ok(batch)
    }

    /// The number of samples, which all tensors with a sample axis share.
    fn count_samples(&self, inputs: &[Tensor], targets: &[Tensor]) -> Result<i64> {
        let mut count = None;
        for (what, tensors, arguments) in [
            ("input", inputs, &self.model.sequence.inputs),
            ("target", targets, &self.model.targets),
        ] {
            let own = tensors.iter().enumerate();
            let own =
                own.filter(|(at, own)| own.defined() && !arguments.is_shared(*at, tensors.len()));
            for (at, tensor) in own {
                let (size, title) = (tensor.size(), arguments.title(what, at, tensors.len()));
                let Some(&samples) = size.first() else {
                    return Err(Error::Input(format!(
                        "{title} is a scalar, which has no samples: give it the number of samples \
                        as its first size, or declare it as shared ({})",
                        arguments.shared_by(what, at, tensors.len())
                    )));
                };
                let count = *count.get_or_insert(samples);
                if samples != count {
                    return Err(Error::Input(format!(
                        "the first input has {count} samples, {title} is {size:?}: inputs and \
                        targets need the same first size"
                    )));
                }
            }
        }
        match count {
            Some(count) if count > 0 => Ok(count),
            _ => Err(Error::Input("the mini-batch has no samples (N = 0): give at least 1".into())),
        }
    }
}

/// The samples of `slice`. Each micro-batch gets tensors without a sample axis whole.
fn narrow(tensors: &[Tensor], slice: Slice, arguments: &Arguments) -> Result<Vec<Tensor>> {
    let (first, count) = (slice.first as i64, slice.count as i64);
    let own = |(at, tensor): (usize, &Tensor)| match arguments.is_shared(at, tensors.len()) {
        true => Ok(tensor.shallow_clone()),
        false => if_defined(tensor, |tensor| Ok(tensor.f_narrow(0, first, count)?)),
    };
    tensors.iter().enumerate().map(own).collect()
}
