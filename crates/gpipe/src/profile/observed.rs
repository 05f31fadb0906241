//! Measurements of one training of a few steps: times of layers, and bytes.

use std::collections::HashMap;

use gpipe_core::{
    Action, Bytes, LayerId, MicroBatch, Nanos, Op,
    cost::{LayerCost, ModelCosts, Spread},
    lower::RematSet,
    simulate::Timeline,
};

use super::{LayerSpread, links::Messages, measure::Profiling};
use crate::{
    arguments::IntoTensors,
    error::Result,
    pipeline::Pipeline,
    stage::recorder::{LayerBytes, ProfiledOp, Sample},
};

/// Steps that run before the measurement.
///
/// The first step creates the optimizer's state and fills caches. The second still touches memory
/// for the first time: in the `gpt` workload with all forwards kept it takes a third longer than
/// later steps. In AmoebaNet even the third step takes 2 to 6% longer.
const WARM_UP: usize = 3;

/// Measurements of one training of a few steps.
pub(super) struct Observed {
    pub(super) messages: Messages,
    samples: HashMap<(usize, ProfiledOp), Vec<Sample>>,
    /// Mean of a layer's times in each step.
    means: HashMap<(usize, ProfiledOp), Vec<f64>>,
    /// By layer.
    bytes: Vec<LayerBytes>,
    /// The first layer of each stage.
    starts: Vec<usize>,
    /// Time of all layers in each step, in nanoseconds.
    steps: Vec<f64>,
    /// By stage and operation: total time of the actions, and of the layers in them. The difference
    /// is dispatch and the transfer of values from and to links.
    actions: HashMap<(usize, ProfiledOp), (f64, f64)>,
}

impl Observed {
    pub(super) fn train(
        pipeline: &mut Pipeline,
        settings: &Profiling<'_>,
        micro_batches: usize,
    ) -> Result<Self> {
        let (mut timelines, mut all) = (Vec::new(), Vec::new());
        let mut messages = Messages::default();
        let mut means: HashMap<_, Vec<f64>> = HashMap::new();
        let (mut bytes, mut steps) = (Vec::new(), Vec::new());
        // Skipped steps, which search for a loss scale, do not count.
        let attempts = 4 * (settings.steps.max(1) + WARM_UP) + 16;
        let mut step = 0;
        for (inputs, targets) in settings.batches.iter().cycle().take(attempts) {
            if step >= settings.steps.max(1) + WARM_UP {
                break;
            }
            let (report, profiles) =
                pipeline.train(inputs.into_tensors(), targets.into_tensors())?;
            if report.skipped {
                continue;
            }
            step += 1;
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
                steps.push(samples.iter().map(|sample| sample.time.0 as f64).sum());
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
        let actions = actions(&timelines, &all, &starts, micro_batches);
        let mut samples: HashMap<_, Vec<Sample>> = HashMap::new();
        for sample in all {
            samples.entry((sample.layer, sample.work)).or_default().push(sample);
        }
        Ok(Self { messages, samples, means, bytes, starts, steps, actions }.sorted())
    }

    fn sorted(mut self) -> Self {
        self.means.values_mut().for_each(|means| means.sort_unstable_by(f64::total_cmp));
        self
    }

    /// Merges the measurements of another training of the same kind.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.messages.extend(other.messages);
        self.steps.extend(other.steps);
        for (key, samples) in other.samples {
            self.samples.entry(key).or_default().extend(samples);
        }
        for (key, means) in other.means {
            self.means.entry(key).or_default().extend(means);
        }
        for (key, (action, layers)) in other.actions {
            let sums = self.actions.entry(key).or_default();
            *sums = (sums.0 + action, sums.1 + layers);
        }
        self.sorted()
    }

    fn stage_of(&self, layer: usize) -> usize {
        self.starts.iter().rposition(|&start| start <= layer).unwrap_or_default()
    }

    fn of(&self, layer: usize, work: ProfiledOp) -> &[Sample] {
        self.samples.get(&(layer, work)).map_or(&[], Vec::as_slice)
    }

    /// A quantile of a layer's times, including its share of the actions' overhead.
    fn time(&self, layer: usize, work: ProfiledOp, quantile: f64) -> Nanos {
        let mut times: Vec<u64> = self.of(layer, work).iter().map(|s| s.time.0).collect();
        times.sort_unstable();
        let at = (times.len() as f64 * quantile) as usize;
        let time = times.get(at.min(times.len().saturating_sub(1))).copied().unwrap_or(0);
        self.with_overhead(layer, work, time as f64)
    }

