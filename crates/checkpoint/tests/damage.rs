//! Damaged files and checkpoints of other models are detected, named and skipped, and the pipeline
//! stays unchanged.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{fs, path::Path, process::Command};

use common::{
    Flat, assert_same, builder, copy, flat, info, model, names, newest, path, save, sealed, trained,
};
use gpipe::{
    Adafactor, Pipeline, Sequence, Sgd, TensorSpec,
    layers::{Activation, Linear},
};
use gpipe_checkpoint::{
    Checkpoint, CheckpointError, Settings, folder,
    manifest::{Manifest, sha256},
    tensor_file::{TensorFile, encode},
};
use tch::{Kind, Tensor};

type Named = Vec<(String, Tensor)>;

/// Two checkpoints. Damage to the second one must be detected, and the first one is then found.
struct Folder {
    folder: tempfile::TempDir,
    untouched: tempfile::TempDir,
    pipeline: Pipeline,
    before: Flat,
}

impl Folder {
    fn new() -> Self {
        let (folder, untouched) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for steps in [1, 2] {
            let mut pipeline = trained(model(), 2, steps);
            save(folder.path(), Settings::default(), &mut pipeline, info(steps as u64));
        }
        copy(&path(folder.path(), 2), untouched.path()).unwrap();
        let mut pipeline = trained(model(), 3, 1);
        let before = flat(&mut pipeline);
        Self { folder, untouched, pipeline, before }
    }

    fn second(&self) -> std::path::PathBuf {
        path(self.folder.path(), 2)
    }

    fn restore(&mut self) -> Result<(), CheckpointError> {
        Checkpoint::open(&self.second())?.restore(&mut self.pipeline)
    }

    /// Expects that the damage by `damage` is detected and reported with `part`, then undoes it.
    fn finds(&mut self, part: &str, what: &str, damage: impl FnOnce(&Path)) -> String {
        let second = self.second();
        damage(&second);
        let verified = Checkpoint::open(&second).and_then(|checkpoint| checkpoint.verify());
        let message = verified.expect_err(what).to_string();
        assert!(message.contains(part), "{what}: '{part}' is not in: {message}");
        assert!(message.contains("step-00000002"), "{what}: {message}");
        assert_eq!(self.restore().expect_err(what).to_string(), message, "{what}");
        assert_same(&flat(&mut self.pipeline), &self.before, what);
        let newest = folder::newest(self.folder.path()).unwrap();
        assert_eq!(newest.found.unwrap().manifest().progress.batches, 1, "{what}");
        let skipped: Vec<_> = newest.skipped.iter().map(|s| (&s.folder, &s.reason)).collect();
        assert_eq!(skipped, [(&second, &message)], "{what}");
        fs::remove_dir_all(&second).unwrap();
        copy(self.untouched.path(), &second).unwrap();
        message
    }
}

#[test]
fn fault_each_damage_to_each_file_is_found_and_named() {
    let mut folder = Folder::new();
    let files = names(&folder.second());
    assert_eq!(files.len(), 4 * 3 + 2, "{files:?}");
    for file in &files {
        let bytes = fs::read(folder.second().join(file)).unwrap();
        let mut damaged: Vec<(String, Vec<u8>)> = vec![
            ("one byte longer".into(), [&bytes[..], b"\n"].concat()),
            ("twice as long".into(), [&bytes[..], &bytes[..]].concat()),
        ];
        for length in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            damaged.push((format!("cut to {length} bytes"), bytes[..length].to_vec()));
        }
        for bit in
            [0, 3, 8 * 8, 4 * bytes.len(), 8 * bytes.len() - 1].map(|b| b % (8 * bytes.len()))
        {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            damaged.push((format!("bit {bit} flipped"), flipped));
        }
        damaged.push(("of zeros".into(), vec![0; bytes.len()]));
        for (how, bytes) in damaged {
            let what = format!("{file} {how}");
            folder.finds(file, &what, |second| fs::write(second.join(file), bytes).unwrap());
        }
        let message =
            folder.finds(file, file, |second| fs::remove_file(second.join(file)).unwrap());
        assert!(message.contains("missing") || message.contains("has no manifest.json"));
        for how in ["a folder", "a pipe", "a link to nothing", "a link to itself"] {
            let what = format!("{file} replaced by {how}");
            folder.finds(file, &what, |second| {
                let at = second.join(file);
                fs::remove_file(&at).unwrap();
                match how {
                    "a folder" => fs::create_dir(&at).unwrap(),
                    "a pipe" => {
                        assert!(Command::new("mkfifo").arg(&at).status().unwrap().success())
                    }
                    "a link to nothing" => std::os::unix::fs::symlink("nothing", &at).unwrap(),
                    _ => std::os::unix::fs::symlink(file, &at).unwrap(),
                }
            });
        }
    }
    folder.restore().unwrap();
}

