//! Families: `property_` (bubble and held inputs over all K and M), `golden_` (drawings), `oracle_`
//! (text forms).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::sync::Arc;

use gpipe_core::{
    Action, Nanos, Op, StageId,
    draw::grid,
    lower::{Program, Topology, lower},
    remat::Remat,
    schedule::{CustomSchedule, Schedule},
    simulate::{Costs, simulate, simulate_with_room},
    validate::validate,
};

fn program(schedule: &Schedule, remat: Remat, devices: usize, micro_batches: usize) -> Program {
    let compute = remat.apply(&schedule.actions(devices, micro_batches));
    let stages = schedule.stages(devices).unwrap();
    lower(&compute, &Topology::chain(stages), micro_batches).unwrap()
}

#[test]
fn property_unit_cost_bubble_is_the_papers() {
    for schedule in Schedule::SEARCHED_EXACTLY {
        for k in 1..=8 {
            for m in 1..=32 {
                let timeline =
                    simulate(&program(&schedule, Remat::Never, k, m), &Costs::unit(k), 1).unwrap();
                let expected = (k - 1) as f64 / (m + k - 1) as f64;
                assert!((timeline.bubble() - expected).abs() < 1e-12, "{schedule} K={k} M={m}");
                assert_eq!(timeline.makespan, Nanos(2 * (m + k - 1) as u64));
            }
        }
    }
}

/// Each stage's first backward waits for that of the next stage. It also waits for its
/// recomputation, unless that has already run (Huang et al. 2019, section 2.3).
#[test]
fn property_early_rematerialization_saves_one_recomputation_per_stage() {
    for k in 1..=8 {
        for m in 1..=32 {
            let early = program(&Schedule::GPipe, Remat::Always, k, m);
            let late = early.clone().rematerializing_late();
            assert_eq!(early == late, k == 1, "K={k} M={m}");
            validate(&late, 1).unwrap();
            let took = |program| simulate(program, &Costs::unit(k), 1).unwrap().makespan.0 as usize;
            assert_eq!(took(&early), 3 * m + 2 * (k - 1), "K={k} M={m}");
            assert_eq!(took(&late), 3 * m + 3 * (k - 1), "K={k} M={m}");
        }
    }
    let never = program(&Schedule::OneFOneB, Remat::Never, 3, 5);
    assert_eq!(never.clone().rematerializing_late(), never);
}

#[test]
fn property_every_schedule_is_valid_and_holds_what_it_should() {
    for k in 1..=8 {
        for m in 1..=32 {
            for remat in [Remat::Always, Remat::Never, Remat::UnlessAdjacent] {
                let gpipe = validate(&program(&Schedule::GPipe, remat, k, m), 1).unwrap();
                assert_eq!(gpipe.inputs, vec![m; k]);
                let held = validate(&program(&Schedule::OneFOneB, remat, k, m), 1).unwrap();
                for stage in 0..k {
                    assert_eq!(held.inputs[stage], (k - stage).min(m), "K={k} M={m} stage {stage}");
                }
                if remat == Remat::Always {
                    assert_eq!((gpipe.activations, held.activations), (vec![1; k], vec![1; k]));
                }
            }
            validate(&program(&Schedule::ForwardOnly, Remat::Never, k, m), 1).unwrap();
        }
    }
}

/// The idle time of a device. Whole backwards take 2 and halves take 1. If a device has several
/// stages, each stage is a part of what a single one would be.
fn idle(schedule: &Schedule, devices: usize, micro_batches: usize) -> u64 {
    let program = program(schedule, Remat::Never, devices, micro_batches);
    let chunks = program.topology.stages / devices;
    let timeline = simulate(&program, &Costs::unit_halves(devices * chunks), 64).unwrap();
    timeline.makespan.0 - 3 * (micro_batches * chunks) as u64
}

#[test]
fn property_zb_h1_has_a_third_of_the_bubble_and_holds_no_more_than_1f1b() {
    for k in 1..=8_usize {
        for m in 1..=32_usize {
            assert_eq!(idle(&Schedule::OneFOneB, k, m), 3 * (k as u64 - 1));
            // If M < K, the way through all stages and back is longer than W can fill. No order is
            // shorter.
            let expected = (k - 1).max(2 * (k - 1) + 1 - m.min(2 * k - 1));
            assert_eq!(idle(&Schedule::ZbH1, k, m), expected as u64, "K={k} M={m}");
            for remat in [Remat::Always, Remat::Never, Remat::UnlessAdjacent] {
                let held = validate(&program(&Schedule::ZbH1, remat, k, m), 2).unwrap();
                assert_eq!(held.inputs, vec![k.min(m); k], "K={k} M={m}");
            }
        }
    }
}

