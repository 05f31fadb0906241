//! The folder of a run: found or created, locked, and checked while the run writes to it.

use std::{
    fs::{self, File, TryLockError},
    io::Read,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use gpipe_checkpoint::{CheckpointError, FolderIdentity};
use gpipe_files::WRITING;

use crate::{
    CliError,
    args::TrainArguments,
    config::COMPLETE,
    files::io,
    metrics::METRICS,
    model_folder::is_model_folder,
    run_folder::{AVERAGES, CHECKPOINTS, PLAN, WEIGHTS},
    task::COMPANIONS,
};

/// Maximum number of numbered folders to try for a run without --out.
const FOLDERS_MAX: usize = 10_000;

/// Maximum number of entries of a run's folder to examine.
const ENTRIES_MAX: usize = 10_000;
/// Prefixes of the names of a run's files that are written aside.
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

/// A run's folder, reserved for the processes of this run.
pub(crate) struct RunLock {
    path: PathBuf,
    /// The folder, which is locked while it is open. Of several processes, only rank 0 locks it.
    lock: Option<Lock>,
    /// Whether this process created the folder and it is still empty.
    fresh: bool,
}

struct Lock {
    folder: File,
    identity: FolderIdentity,
}

fn numbered(arguments: &TrainArguments, number: usize) -> PathBuf {
    let name = arguments.pipeline.config.name();
    match number {
        1 => PathBuf::from("out").join(name),
        _ => PathBuf::from("out").join(format!("{name}-{number}")),
    }
}

/// The last folder of runs of this configuration.
pub(crate) fn last_numbered(arguments: &TrainArguments) -> Option<PathBuf> {
    let folders = (1..FOLDERS_MAX).map(|number| numbered(arguments, number));
    folders.take_while(|path| path.exists()).last()
}

/// Refuses a folder with files that a run would replace and that no run has written.
pub(crate) fn check_files(path: &Path) -> Result<(), CliError> {
    let refuse = |file: &str| {
        Err(CliError::Usage(format!(
            "{} has a {file} of its own, which a run would replace: give another --out",
            path.display()
        )))
    };
    if is_model_folder(path) {
        return Err(CliError::Usage(format!(
            "{} is a model's folder, whose files a run would replace: give another --out",
            path.display()
        )));
    }
    let mut head = Vec::new();
    let begins = File::open(path.join("config.toml")).and_then(|file| {
        file.take(COMPLETE.len() as u64).read_to_end(&mut head)?;
        Ok(head == COMPLETE.as_bytes())
    });
    match begins {
        // Of a run that ended before its first step.
        Ok(true) => Ok(()),
        Ok(false) => refuse("config.toml"),
        Err(_) => ["tokenizer.json", "classes.json"]
            .into_iter()
            .find(|name| path.join(name).exists())
            .map_or(Ok(()), refuse),
    }
}

impl RunLock {
    /// A folder that rank 0 has locked for all processes.
    pub(crate) fn followed(path: PathBuf) -> Self {
        Self { path, lock: None, fresh: false }
    }

    /// The folder of a new run: the one given, or the next free one under `out/`.
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
        Err(CliError::Usage(format!(
            "{} to {} all exist: give --out DIR, or remove some",
            numbered(arguments, 1).display(),
            numbered(arguments, FOLDERS_MAX - 1).display()
        )))
    }

    /// A folder that must not hold a run.
    pub(crate) fn other_run(path: &Path) -> Result<Self, CliError> {
        if [METRICS, CHECKPOINTS, WEIGHTS].iter().any(|name| path.join(name).exists()) {
            return Err(CliError::Usage(format!(
                "{} already holds a run: give another --out, remove it, or go on with --resume",
                path.display()
            )));
        }
        check_files(path)?;
        let fresh = !path.exists();
        fs::create_dir_all(path).map_err(io(path))?;
        Self::lock(path.to_owned(), fresh)
    }

    /// The folder of a run that resumes.
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
        // Find out now whether the folder is writable, not after the text has been read.
        let probe = path.join(".writable");
        File::create(&probe).and_then(|_| fs::remove_file(&probe)).map_err(io(&path))?;
        remove_unfinished(&path)?;
        // The first write may change the folder's identity in an overlay file system, so it comes
        // before this.
        let identity = FolderIdentity::of(&path)?;
        Ok(Self { path, lock: Some(Lock { folder, identity }), fresh })
    }

    /// Checks that the folder still exists and is the one in which the run began. Only the process
    /// that locked it can check.
    pub(crate) fn check(&self) -> Result<(), CliError> {
        let Some(Lock { folder, identity }) = &self.lock else { return Ok(()) };
        let Err(error) = identity.check() else { return Ok(()) };
        if !matches!(error, CheckpointError::Gone { .. }) {
            return Err(error.into());
        }
        // The present path of the open folder, if the system knows it. A removed folder keeps its
        // name.
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

    /// Keeps the folder, because the run begins.
    pub(crate) fn keep(&mut self) {
        self.fresh = false;
    }
}

impl Drop for RunLock {
    /// Removes a folder that was created for a run that did not begin, if it is empty.
    fn drop(&mut self) {
        if self.fresh {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// Removes partly written files that a killed process left in the folder, which must be locked.
fn remove_unfinished(folder: &Path) -> Result<(), CliError> {
    for entry in fs::read_dir(folder).map_err(io(folder))?.take(ENTRIES_MAX) {
        let entry = entry.map_err(io(folder))?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_own = OWN_FILES.iter().chain(&COMPANIONS).any(|own| name.starts_with(own));
        if is_own && name.ends_with(WRITING) && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            fs::remove_file(entry.path()).map_err(io(&entry.path()))?;
        }
    }
    Ok(())
}
