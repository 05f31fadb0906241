//! Families: `oracle_` (what is written can be read and continued), `fault_` (torn, invalid and
//! oversized files).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{
    fs,
    path::{Path, PathBuf},
};

use gpipe_observe::metrics::{
    Evaluation, LINE_BYTES_MAX, RECORDS_MAX, Record, Run, Stage, Step, Writer, read,
};

/// A folder and the path of a file in it.
fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    (folder, path)
}

fn records() -> Vec<Record> {
    let stage = Stage {
        forward_ms: 1.5,
        communication_ms: 0.1 + 0.2,
        fill_drain_ms: 1e-3,
        imbalance_ms: 1.0 / 3.0,
        stalls_ms: 7.0,
        peak_bytes: 1 << 40,
        sent_bytes: 7,
        ..Stage::default()
    };
    let step = Step {
        step: 1,
        loss: 2.5,
        metrics: [("accuracy".to_owned(), 0.25)].into(),
        tokens: 56,
        samples: 7,
        tokens_total: u64::MAX,
        samples_total: 7,
        tokens_per_s: 1e-300,
        loss_scale: Some(65536.0),
        stages: vec![stage; 3],
        ..Step::default()
    };
    let evaluation = Evaluation {
        step: 1,
        loss: 0.1 + 0.2,
        bits_per_byte: Some(1.0 / 3.0),
        ..Evaluation::default()
    };
    vec![Record::Step(step), Record::Evaluation(evaluation)]
}

#[test]
fn oracle_what_is_written_is_read_to_the_bit() {
    let (_folder, path) = file();
    let mut writer = Writer::create(&path).unwrap();
    for (count, record) in records().iter().enumerate() {
        writer.write(record).unwrap();
        assert_eq!(read(&path).unwrap(), records()[..=count], "each line is there at once");
    }
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with(r#"{"kind":"step","step":1,"loss":2.5,"#), "{text}");
    let run = Run::new("r", read(&path).unwrap());
    assert_eq!((run.steps.len(), run.evaluations.len()), (1, 1));
}

#[test]
fn oracle_numbers_that_are_not_finite_come_back_as_nan() {
    let (_folder, path) = file();
    let mut writer = Writer::create(&path).unwrap();
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let metrics = [("m".to_owned(), value)].into();
        let step = Step { loss: value, grad_norm: 1.0, metrics, ..Step::default() };
        writer.write(&Record::Step(step)).unwrap();
    }
    let run = Run::new("r", read(&path).unwrap());
    assert_eq!(run.steps.len(), 3);
    for step in &run.steps {
        assert!(step.loss.is_nan() && step.metrics["m"].is_nan() && step.grad_norm == 1.0);
    }
}

#[test]
fn oracle_older_and_newer_files_are_read() {
    let (_folder, path) = file();
    let older = r#"{"step":3,"loss":1.5,"tokens":56.0,"stages":[{"busy_ms":2.0,"idle_ms":1.0}]}"#;
    let newer = r#"{"kind":"step","step":4,"momentum":[1,{}],"stages":[{"idle_ms":2.0,"new":1}]}"#;
    fs::write(&path, format!("{older}\n\n{newer}\n")).unwrap();
    let run = Run::new("r", read(&path).unwrap());
    assert_eq!((run.steps[0].step, run.steps[0].tokens, run.steps[0].lr), (3, 56, 0.0));
    let waits = run.steps.iter().map(|step| step.stages[0].idle_ms);
    assert_eq!(waits.collect::<Vec<_>>(), [1.0, 2.0]);
    assert_eq!(run.steps[0].stages[0].stalls_ms, 0.0);
    assert_eq!(run.steps[0].share(|stage| stage.idle_ms), 0.0, "its step_ms is not there");
}

fn step_of(record: &Record) -> u64 {
    match record {
        Record::Step(step) => step.step,
        Record::Evaluation(evaluation) => evaluation.step,
    }
}

fn next() -> Record {
    Record::Step(Step { step: 99, ..Step::default() })
}

/// Number of files in the folder of `path`, including temporary ones.
fn files_beside(path: &Path) -> usize {
    fs::read_dir(path.parent().unwrap()).unwrap().count()
}

#[test]
fn oracle_a_resumed_file_keeps_its_lines_byte_for_byte() {
    let (_folder, path) = file();
    // Lines that our writer would not produce: spaces, unknown fields, blank lines.
    let lines = [
        "{\"step\":1,\"tokens\":56.0}\n",
        "\n",
        "  {\"step\": 2, \"momentum\":[1,{}]}\r\n",
        "{\"kind\":\"evaluation\",\"step\":2}\n",
        "{\"step\":3,\"loss\":null}\n",
        " \n",
        "{\"step\":4}\n",
    ];
    let appended = serde_json::to_string(&next()).unwrap() + "\n";
    let asked = [1, 2, 2, 3, 4];
    for dropped in 0..1 << 5 {
        for torn in ["", "{\"step\":5,\"lo", "\0\0"] {
            fs::write(&path, lines.concat() + torn).unwrap();
            let mut steps = Vec::new();
            let keep = |record: &Record| {
                steps.push(step_of(record));
                dropped >> (steps.len() - 1) & 1 == 0
            };
            let mut writer = Writer::resume(&path, keep).unwrap();
            assert_eq!(steps, asked, "each record is asked for once");
            let mut index = 0..;
            let is_kept =
                |line: &&&str| line.trim().is_empty() || dropped >> index.next().unwrap() & 1 == 0;
            let kept: String = lines.iter().filter(is_kept).copied().collect();
            assert_eq!(fs::read_to_string(&path).unwrap(), kept, "{dropped:b} {torn}");
            assert_eq!(files_beside(&path), 1, "nothing is left aside");
            writer.write(&next()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), kept + &appended);
        }
    }
}

