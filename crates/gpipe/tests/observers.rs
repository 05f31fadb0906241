//! Observers of steps, actions and layers.
//!
//! - what they see: every action, every layer in every pass, the tensors themselves
//! - `transparency_`: they change nothing
//! - `fault_`: they may fail a step, and may not change a tensor
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use common::{Features, Run, assert_close, assert_same_bits, batch, bits, flat, model, uniform};
use gpipe::{
    ActionEvent, Error, LayerError, LayerEvent, MeanSquaredError, Observer, Part, Pass, Pipeline,
    PipelineBuilder, Remat, Schedule, Sequence, Sgd, StepEvent, TensorSpec, When,
    layers::{Activation, Linear},
};
use tch::{Device, Kind, Tensor};

/// Micro-batch, layer, pass, and whether it is after it.
type Key = (usize, String, String, bool);

/// Everything that was seen, by micro-batch, layer and pass, and the texts of actions and steps.
#[derive(Default)]
struct Seen {
    steps: Mutex<Vec<(usize, u64, Part, bool)>>,
    actions: Mutex<Vec<(String, bool)>>,
    layers: Mutex<BTreeMap<Key, Vec<Vec<u64>>>>,
    gradients: Mutex<BTreeMap<(usize, String), Vec<u64>>>,
}

struct Watches(Arc<Seen>);

impl Observer for Watches {
    fn step(&self, event: &StepEvent) -> Result<(), LayerError> {
        let is_after = event.when != When::Before;
        self.0.steps.lock().unwrap().push((event.stage, event.step, event.part, is_after));
        Ok(())
    }

    fn action(&self, event: &ActionEvent) -> Result<(), LayerError> {
        let is_after = event.when != When::Before;
        self.0.actions.lock().unwrap().push((event.action.to_string(), is_after));
        Ok(())
    }

    fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
        let is_after = event.when != When::Before;
        // The two halves of a backward together, like a whole one.
        let pass = match event.pass {
            Pass::BackwardInput => Pass::Backward,
            pass => pass,
        };
        let key = (event.micro_batch, event.layer.to_owned(), format!("{pass:?}"), is_after);
        let tensors = event.tensors.iter().map(|tensor| tensor.map_or(vec![], bits)).collect();
        assert!(self.0.layers.lock().unwrap().insert(key, tensors).is_none(), "seen twice");
        if matches!(event.pass, Pass::Backward | Pass::BackwardWeight) && is_after {
            for (name, sum) in &event.parameter_gradients {
                let name = format!("{}.{name}", event.layer);
                self.0.gradients.lock().unwrap().insert((event.micro_batch, name), bits(sum));
            }
        }
        Ok(())
    }
}

fn features() -> Features {
    Features { skip: true, dropout: 0.2, batch_norm: true, ..Features::plain() }
}

/// Two steps, the second of which is seen.
fn watched(run: &Run, watches: bool) -> (Arc<Seen>, common::Named) {
    let seen = Arc::new(Seen::default());
    let mut builder = run.builder(model(features()), 3);
    if watches {
        builder = builder.observer(Watches(Arc::clone(&seen)));
    }
    let mut pipeline = builder.build().unwrap();
    for seed in 0..2 {
        seen.layers.lock().unwrap().clear();
        seen.actions.lock().unwrap().clear();
        let (inputs, targets) = batch(7, seed);
        let report = pipeline.train_step(&inputs, &targets).unwrap();
        if watches {
            let ran = report.timeline.devices.iter().flatten();
            let mut ran: Vec<String> = ran.map(|timed| timed.action.to_string()).collect();
            let actions = seen.actions.lock().unwrap().clone();
            let after = actions.iter().filter(|(_, is_after)| *is_after);
            let mut after: Vec<String> = after.map(|(text, _)| text.clone()).collect();
            ran.sort();
            after.sort();
            assert_eq!(after, ran, "every action is seen once");
            assert_eq!(actions.len(), 2 * ran.len());
        }
    }
    (seen, flat(&mut pipeline))
}

