//! Layers through which sentences enter an encoder-decoder: the source before the encoder, the
//! target between encoder and decoder.

use tch::{Kind, Tensor};

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Init, Layer, ParameterSpec},
    layers::{
        dropout::check_probability,
        embedding::known_tokens,
        norm::{norm_parameters, normalise},
        sinusoids::{TEMPORARY, sinusoids},
    },
    spec::TensorSpec,
    tape::{Node, Tape, Var},
};

/// Scaled token vectors plus sinusoidal positions, then dropout: int64 [samples, positions] ->
/// [samples, positions, features] (Vaswani et al. 2017, sections 3.4 and 3.5).
///
/// Vectors are scaled by sqrt(features), and their initial variance is 1 / features. Elements
/// therefore enter the network with a variance of 1, against 1/2 for the positions. If the output
/// projection is the same weight, logits initially have a variance of 1, too. The logit of the
/// input token is larger: the token's own vector is still part of the state. An untrained network
/// therefore predicts its input token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEmbedding {
    /// Number of tokens. Valid tokens are 0 .. vocabulary.
    pub vocabulary: i64,
    /// Size of a token's vector. It must be even, because sines and cosines come in pairs.
    pub features: i64,
    /// Dropout of the sum.
    pub dropout: f64,
    /// Name under which the vectors are tied to other weights.
    pub tie: Option<String>,
}

impl TokenEmbedding {
    /// `tokens` [vocabulary, features].
    fn parameter(&self) -> ParameterSpec {
        let init = Init::Normal { std: (self.features.max(1) as f64).powf(-0.5) };
        let tokens = ParameterSpec::new("tokens", [self.vocabulary, self.features], init);
        tokens.tied(self.tie.as_deref())
    }

    fn check(&self, ctx: &Infer, tokens: &TensorSpec) -> Result<TensorSpec, LayerError> {
        check_probability("dropout", self.dropout)?;
        if self.features % 2 != 0 {
            let reason = format!("{} features: positions need an even number", self.features);
            return Err(LayerError::Shape(reason));
        }
        match (&tokens.shape[..], tokens.kind) {
            (&[samples, length], Kind::Int64) => {
                Ok(TensorSpec::new([samples, length, self.features], ctx.parameter_kind()))
            }
            _ => Err(LayerError::Shape(format!(
                "it takes int64 tokens [samples, positions], it got {tokens}"
            ))),
        }
    }

    /// The forward, with the token vectors in parameter number `table`.
    fn apply(
        &self,
        ctx: &mut Forward,
        table: usize,
        tokens: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let known = known_tokens(ctx, tokens, self.vocabulary)?;
        let x = self.sum(ctx.parameter(table)?, &known, ctx.past())?;
        ctx.dropout(&x, self.dropout)
    }

    /// Scaled vectors plus positions. `past` is the number of earlier positions.
    fn sum(&self, vectors: &Tensor, tokens: &Tensor, past: i64) -> Result<Tensor, LayerError> {
        let (_, length) = tokens.size2()?;
        let (kind, device) = (vectors.kind(), vectors.device());
        let positions = sinusoids(past..past + length, self.features, kind, device)?;
        let x = Tensor::f_embedding(vectors, tokens, -1, false, false)?;
        let mut scale = Tensor::f_empty([1], (kind, device))?;
        let scale = scale.f_fill_((self.features as f64).sqrt())?;
        // One fused operation, so that only the sum is allocated.
        Ok(positions.f_addcmul(&x, &scale)?)
    }

    /// Records what [`TokenEmbedding::apply`] computes.
    fn record(&self, tape: &mut Tape, table: usize, tokens: Var) -> Option<Var> {
        let length = *tape.spec(tokens).shape.get(1)?;
        let spec = TensorSpec::new([length, self.features], tape.compute_kind());
        let temporary = TEMPORARY * spec.elements();
        let positions = tape.push(Node::new(&[], spec).forward_bytes(temporary));
        let x = tape.embedding(tokens, table);
        let sum = tape.scaled(x, 0.0);
        [positions, x].into_iter().for_each(|var| tape.release(var));
        Some(tape.dropout(sum, self.dropout))
    }
}

/// The encoder's first layer: embeds the source and masks its padding.
///
/// Inputs are source and target, int64 [samples, positions], which may differ in length. Outputs
/// are the source's states [samples, positions, features], the mask of source tokens that are not
/// padding (bool [samples, positions]), and the unchanged target.
///
/// Each sample needs at least one token that is not padding, because attention to no keys is
/// undefined.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceEmbedding {
    /// Embedding of the source.
    pub tokens: TokenEmbedding,
    /// The padding token. Padding affects no result and gets no gradient.
    pub pad: i64,
}

