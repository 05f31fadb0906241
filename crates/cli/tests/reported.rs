//! What is read, left out, capped, guessed or impossible is said before the first step, with
//! numbers. Family: `regression_`, each of something that was once done in silence.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::fs;

use common::{Folder, bytes, train};

const FEW: &[&str] = &["--steps", "1", "--set", "train.validation_tokens=100"];

fn with<'a>(command: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [command, more].concat()
}

/// A text of 38 MB was cut to 16 MiB by a default, and binaries in a folder were left out, both
/// without a word.
#[test]
fn regression_a_text_is_read_whole_and_what_is_left_out_is_said() {
    let folder = Folder::new();
    fs::create_dir(folder.path("texts")).unwrap();
    fs::copy(folder.path("text.txt"), folder.path("texts/a.txt")).unwrap();
    fs::write(folder.path("texts/b.png"), b"PNG\0\xff").unwrap();
    let texts = with(&["train", "tiny.toml", "--text", "texts"], FEW);
    let size = fs::metadata(folder.path("text.txt")).unwrap().len();
    assert!(size > 40_000, "{size}");

    let printed = folder.succeeds(&with(&texts, &["--out", "all"]));
    let line = printed.lines().next().unwrap();
    assert!(line.starts_with("texts: read 1 file (1 .txt), "), "{printed}");
    assert!(line.ends_with(" KiB; left out 1 binary file (texts/b.png)"), "{printed}");
    let second = printed.lines().nth(1).unwrap();
    for part in ["texts: ", "training tokens", "(of which train.validation_tokens = 100 are"] {
        assert!(second.contains(part), "'{part}' is not in {second}");
    }
    let config = fs::read_to_string(folder.path("all/config.toml")).unwrap();
    assert!(config.contains("train_bytes = \"all\""), "{config}");

    let cap = ["--set", "data.train_bytes=8KiB", "--out", "cut"];
    let printed = folder.succeeds(&with(&texts, &cap));
    let cut = printed.lines().next().unwrap();
    assert!(
        cut.contains("; took 8.0 KiB of ") && cut.ends_with("as data.train_bytes says"),
        "{cut}"
    );
    folder.refuses(&with(&texts, &["--set", "data.train_bytes=some"]), &["train_bytes", "or all"]);
    // What is measured on is told, too.
    let eval = folder.succeeds(&["eval", "all", "--text", "texts", "--tokens", "50"]);
    assert!(eval.contains("left out 1 binary file (texts/b.png)"), "{eval}");
}

/// Records of JSON were learned as plain text, braces and keys and all, without a word.
#[test]
fn regression_json_is_no_plain_text_unless_someone_insists() {
    let folder = Folder::new();
    let rows = "{\"text\": \"a pipeline of stages\"}\n".repeat(300);
    fs::write(folder.path("rows.jsonl"), rows).unwrap();
    let rows = with(&["train", "tiny.toml", "--text", "rows.jsonl"], FEW);
    folder.refuses(&rows, &["`rows.jsonl` is JSON", "jq -r .text", "data.json = \"text\""]);
    assert!(!folder.path("out/tiny").exists(), "nothing was begun");
    let printed = folder.succeeds(&with(&rows, &["--set", "data.json=text", "--out", "run"]));
    assert!(printed.starts_with("rows.jsonl: read 1 file (1 .jsonl)"), "{printed}");
    folder.refuses(&["eval", "run", "--text", "nowhere.jsonl"], &["nowhere.jsonl"]);
}

