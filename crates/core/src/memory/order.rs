//! What may be live at each action, from the order of a program. A device knows about the others
//! only what their messages tell it.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

use super::{Counts, Moments};
use crate::{
    action::{Action, Direction, Op, Transfer},
    ids::{EdgeId, StageId},
    lower::{Program, RematSet, Topology},
    simulate::LINK_CAPACITY,
};

/// The order of a program, as its devices know it about each other. Re-materialization on one
/// device does not change it, so a planner computes the moments of many policies with one order.
#[derive(Debug)]
pub struct Order {
    topology: Topology,
    places: Places,
    capacity: usize,
}

impl Order {
    /// Builds the order of a training program whose links hold `capacity` messages.
    pub fn new(program: &Program, capacity: usize) -> Self {
        Self { topology: program.topology.clone(), places: Places::new(program), capacity }
    }

    /// The moments of `stage` if it is alone on the device with its number and that device runs
    /// `list`. `list` may differ from the program's list only in re-materializations.
    pub fn moments_of(&self, stage: StageId, list: &[Action]) -> Moments {
        let mut all = vec![Moments::default(); self.topology.stages];
        if stage.index() < all.len().min(self.places.devices) {
            self.add_moments(stage.index(), list, &mut all);
            return all.swap_remove(stage.index());
        }
        Moments::default()
    }

    pub(super) fn add_moments(&self, device: usize, list: &[Action], all: &mut [Moments]) {
        let Self { topology, places, capacity } = self;
        let recomputed = RematSet::from_actions(list.iter());
        // By device: all positions before this one are known to be done.
        let mut known = vec![0; places.devices];
        let mut counts: HashMap<StageId, Counts> = HashMap::new();
        let mut living: HashMap<StageId, Sent> = HashMap::new();
        let mut done: HashMap<(EdgeId, Direction, bool), usize> = HashMap::new();
        for (position, &action) in list.iter().enumerate() {
            known[device] = position;
            let stage = action.stage;
            let sent = living.entry(stage).or_default();
            let count = counts.entry(stage).or_default();
            if let Some((kind, after)) = count.act(action, &recomputed) {
                let moments = &mut all[stage.index()];
                moments.beyond = capacity.saturating_sub(LINK_CAPACITY);
                moments.watch(sent.links());
                moments.add(count.moment(kind, sent.counts(&known)));
                *count = after;
            }
            let mut turn = |edge: EdgeId, direction: Direction, sends: bool| {
                let turn = done.entry((edge, direction, sends)).or_default();
                *turn += 1;
                *turn - 1
            };
            match action.op {
                Op::Send(transfer) => {
                    let Transfer { edge, direction, .. } = transfer;
                    sent.extend(places.living(topology, stage, transfer, &recomputed));
                    // The send found room, so the receiver has taken the message that was in its
                    // place.
                    let before = turn(edge, direction, true).checked_sub(*capacity);
                    let taken =
                        before.and_then(|before| places.link(edge, direction)?.1.get(before));
                    hear(&mut known, taken);
                }
                op if op.computes().is_some() => {
                    let outputs = places.outlive(topology, action, &recomputed).into_iter();
                    let handed = places.handed_over(topology, action, &recomputed);
                    outputs.chain(handed).for_each(|value| sent.extend(Some(value)));
                }
                Op::Receive(Transfer { edge, direction, .. }) => {
                    let number = turn(edge, direction, false);
                    hear(&mut known, places.link(edge, direction).and_then(|(s, _)| s.get(number)));
                }
                _ => {}
            }
        }
    }
}

/// Records that everything up to `place` is done.
fn hear(known: &mut [usize], place: Option<&ListPosition>) {
    if let Some(&(device, position)) = place {
        known[device] = known[device].max(position + 1);
    }
}

/// A value that was sent or handed over. It lives until its receiver's backward is known to be
/// done.
pub(super) struct Living {
    pub(super) link: (EdgeId, Direction),
    /// The receiver's device.
    pub(super) device: usize,
    /// The position of that backward in the receiver's list.
    pub(super) consumed: usize,
}

/// The messages of one stage that may be live, by link.
#[derive(Default)]
struct Sent(Vec<SentOnLink>);

struct SentOnLink {
    link: (EdgeId, Direction),
    device: usize,
    /// The positions of the backwards that free the messages, the earliest on top.
    consumed: BinaryHeap<Reverse<usize>>,
}

impl Sent {
    /// The links in the order of their first use. New links come at the end.
    fn links(&self) -> impl Iterator<Item = (EdgeId, Direction)> {
        self.0.iter().map(|own| own.link)
    }

    fn extend(&mut self, message: Option<Living>) {
        let Some(Living { link, device, consumed }) = message else { return };
        let at = self.0.iter().position(|own| own.link == link).unwrap_or_else(|| {
            self.0.push(SentOnLink { link, device, consumed: BinaryHeap::new() });
            self.0.len() - 1
        });
        self.0[at].consumed.push(Reverse(consumed));
    }

    /// How many messages of each link may be live when devices are `known` to have come this far.
    fn counts(&mut self, known: &[usize]) -> Vec<u32> {
        let count = |SentOnLink { device, consumed, .. }: &mut SentOnLink| {
            while consumed.peek().is_some_and(|Reverse(at)| known[*device] > *at) {
                consumed.pop();
            }
            consumed.len() as u32
        };
        self.0.iter_mut().map(count).collect()
    }
}

