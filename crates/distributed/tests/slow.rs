//! A timeout counts the silence of a process. Slow work, however long it takes, is no silence.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::{common, replicas::replicated};

use std::{sync::Arc, time::Duration};

use common::{
    in_processes,
    model::{Features, Run, batch, model},
};
use gpipe::{
    Forward, Infer, Layer, LayerError, PipelineBuilder, Sequence, TensorSpec, processes::Transport,
};
use gpipe_distributed::{Member, threads::SharedSums};
use tch::Tensor;

const TIMEOUT: Duration = Duration::from_secs(2);
/// Half of the timeout, so that a machine with other work does not take one for silence.
const LONG: Duration = Duration::from_secs(1);
/// Of a pipeline. All of them take six timeouts.
const MICRO_BATCHES: usize = 12;

/// Takes its time, in each forward and in each recomputation.
#[derive(Clone, Copy)]
struct Slow(Duration);

impl Layer for Slow {
    fn kind(&self) -> &'static str {
        "slow"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        std::thread::park_timeout(self.0);
        Ok(vec![inputs[0].f_mul_scalar(1.0)?])
    }
}

fn builder(model: Sequence, stages: usize) -> PipelineBuilder {
    let run = Run { stages, ..Run::plain() };
    run.builder(model, MICRO_BATCHES).timeout(TIMEOUT)
}

fn slow(time: Duration) -> Sequence {
    model(Features::plain()).push("slow", Slow(time))
}

/// The loss of a step of so many replicas.
fn step(builder: PipelineBuilder, replicas: usize) -> u64 {
    let (inputs, targets) = batch((MICRO_BATCHES * replicas) as i64, 0);
    builder.build().unwrap().train_step(inputs, &targets).unwrap().loss.to_bits()
}

/// A link that nothing came over for four timeouts was taken for lost, such as that of the decision
/// about the update, which comes when all else is done.
#[test]
fn regression_a_step_may_take_many_timeouts() {
    let found =
        in_processes(2, TIMEOUT, |cluster| step(builder(slow(LONG), 2).processes(cluster), 1));
    let wanted = step(builder(slow(Duration::ZERO), 2), 1);
    assert_eq!(found, [wanted; 2]);
}

/// A replica that waited for a slow one for longer than the timeout failed: as if it were stuck
/// itself where the gradients are summed in memory, and as if the other were lost elsewhere.
#[test]
fn regression_a_replica_may_be_much_slower_than_another() {
    let sums = SharedSums::new();
    let time = |rank: usize| if rank == 1 { LONG } else { Duration::ZERO };
    let in_memory = in_processes(2, TIMEOUT, |cluster| {
        let member = Member::sharing(&cluster, 2, &sums).unwrap();
        let own = builder(slow(time(cluster.rank())), 1);
        step(own.processes(Arc::clone(&member) as Arc<dyn Transport>).replicas(member), 2)
    });
    let over_links = in_processes(2, TIMEOUT, |cluster| {
        step(replicated(&cluster, 2, builder(slow(time(cluster.rank())), 1)), 2)
    });
    assert_eq!(in_memory, over_links);
    assert_eq!(in_memory[0], in_memory[1]);
}
