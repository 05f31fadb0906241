//! Recipes, dtypes and devices through the command. Families: `oracle_`, `transparency_`, `fault_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::fs;

use common::{CONFIG, Folder, bytes};
use serde_json::Value;

/// Everything that the optimizer's table can say.
const RECIPE: &str = r#"
[optimizer]
name = "rmsprop"
lr = 1e-3
weight_decay = 0.01
warmup_steps = 2
decay = "inverse-sqrt"
average = 0.9

[optimizer.rmsprop]
momentum = 0.5

[[optimizer.groups]]
names = ["*norm.*", "*.bias"]
weight_decay = 0.0

[[optimizer.groups]]
names = ["embedding.*"]
lr_scale = 0.5

[[optimizer.groups]]
names = ["0.mlp.hidden.*"]
frozen = true
"#;

fn folder() -> Folder {
    let folder = Folder::new();
    let recipe = CONFIG.replace("[train]", "[train]\nlabel_smoothing = 0.1\nvalidate_every = 2");
    fs::write(folder.path("recipe.toml"), recipe + RECIPE).unwrap();
    folder
}

fn run(folder: &Folder, out: &str, arguments: &[&str]) -> String {
    let mut all = vec!["train", "recipe.toml", "--text", "text.txt", "--out", out];
    all.extend(arguments);
    let output = folder.gpipe(&all);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn transparency_a_recipe_gives_the_same_weights_and_averages_at_every_k() {
    let folder = folder();
    let files = ["weights.safetensors", "averages.safetensors"];
    let of = |out: &str| files.map(|file| bytes(&folder.path(out).join(file)));
    for dtype in ["float32", "bfloat16"] {
        let printed = run(&folder, dtype, &["--stages", "1", "--dtype", dtype]);
        assert!(printed.contains("step 4: averaged weights loss"), "{printed}");
        for stages in ["2", "4"] {
            let out = format!("{dtype} {stages}");
            run(&folder, &out, &["--stages", stages, "--dtype", dtype, "--remat", "always"]);
            assert!(of(&out) == of(dtype), "{out}");
        }
    }
    assert!(of("float32") != of("bfloat16"), "the dtype is used");
}

#[test]
fn oracle_a_recipe_is_recorded_and_its_averages_can_be_evaluated() {
    let folder = folder();
    run(&folder, "run", &[]);
    let lines = folder.lines("run");
    let of =
        |kind: &str| -> Vec<&Value> { lines.iter().filter(|line| line["kind"] == kind).collect() };
    let rates: Vec<f64> = of("step").iter().map(|line| line["lr"].as_f64().unwrap()).collect();
    let root = |x: f64| x.sqrt();
    for (rate, expected) in rates.iter().zip([0.5e-3, 1e-3, 1e-3, 1e-3 * root(2.0 / 3.0)]) {
        assert!((rate - expected).abs() < 1e-15, "{rates:?}");
    }
    let steps: Vec<u64> = of("evaluation").iter().map(|l| l["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 4], "on the way and at the end");
    let averaged = of("evaluation")[1]["metrics"]["averaged_loss"].as_f64().unwrap();
    let output = folder.gpipe(&["eval", "run", "--averages", "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["loss"].as_f64().unwrap(), averaged);
    let resolved = fs::read_to_string(folder.path("run/config.toml")).unwrap();
    fs::write(folder.path("again.toml"), resolved).unwrap();
    let output = folder.gpipe(&["train", "again.toml", "--out", "again"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let weights = |run: &str| bytes(&folder.path(run).join("weights.safetensors"));
    assert!(weights("run") == weights("again"), "the resolved configuration repeats the run");
}

#[test]
fn transparency_verify_in_bfloat16() {
    let folder = Folder::new();
    let arguments =
        ["verify", "tiny.toml", "--text", "text.txt", "--dtype", "bfloat16", "--stages", "1,2,3"];
    let output = folder.gpipe(&arguments);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("is the same to the last bit"), "{text}");
}

#[test]
fn fault_recipes_and_devices_that_cannot_be_used_are_named() {
    let folder = folder();
    let with = |more: &[&'static str]| {
        [&["train", "recipe.toml", "--text", "text.txt", "--out", "x"], more].concat()
    };
    folder.refuses(
        &with(&["--dtype", "float8"]),
        &["'float8' is not one of float32, float64, bfloat16, float16"],
    );
    folder.refuses(&with(&["--device", "tpu"]), &["'tpu' is no device", "use cpu, cuda or cuda:0"]);
    folder.refuses(&with(&["--device", "cuda:100"]), &["cuda:100"]);
    folder.refuses(&with(&["--device", "cpu,cpu", "--stages", "3"]), &["2 devices for 3 stages"]);
    folder.refuses(
        &with(&["--set", "optimizer.decay=linear"]),
        &["is not one of constant, cosine, inverse-sqrt, exponential"],
    );
    folder.refuses(&with(&["--set", "train.label_smoothing=1"]), &["train.label_smoothing"]);
    folder.refuses(&with(&["--set", "train.prefetch=0"]), &["train.prefetch", "use 1 to 64"]);
    folder.refuses(
        &with(&["--set", "optimizer.average=1.5"]),
        &["optimizer.average", "use 0 (off) or less than 1"],
    );
    folder.refuses(
        &with(&["--set", "optimizer.rmsprop.momentun=1"]),
        &["did you mean 'optimizer.rmsprop.momentum'"],
    );
    folder.refuses(
        &["trace", "recipe.toml", "--text", "text.txt", "--width", "3"],
        &["use 40 to 1000"],
    );
    folder.refuses(&["eval", "nothing", "--averages"], &["no such folder"]);
    let verify = ["verify", "recipe.toml", "--text", "text.txt", "--device", "cpu,cpu"];
    folder.refuses(&verify, &["verify compares several numbers of stages", "--device cpu"]);
    let groups = CONFIG.to_owned() + "[[optimizer.groups]]\nnames = [\"*.wieght\"]\n";
    fs::write(folder.path("groups.toml"), groups).unwrap();
    folder.refuses(
        &["train", "groups.toml", "--text", "text.txt"],
        &["no parameter matches", "'*.wieght'"],
    );
    let groups = CONFIG.to_owned() + "[[optimizer.groups]]\nnames = [\"*\"]\nlr_scael = 2\n";
    fs::write(folder.path("groups.toml"), groups).unwrap();
    folder.refuses(&["train", "groups.toml", "--text", "text.txt"], &["lr_scael", "lr_scale"]);
}

#[test]
fn regression_flags_win_over_devices_in_the_file_and_eval_runs_where_it_is_told() {
    // Several devices in the file used to fix the number of stages: --stages was checked too early,
    // and eval and verify went on with the file's.
    let folder = Folder::new();
    let devices = ["--set", "pipeline.devices=cpu,cpu,cpu", "--stages", "3", "--out", "run"];
    let printed = folder.train(&devices);
    assert!(printed.contains("K = 3 on cpu,cpu,cpu"), "{printed}");
    let loss = |arguments: &[&str]| {
        let output = folder.gpipe(&[&["eval", "run", "--json"], arguments].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    assert_eq!(loss(&[]), loss(&["--stages", "2"]));
    assert_eq!(loss(&[]), loss(&["--device", "cpu", "--stages", "1"]));
    folder.refuses(&["eval", "run", "--averages"], &["kept no averages", "optimizer.average"]);
    assert_eq!(loss(&[]), loss(&["--device", "cpu,cpu"]), "which says how many stages there are");
    let three = ["eval", "run", "--device", "cpu,cpu", "--stages", "3"];
    folder.refuses(&three, &["2 devices for 3 stages"]);
}
