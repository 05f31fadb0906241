//! Estimates a model's time and memory from shapes alone: nothing is built and nothing runs.
//!
//! Times follow the roofline model. Bytes come from a [`Tape`], which replays each layer's forward
//! in shapes.
//!
//! ```
//! use gpipe::{
//!     Adam, CrossEntropy, Kernels, Sequence, TensorSpec,
//!     estimate::{Rate, Training, estimate}, layers::Linear,
//! };
//! use tch::Kind;
//! let model = Sequence::new().layer(Linear::new(64, 256)).layer(Linear::new(256, 10));
//! let training = Training {
//!     kind: Kind::Float, kernels: Kernels::Aten, losses: &[&CrossEntropy::default()],
//!     optimizer: &Adam::default(), average: false, loss_rows: None,
//! };
//! let one = [TensorSpec::new([1, 64], Kind::Float)];
//! let costs = estimate(&model, &one, &training, &[8], &Rate::default())?;
//! assert_eq!(costs.layers[0].parameters.0, 4 * (64 * 256 + 256));
//! assert_eq!(costs.sizes[&8][1].kept.0, 4 * 8 * 10);
//! # Ok::<(), gpipe::Error>(())
//! ```

use std::collections::{BTreeMap, HashMap};

use gpipe_bridge::linear::Kernels;
use gpipe_core::{
    Bytes, Nanos,
    cost::{LayerCost, LayerState, ModelCosts, SkipCost, TieCost, Transport},
};
use tch::Kind;

pub use crate::tape::{Node, Strides, Tape, Var, bytes};
use crate::{
    error::{Error, Result},
    layer::{Infer, ParameterSpec},
    loss::{self, Loss},
    optim::{Optimizer, ParameterInfo},
    precision::Precision,
    sequence::{NamedLayer, Sequence, TieGroup},
    spec::TensorSpec,
    tape::{Outside, Totals},
};

/// The speed of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Floating-point operations per second.
    pub flops_per_s: f64,
    /// Bytes per second to and from its memory.
    pub bytes_per_s: f64,
    /// Added to each layer's forward and to each backward.
    pub latency: Nanos,
}

impl Default for Rate {
    /// 10^12 operations and 10^11 bytes per second, without latency. These numbers are for
    /// comparing layers; they describe no real device.
    fn default() -> Self {
        Self { flops_per_s: 1e12, bytes_per_s: 1e11, latency: Nanos(0) }
    }
}

impl Rate {
    /// The roofline model (Williams et al. 2009): arithmetic and memory traffic overlap, and the
    /// slower of them determines the time.
    fn time(&self, flops: f64, bytes: f64) -> Nanos {
        let seconds = (flops / self.flops_per_s).max(bytes / self.bytes_per_s);
        self.latency + Nanos((seconds * 1e9).round() as u64)
    }

    fn check(&self) -> Result<()> {
        let numbers = [("flops_per_s", self.flops_per_s), ("bytes_per_s", self.bytes_per_s)];
        match numbers.iter().find(|(_, number)| !(number.is_finite() && *number > 0.0)) {
            None => Ok(()),
            Some((name, number)) => {
                Err(Error::Setting(format!("a device's {name} is {number}: it must be above 0")))
            }
        }
    }
}

/// The training settings that costs depend on.
#[derive(Clone, Copy)]
pub struct Training<'a> {
    /// The dtype of computation.
    pub kind: Kind,
    /// The choice of kernels.
    pub kernels: Kernels,
    /// The losses.
    pub losses: &'a [&'a dyn Loss],
    /// The optimizer.
    pub optimizer: &'a dyn Optimizer,
    /// Whether moving averages of the parameters are kept.
    pub average: bool,
    /// Number of rows of the last layer and the losses that are computed at a time
    /// ([`PipelineBuilder::loss_rows`](crate::PipelineBuilder::loss_rows)). `None`: all rows.
    pub loss_rows: Option<usize>,
}

