//! Measures a profile by training a few steps of the real pipeline.
//!
//! Each micro-batch size is trained under each schedule with all stages at work: once with all
//! forwards discarding their activations, and once with all keeping them. The first schedule is
//! also run with selective re-materialization. `observed` evaluates one training.

use std::collections::BTreeMap;

use gpipe_bridge::memory::IS_COUNTED;
use gpipe_core::{
    Bytes,
    cost::{LayerCost, LayerState, ModelCosts, Spread, TieCost},
    remat::Remat,
    schedule::Schedule,
};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{FORMAT, Profile, links::Messages, observed::Observed};
use crate::{
    arguments::Tensors,
    error::{Error, Result},
    estimate::Rate,
    pipeline::PipelineBuilder,
};

/// Steps are measured again if their interquartile range exceeds this share of the median: a plan
/// could not distinguish two choices that differ by less.
const WIDE: f64 = 0.25;
/// Most times that one measurement is repeated.
const AGAIN_MAX: usize = 3;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Profiling<'a> {
    /// Numbers of micro-batches M to measure.
    pub micro_batches: &'a [usize],
    /// Schedules to measure each size under. The first also stands for all schedules that are not
    /// listed. If empty, the builder's schedule is used.
    pub schedules: &'a [Schedule],
    /// Measured steps of each training, after the warm-up.
    pub steps: usize,
    /// How many passes to make over all sizes and schedules, each with `steps` steps; 0 counts as
    /// 1.
    ///
    /// On a machine with other load, use several passes: only then do the costs of all schedules
    /// come from the same moments.
    pub passes: usize,
    /// Mini-batches, used in turn: inputs and targets, all with the same number of samples.
    pub batches: &'a [(Tensors, Tensors)],
    /// The machine, in words.
    pub machine: &'a str,
    /// Parameters, by full name, that every training starts with. Others keep their initial values.
    pub values: &'a [(String, Tensor)],
}

/// A measurement to be repeated because its steps vary too much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Again {
    /// Index of the schedule in [`Profiling::schedules`].
    pub schedule: usize,
    /// Samples per micro-batch.
    pub samples: usize,
    /// Interquartile range of the steps, in percent of the median.
    pub percent: u64,
}

/// What a profile measures next, and how far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measurement<'a> {
    /// The measurement, in words.
    pub what: &'a str,
    /// How many trainings have ended.
    pub done: usize,
    /// How many trainings there are, as far as is known. Repeats are added when they begin.
    pub all: usize,
}

/// Tells of each measurement.
struct Teller<'a> {
    tell: &'a mut dyn FnMut(Measurement<'_>),
    /// What is said before each measurement: the pass.
    before: String,
    /// What is said after it: why it is repeated.
    after: String,
    done: usize,
    all: usize,
}

impl Teller<'_> {
    fn next(&mut self, what: &str) {
        let what = format!("{}{what}{}", self.before, self.after);
        (self.tell)(Measurement { what: &what, done: self.done, all: self.all });
        self.done += 1;
    }
}

/// The number of trainings of one size under the schedule of that `number`. Selective is measured
/// under one schedule only: its share of a full re-materialization is the same under all.
fn trainings(number: usize) -> usize {
    if number == 0 { 3 } else { 2 }
}

