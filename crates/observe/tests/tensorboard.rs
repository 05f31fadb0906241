//! Families: `oracle_` (the bytes equal those of TensorBoard's writer, and an independent decoder
//! finds every scalar), `fault_` (folders that cannot be created, names that are taken).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use gpipe_observe::{
    metrics::{Evaluation, Record, Stage, Step},
    tensorboard::Writer,
};

/// Two events, written by TensorBoard 2.21 (`tensorboard.summary.writer.record_writer` and its
/// `Event`).
const BY_TENSORBOARD: &str = "\
    1800000000000000a37f4b220900002040fc54d9411a0d627261696e2e4576656e743a322b3531106300000000\
    000000b16b13d90900005040fc54d94110ac022a550a160a0f76616c69646174696f6e2f6c6f73731500002040\
    0a1f0a1876616c69646174696f6e2f626974735f7065725f6279746515000000000a1a0a1376616c6964617469\
    6f6e2f6163637572616379150000c07fd124e622";

fn at_ms(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

#[test]
fn oracle_bytes_are_those_of_tensorboards_own_writer() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer =
        Writer::create(&folder.path().join("a/tensorboard"), at_ms(1_700_000_000_500)).unwrap();
    let evaluation = Evaluation {
        step: 300,
        loss: 2.5,
        bits_per_byte: Some(0.0), // zeros are written, too
        metrics: [("accuracy".to_owned(), f64::NAN)].into(),
        ..Evaluation::default()
    };
    writer.write(&Record::Evaluation(evaluation), at_ms(1_700_000_001_250)).unwrap();
    let name = writer.path().file_name().unwrap().to_str().unwrap();
    assert_eq!(name, "events.out.tfevents.1700000000.gpipe");
    let hex: String =
        fs::read(writer.path()).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, BY_TENSORBOARD);
}

/// One field of a protocol-buffer message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> &'a [u8] {
    let (head, tail) = bytes.split_at(length);
    *bytes = tail;
    head
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)[0];
        value |= u64::from(byte & 127) << shift;
        if byte < 128 {
            break;
        }
    }
    value
}

/// The fields of a message, by number and in order.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let field = match key & 7 {
            0 => Field::Number(varint(&mut bytes)),
            1 => Field::Number(u64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
            2 => {
                let length = varint(&mut bytes) as usize;
                Field::Bytes(take(&mut bytes, length))
            }
            5 => Field::Number(u64::from(u32::from_le_bytes(
                take(&mut bytes, 4).try_into().unwrap(),
            ))),
            kind => panic!("wire type {kind}"),
        };
        all.push((key >> 3, field));
    }
    all
}

/// Masked CRC32C, computed bit by bit.
fn masked_crc(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The payloads of a file's records. Checks their CRCs.
fn payloads(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let length = take(&mut bytes, 8);
        assert_eq!(take(&mut bytes, 4), masked_crc(length).to_le_bytes());
        let payload = take(&mut bytes, u64::from_le_bytes(length.try_into().unwrap()) as usize);
        assert_eq!(take(&mut bytes, 4), masked_crc(payload).to_le_bytes());
        all.push(payload);
    }
    all
}

/// The step and the scalars of an event.
fn scalars(event: &[u8]) -> (u64, BTreeMap<String, f32>) {
    let (mut step, mut scalars) = (0, BTreeMap::new());
    for (number, field) in fields(event) {
        match (number, field) {
            (2, Field::Number(value)) => step = value,
            (5, Field::Bytes(summary)) => {
                for (_, value) in fields(summary) {
                    let Field::Bytes(value) = value else { panic!("a value is a message") };
                    match &fields(value)[..] {
                        [(1, Field::Bytes(tag)), (2, Field::Number(bits))] => {
                            let tag = String::from_utf8(tag.to_vec()).unwrap();
                            scalars.insert(tag, f32::from_bits(*bits as u32));
                        }
                        _ => panic!("a value is a tag and a float"),
                    }
                }
            }
            _ => {}
        }
    }
    (step, scalars)
}

