//! Models' folders as Hugging Face distributes them, as their user trains, measures, continues and
//! exports them. `transparency_`: the same at every K, in one process and in several; `oracle_`:
//! what goes there and back is the same; `fault_`: folders and flags that do not fit. The
//! comparison with transformers itself is `scripts/folder_parity.py`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use gpipe_checkpoint::{model_folder, tensor_file::TensorFile};
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
tied = true
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

const SHORT: [&str; 6] =
    ["--set", "data.sequence=8", "--set", "train.validation_tokens=100", "--steps", "3"];

/// The same mini-batches for a run and for a folder.
const EVAL: [&str; 10] = [
    "--text",
    "text.txt",
    "--tokens",
    "300",
    "--json",
    "--micro-batches",
    "3",
    "--set",
    "data.sequence=8",
    "--set=train.mini_batch=7",
];

/// A folder with a text, a run of a model built like Qwen 3, and `model`, which was exported of it
/// in several shards.
fn exported() -> Folder {
    let folder = Folder::new();
    fs::write(folder.path("tiny.toml"), CONFIG).unwrap();
    folder.train(&["--out", "run"]);
    folder.succeeds(&["export", "run", "--to", "model", "--shard-size", "8KiB"]);
    folder
}

fn from<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let train = ["train", "--from", "model", "--text", "text.txt", "--out", out];
    [&train[..], &SHORT, more].concat()
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// The bytes of all tensors, by name.
fn tensors(folder: &Path) -> Vec<(String, Vec<i64>, String)> {
    let mut set = model_folder::open(folder).unwrap();
    let all: Vec<_> =
        set.entries().map(|entry| (entry.name.clone(), entry.shape.clone())).collect();
    let bytes = |name: &str, set: &mut gpipe_checkpoint::TensorSet| {
        let tensor = set.read(name).unwrap();
        format!("{:?} {:?}", tensor.kind(), Vec::<f32>::try_from(tensor.flatten(0, -1)).unwrap())
    };
    all.into_iter().map(|(name, shape)| (name.clone(), shape, bytes(&name, &mut set))).collect()
}

#[test]
fn transparency_of_a_folders_life() {
    let folder = exported();
    folder.succeeds(&from("one", &["--stages", "1"]));
    folder.succeeds(&from("three", &["--stages", "3", "--schedule", "zb-h1"]));
    assert!(folder.weights("one") == folder.weights("three"));
    let launch = ["launch", "--processes", "2", "--"];
    folder.succeeds(&[&launch[..], &from("processes", &["--stages", "2"])].concat());
    assert!(folder.weights("one") == folder.weights("processes"));
    // The same command starts and restarts it, in several processes too.
    let again = from("processes", &["--stages", "2", "--resume", "auto"]);
    let again: Vec<&str> =
        again.into_iter().map(|own| if own == "3" { "4" } else { own }).collect();
    folder.succeeds(&[&launch[..], &again].concat());
    folder.succeeds(&["trace", "--from", "model", "--text", "text.txt", "--set", SHORT[1]]);
    // With a configuration that has everything but the model.
    fs::write(folder.path("own.toml"), "[train]\nmini_batch = 8\n[optimizer]\nlr = 0.01\n")
        .unwrap();
    let own = [&["train", "own.toml"], &from("own", &["--stages", "2"])[1..]].concat();
    folder.succeeds(&own);
    assert!(folder.weights("one") != folder.weights("own"));

    // Rows may be longer than those that the model was trained on.
    let long = ["--set", "data.sequence=12"];
    for (out, more, warns) in [("as-long", &[][..], false), ("longer", &long[..], true)] {
        let output = folder.gpipe(&from(out, more));
        assert!(output.status.success(), "{output:?}");
        let errors = String::from_utf8_lossy(&output.stderr).replace('\n', " ");
        let warning = "rows have 12 tokens, and the model was trained on 8 positions";
        assert_eq!(errors.contains(warning), warns, "{errors}");
    }

    // It goes on from a checkpoint, without the folder it came from.
    fs::rename(folder.path("model"), folder.path("elsewhere")).unwrap();
    folder.succeeds(&["train", "--resume", "three", "--steps", "5", "--out", "further"]);
    fs::rename(folder.path("elsewhere"), folder.path("model")).unwrap();
    let generate = |of: &str, stages: &str| {
        let generate = ["generate", of, "--prompt", "stage", "--prompt", "pipeline stage layer"];
        folder.succeeds(&[&generate[..], &["--tokens", "9", "--stages", stages]].concat())
    };
    for of in ["one", "model"] {
        assert_eq!(generate(of, "1"), generate(of, "3"), "{of}");
    }
    // Prompts of hundreds of tokens, and many of them.
    let long = "stage ".repeat(700);
    let many: Vec<String> = (0..64).map(|at| "layer ".repeat(20 + at % 2)).collect();
    let mut generate = vec!["generate", "model", "--tokens", "3", "--json", "--prompt", &long];
    generate.extend(many.iter().flat_map(|prompt| ["--prompt", prompt]));
    assert_eq!(folder.succeeds(&generate).lines().count(), 65);
}

