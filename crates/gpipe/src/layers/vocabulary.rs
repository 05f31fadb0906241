//! The two ends of a language model whose parts have the names of Hugging Face's transformers.

use tch::{Kind, Tensor};

use super::embedding::known_tokens;
use crate::{
    error::LayerError,
    layer::{Forward, Infer, Init, Layer, ParameterSpec, only},
    layers::{first_and_rest, passing_on},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// The vector of each token: int64 [samples, positions] -> [samples, positions, features].
#[derive(Debug, Clone, PartialEq)]
pub struct TokenTable {
    /// Number of tokens. Valid tokens are 0 .. vocabulary.
    pub vocabulary: i64,
    /// Size of a token's vector.
    pub features: i64,
    /// Standard deviation of the initial values.
    pub std: f64,
    /// Name under which the table is tied to other weights.
    pub tie: Option<String>,
    /// A token whose vector gets no gradient from its lookups, as PyTorch's `padding_idx`.
    pub padding: Option<i64>,
}

/// Logits of the next token: [samples, positions, features] -> [samples, positions, vocabulary].
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogits {
    /// Number of logits.
    pub vocabulary: i64,
    /// Size of the model.
    pub features: i64,
    /// Standard deviation of the initial weights, if they are not tied.
    pub std: f64,
    /// Name under which the weights are tied to other weights (Press & Wolf 2017).
    pub tie: Option<String>,
}

impl Layer for TokenTable {
    fn kind(&self) -> &'static str {
        "token_table"
    }

    /// `weight` `[vocabulary, features]`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let init = Init::Normal { std: self.std };
        let weight = ParameterSpec::new("weight", [self.vocabulary, self.features], init);
        vec![weight.tied(self.tie.as_deref())]
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let input = only(inputs)?;
        if let Some(token) = self.padding.filter(|own| !(0..self.vocabulary).contains(own)) {
            let vocabulary = self.vocabulary;
            return Err(LayerError::Value(format!(
                "padding is token {token}: use one from 0 to below {vocabulary}"
            )));
        }
        match (input.kind, &input.shape[..]) {
            (Kind::Int64, &[samples, length]) => {
                Ok(vec![TensorSpec::new([samples, length, self.features], ctx.parameter_kind())])
            }
            _ => Err(LayerError::Shape(format!(
                "it takes int64 tokens [samples, positions], it got {input}"
            ))),
        }
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let known = known_tokens(ctx, only(inputs)?, self.vocabulary)?;
        let padding = self.padding.unwrap_or(-1); // there is none
        Ok(vec![Tensor::f_embedding(ctx.parameter(0)?, &known, padding, false, false)?])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        Some(vec![tape.embedding(*inputs.first()?, 0)])
    }
}

impl Layer for TokenLogits {
    fn kind(&self) -> &'static str {
        "token_logits"
    }

    /// `weight` `[vocabulary, features]`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let init = Init::Normal { std: self.std };
        let weight = ParameterSpec::new("weight", [self.vocabulary, self.features], init);
        vec![weight.tied(self.tie.as_deref())]
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        let x = super::features(ctx, std::slice::from_ref(x), self.features)?;
        Ok(passing_on(x.with_last(self.vocabulary), rest, Clone::clone))
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (x, rest) = first_and_rest(inputs)?;
        let logits = ctx.linear(x, ctx.parameter(0)?, None)?;
        Ok(passing_on(logits, rest, Tensor::shallow_clone))
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        Some(2.0 * inputs.first()?.elements() * self.vocabulary as f64)
    }

    fn by_rows(&self) -> bool {
        true
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let (&x, rest) = inputs.split_first()?;
        let logits = tape.linear(x, 0, None);
        Some(passing_on(logits, rest, |var| *var))
    }
}