/// Estimates the costs of `sequence` for micro-batches of each of `sizes` samples.
///
/// `inputs` are specs of one sample: the first size of those with samples is 1. `rate` is the speed
/// of the device. Messages take no time unless the caller sets [`ModelCosts::transport`]. In
/// bfloat16 and float16, stages copy inputs to that dtype. Not counted are the copies of shared
/// inputs, and those that later stages make of inputs by name.
///
/// A layer without [`crate::Layer::record`] counts as if autograd saved nothing. It then keeps only
/// its outputs for the backward, besides its inputs and parameters. A layer without
/// [`crate::Layer::flops`] counts one operation for each element of its inputs and outputs.
///
/// # Errors
/// [`Error::Model`]: shapes, names or ties do not fit. [`Error::Setting`]: the dtype is not
/// supported, there are no sizes, or a rate is not above 0.
pub fn estimate(
    sequence: &Sequence,
    inputs: &[TensorSpec],
    training: &Training,
    sizes: &[usize],
    rate: &Rate,
) -> Result<ModelCosts> {
    rate.check()?;
    let precision = Precision::of(training.kind).ok_or_else(|| {
        let kind = training.kind;
        Error::Setting(format!(
            "dtype {kind:?} is not supported: use Float, Double, BFloat16 or Half"
        ))
    })?;
    if sequence.is_empty() || sizes.is_empty() || sizes.contains(&0) {
        return Err(Error::Setting(
            "an estimate needs a layer, and sizes of micro-batches of at least 1 sample".into(),
        ));
    }
    loss::check_handed(training.losses, sequence)?;
    let model = Model { sequence, precision, training, rate };
    let one = model.inputs(inputs, 1);
    let specs: Vec<TensorSpec> = one.iter().map(|outside| outside.spec.clone()).collect();
    let inferred = sequence.infer(&specs, training.kind)?;
    let ties = sequence.ties()?;
    let narrowed = specs.iter().enumerate().filter(|(at, spec)| {
        let is_shared = sequence.inputs.is_shared(*at, specs.len());
        precision.is_reduced() && spec.kind == training.kind && !is_shared
    });
    let single = model.run(one)?;
    let skips = inferred.skips.iter().map(|skip| {
        let (stash, pop) = (skip.stash.index(), skip.pop.index());
        let own = single.skip_gradients.get(&(pop, skip.name.clone()));
        let bytes = held(bytes(&skip.spec));
        SkipCost { stash, pop, bytes, gradient: own.map_or(bytes, |own| held(*own)) }
    });
    let by_size: BTreeMap<usize, Vec<LayerCost>> = sizes
        .iter()
        .map(|&samples| Ok((samples, model.run(model.inputs(inputs, samples))?.costs)))
        .collect::<Result<_>>()?;
    let states = sequence.layers.iter().zip(&inferred.specs).zip(&single.statistics);
    type Pair<'a> = (&'a NamedLayer, &'a Vec<TensorSpec>);
    let state =
        |((layer, inputs), statistics): (Pair, &f64)| model.state(layer, inputs, *statistics);
    Ok(ModelCosts {
        layers: states.map(state).collect(),
        sizes: by_size,
        under: BTreeMap::new(),
        skips: skips.collect(),
        ties: ties.iter().map(|group| model.tie(group)).collect(),
        trained_before: sequence.trained_before(),
        fed: held(narrowed.map(|(_, spec)| bytes(spec)).sum()),
        transport: Transport::default(),
        replicated: false,
        ..ModelCosts::default()
    })
}

/// The costs of one micro-batch size.
#[derive(Default)]
struct Run {
    /// By layer; the loss is last.
    costs: Vec<LayerCost>,
    /// By layer: bytes of its batch statistics.
    statistics: Vec<f64>,
    /// By the layer that pops, and by name.
    skip_gradients: HashMap<(usize, String), f64>,
}

struct Model<'a> {
    sequence: &'a Sequence,
    precision: Precision,
    training: &'a Training<'a>,
    rate: &'a Rate,
}

