//! The folder of a run: found or made, locked, and watched for as long as the run writes there.

use std::{
    fs::{self, File, TryLockError},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use gpipe_checkpoint::{CheckpointError, FolderIdentity};
use gpipe_files::WRITING;

use crate::{
    CliError,
    args::TrainArguments,
    files::io,
    metrics::METRICS,
    run_folder::{AVERAGES, CHECKPOINTS, PLAN, WEIGHTS},
};

/// Numbered folders tried for a run without --out.
const FOLDERS_MAX: usize = 10_000;

/// Most entries of a run's folder that are looked at.
const ENTRIES_MAX: usize = 10_000;
/// Files of a run that are written aside, by what their names begin with.
const OWN_FILES: [&str; 8] = [
    WEIGHTS,
    AVERAGES,
    METRICS,
    PLAN,
    "config.toml",
    "tokenizer.json",
    "classes.json",
    gpipe_observe::step_file::NAME,
];

/// A run's folder, for this process alone, and those that train with it.
pub(crate) struct RunLock {
    path: PathBuf,
    /// The folder itself, locked as long as it is open; of several processes by the first one.
    lock: Option<Lock>,
    /// Made by this process, and nothing is in it yet.
    fresh: bool,
}

struct Lock {
    folder: File,
    identity: FolderIdentity,
}

fn numbered(arguments: &TrainArguments, number: usize) -> PathBuf {
    let config = arguments.pipeline.config.config.as_deref();
    let name = config.and_then(Path::file_stem).unwrap_or_default().to_string_lossy();
    match number {
        1 => PathBuf::from("out").join(name.as_ref()),
        _ => PathBuf::from("out").join(format!("{name}-{number}")),
    }
}

/// The last folder of runs of this configuration.
pub(crate) fn last_numbered(arguments: &TrainArguments) -> Option<PathBuf> {
    let folders = (1..FOLDERS_MAX).map(|number| numbered(arguments, number));
    folders.take_while(|path| path.exists()).last()
}

impl RunLock {
    /// A folder that another process has claimed for all of them.
    pub(crate) fn followed(path: PathBuf) -> Self {
        Self { path, lock: None, fresh: false }
    }

    /// The folder of a new run: the one named, or the next free one under `out/`.
    pub(crate) fn new_run(arguments: &TrainArguments) -> Result<Self, CliError> {
        if let Some(out) = &arguments.out {
            return Self::other_run(out);
        }
        for number in 1..FOLDERS_MAX {
            let path = numbered(arguments, number);
            let parent = path.parent().unwrap_or(Path::new("."));
            fs::create_dir_all(parent).map_err(io(parent))?;
            match fs::create_dir(&path) {
                Ok(()) => return Self::lock(path, true),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(io(&path)(error)),
            }
        }
        Err(CliError::Usage("out/ is full: give --out DIR".into()))
    }

    /// A folder that must not hold a run.
    pub(crate) fn other_run(path: &Path) -> Result<Self, CliError> {
        if [METRICS, CHECKPOINTS, WEIGHTS].iter().any(|name| path.join(name).exists()) {
            return Err(CliError::Usage(format!(
                "{} already holds a run: give another --out, remove it, or go on with --resume",
                path.display()
            )));
        }
        let fresh = !path.exists();
        fs::create_dir_all(path).map_err(io(path))?;
        Self::lock(path.to_owned(), fresh)
    }

    /// The folder of a run that goes on.
    pub(crate) fn existing(path: &Path) -> Result<Self, CliError> {
        Self::lock(path.to_owned(), false)
    }

    fn lock(path: PathBuf, fresh: bool) -> Result<Self, CliError> {
        let folder = File::open(&path).map_err(io(&path))?;
        match folder.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(CliError::Usage(format!(
                    "another process is training in {}: let it end, or give another --out",
                    path.display()
                )));
            }
            Err(TryLockError::Error(error)) => return Err(io(&path)(error)),
        }
        // Now, and not after the text was read, it is known whether it can be written.
        let probe = path.join(".writable");
        File::create(&probe).and_then(|_| fs::remove_file(&probe)).map_err(io(&path))?;
        remove_unfinished(&path)?;
        // Now that something was written there, which may have given it another number in an
        // overlay.
        let identity = FolderIdentity::of(&path)?;
        Ok(Self { path, lock: Some(Lock { folder, identity }), fresh })
    }

    /// Sees that the folder is still there, and the one that the run began in. Only the process
    /// that locked it knows.
    pub(crate) fn check(&self) -> Result<(), CliError> {
        let Some(Lock { folder, identity }) = &self.lock else { return Ok(()) };
        let Err(error) = identity.check() else { return Ok(()) };
        if !matches!(error, CheckpointError::Gone { .. }) {
            return Err(error.into());
        }
        // Where the system knows, the place that the open folder has now; its name goes on after a
        // removal.
        let place = fs::read_link(format!("/proc/self/fd/{}", folder.as_raw_fd())).ok();
        let now =
            place.filter(|place| FolderIdentity::of(place).is_ok_and(|now| now.is_same(identity)));
        let (became, rest) = match now {
            Some(now) => {
                let now = now.display();
                let rest = format!(
                    ", its finished checkpoints are there: gpipe train --resume {now} goes on \
                    from the newest, if there is one"
                );
                (format!("was moved to {now}"), rest)
            }
            None => {
                let rest = "; if the folder was moved, its finished checkpoints are in it: gpipe \
                    train --resume goes on from there";
                ("was removed or moved".to_owned(), rest.to_owned())
            }
        };
        Err(CliError::FolderGone { folder: self.path.clone(), became, rest })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The run begins: the folder stays.
    pub(crate) fn keep(&mut self) {
        self.fresh = false;
    }
}

impl Drop for RunLock {
    /// A folder that was made for a run which did not begin is removed, if nothing is in it.
    fn drop(&mut self) {
        if self.fresh {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// Removes what a process that was killed left half-written of the run's own files. The folder must
/// be claimed.
fn remove_unfinished(folder: &Path) -> Result<(), CliError> {
    for entry in fs::read_dir(folder).map_err(io(folder))?.take(ENTRIES_MAX) {
        let entry = entry.map_err(io(folder))?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_own = OWN_FILES.iter().any(|own| name.starts_with(own));
        if is_own && name.ends_with(WRITING) && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            fs::remove_file(entry.path()).map_err(io(&entry.path()))?;
        }
    }
    Ok(())
}
