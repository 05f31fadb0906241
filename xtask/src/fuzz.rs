//! `cargo xtask fuzz [SECONDS] [TARGET...]`: runs every reader under libFuzzer, guided by coverage,
//! for SECONDS each, with as many in parallel as there are cores. Findings are in
//! `target/fuzz/findings`, and counts in `target/fuzz/report.md`.
//!
//! cargo-fuzz needs a nightly toolchain for its sanitizers, but coverage is a pass of stable LLVM.
//! Sanitizers would find memory unsafety, and the readers have no `unsafe` except in their
//! libraries.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Mutex,
    thread,
};

/// Flags for libFuzzer's coverage, and the checks that a release build leaves out.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions=yes -Coverflow-checks=yes";

/// Memory limit of a process, in MiB. The largest image that is read takes a quarter.
const MEMORY_MB: usize = 4096;
/// Timeout of one input, in seconds.
const INPUT_SECONDS: usize = 20;
/// Maximum length of a generated input, in bytes.
const INPUT_BYTES: usize = 1 << 16;

/// The outcome of a target.
struct Outcome {
    target: String,
    executions: u64,
    covered: u64,
    kept: usize,
    findings: Vec<String>,
}

/// Builds the fuzzer and runs `targets`, or all if none are named, for `seconds` each. Returns
/// whether all ran without findings.
pub fn run(root: &Path, cargo: &str, seconds: u64, targets: &[&str]) -> Result<bool, String> {
    let folder = root.join("target").join("fuzz");
    let program = build(root, cargo, &folder)?;
    let mut waiting: Vec<String> = match targets {
        [] => self::targets(root)?,
        named => named.iter().map(|&name| name.to_owned()).collect(),
    };
    waiting.reverse();
    let findings = folder.join("findings");
    fs::create_dir_all(&findings).map_err(|error| format!("{}: {error}", findings.display()))?;
    let waiting = Mutex::new(waiting);
    let outcomes = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().ok().and_then(|mut waiting| waiting.pop());
                    let Some(target) = next else { break };
                    let outcome = fuzz(root, &folder, &program, &target, seconds);
                    println!("fuzz {}", outcome.line());
                    if let Ok(mut outcomes) = outcomes.lock() {
                        outcomes.push(outcome);
                    }
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().map_err(|error| error.to_string())?;
    outcomes.sort_by(|a, b| a.target.cmp(&b.target));
    let mut report = format!(
        "| target | inputs run in {seconds} s | edges covered | inputs kept | findings \
        |\n|---|---|---|---|---|\n"
    );
    for outcome in &outcomes {
        let Outcome { target, executions, covered, kept, findings } = outcome;
        let findings = findings.len();
        let _ = writeln!(report, "| {target} | {executions} | {covered} | {kept} | {findings} |");
    }
    let path = folder.join("report.md");
    fs::write(&path, &report).map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{report}in {}", path.display());
    // A target that did not run also has no findings.
    Ok(outcomes.iter().all(|own| own.findings.is_empty() && own.executions > 0))
}

/// The names of all targets.
pub fn targets(root: &Path) -> Result<Vec<String>, String> {
    listed(&root.join("fuzz").join("corpus"))
}

fn build(root: &Path, cargo: &str, folder: &Path) -> Result<PathBuf, String> {
    let target = host(cargo)?;
    let mut command = Command::new(cargo);
    command.args(["build", "--release", "--locked", "--package", "gpipe-fuzz"]);
    command.args(["--features", "libfuzzer", "--target", &target, "--target-dir"]);
    // An explicit target keeps the flags away from build scripts and macros.
    command.arg(folder.join("build")).env("RUSTFLAGS", FLAGS).current_dir(root);
    match command.status() {
        Ok(status) if status.success() => {
            Ok(folder.join("build").join(target).join("release").join("fuzz"))
        }
        Ok(status) => Err(format!("the fuzzer cannot be built ({status})")),
        Err(error) => Err(format!("cannot run {cargo}: {error}")),
    }
}

/// The target triple of this machine.
fn host(cargo: &str) -> Result<String, String> {
    let output = Command::new(cargo).args(["version", "--verbose"]).output();
    let output = output.map_err(|error| format!("cannot run {cargo}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| "cargo does not say which host this is".to_owned())
}

/// The names in a folder, sorted.
fn listed(folder: &Path) -> Result<Vec<String>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn fuzz(root: &Path, folder: &Path, program: &Path, target: &str, seconds: u64) -> Outcome {
    let own = folder.join("corpus").join(target);
    let prefix = folder.join("findings").join(format!("{target}-"));
    let earlier = listed(&folder.join("findings")).unwrap_or_default();
    let ran = fs::create_dir_all(&own).and_then(|()| {
        let mut command = Command::new(program);
        command.env("GPIPE_FUZZ_TARGET", target).env("LD_LIBRARY_PATH", libtorch(root));
        command.arg(format!("-max_total_time={seconds}"));
        command.arg(format!("-rss_limit_mb={MEMORY_MB}")).arg("-print_final_stats=1");
        command.arg(format!("-timeout={INPUT_SECONDS}")).arg(format!("-max_len={INPUT_BYTES}"));
        command.arg(format!("-artifact_prefix={}", prefix.display()));
        // New inputs go into the first folder. The second holds the kept inputs.
        command.arg(&own).arg(root.join("fuzz").join("corpus").join(target));
        command.output()
    });
    let kept = listed(&own).map_or(0, |names| names.len());
    let mut findings = listed(&folder.join("findings")).unwrap_or_default();
    // libFuzzer reports a slow unit only if the machine was busy. An input that is really too slow
    // is a timeout.
    let found = |rest: &str| rest.starts_with('-') && !rest.starts_with("-slow-unit");
    findings.retain(|name| !earlier.contains(name));
    findings.retain(|name| name.strip_prefix(target).is_some_and(found));
    let (mut executions, mut covered) = (0, 0);
    match ran {
        Ok(Output { stderr, status, .. }) => {
            let text = String::from_utf8_lossy(&stderr).into_owned();
            let _ = fs::write(folder.join(format!("{target}.log")), &text);
            let number = |words: &str, name: &str| {
                let mut words = words.split_whitespace().skip_while(|word| *word != name).skip(1);
                words.next().and_then(|word| word.parse::<u64>().ok())
            };
            for line in text.lines() {
                covered = number(line, "cov:").unwrap_or(covered);
                executions = number(line, "stat::number_of_executed_units:").unwrap_or(executions);
            }
            if !status.success() && findings.is_empty() {
                findings.push(format!("it ended with {status}"));
            }
        }
        Err(error) => findings.push(format!("it did not run: {error}")),
    }
    Outcome { target: target.to_owned(), executions, covered, kept, findings }
}

fn libtorch(root: &Path) -> PathBuf {
    let own = std::env::var_os("LIBTORCH").map_or_else(|| root.join(".libtorch"), PathBuf::from);
    own.join("lib")
}

impl Outcome {
    fn line(&self) -> String {
        let Self { target, executions, covered, kept, findings } = self;
        let findings = if findings.is_empty() { "nothing".into() } else { findings.join(", ") };
        format!("{target}: {executions} inputs, {covered} edges, {kept} kept; found: {findings}")
    }
}
