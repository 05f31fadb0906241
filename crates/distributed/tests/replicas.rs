//! Replicas of a pipeline. Every replica applies the same update, whatever the number of processes
//! per replica. It equals the update of one pipeline with the whole mini-batch, except for the
//! order in which gradients are added.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{sync::Arc, time::Duration};

use common::{
    DEADLINE, in_processes,
    model::{Features, Named, Recipe, Run, batch, bits, flat, model},
};
use gpipe::{Pipeline, PipelineBuilder, Schedule, processes::Transport};
use gpipe_distributed::{Cluster, Member, threads::SharedSums};
use tch::{Kind, Tensor};

const STEPS: u64 = 4;

/// Results of training: losses, norms and metrics of every step, and the gradients of the last
/// step.
struct Computed {
    losses: Vec<f64>,
    numbers: Vec<u64>,
    gradients: Named,
    state: Named,
}

fn builder(features: Features, stages: usize, micro_batches: usize) -> PipelineBuilder {
    let run = Run { stages, ..Run::plain() };
    features.build(run.builder(model(features), micro_batches).clip_norm(1.0)).keep_gradients()
}

fn train(pipeline: &mut Pipeline, samples: i64, steps: u64) -> Computed {
    let (mut losses, mut numbers) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let (inputs, targets) = batch(samples, step);
        // The samples that this process is not fed may be invalid: no vocabulary has such a token.
        let fed = pipeline.samples_fed(samples as usize).unwrap();
        for sample in (0..samples).filter(|sample| !fed.contains(&(*sample as usize))) {
            let _ = inputs.get(sample).fill_(i64::MIN);
        }
        let report = pipeline.train_step(inputs, &targets).unwrap();
        losses.push(report.loss);
        numbers.extend([report.loss, report.grad_norm, report.count].map(f64::to_bits));
        numbers.extend(report.metrics.iter().map(|metric| metric.sum.to_bits()));
    }
    let (inputs, targets) = batch(5, 77);
    numbers.push(pipeline.evaluate(&inputs, &targets).unwrap().loss.to_bits());
    let gradients = pipeline.gradients().unwrap();
    Computed { losses, numbers, gradients, state: flat(pipeline) }
}

/// Makes the pipeline one of `replicas` replicas whose gradients are summed in memory.
fn sharing(
    cluster: &Arc<Cluster>,
    replicas: usize,
    sums: &SharedSums,
    builder: PipelineBuilder,
) -> PipelineBuilder {
    let member = Member::sharing(cluster, replicas, sums).unwrap();
    builder.processes(Arc::clone(&member) as Arc<dyn Transport>).replicas(member)
}

/// Makes the pipeline one of `replicas` replicas.
pub fn replicated(
    cluster: &Arc<Cluster>,
    replicas: usize,
    builder: PipelineBuilder,
) -> PipelineBuilder {
    let member = Member::new(cluster, replicas).unwrap();
    builder.processes(Arc::clone(&member) as Arc<dyn Transport>).replicas(member)
}

fn sorted(mut named: Named) -> Named {
    named.sort_by(|(a, _), (b, _)| a.cmp(b));
    named.dedup_by(|(a, _), (b, _)| a == b); // counters, which every process has
    named
}

fn assert_same(a: &Named, b: &Named, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for ((name, a), (other, b)) in a.iter().zip(b) {
        assert!(name == other && bits(a) == bits(b), "{what}: {name}");
    }
}

/// Checks |a - b| <= rounding max(|b|, 1e-3 norm), the tolerance for a different order of sums.
fn assert_close(a: &Named, b: &Named, rounding: f64, norm: f64, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for ((name, a), (other, b)) in a.iter().zip(b) {
        assert_eq!(name, other, "{what}");
        let bound = b.abs().clamp_min(1e-3 * norm) * rounding;
        let apart: Tensor = (a - b).abs() - bound;
        let worst = apart.max().double_value(&[]);
        assert!(worst <= 0.0, "{what}: {name} is {worst:e} too far");
    }
}

fn norm(named: &Named) -> f64 {
    named.iter().map(|(_, t)| t.norm().double_value(&[]).powi(2)).sum::<f64>().sqrt()
}

