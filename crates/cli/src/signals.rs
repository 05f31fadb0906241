//! The signals that ask a process to end.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// SIGINT (Ctrl-C), SIGTERM and, unless `nohup` ignores it, SIGHUP: a terminal that closes.
pub(crate) fn ends() -> Vec<i32> {
    let is_ignored = std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.unwrap_or(0) & (1 << (SIGHUP - 1)) != 0
    });
    let hang_up = Some(SIGHUP).filter(|_| !is_ignored);
    [SIGINT, SIGTERM].into_iter().chain(hang_up).collect()
}

/// Whether a command with this exit code was ended by one of them.
pub(crate) fn has_ended(code: Option<i32>) -> bool {
    [SIGINT, SIGTERM, SIGHUP].iter().any(|signal| code == Some(128 + signal))
}
