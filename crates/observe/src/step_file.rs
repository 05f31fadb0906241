//! `step.json`: one step of a run, for pictures. It has the measured timeline, the predicted one
//! and the bytes held.
//!
//! ```text
//! {"format":1,"step":10,
//! "measured":{"makespan":28900000,"devices":[
//! [["0F0",0,2300000],["0SEND_F0@0",2300000,2301000]],
//! [["1RECV_F0@0",0,2400000]]]},
//! "predicted":{"source":"...","timeline":{...}},
//! "memory":{"predicted":[[[0,4096],[2300000,8192]],..],"measured":[[[0,4096],..],..],
//! "peaks":[..],"caps":[null,..]}}
//! ```
//!
//! Times are nanoseconds from the start of the step. A device's actions are in order and do not
//! overlap. Each device is on a separate line, so the line number of an error identifies the
//! device. The writer applies the same checks as the reader.

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use gpipe_core::{
    Action, Bytes, Nanos, StageId,
    simulate::{TimedAction, Timeline},
};
use gpipe_files::{Aside, ReadError};
use serde::{Deserialize, Deserializer, Serialize, de};

/// The file's name in a run's folder.
pub const NAME: &str = "step.json";
/// The format version that is written and read.
pub const FORMAT: u32 = 1;
/// Maximum number of actions of both timelines together.
pub const ACTIONS_MAX: usize = 600_000;
/// Maximum number of points of all byte series together.
pub const POINTS_MAX: usize = 400_000;
/// Maximum number of devices, and of stages.
pub const STAGES_MAX: usize = 4_096;
/// Maximum duration of a step, about eleven days.
pub const TIME_MAX: Nanos = Nanos(1_000_000_000_000_000);
/// Maximum bytes held by a device. Small enough that sums fit 64 bits.
pub const BYTES_MAX: Bytes = Bytes(1 << 60);
/// Maximum number of bytes read from one file.
pub const FILE_BYTES_MAX: u64 = 64 << 20;
/// Maximum number of bytes of a text in the file.
pub const TEXT_BYTES_MAX: usize = 1_000;

/// One step of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepFile {
    /// The step's number.
    pub step: u64,
    /// Whether it ran on simulated GPUs, whose times say nothing about real ones.
    pub simulated_gpus: bool,
    /// The measured timeline.
    pub measured: Timeline,
    /// The predicted timeline.
    pub predicted: Option<Predicted>,
    /// The bytes held by devices.
    pub memory: Memory,
}

/// A timeline that was predicted rather than measured.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Predicted {
    /// The prediction's source, such as "simulated from the costs measured in 40 steps".
    pub source: String,
    /// The timeline.
    pub timeline: Timeline,
}

/// Bytes held by each device. Fields are empty if unknown.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Predicted bytes over time. Each value holds from its time until the next one.
    pub predicted: Vec<Vec<(Nanos, Bytes)>>,
    /// Measured bytes over time, in the same form.
    #[serde(default)]
    pub measured: Vec<Vec<(Nanos, Bytes)>>,
    /// Measured peak bytes.
    pub peaks: Vec<Bytes>,
    /// Maximum bytes allowed.
    pub caps: Vec<Option<Bytes>>,
}

