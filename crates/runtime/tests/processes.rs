//! One pool in several processes (here: threads with an in-memory network). Families: `oracle_`
//! (against the unpipelined result), `fault_` (after any failure, every process ends with the same
//! error).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use gpipe_core::{
    DeviceId, Nanos, StageId,
    lower::{Program, Topology, lower},
    splitmix::Stream,
    testing::{random_compute, random_topology},
    validate::validate,
};
use gpipe_runtime::{
    PeerError, Peers, Settings, WorkerPool,
    peers::{Inbound, Outbound, RemoteEdge, Run, Share},
    testing::{
        Fault, FaultKind, MockStage, Number, feeds, mock_devices,
        peers::{MockPeers, Network},
        unpipelined,
    },
};

/// Number of random cases; `make soak` runs 50 times as many.
fn cases(count: u64) -> u64 {
    if std::env::var_os("GPIPE_SOAK").is_some() { 50 * count } else { count }
}

/// A program, its link capacity, and the process of each device.
struct Case {
    program: Arc<Program>,
    capacity: usize,
    placement: Vec<usize>,
    processes: usize,
    has_buffers: bool,
}

fn random_case(random: &mut Stream) -> Case {
    let stages = 1 + random.below(6);
    let devices = 1 + random.below(stages);
    let micro_batches = 1 + random.below(5);
    let compute = random_compute(random, stages, devices, micro_batches);
    let program = lower(&compute, &random_topology(random, stages), micro_batches).unwrap();
    let capacity = (1..).find(|&capacity| validate(&program, capacity).is_ok()).unwrap();
    let processes = 1 + random.below(devices);
    // Every process has at least one device; the remaining devices are placed at random.
    let placement = (0..devices).map(|d| if d < processes { d } else { random.below(processes) });
    let placement = placement.collect();
    Case { program: Arc::new(program), capacity, placement, processes, has_buffers: true }
}

/// Like [`random_case`], with a process for each device and links without buffers.
fn unbuffered_case(random: &mut Stream) -> Case {
    let case = random_case(random);
    let processes = case.program.devices.len();
    Case { placement: (0..processes).collect(), processes, has_buffers: false, ..case }
}

