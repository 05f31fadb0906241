//! Schedules: the order of forwards and backwards on each device. Each is a pure function of the
//! device, K and M in its own file, drawn above its generator. [`custom`] holds a user's schedules.
//!
//! A schedule consists of F and B, or of F, I and W if it splits the backward. [`crate::remat`]
//! adds R and [`crate::lower`] adds everything else.

pub mod custom;
mod forward_only;
mod gpipe;
mod interleaved;
mod one_f_one_b;
mod zb_h1;

use std::{fmt, str::FromStr, sync::Arc};

pub use self::custom::CustomSchedule;
pub use crate::action::ActionLists;
use crate::{
    action::{Action, Op},
    ids::{MicroBatch, StageId},
};

/// The most stages that a schedule puts on one device.
const CHUNKS_MAX: u32 = 64;

/// The available schedules.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// All forwards, then all backwards (Huang et al. 2019, section 2).
    GPipe,
    /// One forward and one backward alternate (PipeDream-Flush; Narayanan et al. 2021, section
    /// 2.2).
    OneFOneB,
    /// 1F1B with this many stages (V) on each device (Narayanan et al. 2021, section 2.2): a
    /// smaller bubble, but more messages and bytes. `interleaved:2` in text.
    Interleaved(u32),
    /// 1F1B with each backward in two halves; the second half fills the bubble (Qi et al. 2023,
    /// section 2.3).
    ZbH1,
    /// A user's schedule, for example from a file, for one K and one M. `file:NAME` in text.
    Custom(Arc<CustomSchedule>),
    /// Forwards only: evaluation and prediction.
    ForwardOnly,
}

impl Schedule {
    /// The schedules that the planner searches exactly: one stage per device, whole backwards.
    pub const SEARCHED_EXACTLY: [Schedule; 2] = [Schedule::GPipe, Schedule::OneFOneB];
    /// One schedule of each kind that is defined by K and M alone. Names are parsed from this list,
    /// and tests run every schedule in it: golden drawings, the mock runtime and the transparency
    /// matrix.
    pub const NAMED: [Schedule; 4] =
        [Schedule::GPipe, Schedule::OneFOneB, Schedule::Interleaved(2), Schedule::ZbH1];

    /// The compute actions of `devices` (K) devices for `micro_batches` (M) micro-batches: F and B,
    /// or F, I and W. A custom schedule has a fixed number of devices; micro-batches from M on are
    /// left out.
    pub fn actions(&self, devices: usize, micro_batches: usize) -> ActionLists {
        let list = |device: usize| match self {
            Schedule::GPipe => gpipe::actions(device, devices, micro_batches),
            Schedule::OneFOneB => one_f_one_b::actions(device, devices, micro_batches),
            Schedule::ZbH1 => zb_h1::actions(device, devices, micro_batches),
            Schedule::ForwardOnly => forward_only::actions(device, devices, micro_batches),
            Schedule::Interleaved(chunks) => {
                interleaved::actions(device, devices, *chunks as usize, micro_batches)
            }
            Schedule::Custom(own) => {
                let list = own.lists().get(device).map_or(&[][..], Vec::as_slice);
                without(list.iter().copied(), micro_batches)
            }
        };
        (0..devices).map(list).collect()
    }

    /// The forwards of [`Schedule::actions`] alone, on the same stages and devices, for evaluation
    /// and prediction.
    pub fn forwards(&self, devices: usize, micro_batches: usize) -> ActionLists {
        if let Schedule::Custom(_) = self {
            // A custom schedule may get more micro-batches here than it has, so each micro-batch
            // goes through all stages in order.
            let mut lists = vec![Vec::new(); devices];
            let placement = self.placement(devices);
            for m in 0..micro_batches {
                for (stage, &device) in placement.iter().enumerate() {
                    lists[device].push(forward(stage, m));
                }
            }
            return lists;
        }
        let mut lists = self.actions(devices, micro_batches);
        for list in &mut lists {
            list.retain(|action| matches!(action.op, Op::Forward(_)));
        }
        lists
    }

    /// The same actions, all forwards before all backwards: the order of a step that runs in parts.
    /// The caller works between the two. A backward can directly follow its forward only if it is
    /// the first backward and its forward was the last, for example with M = 1.
    pub fn in_parts(&self, devices: usize, micro_batches: usize) -> ActionLists {
        let mut lists = self.forwards(devices, micro_batches);
        for (list, actions) in lists.iter_mut().zip(self.actions(devices, micro_batches)) {
            let backwards = actions.into_iter();
            list.extend(backwards.filter(|action| !matches!(action.op, Op::Forward(_))));
        }
        lists
    }

    /// The number of stages that this schedule makes on `devices` devices.
    ///
    /// # Errors
    /// [`DoesNotFit`]: a custom schedule is for another number of devices.
    pub fn stages(&self, devices: usize) -> Result<usize, DoesNotFit> {
        match self {
            Schedule::Interleaved(chunks) => Ok(devices.saturating_mul(*chunks as usize)),
            Schedule::Custom(own) if own.lists().len() == devices => Ok(own.stages()),
            Schedule::Custom(own) => Err(DoesNotFit {
                schedule: self.to_string(),
                what: "devices",
                own: own.lists().len(),
                asked: devices,
            }),
            Schedule::GPipe | Schedule::OneFOneB | Schedule::ZbH1 | Schedule::ForwardOnly => {
                Ok(devices)
            }
        }
    }

