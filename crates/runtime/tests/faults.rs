//! Family `fault_`: an error, a panic or a stall at any action ends in one clear error, never
//! hangs, and leaves all state unchanged.
// helpers of tests may panic
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use gpipe_core::{
    Action, DeviceId, Direction, Op, StageId,
    lower::{EdgeKind, Program, Topology, lower},
    remat::Remat,
    schedule::Schedule,
    splitmix::Stream,
    testing::{random_compute, random_topology},
    validate::validate,
};
use gpipe_runtime::{
    Settings, StepError, WorkerPool,
    testing::{Fault, FaultKind, Gate, MockError, MockStage, mock_devices, unpipelined},
};

/// Number of random cases; `make soak` runs 50 times as many.
fn cases(count: u64) -> u64 {
    if std::env::var_os("GPIPE_SOAK").is_some() { 50 * count } else { count }
}

fn pool(
    program: &Program,
    capacity: usize,
    deadline_ms: u64,
    fault: &Fault,
) -> WorkerPool<MockStage> {
    let deadline = Duration::from_millis(deadline_ms);
    for _ in 0..20 {
        let devices = mock_devices(program, Some(fault));
        let settings = Settings { link_capacity: capacity, deadline, virtual_costs: None };
        match WorkerPool::spawn(devices, settings) {
            Ok(pool) => return pool,
            // Found by a soak: on a busy machine a thread may start only after a deadline as short
            // as those used here.
            Err(StepError::Stuck { doing, .. }) if doing.contains("building") => {}
            Err(error) => panic!("{error}"),
        }
    }
    panic!("twenty times no thread has begun within {deadline:?}");
}

fn feeds(program: &Program) -> Vec<Vec<u64>> {
    gpipe_runtime::testing::feeds(program, 3)
}

/// Whether other stages may already have applied the update when `at` completes.
fn after_decision(program: &Program, at: Action) -> bool {
    match at.op {
        Op::Update => true,
        Op::Send(transfer) | Op::Receive(transfer) => {
            let edge = program.topology.edges[transfer.edge.index()];
            edge.kind == EdgeKind::Vote && transfer.direction == Direction::Backward
        }
        _ => false,
    }
}

/// Runs a program with a fault and checks the resulting error.
fn check(program: &Arc<Program>, capacity: usize, at: Action, kind: FaultKind) {
    let injected = Fault { at, kind: kind.clone() };
    let mut pool = pool(program, capacity, 60_000, &injected);
    let error = pool.run(program, feeds(program)).unwrap_err();
    let text = error.to_string();
    let decided = after_decision(program, at);
    match (&error, &kind) {
        (StepError::Stage { action, source: MockError::Injected }, FaultKind::Error) => {
            assert_eq!(*action, at);
        }
        (StepError::Panic { action, message }, FaultKind::Panic) => {
            assert_eq!((*action, message.as_str()), (at, "injected panic"));
        }
        // If another stage has already applied the update, the error says so and names the cause.
        (StepError::Torn { applied, begun, cause }, _) if decided => {
            assert!(!(applied.is_empty() && begun.is_empty()), "{text}");
            // A stage that failed in its own update has not applied it.
            assert!(!applied.contains(&at.stage) || at.op != Op::Update, "{text}");
            assert!(cause.contains(&at.to_string()), "{text}");
            assert!(text.starts_with(cause.as_str()), "{text}");
        }
        _ => panic!("{at} {kind:?}: {text}"),
    }
    assert!(text.contains(&at.to_string()), "{text}");
    if matches!(error, StepError::Torn { .. }) {
        assert!(pool.run(program, feeds(program)).unwrap_err().to_string().contains("checkpoint"));
    }
}

fn random_program(random: &mut Stream) -> (Arc<Program>, usize) {
    let stages = 1 + random.below(5);
    let devices = 1 + random.below(stages);
    let micro_batches = 1 + random.below(5);
    let compute = random_compute(random, stages, devices, micro_batches);
    let topology = random_topology(random, stages);
    let program = Arc::new(lower(&compute, &topology, micro_batches).unwrap());
    let capacity = (1..).find(|&capacity| validate(&program, capacity).is_ok()).unwrap();
    (program, capacity)
}

