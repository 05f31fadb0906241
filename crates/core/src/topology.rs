//! The edges between the stages that a cut of a sequence makes.

use std::ops::Range;

use crate::{
    ids::{LayerId, StageId},
    lower::{Edge, EdgeKind, Topology},
};

/// The range of layers of each stage.
pub fn ranges(balance: &[usize]) -> Vec<Range<usize>> {
    let mut start = 0;
    balance
        .iter()
        .map(|layers| {
            start += layers;
            start - layers..start
        })
        .collect()
}

/// The parts of a sequence that make edges where it is cut.
#[derive(Debug, Clone, Copy, Default)]
pub struct Across<'a> {
    /// The ends of each long skip: the layer that stashes and the layer that pops.
    pub skips: &'a [(LayerId, LayerId)],
    /// The layers that use each tied weight, ascending. The first one owns the weight.
    pub ties: &'a [Vec<LayerId>],
    /// For each layer, whether anything before it is trained; one more entry says whether anything
    /// is.
    pub trained_before: &'a [bool],
}

/// The purpose of an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Activations from one stage to the next.
    Boundary,
    /// The skip with this number.
    Skip(usize),
    /// All weights that one stage uses and another stage owns.
    Tie,
    /// The norm and the verdict.
    Vote,
}

/// The topology of a cut into `ranges`, and the purpose of each of its edges.
pub fn of_cut(ranges: &[Range<usize>], across: Across<'_>) -> (Topology, Vec<Purpose>) {
    let stages = ranges.len();
    let (mut edges, mut purposes) = (Vec::new(), Vec::new());
    let stage_of = |layer: LayerId| {
        ranges.iter().position(|range| range.contains(&layer.index())).unwrap_or_default()
    };
    let trained = |layer: usize| across.trained_before.get(layer).copied().unwrap_or(true);
    let mut connect = |from: usize, to: usize, kind: EdgeKind, purpose: Purpose| {
        edges.push(Edge { from: StageId::from_index(from), to: StageId::from_index(to), kind });
        purposes.push(purpose);
    };
    for (to, range) in ranges.iter().enumerate().skip(1) {
        let kind = EdgeKind::Boundary { gradient: trained(range.start) };
        connect(to - 1, to, kind, Purpose::Boundary);
    }
    for (index, &(stash, pop)) in across.skips.iter().enumerate() {
        let (from, to) = (stage_of(stash), stage_of(pop));
        if from != to {
            let kind = EdgeKind::Skip { gradient: trained(stash.index() + 1) };
            connect(from, to, kind, Purpose::Skip(index));
        }
    }
    // One edge for all weights that one stage uses and another owns.
    for owner in 0..stages {
        for user in owner + 1..stages {
            let shared = |uses: &Vec<LayerId>| {
                uses.first().is_some_and(|&first| stage_of(first) == owner)
                    && uses.iter().any(|&layer| stage_of(layer) == user)
            };
            if across.ties.iter().any(shared) {
                connect(user, owner, EdgeKind::Tie, Purpose::Tie);
            }
        }
    }
    for voter in 1..stages {
        connect(voter, 0, EdgeKind::Vote, Purpose::Vote);
    }
    (Topology { stages, edges }, purposes)
}
