//! Family `fault_`: injects an error, a panic, an allocation over the cap and a stall at every kind
//! of action of every stage.
//!
//! Each fault must cause one error that names its place, in time, and every wait must end.
//! Afterwards the pipeline either goes on as if nothing had happened, to the bit and to the byte,
//! or it refuses everything and closes without leaving a thread or a file.
//!
//! `make test` injects a few of these faults, `GPIPE_SOAK=1` all.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test

mod common;

use std::{
    collections::BTreeMap,
    fs,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use common::{assert_same_bits, memory, threads, uniform};
use gpipe::{
    Adam, Balance, Bytes, CrossEntropy, LayerError, Pipeline, Remat, Schedule, Sequence,
    TensorSpec,
    layers::{Embedding, Head, Mlp},
};
use gpipe_core::{Action, Op, splitmix::Stream};
use tch::{Device, Kind, Tensor};

const K: usize = 3;
const M: usize = 3;
const SAMPLES: i64 = 6;
/// A deadline far above the duration of any test.
const LONG: Duration = Duration::from_secs(60);
const CAP: Bytes = Bytes(16 << 20);

/// The fault that is injected before an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    Error,
    Panic,
    OverTheCap,
    Stall,
}

/// Records all actions, and injects a fault once, before one of them.
#[derive(Default)]
struct Trap {
    at: Mutex<Option<(Action, Deed)>>,
    seen: Mutex<Vec<Action>>,
    shut: Mutex<bool>,
    opened: Condvar,
}

impl Trap {
    fn before(&self, action: Action) -> Result<(), LayerError> {
        self.seen.lock().unwrap().push(action);
        let mut at = self.at.lock().unwrap();
        let Some((_, deed)) = at.take_if(|(at, _)| *at == action) else { return Ok(()) };
        drop(at); // a panic must not poison it
        match deed {
            Deed::Error => Err(LayerError::Value("injected error".into())),
            Deed::Panic => panic!("injected panic"),
            Deed::OverTheCap => {
                let options = (Kind::Float, Device::Cpu);
                Tensor::f_zeros([CAP.0 as i64], options).map(drop).map_err(LayerError::from)
            }
            Deed::Stall => {
                let mut shut = self.shut.lock().unwrap();
                while *shut {
                    shut = self.opened.wait(shut).unwrap();
                }
                Ok(())
            }
        }
    }

    fn set(&self, action: Action, deed: Deed) {
        *self.shut.lock().unwrap() = true;
        *self.at.lock().unwrap() = Some((action, deed));
    }

    fn open(&self) {
        *self.shut.lock().unwrap() = false;
        self.opened.notify_all();
    }
}

/// Ways to run that together have every kind of compute action of a training, and transfers of
/// activations, gradients, tied weights and the vote.
fn ways() -> [(Schedule, Remat); 5] {
    [
        (Schedule::OneFOneB, Remat::Always),
        (Schedule::ZbH1, Remat::Never),
        (Schedule::GPipe, Remat::Always),
        (Schedule::GPipe, Remat::Selective),
        (Schedule::OneFOneB, Remat::Offload),
    ]
}

/// An embedding, an MLP, and a head tied to the embedding, each on a separate stage.
fn pipeline(
    (schedule, remat): &(Schedule, Remat),
    trap: &Arc<Trap>,
    deadline: Duration,
) -> Pipeline {
    let tie = Some("tokens".to_owned());
    let embedding = Embedding {
        vocabulary: 7,
        features: 4,
        positions: 3,
        std: 0.1,
        dropout: 0.1,
        tie: tie.clone(),
    };
    let mlp = Mlp {
        features: 4,
        hidden: 8,
        dropout: 0.1,
        std: 0.1,
        output_std: 0.1,
        gelu: Default::default(),
    };
    let head = Head { features: 4, vocabulary: 7, std: 0.1, logit_clip: 0.0, tie };
    let model = Sequence::new().push("embedding", embedding).push("mlp", mlp).push("head", head);
    let trap = Arc::clone(trap);
    Pipeline::builder(model, TensorSpec::new([SAMPLES, 3], Kind::Int64))
        .stages(K)
        .balance(Balance::Uniform)
        .schedule(schedule.clone())
        .remat(*remat)
        .micro_batches(M)
        .memory_cap([CAP])
        .seed(5)
        .timeout(deadline)
        .clip_norm(0.1)
        .loss(CrossEntropy::default())
        .optimizer(Adam { lr: 0.01, ..Adam::default() })
        .before_action(move |action| trap.before(action))
        .build()
        .unwrap()
}

fn data() -> (Tensor, Tensor) {
    let tokens =
        |seed| (uniform(&[SAMPLES, 3], seed, Kind::Float) * 3.0 + 3.0).to_kind(Kind::Int64);
    (tokens(1), tokens(2))
}

fn step(pipeline: &mut Pipeline) -> gpipe::Result<gpipe::StepReport> {
    let (x, y) = data();
    pipeline.train_step(&x, &y)
}

/// One action of each kind of each stage: the middle one. The order is by stage and name, so that a
/// failure can be reproduced.
fn one_of_each(seen: &[Action]) -> Vec<Action> {
    let mut kinds: BTreeMap<(u32, String), Vec<Action>> = BTreeMap::new();
    for action in seen {
        let name = match action.op {
            Op::Send(transfer) | Op::Receive(transfer) => {
                let way = if matches!(action.op, Op::Send(_)) { "send" } else { "receive" };
                format!("{way} {:?} {:?}", transfer.edge, transfer.direction)
            }
            _ => action.to_string().chars().filter(char::is_ascii_alphabetic).collect(),
        };
        kinds.entry((action.stage.0, name)).or_default().push(*action);
    }
    kinds.into_values().map(|all| all[all.len() / 2]).collect()
}

