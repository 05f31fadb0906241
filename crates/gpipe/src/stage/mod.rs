//! The seam on libtorch: a stage holds its layers' parameters and runs them, each as its own autograd
//! island.
//!
//! - [`island`]: one layer's forward with a graph, and its VJP
//! - [`loss`]: the loss and the metrics, on the last stage
//! - [`discarding`]: forwards that keep a segment's inputs only, and what is computed again from them
//! - [`back`]: backwards, whole or in halves
//! - [`held`]: what a micro-batch leaves from its forward to its backward, whole or in segments
//! - [`parameters`]: parameters, gradients, ties
//! - [`reduction`]: gradients summed over replicas; [`update`]: norm, update, moving averages
//! - [`state`]: what of all that a checkpoint holds
//! - [`device`]: the stage's stream, memory, and what crosses to other devices
//! - [`recorder`]: what each layer takes and holds, where that is asked for
//! - [`feed`]: what the driver gives a stage for a step, and what it gets back
//! - [`actions`]: what the runtime calls
//! - here: how they run layers, the loss, segments and islands

mod actions;
mod back;
mod device;
mod discarding;
pub(crate) mod feed;
mod held;
mod island;
mod loss;
pub(crate) mod parameters;
pub(crate) mod recorder;
pub(crate) mod reduction;
mod state;
mod update;

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    ops::Range,
    rc::Rc,
    sync::Arc,
};

use gpipe_bridge::{layout::settled, linear::Kernels, op_cache::OpCache};
use gpipe_core::{Action, EdgeId, LayerId, MicroBatch, StageId, remat::Remat};
use gpipe_runtime::{Verdict, stage::OnEdges};
use tch::Tensor;

pub(crate) use self::island::catching;
use self::{
    device::StageDevice,
    feed::{Feed, Mode},
    held::SavedActivations,
    island::{Island, LayerRun, WeightGradients},
    parameters::{ParamIndex, Parameters},
    recorder::{Begun, ProfiledOp, Recorder},
    reduction::Reduction,
};
use crate::{
    batch_norm::BatchStatistics,
    cache::Cache,
    device::Device,
    error::{LayerError, StageError},
    loss::Loss,
    metric::Metric,
    optim::{Optimizer, ParameterSettings},
    precision::Precision,
    processes::Replicas,
    sequence::{NamedLayer, Skip, TieGroup},
    spec::is_float,
    value::Value,
};

/// Everything that one stage is built from; plain data, so that the stage itself is made in its own thread.
pub(crate) struct StagePlan {
    pub stage: StageId,
    pub last: bool,
    /// Which layers of the sequence it has.
    pub layers: Range<usize>,
    pub named: Vec<NamedLayer>,
    /// For each of its layers, whether its input's gradient is needed.
    pub input_grads: Vec<bool>,
    pub skips: Vec<Skip>,
    pub ties: Vec<TieGroup>,
    pub edges: Arc<Edges>,
    /// The device at the other end of each edge.
    pub peers: HashMap<EdgeId, Device>,
    pub device: Device,
    /// Whether no earlier stage is on the same device: it then speaks for the device.
    pub first_on_device: bool,
    pub remat: Remat,
    pub seed: u64,
    pub precision: Precision,
    pub kernels: Kernels,
    pub cap: Option<u64>,
    pub max_norm: Option<f64>,
    pub keep_gradients: bool,
    pub threads: i32,
    pub loss: Option<Arc<dyn Loss>>,
    pub metrics: Vec<Arc<dyn Metric>>,
    /// Whether metrics are taken in training, too.
    pub training_metrics: bool,
    pub optimizer: Option<Arc<dyn Optimizer>>,
    /// What the groups say, by layer and parameter.
    pub settings: Vec<Vec<ParameterSettings>>,
    /// Decay of the moving averages, if there are any.
    pub average: Option<f64>,
    /// Whether each layer is measured.
    pub profile: bool,
    /// Whether there is no other process.
    pub alone: bool,
    /// The other replicas of the pipeline, if there are any.
    pub replicas: Option<Arc<dyn Replicas>>,
    /// For tests of faults.
    pub before_action: Option<BeforeAction>,
}

impl StagePlan {
    fn peer(&self, edge: EdgeId) -> Device {
        self.peers.get(&edge).copied().unwrap_or(self.device)
    }
}

/// This stage's edges by what they carry.
#[derive(Debug, Clone, Default)]
pub(crate) struct Edges {
    pub boundary_in: Option<EdgeId>,
    pub boundary_out: Option<EdgeId>,
    /// (edge, index into the sequence's skips)
    pub skips_in: Vec<(EdgeId, usize)>,
    pub skips_out: Vec<(EdgeId, usize)>,
    /// Ties with the stages that use a weight owned here, by their layers.
    pub tie_users: Vec<(EdgeId, Range<usize>)>,
    /// Ties with the stages that own a weight used here, by their layers.
    pub tie_owners: Vec<(EdgeId, Range<usize>)>,
    /// Which edges carry a gradient back.
    pub gradient: HashMap<EdgeId, bool>,
}

