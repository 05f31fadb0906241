//! Files of a run that are damaged, cut or gone, and that stop growing at a limit. Family
//! `regression_`: each was found by someone else, and passed for a whole run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{fs, net::TcpListener, path::Path, process::Command};

use common::{
    Folder, TRAIN, bytes,
    process::{Process, output},
    train,
};
use gpipe_checkpoint::{
    tensor_file::{TensorFile, encode},
    weights,
};

/// Changes one bit of a file, so many bytes before its end.
fn flip(path: &Path, before_end: usize) {
    let mut content = bytes(path);
    let at = content.len() - before_end;
    content[at] ^= 1;
    fs::write(path, content).unwrap();
}

/// A flipped bit in weights or averages passed `inspect`, `eval` and `export`: they had no digest,
/// and `inspect RUN` did not read them.
#[test]
fn regression_a_flipped_bit_of_weights_is_found_by_whoever_reads_them() {
    let folder = Folder::new();
    folder.succeeds(&train("run", &["--set", "optimizer.average=0.9"]));
    let shown = folder.succeeds(&["inspect", "run"]);
    for name in ["weights", "averages"] {
        let line = shown.lines().find(|line| line.contains(&format!("run/{name}.safetensors")));
        assert!(line.unwrap().ends_with(", complete"), "{shown}");
    }
    let file = folder.succeeds(&["inspect", "run/weights.safetensors"]);
    assert!(file.ends_with("complete: all 16 tensors are as they were written (SHA-256)\n"));

    folder.copy("run", "flipped");
    for name in ["weights", "averages"] {
        flip(&folder.path(&format!("flipped/{name}.safetensors")), 7);
    }
    let refuses = |arguments: &[&str], name: &str| {
        folder.refuses(arguments, &[name, ": its SHA-256 is ", "the header says"]);
    };
    let weights = "flipped/weights.safetensors";
    refuses(&["inspect", weights], weights);
    refuses(&["eval", "flipped"], weights);
    refuses(&["eval", "flipped", "--averages"], "flipped/averages.safetensors");
    refuses(&["generate", "flipped", "--prompt", "stage", "--tokens", "2"], weights);
    refuses(&["export", "flipped", "--out", "out.safetensors"], weights);
    refuses(&["export", "flipped", "--averages", "--out", "out.safetensors"], "averages");
    refuses(&train("new", &["--init", "flipped"]), weights);
    let import = ["--config", "run/config.toml", "--out", "out.safetensors"];
    refuses(&[&["import", weights], &import[..]].concat(), weights);
    assert!(!folder.path("out.safetensors").exists());
    let output = folder.gpipe(&["inspect", "flipped"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().filter(|line| line.contains(": DAMAGED: ")).count(), 2, "{text}");
    folder.refuses(&["inspect", "flipped"], &["2 of 2 files of weights are damaged"]);
    let output = folder.gpipe(&["inspect", weights, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["digests"], &told["complete"]), (&true.into(), &false.into()));

    // In the header, where it says what the tensors are.
    let whole = bytes(&folder.path("run/weights.safetensors"));
    let text = String::from_utf8_lossy(&whole).into_owned();
    for part in ["\"head.norm.weight\":{", "\"F32\"", "[278,16]"] {
        let mut changed = whole.clone();
        changed[text.find(part).unwrap() + 2] ^= 1;
        fs::write(folder.path(weights), changed).unwrap();
        folder.refuses(&["eval", "flipped"], &[weights]);
        folder.refuses(&["inspect", "flipped"], &["files of weights are damaged"]);
    }
}

#[test]
fn oracle_weights_without_digests_are_taken_and_said_to_have_none() {
    let folder = Folder::new();
    folder.succeeds(&train("run", &[]));
    let path = folder.path("run/weights.safetensors");
    let tensors = weights::load(&path).unwrap();
    let plain = encode(&tensors, TensorFile::open(&path).unwrap().metadata()).unwrap();
    fs::write(&path, plain).unwrap();
    for shown in ["run", "run/weights.safetensors"] {
        let text = folder.succeeds(&["inspect", shown]);
        assert!(text.contains("it has no digests"), "{text}");
    }
    folder.succeeds(&["eval", "run", "--tokens", "100"]);
    folder.succeeds(&["export", "run", "--out", "out.safetensors"]);
    assert!(TensorFile::open(&folder.path("out.safetensors")).unwrap().has_digests());
    // A file whose header is blanks and no tensors once counted as one.
    let header = "{}".to_owned() + &" ".repeat(62);
    let empty = [&64u64.to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(folder.path("empty.safetensors"), empty).unwrap();
    folder.refuses(&["inspect", "empty.safetensors"], &["empty.safetensors", "no tensors"]);
    let blanks = [&64u64.to_le_bytes()[..], " ".repeat(64).as_bytes()].concat();
    fs::write(folder.path("blanks.safetensors"), blanks).unwrap();
    folder
        .refuses(&["inspect", "blanks.safetensors"], &["blanks.safetensors", "not a safetensors"]);
}

/// A run that would last longer than any test.
fn endless<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&TRAIN[..4], &["--steps", "100000", "--out", out], &TRAIN[8..], more].concat()
}

