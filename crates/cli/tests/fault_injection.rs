//! Three processes of which one kills or stops itself before an action, of every kind that its
//! stage has; and processes that are killed at random moments. Family `fault_`: all of them end in
//! time with the one error, which names the rank, and the run goes on to the end of one that nobody
//! disturbed, bit for bit.
//!
//! Some of it under `make test`, all of it with `GPIPE_SOAK=1`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test

mod common;

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use common::{
    Folder, TRAIN,
    kills::{Phase, nothing_half_written_is_taken_for_complete},
    process::{DEADLINE, Process},
    results, train,
};
use gpipe_core::{
    Action, Op,
    lower::{Topology, lower},
    remat::RematPolicies,
    schedule::Schedule,
    splitmix::Stream,
};

/// Seconds after which a silent process is given up.
const DEADLINE_S: u64 = 3;

/// Without tied weights the stages are a chain, whose list of actions is known here.
const MORE: &[&str] =
    &["--set", "model.tied=false", "--set", "pipeline.timeout_s=3", "--resume", "auto"];

fn soak() -> bool {
    std::env::var_os("GPIPE_SOAK").is_some()
}

/// One action of each kind of each stage of a step, as the command runs it.
fn one_of_each(schedule: &Schedule, remat: &str) -> Vec<Action> {
    let remat: RematPolicies = remat.parse().unwrap();
    let lists = remat.apply(&schedule.actions(3, 3));
    let program = lower(&lists, &Topology::chain(3), 3).unwrap();
    let mut kinds: BTreeMap<(u32, String), Action> = BTreeMap::new();
    for action in program.devices.iter().flatten() {
        let kind = match action.op {
            Op::Send(transfer) => format!("send {:?} {:?}", transfer.edge, transfer.direction),
            Op::Receive(transfer) => {
                format!("receive {:?} {:?}", transfer.edge, transfer.direction)
            }
            _ => action.to_string().chars().filter(char::is_ascii_alphabetic).collect(),
        };
        kinds.insert((action.stage.0, kind), *action);
    }
    kinds.into_values().collect()
}

#[test]
fn fault_a_process_that_is_killed_or_stopped_at_any_kind_of_action() {
    let folder = Folder::new();
    let mut random = Stream::new(3);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (schedule, remat) in [(Schedule::OneFOneB, "always"), (Schedule::ZbH1, "never")] {
        let name = schedule.to_string();
        let shape = ["--stages", "3", "--schedule", &name, "--remat", remat];
        let more = [MORE, &shape].concat();
        let reference = format!("reference {name}");
        folder.succeeds(&train(&reference, &more));
        let actions = one_of_each(&schedule, remat);
        assert!(actions.len() >= 24, "{actions:?}");
        let chosen = ["KILL", "STOP"].map(|_| random.below(actions.len()));
        for (index, action) in actions.into_iter().enumerate() {
            for (signal, chosen) in ["KILL", "STOP"].into_iter().zip(chosen) {
                if !soak() && index != chosen {
                    continue;
                }
                *counts.entry(signal).or_default() += 1;
                harm(&folder, &train("run", &more), action, signal);
                // What is there goes on, in processes or in one.
                let alone = train("run", &more);
                match random.below(2) {
                    0 => folder.succeeds(&alone),
                    _ => folder.succeeds(&launched(3, &alone)),
                };
                assert!(folder.weights("run") == folder.weights(&reference), "{signal} {action}");
                assert_eq!(results(&folder.path("run")), results(&folder.path(&reference)));
                fs::remove_dir_all(folder.path("run")).unwrap();
            }
        }
    }
    println!("soak: processes at their actions: {counts:?}");
    assert!(counts.len() == 2, "{counts:?}");
}

fn launched<'a>(processes: usize, command: &[&'a str]) -> Vec<&'a str> {
    let processes = ["1", "2", "3", "4"][processes - 1];
    [&["launch", "--processes", processes, "--"], command].concat()
}

/// The process of the action's stage does it at the sixth step, after the first checkpoint.
fn harm(folder: &Folder, command: &[&str], action: Action, signal: &str) {
    let what = format!("{signal} {action} 6");
    let mut command = folder.command(&launched(3, command));
    let mut run = Process::start(command.env("GPIPE_TEST_AT_ACTION", &what));
    run.until("step 1/");
    let start = Instant::now();
    let outcome = run.end();
    let took = start.elapsed();
    let (rank, printed) = (action.stage.0, &run.printed);
    match signal {
        "KILL" => {
            assert_eq!(outcome, Ok(137), "{what}: {printed}");
            let told = format!("gpipe: rank {rank} of 3 was ended by SIGKILL");
            assert!(printed.contains(&told), "{what}: {printed}");
        }
        _ => assert_eq!(outcome, Ok(1), "{what}: {printed}"),
    }
    for other in (0..3).filter(|other| *other != rank) {
        let last = format!("[{other}] gpipe: ");
        let named = printed.lines().any(|line| {
            line.starts_with(&last)
                && (line.contains(&format!("rank {rank}"))
                    || line.contains(&format!("of stage {rank} ")))
        });
        assert!(named, "{what}: {printed}");
    }
    // The deadline; the launcher's patience with a stopped process; and a busy machine.
    let most = Duration::from_secs(DEADLINE_S + 15 + 30);
    assert!(took < most, "{what}: {took:?}: {printed}");
}

