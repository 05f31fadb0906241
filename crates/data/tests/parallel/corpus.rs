//! Tests from a folder of files of pairs to a corpus.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use gpipe_data::parallel::{Pair, ParallelCorpus, ParallelOptions, Reason, Report, Source};
use gpipe_data::{Error, Result};
use tempfile::TempDir;

fn write(root: &Path, name: &str, pairs: &[Pair]) {
    fs::create_dir_all(root).unwrap();
    let line = |pair: &Pair| format!("{}\t{}\n", pair.source, pair.target);
    fs::write(root.join(name), pairs.iter().map(line).collect::<String>()).unwrap();
}

fn options() -> ParallelOptions {
    ParallelOptions { min_pairs: 1, validation_share: 0.0, ..ParallelOptions::default() }
}

fn source(root: &Path) -> Source {
    Source::Folder { folder: root.to_path_buf() }
}

fn read(root: &Path, options: &ParallelOptions) -> Result<(ParallelCorpus, Report)> {
    ParallelCorpus::read(&[source(root)], options)
}

fn refusal(root: &Path, options: &ParallelOptions) -> Error {
    read(root, options).unwrap_err()
}

fn pair(source: &str, target: &str) -> Pair {
    Pair { source: source.into(), target: target.into() }
}

/// Words in a different order for each number, so that no two sentences are near-duplicates.
fn sentence(number: usize) -> String {
    let words = ["open", "the", "file", "and", "save", "every", "page", "again", "or", "print"];
    let mut rest = number;
    let mut sentence = Vec::new();
    for _ in 0..5 {
        sentence.push(words[rest % 10]);
        rest /= 10;
    }
    sentence.join(" ")
}

fn many(count: usize, translate: impl Fn(&str) -> String) -> Vec<Pair> {
    (0..count).map(|i| sentence(i * 7)).map(|text| pair(&translate(&text), &text)).collect()
}

#[test]
fn oracle_a_folder_becomes_a_corpus() {
    let folder = tempfile::tempdir().unwrap();
    let german = [pair("Öffnen", "Open"), pair(" Baum", "Tree "), pair("", "nothing")];
    write(folder.path(), "de.tsv", &[&german[..], &german[..1]].concat());
    write(folder.path(), "pt_BR.tsv", &[pair("Árvore", "Tree")]);
    fs::write(folder.path().join("made_by.json"), "{}").unwrap();
    let (corpus, report) = read(folder.path(), &options()).unwrap();
    let codes: Vec<&str> = corpus.languages.iter().map(|language| language.code.as_str()).collect();
    assert_eq!(codes, ["de", "pt_BR"]);
    let mut pairs = corpus.languages[0].train.clone();
    pairs.sort();
    assert_eq!(pairs, [pair("Baum", "Tree"), pair("Öffnen", "Open")]);
    let left_out: Vec<_> = report.languages["de"].left_out.clone().into_iter().collect();
    assert_eq!(left_out, [(Reason::Empty, 1), (Reason::Duplicate, 1)]);
    assert_eq!(
        report.to_string(),
        "read 2 files: 3 pairs in 2 languages, 0 of them to validate on; left out 2 pairs \
         (1 empty, 1 duplicates); left out 1 files in other languages, or not called LANGUAGE.tsv"
    );
}

#[test]
fn property_names_and_places_of_files_change_nothing() {
    let pairs = many(300, |text| format!("x{text}"));
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(one.path(), "de.tsv", &pairs);
    let mut sources = vec![source(two.path())];
    let reversed: Vec<Pair> = pairs.iter().rev().cloned().collect();
    write(two.path(), "de.tsv", &reversed);
    for (i, part) in pairs.chunks(17).enumerate() {
        let name = format!("{i}");
        write(two.path(), &name, part);
        sources.push(Source::Tsv { language: "de".into(), path: two.path().join(name) });
    }
    let options = ParallelOptions { validation_share: 0.2, most_pairs: 200, ..options() };
    let one = read(one.path(), &options).unwrap().0;
    let (two, report) = ParallelCorpus::read(&sources, &options).unwrap();
    assert_eq!(one, two);
    assert_eq!(one.fingerprint(), two.fingerprint());
    assert_eq!(report.left_out()[&Reason::Duplicate], 300);
    assert_eq!((report.left_out()[&Reason::OverMost], report.kept()), (100, 200));
}