#[test]
fn oracle_what_is_exported_is_the_same_model() {
    let folder = exported();
    let eval = |of: &str| folder.succeeds(&[&["eval", of], &EVAL[..]].concat());
    assert_eq!(eval("run"), eval("model"));
    // The tokenizer and the description are there, and what was learned here is told to others.
    let config: Value =
        serde_json::from_str(&fs::read_to_string(folder.path("model/config.json")).unwrap())
            .unwrap();
    assert_eq!(config["model_type"], "qwen3");
    assert_eq!(config["architectures"], json!(["Qwen3ForCausalLM"]));
    let tokens = |of: &str| fs::read(folder.path(of).join("tokenizer.json")).unwrap();
    assert!(tokens("run") == tokens("model"));
    let index: Value = serde_json::from_str(
        &fs::read_to_string(folder.path("model/model.safetensors.index.json")).unwrap(),
    )
    .unwrap();
    let total: u64 = tensors(&folder.path("model"))
        .iter()
        .map(|(_, shape, _)| 4 * shape.iter().product::<i64>() as u64)
        .sum();
    assert_eq!(index["metadata"]["total_size"], total);

    // A training begins with the folder's weights: without a learning rate, it ends with them.
    folder.succeeds(&from("still", &["--set", "optimizer.lr=0"]));
    folder.succeeds(&["export", "still", "--to", "from-training"]);
    assert_eq!(tensors(&folder.path("model")), tensors(&folder.path("from-training")));

    // In, and out again: by a weights file, by a training's checkpoint before its first step, and
    // from folder to folder.
    folder.succeeds(&["import", "model", "--out", "imported/weights.safetensors"]);
    folder.succeeds(&["export", "imported", "--to", "back"]);
    assert_eq!(tensors(&folder.path("model")), tensors(&folder.path("back")));
    folder.succeeds(&["export", "model", "--to", "again", "--shard-size", "1KiB"]);
    assert_eq!(tensors(&folder.path("model")), tensors(&folder.path("again")));
    folder.succeeds(&["export", "model", "--to", "half", "--dtype", "bfloat16"]);
    folder.succeeds(&["export", "half", "--to", "float", "--dtype", "float32"]);
    let half = fs::read_to_string(folder.path("half/config.json")).unwrap();
    assert!(half.contains("\"torch_dtype\": \"bfloat16\""), "{half}");
    let rounded = tensors(&folder.path("float"));
    for ((name, _, own), (_, _, rounded)) in tensors(&folder.path("model")).iter().zip(&rounded) {
        // Norms begin at 1 and hardly move: their rounding may be no change.
        assert!(own != rounded || name.contains("norm"), "{name}");
    }

    let seen = folder.succeeds(&["inspect", "model"]);
    for part in ["qwen3, 6 layers", "F32", "files", "all tensors are as they were written"] {
        assert!(seen.contains(part), "{part}: {seen}");
    }
    let json: Value =
        serde_json::from_str(&folder.succeeds(&["inspect", "model", "--json"])).unwrap();
    assert_eq!((&json["tied"], &json["digests"]), (&true.into(), &true.into()));
}

