//! From a configuration to text, tokens, a model and a pipeline.

use std::{path::PathBuf, time::Duration};

use gpipe::{
    Accuracy, Adafactor, Adam, CrossEntropy, Decay, Group, Kernels, LayerError, LearningRate, Loss,
    Metric, Pipeline, PipelineBuilder, RmsForm, RmsProp, Sequence, Sgd, TensorSpec,
};
use gpipe_checkpoint::manifest::sha256;
use gpipe_data::{Batch, Corpus, Limits, TokenSet, Tokenizer};
use gpipe_models::Transformer;
use tch::{Kind, Tensor};

use crate::{
    CliError,
    config::{Config, Decays, Dtype, GroupConfig, KernelChoice, OptimizerConfig, OptimizerName},
};

/// Text as tokens.
pub(crate) struct Text {
    pub tokenizer: Tokenizer,
    pub train: TokenSet,
    pub validation: TokenSet,
    /// What it is, in a line.
    pub summary: String,
}

/// Reads the text and encodes both parts with `tokenizer`; without one, with one trained on its training part.
pub(crate) fn text(config: &Config, tokenizer: Option<Tokenizer>) -> Result<Text, CliError> {
    let (corpus, what) = corpus(config)?;
    let tokenizer = match tokenizer {
        Some(tokenizer) => tokenizer,
        None => Tokenizer::train(&corpus.train, config.model.vocabulary)?,
    };
    let train = if config.data.shuffle_documents {
        TokenSet::encode_shuffled(&tokenizer, &corpus.train, config.seed)?
    } else {
        TokenSet::encode(&tokenizer, &corpus.train)?
    };
    let validation = TokenSet::encode(&tokenizer, &corpus.validation)?;
    let summary = format!(
        "{what}: {} training tokens, {} validation tokens, vocabulary {}",
        train.tokens.len(),
        validation.tokens.len(),
        tokenizer.vocabulary()
    );
    Ok(Text { tokenizer, train, validation, summary })
}

/// Tokens that are hashed at once.
const TOKENS_HASHED: usize = 1 << 20;

/// What tells training data from others: the SHA-256 of the SHA-256 of each part of its tokens, in order.
pub(crate) fn fingerprint(tokens: &TokenSet) -> String {
    let part = |part: &[u32]| {
        let bytes: Vec<u8> = part.iter().flat_map(|token| token.to_le_bytes()).collect();
        sha256(&bytes)
    };
    sha256(tokens.tokens.chunks(TOKENS_HASHED).map(part).collect::<String>().as_bytes())
}

/// Reads the text and splits it; with it, what it is.
pub(crate) fn corpus(config: &Config) -> Result<(Corpus, String), CliError> {
    let data = &config.data;
    let limits = Limits {
        train_bytes: data.train_bytes.0,
        validation_bytes: data.validation_bytes.0,
        per_crate_bytes: data.crate_bytes.0,
    };
    if data.text.is_empty() {
        if !data.cargo_lock.exists() {
            return Err(CliError::Usage(format!(
                "there is no {} here, whose crates' sources would be the text: run in gpipe's own folder, or name your text with --text PATH",
                data.cargo_lock.display()
            )));
        }
        let corpus = Corpus::from_cargo_sources(&data.cargo_lock, &registry_sources()?, &limits)?;
        return Ok((corpus, "Rust sources of this workspace's dependencies".to_owned()));
    }
    let names: Vec<String> = data.text.iter().map(|path| path.display().to_string()).collect();
    Ok((Corpus::from_paths(&data.text, &limits)?, names.join(", ")))
}

/// Where cargo keeps the sources that it fetched.
fn registry_sources() -> Result<PathBuf, CliError> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let home = home.ok_or_else(|| {
        CliError::Usage(
            "neither CARGO_HOME nor HOME is set: name your text with --text PATH".into(),
        )
    })?;
    Ok(home.join("registry").join("src"))
}

/// The model.
pub(crate) fn model(config: &Config, vocabulary: usize) -> Result<Sequence, CliError> {
    let model = &config.model;
    let size = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
    let transformer = Transformer {
        vocabulary: size(vocabulary),
        positions: size(config.data.sequence),
        features: model.features,
        heads: model.heads,
        hidden: model.hidden,
        blocks: model.blocks,
        dropout: model.dropout,
        attention_dropout: model.attention_dropout,
        tied: model.tied,
        split_blocks: model.split_blocks,
    };
    Ok(transformer.build()?)
}

