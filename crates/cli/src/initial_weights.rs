//! Starting from existing weights: `train --init`, and the part that `import` shares with it.

use std::path::{Path, PathBuf};

use gpipe::{LORA_A, Pipeline};
use gpipe_checkpoint::{
    TensorSet, fit::Fit, names::NameMap, tensor_file::TensorFile, weights::Facts,
};
use tch::Kind;

use crate::{
    CliError,
    args::TrainArguments,
    config::{Config, Dtype},
    facts,
    files::read_bounded,
    model_folder::{self, ModelFolder},
    output::{prose, say},
    run_folder::{WEIGHTS, checkpoint_in},
    setup,
    task::Vocabulary,
};

/// Patterns of the names of adapters' parameters.
const ADAPTERS: [&str; 2] = ["*.lora_A.weight", "*.lora_B.weight"];
/// Maximum size of a file of names.
const NAMES_BYTES_MAX: u64 = 1 << 20;

/// The weights that `--init` or `--from` names.
pub(crate) struct Init {
    pub file: TensorSet,
    /// Properties of their model that shapes do not determine.
    said: Facts,
    /// How the weights of a model's folder fit.
    fit: Option<Fit>,
    /// Path of the weights.
    pub from: PathBuf,
    /// The tokens or classes of the weights, if known.
    pub vocabulary: Option<Vocabulary>,
}

/// Loads weights into a new pipeline as `--from`, `--init`, `--names`, `--partial` and `--reinit`
/// ask, and reports what it did. Parameters that match `reinit` keep their initial values. Of
/// several processes, each reads the tensors of its stages.
pub(crate) fn load(
    pipeline: &mut Pipeline,
    init: Init,
    config: &Config,
    arguments: &TrainArguments,
    reinit: &[&str],
) -> Result<(), CliError> {
    let Init { mut file, said, fit: of_folder, .. } = init;
    let note = rounding(&file, config);
    if let Some(fit) = of_folder {
        setup::read_weights(pipeline, &fit, &mut file)?;
        note.into_iter().for_each(|note| prose!("{note}"));
        say!("weights of {}:\n{fit}", file.path().display());
        return Ok(());
    }
    check_facts(file.path(), &said, config)?;
    let named = arguments.reinit.iter().map(String::as_str);
    // Adapters are initialized if the file has none. A run's adapters are loaded.
    let has_adapters = file.entries().any(|entry| entry.name.ends_with(LORA_A));
    let adapters = (config.lora.rank != 0 && !has_adapters).then_some(ADAPTERS);
    let reinit: Vec<&str> =
        named.chain(reinit.iter().copied()).chain(adapters.into_iter().flatten()).collect();
    let fit =
        fit(&parameters(pipeline), &file, arguments.names.as_deref(), arguments.partial, &reinit)?;
    let unused = arguments
        .reinit
        .iter()
        .find(|pattern| !fit.reinit.iter().any(|name| gpipe::name_matches(pattern, name)));
    if let Some(pattern) = unused {
        return Err(CliError::Usage(format!(
            "--reinit {pattern}: no parameter has such a name; gpipe inspect lists those of a run"
        )));
    }
    setup::read_weights(pipeline, &fit, &mut file)?;
    note.into_iter().for_each(|note| prose!("{note}"));
    say!("weights of {}:\n{fit}", file.path().display());
    Ok(())
}

/// Says that the frozen weights of adapters lose digits, if they do.
fn rounding(file: &TensorSet, config: &Config) -> Option<String> {
    let dtype = config.pipeline.dtype;
    let is_wide = |kind| matches!(kind, Some(Kind::Float | Kind::Double));
    let is_narrow = matches!(dtype, Dtype::BFloat16 | Dtype::Float16);
    let rounds = config.lora.rank != 0
        && is_narrow
        && file.entries().any(|entry| is_wide(entry.kind) && !entry.name.ends_with(LORA_A));
    rounds.then(|| {
        format!(
            "{}: its frozen weights are rounded to {dtype}, also in what is exported; \
            --dtype float32 keeps them",
            file.path().display()
        )
    })
}

