//! Devices and their exchanges on an abstract machine without times.
//!
//! Each device runs its list, and beside it its groups:
//!
//! ```text
//! due        until its sends have been made, and there is room for what it receives
//! announced  it has said what it sends; until all that it receives is announced
//! running    until all groups that it meets run, and all that those meet, and so on
//! ```
//!
//! Groups that meet end together. NCCL may do more: but in which order it passes the tensors of a
//! group, and connects processes for the first time, is not ours to say.
//!
//! Whatever can advance does: an advance never takes from another one what it needs, so the order
//! of advances does not matter (Kahn 1974).

use std::collections::HashMap;

use super::{Crossings, ExchangeError, Exchanges, Group, WaitingDevice};
use crate::{
    action::{Action, Direction, Op, Transfer},
    ids::{DeviceId, EdgeId},
    lower::Program,
};

type Half = (EdgeId, Direction);

/// How many messages have come how far on one direction of an edge.
#[derive(Clone, Copy, Default)]
struct Passed {
    /// Put in by the sender's list.
    sent: usize,
    /// Taken and announced by a group of the sender.
    taken: usize,
    /// For which the receiver has kept room.
    expected: usize,
    /// That the receiver's list may take.
    arrived: usize,
    /// Taken by the receiver's list.
    received: usize,
}

impl Passed {
    /// The messages for which the receiver keeps room. Those of its own process need none.
    fn waiting(&self) -> usize {
        self.expected.saturating_sub(self.received)
    }
}

/// How far a group is.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Due,
    Announced,
    Running,
}

/// How far a device is.
#[derive(Clone, Default)]
struct Place {
    /// The position in its list.
    list: usize,
    /// The position in its groups.
    group: usize,
    /// How far that group is.
    phase: Phase,
    /// The messages for which the device needs room before that group is announced.
    held: HashMap<Half, usize>,
}

pub(super) struct Machine<'a> {
    program: &'a Program,
    crossings: &'a Crossings,
    exchanges: Exchanges,
    places: Vec<Place>,
    passed: HashMap<Half, Passed>,
}

fn half(transfer: Transfer) -> Half {
    (transfer.edge, transfer.direction)
}

fn transfers(actions: &[Action]) -> impl Iterator<Item = Transfer> {
    actions.iter().filter_map(|action| action.op.transfer())
}

impl<'a> Machine<'a> {
    pub(super) fn new(
        program: &'a Program,
        crossings: &'a Crossings,
        exchanges: Exchanges,
    ) -> Self {
        let places = vec![Place::default(); program.devices.len()];
        Self { program, crossings, exchanges, places, passed: HashMap::new() }
    }

    /// Runs to the end.
    pub(super) fn run(mut self) -> Result<(), ExchangeError> {
        while self.advance() {}
        self.finish()
    }

    /// Runs to the end. Moves a receive up, or makes room for it, where every device waits.
    pub(super) fn complete(mut self) -> Result<Exchanges, ExchangeError> {
        while self.advance() || self.resolve() {}
        self.finish()?;
        let mut exchanges = self.exchanges;
        for groups in &mut exchanges.devices {
            groups.retain(|group| !group.is_empty());
        }
        Ok(exchanges)
    }

    fn of(&mut self, transfer: Transfer) -> &mut Passed {
        self.passed.entry(half(transfer)).or_default()
    }

    fn group(&self, device: usize) -> Option<&Group> {
        self.exchanges.devices.get(device)?.get(self.places[device].group)
    }

    /// Advances everything as far as it goes without another device. Returns whether anything
    /// moved.
    fn advance(&mut self) -> bool {
        let mut moved = false;
        for device in 0..self.places.len() {
            while self.step(device) || self.announce(device) || self.start(device) {
                moved = true;
            }
        }
        moved || self.meet()
    }

    /// Runs the next action of a device's list. Returns whether it could.
    fn step(&mut self, device: usize) -> bool {
        let Some(&action) = self.program.devices[device].get(self.places[device].list) else {
            return false;
        };
        let capacity = self.exchanges.capacity;
        let can = match action.op {
            Op::Send(transfer) => {
                let crosses = self.crossings.ends(transfer).is_some();
                let passed = self.of(transfer);
                let gone = if crosses { passed.taken } else { passed.received };
                let can = passed.sent - gone < capacity;
                passed.sent += usize::from(can);
                if !crosses {
                    passed.arrived = passed.sent;
                }
                can
            }
            Op::Receive(transfer) => {
                let passed = self.of(transfer);
                let can = passed.received < passed.arrived;
                passed.received += usize::from(can);
                can
            }
            _ => true,
        };
        self.places[device].list += usize::from(can);
        can
    }

