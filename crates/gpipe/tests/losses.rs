//! Losses that need more than outputs and targets, and several losses with weights.
//!
//! - `transparency_`: equal at every K, and saved and restored like all other state
//! - `oracle_`: against the same losses by autograd
//! - `fault_`: what does not fit
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{
    Named, Run, assert_close, assert_same_bits, flat, own_loss::OwnLoss, restore, uniform,
};
use gpipe::{
    Adam, Balance, Count, CrossEntropy, Forward, Group, Infer, Init, Layer, LayerError, Loss,
    LossContext, LossOf, MeanSquaredError, ParameterSpec, Pipeline, PipelineBuilder, Sequence,
    TensorSpec,
    layers::{Linear, Stash},
};
use tch::{Kind, Tensor};

const WIDTH: i64 = 5;
const SAMPLES: i64 = 7;

/// y = tanh(x W^T + b)
struct Dense;

impl Layer for Dense {
    fn kind(&self) -> &'static str {
        "dense"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Linear::new(WIDTH, WIDTH).parameters()
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let y = ctx.linear(&inputs[0], ctx.parameter(0)?, Some(ctx.parameter(1)?))?;
        Ok(vec![y.f_tanh()?])
    }
}

/// (output - target)^2 e^-s + s, with a learned s for each feature, where the target of a sample is
/// scaled by the mean of its input. Counts elements.
struct Uncertain;

/// The squared distance between a skip and the output. Counts samples.
struct NearSkip;

impl Loss for Uncertain {
    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("s", [WIDTH], Init::Normal { std: 0.3 })]
    }

    fn takes_inputs(&self) -> bool {
        true
    }

    fn check(
        &self,
        ctx: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        targets: &[TensorSpec],
    ) -> Result<(), LayerError> {
        assert_eq!(ctx.parameter(0)?.shape, [WIDTH]);
        match outputs == targets && ctx.input(0)?.shape == outputs[0].shape {
            true => Ok(()),
            false => Err(LayerError::Shape("outputs and targets differ".into())),
        }
    }

    fn sum(
        &self,
        ctx: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        let s = ctx.parameter(0)?;
        let scale = ctx.input(0)?.f_mean_dim(-1, true, None)?;
        let square = outputs[0].f_sub(&targets[0].f_mul(&scale)?)?.f_square()?;
        Ok(square.f_mul(&s.f_neg()?.f_exp()?)?.f_add(s)?.f_sum(outputs[0].kind())?)
    }

    fn count(&self, ctx: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        assert_eq!(ctx.input(0)?.size()[0], targets[0].size()[0], "the whole mini-batch");
        Ok(targets[0].numel() as f64)
    }
}

impl Loss for NearSkip {
    fn pops(&self) -> Vec<String> {
        vec!["early".into()]
    }

    fn check(
        &self,
        ctx: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        _: &[TensorSpec],
    ) -> Result<(), LayerError> {
        match *ctx.skip("early")? == outputs[0] {
            true => Ok(()),
            false => Err(LayerError::Shape("the skip has another shape".into())),
        }
    }

    fn sum(
        &self,
        ctx: &LossContext<'_>,
        outputs: &[Tensor],
        _: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        Ok(outputs[0].f_sub(ctx.skip("early")?)?.f_square()?.f_sum(outputs[0].kind())?)
    }

    fn count(&self, _: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        Ok(targets[0].size()[0] as f64)
    }
}

fn network() -> Sequence {
    Sequence::new()
        .push("a", Dense)
        .push("stash", Stash::new("early"))
        .push("b", Dense)
        .push("c", Dense)
        .push("d", Dense)
}

/// Layers with the one that holds the losses' parameters.
const LAYERS: usize = 6;

fn with_losses(builder: PipelineBuilder) -> PipelineBuilder {
    builder
        .loss(Uncertain)
        .named_loss("near", 0.25, NearSkip)
        .named_loss("shown", 0.0, MeanSquaredError)
        .optimizer(Adam { lr: 1e-2, ..Adam::default() })
        .clip_norm(0.5)
        .average(0.9)
        .input_gradients()
        .keep_gradients()
}

fn pipeline(run: &Run, micro_batches: usize, kind: Kind) -> Pipeline {
    let inputs = TensorSpec::new([SAMPLES, WIDTH], kind);
    let builder = Pipeline::builder(network(), inputs)
        .stages(run.stages)
        .schedule(run.schedule.clone())
        .remat(run.remat)
        .balance(run.balance.clone())
        .micro_batches(micro_batches)
        .kind(kind);
    with_losses(builder).build().unwrap()
}

