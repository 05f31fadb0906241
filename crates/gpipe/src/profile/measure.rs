//! Measuring a profile: a few steps of the real pipeline for each size of micro-batches and each schedule, all its stages at work,
//! once with all forwards discarding and once with all keeping.

use std::collections::{BTreeMap, HashMap};

use gpipe_core::{
    Action, Bytes, LayerId, MicroBatch, Nanos, Op,
    cost::{LayerCost, LayerState, ModelCosts, TieCost},
    lower::Recomputed,
    remat::Remat,
    schedule::Schedule,
    simulate::Timeline,
};
use tch::Tensor;

use super::{FORMAT, LayerSpread, Profile, links::Messages};
use crate::{
    error::{Error, Result},
    estimate::Rate,
    pipeline::{Pipeline, PipelineBuilder},
    stage::recorder::{LayerBytes, Sample, Work},
};

/// Steps that are not measured: the first one makes the optimizer's state and fills caches, the second one still touches memory for the
/// first time (of the `gpt` workload with all forwards kept it takes a third more than those after it), and the third of AmoebaNet
/// is still 2 to 6% longer.
const WARM_UP: usize = 3;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Profiling<'a> {
    /// M for which a mini-batch is cut and measured.
    pub micro_batches: &'a [usize],
    /// The schedules that each size is measured under, the first for all that are not here; none: the builder's.
    pub schedules: &'a [Schedule],
    /// Steps that are measured of each, after those that only warm up.
    pub steps: usize,
    /// Mini-batches, used in turn: inputs and targets, all with the same number of samples.
    pub batches: &'a [(Vec<Tensor>, Vec<Tensor>)],
    /// The machine, in words.
    pub machine: &'a str,
}

