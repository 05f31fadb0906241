//! Batch normalisation.

use tch::Tensor;

pub use crate::batch_norm::BatchNorm;
use crate::{
    error::LayerError,
    layer::{Forward, Infer, Layer, ParameterSpec, only},
    spec::{TensorSpec, dtype},
    tape::{Tape, Var},
};

impl Layer for BatchNorm {
    fn kind(&self) -> &'static str {
        "batch norm"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        BatchNorm::parameters(self, "").into()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (input, kind) = (only(inputs)?, ctx.parameter_kind());
        self.check()?;
        if input.kind == kind && input.shape.len() >= 2 && input.shape[1] == self.channels {
            return Ok(vec![input.clone()]);
        }
        let (kind, channels) = (dtype(kind), self.channels);
        let reason = format!("it takes {kind} [samples, {channels} channels, ...], it got {input}");
        Err(LayerError::Shape(reason))
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![ctx.batch_norm(0, self, only(inputs)?)?])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        Some(vec![tape.batch_norm(*inputs.first()?, 0)])
    }
}
