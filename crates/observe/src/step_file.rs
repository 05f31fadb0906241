//! `step.json`: what a run leaves of one step, for pictures of it: the measured timeline, what was
//! predicted, and bytes.
//!
//! ```text
//! {"format":1,"step":10,
//! "measured":{"makespan":28900000,"devices":[
//! [["0F0",0,2300000],["0SEND_F0@0",2300000,2301000]],
//! [["1RECV_F0@0",0,2400000]]]},
//! "predicted":{"source":"...","timeline":{...}},
//! "memory":{"predicted":[[[0,4096],[2300000,8192]],..],"peaks":[..],"caps":[null,..]}}
//! ```
//!
//! Times are nanoseconds from the start of the step, a device's actions are in its order and do not
//! overlap, and each device has a line of its own, so that an error's line says which it is of.
//! What is written has passed the checks of what is read.

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
/// The form of the file that this version writes and reads.
pub const FORMAT: u32 = 1;
/// Most actions of both timelines together.
pub const ACTIONS_MAX: usize = 600_000;
/// Most points of all series of bytes together.
pub const POINTS_MAX: usize = 400_000;
/// Most devices, and stages.
pub const STAGES_MAX: usize = 4_096;
/// Longest step: eleven days.
pub const TIME_MAX: Nanos = Nanos(1_000_000_000_000_000);
/// Most bytes that a device holds: an eighth of what 64 bits can say, so that sums are good, too.
pub const BYTES_MAX: Bytes = Bytes(1 << 60);
/// Most bytes read from one file.
pub const FILE_BYTES_MAX: u64 = 64 << 20;
/// Most bytes of a text in it.
pub const TEXT_BYTES_MAX: usize = 1_000;

/// One step of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepFile {
    /// Its number.
    pub step: u64,
    /// What happened.
    pub measured: Timeline,
    /// What was to happen.
    pub predicted: Option<Predicted>,
    /// What devices held.
    pub memory: Memory,
}

/// A timeline that nobody measured.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Predicted {
    /// Where it comes from, such as "simulated from the costs measured in 40 steps".
    pub source: String,
    /// The timeline.
    pub timeline: Timeline,
}

/// Bytes by device; of what is not known, nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// What each was to hold over the time of the prediction: from each time on, until the next
    /// one.
    pub predicted: Vec<Vec<(Nanos, Bytes)>>,
    /// What each held over the time of the step, in the same way.
    #[serde(default)]
    pub measured: Vec<Vec<(Nanos, Bytes)>>,
    /// The most that each held.
    pub peaks: Vec<Bytes>,
    /// The most that each may hold.
    pub caps: Vec<Option<Bytes>>,
}

/// What goes wrong with a step file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepFileError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "read", "write" or "replace".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file that no run wrote in this form.
    #[error("{} is damaged: {reason}; it is written anew by the run's next `gpipe train \
        --resume`", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// A step that does not go into a file.
    #[error("the step is not written to {}: {reason}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

impl StepFile {
    /// Writes the step aside and then in the place of `path`: a crash leaves the old file or the
    /// new.
    ///
    /// # Errors
    /// [`StepFileError`]: the step is larger than the bounds above, or the system refuses. The old
    /// file is unchanged then.
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

    /// Reads what [`Self::write`] wrote.
    ///
    /// # Errors
    /// [`StepFileError`]: the file cannot be read, is larger than the bounds above, or is not such
    /// a file; with the line, or the device and action.
    pub fn read(path: &Path) -> Result<Self, StepFileError> {
        let damaged = |reason| StepFileError::Damaged { path: path.to_owned(), reason };
        let bytes = gpipe_files::read(path, FILE_BYTES_MAX).map_err(|error| match error {
            ReadError::TooLarge { .. } => damaged(error.to_string()),
            other => failed("read", path)(other.into()),
        })?;
        let text = String::from_utf8(bytes).map_err(|error| damaged(error.to_string()))?;
        Self::parse(&text).map_err(damaged)
    }

    /// From the text of a file.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(format!("it has more than {}", Bytes(FILE_BYTES_MAX)));
        }
        let form: Form = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if form.format != FORMAT {
            let format = form.format;
            return Err(format!("it has format {format}, and this program reads {FORMAT}"));
        }
        let Form { step, measured, predicted, memory, .. } = form;
        let predicted = predicted
            .map(|FormPredicted { source, timeline }| Predicted { source, timeline: timeline.0 });
        let step = Self { step, measured: measured.0, predicted, memory };
        step.check()?;
        Ok(step)
    }

    fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let step = self.step;
        write!(out, "{{\"format\":{FORMAT},\"step\":{step},\n\"measured\":")?;
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

    /// Whether everything is within its bounds and in order.
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

/// A device a line.
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

/// The file as it is read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    format: u32,
    step: u64,
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

/// An action in its printed form, parsed as it is met: an error then has its place in the file.
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
                // No action is as long as that, and an error quotes all of what it is given.
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
