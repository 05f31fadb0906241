//! `fault_build_*`: settings and models that do not fit, found before anything runs.

use std::time::Duration;

use gpipe::{
    Adam, Balance, Bytes, MeanSquaredError, Pipeline, PipelineBuilder, Schedule, Sequence, Sgd,
    TensorSpec,
    layers::{Activation, Dropout, Linear, Mlp, Pop, Stash},
};
use tch::Kind;

use super::{SAMPLES, assert_says, refused, tokens_builder, tokens_model};

fn two_layers() -> PipelineBuilder {
    let model = Sequence::new().push("one", Linear::new(4, 8)).push("two", Linear::new(8, 2));
    Pipeline::builder(model, TensorSpec::new([SAMPLES, 4], Kind::Float))
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
}

#[test]
fn fault_build_stages_micro_batches_and_balance() {
    let build =
        |change: fn(PipelineBuilder) -> PipelineBuilder| refused(change(two_layers()).build());
    assert_says(&build(|b| b.stages(3)), &["3 stages", "the model has 2", "at most 2"]);
    for balance in [Balance::Uniform, Balance::Cost] {
        assert_says(&refused(two_layers().stages(3).balance(balance).build()), &["at most 2"]);
    }
    assert_says(&build(|b| b.stages(0)), &["at least one stage", "use 1 or more"]);
    assert_says(&build(|b| b.micro_batches(0)), &["0 micro-batches", "use 1 to"]);
    assert_says(&build(|b| b.micro_batches(usize::MAX)), &["micro-batches", "use 1 to"]);
    let balance = |layers: &[usize]| {
        refused(two_layers().stages(2).balance(Balance::Layers(layers.into())).build())
    };
    assert_says(&balance(&[2, 1]), &["[2, 1]", "covers 3", "has 2", "take 1"]);
    assert_says(&balance(&[usize::MAX, 3]), &["the model has 2", "take"]);
    assert_says(&balance(&[1]), &["[1]", "1 stages", "has 2", "one number per stage"]);
    assert_says(&balance(&[2, 0]), &["[2, 0]", "stage 1", "at least 1"]);
    let nothing = Pipeline::builder(Sequence::new(), TensorSpec::new([1, 1], Kind::Float));
    assert_says(&refused(nothing.build()), &["an empty network", "at least one layer"]);
}

#[test]
fn fault_build_settings() {
    let build =
        |change: fn(PipelineBuilder) -> PipelineBuilder| refused(change(two_layers()).build());
    assert_says(&build(|b| b.clip_norm(0.0)), &["clip_norm is 0:", "above 0"]);
    assert_says(&build(|b| b.clip_norm(f64::NAN)), &["clip_norm is NaN:", "above 0"]);
    assert_says(&build(|b| b.clip_norm(-1.0)), &["clip_norm is -1:", "above 0"]);
    assert_says(&build(|b| b.average(1.5)), &["average is 1.5:", "less than 1"]);
    assert_says(&build(|b| b.threads_per_stage(0)), &["0 threads", "use 1 to"]);
    assert_says(&build(|b| b.kind(Kind::Int64)), &["Int64", "use Float, Double, BFloat16 or Half"]);
    assert_says(&build(|b| b.timeout(Duration::ZERO)), &["timeout is 0ns", "more than 0"]);
    // Its end is on no clock.
    assert_says(&build(|b| b.timeout(Duration::MAX)), &["timeout is ", "at most 366 days"]);
    assert_says(&build(|b| b.memory_cap([Bytes(1), Bytes(1)])), &["2 memory caps", "1 devices"]);
    assert_says(&build(|b| b.schedule(Schedule::ForwardOnly)), &["forward-only", "1f1b"]);
    let adam = Adam::default();
    for (bad, says) in [
        (Adam { beta1: 1.0, ..adam }, "beta1 = 1"),
        (Adam { beta2: -0.1, ..adam }, "beta2 = -0.1"),
        (Adam { beta2: f64::NAN, ..adam }, "beta2 = NaN"),
        (Adam { lr: f64::NAN, ..adam }, "lr = NaN"),
        (Adam { eps: -1.0, ..adam }, "eps = -1"),
        (Adam { weight_decay: f64::INFINITY, ..adam }, "weight_decay = inf"),
    ] {
        assert_says(&refused(two_layers().optimizer(bad).build()), &["adam", says, ": use "]);
    }
    let sgd = Sgd { momentum: -0.5, ..Sgd::new(0.1) };
    assert_says(&refused(two_layers().optimizer(sgd).build()), &["sgd", "momentum = -0.5"]);
    assert_says(&refused(two_layers().optimizer(Sgd::new(-1.0)).build()), &["sgd", "lr = -1"]);
}

