//! A tape replays a layer's forward in shapes alone, to find the bytes that forward and backward
//! hold.
//!
//! A tape records which tensors the forward allocates and which of them autograd saves. A formula
//! per layer would not do: the peak of a backward depends on where gradients meet, and a formula
//! for a cell of ten branches would be wrong. Instead the tape walks the graph as autograd's engine
//! does, from the last node to the first. Each node frees what it saved. Gradients that meet are
//! added in place if nothing else holds them.

mod attention;
mod backward;
mod images;
mod node;
mod operations;

use std::{collections::HashMap, sync::Arc};

use gpipe_bridge::linear::Kernels;
use tch::Kind;

pub use self::{
    images::Strides,
    node::{Node, Var},
};
use crate::{adapter::Adapter, parameter::ParameterSpec, precision::Precision, spec::TensorSpec};

#[derive(Debug, Clone)]
struct Value {
    spec: TensorSpec,
    memory: usize,
    grad: bool,
    channels_last: bool,
    /// Whether a variable of the forward still holds the tensor.
    held: bool,
}

/// Bytes of a tensor of `spec`.
///
/// The result is a whole number. It is an `f64` so that sums and products of absurd sizes cannot
/// overflow.
pub fn bytes(spec: &TensorSpec) -> f64 {
    spec.elements() * spec.kind.elt_size_in_bytes() as f64
}

/// Memory blocks, each with its number of users.
#[derive(Debug, Clone, Default)]
struct Memory {
    blocks: Vec<(f64, u32)>,
    live: f64,
    peak: f64,
}

impl Memory {
    /// Allocates a block with one user.
    fn allocate(&mut self, bytes: f64) -> usize {
        self.blocks.push((bytes, 1));
        self.live += bytes;
        self.look(0.0);
        self.blocks.len() - 1
    }

    fn share(&mut self, block: usize) -> usize {
        self.blocks[block].1 += 1;
        block
    }

    fn release(&mut self, block: usize) {
        let (bytes, users) = &mut self.blocks[block];
        *users -= 1;
        if *users == 0 {
            self.live -= *bytes;
        }
    }

    /// Updates the peak as if `more` bytes were in use for a moment.
    fn look(&mut self, more: f64) {
        self.peak = self.peak.max(self.live + more);
    }
}

/// A node that has run, with the blocks that it saved.
#[derive(Debug)]
struct Ran {
    node: Node,
    output: Var,
    saved: Vec<usize>,
}

/// Records one forward of a layer, for one micro-batch. [`crate::Layer::record`] writes on it.
///
/// A tensor counts as held until the layer is done or [`Tape::release`] is called, just as a
/// variable of a function is.
#[derive(Debug)]
pub struct Tape {
    precision: Precision,
    kernels: Kernels,
    parameters: Vec<ParameterSpec>,
    /// Adapters of the layer's weights.
    adapters: Arc<[Adapter]>,
    values: Vec<Value>,
    nodes: Vec<Ran>,
    memory: Memory,
    inputs: Vec<Var>,
    /// The pipeline's inputs by name.
    named: Vec<(String, Var)>,
    /// Skips that the layer may pop.
    open: HashMap<String, Var>,
    popped: Vec<(String, Var)>,
    statistics: f64,
    stashed: Vec<(String, Var)>,
    traffic: f64,
    products: Products,
}

/// The share of matrix products and convolutions in a layer's forward.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Products {
    /// Bytes of their outputs.
    pub bytes: f64,
    pub flops: f64,
    pub traffic: f64,
}

/// What a layer's forward and backward hold and move.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Totals {
    pub input_gradients: f64,
    /// Bytes of batch statistics.
    pub statistics: f64,
    pub kept: f64,
    /// The part of `kept` that no backward reads.
    pub unread: f64,
    pub forward_peak: f64,
    pub backward_peak: f64,
    pub first_backward_peak: f64,
    /// Bytes that the first half of a split backward leaves for the second half.
    pub split: f64,
    /// The gradients' part of `split`.
    pub captured: f64,
    /// Whether the layer has trained parameters.
    pub trained: bool,
    /// Bytes that the operations read and write in a forward.
    pub traffic: f64,
    pub products: Products,
}

