//! Optimizer state that is sharded over replicas (ZeRO stage 1): the same bits as without sharding,
//! less memory, the same checkpoints, and failures that all replicas know.
//!
//! `replicas.rs` also runs its comparisons with sharding.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::{common, replicas::replicated};

use std::{
    cell::Cell,
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{
    DEADLINE, in_processes,
    model::{
        Features, LENGTH, Named, Recipe, Run, assert_same_bits, batch, flat, is_about_cpus,
        matrix::{Subject, one},
        model, restore,
    },
};
use gpipe::{
    Adam, Group, LayerError, Moments, Muon, Optimizer, ParameterInfo, Pipeline, PipelineBuilder,
    Remat, Schedule, StateSpec, TensorSpec, Update,
    estimate::Rate,
    processes::{Replicas, Transport},
};
use gpipe_checkpoint::{Checkpoints, RunInfo, Settings, folder, manifest::TrainPosition};
use gpipe_core::{
    cost::ModelCosts,
    plan::{Plan, PlanDevice, predict},
};
use gpipe_distributed::{Cluster, Member};
use tch::Kind;

const FEATURES: Features = Features {
    tied: true,
    skip: true,
    dropout: 0.2,
    batch_norm: false,
    kind: Kind::Float,
    recipe: Recipe::Adam,
};

fn adam() -> Adam {
    Adam { lr: 1e-2, weight_decay: 0.1, decoupled: true, ..Adam::default() }
}

/// Trains in the shared matrix as replicas. The run that all others must equal is not sharded, the
/// others are.
fn matrix(
    replicas: usize,
    nth: usize,
    what: &str,
    with: &(dyn Fn(PipelineBuilder) -> PipelineBuilder + Sync),
) {
    in_processes(replicas, DEADLINE, |cluster| {
        let is_first = Cell::new(true);
        let member = Member::new(&cluster, replicas).unwrap();
        let build = |builder: PipelineBuilder| {
            let builder = with(builder).processes(Arc::clone(&member) as Arc<dyn Transport>);
            let builder = builder.replicas(Arc::clone(&member) as Arc<dyn Replicas>);
            if is_first.replace(false) { builder } else { builder.shard_optimizer() }
        };
        let subject = Subject {
            model: &|| model(FEATURES),
            inputs: vec![TensorSpec::new([4, LENGTH], Kind::Int64)],
            batch: &one(batch),
            build: &build,
            may_skip: false,
            what: format!("{what}, {replicas} replicas"),
        };
        subject.every(nth, &[(vec![7, 6], 2)]);
        Replicas::gather(&*member, Vec::new()).unwrap(); // none leaves while another one runs
    });
}

#[test]
fn transparency_of_sharding_in_the_shared_matrix() {
    let average_and_clip = |builder: PipelineBuilder| builder.average(0.9).clip_norm(1.0);
    matrix(2, 9, "adamw", &|builder| average_and_clip(builder.optimizer(adam())));
    matrix(2, 19, "rounded moments, one group frozen", &|builder| {
        let frozen = Group::matching(["0.mlp.hidden.weight"]).frozen();
        let rounded = Adam { moments: Moments::BFloat16, ..adam() };
        average_and_clip(builder.optimizer(rounded).group(frozen))
    });
    matrix(3, 37, "muon", &|builder| {
        let others = vec!["embedding.*".into(), "head.*".into()];
        builder.optimizer(Muon { others, ..Muon::default() })
    });
    matrix(4, 67, "adam", &|builder| builder);
}

fn builder(stages: usize) -> PipelineBuilder {
    let run = Run { stages, ..Run::plain() };
    let rounded = Adam { moments: Moments::BFloat16, ..adam() };
    run.builder(model(FEATURES), 2).optimizer(rounded).average(0.9)
}

/// One of `replicas` replicas of `stages` stages.
fn built(cluster: &Arc<Cluster>, replicas: usize, stages: usize, shards: bool) -> Pipeline {
    let builder = replicated(cluster, replicas, builder(stages));
    if shards { builder.shard_optimizer() } else { builder }.build().unwrap()
}

fn step(pipeline: &mut Pipeline, number: u64) -> u64 {
    let (inputs, targets) = batch(8, number);
    pipeline.train_step(inputs, &targets).unwrap().loss.to_bits()
}

/// Every file of a checkpoint except the manifest, which contains the number of stages.
fn files(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap());
    let file = |entry: std::fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    entries.map(file).filter(|(name, _)| name != "manifest.json").collect()
}