/// A launcher that was killed left its processes behind: they went on by themselves, and whoever
/// started the run again was told that another process had the folder.
#[test]
fn regression_processes_end_with_their_launcher() {
    let folder = Folder::new();
    let own = TRAIN.iter().map(|own| if *own == "12" { "100000" } else { own });
    let command: Vec<&str> = own.chain(["--out", "run"]).chain(MORE.iter().copied()).collect();
    let mut run = Process::start(&mut folder.command(&launched(2, &command)));
    run.until("saved");
    let children = children(run.number());
    assert_eq!(children.len(), 2);
    assert_eq!(run.kill(), Err(9), "{}", run.printed);
    let end = Instant::now() + DEADLINE;
    for child in children {
        // They save first; and then somebody has to wait for them.
        let status = || fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
        while !status().is_empty() && !status().contains("State:\tZ") {
            assert!(Instant::now() < end, "{}", status());
            std::thread::yield_now();
        }
    }
    // Whoever goes on finds the folder free.
    let mut run = Process::start(&mut folder.command(&command));
    run.until("resuming");
    run.until("saved");
    assert_eq!(run.kill(), Err(9), "{}", run.printed);
}

/// Resident KiB, threads and open files of a process, and how many files its run's folder has.
fn held(process: u32, folder: &Path) -> (i64, [usize; 3]) {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let count = |name: &str| fs::read_dir(format!("/proc/{process}/{name}")).unwrap().count();
    let mut files = 0;
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        // A checkpoint that is pruned meanwhile is gone.
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                _ => files += 1,
            }
        }
    }
    let resident = resident.trim().trim_end_matches(" kB").parse().unwrap();
    (resident, [count("task"), count("fd"), files])
}

/// 20,000 steps with a checkpoint after every fiftieth of them, and metrics of each.
#[test]
fn property_a_long_run_holds_no_more_at_its_end() {
    let folder = Folder::new();
    let steps = if soak() { 20_000 } else { 1_000 };
    let all = steps.to_string();
    let own = TRAIN.iter().map(|own| match *own {
        "12" => &all,
        "4" => "50",
        own => own,
    });
    let command: Vec<&str> = own.chain(["--out", "run"]).collect();
    let mut run = Process::start(&mut folder.command(&command));
    let mut at = |step: u64| {
        run.until(&format!("saved step {step}: "));
        held(run.number(), &folder.path("run"))
    };
    let tenth = steps / 10;
    let marks: Vec<_> = (1..10).map(|mark| at(tenth * mark)).collect();
    let ((before, counts), (after, _)) = (marks[1], marks[8]);
    println!("soak: {} steps of the command: {marks:?}", steps);
    assert!(after - before < 4096, "KiB, and threads, open files and files: {marks:?}");
    // At such a moment the writer of checkpoints may be there or not, with a file and some files
    // that are not yet in place.
    let most = |index: usize| marks.iter().map(|(_, counts)| counts[index]).max().unwrap();
    for (index, room) in [(0, 3), (1, 4), (2, 12)] {
        assert!(most(index) <= counts[index] + room, "{marks:?}");
    }
    assert_eq!(run.end(), Ok(0), "{}", run.printed);
}

/// Which of them a process is; none before it has begun.
fn rank(process: u32) -> Option<String> {
    let variables = fs::read(format!("/proc/{process}/environ")).ok()?;
    let variables = String::from_utf8_lossy(&variables).into_owned();
    variables.split('\0').find_map(|variable| variable.strip_prefix("RANK=").map(str::to_owned))
}

/// The numbers of the processes that a launcher has started.
fn children(launcher: u32) -> Vec<u32> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc").unwrap() {
        let path = entry.unwrap().path();
        let Ok(stat) = fs::read_to_string(path.join("stat")) else { continue };
        // After the name, which may have spaces: the state, and the number of the parent.
        let parent = stat.rsplit(") ").next().unwrap().split(' ').nth(1).unwrap();
        if parent == launcher.to_string() {
            all.push(path.file_name().unwrap().to_str().unwrap().parse().unwrap());
        }
    }
    all.sort();
    all
}

