//! Pre-LN causal self-attention with its residual connection, one layer of a decoder.

use tch::{Device, Kind, Tensor};

use crate::{
    error::LayerError,
    estimate::{Tape, Var},
    layer::{Forward, Infer, Init, Layer, ParameterSpec, only},
    layers::{
        dropout::check_probability,
        norm::{norm_parameters, normalise},
    },
    spec::TensorSpec,
};

/// x + dropout(attention(norm(x))) with a causal mask (Vaswani et al. 2017, section 3.2; pre-LN: Xiong et
/// al. 2020): [samples, positions, features] -> the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Size of the model; a multiple of `heads`.
    pub features: i64,
    /// Number of heads.
    pub heads: i64,
    /// Dropout of the attention weights; above 0 training takes the unfused path.
    pub attention_dropout: f64,
    /// Dropout of the output, before it is added.
    pub dropout: f64,
    /// Standard deviation of the initial weights.
    pub std: f64,
    /// Standard deviation of the output projection's: smaller in deep networks.
    pub output_std: f64,
}

impl Attention {
    /// How many parameters it has, for layers made of several parts.
    pub(super) const PARAMETERS: usize = 6;

    pub(super) fn parameters_named(&self, prefix: &str) -> Vec<ParameterSpec> {
        let d = self.features;
        let name = |part: &str| format!("{prefix}{part}");
        let weight = Init::Normal { std: self.std };
        let output = Init::Normal { std: self.output_std };
        let mut parameters: Vec<_> = norm_parameters(&name("norm."), d).into();
        parameters.extend([
            ParameterSpec::new(&name("qkv.weight"), [3 * d, d], weight),
            ParameterSpec::new(&name("qkv.bias"), [3 * d], Init::Zeros),
            ParameterSpec::new(&name("output.weight"), [d, d], output),
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
        check_probability("attention_dropout", self.attention_dropout)?;
        if self.heads <= 0 || self.features % self.heads != 0 {
            return Err(LayerError::Shape(format!(
                "{} features do not divide into {} heads",
                self.features, self.heads
            )));
        }
        let input = super::features(ctx, inputs, self.features)?;
        if input.shape.len() != 3 {
            return Err(LayerError::Shape(format!(
                "it takes [samples, positions, {}], it got {input}",
                self.features
            )));
        }
        Ok(input.clone())
    }

    /// The layer with its parameters from number `first`.
    pub(super) fn apply(
        &self,
        ctx: &mut Forward,
        first: usize,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let h = normalise(ctx, first, x)?;
        let qkv = ctx.linear(&h, ctx.parameter(first + 2)?, Some(ctx.parameter(first + 3)?))?;
        let [samples, length] = [0, 1].map(|axis| x.size()[axis]);
        let qkv = qkv
            .f_reshape([samples, length, 3, self.heads, self.features / self.heads])?
            .f_permute([2, 0, 3, 1, 4])?;
        // Not three selects: each one's backward would fill and add a tensor of all three.
        let parts = qkv.f_unbind(0)?;
        let [q, k, v] = &parts[..] else {
            return Err(LayerError::Shape("qkv has not three parts".into()));
        };
        let attended = self.attend(ctx, q, k, v)?;
        let joined = attended.f_transpose(1, 2)?.f_reshape([samples, length, self.features])?;
        let y = ctx.linear(&joined, ctx.parameter(first + 4)?, Some(ctx.parameter(first + 5)?))?;
        Ok(x.f_add(&ctx.dropout(&y, self.dropout)?)?)
    }

    /// q, k, v: [samples, heads, positions, features / heads].
    fn attend(
        &self,
        ctx: &mut Forward,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<Tensor, LayerError> {
        if !ctx.training() || self.attention_dropout == 0.0 {
            let no_mask = None::<Tensor>;
            let fused =
                Tensor::f_scaled_dot_product_attention(q, k, v, no_mask, 0.0, true, None, false)?;
            return Ok(fused);
        }
        let (length, size) = (q.size()[2], q.size()[3]);
        let later = Tensor::f_ones([length, length], (Kind::Bool, Device::Cpu))?.f_triu(1)?;
        let scores = q
            .f_matmul(&k.f_transpose(2, 3)?)?
            .f_mul_scalar(1.0 / (size as f64).sqrt())?
            .f_masked_fill(&later.f_to(q.device())?, f64::NEG_INFINITY)?;
        let weights = scores.f_softmax(-1, None)?;
        Ok(ctx.dropout(&weights, self.attention_dropout)?.f_matmul(v)?)
    }

    /// As [`Attention::apply`].
    pub(super) fn record_from(&self, tape: &mut Tape, first: usize, x: Var) -> Var {
        let h = tape.layer_norm(x, first);
        let qkv = tape.linear(h, first + 2, Some(first + 3));
        let attended = match self.attention_dropout > 0.0 {
            true => tape.unfused_attention(qkv, self.heads, self.attention_dropout),
            false => tape.fused_attention(qkv, self.heads),
        };
        let y = tape.linear(attended, first + 4, Some(first + 5));
        let dropped = tape.dropout(y, self.dropout);
        let sum = tape.add(x, dropped);
        [h, qkv, attended, y, dropped].into_iter().for_each(|var| tape.release(var));
        sum
    }

    /// Floating-point operations of one forward.
    pub(super) fn operations(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let input = inputs.first()?;
        let (elements, d) = (input.elements(), self.features as f64);
        let length = input.shape.get(1).copied()? as f64;
        Some(elements * (8.0 * d + 4.0 * length))
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
        Ok(vec![self.check(ctx, inputs)?])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![self.apply(ctx, 0, only(inputs)?)?])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        self.operations(inputs)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        Some(vec![self.record_from(tape, 0, *inputs.first()?)])
    }
}
