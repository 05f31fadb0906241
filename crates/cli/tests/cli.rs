//! The command as its user runs it, in a process of its own. Families: `transparency_` (the same
//! weights at every K), `oracle_` (what a run writes), `fault_` (bad input: a clear error, exit
//! code 1, no panic text).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::fs;

use common::{Folder, bytes};

#[test]
fn oracle_completions_have_every_command() {
    let folder = Folder::new();
    let commands = folder.succeeds(&["--help"]);
    let names = ["train", "eval", "generate", "plan", "launch", "export", "completions"];
    for shell in ["bash", "zsh", "fish"] {
        let script = folder.succeeds(&["completions", shell]);
        for name in names {
            assert!(commands.contains(name) && script.contains(name), "{shell}: {name}");
        }
        assert!(script.contains("micro-batches"), "{shell}: a flag");
    }
    folder.refuses(&["completions", "tcl"], &["tcl", "bash"]);
}

#[test]
fn oracle_a_run_writes_what_it_promises() {
    let folder = Folder::new();
    let printed = folder.train(&["--out", "run"]);
    for part in
        ["layers per stage: ", "step 1/4  loss ", "tokens/s  bubble ", "nats/token, ", "bits/byte"]
    {
        assert!(printed.contains(part), "'{part}' is not in: {printed}");
    }
    let bubble = printed.lines().find(|line| line.starts_with("bubble ")).unwrap();
    assert_eq!(bubble.matches('%').count(), 5, "the bubble and its four parts: {bubble}");
    let heads = printed.lines().find(|line| line.contains("stage 0")).unwrap();
    assert_eq!(heads.split_whitespace().collect::<Vec<_>>(), ["stage", "0", "stage", "1"]);
    for row in ["forward ", "backward ", "stalls ", "peak memory ", "sent "] {
        assert!(printed.lines().any(|line| line.starts_with(row)), "'{row}': {printed}");
    }
    assert!(!printed.contains('\r') && !printed.contains('\x1b'), "plain lines, not a terminal");

    let weights = gpipe_checkpoint::weights::load(&folder.path("run/weights.safetensors")).unwrap();
    let tokens = weights.iter().find(|(name, _)| name == "embedding.tokens").unwrap();
    let vocabulary = tokens.1.size()[0] as u64; // less than asked for: the text is short
    let lines = folder.lines("run");
    let (evaluation, lines) = lines.split_last().unwrap();
    assert_eq!(lines.len(), 4);
    assert_eq!((&evaluation["kind"], &evaluation["step"]), (&"evaluation".into(), &4.into()));
    assert_eq!(evaluation["tokens_total"], 4 * 7 * 8);
    assert!(evaluation["loss"].as_f64() > Some(0.0) && evaluation["count"].as_u64() > Some(0));
    assert!(evaluation["bits_per_byte"].as_f64() > Some(0.0));
    for (index, line) in lines.iter().enumerate() {
        assert_eq!((&line["kind"], &line["step"]), (&"step".into(), &(index + 1).into()));
        assert_eq!((&line["tokens"], &line["samples"]), (&(7 * 8).into(), &7.into()));
        assert_eq!(line["tokens_total"], (index + 1) * 7 * 8);
        assert_eq!(line["samples_total"], (index + 1) * 7);
        for key in [
            "loss",
            "tokens_per_s",
            "step_ms",
            "data_wait_ms",
            "lr",
            "grad_norm",
            "clip_scale",
            "bubble",
        ] {
            assert!(line[key].as_f64().is_some_and(f64::is_finite), "{key} in {line}");
        }
        let stages = line["stages"].as_array().unwrap();
        assert_eq!(stages.len(), 2);
        // 7 samples of 8 positions of 16 float32 each way, and once the tied weight.
        let boundary = 7 * 8 * 16 * 4;
        let tied = vocabulary * 16 * 4;
        let sent: Vec<_> =
            stages.iter().map(|stage| stage["sent_bytes"].as_u64().unwrap()).collect();
        assert_eq!(sent, [boundary + tied, boundary + tied]);
        for stage in stages {
            let ms = |key: &str| stage[key].as_f64().unwrap();
            let busy = ["forward_ms", "recompute_ms", "backward_ms", "optimizer_ms"];
            let waits = ["fill_drain_ms", "imbalance_ms", "stalls_ms"];
            let wait: f64 = waits.map(ms).iter().sum();
            assert!((wait - ms("idle_ms")).abs() < 1e-9, "{line}");
            let sum = busy.map(ms).iter().sum::<f64>() + ms("communication_ms") + wait;
            assert!((sum - line["step_ms"].as_f64().unwrap()).abs() < 1e-9, "{line}");
            assert!(ms("forward_ms") > 0.0 && stage["peak_bytes"].as_u64() > Some(0));
        }
    }
    let names: Vec<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
    assert!(names.contains(&"0.attention.qkv.weight") && names.contains(&"embedding.tokens"));
    assert!(!names.contains(&"head.weight"), "a tied weight is written once");
    assert!(folder.path("run/tokenizer.json").exists());
    let events: Vec<_> = fs::read_dir(folder.path("run/tensorboard")).unwrap().collect();
    let name = events[0].as_ref().unwrap().file_name().into_string().unwrap();
    assert!(events.len() == 1 && name.starts_with("events.out.tfevents."), "{name}");
    assert!(folder.gpipe(&["plot", "run"]).status.success(), "a run can be plotted");
}

