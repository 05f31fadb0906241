//! Families: `property_` (predicted peaks against what simulated timelines hold).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_core::{
    Action, Bytes, Direction, MicroBatch, Nanos, Op, StageId,
    lower::{Program, Topology, lower},
    memory::{ActionMemory, EdgeBytes, StageBytes, peaks, series},
    remat::{Remat, RematPolicies},
    schedule::Schedule,
    simulate::{Costs, LinkCost, StageCost, TimedAction, Timeline, simulate_with_room},
    splitmix::Stream,
    testing::{random_compute, random_topology},
};

/// The most that each stage holds, from the times of all actions. A message is held until its
/// receiver's backward has ended.
fn brute_force(
    program: &Program,
    timeline: &Timeline,
    stages: &[StageBytes],
    edges: &[EdgeBytes],
) -> Vec<u64> {
    let again = program.rematerialized();
    let all: Vec<&TimedAction> = timeline.devices.iter().flatten().collect();
    let of = |stage: usize| all.iter().filter(move |timed| timed.action.stage.index() == stage);
    let end_of_backward = |stage, m| {
        let is_it = |timed: &&&TimedAction| {
            timed.action.stage == stage && timed.action.op.completes() == Some(m)
        };
        all.iter().find(is_it).unwrap().end
    };
    let mut most = Vec::new();
    for (stage, bytes) in stages.iter().enumerate() {
        let mut peak = bytes.resident.0;
        // Bytes held for micro-batches, bytes of gradients, and messages with the time at which
        // they go.
        let (mut held, mut gradients, mut messages) = (0, 0, Vec::new());
        // The micro-batch whose gradients are summed next, and those whose gradients came too
        // early.
        let (mut turn, mut waiting) = (0, Vec::new());
        for timed in of(stage) {
            let recomputed = |m| again.contains(timed.action.stage, m);
            messages.retain(|&(gone, _): &(Nanos, u64)| gone > timed.start);
            let found = waiting.len() as u64 + u64::from(turn > 0 && gradients == 0);
            let now = bytes.resident.0
                + held
                + gradients
                + found * bytes.early.0
                + messages.iter().map(|m| m.1).sum::<u64>();
            let (own, after) = match timed.action.op {
                Op::Forward(m) => {
                    let forward = if recomputed(m) { bytes.forward } else { bytes.forward_kept };
                    (forward.peak.0, held + forward.after.0 + bytes.statistics.0)
                }
                Op::Rematerialize(_) => {
                    (bytes.rematerialize.peak.0, held + bytes.rematerialize.after.0)
                }
                Op::Backward(m) => {
                    let (peak, gone) = match (recomputed(m), gradients_made(gradients, bytes)) {
                        (true, true) => {
                            (bytes.backward, bytes.forward.after + bytes.rematerialize.after)
                        }
                        (true, false) => {
                            (bytes.first_backward, bytes.forward.after + bytes.rematerialize.after)
                        }
                        (false, true) => (bytes.backward_kept, bytes.forward_kept.after),
                        (false, false) => (bytes.first_backward_kept, bytes.forward_kept.after),
                    };
                    gradients = bytes.gradients.0;
                    turn = turn.max(m.0 + 1);
                    (peak.0, held - gone.0)
                }
                Op::BackwardInput(m) => {
                    let gone = match recomputed(m) {
                        true => bytes.forward.after + bytes.rematerialize.after,
                        false => bytes.forward_kept.after,
                    };
                    let adds = m.0 == turn && turn > 0;
                    let peak = match (recomputed(m), adds) {
                        (true, true) => bytes.backward_input,
                        (true, false) => bytes.first_backward_input,
                        (false, true) => bytes.backward_input_kept,
                        (false, false) => bytes.first_backward_input_kept,
                    };
                    match m.0 == turn {
                        true => turn += 1,
                        false => waiting.push(m),
                    }
                    (peak.0, held + bytes.split.0 - gone.0)
                }
                Op::BackwardWeight(m) => {
                    waiting.retain(|other| *other != m);
                    turn = turn.max(m.0 + 1);
                    let peak = match gradients_made(gradients, bytes) {
                        true => bytes.backward_weight,
                        false => bytes.first_backward_weight,
                    };
                    gradients = bytes.gradients.0;
                    (peak.0, held - bytes.split.0)
                }
                Op::Norm => (bytes.update.0, held),
                Op::Update => {
                    (gradients, turn) = (0, 0);
                    // The update frees the statistics of all forwards.
                    (bytes.update.0, held - bytes.statistics.0 * program.micro_batches as u64)
                }
                Op::Send(transfer) => {
                    let edge = program.topology.edges[transfer.edge.index()];
                    let forward = transfer.direction == Direction::Forward;
                    let receiver = if forward { edge.to } else { edge.from };
                    let size = edges[transfer.edge.index()].of(transfer.direction);
                    if let Some(m) = transfer.micro_batch
                        && (!forward || recomputed(m))
                    {
                        messages.push((end_of_backward(receiver, m), size.0));
                        peak = peak.max(now + size.0);
                    }
                    continue;
                }
                _ => continue,
            };
            peak = peak.max(now + own);
            held = after;
            // What is handed over to a stage of the same device lives like a message.
            let (handed, direction) = match timed.action.op {
                Op::Forward(m) => (Some(m).filter(|&m| recomputed(m)), Direction::Forward),
                op => (op.goes_back(), Direction::Backward),
            };
            for (id, edge) in program.topology.edges_where(|_| handed.is_some()) {
                let (from, to) = match direction {
                    Direction::Forward => (edge.from, edge.to),
                    Direction::Backward => (edge.to, edge.from),
                };
                let goes = direction == Direction::Forward || edge.kind.goes_back();
                if from == timed.action.stage && goes && program.hands_over(id) {
                    let gone = handed.map(|m| end_of_backward(to, m)).unwrap();
                    messages.push((gone, edges[id.index()].of(direction).0));
                }
            }
            // Kept outputs live on if their receivers split the backward.
            if let Some(m) = timed.action.op.goes_back().filter(|&m| !recomputed(m)) {
                for (id, edge) in program.topology.edges_where(|edge| {
                    edge.kind.per_micro_batch() && edge.from == timed.action.stage
                }) {
                    let is_half = all.iter().any(|other| {
                        other.action.stage == edge.to && other.action.op == Op::BackwardWeight(m)
                    });
                    let gone = end_of_backward(edge.to, m);
                    if is_half && gone > timed.end {
                        messages.push((gone, edges[id.index()].of(Direction::Forward).0));
                    }
                }
            }
        }
        assert_eq!(held, 0, "stage {stage} has given everything back");
        most.push(peak);
    }
    most
}

