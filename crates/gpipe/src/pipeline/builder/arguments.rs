//! Which inputs and targets calls give: those without a sample axis, and those with names.

use super::PipelineBuilder;
use crate::spec::TensorSpec;

impl PipelineBuilder {
    /// The inputs, by position, that have no sample axis, such as a mask for all samples or a
    /// number for each step. Every micro-batch gets the whole tensor. At least one input has
    /// samples.
    #[must_use]
    pub fn shared_inputs(mut self, positions: impl Into<Vec<usize>>) -> Self {
        self.sequence.inputs.shared = positions.into();
        self
    }

    /// As [`PipelineBuilder::shared_inputs`], for targets. [`Loss::count`](crate::Loss::count) gets
    /// them as they are.
    #[must_use]
    pub fn shared_targets(mut self, positions: impl Into<Vec<usize>>) -> Self {
        self.targets.shared = positions.into();
        self
    }

    /// Adds an input with a name: calls give it by [`Tensors::named`](crate::Tensors::named), and
    /// every layer may ask for it ([`Forward::named`](crate::Forward::named)), on whichever stage.
    /// `spec` is the shape and dtype for a mini-batch, with which `build` checks the layers; with
    /// [`TensorSpec::none`] it checks them without this input. Every call must name the input, but
    /// may give `None` if the layers accept that.
    ///
    /// It has no gradient. Every process needs the named inputs of all samples.
    #[must_use]
    pub fn named_input(self, name: impl Into<String>, spec: TensorSpec) -> Self {
        self.with_named_input(name.into(), spec, false)
    }

    /// As [`PipelineBuilder::named_input`], without a sample axis: every micro-batch gets the whole
    /// tensor.
    #[must_use]
    pub fn shared_named_input(self, name: impl Into<String>, spec: TensorSpec) -> Self {
        self.with_named_input(name.into(), spec, true)
    }

    fn with_named_input(mut self, name: String, spec: TensorSpec, shared: bool) -> Self {
        self.sequence.inputs.declare(name, shared);
        self.inputs.push(spec);
        self
    }

    /// Adds a target with a name, for [`LossContext::named_target`](crate::LossContext::named_target).
    /// Metrics see only the targets by position.
    #[must_use]
    pub fn named_target(mut self, name: impl Into<String>) -> Self {
        self.targets.declare(name.into(), false);
        self
    }

    /// As [`PipelineBuilder::named_target`], without a sample axis.
    #[must_use]
    pub fn shared_named_target(mut self, name: impl Into<String>) -> Self {
        self.targets.declare(name.into(), true);
        self
    }
}
