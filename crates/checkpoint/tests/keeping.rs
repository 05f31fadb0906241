//! Which checkpoints are kept, and what else may be in their folder.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use common::{info, keep, linked, names, newest, path, save, tiny, trained};
use gpipe::Pipeline;
use gpipe_checkpoint::{
    CheckpointError, Checkpoints, RunInfo, Settings,
    files::{Files, Operation},
    folder,
    manifest::Best,
};

struct Run {
    folder: tempfile::TempDir,
    pipeline: Pipeline,
}

impl Run {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), pipeline: trained(tiny(), 1, 1) }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Saves number `batches`, and returns the numbers that exist then.
    fn save(&mut self, settings: Settings, batches: u64, best: Option<u64>) -> Vec<u64> {
        let best = best.map(|batches| Best { batches, loss: 0.5 });
        let info = RunInfo { best, ..info(batches) };
        save(self.folder.path(), settings, &mut self.pipeline, info);
        assert_eq!(linked(self.path(), "latest"), Some(batches));
        self.numbers()
    }

    fn numbers(&self) -> Vec<u64> {
        folder::list(self.path()).unwrap().into_iter().map(|(number, _)| number).collect()
    }

    fn damage(&self, number: u64) {
        fs::write(path(self.path(), number).join("tokenizer.json"), "other").unwrap();
    }
}

fn keep_best(keep: usize) -> Settings {
    Settings { keep_best: true, ..common::keep(keep) }
}

#[test]
fn oracle_the_newest_are_kept() {
    let mut run = Run::new();
    assert_eq!(run.save(keep(2), 1, None), [1]);
    assert_eq!(run.save(keep(2), 9, None), [9, 1]);
    assert_eq!(run.save(keep(2), 10, None), [10, 9]);
    assert_eq!(run.save(keep(4), 100_000_000, None), [100_000_000, 10, 9], "more digits");
    assert_eq!(run.save(keep(4), 123_456_789_012, None).len(), 4);
    assert_eq!(run.save(keep(1), u64::MAX, None), [u64::MAX]);
    let mut run = Run::new();
    assert_eq!(run.save(keep(0), 1, None), [1], "at least one");
    assert_eq!(run.save(keep(0), 2, None), [2]);
    assert_eq!(run.save(keep(usize::MAX), 3, None), [3, 2]);
    assert_eq!(names(run.path()), ["latest", "step-00000002", "step-00000003"]);
}

#[test]
fn oracle_the_best_one_is_kept_besides() {
    let mut run = Run::new();
    assert_eq!(run.save(keep_best(1), 1, None), [1]);
    assert_eq!(linked(run.path(), "best"), None);
    assert_eq!(run.save(keep_best(1), 2, Some(2)), [2]);
    assert_eq!(run.save(keep_best(1), 3, Some(2)), [3, 2]);
    assert_eq!(run.save(keep_best(1), 4, Some(2)), [4, 2]);
    assert_eq!(linked(run.path(), "best"), Some(2));
    assert_eq!(run.save(keep_best(1), 5, Some(5)), [5]);
    assert_eq!(linked(run.path(), "best"), Some(5));
    assert_eq!(run.save(keep_best(2), 6, Some(5)), [6, 5], "it is one of the newest");
    // Without the setting, the best checkpoint is treated like any other.
    let mut run = Run::new();
    run.save(keep(1), 1, Some(1));
    assert_eq!(run.save(keep(1), 2, Some(1)), [2]);
    assert_eq!(names(run.path()), ["latest", "step-00000002"]);
}

