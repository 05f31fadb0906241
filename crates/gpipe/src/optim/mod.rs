//! Optimizers: arithmetic over tensors that the stage owns, by layer; and what goes with them.
//!
//! - [`Sgd`], [`RmsProp`], [`Adam`] (and AdamW), [`Adafactor`]: a file each
//! - [`Group`]: other settings for the parameters whose names match
//! - [`LearningRate`]: warm-up and decay

mod adafactor;
mod adam;
mod group;
mod rate;
mod rmsprop;
mod sgd;

pub use adafactor::Adafactor;
pub use adam::Adam;
pub use group::{Group, name_matches};
pub(crate) use group::{ParameterSettings, settings};
pub use rate::{Decay, LearningRate};
pub use rmsprop::{RmsForm, RmsProp};
pub use sgd::Sgd;
use tch::Tensor;

use crate::error::LayerError;

/// Parameters with one number of updates and one group, with their gradients and state; all lists
/// have one length.
pub struct Update<'a> {
    /// The parameters, changed in place.
    pub parameters: &'a [&'a Tensor],
    /// The gradients of the mini-batch, reduced and clipped. They may be overwritten.
    pub grads: &'a [&'a Tensor],
    /// For each parameter, the tensors of [`Optimizer::state`], changed in place.
    pub state: &'a [&'a [Tensor]],
    /// The learning rate of this step and group.
    pub lr: f64,
    /// The weight decay of this group.
    pub weight_decay: f64,
    /// The number of this update of these parameters, from 1; it belongs to their state.
    pub update: u64,
}

impl<'a> Update<'a> {
    /// State tensor number `index` of every parameter.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn column(&self, index: usize) -> Result<Vec<&'a Tensor>, LayerError> {
        let missing = || LayerError::Value(format!("there is no optimizer state number {index}"));
        self.state.iter().map(|state| state.get(index).ok_or_else(missing)).collect()
    }
}

/// A tensor that an optimizer keeps for one parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct StateSpec {
    /// Its name.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<i64>,
    /// The value of every element at first.
    pub fill: f64,
}

impl StateSpec {
    /// Zeros of the parameter's own `shape`.
    pub fn zeros(name: &'static str, shape: &[i64]) -> Self {
        Self { name, shape: shape.to_vec(), fill: 0.0 }
    }
}

/// An update rule. Its state is ours: named tensors of the parameters' dtype, held by the stage.
pub trait Optimizer: Send + Sync + 'static {
    /// Its name.
    fn name(&self) -> &'static str;

    /// What it keeps for a parameter of `shape`.
    fn state(&self, shape: &[i64]) -> Vec<StateSpec>;

    /// How many temporaries of a parameter's size its update makes at once, for one parameter after
    /// the other. The stage makes sure that they fit before any stage begins to update.
    fn temporaries(&self) -> usize {
        0
    }

    /// The learning rate before any schedule.
    fn lr(&self) -> f64;

    /// The weight decay where no group says otherwise.
    fn weight_decay(&self) -> f64;

    /// Whether its numbers are usable.
    ///
    /// # Errors
    /// Which one is not, and what it must be.
    fn check(&self) -> Result<(), String>;

    /// Updates one layer's parameters in place.
    ///
    /// # Errors
    /// libtorch's.
    fn apply(&self, update: &Update) -> Result<(), LayerError>;
}

/// An error for a number that must not be negative.
fn not_negative(numbers: &[(&str, f64)]) -> Result<(), String> {
    match numbers.iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
        None => Ok(()),
        Some((name, value)) => Err(format!("{name} is {value}: it must be a number of at least 0")),
    }
}

/// An error for a number that must be at least 0 and below 1.
fn fraction(numbers: &[(&str, f64)]) -> Result<(), String> {
    match numbers.iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
        None => Ok(()),
        Some((name, value)) => Err(format!("{name} is {value}: it must be at least 0 and below 1")),
    }
}
