//! The decoder block of Llama, Mistral and Qwen.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Layer, ParameterSpec, only},
    layers::{GatedMlp, GroupedAttention, RmsNorm},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// `h = x + attention(norm(x))`, then `h + mlp(norm(h))`, both norms by the root mean square
/// (Touvron et al. 2023): [samples, positions, features] -> the same shape.
///
/// Parameters have the names of Hugging Face's transformers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LlamaBlock {
    /// Attention.
    pub attention: GroupedAttention,
    /// Feed-forward.
    pub mlp: GatedMlp,
    /// The `eps` of both norms.
    pub eps: f64,
}

impl LlamaBlock {
    fn norm(&self) -> RmsNorm {
        RmsNorm { features: self.attention.features, eps: self.eps }
    }

    /// The numbers of the first parameter of attention, second norm and feed-forward. Number 0 is
    /// the first norm.
    fn places(&self) -> (usize, usize, usize) {
        let second = 1 + self.attention.count();
        (1, second, second + 1)
    }
}

impl Layer for LlamaBlock {
    fn kind(&self) -> &'static str {
        "llama_block"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        let mut parameters = vec![self.norm().parameter("input_layernorm.weight")];
        parameters.extend(self.attention.parameters("self_attn."));
        parameters.push(self.norm().parameter("post_attention_layernorm.weight"));
        parameters.extend(self.mlp.parameters("mlp."));
        debug_assert_eq!(parameters.len(), self.places().2 + self.mlp.count());
        parameters
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        self.norm().check()?;
        self.attention.check()?;
        let x = only(inputs)?;
        super::positions(ctx, x, self.attention.features)?;
        Ok(vec![x.clone()])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let x = only(inputs)?;
        let (attention, second, mlp) = self.places();
        let normed = self.norm().apply(ctx, 0, x)?;
        let h = x.f_add(&self.attention.apply(ctx, attention, &normed)?)?;
        drop(normed);
        let normed = self.norm().apply(ctx, second, &h)?;
        Ok(vec![h.f_add(&self.mlp.apply(ctx, mlp, &normed)?)?])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let x = inputs.first()?;
        let positions = x.elements() / x.last().max(1) as f64;
        Some(self.attention.operations(x)? + self.mlp.operations(positions))
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let x = *inputs.first()?;
        let (attention, second, mlp) = self.places();
        let normed = tape.rms_norm(x, 0);
        let attended = self.attention.record(tape, attention, normed)?;
        tape.release(normed);
        let h = tape.add(x, attended);
        tape.release(attended);
        let normed = tape.rms_norm(h, second);
        let made = self.mlp.record(tape, mlp, normed);
        let sum = tape.add(h, made);
        [h, normed, made].into_iter().for_each(|var| tape.release(var));
        Some(vec![sum])
    }
}
