//! The suites on simulated GPUs: every wait between streams, devices and the host is checked, and a
//! missing one ends the test's program with a report.
//!
//! A GPU's statistics cover all its users, so the tests of a process run one at a time. Several
//! processes run beside each other, each with some of the tests: its GPUs are its own.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
    thread,
    time::Instant,
};

use serde_json::Value;

/// A test program of a package, and the arguments that choose its tests.
struct Suite {
    package: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
}

/// Maximum number of tests of one process.
const TESTS_MAX: usize = 12;

/// What CI runs, in a few minutes.
const SHORT: &[Suite] = &[
    Suite { package: "gpipe", program: "gpu", arguments: &[] },
    Suite { package: "gpipe", program: "suite", arguments: &["--skip", "transparency"] },
    Suite { package: "gpipe", program: "suite", arguments: &["transparency_of_views"] },
    Suite { package: "checkpoint", program: "suite", arguments: &[] },
    Suite { package: "distributed", program: "suite", arguments: &[] },
    Suite { package: "distributed", program: "transparency", arguments: &["connected_by_nccl"] },
    Suite { package: "models", program: "suite", arguments: &["oracle_on_gpus"] },
    Suite { package: "models", program: "suite", arguments: &["llama::"] },
];

/// Everything that can run there.
const WHOLE: &[Suite] = &[
    Suite { package: "gpipe", program: "gpu", arguments: &[] },
    Suite { package: "gpipe", program: "suite", arguments: &[] },
    Suite { package: "checkpoint", program: "suite", arguments: &[] },
    Suite { package: "distributed", program: "suite", arguments: &[] },
    Suite { package: "distributed", program: "transparency", arguments: &["connected_by_nccl"] },
    Suite { package: "models", program: "suite", arguments: &["oracle_on_gpus"] },
    // The other tests of estimates are about the CPU's kernels.
    Suite { package: "models", program: "suite", arguments: &["--skip", "estimates"] },
];

/// Some tests of a suite, which one process runs.
struct Part {
    name: String,
    folder: PathBuf,
    program: PathBuf,
    tests: Vec<String>,
}

/// Runs the suites, or the short ones. Returns whether all passed.
pub fn run(root: &Path, cargo: &str, skip_log: &Path, is_short: bool) -> Result<bool, String> {
    let programs = build(root, cargo)?;
    let log = root.join("target/simulated-gpu.txt");
    let _ = fs::remove_file(&log);
    let mut parts = Vec::new();
    for suite in if is_short { SHORT } else { WHOLE } {
        let name = format!("{} {} {}", suite.package, suite.program, suite.arguments.join(" "));
        let is_it =
            |(package, program, _): &&Program| package == suite.package && program == suite.program;
        let found = programs.iter().find(is_it);
        let (_, _, program) =
            found.ok_or_else(|| format!("{name}: cargo built no such program"))?;
        let folder = root.join("crates").join(suite.package);
        let tests = tests_of(program, &folder, suite.arguments)?;
        if tests.is_empty() {
            return Err(format!("{name}: there are no such tests"));
        }
        parts.extend(tests.chunks(TESTS_MAX).map(|tests| Part {
            name: name.clone(),
            folder: folder.clone(),
            program: program.clone(),
            tests: tests.to_vec(),
        }));
    }
    let passed = at_once(parts, |part| one(part, &log, skip_log));
    let lines = fs::read_to_string(&log).unwrap_or_default();
    let kernels: u64 =
        lines.lines().filter_map(|line| line.split(' ').next()?.parse::<u64>().ok()).sum();
    println!("== on simulated GPUs: {kernels} kernels in {} processes", lines.lines().count());
    Ok(passed && kernels > 0)
}

/// The names of the tests that `arguments` choose.
fn tests_of(program: &Path, folder: &Path, arguments: &[&str]) -> Result<Vec<String>, String> {
    let failed = |error: String| format!("{}: {error}", program.display());
    let listed = Command::new(program)
        .args(arguments)
        .args(["--list", "--format=terse"])
        .current_dir(folder)
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !listed.status.success() {
        return Err(failed(String::from_utf8_lossy(&listed.stderr).into_owned()));
    }
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Runs all parts, as many at once as there are cores. Returns whether all passed.
fn at_once(parts: Vec<Part>, run: impl Fn(&Part) -> bool + Sync) -> bool {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let left = Mutex::new(parts.into_iter());
    let next = || left.lock().ok()?.next();
    let work = || {
        let mut passed = true;
        while let Some(part) = next() {
            passed &= run(&part);
        }
        passed
    };
    thread::scope(|scope| {
        let all: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let ended: Vec<bool> = all.into_iter().map(|own| own.join().unwrap_or(false)).collect();
        ended.iter().all(|passed| *passed)
    })
}

/// Runs a part, and prints what it printed. Returns whether it passed.
fn one(part: &Part, log: &Path, skip_log: &Path) -> bool {
    let start = Instant::now();
    let output = Command::new(&part.program)
        .args(["--test-threads=1", "--exact"])
        .args(&part.tests)
        .env("GPIPE_SIMULATED_GPUS", "4")
        .env("GPIPE_SIMULATED_GPU_LOG", log)
        .env("GPIPE_TEST_DEVICES", "cuda:0,cuda:1,cuda:2,cuda:3")
        .env("GPIPE_SKIP_LOG", skip_log)
        .current_dir(&part.folder)
        .stdin(Stdio::null())
        .output();
    let name = format!("== on simulated GPUs: {}", part.name);
    match output {
        Ok(output) => {
            let seconds = start.elapsed().as_secs();
            println!("{}", String::from_utf8_lossy(&output.stdout).trim());
            eprintln!("{}", String::from_utf8_lossy(&output.stderr).trim());
            println!("{name}: {} tests, {seconds} s", part.tests.len());
            if !output.status.success() {
                eprintln!("{name} failed ({})", output.status);
            }
            output.status.success()
        }
        Err(error) => {
            eprintln!("{name}: {error}");
            false
        }
    }
}

/// The package's folder, name and path of a test program.
type Program = (String, String, PathBuf);

/// Builds all tests, as the tests of CI are built.
fn build(root: &Path, cargo: &str) -> Result<Vec<Program>, String> {
    let output = Command::new(cargo)
        .args(["test", "--workspace", "--exclude=gpipe-drivers", "--locked", "--no-run"])
        .args(["--message-format=json-render-diagnostics"])
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot run {cargo}: {error}"))?;
    if !output.status.success() {
        return Err("the tests do not compile".into());
    }
    let root = fs::canonicalize(root).map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let artifacts = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = |artifact: Value| {
        let folder = Path::new(artifact["manifest_path"].as_str()?).parent()?;
        let package = folder.strip_prefix(root.join("crates")).ok()?.to_str()?;
        let name = artifact["target"]["name"].as_str()?;
        let path = artifact["executable"].as_str()?;
        Some((package.to_owned(), name.to_owned(), PathBuf::from(path)))
    };
    Ok(artifacts.filter_map(program).collect())
}