fn data(seed: u64, kind: Kind) -> (Tensor, Tensor) {
    let kind = if kind == Kind::Double { kind } else { Kind::Float };
    (uniform(&[SAMPLES, WIDTH], seed, kind), uniform(&[SAMPLES, WIDTH], 100 + seed, kind))
}

/// Losses by name, as bits; gradients of each step; the state at the end.
fn trained(run: &Run, then: Option<&Run>, kind: Kind) -> (Vec<u64>, Named) {
    let mut own = pipeline(run, 3, kind);
    let (mut numbers, mut named) = (Vec::new(), Named::new());
    for step in 0..4 {
        if let (2, Some(then)) = (step, then) {
            let state = own.state().unwrap();
            own = pipeline(then, 3, kind);
            restore(&mut own, state);
        }
        let (inputs, targets) = data(step, kind);
        let report = own.train_step(&inputs, &targets).unwrap();
        numbers.extend([report.loss.to_bits(), report.grad_norm.to_bits()]);
        numbers.extend(report.losses.iter().map(|term| term.sum.to_bits()));
        let gradients = own.gradients().unwrap().into_iter();
        named.extend(gradients.map(|(name, grad)| (format!("{step} {name}"), grad)));
        let evaluation = own.evaluate(&inputs, &targets).unwrap();
        numbers.push(evaluation.loss.to_bits());
        numbers.extend(evaluation.losses.iter().map(|term| term.value().to_bits()));
    }
    named.extend(flat(&mut own));
    (numbers, named)
}

#[test]
fn transparency_of_losses_with_parameters_inputs_and_skips() {
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        let expected = trained(&Run::plain(), None, kind);
        assert!(expected.1.iter().any(|(name, _)| name == "3 loss.s"), "its gradient");
        let runs = Run::all(LAYERS);
        for (index, run) in runs.iter().enumerate() {
            let found = trained(run, Some(&runs[(7 * index + 3) % runs.len()]), kind);
            assert_eq!(found.0, expected.0, "{run:?} {kind:?}");
            assert_same_bits(&found.1, &expected.1, &format!("{run:?} {kind:?}"));
        }
    }
}

/// The three losses of a whole mini-batch by autograd, and their total.
fn plain(parameters: &Named, x: &Tensor, target: &Tensor) -> (Vec<Tensor>, Tensor) {
    let of = |name: &str| &parameters.iter().find(|(own, _)| own == name).unwrap().1;
    let dense = |x: Tensor, layer: &str| {
        x.linear(of(&format!("{layer}.weight")), Some(of(&format!("{layer}.bias")))).tanh()
    };
    let early = dense(x.shallow_clone(), "a");
    let output = ["b", "c", "d"].iter().fold(early.shallow_clone(), |x, layer| dense(x, layer));
    let (s, scale) = (of("loss.s"), x.detach().mean_dim(-1, true, None));
    let square = (&output - target * scale).square();
    let uncertain = (square * (-s).exp() + s).mean(None);
    let near = (&output - early).square().sum(None) / SAMPLES;
    let shown = (&output - target).square().mean(None);
    let total = &uncertain + 0.25 * &near;
    (vec![uncertain, near, shown], total)
}

#[test]
fn oracle_losses_and_their_gradients_are_those_of_autograd() {
    let kind = Kind::Double;
    let (x, target) = data(1, kind);
    for run in Run::all(LAYERS).iter().step_by(7) {
        let mut own = pipeline(run, 3, kind);
        own.set_clip_norm(None).unwrap();
        let parameters: Named = own
            .parameters()
            .unwrap()
            .into_iter()
            .map(|(name, value)| (name, value.set_requires_grad(true)))
            .collect();
        let (terms, total) = plain(&parameters, &x, &target);
        total.backward();
        let report = own.train_step(&x, &target).unwrap();
        let close = |found: f64, wanted: &Tensor| {
            assert!((found - wanted.double_value(&[])).abs() < 1e-12, "{found}, {wanted:?}");
        };
        close(report.loss, &total);
        assert_eq!(report.count, (SAMPLES * WIDTH) as f64);
        let names: Vec<&str> = report.losses.iter().map(|term| term.name.as_str()).collect();
        assert_eq!(names, ["loss", "near", "shown"]);
        report.losses.iter().zip(&terms).for_each(|(term, wanted)| close(term.value(), wanted));
        let wanted: Named =
            parameters.iter().map(|(name, value)| (name.clone(), value.grad())).collect();
        assert_close(&own.gradients().unwrap(), &wanted, 1e-10, &format!("{run:?}"));
    }
}