fn long(out: &str) -> Vec<&str> {
    let own = TRAIN.iter().map(|own| if *own == "12" { "40" } else { own });
    own.chain(["--out", out]).chain(MORE.iter().copied()).collect()
}

/// At the end of a run, or where it was killed: whether it was.
fn look(
    folder: &Folder,
    run: &str,
    process: &Process,
    outcome: Result<i32, i32>,
    harmed: &str,
) -> bool {
    match outcome {
        Ok(0) => {
            let same = folder.weights(run) == folder.weights("reference");
            assert!(same, "{run}: {}", process.printed);
            assert_eq!(results(&folder.path(run)), results(&folder.path("reference")));
            false
        }
        // Its own end, or that of a process it had started; or one that lost another is heard
        // before the system tells of that.
        Err(9) | Ok(137 | 1) => {
            let named = process.printed.contains(&format!("rank {harmed}"));
            assert!(outcome != Ok(1) || named, "rank {harmed}: {}", process.printed);
            nothing_half_written_is_taken_for_complete(&folder.path(run));
            true
        }
        other => panic!("{other:?}: {}", process.printed),
    }
}

/// The last run comes to its end, which is that of the undisturbed one.
fn finish(folder: &Folder, run: &str) {
    folder.succeeds(&launched(2, &long(run)));
    assert!(folder.weights(run) == folder.weights("reference"));
    assert_eq!(results(&folder.path(run)), results(&folder.path("reference")));
}

#[test]
fn fault_a_process_that_is_killed_before_any_file_operation_of_a_joint_save() {
    let folder = Folder::new();
    folder.succeeds(&launched(2, &long("reference")));
    let mut random = Stream::new(0x5a7e);
    let (mut ended, mut phases) = (0, BTreeMap::<Phase, usize>::new());
    for moment in 1..=60 {
        for rank in ["0", "1"] {
            if !soak() && random.below(15) != 0 {
                continue;
            }
            let run = format!("run {ended}");
            let mut command = folder.command(&launched(2, &long(&run)));
            command.env("GPIPE_TEST_KILL_AT_FILE_OPERATION", format!("{moment}@{rank}"));
            let mut process = Process::start(&mut command);
            let outcome = process.end();
            match look(&folder, &run, &process, outcome, rank) {
                true => {
                    *phases.entry(Phase::of(&process.printed, &folder.path(&run))).or_default() += 1
                }
                false => ended += 1,
            }
        }
    }
    println!(
        "soak: processes killed before a file operation of a joint save, {ended} runs came to \
        their end: {phases:?}"
    );
    assert!(phases.contains_key(&Phase::Writing), "{phases:?}");
    finish(&folder, &format!("run {ended}"));
}

#[test]
fn fault_processes_that_are_killed_at_random_moments_go_on_as_if_nothing_had_happened() {
    let folder = Folder::new();
    let kills = if soak() { 60 } else { 6 };
    let start = Instant::now();
    folder.succeeds(&launched(2, &long("reference")));
    let longest_us = usize::try_from(start.elapsed().as_micros()).unwrap() * 11 / 10;
    let mut random = Stream::new(0x9a0);
    let (mut ended, mut starts) = (0, 0);
    let mut phases: BTreeMap<Phase, usize> = BTreeMap::new();
    while phases.values().sum::<usize>() < kills {
        let run = format!("run {ended}");
        starts += 1;
        let mut command = folder.command(&launched(2, &long(&run)));
        if random.below(2) == 0 {
            // Saves take longer, so that some are met.
            command.env("GPIPE_TEST_FILE_DELAY_MS", "10");
        }
        let mut process = Process::start(&mut command);
        let mut harmed = None;
        let after = Duration::from_micros(random.below(longest_us) as u64);
        let outcome = match process.ends_within(after) {
            Some(_) => {
                assert_eq!(process.end(), Ok(0), "{}", process.printed);
                Ok(0)
            }
            None => {
                let all = children(process.number());
                // One of them; where there is none yet or any more, the launcher.
                let one = match all.is_empty() {
                    true => process.number().to_string(),
                    false => {
                        let one = all[random.below(all.len())];
                        harmed = rank(one);
                        one.to_string()
                    }
                };
                // It may have ended meanwhile.
                let _ = std::process::Command::new("kill").args(["-KILL", &one]).output().unwrap();
                process.end()
            }
        };
        match look(&folder, &run, &process, outcome, &harmed.unwrap_or_default()) {
            true => {
                *phases.entry(Phase::of(&process.printed, &folder.path(&run))).or_default() += 1;
            }
            false => ended += 1,
        }
    }
    println!(
        "soak: processes killed in {starts} starts, {ended} runs came to their end before: \
        {phases:?}"
    );
    assert!(!soak() || phases.contains_key(&Phase::Writing), "{phases:?}");
    finish(&folder, &format!("run {ended}"));
}
