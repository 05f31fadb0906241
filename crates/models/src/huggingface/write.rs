//! `config.json` of a model that was not read from one.

use gpipe::layers::{Rotary, RotaryScaling};
use serde_json::{Map, Value, json};

use super::{Network, config, keys::ConfigError, llama::Family};
use crate::{Llama, Transformer, llama::Experts, transformer::Gelu};

/// The text of a `config.json` for `network`, whose texts end with token `end`. `dtype` is
/// transformers' name of the weights' dtype, such as `float32`.
///
/// # Errors
/// [`ConfigError`] if no architecture of transformers computes the same.
pub fn written(network: &Network, end: u32, dtype: &str) -> Result<String, ConfigError> {
    // An architecture fits if what is read back is the same network.
    let candidates: Vec<Map<String, Value>> = match network {
        Network::Llama(model) => {
            let names = Family::ALL.iter().map(|(name, _)| *name);
            // transformers 5 refuses a Llama (no other) whose width is no multiple of its heads.
            let is_llama = model.features % model.heads.max(1) == 0;
            let names = names.filter(|name| is_llama || *name != "llama");
            names.map(|name| llama(model, name)).collect()
        }
        Network::Gpt2(model) => vec![gpt2(model)],
    };
    for mut keys in candidates {
        keys.insert("eos_token_id".into(), end.into());
        keys.insert("torch_dtype".into(), dtype.into());
        keys.insert("use_cache".into(), true.into());
        let text =
            serde_json::to_string_pretty(&keys).map_err(|error| ConfigError(error.to_string()))?;
        let is_same = |read: Network| match (read, network) {
            // In how many layers a block is has no effect on what it computes.
            (Network::Gpt2(read), Network::Gpt2(own)) => {
                Transformer { split_blocks: own.split_blocks, ..read } == *own
            }
            (read, own) => read == *own,
        };
        if config(&text).is_ok_and(|read| is_same(read.network)) {
            return Ok(text + "\n");
        }
    }
    Err(ConfigError(
        "no architecture of transformers has this combination of width, norms, biases and windows"
            .into(),
    ))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(keys) => keys,
        _ => Map::new(),
    }
}

fn llama(model: &Llama, model_type: &str) -> Map<String, Value> {
    let architecture = match model_type {
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        "mixtral" => "MixtralForCausalLM",
        "qwen3_moe" => "Qwen3MoeForCausalLM",
        _ => "LlamaForCausalLM",
    };
    let mut keys = object(json!({
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model.vocabulary,
        "hidden_size": model.features,
        "intermediate_size": model.hidden,
        "num_hidden_layers": model.windows.len(),
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.rotary.positions,
        "rope_theta": model.rotary.theta,
        "rms_norm_eps": model.eps,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.std,
    }));
    if let Some(scaling) = scaling(&model.rotary) {
        keys.insert("rope_scaling".into(), scaling);
    }
    if let Some(token) = model.padding {
        keys.insert("pad_token_id".into(), token.into());
    }
    if let Some(own) = &model.experts {
        experts(&mut keys, own, model_type);
    }
    if matches!(model_type, "llama" | "qwen3" | "qwen3_moe") {
        keys.insert("attention_bias".into(), model.output_bias.into());
    }
    if model_type == "llama" {
        keys.insert("mlp_bias".into(), model.mlp_bias.into());
    }
    let window = model.windows.iter().flatten().next();
    if matches!(model_type, "mistral" | "mixtral") {
        keys.insert("sliding_window".into(), json!(window));
    }
    if model_type == "qwen3_moe"
        && let Some(window) = window
    {
        keys.insert("sliding_window".into(), json!(window));
        keys.insert("use_sliding_window".into(), true.into());
    } else if model_type.starts_with("qwen")
        && let Some(window) = window
    {
        let of = |own: &Option<i64>| match own {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        let types: Vec<&str> = model.windows.iter().map(of).collect();
        keys.insert("sliding_window".into(), json!(window));
        keys.insert("use_sliding_window".into(), true.into());
        keys.insert("layer_types".into(), types.into());
    }
    keys
}

fn experts(keys: &mut Map<String, Value>, own: &Experts, model_type: &str) {
    let dense = own.blocks.iter().enumerate().filter(|(_, is_sparse)| !**is_sparse);
    let dense: Vec<usize> = dense.map(|(number, _)| number).collect();
    let more = match model_type {
        "mixtral" => json!({"num_local_experts": own.experts, "intermediate_size": own.hidden}),
        "qwen3_moe" => json!({
            "num_experts": own.experts, "moe_intermediate_size": own.hidden,
            "norm_topk_prob": own.normalise, "decoder_sparse_step": 1, "mlp_only_layers": dense
        }),
        _ => return,
    };
    keys.extend(object(more));
    keys.extend(object(json!({
        "num_experts_per_tok": own.top_k, "output_router_logits": own.balance > 0.0,
        "router_aux_loss_coef": own.balance
    })));
}

fn scaling(rotary: &Rotary) -> Option<Value> {
    Some(match rotary.scaling {
        RotaryScaling::None => return None,
        RotaryScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RotaryScaling::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
        RotaryScaling::Llama3 { factor, low, high, original } => json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": original
        }),
        RotaryScaling::Yarn { factor, attention, fast, slow, original, truncate } => json!({
            "rope_type": "yarn", "factor": factor, "attention_factor": attention,
            "beta_fast": fast, "beta_slow": slow, "truncate": truncate,
            "original_max_position_embeddings": original
        }),
    })
}

fn gpt2(model: &Transformer) -> Map<String, Value> {
    object(json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocabulary,
        "n_positions": model.positions,
        "n_embd": model.features,
        "n_layer": model.blocks,
        "n_head": model.heads,
        "n_inner": model.hidden,
        "activation_function": match model.gelu {
            Gelu::Exact => "gelu",
            Gelu::Tanh => "gelu_new",
        },
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": model.tied,
    }))
}
