//! The whole life of a run on simulated GPUs, whose every wait is checked: a report ends the
//! command. What comes out is the same, to the last bit, on one GPU, on several and in processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::process::{Command, Output};

use common::{Folder, process, train};

/// The command on two simulated GPUs.
fn command(folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = folder.command(arguments);
    command.env("GPIPE_SIMULATED_GPUS", "2").env("GPIPE_SIMULATED_GPU_MEMORY", "1GiB");
    command
}

/// Its output, after it succeeded. Every line says that no GPU was used.
fn succeeds(folder: &Folder, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = process::output(&mut command(folder, arguments));
    let errors = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{arguments:?}: {errors}");
    String::from_utf8(stdout).unwrap()
}

fn run<'a>(out: &'a str, device: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    train(out, &[&["--device", device, "--set", "train.validate_every=5"], more].concat())
}

#[test]
fn gpu_a_runs_whole_life_on_simulated_gpus() {
    let folder = Folder::new();
    let printed = succeeds(&folder, &run("one", "cuda:0", &[]));
    assert!(printed.lines().all(|line| line.starts_with("simulated: ")), "{printed}");
    for file in ["one/metrics.jsonl", "one/step.json"] {
        let text = std::fs::read_to_string(folder.path(file)).unwrap();
        assert!(text.contains("\"simulated_gpus\":true"), "{file}: {text}");
    }
    for (out, devices, more) in [
        ("two", "cuda:0,cuda:1", &[][..]),
        ("shared", "cuda:1,cuda:1", &["--schedule", "zb-h1"]),
        ("interleaved", "cuda:1,cuda:0", &["--schedule", "interleaved:2", "--remat", "always"]),
    ] {
        succeeds(&folder, &run(out, devices, more));
        assert!(folder.weights("one") == folder.weights(out), "{devices}: other weights");
    }
    // In processes, each with the GPU of its stage.
    let launched = [&["launch", "--processes", "2", "--"], &run("apart", "cuda:0,cuda:1", &[])[..]];
    succeeds(&folder, &launched.concat());
    assert!(folder.weights("one") == folder.weights("apart"), "in processes: other weights");
    // The same, from GPU to GPU. With re-materialization neighbours send before they receive.
    let more = ["--set", "pipeline.links=nccl", "--schedule", "zb-h1", "--remat", "always"];
    let launched =
        [&["launch", "--processes", "2", "--"], &run("joined", "cuda:0,cuda:1", &more)[..]];
    succeeds(&folder, &launched.concat());
    assert!(folder.weights("one") == folder.weights("joined"), "over NCCL: other weights");
    // On from a checkpoint, on other devices.
    let from = "two/checkpoints/step-00000008";
    succeeds(&folder, &["train", "--resume", from, "--out", "on", "--device", "cuda:1"]);
    assert!(folder.weights("one") == folder.weights("on"), "resumed: other weights");

    let evaluated = |device| succeeds(&folder, &["eval", "one", "--device", device]);
    let loss = |text: String| {
        let at = text.find("loss ").unwrap_or_else(|| panic!("{text}"));
        text[at..].split_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!(loss(evaluated("cuda:0")), loss(evaluated("cuda:1,cuda:0")));
    let written = |device| {
        succeeds(
            &folder,
            &["generate", "one", "--prompt", "stage", "--tokens", "8", "--device", device],
        )
    };
    assert_eq!(written("cuda:0"), written("cuda:0,cuda:1"));
    let generate = ["generate", "joined", "--prompt", "stage", "--tokens", "8"];
    let launched = [&["launch", "--processes", "2", "--no-prefix", "--"], &generate[..]].concat();
    assert_eq!(written("cuda:0"), succeeds(&folder, &launched));
}

#[test]
fn gpu_replicas_and_batch_norm_on_simulated_gpus() {
    let folder = Folder::new();
    let replicas = ["launch", "--processes", "2", "--"];
    let more = ["--replicas", "2"];
    let on = |out, device| [&replicas[..], &run(out, device, &more)[..]].concat();
    succeeds(&folder, &on("gpus", "cuda:0"));
    succeeds(&folder, &on("others", "cuda:1"));
    assert!(folder.weights("gpus") == folder.weights("others"));
    // Two replicas of two processes each, whose values pass from GPU to GPU.
    let more = ["--replicas", "2", "--set", "pipeline.links=nccl"];
    let joined = run("joined", "cuda:0,cuda:1", &more);
    succeeds(&folder, &[&["launch", "--processes", "4", "--"], &joined[..]].concat());
    assert!(folder.weights("gpus") == folder.weights("joined"));
}

#[test]
fn gpu_profiles_and_plans_on_simulated_gpus() {
    let folder = Folder::new();
    let planned = succeeds(&folder, &run("planned", "cuda:0,cuda:1", &["--plan", "auto"]));
    assert!(planned.contains("layers per stage"), "{planned}");
}

#[test]
fn fault_gpus_that_are_not_there_are_refused() {
    let folder = Folder::new();
    let refused = |more: &[(&str, &str)], device: &str| {
        let mut command = command(&folder, &run(device, device, &[]));
        command.envs(more.iter().copied());
        let output = process::output(&mut command);
        assert!(!output.status.success(), "{device}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let error = refused(&[], "cuda:2");
    assert!(error.contains("there are 2 GPUs: use cuda:0 to cuda:1"), "{error}");
    let error = refused(&[("GPIPE_SIMULATED_GPUS", "many")], "cuda:0");
    assert!(error.contains("GPIPE_SIMULATED_GPUS=many: give a number"), "{error}");
    let error = refused(&[("GPIPE_SIMULATED_GPU_MEMORY", "1GB")], "cuda:0");
    assert!(error.contains("GPIPE_SIMULATED_GPU_MEMORY=1GB: give the bytes"), "{error}");
    // The simulator does not lie beside this copy of the program.
    std::fs::copy(env!("CARGO_BIN_EXE_gpipe"), folder.path("gpipe")).unwrap();
    let mut alone = Command::new(folder.path("gpipe"));
    alone.args(run("alone", "cuda:0", &[])).current_dir(folder.path("."));
    alone.env("GPIPE_SIMULATED_GPUS", "2").env_remove("LD_LIBRARY_PATH");
    let error = String::from_utf8_lossy(&process::output(&mut alone).stderr).into_owned();
    assert!(
        error.contains("--package gpipe-simulated-gpu puts it there; or unset the variable"),
        "{error}"
    );
    // Of the memory of the simulated GPU.
    let error = refused(&[("GPIPE_SIMULATED_GPU_MEMORY", "64KiB")], "cuda:0");
    assert!(error.contains("out of memory on the GPU") && error.contains("(simulated)"), "{error}");
    // Of a cap: the two stages on one GPU share the sum of theirs.
    let mut capped = command(&folder, &run("capped", "cuda:0", &["--memory", "64KiB"]));
    let output = process::output(&mut capped);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("layer '"), "{error}");
    assert!(error.contains("asked for") && error.contains("cap 128.0 KiB"), "{error}");
    // In processes, each has a GPU 0 of its own.
    let capped = run("apart", "cuda:0,cuda:0", &["--memory", "64KiB"]);
    let launched = [&["launch", "--processes", "2", "--"], &capped[..]].concat();
    let output = process::output(&mut command(&folder, &launched));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("cap 64.0 KiB"), "{error}");
}
