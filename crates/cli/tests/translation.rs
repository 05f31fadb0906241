//! Translation as its user runs it: from pairs of lines to translated lines. Families: `oracle_`,
//! `fault_` (files, languages and models that do not fit).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{
    fs,
    io::Write,
    process::{Output, Stdio},
};

use common::{Folder, bytes, results};

const CONFIG: &str = r#"
[model]
kind = "translation"
vocabulary = 400
features = 16
heads = 2
head_size = 8
hidden = 32
encoder_layers = 1
decoder_layers = 1

[data]
kind = "parallel"
length = 24
batch_tokens = 150
validation_share = 0.1
min_pairs = 10
validation_pairs = 20
tsv = [{ language = "xx", path = "xx.tsv" }]
lines = [{ language = "yy", source = "yy.txt", target = "en.txt" }]

[pipeline]
stages = 2
micro_batches = 3

[optimizer]
lr = 3e-3
decay = "constant"

[train]
steps = 6
label_smoothing = 0.1
"#;

/// English of a small grammar, and two languages that are other words for it, one backwards.
fn pairs() -> Vec<(String, String, String)> {
    let words = [
        ("open", "ouvra", "niv"),
        ("close", "ferma", "sul"),
        ("the", "la", "et"),
        ("red", "roja", "dor"),
        ("blue", "azul", "neb"),
        ("file", "fisha", "lim"),
        ("window", "fenetra", "dov"),
        ("twice", "dosfe", "wit"),
    ];
    let all = (0..400_usize).map(|i| {
        let length = 2 + i % 4;
        let chosen = (0..length).map(|k| words[(i * 7 + k * k * 3 + i / 8 * k) % words.len()]);
        let chosen: Vec<_> = chosen.collect();
        let english: Vec<_> = chosen.iter().map(|word| word.0).collect();
        let first: Vec<_> = chosen.iter().map(|word| word.1).collect();
        let second: Vec<_> = chosen.iter().rev().map(|word| word.2).collect();
        // Numbers keep the sentences apart.
        let with = |words: Vec<&str>| format!("{} {}", words.join(" "), i / 3);
        (with(english), with(first), with(second))
    });
    all.collect()
}

pub fn folder() -> Folder {
    let folder = Folder::new();
    let pairs = pairs();
    let lines = |line: &dyn Fn(&(String, String, String)) -> String| {
        pairs.iter().map(|pair| line(pair) + "\n").collect::<String>()
    };
    fs::write(folder.path("t.toml"), CONFIG).unwrap();
    fs::write(folder.path("xx.tsv"), lines(&|pair| format!("{}\t{}", pair.1, pair.0))).unwrap();
    fs::write(folder.path("yy.txt"), lines(&|pair| pair.2.clone())).unwrap();
    fs::write(folder.path("en.txt"), lines(&|pair| pair.0.clone())).unwrap();
    folder
}

