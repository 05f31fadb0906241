//! The decoder block of Llama, Mistral and Qwen.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Layer, ParameterSpec},
    layers::{
        ExpertMlp, GatedMlp, GroupedAttention, RmsNorm, expert_mlp::Mixed, first_and_rest,
        passing_on,
    },
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// The feed-forward part of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FeedForward {
    /// One for all tokens.
    Dense(GatedMlp),
    /// A mixture of experts.
    Experts(ExpertMlp),
}

/// `h = x + attention(norm(x))`, then `h + mlp(norm(h))`, both norms by the root mean square
/// (Touvron et al. 2023): [samples, positions, features] -> the same shape.
///
/// With a load-balancing loss, a block with experts has a second output, [samples, 2, experts]: how
/// tokens were divided among experts, summed over this and all earlier blocks. It takes the sum so
/// far as its second input. Other blocks pass further inputs on.
///
/// With the pipeline's input [`DOCUMENTS`](super::DOCUMENTS), a row can hold several documents,
/// which do not attend to each other.
///
/// Parameters have the names of Hugging Face's transformers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LlamaBlock {
    /// Attention.
    pub attention: GroupedAttention,
    /// Feed-forward.
    pub mlp: FeedForward,
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

    fn count(&self) -> usize {
        self.places().2
            + match &self.mlp {
                FeedForward::Dense(mlp) => mlp.count(),
                FeedForward::Experts(mlp) => mlp.count(),
            }
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
        parameters.extend(match &self.mlp {
            FeedForward::Dense(mlp) => mlp.parameters("mlp."),
            FeedForward::Experts(mlp) => mlp.parameters(),
        });
        debug_assert_eq!(parameters.len(), self.count());
        parameters
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        self.norm().check()?;
        self.attention.check(ctx, x)?;
        super::positions(ctx, x, self.attention.features)?;
        let (of_mlp, hidden) = match &self.mlp {
            FeedForward::Dense(mlp) => (mlp.features, mlp.hidden),
            FeedForward::Experts(mlp) => (mlp.features, mlp.hidden),
        };
        if of_mlp != self.attention.features || hidden < 1 {
            return Err(LayerError::Shape(format!(
                "its feed-forward part has {of_mlp} features and {hidden} hidden ones: use {}, and \
                at least 1",
                self.attention.features
            )));
        }
        let FeedForward::Experts(mlp) = &self.mlp else {
            return Ok(passing_on(x.clone(), rest, Clone::clone));
        };
        mlp.check()?;
        if !mlp.balance {
            return Ok(passing_on(x.clone(), rest, Clone::clone));
        }
        let samples = x.shape.first().copied().unwrap_or(0);
        let division = mlp.division(samples, ctx.parameter_kind());
        match rest {
            [] => Ok(vec![x.clone(), division]),
            [earlier] if *earlier == division => Ok(vec![x.clone(), division]),
            _ => Err(LayerError::Shape(format!(
                "its further inputs are {rest:?}, and it adds {division} to the second: blocks \
                with experts need as many of them"
            ))),
        }
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        let (attention, second, mlp) = self.places();
        let normed = self.norm().apply(ctx, 0, x)?;
        let h = x.f_add(&self.attention.apply(ctx, attention, &normed)?)?;
        drop(normed);
        let normed = self.norm().apply(ctx, second, &h)?;
        let (made, division) = match &self.mlp {
            FeedForward::Dense(own) => (own.apply(ctx, mlp, &normed)?, None),
            FeedForward::Experts(own) => {
                let Mixed { output, division } = own.apply(ctx, mlp, &normed)?;
                (output, division)
            }
        };
        let sum = h.f_add(&made)?;
        match (division, rest) {
            (None, rest) => Ok(passing_on(sum, rest, Tensor::shallow_clone)),
            (Some(own), []) => Ok(vec![sum, own]),
            (Some(own), [earlier, ..]) => Ok(vec![sum, earlier.f_add(&own)?]),
        }
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let x = inputs.first()?;
        let positions = x.elements() / x.last().max(1) as f64;
        let mlp = match &self.mlp {
            FeedForward::Dense(mlp) => mlp.operations(positions),
            FeedForward::Experts(mlp) => mlp.operations(positions),
        };
        Some(self.attention.operations(x)? + mlp)
    }

    /// All linear layers except those of experts.
    fn adaptable(&self) -> Vec<usize> {
        let (attention, second, mlp) = self.places();
        let is_dense = matches!(self.mlp, FeedForward::Dense(_));
        let fits =
            |number: &usize| (attention..second).contains(number) || is_dense && *number >= mlp;
        super::matrices(&self.parameters()).filter(fits).collect()
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn unread(&self) -> Option<usize> {
        let (_, _, mlp) = self.places();
        match &self.mlp {
            FeedForward::Dense(own) => Some(mlp + own.last()),
            FeedForward::Experts(_) => None,
        }
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let (&x, rest) = inputs.split_first()?;
        let (attention, second, mlp) = self.places();
        let normed = tape.rms_norm(x, 0);
        let attended = self.attention.record(tape, attention, normed)?;
        tape.release(normed);
        let h = tape.add(x, attended);
        tape.release(attended);
        let normed = tape.rms_norm(h, second);
        let (made, division) = match &self.mlp {
            FeedForward::Dense(own) => (own.record(tape, mlp, normed), None),
            FeedForward::Experts(own) => own.record(tape, mlp, normed),
        };
        let sum = tape.add(h, made);
        [h, normed, made].into_iter().for_each(|var| tape.release(var));
        Some(match (division, rest) {
            (None, rest) => passing_on(sum, rest, |var| *var),
            (Some(own), []) => vec![sum, own],
            (Some(own), [earlier, ..]) => {
                let both = tape.add(*earlier, own);
                tape.release(own);
                vec![sum, both]
            }
        })
    }
}
