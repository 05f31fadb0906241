//! The affine map of the last axis, through the faster of libtorch's float32 kernels.

use tch::Tensor;

use crate::{Error, Result, address, adopt, ffi::bridged};

/// The matrix products for affine maps and 1x1 convolutions, and the layout of images, in float32
/// on a CPU. Results differ in the last bits, so one choice holds for a whole run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kernels {
    /// ATen's operations throughout: MKL's products in float32; images in contiguous layout.
    #[default]
    Aten,
    /// ATen's products; images in channels-last layout, where a 1x1 convolution is a product; and
    /// the operations of [`crate::fused`] and [`crate::images`], and our sums of columns.
    ChannelsLast,
    /// Like `ChannelsLast`. Products from about a million multiplications up are oneDNN's. Those of
    /// at most 64 rows are of this crate. Convolutions of at most 256 positions are products of
    /// copied patches.
    OneDnn,
}

impl Kernels {
    /// The fastest choice on this machine. It is channels-last. The products are oneDNN's on
    /// processors that have AVX-512 but are not Intel's, because MKL falls back to AVX2 there.
    pub fn fastest() -> Self {
        if bridged::onednn_is_faster() { Self::OneDnn } else { Self::ChannelsLast }
    }

    /// Whether products use oneDNN.
    pub fn are_onednn(self) -> bool {
        self == Self::OneDnn
    }

    /// Whether images are in channels-last layout.
    pub fn are_channels_last(self) -> bool {
        self != Self::Aten
    }
}

/// Computes y = x W^T + b, differentiable once: `x` `[..., inputs]`, `weight` `[outputs, inputs]`,
/// `bias` `[outputs]`. Dtypes and devices that `kernels` does not cover use ATen.
///
/// # Errors
/// Shapes, dtypes or devices that do not fit; out of memory.
pub fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    kernels: Kernels,
) -> Result<Tensor> {
    let bias = bias.map_or(0, address);
    let (onednn, fused) = (kernels.are_onednn(), kernels != Kernels::Aten);
    // SAFETY: the tensors at these addresses are borrowed for the whole call; C++ accepts 0 for
    // `bias`.
    let y = unsafe { bridged::linear(address(x), address(weight), bias, onednn, fused) }?;
    adopt(y).ok_or_else(|| Error("linear gave no tensor".into()))
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::{
        testing,
        vjp::{Request, vjp},
    };

    fn values(shape: &[i64], seed: f64) -> Tensor {
        testing::values(shape, seed).to_kind(Kind::Float)
    }

    #[test]
    fn oracle_both_kernels_agree_with_float64_in_values_and_gradients() {
        // Large enough for oneDNN; ragged, like a last micro-batch; with and without a bias. The
        // weight's gradient transposes x where (rows + 256) 128 < rows 256: of 288 rows, but not
        // of 111.
        for (rows, with_bias) in [(96, true), (96, false), (37, true), (37, false)] {
            let x = values(&[3, rows, 128], 0.1);
            let (w, b) = (values(&[256, 128], 0.2), values(&[256], 0.3));
            let dy = values(&[3, rows, 256], 0.4);
            let run = |kind: Kind, kernels| {
                let leaf = |t: &Tensor| t.to_kind(kind).detach().set_requires_grad(true);
                let (x, w, b) = (leaf(&x), leaf(&w), leaf(&b));
                let y = linear(&x, &w, with_bias.then_some(&b), kernels).unwrap();
                let parameters: Vec<&Tensor> = if with_bias { vec![&w, &b] } else { vec![&w] };
                let mut sums = parameters.iter().map(|_| None).collect::<Vec<_>>();
                let request = Request {
                    outputs: &[&y],
                    output_grads: &[&dy.to_kind(kind)],
                    inputs: &[&x],
                    parameters: &parameters,
                };
                let dx = vjp(&request, &mut sums).unwrap();
                let all = [Some(y.detach())].into_iter().chain(dx).chain(sums);
                all.map(|t| t.unwrap().to_kind(Kind::Double)).collect::<Vec<_>>()
            };
            let exact = run(Kind::Double, Kernels::Aten);
            for kernels in [Kernels::Aten, Kernels::OneDnn] {
                let found = run(Kind::Float, kernels);
                assert_eq!(found.len(), exact.len());
                for (a, b) in found.iter().zip(&exact) {
                    assert_eq!(a.size(), b.size());
                    // Sums of up to 288 products of numbers below 1: at most 288 rounding errors of
                    // 6e-8.
                    let difference = (a - b).abs().max().double_value(&[]);
                    assert!(difference < 288.0 * 6e-8 * 4.0, "{kernels:?}: {difference:e}");
                }
            }
        }
    }

    #[test]
    fn oracle_what_onednn_does_not_cover_is_atens_to_the_bit() {
        let (x, w) = (values(&[4, 8], 0.0), values(&[3, 8], 1.0)); // too small
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            let (x, w) = (x.to_kind(kind), w.to_kind(kind));
            let found = linear(&x, &w, None, Kernels::OneDnn).unwrap();
            assert_eq!(found, x.linear(&w, None::<&Tensor>));
        }
    }

    /// The gradients of our function with an op cache equal those that autograd computes for ATen's
    /// operations.
    #[test]
    fn oracle_gradients_of_atens_kernels_are_autograds_to_the_bit() {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            let leaf =
                |shape: &[i64], seed| values(shape, seed).to_kind(kind).set_requires_grad(true);
            let (x, w, b) = (leaf(&[3, 37, 24], 0.1), leaf(&[40, 24], 0.2), leaf(&[40], 0.3));
            let gradients = |y: Tensor| {
                let dy = y.detach().cos();
                let request = Request {
                    outputs: &[&y],
                    output_grads: &[&dy],
                    inputs: &[&x, &w, &b],
                    parameters: &[],
                };
                vjp(&request, &mut []).unwrap()
            };
            let own = gradients(linear(&x, &w, Some(&b), Kernels::Aten).unwrap());
            assert!(own.iter().all(Option::is_some));
            assert_eq!(own, gradients(x.linear(&w, Some(&b))), "{kind:?}");
        }
    }

    #[test]
    fn fault_shapes_that_do_not_fit_are_an_error() {
        let (x, w) = (values(&[4, 8], 0.0), values(&[3, 9], 1.0));
        assert!(linear(&x, &w, None, Kernels::OneDnn).is_err());
    }

    /// The gradient of a gradient silently lacked the part through the product.
    #[test]
    fn regression_a_gradient_of_a_gradient_is_refused() {
        for kernels in [Kernels::Aten, Kernels::OneDnn] {
            let x = values(&[96, 128], 0.1).set_requires_grad(true);
            let y = linear(&x, &values(&[256, 128], 0.2), None, kernels).unwrap().square();
            let once = |graph| Tensor::f_run_backward(&[y.sum(Kind::Float)], &[&x], true, graph);
            assert!(once(false).is_ok());
            let error = once(true).unwrap_err().to_string();
            assert!(error.contains("differentiable once"), "{error}");
        }
    }
}
