//! From a sequence and a balance to stages and the edges between them, and to where each parameter is.

use std::ops::Range;

use gpipe_core::{
    EdgeId, LayerId, StageId,
    lower::{Edge, EdgeKind, Topology},
};

use super::OwnedParameter;
use crate::{
    device::Device,
    error::{Error, Result},
    sequence::{Sequence, Skip, TieGroup},
    stage::Edges,
};

/// The layers of each stage.
pub(super) fn ranges(balance: &[usize]) -> Vec<Range<usize>> {
    let mut start = 0;
    balance
        .iter()
        .map(|layers| {
            start += layers;
            start - layers..start
        })
        .collect()
}

/// The topology, and each stage's own view of its edges. `trained_before[l]`: whether anything before layer
/// l is trained.
pub(super) fn build(
    ranges: &[Range<usize>],
    skips: &[Skip],
    ties: &[TieGroup],
    trained_before: &[bool],
) -> (Topology, Vec<Edges>) {
    let stages = ranges.len();
    let mut topology = Topology { stages, edges: Vec::new() };
    let mut views = vec![Edges::default(); stages];
    let stage_of = |layer: LayerId| {
        ranges.iter().position(|range| range.contains(&layer.index())).unwrap_or_default()
    };
    let mut connect = |from: usize, to: usize, kind: EdgeKind| {
        let edge = Edge { from: StageId::from_index(from), to: StageId::from_index(to), kind };
        topology.edges.push(edge);
        EdgeId::from_index(topology.edges.len() - 1)
    };
    for to in 1..stages {
        let gradient = trained_before[ranges[to].start];
        let edge = connect(to - 1, to, EdgeKind::Boundary { gradient });
        views[to - 1].boundary_out = Some(edge);
        views[to].boundary_in = Some(edge);
        views[to].gradient.insert(edge, gradient);
    }
    for (index, skip) in skips.iter().enumerate() {
        let (from, to) = (stage_of(skip.stash), stage_of(skip.pop));
        if from != to {
            let gradient = trained_before[skip.stash.index() + 1];
            let edge = connect(from, to, EdgeKind::Skip { gradient });
            views[from].skips_out.push((edge, index));
            views[to].skips_in.push((edge, index));
            views[to].gradient.insert(edge, gradient);
        }
    }
    // One edge for all weights that one stage uses and another owns.
    for owner in 0..stages {
        for user in owner + 1..stages {
            let uses = |group: &TieGroup, stage: usize| {
                group.uses.iter().any(|(layer, _)| stage_of(*layer) == stage)
            };
            let shared = |g: &TieGroup| stage_of(g.uses[0].0) == owner && uses(g, user);
            if ties.iter().any(shared) {
                let edge = connect(user, owner, EdgeKind::Tie);
                views[owner].tie_users.push((edge, ranges[user].clone()));
                views[user].tie_owners.push((edge, ranges[owner].clone()));
            }
        }
    }
    for voter in 1..stages {
        connect(voter, 0, EdgeKind::Vote);
    }
    (topology, views)
}

/// Each stage that uses a tied weight updates a copy of its own with the same gradient. On devices of one kind
/// the copies stay equal to the bit; a CPU's and a GPU's kernels round differently, and would drift apart.
pub(super) fn check_ties(
    ranges: &[Range<usize>],
    devices: &[Device],
    ties: &[TieGroup],
) -> Result<()> {
    for group in ties {
        let devices: Vec<Device> = ranges
            .iter()
            .zip(devices)
            .filter(|(range, _)| group.uses.iter().any(|(layer, _)| range.contains(&layer.index())))
            .map(|(_, device)| *device)
            .collect();
        let other =
            devices.iter().find(|device| device.gpu().is_some() != devices[0].gpu().is_some());
        if let Some(other) = other {
            return Err(Error::Setting(format!(
                "the weight '{}' is tied between {} and {other}, whose copies would drift apart: put its layers on devices of one kind, or do not tie it",
                group.name, devices[0]
            )));
        }
    }
    Ok(())
}

/// Every parameter once, in layer order; a tied weight under its first use.
pub(super) fn owned(
    sequence: &Sequence,
    ranges: &[Range<usize>],
    ties: &[TieGroup],
) -> Vec<OwnedParameter> {
    let mut all = Vec::new();
    let place = |layer: usize, slot: usize| {
        let stage = ranges.iter().position(|range| range.contains(&layer)).unwrap_or_default();
        (StageId::from_index(stage), (layer - ranges[stage].start, slot))
    };
    for (index, layer) in sequence.layers.iter().enumerate() {
        for (slot, parameter) in layer.parameters.iter().enumerate() {
            let group = parameter.tie.as_ref().and_then(|t| ties.iter().find(|g| g.name == *t));
            let uses = group.map_or(vec![place(index, slot)], |group| {
                group.uses.iter().map(|(layer, slot)| place(layer.index(), *slot)).collect()
            });
            if group.is_none_or(|group| group.uses[0] == (LayerId::from_index(index), slot)) {
                let name = format!("{}.{}", layer.name, parameter.name);
                all.push(OwnedParameter { name, layer: index, slot, uses });
            }
        }
    }
    all
}
