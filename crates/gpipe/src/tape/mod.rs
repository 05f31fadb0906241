//! A layer's forward in shapes alone: which tensors are made, what autograd saves of them, and so
//! how many bytes the forward and the backward hold.
//!
//! Why not a formula per layer: what a backward holds at most depends on which gradients meet
//! where, and a formula for a cell of ten branches would be wrong. The tape goes through the graph
//! as autograd's engine does: from the last node to the first, each giving back what it saved,
//! gradients that meet being added in place where nobody else holds them.

mod node;
mod operations;

use std::collections::{HashMap, HashSet};

use gpipe_bridge::linear::Kernels;
use tch::Kind;

use self::node::Gradient;
pub use self::{
    node::{Node, Var},
    operations::Strides,
};
use crate::{parameter::ParameterSpec, precision::Precision, spec::TensorSpec};

#[derive(Debug, Clone)]
struct Value {
    spec: TensorSpec,
    memory: usize,
    grad: bool,
    channels_last: bool,
    /// Whether the forward still has it in a variable.
    held: bool,
}

/// Bytes of `spec`. Sizes are whole numbers; they are in float64 because sums and products of
/// absurd ones must not overflow.
pub fn bytes(spec: &TensorSpec) -> f64 {
    spec.elements() * spec.kind.elt_size_in_bytes() as f64
}

/// Memory in use, with who uses it.
#[derive(Debug, Clone, Default)]
struct Memory {
    blocks: Vec<(f64, u32)>,
    live: f64,
    peak: f64,
}

impl Memory {
    /// A block with one user.
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

    /// Notes that so many bytes more are in use for a moment.
    fn look(&mut self, more: f64) {
        self.peak = self.peak.max(self.live + more);
    }
}

/// A node that has run, and the block of its saved bytes.
#[derive(Debug)]
struct Ran {
    node: Node,
    output: Var,
    saved: Vec<usize>,
}

/// What [`crate::Layer::record`] writes on: one forward of a layer, for one micro-batch. Tensors
/// count as held until the layer is done unless they are released, as variables of a function are.
#[derive(Debug)]
pub struct Tape {
    precision: Precision,
    kernels: Kernels,
    parameters: Vec<ParameterSpec>,
    values: Vec<Value>,
    nodes: Vec<Ran>,
    memory: Memory,
    inputs: Vec<Var>,
    /// Skips that the layer may pop.
    open: HashMap<String, Var>,
    popped: Vec<(String, Var)>,
    statistics: f64,
    stashed: Vec<(String, Var)>,
    traffic: f64,
    products: Products,
}

/// What matrix products and convolutions are of a layer's forward.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Products {
    /// What they give.
    pub bytes: f64,
    pub flops: f64,
    pub traffic: f64,
}

