//! Builds a pipeline from a configuration, and reads weights into it.

use std::{collections::HashMap, path::Path, time::Duration};

use gpipe::{
    Adafactor, Adam, Decay, Group, Kernels, LearningRate, Moments, Pipeline, PipelineBuilder,
    RmsForm, RmsProp, Sequence, Sgd, state::ParameterOutline,
};

use gpipe_checkpoint::{TensorSet, fit::Fit};

use crate::{
    CliError,
    config::{
        Config, Decays, GroupConfig, KernelChoice, MomentsChoice, OnUnreadableChoice,
        OptimizerConfig, OptimizerName,
    },
    faults,
    processes::Processes,
    task::{self, Task, Vocabulary},
};

/// Opens the data as [`task::open`] does, after everything has been checked that can be without
/// them.
pub(crate) fn open(config: &Config, given: Option<Vocabulary>) -> Result<Box<dyn Task>, CliError> {
    check(config, given.as_ref())?;
    task::open(config, given)
}

/// Checks the network, its cut, the schedule and all settings of the pipeline. Reads no data and
/// builds nothing.
///
/// `given` is the vocabulary of an earlier training, if there was one.
pub(crate) fn check(config: &Config, given: Option<&Vocabulary>) -> Result<(), CliError> {
    // An order that is still to be made will fit.
    let config = config.before_order();
    let size = given.map_or_else(|| task::expected_size(&config), |given| Ok(given.size()))?;
    let model = task::model(&config, size)?;
    Ok(pipeline(&config, model)?.check()?)
}

/// Refuses to skip unreadable images in several processes, since they might skip different ones.
pub(crate) fn check_images(config: &Config, processes: &Processes) -> Result<(), CliError> {
    if processes.are_several() && config.images.on_unreadable == OnUnreadableChoice::Skip {
        return Err(CliError::Usage(
            "images.on_unreadable = \"skip\": what one of several processes cannot read others \
            may, and their mini-batches would differ: use \"stop\""
                .into(),
        ));
    }
    Ok(())
}

/// The configured pipeline among the given processes. With several replicas, it is one of them.
pub(crate) fn pipeline_among(
    config: &Config,
    model: Sequence,
    processes: &Processes,
) -> Result<PipelineBuilder, CliError> {
    let builder = replica(config, model, processes)?;
    match processes.replicas() {
        Some(replicas) if config.pipeline.shard_optimizer => {
            Ok(builder.replicas(replicas).shard_optimizer())
        }
        Some(replicas) => Ok(builder.replicas(replicas)),
        None => Ok(builder),
    }
}

/// Like [`pipeline_among`], but without the other replicas: all samples that it receives are its
/// own.
pub(crate) fn replica(
    config: &Config,
    model: Sequence,
    processes: &Processes,
) -> Result<PipelineBuilder, CliError> {
    let builder = pipeline(config, model)?;
    match processes.transport() {
        Some(transport) => Ok(builder.processes(transport).links(config.pipeline.links)),
        None => Ok(builder),
    }
}

/// The configured pipeline in a single process.
pub(crate) fn pipeline(config: &Config, model: Sequence) -> Result<PipelineBuilder, CliError> {
    let (pipeline, optimizer) = (&config.pipeline, &config.optimizer);
    // Cuts by cost are made for the micro-batch size that the stages will see.
    let parts = pipeline.micro_batches.saturating_mul(pipeline.replicas).max(1);
    let samples = config.train.mini_batch.div_ceil(parts).max(1);
    let builder = Pipeline::builder(model, task::inputs(config, samples));
    let mut builder = task::with_measures(builder, config, samples)
        .devices(match &pipeline.devices.0[..] {
            [device] => vec![*device; pipeline.stages],
            devices => devices.to_vec(),
        })
        .kind(task::kind(config))
        .kernels(kernels(config))
        .micro_batches(pipeline.micro_batches)
        .schedule(pipeline.schedule.schedule()?)
        .balance(pipeline.balance.clone())
        .remat(pipeline.remat.clone())
        .threads_per_stage(pipeline.threads_per_stage)
        .timeout(Duration::from_secs(pipeline.timeout_s))
        .seed(config.seed);
    if !pipeline.offload_folder.as_os_str().is_empty() {
        builder = builder.offload_folder(&pipeline.offload_folder);
    }
    if !pipeline.memory.0.is_empty() {
        builder = builder.memory_cap(pipeline.memory.0.clone());
    }
    if pipeline.loss_rows > 0 {
        builder = builder.loss_rows(pipeline.loss_rows);
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
    let builder = builder.learning_rate(learning_rate(config));
    Ok(faults::actions(with_optimizer(builder, optimizer)))
}

/// The configured kernels.
pub(crate) fn kernels(config: &Config) -> Kernels {
    match config.pipeline.kernels {
        KernelChoice::Fastest => Kernels::fastest(),
        KernelChoice::Aten => Kernels::Aten,
        KernelChoice::ChannelsLast => Kernels::ChannelsLast,
        KernelChoice::OneDnn => Kernels::OneDnn,
    }
}

/// Reads what fits, one tensor at a time. Of several processes, each reads the tensors of its
/// stages.
pub(crate) fn read_weights(
    pipeline: &mut Pipeline,
    fit: &Fit,
    file: &mut TensorSet,
) -> Result<(), CliError> {
    let mut kinds = HashMap::new();
    for layer in pipeline.outline() {
        let of = |own: ParameterOutline| (format!("{}.{}", layer.layer, own.name), own.kind);
        kinds.extend(layer.parameters.into_iter().map(of));
    }
    let kind = |name: &str| kinds.get(name).copied().unwrap_or(tch::Kind::Float);
    let here = pipeline.parameters_here();
    let is_here = |name: &str| here.contains(name);
    let path = file.path().to_owned();
    for loaded in fit.read(file, kind, is_here)? {
        let (name, tensor) = loaded?;
        check_finite(&path, &name, &tensor)?;
        pipeline.set_parameters(&[(name, tensor)])?;
    }
    Ok(())
}

/// Refuses a tensor of weights that no training or generation could use.
fn check_finite(path: &Path, name: &str, tensor: &tch::Tensor) -> Result<(), CliError> {
    let _no_grad = tch::no_grad_guard();
    let count = || -> Result<i64, tch::TchError> {
        let finite = tensor.f_isfinite()?.f_sum(tch::Kind::Int64)?;
        Ok(tensor.numel() as i64 - finite.f_int64_value(&[])?)
    };
    // A tensor that cannot be counted fails where it is used.
    match count() {
        Ok(0) | Err(_) => Ok(()),
        Ok(bad) => Err(CliError::Usage(format!(
            "{}: {bad} of the {} elements of {name} are NaN or infinite: the file is damaged, or \
            its training diverged: take an earlier checkpoint or other weights",
            path.display(),
            tensor.numel()
        ))),
    }
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
            moments: match adam.moments {
                MomentsChoice::Float32 => Moments::Full,
                MomentsChoice::BFloat16 => Moments::BFloat16,
            },
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
        // The last step's rate is just above the floor, which the step after it would have.
        Decays::Cosine => Decay::Cosine { steps, floor: optimizer.decay_floor },
        Decays::InverseSqrt => Decay::InverseSquareRoot,
        Decays::Exponential => {
            Decay::Exponential { rate: optimizer.decay_rate, every: optimizer.decay_every }
        }
    };
    LearningRate { warmup_steps: optimizer.warmup_steps.min(steps), decay }
}