impl Model<'_> {
    /// The first layer's inputs: this many samples, in the user's layout.
    fn inputs(&self, inputs: &[TensorSpec], samples: usize) -> Vec<Outside> {
        let specs = self.sequence.inputs.with_samples(&self.precision.fed(inputs), samples);
        specs.into_iter().map(|spec| Outside { spec, channels_last: false }).collect()
    }

    /// Runs all layers and the loss in shapes, from these inputs of the first layer.
    fn run(&self, inputs: Vec<Outside>) -> Result<Run> {
        let trained_before = self.sequence.trained_before();
        let mut ctx = Infer::new(self.training.kind);
        let mut open: HashMap<String, Outside> = HashMap::new();
        let given = self.sequence.inputs.split(&inputs);
        let (mut values, named) = (given.positional.to_vec(), given.named());
        ctx.named = named.iter().map(|(name, own)| (name.clone(), own.spec.clone())).collect();
        let mut run = Run::default();
        for (index, layer) in self.sequence.layers.iter().enumerate() {
            let specs: Vec<TensorSpec> = values.iter().map(|value| value.spec.clone()).collect();
            let outputs = layer.layer.infer(&mut ctx, &specs);
            let outputs = outputs.map_err(|error| self.sequence.error(index, error))?;
            let grads = trained_before[index];
            let mut tape = self.tape(layer.parameters.clone());
            let vars: Vec<Var> = values.iter().map(|value| tape.input(value, grads)).collect();
            named.iter().for_each(|(name, own)| tape.offer_input(name, own));
            for name in ctx.popped.drain(..) {
                if let Some(skip) = open.remove(&name) {
                    tape.offer(&name, &skip, grads);
                }
            }
            let recorded = layer.layer.record(&mut tape, &vars);
            let recorded = recorded.unwrap_or_else(|| unknown(&mut tape, &vars, &outputs));
            for name in ctx.stashed.drain(..) {
                let Some((_, spec)) = ctx.open.iter().find(|(own, _)| *own == name) else {
                    continue;
                };
                let known =
                    tape.stashed().find(|(own, _)| *own == name).map(|(_, outside)| outside);
                let plain = || Outside { spec: spec.clone(), channels_last: false };
                open.insert(name, known.unwrap_or_else(plain));
            }
            if index + 1 == self.sequence.layers.len()
                && let (Some(chunk), [x]) = (self.training.loss_rows, &values[..])
            {
                let cost = self.by_rows(layer, x, grads, chunk);
                run.costs.extend([cost, LayerCost::default()]);
                run.statistics.push(0.0);
                return Ok(run);
            }
            let touched = || specs.iter().chain(&outputs).map(TensorSpec::elements).sum();
            let flops = layer.layer.flops(&specs).unwrap_or_else(touched);
            let inputs = specs.iter().map(bytes).sum();
            values = recorded.iter().map(|&var| tape.outside(var)).collect();
            let (totals, gradients) = tape.finish(&recorded);
            let mut cost = self.cost(inputs, flops, &totals);
            if !layer.layer.may_end_early() {
                cost.unread = Bytes(0);
            }
            run.costs.push(cost);
            run.statistics.push(totals.statistics);
            let gradients = gradients.into_iter();
            run.skip_gradients.extend(gradients.map(|(name, bytes)| ((index, name), bytes)));
        }
        let grads = trained_before.last().copied().unwrap_or(false);
        run.costs.push(self.loss(&values, grads));
        Ok(run)
    }

    fn tape(&self, parameters: Vec<ParameterSpec>) -> Tape {
        Tape::new(self.precision, self.training.kernels, parameters)
    }

    /// The cost of the loss. It sees outputs in float32 if the compute dtype is smaller.
    fn loss(&self, outputs: &[Outside], grads: bool) -> LayerCost {
        let mut tape = self.tape(Vec::new());
        let vars: Vec<Var> = outputs.iter().map(|value| tape.input(value, grads)).collect();
        let kind = |var: Var, tape: &Tape| tape.spec(var).kind;
        let seen: Vec<Var> = vars
            .iter()
            .map(|&var| match kind(var, &tape) == self.precision.compute {
                true => tape.cast(var, self.precision.master),
                false => var,
            })
            .collect();
        let sum = loss::record(self.training.losses, &mut tape, &seen, self.precision.master);
        let sums: Vec<Var> = sum.into_iter().collect();
        let elements: f64 = outputs.iter().map(|outside| outside.spec.elements()).sum();
        let inputs = outputs.iter().map(|outside| bytes(&outside.spec)).sum();
        let cost = self.cost(inputs, LOSS_FLOPS * elements, &tape.finish(&sums).0);
        // A forward that discards leaves the loss to the re-materialization.
        LayerCost { forward: Nanos(0), ..cost }
    }

    /// The cost of the last layer `of` with the losses, computed on `chunk` rows of `x` at a time.
    /// The backward computes everything.
    fn by_rows(&self, of: &NamedLayer, x: &Outside, grads: bool, chunk: usize) -> LayerCost {
        let all = x.spec.elements() / x.spec.last().max(1) as f64;
        let rows = all.min(chunk as f64).max(1.0);
        let chunks = (all / rows).ceil().max(1.0) as u64;
        let spec = TensorSpec::new([rows as i64, x.spec.last()], x.spec.kind);
        let part = Outside { spec: spec.clone(), channels_last: false };
        let mut tape = self.tape(of.parameters.clone());
        let input = tape.input(&part, grads);
        let inferred =
            of.layer.infer(&mut Infer::new(self.training.kind), std::slice::from_ref(&spec));
        let recorded = of.layer.record(&mut tape, &[input]);
        let recorded =
            recorded.unwrap_or_else(|| unknown(&mut tape, &[input], &inferred.unwrap_or_default()));
        let values: Vec<Outside> = recorded.iter().map(|&var| tape.outside(var)).collect();
        let flops = of.layer.flops(std::slice::from_ref(&spec)).unwrap_or_else(|| spec.elements());
        let layer = self.cost(bytes(&spec), flops, &tape.finish(&recorded).0);
        let trains = grads || of.parameters.iter().any(|own| own.trainable);
        let loss = self.loss(&values, trains);
        let time = layer.forward + layer.backward + loss.forward_kept + loss.backward;
        let dx = if grads { bytes(&x.spec) } else { 0.0 };
        let peak = |backward: Bytes| {
            let logits = layer.kept;
            let moments = [
                layer.forward_peak,
                logits + loss.forward_peak,
                logits + loss.kept + loss.backward_peak,
                logits + loss.input_gradients + backward,
            ];
            // The gradients of all rows.
            moments.into_iter().max().unwrap_or_default() + held(dx)
        };
        LayerCost {
            backward: Nanos(time.0 * chunks),
            backward_kept: Nanos(time.0 * chunks),
            backward_input: Nanos(time.0 * chunks),
            inputs: held(bytes(&x.spec)),
            input_gradients: held(dx),
            backward_peak: peak(layer.backward_peak),
            first_backward_peak: peak(layer.first_backward_peak),
            backward_input_peak: peak(layer.first_backward_peak),
            ..LayerCost::default()
        }
    }

    fn cost(&self, inputs: f64, flops: f64, totals: &Totals) -> LayerCost {
        let traffic = totals.traffic;
        let forward = self.rate.time(flops, traffic);
        // One product for the input's gradient and one for the weight's. Only the latter is needed
        // if nothing before the layer is trained.
        let products = if totals.input_gradients > 0.0 { 2.0 } else { 1.0 };
        let backward = self.rate.time(products * flops, products * traffic);
        // In a split backward, each half computes one product. If there is only one half, it does
        // all.
        let (input, weight) = match (totals.trained, totals.input_gradients > 0.0) {
            (true, true) => (forward, self.rate.time(flops, traffic)),
            (true, false) => (Nanos(0), backward),
            (false, _) => (backward, Nanos(0)),
        };
        let of = totals.products;
        let rest = self.rate.time((flops - of.flops).max(0.0), (traffic - of.traffic).max(0.0));
        LayerCost {
            forward,
            forward_kept: forward,
            rematerialize: forward,
            rematerialize_selective: rest.min(forward),
            products: held(of.bytes),
            backward,
            backward_kept: backward,
            backward_input: input,
            backward_weight: weight,
            split: held(totals.split),
            backward_input_peak: held(totals.backward_peak + totals.captured),
            backward_weight_peak: held(totals.backward_peak),
            first_backward_weight_peak: held(totals.first_backward_peak),
            inputs: held(inputs),
            input_gradients: held(totals.input_gradients),
            kept: held(totals.kept),
            unread: held(totals.unread),
            forward_peak: held(totals.forward_peak),
            // Counted as if the products were computed again.
            selective_peak: held(totals.forward_peak),
            backward_peak: held(totals.backward_peak),
            first_backward_peak: held(totals.first_backward_peak),
        }
    }

    fn state(&self, layer: &NamedLayer, inputs: &[TensorSpec], statistics: f64) -> LayerState {
        let own = layer.parameters.iter().filter(|spec| spec.tie.is_none());
        let trained = layer.parameters.iter().filter(|spec| spec.trainable);
        let gradients: Vec<f64> = trained.map(|spec| self.master(&spec.shape)).collect();
        let parameters: f64 = own.clone().map(|spec| self.parameter(spec)).sum();
        let pieces = own.clone().filter(|spec| spec.trainable);
        let pieces: Vec<f64> = pieces.map(|spec| self.state_of(&layer.name, spec)).collect();
        let optimizer =
            pieces.iter().sum::<f64>() + own.map(|spec| self.average_of(spec)).sum::<f64>();
        let sum: f64 = gradients.iter().sum();
        let rule = self.training.optimizer;
        let largest = gradients.iter().copied().reduce(f64::max);
        let largest = largest.filter(|_| rule.temporaries() > 0);
        let touched = || inputs.iter().map(TensorSpec::elements).sum();
        LayerState {
            name: layer.name.clone(),
            parameters: held(parameters),
            gradients: held(sum),
            optimizer: held(optimizer),
            shardable: pieces.into_iter().map(held).collect(),
            statistics: held(statistics),
            norm: self.rate.time(0.0, sum),
            // An update reads everything, and writes everything but the gradients.
            update: self.rate.time(0.0, sum + 2.0 * (parameters + optimizer)),
            update_peak: held(
                largest.map_or(0.0, |bytes| rule.temporary_bytes(bytes as u64) as f64 + SCALARS),
            ),
            // With `loss_rows`, the last layer's backward is not split.
            unsplit: self.training.loss_rows.is_some()
                && self.sequence.layers.last().is_some_and(|last| last.name == layer.name),
            early: Bytes(0),
            flops: layer.layer.flops(inputs).unwrap_or_else(touched) as u64,
        }
    }

    fn tie(&self, group: &TieGroup) -> TieCost {
        let mut layers: Vec<usize> = group.uses.iter().map(|(layer, _)| layer.index()).collect();
        layers.dedup();
        let used = group.uses.first();
        let (parameters, state, average) = used.map_or((0.0, 0.0, 0.0), |(layer, slot)| {
            let layer = &self.sequence.layers[layer.index()];
            let spec = &layer.parameters[*slot];
            (self.parameter(spec), self.state_of(&layer.name, spec), self.average_of(spec))
        });
        let (parameters, optimizer) = (held(parameters), held(state + average));
        TieCost { layers, parameters, optimizer, shardable: held(state) }
    }

    fn master(&self, shape: &[i64]) -> f64 {
        bytes(&TensorSpec::new(shape, self.precision.master))
    }

    /// Bytes of the parameter and its copy in the compute dtype.
    fn parameter(&self, spec: &ParameterSpec) -> f64 {
        let stored = spec.stored(self.precision);
        let copied = stored != self.precision.compute && !spec.buffer;
        let copy = TensorSpec::new(spec.shape.clone(), self.precision.compute);
        let own = TensorSpec::new(spec.shape.clone(), stored);
        bytes(&own) + if copied { bytes(&copy) } else { 0.0 }
    }

    /// Bytes of the parameter's optimizer state.
    fn state_of(&self, layer: &str, spec: &ParameterSpec) -> f64 {
        if !spec.trainable {
            return 0.0;
        }
        let (name, kind) = (format!("{layer}.{}", spec.name), self.precision.master);
        let parameter = ParameterInfo { name: &name, shape: &spec.shape, kind };
        let state = self.training.optimizer.state(&parameter);
        state.iter().map(|state| bytes(&state.spec(kind))).sum()
    }

    /// Bytes of the parameter's moving average.
    fn average_of(&self, spec: &ParameterSpec) -> f64 {
        let is_kept = self.training.average && spec.trainable;
        if is_kept { self.master(&spec.shape) } else { 0.0 }
    }
}

/// Operations of a loss per element of its input.
const LOSS_FLOPS: f64 = 8.0;
/// Bytes that an update allocates besides its temporaries.
const SCALARS: f64 = 1024.0;

/// Records a layer without [`crate::Layer::record`]: its outputs, computed from all inputs and
/// parameters at once.
fn unknown(tape: &mut Tape, inputs: &[Var], outputs: &[TensorSpec]) -> Vec<Var> {
    let one = |(number, spec): (usize, &TensorSpec)| {
        let node = Node::new(inputs, spec.clone());
        let parameters = if number == 0 { tape.parameter_count() } else { 0 };
        tape.push((0..parameters).fold(node, Node::parameter))
    };
    outputs.iter().enumerate().map(one).collect()
}

fn held(bytes: f64) -> Bytes {
    Bytes(bytes.max(0.0) as u64)
}
