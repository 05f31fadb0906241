//! Tests of corpora from the user's files and folders. Families: `property_`, `oracle_`,
//! `regression_`, `fault_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use gpipe_data::{Corpus, Document, Error, JsonFiles, Limits, Texts};
use tempfile::TempDir;

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, bytes) in files {
        let path = folder.path().join("texts").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    folder
}

fn many(count: usize) -> TempDir {
    let names: Vec<_> = (0..count).map(|i| format!("{i}.txt")).collect();
    let file = |name: &'_ String| -> (String, Vec<u8>) {
        (name.clone(), format!("text of {name}\n").into())
    };
    let files: Vec<_> = names.iter().map(file).collect();
    let files: Vec<(&str, &[u8])> = files.iter().map(|(n, t)| (n.as_str(), t.as_slice())).collect();
    folder(&files)
}

fn read(paths: &[&Path]) -> Result<Corpus, Error> {
    let paths: Vec<PathBuf> = paths.iter().map(|path| path.to_path_buf()).collect();
    Corpus::from_paths(&paths, &Limits::default(), JsonFiles::Refuse)
}

fn names(documents: &[Document]) -> BTreeSet<&str> {
    documents.iter().map(|d| d.name.as_str()).collect()
}

#[test]
fn property_many_documents_are_split_by_document() {
    let folder = many(100);
    let corpus = read(&[&folder.path().join("texts")]).unwrap();
    let (train, validation) = (names(&corpus.train), names(&corpus.validation));
    assert!(train.is_disjoint(&validation));
    assert_eq!(train.len() + validation.len(), 100);
    assert!((4..=20).contains(&validation.len()), "{}", validation.len());
    assert!(train.iter().all(|name| name.starts_with("texts/")));
}

#[test]
fn property_a_document_more_moves_no_other() {
    let (fewer, more) = (many(100), many(101));
    let fewer = read(&[&fewer.path().join("texts")]).unwrap();
    let more = read(&[&more.path().join("texts")]).unwrap();
    assert!(names(&fewer.train).is_subset(&names(&more.train)));
    assert!(names(&fewer.validation).is_subset(&names(&more.validation)));
}

#[test]
fn property_few_documents_give_their_tails() {
    let text = "a line of text\n".repeat(100);
    let folder = folder(&[("a.txt", text.as_bytes()), ("b/c.txt", text.as_bytes())]);
    let corpus = read(&[&folder.path().join("texts")]).unwrap();
    assert_eq!((corpus.train.len(), corpus.validation.len()), (2, 2));
    for (head, tail) in corpus.train.iter().zip(&corpus.validation) {
        assert_eq!(head.text.clone() + &tail.text, text);
        assert_eq!(tail.text.len(), 150);
        assert_eq!(tail.name, format!("{} (tail)", head.name));
    }
}

#[test]
fn property_limits_hold() {
    let folder = many(200); // About 16 bytes each
    let limits = Limits { train_bytes: Some(500), validation_bytes: Some(50), ..Limits::default() };
    let texts = [folder.path().join("texts")];
    let corpus = Corpus::from_paths(&texts, &limits, JsonFiles::Refuse).unwrap();
    for (side, limit) in [(&corpus.train, 500), (&corpus.validation, 50)] {
        let bytes: usize = side.iter().map(|d| d.text.len()).sum();
        assert!((limit - 20..=limit).contains(&bytes), "{bytes} of {limit}");
    }
    assert!(names(&corpus.train).iter().any(|name| *name > "texts/5"));
}

#[test]
fn oracle_hidden_binary_and_empty_files_are_passed_over() {
    let text = "line\n".repeat(20);
    let folder = folder(&[
        ("kept.txt", text.as_bytes()),
        (".hidden", b"hidden"),
        (".git/config", b"hidden"),
        ("image", b"PNG\0\xff"),
        ("empty.txt", b""),
    ]);
    let texts = folder.path().join("texts");
    let corpus = read(&[&texts]).unwrap();
    assert_eq!(names(&corpus.train), BTreeSet::from(["texts/kept.txt"]));
    // A file that is named directly is read, hidden or not.
    let corpus = read(&[&texts.join("kept.txt"), &texts.join(".hidden")]).unwrap();
    assert_eq!(names(&corpus.train), BTreeSet::from([".hidden", "kept.txt"]));
}

