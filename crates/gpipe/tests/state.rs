//! The state between two steps: what is refused, and what starts afresh. `transparency.rs` shows
//! that the state is complete: in every run of its matrix it resumes from the state in another
//! pipeline.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{Features, Run, assert_same_bits, batch, flat, model, restore};
use gpipe::{
    Adam, Error, LayerError, Optimizer, ParameterInfo, Pipeline, PipelineBuilder, Sgd, StateSpec,
    Update,
    state::{LayerState, State},
};
use tch::Tensor;

fn builder() -> PipelineBuilder {
    let features = Features { tied: true, ..Features::plain() };
    Run { stages: 2, ..Run::plain() }.builder(model(features), 3)
}

fn trained() -> Pipeline {
    let mut pipeline = builder().build().unwrap();
    step(&mut pipeline);
    pipeline
}

fn step(pipeline: &mut Pipeline) {
    let (inputs, targets) = batch(5, pipeline.steps());
    pipeline.train_step(&inputs, &targets).unwrap();
}

fn put(pipeline: &mut Pipeline, state: State) -> Result<(), Error> {
    let counters = state.counters;
    pipeline.restore(&counters, state.into_layers())
}

/// Expects that a changed state is refused with a message that contains `parts`. Returns whether
/// the pipeline is unchanged.
fn refuses(into: &mut Pipeline, change: impl FnOnce(&mut Vec<LayerState>), parts: &[&str]) -> bool {
    let mut state = trained().state().unwrap();
    let mut layers: Vec<LayerState> = state.stages.drain(..).flatten().collect();
    change(&mut layers);
    state.stages = vec![layers];
    let before = flat(into);
    let error = put(into, state).unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "'{part}' is not in: {error}");
    }
    match into.parameters() {
        Ok(_) => {
            assert_same_bits(&before, &flat(into), "a refused state changes nothing");
            true
        }
        Err(error) => {
            assert!(error.to_string().contains("restoring a state failed half-way"), "{error}");
            false
        }
    }
}

#[test]
fn fault_a_state_that_does_not_fit_is_refused() {
    let fresh = || builder().build().unwrap();
    let first = |layers: &mut Vec<LayerState>, value: Tensor| layers[0].parameters[0].value = value;
    let longer = Tensor::zeros([1, 2], common::cpu(tch::Kind::Float));
    assert!(refuses(&mut fresh(), |layers| first(layers, longer), &["embedding.", "[1, 2]"]));
    assert!(refuses(
        &mut fresh(),
        |layers| {
            let wide = layers[0].parameters[0].value.to_kind(tch::Kind::Double);
            first(layers, wide);
        },
        &["embedding.", "float32", "float64"]
    ));
    assert!(refuses(
        &mut fresh(),
        |layers| layers[0].layer = "other".into(),
        &["no layer 'other'"]
    ));
    assert!(refuses(
        &mut fresh(),
        |layers| {
            layers[0].parameters.pop();
        },
        &["layer 'embedding' has parameters"]
    ));
    let mut sgd = builder().optimizer(Sgd { momentum: 0.9, ..Sgd::new(0.1) }).build().unwrap();
    assert!(refuses(&mut sgd, |_| {}, &["the optimizer keeps", "exp_avg"]));
    let mut other_seed = builder().seed(12).build().unwrap();
    assert!(refuses(&mut other_seed, |_| {}, &["seed 11", "12"]));
    // If some layers were already restored, the pipeline declares itself unusable.
    let usable = refuses(
        &mut fresh(),
        |layers| {
            layers.pop();
        },
        &["it has no layer 'head'"],
    );
    assert!(!usable);
    let mut torn = fresh();
    let twice = |layers: &mut Vec<LayerState>| layers[1].layer = layers[0].layer.clone();
    assert!(!refuses(&mut torn, twice, &["no layer 'embedding', or it came twice"]));
    let (inputs, targets) = batch(5, 0);
    assert!(torn.train_step(&inputs, &targets).is_err() && torn.state().is_err());
    assert!(torn.evaluate(&inputs, &targets).is_err());
}

#[test]
fn oracle_what_the_state_has_none_of_starts_anew_and_what_is_not_wanted_is_passed_over() {
    // Averages and an optimizer that only the state has, and the other way round.
    let mut plain = trained();
    let mut averaged = builder().average(0.5).build().unwrap();
    restore(&mut averaged, plain.state().unwrap());
    step(&mut averaged);
    step(&mut plain);
    assert_same_bits(&averaged.parameters().unwrap(), &plain.parameters().unwrap(), "averages");
    let state = averaged.state().unwrap();
    assert_eq!(state.counters.averaged, 1, "they begin with the next update");
    let mut without = builder().build().unwrap();
    restore(&mut without, state);
    assert_same_bits(&flat(&mut without), &flat(&mut plain), "no averages");
    assert!(without.averages().is_err());
}

#[test]
fn oracle_a_learning_rate_that_was_set_is_part_of_the_state() {
    let mut pipeline = trained();
    pipeline.set_learning_rate(0.125);
    let state = pipeline.state().unwrap();
    let mut other = builder().build().unwrap();
    restore(&mut other, state);
    assert_eq!(other.learning_rate(), 0.125);
    // A learning rate that was never set comes from the new optimizer.
    let state = trained().state().unwrap();
    let mut other = builder().optimizer(Adam { lr: 0.5, ..Adam::default() }).build().unwrap();
    restore(&mut other, state);
    assert_eq!(other.learning_rate(), 0.5);
}

#[test]
fn fault_a_state_cannot_be_taken_while_the_averages_are_in_use() {
    let mut pipeline = builder().average(0.5).build().unwrap();
    let error = pipeline.with_averages(|averaged| averaged.state().map(|_| ())).unwrap_err();
    assert!(error.to_string().contains("outside of with_averages"), "{error}");
    step(&mut pipeline);
}

/// Adam, but the update of one weight fails after others were updated.
#[derive(Debug)]
struct Failing(Adam);

impl Optimizer for Failing {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        self.0.state(parameter)
    }

    fn temporaries(&self) -> usize {
        0
    }
    fn lr(&self) -> f64 {
        self.0.lr()
    }

    fn weight_decay(&self) -> f64 {
        self.0.weight_decay()
    }

    fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        if update.update == 2 && update.parameters.iter().any(|own| own.size() == [32]) {
            return Err(LayerError::Value("injected failure of an update".into()));
        }
        self.0.apply(update)
    }
}

#[test]
fn regression_what_a_torn_update_left_is_no_state() {
    // This state was saved as a complete checkpoint, although its step number fitted no parameter.
    let mut pipeline = builder().optimizer(Failing(Adam::default())).build().unwrap();
    step(&mut pipeline);
    let (inputs, targets) = batch(5, 1);
    let error = pipeline.train_step(&inputs, &targets).unwrap_err().to_string();
    assert!(error.contains("the update was "), "{error}");
    let error = pipeline.state().unwrap_err().to_string();
    assert!(error.contains("the update was "), "{error}");
    assert!(pipeline.parameters().is_err());
}

/// Plain SGD took a state with Adam's moments, and the moments were gone.
#[test]
fn regression_the_state_of_an_optimizer_is_not_dropped_by_one_that_keeps_none() {
    let mut into = builder().optimizer(Sgd::new(0.1)).build().unwrap();
    let own = |_: &mut Vec<LayerState>| {};
    assert!(refuses(&mut into, own, &["values of an optimizer", "the optimizer that it was"]));
}