/// Compares replicas with one and two processes and with several numbers of stages. All replicas
/// and all configurations must agree to the last bit. Then compares them with one pipeline that has
/// the micro-batches of all replicas.
fn compare(features: Features, replicas: usize, samples: i64, rounding: f64) {
    let mut expected: Option<(Vec<u64>, Named, Named)> = None;
    let ways = [
        (1, 1, Schedule::GPipe, false),
        // Without a process of their own: threads that add gradients in memory.
        (0, 1, Schedule::GPipe, false),
        (0, 2, Schedule::ZbV, false),
        (0, 3, Schedule::OneFOneB, true),
        (1, 3, Schedule::GPipe, false),
        (2, 2, Schedule::GPipe, false),
        (1, 3, Schedule::ZbH1, false),
        (2, 2, Schedule::Interleaved(2), false),
        (2, 2, Schedule::ZbV, false),
        (2, 2, Schedule::BreadthFirst(2), false),
        (1, 1, Schedule::GPipe, true),
        (1, 3, Schedule::ZbH1, true),
        (2, 2, Schedule::Interleaved(2), true),
        (2, 2, Schedule::VMin, true),
    ];
    for (processes, stages, schedule, shards) in ways {
        let what = format!(
            "{features:?}: {replicas} replicas of {stages} stages in {processes} processes, \
            {schedule}, optimizer sharded: {shards}"
        );
        let sums = SharedSums::new();
        let in_memory = processes == 0;
        let processes = processes.max(1);
        let found = in_processes(replicas * processes, DEADLINE, |cluster| {
            let built = builder(features, stages, 2).schedule(schedule.clone());
            let built = match in_memory {
                true => sharing(&cluster, replicas, &sums, built),
                false => replicated(&cluster, replicas, built),
            };
            let built = if shards { built.shard_optimizer() } else { built };
            train(&mut built.build().unwrap(), samples, STEPS)
        });
        for replica in found.chunks(processes) {
            assert!(replica.iter().all(|own| own.numbers == replica[0].numbers), "{what}");
            let all = |of: fn(&Computed) -> &Named| {
                let parts = replica.iter().flat_map(of);
                sorted(parts.map(|(name, t)| (name.clone(), t.shallow_clone())).collect())
            };
            let own =
                (replica[0].numbers.clone(), all(|own| &own.gradients), all(|own| &own.state));
            let (numbers, gradients, state) = expected.get_or_insert(clone_all(&own));
            assert_eq!(*numbers, own.0, "{what}");
            assert_same(&own.1, gradients, &what);
            assert_same(&own.2, state, &what);
        }
    }
    // Only the first step is comparable: later ones start from parameters with different rounding.
    let what = format!("{features:?}: {replicas} replicas beside one");
    let mut one = builder(features, 1, 2 * replicas).build().unwrap();
    let first = train(&mut one, samples, 1);
    let found = in_processes(replicas, DEADLINE, |cluster| {
        let built = replicated(&cluster, replicas, builder(features, 1, 2));
        train(&mut built.build().unwrap(), samples, 1)
    });
    // The micro-batches, the masks and the order of the sums are the same, so the losses agree to
    // the last bit.
    assert_eq!(found[0].losses[0].to_bits(), first.losses[0].to_bits(), "{what}");
    let norm = norm(&first.gradients);
    let gradients = sorted(found.into_iter().next().unwrap().gradients);
    assert_close(&gradients, &sorted(first.gradients), rounding, norm, &what);
}

fn clone_all((numbers, gradients, state): &(Vec<u64>, Named, Named)) -> (Vec<u64>, Named, Named) {
    (numbers.clone(), copy(gradients), copy(state))
}

#[test]
fn transparency_of_replicas() {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    compare(features, 2, 8, 1e-5);
    compare(features, 3, 12, 1e-5);
    compare(Features::plain(), 4, 8, 1e-5);
}

