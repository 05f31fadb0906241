//! `manifest.json`: describes a checkpoint and has the size and SHA-256 of every file in it. It is
//! written last, so a folder without a valid manifest is not a checkpoint.
//!
//! The first field is the SHA-256 of the manifest itself, computed with zeros in place of its 64
//! digits. It detects a changed step or counter. All numbers are read back bit for bit.

use std::{collections::HashSet, path::Path};

use gpipe::state::{Counters, LayerOutline};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::tensor_file::shown;

/// The format version that is written, and the only one that is read.
pub const FORMAT: u32 = 1;
/// Maximum size of a manifest, in bytes.
pub const BYTES_MAX: u64 = 64 << 20;
/// The manifest's file name in a checkpoint's folder.
pub const NAME: &str = "manifest.json";

/// The text before the digits of the manifest's checksum.
const OPENING: &str = "{\n  \"checksum\": \"";
const DIGITS: usize = 64;

/// The content of `manifest.json`, except its checksum.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The format version, [`FORMAT`].
    pub format: u32,
    /// The program and version that wrote the checkpoint.
    pub written_by: String,
    /// The run's position in its data.
    pub progress: TrainPosition,
    /// The pipeline's counters.
    pub counters: CounterFields,
    /// The best evaluation so far.
    pub best: Option<Best>,
    /// How the model was run. Not needed to resume.
    pub plan: PlanFields,
    /// The run's whole configuration as TOML, or empty if the caller has none.
    pub config: String,
    /// The model's layers in order.
    pub layers: Vec<Layer>,
    /// Files that belong to the run and to no layer, such as the tokenizer.
    pub files: Vec<FileEntry>,
}

/// A run's position in its data.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainPosition {
    /// Mini-batches consumed, whether or not their update was applied. Names the checkpoint.
    pub batches: u64,
    /// Samples in those mini-batches.
    pub samples: u64,
    /// Tokens (or whatever the loss counts) in those mini-batches.
    pub tokens: u64,
    /// Mini-batches whose update was skipped.
    pub skipped: u64,
    /// Whether the evaluation due after these mini-batches, if any, is done.
    pub evaluated: bool,
    /// Identifies the data, for example by SHA-256. A run resumes only with the same data.
    pub data: String,
    /// Step records written to the run's metrics file so far; `None` if they were not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<u64>,
}

/// The best evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// [`TrainPosition::batches`] at the evaluation.
    pub batches: u64,
    /// The evaluation's loss.
    pub loss: f64,
}

/// The serialized form of [`Counters`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // see there
pub struct CounterFields {
    pub step: u64,
    pub seed: u64,
    pub learning_rate: Option<f64>,
    pub loss_scale: Option<f64>,
    pub good_steps: u32,
    pub averaged: u64,
}

/// The serialized form of [`gpipe::RunSettings`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // see there
pub struct PlanFields {
    pub stages: usize,
    pub micro_batches: usize,
    pub schedule: String,
    pub remat: String,
    pub balance: Vec<usize>,
    pub dtype: String,
}

/// A layer of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// The layer's name.
    pub name: String,
    /// The parameters that the layer owns. A tied weight belongs to the first layer that uses it.
    pub parameters: Vec<Parameter>,
    /// The layer's files; empty if it owns no parameters.
    pub files: Vec<FileEntry>,
}

/// A parameter of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// The name within the layer.
    pub name: String,
    /// The shape.
    pub shape: Vec<i64>,
    /// The dtype in which the parameter is kept: `float32` or `float64`.
    pub dtype: String,
    /// Number of updates applied; `None` if the optimizer has no state for the parameter yet.
    pub updates: Option<u64>,
    /// The names of its optimizer state tensors.
    pub optimizer: Vec<String>,
    /// Whether the parameter has a moving average.
    pub averaged: bool,
}

/// A file of the checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The kind of content.
    pub kind: FileKind,
    /// The file name in the checkpoint's folder.
    pub path: String,
    /// The length in bytes.
    pub bytes: u64,
    /// SHA-256 of the content, as `sha256sum` prints it.
    pub sha256: String,
}

/// The kind of content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// Parameters, by full name (`layer.parameter`).
    Parameters,
    /// Optimizer state, by full name (`layer.parameter.tensor`).
    Optimizer,
    /// Moving averages, by the full name of the parameter.
    Averages,
    /// A file of the run, such as the tokenizer.
    Run,
}

