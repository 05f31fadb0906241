//! What a model is trained for: the data, what its numbers mean, and what is measured.
//!
//! - [`language`]: the next token of a text
//! - [`translation`]: the English of sentences in many languages
//! - [`classification`]: the class of an image
//! - [`pinned`]: a text that is told by its content
//! - [`vocabulary`]: what a trained model's numbers mean: its tokens, or its classes
//! - here: what both have in common, and the choice between them

pub(crate) mod classification;
pub(crate) mod language;
mod pinned;
pub(crate) mod translation;
mod vocabulary;

use std::ops::Range;

use gpipe::{
    Accuracy, CrossEntropy, IntoTensors, LayerError, Loss, Metric, Padding, Pipeline,
    PipelineBuilder, Sequence, TensorSpec, TopK, WithAuxiliary,
};
use gpipe_models::{AmoebaNet, ResNet, Transformer, Variant};
use tch::{Kind, Tensor};

pub(crate) use self::vocabulary::{TOKENIZER, Vocabulary};
use self::{
    classification::Classification,
    language::Language,
    translation::{PAD, Translation},
};
use crate::{
    CliError,
    config::{Config, Data, Dtype, Model, VariantName},
};

/// A mini-batch.
pub(crate) struct Batch {
    pub inputs: Vec<Tensor>,
    pub targets: Tensor,
    pub samples: u64,
}

/// An error of the thread that makes batches.
pub(crate) type BatchError = Box<dyn std::error::Error + Send + Sync>;
/// Makes the mini-batch of a number.
pub(crate) type MakeBatch = Box<dyn Fn(u64) -> Result<Batch, BatchError> + Send>;
/// Of every sample everything.
pub(crate) const ALL: Range<usize> = 0..usize::MAX;
/// Mini-batches in order.
pub(crate) type Batches<'a> = Box<dyn Iterator<Item = Result<Batch, CliError>> + 'a>;

/// Held-out data that are measured on their own.
pub(crate) struct Part<'a> {
    /// What it is called, where there are several.
    pub name: Option<String>,
    pub batches: Batches<'a>,
}

impl<'a> Part<'a> {
    /// The only one.
    pub(crate) fn all(batches: Batches<'a>) -> Vec<Self> {
        vec![Self { name: None, batches }]
    }
}

/// Data to train on and to measure with.
pub(crate) trait Task {
    /// What they are: a line for each source, with what was left out of it, and one for what became
    /// of them.
    fn summary(&self) -> &str;

    /// What they mean.
    fn vocabulary(&self) -> &Vocabulary;

    /// What tells training data from others.
    fn fingerprint(&self) -> String;

    /// The mini-batches of training, of which the first `batches` had `samples`: a function of the
    /// seed and the number. Of samples outside of `fed` only the targets need be true.
    fn training(
        &self,
        batches: u64,
        samples: u64,
        fed: Range<usize>,
    ) -> Result<MakeBatch, CliError>;

    /// What is held out, in order, as much of it as the configuration says. Unless this process is
    /// `fed`, only the targets need be true.
    fn validation(&self, fed: bool) -> Result<Vec<Part<'_>>, CliError>;

    /// The loss in bits per byte of the data held out, where they are bytes.
    fn bits_per_byte(&self, _nats: f64) -> Option<f64> {
        None
    }

