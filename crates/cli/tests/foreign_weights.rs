//! Weights from elsewhere that fit by their shapes, and are another network: a head that is not the
//! embedding, another number of attention heads, rules that match nothing. Family `regression_`:
//! each was imported without a word.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::fs;

use common::{Folder, train};
use gpipe_checkpoint::{
    tensor_file::encode,
    weights::{self, Facts},
};
use tch::{Kind, Tensor};

/// From the names of the transformer here to GPT-2's, the first that fits; and whether the matrix
/// is kept the other way round.
const GPT2: [(&str, &str, bool); 13] = [
    ("embedding.tokens", "transformer.wte.weight", false),
    ("embedding.positions", "transformer.wpe.weight", false),
    ("0.attention.qkv.weight", "transformer.h.0.attn.c_attn.weight", true),
    ("0.attention.qkv.bias", "transformer.h.0.attn.c_attn.bias", false),
    ("0.attention.output.weight", "transformer.h.0.attn.c_proj.weight", true),
    ("0.attention.output.bias", "transformer.h.0.attn.c_proj.bias", false),
    ("0.mlp.hidden.weight", "transformer.h.0.mlp.c_fc.weight", true),
    ("0.mlp.hidden.bias", "transformer.h.0.mlp.c_fc.bias", false),
    ("0.mlp.output.weight", "transformer.h.0.mlp.c_proj.weight", true),
    ("0.mlp.output.bias", "transformer.h.0.mlp.c_proj.bias", false),
    ("0.attention.norm.", "transformer.h.0.ln_1.", false),
    ("0.mlp.norm.", "transformer.h.0.ln_2.", false),
    ("head.norm.", "transformer.ln_f.", false),
];

type Named = Vec<(String, Tensor)>;

/// Weights of a run as GPT-2 has them, with `head` as its lm_head.weight where that is not among
/// them.
fn gpt2(run: &Named, head: Option<&Tensor>) -> Named {
    let rename = |(name, value): &(String, Tensor)| {
        if name == "head.weight" {
            return ("lm_head.weight".to_owned(), value.shallow_clone());
        }
        let rule = GPT2.iter().find(|(own, ..)| name.starts_with(own));
        let (own, theirs, swapped) = rule.unwrap_or_else(|| panic!("{name}"));
        let value = if *swapped { value.tr().contiguous() } else { value.shallow_clone() };
        (name.replace(own, theirs), value)
    };
    let mut all: Named = run.iter().map(rename).collect();
    all.extend(head.map(|head| ("lm_head.weight".to_owned(), head.shallow_clone())));
    all
}

/// A run, and a folder `gpt2` with its weights under GPT-2's names, as another program writes them.
struct Source(Folder);

impl Source {
    fn new(tied: bool) -> Self {
        let folder = Folder::new();
        let tied = format!("model.tied={tied}");
        folder.succeeds(&train("run", &["--set", &tied]));
        fs::create_dir(folder.path("gpt2")).unwrap();
        Self(folder)
    }

    fn run(&self) -> Named {
        weights::load(&self.0.path("run/weights.safetensors")).unwrap()
    }

    fn put(&self, tensors: &Named) {
        let bytes = encode(tensors, &Facts::new()).unwrap();
        fs::write(self.0.path("gpt2/model.safetensors"), bytes).unwrap();
    }

    fn import<'a>(&self, names: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let import = ["import", "gpt2/model.safetensors", "--config", "run/config.toml"];
        [&import[..], &["--names", names, "--out", "w.safetensors"], more].concat()
    }

    /// The imported weights, by name.
    fn imported(&self) -> Named {
        let mut all = weights::load(&self.0.path("w.safetensors")).unwrap();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }
}