/// Silences injected panics, of which there are hundreds; any other panic prints as usual.
fn hush_injected_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload_as_str() != Some("injected panic") {
            usual(info);
        }
    }));
}

#[test]
fn fault_errors_and_panics_at_random_actions_of_random_schedules() {
    hush_injected_panics();
    for seed in 0..cases(300) {
        let mut random = Stream::new(5_000 + seed);
        let (program, capacity) = random_program(&mut random);
        let all: Vec<Action> = program.devices.iter().flatten().copied().collect();
        let at = all[random.below(all.len())];
        let kind = if random.below(2) == 0 { FaultKind::Error } else { FaultKind::Panic };
        check(&program, capacity, at, kind);
    }
    println!("soak: {} errors and panics on mock stages", cases(300));
}

#[test]
fn fault_an_error_at_every_single_action_of_1f1b() {
    let compute = Remat::Always.apply(&Schedule::OneFOneB.actions(3, 4));
    let program = Arc::new(lower(&compute, &Topology::chain(3), 4).unwrap());
    for at in program.devices.iter().flatten() {
        check(&program, 2, *at, FaultKind::Error);
    }
}

/// Stalls a stage at `at` and returns the error; the stalled thread is released at the end.
fn stall(program: &Arc<Program>, capacity: usize, at: Action) -> String {
    let gate = Arc::new(Gate::default());
    let fault = Fault { at, kind: FaultKind::Stall(Arc::clone(&gate)) };
    // With a shorter deadline, a worker that only waits may also seem silent on a busy machine
    // (found by a soak).
    let mut pool = pool(program, capacity, 100, &fault);
    let error = pool.run(program, feeds(program)).unwrap_err();
    assert!(
        matches!(
            error,
            StepError::Deadline { .. } | StepError::Stuck { .. } | StepError::Torn { .. }
        ),
        "{at}: {error}"
    );
    let again = pool.run(program, feeds(program)).unwrap_err().to_string();
    assert!(again.contains("cannot go on"), "{again}");
    gate.open();
    error.to_string()
}

/// Runs four cases at a time, because they only wait.
#[test]
fn fault_stalls_at_random_actions_end_within_the_deadline_and_name_the_stage() {
    let seeds = AtomicU64::new(0);
    let stall_all = || {
        loop {
            let seed = seeds.fetch_add(1, Ordering::Relaxed);
            if seed >= cases(60) {
                break;
            }
            stall_anywhere(seed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(stall_all);
        }
    });
    println!("soak: {} stalls on mock stages", cases(60));
}

fn stall_anywhere(seed: u64) {
    let mut random = Stream::new(9_000 + seed);
    let (program, capacity) = random_program(&mut random);
    let all: Vec<Action> = program.devices.iter().flatten().copied().collect();
    let at = all[random.below(all.len())];
    let text = stall(&program, capacity, at);
    let device = program.placement()[at.stage.index()].unwrap();
    let named = text.contains(&format!("last sign of life of stage {}", at.stage))
        || text.contains(&format!("device {device} has given no sign of life"))
        || text.contains(&at.to_string());
    assert!(named, "seed {seed}, stall at {at}: {text}");
}

#[test]
fn fault_a_stall_is_told_by_who_waits_for_it() {
    let compute = Schedule::GPipe.actions(2, 2);
    let program = Arc::new(lower(&compute, &Topology::chain(2), 2).unwrap());
    let text = stall(&program, 2, "1B0".parse().unwrap());
    let start = "stage 0 waits for the gradient of micro-batch 0 from stage 1 (0RECV_B0@0); \
                 last sign of life of stage 1 ";
    assert!(text.starts_with(start) && text.contains("in 1B0"), "{text}");
}

