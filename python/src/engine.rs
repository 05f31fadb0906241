//! The class behind `gpipe.Pipeline`.

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use gpipe::{
    Count, Group, Interrupt, Outputs, Tensors,
    processes::{Links, Transport},
};
use gpipe_checkpoint::{
    CheckpointError, Checkpoints, RunInfo, Settings as CheckpointSettings, folder,
};
use gpipe_distributed::{Cluster, environment::Environment};
use pyo3::{prelude::*, types::PyDict};
use pyo3_tch::PyTensor;
use tch::Tensor;

use crate::{
    convert::{named, optional, tuple},
    driver::{Driver, Owned},
    failure::{Failure, exception, raised},
    planning, report,
    settings::{Prepared, Settings},
};

/// A pipeline on a thread of its own.
#[pyclass(frozen)]
pub(crate) struct Engine {
    driver: Arc<Driver>,
    failure: Failure,
    cluster: Option<Arc<Cluster>>,
    /// To measure it, which builds it again.
    builder: gpipe::PipelineBuilder,
}

impl Engine {
    /// Runs `job`, and turns its error into an exception.
    fn with<T: Send + 'static>(
        &self,
        py: Python<'_>,
        job: impl FnOnce(&mut Owned) -> gpipe::Result<T> + Send + 'static,
    ) -> PyResult<T> {
        self.failure.clear();
        let done = self.driver.call(py, job)?;
        done.map_err(|error| exception(py, &error, &self.failure))
    }

    /// As [`Engine::with`], for calls on checkpoints.
    fn with_files<T: Send + 'static>(
        &self,
        py: Python<'_>,
        job: impl FnOnce(&mut Owned) -> Result<T, CheckpointError> + Send + 'static,
    ) -> PyResult<T> {
        let done = self.driver.call(py, job)?;
        done.map_err(|error| raised(py, "CheckpointError", &error.to_string()))
    }
}

fn arguments(tensors: Vec<Option<PyTensor>>) -> Tensors {
    Tensors::new(optional(tensors))
}

#[pymethods]
impl Engine {
    /// Builds the pipeline. With `in_processes`, meets the processes that the environment names;
    /// `links`: "gloo" or "nccl".
    #[new]
    fn new(py: Python<'_>, settings: Settings, in_processes: bool, links: &str) -> PyResult<Self> {
        let links = links.parse::<Links>().map_err(|text| raised(py, "SettingError", &text))?;
        let (interrupt, failure) = (Interrupt::default(), Failure::default());
        let mut prepared = settings.prepare(&interrupt, &failure)?;
        let cluster = if in_processes { meet(py, prepared.timeout)? } else { None };
        if let Some(cluster) = &cluster {
            let transport = Arc::clone(cluster);
            prepared.builder = prepared.builder.processes(transport).links(links);
        }
        let builder = prepared.builder.clone();
        let id = failure.id();
        let built = Driver::start(py, interrupt, id, move || Prepared::build(prepared))?;
        match built {
            Ok(driver) => Ok(Self { driver: Arc::new(driver), failure, cluster, builder }),
            Err(error) => Err(exception(py, &error, &failure)),
        }
    }

    /// (rank, number of processes).
    #[getter]
    fn processes(&self) -> (usize, usize) {
        self.cluster.as_ref().map_or((0, 1), |cluster| (cluster.rank(), cluster.size()))
    }

    /// Whether this process has the pipeline's threads.
    #[getter]
    fn is_here(&self) -> bool {
        self.driver.is_here()
    }

    /// Raises if a call from here would never be answered.
    fn check_caller(&self, py: Python<'_>) -> PyResult<()> {
        self.driver.check_caller(py)
    }

