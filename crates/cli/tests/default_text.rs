//! What `make train` learns from, and what it learns. Family: `regression_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{path::Path, process::Command};

use common::{bytes, process::output, skip};
use serde_json::Value;

/// Validation loss after 50 steps, in nats per token.
const LOSS: f64 = 5.354_297_551_554;
/// Other kernels and numbers of threads add up in other orders. `aten` and `onednn` with one
/// thread, and `onednn` with two, gave losses that differ by at most 5.3e-7 here. Other processors
/// have kernels of their own: two hundred times that.
const TOLERANCE: f64 = 1e-4;

/// The README's loss could not be had again: the default text was the sources of the workspace's
/// dependencies, and changed with each of them. It is pinned now, and so is the loss.
#[test]
fn regression_the_default_text_and_its_loss_are_those_that_were_recorded() {
    const NAME: &str = "regression_the_default_text_and_its_loss_are_those_that_were_recorded";
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let manifest = "configs/text/Cargo.toml";
    let mut fetch = Command::new(env!("CARGO"));
    let fetch = fetch.args(["fetch", "--locked", "--manifest-path", manifest]).current_dir(&root);
    let fetched = output(fetch).status.success();
    let folder = tempfile::tempdir().unwrap();
    let mut train = Command::new(env!("CARGO_BIN_EXE_gpipe"));
    train.args(["train", "configs/small.toml", "--steps", "50", "--checkpoint-every", "none"]);
    train.args(["--set", "train.validation_tokens=16384", "--out"]);
    let ran = output(train.arg(folder.path().join("run")).current_dir(&root));
    let errors = String::from_utf8_lossy(&ran.stderr);
    if !fetched && errors.contains("cargo fetch") {
        return skip(NAME, "the crates of configs/text are neither on disk nor to be fetched");
    }
    assert!(ran.status.success(), "{errors}");
    let printed = String::from_utf8_lossy(&ran.stdout);
    assert!(printed.starts_with("Rust sources of the crates in configs/text/Cargo.lock: read "));
    let metrics = String::from_utf8(bytes(&folder.path().join("run/metrics.jsonl"))).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let loss = last["loss"].as_f64().unwrap();
    assert!((loss - LOSS).abs() <= TOLERANCE, "{loss}, recorded {LOSS}: {printed}");
}
