//! A state saved at one K and restored at another continues bit for bit.
//! `crates/gpipe/tests/transparency.rs` covers all ways to run in memory; these tests add the disk.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{
    path::Path,
    sync::{Arc, Mutex, mpsc},
};

use common::{assert_same, bits, builder, flat, info, names, newest, path, save, step, trained};
use gpipe::{
    Adafactor, Adam, Balance, CrossEntropy, Decay, Group, LayerError, LearningRate, Moments,
    Optimizer, ParameterInfo, Pipeline, Remat, RmsProp, Schedule, Sequence, StateSpec, TensorSpec,
    Update,
    layers::{Activation, Attention, Dropout, Embedding, Head, Linear, Mlp},
};
use gpipe_checkpoint::{
    Checkpoint, Checkpoints, Settings,
    files::{Files, Operation},
    folder,
};
use tch::{Kind, Tensor};

const VOCABULARY: i64 = 13;
const LENGTH: i64 = 4;
const FEATURES: i64 = 8;

/// A small language model whose embedding and head share a weight.
fn language_model() -> Sequence {
    let (dropout, std, output_std) = (0.2, 0.2, 0.1);
    let tie = Some("tokens".to_owned());
    let attention = Attention {
        features: FEATURES,
        heads: 2,
        head_size: FEATURES / 2,
        causal: true,
        attention_dropout: dropout,
        dropout,
        std,
        output_std,
    };
    Sequence::new()
        .push(
            "embedding",
            Embedding {
                vocabulary: VOCABULARY,
                features: FEATURES,
                positions: LENGTH,
                std,
                dropout,
                tie: tie.clone(),
            },
        )
        .push("0.attention", attention)
        .push(
            "0.mlp",
            Mlp {
                features: FEATURES,
                hidden: 16,
                dropout,
                std,
                output_std,
                gelu: Default::default(),
            },
        )
        .push("1.attention", attention)
        .push("drop", Dropout { p: dropout })
        .push(
            "head",
            Head { features: FEATURES, vocabulary: VOCABULARY, std, logit_clip: 0.0, tie },
        )
}

