//! The family of Llama: Llama, Mistral, Qwen 2.5, Qwen 3, SmolLM, Mixtral, Qwen3-MoE.

use gpipe::layers::ExpertNames;
use serde_json::Value;

use super::{
    keys::{ConfigError, Keys, Result},
    names::{Found, Name},
    rope,
};
use crate::llama::{BLOCKS_MAX, Experts, Llama};

/// The architectures, by `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Mixtral,
    Qwen3Moe,
}

impl Family {
    pub const ALL: [(&'static str, Self); 6] = [
        ("llama", Self::Llama),
        ("mistral", Self::Mistral),
        ("qwen2", Self::Qwen2),
        ("qwen3", Self::Qwen3),
        ("mixtral", Self::Mixtral),
        ("qwen3_moe", Self::Qwen3Moe),
    ];

    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(own, _)| *own == name).map(|(_, family)| family)
    }
}

/// Reads the keys of a model of `family`.
pub(super) fn read(keys: &mut Keys, family: Family) -> Result<Llama> {
    let heads = keys.whole("num_attention_heads")?;
    let features = keys.whole("hidden_size")?;
    let blocks = keys.whole("num_hidden_layers")?;
    let head_size = match (keys.whole_or("head_dim")?, family) {
        (Some(size), _) => size,
        (None, Family::Qwen3) => 128,
        (None, _) if features % heads == 0 => features / heads,
        (None, _) => {
            return Err(ConfigError(format!(
                "head_dim is missing, and hidden_size {features} is no multiple of \
                num_attention_heads {heads}"
            )));
        }
    };
    keys.only("hidden_act", "silu".into())?;
    keys.only("rope_interleaved", false.into())?;
    keys.only("use_mrope", false.into())?;
    let attention_bias = match family {
        Family::Llama | Family::Qwen3 | Family::Qwen3Moe => {
            keys.truth_or("attention_bias", false)?
        }
        Family::Mistral | Family::Qwen2 | Family::Mixtral => false,
    };
    Ok(Llama {
        vocabulary: keys.whole("vocab_size")?,
        features,
        hidden: keys.whole("intermediate_size")?,
        windows: windows(keys, family, blocks)?,
        heads,
        groups: keys.whole_or("num_key_value_heads")?.unwrap_or(heads),
        head_size,
        // transformers' defaults.
        rotary: rope::read(keys, if family == Family::Mixtral { 1e6 } else { 1e4 })?,
        experts: experts(keys, family, blocks)?,
        eps: keys.positive_or("rms_norm_eps")?.unwrap_or(match family {
            Family::Mixtral => 1e-5,
            _ => 1e-6,
        }),
        qkv_bias: attention_bias || family == Family::Qwen2,
        output_bias: attention_bias,
        mlp_bias: family == Family::Llama && keys.truth_or("mlp_bias", false)?,
        head_norms: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
        attention_dropout: keys.number_or("attention_dropout", 0.0)?,
        tied: keys.truth_or("tie_word_embeddings", false)?,
        padding: padding(keys)?,
        std: keys.number_or("initializer_range", 0.02)?,
    })
}

/// The token of padding, whose vector is not trained by its lookups. PyTorch counts a negative
/// number from the end of the vocabulary.
fn padding(keys: &mut Keys) -> Result<Option<i64>> {
    let vocabulary = keys.whole("vocab_size")?;
    let Some(value) = keys.get("pad_token_id") else { return Ok(None) };
    match value.as_i64() {
        Some(token) if (0..vocabulary).contains(&token) => Ok(Some(token)),
        Some(token) if (-vocabulary..0).contains(&token) => Ok(Some(vocabulary + token)),
        _ => keys.wrong(
            "pad_token_id",
            &value,
            &format!("it is a token below vocab_size, which is {vocabulary}, or null"),
        ),
    }
}

