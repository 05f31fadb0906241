//! The configuration's tables and their defaults. Each field is a key.

use std::path::PathBuf;

use gpipe::{Adafactor, Balance, Device, Lora, RematPolicies, RmsProp, Schedule, processes::Links};
use serde::{Deserialize, Serialize};

use crate::values::ScheduleChoice;

use super::{
    data::{Data, ImagesConfig},
    model::Model,
};
use crate::values::{
    Caps, Decays, Devices, Dtype, Every, KernelChoice, MomentsChoice, OnNan, OptimizerName, as_text,
};

/// Everything that determines a run. Every key has a default, so a file names only what differs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// Seed of the initial values, dropout and the data order.
    pub seed: u64,
    /// The network.
    pub model: Model,
    /// Low-rank adapters, which are trained in place of the model.
    pub lora: LoraConfig,
    /// The data to learn from.
    pub data: Data,
    /// How images are read, augmented and presented to the network.
    pub images: ImagesConfig,
    /// How the network is split and run.
    pub pipeline: PipelineConfig,
    /// The update rule, the learning rate and its schedule.
    pub optimizer: OptimizerConfig,
    /// The length of the training, its mini-batches and its validations.
    pub train: Train,
    /// When checkpoints are saved, and which are kept.
    pub checkpoint: CheckpointConfig,
}

/// Low-rank adapters (Hu et al. 2021). They freeze the base model, whose weights are then stored
/// only in the dtype of the arithmetic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LoraConfig {
    /// Rank of the adapters. 0 trains the whole model without adapters.
    pub rank: i64,
    /// Numerator of the factor `alpha / rank` on an adapter's output. 0 stands for twice the rank.
    pub alpha: f64,
    /// Dropout probability of the adapters' inputs.
    pub dropout: f64,
    /// Linear layers that get an adapter: patterns of whole names, such as
    /// `model.layers.0.self_attn.q_proj`, or of their last part, such as `q_proj`. `*` matches any
    /// text. Embeddings, the output layer and experts get no adapter.
    pub targets: Vec<String>,
}

/// How the network is split and run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct PipelineConfig {
    /// Number of pipeline stages K, or of devices K if the schedule puts several stages on each.
    pub stages: usize,
    /// Number of micro-batches M per mini-batch.
    pub micro_batches: usize,
    /// Number of copies of the whole pipeline, each of which trains on its part of every
    /// mini-batch. They are threads of one process, or the number of processes is a multiple of it.
    pub replicas: usize,
    /// Whether the replicas divide the optimizer state. Each replica then stores and updates the
    /// state of a part of every stage's parameters, and sends the updated parameters to the other
    /// replicas. Results and checkpoints are the same. With one replica it has no effect.
    pub shard_optimizer: bool,
    /// Pipeline schedule: `gpipe`, `1f1b`, `zb-h1`, two stages on each device under `zb-v`,
    /// `v-half` and `v-min`, V stages on each under `interleaved:V`, `interleaved-zb:V` and
    /// `breadth-first:V`, or `file:PATH`. `auto` measures the layers and makes an order for them,
    /// for the configured K, M and re-materialization.
    #[serde(with = "as_text")]
    pub schedule: ScheduleChoice,
    /// How layers are assigned to stages: by estimated `cost`, `uniform` (the same number of layers
    /// each), or the layers per stage, such as `3,5`.
    #[serde(with = "as_text")]
    pub balance: Balance,
    /// Which activations are discarded and recomputed before the backward: one policy for all
    /// stages, or one per stage such as `keep:2,never`. `always` and `never` apply to every
    /// forward. `unless-adjacent` recomputes where a backward does not directly follow its forward.
    /// `selective` is like `unless-adjacent`, but keeps the outputs of matrix products and
    /// convolutions. `keep:N` is like `unless-adjacent`, but lets up to N more micro-batches at a
    /// time keep their activations. `segments:N` recomputes a stage in N segments, one at a time.
    /// `offload` is like `unless-adjacent`, but moves activations to a file and back instead of
    /// recomputing them. On a GPU they go to the host's memory. `gpipe plan` chooses a policy for
    /// each stage.
    #[serde(with = "as_text")]
    pub remat: RematPolicies,
    /// Folder of the files that `offload` writes activations to, such as one on a fast disk. The
    /// files have no names and vanish with the process. Empty means the system's temporary folder,
    /// which may itself be in memory.
    pub offload_folder: PathBuf,
    /// Devices: one for all stages, or a list, such as `cuda:0,cuda:0,cpu`. Each has one stage, or
    /// as many as the schedule puts on each.
    #[serde(with = "as_text")]
    pub devices: Devices,
    /// Dtype of the arithmetic: `float32`, `float64`, or `bfloat16` or `float16` with float32
    /// weights, or for short `fp32`, `fp64`, `bf16` or `fp16`. With `[lora]`, the frozen weights
    /// have the dtype of the arithmetic, too.
    #[serde(with = "as_text")]
    pub dtype: Dtype,
    /// CPU kernels. `aten` uses libtorch's operations throughout. `channels-last` uses libtorch's
    /// matrix products, images in channels-last layout, and gpipe's kernels for attention, RMSNorm,
    /// SwiGLU and rotary positions. `onednn` is like `channels-last` with oneDNN's matrix products
    /// in float32, which are up to twice as fast where MKL lacks AVX-512. `fastest` chooses for
    /// this machine.
    #[serde(with = "as_text")]
    pub kernels: KernelChoice,
    /// Number of rows (positions of samples) of the output layer and the loss to compute at a time.
    /// The logits of a whole micro-batch are then never in memory. In float32 they take 4 bytes per
    /// token of the vocabulary and row, and the loss holds several copies. 0 computes all rows at
    /// once.
    pub loss_rows: usize,
    /// Number of CPU threads of each stage.
    pub threads_per_stage: usize,
    /// Maximum memory of a device's tensors: one size for all devices, or one per device, such as
    /// `1GiB,512MiB`. `none` sets no limit. The CPU allocator enforces it; on a GPU, a layer that
    /// exceeds it fails.
    #[serde(with = "as_text")]
    pub memory: Caps,
    /// Whether to run even if a stage's threads or the memory of a step exceed what the machine
    /// has. Without it, such a run is refused before its first step.
    pub oversubscribe: bool,
    /// How values pass between processes. `gloo` takes them through the memory of the CPU. `nccl`
    /// takes them from GPU to GPU; each process then has one device, a GPU. One process ignores it.
    #[serde(with = "as_text")]
    pub links: Links,
    /// Maximum time, in seconds, without a sign of life from a stage or another process before the
    /// step fails.
    pub timeout_s: u64,
}

