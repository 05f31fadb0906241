//! The folder of a run's checkpoints: how checkpoints are named, found and removed.
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
};

/// The link to the newest checkpoint.
pub const LATEST: &str = "latest";
/// The link to the checkpoint with the best evaluation.
pub const BEST: &str = "best";
/// Maximum number of folder entries that are read.
const ENTRIES_MAX: usize = 100_000;

const PREFIX: &str = "step-";
const WRITING: &str = ".writing";
const REMOVING: &str = ".removing";
const REPLACED: &str = ".replaced";

/// A checkpoint that a search skipped.
#[derive(Debug)]
pub struct Skipped {
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// Why it was skipped.
    pub reason: String,
}

/// The result of a search for the newest checkpoint.
#[derive(Debug)]
pub struct Newest {
    /// The newest undamaged checkpoint.
    pub found: Option<Checkpoint>,
    /// Newer, damaged checkpoints, newest first.
    pub skipped: Vec<Skipped>,
}

/// The folder name of the checkpoint after `batches` mini-batches.
pub fn name(batches: u64) -> String {
    format!("{PREFIX}{batches:08}")
}

/// The number of mini-batches in the folder name of a complete checkpoint; `None` for other names.
fn number(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?;
    // Rejects other spellings, such as +1 and 000000001.
    digits.parse().ok().filter(|number| self::name(*number) == name)
}

/// Lists the complete checkpoints in `folder` by number, newest first. The list is empty if the
/// folder does not exist. Other files are ignored.
///
/// # Errors
/// The folder cannot be read.
pub fn list(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let names: HashSet<String> = entries(folder)?.into_iter().collect();
    let checkpoint = |name: &String| {
        // A process killed while replacing a checkpoint leaves the old one under this name.
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

/// Finds the newest undamaged checkpoint in `folder`. Every file of each candidate is read.
///
/// # Errors
/// The folder cannot be read. A damaged checkpoint is not an error but is listed in
/// [`Newest::skipped`].
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

/// An undamaged checkpoint, and newer ones that are damaged.
#[derive(Debug)]
pub struct Found {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// Newer checkpoints that cannot be used, newest first.
    pub skipped: Vec<Skipped>,
}

/// Finds the checkpoint at `path`, which is a checkpoint or a folder of checkpoints. In a folder of
/// checkpoints, finds the newest undamaged one.
///
/// # Errors
/// There is no checkpoint, or all of them are damaged.
pub fn find(path: &Path) -> Result<Found> {
    if path.join(manifest::NAME).exists() {
        let checkpoint = Checkpoint::open(path)?.verified()?;
        return Ok(Found { checkpoint, skipped: Vec::new() });
    }
    if path.is_file() {
        let reason = "it is a file: give the folder of a run or a checkpoint".into();
        return Err(CheckpointError::NotFound { path: path.to_owned(), reason });
    }
    let Newest { found, skipped } = newest(path)?;
    if let Some(checkpoint) = found {
        return Ok(Found { checkpoint, skipped });
    }
    let reason = match &skipped[..] {
        [] if path.is_dir() => "there is no checkpoint in it".to_owned(),
        [] => "there is no such folder".to_owned(),
        all => {
            let all = all.iter().map(|s| format!("{}: {}", s.folder.display(), s.reason));
            format!("no checkpoint in it is complete: {}", all.collect::<Vec<_>>().join("; "))
        }
    };
    Err(CheckpointError::NotFound { path: path.to_owned(), reason })
}

/// The folder in which the checkpoint of `batches` is written before it is renamed.
pub(crate) fn aside(folder: &Path, batches: u64) -> PathBuf {
    folder.join(format!("{}{WRITING}", name(batches)))
}

/// The beginning of the name of a folder in which ranks see that they share its parent.
const MEETING: &str = "meeting-";

/// The folder in which ranks meet, by what rank 0 chose for its name.
pub(crate) fn meeting(folder: &Path, token: &str) -> PathBuf {
    folder.join(format!("{MEETING}{token}{WRITING}"))
}

/// Removes what killed processes and failed saves left unfinished. No other process may be writing
/// in `folder`.
pub(crate) fn remove_unfinished(files: &Files, folder: &Path) -> Result<()> {
    for name in entries(folder)? {
        let plain = |suffix| name.strip_suffix(suffix).filter(|plain| number(plain).is_some());
        let is_half = plain(WRITING).or(plain(REMOVING)).is_some()
            || [LATEST, BEST].iter().any(|link| name.strip_suffix(WRITING) == Some(link))
            || (name.starts_with(MEETING) && name.ends_with(WRITING));
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

/// Whether `path` exists, even as a dangling link.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Renames the complete and synced folder `aside` to `target`. `target` may already exist: this
/// step was saved earlier, or its checkpoint is damaged and was skipped. The existing folder is
/// first renamed to `*.replaced`, a name that [`list`] still counts, until `target` exists again.
pub(crate) fn publish(files: &Files, folder: &Path, aside: &Path, target: &Path) -> Result<()> {
    let replaced = target.with_extension(&REPLACED[1..]);
    let taken = is_there(target);
    if taken {
        files.remove(&replaced)?;
        files.rename(target, &replaced)?;
    }
    if let Err(error) = files.rename(aside, target) {
        if taken {
            // If this fails, too, the next start restores the name.
            let _ = files.rename(&replaced, target);
        }
        return Err(error);
    }
    files.sync_folder(folder)
}

/// Removes the checkpoint that [`publish`] replaced.
pub(crate) fn remove_replaced(files: &Files, target: &Path) -> Result<()> {
    files.remove(&target.with_extension(&REPLACED[1..]))
}

/// Points [`BEST`] at the checkpoint of `batches`, if that exists.
pub(crate) fn point_best(files: &Files, folder: &Path, batches: u64) -> Result<()> {
    let (link, name) = (folder.join(BEST), name(batches));
    let points = fs::read_link(&link).is_ok_and(|target| target == Path::new(&name));
    if points || !folder.join(&name).is_dir() { Ok(()) } else { files.point(&link, &name) }
}

/// Removes old checkpoints, up to that of `batches`. It keeps the newest `keep`, that of `best`,
/// and what [`BEST`] and [`LATEST`] name. Checkpoints after `batches` are not counted and stay: a
/// search skipped them as damaged, so they are not part of this run.
pub(crate) fn prune(
    files: &Files,
    folder: &Path,
    batches: u64,
    keep: usize,
    best: Option<u64>,
) -> Result<()> {
    let links = [BEST, LATEST].map(|link| fs::read_link(folder.join(link)).ok());
    let best = best.map(|best| name(best).into());
    let kept: Vec<PathBuf> =
        links.into_iter().flatten().chain(best).map(|target| folder.join(target)).collect();
    let own = list(folder)?.into_iter().filter(|(number, _)| *number <= batches);
    for (_, path) in own.skip(keep.max(1)) {
        if !kept.contains(&path) {
            remove(files, &path)?;
        }
    }
    Ok(())
}

/// Removes a checkpoint. It is renamed first, so that a half-removed folder never passes for a
/// checkpoint.
fn remove(files: &Files, path: &Path) -> Result<()> {
    let gone = path.with_extension(&REMOVING[1..]);
    files.remove(&gone)?;
    files.rename(path, &gone)?;
    files.remove(&gone)
}
