//! Random models for the tests of costs, memory and plans. The same seed always yields the same
//! model.
#![allow(dead_code)] // each test uses only a part

use std::collections::BTreeMap;

use gpipe_core::{
    Bytes, Nanos,
    cost::{LayerCost, LayerState, ModelCosts, OffloadSpeed, SkipCost, TieCost, Transport},
    splitmix::Stream,
};

/// How the costs of a layer relate to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Keeping activations costs nothing, and recomputing costs as much as a forward. Stages are a
    /// chain.
    Plain,
    /// Like `Plain`, with long skips, ties and frozen layers.
    Crossed,
    /// Like `Crossed`, with arbitrary numbers, as from a bad measurement.
    Wild,
}

pub fn model(random: &mut Stream, layers: usize, samples: usize, kind: Kind) -> ModelCosts {
    let crossed = kind != Kind::Plain;
    let state = |layer: usize, random: &mut Stream| {
        let gradients = Bytes(random.below(15) as u64);
        LayerState {
            name: format!("block.{layer}"),
            parameters: Bytes(random.below(30) as u64),
            gradients,
            statistics: Bytes(0),
            optimizer: Bytes(random.below(30) as u64),
            shardable: Vec::new(),
            norm: Nanos(random.below(3) as u64),
            update: Nanos(random.below(5) as u64),
            update_peak: Bytes(random.below(10) as u64),
            flops: 1,
            unsplit: false,
            early: Bytes(gradients.0 / 2),
        }
    };
    let states = (0..layers).map(|layer| state(layer, random)).collect();
    let mut measured = || -> BTreeMap<usize, Vec<LayerCost>> {
        let mut of = |samples| (0..=layers).map(|_| cost(random, samples, kind)).collect();
        (1..=samples).map(|samples| (samples, of(samples))).collect()
    };
    let sizes = measured();
    let under = match kind {
        Kind::Wild => [("gpipe".to_owned(), measured())].into(),
        _ => BTreeMap::new(),
    };
    let mut ends = || {
        let a = random.below(layers);
        let b = random.below(layers);
        (a.min(b), a.max(b))
    };
    let pairs: Vec<(usize, usize)> = (0..3).map(|_| ends()).filter(|(a, b)| a < b).collect();
    let (skips, ties) = pairs.split_at(pairs.len() / 2);
    let skip = |&(stash, pop): &(usize, usize)| SkipCost {
        stash,
        pop,
        bytes: Bytes(3),
        gradient: Bytes(3),
    };
    let tie = |&(a, b): &(usize, usize)| TieCost {
        layers: vec![a, b],
        parameters: Bytes(7),
        optimizer: Bytes(14),
        shardable: Bytes(0),
    };
    let frozen = if crossed { random.below(layers) } else { 0 };
    let transport = match random.below(3) {
        0 => Transport::default(),
        1 => Transport { latency: Nanos(2), bytes_per_s: 0 },
        _ => Transport { latency: Nanos(1), bytes_per_s: 4_000_000_000 },
    };
    ModelCosts {
        fed: Bytes(0),
        layers: states,
        sizes,
        under,
        skips: if crossed { skips.iter().map(skip).collect() } else { Vec::new() },
        ties: if crossed { ties.iter().map(tie).collect() } else { Vec::new() },
        trained_before: (0..=layers).map(|layer| layer > frozen).collect(),
        transport,
        replicated: layers % 3 == 2,
        // A byte takes about as long as an operation.
        offload: layers.is_multiple_of(2).then_some(OffloadSpeed {
            out_bytes_per_s: 2_000_000_000,
            back_bytes_per_s: 1_000_000_000,
        }),
        ..ModelCosts::default()
    }
}

fn cost(random: &mut Stream, samples: usize, kind: Kind) -> LayerCost {
    let most = [4, 40][random.below(2)] * samples;
    let mut time = || Nanos(random.below(most) as u64);
    let (forward, backward) = (time(), time());
    let (kept, again, backward_kept) = match kind {
        Kind::Wild => (time(), time(), time()),
        Kind::Plain | Kind::Crossed => (forward, forward, backward),
    };
    let mut bytes = |most: usize| Bytes(random.below(most * samples) as u64);
    let inputs = bytes(8);
    let activations = bytes(40) + inputs;
    LayerCost {
        forward,
        forward_kept: kept,
        rematerialize: again,
        rematerialize_selective: Nanos(again.0 / 3),
        products: Bytes(activations.0 / 2),
        backward,
        backward_kept,
        inputs,
        input_gradients: inputs,
        kept: activations,
        unread: Bytes(inputs.0 / 2),
        forward_peak: bytes(60),
        selective_peak: activations,
        backward_peak: bytes(60),
        first_backward_peak: bytes(70),
        backward_input: Nanos(backward.0 / 2),
        backward_weight: Nanos(backward.0 - backward.0 / 2),
        split: bytes(40),
        backward_input_peak: bytes(60),
        backward_weight_peak: bytes(60),
        first_backward_weight_peak: bytes(70),
    }
}

pub fn balances(layers: usize, stages: usize) -> Vec<Vec<usize>> {
    if stages == 1 {
        return vec![vec![layers]];
    }
    let rest = |first: usize| {
        balances(layers - first, stages - 1).into_iter().map(move |mut rest| {
            rest.insert(0, first);
            rest
        })
    };
    (1..=layers - (stages - 1)).flat_map(rest).collect()
}