/// Calls `process` for each process of `case`, in parallel.
fn in_processes<T: Send>(
    case: &Case,
    fault: Option<&Fault>,
    process: impl Fn(usize, WorkerPool<MockStage>) -> T + Sync,
) -> Vec<T> {
    let network = match case.has_buffers {
        true => Network::new(case.processes, case.placement.clone()),
        false => Network::unbuffered(case.processes),
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..case.processes)
            .map(|here| {
                let (network, process) = (&network, &process);
                scope.spawn(move || {
                    let devices = mock_devices(&case.program, fault);
                    let deadline = Duration::from_secs(60);
                    let settings =
                        Settings { link_capacity: case.capacity, deadline, virtual_costs: None };
                    let peers: Arc<dyn Peers<MockStage>> = MockPeers::new(network, here);
                    process(here, WorkerPool::spawn_among(devices, settings, Some(peers)).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn oracle_random_programs_in_processes_equal_the_unpipelined_step() {
    let mut random = Stream::new(70_000);
    for seed in 0..cases(300) {
        let make = if seed % 2 == 0 { random_case } else { unbuffered_case };
        let case = make(&mut random);
        let program = &case.program;
        let topology = Arc::new(program.topology.clone());
        let (outputs, expected) = unpipelined(&topology, program.micro_batches, seed).unwrap();
        let found = in_processes(&case, None, |here, mut pool| {
            let ran = pool.run(program, feeds(program, seed)).unwrap();
            // Every process has the results of the whole run.
            assert_eq!(ran.outcomes, outputs, "seed {seed} process {here}");
            for (list, timed) in program.devices.iter().zip(&ran.timeline.devices) {
                assert!(list.iter().eq(timed.iter().map(|timed| &timed.action)), "seed {seed}");
            }
            let own = pool.visit_all(|_| {
                |stages: &mut [MockStage]| -> Vec<(StageId, u64)> {
                    let own = |stage: &MockStage| {
                        (gpipe_runtime::StageExecutor::stage(stage), stage.parameter())
                    };
                    stages.iter().map(own).collect()
                }
            });
            let here: Vec<DeviceId> = pool.here().collect();
            assert!(here.iter().all(|device| case.placement[device.index()] < case.processes));
            pool.run(program, feeds(program, seed + 1)).unwrap();
            own.unwrap().into_iter().flatten().collect::<Vec<_>>()
        });
        let mut found: Vec<(StageId, u64)> = found.into_iter().flatten().collect();
        found.sort_unstable();
        let found: Vec<u64> = found.into_iter().map(|(_, parameter)| parameter).collect();
        assert_eq!(found, expected, "seed {seed}");
    }
}

#[test]
fn fault_any_failure_anywhere_ends_every_process_with_the_one_error() {
    let mut crossed = 0;
    for seed in 0..cases(300) {
        let mut random = Stream::new(80_000 + seed);
        let make = if seed % 2 == 0 { random_case } else { unbuffered_case };
        let case = make(&mut random);
        let program = &case.program;
        let device = random.below(program.devices.len());
        let list = &program.devices[device];
        let at = list[random.below(list.len())];
        let kind = if random.below(2) == 0 { FaultKind::Error } else { FaultKind::Panic };
        let errors = in_processes(&case, Some(&Fault { at, kind }), |_, mut pool| {
            let error = pool.run(program, feeds(program, seed)).unwrap_err().to_string();
            let again = pool.run(program, feeds(program, seed)).unwrap_err().to_string();
            (error, again)
        });
        let rank = case.placement[device];
        for (process, (error, again)) in errors.into_iter().enumerate() {
            assert!(error.contains(&at.to_string()), "seed {seed}: process {process}: {error}");
            if process != rank {
                crossed += 1;
                assert!(error.contains(&format!("rank {rank}: ")), "seed {seed}: {error}");
            }
            assert!(again.contains("cannot go on"), "seed {seed}: {again}");
        }
    }
    assert!(crossed > 50, "only {crossed} errors crossed");
}

#[test]
fn fault_another_schedule_is_named() {
    let of = |lists: [&str; 2]| {
        let actions = |list: &str| list.split(' ').map(|one| one.parse().unwrap()).collect();
        Arc::new(lower(&lists.map(actions).to_vec(), &Topology::chain(2), 2).unwrap())
    };
    let own = of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]);
    let other = of(["0F1 0F0 0B0 0B1", "1F1 1F0 1B0 1B1"]);
    let placement = vec![0, 1];
    let program = own.clone();
    let case = Case { program, capacity: 2, placement, processes: 2, has_buffers: true };
    let errors = in_processes(&case, None, |here, mut pool| {
        let program = if here == 0 { &own } else { &other };
        pool.run(program, feeds(program, 1)).unwrap_err().to_string()
    });
    for error in errors {
        let expected = "rank 0: it sent F0@0 where F1@0 was due: its schedule is another";
        assert_eq!(error, expected);
    }
}

/// A transport that connects nothing. It records how long device 1, which is in another process,
/// has been silent when a run begins, and when that is.
#[derive(Default)]
struct Listens(Mutex<Option<(Duration, Instant)>>);

fn gone<T>() -> Result<T, PeerError> {
    Err(PeerError { process: Some(1), reason: "it is gone".into() })
}

impl Peers<MockStage> for Listens {
    fn here(&self) -> usize {
        0
    }

    fn process_of(&self, device: DeviceId) -> usize {
        device.index()
    }

    fn begin(&self, run: Run) -> Result<(), PeerError> {
        *self.0.lock().unwrap() = Some((run.pulses.silence(1), Instant::now()));
        gone()
    }

    fn outbound(&self, _: RemoteEdge) -> Result<Box<dyn Outbound<Number>>, PeerError> {
        gone()
    }

    fn inbound(&self, _: RemoteEdge) -> Result<Box<dyn Inbound<Number>>, PeerError> {
        gone()
    }

    fn fail(&self, _: &PeerError) {}

    fn share(&self, _: Share<MockStage>) -> Result<Vec<Share<MockStage>>, PeerError> {
        gone()
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

/// The silence of another process counted from the building of the stages. Where loading took
/// longer than the timeout, the first step failed at its first wait.
#[test]
fn regression_the_time_before_a_run_is_not_the_silence_of_another_process() {
    let lists = ["0F0 0B0", "1F0 1B0"];
    let actions = |list: &str| list.split(' ').map(|one| one.parse().unwrap()).collect();
    let program = lower(&lists.map(actions).to_vec(), &Topology::chain(2), 1).unwrap();
    let program = Arc::new(program);
    let listens = Arc::new(Listens::default());
    let peers: Arc<dyn Peers<MockStage>> = Arc::clone(&listens) as _;
    let deadline = Duration::from_secs(60);
    let settings = Settings { link_capacity: 1, deadline, virtual_costs: None };
    let devices = mock_devices(&program, None);
    let mut pool = WorkerPool::spawn_among(devices, settings, Some(peers)).unwrap();
    let start = Instant::now();
    let error = pool.run(&program, feeds(&program, 1)).unwrap_err().to_string();
    assert_eq!(error, "rank 1: it is gone");
    let (silence, begun) = listens.0.lock().unwrap().unwrap();
    let run = begun.duration_since(start);
    assert!(silence <= run, "silent for {silence:?}, {run:?} after the run began");
}
