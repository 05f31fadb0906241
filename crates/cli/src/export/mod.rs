//! `gpipe export`: a model's parameters as one safetensors file, or as a folder that Hugging Face's
//! transformers reads.
//!
//! - [`adapters`]: merges adapters into the weights, or writes adapters in the format of PEFT

mod adapters;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use gpipe::{Bytes, Lora};
use gpipe_checkpoint::{
    TensorSet,
    fit::convert,
    model_folder,
    tensor_file::{FileError, Planned, TensorFile, shown, write_planned},
    weights::{self, Facts},
};
use gpipe_models::huggingface::{self, Network};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use crate::{
    CliError,
    args::{ExportArguments, RunArguments},
    config::{Config, Dtype, Model},
    facts,
    files::{folder_of, io},
    model_folder::{CONFIG, is_model_folder},
    output::say,
    run_folder::{AVERAGES, RunFolder, WEIGHTS, checkpoint_in},
    task::{self, Vocabulary},
};

/// The end of the name of a folder that is not complete yet.
const PARTIAL: &str = ".partial";

/// Writes the parameters of a checkpoint or run.
pub(crate) fn export(arguments: &ExportArguments) -> Result<(), CliError> {
    if !arguments.from.exists() {
        return Err(CliError::Usage(format!(
            "{}: there is no such folder: give that of a run, as `gpipe train` printed it",
            arguments.from.display()
        )));
    }
    if !arguments.from.is_dir() {
        return Err(CliError::Usage(format!(
            "{}: give the folder of a checkpoint or of a run",
            arguments.from.display()
        )));
    }
    match (&arguments.out, &arguments.to) {
        (Some(file), None) => to_file(arguments, file),
        (None, Some(folder)) => to_folder(arguments, folder),
        _ => Err(CliError::Usage(
            "say where to: --out FILE.safetensors, or --to FOLDER for transformers".into(),
        )),
    }
}

/// The name of a dtype in transformers.
fn name_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Double => "float64",
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        _ => "float32",
    }
}

fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Float32 => Kind::Float,
        Dtype::Float64 => Kind::Double,
        Dtype::BFloat16 => Kind::BFloat16,
        Dtype::Float16 => Kind::Half,
    }
}

/// Reads a tensor, as `kind` if one is given.
fn read(set: &mut TensorSet, name: &str, kind: Option<Kind>) -> Result<Tensor, FileError> {
    let tensor = set.read(name)?;
    converted(set, name, tensor, kind)
}