#[test]
fn oracle_gradients_of_losses_agree_with_finite_differences() {
    let mut own = pipeline(&Run { stages: 3, ..Run::plain() }, 3, Kind::Double);
    let (x, target) = data(2, Kind::Double);
    // The input of the loss has no gradient, so its share of the inputs' gradients is missing.
    let compared = own.finite_differences(&x, &target, 4).unwrap();
    let parameters: Vec<_> = compared.iter().filter(|one| !one.name.starts_with("input")).collect();
    assert!(parameters.iter().any(|one| one.name == "loss.s"));
    for one in parameters {
        assert!((one.gradient - one.difference).abs() < 1e-8, "{one:?}");
    }
}

#[test]
fn oracle_accumulated_losses_equal_one_larger_mini_batch() {
    let run = Run { stages: 2, ..Run::plain() };
    // Six samples are three micro-batches of two, and 18 are nine, so the bits are the same.
    let six = |tensor: Tensor| tensor.narrow(0, 0, 6);
    let batches: Vec<_> = (0..3)
        .map(|seed| data(seed, Kind::Float))
        .map(|(x, target)| (six(x), six(target)))
        .collect();
    let cat = |of: &dyn Fn(&(Tensor, Tensor)) -> Tensor| {
        Tensor::cat(&batches.iter().map(of).collect::<Vec<_>>(), 0)
    };
    let (x, target) = (cat(&|own| own.0.shallow_clone()), cat(&|own| own.1.shallow_clone()));
    let mut whole = pipeline(&run, 9, Kind::Float);
    let report = whole.train_step(&x, &target).unwrap();
    let mut parts = pipeline(&run, 3, Kind::Float);
    let counts = parts.counts_of(&x, &target).unwrap();
    for (x, target) in &batches {
        parts.accumulate(x, target, Count::Totals(counts.clone())).unwrap();
    }
    let update = parts.update().unwrap();
    assert_same_bits(&flat(&mut parts), &flat(&mut whole), "parts");
    for (own, wanted) in update.losses.iter().zip(&report.losses) {
        assert_eq!((&own.name, own.count), (&wanted.name, wanted.count));
        assert!((own.value() - wanted.value()).abs() < 1e-6, "sums in another order");
    }
}

/// The parameters of a loss are parameters like others, and outputs are the network's own.
#[test]
fn transparency_parameters_of_a_loss_are_frozen_grouped_and_tied_as_others() {
    let spec = TensorSpec::new([SAMPLES, WIDTH], Kind::Float);
    let builder = || with_losses(Pipeline::builder(network(), spec.clone()).micro_batches(2));
    let (x, target) = data(0, Kind::Float);
    let value = |own: &mut Pipeline| {
        own.parameters().unwrap().into_iter().find(|(name, _)| name == "loss.s").unwrap().1
    };
    let frozen = Group::matching(["loss.*"]).frozen();
    let mut own = builder().group(frozen).build().unwrap();
    let before = value(&mut own);
    own.train_step(&x, &target).unwrap();
    assert_eq!(value(&mut own), before);
    own.unfreeze(["loss.s"]).unwrap();
    own.train_step(&x, &target).unwrap();
    assert_ne!(value(&mut own), before);
    assert_eq!(own.predict(&x).unwrap().len(), 1, "its parameters and skips are no outputs");
    let outputs = own.forward(&x).unwrap();
    assert_eq!(outputs.tensors().len(), 1);
    drop(outputs);
    // Balances may count the layer of the loss, or leave it to the last stage.
    for layers in [vec![2, 3], vec![2, 4]] {
        let own = builder().stages(2).balance(Balance::Layers(layers)).build().unwrap();
        assert_eq!(own.balance(), [2, 4]);
    }
}

