//! Stages on libtorch. A stage holds its layers' parameters and runs the layers, each as its own
//! autograd island.
//!
//! What lasts is in [`Stage`]. What lives for one step is in [`step::StepState`] and is dropped
//! with it.
//!
//! - [`config`]: the configuration of a stage
//! - [`step`]: the state of one step, and the stage during it
//! - [`feed`]: what the driver gives a stage for a step, and what the stage returns
//! - [`actions`]: the methods that the runtime calls
//! - [`observing`]: calls of observers
//! - [`layers`]: how layers run; [`island`]: one layer's forward with a graph, and its VJP;
//!   [`later`]: weight gradients of a split one
//! - [`loss`]: the loss and the metrics, on the last stage; [`rows`]: with the last layer, on some
//!   rows at a time
//! - [`discarding`]: forwards that keep only a segment's inputs, and their recomputation
//! - [`back`]: backwards, whole or in halves
//! - [`offload`]: forwards whose saved activations leave the device's memory; [`spill`]: their file
//! - [`bandwidth`]: how fast they leave and come back
//! - [`held`]: what is kept of a micro-batch from its forward to its backward
//! - [`pending`]: what the parts of an update leave for each other
//! - [`edits`]: reads and changes what has accumulated
//! - [`gradients`]: the step's gradients, and those of tied weights
//! - [`reduction`]: gradients summed over replicas
//! - [`parameters`]: parameters; [`update`]: norm, update, moving averages
//! - [`state`]: the stage's share of a checkpoint
//! - [`device`]: the stage's stream, memory, and copies to other devices
//! - [`feeding`]: inputs and targets on the stage's device
//! - [`queue`]: what a GPU was given and may not have done
//! - [`unread`]: values that are read from a GPU at the end of a step
//! - [`recorder`]: time and memory of each layer, when profiling

mod actions;
mod back;
pub(crate) mod bandwidth;
mod config;
mod device;
mod discarding;
pub(crate) mod edits;
pub(crate) mod feed;
mod feeding;
pub(crate) mod gradients;
mod held;
mod hollow;
mod island;
mod later;
mod layers;
mod loss;
mod observing;
pub(crate) mod offload;
pub(crate) mod parameters;
mod pending;
mod queue;
pub(crate) mod recorder;
pub(crate) mod reduction;
mod rows;
mod sharding;
mod spill;
mod state;
mod step;
mod unread;
mod update;

use std::{collections::HashMap, rc::Rc};

use gpipe_core::MicroBatch;
use tch::Tensor;

pub(crate) use self::config::{Edges, StageConfig};
use self::{
    device::StageDevice, offload::Store, parameters::Parameters, pending::Pending, step::StepState,
};
use crate::{
    cache::Cache,
    error::{LayerError, StageError},
    processes::Summing,
    spec::is_float,
};

/// A stage on its device.
pub(crate) struct Stage {
    config: StageConfig,
    /// Including optimizer state and moving averages.
    parameters: Parameters,
    /// The same stage of the other replicas, if there are any.
    replicas: Option<Box<dyn Summing>>,
    /// The layers' caches in a decoding, by group and position. Dropped when anything else runs.
    decoding: HashMap<(usize, usize), Cache>,
    /// What earlier parts of an update left. Empty unless an update runs in parts.
    pending: Pending,
    /// Set between `begin` and `finish` or `abort`.
    step: Option<StepState>,
    /// Where saved activations are moved to.
    store: Store,
    /// Shared with the device's other stages. It is the last field, so that its arena is released
    /// after everything allocated in it.
    device: Rc<StageDevice>,
}

type StageResult<T> = Result<T, StageError>;

/// Wraps an error with the operation that failed.
fn in_operation(what: &'static str) -> impl Fn(LayerError) -> StageError {
    move |source| StageError::Own { what, source }
}

impl Stage {
    /// Builds the stages of one device, in the thread that will run them.
    pub(crate) fn build_all(configs: Vec<StageConfig>) -> StageResult<Vec<Self>> {
        let Some(first) = configs.first() else { return Ok(Vec::new()) };
        crate::threads::set(first.threads);
        let device =
            StageDevice::enter(first.device, first.cap).map_err(in_operation("the device"))?;
        let device = Rc::new(device);
        configs.into_iter().map(|config| Self::build(config, Rc::clone(&device))).collect()
    }

    /// Builds one stage with its parameters.
    fn build(config: StageConfig, device: Rc<StageDevice>) -> StageResult<Self> {
        let parameters = Parameters::build(&config, &device)?;
        device.finish().map_err(in_operation("the device"))?;
        let replicas = config.replicas.as_ref().map(|replicas| replicas.stage(config.stage));
        let replicas = replicas.transpose().map_err(|error| LayerError::Value(error.to_string()));
        let replicas = replicas.map_err(in_operation("meeting the other replicas"))?;
        let store = Store::new(&config, &device).map_err(in_operation("offload"))?;
        let (decoding, pending) = (HashMap::new(), Pending::default());
        Ok(Self { config, parameters, replicas, decoding, pending, step: None, store, device })
    }

    /// The parameters, for the driver. Copies that the driver makes are not charged to the stage.
    pub(crate) fn visit_parameters(&mut self) -> Result<&mut Parameters, LayerError> {
        self.device.charge_nobody()?;
        Ok(&mut self.parameters)
    }

    /// Overwrites a parameter at all of its places on the stage. One that had no memory gets it
    /// here, and it is the stage's.
    pub(crate) fn set_parameter(
        &mut self,
        places: &[parameters::ParamIndex],
        value: &tch::Tensor,
    ) -> Result<(), LayerError> {
        self.device.charge_stage()?;
        let done = self.parameters.set_all(places, value);
        self.device.charge_nobody()?;
        done
    }

    /// Takes a new configuration, which differs in what is trained and how.
    pub(crate) fn reconfigure(&mut self, config: StageConfig) -> Result<(), LayerError> {
        self.parameters.reconfigure(&config)?;
        self.config = config;
        Ok(())
    }

    /// What earlier parts of an update left on this stage.
    pub(crate) fn pending(&mut self) -> &mut Pending {
        &mut self.pending
    }

    /// The memory arena of the stage.
    pub(crate) fn arena(&self) -> u32 {
        self.device.arena()
    }
}

fn not_held(micro_batch: MicroBatch) -> StageError {
    let text = format!("micro-batch {micro_batch} has no forward to go back through");
    in_operation("backward")(LayerError::Value(text))
}

/// The arena for allocations that belong to no stage.
const SHARED_ARENA: u32 = 0;

/// Whether a gradient can flow into `tensor`.
fn differentiable(tensor: &Tensor) -> bool {
    tensor.defined() && is_float(tensor.kind())
}
