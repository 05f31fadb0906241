//! Families: `oracle_` (sums over layers against an event-by-event replay), `property_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod support;

use std::ops::Range;

use gpipe_core::{
    Bytes, Nanos, Op,
    cost::{LayerCost, LayerState, ModelCosts, OffloadSpeed, TieCost},
    memory::ActionMemory,
    remat::{Remat, RematPolicies},
    schedule::Schedule,
    splitmix::Stream,
};
use support::{Kind, model};

/// What is live while a stage runs, by name, and the peak.
#[derive(Default)]
struct Replay {
    live: Vec<((char, usize), u64)>,
    most: i64,
    start: i64,
}

impl Replay {
    fn now(&self) -> i64 {
        self.live.iter().map(|(_, bytes)| *bytes as i64).sum()
    }

    fn add(&mut self, what: char, layer: usize, bytes: Bytes) {
        self.live.push(((what, layer), bytes.0));
    }

    fn drop(&mut self, what: char, layer: usize) {
        self.live.retain(|(name, _)| *name != (what, layer));
    }

    /// Something holds this much while it runs.
    fn peak(&mut self, bytes: Bytes) {
        self.most = self.most.max(self.now() + bytes.0 as i64);
    }

    /// Starts measuring from here.
    fn restart(&mut self) {
        (self.start, self.most) = (self.now(), self.now());
    }

    fn above_start(&self) -> u64 {
        (self.most - self.start).max(0) as u64
    }

    fn keep(&mut self, costs: &[LayerCost], part: Range<usize>) {
        for layer in part {
            self.peak(costs[layer].forward_peak);
            self.add('k', layer, costs[layer].kept);
        }
    }
}

/// A backward after a re-materialization in `segments`, of which the last is already recomputed.
fn backward(
    costs: &[LayerCost],
    gradients: &[Bytes],
    segments: &[Range<usize>],
    first: bool,
) -> u64 {
    let mut replay = Replay::default();
    let last = segments.last().unwrap();
    replay.keep(costs, last.start..costs.len());
    replay.restart();
    for (number, segment) in segments.iter().enumerate().rev() {
        let is_last = number + 1 == segments.len();
        let end = if is_last { costs.len() } else { segment.end };
        if !is_last {
            replay.keep(costs, segment.clone());
        }
        for layer in (segment.start..end).rev() {
            let cost = &costs[layer];
            replay.peak(if first { cost.first_backward_peak } else { cost.backward_peak });
            replay.drop('k', layer);
            replay.drop('g', layer + 1);
            replay.add('g', layer, cost.input_gradients);
            if first && layer < gradients.len() {
                replay.add('p', layer, gradients[layer]);
            }
        }
    }
    replay.above_start()
}

fn discarding(costs: &[LayerCost], segments: &[Range<usize>]) -> ActionMemory {
    let mut replay = Replay::default();
    for segment in segments {
        for layer in segment.clone() {
            // A stage's own inputs are charged to the sender.
            if layer > 0 {
                replay.add('i', layer, costs[layer].inputs);
            }
            replay.peak(costs[layer].forward_peak);
            if layer > segment.start {
                replay.drop('i', layer);
            }
        }
    }
    ActionMemory { peak: Bytes(replay.most as u64), after: Bytes(replay.now() as u64) }
}

/// The outputs of products are kept from the forward on. A re-materialization frees them layer by
/// layer and keeps the layer's activations instead.
#[test]
fn oracle_a_selective_stages_bytes_are_those_of_a_replay() {
    let mut random = Stream::new(23);
    for _ in 0..200 {
        let layers = 1 + random.below(9);
        let mut model = model(&mut random, layers, 2, Kind::Plain);
        model.skips.clear();
        let costs = model.at(2, &Schedule::OneFOneB);
        let own = model.stage_bytes(0..layers, &costs, 2, Remat::Selective);
        let mut replay = Replay::default();
        for (layer, cost) in costs.iter().enumerate().take(layers) {
            replay.add('i', layer, if layer > 0 { cost.inputs } else { Bytes(0) });
            replay.peak(cost.forward_peak);
            replay.drop('i', layer);
            replay.add('q', layer, cost.products);
        }
        assert_eq!(own.forward.after.0, replay.now() as u64);
        assert!(own.forward.peak.0 >= replay.most as u64);
        replay.restart();
        for (layer, cost) in costs.iter().enumerate() {
            replay.peak(if layer < layers { cost.selective_peak } else { cost.forward_peak });
            replay.drop('q', layer);
            replay.add('k', layer, cost.kept);
        }
        assert_eq!(own.rematerialize.peak.0, replay.above_start());
        let whole = model.stage_bytes(0..layers, &costs, 2, Remat::Never).forward_kept.after;
        assert_eq!(own.forward.after + own.rematerialize.after, whole);
    }
}

