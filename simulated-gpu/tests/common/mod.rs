//! Runs a scenario in a process of its own, because a report ends the process.

use std::process::{Command, Output};

/// Runs the ignored test `scenario` of this binary on two simulated GPUs of 1 GiB. `ignores` is a
/// kind of wait that the simulator takes as not asked for.
#[allow(dead_code)]
pub fn run(scenario: &str, ignores: &str) -> Output {
    run_with(scenario, &[("GPIPE_SIMULATED_GPU_IGNORES", ignores)])
}

/// The same with these environment variables.
pub fn run_with(scenario: &str, variables: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([scenario, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env("GPIPE_SIMULATED_GPUS", "2")
        .env("GPIPE_SIMULATED_GPU_MEMORY", "1GiB")
        .env_remove("GPIPE_SIMULATED_GPU_LOG")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// Asserts that the scenario ends without a report.
#[allow(dead_code)]
pub fn passes(scenario: &str) {
    let output = run(scenario, "");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{scenario}: {text}");
    let ran = String::from_utf8_lossy(&output.stdout);
    assert!(ran.contains("1 passed"), "{scenario} did not run: {ran}");
}

/// Asserts that the scenario ends with a report that has each of `words`.
#[allow(dead_code)] // one of the files has no reports
pub fn is_reported(scenario: &str, ignores: &str, words: &[&str]) {
    let output = run(scenario, ignores);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{scenario} without {ignores} was not reported");
    let report = text.lines().find(|line| line.starts_with("simulated GPU: ")).unwrap_or_default();
    for word in words {
        assert!(report.contains(word), "{scenario} without {ignores}: no '{word}' in: {text}");
    }
}
