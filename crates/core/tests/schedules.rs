//! Families: `property_` (bubble, held inputs, over all K and M), `golden_` (drawings), `oracle_` (text forms).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_core::{
    Action, Nanos, StageId,
    draw::grid,
    lower::{Topology, lower},
    remat::Remat,
    schedule::Schedule,
    simulate::{Costs, simulate},
    validate::validate,
};

fn program(
    schedule: Schedule,
    remat: Remat,
    stages: usize,
    micro_batches: usize,
) -> gpipe_core::lower::Program {
    let compute = remat.apply(&schedule.actions(stages, micro_batches));
    lower(&compute, &Topology::chain(stages), micro_batches).unwrap()
}

#[test]
fn property_unit_cost_bubble_is_the_papers() {
    for schedule in Schedule::TRAINING {
        for k in 1..=8 {
            for m in 1..=32 {
                let timeline =
                    simulate(&program(schedule, Remat::Never, k, m), &Costs::unit(k), 1).unwrap();
                let expected = (k - 1) as f64 / (m + k - 1) as f64;
                assert!((timeline.bubble() - expected).abs() < 1e-12, "{schedule} K={k} M={m}");
                assert_eq!(timeline.makespan, Nanos(2 * (m + k - 1) as u64));
            }
        }
    }
}

#[test]
fn property_every_schedule_is_valid_and_holds_what_it_should() {
    for k in 1..=8 {
        for m in 1..=32 {
            for remat in [Remat::Always, Remat::Never, Remat::UnlessAdjacent] {
                let gpipe = validate(&program(Schedule::GPipe, remat, k, m), 1).unwrap();
                assert_eq!(gpipe.inputs, vec![m; k]);
                let held = validate(&program(Schedule::OneFOneB, remat, k, m), 1).unwrap();
                for stage in 0..k {
                    assert_eq!(held.inputs[stage], (k - stage).min(m), "K={k} M={m} stage {stage}");
                }
                if remat == Remat::Always {
                    assert_eq!((gpipe.activations, held.activations), (vec![1; k], vec![1; k]));
                }
            }
            validate(&program(Schedule::ForwardOnly, Remat::Never, k, m), 1).unwrap();
        }
    }
}

#[test]
fn property_unless_adjacent_recomputes_nothing_on_the_last_stage_of_1f1b() {
    let program = program(Schedule::OneFOneB, Remat::UnlessAdjacent, 4, 8);
    let recomputing: Vec<usize> =
        (0..4).map(|k| program.rematerialized().count(StageId::from_index(k))).collect();
    assert_eq!(recomputing, [8, 8, 8, 0]);
}

#[test]
fn golden_timelines() {
    for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ForwardOnly] {
        let timeline =
            simulate(&program(schedule, Remat::Never, 4, 4), &Costs::unit(4), 2).unwrap();
        insta::assert_snapshot!(format!("grid_{schedule}"), grid(&timeline, Nanos(1)));
    }
    let timeline =
        simulate(&program(Schedule::OneFOneB, Remat::Always, 3, 5), &Costs::unit(3), 2).unwrap();
    insta::assert_snapshot!("grid_1f1b_remat", grid(&timeline, Nanos(1)));
}

#[test]
fn golden_lowered_lists() {
    for schedule in Schedule::TRAINING {
        let program = program(schedule, Remat::Always, 2, 3);
        let text: Vec<String> = program
            .devices
            .iter()
            .map(|list| list.iter().map(Action::to_string).collect::<Vec<_>>().join(" "))
            .collect();
        insta::assert_snapshot!(format!("lowered_{schedule}"), text.join("\n"));
    }
}

#[test]
fn oracle_actions_print_and_parse() {
    for schedule in Schedule::TRAINING {
        for action in program(schedule, Remat::Always, 5, 7).devices.into_iter().flatten() {
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
