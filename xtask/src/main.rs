//! The project's tasks:
//! `cargo xtask ci | simulated-gpu | soak | fuzz [SECONDS] [TARGET..] | licences | tidy |
//! golden --bless`.

mod circles;
mod fuzz;
mod licences;
mod programs;
mod prose;
mod simulated;
mod soak;
mod tidy;

use std::{
    io::{self, Write as _},
    path::PathBuf,
    process::{Command, ExitCode, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// One command of CI.
struct Step {
    name: &'static str,
    /// The program, `cargo` or another.
    program: &'static str,
    arguments: &'static [&'static str],
    environment: &'static [(&'static str, &'static str)],
}

const CI: &[Step] = &[
    Step {
        name: "format",
        program: "cargo",
        arguments: &["fmt", "--all", "--check"],
        environment: &[],
    },
    Step {
        // It depends on the crates here, and is built long after these checks.
        name: "the lock file of the Python package",
        program: "cargo",
        arguments: &["fetch", "--locked", "--manifest-path", "python/Cargo.toml"],
        environment: &[],
    },
    Step {
        name: "clippy",
        program: "cargo",
        arguments: &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"],
        environment: &[],
    },
    Step {
        name: "set-up tests",
        program: "python3",
        arguments: &["-m", "unittest", "discover", "-s", "scripts"],
        environment: &[],
    },
    Step {
        name: "tests of what prepares data",
        program: "python3",
        arguments: &["-m", "unittest", "discover", "-s", "scripts/prepare"],
        environment: &[],
    },
    Step {
        name: "tests of what measures",
        program: "python3",
        arguments: &["-m", "unittest", "discover", "-s", "benchmarks"],
        environment: &[],
    },
    Step {
        name: "the book",
        program: "python3",
        arguments: &["scripts/book.py"],
        environment: &[],
    },
    Step {
        name: "text to learn from",
        program: "cargo",
        arguments: &["fetch", "--locked", "--manifest-path", "configs/text/Cargo.toml"],
        environment: &[],
    },
];

/// What CI builds beside the tests, or elsewhere. These steps run at the same time, because a
/// compiler of C++ leaves a core idle.
const APART: &[Step] = &[
    Step {
        name: "documentation",
        program: "cargo",
        arguments: &["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"],
        environment: &[("RUSTDOCFLAGS", "-D warnings")],
    },
    Step {
        name: "examples of the documentation",
        program: "cargo",
        arguments: &["test", "--workspace", "--exclude=gpipe-drivers", "--locked", "--doc"],
        environment: &[],
    },
    Step {
        name: "a crate outside of the workspace",
        program: "python3",
        arguments: &["scripts/outside_crate.py"],
        environment: &[],
    },
    Step {
        name: "packages",
        program: "cargo",
        arguments: &[
            "package",
            "--workspace",
            "--exclude=gpipe-drivers",
            "--exclude=gpipe-fuzz",
            "--exclude=gpipe-simulated-gpu",
            "--exclude=xtask",
            "--no-verify",
            "--allow-dirty",
            "--quiet",
        ],
        environment: &[],
    },
    Step {
        name: "interleavings",
        program: "cargo",
        arguments: soak::INTERLEAVINGS,
        environment: soak::INTERLEAVINGS_ENVIRONMENT,
    },
];

const GOLDEN: &[Step] = &[
    Step {
        name: "golden files",
        program: "cargo",
        arguments: &["test", "--package", "gpipe-core", "--package", "gpipe-observe"],
        environment: &[("INSTA_UPDATE", "always")],
    },
    Step {
        name: "reference pages",
        program: "cargo",
        arguments: &["test", "--package", "gpipe-cli", "--lib", "reference"],
        environment: &[("GPIPE_BLESS", "1")],
    },
    Step {
        name: "pictures",
        program: "cargo",
        arguments: &["test", "--package", "gpipe-cli", "--test", "suite", "schedules::pictures"],
        environment: &[("GPIPE_BLESS", "1")],
    },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["ci"] => {
            let _ = std::fs::remove_file(times());
            tidy_step()
                && licences_step()
                && run(CI)
                && tests(Tests::Ci)
                && at_once(APART)
                && print_skipped()
        }
        ["simulated-gpu"] => tests(Tests::OnSimulatedGpus),
        ["soak"] => soaked(),
        ["fuzz", ref rest @ ..] => {
            match rest.split_first().map(|(first, rest)| (first.parse(), rest)) {
                None => fuzzed(FUZZ_SECONDS, &[]),
                Some((Ok(seconds), targets)) => fuzzed(seconds, targets),
                Some((Err(_), _)) => fuzzed(FUZZ_SECONDS, rest),
            }
        }
        ["licences"] => licences_step(),
        ["tidy"] => tidy_step(),
        ["golden", "--bless"] => run(GOLDEN),
        _ => {
            eprintln!(
                "usage: cargo xtask ci | simulated-gpu | soak | fuzz [SECONDS] [TARGET..] | \
                 licences | tidy | golden --bless"
            );
            return ExitCode::from(2);
        }
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Time to fuzz each reader, in seconds. All together take an hour.
const FUZZ_SECONDS: u64 = 156;

/// Maximum time of a soak, in seconds, and the part reserved for building the fuzzer.
const SOAK_SECONDS: u64 = 3600;
const FUZZ_BUILD_SECONDS: u64 = 600;
/// Maximum time to fuzz each reader within a soak, in seconds.
const SOAK_FUZZ_SECONDS: u64 = 60;

/// Runs all soak tests, and fuzzes in the remaining time. Returns whether all passed.
fn soaked() -> bool {
    let begun = Instant::now();
    let proven = said("soak", soak::run(&root(), &cargo()));
    let left = SOAK_SECONDS.saturating_sub(begun.elapsed().as_secs() + FUZZ_BUILD_SECONDS);
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let targets = fuzz::targets(&root()).map_or(1, |targets| targets.len().max(1)) as u64;
    let seconds = (left * cores / targets).clamp(1, SOAK_FUZZ_SECONDS);
    fuzzed(seconds, &[]) && proven
}

/// Tests to run.
#[derive(Clone, Copy, PartialEq)]
enum Tests {
    /// All, and the short suites on simulated GPUs.
    Ci,
    /// All suites on simulated GPUs.
    OnSimulatedGpus,
}

/// The programs that take the longest, in order.
const LONGEST: &[&str] =
    &["gpipe suite", "cli suite", "models suite", "distributed transparency", "distributed suite"];

/// Builds and runs tests. Returns whether all passed.
fn tests(which: Tests) -> bool {
    let start = Instant::now();
    let all_passed = || {
        let programs = programs::build(&root(), &cargo())?;
        took("building the tests", start.elapsed());
        let log = root().join("target/simulated-gpu.txt");
        let _ = std::fs::remove_file(&log);
        let mut parts = simulated::parts(&programs, &log, which == Tests::Ci)?;
        if which == Tests::Ci {
            let mut whole: Vec<_> = programs.iter().map(programs::Part::whole).collect();
            // The longest first, so that no core is idle at the end.
            whole.sort_by_key(|part| {
                LONGEST.iter().position(|name| *name == part.name).unwrap_or(LONGEST.len())
            });
            let others = whole.split_off(whole.len().min(LONGEST.len()));
            parts = whole.into_iter().chain(parts).chain(others).collect();
        }
        let start = Instant::now();
        let passed = programs::run(parts, &root().join("target/tests"), &skip_log())?;
        took("tests", start.elapsed());
        Ok(passed && simulated::counted(&log))
    };
    said("tests", all_passed())
}

fn fuzzed(seconds: u64, targets: &[&str]) -> bool {
    said("fuzz", fuzz::run(&root(), &cargo(), seconds, targets))
}

fn said(what: &str, outcome: Result<bool, String>) -> bool {
    outcome.unwrap_or_else(|error| {
        eprintln!("{what}: {error}");
        false
    })
}

fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn tidy_step() -> bool {
    let problems = tidy::check(&root());
    for problem in &problems {
        eprintln!("tidy: {problem}");
    }
    println!("== tidy: {} problems", problems.len());
    problems.is_empty()
}

fn licences_step() -> bool {
    let checked = licences::check(&root(), &cargo()).map(|problems| {
        problems.iter().for_each(|problem| eprintln!("licences: {problem}"));
        problems.is_empty()
    });
    said("licences", checked)
}

/// The file in which tests state, one line each, that they did not run and why.
fn skip_log() -> PathBuf {
    root().join("target").join("skipped-tests.txt")
}

/// The file to which each step of CI adds a line with its time, for the table at CI's end.
fn times() -> PathBuf {
    root().join("target").join("ci-times.txt")
}

/// Prints the time of a step, and adds it to the file of [`times`].
fn took(name: &str, time: Duration) {
    let seconds = time.as_secs();
    println!("== {name}: {seconds} s");
    let file = std::fs::OpenOptions::new().create(true).append(true).open(times());
    // The times are for reading alone.
    let _ = file.and_then(|mut file| writeln!(file, "{seconds:5} s    {name}"));
}

/// Runs the steps in turn, up to the first that fails. Returns whether all passed.
fn run(steps: &[Step]) -> bool {
    let cargo = cargo();
    let _ = std::fs::remove_file(skip_log());
    steps.iter().all(|step| {
        println!("== {}: {} {}", step.name, step.program, step.arguments.join(" "));
        let start = Instant::now();
        let status = command(step, &cargo).status();
        passed(step, status, start.elapsed())
    })
}

/// Runs all steps at once, and then prints what each printed. Returns whether all passed.
fn at_once(steps: &[Step]) -> bool {
    let cargo = cargo();
    let one = |step: &Step| {
        println!("== {} begins", step.name);
        let start = Instant::now();
        let output = command(step, &cargo).stdin(Stdio::null()).output();
        (output, start.elapsed())
    };
    let one = &one;
    thread::scope(|scope| {
        let begun: Vec<_> =
            steps.iter().map(|step| (step, scope.spawn(move || one(step)))).collect();
        let ended = begun.into_iter().map(|(step, own)| {
            println!("== {}: {} {}", step.name, step.program, step.arguments.join(" "));
            let Ok((output, time)) = own.join() else { return false };
            if let Ok(output) = &output {
                print!("{}", String::from_utf8_lossy(&output.stdout));
                eprint!("{}", String::from_utf8_lossy(&output.stderr));
            }
            passed(step, output.map(|output| output.status), time)
        });
        ended.collect::<Vec<_>>().into_iter().all(|passed| passed)
    })
}

fn command(step: &Step, cargo: &str) -> Command {
    let mut command = Command::new(if step.program == "cargo" { cargo } else { step.program });
    command
        .args(step.arguments)
        .envs(step.environment.iter().copied())
        .env("GPIPE_SKIP_LOG", skip_log())
        .current_dir(root());
    command
}

/// Prints how a step ended. Returns whether it passed.
fn passed(step: &Step, status: io::Result<ExitStatus>, time: Duration) -> bool {
    match status {
        Ok(status) if status.success() => {
            took(step.name, time);
            return true;
        }
        Ok(status) => {
            eprintln!("== {} failed ({status}) after {} s", step.name, time.as_secs());
        }
        Err(error) => eprintln!("== {}: cannot run {}: {error}", step.name, step.program),
    }
    false
}

fn print_skipped() -> bool {
    let skipped = std::fs::read_to_string(skip_log()).unwrap_or_default();
    match skipped.lines().count() {
        0 => println!("== skipped tests: none"),
        count => println!("== skipped tests: {count}\n{}", skipped.trim_end()),
    }
    true
}