#[test]
fn transparency_observers_see_the_same_values_at_every_k_and_change_none() {
    let (expected, plain) = watched(&Run::plain(), true);
    let expected_layers = expected.layers.lock().unwrap();
    let layers = model(features()).len();
    // Each of 3 micro-batches: forward and backward of each layer and the loss, before and after.
    let in_layers = expected_layers.iter().filter(|((.., pass, _), _)| pass != "Recompute");
    assert_eq!(in_layers.count(), 3 * (layers + 1) * 2 * 2);
    for run in Run::all(layers).iter().step_by(4) {
        let what = format!("{run:?}");
        let (seen, state) = watched(run, true);
        assert_same_bits(&state, &plain, &what);
        let (_, unseen) = watched(run, false);
        assert_same_bits(&unseen, &plain, &what);
        let layers = seen.layers.lock().unwrap();
        for (key, values) in expected_layers.iter() {
            assert!(layers.get(key) == Some(values), "{what}: {key:?}");
        }
        // What is computed again has the values of the first time.
        for ((micro_batch, layer, pass, is_after), values) in layers.iter() {
            if pass == "Recompute" && layer != "loss" {
                let first = (*micro_batch, layer.clone(), "Forward".to_owned(), *is_after);
                assert!(layers.get(&first) == Some(values), "{what}: {layer} again");
            }
        }
        let recomputes = layers.keys().any(|(.., pass, _)| pass == "Recompute");
        assert!(recomputes || run.remat != Remat::Always, "{what}");
        let last = |seen: &Seen| -> BTreeMap<String, Vec<u64>> {
            let all = seen.gradients.lock().unwrap();
            let last = all.iter().filter(|((micro_batch, _), _)| *micro_batch == 2);
            last.map(|((_, name), sum)| (name.clone(), sum.clone())).collect()
        };
        assert!(last(&seen) == last(&expected), "{what}: gradients");
        let steps = seen.steps.lock().unwrap();
        let stages = steps.iter().map(|(stage, ..)| *stage).max().unwrap() + 1;
        assert_eq!(steps.len(), stages * 2 * 2);
    }
}

/// The sums that an observer sees after the last backward are the step's gradients.
#[test]
fn oracle_observed_gradients_are_those_of_the_step() {
    let seen = Arc::new(Seen::default());
    let run = Run { stages: 2, schedule: Schedule::ZbH1, ..Run::plain() };
    let builder = run.builder(model(features()), 3).observer(Watches(Arc::clone(&seen)));
    let mut pipeline = builder.build().unwrap();
    let (inputs, targets) = batch(7, 0);
    pipeline.train_step(&inputs, &targets).unwrap();
    let all = seen.gradients.lock().unwrap();
    let gradients = pipeline.gradients().unwrap();
    assert!(!gradients.is_empty());
    for (name, grad) in gradients {
        assert!(all.get(&(2, name.clone())) == Some(&bits(&grad)), "{name}");
    }
}

/// Observers see evaluations, predictions and the parts of a step, too.
#[test]
fn oracle_observers_see_every_kind_of_run() {
    let seen = Arc::new(Seen::default());
    let run = Run { stages: 2, ..Run::plain() };
    let builder = run.builder(model(features()), 1).observer(Watches(Arc::clone(&seen)));
    let mut pipeline = builder.build().unwrap();
    let (inputs, targets) = batch(4, 0);
    let mut parts = Vec::new();
    let mut take = |seen: &Seen| {
        seen.layers.lock().unwrap().clear();
        let steps = std::mem::take(&mut *seen.steps.lock().unwrap());
        parts.extend(steps.into_iter().filter(|(stage, .., after)| *stage == 0 && *after));
    };
    pipeline.evaluate(&inputs, &targets).unwrap();
    take(&seen);
    pipeline.predict(&inputs).unwrap();
    take(&seen);
    let outputs = pipeline.forward(&inputs).unwrap();
    take(&seen);
    pipeline.backward(&outputs, outputs.tensors()[0].ones_like()).unwrap();
    take(&seen);
    pipeline.update().unwrap();
    take(&seen);
    let parts: Vec<Part> = parts.into_iter().map(|(_, _, part, _)| part).collect();
    let whole = [Part::Inference, Part::Inference, Part::Forward, Part::Backward, Part::Finish];
    assert_eq!(parts, whole);
}

