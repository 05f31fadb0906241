//! What the tests of the command share: a folder with a tiny configuration and text, and the command in it.
#![allow(dead_code)] // each test file uses its own part

use std::{
    fs,
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

    pub fn gpipe(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpipe"));
        command.current_dir(self.0.path()).args(arguments).env("CARGO_HOME", self.path("no cargo"));
        command.output().unwrap()
    }

    /// Trains on the text; what it printed.
    pub fn train(&self, arguments: &[&str]) -> String {
        let mut all = vec!["train", "tiny.toml", "--text", "text.txt"];
        all.extend(arguments);
        let output = self.gpipe(&all);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Expects a failure with one clear message.
    pub fn refuses(&self, arguments: &[&str], parts: &[&str]) {
        let output = self.gpipe(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
        assert!(text.starts_with("gpipe: ") && !text.contains("panicked"), "{arguments:?}: {text}");
        for part in parts {
            assert!(text.contains(part), "{arguments:?}: '{part}' is not in: {text}");
        }
    }

    pub fn lines(&self, run: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

pub fn bytes(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
