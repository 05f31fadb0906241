//! A plan on disk: the decisions, the costs behind them, and the prediction made before the run.

use std::path::Path;

use gpipe::{Bytes, Nanos, profile::Subject};
use gpipe_core::{
    cost::ModelCosts,
    plan::{Plan, PlanDevice, Prediction, predict},
};
use serde::{Deserialize, Serialize};

use crate::{
    CliError,
    config::Config,
    files::{io, read_bounded, write_aside},
    values::ScheduleChoice,
};

/// The format version that is written.
const FORMAT: u32 = 1;
/// Maximum size of a plan file.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// The source of the costs.
#[derive(Clone)]
pub(crate) struct Source {
    pub costs: ModelCosts,
    /// A description of the source.
    pub text: String,
    /// What was profiled.
    pub subject: Subject,
    /// Whether costs were estimated from shapes. The subject then says nothing about devices.
    pub analytic: bool,
}

/// The contents of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlanFile {
    format: u32,
    /// A description of the source of the costs.
    pub source: String,
    /// What was profiled. Analytic costs depend on shapes only.
    pub subject: Subject,
    pub analytic: bool,
    /// Number of samples of a mini-batch, or of one replica's part.
    pub samples: usize,
    pub plan: Plan,
    /// How the machine's cores are used, if the plan decides that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deployment: Option<Deployment>,
    /// Devices by stage.
    pub devices: Vec<Placed>,
    pub predicted: Predicted,
    /// All costs that the prediction used.
    pub costs: ModelCosts,
}

/// How the cores of a machine are used besides stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Deployment {
    /// Copies of the pipeline.
    pub replicas: usize,
    /// Threads of each stage.
    pub threads: usize,
}

/// A device's speed and memory cap.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Placed {
    pub speed: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
}

/// A summary of the prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Predicted {
    pub step: Nanos,
    /// The quartiles of the step's time, if the costs have a spread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<[Nanos; 2]>,
    pub bubble: f64,
    /// Peak memory by stage.
    pub peaks: Vec<Bytes>,
}

impl Predicted {
    /// The quartiles as ` [low .. high]`, or nothing.
    pub(crate) fn quartiles(&self) -> String {
        self.interval.map_or(String::new(), |[low, high]| format!(" [{low} .. {high}]"))
    }
}

impl PlanFile {
    /// A plan file for `devices`.
    pub(crate) fn new(
        source: &Source,
        samples: usize,
        devices: &[PlanDevice],
        plan: &Plan,
        (prediction, interval): (&Prediction, Option<[Nanos; 2]>),
    ) -> Self {
        let placed = |device: &PlanDevice| Placed { speed: device.speed, memory: device.memory };
        let used = plan.devices();
        Self {
            format: FORMAT,
            source: source.text.clone(),
            subject: source.subject.clone(),
            analytic: source.analytic,
            samples,
            plan: plan.clone(),
            deployment: None,
            devices: devices.iter().take(used).map(placed).collect(),
            predicted: Predicted {
                step: prediction.step(),
                interval,
                bubble: prediction.bubble(),
                peaks: prediction.device_peaks(),
            },
            costs: source.costs.clone(),
        }
    }

    /// Reads and checks a file.
    pub(crate) fn read(path: &Path) -> Result<Self, CliError> {
        let bad = |reason: String| CliError::Usage(format!("{reason}; make one with gpipe plan"));
        let text = read_bounded(path, FILE_BYTES_MAX).map_err(|error| bad(error.to_string()))?;
        Self::from_json(&text).map_err(|reason| bad(format!("{}: {reason}", path.display())))
    }

