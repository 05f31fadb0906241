//! What remains when a process dies while saving, or a disk fails. Each file system operation in
//! turn is left undone or half done. There must always be a complete checkpoint, the old or the new
//! one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use common::{
    Flat, assert_same, copy, flat, info, keep, linked, names, newest, path, save, tiny, trained,
};
use gpipe::Pipeline;
use gpipe_checkpoint::{
    Checkpoint, CheckpointError, Checkpoints, RunInfo, Settings,
    files::{Files, Operation},
    folder,
    manifest::Best,
};

/// How one operation breaks.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Break {
    /// The process dies before the operation.
    Before,
    /// The process dies in the middle of the operation.
    HalfWay,
    /// The operation fails with this system error.
    Fails(i32),
}

const ENOSPC: i32 = 28;
const EIO: i32 = 5;
const EROFS: i32 = 30;

/// A file system that breaks at operation `at`, counted from 1, and the number of operations so
/// far.
fn breaking(at: usize, how: Break) -> (Files, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let hook = move |operation: Operation, path: &Path| {
        let number = counted.fetch_add(1, Ordering::SeqCst) + 1;
        match how {
            Break::Fails(code) if number == at => Err(io::Error::from_raw_os_error(code)),
            Break::Fails(_) => Ok(()),
            _ if number < at => Ok(()),
            how => {
                if how == Break::HalfWay && number == at {
                    half(operation, path);
                }
                Err(io::Error::other("the process is dead"))
            }
        }
    };
    (Files::with_hook(Arc::new(hook)), count)
}

/// Performs half of an operation. Renames and links are atomic.
fn half(operation: Operation, path: &Path) {
    match operation {
        Operation::CreateFolder => fs::create_dir_all(path).unwrap(),
        Operation::Create => fs::write(path, []).unwrap(),
        Operation::Write => fs::write(path, "{\n  \"checksum\": \"").unwrap(),
        // The worst case: only the manifest is left, so the folder looks like a checkpoint.
        Operation::Remove if path.is_dir() => {
            let files = names(path).into_iter().filter(|name| name != "manifest.json");
            files.for_each(|name| fs::remove_file(path.join(name)).unwrap());
        }
        Operation::Sync | Operation::Rename | Operation::Link | Operation::Remove => {}
    }
}

/// Three states of one model, identified by their steps, and a pipeline to restore into.
struct States {
    pipelines: Vec<Pipeline>,
    flats: Vec<Flat>,
    target: Pipeline,
}

impl States {
    fn new(stages: usize) -> Self {
        let mut pipelines: Vec<_> = (1..=3).map(|steps| trained(tiny(), stages, steps)).collect();
        let flats = pipelines.iter_mut().map(flat).collect();
        Self { pipelines, flats, target: trained(tiny(), 2, 0) }
    }

    /// The state after `steps` steps.
    fn after(&mut self, steps: usize) -> &mut Pipeline {
        &mut self.pipelines[steps - 1]
    }

    /// Restores the newest checkpoint, which must be intact. Returns its number and steps.
    fn newest(&mut self, folder: &Path, what: &str) -> Option<(u64, usize)> {
        let found = folder::newest(folder).unwrap().found?;
        found.restore(&mut self.target).unwrap();
        let steps = self.target.steps() as usize;
        assert_same(&flat(&mut self.target), &self.flats[steps - 1], what);
        Some((found.manifest().progress.batches, steps))
    }
}

/// A folder of checkpoints. The test then saves the state after 3 steps as number 3.
struct Scenario {
    name: &'static str,
    keep: usize,
    /// Number and steps of each checkpoint saved earlier.
    earlier: &'static [(u64, usize)],
    /// The number of a checkpoint that is damaged before the test.
    damaged: Option<u64>,
    /// Whether a process was killed while it replaced number 2 and wrote number 3.
    killed: bool,
    /// The number of the best evaluation, when the earlier ones are saved and when the new one is.
    best: Option<(u64, u64)>,
    /// The links and folders after the save.
    after: &'static [&'static str],
}

