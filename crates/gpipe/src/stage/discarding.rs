//! Re-materialization: forwards that keep only the inputs of segments, and their recomputation.

use std::collections::HashMap;

use gpipe_core::{LayerId, MicroBatch, remat::Remat};
use gpipe_runtime::Keep;
use tch::Tensor;

use super::{
    StageResult,
    feed::Mode,
    held::{SavedActivations, SegmentStart},
    layers::{ForwardOptions, GraphMode, LastLayer, SavedOps},
    not_held,
    recorder::ProfiledOp,
    step::ActiveStage,
};

impl ActiveStage<'_> {
    /// Runs a forward that keeps only each segment's inputs. With selective re-materialization it
    /// also keeps the outputs of matrix products and convolutions.
    ///
    /// In training each layer still runs as an island, which is dropped at once. ATen may choose
    /// another kernel when nothing requires a gradient (`matmul` folds dimensions depending on it).
    /// The result would then differ in bits from a forward that keeps its activations.
    pub(super) fn forward_discarding(
        &mut self,
        micro_batch: MicroBatch,
        inputs: Vec<Tensor>,
        skips: &mut HashMap<usize, Tensor>,
        keep: Keep,
    ) -> StageResult<Vec<Tensor>> {
        let mut values = inputs;
        let mut starts = Vec::new();
        let run =
            if self.step.feed.mode == Mode::Train { GraphMode::Discard } else { GraphMode::Plain };
        let remembers = keep == Keep::Inputs && self.config.remat == Remat::Selective;
        let mut made = Vec::new();
        for range in self.segment_ranges() {
            if keep == Keep::Inputs {
                starts.push(SegmentStart::new(range.clone(), &values));
            }
            let products = if remembers { SavedOps::Keep(&mut made) } else { SavedOps::Compute };
            let work = ProfiledOp::Forward;
            // A recomputation of the last layer feeds the loss, so it does not end early.
            let feeds_loss = self.config.last && range.end == self.config.layers.len();
            let last = match keep == Keep::Inputs && !feeds_loss {
                true => LastLayer::Hollow,
                false => LastLayer::Read,
            };
            let how = ForwardOptions { run, work, products, last };
            let ran = self.run_layers(range, micro_batch, values, skips, how)?;
            if let Some(start) = starts.last_mut() {
                start.last = ran.hollow;
            }
            self.count_statistics(micro_batch, ran.statistics);
            values = ran.outputs;
        }
        if keep == Keep::Inputs {
            let needed = self.skips_to_keep();
            let kept = skips.iter().filter(|(index, _)| needed.contains(index));
            let kept = kept.map(|(&index, tensor)| (index, tensor.shallow_clone())).collect();
            self.step.held.insert(micro_batch, SavedActivations::discarded(starts, kept, made));
        }
        Ok(values)
    }

    /// Skips that a recomputation needs from an earlier stage or segment.
    fn skips_to_keep(&self) -> Vec<usize> {
        let ranges = self.segment_ranges();
        let segment = |layer: LayerId| {
            let position = layer.index().checked_sub(self.config.layers.start)?;
            ranges.iter().position(|range| range.contains(&position))
        };
        let skips = self.config.skips.iter().enumerate();
        skips
            .filter(|(_, skip)| {
                segment(skip.pop).is_some() && segment(skip.stash) != segment(skip.pop)
            })
            .map(|(index, _)| index)
            .collect()
    }

    /// Recomputes the last segment of `micro_batch` that is still missing, with its graph.
    pub(super) fn recompute(&mut self, micro_batch: MicroBatch) -> StageResult<()> {
        let Some(mut held) = self.step.held.remove(&micro_batch) else {
            return Err(not_held(micro_batch));
        };
        let last_segment = held.is_untouched();
        let Some(start) = held.next_segment() else {
            self.step.held.insert(micro_batch, held);
            return Ok(());
        };
        let mut skips = held.skips();
        // Batch norm statistics are not counted again: the first forward counted them.
        let SegmentStart { layers, inputs, last } = start;
        let work = ProfiledOp::Rematerialize;
        let mut made = held.take_products().into_iter();
        let products = if made.len() > 0 { SavedOps::Reuse(&mut made) } else { SavedOps::Compute };
        // The loss reads them. Anywhere else, the first forward has passed them on.
        let last = match last {
            Some(hollow) => LastLayer::Fill(hollow),
            None if last_segment && self.config.last => LastLayer::Read,
            None => LastLayer::Unread,
        };
        let how = ForwardOptions { run: GraphMode::Keep, work, products, last };
        let ran = self.run_layers(layers, micro_batch, inputs, &mut skips, how)?;
        held.rematerialized(ran.islands);
        if last_segment {
            held.loss = self.run_loss(micro_batch, &ran.outputs, true, false)?;
        }
        self.step.held.insert(micro_batch, held);
        Ok(())
    }
}