/// The tensor `name` of `set`, as `kind` if one is given.
fn converted(
    set: &TensorSet,
    name: &str,
    tensor: Tensor,
    kind: Option<Kind>,
) -> Result<Tensor, FileError> {
    let Some(kind) = kind.filter(|kind| *kind != tensor.kind()) else { return Ok(tensor) };
    let converted = convert(&[(name.to_owned(), tensor)], kind);
    let reason = match converted.map(|mut all| all.pop()) {
        Ok(Some((_, tensor))) => return Ok(tensor),
        Ok(None) => "it has no value".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(FileError::Format { path: set.path().to_owned(), reason })
}

fn to_file(arguments: &ExportArguments, file: &Path) -> Result<(), CliError> {
    if is_model_folder(&arguments.from) {
        return Err(CliError::Usage(format!(
            "{}: it is a model's folder: gpipe import {} --out {} writes its weights with gpipe's \
            names",
            arguments.from.display(),
            arguments.from.display(),
            file.display()
        )));
    }
    let kind = arguments.dtype.map(kind);
    let (mut set, facts) = source(arguments)?;
    let mut tensors = Vec::new();
    for entry in set.entries() {
        let own = entry.kind.ok_or_else(|| {
            let (path, name) = (set.path_of(&entry.name).display(), shown(&entry.name));
            CliError::Usage(format!("{path}: {name} is {}, which is not written", entry.dtype))
        })?;
        let kind = kind.unwrap_or(own);
        tensors.push(Planned { name: entry.name.clone(), kind, shape: entry.shape.clone() });
    }
    folder_of(file)?;
    weights::save_planned(file, &tensors, &facts, |name| read(&mut set, name, kind))?;
    let bytes = std::fs::metadata(file).map_err(io(file))?.len();
    say!("wrote {}: {} tensors, {}", file.display(), tensors.len(), Bytes(bytes));
    say!("from {}", set.path().display());
    Ok(())
}

/// The parameters to export, and properties of the model that no shape shows.
fn source(arguments: &ExportArguments) -> Result<(TensorSet, Facts), CliError> {
    let folder = &arguments.from;
    // The order of preference is that of `eval`: final weights, then the newest checkpoint.
    let path = folder.join(if arguments.averages { AVERAGES } else { WEIGHTS });
    if path.is_file() {
        let file = TensorFile::open(&path)?;
        let facts = facts::in_metadata(file.metadata());
        return Ok((file.into(), facts));
    }
    match checkpoint_in(folder)? {
        Some(checkpoint) => {
            Ok((checkpoint.tensors(arguments.averages)?, facts::of_checkpoint(&checkpoint)))
        }
        None => Err(CliError::Usage(format!(
            "{}: there is neither a checkpoint nor {} in it",
            folder.display(),
            path.file_name().unwrap_or_default().to_string_lossy()
        ))),
    }
}

/// A tensor to be written into a folder.
struct Exported {
    /// Its name in the run.
    own: String,
    /// Whether it is written the other way round.
    transpose: bool,
    planned: Planned,
}

/// A model as a folder describes it.
struct Folder {
    network: Network,
    /// The text of `config.json`.
    config: String,
    /// The dtype of all tensors; `None`: each keeps its own.
    kind: Option<Kind>,
}

fn to_folder(arguments: &ExportArguments, to: &Path) -> Result<(), CliError> {
    let refuse = |reason: &str| Err(CliError::Usage(format!("--to {}: {reason}", to.display())));
    if to.exists() && (!to.is_dir() || std::fs::read_dir(to).map_err(io(to))?.next().is_some()) {
        return refuse("it exists and is not empty: name a new folder");
    }
    let run = RunFolder::read(&RunArguments {
        folder: Some(arguments.from.clone()),
        averages: arguments.averages,
        ..RunArguments::default()
    })?;
    let set = run.check_weights()?;
    let is_folder = is_model_folder(&arguments.from);
    let lora = run.config.lora.adapters();
    if arguments.adapter && lora.is_none() {
        return refuse("the run has no adapters: omit --adapter to write the whole model");
    }
    let folder = described(&run.config, &run.vocabulary, arguments.dtype.map(kind), is_folder)?;
    let tensors = match (&lora, arguments.adapter) {
        (Some(_), true) => adapters::planned(&set, &folder.network, arguments.dtype.map(kind))?,
        _ => planned(&set, &folder, is_folder)?,
    };
    let aside = partial(to)?;
    let mut source = Source { set, lora };
    let written = fill(&aside, &run, &folder, arguments, &tensors, &mut source);
    let placed = written.and_then(|files| {
        if to.is_dir() {
            std::fs::remove_dir(to).map_err(io(to))?; // it is empty
        }
        std::fs::rename(&aside, to).map_err(io(to))?;
        Ok(files)
    });
    if placed.is_err() {
        let _ = std::fs::remove_dir_all(&aside); // the first error says more
    }
    let files = placed?;
    let bytes: u64 = tensors.iter().map(|own| own.planned.bytes()).sum();
    let plural = if files == 1 { "file" } else { "files" };
    let config = if arguments.adapter { adapters::CONFIG } else { CONFIG };
    say!(
        "wrote {}: {} tensors, {} in {files} {plural}, {config} and the tokenizer",
        to.display(),
        tensors.len(),
        Bytes(bytes)
    );
    say!("from {}", source.set.path().display());
    Ok(())
}

/// A new folder beside `to`, in which the files are written before it gets its name.
fn partial(to: &Path) -> Result<PathBuf, CliError> {
    let absolute = std::path::absolute(to).map_err(io(to))?;
    let Some(name) = absolute.file_name() else {
        return Err(CliError::Usage(format!("--to {}: name a new folder", to.display())));
    };
    let mut partial = std::ffi::OsString::from(".");
    partial.push(name);
    partial.push(format!("{PARTIAL}-{}", std::process::id()));
    let path = absolute.with_file_name(partial);
    std::fs::create_dir_all(&path).map_err(io(&path))?;
    Ok(path)
}

/// The tensors of a run, and the settings of its adapters.
struct Source {
    set: TensorSet,
    lora: Option<Lora>,
}

impl Source {
    /// The tensor to write. A weight with an adapter is merged with it.
    fn read(&mut self, exported: &Exported) -> Result<Tensor, FileError> {
        let kind = Some(exported.planned.kind);
        let tensor = match &self.lora {
            Some(lora) => adapters::merged(&mut self.set, &exported.own, lora)?,
            None => None,
        };
        let tensor = match tensor {
            Some(tensor) => converted(&self.set, &exported.own, tensor, kind)?,
            None => read(&mut self.set, &exported.own, kind)?,
        };
        if !exported.transpose {
            return Ok(tensor);
        }
        let swapped = tensor.f_transpose(0, 1).and_then(|matrix| matrix.f_contiguous());
        let path = self.set.path().to_owned();
        swapped.map_err(|error| FileError::Format { path, reason: error.to_string() })
    }
}

/// Writes all files into `folder`. Returns the number of files of weights.
fn fill(
    folder: &Path,
    run: &RunFolder,
    described: &Folder,
    arguments: &ExportArguments,
    tensors: &[Exported],
    source: &mut Source,
) -> Result<usize, CliError> {
    let lora = source.lora.clone();
    let bases: Vec<String> = source.set.entries().map(|entry| entry.name.clone()).collect();
    let plans: Vec<Planned> = tensors.iter().map(|own| own.planned.clone()).collect();
    let by_name: HashMap<&str, &Exported> =
        tensors.iter().map(|own| (own.planned.name.as_str(), own)).collect();
    let mut read_one = |name: &str| match by_name.get(name) {
        Some(exported) => source.read(exported),
        None => read(&mut source.set, name, None),
    };
    let (count, mut files) = match (&lora, arguments.adapter) {
        (Some(lora), true) => {
            let path = folder.join(adapters::WEIGHTS);
            write_planned(&path, &plans, &adapters::metadata(), &mut read_one)?;
            (
                1,
                vec![(
                    adapters::CONFIG.to_owned(),
                    adapters::config(lora, tensors, &bases, &described.network),
                )],
            )
        }
        _ => {
            let names = model_folder::write(folder, &plans, arguments.shard_size.0, &mut read_one)?;
            (names.len(), vec![(CONFIG.to_owned(), described.config.clone().into_bytes())])
        }
    };
    files.extend(run.vocabulary.files()?);
    if !files.iter().any(|(name, _)| name == "tokenizer_config.json") {
        let tokenizer = run.vocabulary.tokenizer()?;
        let end = tokenizer.decode(&[tokenizer.end_of_document()])?;
        // What transformers needs to read a tokenizer that was learned here.
        let config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end});
        files.push(("tokenizer_config.json".to_owned(), format!("{config:#}\n").into_bytes()));
    }
    for (name, bytes) in files {
        let path = folder.join(name);
        gpipe_files::write(&path, &bytes).map_err(io(&path))?;
    }
    Ok(count)
}