#[test]
fn transparency_the_resolved_configuration_repeats_the_run_at_every_k() {
    let folder = Folder::new();
    folder.train(&["--out", "first", "--set", "optimizer.lr=0.01", "--seed", "5"]);
    let expected = bytes(&folder.path("first/weights.safetensors"));
    let config = folder.path("first/config.toml").display().to_string();
    for (k, schedule, remat) in
        [("1", "gpipe", "never"), ("2", "1f1b", "always"), ("4", "1f1b", "segments:2")]
    {
        let out = format!("again-{k}");
        let output = folder.gpipe(&[
            "train",
            &config,
            "--stages",
            k,
            "--schedule",
            schedule,
            "--remat",
            remat,
            "--out",
            &out,
        ]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(bytes(&folder.path(&out).join("weights.safetensors")) == expected, "K = {k}");
    }
    let other = folder.train(&["--out", "other", "--set", "optimizer.lr=0.01", "--seed", "6"]);
    assert!(bytes(&folder.path("other/weights.safetensors")) != expected, "{other}");
}

#[test]
fn transparency_verify_passes_and_can_fail() {
    let folder = Folder::new();
    let text = ["verify", "tiny.toml", "--text", "text.txt", "--steps", "2"];
    let with = |more: &[&'static str]| [&text[..], more].concat();
    let output = folder.gpipe(&with(&["--stages", "1,2,3", "--remat", "always,never"]));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}");
    assert_eq!(printed.matches("identical: ").count(), 3 * 2 * 2 - 1, "{printed}");
    assert!(printed.contains("every loss, gradient and parameter is the same to the last bit"));
    let is_timed =
        |line: &&str| line.starts_with("K ") && line.contains(" of ") && line.contains(" ms  ");
    assert_eq!(printed.lines().filter(is_timed).count(), 3 * 2 * 2, "{printed}");

    // The same through files in the middle.
    let output = folder.gpipe(&with(&["--stages", "1,2,3", "--remat", "always,never", "--resume"]));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}");
    assert_eq!(printed.matches("identical: ").count(), 3 * 2 * 2 - 1, "{printed}");
    assert!(printed.contains("saved after 1 steps, and resumed from the files"), "{printed}");

    // Another M sums in another order: a real difference, and verify must find it.
    let output =
        folder.gpipe(&with(&["--stages", "1", "--schedule", "gpipe", "--micro-batches", "1,7"]));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("DIFFERS first in step 1: "), "{printed}");
    folder.refuses(&with(&["--stages", "1", "--schedule", "gpipe"]), &["nothing to compare"]);
}