    /// The number of devices for `stages` stages, rounded up.
    pub fn devices(&self, stages: usize) -> usize {
        match self {
            Schedule::Interleaved(chunks) => stages.div_ceil((*chunks).max(1) as usize),
            Schedule::Custom(own) => own.lists().len(),
            Schedule::GPipe | Schedule::OneFOneB | Schedule::ZbH1 | Schedule::ForwardOnly => stages,
        }
    }

    /// Checks that the schedule can run `micro_batches` (M) micro-batches.
    ///
    /// # Errors
    /// [`DoesNotFit`]: a custom schedule is for another number.
    pub fn check_micro_batches(&self, micro_batches: usize) -> Result<(), DoesNotFit> {
        match self {
            Schedule::Custom(own) if own.micro_batches() != micro_batches => Err(DoesNotFit {
                schedule: self.to_string(),
                what: "micro-batches",
                own: own.micro_batches(),
                asked: micro_batches,
            }),
            _ => Ok(()),
        }
    }

    /// The device of each stage.
    pub fn placement(&self, devices: usize) -> Vec<usize> {
        let mut placement = Vec::new();
        for (device, list) in self.actions(devices, 1).iter().enumerate() {
            for action in list {
                let stage = action.stage.index();
                if placement.len() <= stage {
                    placement.resize(stage + 1, 0);
                }
                placement[stage] = device;
            }
        }
        placement
    }

    /// Whether the schedule splits backwards into two halves.
    pub fn splits(&self) -> bool {
        match self {
            Schedule::ZbH1 => true,
            Schedule::Custom(own) => {
                own.lists().iter().flatten().any(|a| matches!(a.op, Op::BackwardInput(_)))
            }
            Schedule::GPipe
            | Schedule::OneFOneB
            | Schedule::Interleaved(_)
            | Schedule::ForwardOnly => false,
        }
    }

    /// Whether every device has one stage and backwards are whole. The planner's search is exact
    /// only for such schedules.
    pub fn is_searched_exactly(&self) -> bool {
        Self::SEARCHED_EXACTLY.contains(self)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schedule::GPipe => f.write_str("gpipe"),
            Schedule::OneFOneB => f.write_str("1f1b"),
            Schedule::Interleaved(chunks) => write!(f, "interleaved:{chunks}"),
            Schedule::ZbH1 => f.write_str("zb-h1"),
            Schedule::Custom(own) => write!(f, "file:{}", own.name()),
            Schedule::ForwardOnly => f.write_str("forward-only"),
        }
    }
}

/// A schedule that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no schedule '{0}': use gpipe, 1f1b, interleaved:V (V stages on each device, from 2 \
    to {CHUNKS_MAX}), zb-h1, or, in a command, file:PATH"
)]
pub struct UnknownSchedule(String);

/// A custom schedule that is for another number of devices or micro-batches.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "schedule {schedule} is for {own} {what}, not for {asked}: ask for {own}, or write another file"
)]
pub struct DoesNotFit {
    schedule: String,
    what: &'static str,
    own: usize,
    asked: usize,
}

impl FromStr for Schedule {
    type Err = UnknownSchedule;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownSchedule(text.to_owned());
        if let Some(chunks) = text.strip_prefix("interleaved:") {
            return match chunks.parse() {
                Ok(chunks) if (2..=CHUNKS_MAX).contains(&chunks) => Ok(Self::Interleaved(chunks)),
                _ => Err(unknown()),
            };
        }
        Self::NAMED.into_iter().find(|named| named.to_string() == text).ok_or_else(unknown)
    }
}

fn action(stage: usize, op: fn(MicroBatch) -> Op, micro_batch: usize) -> Action {
    Action { stage: StageId::from_index(stage), op: op(MicroBatch::from_index(micro_batch)) }
}

fn forward(stage: usize, micro_batch: usize) -> Action {
    action(stage, Op::Forward, micro_batch)
}

fn backward(stage: usize, micro_batch: usize) -> Action {
    action(stage, Op::Backward, micro_batch)
}

/// Drops the micro-batches from `micro_batches` on. The rest of a correct order is a correct order.
fn without(list: impl Iterator<Item = Action>, micro_batches: usize) -> Vec<Action> {
    let is_there =
        |action: &Action| action.op.computes().is_some_and(|m| m.index() < micro_batches);
    list.filter(is_there).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The match makes a new variant a compile error here: add one of its kind to `NAMED`, unless
    /// its lists depend on more than K and M.
    #[test]
    fn oracle_every_schedule_of_k_and_m_alone_is_named() {
        let kind = |schedule: &Schedule| match schedule {
            Schedule::GPipe => Some(0),
            Schedule::OneFOneB => Some(1),
            Schedule::Interleaved(_) => Some(2),
            Schedule::ZbH1 => Some(3),
            Schedule::Custom(_) | Schedule::ForwardOnly => None,
        };
        let kinds: Vec<_> = Schedule::NAMED.iter().filter_map(kind).collect();
        assert_eq!(kinds, [0, 1, 2, 3]);
        for schedule in Schedule::NAMED {
            assert_eq!(schedule.to_string().parse(), Ok(schedule));
        }
    }
}
