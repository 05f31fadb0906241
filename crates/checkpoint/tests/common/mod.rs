//! Shared helpers of the tests: small pipelines, their whole state bit for bit, folders.
#![allow(dead_code)] // each test file uses a different part

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use gpipe::{
    Adam, MeanSquaredError, Pipeline, PipelineBuilder, Sequence, TensorSpec,
    layers::{Activation, Linear},
};
use gpipe_checkpoint::{Checkpoint, Checkpoints, RunInfo, Saved, Settings, folder, manifest};
use tch::{Kind, Tensor};

/// A model of four small layers, two of which have the same shapes, and a layer without parameters.
pub fn model() -> Sequence {
    Sequence::new()
        .push("enter", Linear::new(3, 4))
        .push("bend", Activation::Tanh)
        .push("inner", Linear::new(4, 4))
        .push("outer", Linear::new(4, 4))
        .push("leave", Linear::new(4, 2))
}

/// A model with as few files as possible, because each of them is created, written and synced.
pub fn tiny() -> Sequence {
    Sequence::new()
        .push("enter", Linear::new(3, 4))
        .push("bend", Activation::Tanh)
        .push("leave", Linear::new(4, 2))
}

pub fn builder(model: Sequence) -> PipelineBuilder {
    Pipeline::builder(model, TensorSpec::new([4, 3], Kind::Float))
        .micro_batches(2)
        .seed(11)
        .loss(MeanSquaredError)
        .optimizer(Adam { lr: 1e-2, ..Adam::default() })
        .average(0.5)
}

/// The model on `stages` stages, after `steps` steps.
pub fn trained(model: Sequence, stages: usize, steps: usize) -> Pipeline {
    let mut pipeline = builder(model).stages(stages).build().unwrap();
    (0..steps).for_each(|_| step(&mut pipeline));
    pipeline
}

/// Trains one step, on a batch that depends only on the step's number.
pub fn step(pipeline: &mut Pipeline) {
    let numbers = |count: usize, shift: f64| -> Vec<f32> {
        let at = |i: usize| ((i as f64 + shift + 7.0 * pipeline.steps() as f64) * 0.7).sin() as f32;
        (0..count).map(at).collect()
    };
    let inputs = Tensor::from_slice(&numbers(12, 0.0)).reshape([4, 3]);
    let targets = Tensor::from_slice(&numbers(8, 0.5)).reshape([4, 2]);
    pipeline.train_step(&inputs, &targets).unwrap();
}

/// A pipeline's whole state: names with shapes and bits.
pub type Flat = Vec<(String, Vec<i64>, Vec<u64>)>;

pub fn flat(pipeline: &mut Pipeline) -> Flat {
    let state = pipeline.state().unwrap();
    let mut all = vec![(format!("{:?}", state.counters), vec![], vec![])];
    let mut push = |name: String, tensor: &Tensor| all.push((name, tensor.size(), bits(tensor)));
    for layer in state.stages.into_iter().flatten() {
        for parameter in layer.parameters {
            let name = format!("{}.{}", layer.layer, parameter.name);
            push(name.clone(), &parameter.value);
            if let Some(average) = &parameter.average {
                push(format!("{name} average"), average);
            }
            if let Some(kept) = &parameter.optimizer {
                let kept_for = format!("{name} after {} updates", kept.updates);
                kept.tensors.iter().for_each(|(tensor, t)| push(format!("{kept_for} {tensor}"), t));
            }
        }
    }
    all
}

/// The bits of a tensor. Unlike ==, they tell NaN from NaN and 0 from -0.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    let values: Vec<f64> = tensor.to_kind(Kind::Double).reshape([-1]).try_into().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

pub fn assert_same(found: &Flat, expected: &Flat, what: &str) {
    let names = |flat: &Flat| flat.iter().map(|(name, ..)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found == expected, "{what}: {} differs", found.0);
    }
}

pub fn info(batches: u64) -> RunInfo {
    let mut info = RunInfo { config: "steps = 3\n".into(), ..RunInfo::default() };
    info.progress.batches = batches;
    info.files = vec![("tokenizer.json".into(), b"{\"a\": 1}".to_vec())];
    info
}

/// Saves a checkpoint and waits for it.
pub fn save(folder: &Path, settings: Settings, pipeline: &mut Pipeline, info: RunInfo) -> Saved {
    let mut checkpoints = Checkpoints::open(folder, settings).unwrap();
    assert_eq!(checkpoints.save(pipeline, info).unwrap(), None);
    checkpoints.wait().unwrap().unwrap()
}

pub fn keep(keep: usize) -> Settings {
    Settings { keep, ..Settings::default() }
}

/// The checkpoint of `batches` in `folder`.
pub fn path(folder: &Path, batches: u64) -> PathBuf {
    folder.join(folder::name(batches))
}

/// The number of the newest complete checkpoint.
pub fn newest(folder: &Path) -> Option<u64> {
    folder::newest(folder).unwrap().found.map(|found| found.manifest().progress.batches)
}

/// The names in a folder, sorted.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The number that a link in `folder` points to, which must be a complete checkpoint.
pub fn linked(folder: &Path, link: &str) -> Option<u64> {
    let link = folder.join(link);
    link.symlink_metadata().ok()?;
    let found = Checkpoint::open(&link).unwrap();
    found.verify().unwrap();
    Some(found.manifest().progress.batches)
}

/// Copies a folder, preserving links.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (kind, to) = (entry.file_type()?, to.join(entry.file_name()));
        if kind.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(entry.path())?, to)?;
        } else if kind.is_dir() {
            copy(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

/// A manifest of `fields`, the text of a JSON object, with a valid checksum. Only an attacker makes
/// such a manifest.
pub fn sealed(fields: &str) -> Vec<u8> {
    let rest = fields.trim_start().strip_prefix('{').unwrap();
    let with = |digits: &str| format!("{{\n  \"checksum\": \"{digits}\",{rest}\n");
    with(&manifest::sha256(with(&"0".repeat(64)).as_bytes())).into_bytes()
}
