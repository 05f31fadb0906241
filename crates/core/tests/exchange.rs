//! Exchanges without buffers: `property_` (made for every correct program, and proven), `oracle_`
//! (by hand, and by devices that run in any order), `fault_` (a change is found).
#![allow(clippy::unwrap_used, clippy::panic)] // tests may panic

use std::collections::{HashMap, HashSet};

use gpipe_core::{
    Action, DeviceId, Op, Transfer,
    exchange::{ExchangeError, Exchanges, Group},
    lower::{EdgeKind, Part, Program, Topology, lower},
    remat::Remat,
    schedule::Schedule,
    simulate::simulate_with_room,
    splitmix::Stream,
    testing::{random_compute, random_topology},
};

fn each_alone(device: DeviceId) -> usize {
    device.index()
}

fn program(schedule: &Schedule, remat: Remat, devices: usize, micro_batches: usize) -> Program {
    let compute = remat.apply(&schedule.actions(devices, micro_batches));
    let stages = schedule.stages(devices).unwrap();
    lower(&compute, &Topology::chain(stages), micro_batches).unwrap()
}

fn room(program: &Program) -> usize {
    let costs = gpipe_core::simulate::Costs::unit(program.topology.stages);
    simulate_with_room(program, &costs).unwrap().0
}

fn random_program(seed: u64) -> (Program, usize) {
    let mut random = Stream::new(seed);
    let stages = 1 + random.below(7);
    let devices = 1 + random.below(stages);
    let micro_batches = 1 + random.below(7);
    let compute = random_compute(&mut random, stages, devices, micro_batches);
    let topology = random_topology(&mut random, stages);
    let processes = 1 + random.below(devices);
    (lower(&compute, &topology, micro_batches).unwrap(), processes)
}

#[test]
fn property_random_programs_have_exchanges_in_any_processes() {
    let mut moved = 0;
    for seed in 0..600 {
        let (whole, processes) = random_program(seed);
        let devices = whole.devices.len();
        let process_of = |device: DeviceId| device.index() * processes / devices;
        for part in Part::ALL {
            let program = whole.part(part);
            let capacity = room(&whole);
            let made = Exchanges::new(&program, process_of, capacity);
            let made = made.unwrap_or_else(|error| panic!("seed {seed}, {part:?}: {error}"));
            made.validate(&program, process_of).unwrap();
            if processes == devices && part == Part::Step {
                run_in_any_order(&program, &made, capacity, seed);
                moved += made.moved();
            }
        }
    }
    assert!(moved > 100, "{moved}");
}

#[test]
fn property_every_named_schedule_has_exchanges() {
    let schedules = [
        Schedule::GPipe,
        Schedule::OneFOneB,
        Schedule::ZbH1,
        "interleaved:2".parse().unwrap(),
        "interleaved:3".parse().unwrap(),
    ];
    for schedule in &schedules {
        for remat in [Remat::Always, Remat::Never, Remat::UnlessAdjacent] {
            for devices in 1..=8 {
                for micro_batches in [1, 2, 3, 5, 8, 16, 24] {
                    if schedule.check_micro_batches(micro_batches).is_err() {
                        continue;
                    }
                    let program = program(schedule, remat, devices, micro_batches);
                    let what = format!("{schedule} {remat:?} on {devices}, {micro_batches}");
                    let made = Exchanges::new(&program, each_alone, room(&program));
                    let made = made.unwrap_or_else(|error| panic!("{what}: {error}"));
                    made.validate(&program, each_alone).unwrap();
                    if *schedule == Schedule::GPipe {
                        assert_eq!(made.moved(), 0, "{devices} {micro_batches}");
                    }
                }
            }
        }
    }
}

/// 1F1B on two devices, by hand: the gradient leaves together with the arrival of the next value.
#[test]
fn oracle_the_groups_of_1f1b() {
    let program = program(&Schedule::OneFOneB, Remat::Never, 2, 3);
    let made = Exchanges::new(&program, each_alone, 2).unwrap();
    let texts = |groups: &[Group]| groups.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(
        texts(&made.devices[0]),
        ["{0SEND_F0@0}", "{0SEND_F1@0 0RECV_B0@0}", "{0SEND_F2@0 0RECV_B1@0}", "{0RECV_B2@0}"]
    );
    assert_eq!(
        texts(&made.devices[1]),
        ["{1RECV_F0@0}", "{1SEND_B0@0 1RECV_F1@0}", "{1SEND_B1@0 1RECV_F2@0}", "{1SEND_B2@0}"]
    );
}

