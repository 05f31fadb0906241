//! Families: `oracle_` (timelines by hand, the paper's bubble), `property_` (random programs and
//! costs: the parts sum to the step, and each part is what it claims).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::collections::HashMap;

use gpipe_core::{
    Action, Nanos, Op, Transfer,
    lower::{Program, Topology, lower},
    remat::Remat,
    report::{DeviceTimes, breakdown},
    schedule::Schedule,
    simulate::{Costs, LinkCost, StageCost, TimedAction, Timeline, simulate, simulate_with_room},
    splitmix::Stream,
    testing::{random_compute, random_topology},
};

fn program(schedule: Schedule, remat: Remat, stages: usize, micro_batches: usize) -> Program {
    let compute = remat.apply(&schedule.actions(stages, micro_batches));
    lower(&compute, &Topology::chain(stages), micro_batches).unwrap()
}

/// Builds a timeline from lines of "action start end", one line per device.
fn by_hand(program: &Program, lines: &[&str]) -> Timeline {
    let timed = |action: &str| {
        let mut words = action.split(' ');
        let mut word = || words.next().unwrap();
        let action: Action = word().parse().unwrap();
        let [start, end] = [word(), word()].map(|time| Nanos(time.parse().unwrap()));
        TimedAction { action, start, end }
    };
    let devices: Vec<Vec<TimedAction>> =
        lines.iter().map(|line| line.split(", ").map(timed).collect()).collect();
    for (list, actions) in devices.iter().zip(&program.devices) {
        let names: Vec<String> = actions.iter().map(Action::to_string).collect();
        assert!(list.iter().map(|timed| &timed.action).eq(actions), "the program is {names:?}");
    }
    let makespan = devices.iter().flatten().map(|timed| timed.end).max().unwrap();
    Timeline { devices, makespan }
}

/// The parts: forward, recompute, backward, optimizer, communication, fill and drain, imbalance,
/// stalls.
fn parts(times: &DeviceTimes) -> [u64; 8] {
    [
        times.forward,
        times.recompute,
        times.backward,
        times.optimizer,
        times.communication,
        times.fill_drain,
        times.imbalance,
        times.stalls,
    ]
    .map(|Nanos(time)| time)
}

fn assert_sums(times: &[DeviceTimes], timeline: &Timeline, what: &str) {
    assert_eq!(times.len(), timeline.devices.len());
    for (device, times) in times.iter().enumerate() {
        assert_eq!(times.total(), timeline.makespan, "{what}, device {device}: {times:?}");
        assert_eq!(parts(times).iter().sum::<u64>(), timeline.makespan.0, "{what}: {times:?}");
    }
}

/// The time that all devices spend in one part.
fn sum(times: &[DeviceTimes], part: fn(&DeviceTimes) -> Nanos) -> u64 {
    times.iter().map(part).sum::<Nanos>().0
}

#[test]
fn oracle_a_step_of_one_micro_batch_by_hand() {
    let program = program(Schedule::GPipe, Remat::Never, 2, 1);
    // Stage 0 takes 10 for every action and starts 3 late; stage 1 takes 30. The activation is in
    // transit for 4, the gradient for 2, and the vote and the verdict for 1 each.
    let timeline = by_hand(
        &program,
        &[
            "0F0 3 13, 0SEND_F0@0 13 14, 0RECV_B0@0 14 80, 0B0 80 90, 0REDUCE 90 90, 0NORM 90 90, \
            0RECV_F@1 90 90, \
             0DECIDE 90 90, 0SEND_B@1 90 90, 0UPDATE 90 90",
            "1RECV_F0@0 0 18, 1F0 18 48, 1B0 48 78, 1SEND_B0@0 78 78, 1REDUCE 78 78, 1NORM 78 78, \
            1SEND_F@1 78 79, \
             1RECV_B@1 79 91, 1UPDATE 91 91",
        ],
    );
    let times = breakdown(&program, &timeline, 2);
    // Without transport a step takes 80: stage 0 waits 60 and stage 1 waits 20. Balanced (20 each),
    // both wait 40. Measured, they wait 91 - 20 - 1 (send) - 2 (gradient) = 68 and 91 - 60 - 4 - 1
    // - 1 = 25.
    assert_eq!(parts(&times[0]), [10, 0, 10, 0, 3, 40, 20, 8]);
    assert_eq!(parts(&times[1]), [30, 0, 30, 0, 6, 20, 0, 5]);
    assert_sums(&times, &timeline, "by hand");
    assert_eq!(times[0].wait(), Nanos(68));
    let lost = sum(&times, |times| times.wait() + times.communication);
    assert!((timeline.bubble() - lost as f64 / (2.0 * 91.0)).abs() < 1e-12);
}