#[test]
fn fault_losses_that_do_not_fit_are_named() {
    let spec = TensorSpec::new([SAMPLES, WIDTH], Kind::Float);
    let builder = || Pipeline::builder(network(), spec.clone()).optimizer(Adam::default());
    let error = |builder: PipelineBuilder| builder.build().err().unwrap().to_string();
    let near = || builder().named_loss("near", 1.0, NearSkip);
    let twice = error(near().named_loss("near", 1.0, NearSkip));
    assert!(twice.contains("two losses are named 'near'"), "{twice}");
    let weight = error(builder().named_loss("near", f64::NAN, NearSkip));
    assert!(weight.contains("the weight of loss 'near' is NaN"), "{weight}");
    let reserved = near().named_loss("loss", 0.5, MeanSquaredError).loss(MeanSquaredError);
    let reserved = error(reserved);
    assert!(reserved.contains("two losses are named 'loss'"), "{reserved}");
    let none = error(builder().named_loss("near", 0.0, NearSkip));
    assert!(none.contains("every loss has weight 0"), "{none}");
    let missing = Pipeline::builder(Sequence::new().push("a", Dense), spec.clone());
    let missing = error(missing.named_loss("near", 1.0, NearSkip));
    assert!(missing.contains("no earlier layer stashes a skip 'early'"), "{missing}");
    let unpopped = error(builder().loss(MeanSquaredError));
    assert!(unpopped.contains("no later layer pops its skip 'early'"), "{unpopped}");

    let mut own = near().named_loss("shown", 0.5, MeanSquaredError).build().unwrap();
    let (x, target) = data(0, Kind::Float);
    let shape = own.train_step(&x, target.narrow(1, 0, 2)).unwrap_err().to_string();
    assert!(shape.contains("loss 'shown': mean squared error takes"), "{shape}");
    let unknown = own.accumulate(&x, &target, Count::Unknown).unwrap_err().to_string();
    assert!(unknown.contains("give Count::Totals"), "{unknown}");
    let one = own.accumulate(&x, &target, Count::Total(7.0)).unwrap_err().to_string();
    assert!(one.contains("there are 2 losses"), "{one}");
    let counted = own.count_of(&target).unwrap_err().to_string();
    assert!(counted.contains("call counts_of"), "{counted}");
    let nan = own.train_step(&x, &target * f64::NAN).unwrap_err().to_string();
    assert!(nan.contains("the loss 'shown' (NaN)"), "{nan}");
}

/// Two heads, each with a loss of its own. Which are first does not matter to their order.
#[test]
fn oracle_each_loss_takes_its_outputs_and_targets() {
    struct Heads;
    impl Layer for Heads {
        fn kind(&self) -> &'static str {
            "heads"
        }
        fn infer(
            &self,
            _: &mut Infer,
            inputs: &[TensorSpec],
        ) -> Result<Vec<TensorSpec>, LayerError> {
            Ok(vec![inputs[0].clone(), inputs[0].clone()])
        }
        fn forward(&self, _: &mut Forward, x: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
            Ok(vec![x[0].f_mul_scalar(2.0)?, x[0].f_sin()?])
        }
    }
    let kind = Kind::Double;
    let (x, target) = data(1, kind);
    let classes = Tensor::from_slice(&[0_i64, 3, -100, 1, 4, 2, 0]);
    let class = LossOf { outputs: vec![0], targets: vec![0], loss: CrossEntropy::default() };
    let place = LossOf { outputs: vec![1], targets: vec![1], loss: MeanSquaredError };
    let build = |stages: usize| {
        let model = Sequence::new().push("a", Dense).push("heads", Heads);
        Pipeline::builder(model, TensorSpec::new([SAMPLES, WIDTH], kind))
            .stages(stages)
            .micro_batches(3)
            .kind(kind)
            .named_loss("place", 0.5, place.clone())
            .loss(class.clone())
            .optimizer(Adam::default())
            .keep_gradients()
    };
    let mut own = build(2).build().unwrap();
    let leaves: Vec<Tensor> = own.parameters().unwrap().into_iter().map(|(_, own)| own).collect();
    leaves.iter().for_each(|own| drop(own.set_requires_grad(true)));
    let y = x.linear(&leaves[0], Some(&leaves[1])).tanh();
    let entropy = (&y * 2.0).log_softmax(-1, kind).nll_loss(&classes);
    let place_loss = (y.sin() - &target).square().mean(None);
    let total: Tensor = &entropy + 0.5 * &place_loss;
    total.backward();
    let targets = vec![classes.shallow_clone(), target.shallow_clone()];
    let report = own.train_step(&x, targets.clone_all()).unwrap();
    let told: Vec<_> = report.losses.iter().map(|own| (own.name.as_str(), own.value())).collect();
    let value = |own: &Tensor| own.double_value(&[]);
    assert_eq!((told[0].0, told[1].0), ("place", "loss"));
    assert!((told[0].1 - value(&place_loss)).abs() < 1e-12, "{told:?}");
    assert!((told[1].1 - value(&entropy)).abs() < 1e-12, "{told:?}");
    let grads = own.gradients().unwrap();
    let wanted = grads.iter().zip(&leaves).map(|((n, _), leaf)| (n.clone(), leaf.grad())).collect();
    assert_close(&grads, &wanted, 1e-12, "gradients");
    let error = build(1)
        .named_loss("far", 1.0, LossOf { outputs: vec![2], ..place.clone() })
        .build()
        .unwrap()
        .train_step(&x, targets.clone_all())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("loss 'far'") && error.contains("takes output 2, there are 2"),
        "{error}"
    );
}

