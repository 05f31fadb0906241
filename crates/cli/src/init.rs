//! Starting from existing weights: `train --init`, and the part that `import` shares with it.

use std::path::{Path, PathBuf};

use gpipe::Pipeline;
use gpipe_checkpoint::{
    fit::Fit,
    names::NameMap,
    tensor_file::{self, TensorFile},
};

use crate::{
    CliError,
    args::TrainArguments,
    config::Config,
    facts,
    files::read_bounded,
    output::say,
    run_folder::{WEIGHTS, checkpoint_in, checkpoint_weights},
    task::Vocabulary,
};

/// Maximum size of a file of names.
const NAMES_BYTES_MAX: u64 = 1 << 20;

/// The weights that `--init` names.
pub(crate) struct Init {
    pub file: TensorFile,
    /// Path of the weights.
    pub from: PathBuf,
    /// The tokens or classes of the weights, if known.
    pub vocabulary: Option<Vocabulary>,
}

/// Loads weights into a new pipeline as `--init`, `--names`, `--partial` and `--reinit` ask, and
/// reports what it did. Parameters that match `reinit` keep their initial values.
pub(crate) fn load(
    pipeline: &mut Pipeline,
    mut file: TensorFile,
    config: &Config,
    arguments: &TrainArguments,
    reinit: &[&str],
) -> Result<(), CliError> {
    check_facts(&file, config)?;
    let named = arguments.reinit.iter().map(String::as_str);
    let reinit: Vec<&str> = named.chain(reinit.iter().copied()).collect();
    let fit = fit(pipeline, &file, arguments.names.as_deref(), arguments.partial, &reinit)?;
    let unused = arguments
        .reinit
        .iter()
        .find(|pattern| !fit.reinit.iter().any(|name| gpipe::name_matches(pattern, name)));
    if let Some(pattern) = unused {
        return Err(CliError::Usage(format!(
            "--reinit {pattern}: no parameter has such a name; gpipe inspect lists those of a run"
        )));
    }
    let own = pipeline.parameters()?;
    let kind = own.first().map_or(tch::Kind::Float, |(_, value)| value.kind());
    for loaded in fit.read(&mut file, kind)? {
        pipeline.set_parameters(&[loaded?])?;
    }
    say!("weights of {}:\n{fit}", file.path().display());
    Ok(())
}

/// Opens a safetensors file and the vocabulary beside it. For a run, these are its weights or those
/// of its newest checkpoint.
pub(crate) fn open(from: &Path) -> Result<Init, CliError> {
    let weights = if from.is_dir() { from.join(WEIGHTS) } else { from.to_owned() };
    if !from.is_dir() || weights.is_file() {
        let vocabulary = Vocabulary::beside(&weights)?;
        return Ok(Init { file: TensorFile::open(&weights)?, from: weights, vocabulary });
    }
    let Some(checkpoint) = checkpoint_in(from)? else {
        return Err(CliError::Usage(format!(
            "{}: there is neither {WEIGHTS} nor a checkpoint in it",
            from.display()
        )));
    };
    let all = checkpoint_weights(&checkpoint, false)?;
    let bytes = tensor_file::encode(&all, &facts::of_checkpoint(&checkpoint));
    let bytes = bytes.map_err(|error| CliError::Usage(error.to_string()))?;
    let file = TensorFile::from_bytes(bytes, checkpoint.folder())?;
    let vocabulary = Some(Vocabulary::of_checkpoint(&checkpoint)?);
    Ok(Init { file, from: checkpoint.folder().to_owned(), vocabulary })
}

/// Refuses weights that belong to another model although all shapes fit, and reports what could not
/// be compared.
pub(crate) fn check_facts(file: &TensorFile, config: &Config) -> Result<(), CliError> {
    let said = facts::in_metadata(file.metadata());
    facts::check(file.path(), &said, config)?;
    let is_open = facts::of(config).keys().any(|key| !said.contains_key(key));
    if is_open && let Some(note) = facts::check_source(file.path(), config)? {
        say!("{note}");
    }
    Ok(())
}

/// Matches the file's tensors with the pipeline's parameters. Fails if some parameter would keep
/// its initial value without being asked to.
pub(crate) fn fit(
    pipeline: &Pipeline,
    file: &TensorFile,
    names: Option<&Path>,
    partial: bool,
    reinit: &[&str],
) -> Result<Fit, CliError> {
    let names = match names {
        None => NameMap::identity(),
        Some(path) => {
            let text = read_bounded(path, NAMES_BYTES_MAX)?;
            NameMap::parse(&text, &path.display().to_string())?
        }
    };
    let shapes: Vec<(String, Vec<i64>)> = pipeline
        .outline()
        .into_iter()
        .flat_map(|layer| {
            let name = layer.layer;
            let full = move |own: gpipe::state::ParameterOutline| {
                (format!("{name}.{}", own.name), own.shape)
            };
            layer.parameters.into_iter().map(full)
        })
        .collect();
    let left: Vec<&str> =
        names.reinit().iter().map(String::as_str).chain(reinit.iter().copied()).collect();
    let fit = Fit::new(&shapes, file, &names)?.without(&left);
    let is_used =
        |pattern: &String| fit.reinit.iter().any(|name| gpipe::name_matches(pattern, name));
    if let Some(pattern) = names.reinit().iter().find(|pattern| !is_used(pattern)) {
        return Err(CliError::Usage(format!(
            "{}: reinit = \"{pattern}\" is the name of no parameter: correct it, or leave it out",
            names.origin()
        )));
    }
    if fit.is_exact() || partial && !fit.loaded.is_empty() {
        return Ok(fit);
    }
    let remedy = match (partial, fit.loaded.is_empty()) {
        (true, _) => "nothing fits: name the tensors with --names",
        (false, true) => "name the tensors with --names",
        (false, false) => "name the tensors with --names, or load what fits with --partial",
    };
    let file = file.path().display();
    Err(CliError::Usage(format!("{file} does not fit the model:\n{fit}\n{remedy}")))
}