fn soak() -> bool {
    std::env::var_os("GPIPE_SOAK").is_some()
}

/// This process's pipeline threads, open files, and bytes of tensors.
fn held() -> (usize, usize, u64) {
    let devices = threads().iter().filter(|name| name.starts_with("gpipe-device")).count();
    (devices, fs::read_dir("/proc/self/fd").unwrap().count(), memory::live())
}

/// Suppresses the output of injected panics.
fn hush() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload_as_str() != Some("injected panic") {
            usual(info);
        }
    }));
}

/// The bytes that each device held when the step began, which is what the previous step left. Later
/// values depend on when messages are received.
fn left(report: &gpipe::StepReport) -> Vec<Bytes> {
    report.bytes.iter().map(|levels| levels[0].1).collect()
}

/// Injects one fault and checks its effect. A failure before the decision changes nothing. While
/// the decision is being sent, the pipeline may report that it is torn.
fn harm(way: &(Schedule, Remat), at: Action, deed: Deed, deadline: Duration) {
    let what = format!("{way:?} {at} {deed:?}");
    let before = held();
    let trap = Arc::new(Trap::default());
    let (mut harmed, mut spared) =
        (pipeline(way, &trap, deadline), pipeline(way, &Arc::default(), LONG));
    for pipeline in [&mut harmed, &mut spared] {
        step(pipeline).unwrap();
        step(pipeline).unwrap();
    }
    trap.set(at, deed);
    let start = Instant::now();
    let text = step(&mut harmed).expect_err(&what).to_string();
    let took = start.elapsed();
    trap.open();
    assert!(trap.at.lock().unwrap().is_none(), "{what}: the action was not met");
    match deed {
        Deed::Error => assert!(text.contains("injected error"), "{what}: {text}"),
        Deed::Panic => assert!(text.contains("injected panic"), "{what}: {text}"),
        Deed::OverTheCap => {
            assert!(
                text.contains("out of memory") && text.contains("cap 16.0 MiB"),
                "{what}: {text}"
            );
        }
        Deed::Stall => {
            assert!(text.contains("sign of life"), "{what}: {text}");
            // Where only the driver waits, it waits for a little more than twice the deadline. The
            // rest is slack for a busy machine.
            assert!(took < 3 * deadline + Duration::from_secs(4), "{what}: {took:?}: {text}");
        }
    }
    assert!(text.contains(&at.to_string()), "{what}: {text}");
    match step(&mut harmed) {
        // Usable, as if nothing had happened.
        Ok(report) => {
            assert!(deed != Deed::Stall, "{what}: a thread that was given up is used again");
            let mut pair = (report, step(&mut spared).unwrap());
            // The last thread that leaves a step frees its messages, possibly after the next step
            // has begun. A leak persists.
            for more in 0..10 {
                let (own, other) = &pair;
                assert_eq!((own.loss, own.grad_norm), (other.loss, other.grad_norm), "{what}");
                if left(own) == left(other) {
                    break;
                }
                assert!(more < 9, "{what}: {:?} are held, not {:?}", left(own), left(other));
                pair = (step(&mut harmed).unwrap(), step(&mut spared).unwrap());
            }
            assert_same_bits(&harmed.parameters().unwrap(), &spared.parameters().unwrap(), &what);
        }
        // Closed: it returns no values, because they could come from two different steps.
        Err(error) => {
            let torn = text.contains("restore a checkpoint");
            assert!(torn || deed == Deed::Stall, "{what}: {text}; then: {error}");
            assert!(error.to_string().contains("cannot go on"), "{what}: {error}");
            assert!(harmed.parameters().is_err() && harmed.state().is_err(), "{what}");
        }
    }
    drop((harmed, spared));
    // An abandoned thread ends once it is released, but nothing waits for it.
    let end = Instant::now() + Duration::from_secs(20);
    while held() != before {
        assert!(
            Instant::now() < end,
            "{what}: threads, files, bytes {:?}, before {before:?}",
            held()
        );
        std::thread::yield_now();
    }
}

#[test]
fn fault_at_every_kind_of_action_of_every_stage() {
    hush();
    let mut random = Stream::new(17);
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for way in ways() {
        let trap = Arc::new(Trap::default());
        let mut whole = pipeline(&way, &trap, LONG);
        step(&mut whole).unwrap();
        drop(whole);
        let seen = trap.seen.lock().unwrap().clone();
        let actions = one_of_each(&seen);
        assert!(actions.len() >= 25, "{actions:?}");
        for action in actions {
            for deed in [Deed::Error, Deed::Panic, Deed::OverTheCap, Deed::Stall] {
                // A stall takes as long as its deadline, so fewer are injected.
                let every = if deed == Deed::Stall { 12 } else { 2 };
                if !soak() && random.below(every) != 0 {
                    continue;
                }
                let deadline = if deed == Deed::Stall { Duration::from_secs(1) } else { LONG };
                harm(&way, action, deed, deadline);
                *counts.entry(format!("{deed:?}")).or_default() += 1;
            }
        }
    }
    println!("soak: faults at actions of real stages: {counts:?}");
    assert_eq!(counts.len(), 4, "{counts:?}");
    assert!(!soak() || counts.values().all(|count| *count >= 25 * ways().len()), "{counts:?}");
}
