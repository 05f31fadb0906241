//! The operations that layers consist of, as libtorch and the bridge's kernels compute and save
//! them on a CPU.
//!
//! The memory of each kernel beyond its tensors was measured once, with the allocator that stages
//! use. The constants below are the bytes of oneDNN's reorders and scratch space.

use gpipe_bridge::linear::Kernels;
use tch::Kind;

use super::{Node, Tape, Var, bytes};
use crate::spec::TensorSpec;

/// Fewest multiplications for which the bridge uses oneDNN's product (`kMultiplicationsMin`).
const MULTIPLICATIONS_MIN: f64 = (1 << 20) as f64;
/// Bytes of a float32, in which ATen's kernels keep statistics, and of an int64 index.
pub(super) const FLOAT: f64 = 4.0;
pub(super) const INDEX: f64 = 8.0;

/// Most rows for which the bridge uses its own product (`kFewRows`), and what the number of inputs
/// must be a multiple of (`kColumnStep`).
const FEW_ROWS: f64 = 64.0;
pub(super) const COLUMN_STEP: i64 = 16;

/// The kernels of a product.
pub(super) enum Products {
    Aten,
    OneDnn,
    /// The bridge's own. `scratch`: bytes of the forward.
    FewRows {
        scratch: f64,
    },
}

impl Tape {
    /// [`crate::Forward::linear`] with the parameters of these numbers.
    pub fn linear(&mut self, x: Var, weight: usize, bias: Option<usize>) -> Var {
        let Some(adapter) = self.adapter_of(weight) else {
            return self.linear_alone(x, weight, bias);
        };
        let y = self.linear_alone(x, weight, bias);
        let dropped = match adapter.dropout > 0.0 {
            true => self.dropout(x, adapter.dropout),
            false => x,
        };
        let low = self.linear_alone(dropped, adapter.first, None);
        let scaled = self.push(Node::new(&[low], self.spec(low).clone()));
        let added = self.linear_alone(scaled, adapter.first + 1, None);
        let sum = self.add(y, added);
        let dropped = (dropped != x).then_some(dropped);
        for var in [y, low, scaled, added].into_iter().chain(dropped) {
            self.release(var);
        }
        sum
    }

    fn linear_alone(&mut self, x: Var, weight: usize, bias: Option<usize>) -> Var {
        let outputs = self.shape(weight).first().copied().unwrap_or(0);
        let output = self.spec(x).with_last(outputs);
        let flops = 2.0 * self.spec(x).elements() * outputs as f64;
        let inputs = self.spec(x).last();
        let rows = self.spec(x).elements() / inputs.max(1) as f64;
        let products = self.products_for(self.spec(x).kind, rows, inputs, outputs);
        let (forward, transposed) = match products {
            Products::Aten => (0.0, 0.0),
            // The gradient of the outputs is transposed, or the inputs and the result.
            Products::OneDnn => {
                let others = FLOAT * (rows + outputs as f64) * inputs as f64;
                (0.0, bytes(&output).min(others))
            }
            Products::FewRows { scratch } => (scratch, 0.0),
        };
        let node = Node::new(&[x], output).forward_bytes(forward).backward_bytes(transposed);
        // The input is saved only for the gradient of a trained weight.
        let node = if self.is_trained(weight) { node.saving(&[x]) } else { node };
        let node = match products {
            Products::Aten => node.parameter_transposed(weight),
            Products::OneDnn | Products::FewRows { .. } => node.parameter(weight),
        };
        self.push_product(bias.into_iter().fold(node, Node::parameter), flops)
    }

    /// Which kernels compute a product of `rows` with a weight `[outputs, inputs]`.
    pub(super) fn products_for(
        &self,
        kind: Kind,
        rows: f64,
        inputs: i64,
        outputs: i64,
    ) -> Products {
        let multiplications = rows * inputs as f64 * outputs as f64;
        let is_large = multiplications >= MULTIPLICATIONS_MIN;
        if !self.kernels().are_onednn() || kind != Kind::Float || !is_large {
            return Products::Aten;
        }
        if rows > FEW_ROWS || inputs % COLUMN_STEP != 0 {
            return Products::OneDnn;
        }
        let step = COLUMN_STEP as f64;
        let padded = (rows / step).ceil() * step;
        Products::FewRows { scratch: FLOAT * padded * (inputs + outputs) as f64 }
    }

