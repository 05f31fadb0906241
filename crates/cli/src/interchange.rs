//! `gpipe export` and `gpipe import`: parameters as one safetensors file, to and from other
//! programs.

use gpipe::Bytes;
use gpipe_checkpoint::{
    fit::convert,
    tensor_file::TensorFile,
    weights::{self, Facts},
};
use tch::{Kind, Tensor};

use crate::{
    CliError,
    args::{ConfigArguments, ExportArguments, ImportArguments},
    config::{Config, Dtype},
    facts,
    files::io,
    init,
    metrics::METRICS,
    output::say,
    run_folder::{AVERAGES, WEIGHTS, checkpoint_in, checkpoint_weights},
    setup,
    task::{self, TOKENIZER, Vocabulary},
};

/// Writes the parameters of a checkpoint or run to one file.
pub(crate) fn export(arguments: &ExportArguments) -> Result<(), CliError> {
    let kind = arguments.dtype.map(kind);
    let Source { mut tensors, facts, from } = read(arguments)?;
    if let Some(kind) = kind {
        tensors =
            convert(&tensors, kind).map_err(|error| CliError::Usage(format!("{from}: {error}")))?;
    }
    save(arguments.out.as_path(), &tensors, &facts)?;
    say!("from {from}");
    Ok(())
}

/// The parameters to export.
struct Source {
    tensors: Vec<(String, Tensor)>,
    /// Properties of the model that no shape shows.
    facts: Facts,
    /// Where the parameters come from, for the user.
    from: String,
}

fn read(arguments: &ExportArguments) -> Result<Source, CliError> {
    let folder = &arguments.from;
    if !folder.is_dir() {
        return Err(CliError::Usage(format!(
            "{}: give the folder of a checkpoint or of a run",
            folder.display()
        )));
    }
    // The order of preference is that of `eval`: final weights, then the newest checkpoint.
    let path = folder.join(if arguments.averages { AVERAGES } else { WEIGHTS });
    if path.is_file() {
        let facts = facts::in_metadata(TensorFile::open(&path)?.metadata());
        let (tensors, from) = (weights::load(&path)?, path.display().to_string());
        return Ok(Source { tensors, facts, from });
    }
    match checkpoint_in(folder)? {
        Some(checkpoint) => {
            let from = checkpoint.folder().display().to_string();
            let facts = facts::of_checkpoint(&checkpoint);
            let tensors = checkpoint_weights(&checkpoint, arguments.averages)?;
            Ok(Source { tensors, facts, from })
        }
        None => Err(CliError::Usage(format!(
            "{}: there is neither a checkpoint nor {} in it",
            folder.display(),
            path.file_name().unwrap_or_default().to_string_lossy()
        ))),
    }
}

/// Writes weights for a model of ours from the file of another program.
pub(crate) fn import(arguments: &ImportArguments) -> Result<(), CliError> {
    let config = Config::load(&ConfigArguments {
        config: Some(arguments.config.clone()),
        set: arguments.set.clone(),
        ..ConfigArguments::default()
    })?;
    let model = task::model(&config, size(arguments, &config)?)?;
    let mut pipeline = setup::pipeline(&config, model)?.build()?;
    let mut file = TensorFile::open(&arguments.from)?;
    init::check_facts(&file, &config)?;
    let fit = init::fit(&pipeline, &file, arguments.names.as_deref(), arguments.partial, &[])?;
    let kind = match config.pipeline.dtype {
        Dtype::Float64 => Kind::Double,
        _ => Kind::Float,
    };
    let mut tensors = fit.read(&mut file, kind)?.collect::<Result<Vec<_>, _>>()?;
    if !fit.reinit.is_empty() {
        // Initial values complete the weights.
        let own = pipeline.parameters()?.into_iter();
        tensors.extend(own.filter(|(name, _)| fit.reinit.contains(name)));
    }
    say!("{fit}");
    save(&arguments.out, &tensors, &facts::of(&config))?;
    let tokens = arguments.out.with_file_name(TOKENIZER);
    if Vocabulary::file_of(&config) == TOKENIZER && !tokens.is_file() {
        say!(
            "there is no {}: put the model's there, or name it with --set data.tokenizer=PATH, \
            before gpipe train --init uses these weights",
            tokens.display()
        );
    }
    Ok(())
}

/// The number of tokens or classes of the network.
///
/// That is the number given by `--set`, or that of the run whose configuration is used, since a run
/// may have learned fewer tokens than configured. Otherwise it is the configured number.
fn size(arguments: &ImportArguments, config: &Config) -> Result<usize, CliError> {
    let key = |set: &String| set.split_once('=').map(|(key, _)| key.trim().to_owned());
    let keys = ["model.vocabulary", "model.classes"];
    let mut told = arguments.set.iter().filter_map(key);
    let told = told.any(|key| keys.contains(&key.as_str()));
    let of_run = arguments.config.with_file_name(Vocabulary::file_of(config));
    // Only runs write metrics. A tokenizer beside any other configuration may belong to something
    // else.
    let is_run = arguments.config.with_file_name(METRICS).is_file();
    match !told && is_run && of_run.is_file() {
        true => Ok(Vocabulary::load(&of_run)?.size()),
        false => task::configured_size(config),
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

fn save(
    path: &std::path::Path,
    tensors: &[(String, Tensor)],
    facts: &Facts,
) -> Result<(), CliError> {
    weights::save_with(path, tensors, facts)?;
    let bytes = std::fs::metadata(path).map_err(io(path))?.len();
    say!("wrote {}: {} tensors, {}", path.display(), tensors.len(), Bytes(bytes));
    Ok(())
}
