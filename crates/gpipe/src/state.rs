//! The state of a pipeline between two steps, as plain data by layer: the content of a checkpoint.
//!
//! The state does not depend on K, schedule, balance or re-materialization, so it fits every
//! pipeline of the same model. Dropout, initial values and the learning rate are functions of the
//! counters, so there is no random generator state to save.

use tch::{Kind, Tensor};

use crate::spec::TensorSpec;

/// The state of a pipeline between two steps; see [`crate::Pipeline::state`].
#[derive(Debug)]
pub struct State {
    /// The part of the state that is not tensors.
    pub counters: Counters,
    /// The layers of each stage that own parameters, in order.
    pub stages: Vec<Vec<LayerState>>,
}

impl State {
    /// The layers, in the form that [`crate::Pipeline::restore`] takes.
    pub fn into_layers(self) -> impl Iterator<Item = crate::Result<LayerState>> {
        self.stages.into_iter().flatten().map(Ok)
    }
}

/// The counters of a pipeline, and the seed of its random numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counters {
    /// Number of updates applied.
    pub step: u64,
    /// The seed for initial values and dropout.
    pub seed: u64,
    /// The learning rate before any schedule, if [`crate::Pipeline::set_learning_rate`] set one.
    pub learning_rate: Option<f64>,
    /// The loss scale, in float16.
    pub loss_scale: Option<f64>,
    /// Steps since the loss scale changed.
    pub good_steps: u32,
    /// Number of updates in the moving averages.
    pub averaged: u64,
}

/// The state of the parameters that a layer owns.
#[derive(Debug)]
pub struct LayerState {
    /// The layer's name.
    pub layer: String,
    /// The parameters, in the layer's order. A tied weight belongs to the first layer that uses it.
    pub parameters: Vec<ParameterState>,
}

/// The state of one parameter.
#[derive(Debug)]
pub struct ParameterState {
    /// Its name within the layer.
    pub name: String,
    /// Its value on the CPU, in the dtype in which it is updated.
    pub value: Tensor,
    /// Its optimizer state, once it has had a gradient.
    pub optimizer: Option<OptimizerState>,
    /// Its moving average, if averages are kept and the parameter is trained, or was before it was
    /// frozen.
    pub average: Option<Tensor>,
}

/// The optimizer state of one parameter.
#[derive(Debug)]
pub struct OptimizerState {
    /// Number of updates applied to the parameter.
    pub updates: u64,
    /// Tensors by name, in the order of [`crate::Optimizer::state`].
    pub tensors: Vec<(String, Tensor)>,
}

/// The names, shapes and dtypes of a layer's state, without values.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerOutline {
    /// The layer's name.
    pub layer: String,
    /// The parameters that it owns.
    pub parameters: Vec<ParameterOutline>,
}

/// The name, shape and dtype of a parameter's state, without values.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterOutline {
    /// Its name within the layer.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// The dtype in which it is stored.
    pub kind: Kind,
    /// Names, shapes and dtypes of the optimizer's tensors. Empty while the parameter is frozen,
    /// even if its state has some.
    pub optimizer: Vec<(String, TensorSpec)>,
    /// Whether it has a moving average.
    pub averaged: bool,
}
