//! The folder of a run's checkpoints: names, what is there, what is removed.
//!
//! ```text
//! step-00000050/           complete: it got this name after everything in it was on disk
//!   manifest.json          written last
//!   0000-embedding.parameters.safetensors, 0000-embedding.optimizer.safetensors, ...
//! step-00000100/
//! step-00000150.writing/   being written, or left by a process that was killed
//! step-00000100.replaced/  complete: what had this name before, until another has it; then removed
//! step-00000000.removing/  being removed
//! latest -> step-00000100
//! best -> step-00000050
//! ```

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    checkpoint::Checkpoint,
    error::{CheckpointError, Result},
    files::{Files, failed},
    manifest,
    settings::Settings,
};

/// The link to the newest checkpoint.
pub const LATEST: &str = "latest";
/// The link to the one with the best evaluation.
pub const BEST: &str = "best";
/// Most entries of a folder that are looked at.
const ENTRIES_MAX: usize = 100_000;

const PREFIX: &str = "step-";
const WRITING: &str = ".writing";
const REMOVING: &str = ".removing";
const REPLACED: &str = ".replaced";

/// A checkpoint that was passed over.
#[derive(Debug)]
pub struct Skipped {
    /// Its folder.
    pub folder: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// What a search for the newest checkpoint found.
#[derive(Debug)]
pub struct Newest {
    /// The newest one whose every file is as it was written.
    pub found: Option<Checkpoint>,
    /// Newer ones, newest first.
    pub skipped: Vec<Skipped>,
}

/// The name of the checkpoint after `batches` mini-batches.
pub fn name(batches: u64) -> String {
    format!("{PREFIX}{batches:08}")
}

/// The mini-batches of a checkpoint by its folder's name, if it is one of a complete one.
fn number(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?;
    // Not +1, not 000000001.
    digits.parse().ok().filter(|number| self::name(*number) == name)
}

/// The checkpoints in `folder` by number, newest first; none if there is no such folder. Unfinished
/// ones and other files are not among them.
///
/// # Errors
/// The folder cannot be read.
pub fn list(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let names: HashSet<String> = entries(folder)?.into_iter().collect();
    let checkpoint = |name: &String| {
        // A process that is killed while it replaces one leaves the old one under this name.
        let plain = match name.strip_suffix(REPLACED) {
            Some(plain) if names.contains(plain) => return None,
            plain => plain.unwrap_or(name),
        };
        Some((number(plain)?, folder.join(name)))
    };
    let mut all: Vec<(u64, PathBuf)> = names.iter().filter_map(checkpoint).collect();
    all.sort_by(|a, b| b.cmp(a));
    Ok(all)
}

fn entries(folder: &Path) -> Result<Vec<String>> {
    let found = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found.map_err(failed("read", folder))?,
    };
    let mut names = Vec::new();
    for entry in found.take(ENTRIES_MAX) {
        let entry = entry.map_err(failed("read", folder))?;
        names.extend(entry.file_name().into_string().ok());
    }
    Ok(names)
}

/// Looks for the newest checkpoint in `folder` that is complete, reading all of each one that it
/// looks at.
///
/// # Errors
/// The folder cannot be read. A damaged checkpoint is no error: it is among the skipped.
pub fn newest(folder: &Path) -> Result<Newest> {
    let mut skipped = Vec::new();
    for (_, path) in list(folder)? {
        match Checkpoint::open(&path).and_then(Checkpoint::verified) {
            Ok(found) => return Ok(Newest { found: Some(found), skipped }),
            Err(error) => skipped.push(Skipped { folder: path, reason: error.to_string() }),
        }
    }
    Ok(Newest { found: None, skipped })
}

