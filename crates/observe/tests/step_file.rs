//! `step.json`. Families: `golden_` (its format), `oracle_` (what is written can be read), `fault_`
//! (invalid files and failing disks), `property_` (no damage makes the reader or a picture panic).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{fs, path::Path};

use gpipe_core::{
    Bytes, Nanos,
    simulate::{TimedAction, Timeline},
};
use gpipe_observe::{
    picture::{Scene, html, svg},
    step_file::{ACTIONS_MAX, Memory, Predicted, STAGES_MAX, StepFile, StepFileError},
};
use proptest::{
    prelude::*,
    sample::Index,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};

fn timeline(devices: &[&[(&str, u64, u64)]]) -> Timeline {
    let timed = |(name, start, end): &(&str, u64, u64)| TimedAction {
        action: name.parse().unwrap(),
        start: Nanos(*start),
        end: Nanos(*end),
    };
    let devices: Vec<Vec<_>> =
        devices.iter().map(|actions| actions.iter().map(timed).collect()).collect();
    let makespan = devices.iter().flatten().map(|timed| timed.end).max().unwrap_or_default();
    Timeline { devices, makespan }
}

fn step() -> StepFile {
    let predicted = timeline(&[
        &[
            ("0F0", 0, 2000),
            ("0SEND_F0@0", 2000, 2000),
            ("0RECV_B0@0", 2000, 6500),
            ("0B0", 6500, 9000),
            ("0UPDATE", 9000, 9900),
        ],
        &[
            ("1RECV_F0@0", 0, 2100),
            ("1F0", 2100, 4000),
            ("1B0", 4000, 6400),
            ("1SEND_B0@0", 6400, 6400),
            ("1NORM", 6400, 6500),
        ],
    ]);
    let mut measured = predicted.clone();
    measured.devices[0][4].end = Nanos(10_400);
    measured.makespan = Nanos(10_400);
    let source = "simulated from \"what\" was measured\nbefore".to_owned();
    StepFile {
        step: 12,
        simulated_gpus: false,
        measured,
        predicted: Some(Predicted { source, timeline: predicted }),
        memory: Memory {
            predicted: vec![vec![(Nanos(0), Bytes(4096)), (Nanos(2000), Bytes(9000))], vec![]],
            measured: vec![vec![(Nanos(0), Bytes(4097)), (Nanos(2100), Bytes(8100))], vec![]],
            peaks: vec![Bytes(9100), Bytes(5000)],
            caps: vec![None, Some(Bytes(10_000))],
        },
    }
}

fn written(step: &StepFile) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json");
    step.write(&path).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left aside");
    fs::read_to_string(path).unwrap()
}

#[test]
fn golden_the_form_of_the_file() {
    insta::assert_snapshot!("step", written(&step()));
}

#[test]
fn oracle_what_is_written_is_read() {
    let (predicted, memory) = (None, Memory::default());
    let bare = StepFile { predicted, memory, simulated_gpus: true, ..step() };
    for step in [step(), bare, StepFile::default()] {
        assert_eq!(StepFile::parse(&written(&step)), Ok(step));
    }
}

#[test]
fn oracle_an_older_file_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json");
    fs::write(&path, "older").unwrap();
    step().write(&path).unwrap();
    assert_eq!(StepFile::read(&path).unwrap(), step());
}

#[test]
fn fault_what_cannot_be_written_leaves_the_older_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json");
    step().write(&path).unwrap();
    let many = TimedAction { action: "0F0".parse().unwrap(), start: Nanos(0), end: Nanos(0) };
    let measured = Timeline { devices: vec![vec![many; ACTIONS_MAX + 1]], makespan: Nanos(0) };
    let error = StepFile { measured, ..step() }.write(&path).unwrap_err();
    assert!(matches!(&error, StepFileError::Refused { .. }));
    let text = error.to_string();
    assert!(text.contains("step.json") && text.contains("600011 actions"), "{text}");
    assert_eq!(StepFile::read(&path).unwrap(), step());
    let error = step().write(Path::new("/no/such/folder/step.json")).unwrap_err();
    assert!(error.to_string().starts_with("cannot write /no/such/folder/step.json"), "{error}");
    fs::create_dir(folder.path().join("taken")).unwrap();
    fs::write(folder.path().join("taken/file"), "").unwrap();
    let error = step().write(&folder.path().join("taken")).unwrap_err();
    assert!(error.to_string().starts_with("cannot replace "), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left aside");
}

