//! Family `regression_`: mistakes in user-written layers, losses and optimizers that once went
//! unnoticed. The run learned nothing, changed weights permanently, or crashed the process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{assert_same_bits, own_loss::OwnLoss, uniform};
use gpipe::{
    Adam, Bytes, Forward, Infer, Init, Layer, LayerError, MeanSquaredError, Metric, Optimizer,
    ParameterInfo, ParameterSpec, Pipeline, PipelineBuilder, Sequence, Sgd, StateSpec, TensorSpec,
    Update,
    layers::{Linear, Pop, Stash},
};
use tch::{Kind, Tensor};

const WIDTH: i64 = 6;

type Result<T> = std::result::Result<T, LayerError>;

/// y = x w, computed by a given function.
struct Scale(fn(&mut Forward, &Tensor) -> Result<Tensor>);

impl Layer for Scale {
    fn kind(&self) -> &'static str {
        "scale"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("w", [WIDTH], Init::Ones)]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![(self.0)(ctx, &inputs[0])?])
    }
}

fn honest(ctx: &mut Forward, x: &Tensor) -> Result<Tensor> {
    Ok(x.f_mul(ctx.parameter(0)?)?)
}

fn model(middle: impl Layer, last: impl Layer) -> Sequence {
    Sequence::new()
        .push("first", Linear::new(WIDTH, WIDTH))
        .push("middle", middle)
        .push("last", last)
}

fn built(sequence: Sequence, stages: usize) -> PipelineBuilder {
    Pipeline::builder(sequence, TensorSpec::new([4, WIDTH], Kind::Float))
        .stages(stages)
        .micro_batches(2)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
}

fn data() -> (Tensor, Tensor) {
    (uniform(&[4, WIDTH], 1, Kind::Float), uniform(&[4, WIDTH], 2, Kind::Float))
}

