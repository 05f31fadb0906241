//! What a model is trained for: the data, the meaning of tokens and classes, and the metrics.
//!
//! - [`language`]: predicting the next token of a text
//! - [`jsonl`]: predicting the next token of JSONL samples, such as conversations, packed in rows
//! - [`translation`]: translating sentences in many languages into English
//! - [`classification`]: classifying images
//! - [`cache`]: where prepared data are kept for later runs
//! - [`pinned`]: checks that the default text is the expected one
//! - [`template`]: the chat template of a model
//! - [`vocabulary`]: a trained model's tokens or classes
//! - here: what the tasks have in common, and the choice between them

mod cache;
pub(crate) mod classification;
pub(crate) mod jsonl;
pub(crate) mod language;
mod pinned;
pub(crate) mod template;
pub(crate) mod translation;
mod vocabulary;

use std::ops::Range;

use gpipe::{
    Accuracy, BalancedExperts, CrossEntropy, IntoTensors, LayerError, Loss, LossContext, Metric,
    Padding, Pipeline, PipelineBuilder, Sequence, TensorSpec, Tensors, TopK, WithAuxiliary,
    layers::{Gelu, Rotary, RotaryScaling},
};
use gpipe_models::{
    AmoebaNet, Llama, ResNet, Transformer, Variant, huggingface::Network, llama::BLOCKS_MAX,
};
use tch::{Kind, Tensor};

pub(crate) use self::vocabulary::{COMPANIONS, Vocabulary};
use self::{
    classification::Classification,
    jsonl::Jsonl,
    language::Language,
    translation::{PAD, Translation},
};
use crate::{
    CliError,
    config::{
        Config, Data, Dtype, GeluChoice, JsonlConfig, LlamaConfig, Model, TextConfig,
        TokenizerChoice, TransformerConfig, VariantName,
    },
    model_folder::check_vocabulary,
};

/// A mini-batch.
pub(crate) struct Batch {
    pub inputs: Tensors,
    pub targets: Tensor,
    pub samples: u64,
}

/// An error of the thread that makes batches.
pub(crate) type BatchError = Box<dyn std::error::Error + Send + Sync>;
/// Makes the mini-batch with the given number.
pub(crate) type MakeBatch = Box<dyn Fn(u64) -> Result<Batch, BatchError> + Send>;
/// The range of all samples.
pub(crate) const ALL: Range<usize> = 0..usize::MAX;
/// Mini-batches in order.
pub(crate) type Batches<'a> = Box<dyn Iterator<Item = Result<Batch, CliError>> + 'a>;

/// Held-out data that are measured separately.
pub(crate) struct Part<'a> {
    /// Its name, if there are several parts.
    pub name: Option<String>,
    pub batches: Batches<'a>,
}

impl<'a> Part<'a> {
    /// The only part.
    pub(crate) fn all(batches: Batches<'a>) -> Vec<Self> {
        vec![Self { name: None, batches }]
    }
}

/// Data to train on and to validate on.
pub(crate) trait Task {
    /// A summary of the data: one line per source with what was left out, and one line for the
    /// result.
    fn summary(&self) -> &str;

    /// The tokens or classes of the data.
    fn vocabulary(&self) -> &Vocabulary;

    /// A fingerprint of the training data, which must be the same in a run that resumes.
    fn fingerprint(&self) -> String;

    /// A fingerprint of the held-out data, which may be others in a run that resumes.
    fn held_out_fingerprint(&self) -> String;

    /// The function that makes training mini-batches, which depend only on the seed and their
    /// number.
    ///
    /// The first `batches` mini-batches have `samples` samples in all. For samples outside of
    /// `fed`, only the targets need to be correct.
    fn training(
        &self,
        batches: u64,
        samples: u64,
        fed: Range<usize>,
    ) -> Result<MakeBatch, CliError>;

    /// The held-out data in order, up to the configured maximum. Unless this process is `fed`, only
    /// the targets need to be correct.
    fn validation(&self, fed: bool) -> Result<Vec<Part<'_>>, CliError>;

    /// Converts a loss on the held-out data from nats to bits per byte. `None` if the data are not
    /// bytes.
    fn bits_per_byte(&self, _nats: f64) -> Option<f64> {
        None
    }