/// A device sends a value before it receives a gradient, and its neighbour the other way round.
/// Without buffers neither send would end. With everything that follows each other in one group, a
/// device waits for the announcement of a gradient that needs the value in the same group.
#[test]
fn fault_groups_as_the_list_has_them_deadlock() {
    for (schedule, joined) in
        [(Schedule::OneFOneB, false), (Schedule::ZbH1, false), (Schedule::GPipe, true)]
    {
        let program = program(&schedule, Remat::Never, 4, 8);
        let mut plain = Exchanges::new(&program, each_alone, 2).unwrap();
        for (device, groups) in plain.devices.iter_mut().enumerate() {
            *groups = as_listed(&program, device, joined);
        }
        let error = plain.validate(&program, each_alone).unwrap_err();
        let ExchangeError::Deadlock { waiting } = &error else { panic!("{error}") };
        assert!(waiting.len() >= 2, "{error}");
        assert!(error.to_string().contains("while {"), "{error}");
    }
}

/// Runs of transfers that follow each other in a device's list; sends and receives `joined` or not.
fn as_listed(program: &Program, device: usize, joined: bool) -> Vec<Group> {
    let mut groups = vec![Group::default()];
    for action in &program.devices[device] {
        let last = groups.last_mut().unwrap();
        let transfer =
            |own: Transfer| program.topology.edges[own.edge.index()].kind != EdgeKind::Vote;
        match action.op {
            Op::Send(own) if transfer(own) && last.receives.is_empty() => last.sends.push(*action),
            Op::Receive(own) if transfer(own) && (joined || last.sends.is_empty()) => {
                last.receives.push(*action);
            }
            Op::Receive(own) if transfer(own) => {
                groups.push(Group { sends: Vec::new(), receives: vec![*action] });
            }
            _ if last.sends.is_empty() && last.receives.is_empty() => {}
            _ => groups.push(Group::default()),
        }
    }
    groups.retain(|group| !group.sends.is_empty() || !group.receives.is_empty());
    groups
}

/// Every change to correct exchanges is found, or leaves them correct.
#[test]
fn fault_changed_exchanges_are_refused_or_still_run() {
    let (mut refused, mut orders, mut harmless) = (0, 0, 0);
    for seed in 0..600 {
        let (program, _) = random_program(seed);
        let capacity = room(&program);
        let mut made = Exchanges::new(&program, each_alone, capacity).unwrap();
        let mut random = Stream::new(seed);
        let device = random.below(made.devices.len());
        let groups = &mut made.devices[device];
        if groups.len() < 2 {
            continue;
        }
        let (a, b) = (random.below(groups.len()), random.below(groups.len()));
        match random.below(5) {
            0 => groups.swap(a, b),
            1 => drop(groups.remove(a)),
            2 => {
                let again = groups[a].clone();
                groups.insert(b, again);
            }
            3 => {
                // On a device that is none of its ends, or not in its place.
                let group = groups.remove(a);
                let other = random.below(made.devices.len());
                made.devices[other].push(group);
            }
            _ => {
                let group = groups.remove(a);
                groups.insert(a, Group { sends: group.sends, receives: Vec::new() });
                groups.insert(a + 1, Group { sends: Vec::new(), receives: group.receives });
            }
        }
        match made.validate(&program, each_alone) {
            Ok(()) => {
                run_in_any_order(&program, &made, capacity, seed);
                harmless += 1;
            }
            Err(ExchangeError::Deadlock { .. }) => refused += 1,
            Err(ExchangeError::OtherOrder { .. }) => orders += 1,
        }
    }
    assert!(refused > 20 && orders > 50 && harmless > 20, "{refused} {orders} {harmless}");
}

