//! The `config.json` beside weights of a model like Llama.

use gpipe::layers::RotaryScaling;
use gpipe_models::{
    Llama,
    huggingface::{self, Network},
};

use crate::{
    config::{Config, LlamaConfig},
    task::llama,
};

/// What to use if no setting says what the file does.
const FROM: &str = "train with --from and the model's folder";

/// What no shape shows of the model.
pub(super) fn facts(model: &LlamaConfig) -> String {
    let LlamaConfig { heads, theta, window, eps, .. } = model;
    format!(
        "model.heads = {heads}, model.theta = {theta}, model.window = {window}, model.eps = {eps}"
    )
}

/// Compares the `text` of the file with the model.
///
/// # Errors
/// It contradicts the model, or describes none that gpipe has.
pub(super) fn compare(text: &str, model: &LlamaConfig, config: &Config) -> Result<(), String> {
    let described = huggingface::config(text).map_err(|error| error.to_string())?;
    let Network::Llama(source) = described.network else {
        let found = described.model_type;
        return Err(format!("model_type is {found}, and model.kind is llama: {FROM}"));
    };
    // No shape depends on the tokenizer but that of the table, which is compared elsewhere.
    let own = llama(config, model, 1);
    for (key, found, setting, own) in [
        ("num_attention_heads", source.heads as f64, "model.heads", own.heads as f64),
        ("num_key_value_heads", source.groups as f64, "model.groups", own.groups as f64),
        ("head_dim", source.head_size as f64, "model.head_size", own.head_size as f64),
        ("rope_theta", source.rotary.theta, "model.theta", own.rotary.theta),
        ("rms_norm_eps", source.eps, "model.eps", own.eps),
    ] {
        // Some programs write numbers rounded to float32.
        if found as f32 != own as f32 {
            return Err(contradiction(key, found, setting, own));
        }
    }
    if source.rotary.scaling != RotaryScaling::None {
        return Err(format!(
            "rope_scaling changes the positions, which model.kind = \"llama\" cannot: {FROM}"
        ));
    }
    windows(&source, &own)
}

fn contradiction(key: &str, found: f64, setting: &str, own: f64) -> String {
    format!("{key} is {found}, and {setting} is {own}: set {setting} = {found}")
}

/// Compares how many positions each block sees.
fn windows(source: &Llama, own: &Llama) -> Result<(), String> {
    if source.windows == own.windows || source.windows.len() != own.windows.len() {
        return Ok(()); // another number of blocks has other tensors
    }
    let first = source.windows.first().copied().flatten();
    let own = own.windows.first().copied().flatten();
    let number = |window: Option<i64>| window.unwrap_or(0) as f64;
    match source.windows.iter().all(|window| *window == first) {
        true => Err(contradiction("sliding_window", number(first), "model.window", number(own))),
        false => Err(format!("its blocks have windows of several sizes: {FROM}")),
    }
}