/// A run whose folder was removed made it again, and ended with exit code 0 without its history.
#[test]
fn regression_a_run_whose_folder_is_removed_ends_with_an_error() {
    let folder = Folder::new();
    for every in ["none", "1"] {
        let mut run =
            Process::start(&mut folder.command(&endless("run", &["--checkpoint-every", every])));
        run.until("step 1/100000");
        // The run may be writing a file there at the same time.
        while folder.path("run").exists() {
            let _ = fs::remove_dir_all(folder.path("run"));
        }
        assert_eq!(run.end(), Ok(1), "{}", run.printed);
        let told = "gpipe: run: the run's folder was removed or moved";
        let line = run.printed.lines().find(|line| line.contains(told)).unwrap_or_default();
        assert!(line.contains("is lost") && line.contains("--resume"), "{}", run.printed);
        assert!(!folder.path("run").exists(), "nothing is made in its place");
    }
}

/// A run whose folder was moved wrote into the folder that had its name since.
#[test]
fn regression_a_run_whose_folder_is_replaced_writes_nothing_into_the_other() {
    let folder = Folder::new();
    let every = ["--checkpoint-every", "1", "--keep", "3"];
    for processes in [1, 2] {
        let run = endless("run", &every);
        let launch = ["launch", "--processes", "2", "--"];
        let launch = if processes == 1 { &[][..] } else { &launch[..] };
        let mut command = folder.command(&[launch, &run[..]].concat());
        // A save is slow, and the folder is moved well before the tenth step, after which
        // `step.json` is written.
        let mut run = Process::start(command.env("GPIPE_TEST_FILE_DELAY_MS", "20"));
        run.until("saved step 2: run/checkpoints/step-00000002");
        fs::rename(folder.path("run"), folder.path("moved")).unwrap();
        fs::create_dir(folder.path("run")).unwrap();
        assert_eq!(run.end(), Ok(1), "{}", run.printed);
        let place = folder.path("moved").canonicalize().unwrap();
        let told = format!("run: the run's folder was moved to {}", place.display());
        assert!(run.printed.contains(&told), "{}", run.printed);
        assert_eq!(fs::read_dir(folder.path("run")).unwrap().count(), 0, "{}", run.printed);
        // What was finished is there, and goes on from there.
        folder.succeeds(&["inspect", "moved"]);
        let newest = gpipe_checkpoint::folder::newest(&folder.path("moved/checkpoints")).unwrap();
        let steps = newest.found.unwrap().manifest().progress.batches + 2;
        folder.succeeds(&["train", "--resume", "moved", "--steps", &steps.to_string()]);
        fs::remove_dir_all(folder.path("moved")).unwrap();
        fs::remove_dir(folder.path("run")).unwrap();
    }
}

/// A file that reached `ulimit -f` ended the run by SIGXFSZ, without a word and without its state.
#[test]
fn regression_a_limit_on_the_size_of_files_is_an_error_of_writing() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &[]));
    // Room for the tokenizer and the configuration, and not for the weights.
    let size = |name: &str| fs::metadata(folder.path("reference").join(name)).unwrap().len();
    let limit = size("tokenizer.json").max(size("config.toml")).div_ceil(1024) + 1;
    assert!(limit * 1024 < size("weights.safetensors"));
    let limited = format!("ulimit -f {limit}; exec \"$@\"");
    for (out, launch) in [("alone", &[][..]), ("two", &["launch", "--processes", "2", "--"][..])] {
        let gpipe = folder.command(&[launch, &train(out, &[])[..]].concat());
        let mut command = Command::new("bash");
        command.args(["-c", &limited, "bash"]).arg(gpipe.get_program()).args(gpipe.get_args());
        command.current_dir(folder.path(""));
        let ran = output(&mut command);
        let errors = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(1), "{:?}: {errors}", ran.status);
        let printed = String::from_utf8_lossy(&ran.stdout);
        assert!(printed.contains("step 12/12"), "all steps are trained: {printed}{errors}");
        for part in ["a checkpoint was not saved", "File too large", "(ulimit -f)"] {
            assert!(errors.contains(part), "'{part}' is not in: {errors}");
        }
        assert!(!folder.path(out).join("weights.safetensors").exists());
        // Without the limit it goes on, from the beginning or from what there was room for.
        folder.succeeds(&train(out, &["--resume", "auto"]));
        assert!(folder.weights(out) == folder.weights("reference"));
    }
}