/// The older transformer is a GPT-2, whose matrices are the other way round.
#[test]
fn oracle_the_transformer_is_a_gpt2_and_comes_back() {
    let folder = Folder::new();
    for (split, gelu, name) in [("true", "tanh", "split"), ("false", "exact", "whole")] {
        let (split, gelu) = (format!("model.split_blocks={split}"), format!("model.gelu={gelu}"));
        folder.train(&["--out", name, "--set", &split, "--set", &gelu, "--set", "model.hidden=16"]);
        let to = format!("{name}-gpt2");
        folder.succeeds(&["export", name, "--to", &to]);
        let eval = |of: &str| folder.succeeds(&[&["eval", of], &EVAL[..]].concat());
        assert_eq!(eval(name), eval(&to));
    }
    // Texts that are longer than the model's eight positions.
    let generate = |of: &str| {
        folder.succeeds(&["generate", of, "--prompt", "stage", "--tokens", "20", "--seed", "3"])
    };
    assert_eq!(generate("whole"), generate("whole-gpt2"));
}

/// A folder with experts in two of three blocks, whose balance is a part of the loss.
fn with_experts(folder: &Folder) {
    let to = folder.path("experts");
    fs::create_dir(&to).unwrap();
    fs::copy(folder.path("run/tokenizer.json"), to.join("tokenizer.json")).unwrap();
    let config = json!({
        "model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "mlp_only_layers": [1], "norm_topk_prob": true,
        "output_router_logits": true, "router_aux_loss_coef": 0.5, "initializer_range": 0.3,
    });
    fs::write(to.join("config.json"), config.to_string()).unwrap();
    let network = gpipe_models::huggingface::config(&config.to_string()).unwrap().network;
    let input = gpipe::TensorSpec::new([1, 8], tch::Kind::Int64);
    let mut pipeline = gpipe::Pipeline::builder(network.build().unwrap(), input).build().unwrap();
    let tensors = pipeline.parameters().unwrap();
    gpipe_checkpoint::weights::save(&to.join("model.safetensors"), &tensors).unwrap();
}

#[test]
fn transparency_of_experts() {
    let folder = exported();
    with_experts(&folder);
    let train = |out: &'static str, more: &[&'static str]| {
        let train = ["train", "--from", "experts", "--text", "text.txt", "--out", out];
        [&train[..], &SHORT, more].concat()
    };
    folder.succeeds(&train("one", &["--stages", "1"]));
    folder.succeeds(&train("four", &["--stages", "4", "--schedule", "zb-h1", "--remat", "always"]));
    assert!(folder.weights("one") == folder.weights("four"));
    let launch = ["launch", "--processes", "2", "--"];
    folder.succeeds(&[&launch[..], &train("processes", &["--stages", "2"])].concat());
    assert!(folder.weights("one") == folder.weights("processes"));
    // The balance is a part of the loss: without it, other weights.
    edit(&folder.path("experts/config.json"), |config| {
        config["output_router_logits"] = false.into();
    });
    folder.succeeds(&train("other", &["--stages", "1"]));
    assert!(folder.weights("one") != folder.weights("other"));
    // Rows with padding, which has no part in the balance: told to the model where it is trained
    // and evaluated, and not where a text comes from elsewhere.
    edit(&folder.path("experts/config.json"), |config| {
        config["output_router_logits"] = true.into();
    });
    let lines = ["stage", "pipeline stage micro batch", "loss"].map(|text| json!({"text": text}));
    let lines: Vec<String> = lines.iter().cycle().take(40).map(Value::to_string).collect();
    fs::write(folder.path("texts.jsonl"), lines.join("\n")).unwrap();
    for packing in ["none", "joined"] {
        let set = format!("data.packing={packing}");
        let of = |out: &str, stages: &str| {
            let train = ["train", "--from", "experts", "--data", "texts.jsonl", "--out", out];
            let set = ["--set", &set, "--stages", stages];
            folder.succeeds(&[&train[..], &SHORT[..2], &["--steps", "3"], &set].concat());
        };
        let (first, second) = (format!("{packing}-1"), format!("{packing}-2"));
        of(&first, "1");
        of(&second, "2");
        assert!(folder.weights(&first) == folder.weights(&second), "{packing}");
        folder.succeeds(&["eval", &first, "--data", "texts.jsonl"]);
        folder.succeeds(&["eval", &first, "--text", "text.txt", "--tokens", "100"]);
        folder.succeeds(&["generate", &first, "--prompt", "stage", "--tokens", "5"]);
    }
    let generate = ["generate", "one", "--prompt", "stage", "--tokens", "5", "--json"];
    let text = folder.succeeds(&generate);
    assert!(text.contains("\"end\""), "{text}");
    folder.succeeds(&["eval", "one", "--text", "text.txt", "--tokens", "100"]);
    folder.succeeds(&["export", "one", "--to", "mine"]);
    let names: Vec<String> =
        tensors(&folder.path("mine")).into_iter().map(|(name, ..)| name).collect();
    assert!(names.contains(&"model.layers.2.mlp.experts.4.up_proj.weight".to_owned()));
}