fn sorted(mut all: Named) -> Named {
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

const NAMES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/names/gpt2.toml");

/// New tokens, because there is no tokenizer beside the weights.
const INIT: &[&str] =
    &["--init", "gpt2/model.safetensors", "--names", NAMES, "--set", "data.tokenizer=new"];

/// The map left lm_head.weight out, so that an untied GPT-2 became a tied one, with another loss
/// and exit code 0.
#[test]
fn regression_an_untied_gpt2_is_no_tied_one() {
    let source = Source::new(false);
    source.put(&gpt2(&source.run(), None));
    let tied = source.import(NAMES, &["--set", "model.tied=true"]);
    let parts = [
        "gpt2/model.safetensors",
        "lm_head.weight differs from transformer.wte.weight",
        "model.tied = false",
    ];
    source.0.refuses(&tied, &parts);
    assert!(!source.0.path("w.safetensors").exists());
    let init = [INIT, &["--set", "model.tied=true"]].concat();
    source.0.refuses(&train("new", &init), &parts);
    // As it is, it is imported whole: the same loss.
    source.0.succeeds(&source.import(NAMES, &[]));
    assert_eq!(source.imported(), sorted(source.run()));
    // A copy of the embedding is one.
    let tied_run = Source::new(true);
    let run = tied_run.run();
    let table = &run.iter().find(|(name, _)| name == "embedding.tokens").unwrap().1;
    for head in [Some(table), None] {
        tied_run.put(&gpt2(&run, head));
        let printed = tied_run.0.succeeds(&tied_run.import(NAMES, &[]));
        assert!(printed.contains("16 of 16 parameters are in the file"), "{printed}");
        let told = printed.contains("lm_head.weight of transformer.wte.weight");
        assert_eq!(told, head.is_some(), "{printed}");
        assert_eq!(tied_run.imported(), sorted(tied_run.run()));
    }
    tied_run.put(&gpt2(&run, Some(&(table + 1e-3))));
    tied_run.0.refuses(&tied_run.import(NAMES, &[]), &parts);
}

/// A file with other attention heads has the same shapes, and was imported as another network.
#[test]
fn regression_what_no_shape_shows_is_compared_with_the_source_s_config() {
    let source = Source::new(true);
    source.put(&gpt2(&source.run(), None));
    let import = source.import(NAMES, &[]);
    let printed = source.0.succeeds(&import);
    let note = "there is no config.json beside gpt2/model.safetensors: not checked";
    assert!(printed.contains(note) && printed.contains("model.heads = 2"), "{printed}");
    let config = |text: &str| fs::write(source.0.path("gpt2/config.json"), text).unwrap();
    let whole = r#""n_layer": 1, "n_embd": 16, "layer_norm_epsilon": 1e-05"#;
    for (text, parts) in [
        (r#"{"n_head": 4}"#, &["n_head is 4", "model.heads is 2", "set model.heads = 4"][..]),
        (r#"{"num_attention_heads": 1}"#, &["num_attention_heads is 1"]),
        (r#"{"n_head": 2, "n_layer": 3}"#, &["n_layer is 3", "model.blocks is 1"]),
        (r#"{"n_head": "2"}"#, &["n_head is \"2\""]),
        (r#"{"n_head": 2, "layer_norm_epsilon": 1e-6}"#, &["layer_norm_epsilon", "1e-5"]),
        (r#"{"n_head": 2, "activation_function": "relu"}"#, &["activation_function", "relu"]),
        (r#"{"n_head": 2, "scale_attn_by_inverse_layer_idx": true}"#, &["scale_attn_by_inverse"]),
        (r#"{"n_head": 2, "tie_word_embeddings": false}"#, &["model.tied = false"]),
        ("[2]", &["no JSON object"]),
        ("{", &["no JSON", "remove it"]),
    ] {
        config(text);
        source.0.refuses(&import, &[&["gpt2/config.json"], parts].concat());
        source.0.refuses(&train("new", INIT), &["gpt2/config.json"]);
    }
    config(&format!(r#"{{"n_head": 2, "activation_function": "gelu", {whole}}}"#));
    let printed = source.0.succeeds(&import);
    assert!(!printed.contains("config.json"), "nothing is open: {printed}");
    config(&format!(r#"{{"n_head": 2, "activation_function": "gelu_new", {whole}}}"#));
    let printed = source.0.succeeds(&import);
    assert!(printed.contains("gpt2/config.json says activation_function"), "{printed}");
    config(r#"{"n_layer": 1}"#);
    let printed = source.0.succeeds(&import);
    assert!(printed.contains("does not say, and no shape shows, the heads, the"), "{printed}");
}

/// The weights of a run were taken for a model with other heads: each program's own file said
/// nothing of them.
#[test]
fn regression_weights_of_a_run_say_how_many_heads_they_are_for() {
    let folder = Folder::new();
    folder.succeeds(&train("run", &[]));
    let parts = ["trained with model.heads = 2", "the configuration has model.heads = 4"];
    let heads = ["--set", "model.heads=4"];
    folder.refuses(&[&["eval", "run"], &heads[..]].concat(), &parts);
    folder.refuses(&train("new", &[&["--init", "run"], &heads[..]].concat()), &parts);
    let import = ["import", "run/weights.safetensors", "--config", "run/config.toml"];
    folder.refuses(&[&import[..], &["--out", "w.safetensors"], &heads].concat(), &parts);
    for from in ["run/checkpoints/latest", "run/checkpoints/step-00000008"] {
        folder.refuses(&[&["eval", from], &heads[..]].concat(), &parts);
        folder.refuses(&train("new", &[&["--init", from], &heads[..]].concat()), &parts);
        folder.succeeds(&["export", from, "--out", "out.safetensors"]);
        let eval = ["eval", "--config", "run/config.toml", "--weights", "run/out.safetensors"];
        fs::copy(folder.path("out.safetensors"), folder.path("run/out.safetensors")).unwrap();
        folder.refuses(&[&eval[..], &heads].concat(), &parts);
        folder.succeeds(&[&eval[..], &["--tokens", "100"]].concat());
    }
}

/// A misspelt rule was passed over, and so was a pattern of parameters that are to keep their own
/// values.
#[test]
fn regression_rules_that_match_nothing_are_named() {
    let source = Source::new(true);
    let mut tensors = gpt2(&source.run(), None);
    source.put(&tensors);
    let map = fs::read_to_string(NAMES).unwrap();
    let with = |text: String| fs::write(source.0.path("names.toml"), text).unwrap();
    with(format!("{map}\n[[names]]\nfrom = \"h.*.ln_3.*\"\nto = \"*.norm.*\"\n"));
    let import = source.import("names.toml", &[]);
    let parts =
        ["names.toml: rule 17 (", "h.*.ln_3.*", "gpt2/model.safetensors", "optional = true"];
    source.0.refuses(&import, &parts);
    source.0.refuses(&[&import[..], &["--partial"]].concat(), &parts);
    with(format!("reinit = [\"*.scale\"]\n{map}"));
    source.0.refuses(&import, &["names.toml: reinit = \"*.scale\" is the name of no parameter"]);
    // What a file may lack is marked in the map: the causal mask, and a head of its own.
    tensors.push((
        "transformer.h.0.attn.bias".into(),
        Tensor::ones([8, 8], (Kind::Bool, tch::Device::Cpu)),
    ));
    source.put(&tensors);
    with(map);
    source.0.succeeds(&import);
}