const FIRST: Scenario = Scenario {
    name: "the first",
    keep: 1,
    earlier: &[],
    damaged: None,
    killed: false,
    best: None,
    after: &["latest", "step-00000003"],
};

const SCENARIOS: [Scenario; 8] = [
    FIRST,
    Scenario {
        name: "kept by number",
        keep: 2,
        earlier: &[(1, 1), (2, 2)],
        after: &["latest", "step-00000002", "step-00000003"],
        ..FIRST
    },
    Scenario { name: "only one is kept", earlier: &[(2, 2)], ..FIRST },
    Scenario {
        name: "the best one is kept",
        earlier: &[(1, 1), (2, 2)],
        best: Some((1, 1)),
        after: &["best", "latest", "step-00000001", "step-00000003"],
        ..FIRST
    },
    Scenario {
        name: "a new best one",
        earlier: &[(1, 1), (2, 2)],
        best: Some((1, 3)),
        after: &["best", "latest", "step-00000003"],
        ..FIRST
    },
    Scenario {
        name: "a damaged one in the way",
        keep: 2,
        earlier: &[(2, 2), (3, 1)],
        damaged: Some(3),
        after: &["latest", "step-00000002", "step-00000003"],
        ..FIRST
    },
    Scenario { name: "another one of the same number", earlier: &[(3, 2)], ..FIRST },
    Scenario { name: "after a kill", earlier: &[(1, 1), (2, 2)], killed: true, ..FIRST },
];

/// A folder in memory, if possible: thousands of files are synced, and there is no power failure.
fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

impl Scenario {
    fn settings(&self) -> Settings {
        Settings { keep_best: self.best.is_some(), ..keep(self.keep) }
    }

    fn info(batches: u64, best: Option<u64>) -> RunInfo {
        RunInfo { best: best.map(|batches| Best { batches, loss: 0.5 }), ..info(batches) }
    }

    fn prepare(&self, states: &mut States) -> tempfile::TempDir {
        let folder = folder_in_memory();
        for &(number, steps) in self.earlier {
            let info = Self::info(number, self.best.map(|best| best.0));
            save(folder.path(), self.settings(), states.after(steps), info);
        }
        if let Some(number) = self.damaged {
            let file = path(folder.path(), number).join("0002-leave.parameters.safetensors");
            fs::write(file, "damaged").unwrap();
        }
        if self.killed {
            let at = |name: &str| folder.path().join(name);
            fs::rename(path(folder.path(), 2), at("step-00000002.replaced")).unwrap();
            fs::create_dir(at("step-00000003.writing")).unwrap();
            fs::write(at("step-00000003.writing/0000-enter.averages.safetensors"), "half").unwrap();
            std::os::unix::fs::symlink("step-00000003", at("latest.writing")).unwrap();
        }
        folder
    }

    /// Number and steps of the newest complete checkpoint before the save.
    fn old(&self) -> Option<(u64, usize)> {
        let complete = self.earlier.iter().filter(|(number, _)| Some(*number) != self.damaged);
        complete.max().copied()
    }

    /// Opens a copy of `prepared` and saves the state after 3 steps, on a file system that breaks.
    fn run(&self, prepared: &Path, states: &mut States, at: usize, how: Break) -> Outcome {
        let folder = folder_in_memory();
        copy(prepared, folder.path()).unwrap();
        let (files, operations) = breaking(at, how);
        let settings = Settings { files, ..self.settings() };
        let info = Self::info(3, self.best.map(|best| best.1));
        let save = || {
            let mut checkpoints = Checkpoints::open(folder.path(), settings)?;
            assert_eq!(checkpoints.save(states.after(3), info)?, None);
            checkpoints.wait().map(|saved| saved.unwrap())
        };
        // An error after the checkpoint is complete is reported, too.
        let result = save().map_err(|error| error.to_string()).and_then(|saved| {
            assert_eq!(saved.batches, 3);
            let complete = newest(folder.path()) == Some(3);
            assert!(complete, "{}: what is said to be saved is there", self.name);
            saved.untidy.map_or(Ok(3), Err)
        });
        Outcome { folder, operations: operations.load(Ordering::SeqCst), result }
    }

