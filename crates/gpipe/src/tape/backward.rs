//! The memory of a backward: a walk over the tape from its last node to its first.

use std::collections::{HashMap, HashSet};

use super::{
    Memory, Ran, Tape, Var, bytes,
    node::{Gradient, Node},
};
use crate::spec::TensorSpec;

impl Tape {
    /// The nodes that compute gradients of parameters.
    pub(super) fn starts(&self) -> impl Iterator<Item = &Ran> {
        let trained = |node: &Node| node.parameters.iter().any(|own| self.is_trained(own.0));
        self.nodes.iter().filter(move |ran| trained(&ran.node))
    }

    /// Bytes of the gradients that the second half of a split backward starts from.
    pub(super) fn captured(&self, outputs: &[Var]) -> f64 {
        match self.inputs.iter().any(|input| self.values[input.0].grad) {
            true => self.starts().map(|ran| self.bytes(ran.output)).sum(),
            false => outputs.iter().map(|&output| self.bytes(output)).sum(),
        }
    }

    /// The memory without the layer's outputs, but for those that its backward reads.
    pub(super) fn without(&self, outputs: &[Var]) -> Memory {
        let mut memory = self.memory.clone();
        // A stashed value may also be an output.
        let held: HashSet<Var> = outputs.iter().copied().collect();
        for output in held {
            memory.release(self.values[output.0].memory);
        }
        memory
    }

    /// Bytes still saved when only the parameters' gradients remain to be computed.
    pub(super) fn split(&self, outputs: &[Var]) -> f64 {
        let mut memory = self.without(outputs);
        // If no input needs a gradient, the first half does nothing.
        let wanted = self.inputs.iter().any(|input| self.values[input.0].grad);
        for ran in self.nodes.iter().filter(|_| wanted) {
            if !ran.node.parameters.iter().any(|own| self.is_trained(own.0)) {
                ran.saved.iter().for_each(|&block| memory.release(block));
            }
        }
        memory.live
    }

    /// The peak bytes of a backward above its start, and the bytes that each remaining gradient
    /// holds. The `first` backward of a step allocates the parameters' accumulators.
    pub(super) fn backward(&self, outputs: &[Var], first: bool) -> (f64, HashMap<Var, f64>) {
        let mut memory = Memory { live: 0.0, peak: 0.0, ..self.memory.clone() };
        let mut grads: HashMap<Var, usize> = HashMap::new();
        let mut found: Vec<(usize, usize, bool)> = Vec::new();
        // The caller of the backward holds the outputs' gradients until it ends.
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

    /// Adds a gradient to the one already there, in place if nothing else holds that one.
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

    /// Adds the parameters' gradients to the accumulators, one by one, when all are computed.
    fn accumulate(&self, memory: &mut Memory, found: &[(usize, usize, bool)], first: bool) {
        for &(number, gradient, copied) in found {
            let master = bytes(&TensorSpec::new(self.shape(number), self.precision.master));
            if self.precision.is_reduced() {
                // The new accumulator, or the wider copy that is added to it.
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
