//! Operations on images.

use gpipe_bridge::{images::Pooling, linear::Kernels};
use tch::Kind;

use super::{
    Node, Tape, Var, bytes,
    operations::{COLUMN_STEP, FLOAT, INDEX, Products},
};
use crate::spec::TensorSpec;

/// Bytes of oneDNN's convolutions beyond two copies of the weight.
const CONVOLUTION_SCRATCH: f64 = 8216.0;

/// The strides and groups of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// Whether any stride is above 1.
    pub strided: bool,
    /// Number of channel groups.
    pub groups: i64,
}

/// Most positions of a kernel for which the bridge copies the patches under it (`kPositionsMax`).
const POSITIONS_MAX: f64 = 256.0;

fn outputs_of(images: &TensorSpec) -> f64 {
    images.shape.get(1).copied().unwrap_or(1).max(1) as f64
}

impl Tape {
    /// [`crate::Forward::convolution`] with parameter number `weight`, returning `output`.
    pub fn convolution(
        &mut self,
        x: Var,
        weight: usize,
        output: TensorSpec,
        strides: Strides,
    ) -> Var {
        let Strides { strided, groups } = strides;
        let kernel = self.shape(weight).get(2..).unwrap_or_default();
        let pointwise = kernel.iter().all(|&size| size == 1) && groups == 1;
        let (input, weights, made) = (self.bytes(x), self.parameter_bytes(weight), bytes(&output));
        let kind = self.spec(x).kind;
        let takes = matches!(kind, Kind::Float | Kind::BFloat16);
        let element = kind.elt_size_in_bytes() as f64;
        // Each output element is a product with all weights of its kernel.
        let fan_in: i64 = self.shape(weight).iter().skip(1).product();
        let flops = 2.0 * output.elements() * fan_in as f64;
        if !self.kernels().are_channels_last() || !takes {
            let node = Node::new(&[x], output).saving(&[x]).parameter(weight);
            let plain = pointwise && !strided;
            let forward = if plain { 0.0 } else { (input + weights).max(made) };
            let backward = if plain { 0.0 } else { input + made };
            return self.push_product(node.forward_bytes(forward).backward_bytes(backward), flops);
        }
        let node = Node::new(&[x], output.clone()).channels_last(true);
        let plain = !self.is_channels_last(x) && self.layouts_differ(x);
        if !pointwise {
            let node = if plain { node.saving_bytes(input) } else { node.saving(&[x]) };
            let positions = output.elements() / outputs_of(&output);
            let inputs = fan_in;
            let is_few = self.kernels().are_onednn() && groups == 1;
            if is_few && positions <= POSITIONS_MAX && inputs % COLUMN_STEP == 0 {
                // The patches, and in the backward their gradient. That of the images is summed in
                // float32.
                let patches = element * positions * inputs as f64;
                let summed = if kind == Kind::Float { 0.0 } else { FLOAT * input / element };
                let outputs = outputs_of(&output) as i64;
                let scratch = match self.products_for(kind, positions, inputs, outputs) {
                    Products::FewRows { scratch } => scratch,
                    Products::OneDnn => weights,
                    Products::Aten => 0.0,
                };
                let node = node.parameter(weight).forward_bytes(patches + scratch);
                let backward = patches + patches.max(made).max(summed);
                return self.push_product(node.backward_bytes(backward), flops);
            }
            let (forward, backward) = match groups {
                1 => (2.0 * weights + CONVOLUTION_SCRATCH, 3.0 * weights),
                _ => (weights, 2.0 * weights),
            };
            let node = node.parameter(weight).forward_bytes(forward);
            return self.push_product(node.backward_bytes(backward), flops);
        }
        // The pixels that the kernel reads. They are copied if strides skip some or the layout
        // differs.
        let channels = |shape: &[i64], axis: usize| shape.get(axis).copied().unwrap_or(0) as f64;
        let (inputs, outputs) = (channels(&self.spec(x).shape, 1), channels(self.shape(weight), 0));
        let used = made / outputs.max(1.0) * inputs;
        let node = if strided || plain { node.saving_bytes(used) } else { node.saving(&[x]) };
        let thinned = if strided { used } else { 0.0 };
        let products =
            self.products_for(kind, used / element / inputs, inputs as i64, outputs as i64);
        let node = match products {
            Products::Aten => node.parameter_transposed(weight).backward_bytes(thinned),
            Products::OneDnn => {
                let node = node.parameter(weight).forward_bytes(weights);
                node.backward_bytes(made.min(used + weights).max(thinned))
            }
            Products::FewRows { scratch } => {
                node.parameter(weight).forward_bytes(scratch).backward_bytes(thinned)
            }
        };
        self.push_product(node, flops)
    }

