//! Families: `golden_` (a whole small trace), `oracle_` (every action is an event and every message
//! an arrow).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_core::{
    Nanos,
    lower::{Topology, lower},
    remat::Remat,
    schedule::Schedule,
    simulate::{Costs, LinkCost, StageCost, Timeline, simulate},
};
use gpipe_observe::trace;
use serde_json::Value;

/// A simulated step of `stages` stages and `micro_batches` micro-batches.
fn timeline(stages: usize, micro_batches: usize) -> Timeline {
    let cost = StageCost {
        forward: Nanos(1_000),
        rematerialize: Nanos(1_000),
        backward: Nanos(2_500),
        norm: Nanos(0),
        update: Nanos(500),
        ..StageCost::default()
    };
    let compute = Remat::Always.apply(&Schedule::OneFOneB.actions(stages, micro_batches));
    let program = lower(&compute, &Topology::chain(stages), micro_batches).unwrap();
    let link = LinkCost { latency: Nanos(100), ..LinkCost::default() };
    let links = vec![link; program.topology.edges.len()];
    let costs = Costs { links, ..Costs::of_stages(vec![cost; stages]) };
    simulate(&program, &costs, 2).unwrap()
}

fn text(timelines: &[(&str, &Timeline)]) -> String {
    let mut bytes = Vec::new();
    trace::write(&mut bytes, timelines).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn events(timelines: &[(&str, &Timeline)]) -> Vec<Value> {
    let trace: Value = serde_json::from_str(&text(timelines)).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn golden_trace_of_two_stages_and_one_micro_batch() {
    insta::assert_snapshot!("two_stages", text(&[("measured", &timeline(2, 1))]));
}

#[test]
fn oracle_every_action_of_both_timelines_is_an_event() {
    let (predicted, measured) = (timeline(3, 5), timeline(3, 4));
    let events = events(&[("predicted", &predicted), ("measured", &measured)]);
    for (pid, timeline) in [&predicted, &measured].into_iter().enumerate() {
        for (device, actions) in timeline.devices.iter().enumerate() {
            let slices = events
                .iter()
                .filter(|e| e["ph"] == "X" && e["pid"] == pid && e["tid"] == device)
                .map(|e| {
                    let nanos = |key: &str| Nanos((e[key].as_f64().unwrap() * 1e3).round() as u64);
                    (e["name"].as_str().unwrap().to_owned(), nanos("ts"), nanos("dur"))
                });
            let expected = actions
                .iter()
                .map(|timed| (timed.action.to_string(), timed.start, timed.end - timed.start));
            assert_eq!(slices.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        }
    }
    let names: Vec<&Value> =
        events.iter().filter(|e| e["name"] == "process_name").map(|e| &e["args"]["name"]).collect();
    assert_eq!(names, ["predicted", "measured"]);
}

#[test]
fn oracle_every_message_is_an_arrow_from_its_send_to_its_receive() {
    let events = events(&[("measured", &timeline(3, 5))]);
    let named = |part: &str| {
        let slices = events.iter().filter(|e| e["ph"] == "X" && e["cat"] == "wait");
        slices.filter(|e| e["name"].as_str().unwrap().contains(part)).count()
    };
    let ends = |phase: &str| {
        let mut ends: Vec<(&str, f64)> = events
            .iter()
            .filter(|e| e["ph"] == phase)
            .map(|e| (e["id"].as_str().unwrap(), e["ts"].as_f64().unwrap()))
            .collect();
        ends.sort_by(|a, b| a.0.cmp(b.0));
        ends
    };
    let (sent, received) = (ends("s"), ends("f"));
    assert_eq!((sent.len(), received.len()), (named("SEND"), named("RECV")));
    assert!(sent.len() >= 2 * 2 * 5, "values and gradients of 5 micro-batches over 2 edges");
    for (from, to) in sent.iter().zip(&received) {
        assert!(from.0 == to.0 && from.1 <= to.1, "{from:?} {to:?}");
    }
    assert!(sent.windows(2).all(|pair| pair[0].0 != pair[1].0), "each arrow has its own id");
}

#[test]
fn oracle_an_empty_timeline_is_a_trace() {
    assert_eq!(
        events(&[("measured", &Timeline::default())]).len(),
        2,
        "the process's name and place"
    );
}
