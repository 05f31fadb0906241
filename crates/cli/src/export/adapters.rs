//! Merges adapters into the weights, or writes adapters in the format of PEFT.

use std::collections::{BTreeMap, BTreeSet};

use gpipe::{LORA_A, LORA_B, Lora};
use gpipe_checkpoint::{
    TensorSet,
    tensor_file::{FileError, Planned},
};
use gpipe_models::huggingface::Network;
use serde_json::json;
use tch::{Kind, Tensor};

use super::Exported;
use crate::CliError;

/// PEFT's file of settings.
pub(super) const CONFIG: &str = "adapter_config.json";
/// PEFT's file of adapter matrices.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
/// PEFT's prefix of the model's names.
const PREFIX: &str = "base_model.model.";
/// The end of the names of weights.
const WEIGHT: &str = "weight";

/// Whether the run's tensor `name` is a matrix of an adapter.
pub(super) fn is_of_adapter(name: &str) -> bool {
    name.ends_with(LORA_A) || name.ends_with(LORA_B)
}

/// The run's weight `name` merged with its adapter: `W + alpha / rank * B A`. `None` if the weight
/// has no adapter.
///
/// Computes and returns float32, or float64 for a weight in float64.
pub(super) fn merged(
    set: &mut TensorSet,
    name: &str,
    lora: &Lora,
) -> Result<Option<Tensor>, FileError> {
    let Some(map) = name.strip_suffix(WEIGHT) else { return Ok(None) };
    let [a, b] = [LORA_A, LORA_B].map(|end| format!("{map}{end}"));
    if !set.entries().any(|entry| entry.name == a) {
        return Ok(None);
    }
    let [weight, a, b] = [name, &a, &b].map(|name| set.read(name));
    let (weight, a, b) = (weight?, a?, b?);
    let kind = if weight.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let sum = || -> Result<Tensor, tch::TchError> {
        let product = b.f_to_kind(kind)?.f_matmul(&a.f_to_kind(kind)?)?;
        weight.f_to_kind(kind)?.f_add(&product.f_mul_scalar(lora.alpha / lora.rank as f64)?)
    };
    sum().map(Some).map_err(|error| {
        let reason = format!("'{name}' and its adapter: {error}");
        FileError::Format { path: set.path().to_owned(), reason }
    })
}

/// The adapter matrices to write, with PEFT's names, sorted by their names in the run. `kind`
/// converts all of them.
pub(super) fn planned(
    set: &TensorSet,
    network: &Network,
    kind: Option<Kind>,
) -> Result<Vec<Exported>, CliError> {
    let mut all = Vec::new();
    for entry in set.entries().filter(|entry| is_of_adapter(&entry.name)) {
        let end = if entry.name.ends_with(LORA_A) { LORA_A } else { LORA_B };
        let map = entry.name.strip_suffix(end).unwrap_or_default();
        let weight = network.name_of(&format!("{map}{WEIGHT}"));
        let map = weight.name.strip_suffix(WEIGHT).unwrap_or_default();
        let name = format!("{PREFIX}{map}{end}");
        let kind = kind.or(entry.kind).unwrap_or(Kind::Float);
        let planned = Planned { name, kind, shape: entry.shape.clone() };
        all.push(Exported { own: entry.name.clone(), transpose: false, planned });
    }
    Ok(all)
}

/// The metadata that Python readers of safetensors expect.
pub(super) fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

/// The text of PEFT's settings for `matrices`, of a run with the tensors `names`.
pub(super) fn config(
    lora: &Lora,
    matrices: &[Exported],
    names: &[String],
    network: &Network,
) -> Vec<u8> {
    let map =
        |name: &str| name.strip_suffix(LORA_A).map(|map| map.trim_end_matches('.').to_owned());
    let full: BTreeSet<String> =
        matrices.iter().filter_map(|own| map(own.planned.name.strip_prefix(PREFIX)?)).collect();
    let own: BTreeSet<String> = matrices.iter().filter_map(|own| map(&own.own)).collect();
    // PEFT applies the last part of a name to every layer whose name ends with it. Use last parts
    // only if all those layers have adapters.
    let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
    let weights = names.iter().filter_map(|name| name.strip_suffix(".weight"));
    let partial: BTreeSet<String> = weights.filter(|name| !own.contains(*name)).map(last).collect();
    let is_whole = own.iter().all(|name| !partial.contains(&last(name)));
    let targets: BTreeSet<String> = match is_whole {
        true => full.iter().map(|name| last(name)).collect(),
        false => full,
    };
    let settings = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": null,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "bias": "none",
        // The matrices of GPT-2 are [inputs, outputs].
        "fan_in_fan_out": matches!(network, Network::Gpt2(_)),
        "inference_mode": true,
        "init_lora_weights": true,
    });
    format!("{settings:#}\n").into_bytes()
}
