//! How a stage runs its layers, one after the other.

use std::{collections::HashMap, ops::Range};

use gpipe_bridge::{layout::settled, op_cache::OpCache};
use gpipe_core::{EdgeId, LayerId, MicroBatch};
use gpipe_runtime::stage::OnEdges;
use tch::Tensor;

use super::{
    StageResult,
    feed::Mode,
    feeding::Fed,
    hollow::HollowIsland,
    in_operation,
    island::{Island, LayerRun},
    recorder::ProfiledOp,
    step::ActiveStage,
};
use crate::{
    arguments::{NamedArgument, defined, if_defined},
    batch_norm::BatchStatistics,
    cache::Cache,
    error::{LayerError, StageError},
    precision::Precision,
    sequence::Skip,
    value::Value,
};

/// The result of running several layers.
pub(super) struct RanLayers {
    pub(super) outputs: Vec<Tensor>,
    pub(super) islands: Vec<Island>,
    /// The last layer's, for [`LastLayer::Hollow`].
    pub(super) hollow: Option<HollowIsland>,
    /// Batch norm statistics, with the position of their layer.
    pub(super) statistics: Vec<(usize, BatchStatistics)>,
}

/// Whether layers run with autograd graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GraphMode {
    /// Without graphs.
    Plain,
    /// With graphs that are dropped layer by layer.
    Discard,
    /// With graphs, for a backward.
    Keep,
}

/// An error of the bridge as one of `layer`.
fn in_layer(layer: &str) -> impl Fn(gpipe_bridge::Error) -> StageError {
    |source| StageError::Layer { layer: layer.to_owned(), source: source.into() }
}

/// What to do with the outputs of matrix products and convolutions.
pub(super) enum SavedOps<'a> {
    /// Compute them.
    Compute,
    /// Compute them and keep them, for each layer.
    Keep(&'a mut Vec<OpCache>),
    /// Reuse those that an earlier run of the layer kept.
    Reuse(&'a mut std::vec::IntoIter<OpCache>),
}

impl SavedOps<'_> {
    /// Runs a layer's forward, keeping or reusing these outputs.
    fn around<T>(
        &mut self,
        layer: &str,
        forward: impl FnOnce() -> StageResult<T>,
    ) -> StageResult<T> {
        let in_layer = in_layer(layer);
        match self {
            SavedOps::Compute => forward(),
            SavedOps::Keep(caches) => {
                let (ran, cache) = OpCache::record(forward).map_err(in_layer)?;
                caches.push(cache);
                ran
            }
            SavedOps::Reuse(caches) => match caches.next() {
                Some(cache) => cache.replay(forward).map_err(in_layer)?,
                None => forward(),
            },
        }
    }

    /// The same for a forward that may end early, and then has fewer products.
    fn around_part<T>(
        &mut self,
        layer: &str,
        forward: impl FnOnce() -> StageResult<T>,
    ) -> StageResult<T> {
        match self {
            SavedOps::Reuse(caches) => match caches.next() {
                Some(cache) => cache.replay_part(forward).map_err(in_layer(layer))?,
                None => forward(),
            },
            _ => self.around(layer, forward),
        }
    }
}

/// How layers run, and for which operation.
pub(super) struct ForwardOptions<'a> {
    pub(super) run: GraphMode,
    pub(super) work: ProfiledOp,
    pub(super) products: SavedOps<'a>,
    pub(super) last: LastLayer,
}

/// What the outputs of the last of several layers are for.
pub(super) enum LastLayer {
    /// Somebody reads them.
    Read,
    /// Nobody reads them.
    Unread,
    /// Somebody reads them, and the graph stays for [`Fill`](Self::Fill) if the layer may end
    /// early.
    Hollow,
    /// Nobody reads them, and the layer ends when this is filled.
    Fill(HollowIsland),
}