#[cfg(unix)]
#[test]
fn oracle_links_in_folders_are_not_followed() {
    let text = "line\n".repeat(20);
    let folder = folder(&[("a.txt", text.as_bytes())]);
    let texts = folder.path().join("texts");
    std::os::unix::fs::symlink(texts.join("a.txt"), texts.join("b.txt")).unwrap();
    std::os::unix::fs::symlink(&texts, texts.join("loop")).unwrap();
    assert_eq!(read(&[&texts]).unwrap().train.len(), 1);
    // A link that is named directly is read.
    let corpus = read(&[&texts.join("b.txt")]).unwrap();
    assert_eq!(names(&corpus.train), BTreeSet::from(["b.txt"]));
}

#[test]
fn regression_a_file_named_twice_counts_once() {
    let folder = many(20);
    let texts = folder.path().join("texts");
    let once = read(&[&texts]).unwrap();
    let twice = read(&[&texts, &texts.join("3.txt"), &texts.join("../texts")]).unwrap();
    assert_eq!((&once.train, &once.validation), (&twice.train, &twice.validation));
    let left_out = twice.report.left_out.to_string();
    assert!(left_out.starts_with("21 files that were read before (3.txt, "), "{left_out}");
}

#[test]
fn fault_missing_paths_are_named() {
    let error = read(&[Path::new("no/such/file.txt")]).unwrap_err();
    assert!(matches!(error, Error::MissingPath { .. }));
    assert!(error.to_string().contains("no/such/file.txt"), "{error}");
}

#[test]
fn fault_not_utf8_tells_file_and_offset() {
    let folder = folder(&[("bad.txt", b"na\xefve\n"), ("good.txt", b"good\n")]);
    let texts = folder.path().join("texts");
    for path in [&texts, &texts.join("bad.txt")] {
        let error = read(&[path]).unwrap_err();
        assert!(matches!(error, Error::NotUtf8 { offset: 2, .. }));
        let message = error.to_string();
        assert!(message.contains("bad.txt") && message.contains("offset 2"), "{message}");
    }
}

#[test]
fn fault_a_binary_file_named_directly_is_not_passed_over() {
    let folder = folder(&[("image", b"PNG\0\xff")]);
    let error = read(&[&folder.path().join("texts/image")]).unwrap_err();
    assert!(matches!(error, Error::NotUtf8 { offset: 4, .. }), "{error}");
}

#[test]
fn fault_no_text() {
    let folder = folder(&[("empty.txt", b""), ("short.txt", b"x")]);
    let texts = folder.path().join("texts");
    let nothing = read(&[]).unwrap_err();
    assert!(matches!(nothing, Error::Empty { .. }), "{nothing}");
    let empty = read(&[&texts.join("empty.txt")]).unwrap_err();
    assert!(
        empty.to_string().contains("there is no text in")
            && empty.to_string().contains("empty.txt")
    );
    let short = read(&[&texts.join("short.txt")]).unwrap_err();
    assert!(matches!(short, Error::NoText { train_bytes: 1, validation_bytes: 0 }), "{short}");
    assert!(short.to_string().contains("name more text"), "{short}");
}

#[test]
fn oracle_documents_of_paths_are_whole() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
    std::fs::write(&a, "one\ntwo\n".repeat(20)).unwrap();
    std::fs::write(&b, "three\n").unwrap();
    let read = |paths: &[PathBuf]| Texts::from_paths(paths, JsonFiles::Refuse);
    let documents = read(&[b, a.clone()]).unwrap().documents;
    let found: Vec<_> = documents.iter().map(|d| (d.name.as_str(), d.text.len())).collect();
    assert_eq!(found, [("a.txt", 160), ("b.txt", 6)]);
    std::fs::write(&a, "").unwrap();
    assert!(matches!(read(&[a]), Err(Error::Empty { .. })));
}