#[derive(Debug, Clone)]
struct Run(usize, Schedule, Remat, &'static [usize]);

#[derive(Debug, Clone, Copy)]
enum Recipe {
    Adam,
    /// Moments in bfloat16, which are rounded by keyed random numbers.
    Rounded,
    /// Optimizer state of two tensors with other shapes than the parameter's, a changing rate,
    /// frozen parameters and averages.
    Adafactor,
    RmsProp,
}

fn build(Run(stages, schedule, remat, balance): &Run, recipe: Recipe, kind: Kind) -> Pipeline {
    let balance = match balance {
        [] => Balance::Uniform,
        layers => Balance::Layers(layers.to_vec()),
    };
    let builder = Pipeline::builder(language_model(), TensorSpec::new([4, LENGTH], Kind::Int64))
        .stages(*stages)
        .schedule(schedule.clone())
        .remat(*remat)
        .balance(balance)
        .micro_batches(3)
        .seed(5)
        .kind(kind)
        .loss(CrossEntropy::default());
    let builder = match recipe {
        Recipe::Adam => builder.optimizer(Adam { lr: 1e-2, ..Adam::default() }),
        Recipe::Rounded => builder.optimizer(rounded()),
        Recipe::RmsProp => builder.optimizer(RmsProp { lr: 1e-2, ..RmsProp::default() }),
        Recipe::Adafactor => builder
            .optimizer(Adafactor { weight_decay: 0.1, ..Adafactor::default() })
            .group(Group::matching(["*.bias", "*norm.*"]).weight_decay(0.0))
            .group(Group::matching(["0.mlp.hidden.weight", "1.attention.*"]).frozen())
            .learning_rate(LearningRate { warmup_steps: 4, decay: Decay::InverseSquareRoot })
            .clip_norm(1.0)
            .average(0.9),
    };
    builder.build().unwrap()
}

fn rounded() -> Adam {
    Adam { lr: 1e-2, moments: Moments::BFloat16, ..Adam::default() }
}

fn train(pipeline: &mut Pipeline, steps: usize) {
    for _ in 0..steps {
        let tokens: Vec<i64> = tokens(pipeline.steps()).take(7 * (LENGTH as usize + 1)).collect();
        let all = Tensor::from_slice(&tokens).reshape([7, LENGTH + 1]);
        let (inputs, targets) = (all.narrow(1, 0, LENGTH), all.narrow(1, 1, LENGTH));
        pipeline.train_step(inputs.contiguous(), targets.contiguous()).unwrap();
    }
}

/// An endless sequence of tokens, a fixed function of `seed` (Knuth's MMIX generator).
fn tokens(seed: u64) -> impl Iterator<Item = i64> {
    let next = |state: &u64| {
        Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
    };
    std::iter::successors(Some(seed), next).skip(1).map(|state| (state >> 33) as i64 % VOCABULARY)
}

#[test]
fn oracle_a_run_goes_on_to_the_bit_at_another_k() {
    use Recipe::{Adafactor, Adam, RmsProp, Rounded};
    use Remat::{Always, Never, Segments, UnlessAdjacent};
    use Schedule::{GPipe, Interleaved, OneFOneB, ZbH1, ZbV};
    let one = Run(1, GPipe, Never, &[]);
    let two = Run(2, OneFOneB, UnlessAdjacent, &[1, 5]);
    let three = Run(3, GPipe, Segments(2), &[4, 1, 1]);
    let four = Run(4, OneFOneB, Always, &[]);
    let six = Run(6, GPipe, UnlessAdjacent, &[]);
    let six_on_three = Run(3, Interleaved(2), Never, &[]);
    let split = Run(3, ZbH1, Always, &[]);
    let in_a_v = Run(3, ZbV, Always, &[]);
    let cases = [
        (&six_on_three, &split, Adafactor, Kind::Float),
        (&split, &six_on_three, Adam, Kind::Half),
        (&in_a_v, &six_on_three, Adafactor, Kind::Float),
        (&one, &in_a_v, Adam, Kind::Float),
        (&one, &four, Adam, Kind::Float),
        (&four, &one, Adam, Kind::Float),
        (&two, &three, Adafactor, Kind::Float),
        (&three, &two, Adafactor, Kind::Float),
        (&one, &six, Adafactor, Kind::Half),
        (&six, &one, Adafactor, Kind::Half),
        (&four, &two, Adam, Kind::Half),
        (&two, &four, RmsProp, Kind::BFloat16),
        (&three, &six, RmsProp, Kind::Double),
        (&six, &three, Adafactor, Kind::Double),
        (&four, &four, Adafactor, Kind::BFloat16),
        (&one, &one, RmsProp, Kind::Float),
        (&two, &split, Rounded, Kind::Float),
        (&six_on_three, &one, Rounded, Kind::BFloat16),
    ];
    for (index, (from, to, recipe, kind)) in cases.into_iter().enumerate() {
        let what = format!("{from:?} to {to:?}, {recipe:?}, {kind:?}");
        let folder = tempfile::tempdir().unwrap();
        let mut pipeline = build(from, recipe, kind);
        train(&mut pipeline, 2);
        if index % 2 == 0 {
            pipeline.set_learning_rate(0.1 + 0.2);
        }
        let saved = save(folder.path(), Settings::default(), &mut pipeline, info(2));
        let at_the_time = flat(&mut pipeline);
        train(&mut pipeline, 3);
        let expected = flat(&mut pipeline);
        assert!(expected != at_the_time);
        let has = |part: &str| expected.iter().any(|(name, ..)| name.contains(part));
        assert_eq!(has("loss_scale: Some(65536.0)"), kind == Kind::Half, "{what}");
        let averaged = expected.iter().any(|(name, ..)| name.ends_with(" average"));
        assert_eq!(averaged, matches!(recipe, Adafactor), "{what}");
        assert!(has("step: 5") && has("updates") && !has("head.weight"), "the head's is tied");

        let mut other = build(to, recipe, kind);
        train(&mut other, 1); // replace whatever was there
        let checkpoint = Checkpoint::open(&saved.folder).unwrap();
        let stages = from.1.stages(from.0).unwrap();
        assert_eq!(checkpoint.manifest().plan.stages, stages);
        checkpoint.restore(&mut other).unwrap();
        assert_same(&flat(&mut other), &at_the_time, &what);
        train(&mut other, 3);
        assert_same(&flat(&mut other), &expected, &what);
    }
}

#[test]
fn fault_moments_of_another_dtype_are_refused_before_anything_is_restored() {
    let one = Run(1, Schedule::GPipe, Remat::Never, &[]);
    for (from, to, words) in [
        (Recipe::Adam, Recipe::Rounded, ["is F32", "the model's bfloat16"]),
        (Recipe::Rounded, Recipe::Adam, ["is BF16", "the model's float32"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut pipeline = build(&one, from, Kind::Float);
        train(&mut pipeline, 1);
        let saved = save(folder.path(), Settings::default(), &mut pipeline, info(1));
        let mut other = build(&one, to, Kind::Float);
        let before = flat(&mut other);
        let error = Checkpoint::open(&saved.folder).unwrap().restore(&mut other).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("exp_avg") && words.iter().all(|own| error.contains(own)),
            "{error}"
        );
        assert_same(&flat(&mut other), &before, &error);
    }
}

/// The disk blocks until training has continued. The checkpoint must still have the state at the
/// call of `save`.
#[test]
fn oracle_the_state_is_of_the_moment_of_the_call() {
    let folder = tempfile::tempdir().unwrap();
    let (go, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let hook = move |operation: Operation, _: &Path| {
        if operation == Operation::Create {
            let _ = gate.lock().unwrap().recv();
        }
        Ok(())
    };
    let settings = Settings { files: Files::with_hook(Arc::new(hook)), ..Settings::default() };
    let mut checkpoints = Checkpoints::open(folder.path(), settings).unwrap();
    let mut pipeline =
        build(&Run(3, Schedule::OneFOneB, Remat::Always, &[]), Recipe::Adam, Kind::Half);
    train(&mut pipeline, 2);
    let before = flat(&mut pipeline);
    assert_eq!(checkpoints.save(&mut pipeline, info(2)).unwrap(), None);
    train(&mut pipeline, 2);
    let after = flat(&mut pipeline);
    assert_eq!(newest(folder.path()), None);
    assert_eq!(checkpoints.poll().unwrap(), None);
    drop(go);
    // The next save waits for this one and returns its outcome.
    let saved = checkpoints.save(&mut pipeline, info(4)).unwrap().unwrap();
    assert_eq!((saved.batches, &*saved.folder), (2, &*path(folder.path(), 2)));
    let next = checkpoints.wait().unwrap().unwrap();
    assert_eq!((next.batches, checkpoints.wait().unwrap()), (4, None));
    for (number, state) in [(2, before), (4, after)] {
        let found = Checkpoint::open(&path(folder.path(), number)).unwrap();
        let sizes = |entry: std::fs::DirEntry| entry.metadata().unwrap().len();
        let sizes = std::fs::read_dir(found.folder()).unwrap().map(|e| sizes(e.unwrap()));
        assert_eq!(sizes.sum::<u64>(), if number == 2 { saved.bytes } else { next.bytes });
        found.restore(&mut pipeline).unwrap();
        assert_same(&flat(&mut pipeline), &state, &format!("step {number}"));
    }
}

#[test]
fn oracle_a_checkpoint_that_is_being_written_is_waited_for_when_it_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), Settings::default()).unwrap();
    checkpoints.save(&mut trained(common::model(), 2, 1), info(1)).unwrap();
    drop(checkpoints);
    assert_eq!(newest(folder.path()), Some(1));
}

