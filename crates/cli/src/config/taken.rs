//! Flags that change a configuration before it is parsed: `--from`, `--data` and `--lora`.

use std::path::{Path, PathBuf};

use gpipe_models::{Llama, huggingface::Network};

use super::ConfigError;
use crate::model_folder::ModelFolder;

/// Default length of a row with `--from FOLDER`, in tokens. A model with fewer positions lowers it.
const FROM_SEQUENCE: i64 = 512;

/// Default of `pipeline.loss_rows` with `--from FOLDER`. With a vocabulary of 151,936 tokens, the
/// logits of 256 rows take 156 MB in float32.
const FROM_LOSS_ROWS: i64 = 256;

/// Default learning rate of adapters with `--from FOLDER` and no configuration file.
const ADAPTERS_LR: f64 = 2e-4;

/// Inserts the model and the tokenizer of `folder` into the configuration read from `origin`.
///
/// # Errors
/// The configuration has a `[model]`, or the folder cannot be used.
pub(super) fn take_folder(
    table: &mut toml::Table,
    folder: &Path,
    origin: &str,
    has_no_file: bool,
) -> Result<(), ConfigError> {
    let refused = |reason: String| Err(ConfigError::From(reason));
    if table.contains_key("model") {
        return refused(format!(
            "{}: {origin} has a [model], but --from takes the model from the folder: remove one of \
            them (--init takes only the weights)",
            folder.display()
        ));
    }
    let own = ModelFolder::open(folder).and_then(|own| Ok((own.tokenizer()?, own)));
    let (tokenizer, own) = own.map_err(|error| ConfigError::From(error.to_string()))?;
    let model = [("kind", "huggingface".to_owned()), ("config", own.config.clone())];
    let model = model.map(|(key, value)| (key.to_owned(), toml::Value::String(value)));
    table.insert("model".into(), toml::Table::from_iter(model).into());
    let Some(tokenizer) = tokenizer.to_str() else {
        return refused(format!("{}: its name is not UTF-8: rename it", folder.display()));
    };
    let data = table.entry("data").or_insert_with(|| toml::Table::new().into());
    if let toml::Value::Table(data) = data {
        data.entry("tokenizer").or_insert_with(|| tokenizer.into());
        let sequence = own.described.network.positions().min(FROM_SEQUENCE);
        data.entry("sequence").or_insert_with(|| sequence.into());
    }
    // A balancing loss needs all rows at once.
    let is_balanced = matches!(
        &own.described.network,
        Network::Llama(Llama { experts: Some(own), .. }) if own.balance > 0.0
    );
    if let (true, false, Some(toml::Value::Table(pipeline))) =
        (has_no_file, is_balanced, table.get_mut("pipeline"))
    {
        pipeline.insert("loss_rows".into(), FROM_LOSS_ROWS.into());
    }
    Ok(())
}

/// Sets the defaults for adapters. Adapters need a larger learning rate than a whole model, and a
/// frozen model needs no float32.
pub(super) fn take_adapters(table: &mut toml::Table) {
    for (name, key, value) in [
        ("optimizer", "lr", toml::Value::from(ADAPTERS_LR)),
        ("pipeline", "dtype", toml::Value::from("bfloat16")),
    ] {
        let own = table.entry(name).or_insert_with(|| toml::Table::new().into());
        if let toml::Value::Table(own) = own {
            own.insert(key.into(), value);
        }
    }
}

/// Inserts JSONL files into the configuration.
///
/// # Errors
/// The configuration has other data, or the name of a file is not UTF-8.
pub(super) fn take_data(table: &mut toml::Table, files: &[PathBuf]) -> Result<(), ConfigError> {
    let Some(first) = files.first() else { return Ok(()) };
    let refused =
        |path: &PathBuf, reason: String| Err(ConfigError::Data { path: path.clone(), reason });
    let mut names = Vec::new();
    for path in files {
        let Some(name) = path.to_str() else {
            let reason = "its name is not UTF-8, which a configuration cannot hold: rename it";
            return refused(path, reason.into());
        };
        names.push(toml::Value::from(name));
    }
    let data = table.entry("data").or_insert_with(|| toml::Table::new().into());
    let toml::Value::Table(data) = data else { return Ok(()) };
    match data.get("kind").map(|kind| kind.as_str().unwrap_or_default()) {
        None if data.contains_key("text") => {
            let reason = "the configuration trains on data.text: use data.text or --data";
            refused(first, reason.into())
        }
        Some(kind) if kind != "jsonl" => {
            let reason = format!("data.kind is {kind} in the configuration: omit --data");
            refused(first, reason)
        }
        _ => {
            data.insert("kind".into(), "jsonl".into());
            data.insert("files".into(), names.into());
            data.remove("sources");
            Ok(())
        }
    }
}
