//! Predicted against measured, in turn: for each configuration a plan's prediction from a new profile of one step, and then, at once,
//! a step that is run so, again and again. Prints a line of JSON for each pair. For `benchmarks/prediction.py --in-turn`.
//!
//! A profile and the step after it are a second or two apart, so that what disturbs the machine for longer disturbs both; and each
//! prediction is there before the step that it is about, and comes from another pipeline's steps.
//!
//! Usage: prediction [workload=gpt|amoeba] [pairs=9]

#![allow(clippy::print_stdout)]

mod common;

use std::io::Write;

use common::{Arguments, Failure, LENGTH, Numbers, VOCABULARY, gpt};
use gpipe::{
    Adam, Balance, CrossEntropy, Pipeline, PipelineBuilder, Remat, Result, Schedule, Sequence, Sgd,
    TensorSpec,
    profile::{Profiling, profile},
};
use gpipe_core::plan::{Plan, PlanDevice, predict};
use gpipe_models::{AmoebaNet, Variant};
use serde_json::json;
use tch::Tensor;

const STAGES: usize = 2;
const SAMPLES: usize = 32;
/// Steps that still touch memory for the first time, as in a profile.
const WARM_UP: usize = 3;
const MICRO_BATCHES: [usize; 5] = [2, 4, 8, 16, 32];

/// A model with its mini-batch.
struct Workload {
    model: Sequence,
    inputs: Tensor,
    targets: Tensor,
    adam: bool,
    /// M with re-materialization; without it all are measured.
    again: &'static [usize],
}

impl Workload {
    fn named(name: &str) -> std::result::Result<Self, Failure> {
        let mut numbers = Numbers::new();
        let samples = SAMPLES as i64;
        match name {
            "gpt" => {
                let mut tokens = || numbers.below(VOCABULARY, &[samples, LENGTH]);
                let (inputs, targets) = (tokens()?, tokens()?);
                Ok(Self { model: gpt().build()?, inputs, targets, adam: true, again: &[8] })
            }
            "amoeba" => {
                let (channels, classes) = (3, 10);
                let model = AmoebaNet {
                    variant: Variant::D,
                    cells: 6,
                    filters: 128,
                    channels,
                    classes,
                    drop_path: 0.0,
                    auxiliary: false,
                };
                let inputs = numbers.uniform(&[samples, channels, 64, 64])?;
                let targets = numbers.below(classes, &[samples])?;
                let model = model.build()?;
                Ok(Self { model, inputs, targets, adam: false, again: &MICRO_BATCHES })
            }
            other => Err(format!("workload={other}: use gpt or amoeba").into()),
        }
    }

    fn builder(&self, micro_batches: usize) -> PipelineBuilder {
        let mut shape = self.inputs.size();
        shape[0] = (SAMPLES / micro_batches) as i64;
        let builder =
            Pipeline::builder(self.model.clone(), TensorSpec::new(shape, self.inputs.kind()))
                .stages(STAGES)
                .micro_batches(micro_batches)
                .loss(CrossEntropy::default())
                .seed(1);
        match self.adam {
            true => builder.optimizer(Adam { lr: 1e-4, ..Adam::default() }),
            false => builder.optimizer(Sgd { momentum: 0.9, ..Sgd::new(0.01) }),
        }
    }

    /// Each M and schedule, with what is re-materialized: one profile is of both.
    fn configurations(&self) -> Vec<(usize, Schedule, Vec<Remat>)> {
        let mut all = Vec::new();
        for schedule in Schedule::TRAINING {
            for micro_batches in MICRO_BATCHES {
                let again = self.again.contains(&micro_batches).then_some(Remat::Always);
                all.push((
                    micro_batches,
                    schedule.clone(),
                    [Remat::Never].into_iter().chain(again).collect(),
                ));
            }
        }
        all
    }

    /// A pipeline that has made its first steps, which are slower, and the plan that it runs by.
    fn running(
        &self,
        micro_batches: usize,
        schedule: &Schedule,
        remat: Remat,
    ) -> std::result::Result<(Plan, Pipeline), Failure> {
        let built = self.builder(micro_batches).schedule(schedule.clone()).remat(remat);
        let mut pipeline = built.balance(Balance::Cost).build()?;
        for _ in 0..WARM_UP {
            pipeline.train_step(&self.inputs, &self.targets)?;
        }
        let balance = pipeline.balance().to_vec();
        let schedule = schedule.clone();
        Ok((Plan { balance, micro_batches, schedule, remat: remat.into() }, pipeline))
    }

    /// Pairs of a prediction and a step, in turn.
    fn pairs(
        &self,
        micro_batches: usize,
        schedule: &Schedule,
        remats: &[Remat],
        pairs: usize,
    ) -> std::result::Result<(), Failure> {
        let batches = [(vec![self.inputs.shallow_clone()], vec![self.targets.shallow_clone()])];
        let settings = Profiling {
            micro_batches: &[micro_batches],
            schedules: std::slice::from_ref(schedule),
            steps: 1,
            batches: &batches,
            machine: "this one",
        };
        let build = || -> Result<PipelineBuilder> { Ok(self.builder(micro_batches)) };
        let running = |&remat: &Remat| self.running(micro_batches, schedule, remat);
        let mut running = remats.iter().map(running).collect::<std::result::Result<Vec<_>, _>>()?;
        for pair in 0..pairs {
            let costs = profile(&settings, build, |_| {})?.costs;
            for (plan, pipeline) in &mut running {
                let predicted = predict(&costs, &[PlanDevice::default(); STAGES], SAMPLES, plan)?;
                let step = pipeline.train_step(&self.inputs, &self.targets)?;
                let (planned, held) = (predicted.device_peaks().into_iter(), step.devices.iter());
                let line = json!({
                    "micro_batches": micro_batches,
                    "schedule": schedule.to_string(),
                    "remat": plan.remat.to_string(),
                    "balance": plan.balance,
                    "pair": pair,
                    "predicted_ms": predicted.step().0 as f64 / 1e6,
                    "step_ms": step.time.0 as f64 / 1e6,
                    "predicted_peaks": planned.map(|peak| peak.0).collect::<Vec<_>>(),
                    "peaks": held.map(|own| own.peak.0).collect::<Vec<_>>(),
                });
                println!("{line}");
                std::io::stdout().flush()?;
            }
        }
        Ok(())
    }
}

fn main() -> std::result::Result<(), Failure> {
    gpipe::keep_freed_memory();
    let mut arguments = Arguments::read()?;
    let workload = Workload::named(&arguments.take::<String>("workload", "gpt")?)?;
    let pairs = arguments.take("pairs", "9")?;
    for (micro_batches, schedule, remats) in workload.configurations() {
        workload.pairs(micro_batches, &schedule, &remats, pairs)?;
    }
    Ok(())
}
