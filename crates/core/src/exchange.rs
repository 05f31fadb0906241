//! Links without a buffer: in which order devices of different processes exchange values.
//!
//! NCCL has no buffers. A send ends when its receive runs, and the exchanges of a device run one
//! after the other. Only what is in one group call runs at the same time, and nothing of a group
//! need end before all of it runs. A receive needs the size of what comes, which its sender
//! announces when it reaches its own group. The lists of actions are correct for links that hold
//! messages, and deadlock without them: in 1F1B, two neighbours each send before they receive.
//!
//! So the transfers of each device become a list of groups:
//!
//! ```text
//! [1] sends that follow each other in the list are one group, and so are receives
//! [2] between two devices, receives take the order of the sends: NCCL has no tags
//! [3] where all devices would wait, a receive moves up into the group in which its device waits
//! ```
//!
//! A receive needs nothing that its device computes, so moving it up breaks no rule. It costs the
//! memory of a value that arrives earlier. [`Exchanges::validate`] proves the result from the lists
//! alone, and knows nothing of how they were made.
//!
//! Votes and verdicts are a few bytes in the memory of the CPU. They take links with a buffer.

mod machine;

use std::collections::HashMap;

use crate::{
    action::{Action, Direction, Op, Transfer},
    ids::{DeviceId, EdgeId},
    lower::{EdgeKind, Program},
};
use machine::Machine;

/// Transfers of one device that run at the same time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Group {
    /// What leaves, in order.
    pub sends: Vec<Action>,
    /// What arrives, in order.
    pub receives: Vec<Action>,
}

impl Group {
    fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty()
    }
}

impl std::fmt::Display for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let transfers = self.sends.iter().chain(&self.receives).map(ToString::to_string);
        write!(f, "{{{}}}", transfers.collect::<Vec<_>>().join(" "))
    }
}

/// The exchanges of a program between processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchanges {
    /// Per device, its groups in order.
    pub devices: Vec<Vec<Group>>,
    /// Messages that a link of an arrived value must hold, where it is more than the capacity of
    /// all links.
    rooms: HashMap<(EdgeId, Direction), usize>,
    /// The capacity of all other links.
    capacity: usize,
    /// How many receives moved up.
    moved: usize,
}

/// Why exchanges are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// The devices wait for each other.
    #[error(
        "deadlock without buffers: {}",
        waiting.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    Deadlock {
        /// The devices that wait.
        waiting: Vec<WaitingDevice>,
    },
    /// Two devices disagree about what passes between them.
    #[error("device {from} sends {sent} to device {to}, which receives {received} at that place")]
    OtherOrder {
        /// The sender.
        from: DeviceId,
        /// The receiver.
        to: DeviceId,
        /// What is sent; "nothing" at the end.
        sent: String,
        /// What is received; "nothing" at the end.
        received: String,
    },
}

/// A device that waits forever.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingDevice {
    /// The device.
    pub device: DeviceId,
    /// The action that its list is at; `None` at the end.
    pub action: Option<Action>,
    /// The group that its exchanges are at; `None` at the end.
    pub group: Option<Group>,
    /// Whether the group runs, and waits for other devices. Otherwise it waits for its own device.
    pub runs: bool,
}

impl std::fmt::Display for WaitingDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device {}", self.device)?;
        if let Some(action) = self.action {
            write!(f, " is at {action}")?;
        }
        if let Some(group) = &self.group {
            let runs = if self.runs { "runs" } else { "is due" };
            write!(f, "{} {group} {runs}", if self.action.is_some() { " while" } else { ":" })?;
        }
        Ok(())
    }
}

impl Exchanges {
    /// The exchanges of `program` between devices of different processes, whose other links hold
    /// `capacity` messages.
    ///
    /// # Errors
    /// [`ExchangeError::Deadlock`]: the program deadlocks even with buffers.
    pub fn new(
        program: &Program,
        process_of: impl Fn(DeviceId) -> usize,
        capacity: usize,
    ) -> Result<Self, ExchangeError> {
        let crossings = Crossings::new(program, process_of);
        let devices = (0..program.devices.len())
            .map(|device| groups(program, &crossings, DeviceId::from_index(device)))
            .collect();
        let rooms = HashMap::new();
        let exchanges = Self { devices, rooms, capacity, moved: 0 };
        let made = Machine::new(program, &crossings, exchanges).complete()?;
        made.validate_among(program, &crossings)?;
        Ok(made)
    }

    /// Proves that the exchanges pass every value of `program` once, that neighbours agree about
    /// the order, and that no device waits forever, without any buffer between processes.
    ///
    /// # Errors
    /// [`ExchangeError`]
    pub fn validate(
        &self,
        program: &Program,
        process_of: impl Fn(DeviceId) -> usize,
    ) -> Result<(), ExchangeError> {
        self.validate_among(program, &Crossings::new(program, process_of))
    }

    fn validate_among(
        &self,
        program: &Program,
        crossings: &Crossings,
    ) -> Result<(), ExchangeError> {
        self.check_order(crossings)?;
        Machine::new(program, crossings, self.clone()).run()
    }

    /// The messages that a link holds.
    pub fn room(&self, edge: EdgeId, direction: Direction) -> usize {
        self.rooms.get(&(edge, direction)).copied().unwrap_or(self.capacity)
    }