/// A stage on its device.
pub(crate) struct Stage {
    plan: StagePlan,
    parameters: Parameters,
    /// With other replicas.
    reduction: Option<Reduction>,
    feed: Feed,
    held: HashMap<MicroBatch, SavedActivations>,
    /// What first halves of backwards left to the second, last layer first.
    split: HashMap<MicroBatch, Vec<WeightGradients>>,
    loss_sums: Vec<(MicroBatch, f64)>,
    metric_sums: Vec<(MicroBatch, Vec<f64>)>,
    outputs: Vec<(MicroBatch, Vec<Tensor>)>,
    norm: Option<Verdict>,
    /// What the step's batch norms saw, by the place of their first parameter.
    statistics: Statistics,
    /// What layers keep in a decoding, by group and position; until something else is run.
    caches: RefCell<HashMap<(usize, usize), Cache>>,
    recorder: Option<Recorder>,
    /// What was live before each action of the step.
    levels: Vec<u64>,
    /// Shared with the device's other stages. Last, so that its memory is given back after everything that was allocated in it.
    device: Rc<StageDevice>,
}

/// What each batch norm saw of each micro-batch, by the place of its first parameter.
pub(crate) type Statistics = BTreeMap<ParamIndex, Vec<(MicroBatch, BatchStatistics)>>;

/// What a run of several layers gives.
struct RanLayers {
    outputs: Vec<Tensor>,
    islands: Vec<Island>,
    /// By layer.
    statistics: Vec<(usize, BatchStatistics)>,
}

type StageResult<T> = Result<T, StageError>;

/// How layers are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GraphMode {
    /// Without graphs.
    Plain,
    /// With graphs that are dropped layer by layer.
    Discard,
    /// With graphs, for a backward.
    Keep,
}

/// What becomes of what matrix products and convolutions give.
enum SavedOps<'a> {
    /// They are computed.
    Compute,
    /// ... and kept, for each layer.
    Keep(&'a mut Vec<OpCache>),
    /// They are found, where an earlier run of the layer kept them.
    Reuse(&'a mut std::vec::IntoIter<OpCache>),
}

impl SavedOps<'_> {
    /// Runs a layer's forward.
    fn around<T>(
        &mut self,
        layer: &str,
        forward: impl FnOnce() -> StageResult<T>,
    ) -> StageResult<T> {
        let in_layer = |source: gpipe_bridge::Error| StageError::Layer {
            layer: layer.to_owned(),
            source: source.into(),
        };
        match self {
            SavedOps::Compute => forward(),
            SavedOps::Keep(memos) => {
                let (ran, memo) = OpCache::record(forward).map_err(in_layer)?;
                memos.push(memo);
                ran
            }
            SavedOps::Reuse(memos) => match memos.next() {
                Some(memo) => memo.replay(forward).map_err(in_layer)?,
                None => forward(),
            },
        }
    }
}

/// How layers are run, and for what.
struct ForwardOptions<'a> {
    run: GraphMode,
    work: ProfiledOp,
    products: SavedOps<'a>,
}

/// Called before each action, on the stage's thread.
pub(crate) type BeforeAction = Arc<dyn Fn(Action) -> Result<(), LayerError> + Send + Sync>;

/// Names the work in which libtorch failed.
fn in_operation(what: &'static str) -> impl Fn(LayerError) -> StageError {
    move |source| StageError::Own { what, source }
}

impl Stage {
    /// Builds the stages of one device, in the thread that will run them.
    pub(crate) fn build_all(plans: Vec<StagePlan>) -> StageResult<Vec<Self>> {
        let Some(first) = plans.first() else { return Ok(Vec::new()) };
        // Asking first matters: a thread's first look at the number takes over what was last set anywhere in the
        // process, and would undo a number that was set before it.
        let _ = tch::get_num_threads();
        tch::set_num_threads(first.threads);
        let device =
            StageDevice::enter(first.device, first.cap).map_err(in_operation("the device"))?;
        let device = Rc::new(device);
        plans.into_iter().map(|plan| Self::build(plan, Rc::clone(&device))).collect()
    }