/// A copy of the model's folder that a test may damage.
fn copied(folder: &Folder, to: &str) -> PathBuf {
    let to = folder.path(to);
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(folder.path("model")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
    to
}

#[test]
fn fault_folders_that_do_not_fit_are_named_before_any_work() {
    let folder = exported();
    let refused = |name: &str, damage: &dyn Fn(&Path), parts: &[&str]| {
        damage(&copied(&folder, name));
        let train = ["train", "--from", name, "--text", "no such text", "--out", "out"];
        // The text is not there, either: the folder is looked at first.
        folder.refuses(&train, parts);
        assert!(!folder.path("out/metrics.jsonl").exists(), "{name}");
        folder.refuses(&["generate", name, "--prompt", "a"], parts);
        folder.refuses(&["inspect", name], parts);
    };
    let config =
        |change: fn(&mut Value)| move |path: &Path| edit(&path.join("config.json"), change);
    let shard = "model-00002-of-";
    let second = |path: &Path| -> PathBuf {
        let all = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        let is_second = |path: &PathBuf| path.to_string_lossy().contains(shard);
        all.into_iter().find(is_second).unwrap()
    };
    refused("shard", &|path| fs::remove_file(second(path)).unwrap(), &[shard, "which is missing"]);
    refused(
        "index",
        &|path| {
            edit(&path.join("model.safetensors.index.json"), |index| {
                index["weight_map"]["model.norm.weight"] = "../weights.safetensors".into();
            });
        },
        &["../weights.safetensors, which is no file of this folder"],
    );
    refused(
        "cut",
        &|path| {
            let path = second(path);
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        },
        &[shard, "truncated"],
    );
    refused(
        "shape",
        &config(|config| config["intermediate_size"] = 25.into()),
        &["the weights do not fit config.json", "mlp.down_proj.weight: [16, 25]", "is [16, 24]"],
    );
    refused(
        "blocks",
        &config(|config| config["num_hidden_layers"] = 4.into()),
        &["missing from the file", "model.layers.3.input_layernorm.weight"],
    );
    refused(
        "architecture",
        &config(|config| config["model_type"] = "mamba".into()),
        &["architecture: config.json: model_type is mamba: supported are llama, mistral"],
    );
    refused(
        "rope",
        &config(|config| config["rope_scaling"] = json!({"rope_type": "longrope"})),
        &["rope_scaling.rope_type is \"longrope\": supported are default, linear, dynamic"],
    );
    refused(
        "unknown",
        &config(|config| config["num_experts"] = 8.into()),
        &["num_experts is 8: this key is not supported"],
    );
    refused(
        "vocabulary",
        &config(|config| config["vocab_size"] = 100.into()),
        &["the tokenizer has", "tokens, and the model only 100 (vocab_size)"],
    );
    refused(
        "tokenizer",
        &|path| fs::remove_file(path.join("tokenizer.json")).unwrap(),
        &["tokenizer.json: there is no such file: fetch it, too"],
    );
    refused(
        "untied",
        &|path| {
            let head = path.join("model-00001-of-00001.safetensors");
            let mut set = model_folder::open(path).unwrap();
            let table = set.read("model.embed_tokens.weight").unwrap();
            let tensors = [("lm_head.weight".to_owned(), &table + 1.0)];
            gpipe_checkpoint::tensor_file::write(&head, &tensors, &[].into()).unwrap();
            edit(&path.join("model.safetensors.index.json"), |index| {
                let name = head.file_name().unwrap().to_str().unwrap();
                index["weight_map"]["lm_head.weight"] = name.into();
            });
        },
        &["lm_head.weight differs from model.embed_tokens.weight", "set tie_word_embeddings"],
    );
}

#[test]
fn fault_flags_that_do_not_fit_name_the_other_one() {
    let folder = exported();
    let refuses = |arguments: &[&str], parts: &[&str]| folder.refuses(arguments, parts);
    let text = ["--text", "text.txt", "--out", "out"];
    let train = |more: &[&'static str]| [&["train"], more, &text].concat();
    refuses(
        &train(&["tiny.toml", "--from", "model"]),
        &["--from model: tiny.toml has a [model]", "--init takes only the weights"],
    );
    refuses(
        &train(&["tiny.toml", "--init", "model"]),
        &["--init model: it is a model's folder: --from takes"],
    );
    refuses(&train(&["--from", "run"]), &["it is a run of gpipe: `gpipe train --resume run`"]);
    refuses(&train(&["--from", "nowhere"]), &["nowhere: there is no such folder"]);
    refuses(&train(&["--from", "text.txt"]), &["it is no folder with a config.json"]);
    refuses(&train(&["--from", "model", "--init", "run"]), &["cannot be used with"]);
    refuses(
        &train(&["--from", "model", "--resume", "run"]),
        &["--from starts anew and --resume goes on"],
    );
    refuses(&train(&["--from", "model", "--reinit", "lm_head*"]), &["cannot be used with"]);
    refuses(&train(&["--from", "model", "--partial"]), &["cannot be used with"]);
    let into = ["train", "--from", "model", "--text", "text.txt", "--out", "model"];
    refuses(&into, &["model is a model's folder, whose files a run would replace"]);
    refuses(&["export", "run"], &["--to <FOLDER>"]);
    refuses(&["export", "run", "--to", "model"], &["--to model: it exists and is not empty"]);
    refuses(&["export", "model", "--out", "w.safetensors"], &["gpipe import model --out"]);
    refuses(&["import", "model/config.json", "--out", "w"], &["name the configuration of the"]);
    // A single file of the folder fits a configuration that describes the model.
    folder.succeeds(&["export", "model", "--to", "one"]);
    let init =
        ["tiny.toml", "--init", "one/model.safetensors", "--set", "train.validation_tokens=9"];
    folder.succeeds(&train(&init));
    assert!(TensorFile::open(&folder.path("out/weights.safetensors")).is_ok());
}

/// What a model's makers recommend holds where no flag says otherwise.
#[test]
fn oracle_generation_config_is_followed() {
    let folder = exported();
    let path = folder.path("model/generation_config.json");
    let generate = |more: &[&str]| {
        let generate = ["generate", "model", "--prompt", "stage", "--tokens", "12", "--json"];
        let output = folder.gpipe(&[&generate[..], more].concat());
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        (serde_json::from_slice::<Value>(&output.stdout).unwrap(), errors)
    };
    let write = |keys: Value| fs::write(&path, keys.to_string()).unwrap();
    let greedy = generate(&["--temperature", "0"]);
    write(json!({"transformers_version": "5", "eos_token_id": [0]}));
    assert_eq!(generate(&[]), greedy, "no sampling, as transformers without do_sample");
    write(json!({"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0,
        "repetition_penalty": 1.05}));
    let flags = ["--temperature", "0.7", "--top-k", "20", "--top-p", "0.8"];
    let expected = generate(&[&flags[..], &["--repetition-penalty", "1.05"]].concat());
    assert_eq!(generate(&[]), expected);
    assert_eq!(generate(&["--temperature", "0", "--repetition-penalty", "1"]), greedy);
    write(json!({"max_new_tokens": 3}));
    let short = folder.succeeds(&["generate", "model", "--prompt", "stage", "--json"]);
    let short: Value = serde_json::from_str(&short).unwrap();
    assert_eq!(short["tokens"], json!(greedy.0["tokens"].as_array().unwrap()[..3]));
    // A token that ends texts: the third of those.
    write(json!({"eos_token_id": [299, greedy.0["tokens"][2]]}));
    let (ended, _) = generate(&[]);
    assert_eq!(ended["end"], "end");
    assert!(ended["tokens"].as_array().unwrap().len() <= 2, "{ended}");
    // What is not supported is told, and what is wrong is refused.
    write(json!({"num_beams": 4, "output_scores": false, "length_penalty": 1.0}));
    let (_, told) = generate(&[]);
    assert_eq!(
        told,
        "gpipe: warning: not used of generation_config.json: num_beams = 4\n\
        gpipe: warning: the text has more than 8 tokens, the positions that the model was trained \
        on: what follows may be poor\n"
    );
    write(json!({"temperature": "hot", "do_sample": true}));
    folder.refuses(
        &["generate", "model", "--prompt", "a"],
        &["generation_config.json: temperature is \"hot\": it is a number"],
    );
}

/// A tokenizer of another program, for a model that is trained from scratch. What it decodes is not
/// what it encoded: the text is cut into words.
#[test]
fn oracle_a_model_from_scratch_takes_any_tokenizer() {
    let folder = Folder::new();
    fs::write(folder.path("tiny.toml"), CONFIG).unwrap();
    let words = [
        "<unk>", "</s>", "pipeline", "stage", "micro", "batch", "gradient", "layer", "bubble",
        "loss", ".",
    ];
    let vocabulary: serde_json::Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": 1, "content": "</s>", "single_word": false, "lstrip": false,
                          "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    });
    fs::create_dir(folder.path("words")).unwrap();
    fs::write(folder.path("words/tokenizer.json"), tokenizer.to_string()).unwrap();
    let printed = folder.train(&["--out", "run", "--set", "data.tokenizer=words/tokenizer.json"]);
    assert!(printed.contains("vocabulary 11"), "{printed}");
    assert_eq!(
        fs::read_to_string(folder.path("run/tokenizer.json")).unwrap(),
        tokenizer.to_string(),
        "as it was"
    );
    let generate = ["generate", "run", "--prompt", "stage micro", "--tokens", "3", "--json"];
    let made: Value = serde_json::from_str(&folder.succeeds(&generate)).unwrap();
    assert!(made["tokens"].as_array().unwrap().iter().all(|token| token.as_u64() < Some(11)));
    folder.succeeds(&["eval", "run", "--text", "text.txt", "--tokens", "50"]);
    folder.succeeds(&["export", "run", "--to", "model"]);
    // Without a token that ends documents there is a remedy.
    let unnamed = tokenizer.to_string().replace("</s>", "<stop>");
    fs::write(folder.path("words/tokenizer.json"), &unnamed).unwrap();
    let train = [
        "train",
        "tiny.toml",
        "--text",
        "text.txt",
        "--out",
        "other",
        "--set",
        "data.tokenizer=words/tokenizer.json",
    ];
    folder.refuses(&train, &["which token ends a document", "tokenizer_config.json"]);
    let config = json!({"eos_token": "<stop>"}).to_string();
    fs::write(folder.path("words/tokenizer_config.json"), config).unwrap();
    folder.succeeds(&train);
}