    /// Whether the two layouts of images of this shape differ in memory.
    fn layouts_differ(&self, x: Var) -> bool {
        match self.spec(x).shape[..] {
            [_, channels, height, width] => channels > 1 && height * width > 1,
            _ => false,
        }
    }

    /// Whether the bridge's operations on images take `x`.
    fn fuses_images(&self, x: Var) -> bool {
        let spec = self.spec(x);
        let fits = matches!(spec.kind, Kind::Float | Kind::BFloat16) && spec.shape.len() == 4;
        let lies_so = self.is_channels_last(x) || !self.layouts_differ(x);
        self.kernels() != Kernels::Aten && fits && lies_so
    }

    /// [`crate::Forward::batch_norm`] with parameters `first` and `first + 1`.
    pub fn batch_norm(&mut self, x: Var, first: usize) -> Var {
        let spec = self.spec(x).clone();
        let channels = spec.shape.get(1).copied().unwrap_or(0);
        // Libtorch's backward copies the gradient into another layout.
        let copy = if self.fuses_images(x) { 0.0 } else { bytes(&spec) };
        let statistics = 2.0 * FLOAT * channels as f64;
        self.counted(statistics);
        let node = Node::new(&[x], spec).saving(&[x]).saving_bytes(statistics);
        self.push(node.backward_bytes(copy).parameter(first).parameter(first + 1))
    }

    /// [`crate::Forward::batch_norm_relu`] with parameters `first` and `first + 1`.
    pub fn batch_norm_relu(&mut self, x: Var, first: usize) -> Var {
        let is_one = self.fuses_images(x);
        let normed = self.batch_norm(x, first);
        if is_one {
            return normed;
        }
        let y = self.elementwise_by_output(normed);
        self.release(normed);
        y
    }

    /// Instance norm without parameters. It copies images in channels-last layout and saves the
    /// copy.
    pub fn instance_norm(&mut self, x: Var) -> Var {
        let spec = self.spec(x).clone();
        let planes: f64 = spec.shape.iter().take(2).map(|&size| size as f64).product();
        let copy = bytes(&spec);
        let copied = self.is_channels_last(x) && self.layouts_differ(x);
        let node = Node::new(&[x], spec).channels_last(false).backward_bytes(copy);
        let node = node.saving_bytes(2.0 * FLOAT * planes);
        self.push(if copied { node.saving_bytes(copy) } else { node.saving(&[x]) })
    }

    /// [`crate::Forward::pool`] to `output`.
    pub fn pool(&mut self, x: Var, output: TensorSpec, pooling: Pooling) -> Var {
        let found = output.elements();
        // In another dtype, both sides are in float32 for a while.
        let converted = match self.spec(x).kind {
            Kind::Float => 0.0,
            _ => FLOAT * (self.spec(x).elements() + found),
        };
        let fused =
            |output| Node::new(&[x], output).forward_bytes(converted).backward_bytes(converted);
        match (pooling, self.fuses_images(x)) {
            (Pooling::Maximum, true) => self.push(fused(output).saving_bytes(found)),
            (Pooling::Average, true) => self.push(fused(output)),
            (Pooling::Maximum, false) => {
                self.push(Node::new(&[x], output).saving(&[x]).saving_bytes(INDEX * found))
            }
            (Pooling::Average, false) => self.average_pool(x, output),
        }
    }

    /// Libtorch's average pooling to `output`.
    pub fn average_pool(&mut self, x: Var, output: TensorSpec) -> Var {
        self.push(Node::new(&[x], output).saving(&[x]))
    }
}
