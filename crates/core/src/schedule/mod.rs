//! Schedules: for each device, the order of its forwards and backwards. Each is a pure function of
//! (K, M) in a file of its own, drawn above its generator; one stage per device.
//!
//! A schedule says only F and B. [`crate::remat`] adds R, [`crate::lower`] everything else.

mod forward_only;
mod gpipe;
mod one_f_one_b;

use std::{fmt, str::FromStr};

use crate::{
    action::{Action, Op},
    ids::{MicroBatch, StageId},
};

/// Per device, its ordered list of actions.
pub type ActionLists = Vec<Vec<Action>>;

/// The schedules by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// All forwards, then all backwards (Huang et al. 2019, section 2).
    GPipe,
    /// One forward, one backward in turn (PipeDream-Flush; Narayanan et al. 2021, section 2.2).
    OneFOneB,
    /// Forwards only: evaluation and prediction.
    ForwardOnly,
}

impl Schedule {
    /// The schedules that train.
    pub const TRAINING: [Schedule; 2] = [Schedule::GPipe, Schedule::OneFOneB];

    /// The compute actions of `stages` (K) devices for `micro_batches` (M): only F and B.
    pub fn actions(self, stages: usize, micro_batches: usize) -> ActionLists {
        let one_stage = match self {
            Schedule::GPipe => gpipe::actions,
            Schedule::OneFOneB => one_f_one_b::actions,
            Schedule::ForwardOnly => forward_only::actions,
        };
        (0..stages).map(|stage| one_stage(stage, stages, micro_batches)).collect()
    }

    /// The name in configurations and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::GPipe => "gpipe",
            Schedule::OneFOneB => "1f1b",
            Schedule::ForwardOnly => "forward-only",
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A schedule that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no schedule '{0}': use gpipe or 1f1b")]
pub struct UnknownSchedule(String);

impl FromStr for Schedule {
    type Err = UnknownSchedule;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::TRAINING
            .into_iter()
            .find(|schedule| schedule.name() == text)
            .ok_or_else(|| UnknownSchedule(text.to_owned()))
    }
}

fn forward(stage: usize, micro_batch: usize) -> Action {
    Action {
        stage: StageId::from_index(stage),
        op: Op::Forward(MicroBatch::from_index(micro_batch)),
    }
}

fn backward(stage: usize, micro_batch: usize) -> Action {
    Action {
        stage: StageId::from_index(stage),
        op: Op::Backward(MicroBatch::from_index(micro_batch)),
    }
}
