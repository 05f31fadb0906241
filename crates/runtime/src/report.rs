//! What a worker gives back of a step.

use gpipe_core::{Bytes, StageId, simulate::TimedAction};

use crate::stage::StageExecutor;

/// How a worker's part of a step went.
pub struct Report<E: StageExecutor> {
    /// What it did, with times.
    pub actions: Vec<TimedAction>,
    /// What its stages give back; empty if the step failed.
    pub outcomes: Vec<(StageId, E::Outcome)>,
    /// Bytes of values that it sent.
    pub sent: Bytes,
}
