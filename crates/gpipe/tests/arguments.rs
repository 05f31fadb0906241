//! Inputs and targets by name, and `None` in the place of a tensor.
//!
//! - `transparency_`: equal at every K
//! - `oracle_`: against the same network by autograd
//! - `fault_`: names that do not fit
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{
    Named, Run, assert_close, assert_same_bits,
    gated::{Call, Gated, LAYERS, SAMPLES, WIDTH, builder},
    uniform,
};
use gpipe::{
    Adam, Count, Error, Forward, Infer, Layer, LayerError, Pipeline, PipelineBuilder, Sequence,
    TensorSpec, Tensors,
    decode::GroupStep,
    layers::Linear,
    profile::{Profiling, profile},
};
use tch::{Kind, Tensor};

/// Trains on calls that have other tensors each.
fn trained(run: &Run, kind: Kind) -> (Vec<u64>, Named) {
    let mut pipeline = builder(run, kind).build().unwrap();
    let (mut numbers, mut all) = (Vec::new(), Named::new());
    for form in [0, 31, 5, 10, 23] {
        let call = Call::new(form, Kind::Float);
        let report = pipeline.train_step(call.inputs(), call.targets()).unwrap();
        numbers.extend([report.loss.to_bits(), report.grad_norm.to_bits()]);
        let evaluated = pipeline.evaluate(call.inputs(), call.targets()).unwrap();
        numbers.push(evaluated.loss.to_bits());
        let grads = pipeline.gradients().unwrap().into_iter();
        all.extend(grads.map(|(name, grad)| (format!("{form} {name}"), grad)));
        all.push(("outputs".into(), pipeline.predict(call.inputs()).unwrap().remove(0)));
    }
    all.extend(pipeline.parameters().unwrap());
    (numbers, all)
}

#[test]
fn transparency_of_named_and_none_values() {
    for (kind, every) in [(Kind::Float, 1), (Kind::BFloat16, 7)] {
        let expected = trained(&Run::plain(), kind);
        for run in Run::all(LAYERS).into_iter().step_by(every) {
            let found = trained(&run, kind);
            assert_eq!(found.0, expected.0, "{run:?} {kind:?}");
            assert_same_bits(&found.1, &expected.1, &format!("{run:?} {kind:?}"));
        }
    }
}

/// In parts, a recomputation in the backward needs the named inputs again.
#[test]
fn oracle_named_and_none_values_against_autograd() {
    let kind = Kind::Double;
    for (form, run) in (0..32).zip(Run::all(LAYERS).into_iter().step_by(3).cycle()) {
        let what = format!("form {form:05b}, {run:?}");
        let call = Call::new(form, kind);
        let mut pipeline = builder(&run, kind).build().unwrap();
        let values = pipeline.parameters().unwrap();
        let leaves: Vec<Tensor> =
            values.iter().map(|(_, value)| value.copy().set_requires_grad(true)).collect();
        let plain = Call {
            x: call.x.copy().set_requires_grad(true),
            other: call.other.as_ref().map(|own| own.copy().set_requires_grad(true)),
            ..Call::new(form, kind)
        };
        let wanted = plain.outputs(&leaves);
        let loss = plain.loss(&wanted);
        loss.backward();
        let named = |grads: Vec<Tensor>| -> Named {
            values.iter().map(|(name, _)| name.clone()).zip(grads).collect()
        };
        let wanted_grads = named(leaves.iter().map(Tensor::grad).collect());

        let counts = pipeline.counts_of(call.inputs(), call.targets()).unwrap();
        let count = Count::Totals(counts);
        let found = pipeline.accumulate(call.inputs(), call.targets(), count).unwrap();
        assert!((found.loss - loss.double_value(&[])).abs() < 1e-12, "{what}");
        let found = pipeline.accumulated_gradients().unwrap();
        assert_close(&found, &wanted_grads, 1e-12, &what);
        pipeline.discard_update().unwrap();

        let outputs = pipeline.forward(call.inputs()).unwrap();
        call.loss(&outputs.tensors()[0]).backward();
        let back = pipeline.backward(&outputs, outputs.gradients()).unwrap();
        assert_close(&pipeline.accumulated_gradients().unwrap(), &wanted_grads, 1e-12, &what);
        let grad = |leaf: &Tensor| vec![("input".to_owned(), leaf.grad())];
        let own = |found: &Option<Tensor>| {
            vec![("input".to_owned(), found.as_ref().unwrap().shallow_clone())]
        };
        assert_close(&own(&back[0]), &grad(&plain.x), 1e-12, &what);
        match &plain.other {
            Some(other) => assert_close(&own(&back[1]), &grad(other), 1e-12, &what),
            None => assert!(back[1].is_none(), "{what}"),
        }
        assert_eq!(back.len(), 2);
    }
}