    fn train_step<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Option<PyTensor>>,
        targets: Vec<Option<PyTensor>>,
        lr: Option<f64>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (inputs, targets) = (arguments(inputs), arguments(targets));
        let own = self.with(py, move |owned| {
            owned.needs_no_forwards("train")?;
            if let Some(lr) = lr {
                owned.pipeline.set_learning_rate(lr);
            }
            owned.pipeline.train_step(inputs, targets)
        })?;
        report::step(py, own)
    }

    fn evaluate<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Option<PyTensor>>,
        targets: Vec<Option<PyTensor>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (inputs, targets) = (arguments(inputs), arguments(targets));
        let own = self.with(py, move |owned| owned.pipeline.evaluate(inputs, targets))?;
        report::evaluation(py, own)
    }

    fn predict<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Option<PyTensor>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let inputs = arguments(inputs);
        let outputs = self.with(py, move |owned| owned.pipeline.predict(inputs))?;
        Ok(tuple(py, outputs)?.into_any())
    }

    /// A forward whose backward may come. Applies the statistics of batch norms, as PyTorch does.
    fn forward<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Option<PyTensor>>,
    ) -> PyResult<(Bound<'py, PyAny>, OpenForward)> {
        let (inputs, driver) = (arguments(inputs), Arc::clone(&self.driver));
        let (tensors, open) = self.with(py, move |owned| {
            let outputs = owned.pipeline.forward(inputs)?;
            owned.pipeline.apply_statistics(&outputs)?;
            let tensors: Vec<Tensor> = outputs.tensors().iter().map(Tensor::detach).collect();
            owned.next += 1;
            owned.open.insert(owned.next, outputs);
            // Made here, so that a call which Ctrl-C ends drops it, and so closes the forward.
            Ok((tensors, OpenForward { number: owned.next, driver }))
        })?;
        Ok((tuple(py, tensors)?.into_any(), open))
    }

    /// Goes back through a forward. Returns the gradients of the inputs, and those of parameters by
    /// name.
    #[allow(clippy::type_complexity)] // of Python
    fn backward(
        &self,
        py: Python<'_>,
        open: &OpenForward,
        gradients: Vec<Option<PyTensor>>,
    ) -> PyResult<(Vec<Option<PyTensor>>, Vec<(String, PyTensor)>)> {
        let (number, gradients) = (open.number, arguments(gradients));
        let (inputs, parameters) = self.with(py, move |owned| {
            let Some(outputs) = owned.open.remove(&number) else {
                return Err(gpipe::Error::Input(
                    "what this forward kept is freed: its backward has run (retain_graph=True is \
                    not supported), or the model has changed since; call the pipeline again"
                        .into(),
                ));
            };
            let inputs = owned.pipeline.backward(&outputs, gradients)?;
            Ok((inputs, owned.pipeline.take_gradients()?))
        })?;
        Ok((inputs.into_iter().map(|own| own.map(PyTensor)).collect(), named(parameters)))
    }

    /// Forwards and backwards under the schedule, with the pipeline's loss. Returns the evaluation,
    /// and the gradients by name.
    #[allow(clippy::type_complexity)] // of Python
    fn accumulate<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Option<PyTensor>>,
        targets: Vec<Option<PyTensor>>,
        count: Option<f64>,
    ) -> PyResult<(Bound<'py, PyDict>, Vec<(String, PyTensor)>)> {
        let (inputs, targets) = (arguments(inputs), arguments(targets));
        let (own, gradients) = self.with(py, move |owned| {
            // Divided by the whole count, so the parts of a larger batch add up.
            let total = match count {
                Some(total) => total,
                None => owned.pipeline.counts_of(&inputs, &targets)?[0],
            };
            let found = owned.pipeline.accumulate(inputs, targets, Count::Total(total))?;
            Ok((found, owned.pipeline.take_gradients()?))
        })?;
        Ok((report::evaluation(py, own)?, named(gradients)))
    }

    /// Copies of the parameters whose names match `pattern`.
    fn parameters(&self, py: Python<'_>, pattern: String) -> PyResult<Vec<(String, PyTensor)>> {
        Ok(named(self.with(py, move |owned| owned.pipeline.parameters_matching(&pattern))?))
    }

    fn averages(&self, py: Python<'_>) -> PyResult<Vec<(String, PyTensor)>> {
        Ok(named(self.with(py, |owned| owned.pipeline.averages())?))
    }

    fn gradients(&self, py: Python<'_>) -> PyResult<Vec<(String, PyTensor)>> {
        Ok(named(self.with(py, |owned| owned.pipeline.gradients())?))
    }

    fn set_parameters(&self, py: Python<'_>, values: Vec<(String, PyTensor)>) -> PyResult<()> {
        let values: Vec<_> = values.into_iter().map(|(name, own)| (name, own.0)).collect();
        self.with(py, move |owned| {
            owned.discard_forwards()?;
            owned.pipeline.set_parameters(&values)
        })
    }

    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |owned| {
            owned.discard_forwards()?;
            owned.pipeline.refresh_parameters()
        })
    }

    /// Freezes some parameters and trains others, by name.
    fn set_trained(
        &self,
        py: Python<'_>,
        frozen: Vec<String>,
        trained: Vec<String>,
    ) -> PyResult<()> {
        self.with(py, move |owned| {
            owned.needs_no_forwards("freeze or train parameters")?;
            if !frozen.is_empty() {
                owned.pipeline.freeze(frozen)?;
            }
            if !trained.is_empty() {
                owned.pipeline.unfreeze(trained)?;
            }
            Ok(())
        })
    }

    fn regroup(&self, py: Python<'_>, groups: Vec<(Vec<String>, f64, f64)>) -> PyResult<()> {
        let group = |(names, lr_scale, decay): (Vec<String>, f64, f64)| {
            Group::matching(names).lr_scale(lr_scale).weight_decay(decay)
        };
        let groups: Vec<Group> = groups.into_iter().map(group).collect();
        self.with(py, move |owned| {
            owned.needs_no_forwards("train")?;
            owned.pipeline.regroup(groups)
        })
    }

    fn set_input_gradients(&self, py: Python<'_>, wanted: bool) -> PyResult<()> {
        self.with(py, move |owned| {
            owned.needs_no_forwards(
                "give inputs that require gradients for the first time, or make the pipeline with \
                input_gradients=True",
            )?;
            owned.pipeline.set_input_gradients(wanted)
        })
    }

    #[getter]
    fn balance(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.with(py, |owned| Ok(owned.pipeline.balance().to_vec()))
    }

    #[getter]
    fn steps(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |owned| Ok(owned.pipeline.steps()))
    }

    /// Saves a checkpoint in `folder` with further `files`, and waits until it is on disk. Returns
    /// its folder, and what could not be tidied up.
    fn save(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        keep: usize,
        files: Vec<(String, Vec<u8>)>,
    ) -> PyResult<(PathBuf, Option<String>)> {
        let cluster = self.cluster.clone();
        self.with_files(py, move |owned| {
            let settings = CheckpointSettings { keep, ..CheckpointSettings::default() };
            let mut checkpoints = match cluster {
                Some(cluster) => {
                    let transport: Arc<dyn Transport> = cluster;
                    Checkpoints::open_among(&folder, settings, &transport)?
                }
                None => Checkpoints::open(&folder, settings)?,
            };
            let info = RunInfo { files, ..RunInfo::default() };
            let first = checkpoints.save(&mut owned.pipeline, info)?;
            let saved = checkpoints.wait()?.or(first);
            Ok(saved.map_or((folder, None), |saved| (saved.folder, saved.untidy)))
        })
    }

    /// Restores the newest checkpoint in `folder`, or the one that `folder` is.
    fn restore(&self, py: Python<'_>, folder: PathBuf) -> PyResult<()> {
        self.with_files(py, move |owned| {
            owned.discard_forwards()?;
            folder::find(&folder)?.checkpoint.restore(&mut owned.pipeline)?;
            Ok(())
        })
    }

    /// Uses parameters of a failed update, or that a forward has changed. Returns whether there
    /// were such.
    fn accept_torn_update(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |owned| owned.pipeline.accept_torn_update())
    }

    /// Measures the layers' costs. Returns a profile as JSON.
    fn profile(
        &self,
        py: Python<'_>,
        inputs: Vec<Option<PyTensor>>,
        targets: Vec<Option<PyTensor>>,
        micro_batches: Vec<usize>,
        schedules: Vec<String>,
        steps: usize,
    ) -> PyResult<String> {
        let (builder, batch) = (self.builder.clone(), (arguments(inputs), arguments(targets)));
        let job = planning::Measurement { builder, batch, micro_batches, schedules, steps };
        self.with(py, move |owned| job.run(owned.pipeline.parameters()?))
    }

    /// The bytes that each process gives, of all processes.
    fn gather(&self, py: Python<'_>, own: Vec<u8>) -> PyResult<Vec<Vec<u8>>> {
        let Some(cluster) = self.cluster.clone() else { return Ok(vec![own]) };
        self.with(py, move |_| Ok(cluster.gather(own)?))
    }
}

/// Meets the processes that the environment names. `None` if it names none.
fn meet(py: Python<'_>, timeout: Duration) -> PyResult<Option<Arc<Cluster>>> {
    let failed = |text: String| raised(py, "PeerError", &text);
    let Some(environment) =
        Environment::read().map_err(|error| raised(py, "SettingError", &error.to_string()))?
    else {
        return Ok(None);
    };
    let meeting = environment.meeting(timeout, Vec::new());
    let meeting = meeting.map_err(|error| raised(py, "SettingError", &error.to_string()))?;
    let joined = py.allow_threads(|| Cluster::join(meeting).map_err(|error| error.to_string()));
    joined.map(Some).map_err(failed)
}

/// The right to go back through a forward once. Dropping it frees what the stages kept.
#[pyclass(frozen)]
pub(crate) struct OpenForward {
    number: u64,
    driver: Arc<Driver>,
}

impl Drop for OpenForward {
    fn drop(&mut self) {
        let number = self.number;
        self.driver.send(move |owned: &mut Owned| {
            let open: &mut HashMap<u64, Outputs> = &mut owned.open;
            drop(open.remove(&number));
        });
    }
}
