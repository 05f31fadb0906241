//! The gated feed-forward part of a Llama block.

use gpipe_bridge::fused;
use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, ParameterSpec},
    layers::projections::{Projection, Projections},
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

/// The projections, by number.
const GATE: usize = 0;
const UP: usize = 1;
const DOWN: usize = 2;

/// `silu(gate) * up`.
pub(super) fn gated(ctx: &Forward, gate: &Tensor, up: &Tensor) -> Result<Tensor, LayerError> {
    match ctx.fuses(gate) {
        true => Ok(fused::swiglu(gate, up)?),
        false => Ok(gate.f_silu()?.f_mul(up)?),
    }
}

impl GatedMlp {
    fn projections(&self) -> Projections<3> {
        let (d, h, bias) = (self.features, self.hidden, self.bias);
        let of = |name, inputs, outputs| Projection { name, inputs, outputs, bias };
        Projections([of("gate_proj", d, h), of("up_proj", d, h), of("down_proj", h, d)])
    }

    /// How many parameters it has.
    pub(super) fn count(&self) -> usize {
        self.projections().count()
    }

    pub(super) fn parameters(&self, prefix: &str) -> Vec<ParameterSpec> {
        self.projections().parameters(prefix, self.std)
    }

    /// The place of the last weight among the parameters.
    pub(super) fn last(&self) -> usize {
        self.projections().weight(0, DOWN)
    }

    /// The forward with parameters from number `first` on.
    pub(super) fn apply(
        &self,
        ctx: &Forward,
        first: usize,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let projections = self.projections();
        let gate = projections.apply(ctx, first, GATE, x)?;
        let up = projections.apply(ctx, first, UP, x)?;
        let gated = gated(ctx, &gate, &up)?;
        drop((gate, up));
        projections.apply(ctx, first, DOWN, &gated)
    }

    /// Records what [`GatedMlp::apply`] computes.
    pub(super) fn record(&self, tape: &mut Tape, first: usize, x: Var) -> Var {
        let projections = self.projections();
        let gate = projections.record(tape, first, GATE, x);
        let up = projections.record(tape, first, UP, x);
        let gated = tape.gated(gate, up);
        [gate, up].into_iter().for_each(|var| tape.release(var));
        let down = projections.record(tape, first, DOWN, gated);
        tape.release(gated);
        down
    }

    /// Floating-point operations of one forward on this many positions.
    pub(super) fn operations(&self, positions: f64) -> f64 {
        6.0 * positions * self.features as f64 * self.hidden as f64
    }
}
