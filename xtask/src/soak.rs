//! `cargo xtask soak`: the long tests, which take at most an hour. Each has a time limit. A test
//! that exceeds its limit is killed and fails, as does a test that does not report its counts.
//! Tests report counts as lines `soak: ...`. The counts and outcomes are in
//! `target/soak/report.md`. Everything is compiled first, outside the limits.

use std::{
    fmt::Write as _,
    fs,
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

/// Time limit of all tests together. The rest of an hour is for fuzzing.
const MOST: Duration = Duration::from_secs(2700);

/// A long test.
struct Proof {
    name: &'static str,
    /// Arguments of `cargo`.
    arguments: &'static [&'static str],
    environment: &'static [(&'static str, &'static str)],
    /// A system program that the test needs. Without the program, the test is skipped.
    needs: Option<&'static str>,
    limit_s: u64,
}

/// Runs a test's program under memcheck. Checks of undefined values are off, because libtorch's
/// vector kernels read beyond short rows and discard what they read.
const MEMCHECK: &[(&str, &str)] = &[(
    "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER",
    "valgrind -q --undef-value-errors=no --error-exitcode=9",
)];

const PROOFS: &[Proof] = &[
    Proof {
        name: "runs killed at random moments and before file operations",
        arguments: &["test", "--locked", "-p", "gpipe-cli", "--test", "kill", "--", "--nocapture"],
        environment: &[("GPIPE_SOAK", "1")],
        needs: None,
        limit_s: 450,
    },
    Proof {
        name: "processes killed and stopped at every kind of action, and at random moments",
        arguments: &[
            "test",
            "--locked",
            "-p",
            "gpipe-cli",
            "--test",
            "fault_injection",
            "--",
            "--nocapture",
        ],
        environment: &[("GPIPE_SOAK", "1")],
        needs: None,
        limit_s: 1500,
    },
    Proof {
        name: "every run of the shared matrix in two and four processes and with several stages \
            in each",
        arguments: &[
            "test",
            "--locked",
            "-p",
            "gpipe-distributed",
            "--test",
            "transparency",
            "--",
            "--nocapture",
        ],
        environment: &[("GPIPE_SOAK", "1")],
        needs: None,
        limit_s: 400,
    },
    Proof {
        name: "an error, a panic, too little memory and a stall at every kind of action of real \
            stages",
        arguments: &[
            "test",
            "--locked",
            "-p",
            "gpipe",
            "--test",
            "fault_injection",
            "--",
            "--nocapture",
        ],
        environment: &[("GPIPE_SOAK", "1")],
        needs: None,
        limit_s: 300,
    },
    Proof {
        name: "20,000 steps and 500 pipelines in one process",
        arguments: &["test", "--locked", "-p", "gpipe", "--test", "endurance", "--", "--nocapture"],
        environment: &[("GPIPE_SOAK", "1")],
        needs: None,
        limit_s: 200,
    },
    Proof {
        name: "random schedules and faults of the runtime on mock stages",
        // 3,000 stalls of a tenth of a second each.
        arguments: &["test", "--locked", "-p", "gpipe-runtime", "--", "--nocapture"],
        environment: &[("GPIPE_SOAK", "1")],
        needs: None,
        limit_s: 600,
    },
    Proof {
        name: "every function of the bridge, given what it is not for, under memcheck",
        arguments: &[
            "test",
            "--locked",
            "-p",
            "gpipe-bridge",
            "--test",
            "misuse",
            "--",
            "--nocapture",
            "--test-threads=1",
        ],
        environment: MEMCHECK,
        needs: Some("valgrind"),
        limit_s: 300,
    },
    Proof {
        name: "every interleaving at links and failures",
        arguments: INTERLEAVINGS,
        environment: INTERLEAVINGS_ENVIRONMENT,
        needs: None,
        limit_s: 300,
    },
];

/// The interleavings under loom, which CI also runs.
pub const INTERLEAVINGS: &[&str] = &[
    "test",
    "--locked",
    "--release",
    "-p",
    "gpipe-runtime",
    "--test",
    "interleavings",
    "--target-dir",
    "target/loom",
    "--",
    "--nocapture",
];
/// The environment that enables loom.
pub const INTERLEAVINGS_ENVIRONMENT: &[(&str, &str)] = &[("RUSTFLAGS", "--cfg loom")];

