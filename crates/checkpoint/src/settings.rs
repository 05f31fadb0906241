//! Settings for a run's checkpoints.

use std::time::Duration;

use crate::files::Files;

/// Settings for a run's checkpoints.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How many of the newest checkpoints to keep; at least 1.
    pub keep: usize,
    /// Whether to also keep the checkpoint of the best evaluation, linked as `best`. If the best
    /// evaluation was of a step that was not saved, the link keeps naming the best one saved so
    /// far.
    pub keep_best: bool,
    /// Maximum wait for a checkpoint that is still being written.
    pub timeout: Duration,
    /// Access to the file system.
    pub files: Files,
}

impl Default for Settings {
    /// Keeps the newest two, with a timeout of ten minutes.
    fn default() -> Self {
        let timeout = Duration::from_secs(600);
        Self { keep: 2, keep_best: false, timeout, files: Files::default() }
    }
}
