//! The file to which a stage on a CPU moves saved activations, and the thread that writes and reads
//! it.
//!
//! The file has no name: it is gone when the process ends, however it ends. One thread does one
//! thing after the other, so a place in the file that is free again may be used at once: what was
//! asked of it before is done before.
//!
//! Memory: at most one micro-batch is being written, and at most one is read ahead
//! ([`super::offload`]). The reader allocates when the writes before it are done.

use std::{
    cell::RefCell,
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use gpipe_bridge::{
    memory,
    offload::{self, Block},
};
use gpipe_core::Bytes;

use crate::error::LayerError;

/// How long an aborted step waits for what its thread is doing.
const LEAVE_ALONE: Duration = Duration::from_secs(10);

/// The file of one stage.
pub(super) struct Spill {
    shared: Arc<Shared>,
    /// At most the last write and one read per stored micro-batch wait in it.
    jobs: Option<Sender<Job>>,
    thread: Option<thread::JoinHandle<()>>,
    /// The last write, until it is known to be done.
    writing: RefCell<Option<Pending<()>>>,
    /// How long the thread may take for one thing.
    patience: Duration,
}

/// What the stage and its thread share.
struct Shared {
    file: File,
    folder: String,
    space: Mutex<Space>,
    /// The arena that what is read is charged to.
    arena: u32,
}

type Job = Box<dyn FnOnce(&Shared) + Send>;

/// The blocks of a micro-batch in the file.
pub(super) struct Stored {
    place: Place,
    sizes: Vec<usize>,
    reading: Option<Pending<Vec<Block>>>,
}

/// What the thread was asked for.
struct Pending<T> {
    done: Receiver<Result<T, LayerError>>,
    what: String,
}

impl<T> Pending<T> {
    /// Waits until `patience` has passed since `since`.
    fn wait(self, since: Instant, patience: Duration) -> Result<T, LayerError> {
        match self.done.recv_timeout(patience.saturating_sub(since.elapsed())) {
            Ok(done) => done,
            Err(RecvTimeoutError::Timeout) => Err(LayerError::Value(format!(
                "{} took longer than {} s: set a faster `offload_folder`, or a longer timeout",
                self.what,
                patience.as_secs_f64()
            ))),
            Err(RecvTimeoutError::Disconnected) => {
                Err(LayerError::Value(format!("{}: the thread of the file has ended", self.what)))
            }
        }
    }
}

impl Stored {
    /// Whether the thread reads it, or has read it.
    pub(super) fn is_asked_for(&self) -> bool {
        self.reading.is_some()
    }
}

impl Spill {
    /// Creates the file in `folder`, or where the system keeps temporary files, and its thread.
    /// What is read is charged to `arena`.
    ///
    /// # Errors
    /// No file can be created there.
    pub(super) fn new(
        folder: Option<&Path>,
        arena: u32,
        patience: Duration,
    ) -> Result<Self, LayerError> {
        let file = new_file(folder);
        let folder = name_of(folder);
        let file = file.map_err(|error| {
            LayerError::Value(format!(
                "no file for offloaded activations in {folder}: {error}: set another \
                `offload_folder`"
            ))
        })?;
        let shared = Arc::new(Shared { file, folder, space: Mutex::default(), arena });
        let (jobs, asked) = channel::<Job>();
        let own = Arc::clone(&shared);
        let work = move || asked.into_iter().for_each(|job| job(&own));
        let thread =
            thread::Builder::new().name("gpipe offload".into()).spawn(work).map_err(|error| {
                LayerError::Value(format!(
                    "no thread for offload: {error}; raise the limit on threads (ulimit -u)"
                ))
            })?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Self { shared, jobs, thread, writing: RefCell::default(), patience })
    }

    /// Starts to write `blocks`, once the write before is done. Their memory is released when they
    /// are written.
    ///
    /// # Errors
    /// The write before failed: nothing of this one has begun.
    pub(super) fn store(&self, blocks: Vec<Block>) -> Result<Stored, LayerError> {
        self.finish_write()?;
        let sizes: Vec<usize> = blocks.iter().map(Block::len).collect();
        let place = Place::new(&self.shared, sizes.iter().map(|&size| size as u64).sum());
        let start = place.start;
        let write = move |shared: &Shared| {
            let mut at = start;
            for block in blocks {
                let bytes = block.bytes()?;
                let written = shared.file.write_all_at(bytes, at);
                written.map_err(|error| shared.failed("writing", &error))?;
                at += bytes.len() as u64;
            }
            Ok(())
        };
        let what = format!("writing {} of activations", Bytes(place.len));
        *self.writing.borrow_mut() = Some(self.ask(what, write));
        Ok(Stored { place, sizes, reading: None })
    }

    /// Starts to read what is stored.
    pub(super) fn read_ahead(&self, stored: &mut Stored) {
        if stored.reading.is_some() {
            return;
        }
        let (start, sizes) = (stored.place.start, stored.sizes.clone());
        let read = move |shared: &Shared| {
            memory::enter(shared.arena)?;
            // A refusal of an earlier read must not explain an error of this one.
            let _ = memory::take_refusal();
            let mut at = start;
            let mut blocks = Vec::with_capacity(sizes.len());
            for size in sizes {
                let fill = |bytes: &mut [u8]| shared.file.read_exact_at(bytes, at);
                let (block, done) = offload::filled(size, fill)?;
                done.map_err(|error| shared.failed("reading", &error))?;
                at += size as u64;
                blocks.push(block);
            }
            Ok(blocks)
        };
        let what = format!("reading {} of activations", Bytes(stored.place.len));
        stored.reading = Some(self.ask(what, read));
    }

    /// Returns what is stored, and frees its place.
    pub(super) fn load(&self, mut stored: Stored) -> Result<Vec<Block>, LayerError> {
        let since = Instant::now();
        self.read_ahead(&mut stored);
        // The write came first; if it failed, its error is the one to report.
        self.finish_write()?;
        match stored.reading {
            // One deadline for both: the stage's peers wait for their sum.
            Some(reading) => reading.wait(since, self.patience),
            None => Ok(Vec::new()),
        }
    }

    /// Waits until nothing is being written.
    pub(super) fn finish_write(&self) -> Result<(), LayerError> {
        let writing = self.writing.borrow_mut().take();
        writing.map_or(Ok(()), |writing| writing.wait(Instant::now(), self.patience))
    }

    /// Forgets what an aborted step has begun, and waits until the thread has nothing to do. It
    /// then neither holds nor allocates memory of the stage. Returns false if the thread hangs in
    /// the disk: then it is left alone.
    pub(super) fn forget(&self) -> bool {
        self.writing.borrow_mut().take();
        let idle = self.ask("ending an aborted step".into(), |_| Ok(()));
        idle.wait(Instant::now(), self.patience.min(LEAVE_ALONE)).is_ok()
    }

    fn ask<T: Send + 'static>(
        &self,
        what: String,
        work: impl FnOnce(&Shared) -> Result<T, LayerError> + Send + 'static,
    ) -> Pending<T> {
        let (tell, done) = channel();
        // Nobody may be left to tell: the step was aborted. If the thread has ended, the receiver
        // says so.
        let job: Job = Box::new(move |shared| drop(tell.send(work(shared))));
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
        Pending { done, what }
    }
}

