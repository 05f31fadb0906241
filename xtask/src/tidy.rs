//! Checks what the compiler does not: dependencies between crates, import cycles, file lengths and
//! unfinished work.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{circles, prose};

/// Maximum length of a source file, in lines. A longer file has a second subject.
const LINES_MAX: usize = 500;
/// Words that mark unfinished work, each written in two parts so that this file does not contain
/// them.
const UNFINISHED: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
/// Folders that must not use threads, clocks or I/O.
const PURE: &[&str] = &["crates/core/src", "crates/score/src"];
/// What those folders must not use.
const IMPURE: &[&str] = &["std::thread", "std::time", "std::fs", "std::net", "std::env", " tch::"];
/// The project crates that each crate may depend on, as in the table of ARCHITECTURE.md.
const BORDERS: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("score", &[]),
    ("bridge", &[]),
    ("files", &[]),
    ("data", &["gpipe-core", "gpipe-files"]),
    ("observe", &["gpipe-core", "gpipe-files"]),
    ("runtime", &["gpipe-core"]),
    ("gpipe", &["gpipe-core", "gpipe-runtime", "gpipe-bridge"]),
    ("checkpoint", &["gpipe", "gpipe-files"]),
    ("models", &["gpipe"]),
    ("distributed", &["gpipe", "gpipe-bridge", "gpipe-core"]),
];

/// All problems of the tree at `root`.
pub fn check(root: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    let rooms =
        ["crates", "xtask", "fuzz/src", "benchmarks/drivers/src", "python/src", "simulated-gpu"];
    for path in rooms.into_iter().flat_map(|room| sources(&root.join(room))) {
        let text = fs::read_to_string(&path).unwrap_or_default();
        let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        check_file(&name, &text, &mut problems);
    }
    for (room, allowed) in BORDERS {
        check_border(root, room, allowed, &mut problems);
    }
    for folder in fs::read_dir(root.join("crates")).into_iter().flatten().flatten() {
        let (name, source) = (folder.file_name(), folder.path().join("src"));
        let read = |path: PathBuf| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            (path, text)
        };
        let files: Vec<_> = sources(&source).into_iter().map(read).collect();
        problems.extend(circles::check(&name.to_string_lossy(), &source, &files));
    }
    problems.extend(prose::check(root));
    problems
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut all = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            all.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push(path);
        }
    }
    all.sort();
    all
}

fn check_file(name: &str, text: &str, problems: &mut Vec<String>) {
    let lines = text.lines().count();
    if lines > LINES_MAX && !name.contains("/tests/") {
        problems.push(format!("{name} has {lines} lines (at most {LINES_MAX}): split it"));
    }
    let library = name.contains("/src/");
    if library && !text.starts_with("//!") {
        problems.push(format!("{name} does not open with what lives in it (//!)"));
    }
    for (number, line) in text.lines().enumerate() {
        let place = format!("{name}:{}", number + 1);
        if UNFINISHED.iter().any(|word| line.contains(word)) {
            problems
                .push(format!("{place}: unfinished work is written in an issue, not in the code"));
        }
        if PURE.iter().any(|room| name.contains(room))
            && let Some(word) = IMPURE.iter().find(|word| line.contains(**word))
        {
            problems.push(format!("{place}: this room is pure, it does not use {word}"));
        }
    }
}

fn check_border(root: &Path, room: &str, allowed: &[&str], problems: &mut Vec<String>) {
    let path = root.join("crates").join(room).join("Cargo.toml");
    let text = fs::read_to_string(path).unwrap_or_default();
    let dependencies = text.split("[dev-dependencies]").next().unwrap_or_default();
    for line in dependencies.lines().filter(|line| line.starts_with("gpipe")) {
        let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
        if !allowed.contains(&name) {
            problems.push(format!("crates/{room} must not depend on {name}"));
        }
    }
}
