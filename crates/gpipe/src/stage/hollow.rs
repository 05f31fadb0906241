//! The last layer of a segment that is recomputed: its graph stays from the first forward, without
//! what autograd saved, and the recomputation ends where that is complete.

use gpipe_bridge::hollow::HollowGraph;
use tch::Tensor;

use super::island::{Island, LayerRun, leaves};
use crate::{
    error::{LayerError, StageError},
    guard::catching,
};

/// An island whose saved values are not in memory.
pub(super) struct HollowIsland {
    island: Island,
    graph: HollowGraph,
}

impl HollowIsland {
    /// Keeps the graph of `island`, and drops the memory of its leaves and outputs. `None` if
    /// something else would stay in memory with the graph: the layer is then computed again as a
    /// whole.
    pub(super) fn new(mut island: Island, graph: HollowGraph) -> Result<Option<Self>, LayerError> {
        if graph.keeps_memory(island.outputs_and_stashed())? {
            return Ok(None);
        }
        island.keep_roots_only()?;
        island.inputs_and_pops().try_for_each(|leaf| graph.empty_leaf(leaf))?;
        Ok(Some(Self { island, graph }))
    }
}

impl LayerRun<'_> {
    /// Runs the layer again until everything that its backward reads is there, and returns the
    /// island.
    pub(super) fn fill(
        &self,
        inputs: Vec<Tensor>,
        pops: Vec<(usize, String, Tensor)>,
        hollow: HollowIsland,
    ) -> Result<Island, StageError> {
        let HollowIsland { island, graph } = hollow;
        self.run_again(inputs, pops, &graph).map_err(|source| {
            self.layer.layer.failed(&source);
            StageError::Layer { layer: self.layer.name.clone(), source }
        })?;
        Ok(island)
    }

    fn run_again(
        &self,
        inputs: Vec<Tensor>,
        pops: Vec<(usize, String, Tensor)>,
        graph: &HollowGraph,
    ) -> Result<(), LayerError> {
        let inputs = leaves(&inputs, self.input_grads)?;
        let pops = self.popped(pops, self.input_grads)?;
        let mut ctx = self.context(&pops, None);
        graph.fill(|| {
            let _scope = ctx.random.enter()?;
            catching(|| self.layer.layer.forward(&mut ctx, &inputs)).map(drop)
        })?
    }
}
