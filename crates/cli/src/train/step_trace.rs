//! `step.json` in the run's folder: the latest step with its prediction.
//!
//! It is written early, so that a new run has a picture, and again at the end.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
};

use gpipe::{Bytes, Nanos, Pipeline, StepReport};
use gpipe_core::simulate::Timeline;
use gpipe_observe::step_file::{self, ACTIONS_MAX, Memory, Predicted, StepFile};

use crate::{output::complain, plan_file::PlanFile, run_folder::PLAN};

/// Number of steps after which the file is first written. The first steps are slower.
const EARLY: u64 = 10;
/// Maximum number of steps whose measured costs make the prediction.
const STEPS: usize = 8;

/// The latest steps of a run.
pub(super) struct StepTrace {
    path: PathBuf,
    /// Memory caps: one for all devices, or one per device.
    caps: Vec<Bytes>,
    /// The prediction of the run's plan.
    planned: Option<Planned>,
    applied: u64,
    latest: VecDeque<Kept>,
}

/// The step that a plan predicts.
struct Planned {
    predicted: Predicted,
    bytes: Vec<Vec<(Nanos, Bytes)>>,
}

/// The recorded values of a step.
struct Kept {
    step: u64,
    timeline: Timeline,
    peaks: Vec<Bytes>,
    bytes: Vec<Vec<(Nanos, Bytes)>>,
}

impl StepTrace {
    /// The trace of a run in `out` with the memory caps `caps`, which follows `plan` if there is
    /// one.
    pub(super) fn new(out: &Path, caps: Vec<Bytes>, plan: Option<&PlanFile>) -> Self {
        let path = out.join(step_file::NAME);
        let planned = plan.and_then(|plan| {
            let prediction = plan.prediction().ok()?; // read and checked before
            let bytes = prediction.bytes();
            let source = format!("{PLAN}, written before the run: {}", plan.source);
            Some(Planned { predicted: Predicted { source, timeline: prediction.timeline }, bytes })
        });
        Self { path, caps, planned, applied: 0, latest: VecDeque::new() }
    }

    /// Records a step.
    pub(super) fn step(&mut self, pipeline: &mut Pipeline, report: &StepReport) {
        if report.skipped {
            return;
        }
        let timeline = report.timeline.clone();
        // Keep fewer steps if they are huge: together no more actions than one file may have.
        let room = ACTIONS_MAX / timeline.actions().count().max(1);
        self.latest.truncate(room.clamp(1, STEPS) - 1);
        let peaks = report.devices.iter().map(|own| own.peak).collect();
        let bytes = report.bytes.clone();
        self.latest.push_front(Kept { step: report.step, timeline, peaks, bytes });
        self.applied += 1;
        if self.applied == EARLY {
            self.write(pipeline);
        }
    }

    /// Writes the latest step, if there is one. A failed write does not end the run.
    pub(super) fn write(&self, pipeline: &mut Pipeline) {
        let Some(Kept { step, timeline, peaks, bytes }) = self.latest.front() else { return };
        let timelines: Vec<&Timeline> = self.latest.iter().map(|kept| &kept.timeline).collect();
        let mut memory = memory(peaks.clone(), bytes.clone(), &self.caps);
        let predicted = match &self.planned {
            Some(Planned { predicted, bytes }) => {
                memory.predicted.clone_from(bytes);
                Some(predicted.clone())
            }
            None => predicted(pipeline, &timelines),
        };
        let file = StepFile {
            step: *step,
            simulated_gpus: gpipe::Device::gpus_are_simulated(),
            measured: timeline.clone(),
            predicted,
            memory,
        };
        if let Err(error) = file.write(&self.path) {
            complain!("gpipe: warning: {error}; the run goes on");
        }
    }
}

/// The memory that stages used, and their caps.
pub(crate) fn memory(
    peaks: Vec<Bytes>,
    measured: Vec<Vec<(Nanos, Bytes)>>,
    caps: &[Bytes],
) -> Memory {
    let caps = match caps {
        [one] => vec![Some(*one); peaks.len()],
        each => each.iter().copied().map(Some).collect(),
    };
    Memory { predicted: Vec::new(), measured, peaks, caps }
}

/// The prediction for the first of `timelines`: a simulation with costs measured in all of them.
///
/// `None` if the simulated step has other actions, as for a mini-batch with fewer samples than M.
pub(crate) fn predicted(pipeline: &mut Pipeline, timelines: &[&Timeline]) -> Option<Predicted> {
    let timeline = pipeline.simulate(timelines).ok()?;
    let is_same = timelines.first().is_some_and(|first| first.actions().eq(timeline.actions()));
    let steps = match timelines.len() {
        1 => "1 step".to_owned(),
        count => format!("{count} steps"),
    };
    let source =
        format!("simulated from the median time of each kind of action on each stage in {steps}");
    is_same.then_some(Predicted { source, timeline })
}
