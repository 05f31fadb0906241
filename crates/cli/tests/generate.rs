//! A trained model as its user measures it and has it write. Families: `oracle_` (what the numbers
//! and the text must be), `transparency_` (the same at every K), `property_`, `fault_` (bad input:
//! a clear error, no panic text).
//!
//! One model is trained, once, on four sentences, each a document; it knows them by heart.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::LazyLock,
};

use gpipe_data::Tokenizer;
use serde_json::Value;

const CONFIG: &str = r#"
[model]
vocabulary = 320
features = 32
heads = 2
hidden = 64
blocks = 2

[data]
sequence = 12
shuffle_documents = true

[pipeline]
stages = 2
micro_batches = 3

[optimizer]
lr = 0.01

[train]
steps = 120
mini_batch = 8
"#;

const SENTENCES: [&str; 4] = [
    "the quick brown fox jumps over the lazy dog.\n",
    "a pipeline of café au lait, 漢字 and 🦀 in micro batches.\n",
    "every good boy does fine.\n",
    "some rain in Spain stays mainly in the plain.\n",
];

/// A folder with a text and, in `run`, a model trained on it.
struct Trained {
    folder: PathBuf,
    /// What training printed.
    printed: String,
}

static TRAINED: LazyLock<Trained> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("generate");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("text")).unwrap();
    fs::write(folder.join("tiny.toml"), CONFIG).unwrap();
    for document in 0..80 {
        fs::write(folder.join(format!("text/{document}.txt")), SENTENCES[document % 4]).unwrap();
    }
    let mut trained = Trained { folder, printed: String::new() };
    let output = trained.gpipe(&["train", "tiny.toml", "--text", "text", "--out", "run"], "");
    trained.printed = success(&output);
    trained
});

impl Trained {
    fn gpipe(&self, arguments: &[&str], stdin: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpipe"));
        command.current_dir(&self.folder).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // Who refuses its arguments does not read.
        let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
        child.wait_with_output().unwrap()
    }

    fn generate(&self, prompt: &str, more: &[&str]) -> String {
        success(&self.gpipe(&[&["generate", "run", "--prompt", prompt], more].concat(), ""))
    }

    fn greedy(&self, prompt: &str, more: &[&str]) -> String {
        self.generate(prompt, &[&["--temperature", "0"], more].concat())
    }

    /// The numbers of `eval --json`, as text: every bit of them.
    fn eval(&self, more: &[&str]) -> String {
        success(&self.gpipe(&[&["eval", "run", "--json"], more].concat(), ""))
    }

    /// Expects a failure with one clear message.
    fn refuses(&self, arguments: &[&str], parts: &[&str]) {
        let output = self.gpipe(arguments, "");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
        assert!(text.starts_with("gpipe: ") && !text.contains("panicked"), "{arguments:?}: {text}");
        for part in parts {
            assert!(text.contains(part), "{arguments:?}: '{part}' is not in: {text}");
        }
    }
}

