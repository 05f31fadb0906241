//! GPT-2. Its Conv1D keeps weights as [inputs, outputs], the transpose of ours.

use super::{
    keys::{ConfigError, Keys, Result},
    names::{Found, Name},
};
use crate::{Transformer, transformer::Gelu};

pub(super) const MODEL_TYPE: &str = "gpt2";
/// What the layer norms here add to the variance.
const EPSILON: f64 = 1e-5;
/// The file's model may be the one in `GPT2LMHeadModel`, or `GPT2Model` alone.
const PREFIX: &str = "transformer.";

/// The parts of a block: its name here, its name in a folder, and whether it is transposed.
const PARTS: [(&str, &str, bool); 12] = [
    ("attention.norm.weight", "ln_1.weight", false),
    ("attention.norm.bias", "ln_1.bias", false),
    ("attention.qkv.weight", "attn.c_attn.weight", true),
    ("attention.qkv.bias", "attn.c_attn.bias", false),
    ("attention.output.weight", "attn.c_proj.weight", true),
    ("attention.output.bias", "attn.c_proj.bias", false),
    ("mlp.norm.weight", "ln_2.weight", false),
    ("mlp.norm.bias", "ln_2.bias", false),
    ("mlp.hidden.weight", "mlp.c_fc.weight", true),
    ("mlp.hidden.bias", "mlp.c_fc.bias", false),
    ("mlp.output.weight", "mlp.c_proj.weight", true),
    ("mlp.output.bias", "mlp.c_proj.bias", false),
];

/// The other parameters.
const OTHERS: [(&str, &str); 4] = [
    ("embedding.tokens", "wte.weight"),
    ("embedding.positions", "wpe.weight"),
    ("head.norm.weight", "ln_f.weight"),
    ("head.norm.bias", "ln_f.bias"),
];

/// The head, which has no prefix.
const HEAD: (&str, &str) = ("head.weight", "lm_head.weight");

/// Reads the keys of a GPT-2.
pub(super) fn read(keys: &mut Keys) -> Result<Transformer> {
    let features = keys.whole("n_embd")?;
    let positions = keys.whole("n_positions")?;
    let activation = keys.get("activation_function").unwrap_or("gelu_new".into());
    let gelu = match activation.as_str() {
        Some("gelu") => Gelu::Exact,
        Some("gelu_new" | "gelu_pytorch_tanh") => Gelu::Tanh,
        _ => {
            let remedy = "supported are gelu, gelu_new and gelu_pytorch_tanh";
            return keys.wrong("activation_function", &activation, remedy);
        }
    };
    let dropout = keys.number_or("embd_pdrop", 0.1)?;
    if keys.number_or("resid_pdrop", 0.1)? != dropout {
        return Err(ConfigError(
            "embd_pdrop and resid_pdrop differ: only equal ones are supported".into(),
        ));
    }
    // Other programs write it rounded to float32.
    let epsilon = keys.number_or("layer_norm_epsilon", EPSILON)?;
    if epsilon as f32 != EPSILON as f32 {
        return keys.wrong("layer_norm_epsilon", &epsilon.into(), "only 1e-5 is supported");
    }
    keys.only("scale_attn_weights", true.into())?;
    keys.only("scale_attn_by_inverse_layer_idx", false.into())?;
    keys.only("reorder_and_upcast_attn", false.into())?;
    keys.only("add_cross_attention", false.into())?;
    // `n_ctx` is a copy of `n_positions`; the others belong to tasks and to initial values.
    keys.skip(&[
        "n_ctx",
        "n_special",
        "output_past",
        "predict_special_tokens",
        "task_specific_params",
        "initializer_range",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ]);
    let blocks = keys.whole("n_layer")?;
    Ok(Transformer {
        vocabulary: keys.whole("vocab_size")?,
        positions,
        features,
        heads: keys.whole("n_head")?,
        hidden: keys.whole_or("n_inner")?.unwrap_or(features.saturating_mul(4)),
        blocks: usize::try_from(blocks).unwrap_or(usize::MAX),
        dropout,
        attention_dropout: keys.number_or("attn_pdrop", 0.1)?,
        tied: keys.truth_or("tie_word_embeddings", true)?,
        split_blocks: true,
        gelu,
    })
}

/// `name` without the prefix.
pub(super) fn bare(name: &str) -> &str {
    name.strip_prefix(PREFIX).unwrap_or(name)
}

/// How a folder names the parameter `name`.
pub(super) fn name_of(name: &str) -> Name {
    if name == HEAD.0 {
        return Name::same(HEAD.1);
    }
    if let Some((_, theirs)) = OTHERS.iter().find(|(own, _)| *own == name) {
        return Name::same(&format!("{PREFIX}{theirs}"));
    }
    let part = name.split_once('.').and_then(|(block, part)| {
        // Attention and feed-forward may be one layer here.
        let part = part.strip_prefix("block.").unwrap_or(part);
        PARTS.iter().find(|(own, ..)| *own == part).map(|found| (block, found))
    });
    match part {
        Some((block, (_, theirs, transpose))) => {
            Name { name: format!("{PREFIX}h.{block}.{theirs}"), transpose: *transpose }
        }
        None => Name::same(name),
    }
}

/// The parameter that a folder names `name`. `tied` says whether logits share the token table.
pub(super) fn parameter_of(name: &str, tied: bool) -> Found {
    let bare = bare(name);
    if bare == HEAD.1 {
        return match tied {
            true => Found::CopyOf(OTHERS[0].1.to_owned()),
            false => Found::Parameter(Name::same(HEAD.0)),
        };
    }
    if let Some((own, _)) = OTHERS.iter().find(|(_, theirs)| *theirs == bare) {
        return Found::Parameter(Name::same(own));
    }
    let in_block = bare.strip_prefix("h.").and_then(|rest| rest.split_once('.'));
    match in_block {
        // The causal mask, and what it puts in its place.
        Some((_, "attn.bias" | "attn.masked_bias")) => Found::Derived,
        Some((block, part)) => match PARTS.iter().find(|(_, theirs, _)| *theirs == part) {
            Some((own, _, transpose)) => {
                Found::Parameter(Name { name: format!("{block}.{own}"), transpose: *transpose })
            }
            None => Found::Parameter(Name::same(name)),
        },
        None => Found::Parameter(Name::same(name)),
    }
}