/// An error of a step file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepFileError {
    /// The operating system reported an error.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The attempted action: "read", "write" or "replace".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file was not written by a run in this format.
    #[error("{} is damaged: {reason}; it is written anew by the run's next `gpipe train \
        --resume`", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// The step cannot be written to a file.
    #[error("the step is not written to {}: {reason}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why it cannot be written.
        reason: String,
    },
}

impl StepFile {
    /// Writes the step to a temporary file and renames it to `path`, so a crash leaves either the
    /// old file or the new one.
    ///
    /// # Errors
    /// [`StepFileError`]: the step exceeds the limits above, or the system reports an error. The
    /// old file is unchanged then.
    pub fn write(&self, path: &Path) -> Result<(), StepFileError> {
        self.check().map_err(|reason| StepFileError::Refused { path: path.to_owned(), reason })?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let aside =
            Aside::new(path, folder.unwrap_or(Path::new("."))).map_err(failed("write", path))?;
        let mut out = BufWriter::new(aside.file());
        self.write_to(&mut out).and_then(|()| out.flush()).map_err(failed("write", path))?;
        drop(out);
        aside.publish().map_err(failed("replace", path))
    }

    /// Reads a file that [`Self::write`] wrote.
    ///
    /// # Errors
    /// [`StepFileError`]: the file cannot be read, exceeds the limits above, or is not a step file.
    /// The error names the line, or the device and action.
    pub fn read(path: &Path) -> Result<Self, StepFileError> {
        let damaged = |reason| StepFileError::Damaged { path: path.to_owned(), reason };
        let bytes = gpipe_files::read(path, FILE_BYTES_MAX).map_err(|error| match error {
            ReadError::TooLarge { .. } => damaged(error.to_string()),
            other => failed("read", path)(other.into()),
        })?;
        let text = String::from_utf8(bytes).map_err(|error| damaged(error.to_string()))?;
        Self::parse(&text).map_err(damaged)
    }

    /// The file's content, as [`Self::write`] writes it.
    ///
    /// # Errors
    /// Describes what exceeds the limits above, and where.
    pub fn to_json(&self) -> Result<String, String> {
        self.check()?;
        let mut text = Vec::new();
        self.write_to(&mut text).map_err(|error| error.to_string())?;
        String::from_utf8(text).map_err(|error| error.to_string())
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// Describes what is wrong, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(format!("it has more than {}", Bytes(FILE_BYTES_MAX)));
        }
        let form: Form = serde_json::from_str(text).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            format!("it is not a step that gpipe wrote (line {line}, column {column})")
        })?;
        if form.format != FORMAT {
            let format = form.format;
            return Err(format!("it has format {format}, and this program reads {FORMAT}"));
        }
        let Form { step, simulated_gpus, measured, predicted, memory, .. } = form;
        let predicted = predicted
            .map(|FormPredicted { source, timeline }| Predicted { source, timeline: timeline.0 });
        let step = Self { step, simulated_gpus, measured: measured.0, predicted, memory };
        step.check()?;
        Ok(step)
    }

    fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let step = self.step;
        let simulated = if self.simulated_gpus { "\"simulated_gpus\":true," } else { "" };
        write!(out, "{{\"format\":{FORMAT},\"step\":{step},{simulated}\n\"measured\":")?;
        write_timeline(out, &self.measured)?;
        if let Some(Predicted { source, timeline }) = &self.predicted {
            out.write_all(b",\n\"predicted\":{\"source\":")?;
            serde_json::to_writer(&mut *out, source)?;
            out.write_all(b",\"timeline\":")?;
            write_timeline(out, timeline)?;
            out.write_all(b"}")?;
        }
        out.write_all(b",\n\"memory\":")?;
        serde_json::to_writer(&mut *out, &self.memory)?;
        out.write_all(b"}\n")
    }

    /// Checks that everything is within the limits and in order.
    fn check(&self) -> Result<(), String> {
        let predicted = self.predicted.as_ref();
        let timelines = || {
            let predicted = predicted.map(|predicted| ("predicted", &predicted.timeline));
            [("measured", &self.measured)].into_iter().chain(predicted)
        };
        let actions: usize =
            timelines().flat_map(|(_, timeline)| &timeline.devices).map(Vec::len).sum();
        if actions > ACTIONS_MAX {
            return Err(format!("it has {actions} actions, and the most is {ACTIONS_MAX}"));
        }
        if predicted.is_some_and(|predicted| predicted.source.len() > TEXT_BYTES_MAX) {
            return Err(format!("predicted: its source has more than {TEXT_BYTES_MAX} bytes"));
        }
        for (name, timeline) in timelines() {
            check_timeline(timeline).map_err(|reason| format!("{name}, {reason}"))?;
        }
        check_memory(&self.memory).map_err(|reason| format!("memory, {reason}"))
    }
}

fn check_timeline(timeline: &Timeline) -> Result<(), String> {
    let Timeline { devices, makespan } = timeline;
    if devices.len() > STAGES_MAX {
        return Err(format!("{} devices, and the most is {STAGES_MAX}", devices.len()));
    }
    if *makespan > TIME_MAX {
        return Err(format!("makespan: {} ns is more than {}", makespan.0, TIME_MAX.0));
    }
    for (device, actions) in devices.iter().enumerate() {
        let mut now = Nanos(0);
        for (position, &TimedAction { action, start, end }) in actions.iter().enumerate() {
            let wrong =
                |what: &str| Err(format!("device {device}, action {position} ({action}): {what}"));
            if action.stage.index() >= STAGES_MAX {
                return wrong("its stage is beyond the most that there can be");
            }
            if start < now {
                return wrong("it starts before the one before it ends");
            }
            if end < start {
                return wrong("it ends before it starts");
            }
            if end > *makespan {
                return wrong("it ends after the step");
            }
            now = end;
        }
    }
    Ok(())
}

fn check_memory(memory: &Memory) -> Result<(), String> {
    let Memory { predicted, measured, peaks, caps } = memory;
    if predicted.len().max(measured.len()).max(peaks.len()).max(caps.len()) > STAGES_MAX {
        return Err(format!("it has more than {STAGES_MAX} stages"));
    }
    let points: usize = predicted.iter().chain(measured).map(Vec::len).sum();
    if points > POINTS_MAX {
        return Err(format!("it has {points} points, and the most is {POINTS_MAX}"));
    }
    let is_too_much = |bytes: &Bytes| *bytes > BYTES_MAX;
    if peaks.iter().chain(caps.iter().flatten()).any(is_too_much) {
        return Err(format!("a peak or cap is more than {BYTES_MAX}"));
    }
    let named = predicted.iter().enumerate().chain(measured.iter().enumerate());
    for (stage, series) in named {
        let mut now = Nanos(0);
        for (position, (time, bytes)) in series.iter().enumerate() {
            if *time < now || *time > TIME_MAX || is_too_much(bytes) {
                return Err(format!(
                    "stage {}, point {position}: its time is before that of the one before it, or \
                    it is too large",
                    StageId::from_index(stage)
                ));
            }
            now = *time;
        }
    }
    Ok(())
}

/// Writes a timeline, one device per line.
fn write_timeline(out: &mut impl Write, timeline: &Timeline) -> io::Result<()> {
    write!(out, "{{\"makespan\":{},\"devices\":[", timeline.makespan.0)?;
    for (device, actions) in timeline.devices.iter().enumerate() {
        out.write_all(if device == 0 { b"\n[" } else { b",\n[" })?;
        for (position, TimedAction { action, start, end }) in actions.iter().enumerate() {
            let comma = if position == 0 { "" } else { "," };
            write!(out, "{comma}[\"{action}\",{},{}]", start.0, end.0)?;
        }
        out.write_all(b"]")?;
    }
    out.write_all(b"]}")
}

/// The file's JSON form, for reading.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    format: u32,
    step: u64,
    #[serde(default)]
    simulated_gpus: bool,
    measured: FormTimeline,
    #[serde(default)]
    predicted: Option<FormPredicted>,
    #[serde(default)]
    memory: Memory,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FormPredicted {
    source: String,
    timeline: FormTimeline,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename = "a timeline")]
struct Devices {
    makespan: Nanos,
    devices: Vec<Vec<(Text, Nanos, Nanos)>>,
}

struct FormTimeline(Timeline);

impl<'de> Deserialize<'de> for FormTimeline {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Devices { makespan, devices } = Devices::deserialize(deserializer)?;
        let timed = |(Text(action), start, end)| TimedAction { action, start, end };
        let devices =
            devices.into_iter().map(|actions| actions.into_iter().map(timed).collect()).collect();
        Ok(Self(Timeline { devices, makespan }))
    }
}

/// An action as text. It is parsed during deserialization, so that an error has a position in the
/// file.
struct Text(Action);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Text;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an action such as \"2F0\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Text, E> {
                // Cut the text, because an error quotes all of it. No action is this long.
                let text: String = text.chars().take(64).collect();
                text.parse().map(Text).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StepFileError + use<> {
    let path = path.to_owned();
    move |source| StepFileError::Io { action, path, source }
}
