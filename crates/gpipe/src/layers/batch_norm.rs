//! Batch normalisation.

use tch::Tensor;

use crate::{
    error::LayerError,
    estimate::{Tape, Var},
    layer::{Forward, Infer, Init, Layer, ParameterSpec, only},
    spec::TensorSpec,
};

/// Batch normalisation of [samples, channels, ...] (Ioffe & Szegedy 2015): training normalises each micro-batch by its own
/// statistics, evaluation by running averages of the mini-batches'. As a layer of its own, or a part of another one
/// through [`Forward::batch_norm`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchNorm {
    /// Number of channels.
    pub channels: i64,
    /// Added to the variance.
    pub eps: f64,
    /// The share of a mini-batch in the running statistics; `None`: all mini-batches count alike.
    pub momentum: Option<f64>,
}

impl BatchNorm {
    /// With PyTorch's numbers: 1e-5, 0.1.
    pub fn new(channels: i64) -> Self {
        Self { channels, eps: 1e-5, momentum: Some(0.1) }
    }

    /// Its parameters, each name after `prefix`: `weight`, `bias`, and the running `mean`, `variance` (unbiased) and number of
    /// `batches`.
    pub fn parameters(&self, prefix: &str) -> [ParameterSpec; 5] {
        let named = |name: &str, init| {
            ParameterSpec::new(&format!("{prefix}{name}"), [self.channels], init)
        };
        let running = |name: &str, shape, init| {
            ParameterSpec::buffer(&format!("{prefix}running_{name}"), [shape], init)
        };
        [
            named("weight", Init::Ones),
            named("bias", Init::Zeros),
            running("mean", self.channels, Init::Zeros),
            running("variance", self.channels, Init::Ones),
            running("batches", 1, Init::Zeros),
        ]
    }
}

impl Layer for BatchNorm {
    fn kind(&self) -> &'static str {
        "batch norm"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        BatchNorm::parameters(self, "").into()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (input, kind) = (only(inputs)?, ctx.parameter_kind());
        if input.kind == kind && input.shape.len() >= 2 && input.shape[1] == self.channels {
            return Ok(vec![input.clone()]);
        }
        let channels = self.channels;
        let reason =
            format!("it takes {kind:?} [samples, {channels} channels, ...], it got {input}");
        Err(LayerError::Shape(reason))
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![ctx.batch_norm(0, self, only(inputs)?)?])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        Some(vec![tape.batch_norm(*inputs.first()?, 0)])
    }
}