/// Measures a profile of the pipeline that `build` returns. Every training builds a new pipeline.
///
/// Each micro-batch size is measured under each schedule, with all forwards discarding their
/// activations and, unless that exceeds a memory cap, with all keeping them. The first schedule is
/// also measured with selective re-materialization.
///
/// First of all, the speed of offload is measured in the builder's folder.
///
/// `tell` is called before each measurement. A measurement that varies too much is repeated a few
/// times at most; [`ModelCosts::spread`] then holds the remaining spread. `decide`
/// receives the next proposed repeat, if any, and returns the one to make. Processes measure
/// different times, so `decide` must return the same repeat in each process.
///
/// # Errors
/// Errors of `build` and of the steps, or no mini-batches.
pub fn profile(
    settings: &Profiling<'_>,
    build: impl Fn() -> Result<PipelineBuilder>,
    mut tell: impl FnMut(Measurement<'_>),
    mut decide: impl FnMut(Option<Again>) -> Result<Option<Again>>,
) -> Result<Profile> {
    if !IS_COUNTED {
        return Err(Error::Setting(
            "memory of CPUs is not counted, so a profile would have no bytes: build gpipe with \
            its feature `allocator`, or use `gpipe::estimate`"
                .into(),
        ));
    }
    let mut builder = build()?;
    let mini_batch = settings.batches.first().and_then(|(inputs, _)| builder.samples_of(inputs));
    let Some(mini_batch) =
        mini_batch.and_then(|count| usize::try_from(count).ok()).filter(|&count| count > 0)
    else {
        return Err(Error::Input(
            "a profile needs mini-batches to measure: give at least one".into(),
        ));
    };
    let subject = builder.subject(settings.machine)?;
    let configured = [builder.scheduled()];
    let schedules = if settings.schedules.is_empty() { &configured } else { settings.schedules };
    let mut cuts: Vec<Cut> = Vec::new();
    for &micro_batches in settings.micro_batches {
        let cut = Cut::of(mini_batch, micro_batches);
        if cuts.iter().all(|other| other.samples != cut.samples) {
            cuts.push(cut);
        }
    }
    // First, because the folder may be one that cannot be used.
    let of_a_size: usize = (0..schedules.len()).map(trainings).sum();
    let all = of_a_size * cuts.len() * settings.passes.max(1);
    tell(Measurement { what: "the speed of offload", done: 0, all });
    let offload = builder.offload_speed()?;
    let teller =
        Teller { tell: &mut tell, before: String::new(), after: String::new(), done: 0, all };
    let mut ran = Ran::of(settings, schedules, &cuts, (build, teller, &mut decide))?;
    let again = ran.again;
    let (stages, copied) = (ran.stages, ran.copied);
    let mut costs = shapes(&mut builder)?;
    let (mut spread, mut messages) = (BTreeMap::new(), Messages::default());
    for (number, schedule) in schedules.iter().enumerate() {
        let (mut sizes, mut spreads) = (BTreeMap::new(), BTreeMap::new());
        for Cut { samples, .. } in &cuts {
            let Some(mut seen) = ran.seen.remove(&(number, *samples)) else { continue };
            seen.give_messages(&mut messages);
            let mut measured = boundaries(&mut builder, *samples)?;
            seen.fill(&mut measured);
            let discarding = &seen.discarding;
            if schedule.splits() {
                discarding.fill_halves(&mut costs);
            }
            if let Some(own) = seen.spread() {
                spreads.insert(*samples, own);
            }
            if number == 0 {
                let all = (0..measured.len()).map(|layer| discarding.spread(layer)).collect();
                spread.insert(*samples, all);
                discarding.fill_states(&mut costs);
            }
            sizes.insert(*samples, measured);
        }
        match (number, ran.full.remove(&number)) {
            (0, Some(error)) if sizes.is_empty() => return Err(error),
            (0, _) => (costs.sizes, costs.spread) = (sizes, spreads),
            _ if sizes.is_empty() => {}
            _ => {
                costs.under.insert(schedule.to_string(), sizes);
                costs.spread_under.insert(schedule.to_string(), spreads);
            }
        }
    }
    costs.transport = messages.transport(copied);
    costs.offload = offload;
    let steps = settings.steps * settings.passes.max(1);
    Ok(Profile { format: FORMAT, subject, stages, steps, costs, spread, again })
}

/// The results of all trainings.
#[derive(Default)]
struct Ran {
    /// By schedule number and samples per micro-batch.
    seen: BTreeMap<MeasuredSize, MeasuredSteps>,
    /// By schedule number: the first out-of-memory error.
    full: BTreeMap<usize, Error>,
    stages: usize,
    /// Whether messages are copied.
    copied: bool,
    /// How many measurements were repeated.
    again: usize,
}

impl Ran {
    /// Runs all passes: each size, under each schedule, with each policy. Then repeats the
    /// measurements that vary too much.
    fn of(
        settings: &Profiling<'_>,
        schedules: &[Schedule],
        cuts: &[Cut],
        (build, mut tell, decide): (
            impl Fn() -> Result<PipelineBuilder>,
            Teller<'_>,
            &mut impl FnMut(Option<Again>) -> Result<Option<Again>>,
        ),
    ) -> Result<Self> {
        let mut ran = Ran::default();
        let passes = settings.passes.max(1);
        for pass in 1..=passes {
            if passes > 1 {
                tell.before = format!("{pass} of {passes}: ");
            }
            // Schedules of one size run in direct succession, because they are compared first.
            for &cut in cuts {
                for named in schedules.iter().enumerate() {
                    ran.one(settings, named, cut, &build, &mut tell)?;
                }
            }
        }
        let mut turns = BTreeMap::new();
        // At most as many repeats as one pass has measurements.
        for _ in 0..cuts.len() * schedules.len() {
            let spreads = ran.seen.iter().filter_map(|(key, seen)| Some((*key, seen.spread()?)));
            let own = widest(spreads, &turns).map(|((schedule, samples), spread)| {
                let percent = (100.0 * spread.width()) as u64;
                Again { schedule, samples, percent }
            });
            let Some(Again { schedule: number, samples, percent }) = decide(own)? else { break };
            *turns.entry((number, samples)).or_insert(0) += 1;
            let cut = cuts.iter().find(|cut| cut.samples == samples);
            let (Some(&cut), Some(schedule)) = (cut, schedules.get(number)) else { break };
            tell.before.clear();
            tell.after = format!("; again, because its steps are spread by {percent}%");
            tell.all += trainings(number);
            ran.one(settings, (number, schedule), cut, &build, &mut tell)?;
            ran.again += 1;
        }
        Ok(ran)
    }

    /// Trains with one micro-batch size under one schedule, with each policy.
    fn one(
        &mut self,
        settings: &Profiling<'_>,
        (number, schedule): (usize, &Schedule),
        cut: Cut,
        build: &impl Fn() -> Result<PipelineBuilder>,
        tell: &mut Teller<'_>,
    ) -> Result<()> {
        let done = tell.done + trainings(number);
        let observe = |remat: Remat| {
            let Cut { samples, micro_batches, .. } = cut;
            tell.next(&format!(
                "micro-batches of {samples} samples (M = {micro_batches}), {schedule}, {remat}"
            ));
            let builder =
                build()?.micro_batches(micro_batches).schedule(schedule.clone()).remat(remat);
            let mut pipeline = builder.profiled().build()?;
            pipeline.set_parameters(settings.values)?;
            (self.stages, self.copied) = (pipeline.balance().len(), pipeline.is_in_processes());
            Observed::train(&mut pipeline, settings, cut.of_that_size)
        };
        let measured = MeasuredSteps::new(trainings(number) == 3, observe);
        // A training that runs out of memory ends those of this size.
        tell.done = done;
        match measured {
            Ok(seen) => {
                let seen = match self.seen.remove(&(number, cut.samples)) {
                    Some(before) => before.and(seen),
                    None => seen,
                };
                self.seen.insert((number, cut.samples), seen);
                Ok(())
            }
            // The device's memory is full. Smaller micro-batches may fit.
            Err(error) if error.is_out_of_memory() => {
                self.full.entry(number).or_insert(error);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

/// Key of a measurement: schedule number and samples per micro-batch.
type MeasuredSize = (usize, usize);

/// The measurement that varies most, among those that vary too much and may still be repeated.
fn widest(
    spreads: impl Iterator<Item = (MeasuredSize, Spread)>,
    turns: &BTreeMap<MeasuredSize, usize>,
) -> Option<(MeasuredSize, Spread)> {
    let is_open = |thing: &MeasuredSize| turns.get(thing).copied().unwrap_or(0) < AGAIN_MAX;
    spreads
        .filter(|(thing, spread)| spread.width() > WIDE && is_open(thing))
        .max_by(|(_, a), (_, b)| a.width().total_cmp(&b.width()))
}

/// Measurements of one micro-batch size under one schedule, by what its forwards kept.
struct MeasuredSteps {
    discarding: Observed,
    /// `None` if it exceeded a memory cap or was not requested.
    keeping: Option<Observed>,
    selective: Option<Observed>,
}

impl MeasuredSteps {
    /// # Errors
    /// Errors of `observe`. Running out of memory is an error only where all forwards discard.
    fn new(selective: bool, mut observe: impl FnMut(Remat) -> Result<Observed>) -> Result<Self> {
        let discarding = observe(Remat::Always)?;
        let mut if_it_fits = |remat| match observe(remat) {
            Err(error) if error.is_out_of_memory() => Ok(None),
            other => other.map(Some),
        };
        let keeping = if_it_fits(Remat::Never)?;
        let selective = if selective { if_it_fits(Remat::Selective)? } else { None };
        Ok(Self { discarding, keeping, selective })
    }

    /// Merges the measurements of another pass.
    fn and(self, other: Self) -> Self {
        let both = |a: Option<Observed>, b: Option<Observed>| match (a, b) {
            (Some(a), Some(b)) => Some(a.and(b)),
            (a, b) => a.or(b),
        };
        Self {
            discarding: self.discarding.and(other.discarding),
            keeping: both(self.keeping, other.keeping),
            selective: both(self.selective, other.selective),
        }
    }

    /// The spread of the steps, over all policies.
    fn spread(&self) -> Option<Spread> {
        let all = [Some(&self.discarding), self.keeping.as_ref(), self.selective.as_ref()];
        all.into_iter().flatten().filter_map(Observed::steps).reduce(Spread::and)
    }

    fn give_messages(&mut self, messages: &mut Messages) {
        let Self { discarding, keeping, selective } = self;
        for observed in
            [Some(discarding), keeping.as_mut(), selective.as_mut()].into_iter().flatten()
        {
            messages.extend(std::mem::take(&mut observed.messages));
        }
    }

    /// Fills in the layers' times and bytes. The loss is last.
    fn fill(&self, layers: &mut [LayerCost]) {
        let outputs: Vec<Bytes> = layers.iter().map(|cost| cost.inputs).collect();
        for (layer, cost) in layers.iter_mut().enumerate() {
            self.discarding.fill(layer, cost);
            match &self.keeping {
                Some(keeping) => keeping.fill(layer, cost),
                None => {
                    (cost.forward_kept, cost.backward_kept) = (cost.rematerialize, cost.backward);
                }
            }
            if cost.kept == Bytes(0) {
                // The layer's stage is not trained, so it keeps nothing. In another stage it may
                // have to keep its outputs and be recomputed.
                (cost.forward_kept, cost.rematerialize) = (cost.forward, cost.forward);
                (cost.rematerialize_selective, cost.selective_peak) =
                    (cost.forward, cost.forward_peak);
                cost.kept = outputs.get(layer + 1).copied().unwrap_or_default();
            }
        }
        match &self.selective {
            Some(selective) => selective.fill_selective(layers),
            None => {
                for cost in layers {
                    (cost.rematerialize_selective, cost.products, cost.selective_peak) =
                        Default::default();
                }
            }
        }
    }
}

/// How a mini-batch is cut for a measurement.
#[derive(Clone, Copy)]
struct Cut {
    /// M, at most one per sample.
    micro_batches: usize,
    /// Samples of the larger micro-batches.
    samples: usize,
    /// Number of the larger micro-batches. Smaller ones at the end of the mini-batch are ignored.
    of_that_size: usize,
}

impl Cut {
    fn of(mini_batch: usize, micro_batches: usize) -> Self {
        let micro_batches = micro_batches.clamp(1, mini_batch);
        let of_that_size = match mini_batch % micro_batches {
            0 => micro_batches,
            larger => larger,
        };
        Self { micro_batches, samples: mini_batch.div_ceil(micro_batches), of_that_size }
    }
}

/// The costs that follow from shapes alone: names, flops, skips, ties and the pieces of optimizer
/// state. Measured fields are 0.
fn shapes(builder: &mut PipelineBuilder) -> Result<ModelCosts> {
    let estimated = builder.estimate(&[1], &Rate::default())?;
    let state = |layer: LayerState| LayerState {
        name: layer.name,
        flops: layer.flops,
        shardable: layer.shardable,
        ..LayerState::default()
    };
    let tie = |tie: TieCost| TieCost { parameters: Bytes(0), optimizer: Bytes(0), ..tie };
    Ok(ModelCosts {
        layers: estimated.layers.into_iter().map(state).collect(),
        ties: estimated.ties.into_iter().map(tie).collect(),
        sizes: BTreeMap::new(),
        ..estimated
    })
}

/// For each layer and the loss: the bytes that cross a cut before it, and the bytes of its
/// products. A stage that is not trained does not show the latter.
fn boundaries(builder: &mut PipelineBuilder, samples: usize) -> Result<Vec<LayerCost>> {
    let estimated =
        builder.estimate(&[samples], &Rate::default())?.at(samples, &Schedule::OneFOneB);
    let crossing = |cost: LayerCost| LayerCost {
        inputs: cost.inputs,
        input_gradients: cost.input_gradients,
        products: cost.products,
        ..LayerCost::default()
    };
    Ok(estimated.into_iter().map(crossing).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(low: u32, high: u32) -> Spread {
        Spread { low, high }
    }

    /// A profile with quartiles of 2.85 and 15.40 around 5.39 was once trusted, and the resulting
    /// plan took three times as long as the default. Measurements this wide are repeated, the
    /// widest first, a bounded number of times.
    #[test]
    fn regression_what_is_spread_too_far_is_measured_again_and_not_for_ever() {
        let all = [
            ((0, 4), spread(980, 1030)),
            ((0, 8), spread(529, 2857)),
            ((1, 8), spread(800, 1200)),
            ((1, 4), spread(900, 1150)), // exactly WIDE is not too far
        ];
        let mut turns = BTreeMap::new();
        let mut order = Vec::new();
        while let Some((thing, _)) = widest(all.into_iter(), &turns) {
            *turns.entry(thing).or_insert(0) += 1;
            order.push(thing);
        }
        assert_eq!(order, [[(0, 8); AGAIN_MAX], [(1, 8); AGAIN_MAX]].concat());
    }
}
