//! What the tests of the command share: a folder with a tiny configuration and text, and the
//! command in it.
#![allow(dead_code)] // each test file uses its own part

pub mod images;
pub mod kills;
pub mod listening;
pub mod mounts;
pub mod process;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

pub const CONFIG: &str = r#"
[model]
vocabulary = 300
features = 16
heads = 2
hidden = 32
blocks = 2
dropout = 0.1

[data]
sequence = 8

[pipeline]
stages = 2
micro_batches = 3

[train]
steps = 4
mini_batch = 7
"#;

/// Twelve steps, a checkpoint after every fourth, and what a short text and a debug build need.
pub const TRAIN: &[&str] = &[
    "train",
    "tiny.toml",
    "--text",
    "text.txt",
    "--checkpoint-every",
    "4",
    "--steps",
    "12",
    "--set",
    "train.validation_tokens=100",
    "--set",
    "model.blocks=1",
];

pub fn train<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [TRAIN, &["--out", out], more].concat()
}

/// A folder with a configuration and a text of some thousand words.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("tiny.toml"), CONFIG).unwrap();
        let words = ["pipeline", "stage", "micro", "batch", "gradient", "layer", "bubble", "loss"];
        let text: Vec<String> = (0..6000_usize)
            .map(|i| format!("{}{}", words[i * i % 8], if i % 9 == 0 { ".\n" } else { " " }))
            .collect();
        fs::write(folder.path().join("text.txt"), text.concat()).unwrap();
        Self(folder)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpipe"));
        command.current_dir(self.0.path()).args(arguments).env("CARGO_HOME", self.path("no cargo"));
        // Threads of one stage spin while they wait for each other: among other tests, for minutes.
        command.env("OMP_WAIT_POLICY", "passive");
        command
    }

    pub fn gpipe(&self, arguments: &[&str]) -> Output {
        process::output(&mut self.command(arguments))
    }

    /// Expects success; what it printed on the standard output.
    pub fn succeeds(&self, arguments: &[&str]) -> String {
        let output = self.gpipe(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Trains on the text; what it printed.
    pub fn train(&self, arguments: &[&str]) -> String {
        let mut all = vec!["train", "tiny.toml", "--text", "text.txt"];
        all.extend(arguments);
        self.succeeds(&all)
    }

    /// Expects a failure with one clear message.
    pub fn refuses(&self, arguments: &[&str], parts: &[&str]) {
        let output = self.gpipe(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        // 2 is of a command line that is none: a flag's value, say.
        let begins = match output.status.code() {
            Some(1) => "gpipe: ",
            Some(2) => "error: ",
            other => panic!("{arguments:?}: {other:?}: {text}"),
        };
        assert!(text.starts_with(begins) && !text.contains("panicked"), "{arguments:?}: {text}");
        for part in parts {
            assert!(text.contains(part), "{arguments:?}: '{part}' is not in: {text}");
        }
    }

    /// A copy of a run, to go on with.
    pub fn copy(&self, from: &str, to: &str) {
        let copied = Command::new("cp").arg("-a").args([self.path(from), self.path(to)]).status();
        assert!(copied.unwrap().success());
    }

    /// The weights that a run has ended with.
    pub fn weights(&self, run: &str) -> Vec<u8> {
        bytes(&self.path(run).join("weights.safetensors"))
    }

    pub fn lines(&self, run: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

pub fn bytes(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The steps of the checkpoints, oldest first.
pub fn steps(folder: &Folder, run: &str) -> Vec<u64> {
    let all = gpipe_checkpoint::folder::list(&folder.path(run).join("checkpoints")).unwrap();
    all.into_iter().rev().map(|(step, _)| step).collect()
}

/// Writes down that `test` cannot run here, and why.
pub fn skip(test: &str, reason: &str) {
    if let Some(path) = std::env::var_os("GPIPE_SKIP_LOG") {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        // In one write: tests run side by side.
        file.write_all(format!("{test}: {reason}\n").as_bytes()).unwrap();
    }
}

/// What a run's `metrics.jsonl` says of its steps and evaluations, digit for digit, without times.
/// Timing and memory depend on the machine and on K.
pub fn results(run: &Path) -> Vec<String> {
    let text = String::from_utf8(bytes(&run.join("metrics.jsonl"))).unwrap();
    let between = |line: &str, from: &str, to: &str| {
        let (start, end) = (line.find(from).unwrap(), line.find(to).unwrap());
        line[start..end].to_owned()
    };
    let result = |line: &str| match line.contains(r#""kind":"step""#) {
        true => between(line, "{", r#""tokens_per_s""#) + &between(line, r#""lr""#, r#""bubble""#),
        false => line.to_owned(),
    };
    text.lines().map(result).collect()
}
