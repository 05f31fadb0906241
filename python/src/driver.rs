//! The thread that owns a pipeline, and how Python waits for it.
//!
//! A call runs on that thread, without the interpreter's lock, because the stages' threads need the
//! lock. Meanwhile the caller looks for signals, so that Ctrl-C ends a step.

use std::{
    collections::HashMap,
    mem::ManuallyDrop,
    sync::mpsc::{self, RecvTimeoutError, SyncSender},
    thread::{self, JoinHandle},
    time::Duration,
};

use gpipe::{Error, Interrupt, Outputs, Pipeline, Result};
use pyo3::{
    exceptions::{PyKeyboardInterrupt, PyRuntimeError},
    prelude::*,
};

use crate::{failure::raised, gil, running};

/// How often a waiting call looks for signals.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);
/// Most calls that wait for the thread. Each Python thread has at most one.
const CALLS_MAX: usize = 256;

/// What the thread owns.
pub(crate) struct Owned {
    pub pipeline: Pipeline,
    /// Forwards whose backward may still come, by number.
    pub open: HashMap<u64, Outputs>,
    pub next: u64,
}

impl Owned {
    /// Gives up open forwards. The caller has changed what they computed with.
    pub(crate) fn discard_forwards(&mut self) -> Result<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        self.open.clear();
        self.pipeline.discard_update()
    }

    /// Returns an error if forwards are open.
    pub(crate) fn needs_no_forwards(&self, what: &str) -> Result<()> {
        match self.open.len() {
            0 => Ok(()),
            number => Err(Error::Setting(format!(
                "forwards that wait for their backward: {number}; run it, or drop their outputs, \
                before you {what}"
            ))),
        }
    }
}

type Job = Box<dyn FnOnce(&mut Owned) + Send>;

/// A pipeline on its thread.
pub(crate) struct Driver {
    jobs: ManuallyDrop<SyncSender<Job>>,
    thread: ManuallyDrop<JoinHandle<()>>,
    interrupt: Interrupt,
    /// The pipeline's [`Failure::id`].
    id: usize,
    /// The process that has the thread. A fork of it has not.
    process: u32,
}

impl Driver {
    /// Starts the thread, which builds the pipeline.
    pub(crate) fn start(
        py: Python<'_>,
        interrupt: Interrupt,
        id: usize,
        build: impl FnOnce() -> Result<Pipeline> + Send + 'static,
    ) -> PyResult<Result<Self>> {
        let (jobs, queue) = mpsc::sync_channel::<Job>(CALLS_MAX);
        let (built, result) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name("gpipe".into()).spawn(move || {
            let pipeline = match build() {
                Ok(pipeline) => pipeline,
                Err(error) => return drop(built.send(Err(error))),
            };
            drop(built.send(Ok(())));
            let mut owned = Owned { pipeline, open: HashMap::new(), next: 0 };
            for job in queue {
                job(&mut owned);
            }
        })?;
        let (jobs, thread) = (ManuallyDrop::new(jobs), ManuallyDrop::new(thread));
        let driver = Self { jobs, thread, interrupt, id, process: std::process::id() };
        let built = driver.wait(py, result)?;
        Ok(built.map(|()| driver))
    }

    /// Whether this process has the thread: a fork of it has not.
    pub(crate) fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    /// Refuses a caller for whom nothing would ever answer: a fork, a layer, or what else of Python
    /// the pipeline itself runs.
    pub(crate) fn check_caller(&self, py: Python<'_>) -> PyResult<()> {
        if !self.is_here() {
            let text = "this process is a fork of the one that made the pipeline, and has none of \
                its threads: make the pipeline after the fork, or use it in the parent only";
            return Err(raised(py, "SettingError", text));
        }
        if running::in_layer() {
            let text = "a layer calls a pipeline, which would wait for itself";
            return Err(raised(py, "SettingError", text));
        }
        if gil::owner() == self.id {
            let text = "the loss or a hook calls its own pipeline, which would wait for itself: \
                compute with the module, or call the pipeline between steps";
            return Err(raised(py, "SettingError", text));
        }
        Ok(())
    }

    /// Runs `job` on the thread, and waits for it.
    ///
    /// # Errors
    /// As for [`Driver::check_caller`]. A signal's exception, such as `KeyboardInterrupt`, after
    /// the step has ended.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        job: impl FnOnce(&mut Owned) -> T + Send + 'static,
    ) -> PyResult<T> {
        self.check_caller(py)?;
        let (answer, result) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |owned| drop(answer.send(job(owned))));
        py.allow_threads(|| self.jobs.send(job)).map_err(|_| Self::gone())?;
        self.wait(py, result)
    }

    /// Runs `job` on the thread some time, without waiting.
    pub(crate) fn send(&self, job: impl FnOnce(&mut Owned) + Send + 'static) {
        if self.is_here() {
            // If the queue is full or the thread gone, there is nothing left to free.
            let _ = self.jobs.try_send(Box::new(job));
        }
    }

    fn wait<T: Send>(&self, py: Python<'_>, result: mpsc::Receiver<T>) -> PyResult<T> {
        let wait = move || loop {
            match result.recv_timeout(SIGNALS_EVERY) {
                Ok(found) => return Ok(found),
                Err(RecvTimeoutError::Disconnected) => return Err(Self::gone()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Err(signal) = Python::with_gil(|py| py.check_signals()) {
                self.interrupt.set();
                let _ = result.recv();
                self.interrupt.clear();
                return Err(Self::without_repeat(signal));
            }
        };
        py.allow_threads(wait)
    }

    /// `first`, or the exception of another signal that came while the step ended. A second Ctrl-C
    /// is the same request: it would break into what handles the first.
    fn without_repeat(first: PyErr) -> PyErr {
        Python::with_gil(|py| {
            let interrupts = |error: &PyErr| error.is_instance_of::<PyKeyboardInterrupt>(py);
            match py.check_signals() {
                Err(second) if !(interrupts(&first) && interrupts(&second)) => second,
                _ => first,
            }
        })
    }

    fn gone() -> PyErr {
        PyRuntimeError::new_err(
            "the pipeline's thread has ended after a panic: make a new pipeline",
        )
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.is_here() {
            return; // a fork has no thread to wait for, and shares the queue with its parent
        }
        // SAFETY: both are taken once, here, and `self` is not used afterwards.
        let (jobs, thread) =
            unsafe { (ManuallyDrop::take(&mut self.jobs), ManuallyDrop::take(&mut self.thread)) };
        drop(jobs);
        // The stages' threads may need the interpreter's lock to end.
        Python::with_gil(|py| py.allow_threads(|| drop(thread.join())));
    }
}