#[track_caller]
fn refused<T>(outcome: std::result::Result<T, gpipe::Error>, words: &[&str]) {
    let Err(error) = outcome else { panic!("it was accepted") };
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

/// One `evaluate` silently halved a weight for good.
#[test]
fn regression_a_parameter_changed_in_place_is_an_error() {
    let halves = |ctx: &mut Forward, x: &Tensor| -> Result<Tensor> {
        let _ = ctx.parameter(0)?.f_detach()?.f_mul_scalar_(0.5)?;
        honest(ctx, x)
    };
    for stages in [1, 3] {
        let build = || built(model(Scale(honest), Scale(halves)), stages).build().unwrap();
        let (x, y) = data();
        let words = ["layer 'last'", "changed its parameter 'w' in place", "restore a checkpoint"];
        refused(build().train_step(&x, &y), &words);
        refused(build().predict(&x), &words);
        let mut pipeline = build();
        refused(pipeline.evaluate(&x, &y), &words);
        // The pipeline is unusable until somebody accepts its state.
        refused(pipeline.parameters(), &["changed parameters in place", "accept_torn_update"]);
        refused(pipeline.train_step(&x, &y), &["changed parameters in place"]);
        assert!(pipeline.accept_torn_update().unwrap());
        let parameters = pipeline.parameters().unwrap();
        let (_, w) = parameters.iter().find(|(name, _)| name == "last.w").unwrap();
        assert!(w.max().double_value(&[]) < 1.0);
        assert!(!pipeline.accept_torn_update().unwrap());
    }
}

fn squares(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    Ok(x.f_sub(y)?.f_square()?.f_sum(Kind::Float)?)
}

/// Every step had a gradient norm of 0.
#[test]
fn regression_a_loss_without_a_gradient_is_an_error() {
    let step = |loss: fn(&Tensor, &Tensor) -> Result<Tensor>, stages| {
        let built = built(model(Scale(honest), Scale(honest)), stages).loss(OwnLoss(loss));
        let (x, y) = data();
        built.build().unwrap().train_step(&x, &y)
    };
    for stages in [1, 3] {
        let words = ["layer 'loss'", "its sum has no gradient"];
        refused(step(|x, y| Ok(squares(x, y)?.f_detach()?), stages), &words);
        refused(step(|x, y| Ok(Tensor::from(squares(x, y)?.f_double_value(&[])?)), stages), &words);
        assert!(step(squares, stages).unwrap().grad_norm > 0.0);
        // A mini-batch in which nothing counts cannot teach anything.
        assert_eq!(step(|_, _| Ok(Tensor::from(0.0)), stages).unwrap().grad_norm, 0.0);
    }
}

#[test]
fn regression_a_loss_or_metric_that_changes_what_it_is_given_is_an_error() {
    struct Rounds;
    impl Metric for Rounds {
        fn name(&self) -> &str {
            "rounds"
        }
        fn sum(&self, outputs: &[Tensor], _: &[Tensor]) -> Result<f64> {
            Ok(outputs[0].shallow_clone().f_round_()?.f_sum(Kind::Float)?.f_double_value(&[])?)
        }
        fn count(&self, _: &[Tensor]) -> Result<f64> {
            Ok(1.0)
        }
    }
    let (x, y) = data();
    let sequence = || model(Scale(honest), Scale(honest));
    let shifts = OwnLoss(|x, y| squares(x, &y.shallow_clone().f_add_scalar_(1.0)?));
    let mut pipeline = built(sequence(), 2).loss(shifts).build().unwrap();
    refused(pipeline.train_step(&x, &y), &["layer 'loss'", "outputs, targets or inputs in place"]);
    let mut pipeline = built(sequence(), 2).metric(Rounds).build().unwrap();
    refused(pipeline.evaluate(&x, data().1), &["'rounds'", "outputs, targets or inputs in place"]);
}

/// Layers before one that detaches its output were never trained.
#[test]
fn regression_a_layer_that_detaches_its_output_is_an_error() {
    let detaches = |ctx: &mut Forward, x: &Tensor| Ok(honest(ctx, x)?.f_detach()?);
    let (x, y) = data();
    for stages in [1, 3] {
        let last = built(model(Scale(honest), Scale(detaches)), stages);
        let words = ["layer 'last'", "no output of its forward has a gradient"];
        refused(last.build().unwrap().train_step(&x, &y), &words);
        let middle = || model(Scale(detaches), Scale(honest));
        let words = ["layer 'middle'", "freeze the parameters up to here"];
        refused(built(middle(), stages).build().unwrap().train_step(&x, &y), &words);
        // Frozen layers may detach.
        let frozen = middle().freeze(["first.*", "middle.w"]);
        let report = built(frozen, stages).build().unwrap().train_step(&x, &y).unwrap();
        assert!(report.grad_norm > 0.0);
        assert!(built(middle(), stages).build().unwrap().evaluate(&x, &y).is_ok());
    }
}

#[test]
fn regression_a_freeze_that_matches_nothing_names_its_pattern() {
    let sequence = || model(Scale(honest), Scale(honest));
    let wrong = sequence().freeze(["first.*", "midle.*"]);
    refused(built(wrong, 1).build(), &["'midle.*'", "first.weight"]);
    refused(built(sequence().freeze_except(["lats.w"]), 1).build(), &["'lats.w'"]);
    let mut pipeline = built(sequence().freeze_except(["last.w"]), 2).keep_gradients();
    pipeline = pipeline.clip_norm(1.0);
    let mut pipeline = pipeline.build().unwrap();
    let (x, y) = data();
    pipeline.train_step(&x, &y).unwrap();
    let names: Vec<String> = pipeline.gradients().unwrap().into_iter().map(|(n, _)| n).collect();
    assert_eq!(names, ["last.w"]);
}

/// `Adam::apply` with a state of another shape wrote out of bounds, and the process crashed.
#[test]
fn regression_an_optimizer_state_of_another_shape_is_an_error() {
    #[derive(Debug)]
    struct Short;
    impl Optimizer for Short {
        fn name(&self) -> &'static str {
            "short"
        }
        fn state(&self, own: &ParameterInfo) -> Vec<StateSpec> {
            ["exp_avg", "exp_avg_sq"].map(|name| StateSpec::zeros(name, &own.shape[..1])).into()
        }
        fn temporaries(&self) -> usize {
            0
        }
        fn lr(&self) -> f64 {
            0.1
        }
        fn apply(&self, update: &Update) -> Result<()> {
            Adam::default().apply(update)
        }
    }
    let sequence = Sequence::new().push("wide", Linear::new(WIDTH, WIDTH));
    let mut pipeline = built(sequence, 1).optimizer(Short).build().unwrap();
    let (x, y) = data();
    let words = ["exp_avg of parameter 0 is Float [6] on ", "[6, 6]"];
    refused(pipeline.train_step(&x, &y), &words);
}

