//! The configuration of a stage.

use std::{collections::HashMap, ops::Range, path::PathBuf, sync::Arc, time::Duration};

use gpipe_bridge::linear::Kernels;
use gpipe_core::{EdgeId, StageId, remat::Remat};

use tch::Kind;

use super::parameters::ParamIndex;
use crate::{
    arguments::Arguments,
    batch_norm::NormsFollow,
    device::Device,
    interrupt::Interrupt,
    loss::Losses,
    metric::Metric,
    observer::Observer,
    optim::{Optimizer, ParameterInfo, ParameterSettings},
    precision::Precision,
    processes::Replicas,
    sequence::{NamedLayer, Skip, TieGroup},
};

/// The configuration of a stage. It never changes. It is plain data, so that each stage can be
/// built in its own thread.
pub(crate) struct StageConfig {
    pub stage: StageId,
    pub last: bool,
    /// The range of layers in the sequence.
    pub layers: Range<usize>,
    pub named: Vec<NamedLayer>,
    /// For each layer, whether the gradient of its input is needed.
    pub input_grads: Vec<bool>,
    /// Skips of the whole sequence.
    pub skips: Arc<[Skip]>,
    /// Ties of the whole sequence.
    pub ties: Arc<[TieGroup]>,
    pub edges: Arc<Edges>,
    /// The device at the other end of each edge.
    pub peers: HashMap<EdgeId, Device>,
    pub device: Device,
    /// Whether no earlier stage is on the same device. The first stage resets the device's peak.
    pub first_on_device: bool,
    /// Whether another device of the pipeline is the same GPU, with a thread of its own.
    pub shares_device: bool,
    pub remat: Remat,
    /// The folder of offloaded activations; `None`: where the system keeps temporary files.
    pub offload_folder: Option<PathBuf>,
    /// The longest silence of the stage.
    pub deadline: Duration,
    pub seed: u64,
    pub precision: Precision,
    pub kernels: Kernels,
    pub cap: Option<u64>,
    pub max_norm: Option<f64>,
    pub keep_gradients: bool,
    pub threads: i32,
    /// What is declared of the pipeline's inputs and targets.
    pub inputs: Arguments,
    pub targets: Arguments,
    /// Only the last stage has them.
    pub losses: Losses,
    pub metrics: Vec<Arc<dyn Metric>>,
    /// Whether metrics are computed in training, too.
    pub training_metrics: bool,
    /// How many rows of the last layer, the losses and the metrics are computed at a time; `None`
    /// for all.
    pub loss_rows: Option<usize>,
    pub optimizer: Option<Arc<dyn Optimizer>>,
    /// Settings of the parameter groups, by layer and parameter.
    pub settings: Vec<Vec<ParameterSettings>>,
    /// Full names, by layer and parameter. A tied weight has the name of its first use.
    pub names: Vec<Vec<String>>,
    /// Decay of the moving averages, if there are any.
    pub average: Option<f64>,
    pub norms_follow: NormsFollow,
    /// Whether the caller gives the parameters' values before the first step.
    pub given_parameters: bool,
    /// Whether each layer is measured.
    pub profile: bool,
    /// Whether the pipeline runs in a single process.
    pub alone: bool,
    /// The other replicas of the pipeline, if there are any.
    pub replicas: Option<Arc<dyn Replicas>>,
    /// Whether each replica keeps the optimizer state of only a part of the parameters.
    pub shards_optimizer: bool,
    pub observers: Vec<Arc<dyn Observer>>,
    pub interrupt: Interrupt,
}

impl StageConfig {
    /// The parameter at `place`, which is updated in `kind`, as its optimizer sees it.
    pub(super) fn info(&self, (layer, slot): ParamIndex, kind: Kind) -> ParameterInfo<'_> {
        let shape = &self.named[layer].parameters[slot].shape;
        ParameterInfo { name: &self.names[layer][slot], shape, kind }
    }

    pub(super) fn peer(&self, edge: EdgeId) -> Device {
        self.peers.get(&edge).copied().unwrap_or(self.device)
    }
}

/// The stage's edges by what they carry.
#[derive(Debug, Clone, Default)]
pub(crate) struct Edges {
    pub boundary_in: Option<EdgeId>,
    pub boundary_out: Option<EdgeId>,
    /// (edge, index into the sequence's skips)
    pub skips_in: Vec<(EdgeId, usize)>,
    pub skips_out: Vec<(EdgeId, usize)>,
    /// Edges to the stages that use a weight owned here, with the layers of those stages.
    pub tie_users: Vec<(EdgeId, Range<usize>)>,
    /// Edges to the stages that own a weight used here, with the layers of those stages.
    pub tie_owners: Vec<(EdgeId, Range<usize>)>,
    /// Whether each edge carries a gradient back.
    pub gradient: HashMap<EdgeId, bool>,
}