impl Manifest {
    /// Encodes the manifest as the bytes of `manifest.json`.
    ///
    /// # Errors
    /// The manifest could not be read back: it has a non-finite number or a path outside the
    /// folder, or is larger than [`BYTES_MAX`].
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        // JSON has no NaN or infinity; serde would write null.
        let CounterFields { learning_rate, loss_scale, .. } = self.counters;
        let best = self.best.map(|best| best.loss);
        let numbers =
            [("learning rate", learning_rate), ("loss scale", loss_scale), ("best loss", best)];
        for (what, value) in numbers {
            if let Some(value) = value.filter(|value| !value.is_finite()) {
                return Err(format!("the {what} is {value}: only a finite one can be written"));
            }
        }
        let fields = serde_json::to_string_pretty(self).map_err(|error| error.to_string())?;
        let rest = fields.strip_prefix('{').unwrap_or_default();
        let with = |digits: &str| format!("{OPENING}{digits}\",{rest}\n").into_bytes();
        let bytes = with(&sha256(&with(&"0".repeat(DIGITS))));
        if bytes.len() as u64 > BYTES_MAX {
            return Err(format!("it has {} bytes, at most {BYTES_MAX} are read", bytes.len()));
        }
        Self::decode(&bytes)?;
        Ok(bytes)
    }

    /// Decodes the bytes of `manifest.json` and checks what can be checked without other files.
    ///
    /// # Errors
    /// Describes what is wrong with the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let end = OPENING.len() + DIGITS;
        let digits = bytes
            .strip_prefix(OPENING.as_bytes())
            .and_then(|rest| rest.get(..DIGITS))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
            .ok_or("it does not open with its checksum: it is no manifest, or damaged")?;
        let mut blank = bytes.to_vec();
        if let Some(place) = blank.get_mut(OPENING.len()..end) {
            place.fill(b'0');
        }
        let found = sha256(&blank);
        if found != digits {
            return Err(format!("its SHA-256 is {found}, it says {digits}: it is damaged"));
        }
        // Turns the rest, `",` and the fields, into a JSON object.
        let fields = blank.get_mut(end + 1..).filter(|rest| rest.first() == Some(&b','));
        let fields = fields.ok_or("it is no manifest: there is nothing after its checksum")?;
        fields[0] = b'{';
        Self::parse(fields)
    }

    /// Parses what follows the checksum. Public for fuzzing.
    #[doc(hidden)]
    pub fn parse(fields: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let no_manifest = |error| format!("it is no manifest: {}", shown(&error));
        let version: Version = serde_json::from_slice(fields).map_err(no_manifest)?;
        if version.format != FORMAT {
            return Err(format!(
                "it is of format {}, this version of gpipe reads {FORMAT}: use the version that \
                wrote it",
                version.format
            ));
        }
        let manifest: Self = serde_json::from_slice(fields).map_err(no_manifest)?;
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        let mut names = HashSet::new();
        for layer in &self.layers {
            if !names.insert(&layer.name) {
                return Err(format!("it names the layer '{}' twice", shown(&layer.name)));
            }
            layer.check()?;
        }
        let mut paths = HashSet::new();
        for file in self.all_files() {
            check_path(&file.path)?;
            if !paths.insert(&file.path) {
                return Err(format!("it names the file '{}' twice", shown(&file.path)));
            }
        }
        match self.files.iter().find(|file| file.kind != FileKind::Run) {
            Some(file) => Err(format!("the file '{}' is of no layer", shown(&file.path))),
            None => Ok(()),
        }
    }

    /// Every file of the checkpoint except the manifest.
    pub fn all_files(&self) -> impl Iterator<Item = &FileEntry> {
        self.layers.iter().flat_map(|layer| &layer.files).chain(&self.files)
    }

    /// Total size of all files, in bytes, without the manifest.
    pub fn bytes(&self) -> u64 {
        self.all_files().map(|file| file.bytes).fold(0, u64::saturating_add)
    }

    /// Describes, for the user, what does not fit a model with `outlines`. Empty if everything
    /// fits.
    pub fn misfits(&self, outlines: &[LayerOutline]) -> Vec<String> {
        let mut all = Vec::new();
        for outline in outlines {
            match self.layers.iter().find(|layer| layer.name == outline.layer) {
                Some(layer) => all.extend(layer.misfits(outline)),
                None => all.push(format!("it has no layer '{}'", outline.layer)),
            }
        }
        let unknown = |layer: &&Layer| !outlines.iter().any(|outline| outline.layer == layer.name);
        let unknown = self.layers.iter().filter(unknown);
        all.extend(unknown.map(|layer| format!("the model has no layer '{}'", shown(&layer.name))));
        let mut pairs = self.layers.iter().zip(outlines);
        if let (true, Some((given, own))) =
            (all.is_empty(), pairs.find(|(given, own)| given.name != own.layer))
        {
            let (given, own) = (&given.name, &own.layer);
            all.push(format!(
                "its layers are in another order: '{given}' is where '{own}' should be"
            ));
        }
        all
    }
}