    /// The samples that could not be read and were left out so far, with the reasons.
    fn unreadable(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// Reads the configured data. `given` is the vocabulary of an earlier training, if there was one.
/// Otherwise the configured tokenizer file is used, if there is one.
pub(crate) fn open(config: &Config, given: Option<Vocabulary>) -> Result<Box<dyn Task>, CliError> {
    let given = match given {
        Some(given) => Some(given),
        None => Vocabulary::configured(config)?,
    };
    check_made(config)?;
    Ok(match &config.data {
        Data::Text(data) => Box::new(Language::open(config, data, given)?),
        Data::Jsonl(data) => Box::new(Jsonl::open(config, data, given)?),
        Data::Parallel(data) => Box::new(Translation::open(config, data, given)?),
        _ => Box::new(Classification::open(config, given)?),
    })
}

/// Folders that recipes in `configs/` use, and the commands that make them.
const MADE: &[(&str, &str)] = &[
    ("data/translations", "make catalogues"),
    ("data/letters", "make fonts"),
    ("data/digits", "make fonts"),
];

/// Fails if the data are in one of these folders and it has not been made yet.
fn check_made(config: &Config) -> Result<(), CliError> {
    let folder = match &config.data {
        Data::Parallel(data) => &data.folder,
        Data::ImageFolder(data) => &data.folder,
        _ => return Ok(()),
    };
    match MADE.iter().find(|(made, _)| folder.starts_with(made)) {
        Some((_, command)) if !folder.exists() => Err(CliError::Usage(format!(
            "{}: it does not exist: `{command}` makes it",
            folder.display()
        ))),
        _ => Ok(()),
    }
}

/// Makes a mini-batch on the calling thread.
pub(crate) fn made(make: &MakeBatch, number: u64) -> Result<Batch, CliError> {
    make(number).map_err(|source| gpipe_data::Error::Loader { step: number, source }.into())
}

/// The unit in which targets are counted.
pub(crate) fn unit(config: &Config) -> &'static str {
    match config.data {
        Data::Text(_) | Data::Jsonl(_) | Data::Parallel(_) => "token",
        _ => "image",
    }
}

/// The model for `size` tokens or classes, with adapters if `[lora]` has a rank.
pub(crate) fn model(config: &Config, size: usize) -> Result<Sequence, CliError> {
    let network = network(config, size)?;
    Ok(match config.lora.adapters() {
        Some(lora) => network.with_lora(&lora)?,
        None => network,
    })
}

/// The model without adapters.
fn network(config: &Config, size: usize) -> Result<Sequence, CliError> {
    const COLOURS: i64 = 3;
    Ok(match &config.model {
        Model::Transformer(model) => transformer(config, model, size).build()?,
        Model::HuggingFace(_) => {
            let network = config.network()?;
            check_vocabulary(&network, size)?;
            network.build().map_err(|error| CliError::Usage(error.to_string()))?
        }
        Model::Llama(model) => llama(config, model, size).build()?,
        Model::Translation(model) => gpipe_models::Translation {
            source_vocabulary: count(size),
            target_vocabulary: count(size),
            pad: PAD,
            features: model.features,
            heads: model.heads,
            head_size: model.head_size,
            hidden: model.hidden,
            encoder_layers: model.encoder_layers,
            decoder_layers: model.decoder_layers,
            dropout: model.dropout,
            attention_dropout: model.attention_dropout,
            logit_clip: model.logit_clip,
            tied: model.tied,
            shared: model.shared,
            split_blocks: model.split_blocks,
        }
        .build()?,
        Model::AmoebaNet(model) => AmoebaNet {
            variant: match model.variant {
                VariantName::B => Variant::B,
                VariantName::D => Variant::D,
            },
            cells: model.cells,
            filters: model.filters,
            channels: COLOURS,
            classes: count(classes(model.classes, size)?),
            drop_path: model.drop_path,
            auxiliary: model.auxiliary > 0.0,
        }
        .build()?,
        Model::ResNet(model) => ResNet {
            blocks: model.blocks,
            width: model.width,
            channels: COLOURS,
            classes: count(classes(model.classes, size)?),
        }
        .build()?,
    })
}

fn count(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

/// The configured transformer.
pub(crate) fn transformer(config: &Config, model: &TransformerConfig, size: usize) -> Transformer {
    Transformer {
        vocabulary: count(size),
        positions: count(sequence(config)),
        features: model.features,
        heads: model.heads,
        hidden: model.hidden,
        blocks: model.blocks,
        dropout: model.dropout,
        attention_dropout: model.attention_dropout,
        tied: model.tied,
        split_blocks: model.split_blocks,
        gelu: match model.gelu {
            GeluChoice::Exact => Gelu::Exact,
            GeluChoice::Tanh => Gelu::Tanh,
        },
    }
}

/// The configured model built like Llama.
pub(crate) fn llama(config: &Config, model: &LlamaConfig, size: usize) -> Llama {
    Llama {
        vocabulary: count(size),
        features: model.features,
        hidden: model.hidden,
        windows: vec![(model.window != 0).then_some(model.window); blocks_of(model.blocks)],
        heads: model.heads,
        groups: model.groups,
        head_size: model.head_size,
        rotary: Rotary {
            theta: model.theta,
            positions: count(sequence(config)),
            scaling: RotaryScaling::None,
        },
        eps: model.eps,
        qkv_bias: model.qkv_bias,
        output_bias: false,
        mlp_bias: false,
        experts: None,
        head_norms: model.head_norms,
        attention_dropout: model.attention_dropout,
        tied: model.tied,
        padding: None,
        std: 0.02,
    }
}

/// The number of blocks, or one that is refused as too many.
fn blocks_of(blocks: usize) -> usize {
    blocks.min(BLOCKS_MAX + 1)
}

/// The number of classes, which is that of the data. A configured number must be equal.
fn classes(configured: usize, found: usize) -> Result<usize, CliError> {
    if configured == 0 || configured == found {
        return Ok(found);
    }
    Err(CliError::Usage(format!(
        "model.classes is {configured}, and there are {found} classes: correct it, or leave it out"
    )))
}

/// The configured number of tokens or classes. `None` if only the data know it.
fn named_size(config: &Config) -> Result<Option<usize>, CliError> {
    let classes = |count: usize| (count > 0).then_some(count);
    Ok(match &config.model {
        Model::Transformer(model) => Some(model.vocabulary),
        Model::Llama(model) => Some(model.vocabulary),
        Model::HuggingFace(_) => {
            Some(usize::try_from(config.network()?.vocabulary()).unwrap_or_default())
        }
        Model::Translation(model) => Some(model.vocabulary),
        Model::AmoebaNet(model) => classes(model.classes),
        Model::ResNet(model) => classes(model.classes),
    })
}

/// A number of tokens or classes with which everything else can be checked before data are read.
/// The data may have fewer tokens.
pub(crate) fn expected_size(config: &Config) -> Result<usize, CliError> {
    /// No check depends on the number of tokens or classes.
    const ANY: usize = 300;
    // A tokenizer's file says how many tokens the model has, whatever is configured.
    if matches!(config.tokenizer(), Some(TokenizerChoice::File(_)))
        && !matches!(config.model, Model::HuggingFace(_))
    {
        return Ok(ANY);
    }
    Ok(named_size(config)?.unwrap_or(ANY))
}

/// The number of tokens or classes of a plan: as configured, or else the classes of the data.
pub(crate) fn planned_size(config: &Config) -> Result<usize, CliError> {
    if named_size(config)?.is_none()
        && let Some(classes) = classification::classes_of_data(config)?
    {
        return Ok(classes);
    }
    configured_size(config)
}

/// The configured number of tokens or classes, for use without data.
pub(crate) fn configured_size(config: &Config) -> Result<usize, CliError> {
    if let Some(size) = named_size(config)? {
        return Ok(size);
    }
    // A profile would know the number of classes of the data.
    check_made(config)?;
    Err(CliError::Usage(
        "model.classes is 0: say how many classes the network has, with --set model.classes=N; a \
        plan takes the number from a profile, too, which gpipe profile measures"
            .into(),
    ))
}

/// The number of tokens of a sample or row. 0 unless the data are text or JSONL.
pub(crate) fn sequence(config: &Config) -> usize {
    match &config.data {
        Data::Text(data) => data.sequence,
        Data::Jsonl(data) => data.sequence,
        _ => 0,
    }
}

/// The shapes of the network's inputs for `samples` samples. For sentences, they have the maximum
/// length.
pub(crate) fn inputs(config: &Config, samples: usize) -> Vec<TensorSpec> {
    let samples = samples as i64;
    let tokens = |length: usize| TensorSpec::new([samples, length as i64], Kind::Int64);
    match &config.data {
        Data::Text(TextConfig { sequence, .. }) | Data::Jsonl(JsonlConfig { sequence, .. }) => {
            vec![tokens(*sequence)]
        }
        Data::Parallel(data) => vec![tokens(data.length); 2],
        _ => {
            let size = config.images.size as i64;
            vec![TensorSpec::new([samples, 3, size, size], kind(config))]
        }
    }
}

/// The dtype of the arithmetic.
pub(crate) fn kind(config: &Config) -> Kind {
    match config.pipeline.dtype {
        Dtype::Float32 => Kind::Float,
        Dtype::Float64 => Kind::Double,
        Dtype::BFloat16 => Kind::BFloat16,
        Dtype::Float16 => Kind::Half,
    }
}

/// Adds the loss, the metrics, including [`NATS`], and the inputs by name to a pipeline, which is
/// built for micro-batches of `samples`.
pub(crate) fn with_measures(
    builder: PipelineBuilder,
    config: &Config,
    samples: usize,
) -> PipelineBuilder {
    let label_smoothing = config.train.label_smoothing;
    let loss = CrossEntropy { label_smoothing, ..CrossEntropy::default() };
    let builder = match &config.model {
        Model::AmoebaNet(model) if model.auxiliary != 0.0 => {
            builder.loss(WithAuxiliary { loss, weight: model.auxiliary })
        }
        _ => match balances_experts(config) {
            Some((weight, top_k)) => builder.loss(BalancedExperts { loss, weight, top_k }),
            None => builder.loss(loss),
        },
    };
    let builder = builder.metric(Nats);
    match config.data {
        Data::Text(_) => builder.metric(Accuracy::default()),
        Data::Jsonl(_) => jsonl::with_rows(builder, config, samples).metric(Accuracy::default()),
        Data::Parallel(_) => {
            let ignore = Some(CrossEntropy::default().ignore);
            let padding = Padding { inputs: vec![Some(PAD); 2], targets: vec![ignore] };
            builder.padding(padding).metric(Accuracy::default())
        }
        _ => builder.metric(TopK::new(1)).metric(TopK::new(5)),
    }
}

/// What the training loss contains beside the cross entropy, which evaluations report.
pub(crate) fn beside_nats(config: &Config) -> Option<&'static str> {
    let has_auxiliary = matches!(&config.model, Model::AmoebaNet(own) if own.auxiliary != 0.0);
    match (config.train.label_smoothing > 0.0, has_auxiliary, balances_experts(config).is_some()) {
        (true, true, _) => Some("label smoothing and the auxiliary head"),
        (true, _, true) => Some("label smoothing and the balance of experts"),
        (true, ..) => Some("label smoothing"),
        (_, true, _) => Some("the auxiliary head"),
        (_, _, true) => Some("the balance of experts"),
        _ => None,
    }
}

/// The weight of the loss that balances the experts, and the number of experts of a token, if the
/// model has such a loss.
fn balances_experts(config: &Config) -> Option<(f64, i64)> {
    let Model::HuggingFace(_) = &config.model else { return None };
    match config.network() {
        Ok(Network::Llama(Llama { experts: Some(own), .. })) if own.balance > 0.0 => {
            Some((own.balance, own.top_k))
        }
        _ => None,
    }
}

/// The name of [`Nats`].
pub(crate) const NATS: &str = "nats";

/// The cross entropy without label smoothing and auxiliary heads. Evaluations report it whatever
/// the training loss is.
struct Nats;

impl Metric for Nats {
    fn name(&self) -> &str {
        NATS
    }

    fn sum(&self, outputs: &[Tensor], targets: &[Tensor]) -> Result<f64, LayerError> {
        let first = &outputs[..outputs.len().min(1)];
        Ok(CrossEntropy::default()
            .sum(&LossContext::default(), first, targets)?
            .f_double_value(&[])?)
    }

    fn by_rows(&self) -> bool {
        true
    }

    fn count(&self, targets: &[Tensor]) -> Result<f64, LayerError> {
        CrossEntropy::default().count(&LossContext::default(), targets)
    }
}

/// The model's outputs, without dropout.
///
/// For int64 tokens [samples, positions] they are [samples, positions, vocabulary]. For images
/// [samples, channels, height, width] they are [samples, classes].
pub(crate) fn logits(
    pipeline: &mut Pipeline,
    inputs: impl IntoTensors,
) -> Result<Tensor, CliError> {
    let first = pipeline.predict(inputs)?.into_iter().next();
    first.ok_or_else(|| CliError::Usage("the model has no output".into()))
}