#[test]
fn oracle_parameters_averages_and_files_can_be_read_without_a_pipeline() {
    let folder = tempfile::tempdir().unwrap();
    let mut pipeline =
        build(&Run(2, Schedule::GPipe, Remat::Never, &[]), Recipe::Adafactor, Kind::Half);
    train(&mut pipeline, 2);
    let saved = save(folder.path(), Settings::default(), &mut pipeline, info(2));
    let checkpoint = Checkpoint::open(&saved.folder).unwrap();
    let all = |named: Vec<(String, Tensor)>| -> Vec<_> {
        named.into_iter().map(|(name, t)| (name, t.size(), bits(&t))).collect()
    };
    let parameters = all(checkpoint.parameters().unwrap());
    assert_eq!(parameters, all(pipeline.parameters().unwrap()));
    let averages = all(checkpoint.averages().unwrap());
    assert_eq!(averages, all(pipeline.averages().unwrap()));
    assert!(averages != parameters);
    assert_eq!(checkpoint.run_file("tokenizer.json").unwrap().unwrap(), b"{\"a\": 1}");
    assert_eq!(checkpoint.run_file("0000-embedding.parameters.safetensors").unwrap(), None);
    let mut plain = build(&Run(2, Schedule::GPipe, Remat::Never, &[]), Recipe::Adam, Kind::Float);
    let saved = save(folder.path(), Settings::default(), &mut plain, info(3));
    let without = Checkpoint::open(&saved.folder).unwrap();
    assert_eq!(without.parameters().unwrap().len(), parameters.len());
    assert!(without.averages().unwrap_err().to_string().contains("no moving averages"));
}

/// A pipeline that only predicts can be saved. What it lacks starts from scratch.
#[test]
fn oracle_a_pipeline_that_was_never_trained_can_be_saved_and_trained_on() {
    let folder = tempfile::tempdir().unwrap();
    let spec = || TensorSpec::new([4, 3], Kind::Float);
    let mut predicts = Pipeline::builder(common::model(), spec()).seed(11).build().unwrap();
    let saved = save(folder.path(), Settings::default(), &mut predicts, info(0));
    let mut expected = trained(common::model(), 2, 0);
    let mut found = trained(common::model(), 3, 2);
    Checkpoint::open(&saved.folder).unwrap().restore(&mut found).unwrap();
    assert_eq!(found.steps(), 0);
    (0..2).for_each(|_| step(&mut found));
    (0..2).for_each(|_| step(&mut expected));
    assert_same(&flat(&mut found), &flat(&mut expected), "trained on");
}

