//! The output layer of a language or translation model.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Init, Layer, ParameterSpec},
    layers::{
        first_and_rest,
        norm::{norm_parameters, normalise},
    },
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Layer norm, then a projection to logits: [samples, positions, features] -> [samples, positions,
/// vocabulary]. Further inputs are dropped.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    /// Size of the model.
    pub features: i64,
    /// Number of logits.
    pub vocabulary: i64,
    /// Standard deviation of the initial projection, if it is not tied.
    pub std: f64,
    /// Largest magnitude of a logit; beyond it, gradients are 0 (Huang et al. 2019, section 5). 0
    /// disables the clip.
    pub logit_clip: f64,
    /// Name under which the projection is tied to other weights (Press & Wolf 2017).
    pub tie: Option<String>,
}

impl Layer for Head {
    fn kind(&self) -> &'static str {
        "head"
    }

    /// `norm.weight`, `norm.bias` `[features]` and `weight` `[vocabulary, features]`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let [weight, bias] = norm_parameters("norm.", self.features);
        let init = Init::Normal { std: self.std };
        let projection = ParameterSpec::new("weight", [self.vocabulary, self.features], init);
        vec![weight, bias, projection.tied(self.tie.as_deref())]
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        if !(self.logit_clip.is_finite() && self.logit_clip >= 0.0) {
            return Err(LayerError::Value(format!(
                "logit_clip is {}: it must be a number above 0, or 0 for none",
                self.logit_clip
            )));
        }
        let (x, _) = first_and_rest(inputs)?;
        let x = super::features(ctx, std::slice::from_ref(x), self.features)?;
        Ok(vec![x.with_last(self.vocabulary)])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (x, _) = first_and_rest(inputs)?;
        let logits = ctx.linear(&normalise(ctx, 0, x)?, ctx.parameter(2)?, None)?;
        Ok(vec![match self.logit_clip > 0.0 {
            true => logits.f_clamp(-self.logit_clip, self.logit_clip)?,
            false => logits,
        }])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        Some(2.0 * inputs.first()?.elements() * self.vocabulary as f64)
    }

    fn by_rows(&self) -> bool {
        true
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let h = tape.layer_norm(*inputs.first()?, 0);
        let logits = tape.linear(h, 2, None);
        if self.logit_clip == 0.0 {
            return Some(vec![logits]);
        }
        tape.release(h);
        let clipped = tape.elementwise(logits);
        tape.release(logits);
        Some(vec![clipped])
    }
}
