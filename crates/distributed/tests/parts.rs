//! A training step in parts, in several processes and replicas: the bits of one process, and those
//! of whole steps.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::sync::Arc;

use common::{
    DEADLINE, in_processes,
    model::{
        Features, Named, Run, assert_same_bits, batch, bits, flat,
        gated::{self, Call},
        model, uniform,
    },
};
use gpipe::{
    Count, Init, LayerError, Loss, LossContext, MeanSquaredError, ParameterSpec, Pipeline,
    PipelineBuilder, Schedule, Sequence, Sgd, TensorSpec,
    layers::{Activation, Linear},
    processes::Transport,
};
use gpipe_distributed::Member;
use tch::{Kind, Tensor};

const STEPS: u64 = 2;

fn network() -> Sequence {
    let features =
        Features { tied: true, skip: true, dropout: 0.2, batch_norm: true, ..Features::plain() };
    model(features)
}

fn builder(run: &Run) -> PipelineBuilder {
    run.builder(network(), 3)
}

/// Trains in parts, with gradients that are changed by name. Returns numbers that every process
/// has, and the state of this process's stages.
fn train(pipeline: &mut Pipeline) -> (Vec<u64>, Named) {
    let mut numbers = Vec::new();
    for step in 0..STEPS {
        let (inputs, targets) = batch(7, step);
        let dropped = pipeline.forward(&inputs).unwrap();
        let outputs = pipeline.forward(&inputs).unwrap();
        drop(dropped);
        let count = pipeline.count_of(&targets).unwrap();
        let loss = gpipe::CrossEntropy::default();
        (loss.sum(&LossContext::default(), outputs.tensors(), &[targets]).unwrap() / count)
            .backward();
        numbers.extend(outputs.tensors().iter().flat_map(bits));
        pipeline.backward(&outputs, outputs.gradients()).unwrap();
        pipeline.scale_gradients("*.tokens", 0.5).unwrap();
        numbers.push(pipeline.clip_gradients("*.weight", 0.1).unwrap().to_bits());
        let report = pipeline.update().unwrap();
        numbers.extend([report.grad_norm.to_bits(), report.step]);
    }
    (numbers, flat(pipeline))
}

/// Merges by name, because each process has only the entries of its stages.
fn merged(parts: Vec<Named>) -> Named {
    let mut all: Named = parts.into_iter().flatten().collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all.dedup_by(|(a, _), (b, _)| a == b);
    all
}

#[test]
fn transparency_of_parts_in_processes() {
    let (numbers, state) = train(&mut builder(&Run::plain()).build().unwrap());
    let expected = merged(vec![state]);
    for processes in [2, 4] {
        let runs = Run::all(network().len()).into_iter().filter(|run| run.stages >= processes);
        for run in runs.step_by(11) {
            let what = format!("{run:?} in {processes} processes");
            let found = in_processes(processes, DEADLINE, |cluster| {
                train(&mut builder(&run).processes(cluster).build().unwrap())
            });
            let states = found.into_iter().map(|(own, state)| {
                assert!(own == numbers, "{what}");
                state
            });
            assert_same_bits(&merged(states.collect()), &expected, &what);
        }
    }
}

/// Gradients of inputs arrive in every process.
#[test]
fn transparency_of_input_gradients_in_processes() {
    let gradient = |builder: PipelineBuilder| {
        let x = uniform(&[6, 5], 3, Kind::Float);
        let mut pipeline = builder.build().unwrap();
        let outputs = pipeline.forward(&x).unwrap();
        outputs.tensors()[0].square().sum(Kind::Float).backward();
        let grads = pipeline.backward(&outputs, outputs.gradients()).unwrap();
        bits(grads[0].as_ref().unwrap())
    };
    let builder = || {
        let model = Sequence::new()
            .layer(Linear::new(5, 8))
            .layer(Activation::Tanh)
            .layer(Linear::new(8, 3));
        Pipeline::builder(model, TensorSpec::new([6, 5], Kind::Float))
            .stages(2)
            .micro_batches(3)
            .schedule(Schedule::ZbH1)
            .optimizer(Sgd::new(0.1))
            .input_gradients()
    };
    let expected = gradient(builder());
    let found = in_processes(2, DEADLINE, |cluster| gradient(builder().processes(cluster)));
    assert!(found.iter().all(|own| *own == expected));
}

