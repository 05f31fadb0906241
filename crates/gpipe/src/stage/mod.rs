//! The seam on libtorch: a stage holds its layers' parameters and runs them, each as its own
//! autograd island.
//!
//! What lasts is in [`Stage`]. What lives for one step is in [`step::StepState`], and is dropped
//! with it.
//!
//! - [`config`]: what a stage is told when it is built
//! - [`step`]: the state of one step, and the stage during it
//! - [`feed`]: what the driver gives a stage for a step, and what it gets back
//! - [`actions`]: what the runtime calls
//! - [`guard`]: what is looked at around calls of a user's code
//! - [`layers`]: how layers are run; [`island`]: one layer's forward with a graph, and its VJP
//! - [`loss`]: the loss and the metrics, on the last stage
//! - [`discarding`]: forwards that keep a segment's inputs only, and what is computed again from
//!   them
//! - [`back`]: backwards, whole or in halves
//! - [`held`]: what a micro-batch leaves from its forward to its backward, whole or in segments
//! - [`gradients`]: the step's gradients, and those of tied weights
//! - [`reduction`]: gradients summed over replicas
//! - [`parameters`]: parameters; [`update`]: norm, update, moving averages
//! - [`state`]: what of all that a checkpoint holds
//! - [`device`]: the stage's stream, memory, and what crosses to other devices
//! - [`recorder`]: what each layer takes and holds, where that is asked for

mod actions;
mod back;
mod config;
mod device;
mod discarding;
pub(crate) mod feed;
mod gradients;
mod guard;
mod held;
mod island;
mod layers;
mod loss;
pub(crate) mod parameters;
pub(crate) mod recorder;
pub(crate) mod reduction;
mod state;
mod step;
mod update;

use std::{collections::HashMap, rc::Rc};

use gpipe_core::MicroBatch;
use tch::Tensor;

pub(crate) use self::{
    config::{BeforeAction, Edges, StageConfig},
    guard::catching,
};
use self::{device::StageDevice, parameters::Parameters, step::StepState};
use crate::{
    cache::Cache,
    error::{LayerError, StageError},
    processes::Summing,
    spec::is_float,
};

/// A stage on its device.
pub(crate) struct Stage {
    config: StageConfig,
    /// With optimizer state and moving averages.
    parameters: Parameters,
    /// The same stage of the other replicas, if there are any.
    replicas: Option<Box<dyn Summing>>,
    /// What layers keep in a decoding, by group and position; until something else is run.
    decoding: HashMap<(usize, usize), Cache>,
    /// Between `begin` and `finish`, or `abort`.
    step: Option<StepState>,
    /// Shared with the device's other stages. Last, so that its memory is given back after
    /// everything that was allocated in it.
    device: Rc<StageDevice>,
}

type StageResult<T> = Result<T, StageError>;

/// Names the work in which libtorch failed.
fn in_operation(what: &'static str) -> impl Fn(LayerError) -> StageError {
    move |source| StageError::Own { what, source }
}

impl Stage {
    /// Builds the stages of one device, in the thread that will run them.
    pub(crate) fn build_all(configs: Vec<StageConfig>) -> StageResult<Vec<Self>> {
        let Some(first) = configs.first() else { return Ok(Vec::new()) };
        // Asking first matters: a thread's first look at the number takes over what was last set
        // anywhere in the process, and would undo a number that was set before it.
        let _ = tch::get_num_threads();
        tch::set_num_threads(first.threads);
        let device =
            StageDevice::enter(first.device, first.cap).map_err(in_operation("the device"))?;
        let device = Rc::new(device);
        configs.into_iter().map(|config| Self::build(config, Rc::clone(&device))).collect()
    }

    /// With the stage's own parameters.
    fn build(config: StageConfig, device: Rc<StageDevice>) -> StageResult<Self> {
        let parameters = Parameters::build(&config)?;
        device.finish().map_err(in_operation("the device"))?;
        let replicas = config.replicas.as_ref().map(|replicas| replicas.stage(config.stage));
        let replicas = replicas.transpose().map_err(|error| LayerError::Value(error.to_string()));
        let replicas = replicas.map_err(in_operation("meeting the other replicas"))?;
        Ok(Self { config, parameters, replicas, decoding: HashMap::new(), step: None, device })
    }

    /// The parameters, for the driver; copies that it takes are not charged to the stage.
    pub(crate) fn visit_parameters(&mut self) -> Result<&mut Parameters, LayerError> {
        self.device.charge_nobody()?;
        Ok(&mut self.parameters)
    }

    /// Where its memory is counted.
    pub(crate) fn arena(&self) -> u32 {
        self.device.arena()
    }
}

fn not_held(micro_batch: MicroBatch) -> StageError {
    let text = format!("micro-batch {micro_batch} has no forward to go back through");
    in_operation("backward")(LayerError::Value(text))
}

/// Where allocations go that are not a stage's own.
const SHARED_ARENA: u32 = 0;

/// Whether a gradient can flow into `tensor`.
fn differentiable(tensor: &Tensor) -> bool {
    is_float(tensor.kind())
}
