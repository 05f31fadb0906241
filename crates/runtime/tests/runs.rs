//! Families: `oracle_` (against the unpipelined result), `property_` (same seed, same run; same
//! timeline as the simulator), over hundreds of random schedules, edges and placements.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{sync::Arc, time::Duration};

use gpipe_core::{
    DeviceId, MicroBatch, Nanos, StageId,
    lower::{Program, Topology, lower},
    remat::Remat,
    schedule::Schedule,
    simulate::{Costs, LinkCost, StageCost, simulate, simulate_with_room},
    splitmix::Stream,
    testing::{random_compute, random_topology},
    validate::validate,
};
use gpipe_runtime::{
    Settings, StageExecutor, WorkerPool,
    testing::{MockStage, feeds, mock_devices, unpipelined},
};

/// Number of random cases; `make soak` runs 50 times as many.
fn cases(count: u64) -> u64 {
    if std::env::var_os("GPIPE_SOAK").is_some() { 50 * count } else { count }
}

/// A random valid program, and a link capacity at which it cannot deadlock.
fn random_program(random: &mut Stream) -> (Arc<Program>, usize) {
    let stages = 1 + random.below(5);
    let devices = 1 + random.below(stages);
    let micro_batches = 1 + random.below(6);
    let compute = random_compute(random, stages, devices, micro_batches);
    let topology = random_topology(random, stages);
    let program = lower(&compute, &topology, micro_batches).unwrap();
    let capacity = (1..).find(|&capacity| validate(&program, capacity).is_ok()).unwrap();
    (Arc::new(program), capacity)
}

fn random_costs(random: &mut Stream, program: &Program) -> Costs {
    let mut time = || Nanos(random.below(50) as u64);
    let mut stage = || StageCost {
        forward: time(),
        forward_kept: time(),
        rematerialize: time(),
        backward: time(),
        backward_kept: time(),
        backward_input: time(),
        backward_input_kept: time(),
        backward_weight: time(),
        norm: Nanos(0),
        update: time(),
    };
    let stages: Vec<StageCost> = (0..program.topology.stages).map(|_| stage()).collect();
    let smaller = (0..program.topology.stages).map(|_| stage()).collect();
    let mut link = || LinkCost { latency: time(), forward: time(), backward: time() };
    let links = program.topology.edges.iter().map(|_| link()).collect();
    let smaller_from = Some(MicroBatch::from_index(random.below(program.micro_batches + 1)));
    Costs { stages, smaller, smaller_from, links }
}

fn settings(capacity: usize) -> Settings {
    Settings { link_capacity: capacity, deadline: Duration::from_secs(60), virtual_costs: None }
}

fn parameters(pool: &mut WorkerPool<MockStage>, program: &Program) -> Vec<u64> {
    let mut all = vec![0; program.topology.stages];
    for device in 0..program.devices.len() {
        let own = pool.visit(DeviceId::from_index(device), |stages| {
            stages.iter().map(|stage| (stage.stage(), stage.parameter())).collect::<Vec<_>>()
        });
        for (stage, parameter) in own.unwrap() {
            all[stage.index()] = parameter;
        }
    }
    all
}

#[test]
fn oracle_random_programs_equal_the_unpipelined_step() {
    for seed in 0..cases(300) {
        let mut random = Stream::new(seed);
        let (program, capacity) = random_program(&mut random);
        let topology = Arc::new(program.topology.clone());
        let devices = mock_devices(&program, None);
        let mut pool = WorkerPool::spawn(devices, settings(capacity)).unwrap();
        let ran = pool.run(&program, feeds(&program, seed)).unwrap();
        let (_, expected) = unpipelined(&topology, program.micro_batches, seed).unwrap();
        assert_eq!(parameters(&mut pool, &program), expected, "seed {seed}");
        // Every action was executed, in the program's order.
        for (list, timed) in program.devices.iter().zip(&ran.timeline.devices) {
            assert!(list.iter().eq(timed.iter().map(|timed| &timed.action)), "seed {seed}");
        }
    }
}

