//! Low-rank adapters in the command. `transparency_`: the same result at every K, schedule and
//! policy, and after a resumption; `oracle_`: exported weights; `fault_`: invalid settings.

use std::{collections::HashMap, fs};

use serde_json::Value;
use tch::{Kind, Tensor};

use crate::{
    common::Folder,
    samples::{folder, loss},
};

/// A folder of a model, `base`, and its samples.
fn with_base() -> Folder {
    let folder = folder();
    folder.succeeds(&["train", "tuned.toml", "--out", "first"]);
    folder.succeeds(&["export", "first", "--to", "base"]);
    folder
}

const TUNE: &[&str] = &[
    "train",
    "--from",
    "base",
    "--data",
    "chats.jsonl",
    "--lora",
    "3",
    "--dtype",
    "float32",
    "--steps",
    "6",
    "--set",
    "data.sequence=64",
    "--set",
    "data.cache=kept",
    "--set",
    "optimizer.lr=0.01",
];

fn tune<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [TUNE, more].concat()
}

#[test]
fn transparency_of_a_training_of_adapters() {
    let folder = with_base();
    let printed = folder.succeeds(&tune(&["--stages", "2", "--out", "two"]));
    assert!(printed.contains("samples do not attend to each other"), "{printed}");
    assert!(printed.contains("of adapters of rank 3 on 21 linear layers"), "{printed}");
    folder.succeeds(&tune(&[
        "--stages",
        "3",
        "--schedule",
        "zb-h1",
        "--remat",
        "always",
        "--out",
        "three",
    ]));
    assert!(folder.weights("two") == folder.weights("three"));
    let launched = tune(&["--stages", "2", "--out", "launched"]);
    folder.succeeds(&[&["launch", "--processes", "2", "--"], &launched[..]].concat());
    assert!(folder.weights("two") == folder.weights("launched"));
    folder.succeeds(&tune(&["--checkpoint-every", "3", "--out", "whole"]));
    let middle = "whole/checkpoints/step-00000003";
    folder.succeeds(&["train", "--resume", middle, "--stages", "2", "--out", "rest"]);
    assert!(folder.weights("two") == folder.weights("rest"));
    // The flag again does not change learning rate and dtype, as it does where a run begins.
    folder.succeeds(&["train", "--resume", middle, "--lora", "3", "--out", "again"]);
    assert!(folder.weights("two") == folder.weights("again"));
    let refused = ["train", "--resume", middle, "--set", "lora.alpha=1", "--out", "other"];
    folder.refuses(&refused, &["lora.alpha", "cannot change from"]);
    // It was said to be allowed, and then the checkpoint did not fit.
    let refused = ["train", "--resume", middle, "--dtype", "bfloat16", "--out", "other"];
    folder.refuses(&refused, &["pipeline.dtype cannot", "are saved in the old dtype"]);
    let refused = ["train", "--resume", middle, "--lora", "4", "--out", "other"];
    folder.refuses(&refused, &["lora.rank cannot", "gpipe export RUN --to FOLDER", "--lora N"]);
}