    fn from_json(text: &str) -> Result<Self, String> {
        let file: Self = serde_json::from_str(text).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            format!("it is not a plan that gpipe wrote (line {line}, column {column})")
        })?;
        if file.format != FORMAT {
            return Err(format!("format {}, this gpipe reads {FORMAT}", file.format));
        }
        file.prediction().map_err(|error| error.to_string())?;
        Ok(file)
    }

    /// Writes the file, whole or not at all.
    pub(crate) fn write(&self, path: &Path) -> Result<(), CliError> {
        let text = serde_json::to_string(self).map_err(|error| io(path)(error.into()))?;
        write_aside(path, &text)
    }

    /// The full prediction, recomputed from the costs.
    pub(crate) fn prediction(&self) -> Result<Prediction, gpipe_core::plan::PlanError> {
        let device = |own: &Placed| PlanDevice { speed: own.speed, memory: own.memory };
        let devices: Vec<PlanDevice> = self.devices.iter().map(device).collect();
        predict(&self.costs, &devices, self.samples, &self.plan)
    }

    /// The replicas that the plan decides on, or 1.
    pub(crate) fn replicas(&self) -> usize {
        self.deployment.map_or(1, |deployment| deployment.replicas)
    }

    /// Changes the threads of `config` to the plan's, and the replicas, unless the command line
    /// gives them. Returns what that changes, which changes the last bits of results.
    pub(crate) fn deploy(&self, config: &mut Config, replicas: Option<usize>) -> Vec<String> {
        let Some(planned) = self.deployment else { return Vec::new() };
        let (replicas, threads) = (replicas.unwrap_or(planned.replicas), planned.threads);
        let pipeline = &mut config.pipeline;
        let mut changed = Vec::new();
        let own = [
            ("pipeline.replicas", &mut pipeline.replicas, replicas),
            ("pipeline.threads_per_stage", &mut pipeline.threads_per_stage, threads),
        ];
        for (key, own, planned) in own {
            if *own != planned {
                changed.push(format!("{key} {own} -> {planned}"));
                *own = planned;
            }
        }
        changed
    }

    /// Whether `config` follows the plan.
    pub(crate) fn is_followed(&self, config: &Config) -> bool {
        let mut planned = config.clone();
        self.apply(&mut planned, "").is_ok() && planned.pipeline == config.pipeline
    }

    /// Changes `config` to follow the plan.
    pub(crate) fn apply(&self, config: &mut Config, origin: &str) -> Result<(), CliError> {
        let (wanted, samples) = (config.samples_of_a_pipeline(), self.samples);
        if wanted != samples {
            let of = match config.pipeline.replicas {
                1 => String::new(),
                replicas => format!(" for each of {replicas} replicas"),
            };
            return Err(CliError::Usage(format!(
                "{origin} is a plan for mini-batches of {samples} samples, the configuration has \
                {wanted}{of}: plan again"
            )));
        }
        if config.pipeline.replicas > 1 && !self.costs.replicated {
            return Err(CliError::Usage(format!(
                "{origin} is a plan of one pipeline, without the bytes of sums over {} replicas: \
                plan again, with pipeline.replicas",
                config.pipeline.replicas
            )));
        }
        let (planned, wanted) = (self.costs.optimizer_shards.max(1), config.optimizer_shards());
        if planned > wanted {
            return Err(CliError::Usage(format!(
                "{origin} is a plan with the optimizer state divided among {planned} replicas, \
                which needs less memory: give --replicas {planned} --shard-optimizer, or plan again"
            )));
        }
        let Plan { balance, micro_batches, schedule, remat } = &self.plan;
        let stages = self.plan.devices();
        let own = &mut config.pipeline.devices.0;
        if own.len() != stages && own.windows(2).all(|pair| pair[0] == pair[1]) {
            own.truncate(1); // one for all
        }
        let devices = own.len();
        if devices > 1 && devices != stages {
            return Err(CliError::Usage(format!(
                "{origin} is a plan for {stages} stages, {devices} devices are configured: name \
                one for all, or one for each stage with --device"
            )));
        }
        config.pipeline.schedule = ScheduleChoice::Named(schedule.clone());
        config.set_stages(stages, true);
        let pipeline = &mut config.pipeline;
        pipeline.balance = gpipe::Balance::Layers(balance.clone());
        pipeline.micro_batches = *micro_batches;
        pipeline.remat = remat.clone();
        let caps: Option<Vec<Bytes>> = self.devices.iter().map(|device| device.memory).collect();
        // A plan without caps is of a run without caps.
        pipeline.memory.0 = caps.unwrap_or_default();
        Ok(config.check()?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gpipe::{
        Adam, MeanSquaredError, Pipeline, RematPolicies, Schedule, Sequence, TensorSpec,
        layers::Linear,
    };
    use gpipe_core::{
        cost::{LayerCost, LayerState},
        splitmix::Stream,
    };

    use super::*;

    fn file() -> PlanFile {
        let model = Sequence::new().layer(Linear::new(2, 2));
        let mut builder = Pipeline::builder(model, TensorSpec::new([8, 2], tch::Kind::Float))
            .loss(MeanSquaredError)
            .optimizer(Adam::default());
        let state = |name: &str| LayerState { name: name.into(), ..LayerState::default() };
        let cost = LayerCost { forward: Nanos(5), backward: Nanos(9), ..LayerCost::default() };
        let costs = ModelCosts {
            layers: vec![state("a"), state("b"), state("c")],
            sizes: BTreeMap::from([(2, vec![cost; 4])]),
            trained_before: vec![false, true, true, true],
            ..ModelCosts::default()
        };
        let plan = Plan {
            balance: vec![1, 2],
            micro_batches: 4,
            schedule: Schedule::OneFOneB,
            remat: RematPolicies::default(),
        };
        let devices = [PlanDevice { speed: 1.0, memory: Some(Bytes(1 << 30)) }; 2];
        let prediction = predict(&costs, &devices, 8, &plan).unwrap();
        let subject = builder.subject("here").unwrap();
        let source = Source { costs, text: "a test".into(), subject, analytic: false };
        let interval = Some([Nanos(1), Nanos(99)]);
        PlanFile::new(&source, 8, &devices, &plan, (&prediction, interval))
    }

    #[test]
    fn property_a_file_is_read_as_it_was_written_and_a_changed_one_never_panics() {
        let file = file();
        let text = serde_json::to_string(&file).unwrap();
        assert_eq!(PlanFile::from_json(&text).unwrap(), file);
        let pieces = ["99999999999999999999", "-1", "1e308", "null", "[", "0", "\"x\""];
        let mut random = Stream::new(6);
        let mut refused = 0;
        for _ in 0..4000 {
            let mut bytes = text.clone().into_bytes();
            for _ in 0..1 + random.below(3) {
                let at = random.below(bytes.len());
                match random.below(4) {
                    0 => bytes.truncate(at),
                    1 => drop(bytes.drain(at..(at + 1 + random.below(20)).min(bytes.len()))),
                    2 => drop(bytes.splice(at..at, pieces[random.below(pieces.len())].bytes())),
                    _ => bytes[at] = b"0123456789,:{}[]\"-e."[random.below(20)],
                }
                if bytes.is_empty() {
                    bytes.push(b'{');
                }
            }
            match PlanFile::from_json(&String::from_utf8_lossy(&bytes)) {
                Ok(read) => drop(read.prediction().unwrap()),
                Err(reason) => {
                    assert!(!reason.is_empty());
                    refused += 1;
                }
            }
        }
        assert!(refused > 2000, "{refused}");
    }
}