    /// How many receives had to move up, so that the devices do not wait for each other.
    pub fn moved(&self) -> usize {
        self.moved
    }

    /// Checks that between each two devices, values are received in the order in which they are
    /// sent.
    fn check_order(&self, crossings: &Crossings) -> Result<(), ExchangeError> {
        type Passed = HashMap<(DeviceId, DeviceId), Vec<Transfer>>;
        let (mut sent, mut received) = (Passed::new(), Passed::new());
        for group in self.devices.iter().flatten() {
            let lists = [(&group.sends, &mut sent), (&group.receives, &mut received)];
            for (actions, passed) in lists {
                for transfer in actions.iter().filter_map(|action| action.op.transfer()) {
                    let Some(ends) = crossings.ends(transfer) else { continue };
                    passed.entry(ends).or_default().push(transfer);
                }
            }
        }
        let mut pairs: Vec<_> = sent.keys().chain(received.keys()).copied().collect();
        pairs.sort_unstable();
        pairs.dedup();
        let none = Vec::new();
        for (from, to) in pairs {
            let there = sent.get(&(from, to)).unwrap_or(&none);
            let here = received.get(&(from, to)).unwrap_or(&none);
            let differs =
                (0..there.len().max(here.len())).find(|&at| there.get(at) != here.get(at));
            if let Some(at) = differs {
                let name = |transfer: Option<&Transfer>| {
                    transfer.map_or_else(|| "nothing".to_owned(), ToString::to_string)
                };
                let (sent, received) = (name(there.get(at)), name(here.get(at)));
                return Err(ExchangeError::OtherOrder { from, to, sent, received });
            }
        }
        Ok(())
    }
}

/// Which transfers pass between processes, and between which devices.
struct Crossings {
    /// By edge, the devices of its two ends; `None` if they are in one process, or for a vote.
    edges: Vec<Option<(DeviceId, DeviceId)>>,
}

impl Crossings {
    fn new(program: &Program, process_of: impl Fn(DeviceId) -> usize) -> Self {
        let placement = program.placement();
        let ends = |edge: &crate::lower::Edge| {
            let from = placement.get(edge.from.index()).copied().flatten()?;
            let to = placement.get(edge.to.index()).copied().flatten()?;
            let crosses = edge.kind != EdgeKind::Vote && process_of(from) != process_of(to);
            crosses.then_some((from, to))
        };
        Self { edges: program.topology.edges.iter().map(ends).collect() }
    }

    /// The devices that send and receive a message; `None` if it does not pass between processes.
    fn ends(&self, transfer: Transfer) -> Option<(DeviceId, DeviceId)> {
        let (from, to) = self.edges.get(transfer.edge.index()).copied().flatten()?;
        Some(match transfer.direction {
            Direction::Forward => (from, to),
            Direction::Backward => (to, from),
        })
    }
}

/// The groups of a device before any receive moves up.
fn groups(program: &Program, crossings: &Crossings, device: DeviceId) -> Vec<Group> {
    let crossing = |action: &Action| crossings.ends(action.op.transfer()?);
    let mut placed: Vec<(usize, usize, Action)> = Vec::new();
    for (at, action) in program.devices[device.index()].iter().enumerate() {
        if matches!(action.op, Op::Send(_)) && crossing(action).is_some() {
            placed.push((at, 0, *action));
        }
    }
    for source in (0..program.devices.len()).map(DeviceId::from_index) {
        placed.extend(receives_from(program, crossings, source, device));
    }
    placed.sort_unstable_by_key(|(at, order, _)| (*at, *order));
    let mut groups: Vec<Group> = Vec::new();
    let mut next = None;
    for (at, _, action) in placed {
        let sends = matches!(action.op, Op::Send(_));
        let is_alike = |group: &Group| sends != group.sends.is_empty();
        let follows = next == Some(at) || next == Some(at + 1);
        if !follows || !groups.last().is_some_and(is_alike) {
            groups.push(Group::default());
        }
        if let Some(group) = groups.last_mut() {
            if sends { &mut group.sends } else { &mut group.receives }.push(action);
        }
        next = Some(at + 1);
    }
    groups
}

/// What `device` receives from `source`, in the order in which it is sent. Each receive comes where
/// its value, or one that is sent after it, is needed first. Returns it with its position in the
/// device's list, and its order at that position.
fn receives_from(
    program: &Program,
    crossings: &Crossings,
    source: DeviceId,
    device: DeviceId,
) -> Vec<(usize, usize, Action)> {
    let is_ours = |transfer: &Transfer| crossings.ends(*transfer) == Some((source, device));
    let mut needed: HashMap<Transfer, (usize, Action)> = HashMap::new();
    for (at, action) in program.devices[device.index()].iter().enumerate() {
        if let Op::Receive(transfer) = action.op
            && is_ours(&transfer)
        {
            needed.insert(transfer, (at, *action));
        }
    }
    let sent = program.devices[source.index()].iter().filter_map(|action| match action.op {
        Op::Send(transfer) if is_ours(&transfer) => needed.get(&transfer).copied(),
        _ => None,
    });
    let mut receives: Vec<(usize, usize, Action)> =
        sent.enumerate().map(|(order, (at, action))| (at, order, action)).collect();
    let mut first = usize::MAX;
    for (at, ..) in receives.iter_mut().rev() {
        first = first.min(*at);
        *at = first;
    }
    receives
}