#[test]
fn fault_what_is_wrong_is_said_with_its_place() {
    let good = written(&step());
    let with = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        good.replacen(from, to, 1)
    };
    let stage = format!("\"{STAGES_MAX}F0\"");
    let cases = [
        (String::new(), "it is not a step that gpipe wrote (line 1, "),
        ("[1]".into(), "line 1"),
        (with("\"format\":1", "\"format\":2"), "it has format 2, and this program reads 1"),
        (with("\"step\":12,", ""), "it is not a step that gpipe wrote (line "),
        (with("\"step\":12,", "\"stop\":12,"), "it is not a step that gpipe wrote (line 1, "),
        (with("\"1F0\"", "\"1X0\""), "line 4"),
        (with("\"1F0\"", "7"), "line 4"),
        (with("\"1F0\"", &stage), "device 1, action 1 (4096F0): its stage is beyond"),
        (
            with("[\"1F0\",2100,4000]", "[\"1F0\",2000,4000]"),
            "measured, device 1, action 1 (1F0): it starts before the one before it ends",
        ),
        (
            with("[\"1F0\",2100,4000]", "[\"1F0\",2100,2099]"),
            "action 1 (1F0): it ends before it starts",
        ),
        (with("10400", "10300"), "measured, device 0, action 4 (0UPDATE): it ends after the step"),
        (with("\"makespan\":9900", "\"makespan\":1e3"), "line 5"),
        (with("\"makespan\":9900", "\"makespan\":2000000000000000"), "predicted, makespan"),
        (with("[0,4096]", "[2001,4096]"), "memory, stage 0, point 1"),
        (with("[0,4097]", "[2101,4097]"), "memory, stage 0, point 1"),
        (with("9100", "1152921504606846977"), "memory, a peak or cap is more than"),
        (
            with("before\"", &format!("{}\"", "x".repeat(1000))),
            "its source has more than 1000 bytes",
        ),
        (good.trim_end().trim_end_matches('}').to_owned(), "that gpipe wrote (line "),
        (good.clone() + "{}", "that gpipe wrote (line "),
    ];
    for (text, part) in cases {
        let error = StepFile::parse(&text).unwrap_err();
        assert!(error.contains(part), "'{part}' is not in: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json");
    fs::write(&path, "{").unwrap();
    let error = StepFile::read(&path).unwrap_err().to_string();
    assert!(
        error.contains("step.json is damaged: it is not a step") && error.contains("--resume"),
        "{error}"
    );
    fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(StepFile::read(&path).unwrap_err().to_string().contains("step.json"));
}

#[test]
fn property_no_damage_panics() {
    let good = written(&step()).into_bytes();
    let edit = (any::<Index>(), 0_u8..5, any::<u8>(), any::<Index>());
    let config = Config { cases: 4000, failure_persistence: None, ..Config::default() };
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &[5; 32]);
    let mut runner = TestRunner::new_with_rng(config, random);
    let read = std::cell::Cell::new(0);
    let result = runner.run(&prop::collection::vec(edit, 1..4), |edits| {
        let mut bytes = good.clone();
        for (at, kind, byte, other) in edits {
            if bytes.is_empty() {
                break;
            }
            let (at, other) = (at.index(bytes.len()), other.index(bytes.len()));
            match kind {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                2 => drop(bytes.remove(at)),
                // Changing digits keeps the form but changes the values.
                3 => {
                    let digits: Vec<usize> =
                        (0..bytes.len()).filter(|i| bytes[*i].is_ascii_digit()).collect();
                    if let Some(digit) = digits.get(at % digits.len().max(1)) {
                        bytes[*digit] = b'0' + byte % 10;
                    }
                }
                _ => drop(bytes.drain(at.min(other)..at.max(other))),
            }
        }
        if let Ok(text) = std::str::from_utf8(&bytes)
            && let Ok(step) = StepFile::parse(text)
        {
            read.set(read.get() + 1);
            let scene = Scene::of_step("damaged", &step);
            prop_assert!(svg(&scene).ends_with("</svg>\n") && html(&scene).ends_with("</html>\n"));
            prop_assert_eq!(StepFile::parse(&written(&step)), Ok(step));
        }
        Ok(())
    });
    result.unwrap();
    assert!(read.get() > 100, "{} damaged files were read", read.get());
}
