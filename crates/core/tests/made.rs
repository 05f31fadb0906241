//! Schedules made for given costs. Families: `oracle_` (against an exhaustive search that shares no
//! code), `property_` (never worse than named schedules, never below the bound, within the room).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::collections::{BTreeMap, HashMap};

use gpipe_core::{
    Nanos,
    lower::{EdgeKind, Topology, lower},
    made::{Made, Problem, StageTimes, Transit, make},
    remat::Remat,
    schedule::{ActionLists, Schedule},
    simulate::{Costs, LinkCost, StageCost, simulate},
    splitmix::Stream,
    validate::validate,
};

/// Random times on `devices` devices. `schedule` gives the placement.
fn random_problem(random: &mut Stream, schedule: &Schedule, devices: usize, m: usize) -> Problem {
    let placement = schedule.placement(devices);
    let mut time = |most: usize| 1 + random.below(most) as u64;
    let stages: Vec<StageTimes> = placement
        .iter()
        .map(|_| {
            let (input, weight) = (time(9), time(9));
            let backward = (input.max(weight) + time(4)).min(input + weight);
            let held = time(3);
            let split = time(held as usize + 1) - 1;
            StageTimes { forward: time(9), again: 0, backward, input, weight, held, split }
        })
        .collect();
    let most = [1, 3, 6][random.below(3)];
    // A link has one latency for both directions.
    let mut link = || {
        let latency = random.below(most) as u64;
        [0, 1].map(|_| Transit { occupied: random.below(most) as u64, latency })
    };
    Problem {
        smaller: stages.clone(),
        smaller_from: m,
        micro_batches: m,
        links: (1..placement.len()).map(|_| link()).collect(),
        waits_for_gradient: vec![true; placement.len() - 1],
        room: vec![u64::MAX; devices],
        norm: vec![0; devices],
        update: 0,
        splits: true,
        keeps_adjacent: vec![false; placement.len()],
        placement,
        stages,
    }
}

/// The time of the lists, by the simulator that also prices plans. Links hold everything.
fn simulated(problem: &Problem, lists: &ActionLists) -> u64 {
    let stages = problem.stages.len();
    let recomputes = problem.stages.iter().any(|own| own.again > 0);
    let remat = if recomputes { Remat::Always } else { Remat::Never };
    let compute = remat.apply(lists);
    let mut topology = Topology::chain(stages);
    for (edge, &gradient) in topology.edges.iter_mut().zip(&problem.waits_for_gradient) {
        edge.kind = EdgeKind::Boundary { gradient };
    }
    let program = lower(&compute, &topology, problem.micro_batches).unwrap();
    validate(&program, problem.micro_batches + 1).unwrap();
    let cost = |own: &StageTimes| StageCost {
        forward: Nanos(own.forward),
        forward_kept: Nanos(own.forward),
        rematerialize: Nanos(own.again),
        backward: Nanos(own.backward),
        backward_kept: Nanos(own.backward),
        backward_input: Nanos(own.input),
        backward_input_kept: Nanos(own.input),
        backward_weight: Nanos(own.weight),
        ..StageCost::default()
    };
    // A chain has its boundaries first.
    let link = |[forward, back]: &[Transit; 2]| LinkCost {
        latency: Nanos(forward.latency),
        forward: Nanos(forward.occupied),
        backward: Nanos(back.occupied),
    };
    let costs = Costs {
        links: problem.links.iter().map(link).collect(),
        ..Costs::of_stages(problem.stages.iter().map(cost).collect())
    };
    simulate(&program, &costs, problem.micro_batches + 1).unwrap().makespan.0
}