#[test]
fn oracle_a_send_waits_for_room_and_then_communicates() {
    // Forwards only, with links of one message. The second send waits until the first message is
    // taken at 20.
    let program = program(Schedule::ForwardOnly, Remat::Never, 2, 2);
    let timeline = by_hand(
        &program,
        &[
            "0F0 0 5, 0SEND_F0@0 5 6, 0F1 6 11, 0SEND_F1@0 11 23",
            "1RECV_F0@0 10 20, 1F0 20 40, 1RECV_F1@0 40 40, 1F1 40 60",
        ],
    );
    let times = breakdown(&program, &timeline, 1);
    assert_eq!(times[0].communication, Nanos(1 + 3));
    // The receive started at 10, after the message was sent at 6, so all ten until its end are
    // transport. The time before it is waiting.
    assert_eq!(times[1].communication, Nanos(10));
    assert_sums(&times, &timeline, "room");
    let roomy = breakdown(&program, &timeline, 2);
    assert_eq!(roomy[0].communication, Nanos(1 + 12), "with room for two it waited for nobody");
}

#[test]
fn oracle_one_slow_action_is_a_stall_and_no_property_of_its_stage() {
    let program = program(Schedule::GPipe, Remat::Never, 2, 8);
    let slow: Action = "1F3".parse().unwrap();
    let duration = |action: Action| match action.op {
        Op::Decide => 0, // only stage 0 decides
        _ if action == slow => 100,
        _ => 10,
    };
    let timeline = timed(&program, duration, 2);
    let times = breakdown(&program, &timeline, 2);
    assert_eq!(times.iter().map(|times| times.imbalance.0).sum::<u64>(), 0, "{times:?}");
    assert_eq!((times[0].stalls, times[1].stalls), (Nanos(90), Nanos(0)), "{times:?}");
}

#[test]
fn oracle_fill_and_drain_at_unit_costs_is_the_papers() {
    for schedule in Schedule::SEARCHED_EXACTLY {
        for k in 1..=8 {
            for m in 1..=32 {
                let program = program(schedule.clone(), Remat::Never, k, m);
                let timeline = simulate(&program, &Costs::unit(k), 1).unwrap();
                let times = breakdown(&program, &timeline, 1);
                let share = sum(&times, |times| times.fill_drain) as f64
                    / (k as u64 * timeline.makespan.0) as f64;
                let expected = (k - 1) as f64 / (m + k - 1) as f64;
                assert!((share - expected).abs() < 1e-12, "{schedule} K={k} M={m}: {share}");
                let rest = |times: &DeviceTimes| times.imbalance + times.stalls;
                assert_eq!(sum(&times, rest), 0, "{schedule} K={k} M={m}");
            }
        }
    }
}

#[test]
fn oracle_a_stage_that_recomputes_nothing_is_an_imbalance() {
    // 1F1B's last stage recomputes nothing, so it works only two thirds as long as the other stage.
    let program = program(Schedule::OneFOneB, Remat::UnlessAdjacent, 2, 16);
    let timeline = simulate(&program, &Costs::unit(2), 2).unwrap();
    let times = breakdown(&program, &timeline, 2);
    assert_eq!(times[0].imbalance, Nanos(0));
    assert!(times[1].imbalance >= Nanos(10), "{times:?}");
    assert_eq!(sum(&times, |times| times.stalls), 0);
}

#[test]
fn fault_a_program_that_does_not_fit_its_links_is_all_stalls() {
    let program = program(Schedule::GPipe, Remat::Never, 3, 4);
    let timeline = simulate(&program, &Costs::unit(3), 2).unwrap();
    let times = breakdown(&program, &timeline, 0);
    assert_sums(&times, &timeline, "no room");
    assert_eq!(sum(&times, |times| times.fill_drain + times.imbalance), 0);
    assert!(breakdown(&program, &Timeline::default(), 2).is_empty());
}

fn random_cost(random: &mut Stream) -> StageCost {
    let mut any = || Nanos(random.below(1000) as u64);
    StageCost {
        forward: any(),
        forward_kept: any(),
        rematerialize: any(),
        backward: any(),
        backward_kept: any(),
        backward_input: any(),
        backward_input_kept: any(),
        backward_weight: any(),
        norm: any(),
        update: any(),
    }
}

fn random_program(random: &mut Stream) -> Program {
    let stages = 1 + random.below(6);
    let devices = 1 + random.below(stages);
    let micro_batches = 1 + random.below(8);
    let compute = random_compute(random, stages, devices, micro_batches);
    lower(&compute, &random_topology(random, stages), micro_batches).unwrap()
}