/// An optimizer failed on one stage, the message claimed that this stage had applied the update,
/// and the pipeline could not be read any more.
#[test]
fn regression_a_torn_update_says_who_applied_it_and_can_be_accepted() {
    #[derive(Debug)]
    struct Refuses;
    impl Optimizer for Refuses {
        fn name(&self) -> &'static str {
            "refuses"
        }
        fn state(&self, _: &ParameterInfo) -> Vec<StateSpec> {
            vec![]
        }
        fn temporaries(&self) -> usize {
            0
        }
        fn lr(&self) -> f64 {
            0.1
        }
        fn apply(&self, update: &Update) -> Result<()> {
            match update.parameters[0].size()[..] {
                [WIDTH] => Err(LayerError::Value("it does not like vectors".into())),
                _ => Sgd::new(0.1).apply(update),
            }
        }
    }
    // The first stage has only a matrix, the second a vector.
    let sequence = || {
        let first = Linear { bias: false, ..Linear::new(WIDTH, WIDTH) };
        Sequence::new().push("matrix", first).push("vector", Scale(honest))
    };
    let (x, y) = data();
    let mut plain = built(sequence(), 2).build().unwrap();
    let before = plain.parameters().unwrap();
    plain.train_step(&x, &y).unwrap();
    let after = plain.parameters().unwrap();
    for _ in 0..20 {
        let mut pipeline = built(sequence(), 2).optimizer(Refuses).build().unwrap();
        let text = pipeline.train_step(&x, &y).unwrap_err().to_string();
        assert!(text.contains("it does not like vectors"), "{text}");
        assert!(text.contains("begun by stage 1 and not finished there"), "{text}");
        refused(pipeline.parameters(), &["accept_torn_update"]);
        refused(pipeline.train_step(&x, &y), &["accept_torn_update"]);
        assert!(pipeline.accept_torn_update().unwrap());
        // Stage 0 may or may not have applied the update before it learned of the failure. The
        // message must say what happened.
        let applied = text.contains("applied by stage 0");
        let found = pipeline.parameters().unwrap();
        let expected = vec![if applied { &after[0] } else { &before[0] }, &before[1]];
        let expected =
            expected.into_iter().map(|(name, own)| (name.clone(), own.shallow_clone())).collect();
        assert_same_bits(&found, &expected, &text);
        assert!(pipeline.evaluate(&x, &y).is_ok());
        assert_eq!(pipeline.steps(), 0);
    }
}

/// A declared pop that no forward made silently cut the skip's gradient.
#[test]
fn regression_a_pop_that_is_not_taken_is_an_error() {
    struct Forgets;
    impl Layer for Forgets {
        fn kind(&self) -> &'static str {
            "forgets"
        }
        fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>> {
            ctx.pop("skip")?;
            Ok(inputs.to_vec())
        }
        fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
            Ok(vec![inputs[0].shallow_clone()])
        }
    }
    let (x, y) = data();
    let sequence = |forgets: bool| {
        let start = Sequence::new()
            .push("first", Linear::new(WIDTH, WIDTH))
            .push("stash", Stash::new("skip"))
            .push("second", Linear::new(WIDTH, WIDTH));
        if forgets { start.push("pop", Forgets) } else { start.push("pop", Pop::new("skip")) }
    };
    for stages in [1, 4] {
        let words = ["layer 'pop'", "pops a skip 'skip'", "does not take it"];
        refused(built(sequence(true), stages).build().unwrap().train_step(&x, &y), &words);
        assert!(built(sequence(false), stages).build().unwrap().train_step(&x, &y).is_ok());
    }
}