/// What a layer's forward and backward hold and move.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Totals {
    pub input_gradients: f64,
    /// Batch norms' statistics.
    pub statistics: f64,
    pub kept: f64,
    pub forward_peak: f64,
    pub backward_peak: f64,
    pub first_backward_peak: f64,
    /// What a backward of the inputs alone leaves to that of the parameters.
    pub split: f64,
    /// Of that, the gradients.
    pub captured: f64,
    /// Whether it has trained parameters.
    pub trained: bool,
    /// Bytes that its operations read and write in a forward.
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
            values: Vec::new(),
            nodes: Vec::new(),
            memory: Memory::default(),
            inputs: Vec::new(),
            open: HashMap::new(),
            popped: Vec::new(),
            statistics: 0.0,
            stashed: Vec::new(),
            traffic: 0.0,
            products: Products::default(),
        }
    }

    /// A tensor that is there before the layer runs.
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

    /// A skip that the layer may pop.
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

    /// Whether `x` is images in channels-last layout.
    pub fn is_channels_last(&self, x: Var) -> bool {
        self.values[x.0].channels_last
    }

    /// As it leaves the layer.
    pub(super) fn outside(&self, x: Var) -> Outside {
        let Value { spec, channels_last, .. } = self.values[x.0].clone();
        Outside { spec, channels_last }
    }

    /// Whose products the affine maps and convolutions take.
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// Shape of the layer's parameter with this number; empty if there is none.
    pub fn shape(&self, parameter: usize) -> &[i64] {
        self.parameters.get(parameter).map_or(&[], |spec| &spec.shape)
    }

    /// Bytes of the layer's parameter with this number in the dtype of the arithmetic: those of its
    /// gradient.
    pub fn parameter_bytes(&self, parameter: usize) -> f64 {
        bytes(&TensorSpec::new(self.shape(parameter), self.precision.compute))
    }

    /// The dtype of the arithmetic.
    pub fn compute_kind(&self) -> Kind {
        self.precision.compute
    }

    /// How many parameters the layer has.
    pub fn parameter_count(&self) -> usize {
        self.parameters.len()
    }

    /// Whether the layer's parameter with this number is trained.
    fn is_trained(&self, parameter: usize) -> bool {
        self.parameters.get(parameter).is_some_and(|spec| spec.trainable)
    }

    /// Runs an operation.
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

    /// As [`Tape::push`], of a matrix product or a convolution: what it gives may be kept for a
    /// re-materialization.
    pub(super) fn push_product(&mut self, node: Node, flops: f64) -> Var {
        let (before, made) = (self.traffic, bytes(&node.output));
        let output = self.push(node);
        self.products.bytes += made;
        self.products.flops += flops;
        self.products.traffic += self.traffic - before;
        output
    }

    /// The forward's variable for `x` goes out of scope.
    pub fn release(&mut self, x: Var) {
        if std::mem::take(&mut self.values[x.0].held) {
            self.memory.release(self.values[x.0].memory);
        }
    }

    /// Sends `x` over a long skip.
    pub fn stash(&mut self, name: &str, x: Var) {
        self.stashed.push((name.to_owned(), x));
    }

    /// Takes what an earlier layer stashed; `None` if nothing is there under this name.
    pub fn pop(&mut self, name: &str) -> Option<Var> {
        let (name, var) = self.open.remove_entry(name)?;
        self.popped.push((name, var));
        Some(var)
    }

    /// The running statistics want what this operation saved: so many bytes until the norm.
    pub(super) fn counted(&mut self, bytes: f64) {
        self.statistics += bytes;
    }

    /// What was stashed.
    pub(super) fn stashed(&self) -> impl Iterator<Item = (&str, Outside)> {
        self.stashed.iter().map(|(name, var)| (name.as_str(), self.outside(*var)))
    }

    /// The layer is done.
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

    /// The nodes that find gradients of parameters.
    fn starts(&self) -> impl Iterator<Item = &Ran> {
        let trained = |node: &Node| node.parameters.iter().any(|own| self.is_trained(own.0));
        self.nodes.iter().filter(move |ran| trained(&ran.node))
    }

    /// The gradients from which those of the parameters are found later.
    fn captured(&self, outputs: &[Var]) -> f64 {
        match self.inputs.iter().any(|input| self.values[input.0].grad) {
            true => self.starts().map(|ran| self.bytes(ran.output)).sum(),
            false => outputs.iter().map(|&output| self.bytes(output)).sum(),
        }
    }

    /// What is still saved when only the gradients of the parameters are left to find.
    fn split(&self, outputs: &[Var]) -> f64 {
        let mut memory = self.memory.clone();
        // What is stashed may be an output, too.
        let held: HashSet<Var> = outputs.iter().copied().collect();
        for output in held {
            memory.release(self.values[output.0].memory);
        }
        // Where no input's gradient is wanted nothing is done before the second half.
        let wanted = self.inputs.iter().any(|input| self.values[input.0].grad);
        for ran in self.nodes.iter().filter(|_| wanted) {
            if !ran.node.parameters.iter().any(|own| self.is_trained(own.0)) {
                ran.saved.iter().for_each(|&block| memory.release(block));
            }
        }
        memory.live
    }

    /// Most bytes above its start of a backward, and what the gradients hold that it leaves; the
    /// `first` of a step makes the parameters' accumulators.
    fn backward(&self, outputs: &[Var], first: bool) -> (f64, HashMap<Var, f64>) {
        let mut memory = Memory { live: 0.0, peak: 0.0, ..self.memory.clone() };
        let mut grads: HashMap<Var, usize> = HashMap::new();
        let mut found: Vec<(usize, usize, bool)> = Vec::new();
        // Whoever calls the backward holds the outputs' gradients until it is done.
        let mut given: HashMap<usize, f64> = HashMap::new();
        for &output in outputs.iter().filter(|output| self.values[output.0].grad) {
            let gradient = memory.allocate(0.0);
            given.insert(memory.share(gradient), self.bytes(output));
            self.meet(&mut memory, &mut grads, output, gradient);
        }
        for Ran { node, output, saved } in self.nodes.iter().rev() {
            let Some(gradient) = grads.remove(output) else { continue };
            let inputs = node.inputs.iter().filter(|input| self.values[input.0].grad);
            let mut made: Vec<(Var, usize)> = Vec::new();
            let overwritten =
                if node.gradient == Gradient::Overwritten { node.saved_bytes } else { 0.0 };
            memory.live -= overwritten;
            for &input in inputs {
                let block = match node.gradient {
                    Gradient::Passed => memory.share(gradient),
                    _ => memory.allocate(self.bytes(input)),
                };
                made.push((input, block));
            }
            for &(number, copied) in node.parameters.iter().filter(|p| self.is_trained(p.0)) {
                found.push((number, memory.allocate(self.parameter_bytes(number)), copied));
            }
            memory.look(node.backward_bytes);
            memory.live += overwritten;
            memory.release(gradient);
            for &block in saved {
                memory.release(block);
            }
            for (input, block) in made {
                self.meet(&mut memory, &mut grads, input, block);
            }
        }
        self.accumulate(&mut memory, &found, first);
        let holds = |block: usize| given.get(&block).copied().unwrap_or(memory.blocks[block].0);
        let left = grads.into_iter().map(|(var, block)| (var, holds(block))).collect();
        (memory.peak, left)
    }

    /// Adds a gradient to what there is: in place where nobody else has that.
    fn meet(
        &self,
        memory: &mut Memory,
        grads: &mut HashMap<Var, usize>,
        input: Var,
        gradient: usize,
    ) {
        let Some(old) = grads.get(&input).copied() else {
            grads.insert(input, gradient);
            return;
        };
        if memory.blocks[old].1 > 1 {
            let sum = memory.allocate(self.bytes(input));
            grads.insert(input, sum);
            memory.release(old);
        }
        memory.release(gradient);
    }

    /// All parameters' gradients are there; they are added to the accumulators one after the other.
    fn accumulate(&self, memory: &mut Memory, found: &[(usize, usize, bool)], first: bool) {
        for &(number, gradient, copied) in found {
            let master = bytes(&TensorSpec::new(self.shape(number), self.precision.master));
            if self.precision.is_reduced() {
                // Its sum, or what it is widened to for the addition.
                let wide = memory.allocate(master);
                memory.release(gradient);
                if !first {
                    memory.release(wide);
                }
            } else if first && copied {
                memory.look(master);
            } else if !first {
                memory.release(gradient);
            }
        }
    }
}

/// A tensor between layers.
#[derive(Debug, Clone)]
pub(super) struct Outside {
    pub spec: TensorSpec,
    pub channels_last: bool,
}
