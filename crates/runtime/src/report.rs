//! A worker's results for a step.

use gpipe_core::{Bytes, StageId, simulate::TimedAction};

use crate::stage::StageExecutor;

/// One worker's part of a step.
pub struct Report<E: StageExecutor> {
    /// The executed actions, with times.
    pub actions: Vec<TimedAction>,
    /// The outcomes of its stages; empty if the step failed.
    pub outcomes: Vec<(StageId, E::Outcome)>,
    /// Bytes of values that the worker sent.
    pub sent: Bytes,
}
