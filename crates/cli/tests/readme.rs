//! The README's commands do what it says: each is run as it stands, with a small configuration in
//! the place of `configs/small.toml`, and two steps of what `init` writes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{fs, path::Path, process::Command};

use common::{CONFIG, Folder, process};

/// The commands of the README's shell blocks, without their comments.
fn commands() -> Vec<String> {
    let readme = include_str!("../../../README.md");
    let blocks = readme.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let lines = blocks.flat_map(str::lines);
    let command = |line: &str| line.split(" #").next().unwrap_or_default().trim().to_owned();
    lines.map(command).filter(|line| !line.is_empty()).collect()
}

/// The words of a command. Quotes hold words together, as in a shell.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for letter in command.chars() {
        match letter {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            letter => words.last_mut().unwrap().push(letter),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// A small model in the place of Qwen3-0.6B, and something to train it on.
fn model_and_notes(folder: &Folder) {
    let model = "[model]\nkind = \"llama\"\nvocabulary = 300\nfeatures = 16\nheads = 2\n\
        groups = 1\nhead_size = 8\nhidden = 24\nblocks = 2\nhead_norms = true\n\
        [data]\nsequence = 8\n[train]\nsteps = 1\nvalidation_tokens = 100\n";
    fs::write(folder.path("llama.toml"), model).unwrap();
    folder.succeeds(&["train", "llama.toml", "--text", "text.txt", "--out", "llama"]);
    folder.succeeds(&["export", "llama", "--to", "Qwen3-0.6B"]);
    fs::create_dir(folder.path("notes")).unwrap();
    fs::copy(folder.path("text.txt"), folder.path("notes/text.txt")).unwrap();
}

#[test]
fn oracle_the_commands_of_the_readme_run() {
    let folder = Folder::new();
    fs::create_dir(folder.path("configs")).unwrap();
    let text = format!(
        "{CONFIG}\nvalidation_tokens = 100\n{}",
        "[data]\nsequence = 8\ntext = [\"text.txt\"]\n"
    );
    // One table of each name.
    let text = text.replacen("[data]\nsequence = 8\n\n", "", 1);
    fs::write(folder.path("configs/small.toml"), text).unwrap();
    model_and_notes(&folder);
    let (mut own, mut made) = (0, 0);
    for command in commands() {
        let words = words(&command);
        let mut arguments: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
        // What `init` writes trains for minutes.
        if arguments.starts_with(&["train", "notes.toml"]) {
            arguments.extend(["--steps", "2", "--set", "train.validation_tokens=100"]);
        }
        match words[0].as_str() {
            "gpipe" => {
                folder.succeeds(&arguments);
                own += 1;
            }
            "make" => {
                let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
                let mut make = Command::new("make");
                let output = process::output(make.current_dir(root).arg("-n").args(arguments));
                assert!(output.status.success(), "{command}");
                made += 1;
            }
            other => panic!("{other}: a command that nothing runs"),
        }
    }
    assert!(own >= 6 && made >= 2, "{own} and {made}: the README has lost its commands");
}