fn small() -> PipelineBuilder {
    let model = Sequence::new()
        .push("first", Linear::new(5, 4))
        .push("tanh", Activation::Tanh)
        .push("last", Linear::new(4, 3));
    Pipeline::builder(model, TensorSpec::new([6, 5], Kind::Float))
        .stages(2)
        .micro_batches(2)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
}

/// Acts on one layer's pass.
struct Acts {
    layer: &'static str,
    pass: Pass,
    after: bool,
    act: fn(&LayerEvent) -> Result<(), LayerError>,
}

impl Observer for Acts {
    fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
        let is_here = (event.layer, event.pass) == (self.layer, self.pass);
        match is_here && self.after == (event.when != When::Before) && event.micro_batch == 1 {
            true => (self.act)(event),
            false => Ok(()),
        }
    }
}

#[test]
fn fault_an_observer_that_fails_panics_or_changes_a_tensor_fails_the_step() {
    type Act = fn(&LayerEvent) -> Result<(), LayerError>;
    let acts: [(Act, &str); 3] = [
        (|_| Err(LayerError::Value("seen enough".into())), "seen enough"),
        (|_| panic!("a panic"), "a panic"),
        (
            |event| {
                let tensor = event.tensors.iter().flatten().next();
                let tensor = tensor.copied().or(event.parameter_gradients.first().map(|own| own.1));
                let _ = tensor.unwrap().shallow_clone().f_add_scalar_(1.0)?;
                Ok(())
            },
            "observers may only look",
        ),
    ];
    let (x, y) = (uniform(&[6, 5], 1, Kind::Float), uniform(&[6, 3], 2, Kind::Float));
    for (act, text) in acts {
        for (layer, pass, after) in [
            ("first", Pass::Forward, false),
            ("last", Pass::Forward, true),
            ("last", Pass::Backward, false),
            ("first", Pass::Backward, true),
        ] {
            let mut pipeline = small()
                .remat(Remat::Never)
                .observer(Acts { layer, pass, after, act })
                .build()
                .unwrap();
            let before = pipeline.parameters().unwrap();
            let error = pipeline.train_step(&x, &y).unwrap_err();
            assert!(matches!(error, Error::Step { .. }), "{error}");
            let error = error.to_string();
            assert!(error.contains(text) && error.contains(layer), "{error} lacks {text}, {layer}");
            assert_same_bits(&pipeline.parameters().unwrap(), &before, "nothing changed");
        }
    }
}

/// An observer may keep what it sees, such as activations for a picture.
#[test]
fn oracle_kept_activations_are_those_of_the_network() {
    struct Keeps(Arc<Mutex<Vec<Tensor>>>);
    impl Observer for Keeps {
        fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
            if event.layer == "tanh" && event.when != When::Before {
                // On a GPU the stage goes on with the tensor: a copy on the CPU is the caller's.
                let copy = event.tensors[0].unwrap().f_to(Device::Cpu)?.f_detach_copy()?;
                self.0.lock().unwrap().push(copy);
            }
            Ok(())
        }
    }
    let kept = Arc::new(Mutex::new(Vec::new()));
    let mut pipeline = small().observer(Keeps(Arc::clone(&kept))).build().unwrap();
    let x = uniform(&[6, 5], 1, Kind::Float);
    pipeline.predict(&x).unwrap();
    let parameters = pipeline.parameters().unwrap();
    let expected = x.linear(&parameters[0].1, Some(&parameters[1].1)).tanh();
    let found = Tensor::cat(&kept.lock().unwrap(), 0);
    let named = |tensor: Tensor| vec![("tanh".to_owned(), tensor)];
    assert_close(&named(found), &named(expected), 1e-6, "activations");
}

/// Fails at the end of one stage's update, when it is too late to change nothing.
struct FailsAfterUpdate;