#[test]
fn oracle_every_scalar_of_a_step_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), at_ms(1000)).unwrap();
    let stage = |idle_ms, peak_bytes| Stage {
        idle_ms,
        peak_bytes,
        communication_ms: 1.0,
        fill_drain_ms: 1.5,
        imbalance_ms: idle_ms - 2.0,
        stalls_ms: 0.5,
        ..Stage::default()
    };
    let step = Step {
        step: 70_000,
        loss: 2.5,
        lr: 1e-3,
        grad_norm: 0.75,
        clip_scale: 0.5,
        loss_scale: Some(1024.0),
        metrics: [("accuracy".to_owned(), 0.25)].into(),
        tokens_per_s: 21_000.0,
        step_ms: 12.5,
        bubble: 0.125,
        stages: vec![stage(3.0, 1 << 30), stage(4.0, 1 << 20)],
        ..Step::default()
    };
    writer.write(&Record::Step(step), at_ms(2000)).unwrap();
    let bytes = fs::read(writer.path()).unwrap();
    let (step, found) = scalars(payloads(&bytes)[1]);
    assert_eq!(step, 70_000);
    let expected = [
        ("train/loss", 2.5),
        ("train/lr", 1e-3),
        ("train/grad_norm", 0.75),
        ("train/clip_scale", 0.5),
        ("train/loss_scale", 1024.0),
        ("train/accuracy", 0.25),
        ("speed/tokens_per_s", 21_000.0),
        ("speed/step_ms", 12.5),
        ("pipeline/bubble", 0.125),
        ("pipeline/communication", 0.08),
        ("pipeline/fill_drain", 0.12),
        ("pipeline/imbalance", 0.12),
        ("pipeline/stalls", 0.04),
        ("pipeline/stage0_idle_ms", 3.0),
        ("pipeline/stage1_idle_ms", 4.0),
        ("memory/stage0_peak_bytes", (1_u32 << 30) as f32),
        ("memory/stage1_peak_bytes", (1_u32 << 20) as f32),
    ];
    assert_eq!(found, expected.map(|(tag, value)| (tag.to_owned(), value)).into());
}

fn name(writer: &Writer) -> &str {
    writer.path().file_name().unwrap().to_str().unwrap()
}

#[test]
fn oracle_a_resumed_run_says_from_where() {
    let folder = tempfile::tempdir().unwrap();
    let first = Writer::create(folder.path(), at_ms(1_000)).unwrap();
    let before = fs::read(first.path()).unwrap();
    let mut writer = Writer::resume(folder.path(), at_ms(2_000), 301).unwrap();
    let evaluation = Evaluation { step: 301, loss: 2.5, ..Evaluation::default() };
    writer.write(&Record::Evaluation(evaluation), at_ms(3_000)).unwrap();
    assert_eq!(fs::read(first.path()).unwrap(), before, "the older file is left alone");

    let bytes = fs::read(writer.path()).unwrap();
    let [version, first_start, start, evaluation] = payloads(&bytes)[..] else {
        panic!("four events")
    };
    assert!(version.ends_with(b"brain.Event:2"));
    // TensorBoard ignores the first start that it sees in a folder.
    assert_eq!(first_start, start);
    match &fields(start)[..] {
        [(1, Field::Number(time)), (2, Field::Number(301)), (7, Field::Bytes(log))] => {
            assert_eq!(f64::from_bits(*time), 2.0);
            assert!(matches!(fields(log)[..], [(1, Field::Number(1))]), "status START");
        }
        _ => panic!("a start is a time, a step and a session log"),
    }
    assert_eq!(scalars(evaluation), (301, [("validation/loss".to_owned(), 2.5)].into()));
}

#[test]
fn fault_files_of_the_same_second_do_not_overwrite_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let mut writers: Vec<Writer> = (0..4)
        .map(|index| match index % 2 {
            0 => Writer::create(folder.path(), at_ms(1_000)).unwrap(),
            _ => Writer::resume(folder.path(), at_ms(1_000), 1).unwrap(),
        })
        .collect();
    for (step, writer) in (1..).zip(&mut writers) {
        let evaluation = Evaluation { step, ..Evaluation::default() };
        writer.write(&Record::Evaluation(evaluation), at_ms(1_000)).unwrap();
    }
    for (step, writer) in (1..).zip(&writers) {
        let bytes = fs::read(writer.path()).unwrap();
        assert_eq!(scalars(payloads(&bytes).last().unwrap()).0, step);
        assert!(name(writer).starts_with("events.out.tfevents.1.gpipe"), "{}", name(writer));
    }
    assert!(writers.iter().map(name).is_sorted(), "TensorBoard reads them by name");
    for _ in writers.len()..1_000 {
        Writer::create(folder.path(), at_ms(1_000)).unwrap();
    }
    let error = Writer::create(folder.path(), at_ms(1_000)).unwrap_err().to_string();
    assert!(error.contains("cannot write") && error.contains("gpipe.999"), "{error}");
}

#[test]
fn fault_a_folder_that_cannot_be_made_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let error = Writer::create(&folder.path().join("file/tensorboard"), at_ms(0)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("cannot write") && text.contains("file/tensorboard"), "{text}");
}
