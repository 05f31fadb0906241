//! `gpipe ledger` as its user runs it. Families: `oracle_` (what it counts adds up), `fault_` (what
//! it cannot count).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{Folder, bytes};
use serde_json::Value;

const LEDGER: &[&str] = &["ledger", "tiny.toml", "--text", "text.txt", "--steps", "2"];

#[test]
fn oracle_operations_add_up_to_the_steps() {
    let folder = Folder::new();
    let flags = ["--remat", "always", "--operations", "3", "--out", "ledger.json"];
    let text = folder.succeeds(&[LEDGER, &flags].concat());
    for part in [
        "work, ms",
        "\nproducts ",
        "\nattention ",
        "\ndispatch ",
        "\nall ",
        "TFLOP a step",
        "new pages of memory, and reused the rest",
    ] {
        assert!(text.contains(part), "'{part}' is not in {text}");
    }
    assert!(text.contains(" stages of 1 thread, M 3, 1f1b, always, float32 (2 steps)"), "{text}");
    let ledger: Value = serde_json::from_slice(&bytes(&folder.path("ledger.json"))).unwrap();
    let operations = ledger["operations"].as_array().unwrap();
    let sum = |key: &str, phase: &str| -> f64 {
        let own = operations.iter().filter(|one| one["phase"] == phase);
        own.map(|one| one[key].as_f64().unwrap()).sum()
    };
    // A backward takes twice the products of a forward, and a recomputation the same.
    let [forward, recompute, backward] =
        ["forward", "recompute", "backward"].map(|phase| sum("flops", phase));
    assert!(forward > 0.0 && backward == 2.0 * forward, "{forward} {backward}");
    assert!(recompute > 0.0 && recompute <= forward, "{recompute} of {forward}");
    assert!(ledger["new_pages"].is_u64(), "{ledger}");
    assert_eq!(ledger["flops"].as_f64().unwrap(), forward + backward);
    // Stages work at the same time, and each works no longer than the step.
    let all: f64 = ["forward", "recompute", "backward", "update"]
        .map(|phase| sum("time_ns", phase))
        .iter()
        .sum();
    let stages = ledger["stages"].as_f64().unwrap();
    assert!(all > 0.0, "{ledger}");
    // Times are means, and the step's is a median: of two steps, the longer one.
    assert!(all <= 1.01 * stages * ledger["step_ns"].as_f64().unwrap(), "{ledger}");
}

/// What it counts is what `gpipe train` would run with the same flags.
#[test]
fn oracle_a_ledger_follows_a_plan() {
    let folder = Folder::new();
    let counted = |flags: &[&str]| {
        folder.succeeds(&[LEDGER, flags, &["--out", "ledger.json"]].concat());
        serde_json::from_slice::<Value>(&bytes(&folder.path("ledger.json"))).unwrap()
    };
    let of = |command| [command, "tiny.toml", "--text", "text.txt"];
    let sizes = ["--stages", "2", "--micro-batches", "4"];
    folder.succeeds(&[&of("profile")[..], &sizes, &["--steps", "1"]].concat());
    let made = counted(&[&sizes[..], &["--schedule", "auto"]].concat());
    assert_eq!([&made["stages"], &made["micro_batches"]], [2, 4]);

    let choices = ["--schedule", "zb-h1", "--out", "plan.json"];
    folder.succeeds(&[&of("plan")[..], &sizes, &choices].concat());
    let given = counted(&["--plan", "plan.json"]);
    assert_eq!(given["schedule"], "zb-h1");
    assert_eq!([&given["stages"], &given["micro_batches"]], [2, 4]);
    // A trace does, too.
    let text = folder.succeeds(&[&of("trace")[..], &["--plan", "plan.json"]].concat());
    for part in ["plan: 2 stages, M = 4, zb-h1", "times the prediction"] {
        assert!(text.contains(part), "'{part}' is not in {text}");
    }
    let flops = |one: &Value| one["flops"].as_f64().unwrap();
    assert_eq!(flops(&made), flops(&given));
    // The fastest way may have other numbers, but never replicas.
    assert_eq!(flops(&counted(&["--plan", "auto"])), flops(&given));
}

#[test]
fn fault_what_cannot_be_counted_is_refused() {
    let folder = Folder::new();
    let replicas = [LEDGER, &["--replicas", "2"]].concat();
    folder.refuses(&replicas, &["one pipeline", "--replicas"]);
    let stages = [LEDGER, &["--plan", "plan.json", "--stages", "2"]].concat();
    folder.refuses(&stages, &["--stages 2", "plan.json has a number of stages"]);
    let other = [LEDGER, &["--plan", "auto", "--schedule", "1f1b"]].concat();
    folder.refuses(&other, &["--plan", "--schedule", "cannot be used with"]);
}