    fn with_overhead(&self, layer: usize, work: ProfiledOp, time: f64) -> Nanos {
        let overhead = match self.actions.get(&(self.stage_of(layer), work)) {
            Some((action, layers)) if *layers > 0.0 => (action / layers).max(1.0),
            _ => 1.0,
        };
        Nanos((time * overhead) as u64)
    }

    /// A layer's time in a typical step: the median over steps of its mean in each.
    ///
    /// A step is a sum over runs. If some runs of a layer are disturbed in every step, medians over
    /// single runs add up to less than the step.
    fn typical(&self, layer: usize, work: ProfiledOp) -> Nanos {
        let means = self.means.get(&(layer, work)).map_or(&[][..], Vec::as_slice);
        let time = match means.len() {
            0 => 0.0,
            count => (means[(count - 1) / 2] + means[count / 2]) / 2.0,
        };
        self.with_overhead(layer, work, time)
    }

    /// Spread of the total time of the steps. A disturbed machine slows down all layers of a step.
    pub(super) fn steps(&self) -> Option<Spread> {
        Spread::of(&self.steps)
    }

    pub(super) fn spread(&self, layer: usize) -> LayerSpread {
        let quartiles = |work| [0.25, 0.5, 0.75].map(|quantile| self.time(layer, work, quantile));
        LayerSpread {
            forward: quartiles(ProfiledOp::Forward),
            rematerialize: quartiles(ProfiledOp::Rematerialize),
            backward: quartiles(ProfiledOp::Backward { kept: false }),
        }
    }

    /// Fills in the costs of a layer that this training measured. A training measures only some
    /// kinds of operations.
    pub(super) fn fill(&self, layer: usize, cost: &mut LayerCost) {
        let set = |time: &mut Nanos, work| {
            if !self.of(layer, work).is_empty() {
                *time = self.typical(layer, work);
            }
        };
        set(&mut cost.forward, ProfiledOp::Forward);
        set(&mut cost.forward_kept, ProfiledOp::ForwardKept);
        set(&mut cost.rematerialize, ProfiledOp::Rematerialize);
        set(&mut cost.backward, ProfiledOp::Backward { kept: false });
        set(&mut cost.backward_kept, ProfiledOp::Backward { kept: true });
        set(&mut cost.backward_input, ProfiledOp::BackwardInput { kept: false });
        set(&mut cost.backward_input, ProfiledOp::BackwardInput { kept: true });
        set(&mut cost.backward_weight, ProfiledOp::BackwardWeight);
        // Memory that other stages free meanwhile makes a sample smaller, never larger.
        for work in [ProfiledOp::ForwardKept, ProfiledOp::Rematerialize, ProfiledOp::Forward] {
            for sample in self.of(layer, work) {
                let kept = if work == ProfiledOp::Forward {
                    Bytes(0)
                } else {
                    sample.after - sample.before
                };
                cost.kept = cost.kept.max(kept);
                cost.forward_peak = cost.forward_peak.max(sample.peak - sample.before);
            }
        }
        for work in [ProfiledOp::Backward { kept: false }, ProfiledOp::Backward { kept: true }] {
            for sample in self.of(layer, work) {
                let peak = match sample.micro_batch {
                    MicroBatch(0) => &mut cost.first_backward_peak,
                    _ => &mut cost.backward_peak,
                };
                *peak = (*peak).max(sample.peak - sample.before);
            }
        }
        self.fill_split(layer, cost);
        // With one micro-batch, only the first backward was measured.
        if cost.backward_peak == Bytes(0) {
            cost.backward_peak = cost.first_backward_peak;
        }
    }

    /// Fills in the costs of a selective re-materialization, and the bytes of the products that it
    /// reuses.
    pub(super) fn fill_selective(&self, measured: &mut [LayerCost]) {
        for (layer, cost) in measured.iter_mut().enumerate() {
            if !self.of(layer, ProfiledOp::Rematerialize).is_empty() {
                cost.products = Bytes(self.bytes.get(layer).map_or(0, |own| own.products));
                // Without products to reuse, it is an ordinary re-materialization.
                cost.rematerialize_selective = match cost.products {
                    Bytes(0) => cost.rematerialize,
                    _ => self.typical(layer, ProfiledOp::Rematerialize).min(cost.rematerialize),
                };
                let peaks = self.of(layer, ProfiledOp::Rematerialize).iter();
                cost.selective_peak =
                    peaks.map(|sample| sample.peak - sample.before).max().unwrap_or_default();
            }
        }
    }