/// A device and a position in its list.
type ListPosition = (usize, usize);

/// The positions of sends, receives and backwards.
#[derive(Debug)]
pub(super) struct Places {
    devices: usize,
    /// For each edge and direction, the positions of its sends and of its receives, in order. The
    /// n-th receive takes the n-th send.
    links: Vec<[(Vec<ListPosition>, Vec<ListPosition>); 2]>,
    /// By stage and micro-batch, the action until which received values are held: the backward, or
    /// the second half of a split one (`true`).
    backwards: Vec<Vec<Option<(ListPosition, bool)>>>,
    /// By edge, whether its values pass without a message.
    handed: Vec<bool>,
}

impl Places {
    pub(super) fn new(program: &Program) -> Self {
        let links = program.topology.edges.iter().map(|_| Default::default()).collect();
        let backwards = vec![vec![None; program.micro_batches]; program.topology.stages];
        let edges = 0..program.topology.edges.len();
        let handed = edges.map(|edge| program.hands_over(EdgeId::from_index(edge))).collect();
        let mut places = Self { devices: program.devices.len(), links, backwards, handed };
        for (device, list) in program.devices.iter().enumerate() {
            for (position, action) in list.iter().enumerate() {
                let place = (device, position);
                match action.op {
                    Op::Send(Transfer { edge, direction, .. }) => {
                        let link = places.links.get_mut(edge.index());
                        link.into_iter().for_each(|link| link[direction as usize].0.push(place));
                    }
                    Op::Receive(Transfer { edge, direction, .. }) => {
                        let link = places.links.get_mut(edge.index());
                        link.into_iter().for_each(|link| link[direction as usize].1.push(place));
                    }
                    Op::Backward(m) | Op::BackwardWeight(m) => {
                        let stage = places.backwards.get_mut(action.stage.index());
                        let slot = stage.and_then(|stage| stage.get_mut(m.index()));
                        let is_half = matches!(action.op, Op::BackwardWeight(_));
                        slot.into_iter().for_each(|slot| *slot = Some((place, is_half)));
                    }
                    _ => {}
                }
            }
        }
        places
    }

    fn link(
        &self,
        edge: EdgeId,
        direction: Direction,
    ) -> Option<&(Vec<ListPosition>, Vec<ListPosition>)> {
        Some(&self.links.get(edge.index())?[direction as usize])
    }

    /// The kept outputs that outlive `action`, the stage's own backward. Their receivers split the
    /// backward and hold them until its second half.
    pub(super) fn outlive(
        &self,
        topology: &Topology,
        action: Action,
        recomputed: &RematSet,
    ) -> Vec<Living> {
        let Some(m) = action.op.goes_back().filter(|&m| !recomputed.contains(action.stage, m))
        else {
            return Vec::new();
        };
        let outputs = topology
            .edges_where(|edge| edge.kind.per_micro_batch() && edge.from == action.stage)
            .filter_map(|(id, edge)| {
                let of_receiver = self.backwards.get(edge.to.index())?.get(m.index())?;
                let ((device, consumed), is_half) = (*of_receiver)?;
                is_half.then_some(Living { link: (id, Direction::Forward), device, consumed })
            });
        outputs.collect()
    }

    /// What `action` hands over to stages of its own device, unless the stage keeps those values
    /// anyway.
    pub(super) fn handed_over(
        &self,
        topology: &Topology,
        action: Action,
        recomputed: &RematSet,
    ) -> Vec<Living> {
        let (direction, micro_batch) = match action.op {
            Op::Forward(m) => (Direction::Forward, Some(m)),
            op => (Direction::Backward, op.goes_back()),
        };
        if micro_batch.is_none() {
            return Vec::new();
        }
        let values = topology.edges_where(|edge| match direction {
            Direction::Forward => edge.kind.per_micro_batch() && edge.from == action.stage,
            Direction::Backward => edge.kind.goes_back() && edge.to == action.stage,
        });
        values
            .filter(|(edge, _)| self.handed.get(edge.index()).copied().unwrap_or(false))
            .filter_map(|(edge, _)| {
                let transfer = Transfer { direction, micro_batch, edge };
                self.living(topology, action.stage, transfer, recomputed)
            })
            .collect()
    }

    /// The value that `stage` passes on, unless the stage keeps that value anyway. The output of a
    /// forward that keeps lives until the stage's own backward, which comes after the receiver's.
    pub(super) fn living(
        &self,
        topology: &Topology,
        stage: StageId,
        transfer: Transfer,
        recomputed: &RematSet,
    ) -> Option<Living> {
        let m = transfer.micro_batch?;
        if transfer.direction == Direction::Forward && !recomputed.contains(stage, m) {
            return None;
        }
        let edge = topology.edges.get(transfer.edge.index())?;
        let receiver = if transfer.direction == Direction::Forward { edge.to } else { edge.from };
        let ((device, consumed), _) = (*self.backwards.get(receiver.index())?.get(m.index())?)?;
        Some(Living { link: (transfer.edge, transfer.direction), device, consumed })
    }
}
