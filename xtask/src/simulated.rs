//! The suites on simulated GPUs: every wait between streams, devices and the host is checked, and a
//! missing one ends the test's program with a report.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use serde_json::Value;

/// A test program of a package, and its arguments.
struct Suite {
    package: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
}

/// A GPU's statistics cover all its users, so tests of memory run one at a time.
const ONE_BY_ONE: &str = "--test-threads=1";

/// What CI runs, in a few minutes.
const SHORT: &[Suite] = &[
    Suite { package: "gpipe", program: "gpu", arguments: &[ONE_BY_ONE] },
    Suite {
        package: "gpipe",
        program: "suite",
        arguments: &[ONE_BY_ONE, "--skip", "transparency"],
    },
    Suite { package: "gpipe", program: "suite", arguments: &["transparency_of_views"] },
    Suite { package: "checkpoint", program: "suite", arguments: &[ONE_BY_ONE] },
    Suite { package: "distributed", program: "suite", arguments: &[ONE_BY_ONE] },
    Suite { package: "distributed", program: "transparency", arguments: &["connected_by_nccl"] },
    Suite { package: "models", program: "suite", arguments: &[ONE_BY_ONE, "oracle_on_gpus"] },
    Suite { package: "models", program: "suite", arguments: &[ONE_BY_ONE, "llama::"] },
];

/// Everything that can run there.
const WHOLE: &[Suite] = &[
    Suite { package: "gpipe", program: "gpu", arguments: &[ONE_BY_ONE] },
    Suite { package: "gpipe", program: "suite", arguments: &[ONE_BY_ONE] },
    Suite { package: "checkpoint", program: "suite", arguments: &[ONE_BY_ONE] },
    Suite { package: "distributed", program: "suite", arguments: &[ONE_BY_ONE] },
    Suite { package: "distributed", program: "transparency", arguments: &["connected_by_nccl"] },
    Suite { package: "models", program: "suite", arguments: &[ONE_BY_ONE, "oracle_on_gpus"] },
    // The other tests of estimates are about the CPU's kernels.
    Suite { package: "models", program: "suite", arguments: &[ONE_BY_ONE, "--skip", "estimates"] },
];

/// Runs the suites, or the short ones. Returns whether all passed.
pub fn run(root: &Path, cargo: &str, skip_log: &Path, is_short: bool) -> Result<bool, String> {
    let programs = build(root, cargo)?;
    let log = root.join("target/simulated-gpu.txt");
    let _ = fs::remove_file(&log);
    let mut passed = true;
    for suite in if is_short { SHORT } else { WHOLE } {
        let name = format!("{} {} {}", suite.package, suite.program, suite.arguments.join(" "));
        let folder = root.join("crates").join(suite.package);
        let is_it =
            |(package, program, _): &&Program| package == suite.package && program == suite.program;
        let found = programs.iter().find(is_it);
        let (_, _, path) = found.ok_or_else(|| format!("{name}: cargo built no such program"))?;
        println!("== on simulated GPUs: {name}");
        let start = Instant::now();
        let status = Command::new(path)
            .args(suite.arguments)
            .env("GPIPE_SIMULATED_GPUS", "4")
            .env("GPIPE_SIMULATED_GPU_LOG", &log)
            .env("GPIPE_TEST_DEVICES", "cuda:0,cuda:1,cuda:2,cuda:3")
            .env("GPIPE_SKIP_LOG", skip_log)
            .current_dir(&folder)
            .status()
            .map_err(|error| format!("{name}: {error}"))?;
        println!("== on simulated GPUs: {name}: {} s", start.elapsed().as_secs());
        if !status.success() {
            eprintln!("== on simulated GPUs: {name} failed ({status})");
            passed = false;
        }
    }
    let lines = fs::read_to_string(&log).unwrap_or_default();
    let kernels: u64 =
        lines.lines().filter_map(|line| line.split(' ').next()?.parse::<u64>().ok()).sum();
    println!("== on simulated GPUs: {kernels} kernels in {} processes", lines.lines().count());
    Ok(passed && kernels > 0)
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