#[test]
fn oracle_a_stages_bytes_are_those_of_a_replay() {
    let mut random = Stream::new(21);
    for round in 0..300 {
        let layers = 1 + random.below(9);
        let kind = [Kind::Plain, Kind::Crossed, Kind::Wild][round % 3];
        let mut model = model(&mut random, layers, 2, kind);
        model.skips.clear(); // the estimates' tests compare their gradients with real stages
        let start = random.below(layers);
        let range = start..start + 1 + random.below(layers - start);
        let segments = 1 + random.below(range.len() + 2) as u32;
        let remat = if segments == 1 { Remat::Always } else { Remat::Segments(segments) };
        let costs = model.at(2, &Schedule::OneFOneB);
        let own = model.stage_bytes(range.clone(), &costs, 2, remat);
        let end = if range.end == layers { layers + 1 } else { range.end };
        let costs = &costs[range.start..end];
        let states = &model.layers[range.clone()];
        let gradients: Vec<Bytes> = states.iter().map(|state| state.gradients).collect();
        let parts = remat.segment_ranges(range.len());
        assert_eq!(parts.iter().map(|part| part.len()).sum::<usize>(), range.len());
        assert!(parts.iter().all(|part| !part.is_empty()));
        let whole = Remat::Never.segment_ranges(range.len());
        assert_eq!(own.forward, discarding(costs, &parts), "{remat}");
        // A re-materialization ends before outputs that nobody reads. The loss reads the last.
        let mut again = costs.to_vec();
        for part in &parts {
            if range.start + part.end < layers {
                again[part.end - 1].kept = again[part.end - 1].kept - again[part.end - 1].unread;
            }
        }
        assert_eq!(own.backward.0, backward(&again, &gradients, &parts, false), "{remat}");
        assert_eq!(own.first_backward.0, backward(&again, &gradients, &parts, true), "{remat}");
        let mut last = Replay::default();
        last.keep(&again, parts.last().unwrap().start..again.len());
        let last = ActionMemory { peak: Bytes(last.most as u64), after: Bytes(last.now() as u64) };
        assert_eq!(own.rematerialize, last, "{remat}");
        assert_eq!(own.backward_kept.0, backward(costs, &gradients, &whole, false));
        assert_eq!(own.first_backward_kept.0, backward(costs, &gradients, &whole, true));
        let mut kept = Replay::default();
        kept.keep(costs, 0..costs.len());
        let kept = ActionMemory { peak: Bytes(kept.most as u64), after: Bytes(kept.now() as u64) };
        assert_eq!(own.forward_kept, kept);
        let tied = model.ties.iter().filter(|tie| tie.layers.iter().any(|l| range.contains(l)));
        let tied: u64 = tied.map(|tie| tie.parameters.0 + tie.optimizer.0).sum();
        let states: u64 = states.iter().map(|s| s.parameters.0 + s.optimizer.0).sum();
        // All-reduces over replicas need copies; here the gradients are small enough to copy them
        // all.
        let copies = if model.replicated { gradients.iter().map(|own| own.0).sum() } else { 0 };
        assert_eq!(own.resident.0, states + tied + copies);
    }
}

/// The copies of gradients in flight stay within the limit plus one layer's gradients.
#[test]
fn oracle_copies_of_gradients_are_bounded() {
    let mut random = Stream::new(24);
    let mut model = model(&mut random, 5, 2, Kind::Plain);
    let (mib, sizes) = (1 << 20, [4, 40, 30, 2, 60]);
    for (layer, size) in model.layers.iter_mut().zip(sizes) {
        layer.gradients = Bytes(size * mib);
    }
    let costs = model.at(2, &Schedule::OneFOneB);
    // All gradients if they fit; otherwise 50 MiB plus the largest layer's.
    for (range, copies) in [(0..1, 4), (0..2, 44), (1..3, 70), (1..4, 72), (0..5, 110)] {
        let mut resident = |replicated| {
            model.replicated = replicated;
            model.stage_bytes(range.clone(), &costs, 2, Remat::Always).resident.0
        };
        assert_eq!(resident(true) - resident(false), copies * mib, "{range:?}");
    }
}

