//! Convolution of images, in a layout that suits small micro-batches.

use tch::Tensor;

use crate::{Error, Result, address, adopt, ffi::bridged, linear::Kernels};

/// How a kernel moves over the pixels; each pair is height, then width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Distance in pixels between neighbouring positions of the kernel.
    pub stride: [i64; 2],
    /// Rows and columns of zeros on either side.
    pub padding: [i64; 2],
    /// Distance in pixels between neighbouring elements of the kernel.
    pub dilation: [i64; 2],
    /// Number of channel groups; groups are independent of each other.
    pub groups: i64,
}

impl Default for Geometry {
    /// Stride 1, no padding, dilation 1, one group.
    fn default() -> Self {
        Self { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1 }
    }
}

/// Convolves `x` with `weight`; differentiable once. Shapes: `x` `[samples, inputs, height,
/// width]`, `weight` `[outputs, inputs / groups, height, width]`. Unless `kernels` is
/// [`Kernels::Aten`], the result in float32 or bfloat16 on a CPU is in channels-last layout, to
/// which `x` is converted if necessary.
///
/// # Errors
/// Shapes, dtypes or devices that do not fit; out of memory.
pub fn convolution(
    x: &Tensor,
    weight: &Tensor,
    geometry: &Geometry,
    kernels: Kernels,
) -> Result<Tensor> {
    let Geometry { stride, padding, dilation, groups } = geometry;
    let (x, weight) = (address(x), address(weight));
    let (channels_last, onednn) = (kernels.are_channels_last(), kernels.are_onednn());
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    let y = unsafe {
        bridged::convolution(x, weight, stride, padding, dilation, *groups, channels_last, onednn)
    }?;
    adopt(y).ok_or_else(|| Error("convolution gave no tensor".into()))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::{
        testing::values,
        vjp::{Request, vjp},
    };

    /// The output, and the gradients of input and weight.
    fn run(
        case: &Case,
        kind: Kind,
        kernels: Kernels,
        values: impl Fn(&[i64], f64) -> Tensor,
    ) -> Vec<Tensor> {
        let leaf = |t: Tensor| t.to_kind(kind).set_requires_grad(true);
        let x = leaf(values(&case.x, 0.1));
        let w = leaf(values(&case.w, 0.2));
        let y = convolution(&x, &w, &case.geometry, kernels).unwrap();
        let dy = values(&y.size(), 0.4).to_kind(kind);
        let mut sums = vec![None];
        let request =
            Request { outputs: &[&y], output_grads: &[&dy], inputs: &[&x], parameters: &[&w] };
        let dx = vjp(&request, &mut sums).unwrap();
        let all = [Some(y.detach())].into_iter().chain(dx).chain(sums);
        all.map(|t| t.unwrap().to_kind(Kind::Double)).collect()
    }

    struct Case {
        x: [i64; 4],
        w: [i64; 4],
        geometry: Geometry,
    }

    #[test]
    fn oracle_every_layout_agrees_with_float64_in_values_and_gradients() {
        let plain = Geometry::default();
        let strided = Geometry { stride: [2, 1], ..plain };
        let padded = Geometry { padding: [1, 1], stride: [2, 2], ..plain };
        let same = Geometry { padding: [1, 1], ..plain };
        let apart = Geometry { padding: [4, 4], dilation: [2, 2], groups: 64, ..plain };
        let cases = [
            // Large enough for oneDNN's product; too small; ragged; an odd size with a stride; one
            // pixel.
            Case { x: [4, 256, 8, 8], w: [64, 256, 1, 1], geometry: plain },
            Case { x: [1, 3, 5, 7], w: [2, 3, 1, 1], geometry: plain },
            Case { x: [3, 256, 9, 7], w: [64, 256, 1, 1], geometry: strided },
            Case { x: [4, 512, 1, 1], w: [513, 512, 1, 1], geometry: plain },
            // Not 1x1, with 75, 192 and 50 positions, and with too many to copy their patches;
            // padded 1x1; grouped, dilated.
            Case { x: [3, 32, 9, 9], w: [48, 32, 3, 3], geometry: padded },
            Case { x: [3, 64, 16, 16], w: [96, 64, 3, 3], geometry: padded },
            Case { x: [2, 64, 5, 5], w: [96, 64, 3, 3], geometry: same },
            Case { x: [2, 32, 12, 12], w: [32, 32, 3, 3], geometry: same },
            Case { x: [2, 64, 6, 6], w: [64, 64, 1, 1], geometry: padded },
            Case { x: [2, 64, 12, 12], w: [64, 1, 5, 5], geometry: apart },
        ];
        for (case, kind) in
            cases.iter().flat_map(|case| [Kind::Float, Kind::BFloat16].map(|kind| (case, kind)))
        {
            let values = |shape: &[i64], seed| values(shape, seed).to_kind(kind);
            let exact = run(case, Kind::Double, Kernels::Aten, values);
            let magnitudes = |shape: &[i64], seed| values(shape, seed).abs();
            let sums = run(case, Kind::Double, Kernels::Aten, magnitudes);
            for kernels in [Kernels::Aten, Kernels::ChannelsLast, Kernels::OneDnn] {
                let all = run(case, kind, kernels, values);
                for ((a, b), sums) in all.iter().zip(&exact).zip(&sums) {
                    assert_eq!(a.size(), b.size());
                    // A sum of 864 products has as many rounding errors. Each is at most 6e-8 of
                    // the sum of magnitudes. They have either sign, so the root of their number
                    // remains (Higham and Mary 2019, "A new approach to probabilistic rounding
                    // error analysis").
                    let bound = match kind {
                        Kind::Float => sums * (6e-8 * 864.0_f64.sqrt()),
                        // Sums are in float32. Patches and the result are rounded to 8 bits.
                        _ => sums / 256.0,
                    };
                    let beyond = ((a - b).abs() - bound).max().double_value(&[]);
                    assert!(beyond <= 0.0, "{kind:?} {kernels:?}: {beyond:e}");
                }
            }
        }
    }

    /// The gradients of our function with an op cache equal those that autograd computes for ATen's
    /// operation.
    #[test]
    fn oracle_gradients_of_atens_convolution_are_autograds_to_the_bit() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let leaf =
                |shape: &[i64], seed| values(shape, seed).to_kind(kind).set_requires_grad(true);
            let (x, w) = (leaf(&[3, 8, 9, 7], 0.1), leaf(&[12, 4, 3, 3], 0.2));
            let gradients = |y: Tensor| {
                let dy = y.detach().cos();
                let (outputs, output_grads) = (&[&y], &[&dy]);
                let request = Request { outputs, output_grads, inputs: &[&x, &w], parameters: &[] };
                vjp(&request, &mut []).unwrap()
            };
            let geometry =
                Geometry { stride: [2, 1], padding: [1; 2], groups: 2, ..Geometry::default() };
            let own = gradients(convolution(&x, &w, &geometry, Kernels::Aten).unwrap());
            let none = None::<&Tensor>;
            let theirs = gradients(x.conv2d(&w, none, [2, 1], [1, 1], [1, 1], 2));
            assert!(own.iter().all(Option::is_some));
            assert_eq!(own, theirs, "{kind:?}");
        }
    }

    /// Over a map one pixel wide, oneDNN left parts of a bfloat16 weight gradient uninitialized.
    /// Training on small images found NaNs in some runs only. Memory full of NaNs makes the bug
    /// certain to show.
    #[test]
    fn regression_a_stride_over_one_pixel_leaves_no_part_of_a_gradient_unwritten() {
        let geometry = Geometry { stride: [2; 2], padding: [1; 2], ..Geometry::default() };
        let case = Case { x: [4, 64, 1, 1], w: [64, 64, 3, 3], geometry };
        let exact = run(&case, Kind::Double, Kernels::Aten, values);
        for kernels in [Kernels::Aten, Kernels::ChannelsLast, Kernels::OneDnn] {
            for _ in 0..5 {
                let dirty: Vec<Tensor> = (0..8)
                    .map(|_| Tensor::full([64 * 64 * 9], f64::NAN, (Kind::Float, Device::Cpu)))
                    .collect();
                drop(dirty);
                for (a, b) in run(&case, Kind::BFloat16, kernels, values).iter().zip(&exact) {
                    // bfloat16 has 8 significant bits, and the sums are below 64.
                    let difference = (a - b).abs().max().double_value(&[]);
                    assert!(difference < 64.0 / 128.0, "{kernels:?}: {difference}");
                }
            }
        }
    }

    #[test]
    fn fault_shapes_that_do_not_fit_are_an_error() {
        let x = values(&[2, 8, 4, 4], 0.0).to_kind(Kind::Float);
        for shape in [&[4, 9, 1, 1][..], &[4, 8, 1], &[4, 4, 3, 3]] {
            let w = values(shape, 1.0).to_kind(Kind::Float);
            for kernels in [Kernels::Aten, Kernels::ChannelsLast, Kernels::OneDnn] {
                assert!(convolution(&x, &w, &Geometry::default(), kernels).is_err(), "{shape:?}");
            }
        }
    }

    /// Sizes were divided by the stride before it was checked, and a signal ended the process.
    #[test]
    fn regression_a_stride_of_zero_is_an_error() {
        let (x, w) = (values(&[1, 2, 5, 5], 0.1), values(&[3, 2, 3, 3], 0.2));
        let point = values(&[3, 2, 1, 1], 0.3);
        for kernels in [Kernels::Aten, Kernels::ChannelsLast, Kernels::OneDnn] {
            for (weight, stride) in [(&w, [0, 1]), (&w, [1, -1]), (&point, [0, 0])] {
                let geometry = Geometry { stride, ..Geometry::default() };
                let error = convolution(&x, weight, &geometry, kernels).unwrap_err().to_string();
                assert!(error.contains("stride") || error.contains("step"), "{error}");
            }
        }
    }

    /// The gradient of a gradient silently lacked the part through the convolution.
    #[test]
    fn regression_a_gradient_of_a_gradient_is_refused() {
        let x = values(&[1, 2, 5, 5], 0.1).to_kind(Kind::Float).set_requires_grad(true);
        for (shape, kernels) in [
            ([3, 2, 3, 3], Kernels::Aten),
            ([3, 2, 3, 3], Kernels::OneDnn),
            ([3, 2, 1, 1], Kernels::OneDnn),
            ([3, 2, 1, 1], Kernels::ChannelsLast),
        ] {
            let w = values(&shape, 0.2).to_kind(Kind::Float);
            let y = convolution(&x, &w, &Geometry::default(), kernels).unwrap().square();
            let once = |graph| Tensor::f_run_backward(&[y.sum(Kind::Float)], &[&x], true, graph);
            assert!(once(false).is_ok());
            let error = once(true).unwrap_err().to_string();
            assert!(error.contains("differentiable once"), "{error}");
        }
    }
}
