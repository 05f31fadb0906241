//! Pre-LN attention of a decoder to the encoder's output, with a residual connection.

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

/// Cross-attention: x + dropout(attention(norm(x), memory)), [samples, positions, features] -> the
/// same shape (Vaswani et al. 2017, section 3.2.3).
///
/// The second input is the memory [samples, memory positions, features], already normalised. The
/// third is its mask of visible positions: bool [samples, memory positions], at least one per
/// sample. All inputs after the first are passed on unchanged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossAttention {
    /// Size of the model.
    pub features: i64,
    /// Number of heads.
    pub heads: i64,
    /// Size of a head. The attention's width is `heads * head_size`, which may differ from
    /// `features`.
    pub head_size: i64,
    /// Dropout of the attention weights. Above 0, training uses the unfused path.
    pub attention_dropout: f64,
    /// Dropout of the output, before the residual addition.
    pub dropout: f64,
    /// Standard deviation of the initial weights.
    pub std: f64,
    /// Standard deviation of the output projection's initial weights: smaller in deep networks.
    pub output_std: f64,
}

/// The memory and its mask, taken from the inputs after the first.
fn memory_and_mask<T>(rest: &[T]) -> Result<(&T, &T), LayerError> {
    match rest {
        [memory, mask, ..] => Ok((memory, mask)),
        _ => {
            let found = rest.len();
            Err(LayerError::Shape(format!(
                "it takes a memory and its mask after the first tensor, it got {found} tensors"
            )))
        }
    }
}

impl CrossAttention {
    /// Number of parameters, for layers that combine several parts.
    pub(super) const PARAMETERS: usize = 8;
    /// The place of the last weight among them.
    const LAST: usize = 6;

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
            ParameterSpec::new(&name("q.weight"), [width, d], weight),
            ParameterSpec::new(&name("q.bias"), [width], Init::Zeros),
            ParameterSpec::new(&name("kv.weight"), [2 * width, d], weight),
            ParameterSpec::new(&name("kv.bias"), [2 * width], Init::Zeros),
            ParameterSpec::new(&name("output.weight"), [d, width], output),
            ParameterSpec::new(&name("output.bias"), [d], Init::Zeros),
        ]);
        parameters
    }

    pub(super) fn check(
        &self,
        ctx: &Infer,
        x: &TensorSpec,
        rest: &[TensorSpec],
    ) -> Result<TensorSpec, LayerError> {
        check_probability("dropout", self.dropout)?;
        self.heads().check()?;
        let (memory, mask) = memory_and_mask(rest)?;
        for states in [x, memory] {
            super::positions(ctx, states, self.features)?;
        }
        if x.shape.first() != memory.shape.first() {
            let reason = format!("{x} and the memory {memory} are of different samples");
            return Err(LayerError::Shape(reason));
        }
        check_mask(memory, Some(mask))?;
        Ok(x.clone())
    }

    /// The forward with parameters from number `first` on. `rest` are the inputs after `x`.
    pub(super) fn apply(
        &self,
        ctx: &mut Forward,
        first: usize,
        x: &Tensor,
        rest: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        let (memory, mask) = memory_and_mask(rest)?;
        let q = self.queries(ctx, first, &normalise(ctx, first, x)?)?;
        let [k, v, mask] = self.keys_values_mask(ctx, first, memory, mask)?;
        let attended = self.heads().attend(ctx, &q, &k, &v, Visible::Unmasked(&mask))?;
        let joined = self.heads().joined(&attended)?;
        let y = ctx.linear(
            &joined,
            ctx.parameter(first + Self::LAST)?,
            Some(ctx.parameter(first + 7)?),
        )?;
        Ok(x.f_add(&ctx.dropout(&y, self.dropout)?)?)
    }

    /// Queries of normalised `h`: [samples, heads, positions, head_size].
    fn queries(&self, ctx: &Forward, first: usize, h: &Tensor) -> Result<Tensor, LayerError> {
        let q = ctx.linear(h, ctx.parameter(first + 2)?, Some(ctx.parameter(first + 3)?))?;
        self.heads().apart(&q)
    }

    /// Keys and values of the memory: each [samples, heads, memory positions, head_size]. They are
    /// the same for every position of the decoder.
    fn keys_values(
        &self,
        ctx: &Forward,
        first: usize,
        memory: &Tensor,
    ) -> Result<[Tensor; 2], LayerError> {
        let kv = ctx.linear(memory, ctx.parameter(first + 4)?, Some(ctx.parameter(first + 5)?))?;
        self.heads().parts(&kv)
    }

    /// Keys, values and mask of the memory. Decoding caches those of its first step, the only one
    /// that has the memory.
    fn keys_values_mask(
        &self,
        ctx: &mut Forward,
        first: usize,
        memory: &Tensor,
        mask: &Tensor,
    ) -> Result<[Tensor; 3], LayerError> {
        if ctx.past() > 0
            && let Some(cache) = ctx.cache()
        {
            return Ok([cache.kept(first)?, cache.kept(first + 1)?, cache.kept(first + 2)?]);
        }
        let [k, v] = self.keys_values(ctx, first, memory)?;
        let all = [k, v, mask.shallow_clone()];
        if let Some(cache) = ctx.cache() {
            all.iter().enumerate().for_each(|(slot, own)| cache.keep(first + slot, own));
        }
        Ok(all)
    }

    /// Records what [`CrossAttention::apply`] computes.
    pub(super) fn record_from(
        &self,
        tape: &mut Tape,
        first: usize,
        x: Var,
        rest: &[Var],
    ) -> Option<Var> {
        let (memory, mask) = memory_and_mask(rest).ok()?;
        let h = tape.layer_norm(x, first);
        let q = tape.linear(h, first + 2, Some(first + 3));
        let kv = tape.linear(*memory, first + 4, Some(first + 5));
        let attended = self.heads().record(tape, q, kv, Some(*mask));
        let y = tape.linear(attended, first + 6, Some(first + 7));
        let dropped = tape.dropout(y, self.dropout);
        let sum = tape.add(x, dropped);
        [h, q, kv, attended, y, dropped].into_iter().for_each(|var| tape.release(var));
        Some(sum)
    }

    /// Floating-point operations of one forward: the projections, and the products of queries with
    /// keys and of weights with values.
    pub(super) fn operations(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let [samples, queries, features] = inputs.first()?.shape[..] else { return None };
        let keys = *inputs.get(1)?.shape.get(1)?;
        let [queries, keys, d] = [queries, keys, features].map(|size| size as f64);
        let by_pair = 4.0 * queries * d + 4.0 * keys * d + 4.0 * queries * keys;
        Some(samples as f64 * self.heads().width() as f64 * by_pair)
    }
}

impl Layer for CrossAttention {
    fn kind(&self) -> &'static str {
        "cross-attention"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.parameters_named("")
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        Ok(passing_on(self.check(ctx, x, rest)?, rest, Clone::clone))
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