fn success(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn number(json: &str, key: &str) -> f64 {
    let value: Value = serde_json::from_str(json).unwrap();
    value[key].as_f64().unwrap_or_else(|| panic!("{key} in {json}"))
}

#[test]
fn oracle_eval_prints_what_training_ended_with() {
    let json = TRAINED.eval(&[]);
    let line = TRAINED.printed.lines().find(|line| line.contains(": validation loss ")).unwrap();
    let expected = format!(
        "validation loss {:.4} nats/token, {:.4} bits/byte, accuracy {:.1}% over {} tokens",
        number(&json, "loss"),
        number(&json, "bits_per_byte"),
        100.0 * number(&json, "accuracy"),
        number(&json, "tokens")
    );
    assert!(line.ends_with(&expected), "{line} against {expected}");
    assert!((number(&json, "perplexity").ln() - number(&json, "loss")).abs() < 1e-12);
    let accuracy = number(&json, "accuracy");
    assert!((0.5..1.0).contains(&accuracy), "first words cannot be known: {accuracy}");

    let printed = success(&TRAINED.gpipe(&["eval", "run"], ""));
    for part in ["held out of text", "nats/token", "perplexity", "bits per byte", "accuracy"] {
        assert!(printed.contains(part), "'{part}' is not in: {printed}");
    }
    assert!(printed.contains(&format!("{:.6} nats/token", number(&json, "loss"))), "{printed}");
}

#[test]
fn oracle_a_known_text_is_more_likely_than_another() {
    fs::write(TRAINED.folder.join("known.txt"), SENTENCES[0]).unwrap();
    fs::write(TRAINED.folder.join("other.txt"), "dog lazy the over jumps fox brown quick the.\n")
        .unwrap();
    let (known, other) =
        (TRAINED.eval(&["--text", "known.txt"]), TRAINED.eval(&["--text", "other.txt"]));
    assert!(number(&known, "loss") + 1.0 < number(&other, "loss"), "{known} {other}");
    assert!(number(&known, "accuracy") > number(&other, "accuracy"), "{known} {other}");
    // All of the text, and the end of the document, but for the first token.
    let tokenizer = Tokenizer::load(&TRAINED.folder.join("run/tokenizer.json")).unwrap();
    let count = tokenizer.encode(SENTENCES[0]).unwrap().len();
    assert_eq!(number(&known, "tokens"), count as f64);
    assert_eq!(number(&TRAINED.eval(&["--text", "known.txt", "--tokens", "4"]), "tokens"), 3.0);
    let capped = success(&TRAINED.gpipe(&["eval", "run", "--tokens", "4"], ""));
    assert!(capped.contains("the first 4 tokens; --tokens N measures more"), "{capped}");
}

#[test]
fn transparency_eval_is_the_same_to_the_last_bit_at_every_k() {
    let expected = TRAINED.eval(&["--stages", "1"]);
    for k in ["2", "3"] {
        assert_eq!(TRAINED.eval(&["--stages", k]), expected, "K = {k}");
    }
    // Layers per stage that were meant for two stages do not stand in the way of three.
    let cut = ["--set", "pipeline.balance=1,5", "--stages"];
    assert_eq!(TRAINED.eval(&[&cut[..], &["2"]].concat()), expected);
    assert_eq!(TRAINED.eval(&[&cut[..], &["3"]].concat()), expected);
    // Another M adds in another order, and no more than that.
    let other = TRAINED.eval(&["--micro-batches", "1"]);
    assert!((number(&other, "loss") - number(&expected, "loss")).abs() < 1e-5, "{other}");
    let by_files = ["--config", "run/config.toml", "--weights", "run/weights.safetensors"];
    let output = TRAINED.gpipe(&[&["eval", "--json"], &by_files[..]].concat(), "");
    assert_eq!(success(&output), expected);
}

#[test]
fn transparency_the_same_text_at_every_k() {
    let sampled = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--seed", "3"];
    let expected = TRAINED.generate("the quick", &[&sampled[..], &["--stages", "1"]].concat());
    for k in ["2", "3"] {
        let found = TRAINED.generate("the quick", &[&sampled[..], &["--stages", k]].concat());
        assert_eq!(found, expected, "K = {k}");
        assert_eq!(TRAINED.greedy("the quick", &["--stages", k]), TRAINED.greedy("the quick", &[]));
    }
}

#[test]
fn oracle_a_sentence_known_by_heart_is_continued_to_its_end() {
    assert_eq!(TRAINED.greedy("the quick brown", &[]), " fox jumps over the lazy dog.\n");
    assert_eq!(TRAINED.greedy("every good", &[]), " boy does fine.\n");
    // Characters of 2 to 4 bytes, which tokens cut.
    let tokenizer = Tokenizer::load(&TRAINED.folder.join("run/tokenizer.json")).unwrap();
    let tokens = tokenizer.encode(SENTENCES[1]).unwrap();
    let is_cut = |token: &&u32| String::from_utf8(tokenizer.token_bytes(**token).unwrap()).is_err();
    assert!(tokens.iter().find(is_cut).is_some(), "no token ends within a character");
    assert_eq!(TRAINED.greedy("a pipeline of", &[]), &SENTENCES[1]["a pipeline of".len()..]);
    // Without a prompt a document begins: one of the four.
    assert!(SENTENCES.contains(&TRAINED.greedy("", &[]).as_str()));
    // From a file, and from the standard input.
    fs::write(TRAINED.folder.join("prompt.txt"), "some rain").unwrap();
    let generate = ["generate", "run", "--temperature", "0"];
    let from_file = TRAINED.gpipe(&[&generate[..], &["--prompt-file", "prompt.txt"]].concat(), "");
    assert_eq!(success(&from_file), " in Spain stays mainly in the plain.\n");
    assert_eq!(success(&TRAINED.gpipe(&generate, "some rain")), success(&from_file));
}

#[test]
fn oracle_tokens_bound_the_text() {
    let tokenizer = Tokenizer::load(&TRAINED.folder.join("run/tokenizer.json")).unwrap();
    let whole = TRAINED.greedy("the quick brown", &[]);
    let tokens = tokenizer.encode(&format!("the quick brown{whole}")).unwrap();
    let prompt = tokenizer.encode("the quick brown").unwrap().len();
    for count in 1..=3 {
        let expected = tokenizer.decode(&tokens[prompt..prompt + count]).unwrap();
        assert_eq!(TRAINED.greedy("the quick brown", &["--tokens", &count.to_string()]), expected);
    }
}

/// Texts of equal and of other lengths, beyond the model's positions, some of which end early.
#[test]
fn oracle_several_texts_are_each_what_it_is_alone() {
    let long = SENTENCES[0].repeat(2) + "the quick";
    let prompts = ["the quick", "every good", "some rain", "a", "", &long];
    let mut all = vec!["generate", "run", "--temperature", "0", "--json", "--tokens", "9"];
    all.extend(prompts.iter().flat_map(|prompt| ["--prompt", prompt]));
    let lines = |arguments: &[&str]| -> Vec<Value> {
        let printed = success(&TRAINED.gpipe(arguments, ""));
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let together = lines(&all);
    for (prompt, found) in prompts.iter().zip(&together) {
        assert_eq!(found["prompt"], *prompt);
        let alone = TRAINED.greedy(prompt, &["--tokens", "9"]);
        assert_eq!(found["text"], alone, "{prompt}");
        assert_eq!(found["end"], if alone.ends_with(".\n") { "end" } else { "length" }, "{found}");
    }
    // However many share a step, whatever K, and from a file.
    let batches = |more: &[&'static str]| lines(&[&all[..], more].concat());
    assert_eq!(batches(&["--batch", "2"]), together);
    assert_eq!(batches(&["--stages", "3"]), together);
    let marked = "\u{feff}the quick\nevery good\n"; // with a byte order mark, which is no text
    fs::write(TRAINED.folder.join("prompts.txt"), marked).unwrap();
    let file =
        ["generate", "run", "--temperature", "0", "--tokens", "9", "--prompts", "prompts.txt"];
    assert_eq!(lines(&[&file[..], &["--json"]].concat()), together[..2]);
    let headings = success(&TRAINED.gpipe(&file, ""));
    let expected = format!(
        "==> 1: the quick <==\n{}\n\n==> 2: every good <==\n{}\n",
        together[0]["text"].as_str().unwrap(),
        together[1]["text"].as_str().unwrap()
    );
    assert_eq!(headings, expected);
    // Each text draws numbers of its own.
    let twice =
        ["generate", "run", "--prompt", "a", "--prompt", "a", "--temperature", "3", "--json"];
    let drawn = lines(&twice);
    assert_ne!(drawn[0]["text"], drawn[1]["text"]);
}

#[test]
fn oracle_a_text_ends_before_a_string() {
    let whole = TRAINED.greedy("the quick brown", &[]);
    let before = |stop: &str| whole.split(stop).next().unwrap().to_owned();
    for stop in ["jumps", " over", "zy d", "."] {
        assert_eq!(TRAINED.greedy("the quick brown", &["--stop", stop]), before(stop), "{stop}");
    }
    assert_eq!(TRAINED.greedy("the quick brown", &["--stop", "cat"]), whole);
    let two = ["--stop", "lazy", "--stop", "over"];
    assert_eq!(TRAINED.greedy("the quick brown", &two), before("over"));
    let json = TRAINED.greedy("the quick brown", &["--stop", "over", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["end"], &json["text"]), (&"stop".into(), &before("over").into()));
}

/// What the model has written already becomes so unlikely that it must go on otherwise.
#[test]
fn property_a_penalty_avoids_what_is_there() {
    let tokens = |more: &[&str]| -> Vec<u64> {
        let json = TRAINED.greedy("the quick brown", &[&["--json"], more].concat());
        let json: Value = serde_json::from_str(&json).unwrap();
        json["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect()
    };
    let strong = tokens(&["--repetition-penalty", "1000", "--tokens", "20"]);
    let mut different = strong.clone();
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), strong.len(), "{strong:?}");
    assert_eq!(tokens(&["--repetition-penalty", "1"]), tokens(&[]));
}

#[test]
fn oracle_of_a_long_text_the_model_sees_the_last_positions() {
    let tokenizer = Tokenizer::load(&TRAINED.folder.join("run/tokenizer.json")).unwrap();
    let long = SENTENCES[3].repeat(5) + "every good";
    let tokens = tokenizer.encode(&long).unwrap();
    let seen = tokenizer.decode(&tokens[tokens.len() - 12..]).unwrap();
    assert_eq!(tokenizer.encode(&seen).unwrap().len(), 12, "the cut is between words: {seen}");
    let continued = TRAINED.greedy(&long, &["--tokens", "5"]);
    assert_eq!(continued, TRAINED.greedy(&seen, &["--tokens", "5"]));
    assert!(!continued.is_empty());
    let help = success(&TRAINED.gpipe(&["generate", "--help"], ""));
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("sees the last data.sequence tokens"), "{help}");
}

#[test]
fn property_a_seed_is_a_text() {
    let hot =
        |seed: u32| TRAINED.generate("", &["--temperature", "2", "--seed", &seed.to_string()]);
    let texts: BTreeSet<String> = (0..6).map(hot).collect();
    assert!(texts.len() >= 5, "seeds differ: {texts:?}");
    assert_eq!(hot(3), hot(3));
    // Where only the likeliest may be chosen the seed changes nothing.
    let one = |seed| TRAINED.generate("every", &["--top-k", "1", "--seed", seed]);
    assert_eq!(one("1"), one("2"));
    assert_eq!(one("1"), TRAINED.greedy("every", &[]));
    assert_eq!(TRAINED.generate("every", &["--top-p", "0.000001"]), one("1"));
}

#[test]
fn fault_a_closed_output_ends_quietly() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpipe"));
    let arguments = ["generate", "run", "--prompt", "the", "--temperature", "0"];
    command.current_dir(&TRAINED.folder).args(arguments);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn fault_settings_out_of_range_name_the_remedy() {
    let with = |more: &[&'static str]| [&["generate", "run", "--prompt", "a"], more].concat();
    TRAINED.refuses(&with(&["--temperature", "-1"]), &["--temperature -1: use 0"]);
    TRAINED.refuses(&with(&["--temperature", "NaN"]), &["--temperature NaN"]);
    TRAINED.refuses(&with(&["--top-p", "0"]), &["--top-p 0:", "above 0 and at most 1"]);
    TRAINED.refuses(&with(&["--top-p", "-0.5"]), &["--top-p -0.5:"]);
    TRAINED.refuses(&with(&["--top-p", "1.5"]), &["--top-p 1.5:"]);
    TRAINED.refuses(&with(&["--top-k", "0"]), &["--top-k 0", "at least 1"]);
    TRAINED.refuses(&with(&["--min-p", "1"]), &["--min-p 1: use a number from 0"]);
    TRAINED.refuses(&with(&["--repetition-penalty", "0"]), &["--repetition-penalty 0: use a"]);
    TRAINED.refuses(&with(&["--stop", ""]), &["--stop: give at most 64 texts, none of them empty"]);
    TRAINED.refuses(&with(&["--batch", "0"]), &["--batch 0: use 1 to 4096"]);
    TRAINED.refuses(&with(&["--tokens", "0"]), &["--tokens 0: use 1 to"]);
    TRAINED.refuses(&with(&["--stages", "9"]), &["9 stages need at least 9 layers"]);
    TRAINED.refuses(&["eval", "run", "--tokens", "1"], &["--tokens 1", "at least 2"]);
    TRAINED.refuses(&["eval", "run", "--text", "none.txt"], &["`none.txt` does not exist"]);
    TRAINED.refuses(
        &["eval", "run", "--set", "data.text=[\"gone\"]"],
        &["`gone`", "run where you trained, or name another with --text PATH"],
    );
    fs::write(TRAINED.folder.join("latin1.txt"), b"caf\xe9").unwrap();
    let prompt_file = |name| ["generate", "run", "--prompt-file", name];
    TRAINED.refuses(&prompt_file("latin1.txt"), &["latin1.txt", "UTF-8", "offset 3"]);
    TRAINED.refuses(&prompt_file("none.txt"), &["none.txt"]);
    fs::write(TRAINED.folder.join("long.txt"), "a".repeat((1 << 20) + 1)).unwrap();
    TRAINED.refuses(&prompt_file("long.txt"), &["at most 1048576 bytes"]);
}

#[test]
fn fault_models_that_are_not_whole_or_not_one_are_refused() {
    let copy = |name: &str, files: &[&str]| {
        let folder = TRAINED.folder.join(name);
        fs::create_dir_all(&folder).unwrap();
        for file in files {
            fs::copy(TRAINED.folder.join("run").join(file), folder.join(file)).unwrap();
        }
        folder
    };
    for command in ["eval", "generate"] {
        TRAINED.refuses(&[command, "nowhere"], &["nowhere: there is no such folder", "give the"]);
        copy("no-weights", &["config.toml", "tokenizer.json"]);
        TRAINED.refuses(
            &[command, "no-weights"],
            &["no-weights/weights.safetensors: there is no such file", "let the run end"],
        );
        copy("no-tokenizer", &["config.toml", "weights.safetensors"]);
        TRAINED.refuses(&[command, "no-tokenizer"], &["no-tokenizer/tokenizer.json"]);
        let damaged = copy("damaged", &["config.toml", "tokenizer.json"]);
        fs::write(damaged.join("weights.safetensors"), "nothing of the kind").unwrap();
        TRAINED.refuses(&[command, "damaged"], &["weights.safetensors", "not a safetensors file"]);
        // Weights of another model: other sizes, more layers, fewer layers.
        for (set, part) in [
            ("model.features=16", "'embedding.tokens' is [320, 32], the model's is [320, 16]"),
            ("model.blocks=3", "it has no parameter '2."),
            ("model.blocks=1", "the model has no parameter '1."),
        ] {
            TRAINED.refuses(
                &[command, "run", "--set", set],
                &["run/weights.safetensors does not fit", part, "give the files of one run"],
            );
        }
    }
    // Weights whose training diverged.
    let path = copy("diverged", &["config.toml", "tokenizer.json"]).join("weights.safetensors");
    let mut weights =
        gpipe_checkpoint::weights::load(&TRAINED.folder.join("run/weights.safetensors")).unwrap();
    for (_, tensor) in &mut weights {
        *tensor = tensor.f_mul_scalar(f64::NAN).unwrap();
    }
    gpipe_checkpoint::weights::save(&path, &weights).unwrap();
    TRAINED.refuses(&["generate", "diverged"], &["NaN or infinite", "other weights"]);
    TRAINED.refuses(&["eval", "diverged"], &["NaN or infinite"]);
}
