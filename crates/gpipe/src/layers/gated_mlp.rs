//! The gated feed-forward part of a Llama block.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Init, ParameterSpec},
    tape::{Tape, Var},
};

/// SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`, [samples, positions, features] -> the same
/// shape. A part of [`LlamaBlock`](super::LlamaBlock).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedMlp {
    /// Size of the model.
    pub features: i64,
    /// Size of the hidden layer.
    pub hidden: i64,
    /// Whether the three products add a bias.
    pub bias: bool,
    /// Standard deviation of the initial weights.
    pub std: f64,
}

impl GatedMlp {
    /// How many parameters it has.
    pub(super) fn count(&self) -> usize {
        if self.bias { 6 } else { 3 }
    }

    pub(super) fn parameters(&self, prefix: &str) -> Vec<ParameterSpec> {
        let (d, h) = (self.features, self.hidden);
        let products = [("gate_proj", h, d), ("up_proj", h, d), ("down_proj", d, h)];
        let product = |(name, outputs, inputs): (&str, i64, i64)| {
            let weight = format!("{prefix}{name}.weight");
            let weight = ParameterSpec::new(&weight, [outputs, inputs], self.init());
            let bias = format!("{prefix}{name}.bias");
            let bias = self.bias.then(|| ParameterSpec::new(&bias, [outputs], Init::Zeros));
            std::iter::once(weight).chain(bias)
        };
        products.into_iter().flat_map(product).collect()
    }

    fn init(&self) -> Init {
        Init::Normal { std: self.std }
    }

    /// The numbers of the weight and of the bias of product `number`.
    fn numbers(&self, first: usize, number: usize) -> (usize, Option<usize>) {
        match self.bias {
            true => (first + 2 * number, Some(first + 2 * number + 1)),
            false => (first + number, None),
        }
    }

    fn product(
        &self,
        ctx: &Forward,
        first: usize,
        number: usize,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let (weight, bias) = self.numbers(first, number);
        let bias = bias.map(|bias| ctx.parameter(bias)).transpose()?;
        ctx.linear(x, ctx.parameter(weight)?, bias)
    }

    /// The forward with parameters from number `first` on.
    pub(super) fn apply(
        &self,
        ctx: &Forward,
        first: usize,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let gate = self.product(ctx, first, 0, x)?.f_silu()?;
        let gated = gate.f_mul(&self.product(ctx, first, 1, x)?)?;
        drop(gate);
        self.product(ctx, first, 2, &gated)
    }

    /// Records what [`GatedMlp::apply`] computes.
    pub(super) fn record(&self, tape: &mut Tape, first: usize, x: Var) -> Var {
        let product = |tape: &mut Tape, number, x| {
            let (weight, bias) = self.numbers(first, number);
            tape.linear(x, weight, bias)
        };
        let gate = product(tape, 0, x);
        let active = tape.elementwise(gate);
        tape.release(gate);
        let up = product(tape, 1, x);
        let gated = tape.multiply(active, up);
        [active, up].into_iter().for_each(|var| tape.release(var));
        let down = product(tape, 2, gated);
        tape.release(gated);
        down
    }

    /// Floating-point operations of one forward on this many positions.
    pub(super) fn operations(&self, positions: f64) -> f64 {
        6.0 * positions * self.features as f64 * self.hidden as f64
    }
}
