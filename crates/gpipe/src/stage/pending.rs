//! What the parts of an update leave for each other on a stage: open forwards, and the gradients
//! and statistics that have accumulated.
//!
//! Nothing is here between two updates, nor while whole steps run. [`super::edits`] changes the
//! gradients.

use std::collections::{BTreeMap, HashMap};

use gpipe_core::{MicroBatch, lower::Part};

use super::{
    config::StageConfig,
    gradients::Gradients,
    held::SavedActivations,
    step::{Statistics, StepState},
};

/// What the parts of an update have left so far.
#[derive(Default)]
pub(crate) struct Pending {
    /// Forwards whose backward has not run, by number.
    open: BTreeMap<u64, OpenForward>,
    /// `None` before the first backward.
    gradients: Option<Gradients>,
    statistics: Statistics,
    /// How many micro-batches the statistics come from.
    counted: u32,
}

/// What a forward keeps for its backward.
#[derive(Default)]
struct OpenForward {
    held: HashMap<MicroBatch, SavedActivations>,
    statistics: Statistics,
}

impl Pending {
    /// Moves what a part of an update continues from into its state.
    pub(super) fn hand_to(&mut self, step: &mut StepState, config: &StageConfig) {
        let part = step.feed.part;
        if part == Part::Backward {
            let open = self.open.remove(&step.feed.forward).unwrap_or_default();
            (step.held, step.statistics) = (open.held, open.statistics);
        }
        if !matches!(part, Part::Inference | Part::Step | Part::Forward) {
            step.gradients = self.gradients.take().unwrap_or_else(|| Gradients::new(config));
            step.gradients.start_turns();
        }
        if matches!(part, Part::Update | Part::Finish) {
            step.statistics = std::mem::take(&mut self.statistics);
            self.counted = 0;
        }
    }

    /// Takes from a finished part what later parts need.
    pub(super) fn take_from(&mut self, step: &mut StepState) {
        match step.feed.part {
            Part::Inference | Part::Step => {}
            // The parameters have changed, so no backward of an open forward would be right.
            Part::Update | Part::Finish => self.open.clear(),
            Part::Forward => {
                let held = std::mem::take(&mut step.held);
                let statistics = std::mem::take(&mut step.statistics);
                self.open.insert(step.feed.forward, OpenForward { held, statistics });
            }
            Part::Backward | Part::Gradients | Part::Reduce => {
                let gradients = std::mem::take(&mut step.gradients);
                self.gradients = Some(gradients);
                let before = self.counted;
                for (place, seen) in std::mem::take(&mut step.statistics) {
                    let later = |(m, seen): (MicroBatch, _)| (MicroBatch(before + m.0), seen);
                    self.statistics.entry(place).or_default().extend(seen.into_iter().map(later));
                }
                self.counted += step.feed.slices.len() as u32;
            }
        }
    }

    /// The gradients that have accumulated.
    pub(super) fn gradients(&mut self) -> Option<&mut Gradients> {
        self.gradients.as_mut()
    }

    /// Takes what has accumulated. Open forwards stay.
    pub(super) fn take_accumulated(&mut self) -> (Option<Gradients>, Statistics) {
        self.counted = 0;
        (self.gradients.take(), std::mem::take(&mut self.statistics))
    }

    /// Takes the statistics of an open forward.
    pub(super) fn take_statistics_of(&mut self, forward: u64) -> Statistics {
        let open = self.open.get_mut(&forward);
        open.map(|open| std::mem::take(&mut open.statistics)).unwrap_or_default()
    }

    /// Drops the forward with this number.
    pub(crate) fn close(&mut self, forward: u64) {
        self.open.remove(&forward);
    }

    /// Drops everything.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}
