//! Tests of corpora from crates. Families: `property_`, `oracle_`, `fault_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use gpipe_data::{Corpus, Document, Error, Limits};
use tempfile::TempDir;

const LIMITS: Limits = limits(1 << 20, 1 << 20, 1 << 20);

const fn limits(train: u64, validation: u64, per_crate: u64) -> Limits {
    Limits {
        train_bytes: Some(train),
        validation_bytes: Some(validation),
        per_crate_bytes: Some(per_crate),
    }
}

/// A lock file and a registry of unpacked crates.
struct Registry {
    folder: TempDir,
    lock: String,
}

impl Registry {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("src/index-1")).unwrap();
        Self { folder, lock: "version = 4\n".into() }
    }

    fn with_crates(count: usize, text: &str) -> Self {
        let mut registry = Self::new();
        for i in 0..count {
            registry.add(&format!("crate{i}"), "1.0.0", &[("src/lib.rs", text)]);
        }
        registry
    }

    /// Locks a crate and unpacks these files for it.
    fn add(&mut self, name: &str, version: &str, files: &[(&str, &str)]) {
        let source = "registry+https://index.example";
        self.lock += &format!(
            "[[package]]\nname = \"{name}\"\nversion = \"{version}\"\nsource = \"{source}\"\n"
        );
        for (path, text) in files {
            self.write(&format!("index-1/{name}-{version}/{path}"), text.as_bytes());
        }
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.src().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn src(&self) -> PathBuf {
        self.folder.path().join("src")
    }

    fn corpus(&self, limits: &Limits) -> Result<Corpus, Error> {
        let lock = self.folder.path().join("Cargo.lock");
        fs::write(&lock, &self.lock).unwrap();
        Corpus::from_cargo_sources(&lock, &self.src(), limits)
    }
}

fn names(documents: &[Document]) -> Vec<&str> {
    documents.iter().map(|d| d.name.as_str()).collect()
}

fn all_names(corpus: &Corpus) -> BTreeSet<&str> {
    let both = corpus.train.iter().chain(&corpus.validation);
    both.map(|d| d.name.as_str()).collect()
}

fn bytes(documents: &[Document]) -> u64 {
    documents.iter().map(|d| d.text.len() as u64).sum()
}

fn crates(documents: &[Document]) -> BTreeSet<&str> {
    let name = |d: &'_ Document| d.name.rfind('-').unwrap_or(0);
    documents.iter().map(|d| &d.name[..name(d)]).collect()
}

#[test]
fn property_no_crate_is_on_both_sides() {
    let mut registry = Registry::new();
    for i in 0..60 {
        for version in ["1.0.0", "2.0.0"] {
            let files = [("src/lib.rs", "fn a() {}\n"), ("src/b.rs", "fn b() {}\n")];
            registry.add(&format!("crate{i}"), version, &files);
        }
    }
    let corpus = registry.corpus(&LIMITS).unwrap();
    assert_eq!(corpus.train.len() + corpus.validation.len(), 240);
    assert!(crates(&corpus.train).is_disjoint(&crates(&corpus.validation)));
    let validation = crates(&corpus.validation).len();
    assert!((1..=12).contains(&validation), "{validation} of 60");
    assert!(names(&corpus.train).is_sorted() && names(&corpus.validation).is_sorted());
}

#[test]
fn property_the_same_files_give_the_same_corpus() {
    let registry = Registry::with_crates(20, "fn a() {}\n");
    let corpus = registry.corpus(&LIMITS).unwrap();
    let again = registry.corpus(&LIMITS).unwrap();
    assert_eq!(corpus, again);
    assert_eq!(corpus.fingerprint(), again.fingerprint());
    assert_eq!(corpus.fingerprint().len(), 16);
    // Also at another place on disk.
    let elsewhere = Registry::with_crates(20, "fn a() {}\n").corpus(&LIMITS).unwrap();
    assert_eq!(corpus.fingerprint(), elsewhere.fingerprint());
    let other = Registry::with_crates(20, "fn b() {}\n").corpus(&LIMITS).unwrap();
    assert_ne!(corpus.fingerprint(), other.fingerprint());
}