/// Expects that building `model` for inputs [6, 4] fails with the same error at every K. Returns
/// the error.
#[track_caller]
fn unfit(model: &Sequence) -> String {
    let build = |stages| {
        let spec = TensorSpec::new([SAMPLES, 4], Kind::Float);
        let builder = Pipeline::builder(model.clone(), spec).stages(stages);
        refused(builder.balance(Balance::Uniform).build())
    };
    let text = build(1);
    for stages in 2..=model.len() {
        assert_eq!(build(stages), text);
    }
    text
}

#[test]
fn fault_build_models_that_do_not_fit_together() {
    let start = || Sequence::new().push("one", Linear::new(4, 8));
    let text = unfit(&start().push("two", Linear::new(7, 2)));
    assert_says(&text, &["layer 'two' (linear)", "7]", "float32 [6, 8]"]);
    let text = unfit(&start().push("one", Activation::Tanh));
    assert_says(&text, &["layer 'one' (tanh)", "layer 0 has the same name", "its own"]);
    let text = unfit(&start().push("stash", Stash::new("far")));
    assert_says(&text, &["layer 'stash'", "no later layer pops", "'far'", "do not stash it"]);
    let text = unfit(&start().push("pop", Pop::new("far")));
    assert_says(&text, &["layer 'pop'", "no earlier layer stashes", "'far'"]);
    let text = unfit(
        &start()
            .push("stash", Stash::new("far"))
            .push("two", Linear::new(8, 2))
            .push("pop", Pop::new("far")),
    );
    assert_says(&text, &["layer 'pop'", "'far'", "float32 [6, 8]", "float32 [6, 2]", "one shape"]);
    let text = unfit(&start().push("a", Stash::new("far")).push("b", Stash::new("far")));
    assert_says(&text, &["layer 'b'", "stashed twice", "its own name"]);
    assert_says(&unfit(&start().push("drop", Dropout { p: 1.5 })), &["layer 'drop'", "p is 1.5"]);
    let text = unfit(&start().push("empty", Linear::new(8, 0)));
    assert_says(&text, &["layer 'empty'", "sizes start at 1"]);
}

#[test]
fn fault_build_ties_and_dtypes() {
    let text = refused(tokens_builder(tokens_model([7, 9])).build());
    assert_says(&text, &["layer 'head'", "[9, 4]", "'embedding.tokens' [7, 4]", "one shape"]);
    let half_frozen = tokens_model([7, 7]).freeze(["head.weight"]);
    let text = refused(tokens_builder(half_frozen).build());
    assert_says(&text, &["layer 'head'", "embedding.tokens", "trained or frozen together"]);
    let model = tokens_model([7, 7]);
    let text = refused(Pipeline::builder(model, TensorSpec::new([6, 3], Kind::Float)).build());
    assert_says(&text, &["layer 'embedding'", "int64", "float32 [6, 3]"]);
    let model = tokens_model([7, 7]);
    let text = refused(Pipeline::builder(model, TensorSpec::new([6, 5], Kind::Int64)).build());
    assert_says(&text, &["layer 'embedding'", "3 positions", "[6, 5]", "shorter samples"]);
    let text = refused(Pipeline::builder(Sequence::new().layer(Linear::new(4, 8)), vec![]).build());
    assert_says(&text, &["layer '0.linear'", "takes 1 tensor, it got 0"]);
}

#[test]
fn fault_build_floats_of_another_width_are_found_when_it_is_built() {
    for (inputs, parameters) in [(Kind::Float, Kind::Double), (Kind::Double, Kind::Float)] {
        let model = Sequence::new().push("one", Linear::new(4, 8));
        let spec = TensorSpec::new([SAMPLES, 4], inputs);
        let text = refused(Pipeline::builder(model, spec).kind(parameters).build());
        assert_says(&text, &["layer 'one'", "float32", "float64"]);
    }
}

#[test]
fn fault_build_two_parameters_of_one_full_name_are_refused() {
    // 'a' + 'hidden.weight' and 'a.hidden' + 'weight' are both 'a.hidden.weight'.
    let mlp = Mlp {
        features: 4,
        hidden: 4,
        dropout: 0.0,
        std: 0.1,
        output_std: 0.1,
        gelu: Default::default(),
    };
    let text = unfit(&Sequence::new().push("a", mlp).push("a.hidden", Linear::new(4, 4)));
    assert_says(&text, &["a.hidden.weight"]);
}

#[test]
fn fault_build_a_model_larger_than_any_memory() {
    // 2^51 bytes: more than an address can name on x86-64 or aarch64.
    let model =
        Sequence::new().push("one", Linear::new(4, 8)).push("vast", Linear::new(8, 1 << 46));
    for stages in [1, 2] {
        let spec = TensorSpec::new([SAMPLES, 4], Kind::Float);
        let builder = Pipeline::builder(model.clone(), spec).stages(stages);
        let text = refused(builder.balance(Balance::Uniform).build());
        assert_says(&text, &["layer 'vast'", "out of memory", "more stages"]);
    }
}
