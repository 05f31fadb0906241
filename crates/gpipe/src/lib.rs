//! Pipeline parallelism with re-materialization for any network that is a sequence of layers (Huang
//! et al. 2019, "GPipe").
//!
//! Results are identical to the bit for every number of stages. A complete example:
//!
//! ```
//! use gpipe::{
//!     Adam, MeanSquaredError, Pipeline, Sequence, TensorSpec, layers::{Activation, Linear},
//! };
//! use tch::{Device, Kind, Tensor};
//! let model = Sequence::new()
//!     .layer(Linear::new(8, 32)).layer(Activation::Tanh).layer(Linear::new(32, 1));
//! let mut pipeline = Pipeline::builder(model, TensorSpec::new([16, 8], Kind::Float))
//!     .stages(2).micro_batches(4).loss(MeanSquaredError).optimizer(Adam::default()).build()?;
//! let x = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
//! let report = pipeline.train_step(&x, &x.sum_dim_intlist(1_i64, true, None))?;
//! println!("loss {:.4}, bubble {:.0}%", report.loss, 100.0 * report.bubble);
//! # Ok::<(), gpipe::Error>(())
//! ```
//!
//! - [`Layer`], [`Sequence`], [`layers`]: the parts of a network
//! - [`Function`]: an operation with a backward of its own
//! - [`Pipeline`]: builder, `train_step`, `evaluate`, `predict`
//! - [`Pipeline::forward`], [`Pipeline::backward`], [`Pipeline::update`]: the step in parts, for a
//!   pipeline inside a larger program
//! - [`estimate`]: the time and memory of a model, from shapes alone
//! - [`profile`]: the time and memory of each layer, measured
//! - [`plan`]: predicts how a model runs and chooses how to run it, from its layers' [`cost`]s
//! - [`state`]: everything that a pipeline keeps between two steps, for checkpoints
//! - [`Loss`], [`Metric`], [`Optimizer`]: use those provided or implement your own
//! - [`ledger`]: where the time of a step goes, by kind of work
//! - [`Observer`]: code that is called as stages work
//! - [`Group`], [`LearningRate`]: settings for groups of parameters, and learning rate schedules
//!
//! **Linking this crate replaces libtorch's CPU allocator for the whole process**, including
//! tensors that are unrelated to a pipeline. The new allocator counts the memory of each stage,
//! keeps freed blocks for reuse, and refuses allocations above a cap.
//!
//! Without the default feature `allocator`, libtorch keeps its own allocator. Training results are
//! the same to the bit, but bytes on CPUs are reported as 0. Building a pipeline with a
//! [`PipelineBuilder::memory_cap`] on a CPU is then an error, and so is [`profile`](mod@profile).
//!
//! Internally, [`gpipe_core`] decides what every device does, [`gpipe_runtime`] runs it on threads,
//! and the stages of this crate compute with libtorch.

/// The README's example, compiled and run with the other doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

mod adapter;
mod arguments;
mod batch_norm;
mod cache;
pub mod decode;
mod device;
mod error;
pub mod estimate;
mod function;
#[doc(hidden)]
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guard;
mod infer;
mod inspect;
mod interrupt;
pub mod layer;
pub mod layers;
pub mod ledger;
mod lora;
mod loss;
mod metric;
mod observer;
mod optim;
mod parameter;
mod pipeline;
mod precision;
pub mod processes;
pub mod profile;
mod rng;
mod sequence;
mod spec;
mod stage;
pub mod state;
mod tape;
mod threads;
mod value;

pub use arguments::{IntoTensors, Tensors};
pub use batch_norm::NormsFollow;
pub use cache::Cache;
pub use device::Device;
pub use error::{Error, LayerError, Result, StageError};
pub use function::{Computed, Function, apply};
pub use gpipe_bridge::{
    convolution::Geometry,
    device::{Determinism, set_determinism},
    images::{Pooling, Windows},
    linear::Kernels,
    memory::keep_freed_memory,
};
pub use gpipe_core::{
    Bytes, Nanos, cost, draw,
    lower::Part,
    plan,
    remat::{Remat, RematPolicies},
    schedule,
    schedule::Schedule,
    simulate::Timeline,
};
pub use interrupt::Interrupt;
pub use layer::{Forward, Infer, Layer};
pub use lora::{LORA_A, LORA_B, Lora};
pub use loss::{
    BalancedExperts, CrossEntropy, Loss, LossContext, LossOf, LossTerm, MeanSquaredError,
    WithAuxiliary,
};
pub use metric::{Accuracy, Measured, Metric, TopK};
pub use observer::{ActionEvent, DeviceMemory, LayerEvent, Observer, Pass, StepEvent, When};
pub use optim::{
    Adafactor, Adam, Decay, Group, LearningRate, Moments, Muon, Optimizer, ParameterInfo, RmsForm,
    RmsProp, Sgd, StateSpec, Update, name_matches,
};
pub use parameter::{Init, LoraRole, ParameterSpec};
pub use pipeline::{
    Balance, Count, DeviceReport, Difference, Evaluation, Outputs, Padding, Pipeline,
    PipelineBuilder, RunSettings, StepReport, TIMEOUT_MAX, UpdateReport,
};
pub use rng::Random;
pub use sequence::Sequence;
pub use spec::TensorSpec;
pub use threads::compute_on_this_thread_alone;
pub use value::{Value, tensor_bytes};
