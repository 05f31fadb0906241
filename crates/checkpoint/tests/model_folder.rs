//! Weights in several files. `oracle_`: what is written is read, to the bit; `fault_`: files that
//! do not belong together.

use std::{collections::HashMap, path::Path};

use gpipe_checkpoint::{
    TensorSet, model_folder,
    tensor_file::{FileError, Planned, TensorFile, write},
};
use tch::{Device, Kind, Tensor};

fn tensors() -> Vec<(String, Tensor)> {
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double, Kind::Bool];
    let tensor = |number: usize| {
        let values = Tensor::arange(4 + number as i64, (Kind::Float, Device::Cpu)) * 0.3;
        (format!("layer.{number}.weight"), values.to_kind(kinds[number % kinds.len()]))
    };
    (0..12).map(tensor).collect()
}

fn put(folder: &Path, shard_bytes: u64) -> Vec<String> {
    let tensors = tensors();
    let planned = |(name, own): &(String, Tensor)| Planned {
        name: name.clone(),
        kind: own.kind(),
        shape: own.size(),
    };
    let plans: Vec<Planned> = tensors.iter().map(planned).collect();
    let by_name: HashMap<_, _> = tensors.into_iter().collect();
    let mut read = Vec::new();
    let names = model_folder::write(folder, &plans, shard_bytes, |name| {
        read.push(name.to_owned());
        Ok(by_name[name].shallow_clone())
    });
    assert_eq!(read.len(), plans.len(), "each is asked for once");
    names.unwrap()
}

fn refusal(folder: &Path) -> String {
    model_folder::open(folder).unwrap_err().to_string()
}

#[test]
fn oracle_shards_are_read_as_they_were_written() {
    for shard_bytes in [1 << 20, 60, 1] {
        let folder = tempfile::tempdir().unwrap();
        let names = put(folder.path(), shard_bytes);
        assert_eq!(names.len() > 1, shard_bytes < 1 << 20);
        let mut set = model_folder::open(folder.path()).unwrap();
        assert_eq!(set.files().len(), names.len());
        assert_eq!(set.metadata()["format"], "pt");
        set.verify().unwrap();
        for (name, own) in tensors() {
            let read = set.read(&name).unwrap();
            assert_eq!((read.kind(), &read), (own.kind(), &own), "{name}");
        }
        assert_eq!(set.entries().count(), 12);
        let bytes: usize =
            tensors().iter().map(|(_, own)| own.numel() * own.kind().elt_size_in_bytes()).sum();
        assert_eq!(set.bytes(), bytes as u64);
    }
}

#[test]
fn oracle_tensors_in_different_files_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let one = Tensor::ones([3], (Kind::Float, Device::Cpu));
    let file = |name: &str, tensors: &[(&str, &Tensor)]| {
        let path = folder.path().join(name);
        let all: Vec<_> =
            tensors.iter().map(|(name, own)| ((*name).to_owned(), own.shallow_clone())).collect();
        write(&path, &all, &[].into()).unwrap();
        TensorFile::open(&path).unwrap()
    };
    let files = vec![
        file("a", &[("x", &one), ("other", &(&one + 1.0))]),
        file("b", &[("y", &one), ("short", &one.narrow(0, 0, 2))]),
    ];
    let mut set = TensorSet::of(folder.path(), files).unwrap();
    assert!(set.are_equal("x", "y").unwrap());
    assert!(!set.are_equal("other", "y").unwrap());
    assert!(!set.are_equal("x", "short").unwrap());
    assert!(set.read("z").unwrap_err().to_string().contains("it has no tensor z"));
    let twice = vec![file("c", &[("x", &one)]), file("d", &[("x", &one)])];
    let error = TensorSet::of(folder.path(), twice).unwrap_err().to_string();
    assert!(error.contains("x is in") && error.contains("keep one of them"), "{error}");
}

#[test]
fn fault_folders_that_are_not_whole_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    assert!(refusal(folder.path()).contains("there is neither model.safetensors nor"));
    put(folder.path(), 60);
    let index = folder.path().join(model_folder::INDEX);
    let good = std::fs::read_to_string(&index).unwrap();
    let with = |from: &str, to: &str| {
        assert!(good.contains(from));
        std::fs::write(&index, good.replace(from, to)).unwrap();
        refusal(folder.path())
    };
    let first = "model-00001-of-";
    assert!(with(first, "../model-00001-of-").contains("which is no file of this folder"));
    assert!(with(first, "/etc/model-00001-of-").contains("which is no file of this folder"));
    assert!(with(first, "model-00009-of-").contains("which is missing: fetch that file, too"));
    assert!(
        with("layer.0.weight", "layer.99.weight").contains("layer.99.weight is in model-00001")
    );
    assert!(with("weight_map", "weights").contains("it is not a list of tensors"));
    std::fs::write(&index, "{").unwrap();
    assert!(refusal(folder.path()).contains("it is not a list of tensors"));
}

#[test]
fn fault_a_tensor_that_is_not_as_planned_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let plan = [Planned { name: "a".into(), kind: Kind::Float, shape: vec![2] }];
    for tensor in [
        Tensor::ones([3], (Kind::Float, Device::Cpu)),
        Tensor::ones([2], (Kind::Double, Device::Cpu)),
    ] {
        let read = |_: &str| Ok::<_, FileError>(tensor.shallow_clone());
        let error = model_folder::write(folder.path(), &plan, 1 << 20, read).unwrap_err();
        assert!(error.to_string().contains("a: it is not as it was planned"), "{error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