/// The thread of one replica fails before its step ends. The others learn why, and do not wait for
/// their deadline.
#[test]
fn fault_a_replica_that_fails_ends_the_others() {
    let sums = SharedSums::new();
    let begun = std::time::Instant::now();
    let errors = in_processes(3, DEADLINE, |cluster| {
        let built = sharing(&cluster, 3, &sums, builder(Features::plain(), 2, 2));
        let mut pipeline = built.build().unwrap();
        let (inputs, targets) = batch(6, 0);
        if cluster.rank() == 1 {
            let _ = inputs.narrow(0, 2, 2).fill_(i64::MIN);
        }
        pipeline.train_step(inputs, &targets).unwrap_err().to_string()
    });
    assert!(begun.elapsed() < DEADLINE, "{errors:?}");
    for error in [&errors[0], &errors[2]] {
        assert!(error.contains("rank 1"), "{error}");
    }
    // What they left does not count when they try again: an exchange that some had begun made the
    // next step wait, or had the gradients of the step that failed.
    let trained = in_processes(3, DEADLINE, |cluster| {
        let built = sharing(&cluster, 3, &sums, builder(Features::plain(), 2, 2));
        let mut pipeline = built.build().unwrap();
        train(&mut pipeline, 6, 1).numbers
    });
    let fresh = SharedSums::new();
    let wanted = in_processes(3, DEADLINE, |cluster| {
        let built = sharing(&cluster, 3, &fresh, builder(Features::plain(), 2, 2));
        train(&mut built.build().unwrap(), 6, 1).numbers
    });
    assert_eq!(trained, wanted);
}

/// The thread of one replica does not train. The others say for whom they waited.
#[test]
fn fault_a_replica_that_does_not_come_is_named() {
    let sums = SharedSums::new();
    let deadline = Duration::from_secs(2);
    let errors = in_processes(2, deadline, |cluster| {
        let built = sharing(&cluster, 2, &sums, builder(Features::plain(), 1, 2));
        let mut pipeline = built.build().unwrap();
        if cluster.rank() == 1 {
            // It lives, and shows life, but makes no step.
            std::thread::park_timeout(6 * deadline);
            return String::new();
        }
        let (inputs, targets) = batch(4, 0);
        pipeline.train_step(inputs, &targets).unwrap_err().to_string()
    });
    assert!(errors[0].contains("replica 1") || errors[0].contains("rank 1"), "{}", errors[0]);
}

#[test]
fn transparency_of_replicas_with_everything() {
    let features = Features { tied: true, skip: true, dropout: 0.2, ..Features::plain() };
    compare(Features { kind: Kind::Double, recipe: Recipe::Everything, ..features }, 2, 8, 1e-10);
    compare(Features { kind: Kind::Double, batch_norm: true, ..features }, 2, 8, 1e-10);
    compare(Features { batch_norm: true, ..features }, 3, 12, 1e-5);
}

/// Every sample counts once, even if the mini-batch does not divide evenly among replicas.
#[test]
fn oracle_ragged_mini_batches_lose_nothing() {
    let features = Features { kind: Kind::Double, ..Features::plain() };
    for samples in [3, 5, 7] {
        let mut one = builder(features, 1, 1).build().unwrap();
        let expected = train(&mut one, samples, 1);
        let found = in_processes(3, DEADLINE, |cluster| {
            let built = replicated(&cluster, 3, builder(features, 1, 2));
            train(&mut built.build().unwrap(), samples, 1)
        });
        let apart = (found[0].losses[0] - expected.losses[0]).abs();
        assert!(apart <= 1e-12, "{samples} samples: {apart:e}"); // sums in another order
        let norm = norm(&expected.gradients);
        for own in found {
            let what = format!("{samples} samples");
            assert_close(
                &sorted(own.gradients),
                &sorted(copy(&expected.gradients)),
                1e-10,
                norm,
                &what,
            );
        }
    }
}

fn copy(named: &Named) -> Named {
    named.iter().map(|(name, t)| (name.clone(), t.shallow_clone())).collect()
}