/// Copies of a list of tensors.
trait CloneAll {
    fn clone_all(&self) -> Self;
}

impl CloneAll for Vec<Tensor> {
    fn clone_all(&self) -> Self {
        self.iter().map(Tensor::shallow_clone).collect()
    }
}

/// One of several losses may have nothing to count in a mini-batch. It then has no gradient.
#[test]
fn oracle_a_loss_that_counts_nothing_leaves_the_others() {
    let spec = TensorSpec::new([SAMPLES, WIDTH], Kind::Float);
    let class = || LossOf { outputs: vec![0], targets: vec![1], loss: CrossEntropy::default() };
    let place = || LossOf { outputs: vec![0], targets: vec![0], loss: MeanSquaredError };
    let builder = || {
        let built = Pipeline::builder(network_without_stash(), spec.clone()).keep_gradients();
        built.stages(2).micro_batches(3).optimizer(Adam::default()).loss(place())
    };
    let (x, target) = data(1, Kind::Float);
    let ignored = Tensor::full([SAMPLES], -100, (Kind::Int64, tch::Device::Cpu));
    let targets = || vec![target.shallow_clone(), ignored.shallow_clone()];
    let mut both = builder().named_loss("class", 1.0, class()).build().unwrap();
    let report = both.train_step(&x, targets()).unwrap();
    assert_eq!((report.losses[1].count, report.losses[1].value()), (0.0, 0.0));
    let mut one = builder().build().unwrap();
    let alone = one.train_step(&x, targets()).unwrap();
    assert_eq!(report.loss.to_bits(), alone.loss.to_bits());
    let zero = |all: Named| -> Named { all.into_iter().map(|(n, own)| (n, own + 0.0)).collect() };
    let (found, wanted) = (both.gradients().unwrap(), one.gradients().unwrap());
    assert_same_bits(&zero(found), &zero(wanted), "gradients");
    let count = Count::Totals(both.counts_of(&x, targets()).unwrap());
    both.accumulate(&x, targets(), count).unwrap();
    both.update().unwrap();
    let none = Pipeline::builder(network_without_stash(), spec).loss(class());
    let error = none.build().unwrap().evaluate(&x, targets()).unwrap_err().to_string();
    assert!(error.contains("no target counts"), "{error}");
}

fn network_without_stash() -> Sequence {
    Sequence::new().push("a", Dense).push("b", Dense)
}

/// A loss that changes its own parameter in place changed the model, and the error said that it had
/// changed outputs or targets: the pipeline went on with the changed parameter.
#[test]
fn regression_a_loss_that_changes_its_parameter_is_told_as_a_layer_is() {
    struct Clamps;
    impl Loss for Clamps {
        fn parameters(&self) -> Vec<ParameterSpec> {
            vec![ParameterSpec::new("s", [1], Init::Ones)]
        }
        fn check(
            &self,
            _: &LossContext<'_, TensorSpec>,
            _: &[TensorSpec],
            _: &[TensorSpec],
        ) -> Result<(), LayerError> {
            Ok(())
        }
        fn sum(
            &self,
            ctx: &LossContext<'_>,
            outputs: &[Tensor],
            _: &[Tensor],
        ) -> Result<Tensor, LayerError> {
            let s = ctx.parameter(0)?;
            let _ = s.f_detach()?.f_mul_scalar_(0.5)?;
            Ok(outputs[0].f_mul(s)?.f_sum(outputs[0].kind())?)
        }
        fn count(&self, _: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
            Ok(targets[0].numel() as f64)
        }
    }
    let spec = TensorSpec::new([SAMPLES, WIDTH], Kind::Float);
    let built = Pipeline::builder(network_without_stash(), spec).stages(2).micro_batches(2);
    let mut own = built.loss(Clamps).optimizer(Adam::default()).build().unwrap();
    let (x, target) = data(1, Kind::Float);
    let error = own.evaluate(&x, &target).unwrap_err().to_string();
    assert!(error.contains("changed its parameter 's' in place"), "{error}");
    let error = own.train_step(&x, &target).unwrap_err().to_string();
    assert!(error.contains("accept_torn_update"), "{error}");
}

