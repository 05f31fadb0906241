//! Saving: the stages copy their state, and one thread per stage writes it while training
//! continues.
//!
//! ```text
//! step-N.writing/   every layer's files, each fsynced          by the stages' writers, in parallel
//!                   manifest.json, fsynced; the folder fsynced when all of them are done
//! step-N            by renaming; the folder above fsynced      now it is a checkpoint
//! latest -> step-N  a new link renamed over the old one, fsynced; then pruning
//! ```
//!
//! If the process is killed at any point, the newest checkpoint with a final name is complete.
//!
//! In a run of several processes, each rank writes the layers of its stages into the same folder.
//! Rank 0 does everything after that.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant, SystemTime},
};

use gpipe::{
    Pipeline,
    processes::Transport,
    state::{LayerOutline, LayerState, State},
};

use crate::{
    error::{CheckpointError, Result},
    files::Files,
    folder,
    identity::FolderIdentity,
    layer_files::encode_layer,
    manifest::{
        self, Best, CounterFields, FORMAT, FileEntry, FileKind, Layer, Manifest, TrainPosition,
    },
    multi_process::{Lane, Together},
    settings::Settings,
};

/// How long the writers of several ranks wait for each other, as a multiple of
/// [`Settings::timeout`]. It is long because training continues meanwhile, and a slow disk has not
/// failed.
const PATIENCE: u32 = 10;

/// What the writer reports, or whether its report may still arrive.
type Received = std::result::Result<Result<Saved>, bool>;

/// What a checkpoint records about its run, besides the pipeline's state.
#[derive(Debug, Clone, Default)]
pub struct RunInfo {
    /// The run's position in its data. The default is unknown; the checkpoint is then named after
    /// the pipeline's steps.
    pub progress: TrainPosition,
    /// The best evaluation so far.
    pub best: Option<Best>,
    /// The configuration as TOML.
    pub config: String,
    /// Files that belong to the run, by name, such as a tokenizer.
    pub files: Vec<(String, Vec<u8>)>,
}

/// A checkpoint that is on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// Its number, [`TrainPosition::batches`].
    pub batches: u64,
    /// The checkpoint's size in bytes.
    pub bytes: u64,
    /// How long the stages took to copy their state. Training was paused.
    pub copied: Duration,
    /// How long writing took. Training continued.
    pub written: Duration,
    /// Why a link is missing or still names an older checkpoint, or more than [`Settings::keep`]
    /// checkpoints remain. The next save tries again.
    pub untidy: Option<String>,
}

/// Saves the checkpoints of one run, one at a time. Only one run may write in a folder.
#[derive(Debug)]
pub struct Checkpoints {
    home: FolderIdentity,
    settings: Settings,
    together: Together,
    writing: Option<Writing>,
}

/// A checkpoint that a thread is writing.
#[derive(Debug)]
struct Writing {
    folder: PathBuf,
    done: mpsc::Receiver<Result<Saved>>,
    /// Whether a wait for it has timed out. Training does not wait for it again.
    late: bool,
}

/// Everything that a writer needs.
struct Job {
    home: FolderIdentity,
    settings: Settings,
    together: Together,
    state: State,
    outlines: Vec<LayerOutline>,
    plan: gpipe::RunSettings,
    info: RunInfo,
    copied: Duration,
}

impl Checkpoints {
    /// Opens `folder`, creates it if needed, and removes what a killed process left unfinished.
    ///
    /// # Errors
    /// The folder cannot be created or written.
    pub fn open(folder: &Path, settings: Settings) -> Result<Self> {
        let is_new = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let new: Vec<&Path> = folder.ancestors().take_while(is_new).collect();
        settings.files.create_folder(folder)?;
        for path in new {
            // A new folder survives a power failure only if its parent is synced.
            let above = path.parent().filter(|above| !above.as_os_str().is_empty());
            settings.files.sync_folder(above.unwrap_or(Path::new(".")))?;
        }
        folder::remove_unfinished(&settings.files, folder)?;
        let (home, together) = (FolderIdentity::of(folder)?, Together::default());
        Ok(Self { home, settings, together, writing: None })
    }

    /// Opens `folder` for a pipeline in several processes. Every rank calls this and saves at the
    /// same steps, and each writes the state of its stages. The folder must be on a file system
    /// that all ranks share.
    ///
    /// # Errors
    /// As [`Checkpoints::open`] on any rank, or a rank does not see the folder.
    pub fn open_among(
        folder: &Path,
        settings: Settings,
        processes: &Arc<dyn Transport>,
    ) -> Result<Self> {
        let together = Together::with(processes);
        let opened = match together.is_first() {
            true => Self::open(folder, settings.clone()).map(|_| ()),
            false => Ok(()),
        };
        together.all(Lane::Training, opened)?;
        meet_in(folder, &together, &settings.files)?;
        let home = together.all(Lane::Training, FolderIdentity::of(folder))?;
        Ok(Self { home, settings, together, writing: None })
    }

