//! Inputs and targets on the stage's device. Their copies to a GPU start one micro-batch ahead, so
//! that they overlap with kernels.

use std::collections::BTreeMap;

use gpipe_core::MicroBatch;
use tch::Tensor;

use super::{device::Coming, feed::Feed, step::ActiveStage};
use crate::error::LayerError;

/// What the driver feeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fed {
    Inputs,
    Targets,
}

impl Fed {
    fn of(self, feed: &Feed, micro_batch: MicroBatch) -> Option<&[Tensor]> {
        let all = match self {
            Fed::Inputs => &feed.inputs,
            Fed::Targets => &feed.targets,
        };
        all.get(micro_batch.index()).map(Vec::as_slice)
    }
}

/// Copies that have started. `None`: an absent tensor.
pub(super) type UnderWay = BTreeMap<(Fed, MicroBatch), Vec<Option<Coming>>>;

impl ActiveStage<'_> {
    /// The tensors of `micro_batch`, on the stage's device. Also starts to copy those of the next
    /// micro-batch.
    pub(super) fn fed_tensors(
        &self,
        what: Fed,
        micro_batch: MicroBatch,
    ) -> Result<Vec<Tensor>, LayerError> {
        let started = self.step.under_way.borrow_mut().remove(&(what, micro_batch));
        let own = match started {
            Some(coming) => coming,
            None => self.start(what, micro_batch)?,
        };
        let next = MicroBatch(micro_batch.0 + 1);
        let is_new = !self.step.under_way.borrow().contains_key(&(what, next));
        if self.device.is_gpu() && is_new && what.of(&self.step.feed, next).is_some() {
            let coming = self.start(what, next)?;
            self.step.under_way.borrow_mut().insert((what, next), coming);
        }
        let take = |own: Option<Coming>| match own {
            Some(coming) => self.device.take(coming),
            None => Ok(Tensor::new()),
        };
        own.into_iter().map(take).collect()
    }

    fn start(&self, what: Fed, micro_batch: MicroBatch) -> Result<Vec<Option<Coming>>, LayerError> {
        let mut given = what.of(&self.step.feed, micro_batch).unwrap_or_default();
        if what == Fed::Inputs {
            // Those with names go to every stage.
            given = self.config.inputs.split(given).positional;
        }
        let start =
            |tensor: &Tensor| tensor.defined().then(|| self.device.bring(tensor)).transpose();
        given.iter().map(start).collect()
    }
}
