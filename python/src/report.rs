//! What a step returns, for Python.

use gpipe::{DeviceReport, Evaluation, StepReport};
use gpipe_core::{Bytes, Nanos, draw, simulate::Timeline as Actions};
use gpipe_observe::picture::{self, Panel, Scene};
use pyo3::{prelude::*, types::PyDict};

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
    let timeline =
        Timeline { step: report.step, actions: report.timeline, bytes: report.bytes, peaks };
    all.set_item("timeline", Bound::new(py, timeline)?)?;
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
#[pyclass(frozen, module = "gpipe")]
pub(crate) struct Timeline {
    step: u64,
    actions: Actions,
    bytes: Vec<Vec<(Nanos, Bytes)>>,
    peaks: Vec<Bytes>,
}

impl Timeline {
    fn scene(&self) -> Scene<'_> {
        let panel = Panel {
            bytes: &self.bytes,
            peaks: &self.peaks,
            ..Panel::new("measured", "", &self.actions)
        };
        let title = match self.step {
            0 => "A step".into(),
            step => format!("Step {step}"),
        };
        Scene { title, subtitle: Vec::new(), panels: vec![panel] }
    }
}

#[pymethods]
impl Timeline {
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
        let devices = self.actions.devices.iter().enumerate();
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
        draw::timeline(&self.actions, 100)
    }
}