    /// The number of operations that a save takes.
    fn operations(&self, prepared: &Path, states: &mut States) -> usize {
        let outcome = self.run(prepared, states, usize::MAX, Break::Before);
        assert_eq!(outcome.result.unwrap(), 3);
        assert_eq!(names(outcome.folder.path()), self.after, "{}", self.name);
        assert!(outcome.operations > 30, "each of 8 files is made, written and synced");
        outcome.operations
    }

    /// Whether the newest checkpoint in `folder` is the new one. Otherwise it must be the old one.
    fn is_new(&self, folder: &Path, states: &mut States, what: &str) -> bool {
        let found = states.newest(folder, what);
        assert!(found == self.old() || found == Some((3, 3)), "{what}: {found:?}");
        found == Some((3, 3))
    }

    /// Checks that every link leads to a complete checkpoint, and that nothing unfinished remains.
    fn is_tidy(&self, folder: &Path, what: &str) {
        let names = names(folder);
        let known = |name: &String| self.after.contains(&name.as_str()) || !name.contains('.');
        assert!(names.iter().all(known), "{what}: {names:?}");
        // A link may name a damaged checkpoint until there is a new one.
        if self.damaged.is_none() || newest(folder) > self.old().map(|old| old.0) {
            linked(folder, "latest");
            linked(folder, "best");
        }
    }
}

struct Outcome {
    folder: tempfile::TempDir,
    operations: usize,
    result: Result<u64, String>,
}

/// Kills the process at every operation of every scenario.
fn dies(how: Break, stages: usize) {
    let mut states = States::new(stages);
    for scenario in SCENARIOS {
        let prepared = scenario.prepare(&mut states);
        let mut was_new = false;
        for at in 1..=scenario.operations(prepared.path(), &mut states) {
            let what = format!("{}: died {how:?} operation {at}", scenario.name);
            let outcome = scenario.run(prepared.path(), &mut states, at, how);
            assert!(outcome.result.is_err(), "{what}");
            let folder = outcome.folder.path();
            let new = scenario.is_new(folder, &mut states, &what);
            assert!(new || !was_new, "{what}: it was there before");
            was_new = new;
            // The next process finds the same state, tidies up and continues.
            drop(Checkpoints::open(folder, scenario.settings()).unwrap());
            assert_eq!(scenario.is_new(folder, &mut states, &what), new, "{what}");
            scenario.is_tidy(folder, &what);
            if at % 5 == 0 {
                let info = Scenario::info(4, scenario.best.map(|best| best.1));
                save(folder, scenario.settings(), states.after(3), info);
                assert_eq!(states.newest(folder, &what), Some((4, 3)), "{what}");
                assert_eq!(linked(folder, "latest"), Some(4), "{what}");
                scenario.is_tidy(folder, &what);
            }
        }
        assert!(was_new, "{}: before the last operation it is there", scenario.name);
    }
}

#[test]
fn fault_a_process_that_dies_before_any_operation_leaves_a_complete_checkpoint() {
    dies(Break::Before, 1);
}

#[test]
fn fault_a_process_that_dies_within_any_operation_leaves_a_complete_checkpoint() {
    dies(Break::HalfWay, 3);
}