/// Moves actions in a program; if `validate` still accepts it, it must compute the same result.
#[test]
fn oracle_changed_programs_that_are_valid_equal_the_unpipelined_step() {
    let mut ran = 0;
    for seed in 0..cases(1500) {
        let mut random = Stream::new(40_000 + seed);
        let (program, capacity) = random_program(&mut random);
        let mut changed = Program::clone(&program);
        let list = random.below(changed.devices.len());
        let length = changed.devices[list].len();
        let (a, b) = (random.below(length), random.below(length));
        changed.devices[list].swap(a, b);
        if a == b || validate(&changed, capacity).is_err() {
            continue;
        }
        ran += 1;
        let topology = Arc::new(changed.topology.clone());
        let devices = mock_devices(&changed, None);
        let mut pool = WorkerPool::spawn(devices, settings(capacity)).unwrap();
        let changed = Arc::new(changed);
        pool.run(&changed, feeds(&changed, seed)).unwrap();
        let (_, expected) = unpipelined(&topology, changed.micro_batches, seed).unwrap();
        assert_eq!(parameters(&mut pool, &changed), expected, "seed {seed}");
    }
    assert!(ran > 50, "only {ran} changed programs were valid");
}

#[test]
fn oracle_named_schedules_agree_with_each_other() {
    for (k, m) in [(1, 1), (2, 5), (4, 2), (4, 8), (6, 6)] {
        for schedule in Schedule::NAMED {
            let topology = Arc::new(Topology::chain(schedule.stages(k).unwrap()));
            let (outputs, expected) = unpipelined(&topology, m, 7).unwrap();
            for remat in [Remat::Always, Remat::Never, Remat::UnlessAdjacent] {
                let compute = remat.apply(&schedule.actions(k, m));
                let program = Arc::new(lower(&compute, &topology, m).unwrap());
                let costs = Costs::unit(topology.stages);
                let (capacity, _) = simulate_with_room(&program, &costs).unwrap();
                let devices = mock_devices(&program, None);
                let mut pool = WorkerPool::spawn(devices, settings(capacity)).unwrap();
                let ran = pool.run(&program, feeds(&program, 7)).unwrap();
                assert_eq!(ran.outcomes, outputs, "{schedule} {remat} K={k} M={m}");
                assert_eq!(
                    parameters(&mut pool, &program),
                    expected,
                    "{schedule} {remat} K={k} M={m}"
                );
            }
        }
    }
}

#[test]
fn property_on_a_virtual_clock_the_run_is_the_simulation_to_the_nanosecond() {
    for seed in 0..cases(200) {
        let mut random = Stream::new(1_000 + seed);
        let (program, capacity) = random_program(&mut random);
        let costs = Arc::new(random_costs(&mut random, &program));
        let simulated = simulate(&program, &costs, capacity).unwrap();
        let run = || {
            let devices = mock_devices(&program, None);
            let virtual_costs = Some(Arc::clone(&costs));
            let settings = Settings { virtual_costs, ..settings(capacity) };
            let mut pool = WorkerPool::spawn(devices, settings).unwrap();
            pool.run(&program, feeds(&program, seed)).unwrap().timeline
        };
        let first = run();
        assert_eq!(first.devices, simulated.devices, "seed {seed}");
        assert_eq!(first.makespan, simulated.makespan, "seed {seed}");
        assert_eq!(first, run(), "seed {seed}: the same seed is the same run");
    }
}

#[test]
fn oracle_forward_only_gives_the_outputs_and_holds_nothing() {
    let topology = Arc::new(Topology::chain(3));
    let program = lower(&Schedule::ForwardOnly.actions(3, 4), &topology, 4).unwrap();
    let program = Arc::new(program);
    let mut pool = WorkerPool::spawn(mock_devices(&program, None), settings(2)).unwrap();
    let before = parameters(&mut pool, &program);
    let ran = pool.run(&program, feeds(&program, 7)).unwrap();
    assert_eq!(ran.outcomes, unpipelined(&topology, 4, 7).unwrap().0);
    assert_eq!(parameters(&mut pool, &program), before);
    assert_eq!(ran.outcomes.len(), StageId(3).index());
}
