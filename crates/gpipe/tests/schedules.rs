//! Runs user-written schedules. Families: `property_` (a correct file computes what one stage
//! computes, to the bit; a changed file is refused or does so, too), `fault_` (a file that does not
//! fit the pipeline is refused before anything runs).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::sync::Arc;

use common::{Features, Named, Run, assert_same_bits, batch, flat, model};
use gpipe::{
    Adam, Balance, Bytes, Forward, Infer, Init, Layer, LayerError, MeanSquaredError, ParameterSpec,
    Pipeline, Remat, Schedule, Sequence, Sgd, TensorSpec, Tensors,
    layers::{LayerNorm, Linear},
    profile::{Profiling, profile},
    schedule::{CustomSchedule, custom::print},
};
use gpipe_core::{
    cost::LayerState,
    splitmix::Stream,
    testing::{changed, random_compute},
};
use tch::{Kind, Tensor};

fn listed(name: &str, text: &str) -> Schedule {
    Schedule::Custom(Arc::new(CustomSchedule::parse(name, text).unwrap()))
}

/// Losses and the whole state after three steps. The second step has fewer samples and therefore
/// fewer micro-batches.
fn trained(pipeline: &mut Pipeline) -> (Vec<u64>, Named) {
    let mut losses = Vec::new();
    for (step, samples) in [7, 3, 6].into_iter().enumerate() {
        let (inputs, targets) = batch(samples, step as u64);
        losses.push(pipeline.train_step(inputs, &targets).unwrap().loss.to_bits());
        let (inputs, targets) = batch(5, 100 + step as u64);
        losses.push(pipeline.evaluate(inputs, &targets).unwrap().loss.to_bits());
    }
    (losses, flat(pipeline))
}

#[test]
fn property_random_files_compute_what_one_stage_does() {
    let features = Features { tied: true, skip: true, dropout: 0.1, ..Features::plain() };
    let layers = model(features).len();
    let mut splits = 0;
    for seed in 0..30 {
        let mut random = Stream::new(seed);
        let stages = 1 + random.below(5).min(layers - 1);
        let devices = 1 + random.below(stages);
        let micro_batches = 1 + random.below(5);
        let text = print(&random_compute(&mut random, stages, devices, micro_batches));
        splits += usize::from(text.contains('W'));
        let schedule = listed("random", &text);
        let run = Run { stages: devices, schedule, remat: Remat::Never, ..Run::plain() };
        let mut plain = Run::plain().builder(model(features), micro_batches).build().unwrap();
        let mut pipeline = run.builder(model(features), micro_batches).build().unwrap();
        assert_eq!(pipeline.balance().len(), stages);
        let (expected, found) = (trained(&mut plain), trained(&mut pipeline));
        assert_eq!(found.0, expected.0, "seed {seed}:\n{text}");
        assert_same_bits(&found.1, &expected.1, &format!("seed {seed}:\n{text}"));
    }
    assert!(splits > 10, "{splits}");
}

/// Weight gradients that I computes are summed in micro-batch order, whatever order the actions run
/// in.
#[test]
fn transparency_first_halves_in_any_order() {
    let features = Features { tied: true, skip: true, dropout: 0.1, ..Features::plain() };
    let mut plain = Run::plain().builder(model(features), 4).build().unwrap();
    let expected = trained(&mut plain);
    for text in [
        "0F0 0F1 0F2 0F3 0I3 0I2 0I1 0I0 0W0 0W1 0W2 0W3",
        "0F0 0F1 0F2 0F3 0I1 0I3 0I0 0I2 0W0 0W1 0W2 0W3",
        "0F0 0F1 0F2 0F3 0I3 0B0 0I1 0I2 0W1 0W2 0W3",
        "0F0 0F1 0F2 0F3 0I2 0I0 0W0 0B1 0I3 0W2 0W3",
    ] {
        let schedule = listed("any order", text);
        let run = Run { stages: 1, schedule, remat: Remat::Never, ..Run::plain() };
        let mut pipeline = run.builder(model(features), 4).build().unwrap();
        let found = trained(&mut pipeline);
        assert_eq!(found.0, expected.0, "{text}");
        assert_same_bits(&found.1, &expected.1, text);
    }
}

/// The first half of a backward adds all gradients of the rows at once, so another order gave other
/// bits, without a word.
#[test]
fn regression_rows_of_a_loss_need_backwards_in_order() {
    let features = Features { dropout: 0.1, ..Features::plain() };
    let build = |text: &str| {
        let schedule = listed("any order", text);
        let run = Run { stages: 1, schedule, remat: Remat::Never, ..Run::plain() };
        run.builder(model(features), 3).loss_rows(5).build()
    };
    for text in ["0F0 0F1 0F2 0I2 0I0 0I1 0W0 0W1 0W2", "0F0 0F1 0F2 0I2 0B0 0I1 0W1 0W2"] {
        let error = build(text).err().unwrap().to_string();
        assert!(error.contains("loss_rows") && error.contains("before micro-batch 0"), "{error}");
    }
    let mut plain = Run::plain().builder(model(features), 3).loss_rows(5).build().unwrap();
    let mut pipeline = build("0F0 0F1 0F2 0B0 0I1 0I2 0W1 0W2").unwrap();
    let (expected, found) = (trained(&mut plain), trained(&mut pipeline));
    assert_eq!(found.0, expected.0);
    assert_same_bits(&found.1, &expected.1, "in order");
}