/// Metrics that were emptied or cut were continued, and the curves of the run had a hole that
/// nobody told of.
#[test]
fn regression_metrics_that_were_cut_are_told_before_a_run_goes_on() {
    let folder = Folder::new();
    folder.succeeds(&train("run", &[]));
    let whole = fs::read_to_string(folder.path("run/metrics.jsonl")).unwrap();
    let lines: Vec<&str> = whole.split_inclusive('\n').collect();
    let resume = ["train", "--resume", "run", "--steps", "14"];
    let auto = train("run", &["--resume", "auto"]);
    for (kept, found) in [(0, "of 0 steps"), (5, "of 5 steps"), (11, "of 11 steps")] {
        fs::write(folder.path("run/metrics.jsonl"), lines[..kept].concat()).unwrap();
        for command in [&resume[..], &auto, &[&resume[..], &["--out", "fork"]].concat()] {
            let parts = ["run/metrics.jsonl", found, "the 12 that were written", "remove it"];
            folder.refuses(command, &parts);
        }
        assert!(!folder.path("fork").exists());
        assert!(folder.path("run/weights.safetensors").exists(), "it was not begun");
    }
    // Lines that are missing in the middle are missing, too.
    fs::write(folder.path("run/metrics.jsonl"), [&lines[..4], &lines[6..]].concat().concat())
        .unwrap();
    folder.refuses(&resume, &["of 10 steps"]);
    // Removed, they begin again, which is said; whole, they go on.
    folder.copy("run", "bare");
    fs::remove_file(folder.path("bare/metrics.jsonl")).unwrap();
    let printed = folder.succeeds(&["train", "--resume", "bare", "--steps", "14"]);
    assert!(printed.contains("there is no bare/metrics.jsonl"), "{printed}");
    assert_eq!(folder.lines("bare")[0]["step"], 13);
    folder.succeeds(&["train", "--resume", "bare", "--steps", "16"]);
    fs::write(folder.path("run/metrics.jsonl"), &whole).unwrap();
    folder.succeeds(&resume);
    assert_eq!(folder.lines("run").len(), 14 + 2, "two evaluations, each at an end");
}

/// Ranks that were given different folders wrote into that of rank 0, with exit code 0.
#[test]
fn regression_ranks_that_are_told_different_things_are_refused() {
    let folder = Folder::new();
    let both = |arguments: [&[&str]; 2]| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        drop(listener);
        let start = |rank: usize| {
            let limit = ["--set", "pipeline.timeout_s=20"];
            let mut command = folder.command(&[arguments[rank], &limit].concat());
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            Process::start(&mut command)
        };
        let mut all = [start(0), start(1)];
        let ends = all.each_mut().map(Process::end);
        (ends, all.map(|process| process.printed.clone()))
    };
    let refuses = |arguments: [&[&str]; 2], part: &str| {
        let (ends, printed) = both(arguments);
        assert_eq!(ends, [Ok(1), Ok(1)], "{printed:?}");
        assert!(printed.iter().all(|printed| printed.contains(part)), "'{part}': {printed:?}");
    };
    let (one, other) = (train("one", &[]), train("other", &[]));
    refuses([&one, &other], "rank 1: --out is other, but one on rank 0");
    assert!(!folder.path("one").exists() && !folder.path("other").exists());
    folder.succeeds(&one);
    let (init, none) = (train("new", &["--init", "one"]), train("new", &[]));
    refuses([&init, &none], "rank 1: --init is none, but one on rank 0");
    folder.copy("one", "copy");
    let eval: [&[&str]; 2] = [&["eval", "one"], &["eval", "copy"]];
    refuses(eval, "rank 1: RUN_DIR is copy, but one on rank 0");
}