fn translate(folder: &Folder, arguments: &[&str], input: &[u8]) -> Output {
    let mut command = folder.command(&[&["translate"], arguments].concat());
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn oracle_a_run_trains_resumes_evaluates_and_translates_the_same_on_every_k() {
    let folder = folder();
    let printed = folder.succeeds(&["train", "t.toml", "--out", "run", "--checkpoint-every", "3"]);
    for part in ["parallel text: 2 languages", "by language: xx ", ", yy ", "nats/token"] {
        assert!(printed.contains(part), "'{part}' is not in {printed}");
    }
    // On other stages, and with a stop in between: the same to the bit.
    folder.succeeds(&[
        "train",
        "t.toml",
        "--out",
        "one",
        "--stages",
        "1",
        "--checkpoint-every",
        "none",
    ]);
    folder.copy("run", "stopped");
    fs::remove_dir_all(folder.path("stopped/checkpoints/step-00000006")).unwrap();
    fs::remove_file(folder.path("stopped/weights.safetensors")).unwrap();
    folder.succeeds(&["train", "--resume", "stopped", "--stages", "3"]);
    let train = ["train", "t.toml", "--out", "two", "--checkpoint-every", "none"];
    folder.succeeds(&[&["launch", "--processes", "2", "--"], &train[..]].concat());
    for other in ["one", "stopped", "two"] {
        assert_eq!(folder.weights(other), folder.weights("run"), "{other}");
        assert_eq!(results(&folder.path(other)), results(&folder.path("run")), "{other}");
    }

    let input = "ouvra la fisha\n\nferma\n   \nroja azul fenetra".as_bytes();
    let output = translate(&folder, &["run", "--from", "xx"], input);
    let (lines, errors) = text(&output);
    assert!(output.status.success(), "{errors}");
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!(lines.len(), 5, "{lines:?}");
    assert!(lines[1].is_empty() && lines[3].is_empty());
    let again = translate(&folder, &["run", "--from", "xx", "--stages", "1"], input);
    assert_eq!(text(&again).0.lines().collect::<Vec<_>>(), lines);
    let launched = ["launch", "--processes", "2", "--no-prefix", "--"];
    let mut command =
        folder.command(&[&launched[..], &["translate", "run", "--from", "xx"]].concat());
    fs::write(folder.path("input.txt"), input).unwrap();
    let input = fs::File::open(folder.path("input.txt")).unwrap();
    let in_two = text(&command.stdin(input).output().unwrap());
    assert_eq!(in_two.0.lines().collect::<Vec<_>>(), lines, "{}", in_two.1);
    // No line, no output; a long one is told, and the lines stay as many.
    assert_eq!(text(&translate(&folder, &["run", "--from", "yy"], b"")).0, "");
    let long = format!("{}\nniv\n", "niv et ".repeat(100));
    let (lines, errors) = text(&translate(&folder, &["run", "--from", "yy"], long.as_bytes()));
    assert_eq!(lines.lines().count(), 2);
    assert!(errors.contains("line 1 is longer than the 22 tokens"), "{errors}");

    let evaluated = folder.succeeds(&[
        "eval",
        "run",
        "--translate",
        "5",
        "--beam",
        "2",
        "--table",
        "t.tsv",
        "--svg",
        "t.svg",
    ]);
    for part in ["language", "unigram", "shuffled sources", "xx", "yy", "average", "BLEU nrefs:1"] {
        assert!(evaluated.contains(part), "'{part}' is not in {evaluated}");
    }
    let table = fs::read_to_string(folder.path("t.tsv")).unwrap();
    assert_eq!(table.lines().count(), 3);
    assert!(bytes(&folder.path("t.svg")).starts_with(b"<svg"));
    let line = folder.succeeds(&["eval", "run", "--translate", "0", "--json", "--stages", "1"]);
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(line["languages"].as_array().unwrap().len(), 2);
    assert!(line["scores"].is_null() && line["perplexity"].as_f64().unwrap() > 1.0);

    // Settings are looked at before any work.
    for command in [&["translate", "run", "--from", "xx"][..], &["eval", "run"]] {
        let with = |more: &[&'static str]| [command, more].concat();
        folder.refuses(&with(&["--beam", "0"]), &["the beam is 0", "1 to 256"]);
        folder.refuses(&with(&["--beam", "1000000"]), &["logits in each step"]);
        folder.refuses(&with(&["--length-penalty", "-1"]), &["the length penalty is -1"]);
    }

    // Nothing else takes it for its own.
    folder.refuses(&["generate", "run", "--prompt", "a"], &["translate"]);
    folder.refuses(&["translate", "run", "--from", "zz"], &["zz", "xx", "yy"]);
    let short = ["translate", "run", "--from", "xx", "--set", "data.length=1"];
    folder.refuses(&short, &["data.length", "3 to 65536"]);
    let wrong = translate(&folder, &["run", "--from", "xx"], b"ouvra\ncaf\xe9\nferma\n");
    let (lines, errors) = text(&wrong);
    assert_eq!((wrong.status.code(), lines.lines().count()), (Some(1), 1));
    assert!(errors.contains("line 2") && errors.contains("UTF-8"), "{errors}");
}

#[test]
fn transparency_a_folder_of_pairs_is_the_same_as_its_files() {
    let folder = folder();
    let train = |out| ["train", "t.toml", "--out", out, "--set=data.lines=[]"];
    folder.succeeds(&train("file"));
    fs::create_dir(folder.path("pairs")).unwrap();
    fs::copy(folder.path("xx.tsv"), folder.path("pairs/xx.tsv")).unwrap();
    let from = ["--set=data.tsv=[]", "--set=data.folder=pairs"];
    let printed = folder.succeeds(&[&train("folder")[..], &from].concat());
    assert!(printed.contains("read 1 files: 400 pairs in 1 languages"), "{printed}");
    assert!(folder.weights("file") == folder.weights("folder"));
}

#[test]
fn fault_pairs_languages_and_models_that_do_not_fit_are_refused() {
    let folder = folder();
    let train = |more: &'static [&'static str]| [&["train", "t.toml", "--out", "r"], more].concat();
    fs::write(folder.path("short.txt"), "one\ntwo\n").unwrap();
    let lines =
        r#"--set=data.lines=[{ language = "yy", source = "short.txt", target = "en.txt" }]"#;
    folder.refuses(&[&train(&[])[..], &[lines]].concat(), &["short.txt", "2", "400"]);
    fs::write(folder.path("no-tab.tsv"), "a b\tc\nno tab here\n").unwrap();
    let tsv = r#"--set=data.tsv=[{ language = "xx", path = "no-tab.tsv" }]"#;
    folder.refuses(&[&train(&[])[..], &[tsv]].concat(), &["no-tab.tsv", "2"]);
    fs::write(folder.path("latin.tsv"), b"caf\xe9\tcoffee\n").unwrap();
    let tsv = r#"--set=data.tsv=[{ language = "xx", path = "latin.tsv" }]"#;
    folder.refuses(&[&train(&[])[..], &[tsv]].concat(), &["latin.tsv", "1"]);
    folder.refuses(&train(&["--set=data.languages=[\"qq\"]"]), &["qq", "xx", "yy"]);
    folder.refuses(&train(&["--set=data.folder=nowhere"]), &["nowhere` does not exist"]);
    // Before the pairs are read: these have no folder.
    let early = |set: &[&'static str], parts: &[&str]| {
        folder.refuses(&[&train(&["--set=data.folder=nowhere"])[..], set].concat(), parts);
    };
    early(&["--set=data.length=2"], &["data.length", "3 to 65536"]);
    early(&["--set=data.temperature=0.5"], &["data.temperature", "at least 1"]);
    early(&["--set=data.batch_tokens=0"], &["data.batch_tokens", "at least 1"]);
    let made = &["data/translations: it does not exist: `make catalogues` makes it"];
    folder.refuses(&train(&["--set=data.folder=data/translations"]), made);
    let none = ["--set=data.tsv=[]", "--set=data.lines=[]"];
    folder.refuses(&[&train(&[])[..], &none].concat(), &["set data.folder", "make catalogues"]);
    folder.refuses(&train(&["--set", "model.kind=transformer"]), &["where it is translation"]);
    assert!(!folder.path("r").exists(), "nothing is left behind");

    folder.train(&["--steps", "2", "--out", "text", "--set=train.validation_tokens=100"]);
    folder.refuses(
        &["translate", "text", "--from", "de"],
        &["text: its model does not translate (data.kind = \"text\"): give the run"],
    );
}
