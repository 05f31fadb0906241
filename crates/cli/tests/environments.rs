//! The command where the machine is not as it should be: no home folder, no locale, no fonts, one
//! core, little memory, paths that are no text, a clock that jumps. Family `fault_`. (Full and
//! read-only disks, and outputs that nobody reads: `left_early.rs`.)
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt, process::ExitStatusExt},
    process::{Command, Output, Stdio},
};

use common::{Folder, process::output, results, skip, train};
use gpipe_core::{Nanos, Op};
use gpipe_observe::step_file::StepFile;

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn fault_without_an_environment_everything_works() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &[]));
    // No HOME, no PATH, no LANG.
    let mut bare = folder.command(&train("bare", &[]));
    let ran = output(bare.env_clear());
    assert!(ran.status.success(), "{}", errors(&ran));
    // A locale and a terminal that there are not.
    let mut odd = folder.command(&train("odd", &[]));
    for (name, value) in [
        ("LC_ALL", "xx_XX.UTF-99"),
        ("LANG", "no such"),
        ("TERM", "none"),
        ("HOME", "/no/such/folder"),
        ("XDG_CACHE_HOME", "/no/such/folder"),
        ("TMPDIR", "/no/such/folder"),
        ("COLUMNS", "0"),
    ] {
        odd.env(name, value);
    }
    let ran = output(&mut odd);
    assert!(ran.status.success(), "{}", errors(&ran));
    for run in ["bare", "odd"] {
        assert!(folder.weights(run) == folder.weights("reference"), "{run}");
        assert_eq!(results(&folder.path(run)), results(&folder.path("reference")), "{run}");
    }
    // Languages of numbers and messages are never those of the locale.
    let shown = |run: &str| folder.succeeds(&["inspect", run]).replace(run, "");
    assert_eq!(shown("odd").lines().count(), shown("reference").lines().count());
}

#[test]
fn transparency_on_one_core() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &["--stages", "2"]));
    let gpipe = folder.command(&train("one", &["--stages", "2"]));
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let first = cores.trim().split([',', '-']).next().unwrap();
    let mut command = Command::new("taskset");
    command.args(["-c", first]).arg(gpipe.get_program()).args(gpipe.get_args());
    command.current_dir(folder.path(""));
    if Command::new("taskset").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip("transparency_on_one_core", "there is no taskset");
    }
    let ran = output(&mut command);
    assert!(ran.status.success(), "{}", errors(&ran));
    assert!(folder.weights("one") == folder.weights("reference"));
}

/// Whatever the system refuses, at start-up or later: an error or a run that is whole, never a hang
/// or a wrong end.
#[test]
fn fault_a_system_without_memory() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &[]));
    let mut outcomes = Vec::new();
    for mib in [100, 400, 700, 800, 900, 1000, 1200, 1500, 2000, 16000] {
        let name = format!("run {mib}");
        let limited = format!("ulimit -v {}; exec \"$@\"", mib * 1024);
        let gpipe = folder.command(&train(&name, &[]));
        let mut command = Command::new("bash");
        command.args(["-c", &limited, "bash"]).arg(gpipe.get_program()).args(gpipe.get_args());
        command.current_dir(folder.path(""));
        let ran = output(&mut command);
        let text = errors(&ran);
        if ran.status.success() {
            assert!(folder.weights(&name) == folder.weights("reference"), "{mib} MiB");
        } else {
            // Its own error; or that of the loader, or an abort of libtorch's, which could not even
            // be loaded.
            let (code, signal) = (ran.status.code(), ran.status.signal());
            let own = code == Some(1) && text.contains("gpipe: ");
            assert!(
                own || code == Some(127) || signal == Some(6),
                "{mib} MiB: {:?}: {text}",
                ran.status
            );
            assert!(!text.is_empty(), "{mib} MiB: it says nothing");
            assert!(!text.contains("panicked"), "{mib} MiB: {text}");
            // What cannot be saved at the end is an error of a run whose weights are there all the
            // same.
            let weights = folder.path(&name).join("weights.safetensors");
            assert!(!weights.exists() || folder.weights(&name) == folder.weights("reference"));
        }
        outcomes.push((mib, ran.status, text.lines().last().map(str::to_owned)));
    }
    println!("{outcomes:#?}");
    assert!(outcomes.last().unwrap().1.success(), "{outcomes:#?}");
    assert!(!outcomes.first().unwrap().1.success(), "{outcomes:#?}");
}

