//! What is on disk, and weights for and from elsewhere: `inspect`, `export`, `import` and `train
//! --init`. Families: `oracle_` (what is shown, and the same values bit for bit), `fault_` (files
//! that do not fit), `regression_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt};

use common::{Folder, TRAIN, bytes, process::Process, train};
use gpipe_checkpoint::weights;
use serde_json::Value;
use tch::{Kind, Tensor};

/// A folder with a run of 12 steps that kept averages.
fn with_run() -> Folder {
    let folder = Folder::new();
    folder.succeeds(&train("run", &["--set", "optimizer.average=0.9"]));
    folder
}

fn json(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn tensors(folder: &Folder, path: &str) -> Vec<(String, Tensor)> {
    weights::load(&folder.path(path)).unwrap()
}

/// The loss of weights on the run's own held-out text, with every digit.
fn loss(folder: &Folder, arguments: &[&str]) -> String {
    folder.succeeds(&[&["eval"], arguments, &["--json", "--tokens", "100"]].concat())
}

#[test]
fn oracle_inspect_says_what_a_run_a_checkpoint_and_a_file_hold() {
    let folder = with_run();
    let all = folder.succeeds(&["inspect", "run"]);
    let checkpoints = folder.succeeds(&["inspect", "run/checkpoints"]).replace("//", "/");
    let weights = all.strip_prefix(&checkpoints).unwrap();
    for (line, name) in weights.lines().zip(["weights", "averages"]) {
        assert_eq!(line, format!("run/{name}.safetensors: 16 tensors, 26.7 KiB, complete"));
    }
    let lines: Vec<&str> = all.lines().collect();
    assert!(lines[0].starts_with("run/checkpoints/step-00000008: step 8, 448 tokens, "), "{all}");
    assert!(lines[0].ends_with(", complete"), "{all}");
    assert!(lines[1].starts_with("run/checkpoints/step-00000012: step 12, 672 tokens, "), "{all}");
    let both = json(&folder.succeeds(&["inspect", "run", "--json"]));
    assert_eq!((both.len(), &both[1]["batches"]), (4, &12.into()));
    assert!(both.iter().all(|one| one["complete"] == true && one["bytes"].as_u64() > Some(27_000)));
    assert_eq!((&both[3]["digests"], &both[3]["tensors"]), (&true.into(), &16.into()));

    let one = folder.succeeds(&["inspect", "run/checkpoints/latest"]);
    for part in [
        "position       12 mini-batches, 84 samples, 672 tokens; 0 left out\n",
        "updates        12, seed 0\n",
        "was run at     K = 2, M = 3, 1f1b, re-materialization unless-adjacent, layers per stage [",
        " in 13 files\n",
        "parameters     6832 in 4 layers\n",
        "    tokens                       float32 [278, 16]  exp_avg, exp_avg_sq after 12 \
        updates\n",
        "complete: all 13 files are as they were written (SHA-256)\n",
    ] {
        assert!(one.contains(part), "'{part}' is not in: {one}");
    }
    let one = json(&folder.succeeds(&["inspect", "run/checkpoints/step-00000008", "--json"]));
    assert_eq!((one.len(), &one[0]["progress"]["batches"]), (1, &8.into()));
    assert_eq!(one[0]["complete"], true);
    assert_eq!(one[0]["layers"].as_array().unwrap().len(), 4);

    let file = folder.succeeds(&["inspect", "run/weights.safetensors"]);
    let head =
        "run/weights.safetensors: 16 tensors, 6832 elements, 26.7 KiB\nmetadata: format = pt\n";
    assert!(file.starts_with(head), "{file}");
    assert!(
        file.contains("  0.attention.qkv.weight                       F32   [48, 16]\n"),
        "{file}"
    );
    let file = json(&folder.succeeds(&["inspect", "run/weights.safetensors", "--json"]));
    let tokens = file[0]["tensors"].as_array().unwrap();
    let tokens = tokens.iter().find(|tensor| tensor["name"] == "embedding.tokens").unwrap();
    assert_eq!((&tokens["dtype"], &tokens["shape"][0]), (&"F32".into(), &278.into()));
    assert_eq!(tokens["sha256"].as_str().map(str::len), Some(64));
    // Of a run without checkpoints: its weights.
    fs::remove_dir_all(folder.path("run/checkpoints")).unwrap();
    assert!(
        folder.succeeds(&["inspect", "run"]).starts_with("run/weights.safetensors: 16 tensors")
    );
}

#[test]
fn fault_inspect_finds_what_is_damaged_or_nothing() {
    let folder = with_run();
    let file = "run/checkpoints/step-00000008/0003-head.averages.safetensors";
    fs::write(folder.path(file), "cut").unwrap();
    folder.refuses(&["inspect", "run/checkpoints/step-00000008"], &[file]);
    folder.refuses(&["inspect", "run"], &["1 of 2 checkpoints are damaged"]);
    let output = folder.gpipe(&["inspect", "run", "--json"]);
    let lines = json(&String::from_utf8(output.stdout).unwrap());
    assert_eq!((&lines[0]["complete"], &lines[1]["complete"]), (&false.into(), &true.into()));
    assert!(lines[0]["reason"].as_str().unwrap().contains("0003-head.averages"), "{lines:?}");
    let output = folder.gpipe(&["inspect", "run/checkpoints/step-00000008", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(json(&String::from_utf8(output.stdout).unwrap())[0]["complete"], false);

    fs::create_dir(folder.path("empty")).unwrap();
    for (path, reason) in [
        ("nowhere", "there is no such file or folder"),
        ("empty", "it is no checkpoint, no run"),
        ("text.txt", "it is no safetensors file: give one"),
    ] {
        folder.refuses(&["inspect", path], &[path, reason]);
    }
}

#[test]
fn oracle_export_writes_the_parameters_or_their_averages_in_the_dtype_asked_for() {
    let folder = with_run();
    for from in ["run", "run/checkpoints/latest"] {
        let printed = folder.succeeds(&["export", from, "--out", "out.safetensors"]);
        assert!(printed.starts_with("wrote out.safetensors: 16 tensors, "), "{printed}");
        assert!(printed.contains(&format!("from {from}")), "{printed}");
        assert!(bytes(&folder.path("out.safetensors")) == folder.weights("run"), "{from}");
        folder.succeeds(&["export", from, "--out", "out.safetensors", "--averages"]);
        let averages = bytes(&folder.path("run/averages.safetensors"));
        assert!(bytes(&folder.path("out.safetensors")) == averages, "{from}");
    }
    for (dtype, kind) in [("float32", Kind::Float), ("bfloat16", Kind::BFloat16)] {
        let older = "run/checkpoints/step-00000008";
        folder.succeeds(&["export", older, "--out", "plain.safetensors"]);
        let cast = ["export", older, "--out", "cast.safetensors", "--dtype", dtype];
        folder.succeeds(&cast);
        let expected = tensors(&folder, "plain.safetensors").into_iter();
        let expected: Vec<_> = expected.map(|(name, value)| (name, value.to_kind(kind))).collect();
        assert_eq!(tensors(&folder, "cast.safetensors"), expected, "{dtype}");
        assert!(expected != tensors(&folder, "run/weights.safetensors"), "the older one");
    }
    // Of a run without checkpoints.
    folder.copy("run", "bare");
    fs::remove_dir_all(folder.path("bare/checkpoints")).unwrap();
    folder.succeeds(&["export", "bare", "--out", "out.safetensors"]);
    assert!(bytes(&folder.path("out.safetensors")) == folder.weights("run"));
}

#[test]
fn fault_what_cannot_be_exported_is_told() {
    let folder = Folder::new();
    folder.succeeds(&train("run", &[]));
    fs::create_dir(folder.path("empty")).unwrap();
    let export = |from: &str, more: &[&str], parts: &[&str]| {
        folder.refuses(&[&["export", from, "--out", "out.safetensors"], more].concat(), parts);
        assert!(!folder.path("out.safetensors").exists());
    };
    export("run", &["--averages"], &["run/checkpoints/step-00000012", "no moving averages"]);
    export("run", &["--dtype", "int8"], &["--dtype", "'int8' is not one of float32"]);
    export("empty", &[], &["empty", "neither a checkpoint nor weights.safetensors"]);
    export("nowhere", &[], &["nowhere", "there is no such folder"]);
    let nowhere = ["export", "run", "--out", "text.txt/w.safetensors"];
    folder.refuses(&nowhere, &["text.txt: "]);
    // A folder that is missing is made.
    folder.succeeds(&["export", "run", "--out", "new/folder/w.safetensors"]);
}

/// The run's weights as another program would have them, and a map of its names.
fn foreign(folder: &Folder) {
    let rename = |(name, value): (String, Tensor)| match name.strip_prefix("0.") {
        // A matrix that is kept the other way round.
        Some("attention.qkv.weight") => {
            ("h.0.c_attn.weight".into(), value.transpose(0, 1).contiguous())
        }
        Some(rest) => (format!("h.0.{rest}"), value),
        None => (format!("transformer:{name}"), value),
    };
    let mut all: Vec<_> =
        tensors(folder, "run/weights.safetensors").into_iter().map(rename).collect();
    all.push(("h.0.attention.mask".into(), Tensor::ones([8, 8], (Kind::Bool, tch::Device::Cpu))));
    weights::save(&folder.path("foreign.safetensors"), &all).unwrap();
    let names = r#"
        [[names]]
        from = "*.mask"
        ignore = true
        [[names]]
        from = "h.*.c_attn.weight"
        to = "*.attention.qkv.weight"
        transpose = true
        [[names]]
        from = "h.*"
        to = "*"
        [[names]]
        from = "transformer:*"
        to = "*"
    "#;
    fs::write(folder.path("names.toml"), names).unwrap();
}

const IMPORT: &[&str] = &[
    "import",
    "foreign.safetensors",
    "--config",
    "run/config.toml",
    "--out",
    "imported/w.safetensors",
];

/// The run was asked for 300 tokens or so and learnt 278: its own configuration once refused its
/// own weights.
#[test]
fn regression_the_size_of_a_vocabulary_is_the_run_s() {
    let folder = with_run();
    let import = ["import", "run/weights.safetensors", "--config", "run/config.toml"];
    let import = |more: &[&'static str]| [&import[..], &["--out", "w.safetensors"], more].concat();
    folder.refuses(&import(&["--set", "model.vocabulary=300"]), &["[300, 16]", "[278, 16]"]);
    folder.refuses(&import(&["--set", "model.vocabulary = 300"]), &["[300, 16]", "[278, 16]"]);
    folder.succeeds(&import(&[]));
    assert_eq!(tensors(&folder, "w.safetensors"), tensors(&folder, "run/weights.safetensors"));
    // A configuration of one's own is not a run's because some tokenizer lies beside it.
    fs::create_dir(folder.path("own")).unwrap();
    for file in ["config.toml", "tokenizer.json"] {
        fs::copy(folder.path("run").join(file), folder.path("own").join(file)).unwrap();
    }
    let own = ["import", "run/weights.safetensors", "--config", "own/config.toml"];
    folder.refuses(&[&own[..], &["--out", "o.safetensors"]].concat(), &["[300, 16]", "[278, 16]"]);
}

#[test]
fn oracle_foreign_weights_are_the_run_s_again_once_they_are_imported() {
    let folder = with_run();
    foreign(&folder);
    fs::create_dir(folder.path("imported")).unwrap();
    let printed = folder.succeeds(&[IMPORT, &["--names", "names.toml"]].concat());
    for part in ["16 of 16 parameters are in the file", "1 ignored:\n  h.0.attention.mask"] {
        assert!(printed.contains(part), "'{part}' is not in: {printed}");
    }
    let sorted = |path: &str| {
        let mut all = tensors(&folder, path);
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    };
    assert_eq!(sorted("imported/w.safetensors"), sorted("run/weights.safetensors"));

    fs::copy(folder.path("run/tokenizer.json"), folder.path("imported/tokenizer.json")).unwrap();
    let imported = ["--config", "run/config.toml", "--weights", "imported/w.safetensors"];
    let expected = loss(&folder, &["run"]);
    assert_eq!(loss(&folder, &imported), expected);
    assert_ne!(loss(&folder, &["run", "--averages"]), expected, "or any weights would do");
}

#[test]
fn fault_foreign_weights_that_do_not_fit_are_told_name_by_name() {
    let folder = with_run();
    foreign(&folder);
    fs::create_dir(folder.path("imported")).unwrap();
    let import = |more: &[&str], parts: &[&str]| {
        folder.refuses(&[IMPORT, more].concat(), parts);
        assert!(!folder.path("imported/w.safetensors").exists());
    };
    let report = [
        "foreign.safetensors does not fit the model",
        "0 of 16 parameters",
        "16 missing",
        "  embedding.tokens",
        "17 in the file but not in the model",
        "name the tensors with --names",
    ];
    import(&[], &report);
    import(&["--partial"], &["nothing fits: name the tensors with --names"]);
    let names = ["--names", "names.toml"];
    let narrow = [&names[..], &["--set", "model.hidden=16"]].concat();
    let report = [
        "3 mismatched in shape",
        "0.mlp.hidden.weight: [16, 16], but h.0.mlp.hidden.weight is [32, 16]",
        "--partial",
    ];
    import(&narrow, &report);
    import(&["--names", "nowhere.toml"], &["nowhere.toml"]);
    for (map, reason) in [
        ("names = 3", "line 1"),
        ("[[names]]\nfrom = \"*\"", "rule 1"),
        ("[[names]]\nfrom = \"*\"\nto = \"*\"\ntranspoze = true", "transpoze"),
        (
            "[[names]]\nfrom = \"*.weight\"\nto = \"head.norm.weight\"",
            "both become head.norm.weight",
        ),
        (
            "[[names]]\nfrom = \"h.*.norm.bias\"\nto = \"*.norm.bias\"\ntranspose = true",
            "no matrix",
        ),
    ] {
        fs::write(folder.path("bad.toml"), map).unwrap();
        import(&["--names", "bad.toml"], &[reason]);
    }
    fs::write(folder.path("foreign.safetensors"), "a text, not tensors").unwrap();
    import(&names, &["foreign.safetensors", "not a safetensors file"]);
    fs::remove_file(folder.path("foreign.safetensors")).unwrap();
    import(&names, &["foreign.safetensors"]);

    foreign(&folder);
    let nowhere = [&IMPORT[..5], &["text.txt/w.safetensors"], &names[..]].concat();
    folder.refuses(&nowhere, &["text.txt: "]);
    folder.succeeds(&[IMPORT, &narrow, &["--partial"]].concat());
    assert_eq!(tensors(&folder, "imported/w.safetensors").len(), 16 - 3);
}

/// A run that learns nothing ends with what it started from.
const STILL: &[&str] = &["--set", "optimizer.lr=0"];

#[test]
fn oracle_init_starts_from_the_weights_of_a_file_a_run_or_a_checkpoint() {
    let folder = with_run();
    folder.copy("run", "running");
    fs::remove_file(folder.path("running/weights.safetensors")).unwrap();
    folder.copy("run/weights.safetensors", "alone.safetensors");
    foreign(&folder);
    for (i, (from, told)) in [
        ("run", "run/weights.safetensors"),
        ("running", "running/checkpoints/step-00000012"),
        ("run/checkpoints/latest", "run/checkpoints/latest"),
        ("run/weights.safetensors", "run/weights.safetensors"),
        ("alone.safetensors", "alone.safetensors"),
        ("foreign.safetensors", "foreign.safetensors"),
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("out-{i}");
        // A file without a tokenizer beside it says nothing of its tokens.
        let names: &[&str] = match from {
            "alone.safetensors" => &["--set", "data.tokenizer=run/tokenizer.json"],
            "foreign.safetensors" => {
                &["--names", "names.toml", "--set", "data.tokenizer=run/tokenizer.json"]
            }
            _ => &[],
        };
        let more = [STILL, &["--init", from, "--stages", "3"], names].concat();
        let printed = folder.succeeds(&train(&out, &more));
        assert!(printed.contains(&format!("weights of {told}:\n16 of 16 parameters")), "{printed}");
        assert!(folder.weights(&out) == folder.weights("run"), "{from}");
        assert_eq!(folder.lines(&out)[0]["step"], 1, "everything else starts anew");
    }
    // Another start is another end, also of a run that goes on from there.
    folder.succeeds(&train("tuned", &["--init", "run"]));
    let mut command = folder.command(&train("tuned-2", &["--init", "run"]));
    let mut process = Process::start(command.env("GPIPE_TEST_KILL_AT_FILE_OPERATION", "50"));
    assert_eq!(process.end(), Err(9));
    folder.succeeds(&["train", "--resume", "tuned-2"]);
    assert!(folder.weights("tuned-2") == folder.weights("tuned"));
    assert!(folder.weights("tuned") != folder.weights("run"));
}

#[test]
fn oracle_init_loads_what_fits_only_if_that_is_meant() {
    let folder = with_run();
    let deeper = [&TRAIN[..8], &["--set", "model.blocks=2", "--init", "run"], STILL].concat();
    let report = [
        "run/weights.safetensors does not fit the model",
        "16 of 28 parameters are in the file",
        "12 missing from the file:\n  1.attention.norm.weight",
        "load what fits with --partial",
    ];
    folder.refuses(&[&deeper[..], &["--out", "deeper"]].concat(), &report);
    assert!(!folder.path("deeper").exists());
    let printed = folder.succeeds(&[&deeper[..], &["--out", "deeper", "--partial"]].concat());
    assert!(printed.contains("12 missing from the file"), "{printed}");
    let (deeper, run) = (
        tensors(&folder, "deeper/weights.safetensors"),
        tensors(&folder, "run/weights.safetensors"),
    );
    for (name, value) in run {
        let (_, loaded) = deeper.iter().find(|(own, _)| *own == name).unwrap();
        assert_eq!(*loaded, value, "{name}");
    }

    let init = |from: &'static str, parts: &[&str]| {
        folder.refuses(&train("new", &["--init", from]), parts);
        assert!(!folder.path("new").exists());
    };
    fs::create_dir(folder.path("empty")).unwrap();
    init("nowhere", &["nowhere"]);
    init("empty", &["empty: there is neither weights.safetensors nor a checkpoint in it"]);
    init("text.txt", &["text.txt", "not a safetensors file"]);
    for more in [&["--names", "x"][..], &["--partial"]] {
        assert_eq!(folder.gpipe(&train("new", more)).status.code(), Some(2), "{more:?}");
    }
    folder.refuses(&train("new", &["--init", "run", "--resume", "run"]), &["give one of them"]);
    // One command that starts a run and restarts it: the weights are those of its beginning.
    folder.succeeds(&train("begun", &["--init", "run"]));
    folder.succeeds(&train("new", &["--init", "run", "--resume", "auto"]));
    assert!(folder.weights("new") == folder.weights("begun"));
    let on = folder.succeeds(&train("new", &["--init", "run", "--resume", "auto"]));
    assert!(on.contains("all 12 steps are done"), "{on}");
}

#[test]
fn regression_init_takes_the_tokenizer_that_the_weights_were_trained_with() {
    // A tokenizer trained on the new text gave every row of the table another meaning, without a
    // word.
    let folder = with_run();
    let text = fs::read_to_string(folder.path("text.txt")).unwrap();
    fs::write(folder.path("other.txt"), text.replace("stage", "egats").replace("micro", "orcim"))
        .unwrap();
    let other = |out: &str, more: &[&str]| {
        let mut arguments: Vec<String> = train(out, more).into_iter().map(str::to_owned).collect();
        arguments[3] = "other.txt".into();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        folder.succeeds(&arguments);
        bytes(&folder.path(out).join("tokenizer.json"))
    };
    let own = bytes(&folder.path("run/tokenizer.json"));
    assert!(other("new", &[]) != own, "or nothing is tested");
    for (i, from) in ["run", "run/weights.safetensors", "run/checkpoints/latest"].iter().enumerate()
    {
        assert!(other(&format!("tuned-{i}"), &["--init", from]) == own, "{from}");
    }
}

/// A path that is not UTF-8 ended it with a panic.
#[test]
fn regression_inspect_shows_every_path_as_json() {
    let folder = with_run();
    let odd = OsStr::from_bytes(b"caf\xe9");
    fs::rename(folder.path("run"), folder.path(".").join(odd)).unwrap();
    let output = folder.command(&["inspect", "--json"]).arg(odd).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let all = json(&String::from_utf8(output.stdout).unwrap());
    assert!(all.iter().all(|one| one["path"].as_str().unwrap().starts_with("caf\u{fffd}/")));
}