    /// With the stage's own parameters.
    fn build(plan: StagePlan, device: Rc<StageDevice>) -> StageResult<Self> {
        let parameters = Parameters::build(&plan)?;
        device.finish().map_err(in_operation("the device"))?;
        let recorder = plan.profile.then(Recorder::default);
        let reduction = plan.replicas.as_ref().map(|replicas| {
            let summing = replicas.stage(plan.stage);
            let summing = summing.map_err(|error| LayerError::Value(error.to_string()));
            summing.map(|summing| Reduction::new(summing, plan.named.len()))
        });
        let reduction =
            reduction.transpose().map_err(in_operation("meeting the other replicas"))?;
        Ok(Self {
            plan,
            reduction,
            device,
            parameters,
            feed: Feed::default(),
            held: HashMap::new(),
            split: HashMap::new(),
            loss_sums: Vec::new(),
            metric_sums: Vec::new(),
            outputs: Vec::new(),
            norm: None,
            statistics: Statistics::default(),
            caches: RefCell::default(),
            levels: Vec::new(),
            recorder,
        })
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

    /// Lets go of everything that belongs to one step.
    fn forget_step(&mut self) {
        self.held.clear();
        self.split.clear();
        self.outputs.clear();
        self.loss_sums.clear();
        self.metric_sums.clear();
        self.norm = None;
        self.statistics.clear();
        self.levels.clear();
        self.feed = Feed::default();
        self.parameters.forget_grads();
        if let Some(reduction) = &mut self.reduction {
            reduction.begin(self.plan.named.len());
        }
    }

    /// After the last backward of the layers from `position` on: their gradients may be summed with other replicas'.
    fn complete(&mut self, micro_batch: MicroBatch, position: usize) -> StageResult<()> {
        let is_last = micro_batch.index() + 1 == self.feed.slices.len();
        let Some(reduction) = self.reduction.as_mut().filter(|_| is_last) else { return Ok(()) };
        let begun = reduction.complete(&mut self.parameters, &self.plan, position);
        begun.map_err(in_operation("summing gradients over replicas"))
    }

    /// Waits until the gradients are those of all replicas.
    fn reduced(&mut self) -> StageResult<()> {
        let Some(reduction) = &mut self.reduction else { return Ok(()) };
        let done = reduction.finish(&mut self.parameters, &self.plan);
        done.map_err(in_operation("summing gradients over replicas"))
    }

    /// Runs the stage's layers in `range` (positions within the stage). `skips` has every skip value that
    /// a layer here may pop, and gets those that are stashed.
    fn run_layers(
        &self,
        range: Range<usize>,
        micro_batch: MicroBatch,
        inputs: Vec<Tensor>,
        skips: &mut HashMap<usize, Tensor>,
        how: ForwardOptions<'_>,
    ) -> StageResult<RanLayers> {
        let ForwardOptions { run: how, work, mut products } = how;
        let _no_grad = (how == GraphMode::Plain).then(tch::no_grad_guard);
        let mut values = inputs;
        let (mut islands, mut statistics) = (Vec::new(), Vec::new());
        for position in range {
            let run = self.layer_run(position, micro_batch);
            let pops = self.skips_popped_by(position);
            let pops = pops.filter_map(|(index, skip)| {
                Some((index, skip.name.clone(), skips.get(&index)?.shallow_clone()))
            });
            let graph = how != GraphMode::Plain;
            let (pops, begun) = (pops.collect(), self.begin_sample()?);
            let cache = self.take_cache(position, micro_batch)?;
            let forward = || run.forward(values, pops, cache, graph);
            let ran = products.around(&run.layer.name, forward)?;
            self.put_cache(position, micro_batch, ran.cache);
            for (name, tensor) in ran.stashed {
                let skip = self.skip_stashed_by(position, &name);
                skips.extend(skip.map(|index| (index, tensor)));
            }
            islands.extend(ran.island.filter(|_| how == GraphMode::Keep));
            self.end_sample(begun, self.plan.layers.start + position, work, micro_batch)?;
            if let (Some(recorder), SavedOps::Keep(memos)) = (&self.recorder, &products) {
                recorder.products(position, memos.last().map_or(0, OpCache::bytes));
            }
            statistics.extend(ran.statistics.into_iter().map(|seen| (position, seen)));
            values = ran.outputs;
        }
        Ok(RanLayers { outputs: values, islands, statistics })
    }

    /// What the layer kept in the decoding so far.
    fn take_cache(&self, position: usize, micro_batch: MicroBatch) -> StageResult<Option<Cache>> {
        let Some(group) = self.feed.group(micro_batch) else { return Ok(None) };
        let cache = match group.past {
            0 => Cache::default(),
            _ => self.caches.borrow_mut().remove(&(group.id, position)).unwrap_or_default(),
        };
        let rows = group.rows.as_ref().map(|rows| self.device.own(rows)).transpose();
        let cache = rows.and_then(|rows| cache.before(group.past, rows.as_ref()));
        cache.map(Some).map_err(in_operation("the cache"))
    }

    fn put_cache(&self, position: usize, micro_batch: MicroBatch, cache: Option<Cache>) {
        if let (Some(group), Some(cache)) = (self.feed.group(micro_batch), cache) {
            self.caches.borrow_mut().insert((group.id, position), cache);
        }
    }

    fn begin_sample(&self) -> StageResult<Option<Begun>> {
        let begun = self.recorder.as_ref().map(|recorder| recorder.begin(&self.device));
        begun.transpose().map_err(in_operation("profiling"))
    }

    fn end_sample(
        &self,
        begun: Option<Begun>,
        layer: usize,
        work: ProfiledOp,
        micro_batch: MicroBatch,
    ) -> StageResult<()> {
        let (Some(recorder), Some(begun)) = (&self.recorder, begun) else { return Ok(()) };
        recorder
            .end(&self.device, begun, layer, work, micro_batch)
            .map_err(in_operation("profiling"))
    }

    /// Keeps what batch norms saw in the one forward of `micro_batch` that counts.
    fn count_statistics(&mut self, micro_batch: MicroBatch, seen: Vec<(usize, BatchStatistics)>) {
        for (position, statistics) in seen {
            let place = (position, statistics.first);
            self.statistics.entry(place).or_default().push((micro_batch, statistics));
        }
    }

    fn layer_run(&self, position: usize, micro_batch: MicroBatch) -> LayerRun<'_> {
        LayerRun {
            layer: &self.plan.named[position],
            id: LayerId::from_index(self.plan.layers.start + position),
            parameters: self.parameters.of_layer(position),
            input_grads: self.plan.input_grads[position],
            training: self.feed.mode == Mode::Train,
            seed: self.plan.seed,
            step: self.feed.step,
            slice: self.feed.slice(micro_batch),
            check_finite: self.feed.check_finite,
            kind: self.plan.precision.compute,
            kernels: self.plan.kernels,
        }
    }

