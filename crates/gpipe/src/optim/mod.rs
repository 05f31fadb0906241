//! Optimizers: update rules for the parameters that a stage owns, applied layer by layer.
//!
//! - [`Sgd`], [`RmsProp`], [`Adam`] (and AdamW), [`Adafactor`]: the rules, one file each
//! - [`Group`]: separate settings for parameters selected by name
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
use std::fmt;

use tch::Tensor;

use crate::error::LayerError;

/// One update of parameters that share a group and an update count, with their gradients and state.
/// All lists have the same length.
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
    /// The number of this update of these parameters, counted from 1. It is part of their state.
    pub update: u64,
}

impl<'a> Update<'a> {
    /// State tensor number `index` of every parameter.
    ///
    /// # Errors
    /// There is no state tensor with this number.
    pub fn column(&self, index: usize) -> Result<Vec<&'a Tensor>, LayerError> {
        let missing = || LayerError::Value(format!("there is no optimizer state number {index}"));
        self.state.iter().map(|state| state.get(index).ok_or_else(missing)).collect()
    }
}

/// A tensor that an optimizer keeps for one parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct StateSpec {
    /// The tensor's name.
    pub name: &'static str,
    /// The tensor's shape.
    pub shape: Vec<i64>,
    /// The initial value of every element.
    pub fill: f64,
}

impl StateSpec {
    /// A tensor of zeros with the parameter's `shape`.
    pub fn zeros(name: &'static str, shape: &[i64]) -> Self {
        Self { name, shape: shape.to_vec(), fill: 0.0 }
    }
}

/// An update rule. The stage holds its state: named tensors in the dtype of the parameters.
///
/// `Debug` prints every setting of the rule. The processes of a run compare that text before they
/// train.
pub trait Optimizer: fmt::Debug + Send + Sync + 'static {
    /// The rule's name.
    fn name(&self) -> &'static str;

    /// The tensors that the rule keeps for a parameter of `shape`.
    fn state(&self, shape: &[i64]) -> Vec<StateSpec>;

    /// How many temporaries of a parameter's size an update holds at once. Parameters are updated
    /// one after the other. The stage checks that the temporaries fit before any stage begins to
    /// update, and lifts the memory cap during the update. If the number is too small, the update
    /// may therefore exceed the cap.
    fn temporaries(&self) -> usize;

    /// The learning rate before any schedule.
    fn lr(&self) -> f64;

    /// The weight decay for parameters whose group sets none.
    fn weight_decay(&self) -> f64;

    /// Checks that the settings are in range.
    ///
    /// # Errors
    /// Names the setting that is out of range, and its valid range.
    fn check(&self) -> Result<(), String>;

    /// Updates one layer's parameters in place.
    ///
    /// # Errors
    /// Any error of libtorch.
    fn apply(&self, update: &Update) -> Result<(), LayerError>;
}

/// Checks that every number is finite and not negative.
fn not_negative(numbers: &[(&str, f64)]) -> Result<(), String> {
    match numbers.iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
        None => Ok(()),
        Some((name, value)) => Err(format!("{name} = {value}: use a number of at least 0")),
    }
}

/// Checks that every number is at least 0 and below 1.
fn fraction(numbers: &[(&str, f64)]) -> Result<(), String> {
    match numbers.iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
        None => Ok(()),
        Some((name, value)) => Err(format!("{name} = {value}: use at least 0 and less than 1")),
    }
}