#[test]
fn fault_any_operation_that_fails_is_named_and_the_next_save_succeeds() {
    let mut states = States::new(2);
    for scenario in SCENARIOS {
        let prepared = scenario.prepare(&mut states);
        for at in 1..=scenario.operations(prepared.path(), &mut states) {
            let (code, remedy) = [
                (ENOSPC, "make room, or keep fewer checkpoints"),
                (EIO, "the disk may be failing"),
                (EROFS, "use a folder that can be written"),
            ][at % 3];
            let what = format!("{}: operation {at} failed with {code}", scenario.name);
            let outcome = scenario.run(prepared.path(), &mut states, at, Break::Fails(code));
            let folder = outcome.folder.path();
            let message = outcome.result.unwrap_err();
            assert!(message.contains(folder.to_str().unwrap()), "{what}: {message}");
            assert!(message.contains(remedy), "{what}: {message}");
            // Opening the folder tidies it. A failure after that removes what it wrote.
            let opened = !scenario.killed || at > 4;
            let found = names(folder);
            assert!(!opened || !found.iter().any(|name| name.ends_with(".writing")), "{found:?}");
            let new = scenario.is_new(folder, &mut states, &what);
            if opened && scenario.old().is_some() && (new || scenario.damaged.is_none()) {
                linked(folder, "latest").unwrap();
            }
            let info = Scenario::info(3, scenario.best.map(|best| best.1));
            save(folder, scenario.settings(), states.after(3), info);
            assert_eq!(states.newest(folder, &what), Some((3, 3)), "{what}");
            assert_eq!(names(folder), scenario.after, "{what}");
            scenario.is_tidy(folder, &what);
        }
    }
}

/// A power failure loses what is not synced. So files must be synced before the manifest is
/// created; the manifest and the folder before the checkpoint is renamed; and the new name before
/// older checkpoints are removed.
#[test]
fn fault_nothing_is_relied_on_that_is_not_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), keep(1), &mut trained(tiny(), 1, 1), info(1));
    let log: Arc<Mutex<Vec<(Operation, PathBuf)>>> = Arc::default();
    let logged = Arc::clone(&log);
    let hook = move |operation, path: &Path| {
        logged.lock().unwrap().push((operation, path.to_owned()));
        Ok(())
    };
    let settings = Settings { files: Files::with_hook(Arc::new(hook)), ..keep(1) };
    save(folder.path(), settings, &mut trained(tiny(), 3, 2), info(2));
    let log = log.lock().unwrap();
    let position = |operation: Operation, path: &Path| {
        let wanted = (operation, path.to_owned());
        assert_eq!(log.iter().filter(|entry| **entry == wanted).count(), 1, "{wanted:?}");
        log.iter().position(|entry| *entry == wanted).unwrap()
    };
    let aside = folder.path().join("step-00000002.writing");
    let manifest = aside.join("manifest.json");
    let target = path(folder.path(), 2);
    let created: Vec<&PathBuf> = log
        .iter()
        .filter(|(operation, _)| *operation == Operation::Create)
        .map(|(_, path)| path)
        .collect();
    // Three files for each of two layers, the tokenizer and the manifest.
    assert_eq!(created.len(), 8, "{created:?}");
    assert_eq!(*created.last().unwrap(), &manifest);
    let mut in_folder: Vec<_> =
        created.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    in_folder.sort();
    assert_eq!(in_folder, names(&target), "every file was made through the hook");
    let named = position(Operation::Rename, &target);
    for file in created {
        let synced = position(Operation::Sync, file);
        assert!(position(Operation::Create, file) < position(Operation::Write, file));
        assert!(position(Operation::Write, file) < synced);
        assert!(*file == manifest || synced < position(Operation::Create, &manifest));
        assert!(synced < position(Operation::Sync, &aside));
    }
    assert!(position(Operation::Sync, &aside) < named);
    let first_link = position(Operation::Link, &folder.path().join("latest.writing"));
    let linked = position(Operation::Rename, &folder.path().join("latest"));
    let gone = position(Operation::Rename, &folder.path().join("step-00000001.removing"));
    let sync = (Operation::Sync, folder.path().to_owned());
    assert!(log[named..first_link].contains(&sync), "the name is on disk before anything else");
    assert!(log[linked..gone].contains(&sync), "the link is on disk before what it named is gone");
}

