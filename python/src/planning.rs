//! Profiles, plans and checkpoints on disk, for Python.

use std::{borrow::Cow, path::PathBuf};

use gpipe::{
    Bytes, Error, PipelineBuilder, Result, Schedule, Tensors,
    plan::{PlanDevice, Request, Usual, explain, search},
    profile::{Profile, Profiling, profile},
};
use gpipe_checkpoint::{
    CheckpointError,
    folder::{self, Found},
};
use gpipe_core::partition::by_cost;
use gpipe_observe::step_file::STAGES_MAX;
use pyo3::{exceptions::PyValueError, prelude::*, types::PyDict};
use pyo3_tch::PyTensor;
use tch::Tensor;

use crate::{convert::named, failure::raised};

/// A measurement of the layers' costs.
pub(crate) struct Measurement {
    pub builder: PipelineBuilder,
    pub batch: (Tensors, Tensors),
    pub micro_batches: Vec<usize>,
    pub schedules: Vec<String>,
    pub steps: usize,
}

impl Measurement {
    /// Measures trainings that start with these parameters, and returns the profile as JSON.
    pub(crate) fn run(self, values: Vec<(String, Tensor)>) -> Result<String> {
        let schedules: Vec<Schedule> = self
            .schedules
            .iter()
            .map(|text| text.parse().map_err(|error| Error::Setting(format!("{error}"))))
            .collect::<Result<_>>()?;
        let settings = Profiling {
            micro_batches: &self.micro_batches,
            schedules: &schedules,
            steps: self.steps,
            passes: 1,
            batches: &[self.batch],
            machine: "this machine",
            values: &values,
        };
        profile(&settings, || Ok(self.builder.clone()), |_| (), Ok)?.to_json()
    }
}

/// Finds the fastest plan that fits. Returns it, with what is predicted, as a dictionary.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // keywords of Python
pub(crate) fn plan<'py>(
    py: Python<'py>,
    measured: &str,
    stages: Vec<usize>,
    micro_batches: Vec<usize>,
    schedules: Vec<String>,
    samples: usize,
    memory: Option<u64>,
) -> PyResult<Bound<'py, PyDict>> {
    let wrong = |text: String| raised(py, "SettingError", &text);
    let measured =
        Profile::from_json(measured, "the profile").map_err(|error| wrong(error.to_string()))?;
    let makes_orders = schedules.iter().any(|name| name == "auto");
    let named = schedules.iter().filter(|name| *name != "auto");
    let mut schedules: Vec<Schedule> = named
        .map(|text| text.parse().map_err(|error| wrong(format!("{error}"))))
        .collect::<PyResult<_>>()?;
    if schedules.is_empty() && makes_orders {
        schedules = Schedule::NAMED.to_vec();
    }
    let most = stages.iter().copied().max().unwrap_or(1);
    if most > STAGES_MAX {
        return Err(wrong(format!("stages: {most}: use at most {STAGES_MAX}")));
    }
    let devices = vec![PlanDevice { memory: memory.map(Bytes), ..PlanDevice::default() }; most];
    let request = Request {
        model: &measured.costs,
        devices: &devices,
        samples,
        stages,
        micro_batches,
        schedules,
        makes_orders,
        balance: None,
        remat: None,
        budget: Request::BUDGET,
        usual: None::<Usual>,
    };
    let found = py.allow_threads(|| search(&request)).map_err(|error| wrong(error.to_string()))?;
    let all = PyDict::new(py);
    all.set_item("balance", found.plan.balance.clone())?;
    all.set_item("micro_batches", found.plan.micro_batches)?;
    all.set_item("schedule", found.plan.schedule.in_full())?;
    all.set_item("remat", found.plan.remat.to_string())?;
    all.set_item("step", found.prediction.step().0 as f64 * 1e-9)?;
    all.set_item("bubble", found.prediction.bubble())?;
    let peaks: Vec<u64> = found.prediction.device_peaks().iter().map(|own| own.0).collect();
    all.set_item("peaks", peaks)?;
    all.set_item("explanation", explain(&found))?;
    Ok(all)
}

/// Layers of each stage, so that the most expensive stage is as cheap as possible.
#[pyfunction]
pub(crate) fn cut(costs: Vec<u64>, stages: usize) -> PyResult<Vec<usize>> {
    by_cost(&costs, stages).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The parameters, by name, of the newest checkpoint in `folder` or of the one that `folder` is.
#[pyfunction]
pub(crate) fn checkpoint_parameters(
    py: Python<'_>,
    folder: PathBuf,
    averages: bool,
) -> PyResult<Vec<(String, PyTensor)>> {
    let read = || {
        let found = folder::find(&folder)?.checkpoint;
        if averages { found.averages() } else { found.parameters() }
    };
    let read: std::result::Result<_, CheckpointError> = py.allow_threads(read);
    Ok(named(read.map_err(|error| raised(py, "CheckpointError", &error.to_string()))?))
}

/// What was found in a folder of checkpoints: the folder of one, a file's content, and what was
/// skipped, with the reasons.
type FoundFile = (PathBuf, Option<Cow<'static, [u8]>>, Vec<String>);

/// The folder of the newest checkpoint in `folder`, or of the one that `folder` is, what
/// [`Engine::save`](crate::engine::Engine) was given as its file `name`, and the newer checkpoints
/// that are damaged.
#[pyfunction]
pub(crate) fn checkpoint_file(py: Python<'_>, folder: PathBuf, name: &str) -> PyResult<FoundFile> {
    let read = || {
        let Found { checkpoint, skipped } = folder::find(&folder)?;
        let skipped = skipped.iter().map(|own| format!("{}: {}", own.folder.display(), own.reason));
        let content = checkpoint.run_file(name)?.map(Cow::Owned);
        Ok((checkpoint.folder().to_path_buf(), content, skipped.collect()))
    };
    let read: std::result::Result<_, CheckpointError> = py.allow_threads(read);
    read.map_err(|error| raised(py, "CheckpointError", &error.to_string()))
}
