//! Drawings in proportion to time. Families: `golden_` (appearance), `property_` (widths, shares of
//! time, and arbitrary timelines).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_core::{
    Action, Nanos,
    draw::{Look, panels, timeline},
    lower::{Topology, lower},
    remat::Remat,
    schedule::Schedule,
    simulate::{Costs, LinkCost, StageCost, TimedAction, Timeline, simulate},
    splitmix::Stream,
};

/// A step whose forwards take `forward_us`. Backwards take twice as long, and messages a twentieth.
fn step(stages: usize, micro_batches: usize, remat: Remat, forward_us: u64) -> Timeline {
    let forward = Nanos(1000 * forward_us);
    let cost = StageCost {
        forward,
        forward_kept: forward,
        rematerialize: forward,
        backward: forward + forward,
        backward_kept: forward + forward,
        norm: Nanos(0),
        update: Nanos(700_000),
        ..StageCost::default()
    };
    let compute = remat.apply(&Schedule::OneFOneB.actions(stages, micro_batches));
    let program = lower(&compute, &Topology::chain(stages), micro_batches).unwrap();
    let latency = Nanos(forward.0 / 20);
    let links = vec![LinkCost { latency, ..LinkCost::default() }; program.topology.edges.len()];
    let costs = Costs { links, ..Costs::of_stages(vec![cost; stages]) };
    simulate(&program, &costs, 2).unwrap()
}

/// A timeline of actions by name, with their start and end in milliseconds.
fn by_hand(devices: &[&[(&str, f64, f64)]]) -> Timeline {
    let nanos = |ms: f64| Nanos((ms * 1e6) as u64);
    let timed = |(name, start_ms, end_ms): &(&str, f64, f64)| TimedAction {
        action: name.parse::<Action>().unwrap(),
        start: nanos(*start_ms),
        end: nanos(*end_ms),
    };
    let devices: Vec<Vec<_>> =
        devices.iter().map(|actions| actions.iter().map(timed).collect()).collect();
    let makespan = devices.iter().flatten().map(|timed| timed.end).max().unwrap_or_default();
    Timeline { devices, makespan }
}

#[test]
fn golden_proportional_timelines() {
    insta::assert_snapshot!("timeline_remat", timeline(&step(3, 4, Remat::Always, 1500), 100));
    // Twelve micro-batches in few columns: some names do not fit.
    insta::assert_snapshot!("timeline_narrow", timeline(&step(2, 12, Remat::Never, 90), 72));
    let shared = by_hand(&[
        &[
            ("0F0", 0.0, 1.0),
            ("2F0", 1.5, 2.5),
            ("2B0", 2.5, 4.5),
            ("0B0", 6.5, 8.5),
            ("0UPDATE", 8.5, 9.0),
        ],
        &[("1RECV_F0@0", 0.0, 1.0), ("1F0", 1.0, 1.5), ("1B0", 4.5, 6.5), ("1NORM", 6.5, 6.7)],
    ]);
    insta::assert_snapshot!("timeline_shared_device", timeline(&shared, 80));
}

#[test]
fn golden_predicted_above_measured() {
    let (predicted, measured) = (step(2, 3, Remat::Never, 2000), step(2, 3, Remat::Never, 2300));
    let both = [("predicted", &predicted), ("measured", &measured)];
    let drawing = panels(&both, Look { width: 100, color: false });
    insta::assert_snapshot!("panels", drawing);
}

#[test]
fn golden_the_legend_explains_halves_of_backwards() {
    let halved = by_hand(&[
        &[("0F0", 0.0, 1.0), ("0I0", 3.0, 4.0), ("0W0", 4.0, 5.0), ("0UPDATE", 5.0, 5.5)],
        &[("1F0", 1.0, 2.0), ("1I0", 2.0, 3.0), ("1W0", 3.0, 4.0), ("1UPDATE", 4.0, 4.5)],
    ]);
    insta::assert_snapshot!("halves_of_backwards", timeline(&halved, 80));
}