#[test]
fn property_no_language_trains_on_a_sentence_of_validation() {
    let folder = tempfile::tempdir().unwrap();
    let key = |text: &str| -> String {
        text.replace("%s", "")
            .chars()
            .filter(|c| c.is_alphanumeric())
            .flat_map(char::to_lowercase)
            .collect()
    };
    // The same sentences with another ending, other capitals or a directive.
    type Vary = fn(&str) -> String;
    let varied: [(&str, Vary); 4] = [
        ("de", |text| text.to_owned()),
        ("fr", |text| format!("{}.", text.to_uppercase())),
        ("it", |text| format!("{text}: %s")),
        ("pl", |text| text.replace(' ', ", ")),
    ];
    for (code, vary) in varied {
        let pairs: Vec<Pair> = (0..1000)
            .map(|i| vary(&sentence(i * 7)))
            .map(|text| pair(&text.replace(['o', 'O'], "ö"), &text))
            .collect();
        write(folder.path(), &format!("{code}.tsv"), &pairs);
    }
    let (corpus, _) =
        read(folder.path(), &ParallelOptions { validation_share: 0.1, ..options() }).unwrap();
    let keys = |pairs: &[Pair]| pairs.iter().map(|pair| key(&pair.target)).collect::<BTreeSet<_>>();
    let (mut train, mut validation) = (BTreeSet::new(), BTreeSet::new());
    for language in &corpus.languages {
        train.extend(keys(&language.train));
        validation.extend(keys(&language.validation));
        let share = language.validation.len() as f64 / 1000.0;
        assert!((0.07..0.13).contains(&share), "{}: {share}", language.code);
    }
    assert_eq!((corpus.languages.len(), train.len() + validation.len()), (4, 1000));
    assert!(train.is_disjoint(&validation));
}

#[test]
fn property_pairs_more_move_no_other_to_another_side() {
    let (fewer, more) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let translate = |text: &str| text.replace('e', "ë");
    write(fewer.path(), "de.tsv", &many(300, translate));
    write(more.path(), "de.tsv", &many(600, translate));
    let options = ParallelOptions { validation_share: 0.2, ..options() };
    let sides = |root: &TempDir| {
        let language = read(root.path(), &options).unwrap().0.languages.remove(0);
        [language.train, language.validation].map(|side| side.into_iter().collect::<BTreeSet<_>>())
    };
    let ([few_train, few_validation], [train, validation]) = (sides(&fewer), sides(&more));
    assert!(
        !few_validation.is_empty()
            && few_train.is_subset(&train)
            && few_validation.is_subset(&validation)
    );
}

#[test]
fn regression_the_order_and_the_split_stay_what_they_are() {
    // A change here changes the runs of existing configurations, so do not update this value
    // lightly.
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "de.tsv", &many(100, |text| text.replace('e', "ë")));
    write(folder.path(), "fr.tsv", &many(100, |text| text.replace('e', "é")));
    let (corpus, _) =
        read(folder.path(), &ParallelOptions { validation_share: 0.1, ..options() }).unwrap();
    assert_eq!(corpus.fingerprint(), "4ec2b15a8a57406f");
}

#[test]
fn fault_languages_that_are_not_there_or_too_small() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "de.tsv", &[pair("Baum", "Tree"), pair("Haus", "House")]);
    write(folder.path(), "pt_BR.tsv", &[pair("Árvore", "Tree")]);
    let asking = |code: &str, min_pairs| {
        let languages = vec![code.to_owned()];
        let options = ParallelOptions { languages, min_pairs, ..options() };
        read(folder.path(), &options)
    };
    let error = asking("pt", 1).unwrap_err().to_string();
    assert!(error.contains("no text in the language `pt`; name some of: pt_BR, de"), "{error}");
    let error = asking("pt_BR", 2).unwrap_err().to_string();
    assert!(error.contains("`pt_BR` has 1 pairs to train on"), "{error}");
    assert_eq!(asking("pt_BR", 1).unwrap().0.languages.len(), 1);
    let two = ParallelOptions { min_pairs: 2, ..options() };
    let (corpus, report) = read(folder.path(), &two).unwrap();
    assert_eq!((corpus.languages.len(), report.too_few["pt_BR"].kept()), (1, 1));
    let error = refusal(folder.path(), &ParallelOptions { min_pairs: 3, ..options() }).to_string();
    assert!(error.contains("no language has 3 pairs"), "{error}");
}

#[test]
fn fault_folders_without_files_of_pairs() {
    let folder = tempfile::tempdir().unwrap();
    let error = refusal(&folder.path().join("missing"), &options()).to_string();
    assert!(error.contains("missing` does not exist"), "{error}");
    fs::write(folder.path().join("de.txt"), "Baum\tTree\n").unwrap();
    fs::write(folder.path().join(".tsv"), "Baum\tTree\n").unwrap();
    let error = refusal(folder.path(), &options()).to_string();
    assert!(error.contains("make catalogues"), "{error}");
    write(folder.path(), "d e.tsv", &[pair("Baum", "Tree")]);
    let error = refusal(folder.path(), &options()).to_string();
    assert!(error.contains("`d e` is no code of a language"), "{error}");
}

#[test]
fn fault_options_out_of_range() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "de.tsv", &[pair("Baum", "Tree")]);
    type Change = fn(&mut ParallelOptions);
    let wrong: [(&str, Change); 6] = [
        ("data.validation_share = 1:", |o| o.validation_share = 1.0),
        ("data.validation_share = NaN:", |o| o.validation_share = f64::NAN),
        ("data.ratio = 0.5:", |o| o.ratio_max = 0.5),
        ("data.ratio = NaN:", |o| o.ratio_max = f64::NAN),
        ("data.sentence_bytes = 0:", |o| o.bytes_max = 0),
        ("`<de>` is no code", |o| o.languages = vec!["<de>".into()]),
    ];
    for (expected, change) in wrong {
        let mut options = options();
        change(&mut options);
        let error = refusal(folder.path(), &options).to_string();
        assert!(error.contains(expected), "{error}");
    }
}