/// Whether any order takes less than `below`: all orders, except those that begin with the same
/// actions as another one whose devices and messages are all as early. Moves one micro-batch at a
/// time, so that every order of every device is among them.
///
/// A state is [device times, then by stage: forwards, inputs, weights done, then the known times of
/// inputs and gradients].
fn is_undercut(problem: &Problem, below: u64) -> bool {
    let (stages, m) = (problem.stages.len(), problem.micro_batches);
    let devices = problem.room.len();
    #[derive(Clone, PartialEq)]
    struct State {
        free: Vec<u64>,
        done: Vec<[usize; 3]>,
        values: Vec<Vec<u64>>,
        gradients: Vec<Vec<u64>>,
        links: Vec<[u64; 2]>,
    }
    let first = State {
        free: vec![0; devices],
        done: vec![[0; 3]; stages],
        values: (0..stages).map(|s| if s == 0 { vec![0; m] } else { Vec::new() }).collect(),
        gradients: vec![Vec::new(); stages],
        links: vec![[0; 2]; stages],
    };
    let held = |state: &State, device: usize| -> u64 {
        let on = (0..stages).filter(|&s| problem.placement[s] == device);
        on.map(|s| {
            let ([f, i, w], own) = (state.done[s], problem.stages[s]);
            (f - i) as u64 * own.held + (i - w) as u64 * own.split
        })
        .sum()
    };
    // Layers of states with as many halves done, so that every state is complete when it is left.
    let mut layers: BTreeMap<usize, HashMap<Vec<[usize; 3]>, Vec<State>>> = BTreeMap::new();
    layers.entry(0).or_default().insert(first.done.clone(), vec![first]);
    while let Some((_, layer)) = layers.pop_first() {
        for state in layer.into_values().flatten() {
            if state.done.iter().all(|done| done[2] == m) {
                if *state.free.iter().max().unwrap() < below {
                    return true;
                }
                continue;
            }
            for stage in 0..stages {
                let (device, own) = (problem.placement[stage], problem.stages[stage]);
                let [f, i, w] = state.done[stage];
                // [kind, start, time]: 0 F, 1 I, 2 W, 3 B
                let mut moves: Vec<(usize, u64, u64)> = Vec::new();
                if let Some(&there) = state.values[stage].get(f)
                    && f < m
                    && held(&state, device) + own.held <= problem.room[device]
                {
                    moves.push((0, there, own.forward));
                }
                if let Some(&there) = state.gradients[stage].get(i)
                    && i < f
                {
                    moves.push((1, there, own.input));
                    if w == i {
                        moves.push((3, there, own.backward));
                    }
                }
                if w < i {
                    moves.push((2, 0, own.weight));
                }
                for (kind, there, time) in moves {
                    let mut next = state.clone();
                    // A recomputation does not wait for the gradient.
                    let again = if kind % 2 == 1 { own.again } else { 0 };
                    let end = state.free[device].max(there.saturating_sub(again)) + again + time;
                    next.free[device] = end;
                    let send = |next: &mut State, boundary: usize, back: usize| {
                        if problem.placement[boundary] == problem.placement[boundary + 1] {
                            return end;
                        }
                        let Transit { occupied, latency } = problem.links[boundary][back];
                        let link = &mut next.links[boundary][back];
                        *link = end.max(*link) + occupied;
                        *link + latency
                    };
                    match kind {
                        0 => {
                            next.done[stage][0] += 1;
                            if stage + 1 < stages {
                                let there = send(&mut next, stage, 0);
                                next.values[stage + 1].push(there);
                            }
                            if problem.waits_for_gradient.get(stage) != Some(&true) {
                                next.gradients[stage].push(end);
                            }
                        }
                        2 => next.done[stage][2] += 1,
                        _ => {
                            next.done[stage][1] += 1;
                            next.done[stage][2] += usize::from(kind == 3);
                            if stage > 0 && problem.waits_for_gradient[stage - 1] {
                                let there = send(&mut next, stage - 1, 1);
                                next.gradients[stage - 1].push(there);
                            }
                        }
                    }
                    let rest = |device: usize| -> u64 {
                        let on = (0..stages).filter(|&s| problem.placement[s] == device);
                        on.map(|s| {
                            let ([f, i, w], own) = (next.done[s], problem.stages[s]);
                            let whole = own.backward.min(own.input + own.weight) + own.again;
                            (m - f) as u64 * own.forward
                                + (m - i) as u64 * whole
                                + (i - w) as u64 * own.weight
                        })
                        .sum()
                    };
                    if (0..devices).any(|device| next.free[device] + rest(device) >= below) {
                        continue;
                    }
                    let depth = next.done.iter().flatten().sum();
                    let alike = layers.entry(depth).or_default();
                    let alike = alike.entry(next.done.clone()).or_default();
                    let within = |a: &State, b: &State| {
                        let le = |a: &[u64], b: &[u64]| a.iter().zip(b).all(|(a, b)| a <= b);
                        le(&a.free, &b.free)
                            && a.values.iter().zip(&b.values).all(|(a, b)| le(a, b))
                            && a.gradients.iter().zip(&b.gradients).all(|(a, b)| le(a, b))
                            && a.links.iter().zip(&b.links).all(|(a, b)| le(a, b))
                    };
                    if !alike.iter().any(|own| within(own, &next)) {
                        alike.retain(|own| !within(&next, own));
                        alike.push(next);
                    }
                }
            }
        }
    }
    false
}

