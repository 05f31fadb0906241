//! The costs of layers for micro-batches of a size, from those of the sizes that were measured or
//! estimated.

use std::collections::BTreeMap;

use super::{LayerCost, ModelCosts, Spread};
use crate::{schedule::Schedule, units::Nanos};

/// The layers' costs, by samples of a micro-batch.
type Sizes = BTreeMap<usize, Vec<LayerCost>>;

/// The costs for micro-batches of `samples` samples, on the line through the two nearest sizes. If
/// there is only one size, they are in proportion to it.
fn between(sizes: &Sizes, samples: usize) -> Option<Vec<LayerCost>> {
    if let Some(own) = sizes.get(&samples) {
        return Some(own.clone());
    }
    let below: Vec<usize> = sizes.range(..samples).rev().take(2).map(|size| *size.0).collect();
    let above: Vec<usize> = sizes.range(samples..).take(2).map(|size| *size.0).collect();
    let (a, b) = match (&below[..], &above[..]) {
        ([a, ..], [b, ..]) | ([b, a, ..], []) | ([], [a, b, ..]) => (*a, *b),
        ([only], []) | ([], [only]) => {
            let ratio = samples as f64 / *only as f64;
            return Some(sizes[only].iter().map(|cost| cost.map(|x| x as f64 * ratio)).collect());
        }
        ([], []) => return None,
    };
    let share = (samples as f64 - a as f64) / (b as f64 - a as f64);
    let line = |(a, b): (&LayerCost, &LayerCost)| {
        a.zip(b, |a, b| a as f64 + share * (b as f64 - a as f64))
    };
    let mut costs: Vec<LayerCost> = sizes[&a].iter().zip(&sizes[&b]).map(line).collect();
    if [a, b].iter().any(|size| !sizes[size].iter().any(LayerCost::has_selective)) {
        // One of the sizes exceeded a cap when it was measured. Its costs are unknown, not zero, so
        // there is no line to draw.
        for cost in &mut costs {
            (cost.rematerialize_selective, cost.products, cost.selective_peak) = Default::default();
        }
    }
    Some(costs)
}

/// Whether the costs of `schedule` include halves of backwards. A made order is of actions of both
/// kinds, whichever it turns out to need.
fn may_split(schedule: &Schedule) -> bool {
    schedule.splits() || matches!(schedule, Schedule::Custom(own) if own.is_made())
}

impl ModelCosts {
    /// Adds the sizes that `other`, the costs of the same model, has beside these.
    pub fn add_sizes_of(&mut self, other: Self) {
        fn add<K: Ord, V>(own: &mut BTreeMap<K, V>, other: BTreeMap<K, V>) {
            other.into_iter().for_each(|(key, value)| {
                own.entry(key).or_insert(value);
            });
        }
        add(&mut self.sizes, other.sizes);
        add(&mut self.spread, other.spread);
        for (schedule, sizes) in other.under {
            add(self.under.entry(schedule).or_default(), sizes);
        }
        for (schedule, spreads) in other.spread_under {
            add(self.spread_under.entry(schedule).or_default(), spreads);
        }
    }

    /// Whether costs for micro-batches of exactly `samples` samples were measured or estimated.
    pub fn has_size(&self, samples: usize) -> bool {
        self.sizes.contains_key(&samples)
    }

    /// The spread of the times that [`ModelCosts::at`] returns. For a size that was not measured,
    /// it covers the spreads of the nearest sizes. `None` if unknown: the costs come from shapes,
    /// or from an older profile.
    pub fn spread(&self, samples: usize, schedule: &Schedule) -> Option<Spread> {
        let own = self.spread_under.get(&self.measured_as(schedule)).unwrap_or(&self.spread);
        if let Some(found) = own.get(&samples).or_else(|| self.spread.get(&samples)) {
            return Some(*found);
        }
        let below = own.range(..samples).next_back().map(|(_, spread)| *spread);
        let above = own.range(samples..).next().map(|(_, spread)| *spread);
        match (below, above) {
            (Some(below), Some(above)) => Some(below.and(above)),
            (below, above) => below.or(above),
        }
    }

