//! Pre-LN self-attention with a residual connection, one layer of a decoder or an encoder.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Init, Layer, ParameterSpec},
    layers::{
        dropout::check_probability,
        first_and_rest,
        heads::{Heads, Visible, check_mask},
        norm::{norm_parameters, normalise},
        passing_on,
    },
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Self-attention: x + dropout(attention(norm(x))), [samples, positions, features] -> the same
/// shape (Vaswani et al. 2017, section 3.2; pre-LN: Xiong et al. 2020).
///
/// Further inputs are passed on unchanged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Size of the model.
    pub features: i64,
    /// Number of heads.
    pub heads: i64,
    /// Size of a head. The attention's width is `heads * head_size`, which may differ from
    /// `features`.
    pub head_size: i64,
    /// Whether attention is causal, as in a decoder: each position sees itself and earlier ones.
    ///
    /// Otherwise the second input is the mask of visible positions: bool [samples, positions], with
    /// at least one visible position per sample.
    pub causal: bool,
    /// Dropout of the attention weights. Above 0, training uses the unfused path.
    pub attention_dropout: f64,
    /// Dropout of the output, before the residual addition.
    pub dropout: f64,
    /// Standard deviation of the initial weights.
    pub std: f64,
    /// Standard deviation of the output projection's initial weights: smaller in deep networks.
    pub output_std: f64,
}

impl Attention {
    /// Number of parameters, for layers that combine several parts.
    pub(super) const PARAMETERS: usize = 6;
    /// The place of the last weight among them.
    const LAST: usize = 4;

    fn heads(&self) -> Heads {
        Heads { count: self.heads, size: self.head_size, dropout: self.attention_dropout }
    }

    pub(super) fn parameters_named(&self, prefix: &str) -> Vec<ParameterSpec> {
        let (d, width) = (self.features, self.heads().width());
        let name = |part: &str| format!("{prefix}{part}");
        let weight = Init::Normal { std: self.std };
        let output = Init::Normal { std: self.output_std };
        let mut parameters: Vec<_> = norm_parameters(&name("norm."), d).into();
        parameters.extend([
            ParameterSpec::new(&name("qkv.weight"), [3 * width, d], weight),
            ParameterSpec::new(&name("qkv.bias"), [3 * width], Init::Zeros),
            ParameterSpec::new(&name("output.weight"), [d, width], output),
            ParameterSpec::new(&name("output.bias"), [d], Init::Zeros),
        ]);
        parameters
    }

    pub(super) fn check(
        &self,
        ctx: &Infer,
        inputs: &[TensorSpec],
    ) -> Result<TensorSpec, LayerError> {
        check_probability("dropout", self.dropout)?;
        self.heads().check()?;
        let (x, rest) = first_and_rest(inputs)?;
        super::positions(ctx, x, self.features)?;
        if !self.causal {
            check_mask(x, rest.first())?;
        }
        Ok(x.clone())
    }

    /// Which keys are visible, given the inputs after the first.
    fn visible<'a>(&self, rest: &'a [Tensor]) -> Result<Visible<'a>, LayerError> {
        match (self.causal, rest.first()) {
            (true, _) => Ok(Visible::Earlier),
            (false, Some(mask)) => Ok(Visible::Unmasked(mask)),
            (false, None) => Err(LayerError::Shape("it takes a mask, it got none".into())),
        }
    }

    /// The forward with parameters from number `first` on. `rest` are the inputs after `x`.
    pub(super) fn apply(
        &self,
        ctx: &mut Forward,
        first: usize,
        x: &Tensor,
        rest: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        if !self.causal && ctx.past() > 0 {
            if x.numel() == 0 {
                // While decoding, the encoder runs in the first step only.
                return Ok(x.shallow_clone());
            }
            let reason =
                "after its first step a decoding has no new positions for attention to all";
            return Err(LayerError::Value(reason.into()));
        }
        let [q, k, v] = self.queries_keys_values(ctx, first, &normalise(ctx, first, x)?)?;
        let (k, v, visible) = match ctx.cache().filter(|_| self.causal) {
            Some(cache) => {
                let visible = match (cache.past(), q.size().get(2)) {
                    (0, _) => Visible::Earlier,
                    (_, Some(1)) => Visible::All,
                    _ => {
                        let reason = "after its first step a decoding makes one position at a time";
                        return Err(LayerError::Value(reason.into()));
                    }
                };
                (cache.append(first, &k, 2)?, cache.append(first + 1, &v, 2)?, visible)
            }
            None => (k, v, self.visible(rest)?),
        };
        let attended = self.heads().attend(ctx, &q, &k, &v, visible)?;
        let joined = self.heads().joined(&attended)?;
        let y = ctx.linear(
            &joined,
            ctx.parameter(first + Self::LAST)?,
            Some(ctx.parameter(first + 5)?),
        )?;
        Ok(x.f_add(&ctx.dropout(&y, self.dropout)?)?)
    }

    /// Queries, keys and values of normalised `h`: each [samples, heads, positions, head_size].
    fn queries_keys_values(
        &self,
        ctx: &Forward,
        first: usize,
        h: &Tensor,
    ) -> Result<[Tensor; 3], LayerError> {
        let qkv = ctx.linear(h, ctx.parameter(first + 2)?, Some(ctx.parameter(first + 3)?))?;
        self.heads().parts(&qkv)
    }

    /// Records what [`Attention::apply`] computes.
    pub(super) fn record_from(
        &self,
        tape: &mut Tape,
        first: usize,
        x: Var,
        rest: &[Var],
    ) -> Option<Var> {
        let mask = if self.causal { None } else { Some(*rest.first()?) };
        let h = tape.layer_norm(x, first);
        let qkv = tape.linear(h, first + 2, Some(first + 3));
        let attended = self.heads().record(tape, qkv, qkv, mask);
        let y = tape.linear(attended, first + 4, Some(first + 5));
        let dropped = tape.dropout(y, self.dropout);
        let sum = tape.add(x, dropped);
        [h, qkv, attended, y, dropped].into_iter().for_each(|var| tape.release(var));
        Some(sum)
    }

    /// Floating-point operations of one forward.
    pub(super) fn operations(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let [samples, length, features] = inputs.first()?.shape[..] else { return None };
        let (length, d) = (length as f64, features as f64);
        Some(samples as f64 * length * self.heads().width() as f64 * (8.0 * d + 4.0 * length))
    }
}

impl Layer for Attention {
    fn kind(&self) -> &'static str {
        "attention"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.parameters_named("")
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (_, rest) = first_and_rest(inputs)?;
        Ok(passing_on(self.check(ctx, inputs)?, rest, Clone::clone))
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        Ok(passing_on(self.apply(ctx, 0, x, rest)?, rest, Tensor::shallow_clone))
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
        Some(passing_on(self.record_from(tape, 0, *x, rest)?, rest, |var| *var))
    }
}
