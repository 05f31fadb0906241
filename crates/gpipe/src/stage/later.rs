//! The weight gradients that the first half of a layer's backward leaves to the second.

use gpipe_bridge::split;
use gpipe_core::LayerId;
use tch::Tensor;

use crate::error::LayerError;

/// The weight gradients that the first half of a layer's backward left to the second.
pub(super) struct WeightGradients {
    pub id: LayerId,
    pub trained: Vec<usize>,
    pub later: Later,
}

pub(super) enum Later {
    /// Not computed yet.
    Graph(split::Later),
    /// Already computed, because the layer cannot be split or has no parameters to train. Holds the
    /// gradients that are not summed yet.
    Gradients(Vec<Option<Tensor>>),
}

impl WeightGradients {
    /// Nothing, for a layer whose weight gradients are all summed in the first half.
    pub(super) fn none(id: LayerId) -> Self {
        Self { id, trained: Vec::new(), later: Later::Gradients(Vec::new()) }
    }

    /// The layer's position within a stage whose first layer is `first`.
    pub(super) fn position(&self, first: usize) -> usize {
        self.id.index() - first
    }

    /// Whether the first half had to compute the gradients.
    pub(super) fn is_whole(&self) -> bool {
        matches!(&self.later, Later::Gradients(found) if !found.is_empty())
    }

    /// Adds the gradients to `accumulators`.
    pub(super) fn finish(self, accumulators: &mut [Option<Tensor>]) -> Result<(), LayerError> {
        let Self { trained, later, .. } = self;
        match later {
            Later::Graph(later) => {
                let mut sums: Vec<_> = trained.iter().map(|&i| accumulators[i].take()).collect();
                later.finish(&mut sums)?;
                for (i, sum) in trained.into_iter().zip(sums) {
                    accumulators[i] = sum;
                }
            }
            Later::Gradients(found) => {
                let _no_grad = tch::no_grad_guard();
                for (i, grad) in trained.into_iter().zip(found) {
                    let Some(grad) = grad else { continue };
                    match &mut accumulators[i] {
                        Some(sum) => drop(sum.f_add_(&grad)?),
                        empty => *empty = Some(grad),
                    }
                }
            }
        }
        Ok(())
    }
}