#[test]
fn property_interleaved_has_a_part_of_the_bubble() {
    for chunks in 2..=4_usize {
        let schedule = Schedule::Interleaved(chunks as u32);
        for k in 1..=8_usize {
            for m in 1..=32_usize {
                let (idle, of_1f1b) = (idle(&schedule, k, m), 3 * (k - 1) * chunks);
                if m % k == 0 {
                    assert_eq!(idle, 3 * (k as u64 - 1), "V={chunks} K={k} M={m}");
                }
                assert!(idle <= of_1f1b as u64, "V={chunks} K={k} M={m}: {idle}, {of_1f1b}");
                let whole = program(&schedule, Remat::Never, k, m);
                let held = validate(&whole, 64).unwrap();
                // A device holds its warm-up and one more micro-batch, each of one chunk.
                for device in 0..k {
                    let most = 2 * (k - 1 - device) + (chunks - 1) * k + 1;
                    let of_device: Vec<usize> = (0..chunks).map(|c| c * k + device).collect();
                    let sum: usize = of_device.iter().map(|&stage| held.inputs[stage]).sum();
                    let most = most.min(m * chunks);
                    // The stages of a device need not all reach their most at the same time.
                    assert!(most_at_once(&whole, device) <= most, "V={chunks} K={k} M={m}");
                    assert!(sum >= most_at_once(&whole, device));
                    if m % k == 0 {
                        assert_eq!(most_at_once(&whole, device), most, "V={chunks} K={k} M={m}");
                    }
                }
                assert_eq!(
                    schedule.placement(k),
                    (0..k * chunks).map(|s| s % k).collect::<Vec<_>>()
                );
            }
        }
    }
}

/// The idle time of each device between its first and last compute action, at most.
fn idle_within(schedule: &Schedule, devices: usize, micro_batches: usize) -> u64 {
    let program = program(schedule, Remat::Never, devices, micro_batches);
    let timeline = simulate(&program, &Costs::unit_halves(program.topology.stages), 64).unwrap();
    let idle = timeline.devices.iter().map(|list| {
        let computing: Vec<_> =
            list.iter().filter(|timed| timed.action.op.computes().is_some()).collect();
        let busy: Nanos = computing.iter().map(|timed| timed.end - timed.start).sum();
        (computing.last().unwrap().end - computing[0].start - busy).0
    });
    idle.max().unwrap()
}

/// What the devices of a schedule with halves hold at most. The policy does not change it.
fn held_on_devices(schedule: &Schedule, devices: usize, micro_batches: usize) -> usize {
    let held = [Remat::Always, Remat::Never, Remat::UnlessAdjacent].map(|remat| {
        let program = program(schedule, remat, devices, micro_batches);
        let held = validate(&program, 64).unwrap().on_devices;
        let counted = (0..devices).map(|device| most_at_once(&program, device));
        assert_eq!(held, counted.collect::<Vec<_>>(), "{schedule} {remat}");
        held.into_iter().max().unwrap()
    });
    assert!(held.iter().all(|own| *own == held[0]), "{schedule}: {held:?}");
    held[0]
}

/// In half-stages: 1F1B has 6(K-1) of idle time and holds 2K.
#[test]
fn property_zb_v_waits_only_for_its_first_action_and_holds_what_1f1b_does() {
    for k in 1..=8_usize {
        for m in 1..=32_usize {
            let (idle, within) = (idle(&Schedule::ZbV, k, m), idle_within(&Schedule::ZbV, k, m));
            if m >= k {
                assert_eq!(idle, k as u64 - 1, "K={k} M={m}");
                assert_eq!(within, (2 * k as u64 - 1).saturating_sub(m as u64), "K={k} M={m}");
            }
            assert!(idle <= 6 * (k as u64 - 1));
            assert_eq!(held_on_devices(&Schedule::ZbV, k, m), (2 * k).min(2 * m), "K={k} M={m}");
        }
    }
}