/// The update rule, the learning rate and its schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct OptimizerConfig {
    /// Update rule: `adam`, `adamw`, `sgd`, `rmsprop` or `adafactor`. Each has a table for its
    /// constants, such as `[optimizer.adam]`; `adamw` shares that of `adam`.
    #[serde(with = "as_text")]
    pub name: OptimizerName,
    /// Learning rate at the end of the warm-up.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Maximum global gradient norm. 0 turns clipping off.
    pub clip_norm: f64,
    /// Number of steps over which the learning rate rises linearly.
    pub warmup_steps: u64,
    /// How the learning rate falls after the warm-up: `constant`, `cosine` (see `decay_floor`),
    /// `inverse-sqrt`, or `exponential` (see `decay_rate`).
    #[serde(with = "as_text")]
    pub decay: Decays,
    /// Learning rate at the end of the `cosine` decay, as a fraction of `lr`.
    pub decay_floor: f64,
    /// Factor by which the `exponential` decay multiplies the learning rate every `decay_every`
    /// steps.
    pub decay_rate: f64,
    /// Number of steps after which the `exponential` decay has multiplied the learning rate by
    /// `decay_rate`.
    pub decay_every: u64,
    /// Decay of the moving averages of the weights, such as 0.999, which are saved as
    /// `averages.safetensors`. 0 keeps no averages.
    pub average: f64,
    /// Parameters with other settings: `[[optimizer.groups]]` with `names` and, optionally,
    /// `weight_decay`, `lr_scale` and `frozen`. The first group that matches a parameter applies.
    pub groups: Vec<GroupConfig>,
    /// Constants of `adam` and `adamw`.
    pub adam: AdamConfig,
    /// Constants of `sgd`.
    pub sgd: SgdConfig,
    /// Constants of `rmsprop`.
    pub rmsprop: RmsPropConfig,
    /// Constants of `adafactor`.
    pub adafactor: AdafactorConfig,
}

/// Settings for parameters selected by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GroupConfig {
    /// Patterns of full parameter names (`layer.parameter`), in which `*` matches any text.
    pub names: Vec<String>,
    /// Factor on the learning rate.
    #[serde(default = "one")]
    pub lr_scale: f64,
    /// Weight decay. If absent, that of the optimizer applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Whether the parameters keep their initial values and are not trained.
    #[serde(default)]
    pub frozen: bool,
}