/// The source and the target among `inputs`.
fn source_and_target<T>(inputs: &[T]) -> Result<(&T, &T), LayerError> {
    match inputs {
        [source, target] => Ok((source, target)),
        _ => {
            let found = inputs.len();
            Err(LayerError::Shape(format!(
                "it takes a source and a target, it got {found} tensors"
            )))
        }
    }
}

impl SourceEmbedding {
    /// The mask of tokens that are not padding.
    fn mask(&self, ctx: &Forward, source: &Tensor) -> Result<Tensor, LayerError> {
        let mask = source.f_ne(self.pad)?;
        if ctx.past() > 0 {
            // While decoding, only the first step has the source.
            return Ok(mask);
        }
        let (first, pad) = (ctx.random.first_sample(), self.pad);
        ctx.inspect(&mask.f_any_dim(1, false)?, move |has_tokens| {
            let has_tokens = Vec::<i64>::try_from(has_tokens)?;
            let Some(empty) = has_tokens.iter().position(|&own| own == 0) else { return Ok(()) };
            let sample = first + empty as i64;
            Err(LayerError::Value(format!(
                "the source of sample {sample} of the mini-batch is all padding (token {pad}): \
                leave it out, or give it a token"
            )))
        })?;
        Ok(mask)
    }
}

impl Layer for SourceEmbedding {
    fn kind(&self) -> &'static str {
        "source embedding"
    }

    /// `tokens` [vocabulary, features].
    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![self.tokens.parameter()]
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (source, target) = source_and_target(inputs)?;
        let states = self.tokens.check(ctx, source)?;
        self.tokens.check(ctx, target)?;
        if source.shape.first() != target.shape.first() {
            let reason = format!("the source {source} and the target {target} differ in samples");
            return Err(LayerError::Shape(reason));
        }
        let mask = TensorSpec::new(source.shape.clone(), Kind::Bool);
        Ok(vec![states, mask, target.clone()])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (source, target) = source_and_target(inputs)?;
        let mask = self.mask(ctx, source)?;
        Ok(vec![self.tokens.apply(ctx, 0, source)?, mask, target.shallow_clone()])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let (source, target) = source_and_target(inputs).ok()?;
        let mask = TensorSpec::new(tape.spec(*source).shape.clone(), Kind::Bool);
        let mask = tape.push(Node::new(&[*source], mask));
        Some(vec![self.tokens.record(tape, 0, *source)?, mask, *target])
    }
}

/// The layer between encoder and decoder: embeds the target and normalises the memory.
///
/// Inputs are the encoder's states, the source's mask and the target. Outputs are the target's
/// states [samples, positions, features], the memory (the encoder's states, normalised), and the
/// mask.
///
/// Padding of the target needs no mask. It follows the sentence, so no real position attends to it,
/// and the loss ignores its outputs.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetEmbedding {
    /// Embedding of the target.
    pub tokens: TokenEmbedding,
}

/// Index of `tokens` among the parameters.
const TABLE: usize = 2;

/// The states, the mask and the target among `inputs`.
fn states_mask_and_target<T>(inputs: &[T]) -> Result<(&T, &T, &T), LayerError> {
    match inputs {
        [states, mask, target] => Ok((states, mask, target)),
        _ => {
            let found = inputs.len();
            Err(LayerError::Shape(format!(
                "it takes states, their mask and a target, it got {found} tensors"
            )))
        }
    }
}

impl Layer for TargetEmbedding {
    fn kind(&self) -> &'static str {
        "target embedding"
    }

    /// `norm.weight` and `norm.bias` `[features]` for the encoder's states, and `tokens`
    /// `[vocabulary, features]`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let [weight, bias] = norm_parameters("norm.", self.tokens.features);
        vec![weight, bias, self.tokens.parameter()]
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (memory, mask, target) = states_mask_and_target(inputs)?;
        super::positions(ctx, memory, self.tokens.features)?;
        super::heads::check_mask(memory, Some(mask))?;
        Ok(vec![self.tokens.check(ctx, target)?, memory.clone(), mask.clone()])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (states, mask, target) = states_mask_and_target(inputs)?;
        let memory = normalise(ctx, 0, states)?;
        Ok(vec![self.tokens.apply(ctx, TABLE, target)?, memory, mask.shallow_clone()])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let (states, mask, target) = states_mask_and_target(inputs).ok()?;
        let memory = tape.layer_norm(*states, 0);
        Some(vec![self.tokens.record(tape, TABLE, *target)?, memory, *mask])
    }
}