/// Measures a profile of the pipeline that `build` gives, each time anew. Each size of micro-batches is measured under each
/// schedule, with all forwards discarding and, unless that goes over a memory cap, with all keeping. `tell` hears what is being
/// measured.
///
/// # Errors
/// Those of `build` and of the steps; no mini-batches.
pub fn profile(
    settings: &Profiling<'_>,
    build: impl Fn() -> Result<PipelineBuilder>,
    mut tell: impl FnMut(&str),
) -> Result<Profile> {
    let mini_batch =
        settings.batches.first().and_then(|(inputs, _)| inputs.first()?.size().first().copied());
    let Some(mini_batch) =
        mini_batch.and_then(|count| usize::try_from(count).ok()).filter(|&count| count > 0)
    else {
        return Err(Error::Input(
            "a profile needs mini-batches to measure: give at least one".into(),
        ));
    };
    let mut builder = build()?;
    let subject = builder.subject(settings.machine)?;
    let configured = [builder.scheduled()];
    let schedules = if settings.schedules.is_empty() { &configured } else { settings.schedules };
    let mut costs = shapes(&mut builder)?;
    let mut spread = BTreeMap::new();
    let (mut stages, mut messages, mut full) = (1, Messages::default(), None);
    let mut copied = false;
    for (number, schedule) in schedules.iter().enumerate() {
        let mut sizes = BTreeMap::new();
        for &micro_batches in settings.micro_batches {
            let cut = Cut::of(mini_batch, micro_batches);
            if sizes.contains_key(&cut.samples) {
                continue;
            }
            let mut observe = |remat: Remat| {
                let Cut { samples, micro_batches, .. } = cut;
                tell(&format!(
                    "micro-batches of {samples} samples (M = {micro_batches}), {schedule}, {remat}"
                ));
                let builder =
                    build()?.micro_batches(micro_batches).schedule(schedule.clone()).remat(remat);
                let mut pipeline = builder.profiled().build()?;
                stages = pipeline.balance().len();
                copied = pipeline.is_in_processes();
                Observed::train(&mut pipeline, settings, cut.of_that_size)
            };
            let mut discarding = match observe(Remat::Always) {
                Ok(discarding) => discarding,
                // A device that is full: smaller micro-batches may fit.
                Err(error) if error.is_out_of_memory() => {
                    full = Some(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let mut keeping = match observe(Remat::Never) {
                Ok(keeping) => Some(keeping),
                Err(error) if error.is_out_of_memory() => None,
                Err(error) => return Err(error),
            };
            // Under one schedule: what it takes of a whole re-materialization is the same under all.
            let selective = match number {
                0 => Some(observe(Remat::Selective)),
                _ => None,
            };
            let mut selective = match selective {
                Some(Err(error)) if !error.is_out_of_memory() => return Err(error),
                other => other.and_then(Result::ok),
            };
            let observed = [Some(&mut discarding), keeping.as_mut(), selective.as_mut()];
            for observed in observed.into_iter().flatten() {
                messages.extend(std::mem::take(&mut observed.messages));
            }
            let mut measured = boundaries(&mut builder, cut.samples)?;
            fill(&mut measured, &discarding, keeping.as_ref());
            if let Some(selective) = &selective {
                selective.fill_selective(&mut measured);
            }
            if schedule.splits() {
                discarding.fill_unsplit(&mut costs);
            }
            if number == 0 {
                let all = (0..measured.len()).map(|layer| discarding.spread(layer)).collect();
                spread.insert(cut.samples, all);
                discarding.fill_states(&mut costs);
            }
            sizes.insert(cut.samples, measured);
        }
        match (number, full.take()) {
            (0, Some(error)) if sizes.is_empty() => return Err(error),
            (0, _) => costs.sizes = sizes,
            _ if sizes.is_empty() => {}
            _ => drop(costs.under.insert(schedule.to_string(), sizes)),
        }
    }
    costs.transport = messages.transport(copied);
    Ok(Profile { format: FORMAT, subject, stages, steps: settings.steps, costs, spread })
}

/// How a mini-batch is cut to be measured.
struct Cut {
    /// M, at most one for each sample.
    micro_batches: usize,
    /// Of the larger micro-batches.
    samples: usize,
    /// The larger micro-batches: smaller ones at the end of the mini-batch are left out.
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

/// What the trainings of one size showed, by layer.
fn fill(measured: &mut [LayerCost], discarding: &Observed, keeping: Option<&Observed>) {
    let outputs: Vec<Bytes> = measured.iter().map(|cost| cost.inputs).collect();
    for (layer, cost) in measured.iter_mut().enumerate() {
        discarding.fill(layer, cost);
        match keeping {
            Some(keeping) => keeping.fill(layer, cost),
            None => (cost.forward_kept, cost.backward_kept) = (cost.rematerialize, cost.backward),
        }
        if cost.kept == Bytes(0) {
            // Its stage is not trained, and keeps nothing. In another one it may have to keep its outputs, and to be recomputed.
            (cost.forward_kept, cost.rematerialize) = (cost.forward, cost.forward);
            cost.kept = outputs.get(layer + 1).copied().unwrap_or_default();
        }
    }
}

/// What shapes alone say: names, flops, skips, ties; nothing of what is measured.
fn shapes(builder: &mut PipelineBuilder) -> Result<ModelCosts> {
    let estimated = builder.estimate(&[1], &Rate::default())?;
    let state = |layer: LayerState| LayerState {
        name: layer.name,
        flops: layer.flops,
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

/// By layer, and for the loss: what crosses a cut before it.
fn boundaries(builder: &mut PipelineBuilder, samples: usize) -> Result<Vec<LayerCost>> {
    let estimated =
        builder.estimate(&[samples], &Rate::default())?.at(samples, &Schedule::OneFOneB);
    let crossing = |cost: LayerCost| LayerCost {
        inputs: cost.inputs,
        input_gradients: cost.input_gradients,
        ..LayerCost::default()
    };
    Ok(estimated.into_iter().map(crossing).collect())
}

/// What a training of a few steps showed.
struct Observed {
    messages: Messages,
    samples: HashMap<(usize, Work), Vec<Sample>>,
    /// The mean of a layer's times in each step.
    means: HashMap<(usize, Work), Vec<f64>>,
    /// By layer.
    bytes: Vec<LayerBytes>,
    /// The first layer of each stage.
    starts: Vec<usize>,
    /// What an action takes over the sum of its layers: dispatch, and what comes from and goes to links.
    overhead: HashMap<(usize, Work), f64>,
}

impl Observed {
    fn train(
        pipeline: &mut Pipeline,
        settings: &Profiling<'_>,
        micro_batches: usize,
    ) -> Result<Self> {
        let (mut timelines, mut all) = (Vec::new(), Vec::new());
        let mut messages = Messages::default();
        let mut means: HashMap<_, Vec<f64>> = HashMap::new();
        let mut bytes = Vec::new();
        // Skipped ones, which look for a loss scale, do not count.
        let attempts = 4 * (settings.steps.max(1) + WARM_UP) + 16;
        let mut step = 0;
        for (inputs, targets) in settings.batches.iter().cycle().take(attempts) {
            if step >= settings.steps.max(1) + WARM_UP {
                break;
            }
            let report = pipeline.train_step(&inputs[..], &targets[..])?;
            if report.skipped {
                drop(pipeline.take_profiles());
                continue;
            }
            step += 1;
            let profiles = pipeline.take_profiles();
            bytes = profiles.iter().flat_map(|stage| &stage.layers).copied().collect();
            if step > WARM_UP {
                messages.add(&report);
                timelines.push(report.timeline);
                let samples = profiles.into_iter().flat_map(|stage| stage.samples);
                let samples: Vec<Sample> =
                    samples.filter(|own| own.micro_batch.index() < micro_batches).collect();
                let mut sums: HashMap<_, (f64, f64)> = HashMap::new();
                for sample in &samples {
                    let (sum, count) = sums.entry((sample.layer, sample.work)).or_default();
                    (*sum, *count) = (*sum + sample.time.0 as f64, *count + 1.0);
                }
                for (key, (sum, count)) in sums {
                    means.entry(key).or_default().push(sum / count);
                }
                all.extend(samples);
            }
        }
        let starts: Vec<usize> = gpipe_core::topology::ranges(pipeline.balance())
            .into_iter()
            .map(|range| range.start)
            .collect();
        let overhead = overhead(&timelines, &all, &starts, micro_batches);
        let mut samples: HashMap<_, Vec<Sample>> = HashMap::new();
        for sample in all {
            samples.entry((sample.layer, sample.work)).or_default().push(sample);
        }
        means.values_mut().for_each(|means| means.sort_unstable_by(f64::total_cmp));
        Ok(Self { messages, samples, means, bytes, starts, overhead })
    }

    fn stage_of(&self, layer: usize) -> usize {
        self.starts.iter().rposition(|&start| start <= layer).unwrap_or_default()
    }

    fn of(&self, layer: usize, work: Work) -> &[Sample] {
        self.samples.get(&(layer, work)).map_or(&[], Vec::as_slice)
    }

    /// The quantile of a layer's times, its share of the action's overhead included.
    fn time(&self, layer: usize, work: Work, quantile: f64) -> Nanos {
        let mut times: Vec<u64> = self.of(layer, work).iter().map(|s| s.time.0).collect();
        times.sort_unstable();
        let at = (times.len() as f64 * quantile) as usize;
        let time = times.get(at.min(times.len().saturating_sub(1))).copied().unwrap_or(0);
        self.with_overhead(layer, work, time as f64)
    }

    fn with_overhead(&self, layer: usize, work: Work, time: f64) -> Nanos {
        let overhead = self.overhead.get(&(self.stage_of(layer), work)).copied().unwrap_or(1.0);
        Nanos((time * overhead) as u64)
    }

    /// What a layer takes in a step like most: the median over the steps of its mean in each. A step is a sum, and the sum of
    /// medians is less than it where some of the layers' runs are disturbed in every step.
    fn typical(&self, layer: usize, work: Work) -> Nanos {
        let means = self.means.get(&(layer, work)).map_or(&[][..], Vec::as_slice);
        let time = match means.len() {
            0 => 0.0,
            count => (means[(count - 1) / 2] + means[count / 2]) / 2.0,
        };
        self.with_overhead(layer, work, time)
    }

    fn spread(&self, layer: usize) -> LayerSpread {
        let quartiles = |work| [0.25, 0.5, 0.75].map(|quantile| self.time(layer, work, quantile));
        LayerSpread {
            forward: quartiles(Work::Forward),
            rematerialize: quartiles(Work::Rematerialize),
            backward: quartiles(Work::Backward { kept: false }),
        }
    }

    /// What it knows of a layer: a training knows only of its own kinds of work.
    fn fill(&self, layer: usize, cost: &mut LayerCost) {
        let set = |time: &mut Nanos, work| {
            if !self.of(layer, work).is_empty() {
                *time = self.typical(layer, work);
            }
        };
        set(&mut cost.forward, Work::Forward);
        set(&mut cost.forward_kept, Work::ForwardKept);
        set(&mut cost.rematerialize, Work::Rematerialize);
        set(&mut cost.backward, Work::Backward { kept: false });
        set(&mut cost.backward_kept, Work::Backward { kept: true });
        set(&mut cost.backward_input, Work::BackwardInput { kept: false });
        set(&mut cost.backward_input, Work::BackwardInput { kept: true });
        set(&mut cost.backward_weight, Work::BackwardWeight);
        // What other stages give back meanwhile makes less of a sample, never more.
        for work in [Work::ForwardKept, Work::Rematerialize, Work::Forward] {
            for sample in self.of(layer, work) {
                let kept =
                    if work == Work::Forward { Bytes(0) } else { sample.after - sample.before };
                cost.kept = cost.kept.max(kept);
                cost.forward_peak = cost.forward_peak.max(sample.peak - sample.before);
            }
        }
        for work in [Work::Backward { kept: false }, Work::Backward { kept: true }] {
            for sample in self.of(layer, work) {
                let peak = match sample.micro_batch {
                    MicroBatch(0) => &mut cost.first_backward_peak,
                    _ => &mut cost.backward_peak,
                };
                *peak = (*peak).max(sample.peak - sample.before);
            }
        }
        self.fill_split(layer, cost);
        // With one micro-batch there is only the first.
        if cost.backward_peak == Bytes(0) {
            cost.backward_peak = cost.first_backward_peak;
        }
    }

    /// What a re-materialization takes that finds what products gave, and what those hold.
    fn fill_selective(&self, measured: &mut [LayerCost]) {
        for (layer, cost) in measured.iter_mut().enumerate() {
            if !self.of(layer, Work::Rematerialize).is_empty() {
                let time = self.typical(layer, Work::Rematerialize);
                cost.rematerialize_selective = time.min(cost.rematerialize);
                cost.products = Bytes(self.bytes.get(layer).map_or(0, |own| own.products));
                let peaks = self.of(layer, Work::Rematerialize).iter();
                cost.selective_peak =
                    peaks.map(|sample| sample.peak - sample.before).max().unwrap_or_default();
            }
        }
    }

    /// What a backward in halves holds.
    fn fill_split(&self, layer: usize, cost: &mut LayerCost) {
        for work in [Work::BackwardInput { kept: false }, Work::BackwardInput { kept: true }] {
            for sample in self.of(layer, work) {
                cost.backward_input_peak =
                    cost.backward_input_peak.max(sample.peak - sample.before);
            }
        }
        let gradients = Bytes(self.bytes.get(layer).map_or(0, |own| own.gradients));
        let mut given_back = Vec::new();
        for sample in self.of(layer, Work::BackwardWeight) {
            let is_first = sample.micro_batch == MicroBatch(0);
            let (made, peak) = match is_first {
                true => (gradients, &mut cost.first_backward_weight_peak),
                false => (Bytes(0), &mut cost.backward_weight_peak),
            };
            *peak = (*peak).max(sample.peak - sample.before);
            given_back.push((sample.before + made - sample.after).0);
        }
        if cost.backward_weight_peak == Bytes(0) {
            cost.backward_weight_peak = cost.first_backward_weight_peak;
        }
        // Other stages may give something back meanwhile: the most is too much.
        let typical = Bytes(gpipe_core::simulate::median(&mut given_back).0);
        cost.split = cost.split.max(typical);
    }

    /// Which layers' backwards could not be split.
    fn fill_unsplit(&self, costs: &mut ModelCosts) {
        for (state, bytes) in costs.layers.iter_mut().zip(&self.bytes) {
            state.unsplit |= bytes.unsplit;
        }
    }

    /// What is once per step, shared among a stage's layers by the bytes of their gradients, and what layers hold
    /// between steps. The latest size that is measured counts.
    fn fill_states(&self, costs: &mut ModelCosts) {
        let gradients = |layer: usize| self.bytes.get(layer).map_or(0, |own| own.gradients) as f64;
        for layer in 0..costs.layers.len() {
            let Some(bytes) = self.bytes.get(layer) else { continue };
            let stage = self.stage_of(layer);
            let start = self.starts[stage];
            let end = self.starts.get(stage + 1).copied().unwrap_or(costs.layers.len());
            let sum: f64 = (start..end).map(gradients).sum();
            let most = (start..end).map(gradients).fold(0.0, f64::max);
            let share = |whole: f64| if whole > 0.0 { gradients(layer) / whole } else { 0.0 };
            let part = |time: Nanos| Nanos((time.0 as f64 * share(sum)) as u64);
            let ends = [Work::Norm, Work::Update];
            let peaks = ends.iter().flat_map(|work| self.of(start, *work));
            let peak = peaks.map(|sample| (sample.peak - sample.before).0).max().unwrap_or(0);
            let state = &mut costs.layers[layer];
            state.parameters = Bytes(bytes.parameters);
            state.gradients = Bytes(bytes.gradients);
            state.optimizer = Bytes(bytes.optimizer);
            state.statistics = Bytes(bytes.statistics);
            state.norm = part(self.typical(start, Work::Norm));
            state.update = part(self.typical(start, Work::Update));
            state.update_peak = Bytes((peak as f64 * share(most)) as u64);
        }
        for tie in &mut costs.ties {
            let of = |bytes: fn(&LayerBytes) -> u64| {
                let all = tie.layers.iter().filter_map(|&layer| self.bytes.get(layer));
                Bytes(all.map(bytes).max().unwrap_or(0))
            };
            (tie.parameters, tie.optimizer) = (of(|b| b.tied_parameters), of(|b| b.tied_optimizer));
        }
    }
}

/// By stage and work: the time of its actions over that of its layers.
fn overhead(
    timelines: &[Timeline],
    samples: &[Sample],
    starts: &[usize],
    micro_batches: usize,
) -> HashMap<(usize, Work), f64> {
    let stage_of = |layer: LayerId| starts.iter().rposition(|&start| start <= layer.index());
    let mut layers: HashMap<(usize, Work), f64> = HashMap::new();
    for sample in samples {
        if let Some(stage) = stage_of(LayerId::from_index(sample.layer)) {
            *layers.entry((stage, sample.work)).or_default() += sample.time.0 as f64;
        }
    }
    let mut actions: HashMap<(usize, Work), f64> = HashMap::new();
    for timeline in timelines {
        let recomputed = Recomputed::of(timeline.actions());
        for timed in timeline.devices.iter().flatten() {
            let early = timed.action.op.computes().is_none_or(|m| m.index() < micro_batches);
            if let Some(work) = work_of(timed.action, &recomputed).filter(|_| early) {
                let time = (timed.end - timed.start).0 as f64;
                *actions.entry((timed.action.stage.index(), work)).or_default() += time;
            }
        }
    }
    let ratio = |(key, sum): (&(usize, Work), &f64)| {
        let action = actions.get(key)?;
        (*sum > 0.0).then(|| (*key, (action / sum).max(1.0)))
    };
    layers.iter().filter_map(ratio).collect()
}

fn work_of(action: Action, recomputed: &Recomputed) -> Option<Work> {
    let again = |m| recomputed.contains(action.stage, m);
    Some(match action.op {
        Op::Forward(m) if again(m) => Work::Forward,
        Op::Forward(_) => Work::ForwardKept,
        Op::Rematerialize(_) => Work::Rematerialize,
        Op::Backward(m) => Work::Backward { kept: !again(m) },
        Op::BackwardInput(m) => Work::BackwardInput { kept: !again(m) },
        Op::BackwardWeight(_) => Work::BackwardWeight,
        Op::Norm => Work::Norm,
        Op::Update => Work::Update,
        _ => return None,
    })
}
