//! The shared matrix: trains a model in every way that `Run::all` lists, and also stops each run
//! after two steps and resumes it in another way. The results must equal those of one stage, to the
//! bit.

use gpipe::{CrossEntropy, Pipeline, PipelineBuilder, Sequence, TensorSpec};
use tch::{Kind, Tensor};

use super::{Named, Run, assert_same_bits, flat, restore};

/// The model to train.
pub struct Subject<'a> {
    pub model: &'a dyn Fn() -> Sequence,
    /// Specs of its inputs, for one micro-batch.
    pub inputs: Vec<TensorSpec>,
    /// Inputs and targets, from a number of samples and a seed.
    pub batch: &'a dyn Fn(i64, u64) -> (Vec<Tensor>, Tensor),
    /// Further settings of the builder.
    pub build: &'a dyn Fn(PipelineBuilder) -> PipelineBuilder,
    /// Whether a step of few samples may overflow in the widened matrix.
    pub may_skip: bool,
    pub what: String,
}

/// Results of five steps: losses, norms, rates and metrics; the gradients of every step; and
/// parameters, averages and optimizer state at the end.
#[derive(Default)]
struct Computed {
    applied: usize,
    numbers: Vec<u64>,
    gradients: Named,
    state: Named,
}

impl Computed {
    fn shallow_clone(&self) -> Self {
        let named = |all: &Named| {
            all.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
        };
        Self {
            applied: self.applied,
            numbers: self.numbers.clone(),
            gradients: named(&self.gradients),
            state: named(&self.state),
        }
    }
}

/// Steps before the state is taken, and steps in all.
const TAKEN_AFTER: usize = 2;
const STEPS: usize = 5;

impl Subject<'_> {
    fn pipeline(&self, run: &Run, micro_batches: usize) -> Pipeline {
        let builder = run.builder_of((self.model)(), self.inputs.clone(), micro_batches);
        (self.build)(builder.loss(CrossEntropy::default())).build().unwrap()
    }

    /// Trains for all steps.
    fn train(&self, run: &Run, samples: &[i64], micro_batches: usize) -> Computed {
        let mut pipeline = self.pipeline(run, micro_batches);
        let mut computed = Computed::default();
        self.steps(&mut pipeline, 0..STEPS, samples, &mut computed);
        computed
    }

    /// Moves the state after two steps to a pipeline that is run like `then`, which makes the other
    /// steps. If it also `stays`, the first pipeline makes them, too.
    fn train_and_move(
        &self,
        run: &Run,
        then: &Run,
        (samples, micro_batches): (&[i64], usize),
        stays: bool,
    ) -> (Computed, Option<Computed>) {
        let mut pipeline = self.pipeline(run, micro_batches);
        let mut stayed = Computed::default();
        self.steps(&mut pipeline, 0..TAKEN_AFTER, samples, &mut stayed);
        let (state, mut moved) = (pipeline.state().unwrap(), stayed.shallow_clone());
        if stays {
            self.steps(&mut pipeline, TAKEN_AFTER..STEPS, samples, &mut stayed);
        }
        drop(pipeline);
        let mut pipeline = self.pipeline(then, micro_batches);
        restore(&mut pipeline, state);
        self.steps(&mut pipeline, TAKEN_AFTER..STEPS, samples, &mut moved);
        (moved, stays.then_some(stayed))
    }

    /// Makes `steps`. After the last one, adds the state.
    fn steps(
        &self,
        pipeline: &mut Pipeline,
        steps: std::ops::Range<usize>,
        samples: &[i64],
        computed: &mut Computed,
    ) {
        let is_last = steps.end == STEPS;
        for step in steps {
            let (inputs, targets) = (self.batch)(samples[step % samples.len()], step as u64);
            let report = pipeline.train_step(inputs, &targets).unwrap();
            let numbers = &mut computed.numbers;
            numbers.extend([
                report.loss.to_bits(),
                report.grad_norm.to_bits(),
                report.lr.to_bits(),
                report.loss_scale.to_bits(),
                report.step,
            ]);
            numbers.extend(report.metrics.iter().map(|metric| metric.sum.to_bits()));
            // In float16 a step of few samples may overflow. Then the skip and the next loss scale
            // must be equal, too.
            numbers.push(u64::from(report.skipped));
            computed.applied += usize::from(!report.skipped);
            let named = pipeline.gradients().unwrap().into_iter();
            computed.gradients.extend(named.map(|(name, t)| (format!("step {step} {name}"), t)));
        }
        if is_last {
            computed.state = flat(pipeline);
        }
    }

    /// Compares all ways to run, for each case (samples of the steps in turn, micro-batches).
    /// GPIPE_SOAK adds many cases.
    pub fn matrix(&self, cases: &[(Vec<i64>, usize)]) {
        self.every(1, cases);
    }

    /// As [`Subject::matrix`], but only every `nth` way to run, and all of them with GPIPE_SOAK:
    /// for a network whose layers another one has, too.
    pub fn every(&self, nth: usize, cases: &[(Vec<i64>, usize)]) {
        let mut cases = cases.to_vec();
        let widened = std::env::var_os("GPIPE_SOAK").is_some();
        if widened {
            cases.extend((1..=9).flat_map(|n| (1..=9).map(move |m| (vec![n], m))));
        }
        let layers = (self.model)().len();
        let last = cases.len() - 1;
        for (number, (samples, micro_batches)) in cases.into_iter().enumerate() {
            let samples = &samples[..];
            // Each way makes the first steps before a move, and the others after one. In the last
            // case it also makes all of them.
            let stays = widened || number == last;
            let expected = self.train(&Run::plain(), samples, micro_batches);
            let trained = expected.state.iter().filter(|(name, _)| name.ends_with(" updates"));
            let all = STEPS * trained.count();
            assert!(all > 0, "nothing is trained");
            assert_eq!(expected.gradients.len(), all, "a gradient of each parameter in each step");
            // In float16, one step of the few samples that only the widened matrix has may
            // overflow. No other step is skipped.
            let skipped = STEPS - expected.applied;
            assert!(skipped <= usize::from(widened && self.may_skip), "{skipped} skipped");
            let runs = Run::all(layers);
            let nth = if widened { 1 } else { nth };
            for (index, run) in runs.iter().enumerate().step_by(nth) {
                // Every way to run occurs both before and after a resume, because 7 is coprime to
                // the number of ways.
                let then = &runs[(7 * index + 3) % runs.len()];
                let case = (samples, micro_batches);
                let (moved, stayed) = self.train_and_move(run, then, case, stays);
                let all = [(Some(moved), Some(then)), (stayed, None)];
                for (found, then) in all.into_iter().filter_map(|(own, then)| Some((own?, then))) {
                    let what = format!(
                        "{run:?}, then {then:?}: {} N={samples:?} M={micro_batches}",
                        self.what
                    );
                    assert_eq!(found.numbers, expected.numbers, "losses and norms: {what}");
                    assert_same_bits(&found.gradients, &expected.gradients, &what);
                    assert_same_bits(&found.state, &expected.state, &what);
                }
            }
        }
    }
}

/// The batches of a model with one input.
pub fn one(
    batch: impl Fn(i64, u64) -> (Tensor, Tensor),
) -> impl Fn(i64, u64) -> (Vec<Tensor>, Tensor) {
    move |samples, seed| {
        let (input, targets) = batch(samples, seed);
        (vec![input], targets)
    }
}

/// Uniform images [samples, channels, size, size]: a fixed function of `seed`.
pub fn images(samples: i64, channels: i64, size: i64, seed: u64) -> Tensor {
    super::uniform(&[samples, channels, size, size], seed, Kind::Float)
}