/// The full name of a tensor, with its dtype and shape if the manifest has them.
pub(crate) type Described<'a> = (String, Option<(&'a str, &'a [i64])>);

impl Layer {
    /// The tensors in the layer's file of one kind. The manifest has no dtypes and shapes of
    /// optimizer state, which can be of any dtype and shape.
    pub(crate) fn tensors(&self, kind: FileKind) -> Vec<Described<'_>> {
        let mut all = Vec::new();
        for parameter in &self.parameters {
            let name = format!("{}.{}", self.name, parameter.name);
            let described = Some((parameter.dtype.as_str(), &parameter.shape[..]));
            match kind {
                FileKind::Parameters => all.push((name, described)),
                FileKind::Averages if parameter.averaged => all.push((name, described)),
                FileKind::Optimizer if parameter.updates.is_some() => {
                    let kept = parameter.optimizer.iter();
                    all.extend(kept.map(|tensor| (format!("{name}.{tensor}"), None)));
                }
                FileKind::Averages | FileKind::Optimizer | FileKind::Run => {}
            }
        }
        all
    }

    /// Checks that the layer has one file of each kind that it has tensors of, and no other.
    fn check(&self) -> Result<(), String> {
        use FileKind::{Averages, Optimizer, Parameters, Run};
        for kind in [Parameters, Optimizer, Averages, Run] {
            let wanted = usize::from(!self.tensors(kind).is_empty());
            let found = self.files.iter().filter(|file| file.kind == kind).count();
            if found != wanted {
                let name = shown(&self.name);
                return Err(format!(
                    "layer '{name}' has {found} files of kind {kind:?}, not {wanted}"
                ));
            }
        }
        Ok(())
    }

    /// Describes what does not fit the model's layer of the same name.
    fn misfits(&self, outline: &LayerOutline) -> Vec<String> {
        let name = &outline.layer;
        let own: Vec<&str> = outline.parameters.iter().map(|own| own.name.as_str()).collect();
        let given: Vec<&str> = self.parameters.iter().map(|given| given.name.as_str()).collect();
        if own != given {
            let (given, own) = (shown(&given.join(", ")), own.join(", "));
            return vec![format!(
                "layer '{name}' has the parameters [{given}], the model's [{own}]"
            )];
        }
        let mut all = Vec::new();
        for (given, own) in self.parameters.iter().zip(&outline.parameters) {
            let (shape, dtype) = (&own.shape, dtype_name(own.kind));
            if given.shape != *shape || given.dtype != dtype {
                let given = shown(&format!("{} {:?}", given.dtype, given.shape));
                all.push(format!("{name}.{} is {given}, the model's {dtype} {shape:?}", own.name));
            }
            let wanted: Vec<&String> = own.optimizer.iter().map(|(name, _)| name).collect();
            let kept: Vec<&String> = given.optimizer.iter().collect();
            if given.updates.is_some() && !wanted.is_empty() && wanted != kept {
                let kept = shown(&format!("{kept:?}"));
                all.push(format!(
                    "{name}.{}: its optimizer keeps {kept}, this one {wanted:?}",
                    own.name
                ));
            }
        }
        all
    }
}

/// Checks that `path` is a plain file name other than the manifest's.
pub(crate) fn check_path(path: &str) -> Result<(), String> {
    if Path::new(path).file_name() == Some(path.as_ref()) && path != NAME {
        return Ok(());
    }
    Err(format!("'{}' is no name for a file in a checkpoint", shown(&path)))
}

impl From<&Counters> for CounterFields {
    fn from(counters: &Counters) -> Self {
        let &Counters { step, seed, learning_rate, loss_scale, good_steps, averaged } = counters;
        Self { step, seed, learning_rate, loss_scale, good_steps, averaged }
    }
}

impl From<&CounterFields> for Counters {
    fn from(fields: &CounterFields) -> Self {
        let &CounterFields { step, seed, learning_rate, loss_scale, good_steps, averaged } = fields;
        Self { step, seed, learning_rate, loss_scale, good_steps, averaged }
    }
}

impl From<gpipe::RunSettings> for PlanFields {
    fn from(plan: gpipe::RunSettings) -> Self {
        let gpipe::RunSettings { stages, micro_batches, schedule, remat, balance, kind } = plan;
        let dtype = dtype_name(kind);
        Self { stages, micro_batches, schedule, remat, balance, dtype }
    }
}

/// The name of a dtype as configurations spell it.
pub fn dtype_name(kind: tch::Kind) -> String {
    match kind {
        tch::Kind::Float => "float32".into(),
        tch::Kind::Double => "float64".into(),
        tch::Kind::BFloat16 => "bfloat16".into(),
        tch::Kind::Half => "float16".into(),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// SHA-256 as 64 lower-case hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
