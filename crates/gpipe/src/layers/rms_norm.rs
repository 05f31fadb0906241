//! Root-mean-square normalisation.

use gpipe_bridge::fused;
use tch::{Kind, Tensor};

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Init, Layer, ParameterSpec},
    layers::{first_and_rest, passing_on},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// RMSNorm over the last axis (Zhang & Sennrich 2019): `weight * x / sqrt(mean(x^2) + eps)`, for
/// [samples, ..., features]. In a smaller dtype than float32, the root is computed in float32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNorm {
    /// Size of the last axis.
    pub features: i64,
    /// Added to the mean of the squares.
    pub eps: f64,
}

impl RmsNorm {
    /// Its only parameter, with this name.
    pub(super) fn parameter(&self, name: &str) -> ParameterSpec {
        ParameterSpec::new(name, [self.features], Init::Ones)
    }

    pub(super) fn check(&self) -> Result<(), LayerError> {
        if self.eps.is_finite() && self.eps > 0.0 {
            return Ok(());
        }
        Err(LayerError::Value(format!("eps is {}: use a small number above 0", self.eps)))
    }

    /// The norm of `x` with parameter number `weight`.
    pub(super) fn apply(
        &self,
        ctx: &Forward,
        weight: usize,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let weight = ctx.parameter(weight)?;
        if ctx.fuses(x) && weight.kind() == x.kind() {
            return Ok(fused::rms_norm(x, weight, self.eps)?);
        }
        let kind = x.kind();
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let wide = x.f_to_kind(wide)?;
        let squares = wide.f_square()?.f_mean_dim(Some(&[-1][..]), true, None::<Kind>)?;
        let normed = wide.f_mul(&squares.f_add_scalar(self.eps)?.f_rsqrt()?)?;
        Ok(normed.f_to_kind(kind)?.f_mul(weight)?)
    }
}

impl Layer for RmsNorm {
    fn kind(&self) -> &'static str {
        "rms_norm"
    }

    /// `weight` `[features]`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![self.parameter("weight")]
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        self.check()?;
        let (x, rest) = first_and_rest(inputs)?;
        let x = super::features(ctx, std::slice::from_ref(x), self.features)?;
        Ok(passing_on(x.clone(), rest, Clone::clone))
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        Ok(passing_on(self.apply(ctx, 0, x)?, rest, Tensor::shallow_clone))
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let (&x, rest) = inputs.split_first()?;
        let normed = tape.rms_norm(x, 0);
        Some(passing_on(normed, rest, |var| *var))
    }
}
