//! Values that configurations and flags write as text, with their parsers and printers.
//!
//! - [`choices`]: values that are one of several names

mod choices;

use std::{
    fmt::{self, Display},
    path::PathBuf,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

pub(crate) use choices::{
    Decays, Dtype, GeluChoice, JsonChoice, KernelChoice, MomentsChoice, OnBadLineChoice, OnNan,
    OnUnreadableChoice, OptimizerName, PackingChoice, VariantName,
};
use gpipe::{Balance, Bytes, Device, RematPolicies, Schedule, processes::Links};
use gpipe_core::schedule::{CustomSchedule, UnknownSchedule, custom::BYTES_MAX};
use serde::{Deserialize, Deserializer, Serializer};

use crate::{CliError, files::read_bounded};

/// Parses a flag's whole number.
pub(crate) fn whole<T: FromStr>(text: &str) -> Result<T, &'static str> {
    text.parse().map_err(|_| match !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit()) {
        true => "the number is too large",
        false => "give a whole number, 0 or more",
    })
}

/// Parses a flag's number.
pub(crate) fn number(text: &str) -> Result<f64, &'static str> {
    text.parse().map_err(|_| "give a number")
}

/// A schedule as a configuration names it. A file is read only when the schedule is needed, so that
/// a run can resume under another schedule after the file is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScheduleChoice {
    Named(Schedule),
    File(PathBuf),
    /// An order is made for measured costs: by `gpipe plan`, or before a training.
    Auto,
}

impl ScheduleChoice {
    /// The schedule. A file is read and validated.
    pub(crate) fn schedule(&self) -> Result<Schedule, CliError> {
        let path = match self {
            Self::Named(schedule) => return Ok(schedule.clone()),
            Self::File(path) => path,
            Self::Auto => {
                return Err(CliError::Usage(
                    "schedule auto is an order that gpipe train, trace, ledger and plan make for \
                    measured costs: name a schedule here"
                        .into(),
                ));
            }
        };
        let text = read_bounded(path, BYTES_MAX as u64)?;
        let is_csv = path.extension().is_some_and(|own| own.eq_ignore_ascii_case("csv"));
        let parse = if is_csv { CustomSchedule::parse_csv } else { CustomSchedule::parse };
        let listed = parse(&path.display().to_string(), &text);
        let listed = listed.map_err(|error| CliError::Usage(error.to_string()))?;
        Ok(Schedule::Custom(Arc::new(listed)))
    }

    /// The number of stages that the schedule creates on this many devices, or `devices` if that is
    /// not known yet. A schedule that does not fit is refused later.
    pub(crate) fn stages(&self, devices: usize) -> usize {
        let stages = self.schedule().ok().and_then(|schedule| schedule.stages(devices).ok());
        stages.unwrap_or(devices)
    }
}

impl fmt::Display for ScheduleChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(schedule) => schedule.fmt(f),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl AsPlainText for ScheduleChoice {
    fn plain(&self) -> String {
        match self {
            Self::Named(schedule) => schedule.in_full(),
            _ => self.to_string(),
        }
    }
}

impl FromStr for ScheduleChoice {
    type Err = UnknownSchedule;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("file:") {
            Some(path) => Ok(Self::File(path.into())),
            None if text == "auto" => Ok(Self::Auto),
            None => text.parse().map(Self::Named),
        }
    }
}

/// Memory caps: one for all devices, one per device, or `none`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Caps(pub Vec<Bytes>);

impl Display for Caps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        let caps: Vec<String> = self.0.iter().map(AsPlainText::plain).collect();
        f.write_str(&caps.join(","))
    }
}

impl FromStr for Caps {
    type Err = gpipe_core::units::ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" {
            return Ok(Self::default());
        }
        Ok(Self(text.split(',').map(str::parse).collect::<Result<_, _>>()?))
    }
}

/// A maximum number of bytes, or `all`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum MostBytes {
    #[default]
    All,
    Bytes(Bytes),
}

impl MostBytes {
    /// The limit, if there is one.
    pub(crate) fn limit(self) -> Option<u64> {
        match self {
            Self::All => None,
            Self::Bytes(bytes) => Some(bytes.0),
        }
    }
}

impl Display for MostBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Bytes(bytes) => f.write_str(&bytes.plain()),
        }
    }
}

impl FromStr for MostBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim() {
            "all" => Ok(Self::All),
            text => text
                .parse()
                .map(Self::Bytes)
                .map_err(|error: gpipe_core::units::ParseBytesError| format!("{error}; or all")),
        }
    }
}

/// Which tokenizer a text model uses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum TokenizerChoice {
    /// The tokenizer of the initial weights, or a new one without initial weights.
    #[default]
    Auto,
    /// A new tokenizer, trained on the training text.
    New,
    /// The tokenizer of a file.
    File(PathBuf),
}

impl Display for TokenizerChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::New => f.write_str("new"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

impl FromStr for TokenizerChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "" => Err("use auto, new, or the path of a tokenizer.json".into()),
            "auto" => Ok(Self::Auto),
            "new" => Ok(Self::New),
            path => Ok(Self::File(path.into())),
        }
    }
}

/// Devices of the stages: one for all stages, or one per stage, such as `cpu` or `cuda:0,cuda:1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Devices(pub Vec<Device>);

