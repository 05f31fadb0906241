//! What can be checked of the prose: lines of at most 100 columns, and a README of at most 800
//! words.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Most columns of a line of prose or code.
const COLUMNS_MAX: usize = 100;
/// Most words of the README, counted as `wc -w` does.
const README_WORDS_MAX: usize = 800;
/// Where lines are checked: files and folders.
const CHECKED: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks",
    "configs",
    "crates",
    "docs",
    "fuzz/src",
    "python/README.md",
    "python/build.rs",
    "python/examples",
    "python/gpipe",
    "python/src",
    "python/tests",
    "python/torchgpipe_tests.py",
    "scripts",
    "xtask",
];
/// What a program writes or measured.
const GENERATED: &[&str] = &["benchmarks/results", "benchmarks/RESULTS.md", "docs/reference"];
const EXTENSIONS: &[&str] = &["rs", "md", "py", "cc", "h", "sh"];

/// The problems of the prose of the tree at `root`.
pub fn check(root: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    let words = read(&root.join("README.md")).split_whitespace().count();
    if words > README_WORDS_MAX {
        problems.push(format!("README.md has {words} words (at most {README_WORDS_MAX})"));
    }
    for place in CHECKED {
        for path in files(&root.join(place)) {
            let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
            if !GENERATED.iter().any(|own| name.starts_with(own)) {
                let text = read(&path);
                problems.extend(long_lines(&text).map(|(line, columns)| {
                    format!("{name}:{line} has {columns} columns (at most {COLUMNS_MAX})")
                }));
            }
        }
    }
    problems
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Files with one of the extensions, in or below `place`.
fn files(place: &Path) -> Vec<PathBuf> {
    let is_checked = |path: &Path| {
        path.extension().is_some_and(|own| EXTENSIONS.iter().any(|known| own == *known))
    };
    if place.is_file() {
        return Vec::from_iter(is_checked(place).then(|| place.to_path_buf()));
    }
    let Ok(entries) = fs::read_dir(place) else { return Vec::new() };
    let mut all: Vec<PathBuf> = entries.flatten().flat_map(|entry| files(&entry.path())).collect();
    all.sort();
    all
}

/// Lines that are too long, with their columns. Tables, links and fenced blocks are exempt: they
/// cannot be broken.
fn long_lines(text: &str) -> impl Iterator<Item = (usize, usize)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        let bare = line.trim_start().trim_start_matches(['/', '!']).trim_start();
        if bare.starts_with("```") {
            fenced = !fenced;
        }
        let columns = line.chars().count();
        let is_exempt =
            fenced || bare.starts_with('|') || line.contains("://") || line.contains("](");
        (columns > COLUMNS_MAX && !is_exempt).then_some((number + 1, columns))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_only_what_can_be_broken_is_too_long() {
        let long = "x ".repeat(51);
        let text =
            format!("{long}\n| {long}\n/// | {long}\n[a]({long})\n```\n{long}\n```\n//! {long}");
        let found: Vec<usize> = long_lines(&text).map(|(line, _)| line).collect();
        assert_eq!(found, [1, 8]);
    }
}
