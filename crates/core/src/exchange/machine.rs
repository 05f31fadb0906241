//! Devices and their exchanges on an abstract machine without times.
//!
//! Each device runs its list, and beside it its groups. A group starts when its sends have been
//! made and there is room for what it receives. It ends when each of its transfers is in a group
//! that runs on the other device, too. Whatever can advance does: an advance never takes from
//! another one what it needs, so the order of advances does not matter (Kahn 1974).

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
    /// Taken by a group of the sender.
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

/// How far a device is.
#[derive(Clone, Default)]
struct Place {
    /// The position in its list.
    list: usize,
    /// The position in its groups.
    group: usize,
    /// Whether that group runs.
    runs: bool,
    /// The transfers of that group that still wait for the other device.
    open: Vec<Transfer>,
    /// The messages that the device held when that group started.
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
            while self.step(device) || self.start(device) {
                moved = true;
            }
            moved |= self.meet(device);
        }
        moved
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

    /// Starts the next group of a device. Returns whether it could.
    fn start(&mut self, device: usize) -> bool {
        let Some(group) = self.group(device).filter(|_| !self.places[device].runs) else {
            return false;
        };
        let (sends, receives): (Vec<_>, Vec<_>) =
            (transfers(&group.sends).collect(), transfers(&group.receives).collect());
        if !sends.iter().all(|own| self.is_made(*own, &sends))
            || receives.iter().any(|own| self.lacks_room(*own, &receives))
        {
            return false;
        }
        let held = self.passed.iter().map(|(own, passed)| (*own, passed.waiting()));
        self.places[device].held = held.collect();
        for &own in &sends {
            self.of(own).taken += 1;
        }
        for &own in &receives {
            self.of(own).expected += 1;
        }
        let place = &mut self.places[device];
        place.runs = true;
        place.open = sends.into_iter().chain(receives).collect();
        self.end_group(device); // it may be empty
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

    /// Passes what a device's group has in common with the groups that run on other devices.
    fn meet(&mut self, device: usize) -> bool {
        let mut moved = false;
        for own in self.places[device].open.clone() {
            let Some((from, to)) = self.crossings.ends(own) else { continue };
            let other = if from.index() == device { to.index() } else { from.index() };
            let Some(at) = self.places[other].open.iter().position(|its| *its == own) else {
                continue;
            };
            self.places[other].open.remove(at);
            self.places[device].open.retain(|its| *its != own);
            self.of(own).arrived += 1;
            for device in [device, other] {
                self.end_group(device);
            }
            moved = true;
        }
        moved
    }

    fn end_group(&mut self, device: usize) {
        let place = &mut self.places[device];
        if place.runs && place.open.is_empty() {
            place.runs = false;
            place.group += 1;
        }
    }

    /// Every device waits. Splits a group that only lacks room for all that it receives. Otherwise
    /// finds a send that runs and whose receive does not, and brings that receive forward. Returns
    /// whether there was one.
    fn resolve(&mut self) -> bool {
        if (0..self.places.len()).any(|device| self.split(device)) {
            return true;
        }
        let open = |(device, place): (usize, &Place)| {
            let sent = |own: &Transfer| {
                let (from, to) = self.crossings.ends(*own)?;
                (from.index() == device).then_some((*own, to.index()))
            };
            place.open.iter().filter_map(sent).collect::<Vec<_>>()
        };
        let sends: Vec<_> = self.places.iter().enumerate().flat_map(open).collect();
        sends.into_iter().any(|(own, to)| self.bring_forward(own, to))
    }

    /// Leaves the receives for which there is no room yet to a group of their own.
    fn split(&mut self, device: usize) -> bool {
        let Some(group) = self.group(device).filter(|_| !self.places[device].runs) else {
            return false;
        };
        let (sends, receives): (Vec<_>, Vec<_>) =
            (transfers(&group.sends).collect(), transfers(&group.receives).collect());
        let fits = |count: &usize| {
            !receives.iter().take(*count).any(|own| self.lacks_room(*own, &receives[..*count]))
        };
        let fitting = (0..=receives.len()).rev().find(fits).unwrap_or(0);
        let starts = !sends.is_empty() && sends.iter().all(|own| self.is_made(*own, &sends));
        if fitting == receives.len() || (fitting == 0 && !starts) {
            return false;
        }
        let now = self.places[device].group;
        let groups = &mut self.exchanges.devices[device];
        let rest = groups[now].receives.split_off(fitting);
        groups.insert(now + 1, Group { sends: Vec::new(), receives: rest });
        true
    }

    /// Makes the receive of `own` run on `device` now, or makes room for it.
    fn bring_forward(&mut self, own: Transfer, device: usize) -> bool {
        let is_it = |action: &Action| action.op == Op::Receive(own);
        let Place { group: now, runs, .. } = self.places[device];
        let groups = &mut self.exchanges.devices[device];
        let holds = |group: &Group| group.receives.iter().any(is_it);
        let Some(found) = groups.iter().skip(now).position(holds) else { return false };
        let group = &mut groups[now + found];
        if !runs && found == 0 && group.sends.is_empty() && group.receives.len() == 1 {
            self.make_room(own); // it is next, and lacks nothing else
            return true;
        }
        let Some(at) = group.receives.iter().position(is_it) else { return false };
        let receive = group.receives.remove(at);
        self.exchanges.moved += 1;
        if !runs {
            groups.insert(now, Group { sends: Vec::new(), receives: vec![receive] });
            return true;
        }
        let group = &mut groups[now].receives;
        group.push(receive);
        // The group waits for the room of all that it receives before it starts.
        let count = transfers(group).filter(|other| half(*other) == half(own)).count();
        let held = self.places[device].held.get(&half(own)).copied().unwrap_or(0);
        while self.exchanges.room(own.edge, own.direction) < held + count {
            self.make_room(own);
        }
        self.of(own).expected += 1;
        self.places[device].open.push(own);
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
                waiting.push(WaitingDevice { device, action, group, runs: place.runs });
            }
        }
        if waiting.is_empty() { Ok(()) } else { Err(ExchangeError::Deadlock { waiting }) }
    }
}