/// Every stage in these tests has gradients, so their presence shows whether a backward has run.
fn gradients_made(now: u64, bytes: &StageBytes) -> bool {
    assert!(bytes.gradients.0 > 0);
    now > 0
}

fn random_bytes(random: &mut Stream) -> StageBytes {
    let mut bytes = |most: usize| Bytes(random.below(most) as u64);
    let (forward, forward_kept, split, early) = (bytes(10), bytes(60), bytes(70), bytes(20));
    let mut held = |after: Bytes| ActionMemory { peak: after + bytes(30), after };
    StageBytes {
        forward: held(forward),
        forward_kept: held(forward_kept),
        rematerialize: held(forward_kept),
        resident: bytes(100),
        statistics: bytes(5),
        // Its bound is compared with what stages really hold.
        moving: Bytes(0),
        gradients: bytes(50) + Bytes(1),
        backward: bytes(80),
        backward_kept: bytes(80),
        first_backward: bytes(110),
        first_backward_kept: bytes(110),
        split,
        early,
        // A first half holds what it leaves, at its end at the latest.
        backward_input: split + bytes(30),
        backward_input_kept: split + bytes(30),
        first_backward_input: split + early + bytes(30),
        first_backward_input_kept: split + early + bytes(30),
        backward_weight: bytes(80),
        first_backward_weight: bytes(110),
        update: bytes(30),
        // Here all devices share one memory.
        ahead: Bytes(0),
        message: Bytes(0),
    }
}

