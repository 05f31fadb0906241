//! The keys of a configuration, one by one, through the command. `oracle_`: what a key does, by its
//! formula; `property_`: a key that changes nothing is read and then forgotten.

use std::{collections::HashMap, fs, iter::zip};

use serde_json::Value;
use tch::Tensor;

use crate::{
    common::{CONFIG, Folder, images::with_images},
    llama, translation,
};

/// `KEY=VALUE` for each `--set`.
type Sets = [&'static str];

/// Trains with each of `sets`, in a run named like them.
fn train(folder: &Folder, config: &str, sets: &Sets) -> String {
    let out = format!("{config} {}", sets.join(" ")).replace(['/', '"'], "");
    let mut arguments = vec!["train", config, "--out", &out];
    arguments.extend(sets.iter().flat_map(|set| ["--set", set]));
    folder.succeeds(&arguments);
    out
}

/// Each case has the keys that another key needs, and that key with a value that is not its
/// default: with it, the weights end up different.
fn change_the_weights(folder: &Folder, config: &str, cases: &[(&Sets, &'static str)]) {
    let mut without: HashMap<&Sets, Vec<u8>> = HashMap::new();
    for (needs, changed) in cases {
        let expected =
            without.entry(needs).or_insert_with(|| folder.weights(&train(folder, config, needs)));
        let sets = [needs, &[*changed][..]].concat();
        assert!(folder.weights(&train(folder, config, &sets)) != *expected, "{config}: {sets:?}");
    }
}

/// Three steps on the text.
fn text() -> Folder {
    let folder = Folder::new();
    let config = CONFIG
        .replace("sequence = 8", "sequence = 8\ntext = [\"text.txt\"]")
        .replace("steps = 4", "steps = 3\nvalidation_tokens = 100");
    fs::write(folder.path("tiny.toml"), config).unwrap();
    folder
}

#[test]
fn property_keys_of_optimizers_change_the_weights() {
    let (sgd, momentum) =
        (&["optimizer.name=sgd"], &["optimizer.name=sgd", "optimizer.sgd.momentum=0.9"]);
    let (rmsprop, adafactor) = (&["optimizer.name=rmsprop"], &["optimizer.name=adafactor"]);
    let (early, exponential) = (
        &["optimizer.warmup_steps=0"],
        &["optimizer.warmup_steps=0", "optimizer.decay=exponential"],
    );
    let cases: &[(&Sets, &str)] = &[
        (&[], "optimizer.adam.beta1=0.5"),
        (&[], "optimizer.adam.beta2=0.5"),
        (&[], "optimizer.adam.eps=0.01"),
        (&[], "optimizer.adam.moments=bfloat16"),
        (&["optimizer.weight_decay=0.1"], "optimizer.name=adamw"),
        (early, "optimizer.decay_floor=0.9"),
        (exponential, "optimizer.decay_rate=0.1"),
        (exponential, "optimizer.decay_every=2"),
        (sgd, "optimizer.sgd.momentum=0.5"),
        (momentum, "optimizer.sgd.nesterov=true"),
        (rmsprop, "optimizer.rmsprop.decay=0.5"),
        (rmsprop, "optimizer.rmsprop.momentum=0.1"),
        (rmsprop, "optimizer.rmsprop.eps=0.1"),
        (rmsprop, "optimizer.rmsprop.tensorflow=false"),
        (adafactor, "optimizer.adafactor.beta2_decay=-0.1"),
        (adafactor, "optimizer.adafactor.eps=0.1"),
        (adafactor, "optimizer.adafactor.clip_threshold=5"),
    ];
    change_the_weights(&text(), "tiny.toml", cases);
}

#[test]
fn property_keys_of_text_models_change_the_weights() {
    let cases: &[(&Sets, &str)] = &[
        (&[], "seed=1"),
        (&[], "model.dropout=0.3"),
        (&[], "model.attention_dropout=0.3"),
        (&[], "model.gelu=tanh"),
        (&[], "train.label_smoothing=0.2"),
        (&[], "train.mini_batch=9"),
    ];
    change_the_weights(&text(), "tiny.toml", cases);
    let folder = llama::folder();
    let cases: &[(&Sets, &str)] = &[
        (&["data.text=[\"text.txt\"]"], "model.theta=10"),
        (&["data.text=[\"text.txt\"]"], "model.window=2"),
        (&["data.text=[\"text.txt\"]"], "model.eps=0.1"),
        (&["data.text=[\"text.txt\"]"], "model.attention_dropout=0.3"),
    ];
    change_the_weights(&folder, "tiny.toml", cases);
}

#[test]
fn property_keys_of_translation_change_the_weights() {
    let folder = translation::folder();
    let pairs = fs::read_to_string(folder.path("xx.tsv")).unwrap();
    let few: Vec<&str> = pairs.lines().take(100).collect();
    fs::write(folder.path("few.tsv"), few.join("\n") + "\n").unwrap();
    let uneven = &[r#"data.tsv=[{ language = "xx", path = "few.tsv" }]"#];
    let cases: &[(&Sets, &str)] = &[
        (&[], "model.dropout=0.3"),
        (&[], "model.attention_dropout=0.3"),
        (&[], "model.logit_clip=0.1"),
        (&[], "model.shared=true"),
        (&[], "data.batch_tokens=80"),
        (&[], "data.sentence_bytes=20"),
        (&[], "data.most_pairs=100"),
        (&[], "data.languages=[\"yy\"]"),
        (uneven, "data.temperature=1"),
    ];
    change_the_weights(&folder, "t.toml", cases);
}

#[test]
fn property_keys_of_images_change_the_weights() {
    let folder = with_images();
    let cases: &[(&Sets, &str)] = &[
        (&["train.steps=2"], "images.resize=48"),
        (&["train.steps=2"], "images.crop=padded:4"),
        (&["train.steps=2"], "images.flip=1"),
        (&["train.steps=2"], "images.cutout=9"),
        (&["train.steps=2"], "images.degrees=40"),
        (&["train.steps=2"], "images.scale=[0.5, 0.8]"),
        (&["train.steps=2"], "images.shear=[0.1, 0.3]"),
        (&["train.steps=2"], "images.translate=0.3"),
        (&["train.steps=2"], "images.contrast=0.5"),
        (&["train.steps=2"], "images.invert=1"),
        (&["train.steps=2"], "images.mean=[0.4, 0.5, 0.5]"),
        (&["train.steps=2"], "images.std=[0.5, 0.5, 0.4]"),
    ];
    change_the_weights(&folder, "resnet.toml", cases);
    let cases: &[(&Sets, &str)] =
        &[(&["train.steps=2"], "model.drop_path=0.5"), (&["train.steps=2"], "model.auxiliary=1")];
    change_the_weights(&folder, "amoebanet.toml", cases);
}

#[test]
fn oracle_learning_rates_follow_their_formulas() {
    let folder = text();
    let rates = |sets: &Sets| -> Vec<f64> {
        let run = train(&folder, "tiny.toml", sets);
        let lines = folder.lines(&run).into_iter();
        lines.filter_map(|line| line["lr"].as_f64()).collect()
    };
    let close = |found: &[f64], expected: &[f64]| {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in zip(found, expected) {
            // A few roundings of float64.
            assert!((found - expected).abs() < 1e-15, "{found} {expected}");
        }
    };
    let constant = ["optimizer.lr=0.01", "optimizer.decay=constant", "optimizer.warmup_steps=2"];
    close(&rates(&constant), &[0.005, 0.01, 0.01]);
    // 1/3 and 2/3 of half a cosine: it is 0.75 and 0.25 of the way above the floor.
    let cosine = ["optimizer.warmup_steps=0", "optimizer.decay_floor=0.2"];
    close(&rates(&cosine), &[1e-3, 1e-3 * (0.2 + 0.8 * 0.75), 1e-3 * (0.2 + 0.8 * 0.25)]);
    let exponential = [
        "optimizer.decay=exponential",
        "optimizer.warmup_steps=0",
        "optimizer.decay_rate=0.25",
        "optimizer.decay_every=2",
    ];
    close(&rates(&exponential), &[1e-3, 0.5e-3, 0.25e-3]);
}

/// The parameters by name after one step of plain SGD without clipping, and its line of metrics.
fn after_a_step(folder: &Folder, sets: &Sets) -> (Vec<(String, Tensor)>, Value) {
    let plain = [
        "train.steps=1",
        "optimizer.name=sgd",
        "optimizer.warmup_steps=0",
        "optimizer.decay=constant",
        "optimizer.clip_norm=0",
    ];
    let run = train(folder, "tiny.toml", &[&plain[..], sets].concat());
    let path = folder.path(&run).join("weights.safetensors");
    (gpipe_checkpoint::weights::load(&path).unwrap(), folder.lines(&run).remove(0))
}

/// Expects `found` = `from` + `factor` (`to` - `from`) for all parameters.
fn assert_between(
    found: &[(String, Tensor)],
    factor: f64,
    from: &[(String, Tensor)],
    to: &[(String, Tensor)],
) {
    let mut moved = 0.0_f64;
    for (((name, found), (_, from)), (_, to)) in zip(zip(found, from), to) {
        let step = (to - from) * factor;
        let apart = (found - from - &step).abs().max().double_value(&[]);
        // Parameters are below 2, so that each of the three values is rounded by at most 2^-24.
        assert!(apart < 4.0 * 2.0_f64.powi(-24) * factor.max(1.0), "{name}: {apart}");
        moved = moved.max(step.abs().max().double_value(&[]));
    }
    assert!(moved > 1e-3, "or nothing is tested: {moved}");
}

#[test]
fn oracle_of_rate_decay_and_clipping() {
    let folder = text();
    let (start, _) = after_a_step(&folder, &["optimizer.lr=0"]);
    let (once, line) = after_a_step(&folder, &["optimizer.lr=0.25"]);
    assert_eq!(line["clip_scale"], 1.0);
    let (twice, _) = after_a_step(&folder, &["optimizer.lr=0.5"]);
    assert_between(&twice, 2.0, &start, &once);
    // w - lr (g + decay w), which is that of no decay less lr decay w.
    let decay = ["optimizer.lr=0.25", "optimizer.weight_decay=0.5"];
    let (decayed, _) = after_a_step(&folder, &decay);
    let zero: Vec<_> = start.iter().map(|(name, own)| (name.clone(), own.zeros_like())).collect();
    let apart: Vec<_> =
        zip(&once, &decayed).map(|((name, one), (_, two))| (name.clone(), one - two)).collect();
    assert_between(&apart, 0.125, &zero, &start);
    let clip = ["optimizer.lr=0.25", "optimizer.clip_norm=0.2"];
    let (clipped, line) = after_a_step(&folder, &clip);
    let (norm, scale) = (line["grad_norm"].as_f64().unwrap(), line["clip_scale"].as_f64().unwrap());
    // PyTorch's clip_grad_norm_ adds 1e-6 to the norm.
    assert!(scale < 0.9 && (scale * norm - 0.2).abs() < 1e-5, "{norm} {scale}");
    assert_between(&clipped, scale, &start, &once);
}

/// In one step of SGD, parameters have no effect on each other: those of a group are as if all had
/// its settings, and the others as if there were no group, bit for bit.
#[test]
fn oracle_groups_change_their_parameters_alone() {
    let folder = text();
    let cases: &[(&str, &Sets)] = &[
        ("frozen = true", &["optimizer.weight_decay=0.5", "optimizer.lr=0"]),
        ("lr_scale = 0.5", &["optimizer.weight_decay=0.5", "optimizer.lr=0.125"]),
        ("weight_decay = 0.0", &["optimizer.lr=0.25"]),
    ];
    let all = ["optimizer.weight_decay=0.5", "optimizer.lr=0.25"];
    let (others, _) = after_a_step(&folder, &all);
    for (group, alone) in cases {
        let (alone, _) = after_a_step(&folder, alone);
        let set = format!("optimizer.groups=[{{ names = [\"*norm*\", \"0.*\"], {group} }}]");
        let set: &'static str = set.leak();
        let (found, _) = after_a_step(&folder, &[&all[..], &[set]].concat());
        // Of the others and of the group: those on which the settings have an effect.
        let mut differ = [0; 2];
        for (((name, found), (_, alone)), (_, others)) in zip(zip(&found, &alone), &others) {
            let is_member = name.contains("norm") || name.starts_with("0.");
            differ[usize::from(is_member)] += usize::from(alone != others);
            assert_eq!(found, if is_member { alone } else { others }, "{group}: {name}");
        }
        assert!(differ.iter().all(|count| *count > 0), "{group}: {differ:?}");
    }
}

#[test]
fn oracle_keys_that_bound_what_is_held_and_measured() {
    let folder = text();
    let of = |sets: &Sets, value: &dyn Fn(&[Value]) -> u64| {
        value(&folder.lines(&train(&folder, "tiny.toml", sets)))
    };
    let count = |lines: &[Value]| lines.last().unwrap()["count"].as_u64().unwrap();
    let all = &["train.validation_tokens=9999"];
    let part = &["train.validation_tokens=9999", "data.validation_bytes=600"];
    assert!(of(part, &count) < of(all, &count));
    // The logits of a whole micro-batch, 20 samples of 8 positions, are never there.
    let peak = |lines: &[Value]| {
        lines[1]["stages"].as_array().unwrap().last().unwrap()["peak_bytes"].as_u64().unwrap()
    };
    let whole = &["train.mini_batch=60"];
    let rows = &["train.mini_batch=60", "pipeline.loss_rows=8"];
    assert!(of(rows, &peak) < of(whole, &peak));
}