/// Layers on all stages see the inputs by name, and a `None` stays one on its way.
#[test]
fn transparency_of_named_and_none_values_in_processes() {
    let trained = |builder: PipelineBuilder| {
        let mut pipeline = builder.build().unwrap();
        let mut numbers = Vec::new();
        for form in [0, 31, 5, 10] {
            let call = Call::new(form, Kind::Float);
            let report = pipeline.train_step(call.inputs(), call.targets()).unwrap();
            numbers.extend([report.loss.to_bits(), report.grad_norm.to_bits()]);
            let outputs = pipeline.forward(call.inputs()).unwrap();
            numbers.extend(bits(&outputs.tensors()[0]));
            call.loss(&outputs.tensors()[0]).backward();
            let back = pipeline.backward(&outputs, outputs.gradients()).unwrap();
            numbers.extend(back.iter().flatten().flat_map(bits));
            numbers.push(pipeline.update().unwrap().grad_norm.to_bits());
        }
        (numbers, flat(&mut pipeline))
    };
    let (numbers, state) = trained(gated::builder(&Run::plain(), Kind::Float));
    let expected = merged(vec![state]);
    for run in Run::all(gated::LAYERS).into_iter().filter(|run| run.stages >= 2).step_by(11) {
        let what = format!("{run:?}");
        let found = in_processes(2, DEADLINE, |cluster| {
            trained(gated::builder(&run, Kind::Float).processes(cluster))
        });
        assert!(found.iter().all(|(own, _)| *own == numbers), "{what}");
        let states = found.into_iter().map(|(_, state)| state).collect();
        assert_same_bits(&merged(states), &expected, &what);
    }
}

/// Two replicas that accumulate, or run in parts, make the update of whole steps.
#[test]
fn transparency_of_parts_of_replicas() {
    let run = |stages| Run { stages, ..Run::plain() };
    let trained = |stages: usize, way: usize| {
        let found = in_processes(2 * stages, DEADLINE, |cluster| {
            let member = Member::new(&cluster, 2).unwrap();
            let transport = Arc::clone(&member) as Arc<dyn Transport>;
            let built = builder(&run(stages)).processes(transport).replicas(member);
            let mut pipeline = built.build().unwrap();
            for step in 0..STEPS {
                let (inputs, targets) = batch(8, step);
                let total = pipeline.count_of(&targets).unwrap();
                match way {
                    0 => drop(pipeline.train_step(&inputs, &targets).unwrap()),
                    1 => {
                        let count = Count::Total(total);
                        pipeline.accumulate(&inputs, &targets, count).unwrap();
                        pipeline.update().unwrap();
                    }
                    _ => {
                        let outputs = pipeline.forward(&inputs).unwrap();
                        let own = outputs.samples();
                        let (first, count) = (own.start as i64, own.len() as i64);
                        let targets = targets.narrow(0, first, count);
                        let loss = gpipe::CrossEntropy::default();
                        let sum = loss
                            .sum(&LossContext::default(), outputs.tensors(), &[targets])
                            .unwrap();
                        (sum * (1.0 / total)).backward();
                        pipeline.backward(&outputs, outputs.gradients()).unwrap();
                        pipeline.accumulated_gradients().unwrap();
                        pipeline.update().unwrap();
                    }
                }
            }
            flat(&mut pipeline)
        });
        merged(found)
    };
    // A caller computes the loss on the CPU, which rounds differently from a GPU.
    let own_loss = common::model::on_gpus().then(|| trained(1, 2));
    for stages in [1, 2] {
        let whole = trained(stages, 0);
        for way in [1, 2] {
            let expected = own_loss.as_ref().filter(|_| way == 2).unwrap_or(&whole);
            let what = format!("{stages} stages, way {way}");
            assert_same_bits(&trained(stages, way), expected, &what);
        }
    }
}

/// (output - target)^2 e^-s + s, with a learned s.
struct Uncertain;