/// Regression: the best evaluation may be of a step that was not saved, or a save may be killed
/// before it updates the link. In both cases `best` must name an existing checkpoint, and later
/// saves must move it.
#[test]
fn regression_the_link_to_the_best_one_never_leads_nowhere() {
    let mut run = Run::new();
    run.save(keep_best(1), 10, Some(10));
    assert_eq!(run.save(keep_best(1), 20, Some(15)), [20, 10], "15 was not saved");
    assert_eq!(linked(run.path(), "best"), Some(10));
    assert_eq!(run.save(keep(1), 25, Some(15)), [25], "nobody keeps it any more");
    assert_eq!(linked(run.path(), "best"), None);
    run.save(keep_best(1), 30, Some(30));
    assert_eq!(linked(run.path(), "best"), Some(30));
    // As if the process had been killed before it made the link.
    fs::remove_file(run.path().join("best")).unwrap();
    assert_eq!(run.save(keep_best(1), 40, Some(30)), [40, 30]);
    assert_eq!(linked(run.path(), "best"), Some(30));
}

#[test]
fn oracle_damaged_newer_ones_are_neither_counted_nor_removed() {
    let mut run = Run::new();
    for number in [10, 20, 30] {
        run.save(keep(9), number, None);
    }
    run.damage(20);
    run.damage(30);
    assert_eq!(newest(run.path()), Some(10));
    assert_eq!(run.save(keep(2), 11, None), [30, 20, 11, 10]);
    assert_eq!(run.save(keep(2), 12, None), [30, 20, 12, 11]);
    assert_eq!(newest(run.path()), Some(12));
    // When the run reaches their numbers, complete checkpoints replace the damaged ones.
    assert_eq!(run.save(keep(2), 20, None), [30, 20, 12]);
    assert_eq!(newest(run.path()), Some(20));
    let skipped = folder::newest(run.path()).unwrap().skipped;
    assert_eq!(skipped.len(), 1);
    assert!(skipped[0].reason.contains("tokenizer.json"), "{skipped:?}");
}

#[test]
fn oracle_a_step_that_is_saved_twice_is_there_once() {
    let mut run = Run::new();
    run.save(keep_best(1), 5, Some(5));
    common::step(&mut run.pipeline);
    assert_eq!(run.save(keep_best(1), 5, Some(5)), [5]);
    assert_eq!(names(run.path()), ["best", "latest", "step-00000005"]);
    let found = folder::find(run.path()).unwrap().checkpoint;
    assert_eq!(found.manifest().counters.step, 2);
    // The same with a single writer.
    let mut checkpoints = Checkpoints::open(run.path(), keep(1)).unwrap();
    for _ in 0..3 {
        checkpoints.save(&mut run.pipeline, info(5)).unwrap();
    }
    drop(checkpoints);
    assert_eq!(newest(run.path()), Some(5));
    assert_eq!(names(run.path()), ["latest", "step-00000005"]);
}

/// Files that only resemble checkpoints are not counted, read or removed.
#[test]
fn fault_foreign_files_are_left_alone() {
    let mut run = Run::new();
    let foreign = [
        "step-1",
        "step-",
        "step-000000001",
        "step-+0000001",
        "step-0000000x",
        "step-99999999999999999999999",
        "step-by-step.writing",
        "notes.writing",
        "step-00000001.bak",
        "x.replaced",
        "latest.replaced",
        "best.removing",
        "Step-00000007",
    ];
    for name in foreign {
        fs::create_dir(run.path().join(name)).unwrap();
        fs::write(run.path().join(name).join("mine"), "mine").unwrap();
    }
    fs::write(run.path().join("README"), "mine").unwrap();
    assert!(run.numbers().is_empty());
    run.save(keep(1), 1, None);
    assert_eq!(run.save(keep(1), 2, None), [2]);
    for name in foreign {
        assert!(run.path().join(name).join("mine").exists(), "{name}");
    }
    assert_eq!(names(run.path()).len(), foreign.len() + 3);
    assert!(folder::list(&run.path().join("nowhere")).unwrap().is_empty());
    let message = folder::list(&run.path().join("README")).unwrap_err().to_string();
    assert!(message.contains("README"), "{message}");
}