impl Display for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&names.join(","))
    }
}

impl FromStr for Devices {
    type Err = gpipe::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let devices = text.split(',').map(|name| name.trim().parse());
        Ok(Self(devices.collect::<Result<_, _>>()?))
    }
}

/// How often a checkpoint is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Every {
    /// Only when a run is ended early, neither during the run nor at its end.
    Never,
    /// After this many steps.
    Steps(u64),
    /// After this much time.
    Time(Duration),
}

impl Default for Every {
    /// Every ten minutes.
    fn default() -> Self {
        Self::Time(Duration::from_secs(600))
    }
}

/// Units of time, longest first.
const TIME_UNITS: [(&str, u64); 3] = [("h", 3600), ("min", 60), ("s", 1)];

impl Display for Every {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Never => f.write_str("none"),
            Self::Steps(steps) => write!(f, "{steps}"),
            Self::Time(time) => {
                let seconds = time.as_secs();
                let exact = TIME_UNITS.iter().find(|(_, unit)| seconds.is_multiple_of(*unit));
                let (name, unit) = exact.unwrap_or(&("s", 1));
                write!(f, "{}{name}", seconds / unit)
            }
        }
    }
}

impl FromStr for Every {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit = match unit.trim() {
            "m" => "min",
            unit => unit,
        };
        let found = match (text, number.parse::<u64>(), unit) {
            ("none", ..) => Some(Self::Never),
            (_, Ok(steps), "") => Some(Self::Steps(steps)),
            (_, Ok(number), unit) => {
                let unit = TIME_UNITS.iter().find(|(name, _)| *name == unit);
                unit.map(|(_, unit)| Self::Time(Duration::from_secs(number.saturating_mul(*unit))))
            }
            _ => None,
        };
        found
            .filter(|every| {
                !matches!(every, Self::Steps(0)) && *every != Self::Time(Duration::ZERO)
            })
            .ok_or_else(|| {
                format!("'{text}' is neither steps (50) nor time (10min, 90s, 2h) nor none")
            })
    }
}

/// Where the tokens of samples are cached.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum CacheChoice {
    /// In `gpipe/tokens` in the user's cache folder.
    #[default]
    Auto,
    /// Nowhere.
    Off,
    /// In a folder.
    Folder(PathBuf),
}

impl Display for CacheChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Folder(path) => write!(f, "{}", path.display()),
        }
    }
}

impl FromStr for CacheChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "" => Err("use auto, off, or the path of a folder".into()),
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            path => Ok(Self::Folder(path.into())),
        }
    }
}

/// What training crops from an image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum CropChoice {
    /// The same crop as in evaluation.
    None,
    /// The same crop, moved by up to this many pixels, with zeros around the image.
    Padded(usize),
    /// A crop of at least this fraction of the area, with an aspect ratio between 3/4 and 4/3.
    Resized(f64),
}

impl Display for CropChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Padded(pixels) => write!(f, "padded:{pixels}"),
            Self::Resized(share) => write!(f, "resized:{share}"),
        }
    }
}

impl FromStr for CropChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = match text.split_once(':') {
            None if text == "none" => Some(Self::None),
            None if text == "resized" => Some(Self::Resized(0.08)),
            Some(("padded", pixels)) => pixels.parse().ok().map(Self::Padded),
            Some(("resized", share)) => share.parse().ok().map(Self::Resized),
            _ => None,
        };
        found.ok_or_else(|| {
            format!(
                "'{text}' is no crop: use none, padded:PIXELS or resized:LEAST_SHARE (resized \
                alone: 0.08)"
            )
        })
    }
}

/// Serializes values as text in TOML.
pub(super) mod as_text {
    use super::*;

    pub(crate) fn serialize<T: Display + AsPlainText, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&value.plain())
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr,
        T::Err: Display,
        D: Deserializer<'de>,
    {
        /// Plain TOML values that are accepted where text is expected, such as `memory = 1000`.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Plain {
            Text(String),
            Number(u64),
        }
        let text = match Plain::deserialize(deserializer)? {
            Plain::Text(text) => text,
            Plain::Number(number) => number.to_string(),
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Writes a value in a form that parses back to the same value.
pub(super) trait AsPlainText {
    fn plain(&self) -> String;
}

impl AsPlainText for Bytes {
    fn plain(&self) -> String {
        let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        let exact = units.iter().find(|(_, size)| self.0 > 0 && self.0.is_multiple_of(*size));
        match exact {
            Some((unit, size)) => format!("{}{unit}", self.0 / size),
            None => self.0.to_string(),
        }
    }
}

macro_rules! plain_is_display {
    ($($type:ty),*) => {
        $(impl AsPlainText for $type {
            fn plain(&self) -> String {
                self.to_string()
            }
        })*
    };
}

plain_is_display!(
    Balance,
    RematPolicies,
    Caps,
    MostBytes,
    TokenizerChoice,
    JsonChoice,
    Devices,
    Dtype,
    KernelChoice,
    Links,
    Decays,
    OptimizerName,
    MomentsChoice,
    OnNan,
    Every,
    VariantName,
    GeluChoice,
    OnUnreadableChoice,
    PackingChoice,
    OnBadLineChoice,
    CacheChoice,
    CropChoice
);