#[test]
fn property_limits_hold_and_do_not_favour_the_alphabet() {
    let text = "fn line() {}\n".repeat(100); // 1,300 bytes
    let registry = Registry::with_crates(100, &text);
    let limits = limits(20_000, 2_000, 1_000);
    let corpus = registry.corpus(&limits).unwrap();
    for (side, limit) in [(&corpus.train, 20_000), (&corpus.validation, 2_000)] {
        assert!((limit - 13..=limit).contains(&bytes(side)), "{} of {limit}", bytes(side));
        assert!(side.iter().all(|d| d.text.len() <= 1_000 && d.text.ends_with('\n')));
    }
    // About 21 of some 90 crates fit. The first 21 in alphabetical order would all begin with
    // crate0, crate1 or crate2.
    let late = crates(&corpus.train).into_iter().filter(|name| *name >= "crate3");
    assert!(late.count() >= 8);
}

#[test]
fn property_the_limit_of_a_crate_spans_its_versions_and_files() {
    let mut registry = Registry::with_crates(3, "fn small() {}\n");
    let text = "fn giant() {}\n".repeat(50);
    for version in ["1.0.0", "2.0.0"] {
        registry.add("giant", version, &[("a.rs", &text), ("b.rs", &text)]);
    }
    let limits = Limits { per_crate_bytes: Some(1000), ..LIMITS };
    let corpus = registry.corpus(&limits).unwrap();
    let both: Vec<_> = corpus.train.into_iter().chain(corpus.validation).collect();
    let giant: Vec<_> = both.into_iter().filter(|d| d.name.starts_with("giant")).collect();
    assert!((987..=1000).contains(&bytes(&giant)));
}

#[test]
fn oracle_generated_and_foreign_files_are_left_out() {
    let mut registry = Registry::with_crates(2, "fn a() {}\n");
    registry.add("winapi", "0.3.0", &[("src/lib.rs", "bindings")]);
    registry.add("z-sys", "0.3.0", &[("src/lib.rs", "bindings")]);
    registry.add("elsewhere", "0.3.0", &[]); // Locked, not fetched.
    let files = [
        ("src/lib.rs", "mod table;\n"),
        ("src/table.rs", "// @generated by a script\n"),
        ("src/huge.rs", &"x".repeat(200 * 1024 + 1)),
        ("src/empty.rs", ""),
        ("README.md", "text"),
        (".hidden/lib.rs", "hidden"),
    ];
    registry.add("mixed", "0.1.0", &files);
    registry.write("index-1/mixed-0.1.0/src/latin1.rs", b"// na\xefve\n");
    registry.write("index-1/unlocked-1.0.0/src/lib.rs", b"fn unlocked() {}\n");
    registry.add("all-generated", "1.0.0", &[("src/lib.rs", "// DO NOT EDIT\n")]);
    registry.add("second-index", "1.0.0", &[]);
    registry.write("index-2/second-index-1.0.0/src/lib.rs", b"fn second() {}\n");

    let corpus = registry.corpus(&LIMITS).unwrap();
    let expected = [
        "crate0-1.0.0/src/lib.rs",
        "crate1-1.0.0/src/lib.rs",
        "mixed-0.1.0/src/lib.rs",
        "second-index-1.0.0/src/lib.rs",
    ];
    assert_eq!(all_names(&corpus), BTreeSet::from(expected));
    assert!(!corpus.train.is_empty() && !corpus.validation.is_empty());
    let report = corpus.report.to_string();
    for part in [
        "read 4 files (4 .rs), 46 B; left out ",
        "2 crates of bindings and tables (winapi-0.3.0, z-sys-0.3.0)",
        "1 crate that is not on disk (elsewhere-0.3.0)",
        "2 generated Rust files (all-generated-1.0.0/src/lib.rs, mixed-0.1.0/src/table.rs)",
        "1 Rust file over 200 KiB (mixed-0.1.0/src/huge.rs)",
        "1 Rust file that is not UTF-8 (mixed-0.1.0/src/latin1.rs)",
        "1 empty Rust file (mixed-0.1.0/src/empty.rs)",
    ] {
        assert!(report.contains(part), "'{part}' is not in {report}");
    }
}