    /// The transfers of a device's group, if it is in `phase`: sends and receives.
    fn transfers_in(&self, device: usize, phase: Phase) -> Option<[Vec<Transfer>; 2]> {
        let group = self.group(device).filter(|_| self.places[device].phase == phase)?;
        Some([&group.sends, &group.receives].map(|own| transfers(own).collect()))
    }

    /// Announces the next group of a device. Returns whether it could.
    fn announce(&mut self, device: usize) -> bool {
        let Some([sends, receives]) = self.transfers_in(device, Phase::Due) else { return false };
        if !sends.iter().all(|own| self.is_made(*own, &sends))
            || receives.iter().any(|own| self.lacks_room(*own, &receives))
        {
            return false;
        }
        sends.into_iter().for_each(|own| self.of(own).taken += 1);
        receives.into_iter().for_each(|own| self.of(own).expected += 1);
        let held = self.passed.iter().map(|(own, passed)| (*own, passed.waiting()));
        self.places[device].held = held.collect();
        self.places[device].phase = Phase::Announced;
        true
    }

    /// Starts the announced group of a device. Returns whether it could.
    fn start(&mut self, device: usize) -> bool {
        let Some([sends, receives]) = self.transfers_in(device, Phase::Announced) else {
            return false;
        };
        let is_announced = |own: &Transfer| {
            let passed = self.passed.get(&half(*own)).copied().unwrap_or_default();
            passed.taken >= passed.expected
        };
        if !receives.iter().all(is_announced) {
            return false;
        }
        let place = &mut self.places[device];
        place.phase = Phase::Running;
        if sends.is_empty() && receives.is_empty() {
            self.end_group(device);
        }
        true
    }

    /// Whether the sender's list has put in a message, and those of its group before it.
    fn is_made(&self, own: Transfer, group: &[Transfer]) -> bool {
        let passed = self.passed.get(&half(own)).copied().unwrap_or_default();
        let count = group.iter().filter(|other| half(**other) == half(own)).count();
        passed.sent - passed.taken >= count
    }

    /// Whether there is no room for a message of a group that has not started.
    fn lacks_room(&self, own: Transfer, group: &[Transfer]) -> bool {
        let passed = self.passed.get(&half(own)).copied().unwrap_or_default();
        let count = group.iter().filter(|other| half(**other) == half(own)).count();
        let room = self.exchanges.room(own.edge, own.direction);
        passed.waiting() + count > room
    }

    /// The device at the other end of a transfer, and whether its running group has it.
    fn other(&self, device: usize, own: Transfer, sends: bool) -> Option<(usize, bool)> {
        let (from, to) = self.crossings.ends(own)?;
        let other = if sends { to.index() } else { from.index() };
        if (if sends { from } else { to }).index() != device {
            return None; // it is in the group of a device that is none of its ends
        }
        let met = self.transfers_in(other, Phase::Running).is_some_and(|[its_sends, receives]| {
            if sends { receives } else { its_sends }.contains(&own)
        });
        Some((other, met))
    }

    /// Ends all groups that meet only groups that run. Returns whether there were any.
    fn meet(&mut self) -> bool {
        let groups: Vec<_> = (0..self.places.len())
            .map(|device| self.transfers_in(device, Phase::Running))
            .collect();
        let mut ends: Vec<bool> = groups.iter().map(Option::is_some).collect();
        loop {
            let left_alone = |device: usize| {
                let Some([sends, receives]) = &groups[device] else { return false };
                let sends = sends.iter().map(|own| (own, true));
                let mut all = sends.chain(receives.iter().map(|own| (own, false)));
                !all.all(|(own, sends)| {
                    self.other(device, *own, sends).is_some_and(|(at, met)| met && ends[at])
                })
            };
            let alone = (0..ends.len()).find(|&device| ends[device] && left_alone(device));
            match alone {
                Some(device) => ends[device] = false,
                None => break,
            }
        }
        for (device, group) in groups.into_iter().enumerate().filter(|(device, _)| ends[*device]) {
            for own in group.into_iter().flat_map(|[_, receives]| receives) {
                self.of(own).arrived += 1;
            }
            self.end_group(device);
        }
        ends.contains(&true)
    }

