//! The tables of `gpipe profile`, each at most 80 columns wide.

use gpipe::{Bytes, Nanos, profile::Profile};
use gpipe_core::{
    cost::{LayerCost, ModelCosts, Spread, Transport},
    plan::shortened,
    schedule::Schedule,
};

use crate::{
    config::Config,
    output::{prose, say},
};

/// The time of forward, re-materialization and backward.
fn time_of(cost: &LayerCost) -> Nanos {
    // A schedule that splits backwards has only the halves.
    cost.forward
        + cost.rematerialize
        + cost.backward.max(cost.backward_input + cost.backward_weight)
}

fn ms(time: Nanos) -> String {
    format!("{:.2}", time.as_ms())
}

/// Prints the time of split backwards, relative to whole ones, for each schedule that splits them.
fn show_halves(costs: &ModelCosts, samples: usize) {
    let whole: Nanos = costs.at(samples, &Schedule::OneFOneB).iter().map(|c| c.backward_kept).sum();
    for (name, sizes) in &costs.under {
        let Some(layers) = sizes.get(&samples) else { continue };
        let sum = |time: fn(&LayerCost) -> Nanos| layers.iter().map(time).sum::<Nanos>();
        let (inputs, weights) = (sum(|c| c.backward_input), sum(|c| c.backward_weight));
        if inputs + weights == Nanos(0) {
            continue;
        }
        prose!(
            "backwards in halves, {name}: inputs {} ms, weights {} ms for {samples} samples; \
            together {:.3} of a whole one",
            ms(inputs),
            ms(weights),
            (inputs + weights).0 as f64 / whole.0.max(1) as f64
        );
        let unsplit = costs.layers.iter().filter(|layer| layer.unsplit);
        let unsplit: Vec<&str> = unsplit.map(|layer| layer.name.as_str()).collect();
        if !unsplit.is_empty() {
            prose!("not split, both halves are in the first: {}", unsplit.join(", "));
        }
    }
}

/// Prints the time and memory of selective re-materialization, relative to full re-materialization.
fn show_selective(costs: &ModelCosts, samples: usize, schedule: &Schedule) {
    if !costs.has_selective(samples, schedule) {
        return;
    }
    let layers = costs.at(samples, schedule);
    let sum = |time: fn(&LayerCost) -> Nanos| layers.iter().map(time).sum::<Nanos>();
    let bytes = |of: fn(&LayerCost) -> Bytes| layers.iter().map(of).sum::<Bytes>();
    prose!(
        "recompute, selective: {} ms instead of {} for {samples} samples; what products gave is \
        {} of the {} of activations",
        ms(sum(|c| c.rematerialize_selective)),
        ms(sum(|c| c.rematerialize)),
        bytes(|c| c.products),
        bytes(|c| c.kept)
    );
}

/// Prints a table of the layers at the configured M, measured and estimated, then a table of the
/// sizes, and the other measurements.
pub(super) fn show(
    profile: &Profile,
    estimated: &ModelCosts,
    config: &Config,
    schedule: &Schedule,
) {
    let costs = &profile.costs;
    let samples = config.samples_of_a_micro_batch();
    show_layers(profile, estimated, samples, schedule);
    show_sizes(costs);
    show_halves(costs, samples);
    show_selective(costs, samples, schedule);
    let Transport { latency, bytes_per_s } = costs.transport;
    let bytes = match bytes_per_s {
        0 => String::new(),
        rate => format!(", and {:.2} GB/s", rate as f64 / 1e9),
    };
    prose!("a message between stages: {latency} after its send{bytes}");
    show_spread(profile);
    prose!("{}", host_memory(costs));
}

/// Prints the spread of the steps, and what was done about it.
fn show_spread(profile: &Profile) {
    let costs = &profile.costs;
    let own = costs.spread.iter().map(|(samples, spread)| (*samples, *spread));
    let under = costs.spread_under.values().flatten().map(|(samples, spread)| (*samples, *spread));
    let widest = own.chain(under).max_by(|a, b| a.1.width().total_cmp(&b.1.width()));
    let Some((samples, Spread { low, high })) = widest else { return };
    let part = |part: u32| f64::from(part) / 1000.0;
    prose!(
        "the steps of one kind are spread from {:.2} to {:.2} of their median at most (quartiles, \
        in micro-batches of {samples} samples); {} measurements were made again because they were \
        spread further",
        part(low),
        part(high),
        profile.again
    );
}