#[test]
fn fault_paths_that_are_no_text() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &[]));
    let odd = OsStr::from_bytes(b"odd \xff\xfe name");
    fs::copy(folder.path("text.txt"), folder.path("").join(odd)).unwrap();
    // As the folder of a run.
    let mut arguments: Vec<&OsStr> = train("", &[]).into_iter().map(OsStr::new).collect();
    let place = arguments.iter().position(|argument| argument.is_empty()).unwrap();
    let out = OsStr::from_bytes(b"run \xff");
    arguments[place] = out;
    let ran = output(folder.command(&[]).args(&arguments));
    let text = errors(&ran);
    assert!(!text.contains("panicked"), "{text}");
    match ran.status.success() {
        true => {
            let weights = fs::read(folder.path("").join(out).join("weights.safetensors")).unwrap();
            assert!(weights == folder.weights("reference"));
        }
        false => assert!(text.starts_with("gpipe: ") && text.contains("run "), "{text}"),
    }
    // As the text to train on: what a configuration cannot say must be refused by name.
    arguments[place] = OsStr::new("other");
    let file = arguments.iter().position(|argument| *argument == "text.txt").unwrap();
    arguments[file] = odd;
    let ran = output(folder.command(&[]).args(&arguments));
    let text = errors(&ran);
    assert!(!text.contains("panicked"), "{text}");
    assert_eq!(ran.status.code(), Some(1), "{text}");
    assert!(text.contains("odd ") && text.contains("rename it"), "{text}");
}

/// Whoever opens a named pipe waits for its other end: the command did, for a tokenizer and a
/// configuration, without a word.
#[test]
fn regression_named_pipes_are_not_waited_for() {
    let folder = Folder::new();
    folder.succeeds(&train("run", &[]));
    let pipe = |name: &str| {
        let _ = fs::remove_file(folder.path(name));
        assert!(Command::new("mkfifo").arg(folder.path(name)).status().unwrap().success());
    };
    for name in ["pipe", "pipe.toml", "run/tokenizer.json"] {
        pipe(name);
    }
    folder.refuses(&["train", "pipe.toml"], &["pipe.toml", "not a regular file"]);
    folder.refuses(&train("new", &["--schedule", "file:pipe"]), &["pipe", "not a regular file"]);
    folder.refuses(&["eval", "run"], &["run/tokenizer.json"]);
    folder.refuses(&["train", "tiny.toml", "--text", "pipe"], &["pipe", "neither a regular file"]);
    for name in ["run/metrics.jsonl", "run/step.json"] {
        pipe(name);
    }
    folder.refuses(&["plot", "run"], &["metrics.jsonl", "not a regular file"]);
    folder.refuses(&["trace", "run"], &["step.json", "not a regular file"]);
    fs::create_dir(folder.path("data")).unwrap();
    for name in ["data/text", "data/a.jsonl"] {
        pipe(name);
    }
    folder.refuses(&["init", "--data", "data"], &["data", "nothing to learn from"]);
    folder
        .refuses(&["init", "--data", "pipe", "--out", "new.toml"], &["pipe", "not a regular file"]);
}

/// A clock that jumps a day back and forth at every look; or, with AHEAD, one that is so many
/// seconds ahead on rank 1, as another machine's may be.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static int looks;
__attribute__((destructor)) static void tell(void) {
    FILE *file = fopen(getenv("LOOKS"), "a");
    if (file) fprintf(file, "%d\n", looks), fclose(file);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (clock != CLOCK_REALTIME) return failed;
    int look = __sync_fetch_and_add(&looks, 1);
    const char *ahead = getenv("AHEAD"), *rank = getenv("RANK");
    if (!ahead) now->tv_sec += look % 2 ? 86400 : -86400;
    else if (rank && rank[0] == '1') now->tv_sec += atoi(ahead);
    return failed;
}
"#;