impl Tape {
    pub(super) fn new(
        precision: Precision,
        kernels: Kernels,
        parameters: Vec<ParameterSpec>,
    ) -> Self {
        Self {
            precision,
            kernels,
            parameters,
            adapters: Arc::default(),
            values: Vec::new(),
            nodes: Vec::new(),
            memory: Memory::default(),
            inputs: Vec::new(),
            named: Vec::new(),
            open: HashMap::new(),
            popped: Vec::new(),
            statistics: 0.0,
            stashed: Vec::new(),
            traffic: 0.0,
            products: Products::default(),
        }
    }

    /// Adds adapters to the layer's linear operations.
    pub(crate) fn adapt(&mut self, adapters: Arc<[Adapter]>) {
        self.adapters = adapters;
    }

    fn adapter_of(&self, weight: usize) -> Option<Adapter> {
        self.adapters.iter().find(|own| own.weight == weight).copied()
    }

    /// Adds an input of the layer.
    pub(super) fn input(&mut self, outside: &Outside, grad: bool) -> Var {
        let var = self.given(outside, grad);
        self.inputs.push(var);
        var
    }

    fn given(&mut self, outside: &Outside, grad: bool) -> Var {
        let memory = self.memory.allocate(0.0);
        let grad = grad && outside.spec.is_float();
        let Outside { spec, channels_last } = outside.clone();
        self.values.push(Value { spec, memory, grad, channels_last, held: true });
        Var(self.values.len() - 1)
    }

    /// Adds an input of the pipeline, by name.
    pub(super) fn offer_input(&mut self, name: &str, outside: &Outside) {
        if !outside.spec.is_none() {
            let var = self.given(outside, false);
            self.named.push((name.to_owned(), var));
        }
    }

    /// The pipeline's input `name`; `None` as [`crate::Forward::named`] says.
    pub fn named(&self, name: &str) -> Option<Var> {
        self.named.iter().find(|(own, _)| own == name).map(|(_, var)| *var)
    }

    /// Adds a skip that the layer may pop.
    pub(super) fn offer(&mut self, name: &str, outside: &Outside, grad: bool) {
        let var = self.given(outside, grad);
        self.open.insert(name.to_owned(), var);
    }

    /// Shape and dtype of `x`.
    pub fn spec(&self, x: Var) -> &TensorSpec {
        &self.values[x.0].spec
    }

    /// Bytes of `x`.
    pub fn bytes(&self, x: Var) -> f64 {
        bytes(self.spec(x))
    }

    /// Whether `x` holds images in channels-last layout.
    pub fn is_channels_last(&self, x: Var) -> bool {
        self.values[x.0].channels_last
    }

    /// `x` as it leaves the layer.
    pub(super) fn outside(&self, x: Var) -> Outside {
        let Value { spec, channels_last, .. } = self.values[x.0].clone();
        Outside { spec, channels_last }
    }

    /// Which kernels compute linear layers and convolutions.
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// Shape of the layer's parameter number `parameter`; empty if there is none.
    pub fn shape(&self, parameter: usize) -> &[i64] {
        self.parameters.get(parameter).map_or(&[], |spec| &spec.shape)
    }

    /// Bytes of the gradient of parameter number `parameter`: its size in the compute dtype.
    pub fn parameter_bytes(&self, parameter: usize) -> f64 {
        bytes(&TensorSpec::new(self.shape(parameter), self.precision.compute))
    }

    /// The dtype of computation.
    pub fn compute_kind(&self) -> Kind {
        self.precision.compute
    }

    /// How many parameters the layer has.
    pub fn parameter_count(&self) -> usize {
        self.parameters.len()
    }

    /// Whether the layer's parameter number `parameter` is trained.
    fn is_trained(&self, parameter: usize) -> bool {
        self.parameters.get(parameter).is_some_and(|spec| spec.trainable)
    }