    /// The folder of the checkpoints.
    pub fn folder(&self) -> &Path {
        self.home.path()
    }

    /// Copies the state of `pipeline`, starts to write it in the background and returns. If an
    /// earlier checkpoint is still being written, waits for it first and returns its outcome.
    ///
    /// # Errors
    /// If the copy fails, this checkpoint is not written. If the earlier checkpoint failed, its
    /// error is returned but this one is started. The exception is [`CheckpointError::Late`]: this
    /// checkpoint is not started, because two writers would share a folder and hold two copies of
    /// the state.
    pub fn save(&mut self, pipeline: &mut Pipeline, mut info: RunInfo) -> Result<Option<Saved>> {
        if info.progress == TrainPosition::default() {
            info.progress.batches = pipeline.steps();
        }
        let late = self.writing.as_ref().is_some_and(|writing| writing.late);
        let before = self.wait_for(if late { Duration::ZERO } else { self.settings.timeout });
        let start = Instant::now();
        let (before, state) = match self.writing.is_some() {
            true => {
                // The other replicas still wait for this replica's part of the state.
                let shared = pipeline.share_state().map_err(CheckpointError::from);
                (Ok(None), before.and(shared).and_then(|()| Err(self.late())))
            }
            false => (before, pipeline.state().map_err(CheckpointError::from)),
        };
        // Either all ranks start to write or none does.
        let state = self.together.all(Lane::Training, state)?;
        let (outlines, plan) = (pipeline.outline(), pipeline.run_settings());
        let (home, settings) = (self.home.clone(), self.settings.clone());
        let together = self.together.clone();
        let target = home.path().join(folder::name(info.progress.batches));
        let copied = start.elapsed();
        let job = Job { home, settings, together, state, outlines, plan, info, copied };
        let (done, receive) = mpsc::channel();
        let thread = thread::Builder::new().name("gpipe-checkpoint".into());
        let spawned = thread.spawn(move || {
            let _ = done.send(job.run());
        });
        spawned.map_err(crate::files::failed("start a thread for", &target))?;
        self.writing = Some(Writing { folder: target, done: receive, late: false });
        before
    }

    /// Returns the outcome of the checkpoint being written, if it is done. Does not wait.
    ///
    /// # Errors
    /// The checkpoint could not be written. Earlier checkpoints are unchanged.
    pub fn poll(&mut self) -> Result<Option<Saved>> {
        self.take(|done| done.try_recv().map_err(|error| error == mpsc::TryRecvError::Empty))
    }

    /// Waits for the checkpoint being written, if any.
    ///
    /// # Errors
    /// As [`Checkpoints::poll`], or [`CheckpointError::Late`] after the timeout.
    pub fn wait(&mut self) -> Result<Option<Saved>> {
        self.wait_for(self.settings.timeout)
    }

    fn wait_for(&mut self, patience: Duration) -> Result<Option<Saved>> {
        let outcome = self.take(|done| {
            done.recv_timeout(patience).map_err(|error| error == mpsc::RecvTimeoutError::Timeout)
        });
        match &mut self.writing {
            None => outcome,
            Some(writing) => {
                writing.late = true;
                Err(self.late())
            }
        }
    }

    /// The error that the checkpoint being written is late.
    fn late(&self) -> CheckpointError {
        let writing = self.writing.as_ref().map(|writing| writing.folder.as_path());
        let path = writing.unwrap_or(self.folder()).to_owned();
        CheckpointError::Late { path, waited: self.settings.timeout }
    }

    /// Takes the outcome that `receive` gets. The error of `receive` says whether an outcome may
    /// still arrive.
    fn take(
        &mut self,
        receive: impl FnOnce(&mpsc::Receiver<Result<Saved>>) -> Received,
    ) -> Result<Option<Saved>> {
        let Some(writing) = &self.writing else { return Ok(None) };
        let outcome = match receive(&writing.done) {
            Ok(outcome) => outcome.map(Some),
            Err(true) => return Ok(None),
            Err(false) => Err(CheckpointError::Content {
                what: format!("checkpoint {}", writing.folder.display()),
                reason: "its writer panicked".into(),
            }),
        };
        self.writing = None;
        outcome
    }
}