#[test]
fn property_v_half_and_v_min_trade_idle_time_for_memory() {
    for k in 1..=8_usize {
        for m in 1..=32_usize {
            let (half, min) = (idle(&Schedule::VHalf, k, m), idle(&Schedule::VMin, k, m));
            if m >= k && k >= 3 {
                assert_eq!((half, min), (3 * k as u64 - 5, 4 * k as u64 - 5), "K={k} M={m}");
            }
            assert!(half.max(min) <= 6 * (k as u64 - 1), "K={k} M={m}: {half} {min}");
            let held = held_on_devices(&Schedule::VHalf, k, m);
            assert!(held <= (k + 2).min(2 * m), "K={k} M={m}: {held}");
            let held = held_on_devices(&Schedule::VMin, k, m);
            assert!(held <= ((2 * k).div_ceil(3) + 2).min(2 * m), "K={k} M={m}: {held}");
        }
    }
}

#[test]
fn property_breadth_first_has_the_bubble_of_interleaved_and_holds_everything() {
    for chunks in 2..=4_usize {
        let schedule = Schedule::BreadthFirst(chunks as u32);
        for k in 1..=8_usize {
            for m in 1..=32_usize {
                if m >= k {
                    assert_eq!(idle(&schedule, k, m), 3 * (k as u64 - 1), "V={chunks} K={k} M={m}");
                }
                assert_eq!(held_on_devices(&schedule, k, m), chunks * m);
            }
        }
    }
}

#[test]
fn property_interleaved_zb_has_a_third_of_the_bubble_of_interleaved() {
    for chunks in 2..=4_usize {
        let (whole, split) =
            (Schedule::Interleaved(chunks as u32), Schedule::InterleavedZb(chunks as u32));
        for k in 1..=8_usize {
            for m in 1..=32_usize {
                if m % k == 0 {
                    assert_eq!(idle(&split, k, m), k as u64 - 1, "V={chunks} K={k} M={m}");
                }
                assert!(idle(&split, k, m) <= idle(&whole, k, m), "V={chunks} K={k} M={m}");
                let most = 2 * (k - 1) + (chunks - 1) * k + 1;
                let held = held_on_devices(&split, k, m);
                assert!(held <= most.min(m * chunks).max(1), "V={chunks} K={k} M={m}: {held}");
            }
        }
    }
}

/// Both measures of the bubble, for what the papers state in theirs.
#[test]
fn property_both_bubbles_are_those_of_the_papers() {
    let both = |schedule: Schedule, k, m| {
        let program = program(&schedule, Remat::Never, k, m);
        let costs = Costs::unit_halves(program.topology.stages);
        let timeline = simulate(&program, &costs, 64).unwrap();
        (timeline.bubble(), timeline.bubble_within_devices())
    };
    for k in 1..=8_usize {
        for m in (2 * k)..=32 {
            let (extra, busy) = ((k - 1) as f64, 3.0 * m as f64);
            // 1F1B's first device waits 3(K-1) between its first and last action (section 2.3).
            let (step, within) = both(Schedule::OneFOneB, k, m);
            assert!((step - 3.0 * extra / (busy + 3.0 * extra)).abs() < 1e-12, "K={k} M={m}");
            assert!((within - step).abs() < 1e-12, "K={k} M={m}");
            // A V: K-1 half-stages in a step of 6M, and none within a device.
            let (step, within) = both(Schedule::ZbV, k, m);
            assert!((step - extra / (2.0 * busy + extra)).abs() < 1e-12, "K={k} M={m}");
            assert_eq!(within, 0.0, "K={k} M={m}");
        }
    }
}

/// The most micro-batches between forward and backward on a device, over all its stages.
fn most_at_once(program: &Program, device: usize) -> usize {
    let (mut now, mut most) = (0_usize, 0);
    for action in &program.devices[device] {
        match action.op {
            Op::Forward(_) => now += 1,
            op if op.completes().is_some() => now -= 1,
            _ => {}
        }
        most = most.max(now);
    }
    most
}

#[test]
fn property_forwards_alone_are_a_program_of_the_same_stages() {
    for schedule in Schedule::NAMED {
        for k in 1..=5 {
            for m in 1..=9 {
                let stages = schedule.stages(k).unwrap();
                let lists = schedule.forwards(k, m);
                let program = lower(&lists, &Topology::chain(stages), m).unwrap();
                validate(&program, 64).unwrap();
                let whole = schedule.actions(k, m);
                let whole = lower(&whole, &Topology::chain(stages), m).unwrap();
                assert_eq!(program.placement(), whole.placement());
            }
        }
    }
}