/// What the run's model is in transformers.
fn described(
    config: &Config,
    vocabulary: &Vocabulary,
    kind: Option<Kind>,
    is_folder: bool,
) -> Result<Folder, CliError> {
    if let Model::HuggingFace(model) = &config.model {
        let network = config.network()?;
        let own = own_kind(&model.config);
        // The tensors of a folder keep their dtypes.
        let kind = if is_folder { kind } else { kind.or(own).or(Some(Kind::Float)) };
        let config = match kind {
            Some(kind) if own != Some(kind) => with_dtype(&model.config, name_of(kind))?,
            _ => model.config.clone(),
        };
        return Ok(Folder { network, config, kind });
    }
    let network = match &config.model {
        Model::Llama(model) => Network::Llama(task::llama(config, model, vocabulary.size())),
        // transformers has no other unit than the block.
        Model::Transformer(model) => {
            let model = task::transformer(config, model, vocabulary.size());
            Network::Gpt2(gpipe_models::Transformer { split_blocks: true, ..model })
        }
        _ => {
            return Err(CliError::Usage(
                "only language models can be exported to a folder: use --out FILE.safetensors"
                    .into(),
            ));
        }
    };
    let kind = kind.unwrap_or(Kind::Float);
    let end = vocabulary.tokenizer()?.end_of_document();
    let config = huggingface::written(&network, end, name_of(kind))
        .map_err(|error| CliError::Usage(format!("the model cannot be exported: {error}")))?;
    Ok(Folder { network, config, kind: Some(kind) })
}

/// The tensors to write, sorted by their names in the run, with their names, dtypes and shapes in
/// the folder.
fn planned(set: &TensorSet, folder: &Folder, is_folder: bool) -> Result<Vec<Exported>, CliError> {
    let mut all = Vec::new();
    for entry in set.entries().filter(|entry| !adapters::is_of_adapter(&entry.name)) {
        let own = entry.kind.ok_or_else(|| {
            let (path, name) = (set.path_of(&entry.name).display(), shown(&entry.name));
            CliError::Usage(format!("{path}: {name} is {}, which is not written", entry.dtype))
        })?;
        let is_floating = matches!(own, Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16);
        let kind = folder.kind.filter(|_| is_floating).unwrap_or(own);
        let (name, transpose) = match is_folder {
            true => (entry.name.clone(), false),
            false => {
                let to = folder.network.name_of(&entry.name);
                (to.name, to.transpose)
            }
        };
        let mut shape = entry.shape.clone();
        if transpose {
            shape.reverse();
        }
        let planned = Planned { name, kind, shape };
        all.push(Exported { own: entry.name.clone(), transpose, planned });
    }
    Ok(all)
}

/// The keys of transformers 5 and 4 for the dtype.
const DTYPES: [&str; 2] = ["dtype", "torch_dtype"];

fn object(config: &str) -> Result<Map<String, Value>, CliError> {
    serde_json::from_str(config).map_err(|error| CliError::Usage(format!("{CONFIG}: {error}")))
}

/// The dtype that a `config.json` names.
fn own_kind(config: &str) -> Option<Kind> {
    let keys = object(config).ok()?;
    let named = DTYPES.iter().find_map(|key| keys.get(*key)?.as_str().map(ToOwned::to_owned))?;
    [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half]
        .into_iter()
        .find(|kind| name_of(*kind) == named)
}

/// A `config.json` with another dtype.
fn with_dtype(config: &str, dtype: &str) -> Result<String, CliError> {
    let mut keys = object(config)?;
    let known: Vec<&str> = DTYPES.into_iter().filter(|key| keys.contains_key(*key)).collect();
    let known = if known.is_empty() { vec![DTYPES[1]] } else { known };
    for key in known {
        keys.insert(key.to_owned(), dtype.into());
    }
    Ok(format!("{:#}\n", Value::Object(keys)))
}
