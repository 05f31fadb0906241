//! The pre-LN feed-forward layer of a transformer, with a residual connection.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Init, Layer, ParameterSpec},
    layers::{
        dropout::check_probability,
        first_and_rest,
        norm::{norm_parameters, normalise},
        passing_on,
    },
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// The two forms of the Gaussian error linear unit (Hendrycks & Gimpel 2016).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gelu {
    /// `x Phi(x)`, with the normal distribution's Phi.
    #[default]
    Exact,
    /// The approximation with tanh, which GPT-2 has (`gelu_new`). It differs by up to 5e-4.
    Tanh,
}

impl Gelu {
    fn apply(self, x: &Tensor) -> Result<Tensor, LayerError> {
        Ok(x.f_gelu(match self {
            Self::Exact => "none",
            Self::Tanh => "tanh",
        })?)
    }
}

/// Feed-forward layer: x + dropout(W2 gelu(W1 norm(x))), [samples, ..., features] -> the same shape
/// (Vaswani et al. 2017, section 3.3).
///
/// Further inputs are passed on unchanged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mlp {
    /// Size of the model.
    pub features: i64,
    /// Size of the hidden layer.
    pub hidden: i64,
    /// Dropout of the output, before the residual addition.
    pub dropout: f64,
    /// Standard deviation of the initial weights.
    pub std: f64,
    /// Standard deviation of the output projection's initial weights.
    pub output_std: f64,
    /// The activation.
    pub gelu: Gelu,
}

impl Mlp {
    /// The place of the last weight among the parameters.
    pub(super) const LAST: usize = 4;

    pub(super) fn parameters_named(&self, prefix: &str) -> Vec<ParameterSpec> {
        let name = |part: &str| format!("{prefix}{part}");
        let (d, h) = (self.features, self.hidden);
        let mut parameters: Vec<_> = norm_parameters(&name("norm."), d).into();
        parameters.extend([
            ParameterSpec::new(&name("hidden.weight"), [h, d], Init::Normal { std: self.std }),
            ParameterSpec::new(&name("hidden.bias"), [h], Init::Zeros),
            ParameterSpec::new(
                &name("output.weight"),
                [d, h],
                Init::Normal { std: self.output_std },
            ),
            ParameterSpec::new(&name("output.bias"), [d], Init::Zeros),
        ]);
        parameters
    }

    pub(super) fn check(&self, ctx: &Infer, x: &TensorSpec) -> Result<TensorSpec, LayerError> {
        check_probability("dropout", self.dropout)?;
        Ok(super::features(ctx, std::slice::from_ref(x), self.features)?.clone())
    }

    /// The forward with parameters from number `first` on.
    pub(super) fn apply(
        &self,
        ctx: &mut Forward,
        first: usize,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        if ctx.past() > 0 && x.numel() == 0 {
            // While decoding, the encoder runs in the first step only.
            return Ok(x.shallow_clone());
        }
        let h = normalise(ctx, first, x)?;
        let h = ctx.linear(&h, ctx.parameter(first + 2)?, Some(ctx.parameter(first + 3)?))?;
        let h = self.gelu.apply(&h)?;
        let y =
            ctx.linear(&h, ctx.parameter(first + Self::LAST)?, Some(ctx.parameter(first + 5)?))?;
        Ok(x.f_add(&ctx.dropout(&y, self.dropout)?)?)
    }

    /// Records what [`Mlp::apply`] computes.
    pub(super) fn record_from(&self, tape: &mut Tape, first: usize, x: Var) -> Var {
        let h = tape.layer_norm(x, first);
        let hidden = tape.linear(h, first + 2, Some(first + 3));
        let active = tape.elementwise(hidden);
        let y = tape.linear(active, first + 4, Some(first + 5));
        let dropped = tape.dropout(y, self.dropout);
        let sum = tape.add(x, dropped);
        [h, hidden, active, y, dropped].into_iter().for_each(|var| tape.release(var));
        sum
    }

    /// Floating-point operations of one forward.
    pub(super) fn operations(&self, inputs: &[TensorSpec]) -> Option<f64> {
        Some(4.0 * inputs.first()?.elements() * self.hidden as f64)
    }
}

impl Layer for Mlp {
    fn kind(&self) -> &'static str {
        "mlp"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.parameters_named("")
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        Ok(passing_on(self.check(ctx, x)?, rest, Clone::clone))
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        Ok(passing_on(self.apply(ctx, 0, x)?, rest, Tensor::shallow_clone))
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        self.operations(inputs)
    }

    fn adaptable(&self) -> Vec<usize> {
        super::matrices(&self.parameters()).collect()
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn unread(&self) -> Option<usize> {
        Some(Self::LAST)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let (x, rest) = inputs.split_first()?;
        Some(passing_on(self.record_from(tape, 0, *x), rest, |var| *var))
    }
}
