//! A model built like Llama, as its user trains it. `transparency_`: the same at every K;
//! `fault_`: settings that do not fit; `regression_`: what went wrong once.

use std::fs;

use serde_json::{Value, json};

use crate::common::Folder;

const CONFIG: &str = r#"
[model]
kind = "llama"
vocabulary = 300
features = 16
heads = 4
groups = 2
head_size = 6
hidden = 24
blocks = 3
window = 5
head_norms = true

[data]
sequence = 8

[pipeline]
stages = 2
micro_batches = 3

[train]
steps = 4
mini_batch = 7
validation_tokens = 100
"#;

pub fn folder() -> Folder {
    let folder = Folder::new();
    fs::write(folder.path("tiny.toml"), CONFIG).unwrap();
    folder
}

#[test]
fn transparency_of_a_llamas_life() {
    let folder = folder();
    folder.train(&["--out", "two"]);
    folder.train(&["--out", "three", "--stages", "3", "--schedule", "zb-h1", "--remat", "always"]);
    assert!(folder.weights("two") == folder.weights("three"));
    folder.succeeds(&["verify", "tiny.toml", "--text", "text.txt", "--steps", "2"]);

    let generate = ["generate", "two", "--prompt", "stage", "--tokens", "12"];
    let written = folder.succeeds(&generate);
    assert_eq!(written, folder.succeeds(&[&generate[..], &["--stages", "3"]].concat()));
    folder.succeeds(&["eval", "two"]);
    folder.succeeds(&["train", "--resume", "two", "--steps", "6"]);

    // Weights that nothing can compute with are refused before work begins, by all who read them.
    folder.succeeds(&["export", "two", "--to", "hf"]);
    let (from, weights) =
        (["--from", "hf", "--text", "text.txt"], folder.path("hf/model.safetensors"));
    folder.succeeds(&[&["verify"][..], &from, &["--steps", "1"]].concat());
    let whole = fs::read(&weights).unwrap();
    let tensors = tch::Tensor::read_safetensors(&weights).unwrap();
    let _ = tensors[0].1.view(-1).get(0).fill_(f64::NAN);
    tch::Tensor::write_safetensors(&tensors, &weights).unwrap(); // without digests
    let words = ["1 of the", "NaN or infinite"];
    folder.refuses(&[&["verify"][..], &from, &["--steps", "1"]].concat(), &words);
    folder.refuses(&[&["train"][..], &from, &["--out", "nan"]].concat(), &words);
    folder.refuses(&["generate", "hf", "--prompt", "a", "--temperature", "0"], &words);
    fs::write(&weights, b"version https://git-lfs.github.com/spec/v1\n").unwrap();
    folder.refuses(&["generate", "hf", "--prompt", "a"], &["git lfs pull"]);
    fs::write(&weights, &whole).unwrap();

    // The weights of another model are not exported under this one's description.
    fs::copy(folder.path("two/weights.safetensors"), folder.path("three/weights.safetensors"))
        .unwrap();
    folder.succeeds(&["export", "three", "--to", "same"]);
    let other = CONFIG.replace("head_norms = true", "head_norms = false");
    fs::write(folder.path("other.toml"), other).unwrap();
    folder.succeeds(&[
        "train",
        "other.toml",
        "--text",
        "text.txt",
        "--steps",
        "1",
        "--out",
        "other",
    ]);
    fs::copy(folder.path("other/weights.safetensors"), folder.path("three/weights.safetensors"))
        .unwrap();
    folder.refuses(&["export", "three", "--to", "mixed"], &["q_norm"]);
    assert!(!folder.path("mixed").exists());

    // Its parts have the names of transformers.
    folder.succeeds(&["export", "two", "--out", "out.safetensors"]);
    let listed = folder.succeeds(&["inspect", "out.safetensors"]);
    for name in ["model.embed_tokens.weight", "model.layers.2.self_attn.q_norm.weight"] {
        assert!(listed.contains(name), "{name}: {listed}");
    }
}

#[test]
fn fault_sizes_that_do_not_fit_are_refused() {
    let folder = folder();
    let refused = |set: &str, part: &str| {
        folder.refuses(&["train", "tiny.toml", "--text", "text.txt", "--set", set], &[part]);
    };
    refused("model.groups=3", "4 heads of queries for 3 of keys");
    refused("model.head_size=5", "rotary positions need an even size");
    refused("model.window=-2", "a window of no positions: use at least 1");
    refused("model.blocks=0", "no blocks: use at least 1");
    refused("model.theta=0", "use a theta above 1");
    refused("model.eps=0", "eps is 0: use a small number above 0");
    refused("model.dropout=0.1", "dropout");
}

/// Weights of a folder fit a model of the same sizes, but the angles of its positions, its norms or
/// its windows may be others. `--init` trained such a network without a word.
#[test]
fn regression_weights_of_another_llama_are_refused() {
    let folder = folder();
    folder.train(&["--out", "run", "--steps", "1"]);
    folder.succeeds(&["export", "run", "--to", "hf"]);
    let train = ["train", "tiny.toml", "--text", "text.txt", "--init", "hf/model.safetensors"];
    let init = |out| [&train[..], &["--out", out]].concat();
    folder.succeeds(&init("same"));
    let path = folder.path("hf/config.json");
    let config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (keys, expected) in [
        (json!({"rope_theta": 5e5}), "rope_theta is 500000, and model.theta is 10000"),
        (json!({"rms_norm_eps": 1e-5}), "set model.eps = 0.00001"),
        (json!({"num_attention_heads": 8, "head_dim": 3}), "set model.heads = 8"),
        (json!({"sliding_window": 3}), "sliding_window is 3, and model.window is 5"),
        (
            json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
            "rope_scaling changes the positions",
        ),
        (json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping"),
    ] {
        let mut other = config.clone();
        other.as_object_mut().unwrap().remove("rope_parameters");
        other.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        fs::write(&path, other.to_string()).unwrap();
        folder.refuses(&init("new"), &["hf/config.json: ", expected]);
    }
    fs::remove_file(&path).unwrap();
    let told = String::from_utf8(folder.gpipe(&init("told")).stdout).unwrap();
    assert!(told.contains("not checked") && told.contains("model.theta = 10000"), "{told}");
}