impl Drop for Checkpoints {
    /// Waits for a checkpoint being written, unless an earlier wait has timed out.
    fn drop(&mut self) {
        if self.writing.as_ref().is_some_and(|writing| !writing.late) {
            let _ = self.wait();
        }
    }
}

/// Returns an error, on all ranks, unless each one sees the same `folder` and can write in it. A
/// folder of that name alone is no proof: a host may have one of its own from an earlier run.
fn meet_in(folder: &Path, together: &Together, files: &Files) -> Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let token = format!("{}-{}", std::process::id(), now.as_nanos());
    let tokens = together.exchange(Lane::Training, Ok(token))?;
    let meeting = folder::meeting(folder, tokens.first().map_or("", String::as_str));
    let made = match together.is_first() {
        true => files.create_folder_within(&meeting),
        false => Ok(()),
    };
    together.all(Lane::Training, made)?;
    let own = meeting.join(format!("rank-{}", together.rank()));
    let wrote = together.see(&meeting).and_then(|()| files.create_folder_within(&own));
    let wrote = together.all(Lane::Training, wrote);
    if together.is_first() {
        let _ = files.remove(&meeting); // the next start removes what stays
    }
    wrote
}

impl Job {
    fn run(self) -> Result<Saved> {
        let files = self.settings.files.clone();
        let aside = folder::aside(self.home.path(), self.info.progress.batches);
        let together = self.together.clone();
        let (lane, home) = (self.lane(), self.home.clone());
        let result = self.write(&files, &aside);
        if result.is_err() {
            if together.is_first() && home.check().is_ok() {
                // Free the space of the half-written checkpoint, as the disk may be full. If this
                // fails, the next start removes it.
                let _ = files.remove(&aside);
            }
            // Wait until rank 0 has freed the space, so that this rank's next write finds it. An
            // error means that other ranks are lost; then there is nothing to wait for.
            let _ = together.all(lane, Ok(()));
        }
        result
    }

    /// The lane in which the writers of all ranks wait for each other.
    fn lane(&self) -> Lane {
        Lane::Writing(self.settings.timeout.saturating_mul(PATIENCE))
    }

    fn write(self, files: &Files, aside: &Path) -> Result<Saved> {
        let start = Instant::now();
        let together = self.together.clone();
        let lane = self.lane();
        let made = if together.is_first() { self.make(files, aside) } else { Ok(()) };
        together.all(lane, made)?;
        let Job { home, settings, state, outlines, plan, info, copied, .. } = self;
        let seen = together.see(aside);
        let own = seen.and_then(|()| write_layers(files, aside, state.stages, &outlines));
        let layers = in_order(together.exchange(lane, own)?, &outlines);
        let batches = info.progress.batches;
        let target = home.path().join(folder::name(batches));
        let whole = Whole { counters: CounterFields::from(&state.counters), plan, layers, info };
        let committed = match together.is_first() {
            true => whole.commit(files, &home, aside, &settings).map(Some),
            false => Ok(None),
        };
        let committed = together.exchange(lane, committed)?;
        let (bytes, untidy) = committed.into_iter().flatten().next().unwrap_or_default();
        Ok(Saved { folder: target, batches, bytes, copied, written: start.elapsed(), untidy })
    }

    /// Makes the folder that layers are written to.
    fn make(&self, files: &Files, aside: &Path) -> Result<()> {
        self.info.files.iter().try_for_each(|(name, _)| {
            manifest::check_path(name).map_err(|reason| CheckpointError::Content {
                what: format!("checkpoint {}", aside.display()),
                reason,
            })
        })?;
        self.home.check()?;
        folder::remove_unfinished(files, self.home.path())?;
        files.create_folder_within(aside)
    }
}

/// What turns layers on disk into a checkpoint.
struct Whole {
    counters: CounterFields,
    plan: gpipe::RunSettings,
    layers: Vec<Layer>,
    info: RunInfo,
}