/// The window of each block.
fn windows(keys: &mut Keys, family: Family, blocks: i64) -> Result<Vec<Option<i64>>> {
    let count = usize::try_from(blocks).unwrap_or(usize::MAX).min(BLOCKS_MAX + 1);
    let window = match family {
        Family::Llama => None,
        // Its first version has one without the key.
        Family::Mistral if !keys.has("sliding_window") => Some(4096),
        Family::Mistral | Family::Mixtral => keys.whole_or("sliding_window")?,
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
            let is_used = keys.truth_or("use_sliding_window", false)?;
            // Without the key it is what transformers takes; null is no window.
            let has_key = keys.has("sliding_window");
            let window = keys.whole_or("sliding_window")?;
            let window = if has_key { window } else { Some(4096) };
            window.filter(|_| is_used)
        }
    };
    if family == Family::Qwen3Moe {
        // transformers takes the window for all blocks.
        keys.skip(&["max_window_layers"]);
    }
    if !matches!(family, Family::Qwen2 | Family::Qwen3) {
        return Ok(vec![window; count]);
    }
    let first = keys.count_or("max_window_layers", 28)?;
    let Some(types) = keys.get("layer_types") else {
        let of = |block: usize| window.filter(|_| block as u64 >= first);
        return Ok((0..count).map(of).collect());
    };
    let Some(listed) = types.as_array().filter(|own| own.len() == count) else {
        let remedy = format!("it is a list of {blocks} types, one for each block");
        return keys.wrong("layer_types", &types, &remedy);
    };
    let of = |own: &Value| match own.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") => window.map(Some).ok_or_else(|| {
            ConfigError(
                "layer_types has \"sliding_attention\", and there is no sliding_window".into(),
            )
        }),
        _ => keys.wrong(
            "layer_types",
            own,
            "supported are \"full_attention\" and \"sliding_attention\"",
        ),
    };
    listed.iter().map(of).collect()
}

/// The mixture of experts of the two families that have one.
fn experts(keys: &mut Keys, family: Family, blocks: i64) -> Result<Option<Experts>> {
    let count = usize::try_from(blocks).unwrap_or(usize::MAX).min(BLOCKS_MAX + 1);
    let names = match family {
        Family::Mixtral => ExpertNames::Mixtral,
        Family::Qwen3Moe => ExpertNames::Qwen,
        _ => return Ok(None),
    };
    // transformers has both names for the number.
    let (new, old) = (keys.whole_or("num_local_experts")?, keys.whole_or("num_experts")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(ConfigError(format!(
            "num_local_experts is {new}, and num_experts {old}: they mean the same, keep one"
        )));
    }
    let experts = new.or(old).ok_or_else(|| keys.missing("num_local_experts"))?;
    let weight = keys.number_or("router_aux_loss_coef", 0.001)?;
    if weight < 0.0 {
        return keys.wrong("router_aux_loss_coef", &weight.into(), "it is a number of at least 0");
    }
    let is_balanced = keys.truth_or("output_router_logits", false)?;
    let (hidden, normalise, blocks) = match family {
        Family::Mixtral => {
            keys.only("router_jitter_noise", 0.0.into())?;
            (keys.whole("intermediate_size")?, true, vec![true; count])
        }
        _ => {
            // What the family always does. Folders of Qwen3-Coder have these keys.
            keys.only("use_qk_norm", true.into())?;
            keys.only("qkv_bias", false.into())?;
            keys.only("shared_expert_intermediate_size", 0.into())?;
            let step = keys.whole_or("decoder_sparse_step")?.unwrap_or(1) as u64;
            let dense = keys.get("mlp_only_layers").unwrap_or_else(|| Value::Array(Vec::new()));
            let listed = dense.as_array().map(|all| all.iter().map(Value::as_u64).collect());
            let Some(Some(listed)) = listed.map(|all: Option<Vec<u64>>| all) else {
                return keys.wrong("mlp_only_layers", &dense, "it is a list of numbers of blocks");
            };
            let is_sparse =
                |block: u64| (block + 1).is_multiple_of(step) && !listed.contains(&block);
            let sparse = (0..count as u64).map(is_sparse).collect();
            (keys.whole("moe_intermediate_size")?, keys.truth_or("norm_topk_prob", false)?, sparse)
        }
    };
    let top_k = keys.whole("num_experts_per_tok")?;
    let balance = if is_balanced { weight } else { 0.0 };
    Ok(Some(Experts { experts, top_k, hidden, normalise, balance, names, blocks }))
}

/// The parameter that a folder names `name`. `tied` says whether logits share the token table.
pub(super) fn parameter_of(name: &str, tied: bool) -> Found {
    match name {
        "lm_head.weight" if tied => Found::CopyOf("model.embed_tokens.weight".into()),
        // Older folders have the angles of rotary positions.
        _ if name.ends_with(".rotary_emb.inv_freq") => Found::Derived,
        _ => Found::Parameter(Name::same(name)),
    }
}
