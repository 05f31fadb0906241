//! `gpipe import`: the weights of another program, as a file of gpipe's.

use std::path::Path;

use gpipe::{Bytes, Sequence};
use gpipe_checkpoint::{
    TensorSet,
    fit::Fit,
    model_folder,
    tensor_file::TensorFile,
    weights::{self, Facts},
};
use tch::{Kind, Tensor};

use crate::{
    CliError,
    args::{ConfigArguments, ImportArguments},
    config::{Config, Dtype},
    facts,
    files::{folder_of, io},
    initial_weights,
    metrics::METRICS,
    model_folder::{ModelFolder, TOKENIZER},
    output::say,
    setup,
    task::{self, Vocabulary},
};

/// Writes weights for a model of ours from those of another program.
pub(crate) fn import(arguments: &ImportArguments) -> Result<(), CliError> {
    match &arguments.config {
        Some(config) => import_for(arguments, config),
        None => import_folder(arguments),
    }
}

/// Writes the weights of a model's folder, and beside them its configuration and tokenizer.
fn import_folder(arguments: &ImportArguments) -> Result<(), CliError> {
    if !arguments.from.is_dir() {
        return Err(CliError::Usage(format!(
            "{}: name the configuration of the model with --config, or give a model's folder",
            arguments.from.display()
        )));
    }
    let folder = ModelFolder::open(&arguments.from)?;
    let vocabulary = Vocabulary::of_folder(&folder)?;
    let config = Config::load(&ConfigArguments {
        from: Some(arguments.from.clone()),
        set: arguments.set.clone(),
        ..ConfigArguments::default()
    })?;
    let model = task::model(&config, vocabulary.size())?;
    let beside = |name: &str| arguments.out.with_file_name(name);
    let mut others = vec![("config.toml".to_owned(), config.to_toml()?.into_bytes())];
    others.extend(vocabulary.files()?);
    // What is there belongs to other weights.
    if let Some((name, _)) = others.iter().find(|(name, _)| beside(name).exists()) {
        return Err(CliError::Usage(format!(
            "{} exists, and would not fit these weights: name a file in a new folder with --out",
            beside(name).display()
        )));
    }
    let mut file = folder.weights()?;
    let fit = folder.fit(&mut file)?;
    let is_double = file.entries().any(|entry| entry.kind == Some(Kind::Double));
    let kind = if is_double { Kind::Double } else { Kind::Float };
    write(arguments, &config, model, (&fit, kind), &mut file)?;
    for (name, bytes) in &others {
        let path = beside(name);
        gpipe_files::write(&path, bytes).map_err(io(&path))?;
    }
    let names: Vec<&str> = others.iter().map(|(name, _)| name.as_str()).collect();
    say!("beside it: {}", names.join(", "));
    Ok(())
}

/// Writes weights for the model that `config` describes.
fn import_for(arguments: &ImportArguments, path: &Path) -> Result<(), CliError> {
    let config = Config::load(&ConfigArguments {
        config: Some(path.to_owned()),
        set: arguments.set.clone(),
        ..ConfigArguments::default()
    })?;
    let model = task::model(&config, size(arguments, path, &config)?)?;
    let parameters = model.parameters();
    let mut file = match arguments.from.is_dir() {
        true => model_folder::open(&arguments.from)?,
        false => TensorFile::open(&arguments.from)?.into(),
    };
    initial_weights::check_facts(file.path(), &facts::in_metadata(&file.metadata()), &config)?;
    let fit = initial_weights::fit(
        &parameters,
        &file,
        arguments.names.as_deref(),
        arguments.partial,
        &[],
    )?;
    let kind = match config.pipeline.dtype {
        Dtype::Float64 => Kind::Double,
        _ => Kind::Float,
    };
    write(arguments, &config, model, (&fit, kind), &mut file)?;
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

/// Writes the tensors that fit, and initial values for those that keep them.
fn write(
    arguments: &ImportArguments,
    config: &Config,
    model: Sequence,
    (fit, kind): (&Fit, Kind),
    file: &mut TensorSet,
) -> Result<(), CliError> {
    let mut tensors = fit.read(file, |_| kind, |_| true)?.collect::<Result<Vec<_>, _>>()?;
    if !fit.reinit.is_empty() {
        // Initial values complete the weights.
        let mut pipeline = setup::pipeline(config, model)?.build()?;
        let own = pipeline.parameters()?.into_iter();
        tensors.extend(own.filter(|(name, _)| fit.reinit.contains(name)));
    }
    say!("{fit}");
    save(&arguments.out, &tensors, &facts::of(config))
}

/// The number of tokens or classes of the network.
///
/// That is the number given by `--set`, or that of the run whose configuration is used, since a run
/// may have learned fewer tokens than configured. Otherwise it is the configured number.
fn size(arguments: &ImportArguments, path: &Path, config: &Config) -> Result<usize, CliError> {
    let key = |set: &String| set.split_once('=').map(|(key, _)| key.trim().to_owned());
    let keys = ["model.vocabulary", "model.classes"];
    let mut told = arguments.set.iter().filter_map(key);
    let told = told.any(|key| keys.contains(&key.as_str()));
    let of_run = path.with_file_name(Vocabulary::file_of(config));
    // Only runs write metrics. A tokenizer beside any other configuration may belong to something
    // else.
    let is_run = path.with_file_name(METRICS).is_file();
    match !told && is_run && of_run.is_file() {
        true => Ok(Vocabulary::load(&of_run, config.end())?.size()),
        false => task::configured_size(config),
    }
}

fn save(
    path: &std::path::Path,
    tensors: &[(String, Tensor)],
    facts: &Facts,
) -> Result<(), CliError> {
    folder_of(path)?;
    weights::save_with(path, tensors, facts)?;
    let bytes = std::fs::metadata(path).map_err(io(path))?.len();
    say!("wrote {}: {} tensors, {}", path.display(), tensors.len(), Bytes(bytes));
    Ok(())
}