#[test]
fn property_unless_adjacent_recomputes_nothing_on_the_last_stage_of_1f1b() {
    let program = program(&Schedule::OneFOneB, Remat::UnlessAdjacent, 4, 8);
    let recomputing: Vec<usize> =
        (0..4).map(|k| program.rematerialized().count(StageId::from_index(k))).collect();
    assert_eq!(recomputing, [8, 8, 8, 0]);
}

#[test]
fn golden_timelines() {
    for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ForwardOnly] {
        let timeline =
            simulate(&program(&schedule, Remat::Never, 4, 4), &Costs::unit(4), 2).unwrap();
        insta::assert_snapshot!(format!("grid_{schedule}"), grid(&timeline, Nanos(1)));
    }
    let halves = |schedule: Schedule, k, m| {
        let program = program(&schedule, Remat::Never, k, m);
        let costs = Costs::unit_halves(program.topology.stages);
        grid(&simulate(&program, &costs, 2).unwrap(), Nanos(1))
    };
    insta::assert_snapshot!("grid_zb-h1", halves(Schedule::ZbH1, 4, 6));
    insta::assert_snapshot!("grid_interleaved", halves(Schedule::Interleaved(2), 2, 4));
    insta::assert_snapshot!("grid_interleaved_uneven", halves(Schedule::Interleaved(2), 3, 4));
    let timeline =
        simulate(&program(&Schedule::OneFOneB, Remat::Always, 3, 5), &Costs::unit(3), 2).unwrap();
    insta::assert_snapshot!("grid_1f1b_remat", grid(&timeline, Nanos(1)));
}

/// Every schedule, and one from a file, at small and uneven sizes. Whole backwards take 2, and a
/// column is one unit.
#[test]
fn golden_grids() {
    let text = "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2";
    let file = Schedule::Custom(Arc::new(CustomSchedule::parse("mine", text).unwrap()));
    let sizes = [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (3, 5), (4, 8)];
    let mut named: Vec<_> = Schedule::NAMED.iter().map(|own| (own.clone(), &sizes[..])).collect();
    named.push((Schedule::Interleaved(3), &sizes[..5]));
    named.push((Schedule::BreadthFirst(3), &sizes[..5]));
    named.push((Schedule::InterleavedZb(3), &sizes[..5]));
    named.push((file, &[(2, 3)]));
    for (schedule, sizes) in named {
        let mut text = String::new();
        for &(k, m) in sizes {
            let program = program(&schedule, Remat::Never, k, m);
            let costs = Costs::unit_halves(program.topology.stages);
            let (_, timeline) = simulate_with_room(&program, &costs).unwrap();
            text += &format!("K = {k}, M = {m}\n{}\n", grid(&timeline, Nanos(1)));
        }
        let name = schedule.to_string().replace(':', "_");
        insta::assert_snapshot!(format!("grids_{name}"), text);
    }
}

#[test]
fn golden_lowered_lists() {
    for schedule in Schedule::NAMED {
        let program = program(&schedule, Remat::Always, 2, 3);
        let text: Vec<String> = program
            .devices
            .iter()
            .map(|list| list.iter().map(Action::to_string).collect::<Vec<_>>().join(" "))
            .collect();
        let name = schedule.to_string().replace(':', "_");
        insta::assert_snapshot!(format!("lowered_{name}"), text.join("\n"));
    }
}

#[test]
fn oracle_actions_print_and_parse() {
    for schedule in Schedule::NAMED {
        assert_eq!(schedule.to_string().parse(), Ok(schedule.clone()));
        for action in program(&schedule, Remat::Always, 5, 7).devices.into_iter().flatten() {
            assert_eq!(action.to_string().parse(), Ok(action));
        }
    }
    for bad in [
        "",
        "F0",
        "2",
        "2X0",
        "2F",
        "2F-1",
        "2F0 ",
        "2SEND_F0",
        "2SEND_X0@1",
        "2F99999999999",
        "02F0",
        "1norm",
    ] {
        assert!(bad.parse::<Action>().is_err(), "{bad:?}");
    }
    let error = "2F".parse::<Action>().unwrap_err().to_string();
    assert!(error.contains("'2F'") && error.contains("write it like 2F0"), "{error}");
}