/// Finite differences leave `None` alone.
#[test]
fn oracle_finite_differences_of_named_and_none_values() {
    let call = Call::new(22, Kind::Double);
    let mut pipeline = builder(&Run::plain(), Kind::Double).build().unwrap();
    let all = pipeline.finite_differences(call.inputs(), call.targets(), 4).unwrap();
    assert!(all.iter().any(|own| own.name == "input 0"));
    for own in all {
        assert!(own.error() < 1e-9, "{own:?}");
    }
}

/// Gives x and `None`.
struct Half;

impl Layer for Half {
    fn kind(&self) -> &'static str {
        "half"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(vec![inputs[0].clone(), TensorSpec::none()])
    }

    fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![inputs[0].f_mul_scalar(0.5)?, Tensor::new()])
    }
}

#[test]
fn oracle_outputs_may_be_none() {
    let x = uniform(&[SAMPLES, WIDTH], 1, Kind::Float);
    for stages in [1, 2] {
        let model = Sequence::new().layer(Linear::new(WIDTH, WIDTH)).layer(Half);
        let inputs = TensorSpec::new([SAMPLES, WIDTH], Kind::Float);
        let built = Pipeline::builder(model, inputs).stages(stages).micro_batches(2);
        let mut pipeline = built.optimizer(Adam::default()).build().unwrap();
        let found = pipeline.predict(&x).unwrap();
        assert!(found[0].defined() && !found[1].defined());
        let outputs = pipeline.forward(&x).unwrap();
        assert!(!outputs.tensors()[1].defined());
        let grads = vec![Some(found[0].ones_like()), Some(found[0].ones_like())];
        let error = pipeline.backward(&outputs, grads).unwrap_err().to_string();
        assert!(error.contains("output 1 is None"), "{error}");
        pipeline.backward(&outputs, vec![Some(found[0].ones_like()), None]).unwrap();
    }
}