fn random_costs(random: &mut Stream, stages: usize, edges: usize) -> Costs {
    let most = [1, 5, 50][random.below(3)];
    let mut time = || Nanos(random.below(most) as u64);
    let mut costs = Costs::default();
    for _ in 0..stages {
        costs.stages.push(StageCost {
            forward: time(),
            forward_kept: time(),
            rematerialize: time(),
            backward: time(),
            backward_kept: time(),
            backward_input: time(),
            backward_input_kept: time(),
            backward_weight: time(),
            norm: time(),
            update: time(),
        });
    }
    let link = |_| LinkCost { latency: time(), forward: time(), backward: time() };
    costs.links = (0..edges).map(link).collect();
    costs
}

fn random_policy(random: &mut Stream) -> Remat {
    match random.below(6) {
        5 => Remat::Selective,
        0 => Remat::Never,
        1 => Remat::Always,
        2 => Remat::UnlessAdjacent,
        3 => Remat::Segments(2),
        _ => Remat::Keep(1 + random.below(4) as u32),
    }
}

/// Compares several timings of one program. Returns, by stage, whether the bound was reached.
fn compare(random: &mut Stream, program: &Program) -> Vec<bool> {
    let (stages, edges) = (program.topology.stages, program.topology.edges.len());
    let mut bytes: Vec<StageBytes> = (0..stages).map(|_| random_bytes(random)).collect();
    let mut message = || Bytes(random.below(20) as u64);
    let messages: Vec<EdgeBytes> =
        (0..edges).map(|_| EdgeBytes { forward: message(), backward: message() }).collect();
    // What an action sends is part of its peak and of what it keeps.
    for (edge, sizes) in program.topology.edges.iter().zip(&messages) {
        let from = &mut bytes[edge.from.index()];
        from.forward.peak += sizes.forward;
        from.forward_kept.peak += sizes.forward;
        from.forward_kept.after += sizes.forward;
        let to = &mut bytes[edge.to.index()];
        let backwards = [
            &mut to.backward,
            &mut to.backward_kept,
            &mut to.first_backward,
            &mut to.first_backward_kept,
            &mut to.backward_input,
            &mut to.backward_input_kept,
            &mut to.first_backward_input,
            &mut to.first_backward_input_kept,
        ];
        for peak in backwards {
            *peak += sizes.backward;
        }
        // The first backward allocates the gradients.
        to.first_backward = to.first_backward.max(to.gradients + sizes.backward);
        to.first_backward_kept = to.first_backward_kept.max(to.gradients + sizes.backward);
    }
    let mut reached = vec![false; stages];
    for _ in 0..6 {
        let costs = random_costs(random, stages, edges);
        let (capacity, timeline) = simulate_with_room(program, &costs).unwrap();
        let bound = peaks(program, capacity, &bytes, &messages);
        let held = brute_force(program, &timeline, &bytes, &messages);
        let drawn = series(program, &timeline, &bytes, &messages);
        for stage in 0..stages {
            assert!(
                held[stage] <= bound[stage].0,
                "stage {stage}: {} {}",
                held[stage],
                bound[stage]
            );
            reached[stage] |= held[stage] == bound[stage].0;
            let most = drawn[stage].iter().map(|(_, bytes)| *bytes).max().unwrap();
            assert!(most <= bound[stage], "stage {stage}: {most} drawn, {}", bound[stage]);
            assert!(most.0 <= held[stage]);
        }
    }
    reached
}