impl Whole {
    /// Writes the manifest, renames the folder, and prunes older checkpoints. Returns the
    /// checkpoint's size in bytes, and the error if pruning or linking failed.
    fn commit(
        self,
        files: &Files,
        home: &FolderIdentity,
        aside: &Path,
        settings: &Settings,
    ) -> Result<(u64, Option<String>)> {
        let folder = home.path();
        let Self { counters, plan, layers, info } = self;
        let run_files =
            info.files.iter().map(|(name, bytes)| write_run_file(files, aside, name, bytes));
        let batches = info.progress.batches;
        let manifest = Manifest {
            format: FORMAT,
            written_by: concat!("gpipe ", env!("CARGO_PKG_VERSION")).into(),
            progress: info.progress,
            counters,
            best: info.best,
            plan: plan.into(),
            config: info.config,
            layers,
            files: run_files.collect::<Result<_>>()?,
        };
        let path = aside.join(manifest::NAME);
        let encoded = manifest.encode().map_err(|reason| CheckpointError::Content {
            what: path.display().to_string(),
            reason,
        })?;
        files.write_new(&path, &encoded)?;
        files.sync_folder(aside)?;

        home.check()?; // never replace or prune another run's checkpoints
        let name = folder::name(batches);
        let target = folder.join(&name);
        folder::publish(files, folder, aside, &target)?;
        // The checkpoint is complete now, even if the links or the pruning fail.
        let best = info.best.filter(|_| settings.keep_best).map(|best| best.batches);
        let point = || {
            files.point(&folder.join(folder::LATEST), &name)?;
            match best {
                Some(best) => folder::point_best(files, folder, best),
                None if settings.keep_best => Ok(()),
                // The checkpoint that the link names is no longer kept.
                None => files.remove(&folder.join(folder::BEST)),
            }
        };
        let pointed = point();
        // Some file systems have no links. Old checkpoints would fill the disk there.
        let pruned = || {
            // Sync the links before removing what they named.
            files.sync_folder(folder)?;
            folder::remove_replaced(files, &target)?;
            folder::prune(files, folder, batches, settings.keep, best)
        };
        let pruned = pruned();
        let untidy = pointed.and(pruned).err().map(|error| error.to_string());
        Ok((manifest.bytes() + encoded.len() as u64, untidy))
    }
}

/// Writes the layers of all stages, on one thread per stage, and returns their entries.
fn write_layers(
    files: &Files,
    aside: &Path,
    stages: Vec<Vec<LayerState>>,
    outlines: &[LayerOutline],
) -> Result<Vec<Layer>> {
    let index_of = |name: &str| outlines.iter().position(|outline| outline.layer == name);
    let write_stage = |stage: Vec<LayerState>| -> Result<Vec<Layer>> {
        let write = |state: LayerState| {
            let encoded = encode_layer(index_of(&state.layer).unwrap_or(outlines.len()), state)?;
            for (entry, bytes) in encoded.layer.files.iter().zip(&encoded.contents) {
                files.write_new(&aside.join(&entry.path), bytes)?;
            }
            Ok(encoded.layer)
        };
        stage.into_iter().map(write).collect()
    };
    let others = stages.len().saturating_sub(1);
    let waiting = Mutex::new(stages.into_iter().enumerate());
    let work = || {
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
        let written = std::iter::from_fn(next).map(|(at, stage)| Ok((at, write_stage(stage)?)));
        written.collect::<Result<Vec<_>>>()
    };
    let written: Vec<Result<Vec<_>>> = thread::scope(|scope| {
        // This thread writes, too, and writes everything if no other thread can be started.
        let start = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let threads: Vec<_> = (0..others).map_while(start).collect();
        let panicked = |_| {
            let (what, reason) = ("a stage's checkpoint writer".into(), "it panicked".into());
            Err(CheckpointError::Content { what, reason })
        };
        // Catch a panic here: other ranks still wait for this one's result.
        let own = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(panicked);
        let theirs = threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked));
        theirs.chain([own]).collect()
    });
    let written = written.into_iter().collect::<Result<Vec<_>>>()?;
    let mut written: Vec<_> = written.into_iter().flatten().collect();
    written.sort_by_key(|(at, _)| *at);
    Ok(written.into_iter().flat_map(|(_, layers)| layers).collect())
}

/// Merges the entries that all ranks have written, in the model's order.
fn in_order(written: Vec<Vec<Layer>>, outlines: &[LayerOutline]) -> Vec<Layer> {
    let all = written.into_iter().flatten();
    // Layers without parameters are listed, too: a model with other such layers is another model.
    let mut by_name: HashMap<String, Layer> =
        all.map(|layer| (layer.name.clone(), layer)).collect();
    let layer = |outline: &LayerOutline| {
        by_name.remove(&outline.layer).unwrap_or_else(|| Layer {
            name: outline.layer.clone(),
            parameters: Vec::new(),
            files: Vec::new(),
        })
    };
    outlines.iter().map(layer).collect()
}

fn write_run_file(files: &Files, aside: &Path, name: &str, bytes: &[u8]) -> Result<FileEntry> {
    files.write_new(&aside.join(name), bytes)?;
    let (path, sha256) = (name.to_owned(), manifest::sha256(bytes));
    Ok(FileEntry { kind: FileKind::Run, path, bytes: bytes.len() as u64, sha256 })
}