#[test]
fn fault_configurations_that_are_wrong_say_where_and_what_to_do() {
    let folder = Folder::new();
    let text = ["train", "tiny.toml", "--text", "text.txt"];
    let with = |more: &[&'static str]| [&text[..], more].concat();
    folder.refuses(&["train", "none.toml"], &["none.toml", "give the path"]);
    folder.refuses(
        &with(&["--set", "model.blcks=3"]),
        &["'model.blcks'", "did you mean 'model.blocks'?"],
    );
    folder.refuses(&with(&["--set", "train.vocabulary=3"]), &["did you mean 'model.vocabulary'?"]);
    folder.refuses(&with(&["--set", "model=3"]), &["that is a table"]);
    folder.refuses(&with(&["--set", "model.blocks"]), &["KEY=VALUE"]);
    folder.refuses(
        &with(&["--set", "model.blocks=many"]),
        &["--set model.blocks=many: give a whole number, 0 or more"],
    );
    fs::write(folder.path("unknown.toml"), "[pipeline]\nstagse = 2\n").unwrap();
    folder.refuses(
        &["train", "unknown.toml"],
        &["unknown.toml", "'pipeline.stagse'", "'pipeline.stages'?"],
    );
    fs::write(folder.path("broken.toml"), "[pipeline\n").unwrap();
    folder.refuses(&["train", "broken.toml"], &["broken.toml", "line 1"]);
    folder.refuses(&with(&["--schedule", "zb"]), &["--schedule", "use gpipe, 1f1b, zb-h1"]);
    folder.refuses(&with(&["--remat", "sometimes"]), &["use always, never"]);
    folder.refuses(&with(&["--memory", "lots"]), &["'lots' is not an amount of memory"]);
    folder.refuses(
        &with(&["--balance", "1,1"]),
        &["balance [1, 1] covers 2 layers, the model has 6"],
    );
    folder.refuses(
        &with(&["--balance", "3,3", "--stages", "3"]),
        &["balance [3, 3] is for 2 stages, the pipeline has 3: give one number per stage"],
    );
    folder.refuses(&with(&["--balance", "three"]), &["use cost, uniform, or layers per stage"]);
    folder
        .refuses(&with(&["--stages", "7"]), &["7 stages need at least 7 layers, the model has 6"]);
    fs::write(folder.path("table.toml"), "[trian]\nsteps = 2\n").unwrap();
    folder.refuses(
        &["train", "table.toml"],
        &["table.toml: there is no table [trian]: did you mean [train]?"],
    );
    let both = ["eval", "run", "--weights", "other.safetensors"];
    folder.refuses(&both, &["--weights", "cannot be used with"]);
    let whole = "give a whole number, 0 or more";
    folder.refuses(&with(&["--stages", "two"]), &["--stages", whole]);
    folder.refuses(&with(&["--seed", "-1"]), &["--seed", whole]);
    // Before any text is looked for.
    let without = |flag| ["train", "tiny.toml", "--text", "none.txt", flag, "0"];
    folder.refuses(&without("--stages"), &["--stages 0: use at least one stage"]);
    folder.refuses(&without("--micro-batches"), &["--micro-batches 0: use at least 1"]);
    folder.refuses(&with(&["--threads-per-stage", "0"]), &["0 threads per stage"]);
    folder.refuses(&with(&["--steps", "0"]), &["--steps 0", "at least 1"]);
    folder.refuses(
        &with(&["--set", "model.heads=3"]),
        &["[model] transformer: features = 16 is no multiple of heads = 3"],
    );
    folder.refuses(&with(&["--set", "model.dropout=1.5"]), &["probability"]);
    folder.refuses(
        &with(&["--set", "optimizer.name=adagrad"]),
        &["'adagrad' is not one of adam, adamw, sgd, rmsprop, adafactor"],
    );
    folder.refuses(
        &with(&["--set", "optimizer.adam.beta1=1.0"]),
        &["adam: beta1 = 1: use at least 0 and less than 1"],
    );
}

#[test]
fn fault_text_that_cannot_be_used_is_named() {
    let folder = Folder::new();
    fs::write(folder.path("empty.txt"), "").unwrap();
    fs::write(folder.path("latin1.txt"), b"caf\xe9 ".repeat(1000)).unwrap();
    fs::write(folder.path("short.txt"), "two words\n").unwrap();
    folder.refuses(&["train", "tiny.toml", "--text", "empty.txt"], &["empty.txt"]);
    folder.refuses(&["train", "tiny.toml", "--text", "latin1.txt"], &["latin1.txt", "UTF-8"]);
    folder.refuses(&["train", "tiny.toml", "--text", "short.txt"], &["token"]);
    folder.refuses(&["train", "tiny.toml", "--text", "missing.txt"], &["missing.txt"]);
    // Without --text and without cargo's sources.
    folder.refuses(
        &["train", "tiny.toml"],
        &["name the data", "--text PATH", "configs/text/Cargo.lock"],
    );
}

#[test]
fn fault_a_run_that_fails_says_where_and_overwrites_nothing() {
    let folder = Folder::new();
    let text = ["train", "tiny.toml", "--text", "text.txt"];
    let with = |more: &[&'static str]| [&text[..], more].concat();
    folder.refuses(
        &with(&["--memory", "1KiB", "--out", "a"]),
        &["out of memory", "cap 1.0 KiB", "device 0"],
    );
    folder.refuses(
        &with(&["--memory", "100KiB", "--out", "b"]),
        &["stage ", "layer '", "out of memory", "held, cap 100.0 KiB", "raise the cap"],
    );
    folder.refuses(
        &with(&["--set", "optimizer.lr=1e30", "--set", "optimizer.name=sgd", "--out", "c"]),
        &["stage ", "micro-batch ", "layer '", "not finite", "nothing was updated"],
    );
    folder.train(&["--out", "run"]);
    let before = bytes(&folder.path("run/metrics.jsonl"));
    folder.refuses(&with(&["--out", "run"]), &["already holds a run"]);
    assert_eq!(bytes(&folder.path("run/metrics.jsonl")), before);
    folder.train(&[]);
    folder.train(&[]);
    assert!(folder.path("out/tiny/metrics.jsonl").exists());
    assert!(
        folder.path("out/tiny-2/metrics.jsonl").exists(),
        "a second run gets a folder of its own"
    );
}