#[test]
fn fault_names_that_do_not_fit_are_told() {
    let kind = Kind::Float;
    let built = |change: &dyn Fn(PipelineBuilder) -> PipelineBuilder| {
        change(builder(&Run::plain(), kind)).build().err().unwrap().to_string()
    };
    let spec = || TensorSpec::new([SAMPLES], kind);
    let found = built(&|own| own.named_input("mask", spec()));
    assert!(found.contains("two inputs are named 'mask'"), "{found}");
    let found = built(&|own| own.shared_named_target("weights"));
    assert!(found.contains("two targets are named 'weights'"), "{found}");
    let found = built(&|own| own.named_input("step", TensorSpec::new([], kind)));
    assert!(found.contains("input 'step' is a scalar"), "{found}");
    assert!(found.contains("shared_named_input"), "{found}");
    // A loss that takes inputs may ask for any, so only the first call shows what none asks for.
    let (call, other) = (Call::new(31, kind), TensorSpec::new([SAMPLES], kind));
    let told = |built: PipelineBuilder, inputs: Tensors, targets: Tensors| {
        built.build().unwrap().train_step(inputs, targets).unwrap_err().to_string()
    };
    let weights = || call.x.select(1, 0);
    let own = builder(&Run::plain(), kind).named_target("wieghts");
    let found = told(own, call.inputs(), call.targets().named("wieghts", weights()));
    assert!(found.contains("nothing asks for the target 'wieghts'"), "{found}");
    let own = builder(&Run::plain(), kind).named_input("masc", other);
    let found = told(own, call.inputs().named("masc", weights()), call.targets());
    assert!(found.contains("nothing asks for the input 'masc'"), "{found}");
    let model = Sequence::new().layer(Linear::new(WIDTH, WIDTH));
    let plain = Pipeline::builder(model, TensorSpec::new([SAMPLES, WIDTH], kind));
    let found = plain.clone().named_input("masc", spec()).build().err().unwrap().to_string();
    assert!(found.contains("no layer asks for the input 'masc'"), "{found}");

    let mut pipeline = builder(&Run::plain(), kind).build().unwrap();
    let mut refused = |inputs: Tensors, targets: Tensors| {
        let error = pipeline.train_step(inputs, targets).unwrap_err();
        assert!(matches!(error, Error::Input(_)), "{error}");
        error.to_string()
    };
    let found = refused(Tensors::new(&call.x), call.targets());
    assert!(found.contains("input 'mask' is missing"), "{found}");
    let found = refused(call.inputs(), Tensors::new(&call.x));
    assert!(found.contains("target 'weights' is missing"), "{found}");
    let found = refused(call.inputs().named("mask", None), call.targets());
    assert!(found.contains("input 'mask' is given twice"), "{found}");
    let found = refused(call.inputs().named("masc", None), call.targets());
    assert!(found.contains("there is no input 'masc'"), "{found}");
    assert!(found.contains("[\"mask\", \"scale\"]"), "{found}");
    let short = Tensors::new(vec![None]).named("weights", call.x.narrow(0, 0, 3));
    let found = refused(call.inputs(), short);
    assert!(found.contains("target 'weights' is [3, 4]"), "{found}");
    let none = Tensors::new(vec![None, None]).named("mask", None).named("scale", None);
    let found = refused(none, Tensors::new(vec![None]).named("weights", None));
    assert!(found.contains("no samples"), "{found}");

    let outputs = pipeline.forward(call.inputs()).unwrap();
    let named = Tensors::new(&outputs.tensors()[0]).named("y", call.x.shallow_clone());
    let found = pipeline.backward(&outputs, named).unwrap_err().to_string();
    assert!(found.contains("a gradient is named 'y'"), "{found}");
    drop(outputs);
    let step = GroupStep { group: 0, inputs: vec![call.x.shallow_clone()], rows: None };
    let found = pipeline.decoding().step(vec![step]).unwrap_err().to_string();
    assert!(found.contains("a decoding takes none by name"), "{found}");
    // All of this has changed nothing.
    pipeline.train_step(call.inputs(), call.targets()).unwrap();
}

/// An operation that a layer applies to a `None` by mistake is an error that names the layer.
#[test]
fn fault_a_layer_that_takes_no_none_is_named() {
    let model = Sequence::new().layer(Half).layer(Gated { index: 1 }).push("last", Takes);
    let inputs = TensorSpec::new([SAMPLES, WIDTH], Kind::Float);
    let mut pipeline = Pipeline::builder(model, inputs).build().unwrap();
    let found = pipeline.predict(uniform(&[SAMPLES, WIDTH], 1, Kind::Float)).unwrap_err();
    assert!(found.to_string().contains("last"), "{found}");
}

/// Adds its two inputs, as if neither could be `None`.
struct Takes;

impl Layer for Takes {
    fn kind(&self) -> &'static str {
        "takes"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(vec![inputs[0].clone()])
    }

    fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![inputs[0].f_add(&inputs[1])?])
    }
}

/// Costs of a network with named, shared and absent inputs are estimated and measured.
#[test]
fn fault_costs_of_named_and_none_values_are_known() {
    let run = Run::plain();
    let build = || builder(&run, Kind::Float);
    let costs = build().estimate(&[2], &gpipe::estimate::Rate::default()).unwrap();
    assert_eq!(costs.sizes[&2].len(), LAYERS + 1);
    let call = Call::new(31, Kind::Float);
    let settings = Profiling {
        micro_batches: &[2],
        schedules: &[],
        steps: 1,
        passes: 1,
        batches: &[(call.inputs(), call.targets())],
        machine: "this one",
        values: &[],
    };
    let profile = profile(&settings, || Ok(build()), |_| {}, |_| Ok(None)).unwrap();
    assert_eq!(profile.costs.sizes.keys().copied().collect::<Vec<_>>(), [4]);
}
