//! Schedules: which device holds which stage, and the order of forwards and backwards on each
//! device. Each schedule is a pure function of K and M in its own file, drawn above its generator.
//! [`custom`] holds a user's schedules, and [`csv`] reads and writes PyTorch's files.
//!
//! | file | schedules |
//! |---|---|
//! | `gpipe`, `one_f_one_b`, `zb_h1` | one stage on each device |
//! | `interleaved`, `breadth_first`, `interleaved_zb` | V stages on each device, round robin |
//! | `v` | two stages on each device, in a V: `zb-v`, `v-half`, `v-min` |
//! | `fill` | where W goes, for those that only order F and I |
//!
//! A schedule consists of F and B, or of F, I and W if it splits the backward. [`crate::remat`]
//! adds R and [`crate::lower`] adds everything else.

mod breadth_first;
pub mod csv;
pub mod custom;
mod fill;
mod forward_only;
mod gpipe;
mod interleaved;
mod interleaved_zb;
mod one_f_one_b;
mod v;
mod zb_h1;

use std::{fmt, str::FromStr, sync::Arc};

pub use self::custom::CustomSchedule;
pub use crate::action::ActionLists;
use crate::{
    action::{Action, Op},
    ids::{MicroBatch, StageId},
    units::counted,
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
    /// Two stages on each device in a V, each backward in two halves (Qi et al. 2023, section 6):
    /// the smallest bubble, with 1F1B's memory on every device.
    ZbV,
    /// Like ZB-V with about half of 1F1B's memory, and a larger bubble (Qi et al. 2024).
    VHalf,
    /// Like ZB-V with about a third of 1F1B's memory, and a larger bubble (Qi et al. 2024).
    VMin,
    /// All micro-batches on one stage of a device before the next stage, with V stages on each
    /// device (Lamy-Poirier 2022). `breadth-first:3` in text; `breadth-first` has two.
    BreadthFirst(u32),
    /// Interleaved 1F1B with V stages on each device and each backward in two halves.
    /// `interleaved-zb:2` in text.
    InterleavedZb(u32),
    /// A user's schedule, for example from a file, for one K and one M. `file:NAME` in text. Or one
    /// that was made for a plan: `auto`.
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
    pub const NAMED: [Schedule; 9] = [
        Schedule::GPipe,
        Schedule::OneFOneB,
        Schedule::Interleaved(2),
        Schedule::ZbH1,
        Schedule::ZbV,
        Schedule::VHalf,
        Schedule::VMin,
        Schedule::BreadthFirst(2),
        Schedule::InterleavedZb(2),
    ];

    /// The compute actions of `devices` (K) devices for `micro_batches` (M) micro-batches: F and B,
    /// or F, I and W. A custom schedule has a fixed number of devices; micro-batches from M on are
    /// left out.
    pub fn actions(&self, devices: usize, micro_batches: usize) -> ActionLists {
        let each = |list: &dyn Fn(usize) -> Vec<Action>| (0..devices).map(list).collect();
        match self {
            Schedule::GPipe => each(&|d| gpipe::actions(d, devices, micro_batches)),
            Schedule::OneFOneB => each(&|d| one_f_one_b::actions(d, devices, micro_batches)),
            Schedule::ZbH1 => each(&|d| zb_h1::actions(d, devices, micro_batches)),
            Schedule::ForwardOnly => each(&|d| forward_only::actions(d, devices, micro_batches)),
            Schedule::Interleaved(chunks) => {
                each(&|d| interleaved::actions(d, devices, *chunks as usize, micro_batches))
            }
            Schedule::BreadthFirst(chunks) => {
                each(&|d| breadth_first::actions(d, devices, *chunks as usize, micro_batches))
            }
            Schedule::InterleavedZb(chunks) => {
                interleaved_zb::actions(devices, *chunks as usize, micro_batches)
            }
            Schedule::ZbV => v::zb_v(devices, micro_batches),
            Schedule::VHalf => v::v_half(devices, micro_batches),
            Schedule::VMin => v::v_min(devices, micro_batches),
            Schedule::Custom(own) => each(&|d| {
                let list = own.lists().get(d).map_or(&[][..], Vec::as_slice);
                without(list.iter().copied(), micro_batches)
            }),
        }
    }

    /// How many stages lie on a device, unless a file says so.
    fn chunks(&self) -> Option<usize> {
        match self {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::ZbH1 | Schedule::ForwardOnly => {
                Some(1)
            }
            Schedule::ZbV | Schedule::VHalf | Schedule::VMin => Some(2),
            Schedule::Interleaved(chunks)
            | Schedule::BreadthFirst(chunks)
            | Schedule::InterleavedZb(chunks) => Some(*chunks as usize),
            Schedule::Custom(_) => None,
        }
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
        match (self, self.chunks()) {
            (_, Some(chunks)) => Ok(devices.saturating_mul(chunks)),
            (Schedule::Custom(own), None) if own.lists().len() != devices => Err(DoesNotFit {
                schedule: self.to_string(),
                what: "device",
                own: own.lists().len(),
                asked: devices,
            }),
            (Schedule::Custom(own), None) => Ok(own.stages()),
            (_, None) => Ok(devices),
        }
    }

    /// The number of devices for `stages` stages, rounded up.
    pub fn devices(&self, stages: usize) -> usize {
        match (self, self.chunks()) {
            (Schedule::Custom(own), _) => own.lists().len(),
            (_, chunks) => stages.div_ceil(chunks.unwrap_or(1).max(1)),
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
                what: "micro-batch",
                own: own.micro_batches(),
                asked: micro_batches,
            }),
            _ => Ok(()),
        }
    }

    /// The device of each stage.
    pub fn placement(&self, devices: usize) -> Vec<usize> {
        match (self, self.chunks()) {
            (Schedule::ZbV | Schedule::VHalf | Schedule::VMin, _) => v::placement(devices),
            (Schedule::Custom(own), _) => own.placement(),
            (_, chunks) => round_robin(devices, chunks.unwrap_or(1)),
        }
    }

    /// Whether the schedule splits backwards into two halves.
    pub fn splits(&self) -> bool {
        match self {
            Schedule::ZbH1
            | Schedule::ZbV
            | Schedule::VHalf
            | Schedule::VMin
            | Schedule::InterleavedZb(_) => true,
            Schedule::Custom(own) => {
                own.lists().iter().flatten().any(|a| matches!(a.op, Op::BackwardInput(_)))
            }
            Schedule::GPipe
            | Schedule::OneFOneB
            | Schedule::Interleaved(_)
            | Schedule::BreadthFirst(_)
            | Schedule::ForwardOnly => false,
        }
    }

    /// The schedule in text that [`FromStr`] reads again, also if it was made for a plan: its order
    /// is then part of the text. A schedule from a file is only named.
    pub fn in_full(&self) -> String {
        match self {
            Schedule::Custom(own) if own.is_made() => {
                format!("{}: {}", custom::MADE, own.in_one_line())
            }
            _ => self.to_string(),
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
            Schedule::ZbV => f.write_str("zb-v"),
            Schedule::VHalf => f.write_str("v-half"),
            Schedule::VMin => f.write_str("v-min"),
            Schedule::BreadthFirst(chunks) => write!(f, "breadth-first:{chunks}"),
            Schedule::InterleavedZb(chunks) => write!(f, "interleaved-zb:{chunks}"),
            Schedule::Custom(own) if own.is_made() => f.write_str(custom::MADE),
            Schedule::Custom(own) => write!(f, "file:{}", own.name()),
            Schedule::ForwardOnly => f.write_str("forward-only"),
        }
    }
}

