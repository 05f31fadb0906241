//! All that a pipeline knows between two steps, as plain data by layer: what a checkpoint holds.
//!
//! It does not depend on K, schedule, balance or re-materialization: what was taken from one
//! pipeline fits every other of the same model. Dropout, initial values and the learning rate are
//! functions of the counters, so there is no generator whose state would have to be kept.

use tch::{Kind, Tensor};

/// The state of a pipeline between two steps; see [`crate::Pipeline::state`].
#[derive(Debug)]
pub struct State {
    /// What is not a tensor.
    pub counters: Counters,
    /// By stage, the layers whose parameters it owns, in order.
    pub stages: Vec<Vec<LayerState>>,
}

impl State {
    /// Its layers, in the form that [`crate::Pipeline::restore`] takes.
    pub fn into_layers(self) -> impl Iterator<Item = crate::Result<LayerState>> {
        self.stages.into_iter().flatten().map(Ok)
    }
}

/// What a pipeline counts, and what its random numbers are keyed by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counters {
    /// Updates that were applied.
    pub step: u64,
    /// The seed of initial values and dropout.
    pub seed: u64,
    /// The learning rate before any schedule, where [`crate::Pipeline::set_learning_rate`] set one.
    pub learning_rate: Option<f64>,
    /// What the loss is multiplied by, in float16.
    pub loss_scale: Option<f64>,
    /// Steps since the loss scale changed.
    pub good_steps: u32,
    /// Updates that the moving averages have seen.
    pub averaged: u64,
}

/// The parameters that a layer owns, with all that belongs to them.
#[derive(Debug)]
pub struct LayerState {
    /// The layer's name.
    pub layer: String,
    /// In the layer's order. A tied weight is with the first layer that uses it.
    pub parameters: Vec<ParameterState>,
}

/// One parameter.
#[derive(Debug)]
pub struct ParameterState {
    /// Its name within the layer.
    pub name: String,
    /// Its value, in the dtype that updates are in, on the CPU.
    pub value: Tensor,
    /// What the optimizer keeps for it, once it has had a gradient.
    pub optimizer: Option<OptimizerState>,
    /// Its moving average, where averages are kept and it is trained.
    pub average: Option<Tensor>,
}

/// What an optimizer keeps for one parameter.
#[derive(Debug)]
pub struct OptimizerState {
    /// Updates that it has seen.
    pub updates: u64,
    /// By name, in the order of [`crate::Optimizer::state`].
    pub tensors: Vec<(String, Tensor)>,
}

/// What a layer's state looks like, without any values.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerOutline {
    /// The layer's name.
    pub layer: String,
    /// The parameters that it owns.
    pub parameters: Vec<ParameterOutline>,
}

/// What a parameter's state looks like.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterOutline {
    /// Its name within the layer.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// The dtype that it is kept in.
    pub kind: Kind,
    /// The optimizer's tensors for it by name, with their shapes; none where it is frozen.
    pub optimizer: Vec<(String, Vec<i64>)>,
    /// Whether it has a moving average.
    pub averaged: bool,
}
