//! The configuration's tables and their defaults: a key is a field here.

use gpipe::{Adafactor, Balance, Device, RematPolicies, RmsProp, Schedule};
use serde::{Deserialize, Serialize};

use crate::values::ScheduleChoice;

use super::{
    data::{Data, ImagesConfig},
    model::Model,
};
use crate::values::{
    Caps, Decays, Devices, Dtype, Every, KernelChoice, OnNan, OptimizerName, as_text,
};

/// Everything that determines a run. Every key has a default, so a file names only what differs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// Seed of initial values, dropout and data order.
    pub seed: u64,
    pub model: Model,
    pub data: Data,
    pub images: ImagesConfig,
    pub pipeline: PipelineConfig,
    pub optimizer: OptimizerConfig,
    pub train: Train,
    pub checkpoint: CheckpointConfig,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct PipelineConfig {
    pub stages: usize,
    pub micro_batches: usize,
    /// Of the whole pipeline, each on its part of every mini-batch.
    pub replicas: usize,
    #[serde(with = "as_text")]
    pub schedule: ScheduleChoice,
    #[serde(with = "as_text")]
    pub balance: Balance,
    #[serde(with = "as_text")]
    /// One for all stages, or one per stage.
    pub remat: RematPolicies,
    /// One for all stages, or one per stage.
    #[serde(with = "as_text")]
    pub devices: Devices,
    #[serde(with = "as_text")]
    pub dtype: Dtype,
    #[serde(with = "as_text")]
    pub kernels: KernelChoice,
    pub threads_per_stage: usize,
    /// One for all stages, or one per stage.
    #[serde(with = "as_text")]
    pub memory: Caps,
    /// Whether to run though the threads or the bytes of a step are more than the machine has.
    pub oversubscribe: bool,
    pub timeout_s: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct OptimizerConfig {
    #[serde(with = "as_text")]
    pub name: OptimizerName,
    pub lr: f64,
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 for no clipping.
    pub clip_norm: f64,
    /// Steps over which the rate rises linearly.
    pub warmup_steps: u64,
    /// After the warm-up.
    #[serde(with = "as_text")]
    pub decay: Decays,
    /// The cosine's last rate, as a share of the first.
    pub decay_floor: f64,
    /// The exponential's factor ...
    pub decay_rate: f64,
    /// ... for every so many steps.
    pub decay_every: u64,
    /// Decay of the moving averages of the weights; 0 for none.
    pub average: f64,
    /// The first that matches a parameter holds.
    pub groups: Vec<GroupConfig>,
    pub adam: AdamConfig,
    pub sgd: SgdConfig,
    pub rmsprop: RmsPropConfig,
    pub adafactor: AdafactorConfig,
}

/// Parameters by name, with other settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GroupConfig {
    /// Full names, in which `*` is any text.
    pub names: Vec<String>,
    #[serde(default = "one")]
    pub lr_scale: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    #[serde(default)]
    pub frozen: bool,
}

fn one() -> f64 {
    1.0
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AdamConfig {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
pub(crate) struct SgdConfig {
    pub momentum: f64,
    pub nesterov: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RmsPropConfig {
    pub decay: f64,
    pub momentum: f64,
    pub eps: f64,
    /// TensorFlow's form, which the paper's networks were trained with, or PyTorch's.
    pub tensorflow: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AdafactorConfig {
    pub beta2_decay: f64,
    pub eps: f64,
    pub clip_threshold: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Train {
    pub steps: u64,
    /// Samples of a mini-batch.
    pub mini_batch: usize,
    /// Share of each target that is spread over all tokens or classes; 0 for none.
    pub label_smoothing: f64,
    /// Most tokens of the validation text that are evaluated.
    pub validation_tokens: usize,
    /// Steps between two validations on the way; 0 for only one at the end.
    pub validate_every: u64,
    /// Batches made ahead of the step.
    pub prefetch: usize,
    #[serde(with = "as_text")]
    pub on_nan: OnNan,
}

/// When checkpoints are saved, and which are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct CheckpointConfig {
    #[serde(with = "as_text")]
    pub every: Every,
    /// The newest so many.
    pub keep: usize,
    /// And the one of the lowest validation loss.
    pub keep_best: bool,
    /// Longest wait for one that is still being written.
    pub timeout_s: u64,
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            stages: 2,
            micro_batches: 4,
            replicas: 1,
            schedule: ScheduleChoice::Named(Schedule::OneFOneB),
            balance: Balance::Cost,
            remat: RematPolicies::default(),
            devices: Devices(vec![Device::Cpu]),
            dtype: Dtype::Float32,
            kernels: KernelChoice::Fastest,
            threads_per_stage: 1,
            memory: Caps::default(),
            oversubscribe: false,
            timeout_s: 300,
        }
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            name: OptimizerName::Adam,
            lr: 1e-3,
            weight_decay: 0.0,
            clip_norm: 1.0,
            warmup_steps: 20,
            decay: Decays::Cosine,
            decay_floor: 0.1,
            decay_rate: 0.5,
            decay_every: 1000,
            average: 0.0,
            groups: Vec::new(),
            adam: AdamConfig::default(),
            sgd: SgdConfig::default(),
            rmsprop: RmsPropConfig::default(),
            adafactor: AdafactorConfig::default(),
        }
    }
}

impl Default for AdamConfig {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.98, eps: 1e-8 }
    }
}

impl Default for RmsPropConfig {
    fn default() -> Self {
        let RmsProp { decay, momentum, eps, .. } = RmsProp::default();
        Self { decay, momentum, eps, tensorflow: true }
    }
}

impl Default for AdafactorConfig {
    fn default() -> Self {
        let Adafactor { beta2_decay, eps, clip_threshold, .. } = Adafactor::default();
        Self { beta2_decay, eps, clip_threshold }
    }
}

impl Default for Train {
    fn default() -> Self {
        Self {
            steps: 300,
            mini_batch: 16,
            label_smoothing: 0.0,
            validation_tokens: 65_536,
            validate_every: 0,
            prefetch: 2,
            on_nan: OnNan::Stop,
        }
    }
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: Every::default(), keep: 2, keep_best: false, timeout_s: 600 }
    }
}
