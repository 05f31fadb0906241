//! A pipeline as one of several replicas: the samples that it trains on, and the sums of a step
//! over all replicas.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Pipeline;
use crate::{
    error::{Error, Result},
    processes::PeerError,
    stage::feed::{Outcome, Slice, split},
};

/// Sums of the last stage of one replica, by micro-batch.
#[derive(Serialize, Deserialize)]
struct Sums {
    losses: Vec<Vec<f64>>,
    metrics: Vec<Vec<f64>>,
}

impl Pipeline {
    /// The samples whose inputs this process needs in [`Pipeline::train_step`], of a mini-batch of
    /// `count` samples.
    ///
    /// - With one process, all samples.
    /// - With several, the first process of each replica needs its replica's samples. The other
    ///   processes need none, because other stages feed their stages.
    /// - Every process needs all samples in three cases: with a [`crate::Padding`], because
    ///   micro-batches are trimmed to their longest sample; where a loss takes inputs
    ///   ([`Loss::takes_inputs`](crate::Loss::takes_inputs)); and where the pipeline has inputs by
    ///   name.
    ///
    /// Inputs of other samples are never read, so a process may pass placeholders. Targets are
    /// needed everywhere, because the loss is divided by the count of all of them.
    ///
    /// # Errors
    /// If there are fewer samples than replicas.
    pub fn samples_fed(&self, count: usize) -> Result<Range<usize>> {
        match self.model.needs_inputs_everywhere() {
            true => Ok(0..count),
            false if self.is_fed() => self.own_samples(count),
            false => Ok(0..0),
        }
    }

    /// Whether this process needs the inputs of [`Pipeline::evaluate`] and [`Pipeline::predict`]:
    /// it has the first stage, there is a [`crate::Padding`], a loss takes inputs, or the pipeline
    /// has inputs by name. Other processes never read the inputs and may pass placeholders.
    pub fn is_fed(&self) -> bool {
        self.model.needs_inputs_everywhere() || self.engine.here().contains(&0)
    }

    /// The samples of a mini-batch of `count` that this replica trains on; all of them without
    /// replicas.
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

    /// Replaces this replica's sums of losses and metrics by those of all replicas, in sample
    /// order.
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