    fn end_group(&mut self, device: usize) {
        let place = &mut self.places[device];
        place.phase = Phase::Due;
        place.group += 1;
    }

    /// Every device waits. Splits a group that only lacks room for all that it receives. Otherwise
    /// finds a send that runs and whose receive does not, and brings that receive forward. Returns
    /// whether there was one.
    fn resolve(&mut self) -> bool {
        if (0..self.places.len()).any(|device| self.split(device)) {
            return true;
        }
        let mut waiting = Vec::new();
        for device in 0..self.places.len() {
            let [sends, _] = self.transfers_in(device, Phase::Running).unwrap_or_default();
            for own in sends {
                if let Some((other, false)) = self.other(device, own, true) {
                    // A group that only receives may end by itself.
                    let group = self.transfers_in(other, Phase::Running);
                    waiting.push((group.is_some_and(|[sends, _]| sends.is_empty()), own, other));
                }
            }
        }
        waiting.sort_by_key(|(only_receives, ..)| *only_receives);
        waiting.into_iter().any(|(_, own, other)| self.bring_forward(own, other))
    }

    /// Leaves the receives for which there is no room yet to a group of their own.
    fn split(&mut self, device: usize) -> bool {
        let Some([_, receives]) = self.transfers_in(device, Phase::Due) else { return false };
        let fits = |count: &usize| {
            !receives.iter().take(*count).any(|own| self.lacks_room(*own, &receives[..*count]))
        };
        let fitting = (0..=receives.len()).rev().find(fits).unwrap_or(0);
        if fitting == receives.len() || fitting == 0 {
            return false;
        }
        let now = self.places[device].group;
        let groups = &mut self.exchanges.devices[device];
        let rest = groups[now].receives.split_off(fitting);
        groups.insert(now + 1, Group { sends: Vec::new(), receives: rest });
        true
    }

    /// Makes the receive of `own`, which its sender has announced, run on `device` now. Or makes
    /// room for it.
    fn bring_forward(&mut self, own: Transfer, device: usize) -> bool {
        let is_it = |action: &Action| action.op == Op::Receive(own);
        let Place { group: now, phase, .. } = self.places[device];
        if let Some([_, receives]) = self.transfers_in(device, Phase::Announced) {
            // It waits for another announcement. Nobody knows of it: it sends nothing.
            receives.into_iter().for_each(|own| self.of(own).expected -= 1);
            self.places[device].phase = Phase::Due;
        }
        let groups = &mut self.exchanges.devices[device];
        let holds = |group: &Group| group.receives.iter().any(is_it);
        let Some(found) = groups.iter().skip(now).position(holds) else { return false };
        let group = &mut groups[now + found];
        if phase != Phase::Running && found == 0 && group.receives.len() == 1 {
            self.make_room(own); // it is next, and lacks nothing else
            return true;
        }
        let Some(at) = group.receives.iter().position(is_it) else { return false };
        let receive = group.receives.remove(at);
        self.exchanges.moved += 1;
        if phase != Phase::Running {
            groups.insert(now, Group { sends: Vec::new(), receives: vec![receive] });
            return true;
        }
        groups[now].receives.push(receive);
        let place = &mut self.places[device];
        place.phase = Phase::Announced;
        // It is not announced before there is room for all that it receives.
        let needed = place.held.entry(half(own)).or_default();
        *needed += 1;
        let needed = *needed;
        while self.exchanges.room(own.edge, own.direction) < needed {
            self.make_room(own);
        }
        self.of(own).expected += 1;
        true
    }

    fn make_room(&mut self, own: Transfer) {
        let room = self.exchanges.room(own.edge, own.direction);
        self.exchanges.rooms.insert(half(own), room + 1);
    }

    fn finish(&self) -> Result<(), ExchangeError> {
        let mut waiting = Vec::new();
        for (device, place) in self.places.iter().enumerate() {
            let action = self.program.devices[device].get(place.list).copied();
            let group = self.group(device).filter(|group| !group.is_empty()).cloned();
            if action.is_some() || group.is_some() {
                let device = DeviceId::from_index(device);
                waiting.push(WaitingDevice {
                    device,
                    action,
                    group,
                    runs: place.phase == Phase::Running,
                });
            }
        }
        if waiting.is_empty() { Ok(()) } else { Err(ExchangeError::Deadlock { waiting }) }
    }
}
