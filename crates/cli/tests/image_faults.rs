//! What an image network cannot be trained on or used for, and what is said then. Families:
//! `fault_` (a clear error, exit code 1, no panic text), `regression_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::fs;

use common::{
    Folder,
    images::{NETWORK, RESNET, SHAPES, shapes, with_images},
    steps,
};
use serde_json::Value;

const TRAIN: [&str; 4] = ["train", "resnet.toml", "--out", "run"];

/// Refuses `train` with `more`, and leaves no run.
fn refuses(folder: &Folder, config: &str, more: &[&str], parts: &[&str]) {
    folder.refuses(&[&["train", config, "--out", "run"], more].concat(), parts);
    assert!(!folder.path("run").exists(), "{more:?}");
}

fn trained(folder: &Folder, more: &[&str]) -> String {
    folder.succeeds(&[&TRAIN[..], &["--steps", "3"], more].concat())
}

/// Makes files that are no images any more of those of `path`, a file or a folder.
fn spoil(folder: &Folder, path: &str) {
    let path = folder.path(path);
    match path.is_dir() {
        true => {
            for entry in fs::read_dir(&path).unwrap() {
                fs::write(entry.unwrap().path(), "no image").unwrap();
            }
        }
        false => fs::write(path, "no image").unwrap(),
    }
}

fn errors(output: &std::process::Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn fault_an_unreadable_image_stops_training_and_the_state_is_saved() {
    let folder = with_images();
    spoil(&folder, "train/disc/03.jpg");
    let parts = [
        "train/disc/03.jpg",
        "neither JPEG nor PNG",
        "the state after step ",
        "is saved; to continue: gpipe train --resume run --set images.on_unreadable=skip, which \
        leaves the image out. Do not replace or remove the file: a run must keep its data\n",
    ];
    folder.refuses(&[&TRAIN[..], &["--steps", "3"]].concat(), &parts);
    assert_eq!(steps(&folder, "run").len(), 1);
    // Left out, it is named at the end; the others are trained on.
    let skip = ["--set", "images.on_unreadable=skip"];
    let output = folder.gpipe(&[&["train", "--resume", "run"], &skip[..]].concat());
    let text = errors(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("warning: left out train/disc/03.jpg: ").count(), 1, "{text}");
    assert!(folder.path("run/weights.safetensors").exists());
}

/// In two processes the images are read by the one whose stage is fed, in two replicas by the one
/// whose part they are; its error is that of all.
#[test]
fn fault_an_unreadable_image_among_processes_is_told_by_who_reads_it() {
    let launch = ["launch", "--processes", "2", "--"];
    let ended = |folder: &Folder, more: &[&str]| {
        let train = ["train", "resnet.toml", "--steps", "3", "--out", "run"];
        let output = folder.gpipe(&[&launch[..], &train, more].concat());
        assert_eq!(output.status.code(), Some(1), "{more:?}: {}", errors(&output));
        errors(&output)
    };
    let folder = with_images();
    for class in ["cross", "disc", "square"] {
        spoil(&folder, &format!("train/{class}"));
    }
    let text = ended(&folder, &[]);
    // Nothing was read by the second one, and the first sample by the first.
    assert!(
        text.contains("[1] gpipe: rank 0: ") && text.contains("neither JPEG nor PNG"),
        "{text}"
    );
    let own = text.lines().find(|line| line.starts_with("[0] gpipe: ") && line.contains("train/"));
    let own = own.unwrap_or_else(|| panic!("{text}"));
    let first = own[own.find("train/").unwrap()..].split('`').next().unwrap();
    // The first sample of an epoch is in the first replica's part.
    let folder = with_images();
    spoil(&folder, first);
    let text = ended(&folder, &["--replicas", "2"]);
    assert!(text.contains("[1] gpipe: rank 0: ") && text.contains(first), "{first}: {text}");
}

#[test]
fn fault_unreadable_images_are_left_out_of_an_evaluation_and_counted() {
    let folder = with_images();
    trained(&folder, &[]);
    spoil(&folder, "held-out/cross/02.png");
    folder.refuses(&["eval", "run"], &["held-out/cross/02.png", "replace the file, remove it"]);
    let eval = ["eval", "run", "--json", "--set", "images.on_unreadable=skip"];
    let output = folder.gpipe(&eval);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["images"], &found["unreadable"]), (&11.into(), &1.into()));
    assert!(errors(&output).contains("warning: left out held-out/cross/02.png: "));
}