/// Runs all tests, even after a failure. Returns whether all passed.
pub fn run(root: &Path, cargo: &str) -> Result<bool, String> {
    for proof in PROOFS {
        build(root, cargo, proof)?;
    }
    let begun = Instant::now();
    let mut report =
        "| proof | outcome | seconds | what was done |\n|---|---|---|---|\n".to_owned();
    let mut passed = true;
    for proof in PROOFS {
        println!("== soak: {}", proof.name);
        if let Some(missing) = proof.needs.filter(|program| !is_there(program)) {
            println!("== soak: {}: SKIPPED: {missing} is not installed", proof.name);
            let _ = writeln!(report, "| {} | skipped: no {missing} | | |", proof.name);
            continue;
        }
        let start = Instant::now();
        let left = MOST.saturating_sub(begun.elapsed());
        let (outcome, counts) =
            one(root, cargo, proof, left.min(Duration::from_secs(proof.limit_s)));
        let (seconds, counts) = (start.elapsed().as_secs(), counts.join("; "));
        println!("== soak: {}: {outcome}, {seconds} s", proof.name);
        passed &= outcome == "passed";
        let _ = writeln!(report, "| {} | {outcome} | {seconds} | {counts} |", proof.name);
    }
    let folder = root.join("target").join("soak");
    let path = folder.join("report.md");
    fs::create_dir_all(&folder)
        .and_then(|()| fs::write(&path, &report))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{report}in {}", path.display());
    Ok(passed)
}

fn is_there(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).status();
    found.is_ok_and(|status| status.success())
}

fn command(root: &Path, cargo: &str, proof: &Proof) -> Command {
    let mut command = Command::new(cargo);
    command.envs(proof.environment.iter().copied()).current_dir(root);
    command
}

fn build(root: &Path, cargo: &str, proof: &Proof) -> Result<(), String> {
    let own = proof.arguments.split(|argument| *argument == "--").next().unwrap_or_default();
    match command(root, cargo, proof).args(own).arg("--no-run").status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} cannot be built ({status})", proof.name)),
        Err(error) => Err(format!("cannot run {cargo}: {error}")),
    }
}

/// An event of a running test.
enum Heard {
    Count(String),
    Ended(std::io::Result<ExitStatus>),
}

/// Runs one test. Returns the outcome in words, and the counts.
fn one(root: &Path, cargo: &str, proof: &Proof, limit: Duration) -> (String, Vec<String>) {
    let mut command = command(root, cargo, proof);
    command.args(proof.arguments).stdout(Stdio::piped()).process_group(0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return (format!("cannot run {cargo}: {error}"), Vec::new()),
    };
    let (end, group) = (Instant::now() + limit, format!("-{}", child.id()));
    let (sender, heard) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        let sender = sender.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                println!("{line}");
                if let Some((_, count)) = line.split_once("soak: ") {
                    let _ = sender.send(Heard::Count(count.to_owned()));
                }
            }
        });
    }
    std::thread::spawn(move || sender.send(Heard::Ended(child.wait())));
    let (mut counts, mut outcome) = (Vec::new(), None);
    loop {
        match heard.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(Heard::Count(count)) => counts.push(count),
            Ok(Heard::Ended(ended)) => outcome = Some(ended),
            // The test has ended and closed its output.
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                // Kills the whole process group. Processes of a launcher end with the launcher.
                let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
                return (format!("ended after {} s", limit.as_secs()), counts);
            }
        }
    }
    let outcome = match outcome {
        Some(Ok(status)) if status.success() && counts.is_empty() => {
            "failed (it does not tell what it did)".into()
        }
        Some(Ok(status)) if status.success() => "passed".into(),
        Some(Ok(status)) => format!("failed ({status})"),
        Some(Err(error)) => format!("cannot be waited for: {error}"),
        None => "failed (its end was not heard)".into(),
    };
    (outcome, counts)
}
