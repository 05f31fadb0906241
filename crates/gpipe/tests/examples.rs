//! Runs the programs in `examples/` as a user does. A full `cargo test` builds them first; before
//! `--test examples` alone, run `cargo build --examples`.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may panic

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use gpipe::Bytes;

/// The output of an example.
fn run(name: &str) -> String {
    let own = std::env::current_exe().unwrap(); // target/PROFILE/deps/examples-HASH
    let program = own.ancestors().nth(2).unwrap().join("examples").join(name);
    let output = Command::new(&program)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}: cargo build --examples", program.display()));
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The words after `mark`, in each line that contains it.
fn after<'a>(text: &'a str, mark: &str) -> Vec<&'a str> {
    let behind = |line: &'a str| line.split_once(mark)?.1.split([' ', ',']).next();
    text.lines().filter_map(behind).collect()
}

#[test]
fn property_each_example_is_tested_here_and_fits_on_a_page() {
    let here = include_str!("examples.rs");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(here.contains(&format!("run(\"{name}\")")), "{name} has no test");
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines < 60, "{name} has {lines} lines");
    }
}

#[test]
fn oracle_minimal_learns() {
    let printed = run("minimal");
    let losses = after(&printed, "loss ").into_iter().map(|loss| loss.parse().unwrap());
    let losses: Vec<f64> = losses.collect();
    assert!(losses.len() == 5 && losses[4] < 0.5 * losses[0], "{losses:?}");
}

#[test]
fn transparency_of_a_custom_layer() {
    let printed = run("custom_layer");
    let losses = after(&printed, "loss ");
    assert_eq!((losses.len(), BTreeSet::from_iter(&losses).len()), (3, 1), "{losses:?}");
}

#[test]
fn oracle_a_long_skip_passes_stages() {
    let printed = run("long_skip");
    assert_eq!(after(&printed, "loss ").len(), 3, "{printed}");
    assert!(printed.contains("layers by stage: ["), "{printed}");
}

#[test]
fn oracle_a_tied_weight_is_there_once() {
    let printed = run("tied_weights");
    assert_eq!(printed.matches("[50, 32]").count(), 1, "{printed}");
}

#[test]
fn oracle_a_plan_holds_what_it_says_and_no_more_than_its_cap() {
    let printed = run("plan_under_a_cap");
    let bytes = |line: &str, from: &str| -> Bytes {
        let (_, rest) = line.split_once(from).unwrap_or_else(|| panic!("{line}"));
        rest.split(',').next().unwrap().parse().unwrap_or_else(|_| panic!("{line}"))
    };
    let devices: Vec<&str> = printed.lines().filter(|line| line.starts_with("predicted")).collect();
    assert!(devices.len() >= 2, "one stage needs more than the cap: {printed}");
    for line in devices {
        let [predicted, held, cap] =
            ["predicted at most ", "held ", "cap "].map(|from| bytes(line, from));
        // Each is printed with one digit after the point.
        assert!(held <= predicted && predicted <= cap && held > Bytes(0), "{line}");
    }
}

#[test]
fn transparency_of_a_resumed_example() {
    let printed = run("checkpoint_and_resume");
    let losses = after(&printed, "loss ");
    assert_eq!(losses.len(), 2, "{printed}");
    assert_eq!(losses[0], losses[1]);
}

#[test]
fn transparency_of_two_processes() {
    let printed = run("two_processes");
    let of = |process: &str| -> Vec<&str> {
        let own = printed.lines().filter(|line| line.starts_with(process));
        own.filter_map(|line| line.split_once(", ")).map(|(_, step)| step).collect()
    };
    assert_eq!(of("process 0").len(), 3, "{printed}");
    assert_eq!(of("process 0"), of("process 1"));
}

#[test]
fn oracle_a_generator_learns_through_a_critic() {
    let printed = run("inside_a_larger_program");
    let means: Vec<f64> =
        after(&printed, "mean ").into_iter().map(|mean| mean.parse().unwrap()).collect();
    assert_eq!(means.len(), 7, "{printed}");
    assert!(means[0].abs() < 1.0 && (means[6] - 3.0).abs() < 0.5, "{printed}");
}

#[test]
fn oracle_an_observer_sees_each_layer_twice_where_it_is_computed_again() {
    let printed = run("watch_activations");
    assert_eq!(printed.matches("Forward").count(), 6, "{printed}");
    assert_eq!(printed.matches("Recompute").count(), 6, "{printed}");
}
