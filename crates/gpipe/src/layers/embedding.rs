//! Token embeddings with learned positions.

use tch::{Device, Kind, Tensor};

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Init, Layer, ParameterSpec, only},
    layers::dropout::check_probability,
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Sum of token and learned position embeddings, then dropout: int64 [samples, positions] ->
/// [samples, positions, features].
#[derive(Debug, Clone, PartialEq)]
pub struct Embedding {
    /// Number of tokens. Valid tokens are 0 .. vocabulary.
    pub vocabulary: i64,
    /// Size of a token's vector.
    pub features: i64,
    /// Largest number of positions; 0 disables the position embedding.
    pub positions: i64,
    /// Standard deviation of the initial values.
    pub std: f64,
    /// Dropout of the sum.
    pub dropout: f64,
    /// Name under which the token embedding is tied to other weights.
    pub tie: Option<String>,
}

impl Layer for Embedding {
    fn kind(&self) -> &'static str {
        "embedding"
    }

    /// `tokens` [vocabulary, features] and `positions` [positions, features].
    fn parameters(&self) -> Vec<ParameterSpec> {
        let init = Init::Normal { std: self.std };
        let tokens = ParameterSpec::new("tokens", [self.vocabulary, self.features], init)
            .tied(self.tie.as_deref());
        let positions = (self.positions > 0)
            .then(|| ParameterSpec::new("positions", [self.positions, self.features], init));
        [Some(tokens), positions].into_iter().flatten().collect()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        check_probability("dropout", self.dropout)?;
        let input = only(inputs)?;
        let [samples, length] = input.shape[..] else {
            return Err(LayerError::Shape(format!(
                "it takes int64 tokens [samples, positions], it got {input}"
            )));
        };
        if input.kind != Kind::Int64 {
            return Err(LayerError::Shape(format!(
                "it takes int64 tokens [samples, positions], it got {input}"
            )));
        }
        if self.positions > 0 && length > self.positions {
            return Err(LayerError::Shape(format!(
                "it has {} positions, the tokens are {input}: use shorter samples or more \
                positions",
                self.positions
            )));
        }
        Ok(vec![TensorSpec::new([samples, length, self.features], ctx.parameter_kind())])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let tokens = only(inputs)?;
        let known = known_tokens(ctx, tokens, self.vocabulary)?;
        let mut x = Tensor::f_embedding(ctx.parameter(0)?, &known, -1, false, false)?;
        if self.positions > 0 {
            let length = tokens.size().get(1).copied().unwrap_or(0);
            let past = ctx.past();
            if past + length > self.positions {
                return Err(LayerError::Value(format!(
                    "it has {} positions, the decoding is at {}",
                    self.positions,
                    past + length
                )));
            }
            x = x.f_add(&ctx.parameter(1)?.f_narrow(0, past, length)?)?;
        }
        Ok(vec![ctx.dropout(&x, self.dropout)?])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let mut x = tape.embedding(*inputs.first()?, 0);
        if self.positions > 0 {
            let sum = tape.add_rows(x, 1);
            tape.release(x);
            x = sum;
        }
        Some(vec![tape.dropout(x, self.dropout)])
    }
}

/// Checks that all tokens are below `vocabulary`, and returns them for a lookup.
///
/// libtorch's message names neither the token nor the vocabulary. On a GPU, an index out of range
/// makes the device unusable for the rest of the process: there the lookup gets a token of the
/// vocabulary instead, and the step fails later.
pub(super) fn known_tokens(
    ctx: &Forward,
    tokens: &Tensor,
    vocabulary: i64,
) -> Result<Tensor, LayerError> {
    if tokens.numel() == 0 {
        return Ok(tokens.shallow_clone());
    }
    let ends = Tensor::f_stack(&[tokens.f_min()?, tokens.f_max()?], 0)?;
    ctx.inspect(&ends, move |ends| {
        let ends = Vec::<i64>::try_from(ends)?;
        let outside = ends.iter().find(|token| !(0..vocabulary).contains(*token));
        match outside {
            None => Ok(()),
            Some(token) => Err(LayerError::Value(format!(
                "token {token} is outside the vocabulary 0..{vocabulary}: use the tokenizer the \
                model was built for"
            ))),
        }
    })?;
    match tokens.device() {
        Device::Cpu => Ok(tokens.shallow_clone()),
        _ => Ok(tokens.f_clamp(0, vocabulary - 1)?),
    }
}
