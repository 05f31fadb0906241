//! How a run's checkpoints are kept.

use std::time::Duration;

use crate::files::Files;

/// How a run's checkpoints are kept.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How many of the newest are kept; at least 1.
    pub keep: usize,
    /// Whether the one of the best evaluation is kept besides, under the name `best`. Where the
    /// best evaluation was of a step that was not saved, the best one of those that were saved
    /// before stays.
    pub keep_best: bool,
    /// Longest wait for a checkpoint that is still being written.
    pub deadline: Duration,
    /// The file system.
    pub files: Files,
}

impl Default for Settings {
    /// The newest two; ten minutes.
    fn default() -> Self {
        let deadline = Duration::from_secs(600);
        Self { keep: 2, keep_best: false, deadline, files: Files::default() }
    }
}
