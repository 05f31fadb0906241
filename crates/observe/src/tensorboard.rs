//! TensorBoard event files: TFRecord framing around protocol-buffer events with scalars.
//!
//! A TFRecord consists of a length (u64), the masked CRC32C of the length, the event, and the
//! masked CRC32C of the event, all little-endian. The first event names the format's version. Each
//! record of a run becomes one event with all its scalars, written at once, so TensorBoard can
//! follow the run. A resumed run continues in a new file.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use crc::{CRC_32_ISCSI, Crc};
use prost::Message;

use crate::{
    append::Append,
    metrics::{Evaluation, Record, Step},
};

/// CRC32C, which the CRC catalogue lists under this name.
const CRC32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);
/// The version in the first event of every file.
const VERSION: &str = "brain.Event:2";
/// `tensorflow.SessionLog.SessionStatus.START`.
const START: i32 = 1;
/// Maximum number of files created in one second.
const FILES_PER_SECOND_MAX: u32 = 1_000;

/// `tensorflow.Event`, with the fields used here.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since the Unix epoch.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

/// `tensorflow.Summary.Value`, with the fields used here.
#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// Optional, because it is one of a `oneof` in the format, and a 0 must be written, too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// `tensorflow.SessionLog`, with the fields used here.
#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// An error of an event file.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.display())]
pub struct EventError {
    /// The file or folder.
    pub path: PathBuf,
    /// The system's error.
    pub source: io::Error,
}

/// An event file, open for the duration of a run.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: Append,
}

impl Writer {
    /// Creates `folder` if needed, and in it a new file named after `now`. Existing files stay.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn create(folder: &Path, now: SystemTime) -> Result<Self, EventError> {
        fs::create_dir_all(folder).map_err(failed(folder))?;
        let wall_time = seconds_since_1970(now);
        let (path, file) = create_file(folder, wall_time)?;
        let mut writer = Self { path, file: Append::after(0, file) };
        let file_version = Some(VERSION.to_owned());
        writer.event(&Event { wall_time, file_version, ..Event::default() })?;
        Ok(writer)
    }

    /// As [`Writer::create`], for a resumed run. TensorBoard discards what older files in the
    /// folder contain from `step` on. `step` is the first step that will be written again.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn resume(folder: &Path, now: SystemTime, step: u64) -> Result<Self, EventError> {
        let mut writer = Self::create(folder, now)?;
        let restart = Event {
            wall_time: seconds_since_1970(now),
            step: signed(step),
            session_log: Some(SessionLog { status: START }),
            ..Event::default()
        };
        // Write the start twice. TensorBoard takes the first start in a folder for the beginning of
        // the run and discards nothing, and older files need not contain one.
        writer.event(&restart)?;
        writer.event(&restart)?;
        Ok(writer)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the scalars of `record` with time `now`. After an error nothing of them is in the
    /// file, and later writes may succeed.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn write(&mut self, record: &Record, now: SystemTime) -> Result<(), EventError> {
        let (step, scalars) = match record {
            Record::Step(step) => (step.step, step_scalars(step)),
            Record::Evaluation(evaluation) => (evaluation.step, evaluation_scalars(evaluation)),
        };
        let value = scalars
            .into_iter()
            .map(|(tag, value)| Scalar { tag, simple_value: Some(value as f32) })
            .collect();
        self.event(&Event {
            wall_time: seconds_since_1970(now),
            step: signed(step),
            summary: Some(Summary { value }),
            ..Event::default()
        })
    }

    fn event(&mut self, event: &Event) -> Result<(), EventError> {
        let payload = event.encode_to_vec();
        let length = (payload.len() as u64).to_le_bytes();
        let (length_crc, payload_crc) = (masked_crc(&length), masked_crc(&payload));
        let record =
            [&length[..], &length_crc.to_le_bytes(), &payload, &payload_crc.to_le_bytes()].concat();
        self.file.piece(&record).map_err(failed(&self.path))
    }
}

