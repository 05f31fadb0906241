//! Lower bounds on the time of a step, whatever its order.
//!
//! For each device, with all of its stages:
//!
//! ```text
//! work | F of a micro-batch on the stages before | all F, and B or I and W | norm | update
//! tail | the same start | all F, and the shorter of B and I | I or B on the stages before, back to
//!        stage 0, which also owes W | norm | update
//! turn | F of a micro-batch down to the last stage and I or B back to this one | what cannot run
//!        before that for want of room | norm | update
//! ```
//!
//! *work* holds because a device cannot begin earlier and has to do all of it. *tail*: the device's
//! last gradient still has to travel to stage 0. *turn*: before its first gradient a device runs
//! nothing but forwards, as many as it has room for.

use super::{Problem, StageTimes};

/// The largest of the bounds.
pub(super) fn of(problem: &Problem) -> u64 {
    let Some(path) = Path::new(problem) else { return 0 };
    let devices = (0..problem.devices()).filter_map(|device| path.device(device));
    devices.max().unwrap_or(0) + problem.update
}

/// The least time of the backward of a micro-batch until its gradient can be passed on.
pub(super) fn gradient(problem: &Problem, times: StageTimes) -> u64 {
    if problem.splits { times.input.min(times.backward) } else { times.backward }
}

/// The least time of the whole backward of a micro-batch.
pub(super) fn backward(problem: &Problem, times: StageTimes) -> u64 {
    let halves = times.input.saturating_add(times.weight);
    if problem.splits { halves.min(times.backward) } else { times.backward }
}

/// The recomputation that a backward cannot avoid.
pub(super) fn again(problem: &Problem, stage: usize, times: StageTimes) -> u64 {
    if problem.keeps_adjacent[stage] { 0 } else { times.again }
}

/// The times of one micro-batch on its way, by stage.
pub(super) struct Path<'a> {
    problem: &'a Problem,
    /// When the first micro-batch can begin on the stage.
    head: Vec<u64>,
    /// The time from the end of the stage's backward until stage 0 has done everything.
    pub(super) tail: Vec<u64>,
    /// Whether the gradient travels back to stage 0.
    to_0: Vec<bool>,
    /// When the first gradient can be at the stage.
    turn: Vec<u64>,
}

impl<'a> Path<'a> {
    fn new(problem: &'a Problem) -> Option<Self> {
        (problem.micro_batches > 0 && !problem.stages.is_empty()).then(|| Self::of(problem))
    }

    pub(super) fn of(problem: &'a Problem) -> Self {
        let stages = problem.stages.len();
        // The first micro-batch is one of the larger, the last one of the smaller.
        let first = |stage: usize| problem.times(stage, 0);
        let least = |stage: usize| problem.times(stage, problem.micro_batches.saturating_sub(1));
        let (mut head, mut tail, mut turn) = (vec![0; stages], vec![0; stages], vec![0; stages]);
        let mut to_0 = vec![true; stages];
        for stage in 1..stages {
            head[stage] =
                head[stage - 1] + first(stage - 1).forward + problem.transit(stage - 1, 0);
            let before = stage - 1;
            to_0[stage] = to_0[before] && problem.waits_for_gradient[before];
            if !problem.waits_for_gradient[before] {
                continue;
            }
            let own = match before {
                0 => backward(problem, least(0)),
                _ => gradient(problem, least(before)),
            };
            tail[stage] = problem.transit(before, 1) + own + tail[before];
        }
        let last = stages - 1;
        turn[last] = head[last] + first(last).forward;
        for stage in (0..last).rev() {
            let own = gradient(problem, first(stage + 1));
            turn[stage] = match problem.waits_for_gradient[stage] {
                true => turn[stage + 1] + own + problem.transit(stage, 1),
                false => head[stage] + first(stage).forward,
            };
        }
        Self { problem, head, tail, to_0, turn }
    }

    /// The bound of one device; `None` if it has no stages.
    fn device(&self, device: usize) -> Option<u64> {
        let problem = self.problem;
        let on = |stage: &usize| problem.placement[*stage] == device;
        let stages: Vec<usize> = (0..problem.stages.len()).filter(on).collect();
        let &first = stages.first()?;
        let sum = |of: &dyn Fn(usize, StageTimes) -> u64| -> u64 {
            let each = |&stage: &usize| {
                let times = (0..problem.micro_batches).map(move |m| problem.times(stage, m));
                times.map(|times| of(stage, times)).sum::<u64>()
            };
            stages.iter().map(each).sum()
        };
        let norm = problem.norm[device];
        let forwards = sum(&|_, times| times.forward);
        let all = sum(&|stage, times| backward(problem, times) + again(problem, stage, times));
        let gradients =
            sum(&|stage, times| gradient(problem, times) + again(problem, stage, times));
        let norm_of_0 = self.norm_of_0(first);
        let own_weights = match first {
            0 => {
                let last = problem.times(0, problem.micro_batches - 1);
                backward(problem, last).saturating_sub(gradient(problem, last))
            }
            _ => 0,
        };
        let work = self.head[first] + forwards + all + norm;
        let tail =
            self.head[first] + forwards + gradients + own_weights + self.tail[first] + norm_of_0;
        let turn = match stages[..] {
            [stage] => self.turn[stage] + self.after_the_turn(stage, forwards + all) + norm,
            _ => 0,
        };
        Some(work.max(tail).max(turn))
    }

    /// The norm of stage 0's device, if the gradient of `stage` travels there.
    pub(super) fn norm_of_0(&self, stage: usize) -> u64 {
        if self.to_0[stage] { self.problem.norm[self.problem.placement[0]] } else { 0 }
    }

    /// The least that the only stage of a device has left when its first gradient arrives.
    fn after_the_turn(&self, stage: usize, work: u64) -> u64 {
        let problem = self.problem;
        let device = problem.placement[stage];
        let (mut held, mut before) = (0_u64, 0);
        for m in 0..problem.micro_batches {
            let times = problem.times(stage, m);
            held = held.saturating_add(times.held);
            if held > problem.room[device] {
                break;
            }
            before += times.forward;
        }
        // A recomputation does not wait for the gradient.
        let early = problem.times(stage, 0).again;
        work.saturating_sub(before + early)
    }
}
