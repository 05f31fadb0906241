//! Users' schedules. Families: `property_` (printed schedules parse again; random correct files and
//! changed ones), `fault_` (errors name line and column).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::sync::Arc;

use gpipe_core::{
    lower::{Topology, lower},
    schedule::{ActionLists, CustomSchedule, Schedule, custom::print},
    simulate::{Costs, simulate_with_room},
    splitmix::Stream,
    testing::{changed, random_compute},
    validate::validate,
};

fn parse(text: &str) -> Result<CustomSchedule, String> {
    CustomSchedule::parse("mine", text).map_err(|error| error.to_string())
}

#[test]
fn property_what_is_printed_is_read_again() {
    for schedule in Schedule::NAMED {
        for (k, m) in [(1, 1), (2, 3), (4, 8), (5, 7)] {
            let lists = schedule.actions(k, m);
            let read = parse(&print(&lists)).unwrap();
            assert_eq!(read.lists(), &lists);
            assert_eq!((read.stages(), read.micro_batches()), (schedule.stages(k).unwrap(), m));
            let listed = Schedule::Custom(Arc::new(read));
            assert_eq!(listed.placement(k), schedule.placement(k));
            // Mini-batches with fewer micro-batches leave out the missing ones.
            for fewer in 1..=m {
                let lists = listed.actions(k, fewer);
                let program = lower(&lists, &Topology::chain(schedule.stages(k).unwrap()), fewer);
                validate(&program.unwrap(), 64).unwrap();
            }
        }
    }
}

#[test]
fn property_comments_and_empty_lines_do_not_count() {
    let text = "# two stages\n\n  0F0 0B0 # the first\n\t\n1F0\t1B0\n#";
    assert_eq!(print(parse(text).unwrap().lists()), "0F0 0B0\n1F0 1B0\n");
}

/// Whether the rules alone accept the lists as a correct training step.
fn is_correct(lists: &ActionLists, stages: usize, micro_batches: usize) -> bool {
    let Ok(program) = lower(lists, &Topology::chain(stages), micro_batches) else { return false };
    match simulate_with_room(&program, &Costs::unit(stages)) {
        Ok((capacity, _)) => program.trains() && validate(&program, capacity).is_ok(),
        Err(_) => false,
    }
}

#[test]
fn property_random_files_are_read_and_changed_ones_are_read_only_if_correct() {
    let (mut refused, mut harmless) = (0, 0);
    for seed in 0..300 {
        let mut random = Stream::new(seed);
        let stages = 1 + random.below(5);
        let devices = 1 + random.below(stages);
        let micro_batches = 1 + random.below(6);
        let lists = random_compute(&mut random, stages, devices, micro_batches);
        assert_eq!(parse(&print(&lists)).unwrap().lists(), &lists, "seed {seed}");
        for _ in 0..10 {
            let changed = changed(&mut random, &lists);
            let read = parse(&print(&changed));
            if changed.iter().any(Vec::is_empty) {
                continue; // an empty line is not a device
            }
            let correct = is_correct(&changed, stages, micro_batches);
            let same_size = read
                .as_ref()
                .is_ok_and(|read| (read.stages(), read.micro_batches()) == (stages, micro_batches));
            assert_eq!(correct, same_size, "seed {seed}: {changed:?}: {read:?}");
            (refused, harmless) =
                (refused + usize::from(!correct), harmless + usize::from(correct));
        }
    }
    assert!(refused > 1000 && harmless > 100, "{refused} {harmless}");
}

#[test]
fn fault_mistakes_are_named_by_line_and_column() {
    let cases = [
        ("", "line 1, column 1: there are no actions"),
        ("0F0 0X0", "line 1, column 5: '0X0' is not an action: its operation is unknown"),
        ("0F0 0B0\n1F0 1SEND_B0@0 1B0", "line 2, column 5: '1SEND_B0@0' is not a compute action"),
        ("0F0\n1F0", "line 1, column 1: 0B0 is missing"),
        ("0F0 0F0 0B0 0B1", "0F1 is missing"),
        ("# x\n0F0  0F0 0B0", "line 2, column 6: 0F0: its forward already ran"),
        ("0F0 0B0\n1F0", "line 2, column 1: 1B0 is missing, which stage 1 owes"),
        ("0F0 0I0", "line 1, column 5: 0W0 is missing, which stage 0 owes"),
        ("0F0 0W0 0I0", "line 1, column 5: 0W0: 0I0, the first half of its backward, comes later"),
        ("0F0 0F1 0B1 0B0", "line 1, column 9: 0B1: backwards run in ascending micro-batch order"),
        ("0F0 0B0 0B0", "line 1, column 9: 0B0: its backward already ran"),
        ("0F0 0B0\n1F0 1B0 0F0", "line 2, column 9: 0F0: stage 0 already acts on device 0"),
        (
            "0F0 0B0\n2F0 2B0",
            "3 stages (to 2) and 1 micro-batch (to 0) need 3 forwards, there are 2",
        ),
        ("0F0 0F7 0B0 0B7", "1 stage (to 0) and 8 micro-batches (to 7) need 8 forwards"),
        ("0F4294967295 0B0", "line 1, column 1: micro-batch 4294967295: at most 65536"),
        ("4096F0", "line 1, column 1: stage 4096: at most 4096"),
        (
            "0F0 0B0 2F0 2B0\n1F0 1B0",
            "line 1, column 5: deadlock: all wait for each other: stage 0 awaits B or I of \
            micro-batch 0 on stage 1 at line 1, column 5; stage 1 awaits B or I of micro-batch 0 \
            on stage 2 at line 2, column 5",
        ),
        ("0F0 0F1 0B0 0B1\n1F1 1B1 1F0 1B0", "line 2, column 5: 1B1: backwards run in ascending"),
        ("0F0 0F1 0I1 0I0 0W0 0W1\n1F0 1I0 1F1 1I1 1W0 1W1", "stage 0: edge 0 is a queue"),
        ("0F0 äöü", "line 1, column 5: 'äöü' is not an action"),
    ];
    for (text, expected) in cases {
        let error = parse(text).unwrap_err();
        assert!(error.contains(expected), "{text:?}: {error}");
        assert!(error.starts_with("schedule file:mine, line "), "{error}");
    }
    let long = format!("0F0 {}", "9".repeat(1 << 20));
    assert!(parse(&long).unwrap_err().len() < 200);
    assert!(parse(&" ".repeat((1 << 24) + 1)).unwrap_err().contains("the most is 16777216"));
}

#[test]
fn fault_another_number_of_devices_or_micro_batches_is_refused() {
    let listed = Schedule::Custom(Arc::new(parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1").unwrap()));
    assert_eq!(listed.stages(2), Ok(2));
    let error = listed.stages(3).unwrap_err().to_string();
    assert_eq!(
        error,
        "schedule file:mine is for 2 devices, not for 3: ask for 2, or write another file"
    );
    assert!(listed.check_micro_batches(2).is_ok());
    assert!(listed.check_micro_batches(4).unwrap_err().to_string().contains("for 2 micro-batches"));
}