    /// Records an operation and returns its output.
    pub fn push(&mut self, node: Node) -> Var {
        let size = bytes(&node.output);
        let any = node.inputs.iter().any(|&input| self.values[input.0].grad);
        let grad = (any || node.parameters.iter().any(|&(number, _)| self.is_trained(number)))
            && node.output.is_float();
        let first = node.inputs.first().copied();
        let memory = match (node.view, first) {
            (true, Some(input)) => self.memory.share(self.values[input.0].memory),
            _ => {
                let read: f64 = node.inputs.iter().map(|&input| self.bytes(input)).sum();
                let parameters = node.parameters.iter().map(|&(number, _)| number);
                let weights: f64 = parameters.map(|number| self.parameter_bytes(number)).sum();
                self.traffic += read + weights + size + node.saved_bytes;
                self.memory.allocate(size)
            }
        };
        let mut saved = Vec::new();
        self.memory.look(node.forward_bytes + node.saved_bytes);
        if grad {
            let tensors = node.saved.iter().map(|&input| self.values[input.0].memory);
            let tensors = tensors.chain(node.saves_output.then_some(memory));
            for block in tensors {
                saved.push(self.memory.share(block));
            }
            saved.push(self.memory.allocate(node.saved_bytes));
        }
        let inherited = first.is_some_and(|input| self.values[input.0].channels_last);
        let channels_last = node.channels_last.unwrap_or(inherited);
        let spec = node.output.clone();
        self.values.push(Value { spec, memory, grad, channels_last, held: true });
        let output = Var(self.values.len() - 1);
        if grad {
            self.nodes.push(Ran { node, output, saved });
        }
        output
    }

    /// Records a matrix product or a convolution, as [`Tape::push`] does. Selective
    /// re-materialization may keep its output.
    pub(super) fn push_product(&mut self, node: Node, flops: f64) -> Var {
        let (before, made) = (self.traffic, bytes(&node.output));
        let output = self.push(node);
        self.products.bytes += made;
        self.products.flops += flops;
        self.products.traffic += self.traffic - before;
        output
    }

    /// Ends the life of the forward's variable for `x`.
    pub fn release(&mut self, x: Var) {
        if std::mem::take(&mut self.values[x.0].held) {
            self.memory.release(self.values[x.0].memory);
        }
    }

    /// Sends `x` over a long skip.
    pub fn stash(&mut self, name: &str, x: Var) {
        self.stashed.push((name.to_owned(), x));
    }

    /// Takes a value that an earlier layer stashed under `name`; `None` if there is none.
    pub fn pop(&mut self, name: &str) -> Option<Var> {
        let (name, var) = self.open.remove_entry(name)?;
        self.popped.push((name, var));
        Some(var)
    }

    /// Counts `bytes` of batch statistics. The running statistics need them until the step's norm.
    pub(super) fn counted(&mut self, bytes: f64) {
        self.statistics += bytes;
    }

    /// The values that the layer stashed.
    pub(super) fn stashed(&self) -> impl Iterator<Item = (&str, Outside)> {
        self.stashed.iter().map(|(name, var)| (name.as_str(), self.outside(*var)))
    }

    /// Ends the layer: returns its totals, and the bytes of the gradient of each popped skip.
    pub(super) fn finish(mut self, outputs: &[Var]) -> (Totals, Vec<(String, f64)>) {
        let stashed: Vec<Var> = self.stashed.iter().map(|(_, var)| *var).collect();
        let outputs: Vec<Var> = outputs.iter().copied().chain(stashed).collect();
        for var in (0..self.values.len()).map(Var) {
            if !outputs.contains(&var) {
                self.release(var);
            }
        }
        let wanted = self.inputs.iter().filter(|&&input| self.values[input.0].grad);
        let (backward_peak, gradients) = self.backward(&outputs, false);
        let totals = Totals {
            input_gradients: wanted.map(|&input| self.bytes(input)).sum(),
            statistics: self.statistics,
            kept: self.memory.live,
            unread: self.memory.live - self.without(&outputs).live,
            forward_peak: self.memory.peak,
            backward_peak,
            first_backward_peak: self.backward(&outputs, true).0,
            split: self.split(&outputs) + self.captured(&outputs),
            captured: self.captured(&outputs),
            trained: self.starts().next().is_some(),
            traffic: self.traffic,
            products: self.products,
        };
        let of = |var: &Var| gradients.get(var).copied().unwrap_or(0.0);
        (totals, self.popped.iter().map(|(name, var)| (name.clone(), of(var))).collect())
    }
}

/// A tensor between two layers.
#[derive(Debug, Clone)]
pub(super) struct Outside {
    pub spec: TensorSpec,
    pub channels_last: bool,
}