fn starts(devices: usize, micro_batches: usize, stages: usize) -> Vec<ActionLists> {
    let named = Schedule::NAMED.into_iter();
    let fitting = named.filter(|schedule| schedule.stages(devices) == Ok(stages));
    fitting.map(|schedule| schedule.actions(devices, micro_batches)).collect()
}

fn made(problem: &Problem) -> Made {
    let found = make(problem, &[], 20_000_000).unwrap();
    assert_eq!(simulated(problem, &found.lists), found.makespan);
    assert!(found.bound <= found.makespan);
    found
}

#[test]
fn oracle_small_orders_are_optimal() {
    for k in 1..=3 {
        for m in 1..=4 {
            for seed in 0..if (k, m) == (3, 4) { 3 } else { 6 } {
                let mut random = Stream::new(seed * 100 + (k * 10 + m) as u64);
                let mut problem = random_problem(&mut random, &Schedule::OneFOneB, k, m);
                if seed % 2 == 1 {
                    let most = 1 + random.below(3) as u64;
                    problem.room = problem.stages.iter().map(|own| most * own.held).collect();
                }
                if seed % 3 == 2 {
                    problem.stages.iter_mut().for_each(|own| own.again = own.forward);
                    problem.smaller = problem.stages.clone();
                }
                if seed % 4 == 3 && k > 1 {
                    // Nothing up to stage 0 is trained.
                    problem.waits_for_gradient[0] = false;
                }
                let found = made(&problem);
                assert!(found.is_optimal(), "K={k} M={m} seed {seed}: {}", found.gap());
                assert!(!is_undercut(&problem, found.makespan), "K={k} M={m} seed {seed}");
                assert!(is_undercut(&problem, found.makespan + 1), "K={k} M={m} seed {seed}");
            }
        }
    }
}

/// Two stages on each device, where a forward can take the room that another stage needs.
#[test]
fn oracle_small_orders_in_a_v_are_optimal() {
    for (k, m) in [(1, 3), (2, 1), (2, 2), (2, 3)] {
        for seed in 0..6 {
            let mut random = Stream::new(seed * 100 + (k * 10 + m) as u64);
            let mut problem = random_problem(&mut random, &Schedule::ZbV, k, m);
            if seed % 2 == 1 {
                let on = |device| {
                    let own = problem.placement.iter().zip(&problem.stages);
                    own.filter(move |(on, _)| **on == device).map(|(_, own)| own.held).sum::<u64>()
                };
                problem.room = (0..k).map(|device| on(device) + seed).collect();
            }
            let found = made(&problem);
            assert!(found.is_optimal(), "K={k} M={m} seed {seed}: {}", found.gap());
            assert!(!is_undercut(&problem, found.makespan), "K={k} M={m} seed {seed}");
        }
    }
}

