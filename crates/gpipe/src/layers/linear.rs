//! The linear layer: an affine map of the last axis.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Init, Layer, ParameterSpec, only},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// y = x W^T + b over the last axis: [samples, ..., inputs] -> [samples, ..., outputs].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Linear {
    /// Size of the input's last axis.
    pub inputs: i64,
    /// Size of the output's last axis.
    pub outputs: i64,
    /// Whether to add the bias b.
    pub bias: bool,
}

impl Linear {
    /// A linear layer with a bias.
    pub fn new(inputs: i64, outputs: i64) -> Self {
        Self { inputs, outputs, bias: true }
    }
}

impl Layer for Linear {
    fn kind(&self) -> &'static str {
        "linear"
    }

    /// `weight` `[outputs, inputs]` and `bias` `[outputs]`, uniform in +-1/sqrt(inputs), as in
    /// PyTorch.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let init = Init::Uniform { bound: 1.0 / (self.inputs.max(1) as f64).sqrt() };
        let weight = ParameterSpec::new("weight", [self.outputs, self.inputs], init);
        let bias = self.bias.then(|| ParameterSpec::new("bias", [self.outputs], init));
        [Some(weight), bias].into_iter().flatten().collect()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(vec![super::features(ctx, inputs, self.inputs)?.with_last(self.outputs)])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let bias = if self.bias { Some(ctx.parameter(1)?) } else { None };
        Ok(vec![ctx.linear(only(inputs)?, ctx.parameter(0)?, bias)?])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        Some(2.0 * inputs.first()?.elements() * self.outputs as f64)
    }

    fn adaptable(&self) -> Vec<usize> {
        vec![0]
    }

    fn by_rows(&self) -> bool {
        true
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn unread(&self) -> Option<usize> {
        Some(0)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        Some(vec![tape.linear(*inputs.first()?, 0, self.bias.then_some(1))])
    }
}
