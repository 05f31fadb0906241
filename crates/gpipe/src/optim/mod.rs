//! Optimizers: arithmetic over tensors that the stage owns, by layer.

mod adam;
mod sgd;

pub use adam::Adam;
pub use sgd::Sgd;
use tch::Tensor;

use crate::error::LayerError;

/// The parameters of one layer with their gradients and state; all lists have one length.
pub struct Update<'a> {
    /// The parameters, changed in place.
    pub parameters: &'a [&'a Tensor],
    /// The gradients of the mini-batch, reduced and clipped.
    pub grads: &'a [&'a Tensor],
    /// For each of [`Optimizer::slots`], a tensor per parameter, changed in place.
    pub slots: &'a [Vec<&'a Tensor>],
    /// The learning rate of this step.
    pub lr: f64,
    /// The number of this update of these parameters, from 1; it belongs to their state.
    pub update: u64,
}

/// An update rule. Its state is ours: named tensors of the parameters' shapes, held by the stage.
pub trait Optimizer: Send + Sync + 'static {
    /// Its name.
    fn name(&self) -> &'static str;

    /// The names of its state tensors, each of the parameter's shape and dtype and zero at first.
    fn slots(&self) -> &'static [&'static str];

    /// The learning rate it starts with.
    fn lr(&self) -> f64;

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
