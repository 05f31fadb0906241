//! Checkpoints that several processes write together: the files equal those of a single process,
//! and every process names a process that cannot write its part.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use common::{
    DEADLINE, in_processes,
    model::{Features, Run, batch, model},
};
use gpipe::{Pipeline, processes::Transport};
use gpipe_checkpoint::{
    Checkpoints, RunInfo, Settings,
    files::{Files, Operation},
    folder,
    manifest::TrainPosition,
    weights,
};

fn builder(stages: usize) -> gpipe::PipelineBuilder {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    features.build(Run { stages, ..Run::plain() }.builder(model(features), 3).average(0.9))
}

fn step(pipeline: &mut Pipeline, number: u64) {
    let (inputs, targets) = batch(6, number);
    pipeline.train_step(inputs, &targets).unwrap();
}

fn at(batches: u64) -> RunInfo {
    let progress = TrainPosition { batches, ..TrainPosition::default() };
    let files = vec![("note.txt".to_owned(), b"of the run".to_vec())];
    RunInfo { progress, files, config: "seed = 1".into(), ..RunInfo::default() }
}

/// Every file of a checkpoint except the manifest, which contains the number of stages.
fn files(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap());
    let file = |entry: std::fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    entries.map(file).filter(|(name, _)| name != "manifest.json").collect()
}

#[test]
fn transparency_of_checkpoints_that_processes_write_together() {
    let alone = tempfile::tempdir().unwrap();
    let mut pipeline = builder(1).build().unwrap();
    let mut checkpoints = Checkpoints::open(alone.path(), Settings::default()).unwrap();
    for number in 0..4 {
        step(&mut pipeline, number);
        checkpoints.save(&mut pipeline, at(number + 1)).unwrap();
    }
    checkpoints.wait().unwrap();
    let own = pipeline.parameters().unwrap();
    weights::save(&alone.path().join("weights"), &own).unwrap();
    for (processes, stages) in [(2, 2), (3, 4)] {
        let shared = tempfile::tempdir().unwrap();
        let saved = in_processes(processes, DEADLINE, |cluster| {
            let transport: Arc<dyn Transport> = cluster.clone();
            let mut pipeline = builder(stages).processes(cluster).build().unwrap();
            let mut checkpoints =
                Checkpoints::open_among(shared.path(), Settings::default(), &transport).unwrap();
            for number in 0..4 {
                // The previous checkpoint is written during this step.
                step(&mut pipeline, number);
                checkpoints.save(&mut pipeline, at(number + 1)).unwrap();
            }
            let own = pipeline.parameters().unwrap();
            weights::save_among(
                &shared.path().join("weights"),
                &own,
                &Default::default(),
                &transport,
            )
            .unwrap();
            let saved = checkpoints.wait().unwrap().unwrap();
            (saved.folder, saved.batches, saved.bytes, saved.untidy)
        });
        assert!(saved.iter().all(|other| *other == saved[0]), "{saved:?}");
        let steps = |path: &Path| -> Vec<u64> {
            folder::list(path).unwrap().into_iter().map(|(number, _)| number).collect()
        };
        assert_eq!(steps(shared.path()), [4, 3]);
        for number in [3, 4] {
            let [a, b] = [alone.path(), shared.path()].map(|path| path.join(folder::name(number)));
            assert!(files(&a) == files(&b), "{processes} processes: step {number}");
        }
        let [a, b] =
            [alone.path(), shared.path()].map(|path| std::fs::read(path.join("weights")).unwrap());
        assert!(a == b, "{processes} processes: weights");
        assert_eq!(std::fs::read_dir(shared.path()).unwrap().count(), 4, "nothing else is left");
        // One process can resume from it, and so can several.
        let newest = folder::newest(shared.path()).unwrap().found.unwrap();
        let mut resumed = builder(2).build().unwrap();
        newest.restore(&mut resumed).unwrap();
        let losses = in_processes(2, DEADLINE, |cluster| {
            let mut pipeline = builder(3).processes(cluster).build().unwrap();
            newest.restore(&mut pipeline).unwrap();
            let (inputs, targets) = batch(6, 9);
            pipeline.train_step(inputs, &targets).unwrap().loss.to_bits()
        });
        let (inputs, targets) = batch(6, 9);
        let expected = resumed.train_step(inputs, &targets).unwrap().loss.to_bits();
        assert_eq!(losses, [expected; 2]);
    }
}