/// Another machine, as simple as can be: at each moment a random device does a random thing that it
/// can. Pairs of devices have no tags: a send meets the oldest receive.
fn run_in_any_order(program: &Program, exchanges: &Exchanges, capacity: usize, seed: u64) {
    let mut random = Stream::new(seed ^ 0xabc);
    let devices = program.devices.len();
    let placement = program.placement();
    let (mut list, mut group) = (vec![0; devices], vec![0; devices]);
    let mut running: Vec<Option<Vec<Action>>> = vec![None; devices];
    let mut announced: HashSet<Transfer> = HashSet::new();
    let mut is_started = vec![false; devices];
    let mut leaving: HashSet<Transfer> = HashSet::new();
    let mut arrived: HashSet<Transfer> = HashSet::new();
    let mut held: HashMap<_, usize> = HashMap::new();
    let kind = |own: Transfer| program.topology.edges[own.edge.index()].kind;
    let ends = |own: Transfer| {
        let edge = program.topology.edges[own.edge.index()];
        let [from, to] = [edge.from, edge.to].map(|stage| placement[stage.index()].unwrap());
        if own.direction == gpipe_core::Direction::Forward { (from, to) } else { (to, from) }
    };
    let crosses = |own| kind(own) != EdgeKind::Vote && ends(own).0 != ends(own).1;
    let on = |held: &HashMap<_, usize>, own: Transfer, sender: bool| {
        held.get(&(own.edge, own.direction, sender)).copied().unwrap_or(0)
    };
    let sent = |own: &Action| matches!(own.op, Op::Send(_));
    loop {
        let mut can: Vec<(usize, usize)> = Vec::new();
        for device in 0..devices {
            match program.devices[device].get(list[device]).map(|action| action.op) {
                Some(Op::Send(own)) if on(&held, own, true) < capacity => can.push((device, 0)),
                Some(Op::Receive(own)) if arrived.contains(&own) => can.push((device, 0)),
                None | Some(Op::Send(_) | Op::Receive(_)) => {}
                Some(_) => can.push((device, 0)),
            }
            if let (None, Some(next)) =
                (&running[device], exchanges.devices[device].get(group[device]))
            {
                let mut full: HashMap<_, usize> = HashMap::new();
                let fits = next.receives.iter().filter_map(|own| own.op.transfer()).all(|own| {
                    let coming = full.entry((own.edge, own.direction)).or_default();
                    *coming += 1;
                    on(&held, own, false) + *coming <= exchanges.room(own.edge, own.direction)
                });
                let made = |own: &Action| leaving.contains(&own.op.transfer().unwrap());
                if fits && next.sends.iter().all(made) {
                    can.push((device, 1));
                }
            }
            if let Some(open) = &running[device] {
                let mut receives = open.iter().filter(|own| !sent(own));
                if is_started[device] {
                    can.push((device, 2));
                } else if receives.all(|own| announced.contains(&own.op.transfer().unwrap())) {
                    can.push((device, 3));
                }
            }
        }
        let done = (0..devices).all(|device| {
            list[device] == program.devices[device].len()
                && group[device] == exchanges.devices[device].len()
        });
        if done {
            return;
        }
        // Meetings that nobody is ready for change nothing: try all in a random order.
        let mut moved = false;
        while !moved && !can.is_empty() {
            let (device, what) = can.swap_remove(random.below(can.len()));
            match what {
                0 => {
                    let action = program.devices[device][list[device]];
                    match action.op {
                        Op::Send(own) if crosses(own) => {
                            *held.entry((own.edge, own.direction, true)).or_default() += 1;
                            leaving.insert(own);
                        }
                        Op::Send(own) => {
                            *held.entry((own.edge, own.direction, true)).or_default() += 1;
                            arrived.insert(own);
                        }
                        Op::Receive(own) => {
                            *held.entry((own.edge, own.direction, !crosses(own))).or_default() -= 1;
                        }
                        _ => {}
                    }
                    list[device] += 1;
                    moved = true;
                }
                1 => {
                    let next = &exchanges.devices[device][group[device]];
                    for own in next.sends.iter().filter_map(|own| own.op.transfer()) {
                        leaving.remove(&own);
                        announced.insert(own);
                        *held.entry((own.edge, own.direction, true)).or_default() -= 1;
                    }
                    for own in next.receives.iter().filter_map(|own| own.op.transfer()) {
                        *held.entry((own.edge, own.direction, false)).or_default() += 1;
                    }
                    let all = next.sends.iter().chain(&next.receives).copied().collect();
                    running[device] = Some(all);
                    moved = true;
                }
                3 => {
                    is_started[device] = true;
                    moved = true;
                }
                _ => {
                    // All groups that this one meets, and so on.
                    let (mut met, mut at) = (vec![device], 0);
                    let mut all_run = true;
                    while at < met.len() {
                        let own = running[met[at]].as_ref().filter(|_| is_started[met[at]]);
                        let Some(own) = own else {
                            all_run = false;
                            break;
                        };
                        for action in own {
                            let (from, to) = ends(action.op.transfer().unwrap());
                            for other in [from.index(), to.index()] {
                                if !met.contains(&other) {
                                    met.push(other);
                                }
                            }
                        }
                        at += 1;
                    }
                    let of = |device: usize, sends: bool, other: usize| -> Vec<Transfer> {
                        let own = running[device].as_ref().unwrap().iter();
                        let passes = own.filter(|action| sent(action) == sends);
                        let transfers = passes.map(|action| action.op.transfer().unwrap());
                        let meets = |own: &Transfer| {
                            let (from, to) = ends(*own);
                            (if sends { to } else { from }).index() == other
                        };
                        transfers.filter(meets).collect()
                    };
                    // Without tags, what is sent meets what is received in order.
                    let agree = all_run
                        && met.iter().all(|&one| {
                            met.iter().all(|&other| of(one, true, other) == of(other, false, one))
                        });
                    if agree {
                        for device in met {
                            let own = running[device].take().unwrap();
                            let received = own.iter().filter(|action| !sent(action));
                            arrived.extend(received.map(|action| action.op.transfer().unwrap()));
                            is_started[device] = false;
                            group[device] += 1;
                        }
                        moved = true;
                    }
                }
            }
        }
        assert!(moved, "seed {seed}: stuck at {list:?} and {group:?}");
    }
}