    /// Samples that could not be read and were left out so far, and why.
    fn unreadable(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// Reads the data that the configuration names. `given` is what an earlier training made of them,
/// if there was one; else tokens are those of the file that the configuration names, if it names
/// one.
pub(crate) fn open(config: &Config, given: Option<Vocabulary>) -> Result<Box<dyn Task>, CliError> {
    let given = match given {
        Some(given) => Some(given),
        None => Vocabulary::configured(config)?,
    };
    check_made(config)?;
    Ok(match &config.data {
        Data::Text(data) => Box::new(Language::open(config, data, given)?),
        Data::Parallel(data) => Box::new(Translation::open(config, data, given)?),
        _ => Box::new(Classification::open(config, given)?),
    })
}

/// Folders that a recipe of `configs/` names, and what makes them.
const MADE: &[(&str, &str)] = &[
    ("data/translations", "make catalogues"),
    ("data/letters", "make fonts"),
    ("data/digits", "make fonts"),
];

/// An error if the data are a folder that is yet to be made.
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

/// The mini-batch of a number, made here and now.
pub(crate) fn made(make: &MakeBatch, number: u64) -> Result<Batch, CliError> {
    make(number).map_err(|source| gpipe_data::Error::Loader { step: number, source }.into())
}

/// What one target is called.
pub(crate) fn unit(config: &Config) -> &'static str {
    match config.data {
        Data::Text(_) | Data::Parallel(_) => "token",
        _ => "image",
    }
}

/// The network, for `size` tokens or classes.
pub(crate) fn model(config: &Config, size: usize) -> Result<Sequence, CliError> {
    let count = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
    const COLOURS: i64 = 3;
    Ok(match &config.model {
        Model::Transformer(model) => Transformer {
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
        }
        .build()?,
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

/// As many classes as the data have; the configuration may say so, too.
fn classes(configured: usize, found: usize) -> Result<usize, CliError> {
    if configured == 0 || configured == found {
        return Ok(found);
    }
    Err(CliError::Usage(format!(
        "model.classes is {configured}, and there are {found} classes: correct it, or leave it out"
    )))
}

/// What the network's numbers are for, where no data say it: as configured.
pub(crate) fn configured_size(config: &Config) -> Result<usize, CliError> {
    let classes = match &config.model {
        Model::Transformer(model) => return Ok(model.vocabulary),
        Model::Translation(model) => return Ok(model.vocabulary),
        Model::AmoebaNet(model) => model.classes,
        Model::ResNet(model) => model.classes,
    };
    if classes > 0 {
        return Ok(classes);
    }
    Err(CliError::Usage("model.classes is 0: say how many classes the network has".into()))
}

/// Tokens of a sample; 0 for images.
pub(crate) fn sequence(config: &Config) -> usize {
    match &config.data {
        Data::Text(data) => data.sequence,
        _ => 0,
    }
}

/// The inputs of the network, of so many samples; of sentences the longest.
pub(crate) fn inputs(config: &Config, samples: usize) -> Vec<TensorSpec> {
    let samples = samples as i64;
    let tokens = |length: usize| TensorSpec::new([samples, length as i64], Kind::Int64);
    match &config.data {
        Data::Text(data) => vec![tokens(data.sequence)],
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

/// Which metrics a pipeline has besides [`NATS`], for `size` tokens or classes.
pub(crate) fn with_measures(builder: PipelineBuilder, config: &Config) -> PipelineBuilder {
    let label_smoothing = config.train.label_smoothing;
    let loss = CrossEntropy { label_smoothing, ..CrossEntropy::default() };
    let builder = match &config.model {
        Model::AmoebaNet(model) if model.auxiliary != 0.0 => {
            builder.loss(WithAuxiliary { loss, weight: model.auxiliary })
        }
        _ => builder.loss(loss),
    };
    let builder = builder.metric(Nats);
    match config.data {
        Data::Text(_) => builder.metric(Accuracy::default()),
        Data::Parallel(_) => {
            let ignore = Some(CrossEntropy::default().ignore);
            let padding = Padding { inputs: vec![Some(PAD); 2], targets: vec![ignore] };
            builder.padding(padding).metric(Accuracy::default())
        }
        _ => builder.metric(TopK::new(1)).metric(TopK::new(5)),
    }
}

/// The name of [`Nats`].
pub(crate) const NATS: &str = "nats";

/// The cross entropy without label smoothing and auxiliary heads: what evaluations report, whatever
/// was trained on.
struct Nats;

impl Metric for Nats {
    fn name(&self) -> &str {
        NATS
    }

    fn sum(&self, outputs: &[Tensor], targets: &[Tensor]) -> Result<f64, LayerError> {
        let first = &outputs[..outputs.len().min(1)];
        Ok(CrossEntropy::default().sum(first, targets)?.f_double_value(&[])?)
    }

    fn count(&self, targets: &[Tensor]) -> Result<f64, LayerError> {
        CrossEntropy::default().count(targets)
    }
}

/// The model's outputs, without dropout: for int64 tokens [samples, positions] [samples, positions,
/// vocabulary], for images [samples, channels, height, width] [samples, classes].
pub(crate) fn logits(
    pipeline: &mut Pipeline,
    inputs: impl IntoTensors,
) -> Result<Tensor, CliError> {
    let first = pipeline.predict(inputs)?.into_iter().next();
    first.ok_or_else(|| CliError::Usage("the model has no output".into()))
}