#[test]
fn fault_leftovers_are_removed_when_the_folder_is_opened() {
    let mut run = Run::new();
    run.save(keep(2), 1, None);
    run.save(keep(2), 2, None);
    let (first, second) = (path(run.path(), 1), path(run.path(), 2));
    let at = |name: &str| run.path().join(name);
    common::copy(&second, &at("step-00000002.replaced")).unwrap();
    common::copy(&second, &at("step-00000003.writing")).unwrap();
    common::copy(&first, &at("step-00000000.removing")).unwrap();
    symlink("step-00000009", at("latest.writing")).unwrap();
    symlink("step-00000009", at("best.writing")).unwrap();
    // These are complete, but their names do not count.
    assert_eq!(run.numbers(), [2, 1]);
    fs::rename(&second, at("moved")).unwrap();
    assert_eq!(run.numbers(), [2, 1], "what was being replaced stands in for it");
    assert_eq!(newest(run.path()), Some(2));
    fs::rename(at("moved"), &second).unwrap();
    drop(Checkpoints::open(run.path(), keep(2)).unwrap());
    assert_eq!(names(run.path()), ["latest", "step-00000001", "step-00000002"]);
}

#[test]
fn fault_links_that_lead_nowhere_or_are_none() {
    let mut run = Run::new();
    // A dangling link is replaced like any other, even in place of a checkpoint.
    symlink("nowhere", run.path().join("latest")).unwrap();
    symlink("nowhere", run.path().join("step-00000001")).unwrap();
    assert_eq!(newest(run.path()), None);
    let message = folder::find(&run.path().join("latest")).unwrap_err().to_string();
    assert!(message.contains("latest: there is no such folder"), "{message}");
    assert_eq!(run.save(keep(2), 1, None), [1]);
    // A file is replaced, too.
    fs::remove_file(run.path().join("latest")).unwrap();
    fs::write(run.path().join("latest"), "step-00000001").unwrap();
    fs::write(run.path().join("step-00000002"), "a file").unwrap();
    assert_eq!(run.save(keep(2), 2, None), [2, 1]);
    // A folder with unknown content is not removed. The checkpoint exists, and the problem is
    // reported.
    fs::remove_file(run.path().join("latest")).unwrap();
    fs::create_dir(run.path().join("latest")).unwrap();
    fs::write(run.path().join("latest/mine"), "mine").unwrap();
    let mut checkpoints = Checkpoints::open(run.path(), keep(1)).unwrap();
    checkpoints.save(&mut run.pipeline, info(3)).unwrap();
    let message = checkpoints.wait().unwrap().unwrap().untidy.unwrap();
    assert!(message.contains("latest") && message.contains("move that away"), "{message}");
    assert_eq!(newest(run.path()), Some(3));
    let all = ["latest", "step-00000003"];
    assert_eq!(names(run.path()), all, "nothing is left aside, and old ones are removed");
    assert_eq!(names(&run.path().join("latest")), ["mine"]);
}

/// Some file systems have no symbolic links. There every save reported one link and then removed no
/// old checkpoint, until the disk was full.
#[test]
fn regression_old_ones_are_removed_where_there_are_no_links() {
    let mut run = Run::new();
    let no_links = |operation, _: &Path| match operation {
        Operation::Link => Err(std::io::Error::from(std::io::ErrorKind::Unsupported)),
        _ => Ok(()),
    };
    let files = Files::with_hook(Arc::new(no_links));
    let best = Some(Best { batches: 2, loss: 0.5 });
    for (keep_best, left) in [(false, &[6_u64, 5][..]), (true, &[6, 5, 2])] {
        for batches in 1..=6 {
            let settings = Settings { files: files.clone(), keep_best, ..keep(2) };
            let mut checkpoints = Checkpoints::open(run.path(), settings).unwrap();
            let info = RunInfo { best: best.filter(|own| own.batches <= batches), ..info(batches) };
            checkpoints.save(&mut run.pipeline, info).unwrap();
            let untidy = checkpoints.wait().unwrap().unwrap().untidy.unwrap();
            assert!(untidy.contains("latest"), "{untidy}");
        }
        assert_eq!(run.numbers(), left);
        assert_eq!(newest(run.path()), Some(6));
        (1..=6).for_each(|number| drop(fs::remove_dir_all(path(run.path(), number))));
    }
}