#[test]
fn oracle_a_file_without_anything_to_drop_is_not_written_again() {
    let (_folder, path) = file();
    // A folder of this name prevents the creation of the temporary file.
    fs::create_dir(path.with_file_name("metrics.jsonl.writing")).unwrap();
    let mut writer = Writer::resume(&path, |_| panic!("there is no record")).unwrap();
    for record in records() {
        writer.write(&record).unwrap();
    }
    drop(writer);
    Writer::resume(&path, |_| true).unwrap().write(&next()).unwrap();
    assert_eq!(read(&path).unwrap(), [records(), vec![next()]].concat());
}

#[test]
fn fault_a_file_is_resumed_wherever_it_was_torn() {
    let (_folder, path) = file();
    let mut writer = Writer::create(&path).unwrap();
    for step in 1..=2 {
        // Kept short, because each file is synced to disk.
        writer.write(&Record::Evaluation(Evaluation { step, ..Evaluation::default() })).unwrap();
    }
    let whole = fs::read(&path).unwrap();
    for length in 0..=whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let before = read(&path).unwrap();
        Writer::resume(&path, |_| true).unwrap().write(&next()).unwrap();
        let after = [before, vec![next()]].concat();
        assert_eq!(read(&path).unwrap(), after, "cut after {length} bytes");
    }
}

#[test]
fn fault_a_file_that_cannot_be_resumed_is_as_it_was() {
    let (_folder, path) = file();
    let aside = path.with_file_name("metrics.jsonl.writing");
    let last = |record: &Record| step_of(record) > 1;
    let bad = b"{\"step\":1}\n{\"step\":2}\n[1]\n{\"step\":3}\n";
    let long = [b"{\"step\":1}\n", &vec![b' '; LINE_BYTES_MAX as usize + 1][..]].concat();
    for (bytes, reason) in [(&bad[..], "metrics.jsonl line 3: "), (&long, "bytes in line 2")] {
        fs::write(&path, bytes).unwrap();
        let error = Writer::resume(&path, last).unwrap_err().to_string();
        assert!(error.contains(reason), "'{reason}' is not in: {error}");
        assert!(fs::read(&path).unwrap() == bytes && !aside.exists(), "{reason}");
    }
    let good = b"{\"step\":1}\n{\"step\":2}\n";
    fs::write(&path, good).unwrap();
    fs::create_dir(&aside).unwrap();
    let error = Writer::resume(&path, last).unwrap_err().to_string();
    assert!(error.contains("cannot create") && error.contains("jsonl.writing"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), good);
    // A temporary file left by a crash is harmless.
    fs::remove_dir(&aside).unwrap();
    fs::write(&aside, "{\"step\":1}\n{\"st".repeat(9)).unwrap();
    Writer::resume(&path, last).unwrap();
    assert!(fs::read(&path).unwrap() == b"{\"step\":2}\n" && !aside.exists());
}

#[test]
fn fault_a_torn_last_line_is_passed_over_wherever_it_is_torn() {
    let (_folder, path) = file();
    let mut writer = Writer::create(&path).unwrap();
    for record in records() {
        writer.write(&record).unwrap();
    }
    let whole = fs::read(&path).unwrap();
    let first = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    for length in 0..=whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        // A line is complete even without its newline.
        let expected = usize::from(length >= first - 1) + usize::from(length >= whole.len() - 1);
        assert_eq!(read(&path).unwrap(), records()[..expected], "cut after {length} bytes");
    }
}

#[test]
fn fault_any_other_bad_line_is_named() {
    let (_folder, path) = file();
    let cases: [(&[u8], &str); 7] = [
        (b"{\"step\":1", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{\"kind\":\"epoch\"}", "its kind is \"epoch\""),
        (b"{\"kind\":null}", "its kind is null"),
        (b"{\"step\":-1}", "not a record"),
        (b"{\"tokens\":1.5}", "1.5 is no count"),
        (b"\xff\xfe", "not JSON"),
    ];
    for (bad, reason) in cases {
        fs::write(&path, [b"{\"step\":1}\n", bad, b"\n{\"step\":2}\n"].concat()).unwrap();
        let error = read(&path).unwrap_err().to_string();
        for part in ["metrics.jsonl line 2: ", reason, "repair or remove"] {
            assert!(error.contains(part), "'{part}' is not in: {error}");
        }
    }
    let missing = read(&path.with_file_name("no.jsonl")).unwrap_err().to_string();
    assert!(missing.contains("cannot read") && missing.contains("no.jsonl"), "{missing}");
}

#[test]
fn fault_files_without_bounds_are_refused() {
    let (_folder, path) = file();
    fs::write(&path, vec![b' '; LINE_BYTES_MAX as usize + 1]).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("bytes in line 1"));
    let line = format!("{{\"step\":1{}}}\n", " ".repeat(LINE_BYTES_MAX as usize - 11));
    assert_eq!(line.len() as u64, LINE_BYTES_MAX);
    fs::write(&path, line).unwrap();
    assert_eq!(read(&path).unwrap().len(), 1, "the longest line is read");
    fs::write(&path, "{}\n".repeat(RECORDS_MAX + 1)).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("2000000 records"));
}