fn one() -> f64 {
    1.0
}

/// Constants of `adam` and `adamw`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AdamConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Constant added to the denominator.
    pub eps: f64,
    /// Dtype of the two stored moments: `float32`, or `bfloat16` in half the memory. Rounding to
    /// `bfloat16` is stochastic. The random numbers depend only on the seed, parameter, update and
    /// element. With `pipeline.dtype = "float64"`, `float32` stands for `float64`.
    #[serde(with = "as_text")]
    pub moments: MomentsChoice,
}

/// Constants of `sgd`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
pub(crate) struct SgdConfig {
    /// Momentum factor. 0 is plain SGD.
    pub momentum: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
}

/// Constants of `rmsprop`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RmsPropConfig {
    /// Decay of the mean square.
    pub decay: f64,
    /// Momentum factor. 0 turns momentum off.
    pub momentum: f64,
    /// Constant added under the square root (TensorFlow's form) or to the root (PyTorch's form).
    pub eps: f64,
    /// Whether to use TensorFlow's form instead of PyTorch's. AmoebaNet was trained with it (Real
    /// et al. 2019).
    pub tensorflow: bool,
}

/// Constants of `adafactor`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AdafactorConfig {
    /// Exponent of the second moment's decay, which is 1 - t^`beta2_decay` at update t.
    pub beta2_decay: f64,
    /// Lower bound of a parameter's root mean square, for parameters that start at 0.
    pub eps: f64,
    /// Maximum root mean square of an update.
    pub clip_threshold: f64,
}

/// The length of the training, its mini-batches and its validations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Train {
    /// Number of training steps.
    pub steps: u64,
    /// Number of samples in a mini-batch. With parallel text, `data.batch_tokens` sets the size
    /// instead, and this is the number of sentences that a plan assumes.
    pub mini_batch: usize,
    /// Fraction of each target that is spread over all tokens or classes. 0 turns it off.
    /// Validation measures without it.
    pub label_smoothing: f64,
    /// Maximum number of tokens that a validation measures. Of JSONL, it measures about as many, in
    /// rows that are spread evenly.
    pub validation_tokens: usize,
    /// Number of steps between two validations. 0 validates only at the end.
    pub validate_every: u64,
    /// Number of steps between two lines about the loss, the learning rate and the gradient's norm.
    /// 0 prints about a dozen lines in a run, and without a terminal one every minute at least.
    pub log_every: u64,
    /// Number of batches prepared ahead of the step.
    pub prefetch: usize,
    /// What to do when a loss or gradient is not finite. `stop` ends the run. `skip` skips that
    /// mini-batch; more than ten in a row end the run.
    #[serde(with = "as_text")]
    pub on_nan: OnNan,
}

/// When checkpoints are saved, and which are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct CheckpointConfig {
    /// Interval between checkpoints: a number of steps (`50`) or a time (`90s`, `10min`, `2h`).
    /// `none` saves only when the run is ended early.
    #[serde(with = "as_text")]
    pub every: Every,
    /// Number of checkpoints to keep: the newest ones.
    pub keep: usize,
    /// Whether to also keep the checkpoint with the lowest validation loss.
    pub keep_best: bool,
    /// Maximum time, in seconds, to wait for a checkpoint that is still being written.
    pub timeout_s: u64,
}

impl LoraConfig {
    /// The adapters; `None` if the whole model is trained.
    pub(crate) fn adapters(&self) -> Option<Lora> {
        let Self { rank, alpha, dropout, ref targets } = *self;
        let alpha = if alpha == 0.0 { 2.0 * rank as f64 } else { alpha };
        (rank != 0).then(|| Lora { rank, alpha, dropout, targets: targets.clone() })
    }
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self { rank: 0, alpha: 0.0, dropout: 0.0, targets: vec!["*".into()] }
    }
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            stages: 2,
            micro_batches: 4,
            replicas: 1,
            shard_optimizer: false,
            schedule: ScheduleChoice::Named(Schedule::OneFOneB),
            balance: Balance::Cost,
            remat: RematPolicies::default(),
            offload_folder: PathBuf::new(),
            devices: Devices(vec![Device::Cpu]),
            dtype: Dtype::Float32,
            kernels: KernelChoice::Fastest,
            loss_rows: 0,
            threads_per_stage: 1,
            memory: Caps::default(),
            oversubscribe: false,
            links: Links::Gloo,
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
        Self { beta1: 0.9, beta2: 0.98, eps: 1e-8, moments: MomentsChoice::Float32 }
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
            log_every: 0,
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