impl Observer for FailsAfterUpdate {
    fn action(&self, event: &ActionEvent) -> Result<(), LayerError> {
        match event.action.to_string() == "1UPDATE" && event.when != When::Before {
            true => Err(LayerError::Value("too late".into())),
            false => Ok(()),
        }
    }
}

#[test]
fn fault_an_observer_that_fails_after_the_update_tears_it() {
    let mut pipeline = small().observer(FailsAfterUpdate).build().unwrap();
    let (x, y) = (uniform(&[6, 5], 1, Kind::Float), uniform(&[6, 3], 2, Kind::Float));
    let error = pipeline.train_step(&x, &y).unwrap_err().to_string();
    assert!(error.contains("too late") && error.contains("the update was"), "{error}");
    assert!(pipeline.predict(&x).is_err(), "what is there may be of two steps");
    assert!(pipeline.accept_torn_update().unwrap());
    pipeline.predict(&x).unwrap();
}

/// Checks the memory of every event.
struct Weighs(Arc<Mutex<BTreeMap<String, (u64, bool)>>>);

impl Observer for Weighs {
    fn action(&self, event: &ActionEvent) -> Result<(), LayerError> {
        assert!(event.memory.peak >= event.memory.live);
        Ok(())
    }

    fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
        assert!(event.memory.peak >= event.memory.live);
        if matches!(event.pass, Pass::Recompute | Pass::BackwardWeight) {
            assert!(!event.keeps, "{event:?}");
        }
        let is_forward = event.pass == Pass::Forward && event.layer != "loss";
        if is_forward && event.micro_batch == 0 && event.step == 1 {
            let mut all = self.0.lock().unwrap();
            let grown = all.entry(event.layer.to_owned()).or_default();
            *grown = match event.when {
                When::Before => (event.memory.live.0, event.keeps),
                When::After(_) => (event.memory.live.0 - grown.0, event.keeps),
            };
        }
        Ok(())
    }
}

/// Events measure their own peaks, and the step reports its peak all the same.
#[test]
fn oracle_events_tell_the_memory_of_layers() {
    let linear = |at| (format!("linear {at}"), Linear::new(64, 64));
    let network = || (0..4).map(linear).fold(Sequence::new(), |model, (n, l)| model.push(n, l));
    let x = uniform(&[30, 64], 1, Kind::Float);
    for remat in [Remat::Never, Remat::Always] {
        let peaks = |watch: Option<Weighs>| {
            let built = Pipeline::builder(network(), TensorSpec::new([30, 64], Kind::Float))
                .micro_batches(3)
                .remat(remat)
                .loss(MeanSquaredError)
                .optimizer(Sgd::new(0.1));
            let built = watch.into_iter().fold(built, |built, own| built.observer(own));
            let mut pipeline = built.build().unwrap();
            let mut step = || pipeline.train_step(&x, &x).unwrap();
            let reports = [step(), step(), step()];
            reports.map(|own| own.devices.iter().map(|own| own.peak).collect::<Vec<_>>())
        };
        let grown = Arc::new(Mutex::new(BTreeMap::new()));
        let (observed, plain) = (peaks(Some(Weighs(Arc::clone(&grown)))), peaks(None));
        // Where nobody looks, a GPU keeps the loss of each micro-batch, in 8 bytes, until it is
        // read at the end of the step.
        let unread = if common::on_gpus() { 3 * 8 } else { 0 };
        for (observed, plain) in observed.iter().flatten().zip(plain.iter().flatten()) {
            assert!((observed.0..=observed.0 + unread).contains(&plain.0), "{observed} {plain}");
        }
        let grown = grown.lock().unwrap();
        assert_eq!(grown.len(), 4);
        for (layer, (bytes, keeps)) in grown.iter() {
            assert_eq!(*keeps, remat == Remat::Never, "{layer}");
            // An output of 10 samples. The input of a discarding forward is freed as it ends.
            assert!(*bytes <= 4 * 10 * 64, "{layer} {bytes}");
            assert!(!*keeps || *bytes == 4 * 10 * 64, "{layer} {bytes}");
        }
    }
}