/// Trains two steps in `replicas` replicas and saves, as the command does. Returns the folder.
fn saved(replicas: usize, stages: usize, processes: usize, shards: bool) -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    in_processes(replicas * processes, DEADLINE, |cluster| {
        let member = Member::new(&cluster, replicas).unwrap();
        let transport: Arc<dyn Transport> = Arc::clone(&member) as _;
        let is_first = cluster.rank() < processes;
        let builder = builder(stages).processes(Arc::clone(&transport)).replicas(member);
        let builder = if shards { builder.shard_optimizer() } else { builder };
        let mut pipeline = builder.build().unwrap();
        for number in 0..2 {
            step(&mut pipeline, number);
        }
        if !is_first {
            return pipeline.share_state().unwrap();
        }
        let settings = Settings::default();
        let mut checkpoints = Checkpoints::open_among(home.path(), settings, &transport).unwrap();
        let progress = TrainPosition { batches: 2, ..TrainPosition::default() };
        let info = RunInfo { progress, ..RunInfo::default() };
        checkpoints.save(&mut pipeline, info).unwrap();
        checkpoints.wait().unwrap();
    });
    home
}

#[test]
fn transparency_of_checkpoints_of_shards() {
    let newest = |home: &tempfile::TempDir| folder::find(home.path()).unwrap().checkpoint;
    let plain = saved(2, 2, 1, false);
    let expected = files(newest(&plain).folder());
    assert!(expected.len() > 5, "{:?}", expected.keys());
    for (stages, processes) in [(2, 1), (3, 2)] {
        let home = saved(2, stages, processes, true);
        let found = files(newest(&home).folder());
        assert!(found == expected, "{stages} stages in {processes} processes");
    }
    // It is loaded in any number of replicas, sharded or not.
    let sharded = saved(2, 1, 1, true);
    let resumed = |replicas: usize, stages: usize, shards: bool| -> (u64, Named) {
        let found = in_processes(replicas, DEADLINE, |cluster| {
            let mut pipeline = built(&cluster, replicas, stages, shards);
            newest(&sharded).restore(&mut pipeline).unwrap();
            let loss = step(&mut pipeline, 2);
            step(&mut pipeline, 3);
            (loss, flat(&mut pipeline))
        });
        found.into_iter().next().unwrap()
    };
    for replicas in [2, 3] {
        let expected = resumed(replicas, 1, false);
        for (stages, shards) in [(1, true), (3, true), (2, false)] {
            let found = resumed(replicas, stages, shards);
            assert_eq!(found.0, expected.0);
            assert_same_bits(&found.1, &expected.1, &format!("{replicas} replicas, {stages}"));
        }
    }
    let mut alone = builder(2).build().unwrap();
    newest(&sharded).restore(&mut alone).unwrap();
    step(&mut alone, 2);
}

/// Freezing at run time changes who is trained, and must not move state.
#[test]
fn transparency_of_sharding_when_parameters_are_frozen_and_thawed() {
    let run = |shards: bool| {
        let found = in_processes(2, DEADLINE, |cluster| {
            let mut pipeline = built(&cluster, 2, 2, shards);
            step(&mut pipeline, 0);
            pipeline.freeze(["*.mlp.*", "embedding.*"]).unwrap();
            step(&mut pipeline, 1);
            pipeline.unfreeze(["*"]).unwrap();
            step(&mut pipeline, 2);
            let state = pipeline.state().unwrap();
            restore(&mut pipeline, state);
            step(&mut pipeline, 3);
            flat(&mut pipeline)
        });
        found.into_iter().next().unwrap()
    };
    assert_same_bits(&run(true), &run(false), "frozen and thawed");
}