/// A disk that blocks until it is released.
fn stuck() -> (Files, mpsc::Sender<()>) {
    let (go, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let hook = move |operation: Operation, _: &Path| {
        if operation == Operation::Write {
            let _ = gate.lock().unwrap().recv(); // fails at once when the sender is gone
        }
        Ok(())
    };
    (Files::with_hook(Arc::new(hook)), go)
}

#[test]
fn fault_a_writer_that_takes_too_long_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (files, go) = stuck();
    let timeout = Duration::from_millis(10);
    let settings = Settings { files, timeout, ..Settings::default() };
    let mut checkpoints = Checkpoints::open(folder.path(), settings).unwrap();
    let mut pipeline = trained(tiny(), 2, 1);
    checkpoints.save(&mut pipeline, info(1)).unwrap();
    assert_eq!(checkpoints.poll().unwrap(), None);
    let error = checkpoints.wait().unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Late { path, .. } if path.ends_with("step-00000001"))
    );
    assert!(error.to_string().contains("step-00000001 was not written within 10ms"));
    assert_eq!(newest(folder.path()), None);
    // The writer still ends, and reports its outcome.
    drop(go);
    assert_eq!(ended(&mut checkpoints).unwrap(), 1);
    assert_eq!(newest(folder.path()), Some(1));
}

/// Waits for the outcome of a writer that is no longer blocked.
fn ended(checkpoints: &mut Checkpoints) -> Result<u64, CheckpointError> {
    loop {
        match checkpoints.poll().transpose() {
            Some(outcome) => return outcome.map(|saved| saved.batches),
            None => thread::yield_now(),
        }
    }
}

/// Regression: `save` after a late writer must not start a second one. Two writers would write into
/// one folder if they had the same number, `latest` would name the one that ends last, and each
/// would hold a copy of the whole state.
#[test]
fn regression_no_second_writer_is_begun_while_one_is_late() {
    let folder = tempfile::tempdir().unwrap();
    let (files, go) = stuck();
    let timeout = Duration::from_millis(10);
    let settings = Settings { files, timeout, ..Settings::default() };
    let mut checkpoints = Checkpoints::open(folder.path(), settings).unwrap();
    let mut pipeline = trained(tiny(), 2, 1);
    checkpoints.save(&mut pipeline, info(1)).unwrap();
    for number in [1, 2] {
        let error = checkpoints.save(&mut pipeline, info(number)).unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Late { path, .. } if path.ends_with("step-00000001"))
        );
        assert_eq!(names(folder.path()), ["step-00000001.writing"]);
    }
    drop(go);
    assert_eq!(ended(&mut checkpoints).unwrap(), 1);
    checkpoints.save(&mut pipeline, info(2)).unwrap();
    assert_eq!(ended(&mut checkpoints).unwrap(), 2);
    assert_eq!(names(folder.path()), ["latest", "step-00000001", "step-00000002"]);
    assert_eq!(linked(folder.path(), "latest"), Some(2));
}

/// Regression: a step saved twice replaces its checkpoint. The old one must stay until the new one
/// has its name, or a process killed in between leaves none. `fault_a_process_that_dies_*` tests
/// every moment of this; this test singles out the critical one.
#[test]
fn regression_what_is_replaced_stays_until_the_new_one_has_its_name() {
    let mut states = States::new(1);
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), keep(1), states.after(2), info(3));
    let target = path(folder.path(), 3);
    let renamed = Mutex::new(false);
    let dead = move |operation, path: &Path| {
        let mut renamed = renamed.lock().unwrap();
        *renamed |= (operation, path) == (Operation::Rename, &*target);
        if *renamed { Err(io::Error::other("the process is dead")) } else { Ok(()) }
    };
    let files = Files::with_hook(Arc::new(dead));
    let mut checkpoints = Checkpoints::open(folder.path(), Settings { files, ..keep(1) }).unwrap();
    checkpoints.save(states.after(3), info(3)).unwrap();
    checkpoints.wait().unwrap_err();
    let left = ["latest", "step-00000003.replaced", "step-00000003.writing"];
    assert_eq!(names(folder.path()), left);
    assert_eq!(states.newest(folder.path(), "before it is tidied up"), Some((3, 2)));
    assert!(Checkpoint::open(&folder.path().join("latest")).is_err());
    drop(Checkpoints::open(folder.path(), keep(1)).unwrap());
    assert_eq!(names(folder.path()), ["latest", "step-00000003"]);
    assert_eq!(linked(folder.path(), "latest"), Some(3));
}
