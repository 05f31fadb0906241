//! Runs that are killed again and again, at random moments and before chosen file operations, and
//! started again by one command. Family `fault_`: whatever happened on the way, the end is that of
//! a run that nobody disturbed, bit for bit, and nothing half-written is ever taken for complete.
//! `GPIPE_SOAK=1` kills 200 times.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use common::{
    Folder, bytes,
    kills::{Phase, names, nothing_half_written_is_taken_for_complete},
    process::Process,
    results,
};
use gpipe_checkpoint::folder;
use gpipe_core::splitmix::Stream;

/// A run with everything that must survive: dropout, averages, validations, a best checkpoint.
const TRAIN: &[&str] = &[
    "train",
    "tiny.toml",
    "--text",
    "text.txt",
    "--steps",
    "60",
    "--resume",
    "auto",
    "--checkpoint-every",
    "3",
    "--keep-best",
    "--set",
    "model.blocks=1",
    "--set",
    "train.validate_every=10",
    "--set",
    "train.validation_tokens=100",
    "--set",
    "optimizer.average=0.9",
    "--out",
];

/// Stages, layers of each, schedule and re-materialization: the end must not depend on them.
const SHAPES: [[&str; 4]; 4] = [
    ["2", "3,1", "1f1b", "unless-adjacent"],
    ["1", "4", "gpipe", "never"],
    ["4", "1,1,1,1", "1f1b", "segments:2"],
    ["3", "1,2,1", "gpipe", "always"],
];

fn arguments(out: &str, round: usize) -> Vec<&str> {
    let [stages, balance, schedule, remat] = SHAPES[round % SHAPES.len()];
    let shape =
        ["--stages", stages, "--balance", balance, "--schedule", schedule, "--remat", remat];
    [TRAIN, &[out], &shape].concat()
}

/// The run in `out` has ended as `reference` has.
fn ended_like(folder: &Folder, out: &str, reference: &str) {
    let (run, reference) = (folder.path(out), folder.path(reference));
    for file in ["weights.safetensors", "averages.safetensors"] {
        assert!(bytes(&run.join(file)) == bytes(&reference.join(file)), "{out}: {file}");
    }
    assert_eq!(results(&run), results(&reference), "{out}");
    let newest = |run: &Path| folder::newest(&run.join("checkpoints")).unwrap().found.unwrap();
    let best = |run: &Path| newest(run).manifest().best.unwrap();
    assert_eq!(best(&run), best(&reference), "{out}");

    let shown = folder.succeeds(&["inspect", &format!("{out}/checkpoints")]);
    let last = shown.lines().last().unwrap(); // which is the best: the loss falls
    assert!(last.contains("/step-00000060: step 60, ") && last.ends_with(", the best so far"));
    // More than two are left only where the last save was killed before it removed the others.
    let complete = shown.matches(", complete").count();
    assert!(complete >= 2 && complete == shown.lines().count(), "{shown}");
    assert_eq!(shown.matches("the best so far").count(), 1, "{shown}");
    nothing_half_written_is_taken_for_complete(&run);
    let unfinished = |name: &String| name.starts_with("step-") && name.contains('.');
    assert!(!names(&run).iter().any(unfinished), "{:?}", names(&run));
}

/// Trains without a disturbance; how long that took.
fn reference(folder: &Folder) -> Duration {
    let start = Instant::now();
    folder.succeeds(&arguments("reference", 1));
    // A new line for each step and validation, or nothing below is worth anything.
    assert_eq!(results(&folder.path("reference")).len(), 60 + 6);
    start.elapsed()
}

/// One run after the other, each started again and again until it comes to its end, which is
/// compared.
struct Runs {
    folder: Folder,
    /// How many have ended.
    ended: usize,
    starts: usize,
}

impl Runs {
    fn out(&self) -> String {
        format!("run-{}", self.ended)
    }

    fn path(&self) -> PathBuf {
        self.folder.path(&self.out())
    }

    fn command(&mut self) -> Command {
        self.starts += 1;
        self.folder.command(&arguments(&self.out(), self.starts))
    }

    /// Looks at what a process left; whether it was killed.
    fn look(&mut self, process: &Process, outcome: Result<i32, i32>) -> bool {
        match outcome {
            Err(9) => nothing_half_written_is_taken_for_complete(&self.path()),
            Ok(0) => {
                ended_like(&self.folder, &self.out(), "reference");
                self.ended += 1;
            }
            other => panic!("{other:?}: {}", process.printed),
        }
        outcome.is_err()
    }

    /// Lets the last one come to its end.
    fn end(mut self) {
        let mut process = Process::start(&mut self.command());
        let outcome = process.end();
        assert!(!self.look(&process, outcome), "{}", process.printed);
    }
}

#[test]
fn fault_killed_at_random_moments_a_run_ends_as_if_nothing_had_happened() {
    let kills = if std::env::var_os("GPIPE_SOAK").is_some() { 200 } else { 20 };
    let mut runs = Runs { folder: Folder::new(), ended: 0, starts: 0 };
    let time = reference(&runs.folder);
    let longest_us = usize::try_from(time.as_micros()).unwrap() * 11 / 10;
    let mut random = Stream::new(0x6b11);
    let mut phases: BTreeMap<Phase, usize> = BTreeMap::new();
    while phases.values().sum::<usize>() < kills {
        let mut command = runs.command();
        if random.below(2) == 0 {
            let delay_ms = 1 + random.below(3);
            command.env("GPIPE_TEST_FILE_DELAY_MS", delay_ms.to_string());
        }
        let mut process = Process::start(&mut command);
        let after = Duration::from_micros(random.below(longest_us) as u64);
        let outcome = match process.ends_within(after) {
            Some(_) => process.end(),
            None => process.kill(),
        };
        if runs.look(&process, outcome) {
            *phases.entry(Phase::of(&process.printed, &runs.path())).or_default() += 1;
        }
    }
    println!("soak: {kills} kills of one process in {} runs: {phases:?}", runs.ended + 1);
    runs.end();
    assert!(phases.contains_key(&Phase::Writing), "{phases:?}");
    // Of 200 some are at start-up and in training, too.
    assert!(kills < 200 || phases.len() >= 3, "{phases:?}");
}

#[test]
fn fault_killed_before_any_file_operation_of_a_save_a_run_ends_as_if_nothing_had_happened() {
    let mut runs = Runs { folder: Folder::new(), ended: 0, starts: 0 };
    reference(&runs.folder);
    // A save is some fifty operations. The last ones give and take names: each of them is met, also
    // those that remove an older checkpoint, which are in the second or third save of a process.
    let moments = (1..6).chain([12, 24, 36]).chain(40..62).chain([90]).chain(97..112);
    let mut left: BTreeMap<&str, usize> = BTreeMap::new();
    for moment in moments {
        let mut command = runs.command();
        command.env("GPIPE_TEST_KILL_AT_FILE_OPERATION", moment.to_string());
        let mut process = Process::start(&mut command);
        let outcome = process.end();
        if !runs.look(&process, outcome) {
            continue;
        }
        for name in names(&runs.path()) {
            let kind = match name.split_once('.') {
                None => "complete",
                Some(("latest" | "best", _)) => "link",
                Some((_, kind)) => {
                    ["writing", "removing"].into_iter().find(|k| *k == kind).unwrap()
                }
            };
            *left.entry(kind).or_default() += 1;
        }
    }
    println!("left in {} runs: {left:?}", runs.ended + 1);
    runs.end();
    for kind in ["complete", "link", "writing", "removing"] {
        assert!(left.contains_key(kind), "no kill left a '{kind}': {left:?}");
    }
}
