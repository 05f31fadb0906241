//! The suites on simulated GPUs: every wait between streams, devices and the host is checked, and a
//! missing one ends the test's program with a report.
//!
//! A GPU's statistics cover all its users, so the tests of a process run one at a time. Several
//! processes run beside each other, each with some of the tests: its GPUs are its own.

use std::{fs, path::Path};

use crate::programs::{Part, Program};

/// A test program of a package, and the arguments that choose its tests.
struct Suite {
    package: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
}

/// Maximum number of tests of one process.
const TESTS_MAX: usize = 12;

/// What CI runs, in a few minutes.
const SHORT: &[Suite] = &[
    Suite { package: "gpipe", program: "gpu", arguments: &[] },
    Suite { package: "gpipe", program: "suite", arguments: &["--skip", "transparency"] },
    Suite { package: "gpipe", program: "suite", arguments: &["transparency_of_views"] },
    Suite { package: "checkpoint", program: "suite", arguments: &[] },
    Suite { package: "distributed", program: "suite", arguments: &[] },
    Suite { package: "distributed", program: "transparency", arguments: &["connected_by_nccl"] },
    Suite { package: "models", program: "suite", arguments: &["oracle_on_gpus"] },
    Suite { package: "models", program: "suite", arguments: &["llama::"] },
];

/// Everything that can run there.
const WHOLE: &[Suite] = &[
    Suite { package: "gpipe", program: "gpu", arguments: &[] },
    Suite { package: "gpipe", program: "suite", arguments: &[] },
    Suite { package: "checkpoint", program: "suite", arguments: &[] },
    Suite { package: "distributed", program: "suite", arguments: &[] },
    Suite { package: "distributed", program: "transparency", arguments: &["connected_by_nccl"] },
    Suite { package: "models", program: "suite", arguments: &["oracle_on_gpus"] },
    // The other tests of estimates are about the CPU's kernels.
    Suite { package: "models", program: "suite", arguments: &["--skip", "estimates"] },
];

/// The parts of the suites, or of the short ones, which write into `log`.
pub fn parts<'a>(
    programs: &'a [Program],
    log: &Path,
    is_short: bool,
) -> Result<Vec<Part<'a>>, String> {
    let mut parts = Vec::new();
    for suite in if is_short { SHORT } else { WHOLE } {
        let name = format!(
            "on simulated GPUs: {} {} {}",
            suite.package,
            suite.program,
            suite.arguments.join(" ")
        );
        let is_it = |own: &&Program| own.package() == suite.package && own.name == suite.program;
        let program = programs.iter().find(is_it);
        let program = program.ok_or_else(|| format!("{name}: cargo built no such program"))?;
        let tests = program.tests(suite.arguments)?;
        if tests.is_empty() {
            return Err(format!("{name}: there are no such tests"));
        }
        parts.extend(tests.chunks(TESTS_MAX).map(|tests| {
            Part {
                name: name.clone(),
                program,
                arguments: ["--test-threads=1", "--exact"]
                    .map(str::to_owned)
                    .into_iter()
                    .chain(tests.iter().cloned())
                    .collect(),
                environment: vec![
                    ("GPIPE_SIMULATED_GPUS", "4".to_owned()),
                    ("GPIPE_SIMULATED_GPU_LOG", log.display().to_string()),
                    ("GPIPE_TEST_DEVICES", "cuda:0,cuda:1,cuda:2,cuda:3".to_owned()),
                ],
            }
        }));
    }
    Ok(parts)
}

/// Prints how many kernels ran, as `log` says. Returns whether there were any.
pub fn counted(log: &Path) -> bool {
    let lines = fs::read_to_string(log).unwrap_or_default();
    let kernels: u64 =
        lines.lines().filter_map(|line| line.split(' ').next()?.parse::<u64>().ok()).sum();
    println!("== on simulated GPUs: {kernels} kernels in {} processes", lines.lines().count());
    kernels > 0
}