impl Loss for Uncertain {
    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("s", [1], Init::Normal { std: 0.3 })]
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
        match outputs == targets && *ctx.input(0)? == outputs[0] {
            true => Ok(()),
            false => Err(LayerError::Shape("the shapes differ".into())),
        }
    }

    fn sum(
        &self,
        ctx: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        let (s, x) = (ctx.parameter(0)?, ctx.input(0)?);
        let square = outputs[0].f_sub(&targets[0].f_mul(x)?)?.f_square()?;
        Ok(square.f_mul(&s.f_neg()?.f_exp()?)?.f_add(s)?.f_sum(Kind::Float)?)
    }

    fn count(&self, _: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        Ok(targets[0].numel() as f64)
    }
}

fn with_losses(stages: usize, weight: f64) -> PipelineBuilder {
    let model = Sequence::new()
        .layer(Linear::new(4, 4))
        .layer(Activation::Tanh)
        .layer(Linear::new(4, 4))
        .layer(Activation::Tanh);
    Pipeline::builder(model, TensorSpec::new([8, 4], Kind::Float))
        .stages(stages)
        .micro_batches(2)
        .named_loss("uncertain", 1.0, Uncertain)
        .named_loss("distance", weight, MeanSquaredError)
        .optimizer(Sgd::new(0.1))
}

/// Several losses, one with parameters and inputs: losses that are reported, and the state.
fn with_losses_trained(builder: PipelineBuilder) -> (Vec<u64>, Named) {
    let mut pipeline = builder.build().unwrap();
    let mut numbers = Vec::new();
    for seed in 0..3 {
        let (x, y) = (uniform(&[8, 4], seed, Kind::Float), uniform(&[8, 4], 9 + seed, Kind::Float));
        let report = pipeline.train_step(&x, &y).unwrap();
        numbers.extend([report.loss.to_bits(), report.grad_norm.to_bits()]);
        numbers.extend(report.losses.iter().map(|own| own.sum.to_bits()));
        let total = Count::Totals(pipeline.counts_of(&x, &y).unwrap());
        pipeline.accumulate(&x, &y, total).unwrap();
        let update = pipeline.update().unwrap();
        numbers.extend(update.losses.iter().map(|own| own.value().to_bits()));
    }
    (numbers, flat(&mut pipeline))
}

#[test]
fn transparency_of_several_losses_in_processes_and_replicas() {
    // Two replicas of two micro-batches sum as one pipeline with four does.
    for (replicas, micro_batches) in [(1, 2), (2, 4)] {
        let alone = with_losses(1, 0.5).micro_batches(micro_batches);
        let (numbers, state) = with_losses_trained(alone);
        let found = in_processes(2 * replicas, DEADLINE, |cluster| {
            let built = with_losses(2, 0.5);
            if replicas == 1 {
                return with_losses_trained(built.processes(cluster));
            }
            let member = Member::new(&cluster, replicas).unwrap();
            let transport = Arc::clone(&member) as Arc<dyn Transport>;
            with_losses_trained(built.processes(transport).replicas(member))
        });
        let what = format!("{replicas} replicas");
        if replicas == 1 {
            assert!(found.iter().all(|(own, _)| *own == numbers), "{what}");
            let states = found.into_iter().map(|(_, state)| state).collect();
            assert_same_bits(&merged(states), &merged(vec![state]), &what);
        } else {
            // Gradients are summed in another order, in float32.
            assert!(found.iter().all(|(own, _)| *own == found[0].0), "{what}");
            for (&own, &all) in found[0].0.iter().zip(&numbers) {
                let (own, all) = (f64::from_bits(own), f64::from_bits(all));
                assert!((own - all).abs() < 1e-6 * all.abs(), "{what}: {own}, {all}");
            }
        }
    }
}

/// Processes that were given other losses are told before anything runs.
#[test]
fn fault_other_losses_in_another_process_are_an_error() {
    let found = in_processes(2, DEADLINE, |cluster| {
        let weight = if cluster.rank() == 0 { 0.5 } else { 0.25 };
        with_losses(2, weight).processes(cluster).build().err().unwrap().to_string()
    });
    assert!(found.iter().all(|error| error.contains("losses")), "{found:?}");
}