#[test]
fn fault_layers_may_be_called_anything() {
    let long = "long/".repeat(60);
    let layers = [
        "a/b",
        "a:b",
        "a_b",
        "",
        " ",
        ".",
        "..",
        "../../up",
        "/etc/passwd",
        "manifest.json",
        "größe/層",
        "層".repeat(100).leak(),
        &*long.clone().leak(),
        "line\nbreak",
        "nul\0",
        "\"",
        "\\",
        "A_b",
        "__metadata__",
        "\u{202e}",
    ];
    let model = || {
        let first = Sequence::new().push("first", Linear::new(3, 2));
        let push = |model: Sequence, name: &&str| model.push(*name, Linear::new(2, 2));
        layers.iter().fold(first, push).push("no/parameters", Activation::Tanh)
    };
    let folder = tempfile::tempdir().unwrap();
    let mut pipeline = builder(model()).stages(3).build().unwrap();
    step(&mut pipeline);
    let saved = save(folder.path(), Settings::default(), &mut pipeline, info(1));
    let files = names(&saved.folder);
    assert_eq!(files.len(), 3 * (layers.len() + 1) + 2, "each layer has its own files");
    let plain = |name: &String| {
        name.len() < 110 && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    assert!(files.iter().all(plain), "{files:?}");
    assert!(files.contains(&"0007-...parameters.safetensors".to_owned()), "{files:?}");
    assert!(files.contains(&"0001-a_b.parameters.safetensors".to_owned()), "{files:?}");
    assert!(files.contains(&"0002-a_b.parameters.safetensors".to_owned()), "{files:?}");
    assert_eq!(names(folder.path()), ["latest", "step-00000001"]);
    let mut other = builder(model()).build().unwrap();
    folder::find(folder.path()).unwrap().checkpoint.restore(&mut other).unwrap();
    assert_same(&flat(&mut other), &flat(&mut pipeline), "odd names");
}

/// Names in our safetensors files have at most 1024 bytes.
#[test]
fn fault_a_name_that_is_too_long_for_a_file_is_an_error_that_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let model = Sequence::new().push("x".repeat(1024), Linear::new(3, 2));
    let mut pipeline = builder(model).build().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), Settings::default()).unwrap();
    checkpoints.save(&mut pipeline, info(1)).unwrap();
    let message = checkpoints.wait().unwrap_err().to_string();
    assert!(message.contains("0000-xxx") && message.contains("at most 1024"), "{message}");
    assert!(message.len() < 1000);
    assert!(names(folder.path()).is_empty());
}

/// Where an optimizer failed and the torn update was accepted, parameters have had more updates
/// than the pipeline has counted steps. Such a state could be trained, but no checkpoint of it
/// could ever be saved.
#[test]
fn regression_the_state_after_a_torn_update_is_saved() {
    /// Adam, which fails in its first update of the last layer.
    #[derive(Debug)]
    struct FailsOnce(Adam, Mutex<bool>);
    impl Optimizer for FailsOnce {
        fn name(&self) -> &'static str {
            self.0.name()
        }
        fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
            self.0.state(parameter)
        }
        fn temporaries(&self) -> usize {
            self.0.temporaries()
        }
        fn lr(&self) -> f64 {
            self.0.lr()
        }
        fn apply(&self, update: &Update) -> Result<(), LayerError> {
            let is_last = update.names.iter().any(|name| name.starts_with("leave"));
            if is_last && !std::mem::replace(&mut *self.1.lock().unwrap(), true) {
                return Err(LayerError::Value("it fails once".into()));
            }
            self.0.apply(update)
        }
    }
    let build = || {
        let optimizer = FailsOnce(Adam { lr: 1e-2, ..Adam::default() }, Mutex::new(false));
        builder(common::model()).stages(2).optimizer(optimizer).build().unwrap()
    };
    let mut pipeline = build();
    let (x, y) = (
        Tensor::ones([4, 3], (Kind::Float, tch::Device::Cpu)),
        Tensor::ones([4, 2], (Kind::Float, tch::Device::Cpu)),
    );
    let error = pipeline.train_step(&x, &y).unwrap_err().to_string();
    assert!(error.contains("it fails once"), "{error}");
    assert!(pipeline.accept_torn_update().unwrap());
    let accepted = flat(&mut pipeline);
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), Settings::default(), &mut pipeline, info(1));
    let mut other = build();
    let checkpoint = folder::newest(folder.path()).unwrap().found.unwrap();
    checkpoint.restore(&mut other).unwrap();
    assert_same(&flat(&mut other), &accepted, "restored");
}