#[test]
fn regression_a_mini_batch_of_unreadable_images_is_left_out_of_an_evaluation() {
    // It had no samples, which the pipeline refused.
    let folder = with_images();
    spoil(&folder, "held-out/disc");
    let skip = ["--set", "images.on_unreadable=skip", "--set", "train.mini_batch=4"];
    trained(&folder, &skip); // a class is a mini-batch
    let lines = folder.lines("run");
    assert_eq!(lines.last().unwrap()["count"], 8);
    let found: Value = serde_json::from_str(&folder.succeeds(&["eval", "run", "--json"])).unwrap();
    assert_eq!((&found["images"], &found["unreadable"]), (&8.into(), &4.into()));
    assert_eq!(found["top1"], lines.last().unwrap()["metrics"]["top1"]);
    // Not one that can be read is no result, and no NaN either.
    for class in SHAPES {
        spoil(&folder, &format!("held-out/{class}"));
    }
    let nothing = ["nothing to measure on", "held-out/cross/00.png"];
    let output = folder.gpipe(&["eval", "run", "--json"]);
    let text = errors(&output);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{text}");
    assert!(nothing.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn regression_what_was_learnt_is_saved_where_the_last_validation_fails() {
    // All steps since the last checkpoint were lost: here all of them.
    let folder = with_images();
    spoil(&folder, "held-out/square/00.png");
    let saved = "the state after step 3 is saved; to continue: gpipe train --resume run";
    let train = [&TRAIN[..], &["--steps", "3"]].concat();
    folder.refuses(&train, &[saved, "held-out/square/00.png", "replace the file, remove it"]);
    assert_eq!(steps(&folder, "run"), [3]);
    fs::remove_file(folder.path("held-out/square/00.png")).unwrap();
    let printed = folder.succeeds(&["train", "--resume", "run"]);
    assert!(printed.contains("all 3 steps are done"), "{printed}");
    folder.succeeds(&[&["train", "resnet.toml", "--out", "other"], &train[4..]].concat());
    assert!(folder.weights("run") == folder.weights("other"));
    // As well where it is said that images are left out, and not one is there.
    for class in SHAPES {
        spoil(&folder, &format!("held-out/{class}"));
    }
    let skip = ["--steps", "3", "--set", "images.on_unreadable=skip"];
    let train = [&["train", "resnet.toml", "--out", "none"], &skip[..]].concat();
    let output = folder.gpipe(&train);
    let text = errors(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("nothing to measure on")
            && text.contains(&saved.replace("resume run", "resume none")),
        "{text}"
    );
    assert_eq!(steps(&folder, "none"), [3]);
}

/// `init` made a configuration with which training failed, after some steps or at once.
#[test]
fn regression_init_looks_at_the_images() {
    let folder = with_images();
    spoil(&folder, "train/disc/03.jpg");
    let text = errors(&folder.gpipe(&["init", "--data", "train"]));
    assert!(
        text.contains("that were tried, 1 cannot be read") && text.contains("train/disc/03.jpg"),
        "{text}"
    );
    fs::create_dir_all(folder.path("one/disc")).unwrap();
    let (from, to) = (folder.path("train/disc/00.png"), folder.path("one/disc/00.png"));
    fs::copy(from, to).unwrap();
    folder.refuses(&["init", "--data", "one"], &["there is one class only, 'disc'"]);
}

/// A plan asked for the number of classes, and changed what batch norms see. A cap that is too
/// small was noticed in the first step.
#[test]
fn regression_a_plan_of_an_image_network_is_for_its_data_and_batch_norms() {
    let folder = with_images();
    let text = folder.succeeds(&["plan", "resnet.toml"]);
    assert!(text.contains("M stays 2 (--micro-batches names others)"), "{text}");
    assert!(text.contains("K 2, M 2, "), "{text}");
    let output = folder.gpipe(&[&TRAIN[..], &["--memory", "100KiB"]].concat());
    let warning = "pipeline.memory gives it 100.0 KiB; gpipe plan finds what fits";
    assert!(errors(&output).contains(warning), "{}", errors(&output));
    let large = ["--steps", "1", "--set", "train.mini_batch=48", "--out", "large"];
    let text = folder.succeeds(&[&["train", "resnet.toml"], &large[..]].concat());
    assert!(text.contains("a mini-batch of 48 takes an image 1.3 times on average"), "{text}");
}

#[test]
fn fault_predict_names_what_it_cannot_read_and_goes_on() {
    let folder = with_images();
    trained(&folder, &[]);
    fs::write(folder.path("text.jpg"), "no image").unwrap();
    let image = fs::read(folder.path("held-out/disc/00.png")).unwrap();
    fs::write(folder.path("cut.png"), &image[..image.len() / 2]).unwrap();
    let (good, other) = ("held-out/disc/00.png", "held-out/cross/01.jpg");
    let output = folder.gpipe(&["predict", "run", good, "text.jpg", "none.png", other, "cut.png"]);
    let (printed, text) = (String::from_utf8(output.stdout.clone()).unwrap(), errors(&output));
    assert_eq!(output.status.code(), Some(1), "{text}");
    let names: Vec<&str> = printed.lines().map(|line| line.split_once(": ").unwrap().0).collect();
    assert_eq!(names, [good, other]);
    for part in [
        "cannot decode the image `text.jpg`: it is neither JPEG nor PNG",
        "cannot read `none.png`",
        "cannot decode the image `cut.png`",
        "3 of 5 images could not be read",
    ] {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
    assert_eq!(
        folder.succeeds(&["predict", "run", good, other]),
        printed,
        "those that cannot be read change nothing of the others"
    );
    folder.refuses(&["predict", "run", "held-out/disc"], &["is a folder: name the images in it"]);
    folder.refuses(&["predict", "run", "text.jpg"], &["text.jpg", "1 of 1 images"]);
    folder.refuses(&["predict", "run", good, "--top", "0"], &["--top 0: name at least one"]);
    folder.refuses(&["predict", "nothing", good], &["nothing: there is no such folder"]);
    folder.refuses(&["predict", "train", good], &["train/weights.safetensors", "give another"]);
}

#[test]
fn fault_other_images_and_other_classes_are_refused() {
    let folder = with_images();
    trained(&folder, &[]);
    let resume = |more: &[&'static str]| {
        [&["train", "--resume", "run", "--steps", "6", "--set"], more].concat()
    };
    folder.copy("train", "less");
    fs::remove_file(folder.path("less/disc/00.png")).unwrap();
    let parts = ["the training data differ from those of run/checkpoints/step-00000003", "--init"];
    folder.refuses(&resume(&["data.folder=less"]), &parts);
    fs::remove_dir_all(folder.path("less/square")).unwrap();
    let parts = ["`square` is none of the 2 classes to train on"];
    folder.refuses(&resume(&["data.folder=less"]), &parts);
    let parts = ["its 2 classes are not the 3 that the model was trained for", "--init"];
    folder.refuses(&resume(&["data.folder=less", "--set", "data.validation=less"]), &parts);
    let eval = ["eval", "run", "--set", "data.folder=less", "--set", "data.validation=less"];
    folder.refuses(&eval, &["its 2 classes are not the 3 of the model", "--images DIR"]);
    folder.refuses(&resume(&["model.width=8"]), &["model.width cannot change from 4 to 8"]);

    shapes(&folder.path("known"), &["disc"], 2);
    fs::rename(folder.path("known/disc"), folder.path("known/dics")).unwrap();
    let parts = ["the folder `dics` is none of the 3 classes", "the nearest are `disc`"];
    folder.refuses(&["eval", "run", "--images", "known"], &parts);
    folder.refuses(&["eval", "run", "--images", "none"], &["`none` does not exist"]);
    assert_eq!(steps(&folder, "run"), [3], "it is as it was");
    // The same images elsewhere are the same.
    folder.copy("train", "moved");
    let printed = folder.succeeds(&resume(&["data.folder=moved"]));
    assert!(printed.contains("(the training data must be the same)"), "{printed}");
}

#[test]
fn regression_other_images_to_validate_on_change_evaluations_only() {
    // It was told of them that the training data must be the same, and their losses were compared
    // with the best so far.
    let folder = with_images();
    let best = ["--keep-best", "--set", "train.validate_every=1"];
    trained(&folder, &best);
    shapes(&folder.path("others"), &SHAPES, 2);
    let others = ["--steps", "4", "--set", "data.validation=others"];
    let printed = folder.succeeds(&[&["train", "--resume", "run"], &others[..]].concat());
    let line = "  data.validation: \"held-out\" -> \"others\" (validation data change; the best \
        checkpoint is chosen anew)";
    assert!(printed.contains(line), "{printed}");
    let link = fs::read_link(folder.path("run/checkpoints/best")).unwrap();
    assert_eq!(link.to_str(), Some("step-00000004"), "whatever the losses of the others were");
}

#[test]
fn fault_each_command_says_which_runs_it_is_for() {
    let folder = with_images();
    trained(&folder, &[]);
    folder.train(&["--out", "text run", "--steps", "1"]);
    let image = "held-out/disc/00.png";
    folder.refuses(&["generate", "run", "--prompt", "x"], &["classifies images", "gpipe predict"]);
    folder.refuses(&["predict", "text run", image], &["the model is of text", "gpipe generate"]);
    folder.refuses(&["eval", "run", "--text", "text.txt"], &["leave --text", "--images DIR"]);
    folder.refuses(&["eval", "run", "--tokens", "9"], &["leave --text and --tokens out"]);
    let of_text = ["the model is of text", "leave --images and --confusion out"];
    folder.refuses(&["eval", "text run", "--images", "held-out"], &of_text);
    folder.refuses(&["eval", "text run", "--confusion", "x.tsv"], &of_text);
    // A table that cannot be made leaves the file that is there. It was emptied first.
    fs::write(folder.path("kept.tsv"), "kept").unwrap();
    let into = ["eval", "run", "--images", "nowhere", "--confusion", "kept.tsv"];
    folder.refuses(&into, &["nowhere"]);
    assert_eq!(fs::read_to_string(folder.path("kept.tsv")).unwrap(), "kept");
    folder.refuses(&["eval", "run", "--averages"], &["kept no averages"]);
    folder.refuses(&[&TRAIN[..], &["--text", "text.txt"]].concat(), &["leave --text out"]);
    // A network that does not fit, and one of text.
    for (from, part) in [("run", "does not fit the model"), ("text run", "the model is of text")] {
        let init = ["train", "amoebanet.toml", "--out", "other", "--init", from];
        folder.refuses(&init, &[part]);
        assert!(!folder.path("other").exists(), "{from}");
    }
}

#[test]
fn fault_kinds_and_their_keys_say_which_there_are() {
    let folder = with_images();
    let set = |set: &str, parts: &[&str]| refuses(&folder, "resnet.toml", &["--set", set], parts);
    let models = "'foo' is no kind: use one of transformer, llama, huggingface, translation, \
        amoebanet, resnet";
    let data = "'foo' is no kind: use one of text, jsonl, parallel, image-folder, cifar10, \
        cifar100";
    set("model.kind=foo", &["--set model.kind=foo: model.kind: ", models]);
    set("data.kind=foo", &["--set data.kind=foo: data.kind: ", data]);
    set(
        "model.kind=3",
        &["--set model.kind=3: model.kind: ", "'3' is no kind: use one of transformer"],
    );
    let more = ["--set", "model.kind=foo", "--set", "model.width=4"];
    refuses(&folder, "resnet.toml", &more, &["--set model.kind=foo: ", models]);
    let file = |from: &str, to: &str, parts: &[&str]| {
        assert!(RESNET.contains(from));
        fs::write(folder.path("wrong.toml"), RESNET.replace(from, to)).unwrap();
        refuses(&folder, "wrong.toml", &[], parts);
    };
    file("kind = \"resnet\"", "kind = \"foo\"", &["wrong.toml: model.kind: ", models]);
    file("kind = \"image-folder\"", "kind = \"foo\"", &["wrong.toml: data.kind: ", data]);
    file("width = 4", "widht = 4", &["wrong.toml: ", "did you mean 'model.width'?"]);
    file("folder = \"train\"", "foldr = \"train\"", &["did you mean 'data.folder'?"]);
    file(
        "width = 4",
        "cells = 4",
        &["no key 'model.cells' where model.kind is resnet, but where it is amoebanet"],
    );
    let text = "wrong.toml: there is no key 'model.blocks'";
    file(
        "kind = \"resnet\"\nblocks",
        "kind = \"amoebanet\"\nblocks",
        &[text, "transformer and llama and resnet"],
    );

    set("model.blokcs=4", &["did you mean 'model.blocks'?"]);
    set("images.on_unreadable=ask", &["'ask' is not one of stop, skip"]);
    set("images.crop=middle", &["'middle' is no crop: use none, padded:PIXELS"]);
    set("images.sise=3", &["did you mean 'images.size'?"]);
    set("model.blocks=2", &["--set model.blocks=2: give a list of 4 values"]);
}

#[test]
fn regression_keys_of_another_kind_than_that_of_set_are_told_for_what_they_are() {
    // It was said that the file had an unknown field, or the name of a key that is no better was
    // given.
    let folder = with_images();
    let kind = ["--set", "model.kind=resnet"];
    let parts = [
        "amoebanet.toml with --set model.kind=resnet: there is no key 'model.",
        "' where model.kind is resnet, but where it is amoebanet: leave it out, or correct the \
        kind",
    ];
    refuses(&folder, "amoebanet.toml", &kind, &parts);
    let parts = ["--set: there is no key 'model.auxiliary'", "but where it is amoebanet"];
    refuses(&folder, "resnet.toml", &["--set", "model.auxiliary=0.4"], &parts);
    let parts = ["no key 'data.ratio' where data.kind is image-folder, but where it is parallel"];
    refuses(&folder, "resnet.toml", &["--set", "data.ratio=2"], &parts);
    // Where the file has only keys that both have, or none, the kind can be chosen.
    let only = RESNET.replace(NETWORK, "kind = \"resnet\"\n");
    fs::write(folder.path("only.toml"), only).unwrap();
    let small =
        ["--set", "model.cells=3", "--set", "model.filters=8", "--set", "model.kind=amoebanet"];
    folder
        .succeeds(&[&["train", "only.toml", "--out", "run", "--steps", "1"], &small[..]].concat());
}

#[test]
fn fault_data_and_networks_that_do_not_fit_are_refused_before_any_step() {
    let folder = with_images();
    let set = |set: &[&str], parts: &[&str]| {
        let arguments: Vec<&str> = set.iter().flat_map(|set| ["--set", set]).collect();
        refuses(&folder, "resnet.toml", &arguments, parts);
    };
    let amoebanet = |set: &str, parts: &[&str]| {
        refuses(&folder, "amoebanet.toml", &["--set", set], parts);
    };
    set(&["model.classes=5"], &["model.classes is 5, and there are 3 classes: correct it"]);
    set(&["data.folder="], &["data.folder is not set", "--set data.folder=images"]);
    set(&["data.folder=none"], &["`none` does not exist"]);
    set(&["data.folder=train/disc"], &["it has no folders in it", "a folder for each class"]);
    set(&["data.validation=resnet.toml"], &["it is not a folder"]);
    set(&["images.size=0"], &["images.size = 0: use 1 to"]);
    set(&["images.flip=2"], &["images.flip = 2: use a probability, 0 to 1"]);
    set(&["images.cutout=99"], &["images.cutout = 99: use 0 (none) to 32 (the size)"]);
    set(&["images.degrees=90"], &["images.degrees = 90: use 0 (none) to 45"]);
    set(&["images.scale=[1.2, 0.8]"], &["images.scale = [1.2, 0.8]: use 0.1 to 10, in order"]);
    set(&["images.shear=[-2, 0]"], &["images.shear = [-2, 0]: use -1 to 1, in order"]);
    set(&["images.translate=1.5"], &["images.translate = 1.5: use a share of the side"]);
    set(&["images.contrast=0"], &["images.contrast = 0: ", "up to 1 (unchanged)"]);
    set(&["images.invert=-1"], &["images.invert = -1: use a probability, 0 to 1"]);
    set(&["images.crop=resized:2"], &["images.crop = resized:2 "]);
    set(&["images.std=[0.0, 1.0, 1.0]"], &["images.std = [0.0, 1.0, 1.0]: ", "greater than 0"]);
    set(&["images.threads=0"], &["images.threads = 0: use 1 to 64"]);
    set(&["model.width=0"], &["resnet: width is 0"]);
    set(&["model.blocks=[0, 1, 1, 1]"], &["resnet: blocks are [0, 1, 1, 1]"]);
    amoebanet("model.cells=4", &["amoebanet: 4 normal cells: use a multiple of 3"]);
    amoebanet("model.filters=7", &["amoebanet: 7 filters", "a multiple of 4"]);
    amoebanet("model.drop_path=1.5", &["amoebanet: drop_path is 1.5"]);
    amoebanet("model.variant=C", &["'C' is not one of B, D"]);

    let fit = ["a transformer, a llama and a", " does not fit data.kind = "];
    fs::write(folder.path("wrong.toml"), "[data]\nkind = \"image-folder\"\nfolder = \"train\"\n")
        .unwrap();
    refuses(&folder, "wrong.toml", &[], &fit);
    fs::write(folder.path("wrong.toml"), "[model]\nkind = \"resnet\"\n").unwrap();
    refuses(&folder, "wrong.toml", &["--text", "text.txt"], &fit);
    let share = RESNET.replace("validation = \"held-out\"", "validation_share = 0.0");
    fs::write(folder.path("wrong.toml"), share).unwrap();
    refuses(
        &folder,
        "wrong.toml",
        &[],
        &["data.validation_share = 0 leaves 36 images to train on and 0"],
    );
}

#[test]
fn regression_the_weight_of_the_auxiliary_loss_is_looked_at_before_any_step() {
    // The first step refused it, and left a folder with a checkpoint behind.
    let folder = with_images();
    for value in ["-1.0", "nan", "inf"] {
        let set = format!("model.auxiliary={value}");
        let parts = ["--set model.auxiliary=", "use 0 (no auxiliary head) or a positive number"];
        refuses(&folder, "amoebanet.toml", &["--set", &set], &parts);
    }
}

#[test]
fn fault_a_folder_that_is_not_cifar_says_what_is_missing() {
    let folder = with_images();
    let text = RESNET.replace(
        "kind = \"image-folder\"\nfolder = \"train\"\nvalidation = \"held-out\"",
        "kind = \"cifar10\"\nfolder = \"cifar\"",
    );
    fs::write(folder.path("cifar.toml"), text).unwrap();
    let parts = ["cifar", "data_batch_1.bin", "data_batch_5.bin", "missing"];
    refuses(&folder, "cifar.toml", &[], &parts);
    let own = folder.path("cifar/cifar-10-batches-bin");
    fs::create_dir_all(&own).unwrap();
    for number in 1..=5 {
        fs::write(own.join(format!("data_batch_{number}.bin")), [0; 3073]).unwrap();
    }
    let parts = ["cifar-10-batches-bin/data_batch_1.bin", "it has 3073 bytes and not 30730000"];
    refuses(&folder, "cifar.toml", &[], &parts);
    let empty = ["--set", "data.folder="];
    refuses(&folder, "cifar.toml", &empty, &["data.folder is not set"]);
    let fine = ["--set", "data.kind=cifar100"];
    refuses(&folder, "cifar.toml", &fine, &["train.bin", "missing"]);
}
