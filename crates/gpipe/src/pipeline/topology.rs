//! From a sequence and a balance to stages, the edges between them, and the place of each
//! parameter.

use std::ops::Range;

pub(super) use gpipe_core::topology::ranges;
use gpipe_core::{
    EdgeId, LayerId, StageId,
    lower::Topology,
    topology::{Across, Purpose, of_cut},
};

use super::model::OwnedParameter;
use crate::{
    device::Device,
    error::{Error, Result},
    sequence::{Sequence, Skip, TieGroup},
    stage::Edges,
};

/// Builds the topology. Also returns the purpose of each edge, and each stage's view of its edges.
/// `trained_before[l]` says whether anything before layer l is trained.
pub(super) fn build(
    ranges: &[Range<usize>],
    skips: &[Skip],
    ties: &[TieGroup],
    trained_before: &[bool],
) -> (Topology, Vec<Purpose>, Vec<Edges>) {
    let skips: Vec<_> = skips.iter().map(|skip| (skip.stash, skip.pop)).collect();
    let ties: Vec<Vec<LayerId>> =
        ties.iter().map(|group| group.uses.iter().map(|(layer, _)| *layer).collect()).collect();
    let across = Across { skips: &skips, ties: &ties, trained_before };
    let (topology, purposes) = of_cut(ranges, across);
    let mut views = vec![Edges::default(); ranges.len()];
    for (index, (edge, purpose)) in topology.edges.iter().zip(&purposes).enumerate() {
        let id = EdgeId::from_index(index);
        let (from, to) = (edge.from.index(), edge.to.index());
        match *purpose {
            Purpose::Boundary => {
                views[from].boundary_out = Some(id);
                views[to].boundary_in = Some(id);
            }
            Purpose::Skip(skip) => {
                views[from].skips_out.push((id, skip));
                views[to].skips_in.push((id, skip));
            }
            Purpose::Tie => {
                let (user, owner) = (from, to);
                views[owner].tie_users.push((id, ranges[user].clone()));
                views[user].tie_owners.push((id, ranges[owner].clone()));
            }
            Purpose::Vote => {}
        }
        views[to].gradient.insert(id, edge.kind.goes_back());
    }
    (topology, purposes, views)
}

/// Checks that each tied weight is on devices of one kind.
///
/// Each stage that uses a tied weight updates its own copy with the same gradient. On devices of
/// one kind the copies stay equal to the bit. CPU and GPU kernels round differently, so their
/// copies would drift apart.
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
                "the weight '{}' is tied between {} and {other}, whose copies would drift apart: \
                put its layers on devices of one kind, or do not tie it",
                group.name, devices[0]
            )));
        }
    }
    Ok(())
}

/// Every parameter once, in layer order. A tied weight is listed under its first use.
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