impl ActiveStage<'_> {
    /// Runs the stage's layers in `range` (positions within the stage). `skips` must hold every
    /// skip that these layers may pop. Skips that they stash are added to it.
    pub(super) fn run_layers(
        &self,
        range: Range<usize>,
        micro_batch: MicroBatch,
        inputs: Vec<Tensor>,
        skips: &mut HashMap<usize, Tensor>,
        how: ForwardOptions<'_>,
    ) -> StageResult<RanLayers> {
        let ForwardOptions { run: how, work, mut products, last } = how;
        let _no_grad = (how == GraphMode::Plain).then(tch::no_grad_guard);
        let mut values = inputs;
        let named = self.named_inputs(micro_batch)?;
        let (mut islands, mut statistics) = (Vec::new(), Vec::new());
        let is_read =
            matches!(last, LastLayer::Read | LastLayer::Hollow) || self.shows_recomputed();
        let stays = matches!(last, LastLayer::Hollow) && !self.shows_recomputed();
        let mut fill = match last {
            LastLayer::Fill(hollow) => Some(hollow),
            _ => None,
        };
        let mut hollow = None;
        for position in range.clone() {
            if self.is_in_rows(position) {
                // It is computed with the losses.
                let shown = values.iter().map(Some);
                let since = self.before_layer(position, micro_batch, work, shown)?;
                self.after_layer(since, position, micro_batch, work, [])?;
                continue;
            }
            let mut run = self.layer_run(position, micro_batch, &named);
            let is_last = position + 1 == range.end;
            if position + 1 == self.config.layers.len() && run.layer.layer.by_rows() {
                values = self.wanted_positions(micro_batch, values)?;
            }
            run.is_read = is_read || !is_last;
            run.is_hollow =
                stays && is_last && how == GraphMode::Discard && run.layer.layer.may_end_early();
            let pops = self.skips_popped_by(position);
            let pops = pops.filter_map(|(index, skip)| {
                Some((index, skip.name.clone(), skips.get(&index)?.shallow_clone()))
            });
            let graph = how != GraphMode::Plain;
            let shown = values.iter().map(Some);
            let since = self.before_layer(position, micro_batch, work, shown)?;
            let pops = pops.collect();
            if let Some(own) = fill.take_if(|_| is_last) {
                let fill = || run.fill(values, pops, own);
                islands.push(products.around_part(&run.layer.name, fill)?);
                self.after_layer(since, position, micro_batch, work, [])?;
                values = Vec::new();
                continue;
            }
            let cache = self.take_cache(position, micro_batch)?;
            let forward = || run.forward(values, pops, cache, graph);
            let ran = products.around(&run.layer.name, forward)?;
            self.put_cache(position, micro_batch, ran.cache);
            self.inspect(micro_batch, position, ran.inspections)?;
            for (name, tensor) in ran.stashed {
                let skip = self.skip_stashed_by(position, &name);
                skips.extend(skip.map(|index| (index, tensor)));
            }
            hollow = ran.hollow;
            islands.extend(ran.island.filter(|_| how == GraphMode::Keep));
            let shown = ran.outputs.iter().map(Some);
            self.after_layer(since, position, micro_batch, work, shown)?;
            if let (Some(recorder), SavedOps::Keep(caches)) = (&self.step.recorder, &products) {
                recorder.products(position, caches.last().map_or(0, OpCache::bytes));
            }
            statistics.extend(ran.statistics.into_iter().map(|seen| (position, seen)));
            values = ran.outputs;
        }
        Ok(RanLayers { outputs: values, islands, hollow, statistics })
    }

    /// Drops what a decoding does not want of the model's first output, [samples, positions, ..]:
    /// all positions but the last, if that alone is wanted.
    pub(super) fn wanted_positions(
        &self,
        micro_batch: MicroBatch,
        mut outputs: Vec<Tensor>,
    ) -> StageResult<Vec<Tensor>> {
        let only_last = self.step.feed.group(micro_batch).is_some_and(|group| group.only_last);
        if let Some(first) = outputs.first_mut()
            && only_last
            && self.config.last
            && first.size().get(1).is_some_and(|&positions| positions > 1)
        {
            let last = first.f_narrow(1, -1, 1).and_then(|last| last.f_contiguous());
            *first = last.map_err(|error| in_operation("the last position")(error.into()))?;
        }
        Ok(outputs)
    }

    /// Takes what the layer kept in the decoding so far.
    fn take_cache(&self, position: usize, micro_batch: MicroBatch) -> StageResult<Option<Cache>> {
        let Some(group) = self.step.feed.group(micro_batch) else { return Ok(None) };
        let cache = match group.past {
            0 => Cache::default(),
            _ => self.decoding.borrow_mut().remove(&(group.id, position)).unwrap_or_default(),
        };
        let rows = group.rows.as_ref().map(|rows| self.device.own(rows)).transpose();
        let cache = rows.and_then(|rows| cache.before(group.past, rows.as_ref()));
        cache.map(Some).map_err(in_operation("the cache"))
    }

    fn put_cache(&self, position: usize, micro_batch: MicroBatch, cache: Option<Cache>) {
        if let (Some(group), Some(cache)) = (self.step.feed.group(micro_batch), cache) {
            self.decoding.borrow_mut().insert((group.id, position), cache);
        }
    }

    /// Keeps batch norm statistics of the one forward of `micro_batch` that counts.
    pub(super) fn count_statistics(
        &mut self,
        micro_batch: MicroBatch,
        seen: Vec<(usize, BatchStatistics)>,
    ) {
        for (position, statistics) in seen {
            let place = (position, statistics.first);
            self.step.statistics.entry(place).or_default().push((micro_batch, statistics));
        }
    }

    pub(super) fn layer_run<'r>(
        &'r self,
        position: usize,
        micro_batch: MicroBatch,
        named: &'r [(String, Tensor)],
    ) -> LayerRun<'r> {
        LayerRun {
            named,
            layer: &self.config.named[position],
            id: LayerId::from_index(self.config.layers.start + position),
            parameters: self.parameters.of_layer(position),
            input_grads: self.config.input_grads[position],
            training: self.step.feed.mode == Mode::Train,
            seed: self.config.seed,
            step: self.step.feed.step,
            slice: self.step.feed.slice(micro_batch),
            kind: self.config.precision.compute,
            kernels: self.config.kernels,
            is_read: true,
            is_hollow: false,
        }
    }

    /// The inputs of the first stage for `micro_batch`.
    pub(super) fn fed_inputs(&self, micro_batch: MicroBatch) -> StageResult<Vec<Tensor>> {
        let inputs = self.fed_tensors(Fed::Inputs, micro_batch).and_then(|inputs| {
            inputs.into_iter().map(|tensor| if_defined(&tensor, |own| self.prepared(own))).collect()
        });
        inputs.map_err(in_operation("the inputs"))
    }

    /// The inputs by name for `micro_batch`, on any stage.
    pub(super) fn named_inputs(
        &self,
        micro_batch: MicroBatch,
    ) -> StageResult<Vec<(String, Tensor)>> {
        let names = &self.config.inputs.named;
        let all = self.step.feed.inputs(micro_batch);
        if names.is_empty() || all.is_empty() {
            return Ok(Vec::new());
        }
        let named = &all[all.len().saturating_sub(names.len())..];
        let named = names.iter().zip(named);
        let fed = |(own, tensor): (&NamedArgument, &Tensor)| {
            let here = if_defined(tensor, |tensor| self.prepared(&self.device.own(tensor)?))?;
            Ok((own.name.clone(), if_defined(&here, Tensor::f_detach)?))
        };
        named.map(fed).collect::<Result<_, LayerError>>().map_err(in_operation("the inputs"))
    }

    /// A tensor of the inputs in the compute dtype, and in the layout of values between layers.
    fn prepared(&self, tensor: &Tensor) -> Result<Tensor, LayerError> {
        let Precision { compute, master } = self.config.precision;
        let kind = if tensor.kind() == master { compute } else { tensor.kind() };
        Ok(settled(tensor.f_to_kind(kind)?)?)
    }

    /// Returns arrived values on this stage's device.
    pub(super) fn receive(
        &self,
        values: OnEdges<Value>,
    ) -> StageResult<OnEdges<Vec<Option<Tensor>>>> {
        let receive = |(edge, value)| Ok((edge, self.device.receive(value)?));
        values
            .into_iter()
            .map(receive)
            .collect::<Result<_, LayerError>>()
            .map_err(in_operation("receiving"))
    }

    /// Ends an action and prepares its values for the devices that receive them.
    pub(super) fn finished(
        &self,
        values: OnEdges<Vec<Option<Tensor>>>,
    ) -> StageResult<OnEdges<Value>> {
        let finish = || {
            self.device.finish()?;
            let send =
                |(edge, tensors)| Ok((edge, self.device.send(tensors, self.config.peer(edge))?));
            values.into_iter().map(send).collect::<Result<_, LayerError>>()
        };
        finish().map_err(in_operation("sending"))
    }

    fn skips_popped_by(&self, position: usize) -> impl Iterator<Item = (usize, &Skip)> {
        let layer = LayerId::from_index(self.config.layers.start + position);
        self.config.skips.iter().enumerate().filter(move |(_, skip)| skip.pop == layer)
    }

    pub(super) fn skip_stashed_by(&self, position: usize, name: &str) -> Option<usize> {
        let layer = LayerId::from_index(self.config.layers.start + position);
        self.config.skips.iter().position(|skip| skip.stash == layer && skip.name == name)
    }

    /// The ranges of layers into which re-materialization cuts the stage.
    pub(super) fn segment_ranges(&self) -> Vec<Range<usize>> {
        self.config.remat.segment_ranges(self.config.layers.len())
    }

    pub(super) fn outgoing(
        &self,
        boundary: Option<EdgeId>,
        tensors: Vec<Option<Tensor>>,
        skips: &[(EdgeId, usize)],
        skip_values: &mut HashMap<usize, Tensor>,
    ) -> OnEdges<Vec<Option<Tensor>>> {
        let boundary = boundary.map(|edge| (edge, tensors));
        let skips = skips
            .iter()
            .map(|&(edge, index)| (edge, vec![skip_values.remove(&index).and_then(defined)]));
        boundary.into_iter().chain(skips).collect()
    }
}
