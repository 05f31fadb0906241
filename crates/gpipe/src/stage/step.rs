//! The state of one step, and a stage during it.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use gpipe_core::{Action, MicroBatch, lower::Part};
use gpipe_runtime::Verdict;
use tch::Tensor;

use super::{
    Stage, StageResult,
    config::StageConfig,
    device::StageDevice,
    feed::Feed,
    feeding::UnderWay,
    gradients::Gradients,
    held::SavedActivations,
    in_operation,
    later::WeightGradients,
    offload::{Moved, Store},
    parameters::{ParamIndex, Parameters},
    recorder::Recorder,
    reduction::Reduction,
    unread::Unread,
};
use crate::{
    batch_norm::BatchStatistics,
    cache::Cache,
    error::{LayerError, StageError},
    processes::Summing,
};

/// Statistics of each batch norm for each micro-batch, by the place of the norm's first parameter.
pub(crate) type Statistics = BTreeMap<ParamIndex, Vec<(MicroBatch, BatchStatistics)>>;

/// Everything that a stage holds for one step.
pub(super) struct StepState {
    pub(super) feed: Feed,
    pub(super) begun: Instant,
    pub(super) held: HashMap<MicroBatch, SavedActivations>,
    /// What the first halves of backwards left to the second, last layer first.
    pub(super) split: HashMap<MicroBatch, Vec<WeightGradients>>,
    pub(super) gradients: Gradients,
    /// Gradients that are being summed over the replicas.
    pub(super) reduction: Reduction,
    pub(super) statistics: Statistics,
    /// The running statistics of batch norms after this step.
    pub(super) running: Vec<(ParamIndex, Tensor)>,
    /// Copies of inputs and targets to a GPU.
    pub(super) under_way: RefCell<UnderWay>,
    /// Values that are still to be read from a GPU.
    pub(super) unread: RefCell<Vec<Unread>>,
    /// The action at work.
    pub(super) action: Option<Action>,
    /// The action that an error belongs to, if it is not the one that found it.
    pub(super) failed: Cell<Option<Action>>,
    pub(super) loss_sums: Vec<(MicroBatch, Vec<f64>)>,
    /// Whether a loss that trains was not finite. Across processes this stops the update.
    pub(super) loss_is_not_finite: bool,
    pub(super) metric_sums: Vec<(MicroBatch, Vec<f64>)>,
    pub(super) outputs: Vec<(MicroBatch, Vec<Tensor>)>,
    /// On the first stage: gradients of the inputs.
    pub(super) input_grads: Vec<(MicroBatch, Vec<Option<Tensor>>)>,
    pub(super) verdict: Option<Verdict>,
    /// Live bytes before each action.
    pub(super) levels: Vec<u64>,
    /// The device's peak so far, where observers look at it in between.
    pub(super) peak: Cell<u64>,
    /// What was offloaded so far.
    pub(super) moved: Moved,
    /// Set if layers are profiled.
    pub(super) recorder: Option<Recorder>,
}

impl StepState {
    pub(super) fn new(config: &StageConfig, feed: Feed) -> Self {
        Self {
            held: HashMap::new(),
            split: HashMap::new(),
            gradients: Gradients::new(config),
            // Before an update alone, an earlier part has summed them.
            reduction: match feed.part {
                Part::Update => Reduction::done(),
                _ => Reduction::new(config.named.len()),
            },
            statistics: Statistics::default(),
            running: Vec::new(),
            under_way: RefCell::default(),
            unread: RefCell::default(),
            action: None,
            failed: Cell::new(None),
            loss_sums: Vec::new(),
            loss_is_not_finite: false,
            metric_sums: Vec::new(),
            outputs: Vec::new(),
            input_grads: Vec::new(),
            verdict: None,
            levels: Vec::new(),
            peak: Cell::new(0),
            moved: Moved::default(),
            recorder: config.profile.then(|| Recorder::new(config.layers.start)),
            feed,
            begun: Instant::now(),
        }
    }
}

/// A stage during a step: the lasting state and the step's state. Its methods are the actions.
pub(super) struct ActiveStage<'a> {
    pub(super) config: &'a StageConfig,
    pub(super) device: &'a StageDevice,
    pub(super) store: &'a Store,
    pub(super) parameters: &'a mut Parameters,
    pub(super) replicas: Option<&'a mut (dyn Summing + 'static)>,
    pub(super) decoding: RefCell<&'a mut HashMap<(usize, usize), Cache>>,
    pub(super) step: &'a mut StepState,
}

impl Stage {
    /// The stage during its step.
    ///
    /// # Errors
    /// If no step has begun.
    pub(super) fn active(&mut self) -> StageResult<ActiveStage<'_>> {
        let Self { config, parameters, replicas, decoding, pending: _, step, store, device } = self;
        Ok(ActiveStage {
            config,
            device,
            store,
            parameters,
            replicas: replicas.as_deref_mut(),
            decoding: RefCell::new(decoding),
            step: step.as_mut().ok_or_else(no_step)?,
        })
    }

    /// Ends the step and takes its state.
    ///
    /// # Errors
    /// If no step has begun.
    pub(super) fn end_step(&mut self) -> StageResult<StepState> {
        self.step.take().ok_or_else(no_step)
    }
}

/// The error of an action outside a step. The runtime always begins a step first.
fn no_step() -> StageError {
    in_operation("an action")(LayerError::Value("no step has begun".into()))
}

impl ActiveStage<'_> {
    /// Called after a backward of the layers from `position` on. After the step's last micro-batch,
    /// begins to sum their gradients with those of other replicas. Where gradients accumulate, more
    /// backwards may follow.
    pub(super) fn complete(&mut self, micro_batch: MicroBatch, position: usize) -> StageResult<()> {
        let is_last = self.step.feed.part == Part::Step
            && micro_batch.index() + 1 == self.step.feed.slices.len();
        if self.replicas.is_none() || !is_last {
            return Ok(());
        }
        // What is wrong here must fail before other replicas have this one's gradients.
        self.read_values()?;
        let Some(replicas) = self.replicas.as_mut() else { return Ok(()) };
        let StepState { reduction, gradients, .. } = &mut *self.step;
        let begun =
            reduction.complete(*replicas, gradients, self.parameters, self.config, position);
        begun.map_err(in_operation("summing gradients over replicas"))
    }

    /// Waits until the gradients are summed over all replicas.
    pub(super) fn reduced(&mut self) -> StageResult<()> {
        if self.replicas.is_some() {
            self.read_values()?;
        }
        let Some(replicas) = self.replicas.as_mut() else { return Ok(()) };
        let StepState { reduction, gradients, .. } = &mut *self.step;
        let done = reduction.finish(*replicas, gradients, self.parameters, self.config);
        done.map_err(in_operation("summing gradients over replicas"))
    }
}