/// No default may silently cut a large text, such as one of 38 MB to its first 16 MiB.
#[test]
fn regression_all_of_a_text_is_taken_unless_a_limit_says_otherwise() {
    let text = "a line of sixteen\n".repeat(2 << 20); // 36 MiB
    let folder = folder(&[("a.txt", text.as_bytes())]);
    let paths = [folder.path().join("texts/a.txt")];
    let read = |limits: &Limits| Corpus::from_paths(&paths, limits, JsonFiles::Refuse).unwrap();
    let bytes = |corpus: &Corpus| {
        corpus.train[0].text.len() as u64 + corpus.validation[0].text.len() as u64
    };
    let all = read(&Limits::default());
    assert_eq!((bytes(&all), all.report.cut.len()), (36 << 20, 0));
    assert_eq!(all.report.to_string(), "read 1 file (1 .txt), 36.0 MiB");
    let limits = Limits { train_bytes: Some(16 << 20), ..Limits::default() };
    let cut = read(&limits).report.to_string();
    let part = "; took 16.0 MiB of 32.4 MiB of training text, as data.train_bytes says";
    assert!(cut.ends_with(part), "{cut}");
}

/// Binary files, links and hidden files in a folder must not be skipped silently.
#[cfg(unix)]
#[test]
fn regression_what_is_left_out_of_a_folder_is_counted_and_named() {
    let text = "line\n".repeat(20);
    let folder = folder(&[
        ("a.txt", text.as_bytes()),
        ("b.md", text.as_bytes()),
        ("c/image.png", b"PNG\0\xff"),
        (".git/config", b"hidden"),
        ("empty.txt", b""),
    ]);
    let texts = folder.path().join("texts");
    std::os::unix::fs::symlink(texts.join("a.txt"), texts.join("link.txt")).unwrap();
    assert_eq!(
        read(&[&texts]).unwrap().report.to_string(),
        "read 2 files (1 .md, 1 .txt), 200 B; left out 1 binary file (texts/c/image.png), \
         1 empty file (texts/empty.txt), 1 hidden entry (.git), 1 symbolic link (link.txt)"
    );
    // If no text is left, the error names what was left out.
    let error = read(&[&texts.join("c")]).unwrap_err().to_string();
    assert!(error.contains("(left out: 1 binary file (c/image.png)); name"), "{error}");
}

/// A file of JSON lines must not be silently learned as plain text, braces and keys included.
#[test]
fn regression_json_is_refused_unless_someone_insists() {
    let text = "line\n".repeat(20);
    let record = "{\"text\": \"line\"}\n".repeat(20);
    let folder = folder(&[("a.txt", text.as_bytes()), ("rows.JSONL", record.as_bytes())]);
    let texts = folder.path().join("texts");
    let file = texts.join("rows.JSONL");
    let read = |path: &Path, json| Corpus::from_paths(&[path.into()], &Limits::default(), json);
    for (path, json) in [
        (&texts, JsonFiles::Refuse),
        (&file, JsonFiles::Refuse),
        (&file, JsonFiles::LeaveOut), // a file that is named is requested
    ] {
        let error = read(path, json).unwrap_err();
        assert!(matches!(error, Error::Json { .. }), "{error}");
        let error = error.to_string();
        for part in ["rows.JSONL", "jq -r .text", "data.json = \"text\"", "skip"] {
            assert!(error.contains(part), "'{part}' is not in {error}");
        }
    }
    assert_eq!(read(&texts, JsonFiles::AsText).unwrap().report.files, 2);
    let without = read(&texts, JsonFiles::LeaveOut).unwrap().report.to_string();
    assert!(without.ends_with("left out 1 JSON file (texts/rows.JSONL)"), "{without}");
    let eval = Texts::from_paths(&[file], JsonFiles::Refuse).unwrap_err();
    assert!(matches!(eval, Error::Json { .. }), "{eval}");
}
