//! Several linear maps of one layer.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Init, ParameterSpec},
    tape::{Tape, Var},
};

/// One linear map of the last axis.
#[derive(Debug, Clone, Copy)]
pub(super) struct Projection {
    /// What the names of its parameters begin with.
    pub name: &'static str,
    pub inputs: i64,
    pub outputs: i64,
    pub bias: bool,
}

/// Linear maps whose parameters follow each other: of each one the weight, then the bias.
pub(super) struct Projections<const N: usize>(pub [Projection; N]);

impl<const N: usize> Projections<N> {
    /// How many parameters they have.
    pub fn count(&self) -> usize {
        self.before(N)
    }

    /// How many parameters those before number `number` have.
    fn before(&self, number: usize) -> usize {
        self.0.iter().take(number).map(|own| 1 + usize::from(own.bias)).sum()
    }

    /// `NAME.weight`, of outputs x inputs, and `NAME.bias`, of outputs, each after `prefix`.
    pub fn parameters(&self, prefix: &str, std: f64) -> Vec<ParameterSpec> {
        let of = |own: &Projection| {
            let Projection { name, inputs, outputs, bias } = *own;
            let (weight, zeros) =
                (format!("{prefix}{name}.weight"), format!("{prefix}{name}.bias"));
            let weight = ParameterSpec::new(&weight, [outputs, inputs], Init::Normal { std });
            let bias = bias.then(|| ParameterSpec::new(&zeros, [outputs], Init::Zeros));
            std::iter::once(weight).chain(bias)
        };
        self.0.iter().flat_map(of).collect()
    }

    /// The numbers of the weight and of the bias of map `number`, if the layer's first map begins
    /// at parameter `first`.
    fn numbers(&self, first: usize, number: usize) -> (usize, Option<usize>) {
        let weight = first + self.before(number);
        let has_bias = self.0.get(number).is_some_and(|own| own.bias);
        (weight, has_bias.then_some(weight + 1))
    }

    /// The number of the weight of map `number`, if the first map begins at parameter `first`.
    pub fn weight(&self, first: usize, number: usize) -> usize {
        self.numbers(first, number).0
    }

    /// Map `number` of `x`.
    pub fn apply(
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

    /// Records what [`Projections::apply`] computes.
    pub fn record(&self, tape: &mut Tape, first: usize, number: usize, x: Var) -> Var {
        let (weight, bias) = self.numbers(first, number);
        tape.linear(x, weight, bias)
    }
}