#[test]
fn fault_a_folder_that_cannot_be_one_is_named() {
    let run = Run::new();
    let file = run.path().join("file");
    fs::write(&file, "").unwrap();
    for (path, part) in [(file.clone(), "file"), (file.join("below"), "below")] {
        let message = Checkpoints::open(&path, keep(1)).unwrap_err().to_string();
        assert!(message.contains(part) && message.contains("move that away"), "{message}");
    }
    // Missing parents are created, and each new name is synced.
    let log: Arc<Mutex<Vec<PathBuf>>> = Arc::default();
    let synced = Arc::clone(&log);
    let hook = move |operation, path: &Path| {
        if operation == Operation::Sync {
            synced.lock().unwrap().push(path.to_owned());
        }
        Ok(())
    };
    let settings = Settings { files: Files::with_hook(Arc::new(hook)), ..keep(1) };
    drop(Checkpoints::open(&run.path().join("a/b/c"), settings.clone()).unwrap());
    assert!(run.path().join("a/b/c").is_dir());
    let above = ["a/b", "a", ""].map(|path| run.path().join(path));
    assert_eq!(log.lock().unwrap()[..], above);
    drop(Checkpoints::open(&run.path().join("a/b/c"), settings).unwrap());
    assert_eq!(log.lock().unwrap().len(), 3, "nothing is new");
}

/// Regression: a folder of checkpoints that was removed must not be created again. If another run's
/// folder has replaced it, that run's checkpoints must not be replaced or pruned.
#[test]
fn regression_a_folder_that_is_gone_or_another_is_not_written_to() {
    let place = tempfile::tempdir().unwrap();
    let (folder, moved) = (place.path().join("checkpoints"), place.path().join("moved"));
    let mut pipeline = trained(tiny(), 1, 1);
    let mut checkpoints = Checkpoints::open(&folder, keep(1)).unwrap();
    checkpoints.save(&mut pipeline, info(1)).unwrap();
    checkpoints.wait().unwrap();
    fs::rename(&folder, &moved).unwrap();
    let mut refuses = |number: u64, part: &str| {
        checkpoints.save(&mut pipeline, info(number)).unwrap();
        let error = checkpoints.wait().unwrap_err();
        assert!(matches!(error, CheckpointError::Gone { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains("checkpoints: ") && message.contains(part), "{message}");
    };
    refuses(2, "was removed or moved");
    assert!(!folder.exists());
    // Now another run's folder has the name.
    save(&folder, keep(1), &mut trained(tiny(), 1, 2), info(1));
    let before = names(&folder);
    refuses(3, "another folder has its name");
    assert_eq!((names(&folder), newest(&folder)), (before, Some(1)));
    assert_eq!(newest(&moved), Some(1));
    // When the folder is back in its place, it can be written again.
    fs::remove_dir_all(&folder).unwrap();
    fs::rename(&moved, &folder).unwrap();
    checkpoints.save(&mut pipeline, info(4)).unwrap();
    checkpoints.wait().unwrap();
    assert_eq!(newest(&folder), Some(4));
}

/// Every checkpoint had the number 0, so each replaced the one before, whatever `keep` said.
#[test]
fn regression_without_a_position_checkpoints_are_named_after_the_steps() {
    let mut run = Run::new();
    for _ in 0..3 {
        save(run.folder.path(), keep(2), &mut run.pipeline, RunInfo::default());
        common::step(&mut run.pipeline);
    }
    let steps = run.pipeline.steps();
    let mut expected = vec!["latest".to_owned()];
    expected.extend([steps - 2, steps - 1].map(folder::name));
    assert_eq!(names(run.path()), expected);
}