/// Batch norms' running statistics cover the whole mini-batch.
#[test]
fn oracle_batch_norms_count_all_replicas() {
    let features = Features { kind: Kind::Double, batch_norm: true, ..Features::plain() };
    let mut one = builder(features, 1, 4).build().unwrap();
    let (inputs, targets) = batch(8, 0);
    one.train_step(&inputs, &targets).unwrap();
    let statistics = |pipeline: &mut Pipeline| -> Named {
        let all = pipeline.parameters().unwrap();
        all.into_iter()
            .filter(|(name, _)| name.contains("running") || name.contains("batches"))
            .collect()
    };
    let expected = statistics(&mut one);
    assert!(expected.len() >= 6, "{expected:?}");
    let found = in_processes(2, DEADLINE, |cluster| {
        let mut pipeline = replicated(&cluster, 2, builder(features, 1, 2)).build().unwrap();
        let (inputs, targets) = batch(8, 0);
        pipeline.train_step(&inputs, &targets).unwrap();
        statistics(&mut pipeline)
    });
    for own in found {
        assert_close(&own, &expected, 1e-12, 1.0, "running statistics");
    }
}

#[test]
fn fault_what_cannot_be_shared_out_is_refused() {
    let errors = in_processes(3, DEADLINE, |cluster| {
        let error = Member::new(&cluster, 2).err().unwrap().to_string();
        let mut pipeline =
            replicated(&cluster, 3, builder(Features::plain(), 1, 2)).build().unwrap();
        let (inputs, targets) = batch(2, 0);
        [error, pipeline.train_step(inputs, &targets).unwrap_err().to_string()]
    });
    for [uneven, few] in errors {
        assert!(uneven.contains("3 processes for 2 replicas"), "{uneven}");
        assert!(few.contains("2 samples for 3 replicas"), "{few}");
    }
}

/// On a non-finite gradient, all replicas skip the update together, and all continue.
#[test]
fn fault_a_nan_in_one_replica_is_one_in_all() {
    assert_eq!(after_overflows(false), after_overflows(true), "sharded, or not");
}

/// Which steps are skipped, and the bits of the state at the end.
fn after_overflows(shards: bool) -> (Vec<bool>, Vec<u64>) {
    let features = Features { kind: Kind::Half, ..Features::plain() };
    let mut found = in_processes(2, DEADLINE, |cluster| {
        let built =
            replicated(&cluster, 2, builder(features, 1, 2).learning_rate(Default::default()));
        let built = if shards { built.shard_optimizer() } else { built };
        let mut pipeline = built.build().unwrap();
        let mut skipped = Vec::new();
        // The initial loss scale overflows in float16.
        for step in 0..12 {
            let (inputs, targets) = batch(8, step);
            skipped.push(pipeline.train_step(inputs, &targets).unwrap().skipped);
        }
        (skipped, flat(&mut pipeline).iter().flat_map(|(_, t)| bits(t)).collect::<Vec<_>>())
    });
    assert!(found[0].0.contains(&false), "{:?}", found[0].0);
    assert!(found[0] == found[1]);
    found.swap_remove(0)
}

#[test]
fn fault_a_replica_that_leaves_ends_the_others() {
    for (replicas, processes, leaves) in [(2, 2, 3), (3, 1, 1)] {
        assert_all_name_who_leaves(replicas, processes, leaves, 2);
    }
}

/// The stages of a process lose a replica at once. Each probed the others, and one that found a
/// probe in use took the process probed for the lost one. Many stages make that likely.
#[test]
fn regression_stages_that_lose_a_replica_at_once_name_it() {
    for _ in 0..4 {
        assert_all_name_who_leaves(3, 1, 1, 6);
    }
}

/// Asserts that the process that leaves during training is named by all others.
fn assert_all_name_who_leaves(replicas: usize, processes: usize, leaves: usize, stages: usize) {
    let deadline = Duration::from_secs(5);
    let errors = in_processes(replicas * processes, deadline, |cluster| {
        let rank = cluster.rank();
        let built = replicated(&cluster, replicas, builder(Features::plain(), stages, 2));
        let mut pipeline = built.build().unwrap();
        drop(cluster);
        for step in 0.. {
            if rank == leaves && step == 2 {
                return String::new();
            }
            let (inputs, targets) = batch(9, step);
            if let Err(error) = pipeline.train_step(inputs, &targets) {
                return error.to_string();
            }
        }
        String::new()
    });
    for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank != leaves) {
        let named = error.contains(&format!("rank {leaves}"));
        assert!(named, "{replicas} replicas, rank {rank}: {error}");
    }
}