/// A second input was silently dropped if the first layer did not use it.
#[test]
fn regression_another_number_of_inputs_is_an_error() {
    let (x, y) = data();
    let mut pipeline = built(model(Scale(honest), Scale(honest)), 2).build().unwrap();
    let words = ["2 input tensors, the pipeline was built for 1"];
    let two = || vec![x.shallow_clone(), x.shallow_clone()];
    refused(pipeline.train_step(two(), &y), &words);
    refused(pipeline.evaluate(two(), &y), &words);
    refused(pipeline.predict(two()), &words);
    assert!(pipeline.train_step(&x, &y).is_ok());
}

/// Profiling gave up where smaller micro-batches would have fitted.
#[test]
fn regression_out_of_memory_while_stages_are_built_is_told_as_that() {
    let builder = built(model(Scale(honest), Scale(honest)), 1).memory_cap([Bytes(64)]);
    let Err(error) = builder.build() else { panic!("its parameters exceed the cap") };
    assert!(error.is_out_of_memory(), "{error}");
}

/// A panic in `infer` ended the program, and named no layer.
#[test]
fn regression_a_panic_in_infer_names_its_layer() {
    struct Panics;
    impl Layer for Panics {
        fn kind(&self) -> &'static str {
            "panics"
        }
        fn infer(&self, _: &mut Infer, _: &[TensorSpec]) -> Result<Vec<TensorSpec>> {
            panic!("no shape")
        }
        fn forward(&self, _: &mut Forward, _: &[Tensor]) -> Result<Vec<Tensor>> {
            unreachable!("it is not built")
        }
    }
    refused(built(model(Panics, Scale(honest)), 1).build(), &["'middle'", "no shape"]);
}

/// A probability of 1.5 zeroed everything, one of -0.5 did nothing, and neither was told.
#[test]
fn regression_a_probability_of_dropout_is_from_0_to_1() {
    for p in ["-0.5", "1.5", "NaN"] {
        let drops: [fn(&mut Forward, &Tensor) -> Result<Tensor>; 3] = [
            |ctx, x| ctx.dropout(x, -0.5),
            |ctx, x| ctx.dropout(x, 1.5),
            |ctx, x| ctx.dropout(x, f64::NAN),
        ];
        let index = ["-0.5", "1.5", "NaN"].iter().position(|own| *own == p).unwrap();
        let mut pipeline = built(model(Scale(drops[index]), Scale(honest)), 1).build().unwrap();
        let (x, y) = data();
        refused(pipeline.train_step(&x, &y), &["'middle'", &format!("probability of {p}")]);
    }
}

/// `main` prints the error with `Debug`, which was the enum's: the remedy was not there. A panic of
/// tch brought libtorch's fifty callers along.
#[test]
fn regression_an_error_is_printed_in_words_and_without_libtorchs_callers() {
    let panics = |_: &mut Forward, x: &Tensor| -> Result<Tensor> {
        Ok(x * Tensor::ones([31], (Kind::Float, tch::Device::Cpu)))
    };
    let mut pipeline = built(model(Scale(panics), Scale(honest)), 1).build().unwrap();
    let (x, y) = data();
    let error = pipeline.train_step(&x, &y).unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
    let text = error.to_string();
    assert!(text.contains("panicked") && text.contains("size of tensor a"), "{text}");
    assert!(!text.contains("frame #"), "{text}");
}