#[test]
fn golden_eight_stages_and_32_micro_batches() {
    let step = step(8, 32, Remat::UnlessAdjacent, 1000);
    let drawing = panels(&[("predicted", &step)], Look { width: 160, color: false });
    insta::assert_snapshot!("eight_stages", drawing);
}

#[test]
fn oracle_colours_change_nothing_but_escapes() {
    let step = step(3, 4, Remat::Always, 1500);
    let drawn = |color| panels(&[("measured", &step)], Look { width: 90, color });
    let (plain, painted) = (drawn(false), drawn(true));
    let mut bare = String::new();
    for part in painted.split("\x1b[") {
        // An escape ends with 'm'. The part before the first escape has none.
        let rest = if bare.is_empty() { part } else { part.split_once('m').unwrap().1 };
        bare.push_str(rest);
    }
    assert_eq!(bare, plain);
    for escape in ["\x1b[38;5;16;48;5;74mF0", "\x1b[38;5;16;48;5;178mR0", "\x1b[0m."] {
        assert!(painted.contains(escape), "{escape:?} is not in {painted:?}");
    }
    for line in painted.lines() {
        assert!(!line.contains('\x1b') || line.rfind("\x1b[0m") == line.rfind('\x1b'), "{line:?}");
    }
}

#[test]
fn oracle_the_idle_row_counts_devices() {
    let step = by_hand(&[&[("0F0", 0.0, 5.0)], &[("1F0", 5.0, 10.0)], &[("2F0", 0.0, 10.0)]]);
    let drawing = panels(&[("x", &step)], Look { width: 31, color: false });
    let idle = drawing.lines().find(|line| line.contains("idle")).unwrap();
    assert_eq!(idle, format!("  idle   | {}", "3".repeat(20)));
}

#[test]
fn property_a_rows_letters_take_their_share_of_the_columns() {
    let step = step(4, 8, Remat::Always, 731);
    for width in [30, 80, 211, 4096] {
        let drawing = timeline(&step, width);
        for (device, (line, actions)) in drawing.lines().zip(&step.devices).enumerate() {
            assert_eq!(line.len(), width, "device {device}");
            let busy: u64 = actions
                .iter()
                .filter(|timed| is_drawn(timed))
                .map(|timed| timed.end.0 - timed.start.0)
                .sum();
            let columns = (width - "device 0 | ".len()) as f64;
            let drawn = line["device 0 | ".len()..].chars().filter(|c| *c != '.').count() as f64;
            let expected = columns * busy as f64 / step.makespan.0 as f64;
            // Each unbroken stretch of work may gain or lose a column.
            assert!((drawn - expected).abs() <= 17.0, "device {device}: {drawn} {expected}");
        }
    }
}

fn is_drawn(timed: &TimedAction) -> bool {
    let name = timed.action.to_string();
    !name.contains("SEND") && !name.contains("RECV")
}

#[test]
fn property_any_timeline_and_width_has_a_drawing() {
    let names = ["0F0", "1B12345", "0R7", "0UPDATE", "3SEND_F0@1", "2NORM"];
    let mut random = Stream::new(11);
    for case in 0..500 {
        let devices = (0..case % 4).map(|_| {
            let mut now = 0;
            let actions = (0..random.below(9)).map(|_| {
                let start = Nanos(now + random.below(3) as u64);
                let end = start + Nanos(1 << random.below(50));
                now = end.0;
                TimedAction { action: names[random.below(6)].parse().unwrap(), start, end }
            });
            actions.collect()
        });
        let devices: Vec<Vec<TimedAction>> = devices.collect();
        let makespan = devices.iter().flatten().map(|timed| timed.end).max().unwrap_or_default();
        let any = Timeline { devices, makespan };
        for width in [0, 1, 25, 79, usize::MAX] {
            let one = timeline(&any, width);
            assert_eq!(one.lines().count(), any.devices.len() + 2, "{one}");
            let both = [("any", &any), ("nothing", &Timeline::default())];
            let two = panels(&both, Look { width, color: case % 2 == 0 });
            assert_eq!(two.lines().count(), any.devices.len() + 7, "{two}");
            assert!(one.lines().all(|line| line.len() <= 4096 + 20));
        }
    }
}