#[test]
fn property_no_named_schedule_is_better_and_no_order_undercuts_the_bound() {
    for seed in 0..40 {
        let mut random = Stream::new(7_000 + seed);
        let (k, m) = (2 + random.below(5), 1 + random.below(12));
        let schedule = [Schedule::OneFOneB, Schedule::ZbV, Schedule::Interleaved(2)];
        let schedule = &schedule[random.below(3)];
        let problem = random_problem(&mut random, schedule, k, m);
        let starts = starts(k, m, problem.stages.len());
        let starts: Vec<ActionLists> = starts
            .into_iter()
            .filter(|lists| placed(lists, problem.stages.len()) == problem.placement)
            .collect();
        assert!(starts.len() >= 2);
        let found = make(&problem, &starts, 500_000).unwrap();
        let own = simulated(&problem, &found.lists);
        assert_eq!(own, found.makespan, "seed {seed}");
        for lists in &starts {
            let other = simulated(&problem, lists);
            assert!(found.makespan <= other && found.bound <= other, "seed {seed}: {other}");
        }
    }
}

fn placed(lists: &ActionLists, stages: usize) -> Vec<usize> {
    let mut placement = vec![0; stages];
    for (device, list) in lists.iter().enumerate() {
        list.iter().for_each(|action| placement[action.stage.index()] = device);
    }
    placement
}

#[test]
fn property_an_order_keeps_to_the_room() {
    for seed in 0..30 {
        let mut random = Stream::new(9_000 + seed);
        let (k, m) = (2 + random.below(4), 2 + random.below(10));
        let mut problem = random_problem(&mut random, &Schedule::OneFOneB, k, m);
        let most = 1 + random.below(4) as u64;
        // What is held between the halves counts as much, so room is a number of micro-batches.
        problem.stages.iter_mut().for_each(|own| own.split = own.held);
        problem.smaller.clone_from(&problem.stages);
        problem.room = problem.stages.iter().map(|own| most * own.held).collect();
        let found = make(&problem, &[], 500_000).unwrap();
        let program = lower(&found.lists, &Topology::chain(k), m).unwrap();
        let held = validate(&program, m + 1).unwrap();
        assert!(held.inputs.iter().all(|&held| held as u64 <= most), "seed {seed}: {held:?}");
    }
    let mut problem = random_problem(&mut Stream::new(1), &Schedule::OneFOneB, 2, 2);
    problem.room = vec![0; 2];
    assert_eq!(make(&problem, &[], 1000), None);
}

/// Where all times are equal, the known optimum is found.
#[test]
fn property_equal_times_give_the_papers_bubbles() {
    for (k, m) in [(4, 8), (8, 16), (16, 64)] {
        let one = StageTimes {
            forward: 1,
            again: 0,
            backward: 2,
            input: 1,
            weight: 1,
            held: 1,
            split: 1,
        };
        let problem = Problem {
            stages: vec![one; k],
            smaller: vec![one; k],
            smaller_from: m,
            micro_batches: m,
            placement: (0..k).collect(),
            links: vec![[Transit::default(); 2]; k - 1],
            waits_for_gradient: vec![true; k - 1],
            room: vec![u64::MAX; k],
            norm: vec![0; k],
            update: 0,
            splits: true,
            keeps_adjacent: vec![false; k],
        };
        let found = make(&problem, &[], 10_000_000).unwrap();
        assert_eq!((found.makespan, found.bound), ((3 * m + k - 1) as u64, (3 * m + k - 1) as u64));
        let problem = Problem { splits: false, ..problem };
        let found = make(&problem, &[], 10_000_000).unwrap();
        assert_eq!(found.makespan, (3 * (m + k - 1)) as u64);
        assert!(found.is_optimal());
    }
}