#[test]
fn fault_a_failed_step_leaves_everything_as_it_was_and_the_crew_goes_on() {
    // The fault occurs only in `long`: the second program has no micro-batch 3.
    let topology = Arc::new(Topology::chain(3));
    let long = Remat::Always.apply(&Schedule::OneFOneB.actions(3, 4));
    let long = Arc::new(lower(&long, &topology, 4).unwrap());
    let short = Remat::Always.apply(&Schedule::GPipe.actions(3, 2));
    let short = Arc::new(lower(&short, &topology, 2).unwrap());
    let fault = Fault { at: "1B3".parse().unwrap(), kind: FaultKind::Error };
    let mut pool = pool(&long, 2, 60_000, &fault);
    let parameters = |pool: &mut WorkerPool<MockStage>| -> Vec<u64> {
        (0..3).map(|d| pool.visit(DeviceId(d), |stages| stages[0].parameter()).unwrap()).collect()
    };
    let before = parameters(&mut pool);
    for _ in 0..3 {
        let error = pool.run(&long, feeds(&long)).unwrap_err();
        assert_eq!(error.to_string(), "1B3: injected fault");
        assert_eq!(parameters(&mut pool), before);
    }
    pool.run(&short, feeds(&short)).unwrap();
    let (_, expected) = unpipelined(&topology, 2, 3).unwrap();
    assert_eq!(parameters(&mut pool), expected);
}

#[test]
fn fault_builds_that_fail_or_panic_are_errors() {
    let stage = |k| MockStage::new(StageId(k), Arc::new(Topology::chain(2)), None);
    let error = WorkerPool::<MockStage>::spawn(
        vec![
            Box::new(move || Ok(vec![stage(0)])),
            Box::new(|| Err(MockError::Contract("no such layer".into()))),
        ],
        Settings::default(),
    );
    let text = error.err().unwrap().to_string();
    assert_eq!(text, "device 1, building its stages: contract: no such layer");

    let error = WorkerPool::<MockStage>::spawn(
        vec![Box::new(|| panic!("out of luck"))],
        Settings::default(),
    );
    let text = error.err().unwrap().to_string();
    assert!(text.contains("the thread of device 0 is gone: out of luck"), "{text}");
}

#[test]
fn fault_a_program_for_other_devices_is_refused() {
    let program = Arc::new(lower(&Schedule::GPipe.actions(2, 2), &Topology::chain(2), 2).unwrap());
    let of_three = lower(&Schedule::GPipe.actions(3, 2), &Topology::chain(3), 2).unwrap();
    let mut pool = WorkerPool::spawn(mock_devices(&of_three, None), Settings::default()).unwrap();
    let text = pool.run(&program, feeds(&program)).unwrap_err().to_string();
    assert!(
        text.contains("the program is for 2 devices, the feeds for 2, the pool has 3"),
        "{text}"
    );
}

/// Two deadlocks that `validate` rejects: two devices that wait for each other, and a device that
/// waits for itself. If the pool runs them anyway, it reports which stage waits for what.
#[test]
fn fault_a_deadlock_that_nobody_validated_ends_as_a_standstill() {
    let never = Fault { at: "9F9".parse().unwrap(), kind: FaultKind::Error };
    let mut crossed = lower(&Schedule::GPipe.actions(2, 1), &Topology::chain(2), 1).unwrap();
    // Stage 0 waits for the gradient before it has sent the activation.
    let list = &mut crossed.devices[0];
    let send = list.iter().position(|action| action.to_string() == "0SEND_F0@0").unwrap();
    list.swap(send, send + 1);
    // Both devices wait for room, because neither receives before it has sent everything.
    let full = lower(&Schedule::BreadthFirst(2).actions(2, 6), &Topology::chain(4), 6).unwrap();
    for (program, part) in
        [(crossed, "stage 0 waits for the gradient"), (full, "waits for room to send")]
    {
        assert!(validate(&program, 1).is_err());
        let program = Arc::new(program);
        let mut pool = pool(&program, 1, 25, &never);
        let error = pool.run(&program, feeds(&program)).unwrap_err();
        assert!(matches!(error, StepError::Standstill { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
}