#[test]
fn property_the_parts_sum_to_the_step_whatever_the_program_and_its_costs() {
    let mut seen = [false; 8];
    for seed in 0..2000 {
        let mut random = Stream::new(seed);
        let program = random_program(&mut random);
        let stages = program.topology.stages;
        let cost = |random: &mut Stream| (0..stages).map(|_| random_cost(random)).collect();
        let (own, smaller) = (cost(&mut random), cost(&mut random));
        let mut any = || Nanos(random.below(200) as u64);
        let mut link = || LinkCost { latency: any(), forward: any(), backward: any() };
        let costs = Costs {
            stages: own,
            smaller,
            smaller_from: Some(gpipe_core::MicroBatch(1)),
            links: program.topology.edges.iter().map(|_| link()).collect(),
        };
        let (capacity, timeline) = simulate_with_room(&program, &costs).unwrap();
        let times = breakdown(&program, &timeline, capacity);
        assert_sums(&times, &timeline, &format!("seed {seed}"));
        for times in &times {
            parts(times).iter().zip(&mut seen).for_each(|(part, seen)| *seen |= *part > 0);
        }
        // Without transport and jitter, all waiting is explained.
        let plain = Costs::of_stages(costs.stages);
        let timeline = simulate(&program, &plain, capacity).unwrap();
        for times in breakdown(&program, &timeline, capacity) {
            assert_eq!((times.communication, times.stalls), (Nanos(0), Nanos(0)), "seed {seed}");
        }
    }
    assert_eq!(seen, [true; 8], "every part is met");
}

#[test]
fn property_equal_devices_have_no_imbalance_and_jittered_ones_stalls() {
    let mut jittered_stalls = 0;
    for seed in 0..300 {
        let mut random = Stream::new(seed);
        let (k, m) = (2 + random.below(7), 1 + random.below(16));
        let schedule = Schedule::SEARCHED_EXACTLY[random.below(2)].clone();
        let remat = [Remat::Always, Remat::Never][random.below(2)];
        let program = program(schedule, remat, k, m);
        let costs = Costs::of_stages(vec![random_cost(&mut random); k]);
        let timeline = simulate(&program, &costs, 2).unwrap();
        let times = breakdown(&program, &timeline, 2);
        let rest = |times: &DeviceTimes| times.imbalance + times.stalls + times.communication;
        assert_eq!(sum(&times, rest), 0, "seed {seed}: {times:?}");

        let mut jitter = |_| 900 + random.below(200) as u64;
        let timeline = timed(&program, &mut jitter, 2);
        let times = breakdown(&program, &timeline, 2);
        assert_sums(&times, &timeline, &format!("jitter, seed {seed}"));
        jittered_stalls += usize::from(sum(&times, |times| times.stalls) > 0);
    }
    assert!(jittered_stalls > 250, "{jittered_stalls} of 300");
}

/// A timeline whose actions take what `duration` says. Transfers take no time.
fn timed(program: &Program, mut duration: impl FnMut(Action) -> u64, capacity: usize) -> Timeline {
    let mut devices: Vec<Vec<TimedAction>> = vec![Vec::new(); program.devices.len()];
    let mut sent: HashMap<Transfer, Nanos> = HashMap::new();
    let mut taken: HashMap<(u32, bool), Vec<Nanos>> = HashMap::new();
    let mut puts: HashMap<(u32, bool), usize> = HashMap::new();
    let link = |t: Transfer| (t.edge.0, t.direction == gpipe_core::Direction::Forward);
    let mut moved = true;
    while moved {
        moved = false;
        for (device, list) in program.devices.iter().enumerate() {
            while let Some(&action) = list.get(devices[device].len()) {
                let start = devices[device].last().map_or(Nanos(0), |timed| timed.end);
                let ready = match action.op {
                    Op::Send(t) => {
                        let put = puts.get(&link(t)).copied().unwrap_or(0);
                        let taken = taken.get(&link(t)).map_or(&[][..], Vec::as_slice);
                        match put.checked_sub(capacity) {
                            None => Some(start),
                            Some(before) => taken.get(before).copied(),
                        }
                    }
                    Op::Receive(t) => sent.get(&t).copied(),
                    _ => Some(start + Nanos(duration(action))),
                };
                let Some(ready) = ready else { break };
                let end = start.max(ready);
                match action.op {
                    Op::Send(t) => {
                        *puts.entry(link(t)).or_default() += 1;
                        sent.insert(t, end);
                    }
                    Op::Receive(t) => taken.entry(link(t)).or_default().push(end),
                    _ => {}
                }
                devices[device].push(TimedAction { action, start, end });
                moved = true;
            }
        }
    }
    let makespan = devices.iter().flatten().map(|timed| timed.end).max().unwrap_or_default();
    assert!(devices.iter().zip(&program.devices).all(|(done, list)| done.len() == list.len()));
    Timeline { devices, makespan }
}