/// Opens a safetensors file and the vocabulary beside it. For a run, these are its weights or those
/// of its newest checkpoint.
pub(crate) fn open(from: &Path) -> Result<Init, CliError> {
    if model_folder::is_model_folder(from) {
        return Err(CliError::Usage(format!(
            "--init {}: it is a model's folder: --from takes its model, tokenizer and weights. For \
            a model that the configuration describes, name a file in it",
            from.display()
        )));
    }
    let weights = if from.is_dir() { from.join(WEIGHTS) } else { from.to_owned() };
    if !from.is_dir() || weights.is_file() {
        let vocabulary = Vocabulary::beside(&weights)?;
        let file = TensorFile::open(&weights)?;
        let said = facts::in_metadata(file.metadata());
        return Ok(Init { file: file.into(), said, fit: None, from: weights, vocabulary });
    }
    let Some(checkpoint) = checkpoint_in(from)? else {
        return Err(CliError::Usage(format!(
            "{}: there is neither {WEIGHTS} nor a checkpoint in it",
            from.display()
        )));
    };
    let vocabulary = Some(Vocabulary::of_checkpoint(&checkpoint, None)?);
    let (file, said) = (checkpoint.tensors(false)?, facts::of_checkpoint(&checkpoint));
    Ok(Init { file, said, fit: None, from: checkpoint.folder().to_owned(), vocabulary })
}

/// Opens the weights of a model's folder, and its tokens.
pub(crate) fn open_folder(path: &Path) -> Result<Init, CliError> {
    let folder = ModelFolder::open(path)?;
    // A tokenizer that does not fit explains weights that do not.
    let vocabulary = Some(Vocabulary::of_folder(&folder)?);
    let (file, fit) = weights_of(&folder)?;
    Ok(Init { file, said: Facts::new(), fit: Some(fit), from: folder.path, vocabulary })
}

/// Loads the weights of a model's folder into a pipeline of its model.
pub(crate) fn read_folder(pipeline: &mut Pipeline, path: &Path) -> Result<(), CliError> {
    let (mut file, fit) = weights_of(&ModelFolder::open(path)?)?;
    setup::read_weights(pipeline, &fit, &mut file)
}

/// The weights of a model's folder, and what each of them is loaded into.
fn weights_of(folder: &ModelFolder) -> Result<(TensorSet, Fit), CliError> {
    let mut file = folder.weights()?;
    let fit = folder.fit(&mut file)?;
    Ok((file, fit))
}

/// Refuses weights that belong to another model although all shapes fit, and reports what could not
/// be compared.
pub(crate) fn check_facts(from: &Path, said: &Facts, config: &Config) -> Result<(), CliError> {
    facts::check(from, said, config)?;
    let is_open = facts::of(config).keys().any(|key| !said.contains_key(key));
    if is_open && let Some(note) = facts::check_source(from, config)? {
        say!("{note}");
    }
    Ok(())
}

/// Matches the file's tensors with a model's `parameters`. Fails if some parameter would keep
/// its initial value without being asked to.
pub(crate) fn fit(
    parameters: &[(String, Vec<i64>)],
    file: &TensorSet,
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
    let left: Vec<&str> =
        names.reinit().iter().map(String::as_str).chain(reinit.iter().copied()).collect();
    let fit = Fit::new(parameters, file, &names)?.without(&left);
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

/// Names and shapes of a pipeline's parameters, in the model's order.
fn parameters(pipeline: &Pipeline) -> Vec<(String, Vec<i64>)> {
    let of = |layer: gpipe::state::LayerOutline| {
        let name = layer.layer;
        let full =
            move |own: gpipe::state::ParameterOutline| (format!("{name}.{}", own.name), own.shape);
        layer.parameters.into_iter().map(full)
    };
    pipeline.outline().into_iter().flat_map(of).collect()
}
