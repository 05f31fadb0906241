//! `gpipe trace` as its user runs it. Families: `oracle_` (what is drawn and written), `fault_`
//! (folders without a step, damaged ones, widths).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::fs;

use common::{Folder, TRAIN, bytes, process::Process, train};
use gpipe_observe::step_file::StepFile;
use serde_json::Value;

fn text(folder: &Folder, name: &str) -> String {
    String::from_utf8(bytes(&folder.path(name))).unwrap()
}

#[test]
fn oracle_a_trace_shows_a_step_below_the_predicted_one() {
    let folder = Folder::new();
    let text = folder.succeeds(&["trace", "tiny.toml", "--text", "text.txt", "--width", "90"]);
    for part in ["device 0", "device 1", "measured: ", "predicted: ", "trace.json", "  idle   | "] {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
    assert!(!text.contains('\x1b'), "there is no terminal to colour");
    assert!(text.lines().filter(|line| line.starts_with("device")).all(|line| line.len() <= 90));
    let trace: Value = serde_json::from_slice(&bytes(&folder.path("trace.json"))).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for process in [0, 1] {
        // Two stages, three micro-batches: six forwards, six backwards.
        for (category, count) in [("forward", 6), ("backward", 6)] {
            let own = |event: &&Value| event["pid"] == process && event["cat"] == category;
            assert_eq!(events.iter().filter(own).count(), count, "{process} {category}");
        }
    }
    let more = ["--text", "text.txt", "--steps", "2", "--svg", "--out", "other.json"];
    let printed = folder.succeeds(&[&["trace", "tiny.toml"][..], &more].concat());
    assert!(printed.contains("\ntrace.svg\n") && printed.contains("\nother.json: "), "{printed}");
    assert!(folder.path("trace.svg").exists() && folder.path("other.json").exists());
}

#[test]
fn oracle_a_run_leaves_its_latest_step_and_pictures_are_made_of_it() {
    let folder = Folder::new();
    folder.succeeds(&train("run", &["--memory", "64MiB"]));
    let step = StepFile::read(&folder.path("run/step.json")).unwrap();
    assert_eq!((step.step, step.measured.devices.len()), (12, 2), "the last one");
    let predicted = step.predicted.as_ref().unwrap();
    assert!(predicted.source.ends_with("in 8 steps"), "{}", predicted.source);
    assert!(predicted.timeline.actions().eq(step.measured.actions()));
    assert!(step.memory.peaks.iter().all(|peak| peak.0 > 0));
    assert_eq!(step.memory.caps, [Some(gpipe_core::Bytes(64 << 20)); 2]);

    let drawn = folder.succeeds(&["trace", "run"]);
    assert!(
        drawn.contains("\nstep 12: ") && drawn.contains(" times the prediction (simulated"),
        "{drawn}"
    );
    for name in ["trace.svg", "trace.html", "trace.json"] {
        assert!(!folder.path("run").join(name).exists(), "{name} was not asked for");
    }
    let printed = folder.succeeds(&["trace", "run", "--svg", "--html", "--chrome"]);
    for name in ["run/trace.svg", "run/trace.html", "run/trace.json"] {
        assert!(printed.contains(name), "{name} is not in {printed}");
    }
    let (svg, page) = (text(&folder, "run/trace.svg"), text(&folder, "run/trace.html"));
    assert!(svg.starts_with("<svg") && page.starts_with("<!doctype html>"));
    for part in ["run, step 12", "K = 2 on 2 devices, M = 3", "predicted", "measured / predicted"] {
        assert!(svg.contains(part) && page.contains(part), "'{part}' is not in the pictures");
    }
    assert!(svg.contains("<title>1B2: stage 1") && svg.contains("cap: 64.0 MiB"));
    folder.succeeds(&["trace", "run", "--svg", "a.svg", "--html", "b.html", "--out", "c.json"]);
    assert_eq!((svg, page), (text(&folder, "a.svg"), text(&folder, "b.html")));
    assert_eq!(text(&folder, "run/trace.json"), text(&folder, "c.json"));
}

#[test]
fn oracle_a_short_run_leaves_its_last_step_and_a_stopped_one_too() {
    let folder = Folder::new();
    folder.train(&["--out", "short", "--steps", "3"]);
    assert_eq!(StepFile::read(&folder.path("short/step.json")).unwrap().step, 3);

    let long = [&TRAIN[..4], &["--steps", "300", "--out", "stopped"], &TRAIN[8..]].concat();
    let mut process = Process::start(&mut folder.command(&long));
    process.until("step 1/300");
    process.signal("TERM");
    assert_eq!(process.end(), Ok(143), "{}", process.printed);
    let step = StepFile::read(&folder.path("stopped/step.json")).unwrap().step;
    let told = format!("the state after step {step} is saved");
    assert!(process.printed.contains(&told), "{told}: {}", process.printed);
}

#[test]
fn fault_what_cannot_be_drawn_is_named() {
    let folder = Folder::new();
    fs::create_dir(folder.path("empty")).unwrap();
    fs::create_dir(folder.path("bad")).unwrap();
    fs::write(folder.path("bad/step.json"), "{\"format\":1,\"step\":3,").unwrap();
    let remedy = "name the folder of a run";
    folder.refuses(&["trace", "empty"], &["there is no empty/step.json", "ten steps", remedy]);
    folder.refuses(
        &["trace", "bad", "--svg"],
        &["bad/step.json is damaged: it is not a step", "column"],
    );
    folder.refuses(&["trace", "empty", "--width", "39"], &["--width 39: use 40 to 1000"]);
    folder.refuses(
        &["trace", "empty", "--stages", "3"],
        &["empty is the folder of a run", "empty/config.toml"],
    );
    folder.refuses(&["trace", "empty", "--plan", "auto"], &["empty is the folder of a run"]);
    folder.refuses(&["trace", "--svg", "empty"], &["gpipe trace empty --svg"]);
    folder.refuses(&["trace", "--html", "tiny.toml"], &["gpipe trace tiny.toml --html"]);
    folder.refuses(&["trace", "missing"], &["missing"]);
    assert!(!folder.path("bad/trace.svg").exists(), "nothing is written");
}