#[test]
fn oracle_adapters_are_exported_alone_and_merged() {
    let folder = with_base();
    folder.succeeds(&tune(&["--stages", "2", "--out", "two"]));
    folder.succeeds(&["export", "two", "--to", "merged", "--dtype", "float32"]);
    let data = ["--data", "chats.jsonl"];
    let own = loss(&folder, &data);
    let of = |model: &str| {
        let printed = folder.succeeds(&[&["eval", model, "--json"], &data[..]].concat());
        serde_json::from_str::<Value>(&printed).unwrap()["loss"].as_f64().unwrap()
    };
    let merged = of("merged");
    // The product is added before the other, in another order.
    assert!((own - merged).abs() < 1e-5 * own, "{own} {merged}");
    let base = of("base");
    assert!(own < base, "{own} {base}");

    folder.succeeds(&["export", "two", "--to", "adapter", "--adapter"]);
    let text = fs::read_to_string(folder.path("adapter/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((config["r"].as_i64(), config["lora_alpha"].as_f64()), (Some(3), Some(6.0)));
    let targets: Vec<&str> = config["target_modules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|own| own.as_str().unwrap())
        .collect();
    let maps = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];
    assert_eq!(targets, maps);
    merged_are_base_and_product(&folder);
    let listed = folder.succeeds(&["inspect", "adapter/adapter_model.safetensors"]);
    let name = "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight";
    assert!(listed.contains(name), "{listed}");
    folder.refuses(&["eval", "adapter"], &["adapter: it has adapters only", "--to FOLDER"]);
    // Only some maps: PEFT is told their whole names.
    let some = ["--set", "lora.targets=[\"model.layers.1.*.q_proj\"]", "--out", "some"];
    folder.succeeds(&tune(&some));
    folder.succeeds(&["export", "some", "--to", "part", "--adapter"]);
    let text = fs::read_to_string(folder.path("part/adapter_config.json")).unwrap();
    assert!(text.contains("\"model.layers.1.self_attn.q_proj\""), "{text}");
    // A folder without a template takes the one that is named.
    fs::remove_file(folder.path("base/chat_template.jinja")).unwrap();
    folder.refuses(&["eval", "base", "--data", "chats.jsonl"], &["data.chat_template"]);
    let named = ["--set", "data.chat_template=chat.jinja"];
    folder.succeeds(&[&["eval", "base", "--data", "chats.jsonl"], &named[..]].concat());
}

/// The tensors of a file, by name.
fn tensors(folder: &Folder, file: &str) -> HashMap<String, Tensor> {
    gpipe_checkpoint::weights::load(&folder.path(file)).unwrap().into_iter().collect()
}

/// A merged weight is that of the base, plus alpha / rank times the product of the exported pair.
fn merged_are_base_and_product(folder: &Folder) {
    let (base, merged) =
        (tensors(folder, "base/model.safetensors"), tensors(folder, "merged/model.safetensors"));
    let adapter = tensors(folder, "adapter/adapter_model.safetensors");
    assert_eq!(adapter.len(), 2 * 21);
    let mut adapted = 0;
    for (name, merged) in &merged {
        let base = base[name].to_kind(Kind::Float);
        let of = |which: &str| {
            let layer = name.strip_suffix(".weight")?;
            adapter.get(&format!("base_model.model.{layer}.{which}.weight"))
        };
        let expected = match (of("lora_A"), of("lora_B")) {
            (Some(a), Some(b)) => {
                adapted += 1;
                let product = b.matmul(a) * 2.0; // alpha 6, rank 3
                assert!(product.abs().max().double_value(&[]) > 1e-3, "or nothing is tested");
                base + product
            }
            _ => base,
        };
        // Weights are below 1, and the sum is rounded to float32.
        let apart = (merged - expected).abs().max().double_value(&[]);
        assert!(apart < 1e-6, "{name}: {apart}");
    }
    assert_eq!(adapted, 21);
}

#[test]
fn fault_adapters_that_do_not_fit_are_refused() {
    let folder = with_base();
    let refused = |more: &[&str], parts: &[&str]| folder.refuses(&tune(more), parts);
    refused(&["--set", "lora.targets=[\"q_prj\"]"], &["'q_prj'", "q_proj"]);
    refused(&["--set", "lora.dropout=1.5"], &["dropout 1.5"]);
    folder.refuses(&["train", "tuned.toml", "--lora", "2"], &["lora.rank", "--from", "--init"]);
    folder.refuses(&["train", "tuned.toml", "--lora", "-2"], &["--lora", "whole number"]);
    folder.refuses(&["export", "first", "--to", "x", "--adapter"], &["--adapter", "no adapters"]);
    // From weights without adapters, and from those of a run with them.
    folder.succeeds(&["train", "tuned.toml", "--init", "first", "--lora", "2", "--out", "a"]);
    folder.succeeds(&["train", "tuned.toml", "--init", "a", "--lora", "2", "--out", "b"]);
    let other = ["train", "tuned.toml", "--init", "a", "--lora", "2", "--set", "lora.alpha=1"];
    folder.refuses(&other, &["lora.alpha = 4"]);
    folder.refuses(&["train", "tuned.toml", "--init", "a"], &["lora_A.weight"]);
}
