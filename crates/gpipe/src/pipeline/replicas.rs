//! A pipeline as one of several replicas: which samples are its own, and what a step came to in all
//! of them.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Pipeline;
use crate::{
    error::{Error, Result},
    processes::PeerError,
    stage::feed::{Outcome, Slice, split},
};

/// What the last stage of a replica summed, by micro-batch.
#[derive(Serialize, Deserialize)]
struct Sums {
    losses: Vec<f64>,
    metrics: Vec<Vec<f64>>,
}

impl Pipeline {
    /// The samples of a mini-batch of `count` whose inputs the stages of this process are fed by
    /// [`Pipeline::train_step`]: all of them in one process; those of this replica in its first
    /// process; none in the others, whose stages are fed by other stages. What stands in the place
    /// of the others' inputs is never looked at, so that a process need not read it. Targets are
    /// needed everywhere: the loss is divided by the count of all of them. Where a
    /// [`crate::Padding`] trims micro-batches to their longest sample, inputs are looked at
    /// everywhere.
    ///
    /// # Errors
    /// Fewer samples than replicas.
    pub fn samples_fed(&self, count: usize) -> Result<Range<usize>> {
        match self.model.padding {
            Some(_) => Ok(0..count),
            None if self.is_fed() => self.own_samples(count),
            None => Ok(0..0),
        }
    }

    /// Whether this process looks at the inputs that [`Pipeline::evaluate`] and
    /// [`Pipeline::predict`] are given: it has the first stage, or there is a [`crate::Padding`].
    /// What stands in the place of the inputs in another process is never looked at.
    pub fn is_fed(&self) -> bool {
        self.model.padding.is_some() || self.engine.here().contains(&0)
    }

    /// The samples of a mini-batch of `count` that this replica trains on: all of them, where there
    /// is one.
    pub(super) fn own_samples(&self, count: usize) -> Result<Range<usize>> {
        let Some(replicas) = &self.engine.replicas else { return Ok(0..count) };
        let all = split(count, replicas.count());
        let Some(Slice { first, count: own }) =
            all.get(replicas.index()).filter(|_| all.len() == replicas.count()).copied()
        else {
            return Err(Error::Input(format!(
                "{count} samples for {} replicas: give at least one to each",
                replicas.count()
            )));
        };
        Ok(first..first + own)
    }

    /// Puts what the last stages of all replicas summed, in the order of the samples, in the place
    /// of what this one's did.
    pub(super) fn of_all_replicas(&self, outcomes: &mut [Outcome]) -> Result<()> {
        let (Some(replicas), Some(last)) = (&self.engine.replicas, outcomes.last_mut()) else {
            return Ok(());
        };
        let own = Sums {
            losses: std::mem::take(&mut last.loss_sums),
            metrics: std::mem::take(&mut last.metric_sums),
        };
        let unreadable = |process, reason: String| Error::from(PeerError { process, reason });
        let packed = postcard::to_stdvec(&own);
        let packed = packed.map_err(|error| unreadable(None, error.to_string()))?;
        for sums in replicas.gather(packed)? {
            let sums: Sums = postcard::from_bytes(&sums)
                .map_err(|error| unreadable(None, format!("the sums of a replica: {error}")))?;
            last.loss_sums.extend(sums.losses);
            last.metric_sums.extend(sums.metrics);
        }
        Ok(())
    }
}