/// A randomly changed file is refused, or computes the same.
#[test]
fn property_changed_files_are_refused_or_compute_what_one_stage_does() {
    let features = Features { skip: true, dropout: 0.1, ..Features::plain() };
    let layers = model(features).len();
    let (mut refused, mut ran) = (0, 0);
    for seed in 0..100 {
        let mut random = Stream::new(1000 + seed);
        let stages = 1 + random.below(4).min(layers - 1);
        let devices = 1 + random.below(stages);
        let micro_batches = 1 + random.below(4);
        let lists = random_compute(&mut random, stages, devices, micro_batches);
        let mut plain = Run::plain().builder(model(features), micro_batches).build().unwrap();
        let expected = trained(&mut plain);
        for _ in 0..10 {
            let changed = changed(&mut random, &lists);
            let text = print(&changed);
            // An empty line does not describe a device.
            if changed == lists || changed.iter().any(Vec::is_empty) {
                continue;
            }
            let Ok(listed) = CustomSchedule::parse("changed", &text) else {
                refused += 1;
                continue;
            };
            if (listed.stages(), listed.micro_batches()) != (stages, micro_batches) {
                continue; // correct, for another pipeline
            }
            let schedule = Schedule::Custom(Arc::new(listed));
            let run = Run { stages: devices, schedule, remat: Remat::Never, ..Run::plain() };
            let mut pipeline = run.builder(model(features), micro_batches).build().unwrap();
            let found = trained(&mut pipeline);
            assert_eq!(found.0, expected.0, "seed {seed}:\n{text}");
            assert_same_bits(&found.1, &expected.1, &format!("seed {seed}:\n{text}"));
            ran += 1;
        }
    }
    assert!(refused > 200 && ran > 30, "{refused} {ran}");
}

/// (x) -> tanh(x w) w: one weight, reached from two products.
struct Twice;

impl Layer for Twice {
    fn kind(&self) -> &'static str {
        "twice"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("weight", [4, 4], Init::Normal { std: 0.5 })]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let once = inputs[0].f_matmul(ctx.parameter(0)?)?.f_tanh()?;
        Ok(vec![once.f_matmul(ctx.parameter(0)?)?])
    }
}

/// (x) -> x w, or tanh(x w) w for fewer than three samples. Only micro-batches of the first kind
/// can be split.
struct Sometimes;

impl Layer for Sometimes {
    fn kind(&self) -> &'static str {
        "sometimes"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Twice.parameters()
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        match inputs[0].size()[0] {
            3.. => Ok(vec![inputs[0].f_matmul(ctx.parameter(0)?)?]),
            _ => Twice.forward(ctx, inputs),
        }
    }
}

/// A layer is split in the first of three micro-batches only. The gradients of the others are ready
/// earlier, and must wait.
#[test]
fn regression_gradients_that_are_found_early_wait_for_those_that_are_not() {
    let updated = |schedule: Schedule| {
        let model = Sequence::new()
            .push("first", Linear::new(4, 4))
            .push("sometimes", Sometimes)
            .push("last", Linear::new(4, 4));
        let built = Pipeline::builder(model, TensorSpec::new([7, 4], Kind::Float))
            .micro_batches(3)
            .schedule(schedule)
            .remat(Remat::Never)
            .loss(MeanSquaredError)
            // At this rate the gradient dominates the new weight, and the old value is negligible.
            .optimizer(Sgd::new(1e6));
        let mut pipeline = built.build().unwrap();
        let values = |seed: f64| (Tensor::arange(28, (Kind::Float, tch::Device::Cpu)) + seed).sin();
        let (inputs, targets) = (values(0.3).reshape([7, 4]), values(0.7).reshape([7, 4]));
        pipeline.train_step(inputs, &targets).unwrap();
        flat(&mut pipeline)
    };
    let whole = updated(Schedule::GPipe);
    for text in ["0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2", "0F0 0F1 0F2 0I2 0I1 0I0 0W0 0W1 0W2"] {
        assert_same_bits(&updated(listed("halves", text)), &whole, text);
    }
}

