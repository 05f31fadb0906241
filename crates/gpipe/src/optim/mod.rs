//! Optimizers: update rules for the parameters that a stage owns, applied layer by layer.
//!
//! - [`Sgd`], [`RmsProp`], [`Adam`] (and AdamW), [`Adafactor`], [`Muon`]: the rules, one file each
//! - [`Group`]: separate settings for parameters selected by name
//! - [`LearningRate`]: warm-up and decay

mod adafactor;
mod adam;
mod group;
mod muon;
mod rate;
mod rmsprop;
mod sgd;

pub use adafactor::Adafactor;
pub use adam::{Adam, Moments};
pub use group::{Group, name_matches};
pub(crate) use group::{ParameterSettings, settings};
pub use muon::Muon;
pub use rate::{Decay, LearningRate};
pub use rmsprop::{RmsForm, RmsProp};
pub use sgd::Sgd;
use std::fmt;

use tch::{Kind, Tensor};

use crate::{error::LayerError, spec::TensorSpec};

/// One update of parameters of one layer, with their gradients and state. The parameters share a
/// group and an update count, so a step may make several updates of one layer. All lists have the
/// same length.
pub struct Update<'a> {
    /// The full names of the parameters. A tied weight has the name of its first use.
    pub names: &'a [&'a str],
    /// The parameters, changed in place: in float32, or float64 if the pipeline computes in it.
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
    /// The number of this step of the pipeline, counted from 1. A parameter that got its first
    /// gradient in a later step has fewer updates.
    pub step: u64,
    /// The pipeline's seed, for rules that draw random numbers. Numbers that depend only on the
    /// seed, a parameter's name, `update` and an element's position are the same for every number
    /// of stages and replicas, and after a resume.
    pub seed: u64,
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

/// A parameter, as an optimizer sees it when it says what it keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParameterInfo<'a> {
    /// The full name. A tied weight has the name of its first use.
    pub name: &'a str,
    /// The shape.
    pub shape: &'a [i64],
    /// The dtype in which the parameter is updated.
    pub kind: Kind,
}

/// A tensor that an optimizer keeps for one parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct StateSpec {
    /// The tensor's name.
    pub name: &'static str,
    /// The tensor's shape.
    pub shape: Vec<i64>,
    /// The tensor's dtype; `None` is the parameter's.
    pub kind: Option<Kind>,
    /// The initial value of every element.
    pub fill: f64,
}

impl StateSpec {
    /// A tensor of zeros of `shape`, in the parameter's dtype.
    pub fn zeros(name: &'static str, shape: &[i64]) -> Self {
        Self { name, shape: shape.to_vec(), kind: None, fill: 0.0 }
    }

    /// Sets the dtype.
    #[must_use]
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Shape and dtype, for a parameter that is updated in `parameter`.
    pub(crate) fn spec(&self, parameter: Kind) -> TensorSpec {
        TensorSpec::new(self.shape.clone(), self.kind.unwrap_or(parameter))
    }
}

/// An update rule. The stage holds its state: named tensors of any shape and dtype. After each
/// update the stage checks that parameters and state still have theirs.
///
/// `Debug` prints every setting of the rule. The processes of a run compare that text before they
/// train.
pub trait Optimizer: fmt::Debug + Send + Sync + 'static {
    /// The rule's name.
    fn name(&self) -> &'static str;

    /// The tensors that the rule keeps for a parameter.
    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec>;

    /// The most temporaries that [`Optimizer::apply`] holds at once, each counted as a tensor of
    /// the size of the stage's largest parameter. A rule that handles its parameters one after the
    /// other gives the number for one parameter.
    ///
    /// The stage checks that they fit before any stage begins to update, and lifts the memory cap
    /// during the update. If the number is too small, the update may therefore exceed the cap.
    fn temporaries(&self) -> usize;

    /// The bytes of temporaries that [`Optimizer::apply`] holds at once, if the largest parameter
    /// of the stage has `largest` bytes. A rule that works in parts of a parameter needs fewer than
    /// the default, which is [`Optimizer::temporaries`] times `largest`.
    fn temporary_bytes(&self, largest: u64) -> u64 {
        largest.saturating_mul(self.temporaries() as u64)
    }

    /// The learning rate before any schedule.
    fn lr(&self) -> f64;

    /// The weight decay for parameters whose group sets none.
    fn weight_decay(&self) -> f64 {
        0.0
    }

    /// Checks that the settings are in range.
    ///
    /// # Errors
    /// Names the setting that is out of range, and its valid range.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// The patterns of full names ([`name_matches`]) in the settings. A pattern that matches no
    /// parameter is refused when a pipeline is built.
    fn patterns(&self) -> &[String] {
        &[]
    }

    /// Updates these parameters in place.
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
