//! Activation offload: forwards whose saved activations leave the device's memory, and their way
//! back before the backward.
//!
//! What moves is what the graphs of a micro-batch hold alone. What stays is held by others, too:
//! parameters, and what the stage received or sends. On a CPU it goes to a file ([`super::spill`]),
//! on a GPU to pinned host memory.
//!
//! ```text
//! F0 --write--> F1 --write--> ...  R0 B0        R1 B1 ...
//!                                     \--read 1-/
//! ```
//!
//! R puts the activations back, where other policies compute them again. When it is done, it starts
//! to read the next micro-batch: backwards ascend, so that is the first one still away. At most one
//! micro-batch is on its way out, and one on its way in.

use std::time::{Duration, Instant};

use gpipe_bridge::offload::{Block, SavedTensors};
use gpipe_core::{Bytes, MicroBatch, Nanos};
use tch::Tensor;

use super::{
    StageResult,
    device::{HostCopies, StageDevice},
    held::{HeldLoss, SavedActivations},
    in_operation,
    spill::{Spill, Stored},
    step::ActiveStage,
};
use crate::error::{LayerError, StageError};

/// What offload did in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Bytes that left the device's memory, and came back.
    pub bytes: Bytes,
    /// How long the stage's thread waited for writes and reads.
    pub waited: Nanos,
}

impl Moved {
    fn waited_since(&mut self, since: Instant) {
        let time = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited += Nanos(time);
    }
}

/// The saved activations of a micro-batch that are not in the device's memory.
pub(super) struct Away {
    saved: SavedTensors,
    blocks: Blocks,
}

enum Blocks {
    InFile(Stored),
    OnHost(HostCopies),
}

/// Where a stage moves activations to.
pub(super) enum Store {
    /// Nowhere: its policy is another.
    None,
    File(Spill),
    Host,
}

impl Store {
    pub(super) fn new(
        config: &super::StageConfig,
        device: &StageDevice,
    ) -> Result<Self, LayerError> {
        if !config.remat.offloads() {
            return Ok(Self::None);
        }
        if device.is_gpu() {
            return Ok(Self::Host);
        }
        // The stage's peers give up on it at the deadline: this error comes first.
        let patience: Duration = config.deadline * 3 / 4;
        let folder = config.offload_folder.as_deref();
        Ok(Self::File(Spill::new(folder, device.arena(), patience)?))
    }

    /// Forgets what an aborted step left.
    pub(super) fn forget(&self) {
        if let Self::File(spill) = self {
            spill.forget();
        }
    }

    /// Waits until nothing is on its way out.
    pub(super) fn finish(&self) -> Result<(), LayerError> {
        match self {
            Self::File(spill) => spill.finish_write(),
            _ => Ok(()),
        }
    }
}

/// Takes the memory of what `held` holds alone.
fn hand_over(
    held: &mut SavedActivations,
    saved: &mut SavedTensors,
) -> Result<Vec<Block>, LayerError> {
    for island in held.islands_mut() {
        island.keep_roots_only()?;
        island.inputs_and_pops().try_for_each(|leaf| saved.add_leaf(leaf))?;
    }
    match &held.loss {
        // The sums themselves are needed to see whether they are finite.
        Some(HeldLoss::Island(loss)) => {
            loss.inputs_and_pops().try_for_each(|leaf| saved.add_leaf(leaf))?;
        }
        Some(HeldLoss::Rows(inputs)) => inputs.iter().try_for_each(|own| saved.add_leaf(own))?,
        None => {}
    }
    Ok(saved.take_away()?)
}

impl ActiveStage<'_> {
    /// Prepares a forward that offloads.
    pub(super) fn before_offload(&mut self) -> StageResult<()> {
        // A micro-batch that was read ahead is in memory, so none may be on its way out as well.
        let ahead = self.step.held.values().any(|held| {
            held.away.as_ref().is_some_and(|away| match &away.blocks {
                Blocks::InFile(stored) => stored.is_asked_for(),
                Blocks::OnHost(copies) => copies.are_coming(),
            })
        });
        if !ahead {
            return Ok(());
        }
        let finish = |stage: &Self| match stage.store {
            Store::Host => stage.device.finish_copies_to_host(),
            store => store.finish(),
        };
        self.timed(finish).map_err(in_offload)
    }

    /// Moves what the forward of `micro_batch` saved out of the device's memory. `stays` are values
    /// that the stage received: they stay.
    pub(super) fn move_away(
        &mut self,
        micro_batch: MicroBatch,
        mut saved: SavedTensors,
        stays: Vec<Tensor>,
    ) -> StageResult<()> {
        let Some(mut held) = self.step.held.remove(&micro_batch) else { return Ok(()) };
        let blocks = hand_over(&mut held, &mut saved).map_err(in_offload)?;
        drop(stays);
        let bytes: u64 = blocks.iter().map(|block| block.len() as u64).sum();
        let blocks = self.timed(|stage| match stage.store {
            Store::File(spill) => Ok(Blocks::InFile(spill.store(blocks)?)),
            _ => Ok(Blocks::OnHost(
                stage.device.copy_to_host(blocks.into_iter().map(Block::into_tensor).collect())?,
            )),
        });
        held.away = Some(Away { saved, blocks: blocks.map_err(in_offload)? });
        self.step.moved.bytes += Bytes(bytes);
        self.step.held.insert(micro_batch, held);
        Ok(())
    }

    /// Brings the saved activations of `micro_batch` back, if they are away, and starts to read
    /// those of the next.
    pub(super) fn bring_back(&mut self, micro_batch: MicroBatch) -> StageResult<()> {
        let held = self.step.held.get_mut(&micro_batch);
        let Some(Away { mut saved, blocks }) = held.and_then(|held| held.away.take()) else {
            return Ok(());
        };
        let blocks = self.timed(|stage| match (blocks, stage.store) {
            (Blocks::InFile(stored), Store::File(spill)) => {
                Ok(spill.load(stored)?.into_iter().map(Block::into_tensor).collect())
            }
            (Blocks::OnHost(copies), _) => stage.device.copy_from_host(copies),
            (Blocks::InFile(_), _) => Err(LayerError::Value("its file is gone".into())),
        });
        saved.bring_back(blocks.map_err(in_offload)?).map_err(|error| in_offload(error.into()))?;
        self.read_ahead().map_err(in_offload)
    }

    /// Starts to bring back the next micro-batch.
    fn read_ahead(&mut self) -> Result<(), LayerError> {
        let away = self.step.held.iter_mut().filter(|(_, held)| held.away.is_some());
        let next = away.min_by_key(|(micro_batch, _)| **micro_batch);
        match (next.and_then(|(_, held)| held.away.as_mut()), self.store) {
            (Some(Away { blocks: Blocks::InFile(stored), .. }), Store::File(spill)) => {
                spill.read_ahead(stored);
                Ok(())
            }
            (Some(Away { blocks: Blocks::OnHost(copies), .. }), _) => {
                self.device.start_from_host(copies)
            }
            _ => Ok(()),
        }
    }

    fn timed<T>(
        &mut self,
        work: impl FnOnce(&Self) -> Result<T, LayerError>,
    ) -> Result<T, LayerError> {
        let since = Instant::now();
        let done = work(self);
        self.step.moved.waited_since(since);
        done
    }
}

fn in_offload(source: LayerError) -> StageError {
    in_operation("moving saved activations")(source)
}