/// A schedule that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no schedule '{0}': use gpipe, 1f1b, zb-h1, zb-v, v-half, v-min, interleaved:V, \
    interleaved-zb:V or breadth-first:V (V stages on each device, from 2 to {CHUNKS_MAX}), or, in \
    a command, file:PATH"
)]
pub struct UnknownSchedule(String);

/// A custom schedule that is for another number of devices or micro-batches.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "schedule {schedule} is for {}, not for {asked}: ask for {own}, or write another file",
    counted(own, what)
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
        if let Some(order) = text.strip_prefix(custom::MADE).and_then(|rest| rest.strip_prefix(':'))
        {
            let made = CustomSchedule::made_from(order);
            return made.map(|made| Self::Custom(made.into())).map_err(|_| {
                let shown: String = text.chars().take(40).collect();
                UnknownSchedule(shown + "..")
            });
        }
        if text == "breadth-first" {
            return Ok(Self::BreadthFirst(2));
        }
        if let Some((name, chunks)) = text.split_once(':') {
            let chunks = chunks.parse().ok().filter(|chunks| (2..=CHUNKS_MAX).contains(chunks));
            return match (name, chunks) {
                ("interleaved", Some(chunks)) => Ok(Self::Interleaved(chunks)),
                ("interleaved-zb", Some(chunks)) => Ok(Self::InterleavedZb(chunks)),
                ("breadth-first", Some(chunks)) => Ok(Self::BreadthFirst(chunks)),
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

/// The device of each stage if every K-th stage lies on the same device.
fn round_robin(devices: usize, chunks: usize) -> Vec<usize> {
    (0..devices * chunks).map(|stage| stage % devices).collect()
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
            Schedule::ZbV => Some(4),
            Schedule::VHalf => Some(5),
            Schedule::VMin => Some(6),
            Schedule::BreadthFirst(_) => Some(7),
            Schedule::InterleavedZb(_) => Some(8),
            Schedule::Custom(_) | Schedule::ForwardOnly => None,
        };
        let kinds: Vec<_> = Schedule::NAMED.iter().filter_map(kind).collect();
        assert_eq!(kinds, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        for schedule in Schedule::NAMED {
            assert_eq!(schedule.to_string().parse(), Ok(schedule));
        }
    }
}