/// Prints the layers in micro-batches of `samples` samples.
fn show_layers(profile: &Profile, estimated: &ModelCosts, samples: usize, schedule: &Schedule) {
    let costs = &profile.costs;
    let (layers, spreads) = (costs.at(samples, schedule), profile.spread.get(&samples));
    let estimates = estimated.at(samples, schedule);
    let all = |layers: &[LayerCost]| layers.iter().map(time_of).sum::<Nanos>().0.max(1) as f64;
    let (measured_time, estimated_time) = (all(&layers), all(&estimates));
    let name = |number: usize| match costs.layers.get(number) {
        Some(layer) => shortened(&format!("{number} {}", layer.name), NAME),
        None => "the loss".to_owned(),
    };
    prose!(
        "layers, in micro-batches of {samples} samples under {schedule}: medians in ms, the \
        widest of their quartiles, and the share of the time, measured | estimated from shapes"
    );
    say!(
        "{:<NAME$} {:>8} {:>9} {:>9} {:>9} {:>11} {:>13}",
        "layer",
        "GFLOP",
        "forward",
        "recompute",
        "backward",
        "quartiles",
        "% of time"
    );
    for (number, (cost, estimate)) in layers.iter().zip(&estimates).enumerate() {
        let spread = spreads.and_then(|spreads| spreads.get(number)).copied().unwrap_or_default();
        let flops = costs.layers.get(number).map_or(0, |layer| layer.flops);
        let gflop = flops as f64 * samples as f64 / 1e9;
        let share = |cost: &LayerCost, all: f64| 100.0 * time_of(cost).0 as f64 / all;
        let [forward, recompute, backward] =
            [spread.forward, spread.rematerialize, spread.backward]
                .map(|[_, median, _]| ms(median));
        say!(
            "{:<NAME$} {gflop:>8.3} {forward:>9} {recompute:>9} {backward:>9} {:>11} {:>5.1} | \
            {:>5.1}",
            name(number),
            quartiles(&[spread.forward, spread.rematerialize, spread.backward]),
            share(cost, measured_time),
            share(estimate, estimated_time)
        );
    }
    prose!("what the layers hold (activations: measured | estimated from shapes):");
    say!(
        "{:<NAME$} {:>23} {:>10} {:>10} {:>10}",
        "layer",
        "activations",
        "boundary",
        "parameters",
        "optimizer"
    );
    for (number, (cost, estimate)) in layers.iter().zip(&estimates).enumerate() {
        let state = costs.layers.get(number);
        let bytes = |bytes: Option<Bytes>| bytes.unwrap_or_default().to_string();
        say!(
            "{:<NAME$} {:>10} | {:>10} {:>10} {:>10} {:>10}",
            name(number),
            cost.kept.to_string(),
            estimate.kept.to_string(),
            cost.inputs.to_string(),
            bytes(state.map(|state| state.parameters)),
            bytes(state.map(|state| state.optimizer))
        );
    }
}

/// Width of a layer's number and name, in characters. The tables then fit 80 columns.
const NAME: usize = 16;

/// The lowest and the highest quartile of several times, relative to their medians.
fn quartiles(times: &[[Nanos; 3]]) -> String {
    let over = |quartile: Nanos, median: Nanos| match median.0 {
        0 => 0.0,
        median => 100.0 * (quartile.0 as f64 / median as f64 - 1.0),
    };
    let low = times.iter().map(|&[low, median, _]| over(low, median)).fold(0.0, f64::min);
    let high = times.iter().map(|&[_, median, high]| over(high, median)).fold(0.0, f64::max);
    format!("{low:.0}% +{high:.0}%")
}

/// Prints the sums over all layers, by micro-batch size.
fn show_sizes(costs: &ModelCosts) {
    let flops: u64 = costs.layers.iter().map(|layer| layer.flops).sum();
    prose!("all layers, by size of micro-batches:");
    say!(
        "{:>8} {:>12} {:>14} {:>13} {:>16} {:>9}",
        "samples",
        "forward, ms",
        "recompute, ms",
        "backward, ms",
        "ms for a sample",
        "GFLOP/s"
    );
    for (&samples, layers) in &costs.sizes {
        let sum = |time: fn(&LayerCost) -> Nanos| layers.iter().map(time).sum::<Nanos>();
        let (forward, backward) = (sum(|c| c.forward), sum(|c| c.backward));
        let again = sum(|c| c.rematerialize);
        let one = (forward + again + backward).as_ms() / samples as f64;
        let rate =
            (samples as u64 * flops * 4) as f64 / (forward + again + backward).0.max(1) as f64;
        say!(
            "{samples:>8} {:>12} {:>14} {:>13} {one:>16.2} {rate:>9.1}",
            ms(forward),
            ms(again),
            ms(backward)
        );
    }
}

/// Describes the host memory used besides the stages' tensors.
pub(crate) fn host_memory(costs: &ModelCosts) -> String {
    let state: Bytes = costs.layers.iter().map(|layer| layer.parameters + layer.optimizer).sum();
    let ties: Bytes = costs.ties.iter().map(|tie| tie.parameters + tie.optimizer).sum();
    format!(
        "besides, on the host: {} for a checkpoint while it is written, and the batches made ahead",
        state + ties
    )
}
