//! `step.json` in the run's folder: the latest step, beside what it was predicted to be. It is
//! written early, so that there is a picture of a run that has just begun, and at the end.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
};

use gpipe::{Bytes, Nanos, Pipeline, StepReport};
use gpipe_core::simulate::Timeline;
use gpipe_observe::step_file::{self, ACTIONS_MAX, Memory, Predicted, StepFile};

use crate::{output::complain, plan_file::PlanFile, run_folder::PLAN};

/// After so many steps the file is written for the first time: the first ones are slower.
const EARLY: u64 = 10;
/// Most steps whose costs the prediction is made of.
const STEPS: usize = 8;

/// The latest steps of a run.
pub(super) struct StepTrace {
    path: PathBuf,
    /// One for all stages, or one for each.
    caps: Vec<Bytes>,
    /// What the run's plan predicts.
    planned: Option<Planned>,
    applied: u64,
    latest: VecDeque<Kept>,
}

/// A plan's step.
struct Planned {
    predicted: Predicted,
    bytes: Vec<Vec<(Nanos, Bytes)>>,
}

/// What is kept of a step.
struct Kept {
    step: u64,
    timeline: Timeline,
    peaks: Vec<Bytes>,
    bytes: Vec<Vec<(Nanos, Bytes)>>,
}

impl StepTrace {
    /// For a run in `out`, whose stages have these caps, and which follows `plan`.
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

    /// After a step.
    pub(super) fn step(&mut self, pipeline: &mut Pipeline, report: &StepReport) {
        if report.skipped {
            return;
        }
        let timeline = report.timeline.clone();
        // Of huge steps, no more than would go into one file.
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

    /// Writes the latest step, if there is one. A file that cannot be written ends no run.
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
        let file = StepFile { step: *step, measured: timeline.clone(), predicted, memory };
        if let Err(error) = file.write(&self.path) {
            complain!("gpipe: warning: {error}; the run goes on");
        }
    }
}

/// What stages held, and may hold.
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

/// What the first of `timelines` was to be: the simulator's, from the costs measured in all of
/// them. None where it would be another step's, as that of a mini-batch with fewer samples than M.
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