#[test]
fn property_no_timing_holds_more_than_the_peak_and_most_reach_it() {
    let mut random = Stream::new(12);
    let (mut reached, mut all) = (0, 0);
    for round in 0..400 {
        let (stages, micro_batches) = (1 + random.below(5), 1 + random.below(9));
        let chain = round % 2 == 0;
        let topology = match chain {
            true => Topology::chain(stages),
            false => random_topology(&mut random, stages),
        };
        let policies: Vec<Remat> = (0..stages).map(|_| random_policy(&mut random)).collect();
        let schedule = Schedule::SEARCHED_EXACTLY[random.below(2)].clone();
        let compute =
            RematPolicies::by_stage(policies).apply(&schedule.actions(stages, micro_batches));
        let program = lower(&compute, &topology, micro_batches).unwrap();
        let own = compare(&mut random, &program);
        reached += own.iter().filter(|&&reached| reached).count();
        all += own.len();
    }
    assert!(reached * 10 >= all * 8, "{reached} of {all} peaks were reached");
}

#[test]
fn property_no_timing_of_random_orders_on_shared_devices_holds_more() {
    let mut random = Stream::new(12);
    for _ in 0..300 {
        let (stages, micro_batches) = (1 + random.below(5), 1 + random.below(6));
        let devices = 1 + random.below(stages);
        let topology = random_topology(&mut random, stages);
        let compute = random_compute(&mut random, stages, devices, micro_batches);
        compare(&mut random, &lower(&compute, &topology, micro_batches).unwrap());
    }
}

/// Whole and split backwards of one stage whose first halves come in any order. The gradients that
/// first halves compute wait for the turn of their micro-batch.
fn random_halves(random: &mut Stream, micro_batches: u32) -> Vec<Op> {
    let all = (0..micro_batches).map(MicroBatch);
    let mut ops: Vec<Op> = all.clone().map(Op::Forward).collect();
    let mut open: Vec<MicroBatch> = all.collect();
    let (mut halved, mut next) = (vec![false; micro_batches as usize], MicroBatch(0));
    while next.0 < micro_batches {
        let is_halved = halved[next.index()];
        match random.below(3) {
            0 if is_halved => ops.push(Op::BackwardWeight(next)),
            1 if !is_halved => {
                open.retain(|m| *m != next);
                ops.push(Op::Backward(next));
            }
            2 if !open.is_empty() => {
                let m = open.swap_remove(random.below(open.len()));
                halved[m.index()] = true;
                ops.push(Op::BackwardInput(m));
                continue;
            }
            _ => continue,
        }
        next.0 += 1;
    }
    ops
}

#[test]
fn property_what_first_halves_find_is_held_as_long_as_it_waits() {
    let mut random = Stream::new(13);
    for _ in 0..1000 {
        let micro_batches = 1 + random.below(6) as u32;
        let ops = random_halves(&mut random, micro_batches);
        let lists = vec![ops.into_iter().map(|op| Action { stage: StageId(0), op }).collect()];
        let program = lower(&lists, &Topology::chain(1), micro_batches as usize).unwrap();
        assert_eq!(compare(&mut random, &program), [true], "{}", lists[0].len());
    }
}

/// A stage with a memory of its own has what comes ahead of it. Links of two places were assumed
/// under every schedule, and breadth-first needs more, the more micro-batches there are.
#[test]
fn regression_longer_links_bring_more_messages_ahead() {
    let schedule = Schedule::BreadthFirst(2);
    for (micro_batches, more) in [(2, 0), (8, 2), (32, 14)] {
        let compute = schedule.actions(2, micro_batches);
        let program = lower(&compute, &Topology::chain(4), micro_batches).unwrap();
        let (capacity, _) = simulate_with_room(&program, &Costs::unit(4)).unwrap();
        let stages = [StageBytes { message: Bytes(1), ..StageBytes::default() }; 4];
        let found = peaks(&program, capacity, &stages, &[]);
        assert_eq!(found, [Bytes(more); 4], "M {micro_batches}: {capacity} places");
    }
}
