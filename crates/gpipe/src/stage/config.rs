//! What a stage is told when it is built.

use std::{collections::HashMap, ops::Range, sync::Arc};

use gpipe_bridge::linear::Kernels;
use gpipe_core::{Action, EdgeId, StageId, remat::Remat};

use crate::{
    device::Device,
    error::LayerError,
    loss::Loss,
    metric::Metric,
    optim::{Optimizer, ParameterSettings},
    precision::Precision,
    processes::Replicas,
    sequence::{NamedLayer, Skip, TieGroup},
};

/// All that a stage is told when it is built. It never changes. It is plain data, so that the stage
/// itself is made in its own thread.
pub(crate) struct StageConfig {
    pub stage: StageId,
    pub last: bool,
    /// Which layers of the sequence it has.
    pub layers: Range<usize>,
    pub named: Vec<NamedLayer>,
    /// For each of its layers, whether its input's gradient is needed.
    pub input_grads: Vec<bool>,
    /// Of the whole sequence.
    pub skips: Arc<[Skip]>,
    /// Of the whole sequence.
    pub ties: Arc<[TieGroup]>,
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

impl StageConfig {
    pub(super) fn peer(&self, edge: EdgeId) -> Device {
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

/// Called before each action, on the stage's thread.
pub(crate) type BeforeAction = Arc<dyn Fn(Action) -> Result<(), LayerError> + Send + Sync>;