/// Weights without a tokenizer beside them were trained on with newly learned tokens: their
/// embedding was that of others.
#[test]
fn regression_weights_without_a_tokenizer_are_refused_with_the_remedy() {
    let folder = Folder::new();
    folder.succeeds(&train("run", &[]));
    fs::create_dir(folder.path("bare")).unwrap();
    fs::copy(folder.path("run/weights.safetensors"), folder.path("bare/w.safetensors")).unwrap();
    let from = |weights: &'static str, out: &'static str, more: &[&'static str]| {
        train(out, &[&["--init", weights][..], more].concat())
    };
    let refused = ["bare/w.safetensors", "there is no tokenizer.json", "data.tokenizer=PATH"];
    folder.refuses(&from("bare/w.safetensors", "no", &[]), &refused);
    folder.refuses(&from("bare/w.safetensors", "no", &["--partial"]), &refused);
    assert!(!folder.path("no").exists(), "nothing was begun");
    // Named, it is as if it lay beside them.
    folder.succeeds(&from("run/weights.safetensors", "beside", &[]));
    let named = ["--set", "data.tokenizer=run/tokenizer.json"];
    folder.succeeds(&from("bare/w.safetensors", "named", &named));
    assert!(folder.weights("named") == folder.weights("beside"));
    let tokens = |run: &str| bytes(&folder.path(run).join("tokenizer.json"));
    assert!(tokens("named") == tokens("run"));
    // Who insists gets new ones.
    folder.succeeds(&from("bare/w.safetensors", "new", &["--set", "data.tokenizer=new"]));
    folder.refuses(
        &from("bare/w.safetensors", "no", &["--set", "data.tokenizer=nowhere.json"]),
        &["nowhere.json"],
    );
    // A run's tokens are its own when it goes on.
    let other = ["train", "--resume", "run", "--set", "data.tokenizer=run/tokenizer.json"];
    folder.refuses(&other, &["data.tokenizer cannot change"]);
    let import = ["import", "run/weights.safetensors", "--config", "run/config.toml", "--out"];
    let said = folder.succeeds(&with(&import, &["bare/imported.safetensors"]));
    assert!(said.contains("there is no bare/tokenizer.json"), "{said}");
}

/// More micro-batches than samples, 1,000 threads on two cores and a mini-batch larger than the
/// memory were accepted until the system killed the run.
#[test]
fn regression_what_the_machine_does_not_have_is_said_before_the_first_step() {
    let folder = Folder::new();
    let tiny = with(&["train", "tiny.toml", "--text", "text.txt"], FEW);
    let printed = folder.succeeds(&with(&tiny, &["--micro-batches", "64", "--out", "run"]));
    let said =
        "pipeline.micro_batches = 64 is more than the 7 samples of a mini-batch: it is cut into 7";
    assert!(printed.lines().any(|line| line == said), "{printed}");

    let cores = std::thread::available_parallelism().unwrap().get();
    let (most, threads) = ((4 * cores).to_string(), (4 * cores + 1).to_string());
    let refused = [
        &format!("pipeline.threads_per_stage = {threads}: there are {cores} cores")[..],
        &most,
        "pipeline.oversubscribe=true",
    ];
    folder.refuses(&with(&tiny, &["--threads-per-stage", &threads]), &refused);
    let insist = ["--threads-per-stage", &threads, "--set", "pipeline.oversubscribe=true"];
    let printed = folder.succeeds(&with(&tiny, &with(&insist, &["--out", "threads"])));
    assert!(printed.contains(&format!("threads on {cores} cores: they take turns")), "{printed}");

    // 2^25 samples of 8 tokens: more than a TiB of activations.
    let huge = ["--set", "train.mini_batch=33554432", "--set", "pipeline.micro_batches=1"];
    for command in [&tiny[..], &["trace", "tiny.toml", "--text", "text.txt"]] {
        let output = folder.gpipe(&with(command, &huge));
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8_lossy(&output.stderr);
        for part in [
            "gpipe: train.mini_batch = 33554432: a step of 33554432 samples needs about 1.",
            " TiB of memory (",
            " are available (/",
            "use a smaller train.mini_batch, more pipeline.micro_batches or --remat always",
            "pipeline.oversubscribe=true",
        ] {
            assert!(text.contains(part), "'{part}' is not in {text}");
        }
    }
    assert!(!folder.path("out/tiny").exists(), "nothing was begun");
}
