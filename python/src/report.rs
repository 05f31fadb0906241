//! What a step returns, for Python.

use gpipe::{DeviceReport, Evaluation, StepReport};
use gpipe_core::{Nanos, draw};
use gpipe_observe::{
    picture::{self, Panel, Scene},
    step_file::{Memory, StepFile},
};
use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyDict, PyType},
};

fn seconds(time: Nanos) -> f64 {
    time.0 as f64 * 1e-9
}

/// One device of a step, as a dictionary of seconds and bytes.
fn device<'py>(py: Python<'py>, own: &DeviceReport) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    for (name, time) in [
        ("forward", own.forward),
        ("recompute", own.recompute),
        ("backward", own.backward),
        ("optimizer", own.optimizer),
        ("communication", own.communication),
        ("fill_drain", own.fill_drain),
        ("imbalance", own.imbalance),
        ("stalls", own.stalls),
    ] {
        all.set_item(name, seconds(time))?;
    }
    for (name, bytes) in [("peak", own.peak), ("live", own.live), ("sent", own.sent)] {
        all.set_item(name, bytes.0)?;
    }
    Ok(all)
}

/// The fields of `gpipe.StepReport`.
pub(crate) fn step(py: Python<'_>, report: StepReport) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("step", report.step)?;
    all.set_item("skipped", report.skipped)?;
    all.set_item("loss", report.loss)?;
    all.set_item("count", report.count)?;
    all.set_item("grad_norm", report.grad_norm)?;
    all.set_item("clip_scale", report.clip_scale)?;
    all.set_item("lr", report.lr)?;
    all.set_item("loss_scale", report.loss_scale)?;
    all.set_item("time", seconds(report.time))?;
    all.set_item("bubble", report.bubble)?;
    all.set_item("overlap", seconds(report.overlap))?;
    let devices: Vec<_> =
        report.devices.iter().map(|own| device(py, own)).collect::<PyResult<_>>()?;
    all.set_item("devices", devices)?;
    let peaks = report.devices.iter().map(|own| own.peak).collect();
    let timeline = StepFile {
        step: report.step,
        simulated_gpus: gpipe::Device::gpus_are_simulated(),
        measured: report.timeline,
        predicted: None,
        memory: Memory { measured: report.bytes, peaks, ..Memory::default() },
    };
    all.set_item("timeline", Bound::new(py, Timeline(timeline))?)?;
    Ok(all)
}

/// The fields of `gpipe.Evaluation`.
pub(crate) fn evaluation(py: Python<'_>, own: Evaluation) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("loss", own.loss)?;
    all.set_item("sum", own.sum)?;
    all.set_item("count", own.count)?;
    Ok(all)
}

/// The actions of a step with their times. A notebook shows it as a picture.
#[pyclass(frozen, eq, module = "gpipe")]
#[derive(PartialEq)]
pub(crate) struct Timeline(StepFile);

impl Timeline {
    fn scene(&self) -> Scene<'_> {
        let StepFile { step, measured, memory, .. } = &self.0;
        let panel = Panel {
            bytes: &memory.measured,
            peaks: &memory.peaks,
            ..Panel::new("measured", "", measured)
        };
        let title = match step {
            0 => "A step".into(),
            step => format!("Step {step}"),
        };
        Scene { title, subtitle: Vec::new(), panels: vec![panel] }
    }
}

#[pymethods]
impl Timeline {
    /// The timeline that `json` returned.
    #[new]
    fn new(json: &str) -> PyResult<Self> {
        StepFile::parse(json).map(Self).map_err(PyValueError::new_err)
    }

    /// The text of a run's `step.json`.
    fn json(&self) -> PyResult<String> {
        self.0.to_json().map_err(PyValueError::new_err)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyType>, (String,))> {
        Ok((py.get_type::<Self>(), (self.json()?,)))
    }

    /// The picture as SVG.
    fn svg(&self) -> String {
        picture::svg(&self.scene())
    }

    /// The picture as a page that can be zoomed, and shows details under the pointer.
    fn html(&self) -> String {
        picture::html(&self.scene())
    }

    /// (device, action, start, end) of every action, in seconds. An action prints as `1B0`: the
    /// backward of micro-batch 0 on stage 1.
    fn actions(&self) -> Vec<(usize, String, f64, f64)> {
        let devices = self.0.measured.devices.iter().enumerate();
        let all = devices.flat_map(|(device, list)| {
            list.iter().map(move |own| {
                (device, own.action.to_string(), seconds(own.start), seconds(own.end))
            })
        });
        all.collect()
    }

    fn _repr_svg_(&self) -> String {
        self.svg()
    }

    fn __str__(&self) -> String {
        draw::timeline(&self.0.measured, 100)
    }
}