    /// Layer norm over the last axis, with parameters `first` and `first + 1`.
    pub fn layer_norm(&mut self, x: Var, first: usize) -> Var {
        let spec = self.spec(x).clone();
        let rows = spec.elements() / spec.last().max(1) as f64;
        let sums = 2.0 * FLOAT * spec.last() as f64;
        let node = Node::new(&[x], spec).saving(&[x]).saving_bytes(2.0 * FLOAT * rows);
        self.push(node.backward_bytes(sums).parameter(first).parameter(first + 1))
    }

    /// [`crate::layers::RmsNorm`] with parameter number `weight`.
    pub fn rms_norm(&mut self, x: Var, weight: usize) -> Var {
        let size = self.spec(x).last();
        self.rms_norm_of_heads(x, size, weight)
    }

    /// The same over groups of `size` features.
    pub fn rms_norm_of_heads(&mut self, x: Var, size: i64, weight: usize) -> Var {
        let spec = self.spec(x).clone();
        let (own, rows) = (bytes(&spec), spec.elements() / size.max(1) as f64);
        if self.fuses(x) {
            // A sum of the weight's gradient for each thread, and their sum.
            let sums = 2.0 * FLOAT * size as f64;
            let node = Node::new(&[x], spec).saving(&[x]).saving_bytes(FLOAT * rows);
            return self.push(node.backward_bytes(sums).parameter(weight));
        }
        let reduced = matches!(spec.kind, Kind::BFloat16 | Kind::Half);
        let wide = if reduced { FLOAT * spec.elements() } else { own };
        let one = wide / spec.elements().max(1.0);
        // The root is saved, and what it was multiplied with: the input in float32. So is the
        // result, for the gradient of the weight, unless the weight is frozen.
        let copied = if reduced { wide } else { 0.0 };
        let (result, backward) =
            if self.is_trained(weight) { (own, 2.0 * wide) } else { (0.0, wide) };
        let node = Node::new(&[x], spec).saving_bytes(result + copied + 2.0 * one * rows);
        let node = if reduced { node } else { node.saving(&[x]) };
        self.push(node.forward_bytes(wide).backward_bytes(backward).parameter(weight))
    }

    /// Whether the bridge's fused operations compute on `x` ([`crate::Forward::fuses`]).
    fn fuses(&self, x: Var) -> bool {
        let reduced_or_not = matches!(self.spec(x).kind, Kind::Float | Kind::BFloat16);
        self.kernels() != Kernels::Aten && reduced_or_not
    }

    /// `silu(gate) * up`, both of one shape.
    pub fn gated(&mut self, gate: Var, up: Var) -> Var {
        if self.fuses(gate) {
            let spec = self.spec(gate).clone();
            return self.push(Node::new(&[gate, up], spec).saving(&[gate, up]));
        }
        let active = self.elementwise(gate);
        let gated = self.multiply(active, up);
        self.release(active);
        gated
    }

    /// The product of two tensors of one shape, which both need gradients.
    pub fn multiply(&mut self, a: Var, b: Var) -> Var {
        let spec = self.spec(a).clone();
        self.push(Node::new(&[a, b], spec).saving(&[a, b]))
    }

    /// Tables of cosines and sines with this many elements, which all turned tensors of a layer
    /// share.
    pub fn tables(&mut self, elements: f64) -> Var {
        let spec = TensorSpec::new([elements as i64], self.compute_kind());
        self.push(Node::new(&[], spec))
    }

    /// Queries or keys turned by [`crate::layers::Rotary`].
    pub fn turned(&mut self, x: Var) -> Var {
        let spec = self.spec(x).clone();
        let copied = if self.fuses(x) { 0.0 } else { bytes(&spec) };
        self.push(Node::new(&[x], spec).forward_bytes(copied).backward_bytes(copied))
    }

    /// A copy of `x` in another layout.
    pub fn copied(&mut self, x: Var) -> Var {
        self.push(Node::new(&[x], self.spec(x).clone()))
    }

    /// Each head of keys or values, `times` times.
    pub fn repeated(&mut self, x: Var, times: i64) -> Var {
        let output = self.spec(x).with_last(self.spec(x).last() * times);
        self.push(Node::new(&[x], output))
    }