    /// What the driver fed the first stage of `micro_batch`: on its device, in the layout that values pass in, and,
    /// where the arithmetic is in a smaller dtype, in that.
    fn fed_inputs(&self, micro_batch: MicroBatch) -> StageResult<Vec<Tensor>> {
        let Precision { compute, master } = self.plan.precision;
        let fed = |tensor: &Tensor| {
            let tensor = self.device.own(tensor)?;
            let tensor = if tensor.kind() == master { tensor.f_to_kind(compute)? } else { tensor };
            Ok(settled(tensor)?)
        };
        let inputs = self.feed.inputs(micro_batch).iter().map(fed);
        inputs.collect::<Result<_, LayerError>>().map_err(in_operation("the inputs"))
    }

    /// What arrived, on this stage's device.
    fn receive(&self, values: OnEdges<Value>) -> StageResult<OnEdges<Vec<Option<Tensor>>>> {
        let receive = |(edge, value)| Ok((edge, self.device.receive(value)?));
        values
            .into_iter()
            .map(receive)
            .collect::<Result<_, LayerError>>()
            .map_err(in_operation("receiving"))
    }

    /// The end of an action: its values, ready for the devices that they go to.
    fn finished(&self, values: OnEdges<Vec<Option<Tensor>>>) -> StageResult<OnEdges<Value>> {
        let finish = || {
            self.device.finish()?;
            let send =
                |(edge, tensors)| Ok((edge, self.device.send(tensors, self.plan.peer(edge))?));
            values.into_iter().map(send).collect::<Result<_, LayerError>>()
        };
        finish().map_err(in_operation("sending"))
    }

    fn skips_popped_by(&self, position: usize) -> impl Iterator<Item = (usize, &Skip)> {
        let layer = LayerId::from_index(self.plan.layers.start + position);
        self.plan.skips.iter().enumerate().filter(move |(_, skip)| skip.pop == layer)
    }

    fn skip_stashed_by(&self, position: usize, name: &str) -> Option<usize> {
        let layer = LayerId::from_index(self.plan.layers.start + position);
        self.plan.skips.iter().position(|skip| skip.stash == layer && skip.name == name)
    }

    /// Into which ranges of its layers the stage is cut where it re-materializes.
    fn segment_ranges(&self) -> Vec<Range<usize>> {
        self.plan.remat.segment_ranges(self.plan.layers.len())
    }

    fn outgoing(
        &self,
        boundary: Option<EdgeId>,
        tensors: Vec<Option<Tensor>>,
        skips: &[(EdgeId, usize)],
        skip_values: &mut HashMap<usize, Tensor>,
    ) -> OnEdges<Vec<Option<Tensor>>> {
        let boundary = boundary.map(|edge| (edge, tensors));
        let skips = skips.iter().map(|&(edge, index)| (edge, vec![skip_values.remove(&index)]));
        boundary.into_iter().chain(skips).collect()
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
