//! Upper bounds for the size of each message between two stages, from shapes alone. A process
//! receives no more than that from another, whatever the sender announces.

use std::ops::Range;

use gpipe_core::{
    Bytes, LayerId,
    lower::{Edge, Topology},
    topology::Purpose,
};

use super::{
    Pipeline,
    mini_batch::{MiniBatch, SHAPES_MAX},
};
use crate::{
    error::Result,
    precision::Precision,
    processes::{SQUARE_BYTES, VERDICT_BYTES},
    sequence::{Inferred, Sequence, TieGroup},
    spec::TensorSpec,
};

/// What an edge carries, in either direction: a tensor's gradient is as large as the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carried {
    /// The inputs of a layer.
    Inputs(LayerId),
    /// The skip with this number.
    Skip(usize),
    /// A size that does not depend on the mini-batch.
    Fixed(Bytes),
}

impl Carried {
    /// What each edge of a cut into `ranges` carries.
    pub(super) fn of(
        topology: &Topology,
        purposes: &[Purpose],
        ranges: &[Range<usize>],
        sequence: &Sequence,
        ties: &[TieGroup],
        precision: Precision,
    ) -> Vec<Self> {
        let carried = |(edge, purpose): (&Edge, &Purpose)| {
            let (from, to) = (&ranges[edge.from.index()], &ranges[edge.to.index()]);
            match *purpose {
                Purpose::Boundary => Self::Inputs(LayerId::from_index(to.start)),
                Purpose::Skip(index) => Self::Skip(index),
                Purpose::Tie => Self::Fixed(tied(sequence, ties, from, to, precision)),
                // A vote in one direction, a verdict in the other.
                Purpose::Vote => {
                    let vote = (from.len() * SQUARE_BYTES) as u64;
                    Self::Fixed(Bytes(vote.max(VERDICT_BYTES as u64)))
                }
            }
        };
        topology.edges.iter().zip(purposes).map(carried).collect()
    }

    /// The most bytes of a message, for a micro-batch with these inferred shapes.
    fn bytes(self, inferred: &Inferred) -> Bytes {
        let bytes = match self {
            Self::Inputs(layer) => inferred.specs.get(layer.index()).map(|specs| sum(specs)),
            Self::Skip(index) => inferred.skips.get(index).map(|skip| skip.spec.bytes()),
            Self::Fixed(bytes) => Some(bytes.0),
        };
        Bytes(bytes.unwrap_or_default())
    }
}

fn sum(specs: &[TensorSpec]) -> u64 {
    specs.iter().map(TensorSpec::bytes).fold(0, u64::saturating_add)
}

/// Size of the gradients that the stage `user` sends for the weights that `owner` owns.
fn tied(
    sequence: &Sequence,
    ties: &[TieGroup],
    user: &Range<usize>,
    owner: &Range<usize>,
    precision: Precision,
) -> Bytes {
    let owned = |group: &&TieGroup| owner.contains(&group.uses[0].0.index());
    let uses = ties.iter().filter(owned).flat_map(|group| &group.uses);
    let elements = uses
        .filter(|(layer, _)| user.contains(&layer.index()))
        .map(|(layer, slot)| sequence.layers[layer.index()].parameters[*slot].elements());
    let elements = elements.fold(0, u64::saturating_add);
    Bytes(elements.saturating_mul(precision.master.elt_size_in_bytes() as u64))
}

impl Pipeline {
    /// The most bytes of a message on each edge, in a run of `batch`.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub(super) fn expected(&mut self, batch: &MiniBatch) -> Result<Vec<Bytes>> {
        let fixed = |carried: &Carried| match carried {
            Carried::Fixed(bytes) => *bytes,
            Carried::Inputs(_) | Carried::Skip(_) => Bytes(0),
        };
        let mut most: Vec<Bytes> = self.engine.carried.iter().map(fixed).collect();
        for specs in &batch.specs {
            let known = self.caches.message_bytes.iter().position(|(own, _)| own == specs);
            let at = match known {
                Some(at) => at,
                None => self.infer_expected(specs.clone())?,
            };
            for (most, own) in most.iter_mut().zip(&self.caches.message_bytes[at].1) {
                *most = (*most).max(*own);
            }
        }
        Ok(most)
    }

    /// Infers and remembers the bounds for a micro-batch with these inputs. Returns their index.
    fn infer_expected(&mut self, inputs: Vec<TensorSpec>) -> Result<usize> {
        let fed = self.model.precision.fed(&inputs);
        let inferred = self.model.sequence.infer(&fed, self.model.precision.compute)?;
        let bytes = self.engine.carried.iter().map(|carried| carried.bytes(&inferred)).collect();
        if self.caches.message_bytes.len() >= SHAPES_MAX {
            self.caches.message_bytes.remove(0);
        }
        self.caches.message_bytes.push((inputs, bytes));
        Ok(self.caches.message_bytes.len() - 1)
    }
}
