//! Many steps and many pipelines in one process do not increase its memory, threads or open files.
//!
//! This is one test because it observes the whole process. `make test` runs a tenth of it,
//! `GPIPE_SOAK=1` all of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test

mod common;

use std::fs;

use common::{memory, threads, uniform};
use gpipe::{
    Adam, Balance, LayerError, MeanSquaredError, Pipeline, Remat, Schedule, Sequence, TensorSpec,
    layers::{Activation, Linear},
};
use tch::{Kind, Tensor};

/// Resources of the process.
#[derive(Debug, Clone, Copy)]
struct Held {
    /// Bytes of live tensors, in all arenas.
    live: u64,
    resident_kib: i64,
    threads: usize,
    files: usize,
}

impl Held {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Self {
            live: memory::live(),
            resident_kib: line.trim().trim_end_matches(" kB").parse().unwrap(),
            threads: threads().len(),
            files: fs::read_dir("/proc/self/fd").unwrap().count(),
        }
    }

    /// The last messages of a step, 2 KiB each, may be freed after it. Leaking one tensor per step
    /// would add 400 KiB. The C library returns pages late, so growth below 2 MiB is tolerated.
    #[track_caller]
    fn assert_no_more_than(self, before: Self, what: &str) {
        println!("soak: {what}: {before:?} before, {self:?} after");
        assert_eq!((self.threads, self.files), (before.threads, before.files), "{what}");
        assert!(self.live <= before.live + (16 << 10), "{what}: {before:?}, {self:?}");
        let grown = self.resident_kib - before.resident_kib;
        assert!(grown < 2048, "{what}: {grown} KiB more");
    }
}

const SHAPE: [i64; 2] = [32, 64];

fn pipeline(schedule: Schedule, fails: bool) -> Pipeline {
    let model = Sequence::new()
        .push("one", Linear::new(64, 64))
        .push("tanh", Activation::Tanh)
        .push("two", Linear::new(64, 64))
        .push("three", Linear::new(64, 64));
    let mut builder = Pipeline::builder(model, TensorSpec::new(SHAPE, Kind::Float))
        .stages(2)
        .balance(Balance::Uniform)
        .schedule(schedule)
        .remat(Remat::Always)
        .micro_batches(4)
        .loss(MeanSquaredError)
        .optimizer(Adam { lr: 1e-4, ..Adam::default() });
    if fails {
        builder = builder.before_action(|action| match action.to_string() == "1B2" {
            true => Err(LayerError::Value("as asked".into())),
            false => Ok(()),
        });
    }
    builder.build().unwrap()
}

fn data() -> (Tensor, Tensor) {
    (uniform(&SHAPE, 1, Kind::Float), uniform(&SHAPE, 2, Kind::Float))
}

#[test]
fn property_nothing_grows() {
    let times = if std::env::var_os("GPIPE_SOAK").is_some() { 10 } else { 1 };
    let (x, y) = data();

    // Once a joined thread was counted, and a pipeline seemed to have left it.
    let before = threads().len();
    for _ in 0..2000 {
        std::thread::spawn(|| ()).join().unwrap();
        assert_eq!(threads().len(), before);
    }

    let mut one = pipeline(Schedule::OneFOneB, false);
    let mut steps = |count: u64| {
        for _ in 0..count {
            one.train_step(&x, &y).unwrap();
        }
        Held::now()
    };
    let before = steps(500);
    let after = steps(2000 * times - 500);
    after.assert_no_more_than(before, &format!("{} steps of one pipeline", 2000 * times));

    // Under each schedule: pipelines that have trained, that failed in a step, and that were never
    // used.
    let pipelines = |count: u64| {
        for number in 0..count {
            let schedules = [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1];
            let schedule = schedules[(number % 3) as usize].clone();
            let fails = number % 4 == 1 && schedule != Schedule::ZbH1;
            let mut own = pipeline(schedule, fails);
            if number % 4 < 3 {
                assert_eq!(own.train_step(&x, &y).is_err(), fails);
            }
        }
        Held::now()
    };
    let before = pipelines(20);
    let after = pipelines(50 * times);
    after.assert_no_more_than(before, &format!("{} pipelines", 50 * times + 20));
}
