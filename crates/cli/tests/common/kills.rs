//! What a run that was killed had come to, and what must hold of all that it left.

use std::{fs, path::Path};

use gpipe_checkpoint::{Checkpoint, folder};

/// What the run has come to that was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    StartUp,
    Training,
    Writing,
    Ending,
}

impl Phase {
    pub fn of(printed: &str, run: &Path) -> Self {
        if !printed.contains("  loss ") {
            Self::StartUp // nothing was trained yet
        } else if names(run).iter().any(|name| name.ends_with(".writing")) {
            Self::Writing
        } else if printed.contains("where the time went") {
            Self::Ending
        } else {
            Self::Training
        }
    }
}

/// What is in the folder of checkpoints.
pub fn names(run: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// After any kill: what has a checkpoint's name is complete, `latest` leads to such, and the
/// metrics can be read.
pub fn nothing_half_written_is_taken_for_complete(run: &Path) {
    let checkpoints = run.join("checkpoints");
    let own = folder::list(&checkpoints).unwrap().into_iter().map(|(_, path)| path);
    let latest = Some(checkpoints.join("latest")).filter(|link| link.symlink_metadata().is_ok());
    for path in own.chain(latest) {
        let found = Checkpoint::open(&path).and_then(|found| found.verify());
        found.unwrap_or_else(|error| panic!("{error}; {:?}", names(run)));
    }
    if run.join("metrics.jsonl").exists() {
        gpipe_observe::metrics::read(&run.join("metrics.jsonl")).unwrap();
    }
}