impl Drop for Spill {
    /// Ends the thread. When a pipeline is gone, so are its files.
    fn drop(&mut self) {
        let idle = self.forget();
        self.jobs = None;
        if let Some(thread) = self.thread.take().filter(|_| idle) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn failed(&self, what: &str, error: &io::Error) -> LayerError {
        let folder = &self.folder;
        LayerError::Value(format!(
            "{what} offloaded activations in {folder}: {error}: free space there, set another \
            `offload_folder`, or another re-materialization"
        ))
    }

    fn space(&self) -> std::sync::MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates a file without a name.
fn new_file(folder: Option<&Path>) -> io::Result<File> {
    match folder {
        // Every write to it fails as on a full disk.
        #[cfg(any(test, feature = "testing"))]
        Some(full) if full == Path::new("/dev/full") => {
            File::options().write(true).read(true).open(full)
        }
        Some(folder) => tempfile::tempfile_in(folder),
        None => tempfile::tempfile(),
    }
}

fn name_of(folder: Option<&Path>) -> String {
    let folder = folder.map(PathBuf::from);
    folder.map_or("the system's temporary folder".into(), |own| own.display().to_string())
}

/// A part of the file. It is free again when dropped.
struct Place {
    shared: Arc<Shared>,
    start: u64,
    len: u64,
}

impl Place {
    fn new(shared: &Arc<Shared>, len: u64) -> Self {
        let start = shared.space().take(len);
        Self { shared: Arc::clone(shared), start, len }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.space().give_back(self.start, self.len);
    }
}

/// The free parts of the file, by start and length, and its end.
#[derive(Debug, Default, PartialEq, Eq)]
struct Space {
    free: Vec<(u64, u64)>,
    end: u64,
}

impl Space {
    /// Takes the first free part that is large enough, or makes the file longer.
    fn take(&mut self, len: u64) -> u64 {
        match self.free.iter_mut().find(|(_, free)| *free >= len) {
            Some((start, free)) => {
                let taken = *start;
                (*start, *free) = (*start + len, *free - len);
                taken
            }
            None => {
                self.end += len;
                self.end - len
            }
        }
    }

    fn give_back(&mut self, start: u64, len: u64) {
        self.free.push((start, len));
        self.free.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(self.free.len());
        for (start, len) in self.free.drain(..).filter(|(_, len)| *len > 0) {
            match merged.last_mut() {
                Some((before, had)) if *before + *had == start => *had += len,
                _ => merged.push((start, len)),
            }
        }
        if let Some(&(start, len)) = merged.last()
            && start + len == self.end
        {
            self.end = start;
            merged.pop();
        }
        self.free = merged;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn block(value: u8, size: usize) -> Block {
        offload::filled(size, |bytes| bytes.fill(value)).unwrap().0
    }

    fn bytes(blocks: &[Block]) -> Vec<&[u8]> {
        blocks.iter().map(|block| block.bytes().unwrap()).collect()
    }

    #[test]
    fn property_places_in_the_file_never_overlap() {
        let mut random = gpipe_core::splitmix::Stream::new(3);
        let (mut space, mut held) = (Space::default(), Vec::<(u64, u64)>::new());
        for _ in 0..2000 {
            if held.len() > 12 || (!held.is_empty() && random.below(2) == 0) {
                let (start, len) = held.swap_remove(random.below(held.len()));
                space.give_back(start, len);
            } else {
                let len = random.below(9) as u64;
                let start = space.take(len);
                let apart = |&(other, size): &(u64, u64)| {
                    start + len <= other || other + size <= start || len == 0 || size == 0
                };
                assert!(held.iter().all(apart), "{start}+{len} in {held:?}");
                assert!(start + len <= space.end);
                held.push((start, len));
            }
        }
        held.into_iter().for_each(|(start, len)| space.give_back(start, len));
        assert_eq!(space, Space::default());
    }

    #[test]
    fn oracle_blocks_come_back_in_any_order_and_places_are_used_again() {
        let spill = Spill::new(None, 0, PATIENCE).unwrap();
        for round in 0..3 {
            let blocks = |m: u8| {
                vec![block(m + round, 1000 + usize::from(m)), block(100 + m, 0), block(7, 3)]
            };
            let mut stored: Vec<_> = (0..4).map(|m| spill.store(blocks(m)).unwrap()).collect();
            spill.read_ahead(&mut stored[1]);
            let mut written = vec![0, 1, 2, 3];
            for m in [2, 1, 0, 0] {
                let back = spill.load(stored.remove(m)).unwrap();
                assert_eq!(bytes(&back), bytes(&blocks(written.remove(m))));
            }
            let last = spill.load(spill.store(blocks(9)).unwrap()).unwrap();
            assert_eq!(bytes(&last), bytes(&blocks(9)));
            assert_eq!(*spill.shared.space(), Space::default());
        }
    }

    #[test]
    fn fault_a_folder_that_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let gone = folder.path().join("gone");
        let error = Spill::new(Some(&gone), 0, PATIENCE).err().unwrap().to_string();
        assert!(error.contains("gone") && error.contains("another `offload_folder`"), "{error}");
    }

    #[test]
    fn property_the_file_has_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let spill = Spill::new(Some(folder.path()), 0, PATIENCE).unwrap();
        let stored = spill.store(vec![block(1, 4096)]).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!(bytes(&spill.load(stored).unwrap()), [[1; 4096]]);
    }

    #[test]
    fn fault_a_full_disk_is_an_error_of_the_next_use() {
        let spill = Spill::new(Some(Path::new("/dev/full")), 0, PATIENCE).unwrap();
        let stored = spill.store(vec![block(1, 4096)]).unwrap();
        let error = spill.load(stored).unwrap_err().to_string();
        assert!(error.contains("writing offloaded activations in /dev/full"), "{error}");
        assert!(error.contains("No space left") && error.contains("free space"), "{error}");
    }

    #[test]
    fn fault_a_thread_that_does_not_come_on() {
        let mut spill = Spill::new(None, 0, Duration::from_millis(1)).unwrap();
        let (jobs, asked) = channel::<Job>();
        spill.jobs = Some(jobs);
        let stored = spill.store(vec![block(1, 16)]).unwrap();
        let error = spill.load(stored).unwrap_err().to_string();
        assert!(error.contains("writing 16 B of activations took longer than 0.001 s"), "{error}");
        drop(asked);
        let error = spill.store(Vec::new()).and_then(|own| spill.load(own)).unwrap_err();
        assert!(error.to_string().contains("has ended"), "{error}");
    }
}