#[test]
fn property_segments_take_what_always_does_in_other_parts() {
    let mut random = Stream::new(22);
    for _ in 0..200 {
        let layers = 1 + random.below(9);
        let model = model(&mut random, layers, 1, Kind::Wild);
        let costs = model.at(1, &Schedule::OneFOneB);
        let stage = |remat| model.stage_cost(0..layers, &costs, remat, 1.0);
        let always = stage(Remat::Always);
        for segments in 1..=layers as u32 + 2 {
            let own = stage(Remat::Segments(segments));
            assert_eq!(own.rematerialize + own.backward, always.rematerialize + always.backward);
            assert!(own.rematerialize <= always.rematerialize);
            assert_eq!((own.forward, own.backward_kept), (always.forward, always.backward_kept));
        }
    }
}

#[test]
fn oracle_costs_on_a_line_are_those_of_any_size_on_it() {
    let line = |samples: usize| LayerCost {
        forward: Nanos(10 + 3 * samples as u64),
        kept: Bytes(100 * samples as u64),
        backward_peak: Bytes(7),
        ..LayerCost::default()
    };
    let costs = |sizes: &[usize]| ModelCosts {
        layers: vec![Default::default()],
        sizes: sizes.iter().map(|&size| (size, vec![line(size); 2])).collect(),
        trained_before: vec![false, true],
        ..ModelCosts::default()
    };
    let at = |costs: &ModelCosts, samples: usize| costs.at(samples, &Schedule::OneFOneB);
    for samples in 1..20 {
        assert_eq!(at(&costs(&[4, 8]), samples), vec![line(samples); 2], "{samples}");
        assert_eq!(at(&costs(&[2, 4, 8, 16]), samples), vec![line(samples); 2], "{samples}");
    }
    // A measured size is taken as it is, even if it is off the line.
    let mut off = costs(&[4, 8]);
    off.sizes.get_mut(&4).unwrap()[0].forward = Nanos(1000);
    assert_eq!(at(&off, 4)[0].forward, Nanos(1000));
    assert_eq!(at(&off, 8)[0].forward, line(8).forward);
    // A falling line does not go below 0.
    assert_eq!(at(&off, 16)[0].forward, Nanos(0));
    // A single size is scaled in proportion.
    assert_eq!(at(&costs(&[4]), 8)[0].forward, Nanos(44));
    // A schedule's own costs are preferred. A size that only `sizes` has is taken from there.
    let mut both = costs(&[4, 8, 16]);
    let twice = LayerCost { forward: Nanos(2), ..line(8) };
    both.under.insert("gpipe".into(), [(8, vec![twice; 2])].into());
    assert_eq!(both.at(8, &Schedule::GPipe), vec![twice; 2]);
    assert_eq!(at(&both, 8), vec![line(8); 2]);
    assert_eq!(both.at(16, &Schedule::GPipe), vec![line(16); 2]);
    assert_eq!(both.at(24, &Schedule::GPipe)[0].forward, Nanos(6));
    both.check().unwrap();
    both.under.insert("1f1b".into(), [(8, vec![twice])].into());
    assert!(both.check().unwrap_err().to_string().contains("1 costs"));
}

/// A cap had refused the larger size during profiling. Sizes in between were then predicted with
/// half of their true costs.
#[test]
fn regression_a_size_without_selective_costs_is_no_zero() {
    let cost = |samples: u64, selective: bool| LayerCost {
        forward: Nanos(samples * 10),
        rematerialize: Nanos(samples * 10),
        rematerialize_selective: Nanos(if selective { samples } else { 0 }),
        products: Bytes(if selective { samples * 100 } else { 0 }),
        ..LayerCost::default()
    };
    let sizes = [(2, true), (4, true), (8, false)];
    let sizes =
        sizes.map(|(samples, selective)| (samples as usize, vec![cost(samples, selective)]));
    let costs = ModelCosts { sizes: sizes.into(), ..ModelCosts::default() };
    for (samples, known) in [(1, true), (2, true), (3, true), (4, true), (6, false), (8, false)] {
        for schedule in [Schedule::OneFOneB, Schedule::GPipe] {
            assert_eq!(costs.has_selective(samples, &schedule), known, "{samples}");
        }
    }
    assert_eq!(costs.at(3, &Schedule::GPipe)[0].products, Bytes(300));
}