/// A layer that cannot be split computes the same under ZB-H1, and the profile marks it.
#[test]
fn oracle_a_layer_that_is_not_split_says_so_in_the_profile() {
    let build = |schedule: Schedule| {
        let model = Sequence::new()
            .push("first", Linear::new(4, 4))
            .push("twice", Twice)
            .push("norm", LayerNorm { features: 4 })
            .push("last", Linear::new(4, 4));
        Pipeline::builder(model, TensorSpec::new([2, 4], Kind::Float))
            .stages(2)
            .micro_batches(3)
            .schedule(schedule)
            .balance(Balance::Layers(vec![2, 2]))
            .remat(Remat::Never)
            .loss(MeanSquaredError)
            .optimizer(Adam::default())
    };
    let x = common::uniform(&[6, 4], 1, Kind::Float);
    let y = common::uniform(&[6, 4], 2, Kind::Float);
    let parameters = |schedule| {
        let mut pipeline = build(schedule).build().unwrap();
        pipeline.train_step(&x, &y).unwrap();
        pipeline.parameters().unwrap()
    };
    assert_same_bits(&parameters(Schedule::ZbH1), &parameters(Schedule::OneFOneB), "zb-h1");

    let batches = [(Tensors::new(&x), Tensors::new(&y))];
    let settings = Profiling {
        micro_batches: &[3],
        schedules: &[Schedule::OneFOneB, Schedule::ZbH1],
        steps: 1,
        passes: 1,
        batches: &batches,
        machine: "here",
        values: &[],
    };
    let found = profile(&settings, || Ok(build(Schedule::OneFOneB)), |_| {}, |_| Ok(None)).unwrap();
    let layers = found.costs.layers.iter();
    let unsplit: Vec<&str> =
        layers.filter(|layer| layer.unsplit).map(|layer| layer.name.as_str()).collect();
    assert_eq!(unsplit, ["twice"]);
    // Gradient bytes that I computes: none where no input gradient is needed, all of a layer that
    // is not split, and the vectors of a norm. A bias is computed with its weight, in W.
    let bytes = |of: fn(&LayerState) -> Bytes| -> Vec<u64> {
        found.costs.layers.iter().map(|layer| of(layer).0).collect()
    };
    assert_eq!(bytes(|layer| layer.early), [0, 64, 32, 0]);
    assert_eq!(bytes(|layer| layer.gradients), [80, 64, 32, 80]);
}

#[test]
fn oracle_a_report_is_of_devices() {
    let features = Features::plain();
    let run =
        Run { stages: 2, schedule: Schedule::Interleaved(2), remat: Remat::Never, ..Run::plain() };
    let mut pipeline = run.builder(model(features), 4).build().unwrap();
    let (inputs, targets) = batch(8, 1);
    let report = pipeline.train_step(inputs, &targets).unwrap();
    assert_eq!((report.devices.len(), report.bytes.len()), (2, 2));
    for (device, (own, bytes)) in report.devices.iter().zip(&report.bytes).enumerate() {
        let parts = own.busy() + own.optimizer + own.communication + own.wait;
        assert_eq!(parts, report.time, "device {device}");
        assert!(own.peak > own.live && own.live > Bytes(0) && own.sent > Bytes(0));
        // One entry per action, and one at the end.
        assert_eq!(bytes.len(), report.timeline.devices[device].len() + 1);
        assert!(bytes.iter().all(|(_, held)| *held <= own.peak));
    }
}

#[test]
fn fault_what_does_not_fit_is_refused_before_anything_runs() {
    let text = print(&Schedule::ZbH1.actions(2, 4));
    let refused = |stages: usize, schedule: Schedule, micro_batches: usize| {
        let run = Run { stages, schedule, remat: Remat::Never, ..Run::plain() };
        let built = run.builder(model(Features::plain()), micro_batches).build();
        built.err().unwrap().to_string()
    };
    let error = refused(3, listed("mine", &text), 4);
    assert!(error.contains("file:mine is for 2 devices, not for 3"), "{error}");
    let error = refused(2, listed("mine", &text), 8);
    assert!(error.contains("file:mine is for 4 micro-batches, not for 8"), "{error}");
    let error = refused(3, Schedule::Interleaved(3), 4);
    assert!(error.contains("9 stages") && error.contains("layers"), "{error}");
    let error = "interleaved:1".parse::<Schedule>().unwrap_err().to_string();
    assert!(error.contains("V stages on each device, from 2 to 64"), "{error}");
}

/// A cap covers all stages of a device: two stages that fit separately do not fit together.
#[test]
fn fault_a_cap_is_of_a_device() {
    let run =
        Run { stages: 2, schedule: Schedule::Interleaved(2), remat: Remat::Never, ..Run::plain() };
    let mut pipeline = run.builder(model(Features::plain()), 4).build().unwrap();
    let (inputs, targets) = batch(8, 1);
    let peak = pipeline.train_step(&inputs, &targets).unwrap().devices[0].peak;
    let capped = |cap: u64| {
        let builder = run.builder(model(Features::plain()), 4).memory_cap([Bytes(cap)]);
        builder.build().and_then(|mut pipeline| pipeline.train_step(&inputs, &targets))
    };
    let other = pipeline.train_step(&inputs, &targets).unwrap();
    let most = other.devices.iter().map(|own| own.peak.0).max().unwrap().max(peak.0);
    assert!(capped(2 * most).is_ok());
    // Less than its stages hold together, and more than each of them alone.
    let error = capped(peak.0 * 3 / 4).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
}