    /// An elementwise function whose backward needs its input, for example gelu.
    pub fn elementwise(&mut self, x: Var) -> Var {
        let spec = self.spec(x).clone();
        self.push(Node::new(&[x], spec).saving(&[x]))
    }

    /// An elementwise function whose backward needs its output, for example relu, tanh or softmax.
    pub fn elementwise_by_output(&mut self, x: Var) -> Var {
        let spec = self.spec(x).clone();
        self.push(Node::new(&[x], spec).saving_output())
    }

    /// The product of `x` and a tensor of `factor_bytes` bytes that needs no gradient.
    pub fn scaled(&mut self, x: Var, factor_bytes: f64) -> Var {
        let spec = self.spec(x).clone();
        self.push(Node::new(&[x], spec).saving_bytes(factor_bytes))
    }

    /// [`crate::Forward::dropout`].
    pub fn dropout(&mut self, x: Var, p: f64) -> Var {
        if p <= 0.0 {
            return x;
        }
        let spec = self.spec(x).clone();
        let mask = bytes(&spec);
        // In a smaller dtype, the scale is applied to a product with the mask.
        let reduced = matches!(spec.kind, Kind::BFloat16 | Kind::Half);
        let drawn = if reduced { mask } else { 0.0 };
        self.push(Node::new(&[x], spec).saving_bytes(mask).forward_bytes(drawn))
    }

    /// The sum of two tensors of one shape. The caller releases both.
    pub fn add(&mut self, a: Var, b: Var) -> Var {
        let spec = self.spec(a).clone();
        self.push(Node::new(&[a, b], spec).passing_gradient())
    }

    /// The rows of parameter `table` at the indices in `x`.
    pub fn embedding(&mut self, x: Var, table: usize) -> Var {
        let features = self.shape(table).last().copied().unwrap_or(0);
        let mut shape = self.spec(x).shape.clone();
        shape.push(features);
        let output = TensorSpec::new(shape, self.compute_kind());
        self.push(Node::new(&[x], output).parameter(table))
    }

    /// Adds the first rows of parameter `table` [rows, features] to each sample of `x`.
    pub fn add_rows(&mut self, x: Var, table: usize) -> Var {
        let spec = self.spec(x).clone();
        let samples = spec.shape.first().copied().unwrap_or(1).max(1);
        let sum = bytes(&spec) / samples as f64;
        let node = Node::new(&[x], spec).passing_gradient().parameter(table);
        self.push(node.backward_bytes(sum))
    }

    /// An operation whose backward needs neither input nor output: a mean, an upsampling, or a crop
    /// with padding.
    pub fn resized(&mut self, x: Var, output: TensorSpec) -> Var {
        self.push(Node::new(&[x], output))
    }

    /// Rows of `x`, or values along its last axis, by indices: one for each row of `output`, or for
    /// each of its values.
    pub fn indexed(&mut self, x: Var, output: TensorSpec) -> Var {
        let is_values = output.last() != self.spec(x).last();
        let rows = output.elements() / if is_values { 1.0 } else { output.last().max(1) as f64 };
        self.push(Node::new(&[x], output).saving_bytes(INDEX * rows))
    }

    /// Some rows of `x`, without a copy.
    pub fn sliced(&mut self, x: Var, output: TensorSpec) -> Var {
        self.push(Node::view(x, output))
    }

    /// The product of each row of `x` with a weight that needs a gradient.
    pub fn weighted(&mut self, x: Var, weights: Var) -> Var {
        let spec = self.spec(x).clone();
        let own = bytes(&spec);
        self.push(Node::new(&[x, weights], spec).saving(&[x, weights]).backward_bytes(own))
    }

    /// Concatenates several tensors.
    pub fn concatenate(&mut self, parts: &[Var], output: TensorSpec) -> Var {
        self.push(Node::new(parts, output).passing_gradient())
    }

    /// [`crate::Forward::concatenate`], into `output`.
    pub fn joined(&mut self, parts: &[Var], output: TensorSpec) -> Var {
        self.push(Node::new(parts, output))
    }

    /// `x` in another dtype.
    pub fn cast(&mut self, x: Var, kind: Kind) -> Var {
        if self.spec(x).kind == kind {
            return x;
        }
        let output = TensorSpec::new(self.spec(x).shape.clone(), kind);
        self.push(Node::new(&[x], output))
    }
}