/// Creates a file named after the second. Further files of the same second are numbered, so that
/// the order of names is the order of creation.
fn create_file(folder: &Path, seconds: f64) -> Result<(PathBuf, File), EventError> {
    let first = format!("events.out.tfevents.{seconds:.0}.gpipe");
    let mut count = 0;
    loop {
        let path = match count {
            0 => folder.join(&first),
            _ => folder.join(format!("{first}.{count:03}")),
        };
        match File::create_new(&path) {
            Err(error)
                if error.kind() == io::ErrorKind::AlreadyExists
                    && count + 1 < FILES_PER_SECOND_MAX =>
            {
                count += 1;
            }
            Err(error) => return Err(failed(&path)(error)),
            Ok(file) => return Ok((path, file)),
        }
    }
}

/// The tags and values of a step. The part of a tag before the slash is its group.
fn step_scalars(step: &Step) -> Vec<(String, f64)> {
    let mut scalars: Vec<(String, f64)> = [
        ("train/loss", step.loss),
        ("train/lr", step.lr),
        ("train/grad_norm", step.grad_norm),
        ("train/clip_scale", step.clip_scale),
        ("speed/tokens_per_s", step.tokens_per_s),
        ("speed/step_ms", step.step_ms),
        ("pipeline/bubble", step.bubble),
        // Communication and the parts of waiting sum to the bubble.
        ("pipeline/communication", step.share(|stage| stage.communication_ms)),
        ("pipeline/fill_drain", step.share(|stage| stage.fill_drain_ms)),
        ("pipeline/imbalance", step.share(|stage| stage.imbalance_ms)),
        ("pipeline/stalls", step.share(|stage| stage.stalls_ms)),
    ]
    .map(|(tag, value)| (tag.to_owned(), value))
    .into();
    scalars.extend(step.loss_scale.map(|scale| ("train/loss_scale".to_owned(), scale)));
    scalars.extend(step.metrics.iter().map(|(name, value)| (format!("train/{name}"), *value)));
    for (k, stage) in step.stages.iter().enumerate() {
        scalars.push((format!("pipeline/stage{k}_idle_ms"), stage.idle_ms));
        scalars.push((format!("memory/stage{k}_peak_bytes"), stage.peak_bytes as f64));
    }
    scalars
}

fn evaluation_scalars(evaluation: &Evaluation) -> Vec<(String, f64)> {
    let mut scalars = vec![("validation/loss".to_owned(), evaluation.loss)];
    let bits = evaluation.bits_per_byte.map(|bits| ("validation/bits_per_byte".to_owned(), bits));
    scalars.extend(bits);
    let metrics = evaluation.metrics.iter();
    scalars.extend(metrics.map(|(name, value)| (format!("validation/{name}"), *value)));
    scalars
}

/// CRC32C, rotated and offset as the format requires, because the CRC of data that contain CRCs is
/// weak.
fn masked_crc(bytes: &[u8]) -> u32 {
    CRC32C.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> EventError {
    let path = path.to_owned();
    move |source| EventError { path, source }
}

fn seconds_since_1970(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |duration| duration.as_secs_f64())
}

/// A step number as the format's signed integer.
fn signed(step: u64) -> i64 {
    i64::try_from(step).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::append::testing::Disk;

    #[test]
    fn fault_an_event_that_a_full_disk_refuses_leaves_nothing_wherever_it_was_torn() {
        let record = Record::Evaluation(Evaluation { step: 1, ..Evaluation::default() });
        let event = |writer: &mut Writer| writer.write(&record, UNIX_EPOCH);
        let one = Disk::new(b"");
        event(&mut Writer { path: "events".into(), file: one.append() }).unwrap();
        let one = one.state().bytes.clone();
        for room in 0..one.len() {
            let disk = Disk::new(b"");
            let mut writer = Writer { path: "events".into(), file: disk.append() };
            event(&mut writer).unwrap();
            disk.state().bytes_max = one.len() + room;
            let error = event(&mut writer).unwrap_err().to_string();
            assert!(error.starts_with("cannot write events: "), "{error}");
            assert_eq!(disk.state().bytes, one, "room for {room} bytes");
            disk.state().bytes_max = usize::MAX;
            event(&mut writer).unwrap();
            assert_eq!(disk.state().bytes, [&one[..], &one].concat());
        }
    }
}