/// The disk of one host is full: nothing is committed, every process names that host's rank, and
/// training continues.
#[test]
fn fault_a_process_that_cannot_write_its_part_is_named_by_all() {
    let shared = tempfile::tempdir().unwrap();
    let outcomes = in_processes(3, DEADLINE, |cluster| {
        let rank = cluster.rank();
        let transport: Arc<dyn Transport> = cluster.clone();
        let is_full = Arc::new(AtomicBool::new(false));
        let full = Arc::clone(&is_full);
        let hook = move |operation: Operation, _: &Path| match operation {
            Operation::Write if full.load(Ordering::SeqCst) => {
                Err(io::ErrorKind::StorageFull.into())
            }
            _ => Ok(()),
        };
        let settings = Settings { files: Files::with_hook(Arc::new(hook)), ..Settings::default() };
        let mut pipeline = builder(3).processes(cluster).build().unwrap();
        let mut checkpoints = Checkpoints::open_among(shared.path(), settings, &transport).unwrap();
        let mut outcomes = Vec::new();
        for number in 1..=3 {
            step(&mut pipeline, number);
            is_full.store(rank == 1 && number == 2, Ordering::SeqCst);
            checkpoints.save(&mut pipeline, at(number)).unwrap();
            outcomes.push(checkpoints.wait().map(|saved| saved.unwrap().batches));
        }
        outcomes.into_iter().map(|own| own.map_err(|error| error.to_string())).collect::<Vec<_>>()
    });
    for (rank, outcomes) in outcomes.iter().enumerate() {
        assert_eq!((&outcomes[0], &outcomes[2]), (&Ok(1), &Ok(3)), "rank {rank}");
        let error = outcomes[1].as_ref().unwrap_err();
        assert!(error.contains("make room"), "{error}");
        assert_eq!(error.starts_with("rank 1: "), rank != 1, "{error}");
    }
    let steps: Vec<u64> =
        folder::list(shared.path()).unwrap().into_iter().map(|(number, _)| number).collect();
    assert_eq!(steps, [3, 1]);
    let left = std::fs::read_dir(shared.path()).unwrap().count();
    assert_eq!(left, 3, "two checkpoints and a link");
}

/// A full disk made a checkpoint fail, and one of two processes continued before the other had
/// removed the partial files. The run's weights, written next, then found no space either.
#[test]
fn regression_what_is_half_written_is_gone_before_any_process_goes_on() {
    let shared = tempfile::tempdir().unwrap();
    let (tell, told) = mpsc::channel();
    let told = Mutex::new(told);
    let left = in_processes(2, DEADLINE, |cluster| {
        let rank = cluster.rank();
        let transport: Arc<dyn Transport> = cluster.clone();
        // Before it removes anything, rank 0 gives rank 1 time to continue too early.
        let may_go_on = Arc::new(Mutex::new(None));
        if rank == 0 {
            let (went_on, wait) = mpsc::channel::<()>();
            tell.send(went_on).unwrap();
            *may_go_on.lock().unwrap() = Some(wait);
        }
        let hook = move |operation: Operation, _: &Path| match operation {
            Operation::Write => Err(io::ErrorKind::StorageFull.into()),
            Operation::Remove => {
                if let Some(went_on) = &*may_go_on.lock().unwrap() {
                    let _ = went_on.recv_timeout(Duration::from_millis(500));
                }
                Ok(())
            }
            _ => Ok(()),
        };
        let settings = Settings { files: Files::with_hook(Arc::new(hook)), ..Settings::default() };
        let mut pipeline = builder(2).processes(cluster).build().unwrap();
        let mut checkpoints = Checkpoints::open_among(shared.path(), settings, &transport).unwrap();
        checkpoints.save(&mut pipeline, at(1)).unwrap();
        checkpoints.wait().unwrap_err();
        let left = std::fs::read_dir(shared.path()).unwrap().count();
        if rank == 1 {
            let _ = told.lock().unwrap().recv().unwrap().send(());
        }
        left
    });
    assert_eq!(left, [0, 0]);
}