    /// Whether the costs of the halves of a split backward are known, for micro-batches of
    /// `samples` samples under `schedule`.
    pub fn has_halves(&self, samples: usize, schedule: &Schedule) -> bool {
        self.at(samples, schedule).iter().any(LayerCost::has_halves)
    }

    /// Whether the costs of selective re-materialization are known, for micro-batches of `samples`
    /// samples under `schedule`.
    pub fn has_selective(&self, samples: usize, schedule: &Schedule) -> bool {
        self.at(samples, schedule).iter().any(LayerCost::has_selective)
    }

    /// The costs of the layers, then of the loss, for micro-batches of `samples` samples under
    /// `schedule`.
    ///
    /// Costs measured for that size are used as they are: those under `schedule` if there are any,
    /// for other schedules that split backwards and for made orders those under ZB-H1, otherwise
    /// those in `sizes`. Other sizes lie on the line through the two nearest ones; a single size is
    /// scaled in proportion. If the halves of a backward were not measured under a schedule that
    /// splits it, they come from the first schedule by name that has them, and likewise for whole
    /// backwards. Selective re-materialization is measured under one schedule only.
    pub fn at(&self, samples: usize, schedule: &Schedule) -> Vec<LayerCost> {
        self.at_as(samples, &self.measured_as(schedule), may_split(schedule))
    }

    /// Like [`ModelCosts::at`], for every order of the stages that `schedule` runs: also with the
    /// halves of backwards, if they were measured.
    pub fn at_in_any_order(&self, samples: usize, schedule: &Schedule) -> Vec<LayerCost> {
        self.at_as(samples, &self.measured_as(schedule), true)
    }

    /// The name of the schedule under which the costs of `schedule` were measured, or its own.
    fn measured_as(&self, schedule: &Schedule) -> String {
        let name = schedule.to_string();
        match may_split(schedule) && !self.under.contains_key(&name) {
            true => Schedule::ZbH1.to_string(),
            false => name,
        }
    }

    fn at_as(&self, samples: usize, name: &str, with_halves: bool) -> Vec<LayerCost> {
        let own = self.under.get(name).unwrap_or(&self.sizes);
        let found = match own.get(&samples).or_else(|| self.sizes.get(&samples)) {
            Some(found) => Some(found.clone()),
            None => between(own, samples),
        };
        let mut costs = found.unwrap_or_else(|| vec![LayerCost::default(); self.layers.len() + 1]);
        if !costs.iter().any(LayerCost::has_selective)
            && let Some(selective) = between(&self.sizes, samples)
        {
            for (cost, own) in costs.iter_mut().zip(selective) {
                let share =
                    own.rematerialize_selective.0 as f64 / own.rematerialize.0.max(1) as f64;
                let time = Nanos((cost.rematerialize.0 as f64 * share) as u64);
                *cost = LayerCost {
                    rematerialize_selective: time,
                    products: own.products,
                    selective_peak: own.selective_peak,
                    ..*cost
                };
            }
        }
        if !with_halves {
            return costs;
        }
        let split = |sizes: &&Sizes| sizes.values().flatten().any(LayerCost::has_halves);
        let whole = |sizes: &&Sizes| sizes.values().flatten().any(LayerCost::has_whole);
        let others = || self.under.values().chain([&self.sizes]);
        if !costs.iter().any(LayerCost::has_halves)
            && let Some(halves) = others().find(split).and_then(|sizes| between(sizes, samples))
        {
            for (cost, half) in costs.iter_mut().zip(halves) {
                *cost = LayerCost {
                    backward_input: half.backward_input,
                    backward_weight: half.backward_weight,
                    split: half.split,
                    backward_input_peak: half.backward_input_peak,
                    backward_weight_peak: half.backward_weight_peak,
                    first_backward_weight_peak: half.first_backward_weight_peak,
                    ..*cost
                };
            }
        }
        if !costs.iter().any(LayerCost::has_whole)
            && let Some(wholes) = others().find(whole).and_then(|sizes| between(sizes, samples))
        {
            for (cost, whole) in costs.iter_mut().zip(wholes) {
                *cost = LayerCost {
                    backward: whole.backward,
                    backward_kept: whole.backward_kept,
                    backward_peak: whole.backward_peak,
                    first_backward_peak: whole.first_backward_peak,
                    ..*cost
                };
            }
        }
        costs
    }
}