/// The checkpoint that `path` names: one itself, or a folder of checkpoints, whose newest complete
/// one is taken.
///
/// # Errors
/// There is none; all are damaged.
pub fn find(path: &Path) -> Result<Newest> {
    if path.join(manifest::NAME).exists() {
        let found = Some(Checkpoint::open(path)?.verified()?);
        return Ok(Newest { found, skipped: Vec::new() });
    }
    let newest = newest(path)?;
    if newest.found.is_some() {
        return Ok(newest);
    }
    let reason = match &newest.skipped[..] {
        [] if path.is_dir() => "there is no checkpoint in it".to_owned(),
        [] => "there is no such folder".to_owned(),
        all => {
            let all = all.iter().map(|s| format!("{}: {}", s.folder.display(), s.reason));
            format!("no checkpoint in it is complete: {}", all.collect::<Vec<_>>().join("; "))
        }
    };
    Err(CheckpointError::NotFound { path: path.to_owned(), reason })
}

/// The folder in which the checkpoint of `batches` is written before it gets its name.
pub(crate) fn aside(folder: &Path, batches: u64) -> PathBuf {
    folder.join(format!("{}{WRITING}", name(batches)))
}

/// Removes what processes that were killed, and saves that failed, left unfinished. Nobody else may
/// be writing in `folder`.
pub(crate) fn remove_unfinished(files: &Files, folder: &Path) -> Result<()> {
    for name in entries(folder)? {
        let plain = |suffix| name.strip_suffix(suffix).filter(|plain| number(plain).is_some());
        let is_half = plain(WRITING).or(plain(REMOVING)).is_some()
            || [LATEST, BEST].iter().any(|link| name.strip_suffix(WRITING) == Some(link));
        let path = folder.join(&name);
        match plain(REPLACED).map(|plain| folder.join(plain)) {
            Some(plain) if !is_there(&plain) => files.rename(&path, &plain)?,
            Some(_) => files.remove(&path)?,
            None if is_half => files.remove(&path)?,
            None => {}
        }
    }
    Ok(())
}

/// Whether something has this name, if only a link that leads nowhere.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Gives the folder `aside`, which is complete and on disk, the name `target`. What has that name,
/// because this step was saved before or because it was damaged and passed over, stays until then
/// under another one that counts.
pub(crate) fn publish(files: &Files, folder: &Path, aside: &Path, target: &Path) -> Result<()> {
    let replaced = target.with_extension(&REPLACED[1..]);
    let taken = is_there(target);
    if taken {
        files.remove(&replaced)?;
        files.rename(target, &replaced)?;
    }
    if let Err(error) = files.rename(aside, target) {
        if taken {
            // If that fails, too, the next start does it.
            let _ = files.rename(&replaced, target);
        }
        return Err(error);
    }
    files.sync_folder(folder)
}

/// Removes what [`publish`] left of a checkpoint that it replaced.
pub(crate) fn remove_replaced(files: &Files, target: &Path) -> Result<()> {
    files.remove(&target.with_extension(&REPLACED[1..]))
}

/// Points [`BEST`] at the checkpoint of `batches`, if it is there.
pub(crate) fn point_best(files: &Files, folder: &Path, batches: u64) -> Result<()> {
    let (link, name) = (folder.join(BEST), name(batches));
    let points = fs::read_link(&link).is_ok_and(|target| target == Path::new(&name));
    if points || !folder.join(&name).is_dir() { Ok(()) } else { files.point(&link, &name) }
}

/// Of the checkpoints up to that of `batches`, removes all but those that are kept: the newest, and
/// the one that [`BEST`] names. Those after it are not this run's: a search passed them over
/// because they are damaged.
pub(crate) fn prune(files: &Files, folder: &Path, batches: u64, settings: &Settings) -> Result<()> {
    let best = fs::read_link(folder.join(BEST)).ok().map(|target| folder.join(target));
    let own = list(folder)?.into_iter().filter(|(number, _)| *number <= batches);
    for (_, path) in own.skip(settings.keep.max(1)) {
        if Some(&path) != best.as_ref() {
            remove(files, &path)?;
        }
    }
    Ok(())
}

/// Removes a checkpoint: it loses its name first, so that what is half removed is never taken for
/// one.
fn remove(files: &Files, path: &Path) -> Result<()> {
    let gone = path.with_extension(&REMOVING[1..]);
    files.remove(&gone)?;
    files.rename(path, &gone)?;
    files.remove(&gone)
}
