//! An update that runs in parts, as the driver knows it: the forwards that are open, and what has
//! accumulated.

use super::outputs::OpenForwards;
use crate::{
    error::{Error, Result},
    loss::LossTerm,
};

/// How [`Pipeline::accumulate`](crate::Pipeline::accumulate) divides the sum of the losses.
#[derive(Debug, Clone, PartialEq)]
pub enum Count {
    /// By this number: the count of all mini-batches of the update together. Each micro-batch then
    /// contributes the same gradients as in one larger mini-batch that is cut the same way.
    /// [`Pipeline::update`](crate::Pipeline::update) checks that the counts add up to it.
    Total(f64),
    /// As [`Count::Total`], where there are several losses: the count of each, in the order in
    /// which the builder was given them.
    Totals(Vec<f64>),
    /// It is not known yet. Only with one loss, because the gradients of all losses add up.
    /// Gradients of the sum accumulate, and
    /// [`Pipeline::update`](crate::Pipeline::update) divides them by the counts that were seen. The
    /// result is the same up to rounding. In float16, the larger gradients overflow sooner.
    Unknown,
}

/// The gradients that have accumulated since the last update.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Accumulated {
    /// Gradients of the caller's losses.
    Given,
    /// Gradients of losses divided by `total`, of which `seen` has been counted. Both are by loss.
    Of { total: Vec<f64>, seen: Vec<f64> },
    /// Gradients of sums of losses, with their count.
    Sums { seen: f64 },
}

/// An update that runs in parts, as the driver knows it.
pub(super) struct UpdateInParts {
    /// The most forwards that may be open.
    pub(super) forwards_max: usize,
    next: u64,
    pub(super) open: OpenForwards,
    /// Samples of the forwards so far. They continue the numbers by which dropout is keyed.
    pub(super) samples: usize,
    pub(super) accumulated: Option<Accumulated>,
    /// Whether tied gradients, and those of the replicas, are summed.
    pub(super) reduced: bool,
    /// The losses that accumulate computed.
    pub(super) losses: Vec<LossTerm>,
}

impl UpdateInParts {
    pub(super) fn new(forwards_max: usize) -> Self {
        Self {
            forwards_max,
            next: 0,
            open: OpenForwards::default(),
            samples: 0,
            accumulated: None,
            reduced: false,
            losses: Vec::new(),
        }
    }

    /// Whether gradients have accumulated.
    pub(super) fn has_gradients(&self) -> bool {
        self.accumulated.is_some()
    }

    /// Returns an error if gradients have accumulated that no update has applied.
    pub(super) fn holds_no_gradients(&self, what: &str) -> Result<()> {
        match self.accumulated {
            None => Ok(()),
            Some(_) => Err(Error::Setting(format!(
                "gradients have accumulated: update or discard_update before you {what}"
            ))),
        }
    }

    /// The number by which accumulated gradients are divided before the update.
    pub(super) fn divisor(&self) -> f64 {
        match &self.accumulated {
            Some(Accumulated::Sums { seen }) => *seen,
            _ => 1.0,
        }
    }

    /// Forgets the update. Outputs that are still open can no longer go back.
    pub(super) fn reset(&mut self) {
        self.open.with(|open| open.numbers.clear());
        let (next, open) = (self.next, self.open.clone());
        *self = Self { next, open, ..Self::new(self.forwards_max) };
    }

    /// The caller has taken the gradients. Open forwards, and the numbers of samples, go on.
    pub(super) fn taken(&mut self) {
        (self.accumulated, self.reduced) = (None, false);
        self.losses.clear();
    }

    /// What will have accumulated after a mini-batch whose losses count `own`.
    pub(super) fn counting(&self, count: Count, own: &[f64]) -> Result<Accumulated> {
        let total = match count {
            Count::Total(total) => Some(vec![total]),
            Count::Totals(totals) => Some(totals),
            Count::Unknown => None,
        };
        if total.as_ref().is_some_and(|total| total.len() != own.len()) {
            return Err(Error::Input(format!(
                "there are {} losses: give Count::Totals with as many counts",
                own.len()
            )));
        }
        let added = |seen: &[f64]| seen.iter().zip(own).map(|(seen, own)| seen + own).collect();
        match (total, &self.accumulated) {
            (Some(total), _)
                if !total.iter().all(|own| own.is_finite() && *own >= 0.0)
                    || total.iter().all(|own| *own == 0.0) =>
            {
                let total = listed(&total);
                Err(Error::Input(format!("the total count is {total}: give a number above 0")))
            }
            (Some(total), None) => Ok(Accumulated::Of { total, seen: own.to_vec() }),
            (Some(total), Some(Accumulated::Of { total: before, seen })) => {
                match total == *before {
                    true => Ok(Accumulated::Of { total, seen: added(seen) }),
                    false => Err(Error::Input(format!(
                        "the total count is {}, before it was {}: give one number for the whole \
                        update",
                        listed(&total),
                        listed(before)
                    ))),
                }
            }
            (None, before) => match (own, before) {
                ([own], None) => Ok(Accumulated::Sums { seen: *own }),
                ([own], Some(Accumulated::Sums { seen })) => {
                    Ok(Accumulated::Sums { seen: seen + own })
                }
                ([_], _) => Err(mixed()),
                _ => Err(Error::Input(
                    "with several losses each has its own count: give Count::Totals".into(),
                )),
            },
            _ => Err(mixed()),
        }
    }

    /// Adds the losses of a mini-batch to those before.
    pub(super) fn add_losses(&mut self, losses: &[LossTerm]) {
        if self.losses.is_empty() {
            self.losses = losses.to_vec();
            return;
        }
        for (all, own) in self.losses.iter_mut().zip(losses) {
            (all.sum, all.count) = (all.sum + own.sum, all.count + own.count);
        }
    }

    pub(super) fn begin_forward(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Whether what was counted is the total. Sums of counts that are no whole numbers are rounded.
pub(super) fn add_up(seen: &[f64], total: &[f64]) -> bool {
    let is_whole = |own: f64| own.fract() == 0.0;
    seen.iter().zip(total).all(|(&seen, &total)| match is_whole(seen) && is_whole(total) {
        true => seen == total,
        false => (seen - total).abs() <= 1e-12 * total,
    })
}

/// Counts in a message.
pub(super) fn listed(counts: &[f64]) -> String {
    counts.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

pub(super) fn mixed() -> Error {
    Error::Input(
        "gradients of your losses, of losses with a total count, and of losses without one cannot \
        be added in one update: use one of the three"
            .into(),
    )
}
