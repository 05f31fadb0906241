//! Tests of TSV files and aligned files, plain and gzip.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::GzEncoder;
use gpipe_data::Result;
use gpipe_data::parallel::{Pair, ParallelCorpus, ParallelOptions, Reason, Report, Source};
use tempfile::TempDir;

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn options() -> ParallelOptions {
    ParallelOptions { min_pairs: 1, validation_share: 0.0, ..ParallelOptions::default() }
}

fn read(source: Source) -> Result<(Vec<Pair>, Report)> {
    let (corpus, report) = ParallelCorpus::read(&[source], &options())?;
    assert_eq!(corpus.languages.len(), 1);
    assert_eq!(corpus.languages[0].code, "de");
    let mut pairs = corpus.languages[0].train.clone();
    pairs.sort();
    Ok((pairs, report))
}

fn tsv(path: PathBuf) -> Source {
    Source::Tsv { language: "de".into(), path }
}

fn lines(source: PathBuf, target: PathBuf) -> Source {
    Source::Lines { language: "de".into(), source, target }
}

fn pair(source: &str, target: &str) -> Pair {
    Pair { source: source.into(), target: target.into() }
}

fn refusal(source: Source) -> String {
    ParallelCorpus::read(&[source], &options()).unwrap_err().to_string()
}

#[test]
fn oracle_tsv_and_lines_plain_and_gzip_are_the_same() {
    let files = Files::new();
    let text = "Guten Tag\tGood day\nDer Baum\tThe tree\n";
    let (source, target) = ("Guten Tag\nDer Baum\n", "Good day\nThe tree\n");
    let expected = [pair("Der Baum", "The tree"), pair("Guten Tag", "Good day")];
    let sources = [
        tsv(files.write("a.tsv", text.as_bytes())),
        tsv(files.write("a.tsv.gz", &gzip(text.as_bytes()))),
        tsv(files.write("zipped", &gzip(text.as_bytes()))),
        tsv(files.write("plain.gz", text.as_bytes())),
        tsv(files
            .write("windows.tsv", format!("\u{feff}{}", text.replace('\n', "\r\n")).as_bytes())),
        tsv(files.write("open.tsv", text.trim_end().as_bytes())),
        lines(files.write("a.de", source.as_bytes()), files.write("a.en", target.as_bytes())),
        lines(
            files.write("b.de", &gzip(source.as_bytes())),
            files.write("b.en", target.trim_end().as_bytes()),
        ),
    ];
    for source in sources {
        assert_eq!(read(source.clone()).unwrap().0, expected, "{source:?}");
    }
}

#[test]
fn oracle_pairs_are_only_trimmed() {
    let files = Files::new();
    let text =
        "_Datei  %s\t_File %d\nLinux\tLinux\n\tnothing\nJa\tYes, of course, and many thanks\n";
    let path = files.write("a.tsv", text.as_bytes());
    let (pairs, report) = read(tsv(path)).unwrap();
    assert_eq!(pairs, [pair("Linux", "Linux"), pair("_Datei  %s", "_File %d")]);
    let left_out: Vec<_> = report.left_out().into_iter().collect();
    assert_eq!(left_out, [(Reason::Empty, 1), (Reason::Ratio, 1)]);
}

#[test]
fn oracle_a_line_separator_is_no_end_of_a_line() {
    let files = Files::new();
    let source = files.write("a.de", "eins\u{2028}zwei\u{b}drei\n".as_bytes());
    let target = files.write("a.en", b"one two three\n");
    assert_eq!(read(lines(source, target)).unwrap().0.len(), 1);
}

#[test]
fn fault_misaligned_files_are_refused_with_both_numbers() {
    let files = Files::new();
    let source = files.write("a.de", b"a\nb\nc\n");
    let target = files.write("a.en", b"a\nb\n");
    let error = refusal(lines(source, target));
    assert!(error.contains("a.de` has 3 lines") && error.contains("a.en` has 2"), "{error}");
}

#[test]
fn fault_a_line_that_is_no_pair_is_named() {
    let files = Files::new();
    for (text, columns) in [("a\tb\nno tab\n", 1), ("a\tb\na\tb\tc\n", 3), ("a\tb\n\n", 1)] {
        let error = refusal(tsv(files.write("a.tsv", text.as_bytes())));
        assert!(error.contains(&format!("a.tsv`, line 2: {columns} columns")), "{error}");
    }
}

#[test]
fn fault_another_charset_is_named_by_line_and_byte() {
    let files = Files::new();
    let path = files.write("a.tsv", b"Tag\tday\nGr\xf6\xdfe\tsize\n");
    let error = refusal(tsv(path));
    assert!(error.contains("a.tsv`, line 2: byte 3 of the line is not UTF-8"), "{error}");
    assert!(error.contains("iconv"), "{error}");
    let target = files.write("a.en", b"day\nsize\n");
    let source = files.write("a.de", b"Tag\nGr\xf6\xdfe\n");
    let error = refusal(lines(source, target));
    assert!(error.contains("a.de`, line 2: byte 3"), "{error}");
}

#[test]
fn fault_damaged_archives_are_refused() {
    let files = Files::new();
    let mut archive = gzip("Guten Tag\tGood day\n".repeat(100).as_bytes());
    let cut = files.write("cut.gz", &archive[..archive.len() / 2]);
    let middle = archive.len() / 2;
    archive[middle] ^= 0x55;
    let flipped = files.write("flipped.gz", &archive);
    for path in [cut, flipped] {
        let error = refusal(tsv(path));
        assert!(error.contains(".gz` cannot be unpacked"), "{error}");
    }
}

#[test]
fn fault_files_that_are_not_there_or_no_files() {
    let files = Files::new();
    let missing = files.0.path().join("missing.tsv");
    assert!(refusal(tsv(missing)).contains("missing.tsv"));
    assert!(refusal(tsv(files.0.path().to_path_buf())).contains("neither a regular file"));
    let path = files.write("a.tsv", b"a\tb\n");
    for code in ["", "d e", "<de>", &"d".repeat(33)] {
        let error = refusal(Source::Tsv { language: code.into(), path: path.clone() });
        assert!(error.contains("is no code of a language"), "{error}");
    }
}