/// What is only reported ends no step.
#[test]
fn oracle_a_loss_of_weight_zero_may_be_nan() {
    let nan = OwnLoss(|y, _| Ok(y.f_sum(Kind::Float)?.f_mul_scalar(f64::NAN)?));
    let spec = TensorSpec::new([SAMPLES, WIDTH], Kind::Float);
    let built = Pipeline::builder(network_without_stash(), spec).stages(2).micro_batches(2);
    let built = built.loss(MeanSquaredError).named_loss("nan", 0.0, nan);
    let mut own = built.optimizer(Adam::default()).build().unwrap();
    let (x, target) = data(1, Kind::Float);
    let report = own.train_step(&x, &target).unwrap();
    assert!(report.loss.is_finite() && report.grad_norm > 0.0);
    assert!(report.losses[1].value().is_nan());
}

/// The search for the layer of a NaN passed over every layer named `loss`, as if it were the loss.
#[test]
fn regression_a_layer_named_loss_is_found_to_make_a_nan() {
    struct Root;
    impl Layer for Root {
        fn kind(&self) -> &'static str {
            "root"
        }
        fn infer(&self, _: &mut Infer, x: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
            Ok(x.to_vec())
        }
        fn forward(&self, _: &mut Forward, x: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
            Ok(vec![x[0].f_abs()?.f_neg()?.f_sub_scalar(1.0)?.f_sqrt()?])
        }
    }
    let model = Sequence::new().push("a", Dense).push("loss", Root).push("b", Dense);
    let built = Pipeline::builder(model, TensorSpec::new([SAMPLES, WIDTH], Kind::Float));
    let built = built.stages(2).micro_batches(2).loss(MeanSquaredError);
    let mut own = built.optimizer(Adam::default()).build().unwrap();
    let (x, target) = data(1, Kind::Float);
    let error = own.train_step(&x, &target).unwrap_err();
    assert!(error.is_not_finite(), "{error}");
    assert!(error.to_string().contains("layer 'loss': its output"), "{error}");
}

/// The update was applied, and then the step failed: the sum was divided by 0.
#[test]
fn regression_a_loss_that_counts_nothing_may_have_a_sum() {
    struct Penalty;
    impl Loss for Penalty {
        fn check(
            &self,
            _: &LossContext<'_, TensorSpec>,
            _: &[TensorSpec],
            _: &[TensorSpec],
        ) -> Result<(), LayerError> {
            Ok(())
        }
        fn sum(
            &self,
            _: &LossContext<'_>,
            outputs: &[Tensor],
            _: &[Tensor],
        ) -> Result<Tensor, LayerError> {
            Ok(outputs[0].f_square()?.f_sum(outputs[0].kind())?)
        }
        fn count(&self, _: &LossContext<'_>, _: &[Tensor]) -> Result<f64, LayerError> {
            Ok(0.0)
        }
    }
    let spec = TensorSpec::new([SAMPLES, WIDTH], Kind::Float);
    let built = || {
        let built = Pipeline::builder(network_without_stash(), spec.clone());
        built.stages(2).micro_batches(2).loss(MeanSquaredError).optimizer(Adam::default())
    };
    let mut own = built().named_loss("penalty", 1.0, Penalty).build().unwrap();
    let (x, target) = data(1, Kind::Float);
    let report = own.train_step(&x, &target).unwrap();
    assert_eq!((report.step, report.losses[1].value()), (1, 0.0));
    assert!(report.losses[1].sum > 0.0);
    let mut without = built().build().unwrap();
    without.train_step(&x, &target).unwrap();
    let (found, wanted) = (own.parameters().unwrap(), without.parameters().unwrap());
    assert_same_bits(&found, &wanted, "it has no part in the gradients");
}