/// Makes clock.so, which stands before the system's clock; whether it could, which is written down
/// for `test`.
fn has_clock(folder: &Folder, test: &str) -> bool {
    fs::write(folder.path("clock.c"), CLOCK).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"]);
    let made = compiler.current_dir(folder.path("")).status().is_ok_and(|status| status.success());
    if !made {
        skip(test, "there is no C compiler");
    }
    made
}

/// Rank 1's clock is an hour ahead: on the clock that a step is told on, its actions are where they
/// were, so that nothing is received before it was sent.
#[test]
fn fault_processes_whose_clocks_differ_by_an_hour() {
    let folder = Folder::new();
    if !has_clock(&folder, "fault_processes_whose_clocks_differ_by_an_hour") {
        return;
    }
    let run = train("run", &["--set", "pipeline.timeout_s=20"]);
    let mut command = folder.command(&[&["launch", "--processes", "2", "--"], &run[..]].concat());
    command.env("LD_PRELOAD", folder.path("clock.so")).env("LOOKS", folder.path("looks"));
    let ran = output(command.env("AHEAD", "3600"));
    assert!(ran.status.success(), "{}", errors(&ran));
    let looks = fs::read_to_string(folder.path("looks")).unwrap();
    assert!(looks.lines().filter(|looks| *looks != "0").count() >= 2, "{looks}");
    let step = StepFile::read(&folder.path("run/step.json")).unwrap().measured;
    assert!(step.makespan < Nanos(60_000_000_000), "{}", step.makespan);
    let timed = || step.devices.iter().flatten();
    let mut arrived = 0;
    for own in timed() {
        let Op::Receive(transfer) = own.action.op else { continue };
        let sent = timed().find(|other| other.action.op == Op::Send(transfer)).unwrap();
        // Clocks are compared to half of a round trip, the shortest of eight, which a busy machine
        // may make long.
        assert!(own.end + Nanos(5_000_000) >= sent.start, "{} of {}", own.end, sent.start);
        arrived += 1;
    }
    assert!(arrived >= 6, "{arrived}");
}

#[test]
fn fault_a_clock_that_jumps() {
    let folder = Folder::new();
    if !has_clock(&folder, "fault_a_clock_that_jumps") {
        return;
    }
    let more = ["--checkpoint-every", "3", "--set", "pipeline.timeout_s=20"];
    folder.succeeds(&train("reference", &more[2..]));
    let jumping = |arguments: &[&str]| {
        let mut command = folder.command(arguments);
        command.env("LD_PRELOAD", folder.path("clock.so")).env("LOOKS", folder.path("looks"));
        let ran = output(&mut command);
        assert!(ran.status.success(), "{}", errors(&ran));
    };
    jumping(&train("run", &more[2..]));
    let run = train("launched", &more[2..]);
    jumping(&[&["launch", "--processes", "2", "--"], &run[..]].concat());
    // One process, and two (their launcher need not look): each of them met it.
    let looks = fs::read_to_string(folder.path("looks")).unwrap();
    let jumped = looks.lines().filter(|looks| looks.parse::<u32>().unwrap() > 1).count();
    assert!(jumped >= 3, "{looks}");
    for run in ["run", "launched"] {
        assert!(folder.weights(run) == folder.weights("reference"), "{run}");
        assert_eq!(results(&folder.path(run)), results(&folder.path("reference")), "{run}");
    }
    // A step of several processes is still a step: none of them lasted for a day.
    for line in folder.lines("launched").iter().filter(|line| line["kind"] == "step") {
        assert!(line["tokens_per_s"].as_f64().unwrap() > 1.0, "{line}");
    }
}
