//! Going on from a checkpoint. Families: `oracle_` (where a run goes on, and what it tells),
//! `transparency_` (as if it had not been interrupted, bit for bit), `fault_` (what it cannot go on
//! from), `regression_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{fs, path::Path};

use common::{Folder, TRAIN, bytes, process::Process, results, steps, train};

/// Some steps at a rate that does not depend on their number, and a checkpoint after every second.
fn constant<'a>(out: &'a str, steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let own = ["--checkpoint-every", "2", "--steps", steps, "--out", out];
    let rate = ["--set", "optimizer.decay=constant", "--set", "optimizer.warmup_steps=2"];
    [&TRAIN[..4], &own, &TRAIN[8..], &rate, more].concat()
}

/// A run that was killed while it wrote its second checkpoint: the one of step 4 is complete.
fn killed(folder: &Folder, out: &str) {
    let mut command = folder.command(&train(out, &[]));
    let mut process = Process::start(command.env("GPIPE_TEST_KILL_AT_FILE_OPERATION", "50"));
    assert_eq!(process.end(), Err(9), "{}", process.printed);
    assert_eq!(steps(folder, out), [4]);
}

/// Changes one byte in the middle of a file.
fn damage(path: &Path) {
    let mut content = bytes(path);
    let middle = content.len() / 2;
    content[middle] ^= 1;
    fs::write(path, content).unwrap();
}

#[test]
fn transparency_a_run_goes_on_from_whatever_names_its_checkpoint() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &[]));
    killed(&folder, "killed");
    for (run, below) in [
        ("a", ""),
        ("b", "/"),
        ("c", "/checkpoints"),
        ("d", "/checkpoints/latest"),
        ("e", "/checkpoints/step-00000004"),
    ] {
        folder.copy("killed", run);
        let path = format!("{run}{below}");
        // With the configuration and flags given again, and with those that were saved.
        let printed = match run {
            "b" | "e" => folder.succeeds(&[TRAIN, &["--resume", &path, "--stages", "1"]].concat()),
            _ => folder.succeeds(&["train", "--resume", &path, "--stages", "3"]),
        };
        assert!(printed.starts_with(&format!("resuming {run}/checkpoints/")), "{printed}");
        assert!(printed.contains(": step 4, 224 tokens\n"), "{printed}");
        assert!(printed.contains(&format!("files: {run}\n")), "{printed}");
        assert!(folder.weights(run) == folder.weights("reference"), "{path}");
        assert_eq!(results(&folder.path(run)), results(&folder.path("reference")), "{path}");
    }
    // By an absolute path and from elsewhere.
    fs::create_dir(folder.path("elsewhere")).unwrap();
    folder.copy("killed", "f");
    let (run, text) = (folder.path("f").display().to_string(), folder.path("text.txt"));
    let arguments = ["train", "--resume", &run, "--text", text.to_str().unwrap()];
    let mut command = folder.command(&arguments);
    let mut process = Process::start(command.current_dir(folder.path("elsewhere")));
    assert_eq!(process.end(), Ok(0), "{}", process.printed);
    assert!(folder.weights("f") == folder.weights("reference"));

    for (nothing, reason) in [
        ("none", "there is no such folder"),
        ("elsewhere", "there is no checkpoint in it"),
        ("text.txt", "it is a file: give the folder of a run or a checkpoint"),
    ] {
        folder.refuses(&["train", "--resume", nothing], &[nothing, reason]);
    }
}

