//! The programs of tests: built by cargo, and run as many at once as there are cores. `cargo test`
//! runs one at a time, and a core is idle while each ends.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
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
}

impl<'a> Part<'a> {
    /// All tests of a program, two at a time: there are as many programs as cores.
    pub fn whole(program: &'a Program) -> Self {
        Self {
            name: format!("{} {}", program.package(), program.name),
            program,
            arguments: vec!["--test-threads=2".to_owned()],
            environment: Vec::new(),
        }
    }
}

/// Maximum time of a part. On two cores the longest takes a quarter of it.
const PART_MAX: Duration = Duration::from_secs(3600);
/// How often a part is asked whether it has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Runs all parts, as many at once as there are cores, in their order. What they print is also in
/// `folder`. Returns whether all passed.
pub fn run(parts: Vec<Part<'_>>, folder: &Path, skip_log: &Path) -> Result<bool, String> {
    fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let left = Mutex::new(parts.into_iter().enumerate());
    let next = || left.lock().ok()?.next();
    let work = || {
        let mut failed = Vec::new();
        while let Some((number, part)) = next() {
            println!("== {} begins", part.name);
            let start = Instant::now();
            let file = folder.join(format!("{number}.txt"));
            let ended = one(&part, &file, skip_log);
            let text = fs::read(&file).unwrap_or_default();
            let ended_text = ended.as_ref().map_or_else(Clone::clone, ToString::to_string);
            // In one piece, because others print, too.
            println!(
                "== {}\n{}\n== {}: {ended_text}, {} s",
                part.name,
                String::from_utf8_lossy(&text).trim(),
                part.name,
                start.elapsed().as_secs()
            );
            if !ended.is_ok_and(|status| status.success()) {
                failed.push(format!("{}: {ended_text}", part.name));
            }
        }
        failed
    };
    let failed: Option<Vec<String>> = thread::scope(|scope| {
        let all: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let ended: Option<Vec<_>> = all.into_iter().map(|own| own.join().ok()).collect();
        Some(ended?.concat())
    });
    let failed = failed.ok_or("a thread that runs tests broke off")?;
    failed.iter().for_each(|what| eprintln!("== failed: {what}"));
    Ok(failed.is_empty())
}

/// Runs a part, which prints into `file`.
fn one(part: &Part<'_>, file: &Path, skip_log: &Path) -> Result<ExitStatus, String> {
    let failed = |error: std::io::Error| error.to_string();
    let file = fs::File::create(file).map_err(failed)?;
    let mut child = Command::new(&part.program.path)
        .args(&part.arguments)
        .envs(part.environment.iter().map(|(name, value)| (name, value)))
        .env("GPIPE_SKIP_LOG", skip_log)
        // As cargo sets it.
        .env("CARGO_MANIFEST_DIR", &part.program.folder)
        .current_dir(&part.program.folder)
        .stdin(Stdio::null())
        .stdout(file.try_clone().map_err(failed)?)
        .stderr(file)
        .spawn()
        .map_err(failed)?;
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            return Ok(status);
        }
        if begun.elapsed() > PART_MAX {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("ended after {} s, because it hangs", PART_MAX.as_secs()));
        }
        thread::sleep(LOOK);
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
