//! A plan on disk: what was decided, from which costs, and what was predicted, before anything runs.

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
    files::{read_bounded, write_aside},
    metrics::io,
};

/// The format that is written.
const FORMAT: u32 = 1;
/// Largest file.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// The file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlanFile {
    format: u32,
    /// Where the costs come from, in words.
    pub source: String,
    /// What they are of; none of analytic ones, which are of shapes alone.
    pub subject: Option<Subject>,
    /// Samples of a mini-batch.
    pub samples: usize,
    pub plan: Plan,
    /// By stage.
    pub devices: Vec<Placed>,
    pub predicted: Predicted,
    /// All that the prediction was made of.
    pub costs: ModelCosts,
}

/// A device and its cap.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Placed {
    pub speed: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
}

/// The prediction in short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Predicted {
    pub step: Nanos,
    pub bubble: f64,
    /// By stage.
    pub peaks: Vec<Bytes>,
}

impl PlanFile {
    /// Of a plan for `devices`.
    pub(crate) fn new(
        source: String,
        subject: Option<Subject>,
        samples: usize,
        devices: &[PlanDevice],
        plan: &Plan,
        prediction: &Prediction,
        costs: &ModelCosts,
    ) -> Self {
        let placed = |device: &PlanDevice| Placed { speed: device.speed, memory: device.memory };
        let stages = plan.balance.len();
        Self {
            format: FORMAT,
            source,
            subject,
            samples,
            plan: plan.clone(),
            devices: devices.iter().take(stages).map(placed).collect(),
            predicted: Predicted {
                step: prediction.step(),
                bubble: prediction.bubble(),
                peaks: prediction.stages.iter().map(|stage| stage.peak).collect(),
            },
            costs: costs.clone(),
        }
    }

    /// Reads and checks a file.
    pub(crate) fn read(path: &Path) -> Result<Self, CliError> {
        let text = read_bounded(path, FILE_BYTES_MAX)?;
        Self::from_json(&text).map_err(|reason| {
            CliError::Usage(format!("{}: {reason}; make another with gpipe plan", path.display()))
        })
    }

    fn from_json(text: &str) -> Result<Self, String> {
        let file: Self = serde_json::from_str(text).map_err(|error| format!("no plan: {error}"))?;
        if file.format != FORMAT {
            return Err(format!("format {}, this gpipe reads {FORMAT}", file.format));
        }
        file.prediction().map_err(|error| error.to_string())?;
        Ok(file)
    }

    /// Writes it, whole or not at all.
    pub(crate) fn write(&self, path: &Path) -> Result<(), CliError> {
        let text = serde_json::to_string(self).map_err(|error| io(path)(error.into()))?;
        write_aside(path, &text)
    }

    /// The prediction in full, made again from the costs.
    pub(crate) fn prediction(&self) -> Result<Prediction, gpipe_core::plan::PlanError> {
        let device = |own: &Placed| PlanDevice { speed: own.speed, memory: own.memory };
        let devices: Vec<PlanDevice> = self.devices.iter().map(device).collect();
        predict(&self.costs, &devices, self.samples, &self.plan)
    }

    /// Runs `config` as planned.
    pub(crate) fn apply(&self, config: &mut Config, origin: &str) -> Result<(), CliError> {
        let mini_batch = config.train.mini_batch;
        if mini_batch != self.samples {
            let samples = self.samples;
            return Err(CliError::Usage(format!(
                "{origin} is a plan for mini-batches of {samples} samples, the configuration has {mini_batch}: plan again"
            )));
        }
        let Plan { balance, micro_batches, schedule, remat } = &self.plan;
        config.set_stages(balance.len(), false);
        let pipeline = &mut config.pipeline;
        pipeline.balance = gpipe::Balance::Layers(balance.clone());
        pipeline.micro_batches = *micro_batches;
        pipeline.schedule = *schedule;
        pipeline.remat = remat.clone();
        let caps: Option<Vec<Bytes>> = self.devices.iter().map(|device| device.memory).collect();
        if let Some(caps) = caps {
            pipeline.memory.0 = caps;
        }
        Ok(())
    }
}