/// The default text must not silently change with the workspace's dependencies, or losses cannot be
/// compared. A fingerprint of all its documents identifies a text. Limits and other crates in the
/// registry do not change the fingerprint.
#[test]
fn regression_a_text_has_a_fingerprint_of_its_own() {
    let fingerprint = |registry: &Registry, limits: &Limits| {
        registry.corpus(limits).unwrap().report.fingerprint.unwrap()
    };
    let mut registry = Registry::with_crates(20, "fn a() {}\n");
    let first = fingerprint(&registry, &Limits::default());
    registry.write("index-1/unlocked-1.0.0/src/lib.rs", b"fn unlocked() {}\n");
    assert_eq!(fingerprint(&registry, &Limits::default()), first);
    assert_eq!(fingerprint(&registry, &limits(50, 10, 10)), first);
    registry.write("index-1/crate7-1.0.0/src/lib.rs", b"fn b() {}\n");
    let changed = fingerprint(&registry, &Limits::default());
    assert_ne!(changed, first);
    registry.add("crate20", "1.0.0", &[("src/lib.rs", "fn a() {}\n")]);
    assert_ne!(fingerprint(&registry, &Limits::default()), changed);
}

#[cfg(unix)]
#[test]
fn oracle_links_are_not_followed() {
    let registry = Registry::with_crates(2, "fn a() {}\n");
    let folder = registry.src().join("index-1/crate0-1.0.0/src");
    std::os::unix::fs::symlink(folder.join("lib.rs"), folder.join("link.rs")).unwrap();
    std::os::unix::fs::symlink(&folder, folder.join("loop")).unwrap();
    let corpus = registry.corpus(&LIMITS).unwrap();
    assert_eq!(all_names(&corpus).len(), 2);
}

#[test]
fn fault_nothing_fetched() {
    let mut registry = Registry::new();
    registry.add("a", "1.0.0", &[]);
    registry.add("b", "1.0.0", &[("src/lib.rs", "fn b() {}\n")]);
    let error = registry.corpus(&LIMITS).unwrap_err();
    assert!(matches!(error, Error::NoSources { locked: 2, usable: 1, .. }), "{error}");
    assert!(error.to_string().contains("cargo fetch"), "{error}");

    fs::remove_dir_all(registry.src()).unwrap();
    let error = registry.corpus(&LIMITS).unwrap_err();
    assert!(matches!(error, Error::NoSources { usable: 0, .. }), "{error}");
}

#[test]
fn fault_locks_that_are_missing_or_malformed() {
    let missing = Corpus::from_cargo_sources(Path::new("no/Cargo.lock"), Path::new("no"), &LIMITS);
    assert!(missing.unwrap_err().to_string().contains("no/Cargo.lock"));
    let mut registry = Registry::new();
    registry.add("..", "1.0.0", &[]);
    let error = registry.corpus(&LIMITS).unwrap_err();
    assert!(matches!(error, Error::LockFile { .. }), "{error}");
}

#[test]
fn fault_a_limit_of_nothing() {
    let limits = Limits { validation_bytes: Some(0), ..LIMITS };
    let error = Registry::with_crates(3, "x").corpus(&limits).unwrap_err();
    assert!(matches!(error, Error::ZeroLimit { limit: "validation_bytes" }), "{error}");
}

#[test]
fn fault_a_limit_less_than_a_line() {
    let limits = Limits { train_bytes: Some(3), ..LIMITS };
    let registry = Registry::with_crates(3, "fn a() {}\n");
    let error = registry.corpus(&limits).unwrap_err();
    assert!(matches!(error, Error::NoText { train_bytes: 0, .. }), "{error}");
}
