//! `gpipe plot` as its user runs it. Families: `oracle_` (the page and where it is), `fault_`
//! (folders that hold no run).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Folders of runs.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A run whose `metrics.jsonl` is `text`.
    fn run(&self, name: &str, text: &str) {
        fs::create_dir(self.path(name)).unwrap();
        fs::write(self.path(name).join("metrics.jsonl"), text).unwrap();
    }

    /// The exit code, and what `gpipe plot` printed.
    fn plot(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpipe"));
        let output =
            command.current_dir(self.0.path()).arg("plot").args(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    fn refuses(&self, arguments: &[&str], parts: &[&str]) {
        let (code, out, error) = self.plot(arguments);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{error}");
        assert!(error.starts_with("gpipe: ") && !error.contains("panicked"), "{error}");
        for part in parts {
            assert!(error.contains(part), "'{part}' is not in: {error}");
        }
    }
}

/// Steps of two stages, an evaluation, and the torn line of a killed run.
fn metrics(steps: u64) -> String {
    let line = |step: u64| {
        let stages = r#"[{"peak_bytes":1048576},{"peak_bytes":2097152}]"#;
        let loss = 5.0 / step as f64;
        format!(
            "{{\"kind\":\"step\",\"step\":{step},\"loss\":{loss},\"tokens_total\":{},\
             \"tokens_per_s\":1500.5,\"bubble\":0.2,\"stages\":{stages}}}\n",
            10 * step
        )
    };
    let evaluation = format!("{{\"kind\":\"evaluation\",\"step\":{steps},\"loss\":1.25}}\n");
    (1..=steps).map(line).collect::<String>() + &evaluation + r#"{"kind":"step","ste"#
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn oracle_one_run_is_drawn_beside_its_metrics() {
    let folder = Folder::new();
    folder.run("run", &metrics(60));
    assert_eq!(folder.plot(&["run"]), (Some(0), "run/plot.svg\n".into(), String::new()));
    let page = read(&folder.path("run/plot.svg"));
    assert!(page.starts_with("<svg"));
    for part in ["60 steps, 600 tokens, 2 stages", "last validation 1.2500", "stage 1", "(MiB)"] {
        assert!(page.contains(part), "'{part}' is not in the page");
    }
}

#[test]
fn oracle_several_runs_are_drawn_on_one_page() {
    let folder = Folder::new();
    folder.run("a", &metrics(60));
    folder.run("b", &metrics(3));
    let (code, printed, error) = folder.plot(&["a", "b", "--out", "both.svg"]);
    assert_eq!((code, printed.as_str(), error.as_str()), (Some(0), "both.svg\n", ""));
    let page = read(&folder.path("both.svg"));
    assert!(page.contains("a: 60 steps") && page.contains("b: 3 steps"));
    assert!(!folder.path("a/plot.svg").exists(), "--out is the only page");
}

#[test]
fn fault_what_is_no_run_is_named() {
    let folder = Folder::new();
    folder.run("good", &metrics(2));
    folder.run("empty", "");
    folder.run("torn", "{\"kind\":\"st");
    folder.run("bad", "{\"step\":1}\n{\"step\":\n{\"step\":3}\n");
    fs::create_dir(folder.path("other")).unwrap();
    let remedy = "name the folder of a run";
    folder.refuses(&["missing"], &["no missing/metrics.jsonl", remedy]);
    folder.refuses(&["good", "other"], &["no other/metrics.jsonl", remedy]);
    folder.refuses(&["empty"], &["empty/metrics.jsonl has no records"]);
    folder.refuses(&["torn"], &["torn/metrics.jsonl has no records"]);
    folder.refuses(&["good", "bad"], &["bad/metrics.jsonl line 2: it is not JSON"]);
    folder.refuses(&["good", "--out", "good/metrics.jsonl/page.svg"], &["good/metrics.jsonl"]);
    folder.refuses(&["good", "--out", "/dev/null"], &["/dev/null", "not a regular file"]);
    folder.refuses(&["good"; 8], &["8 runs", "at most 7"]);
    assert!(!folder.path("good/plot.svg").exists(), "nothing is written");
}
