//! Compares predicted and measured steps in turn, for `benchmarks/prediction.py --in-turn`.
//!
//! For each configuration, repeatedly predicts a step from a new profile of one step, and
//! immediately runs that step. Prints a line of JSON for each pair.
//!
//! A profile and the step after it are a second or two apart, so a longer disturbance of the
//! machine affects both. Each prediction precedes its step and comes from another pipeline's steps.
//!
//! ```text
//! Usage: prediction [workload=gpt|amoeba|gpt-tiny] [pairs=9] [stages=2]
//!        [micro_batches=2,4,8,16,32] [schedules=gpipe,1f1b]
//! ```

use std::{io::Write, str::FromStr};

use gpipe::{
    Balance, Pipeline, PipelineBuilder, Remat, Result, Schedule, Tensors,
    profile::{Profiling, profile},
};
use gpipe_core::plan::{Plan, PlanDevice, predict};
use gpipe_drivers::{
    Arguments, Failure,
    workload::{SAMPLES, STAGES, Workload},
};
use serde_json::json;

/// Number of steps that still touch memory for the first time, as in a profile.
const WARM_UP: usize = 3;

/// Values of M that are measured with re-materialization. All values are measured without.
fn again(workload: &str) -> &'static [usize] {
    match workload {
        "amoeba" => &[2, 4, 8, 16, 32],
        _ => &[8],
    }
}

type Parsed<T> = std::result::Result<T, Failure>;

/// The configurations to run.
struct Pairs {
    workload: Workload,
    again: &'static [usize],
    stages: usize,
    micro_batches: Vec<usize>,
    schedules: Vec<Schedule>,
}

/// The comma-separated values of `key`.
fn list<T: FromStr>(arguments: &mut Arguments, key: &str, default: &str) -> Parsed<Vec<T>>
where
    T::Err: std::fmt::Display,
{
    let text: String = arguments.take(key, default)?;
    let one = |part: &str| part.parse().map_err(|error| format!("{key}={text}: {error}").into());
    text.split(',').map(one).collect()
}

impl Pairs {
    /// Each M and schedule, with its re-materialization policies. One profile covers all policies.
    fn configurations(&self) -> Vec<(usize, Schedule, Vec<Remat>)> {
        let mut all = Vec::new();
        for schedule in &self.schedules {
            for &micro_batches in &self.micro_batches {
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

    /// A pipeline past its first steps, which are slower, with its plan.
    fn running(
        &self,
        micro_batches: usize,
        schedule: &Schedule,
        remat: Remat,
    ) -> Parsed<(Plan, Pipeline)> {
        let built = self.workload.builder(micro_batches).stages(self.stages);
        let built = built.schedule(schedule.clone()).remat(remat);
        let mut pipeline = built.balance(Balance::Cost).build()?;
        for _ in 0..WARM_UP {
            pipeline.train_step(&self.workload.inputs, &self.workload.targets)?;
        }
        let balance = pipeline.balance().to_vec();
        let schedule = schedule.clone();
        Ok((Plan { balance, micro_batches, schedule, remat: remat.into() }, pipeline))
    }

    /// Runs pairs of a prediction and a step in turn.
    fn pairs(
        &self,
        micro_batches: usize,
        schedule: &Schedule,
        remats: &[Remat],
        pairs: usize,
    ) -> Parsed<()> {
        let batches = [(Tensors::new(&self.workload.inputs), Tensors::new(&self.workload.targets))];
        let settings = Profiling {
            micro_batches: &[micro_batches],
            schedules: std::slice::from_ref(schedule),
            steps: 1,
            passes: 1,
            batches: &batches,
            machine: "this one",
            values: &[],
        };
        let build = || -> Result<PipelineBuilder> {
            Ok(self.workload.builder(micro_batches).stages(self.stages))
        };
        let devices = vec![PlanDevice::default(); self.stages];
        let running = |&remat: &Remat| self.running(micro_batches, schedule, remat);
        let mut running = remats.iter().map(running).collect::<Parsed<Vec<_>>>()?;
        for pair in 0..pairs {
            let costs = profile(&settings, build, |_| {}, Ok)?.costs;
            for (plan, pipeline) in &mut running {
                let predicted = predict(&costs, &devices, SAMPLES, plan)?;
                let step = pipeline.train_step(&self.workload.inputs, &self.workload.targets)?;
                let (planned, held) = (predicted.device_peaks().into_iter(), step.devices.iter());
                let line = json!({
                    "stages": self.stages,
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

fn main() -> Parsed<()> {
    gpipe::keep_freed_memory();
    let mut arguments = Arguments::read()?;
    let name: String = arguments.take("workload", "gpt")?;
    let workload = Pairs {
        workload: Workload::named(&name)?,
        again: again(&name),
        stages: arguments.take("stages", &STAGES.to_string())?,
        micro_batches: list(&mut arguments, "micro_batches", "2,4,8,16,32")?,
        schedules: list(&mut arguments, "schedules", "gpipe,1f1b")?,
    };
    let pairs = arguments.take("pairs", "9")?;
    for (micro_batches, schedule, remats) in workload.configurations() {
        workload.pairs(micro_batches, &schedule, &remats, pairs)?;
    }
    Ok(())
}