/// A pipeline with everything that the configuration says.
pub(crate) fn pipeline(config: &Config, model: Sequence) -> PipelineBuilder {
    let (pipeline, optimizer) = (&config.pipeline, &config.optimizer);
    // Cuts by cost are for the micro-batches that the stages will see.
    let samples = config.train.mini_batch.div_ceil(pipeline.micro_batches.max(1)).max(1);
    let shape = [samples as i64, config.data.sequence as i64];
    let mut builder = Pipeline::builder(model, TensorSpec::new(shape, Kind::Int64))
        .devices(match &pipeline.devices.0[..] {
            [device] => vec![*device; pipeline.stages],
            devices => devices.to_vec(),
        })
        .kind(match pipeline.dtype {
            Dtype::Float32 => Kind::Float,
            Dtype::Float64 => Kind::Double,
            Dtype::BFloat16 => Kind::BFloat16,
            Dtype::Float16 => Kind::Half,
        })
        .kernels(match pipeline.kernels {
            KernelChoice::Fastest => Kernels::fastest(),
            KernelChoice::Aten => Kernels::Aten,
            KernelChoice::OneDnn => Kernels::OneDnn,
        })
        .micro_batches(pipeline.micro_batches)
        .schedule(pipeline.schedule)
        .balance(pipeline.balance.clone())
        .remat(pipeline.remat)
        .threads_per_stage(pipeline.threads_per_stage)
        .deadline(Duration::from_secs(pipeline.deadline_s))
        .seed(config.seed)
        .loss(CrossEntropy {
            label_smoothing: config.train.label_smoothing,
            ..CrossEntropy::default()
        })
        .metric(Nats)
        .metric(Accuracy::default());
    if let Some(cap) = pipeline.memory.0 {
        builder = builder.memory_cap([cap]);
    }
    if optimizer.clip_norm > 0.0 {
        builder = builder.clip_norm(optimizer.clip_norm);
    }
    if optimizer.average > 0.0 {
        builder = builder.average(optimizer.average);
    }
    for group in &optimizer.groups {
        builder = builder.group(parameter_group(group));
    }
    with_optimizer(builder.learning_rate(learning_rate(config)), optimizer)
}

fn with_optimizer(builder: PipelineBuilder, optimizer: &OptimizerConfig) -> PipelineBuilder {
    let OptimizerConfig { lr, weight_decay, adam, sgd, rmsprop, adafactor, .. } = optimizer;
    let (lr, weight_decay) = (*lr, *weight_decay);
    match optimizer.name {
        OptimizerName::Adam | OptimizerName::AdamW => builder.optimizer(Adam {
            lr,
            beta1: adam.beta1,
            beta2: adam.beta2,
            eps: adam.eps,
            weight_decay,
            decoupled: optimizer.name == OptimizerName::AdamW,
        }),
        OptimizerName::Sgd => {
            let (momentum, nesterov) = (sgd.momentum, sgd.nesterov);
            builder.optimizer(Sgd { lr, momentum, nesterov, weight_decay })
        }
        OptimizerName::RmsProp => builder.optimizer(RmsProp {
            lr,
            decay: rmsprop.decay,
            momentum: rmsprop.momentum,
            eps: rmsprop.eps,
            weight_decay,
            form: if rmsprop.tensorflow { RmsForm::TensorFlow } else { RmsForm::PyTorch },
        }),
        OptimizerName::Adafactor => builder.optimizer(Adafactor {
            lr,
            beta2_decay: adafactor.beta2_decay,
            eps: adafactor.eps,
            clip_threshold: adafactor.clip_threshold,
            weight_decay,
        }),
    }
}

fn parameter_group(config: &GroupConfig) -> Group {
    let mut group = Group::matching(config.names.clone()).lr_scale(config.lr_scale);
    if let Some(weight_decay) = config.weight_decay {
        group = group.weight_decay(weight_decay);
    }
    if config.frozen { group.frozen() } else { group }
}

fn learning_rate(config: &Config) -> LearningRate {
    let (optimizer, steps) = (&config.optimizer, config.train.steps);
    let decay = match optimizer.decay {
        Decays::Constant => Decay::Constant,
        // The last step's rate is one before the floor: the floor is that of the step after it.
        Decays::Cosine => Decay::Cosine { steps, floor: optimizer.decay_floor },
        Decays::InverseSqrt => Decay::InverseSquareRoot,
        Decays::Exponential => {
            Decay::Exponential { rate: optimizer.decay_rate, every: optimizer.decay_every }
        }
    };
    LearningRate { warmup_steps: optimizer.warmup_steps.min(steps), decay }
}

/// A batch as tensors: inputs and targets, int64 [samples, sequence].
pub(crate) fn tensors(batch: &Batch) -> Result<(Tensor, Tensor), CliError> {
    let shape = [batch.samples as i64, batch.sequence as i64];
    let tensor = |values: &[i64]| Tensor::f_from_slice(values)?.f_reshape(shape);
    Ok((tensor(&batch.inputs)?, tensor(&batch.targets)?))
}

/// The name of [`Nats`].
pub(crate) const NATS: &str = "nats";

/// The cross entropy without label smoothing: what evaluations report, whatever was trained on.
struct Nats;

impl Metric for Nats {
    fn name(&self) -> &str {
        NATS
    }

    fn sum(&self, outputs: &[Tensor], targets: &[Tensor]) -> Result<f64, LayerError> {
        Ok(CrossEntropy::default().sum(outputs, targets)?.f_double_value(&[])?)
    }

    fn count(&self, targets: &[Tensor]) -> Result<f64, LayerError> {
        CrossEntropy::default().count(targets)
    }
}
