//! The programs of tests: built by cargo, and run as many at once as there are cores. `cargo test`
//! runs one at a time, and a core is idle while each ends.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
    thread,
    time::Instant,
};

use serde_json::Value;

/// A program of tests.
pub struct Program {
    /// The folder of its package, which its tests run in.
    pub folder: PathBuf,
    /// Its name in its package.
    pub name: String,
    path: PathBuf,
}

impl Program {
    /// The name of its package's folder.
    pub fn package(&self) -> &str {
        self.folder.file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// The names of the tests that `arguments` choose.
    pub fn tests(&self, arguments: &[&str]) -> Result<Vec<String>, String> {
        let failed = |error: String| format!("{}: {error}", self.path.display());
        let listed = Command::new(&self.path)
            .args(arguments)
            .args(["--list", "--format=terse"])
            .current_dir(&self.folder)
            .output()
            .map_err(|error| failed(error.to_string()))?;
        if !listed.status.success() {
            return Err(failed(String::from_utf8_lossy(&listed.stderr).into_owned()));
        }
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

/// Some tests of a program, which one process runs.
pub struct Part<'a> {
    /// What it is, for who reads the log.
    pub name: String,
    pub program: &'a Program,
    pub arguments: Vec<String>,
    pub environment: Vec<(&'static str, String)>,
    /// How many tests they are.
    pub tests: usize,
}

impl<'a> Part<'a> {
    /// All tests of a program.
    pub fn whole(program: &'a Program) -> Result<Self, String> {
        Ok(Self {
            name: format!("{} {}", program.package(), program.name),
            program,
            arguments: Vec::new(),
            environment: Vec::new(),
            tests: program.tests(&[])?.len(),
        })
    }
}

/// Runs all parts, as many at once as there are cores, those with the most tests first. Returns
/// whether all passed.
pub fn run(mut parts: Vec<Part<'_>>, skip_log: &Path) -> bool {
    parts.sort_by_key(|part| std::cmp::Reverse(part.tests));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let left = Mutex::new(parts.into_iter());
    let next = || left.lock().ok()?.next();
    let work = || {
        let mut failed = Vec::new();
        while let Some(part) = next() {
            if !one(&part, skip_log) {
                failed.push(part.name);
            }
        }
        failed
    };
    let failed: Option<Vec<String>> = thread::scope(|scope| {
        let all: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let ended: Option<Vec<_>> = all.into_iter().map(|own| own.join().ok()).collect();
        Some(ended?.concat())
    });
    match failed {
        Some(failed) => {
            failed.iter().for_each(|name| eprintln!("== {name} failed: see above"));
            failed.is_empty()
        }
        None => false,
    }
}

/// Runs a part, and prints what it printed. Returns whether it passed.
fn one(part: &Part<'_>, skip_log: &Path) -> bool {
    let start = Instant::now();
    let output = Command::new(&part.program.path)
        .args(&part.arguments)
        .envs(part.environment.iter().map(|(name, value)| (name, value)))
        .env("GPIPE_SKIP_LOG", skip_log)
        // As cargo sets it.
        .env("CARGO_MANIFEST_DIR", &part.program.folder)
        .current_dir(&part.program.folder)
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) => {
            // What two programs print is not mixed.
            let text = format!(
                "== {}\n{}\n{}\n== {}: {} tests, {} s",
                part.name,
                String::from_utf8_lossy(&output.stdout).trim(),
                String::from_utf8_lossy(&output.stderr).trim(),
                part.name,
                part.tests,
                start.elapsed().as_secs()
            );
            println!("{text}");
            output.status.success()
        }
        Err(error) => {
            eprintln!("== {}: {error}", part.name);
            false
        }
    }
}

/// Builds all programs of tests.
pub fn build(root: &Path, cargo: &str) -> Result<Vec<Program>, String> {
    let output = Command::new(cargo)
        // The programs of benchmarks have no tests. Clippy and the comparisons build them.
        .args(["test", "--workspace", "--exclude=gpipe-drivers", "--locked", "--no-run"])
        .args(["--message-format=json-render-diagnostics"])
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot run {cargo}: {error}"))?;
    if !output.status.success() {
        return Err("the tests do not compile".into());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let artifacts = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = |artifact: Value| {
        artifact["profile"]["test"].as_bool().filter(|is_test| *is_test)?;
        Some(Program {
            folder: Path::new(artifact["manifest_path"].as_str()?).parent()?.to_path_buf(),
            name: artifact["target"]["name"].as_str()?.to_owned(),
            path: PathBuf::from(artifact["executable"].as_str()?),
        })
    };
    Ok(artifacts.filter_map(program).collect())
}