#[test]
fn fault_swapped_files_are_told_apart() {
    let mut folder = Folder::new();
    let file = |layer: &str, kind: &str| format!("{layer}.{kind}.safetensors");
    let pairs = [
        (file("0002-inner", "parameters"), file("0003-outer", "parameters")),
        (file("0002-inner", "parameters"), file("0002-inner", "averages")),
        (file("0002-inner", "optimizer"), file("0003-outer", "optimizer")),
    ];
    for (a, b) in pairs {
        let message = folder.finds(&a, &a, |second| {
            let (a, b, c) = (second.join(&a), second.join(&b), second.join("c"));
            fs::rename(&a, &c).unwrap();
            fs::rename(&b, &a).unwrap();
            fs::rename(&c, &b).unwrap();
        });
        assert!(message.contains(&format!("its content is that of '{b}'")), "{message}");
    }
    // The manifest of one checkpoint beside another one's files.
    let first = path(folder.folder.path(), 1).join("manifest.json");
    folder.finds("0000-enter.parameters", "the manifest of the first", |second| {
        fs::copy(first, second.join("manifest.json")).unwrap();
    });
    folder.restore().unwrap();
}

#[test]
fn fault_where_no_checkpoint_is_complete_the_reasons_are_said() {
    let folder = Folder::new();
    for number in [1, 2] {
        fs::remove_file(path(folder.folder.path(), number).join("tokenizer.json")).unwrap();
    }
    assert_eq!(newest(folder.folder.path()), None);
    let message = folder::find(folder.folder.path()).unwrap_err().to_string();
    for part in ["no checkpoint in it is complete", "step-00000001", "step-00000002", "missing"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(folder::find(&folder.second()).is_err(), "named itself, it is verified, too");
    let empty = tempfile::tempdir().unwrap();
    for (path, part) in [("", "no checkpoint in it"), ("x", "no such folder")] {
        let message = folder::find(&empty.path().join(path)).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

fn layers(names: [&str; 3], inner: i64) -> Sequence {
    Sequence::new()
        .push("enter", Linear::new(3, 4))
        .push("bend", Activation::Tanh)
        .push(names[0], Linear::new(4, inner))
        .push(names[1], Linear::new(inner, 4))
        .push(names[2], Linear::new(4, 2))
}

#[test]
fn fault_a_checkpoint_of_another_model_is_refused_with_names() {
    let folder = Folder::new();
    let checkpoint = Checkpoint::open(&folder.second()).unwrap();
    let plain = || builder(model());
    let refuses = |builder: gpipe::PipelineBuilder, parts: &[&str]| {
        let mut pipeline = builder.build().unwrap();
        let before = flat(&mut pipeline);
        let error = checkpoint.restore(&mut pipeline).unwrap_err();
        assert!(matches!(error, CheckpointError::Misfit { .. }), "{error:?}");
        let message = error.to_string();
        for part in parts.iter().chain(&["step-00000002 does not fit"]) {
            assert!(message.contains(part), "'{part}' is not in: {message}");
        }
        assert_same(&flat(&mut pipeline), &before, &message);
    };
    let names = ["inner", "outer", "leave"];
    refuses(
        builder(layers(["other", "outer", "leave"], 4)),
        &["it has no layer 'other'", "the model has no layer 'inner'"],
    );
    refuses(builder(layers(names, 5)), &["inner.weight is float32 [4, 4]", "float32 [5, 4]"]);
    refuses(
        builder(layers(["outer", "inner", "leave"], 4)),
        &["its layers are in another order: 'inner' is where 'outer' should be"],
    );
    refuses(builder(model().push("more", Linear::new(2, 2))), &["it has no layer 'more'"]);
    refuses(builder(model().push("bare", Activation::Tanh)), &["it has no layer 'bare'"]);
    let fewer = Sequence::new().push("enter", Linear::new(3, 4)).push("leave", Linear::new(4, 2));
    refuses(builder(fewer), &["no layer 'bend'", "no layer 'inner'", "no layer 'outer'"]);
    let unbiased = Linear { bias: false, ..Linear::new(4, 4) };
    let changed = Sequence::new()
        .push("enter", Linear::new(3, 4))
        .push("bend", Activation::Tanh)
        .push("inner", unbiased)
        .push("outer", Linear::new(4, 4))
        .push("leave", Linear::new(4, 2));
    refuses(builder(changed), &["layer 'inner' has the parameters [weight, bias]", "[weight]"]);
    refuses(
        plain().optimizer(Adafactor::default()),
        &["enter.weight: its optimizer keeps", "exp_avg"],
    );
    refuses(
        plain().optimizer(Sgd { momentum: 0.9, ..Sgd::new(0.1) }),
        &["enter.weight: its optimizer keeps", "and 3 more"],
    );
    refuses(plain().seed(12), &["seed 11", "12"]);
    let double = Pipeline::builder(model(), TensorSpec::new([4, 3], Kind::Double));
    let double = double.seed(11).kind(Kind::Double);
    refuses(double, &["enter.weight is float32 [4, 3], the model's float64 [4, 3]"]);
}

/// Regression: all checksums are right, but a tensor differs from the manifest, by a bug or an
/// attack. This must be detected before restoring starts, or it leaves the pipeline unusable.
#[test]
fn regression_files_that_contradict_the_manifest_are_found_before_anything_is_changed() {
    let mut folder = Folder::new();
    let ones = |shape: &[i64], kind| Tensor::ones(shape, (kind, tch::Device::Cpu));
    type Change = fn(&mut Named);
    let changes: [(&str, Change); 5] = [
        ("parameters", |all| all[1].1 = all[1].1.reshape([-1])),
        ("parameters", |all| all[1].1 = all[1].1.to_kind(Kind::Double)),
        ("parameters", |all| drop(all.pop())),
        ("averages", |all| all[0].0 = "leave.else".into()),
        ("optimizer", |all| all.push(("leave.more".into(), Tensor::from(1.0)))),
    ];
    for (kind, change) in changes {
        folder.finds(&format!("0004-leave.{kind}"), kind, |second| rewrite(second, kind, change));
    }
    // The shapes of optimizer state come from the model, because the manifest does not record them.
    let reshape = |all: &mut Named| {
        let tensor = all.iter_mut().find(|(name, _)| name == "leave.weight.exp_avg").unwrap();
        tensor.1 = ones(&[8], Kind::Float);
    };
    rewrite(&folder.second(), "optimizer", reshape);
    let message = folder.restore().unwrap_err().to_string();
    assert!(
        message.contains("leave.weight.exp_avg is F32 [8], the model's float32 [2, 4]"),
        "{message}"
    );
    assert_same(&flat(&mut folder.pipeline), &folder.before, "an optimizer's shape");
}

/// Changes one of the last layer's files, and updates its size and checksum in the manifest.
fn rewrite(second: &Path, kind: &str, change: impl FnOnce(&mut Named)) {
    let name = format!("0004-leave.{kind}.safetensors");
    let mut file = TensorFile::open(&second.join(&name)).unwrap();
    let tensors: Vec<String> = file.entries().iter().map(|entry| entry.name.clone()).collect();
    let mut all: Vec<_> =
        tensors.into_iter().map(|name| (name.clone(), file.read(&name).unwrap())).collect();
    change(&mut all);
    let bytes = encode(&all, file.metadata()).unwrap();
    fs::write(second.join(&name), &bytes).unwrap();
    let manifest = second.join("manifest.json");
    let mut changed: Manifest = Manifest::decode(&fs::read(&manifest).unwrap()).unwrap();
    let entries = changed.layers.iter_mut().flat_map(|layer| &mut layer.files);
    let entry = entries.into_iter().find(|entry| entry.path == name).unwrap();
    (entry.bytes, entry.sha256) = (bytes.len() as u64, sha256(&bytes));
    fs::write(&manifest, sealed(&serde_json::to_string_pretty(&changed).unwrap())).unwrap();
}