#[test]
fn oracle_changes_of_the_configuration_are_told_key_by_key() {
    let folder = Folder::new();
    killed(&folder, "run");
    let changes = [
        ("pipeline.stages=3", "pipeline.stages: 2 -> 3 (changes no result)"),
        ("pipeline.balance=2,1,1", r#"pipeline.balance: "cost" -> "2,1,1" (changes no result)"#),
        ("pipeline.schedule=gpipe", r#"pipeline.schedule: "1f1b" -> "gpipe" (changes no result)"#),
        ("pipeline.micro_batches=2", "pipeline.micro_batches: 3 -> 2 (changes the last bits)"),
        ("model.dropout=0.2", "model.dropout: 0.1 -> 0.2 (from here on)"),
        ("optimizer.lr=0.01", "optimizer.lr: 0.001 -> 0.01 (from here on)"),
        ("optimizer.name=adamw", r#"optimizer.name: "adam" -> "adamw" (from here on)"#),
        ("optimizer.average=0.9", "optimizer.average: 0.0 -> 0.9 (from here on)"),
        ("train.mini_batch=8", "train.mini_batch: 7 -> 8 (from here on)"),
        ("train.validate_every=5", "train.validate_every: 0 -> 5 (changes no result)"),
        ("checkpoint.keep=1", "checkpoint.keep: 2 -> 1 (changes no result)"),
    ];
    let mut arguments = vec!["train", "--resume", "run"];
    arguments.extend(changes.iter().flat_map(|(set, _)| ["--set", set]));
    let printed = folder.succeeds(&arguments);
    for (_, line) in changes {
        assert!(printed.contains(&format!("\n  {line}\n")), "'{line}': {printed}");
    }
    let told = printed.lines().filter(|line| line.contains(" -> ")).count();
    assert_eq!(told, changes.len(), "{printed}");
    assert_eq!(steps(&folder, "run"), [12], "checkpoint.keep holds");
    assert!(folder.path("run/averages.safetensors").exists());
    let now = fs::read_to_string(folder.path("run/config.toml")).unwrap();
    assert!(
        now.contains("mini_batch = 8"),
        "the run's configuration is the one that it ended with"
    );
}

#[test]
fn fault_changes_that_the_state_is_of_no_use_with_are_refused_all_at_once() {
    let folder = Folder::new();
    killed(&folder, "run");
    let set = [
        "model.hidden=16",
        "data.sequence=4",
        "optimizer.name=sgd",
        "pipeline.dtype=float64",
        "seed=3",
    ];
    let mut arguments = train("run", &["--resume", "auto"]);
    arguments.extend(set.iter().flat_map(|set| ["--set", set]));
    let all = [
        "model.hidden cannot change from 32 to 16",
        "data.sequence cannot change from 8 to 4",
        r#"optimizer.name cannot change from "adam" to "sgd""#,
        r#"pipeline.dtype cannot change from "float32" to "float64""#,
        "seed cannot change from 0 to 3",
        "--init takes its weights",
    ];
    folder.refuses(&arguments, &all);
    for set in set {
        folder.refuses(&["train", "--resume", "run", "--set", set], &[" cannot change from "]);
    }
    assert_eq!(steps(&folder, "run"), [4]);

    // One kind of optimizer that keeps something else.
    folder.succeeds(&train("sgd", &["--set", "optimizer.name=sgd"]));
    let momentum = ["train", "--resume", "sgd", "--set", "optimizer.sgd.momentum=0.9"];
    folder.refuses(&momentum, &["optimizer.sgd.momentum cannot change", "momentum adds state"]);
}

#[test]
fn fault_another_training_text_is_refused_and_leaves_no_folder() {
    let folder = Folder::new();
    killed(&folder, "run");
    let text = fs::read_to_string(folder.path("text.txt")).unwrap();
    fs::write(folder.path("other.txt"), text.replacen("stage", "stags", 1)).unwrap();
    let parts = ["the training data differ from those of run/checkpoints/step-00000004", "--init"];
    folder.refuses(&["train", "--resume", "run", "--text", "other.txt"], &parts);
    let fork = ["train", "--resume", "run", "--out", "fork", "--text", "other.txt"];
    folder.refuses(&fork, &parts);
    assert!(!folder.path("fork").exists(), "or the next try would find a run in it");
    // The same text in another file is the same text.
    fs::write(folder.path("copy.txt"), text).unwrap();
    let printed = folder.succeeds(&["train", "--resume", "run", "--text", "copy.txt"]);
    let line = r#"  data.text: ["text.txt"] -> ["copy.txt"] (the training data must be the same)"#;
    assert!(printed.contains(line), "{printed}");
    folder.succeeds(&train("reference", &[]));
    assert!(folder.weights("run") == folder.weights("reference"));
}

#[test]
fn oracle_a_larger_mini_batch_goes_on_at_the_next_sample() {
    let folder = Folder::new();
    // Nothing is learnt, so that a loss depends on the samples alone.
    let still = ["--set", "optimizer.lr=0", "--set", "model.dropout=0"];
    folder.succeeds(&constant("run", "4", &still));
    folder.succeeds(&["train", "--resume", "run", "--steps", "6", "--set", "train.mini_batch=14"]);
    let large = [&still[..], &["--set", "train.mini_batch=14"]].concat();
    folder.succeeds(&constant("large", "4", &large));
    let of = |run: &str, step: usize| {
        let lines = folder.lines(run);
        let steps: Vec<_> = lines.iter().filter(|line| line["kind"] == "step").cloned().collect();
        steps[step - 1].clone()
    };
    for (step, same) in [(5, 3), (6, 4)] {
        let (run, large) = (of("run", step), of("large", same));
        assert_eq!(run["samples_total"], large["samples_total"]);
        assert_eq!(run["loss"], large["loss"], "step {step}");
    }
    assert_ne!(of("run", 5)["loss"], of("run", 6)["loss"], "or every sample has the same loss");
}

#[test]
fn transparency_more_steps_are_trained_and_none_are_trained_twice() {
    let folder = Folder::new();
    let more = ["--set", "train.validate_every=2", "--set", "optimizer.average=0.9"];
    folder.succeeds(&constant("reference", "8", &more));
    folder.succeeds(&constant("run", "4", &more));
    let ended = [folder.weights("run"), bytes(&folder.path("run/averages.safetensors"))];
    // Nothing is left to train: the files are written all the same.
    for file in ["weights.safetensors", "averages.safetensors"] {
        fs::remove_file(folder.path("run").join(file)).unwrap();
    }
    for resume in ["run", "auto"] {
        let printed = match resume {
            "run" => folder.succeeds(&["train", "--resume", "run"]),
            _ => {
                folder.succeeds(&constant("run", "4", &[&more[..], &["--resume", "auto"]].concat()))
            }
        };
        assert!(printed.contains("all 4 steps are done: --steps 8 goes on to step 8"), "{printed}");
        let again = [folder.weights("run"), bytes(&folder.path("run/averages.safetensors"))];
        assert!(again == ended, "{resume}");
    }
    folder.succeeds(&["train", "--resume", "run", "--steps", "8"]);
    assert!(folder.weights("run") == folder.weights("reference"));
    assert_eq!(results(&folder.path("run")), results(&folder.path("reference")));
    assert_eq!(steps(&folder, "run"), [6, 8]);

    // Regression: step 6 was proposed, which the run has passed.
    let printed = folder.succeeds(&["train", "--resume", "run", "--steps", "3"]);
    let expected = "all 3 steps are done (the run is at step 8): --steps 16 goes on to step 16";
    assert!(printed.contains(expected), "{printed}");
}

#[test]
fn regression_a_validation_that_was_left_out_is_recorded_once() {
    // It was recorded by the process that made it, kept by the next one, which made it again.
    let folder = Folder::new();
    // After step 4, without a validation there, which the configuration now asks for.
    killed(&folder, "run");
    let arguments = train("run", &["--resume", "auto", "--set", "train.validate_every=4"]);
    let mut command = folder.command(&arguments);
    let mut process = Process::start(command.env("GPIPE_TEST_KILL_AT_FILE_OPERATION", "5"));
    assert_eq!(process.end(), Err(9), "{}", process.printed);
    let evaluations = || -> Vec<_> {
        let lines = folder.lines("run").into_iter();
        lines.filter(|line| line["kind"] == "evaluation").map(|line| line["step"].clone()).collect()
    };
    assert_eq!(evaluations()[0], 4);
    folder.succeeds(&arguments);
    assert_eq!(evaluations(), [4, 8, 12]);
}

#[test]
fn fault_damaged_checkpoints_are_passed_over_with_the_reason() {
    let folder = Folder::new();
    folder.succeeds(&constant("reference", "8", &[]));
    folder.succeeds(&constant("run", "6", &["--keep", "3"]));
    assert_eq!(steps(&folder, "run"), [2, 4, 6]);
    let file = |step: u64, name: &str| format!("run/checkpoints/step-{step:08}/{name}");
    let weights = file(6, "0000-embedding.parameters.safetensors");
    damage(&folder.path(&weights));

    // Named, it is refused; looked for, it is passed over.
    folder.refuses(&["train", "--resume", "run/checkpoints/latest"], &["embedding", "SHA-256"]);
    folder.copy("run", "named");
    for (run, auto) in [("named", false), ("run", true)] {
        let output = match auto {
            false => folder.gpipe(&["train", "--resume", run, "--steps", "8"]),
            true => folder.gpipe(&constant(run, "8", &["--resume", "auto"])),
        };
        let [printed, warned] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(output.status.success(), "{warned}");
        let skipped = format!("gpipe: warning: skipped {}", file(6, "").trim_end_matches('/'));
        let line = warned.lines().next().unwrap();
        assert!(line.starts_with(&skipped.replace("run/", &format!("{run}/"))), "{line}");
        assert!(line.contains("0000-embedding.parameters.safetensors: "), "{line}");
        assert!(printed.contains(&format!("resuming {run}/checkpoints/step-00000004: ")));
        assert!(folder.weights(run) == folder.weights("reference"));
        assert_eq!(results(&folder.path(run)), results(&folder.path("reference")));
        assert!(folder.succeeds(&["inspect", run]).contains("step-00000006: step 6, 336 tokens, "));
    }

    // All of them: one cut off, one without a file, one with a manifest that is none.
    let all = folder.succeeds(&["inspect", "run/checkpoints"]).lines().count();
    assert_eq!((all, steps(&folder, "run")), (2, vec![6, 8]));
    fs::remove_file(folder.path(&file(6, "0003-head.optimizer.safetensors"))).unwrap();
    fs::write(folder.path(&file(8, "manifest.json")), "{").unwrap();
    let parts = ["step-00000008", "manifest.json", "step-00000006", "head.optimizer", "missing"];
    folder.refuses(&["train", "--resume", "run"], &parts);
    let auto = constant("run", "9", &["--resume", "auto"]);
    folder.refuses(&auto, &["no checkpoint in run is complete", "remove run to start"]);
    folder.refuses(&["inspect", "run"], &["2 of 2 checkpoints are damaged"]);
}

#[test]
fn oracle_an_older_checkpoint_goes_on_elsewhere() {
    let folder = Folder::new();
    folder.succeeds(&constant("run", "6", &["--keep", "3"]));
    let older = "run/checkpoints/step-00000002";
    let before = bytes(&folder.path("run/metrics.jsonl"));
    let remedy = ["run holds a later checkpoint", "step-00000006", "--out", "remove"];
    folder.refuses(&["train", "--resume", older], &remedy);
    folder.refuses(&["train", "--resume", older, "--out", "run"], &remedy);

    folder.succeeds(&["train", "--resume", older, "--out", "fork"]);
    assert!(folder.weights("fork") == folder.weights("run"));
    assert_eq!(results(&folder.path("fork")), results(&folder.path("run")), "with what was before");
    assert_eq!(steps(&folder, "fork"), [2 + 2, 6]);
    assert_eq!(steps(&folder, "run"), [2, 4, 6]);
    assert!(bytes(&folder.path("run/metrics.jsonl")) == before);
    folder.refuses(&["train", "--resume", older, "--out", "fork"], &["fork already holds a run"]);

    // A checkpoint that lies in no run's folder.
    folder.copy("run/checkpoints/step-00000002", "alone");
    folder.refuses(&["train", "--resume", "alone"], &["alone lies in no run's folder", "--out"]);
    folder.succeeds(&["train", "--resume", "alone", "--out", "from-alone"]);
    assert!(folder.weights("from-alone") == folder.weights("run"));
}

#[test]
fn regression_a_fork_has_a_checkpoint_of_its_own_even_if_nothing_was_trained() {
    // What it was forked from counted as its own: it said that its state was saved, and it was not.
    let folder = Folder::new();
    folder.succeeds(&constant("run", "4", &[]));
    folder.succeeds(&["train", "--resume", "run", "--out", "ended"]);
    assert_eq!(steps(&folder, "ended"), [4]);
    let out_of_memory =
        ["train", "--resume", "run", "--out", "fork", "--steps", "8", "--memory", "80KiB"];
    let saved = "the state after step 4 is saved; to continue: gpipe train --resume fork";
    folder.refuses(&out_of_memory, &[saved, "layer '", "out of memory"]);
    assert_eq!(steps(&folder, "fork"), [4]);
    folder.succeeds(&["train", "--resume", "fork", "--memory", "none"]);
    folder.succeeds(&constant("reference", "8", &[]));
    assert!(folder.weights("fork") == folder.weights("reference"));
}

#[test]
fn regression_the_best_checkpoint_may_be_the_last() {
    // The last one was saved before the validation at the end, and `best` led to the one before.
    let folder = Folder::new();
    let best = ["--keep-best", "--set", "train.validate_every=4", "--set", "optimizer.lr=0.01"];
    folder.succeeds(&constant("run", "8", &best));
    let losses: Vec<f64> = folder
        .lines("run")
        .iter()
        .filter(|l| l["kind"] == "evaluation")
        .map(|l| l["loss"].as_f64().unwrap())
        .collect();
    assert!(losses.len() == 2 && losses[1] < losses[0], "{losses:?}");
    let link = fs::read_link(folder.path("run/checkpoints/best")).unwrap();
    assert_eq!(link, Path::new("step-00000008"));
    // One that is not the last is kept although others are newer.
    folder.succeeds(&["train", "--resume", "run", "--steps", "16", "--set", "optimizer.lr=10"]);
    assert_eq!(fs::read_link(folder.path("run/checkpoints/best")).unwrap(), link);
    assert_eq!(steps(&folder, "run"), [8, 14, 16]);
    let shown = folder.succeeds(&["inspect", "run"]);
    assert!(shown.lines().next().unwrap().ends_with(", complete, the best so far"), "{shown}");
}

#[test]
fn regression_the_best_checkpoint_is_kept_from_a_resume_on() {
    // Nothing was kept until a loss was below one whose checkpoint had not been kept.
    let folder = Folder::new();
    folder.succeeds(&constant(
        "run",
        "4",
        &["--set", "train.validate_every=2", "--set", "optimizer.lr=0.01"],
    ));
    folder.succeeds(&["train", "--resume", "run", "--steps", "16", "--set", "optimizer.lr=10"]);
    let best = folder.path("run/checkpoints/best");
    assert!(fs::read_link(&best).is_err() && !steps(&folder, "run").contains(&4));
    let resume = ["train", "--resume", "run", "--steps", "20", "--keep-best"];
    folder.succeeds(&[&resume[..], &["--set", "optimizer.lr=0.01"]].concat());
    let kept = fs::read_link(best).unwrap();
    assert!(folder.path("run/checkpoints").join(kept).is_dir());
}

#[test]
fn regression_a_run_that_goes_on_has_no_weights_of_its_end() {
    // `eval` took those of the earlier end for the run's.
    let folder = Folder::new();
    folder.succeeds(&constant("run", "4", &["--set", "optimizer.average=0.9"]));
    let mut command = folder.command(&["train", "--resume", "run", "--steps", "8"]);
    let mut process = Process::start(command.env("GPIPE_TEST_KILL_AT_FILE_OPERATION", "5"));
    assert_eq!(process.end(), Err(9), "{}", process.printed);
    assert!(!folder.path("run/weights.safetensors").exists());
    assert!(!folder.path("run/averages.safetensors").exists());
    let output = folder.gpipe(&["eval", "run"]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("the run has not ended: this is its checkpoint"), "{errors}");
    // Where nothing is left to train, they stay until they are written anew.
    folder.succeeds(&["train", "--resume", "run"]);
    assert!(folder.path("run/averages.safetensors").exists());
}

#[test]
fn fault_a_folder_is_for_one_run_and_one_process() {
    let folder = Folder::new();
    folder.succeeds(&constant("used", "2", &[]));
    folder.refuses(&constant("used", "2", &[]), &["used already holds a run", "--resume"]);

    let mut command = folder.command(&constant("busy", "100", &["--resume", "auto"]));
    let mut first = Process::start(command.env("GPIPE_TEST_FILE_DELAY_MS", "100"));
    first.until("step 1/100");
    let busy = ["another process is training in busy", "let it end, or give another --out"];
    folder.refuses(&constant("busy", "100", &["--resume", "auto"]), &busy);
    folder.refuses(&constant("busy", "100", &[]), &["busy already holds a run"]);
    assert_eq!(first.kill(), Err(9));
    // Nothing of the lock is left.
    folder.succeeds(&constant("busy", "2", &["--resume", "auto"]));

    fs::write(folder.path("file"), "").unwrap();
    folder.refuses(&constant("file", "2", &[]), &["file"]);
    folder.refuses(&constant("file", "2", &["--resume", "auto"]), &["file: ", "irectory"]);
    folder.refuses(&constant("file/run", "2", &["--resume", "auto"]), &["file/run: ", "irectory"]);
}

#[test]
fn fault_settings_of_checkpoints_that_make_no_sense_are_refused() {
    let folder = Folder::new();
    let refuses = |more: &[&str], parts: &[&str]| {
        folder.refuses(&[&TRAIN[..4], more].concat(), parts);
        assert!(!folder.path("out/tiny").exists(), "{more:?}");
    };
    for every in ["0", "soon", "0min", "-3", "5 parsecs", ""] {
        let value = format!("--checkpoint-every={every}");
        refuses(
            &[&value],
            &["--checkpoint-every", "neither steps (50) nor time (10min, 90s, 2h) nor none"],
        );
    }
    refuses(&["--set", "checkpoint.every=0"], &["checkpoint", "every"]);
    refuses(&["--keep", "0"], &["--keep 0: keep at least 1"]);
    refuses(&["--keep-best"], &["--keep-best", "set train.validate_every"]);
    refuses(
        &["--set", "train.validation_tokens=0"],
        &["train.validation_tokens", "a run validates when it ends"],
    );
    refuses(&["--on-nan", "ignore"], &["--on-nan", "is not one of stop, skip"]);
}

/// A run replaced files of the user's own: the configuration in `--out .`, the tokenizer of a
/// model's folder with `--resume auto`.
#[test]
fn regression_files_that_no_run_wrote_are_left_alone() {
    let folder = Folder::new();
    let mine = |name: &str, file: &str| {
        fs::create_dir_all(folder.path(name)).unwrap();
        fs::write(folder.path(name).join(file), "mine").unwrap();
    };
    mine("configured", "config.toml");
    mine("tokenized", "tokenizer.json");
    mine("model", "config.json");
    mine("model", "model.safetensors");
    for (name, told) in [
        ("configured", "configured has a config.toml of its own"),
        ("tokenized", "tokenized has a tokenizer.json of its own"),
        ("model", "model is a model's folder"),
    ] {
        let before = fs::read_dir(folder.path(name)).unwrap().count();
        folder.refuses(&constant(name, "2", &[]), &[told, "give another --out"]);
        folder.refuses(&constant(name, "2", &["--resume", "auto"]), &[told]);
        assert_eq!(fs::read_dir(folder.path(name)).unwrap().count(), before);
    }
}

#[test]
fn oracle_a_run_without_checkpoints_leaves_none() {
    let folder = Folder::new();
    let mut arguments = constant("run", "4", &[]);
    arguments[5] = "none";
    folder.succeeds(&arguments);
    assert_eq!(fs::read_dir(folder.path("run/checkpoints")).unwrap().count(), 0);
    arguments.extend(["--resume", "auto"]);
    folder.refuses(&arguments, &["run holds a run that has ended and has no checkpoints"]);
    assert!(folder.path("run/weights.safetensors").exists());
}