    /// Fills in the bytes that a split backward holds.
    fn fill_split(&self, layer: usize, cost: &mut LayerCost) {
        for work in
            [ProfiledOp::BackwardInput { kept: false }, ProfiledOp::BackwardInput { kept: true }]
        {
            for sample in self.of(layer, work) {
                cost.backward_input_peak =
                    cost.backward_input_peak.max(sample.peak - sample.before);
            }
        }
        // In the first micro-batch, W allocates the gradient sums that I did not.
        let gradients =
            Bytes(self.bytes.get(layer).map_or(0, |own| own.gradients.saturating_sub(own.early)));
        let (mut first, mut others) = (Vec::new(), Vec::new());
        for sample in self.of(layer, ProfiledOp::BackwardWeight) {
            let is_first = sample.micro_batch == MicroBatch(0);
            let (made, peak) = match is_first {
                true => (gradients, &mut cost.first_backward_weight_peak),
                false => (Bytes(0), &mut cost.backward_weight_peak),
            };
            *peak = (*peak).max(sample.peak - sample.before);
            let given_back = (sample.before + made - sample.after).0;
            if is_first { &mut first } else { &mut others }.push(given_back);
        }
        if cost.backward_weight_peak == Bytes(0) {
            cost.backward_weight_peak = cost.first_backward_weight_peak;
        }
        // Other stages may free memory meanwhile, so the maximum would be too large.
        for given_back in [&mut first, &mut others] {
            cost.split = cost.split.max(Bytes(gpipe_core::simulate::median(given_back).0));
        }
    }

    /// Notes which layers' backwards could not be split, and how many gradient bytes I computes.
    pub(super) fn fill_halves(&self, costs: &mut ModelCosts) {
        for (state, bytes) in costs.layers.iter_mut().zip(&self.bytes) {
            state.unsplit |= bytes.unsplit;
            state.early = state.early.max(Bytes(bytes.early));
        }
    }

    /// Divides the once-per-step costs of a stage among its layers by the bytes of their gradients,
    /// and fills in what layers hold between steps. The size measured last counts.
    pub(super) fn fill_states(&self, costs: &mut ModelCosts) {
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
            let ends = [ProfiledOp::Norm, ProfiledOp::Update];
            let peaks = ends.iter().flat_map(|work| self.of(start, *work));
            let peak = peaks.map(|sample| (sample.peak - sample.before).0).max().unwrap_or(0);
            let state = &mut costs.layers[layer];
            state.parameters = Bytes(bytes.parameters);
            state.gradients = Bytes(bytes.gradients);
            state.optimizer = Bytes(bytes.optimizer);
            state.statistics = Bytes(bytes.statistics);
            state.norm = part(self.typical(start, ProfiledOp::Norm));
            state.update = part(self.typical(start, ProfiledOp::Update));
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

/// By stage and operation: total time of its actions, and of the layers in them.
fn actions(
    timelines: &[Timeline],
    samples: &[Sample],
    starts: &[usize],
    micro_batches: usize,
) -> HashMap<(usize, ProfiledOp), (f64, f64)> {
    let stage_of = |layer: LayerId| starts.iter().rposition(|&start| start <= layer.index());
    let mut sums: HashMap<(usize, ProfiledOp), (f64, f64)> = HashMap::new();
    for sample in samples {
        if let Some(stage) = stage_of(LayerId::from_index(sample.layer)) {
            sums.entry((stage, sample.work)).or_default().1 += sample.time.0 as f64;
        }
    }
    for timeline in timelines {
        let recomputed = RematSet::from_actions(timeline.actions());
        for timed in timeline.devices.iter().flatten() {
            let early = timed.action.op.computes().is_none_or(|m| m.index() < micro_batches);
            if let Some(work) = work_of(timed.action, &recomputed).filter(|_| early) {
                let time = (timed.end - timed.start).0 as f64;
                // Only operations with measured layers count.
                if let Some((action, _)) = sums.get_mut(&(timed.action.stage.index(), work)) {
                    *action += time;
                }
            }
        }
    }
    sums
}

fn work_of(action: Action, recomputed: &RematSet) -> Option<ProfiledOp> {
    let again = |m| recomputed.contains(action.stage, m);
    Some(match action.op {
        Op::Forward(m) if again(m) => ProfiledOp::Forward,
        Op::Forward(_) => ProfiledOp::ForwardKept,
        Op::Rematerialize(_) => ProfiledOp::Rematerialize,
        Op::Backward(m) => ProfiledOp::Backward { kept: !again(m) },
        Op::BackwardInput(m) => ProfiledOp::BackwardInput { kept: !again(m) },
        Op::BackwardWeight(_) => ProfiledOp::BackwardWeight,
        Op::Norm => ProfiledOp::Norm,
        Op::Update => ProfiledOp::Update,
        _ => return None,
    })
}