/// What each replica holds after a step: the largest is what is predicted, to the byte.
#[test]
fn oracle_each_replica_holds_its_shard() {
    let why = "the statistics of a GPU cover the stages of all replicas";
    if is_about_cpus("oracle_each_replica_holds_its_shard", why) {
        return;
    }
    for (replicas, stages) in [(2, 1), (3, 1), (2, 3)] {
        let held = |shards: bool| -> Vec<u64> {
            let lives = in_processes(replicas, DEADLINE, |cluster| {
                let features = Features { tied: false, ..FEATURES };
                let run = Run { stages, ..Run::plain() };
                let builder = replicated(&cluster, replicas, run.builder(model(features), 2));
                let builder = if shards { builder.shard_optimizer() } else { builder };
                let mut pipeline = builder.optimizer(adam()).average(0.9).build().unwrap();
                // The least after several steps: a thread of Gloo may hold a bucket a little longer
                // than its sum takes.
                let mut least = vec![u64::MAX; stages];
                for number in 0..8 {
                    let (inputs, targets) = batch(12, number);
                    let report = pipeline.train_step(inputs, &targets).unwrap();
                    for (least, device) in least.iter_mut().zip(report.devices) {
                        *least = device.live.0.min(*least);
                    }
                }
                least
            });
            (0..stages).map(|k| lives.iter().map(|live| live[k]).max().unwrap()).collect()
        };
        let features = Features { tied: false, ..FEATURES };
        let run = Run { stages, ..Run::plain() };
        let mut builder = run.builder(model(features), 2).optimizer(adam()).average(0.9);
        let costs = builder.estimate(&[2, 3], &Rate::default()).unwrap();
        let predicted = |shards: usize| -> Vec<u64> {
            let costs = ModelCosts { replicated: true, optimizer_shards: shards, ..costs.clone() };
            let balance = gpipe_core::partition::uniform(model(features).len(), stages).unwrap();
            let (schedule, remat) = (Schedule::GPipe, Remat::Never.into());
            let plan = Plan { balance, micro_batches: 2, schedule, remat };
            let devices = vec![PlanDevice::default(); stages];
            let found = predict(&costs, &devices, 12 / replicas, &plan).unwrap();
            found.stages.iter().map(|stage| stage.bytes.resident.0).collect()
        };
        let (whole, sharded) = (held(false), held(true));
        let (planned_whole, planned) = (predicted(1), predicted(replicas));
        for k in 0..stages {
            let what = format!("{replicas} replicas, stage {k} of {stages}");
            assert!(sharded[k] < whole[k], "{what}");
            assert_eq!(whole[k] - sharded[k], planned_whole[k] - planned[k], "{what}");
        }
    }
}

/// SGD with a momentum, which fails in the replica that has it set.
struct Fails(Mutex<bool>);

impl std::fmt::Debug for Fails {
    /// The same in all replicas.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fails")
    }
}

impl Optimizer for Fails {
    fn name(&self) -> &'static str {
        "fails"
    }

    fn state(&self, parameter: &ParameterInfo) -> Vec<StateSpec> {
        vec![StateSpec::zeros("momentum", parameter.shape)]
    }

    fn temporaries(&self) -> usize {
        0
    }

    fn lr(&self) -> f64 {
        0.1
    }

    fn apply(&self, update: &Update) -> Result<(), LayerError> {
        match *self.0.lock().unwrap() && update.step == 2 {
            true => Err(LayerError::Value("it fails in the middle of an update".into())),
            false => Ok(()),
        }
    }
}

/// A replica that fails between its update and the exchange leaves no other with a mixture: all
/// know, and none trains on.
#[test]
fn fault_a_replica_that_fails_in_its_update_stops_all() {
    for replicas in [2, 3] {
        let found = in_processes(replicas, Duration::from_secs(10), |cluster| {
            let fails = Fails(Mutex::new(cluster.rank() == 1));
            let builder = replicated(&cluster, replicas, builder(1).optimizer(fails));
            let mut pipeline = builder.shard_optimizer().build().unwrap();
            let error = (0..4).find_map(|number| {
                let (inputs, targets) = batch(9, number);
                let failed = pipeline.train_step(inputs, &targets).err()?;
                Some((number, failed.to_string()))
            });
            let (inputs, targets) = batch(9, 5);
            let later = pipeline.train_step(inputs, &targets).err().map(|error| error.to_string());
            (error, later)
        });
        for (rank, (error, later)) in found.into_iter().enumerate() {
            let (number, error) = error.unwrap_or_else(|| panic!("rank {rank} trained on"));
            assert_eq!(number, 1, "rank {rank}: {error}");
            let names = error.contains("rank 1") || (rank == 1 && error.contains("in the middle"));
            assert!(names, "rank {rank}: {error}");
            assert!(later.is_some(), "rank {rank}");
        }
    }
}