#[test]
fn property_keep_n_never_keeps_more_than_n_and_one() {
    let mut random = Stream::new(23);
    for _ in 0..300 {
        let (stages, micro_batches) = (1 + random.below(6), 1 + random.below(20));
        let most = 1 + random.below(8);
        for schedule in Schedule::SEARCHED_EXACTLY {
            let lists = schedule.actions(stages, micro_batches);
            let again = Remat::Keep(most as u32).apply(&lists);
            for list in &again {
                let recomputed: Vec<_> = list
                    .iter()
                    .filter_map(|a| if let Op::Rematerialize(m) = a.op { Some(m) } else { None })
                    .collect();
                let mut kept = 0_usize;
                for action in list {
                    match action.op {
                        Op::Forward(m) if !recomputed.contains(&m) => kept += 1,
                        Op::Backward(m) if !recomputed.contains(&m) => kept -= 1,
                        _ => {}
                    }
                    assert!(kept <= most + 1, "{schedule}, keep:{most}: {kept}");
                }
                // It does keep that many if there are enough.
                let forwards = lists[0].iter().take_while(|a| matches!(a.op, Op::Forward(_)));
                let in_flight = forwards.count().min(most);
                assert!(recomputed.len() + in_flight <= micro_batches || list != &again[0]);
            }
        }
    }
}

#[test]
fn property_policies_print_as_they_parse() {
    for text in ["always", "never,keep:3", "segments:1024,unless-adjacent,keep:65536"] {
        assert_eq!(text.parse::<RematPolicies>().unwrap().to_string(), text);
    }
    for text in
        ["", "keep:0", "keep:", "keep:-1", "keep:65537", "segments:1025", "always,", "Never"]
    {
        let error = text.parse::<RematPolicies>().unwrap_err().to_string();
        assert!(error.contains("use always, never"), "{error}");
    }
    let policies: RematPolicies = " always , never ".parse().unwrap();
    assert_eq!(
        (policies.of(0), policies.of(1), policies.of(2)),
        (Remat::Always, Remat::Never, Remat::default())
    );
    assert!(policies.check(2).is_ok() && policies.check(3).is_err());
    assert_eq!(RematPolicies::by_stage([Remat::Never; 3]), Remat::Never.into());
}

/// Writing hides behind the forward, reading behind a backward, and the longer of both counts.
#[test]
fn oracle_a_stage_that_offloads_waits_for_what_does_not_overlap() {
    let layer = LayerCost {
        forward: Nanos(50),
        forward_kept: Nanos(40),
        rematerialize: Nanos(45),
        backward: Nanos(90),
        backward_kept: Nanos(80),
        kept: Bytes(150),
        ..LayerCost::default()
    };
    let times = |out: u64, back: u64| {
        let costs = ModelCosts {
            layers: vec![LayerState::default(); 2],
            trained_before: vec![true; 3],
            offload: Some(OffloadSpeed { out_bytes_per_s: out, back_bytes_per_s: back }),
            ..ModelCosts::default()
        };
        let all = [layer, layer, LayerCost::default()];
        let cost = costs.stage_cost(0..2, &all, Remat::Offload, 1.0);
        (cost.forward.0, cost.rematerialize.0, cost.backward.0)
    };
    // 300 bytes at 10 and at 1 per nanosecond.
    assert_eq!(times(10_000_000_000, 10_000_000_000), (80, 0, 160));
    assert_eq!(times(1_000_000_000, 10_000_000_000), (300, 0, 160));
    assert_eq!(times(10_000_000_000, 1_000_000_000), (80, 140, 160));
}

/// The last stage of a GPT on GPUs sent the gradient of the tied embedding early: the first stage
/// was still in its last backwards. The first then held 2.2% more than its plan counted at most.
#[test]
fn regression_gradients_of_tied_weights_may_arrive_before_the_last_backward() {
    let tie = TieCost {
        layers: vec![0, 2, 3],
        parameters: Bytes(1000),
        optimizer: Bytes(2000),
        shardable: Bytes(0),
    };
    let costs = vec![LayerCost::default(); 5];
    let of = |ties: Vec<TieCost>, own_memory: bool| ModelCosts {
        layers: vec![LayerState::default(); 4],
        sizes: [(1, costs.clone())].into(),
        ties,
        own_memory,
        trained_before: vec![true; 5],
        ..ModelCosts::default()
    };
    let ahead = |range: Range<usize>, ties: Vec<TieCost>, own_memory: bool| {
        of(ties, own_memory).stage_bytes(range, &costs, 1, Remat::Never).ahead.0
    };
    // The owner receives the gradients of the uses that other stages have.
    let more = |range: Range<usize>| {
        ahead(range.clone(), vec![tie.clone()], true) - ahead(range, Vec::new(), true)
    };
    assert_eq!([more(0..1), more(0..3), more(0..4), more(2..4)], [2000, 1000, 0, 0]);
    // In the memory of the machine, it is the sender that holds them.
    assert_eq!(ahead(0..1, vec![tie.clone()], false), 0);
}
