//! Batch norm, alone or with the ReLU behind it, and pooling, of images in channels-last layout on
//! CPUs, in float32 and bfloat16. They compute in float32, and are differentiable once.

use tch::Tensor;

use crate::{Error, Result, address, adopt, ffi::bridged};

/// Whether these operations take `x`: `[samples, channels, height, width]` in float32 or bfloat16
/// on a CPU, in channels-last layout without gaps.
pub fn takes(x: &Tensor) -> bool {
    // SAFETY: the tensor at this address is borrowed for the whole call.
    unsafe { bridged::are_images(address(x)) }.unwrap_or(false)
}

/// What [`batch_norm`] gives.
#[derive(Debug)]
pub struct Normed {
    /// The images, in the dtype of `x`.
    pub y: Tensor,
    /// The mean of each channel of `x`, float32 `[channels]`, without a gradient.
    pub mean: Tensor,
    /// 1 / sqrt(variance + eps) of each channel, float32 `[channels]`, without a gradient.
    pub inverse: Tensor,
}

/// Normalises each channel of `x` by its own mean and variance (Ioffe & Szegedy 2015): `weight *
/// (x - mean) / sqrt(variance + eps) + bias`. With `relu`, negative values become 0. The backward
/// computes again which.
///
/// # Errors
/// Images that [`takes`] does not take; vectors that are not float32 `[channels]`; out of memory.
pub fn batch_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    eps: f64,
    relu: bool,
) -> Result<Normed> {
    let (x, weight, bias) = (address(x), address(weight), address(bias));
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    let found = unsafe { bridged::batch_norm_images(x, weight, bias, eps, relu) }?;
    let mut found = found.into_iter().filter_map(adopt);
    let mut next = || found.next().ok_or_else(|| Error("batch norm gave too few tensors".into()));
    Ok(Normed { y: next()?, mean: next()?, inverse: next()? })
}

/// Square windows that [`pool`] moves over images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Height and width of a window in pixels, at most [`Windows::SIZE_MAX`].
    pub size: i64,
    /// Distance between neighbouring windows in pixels.
    pub stride: i64,
    /// Rows and columns that windows reach over each border, at most half of `size`. They are no
    /// part of a maximum or an average.
    pub padding: i64,
    /// Whether the last window may reach further over the border, so that no pixel is left out.
    pub ceil: bool,
}

impl Windows {
    /// The largest window: the number of a pixel in it takes a byte.
    pub const SIZE_MAX: i64 = 15;
}

/// What [`pool`] makes of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The largest value. Of several, the first.
    Maximum,
    /// The average.
    Average,
}

/// The maximum or the average of each window of `x`, in the dtype of `x`. It computes in float32,
/// and saves a byte for each maximum, and nothing for averages.
///
/// # Errors
/// Images that [`takes`] does not take; windows that do not fit them; out of memory.
pub fn pool(x: &Tensor, windows: &Windows, pooling: Pooling) -> Result<Tensor> {
    let Windows { size, stride, padding, ceil } = *windows;
    let largest = pooling == Pooling::Maximum;
    // SAFETY: the tensor at this address is borrowed for the whole call.
    let y = unsafe { bridged::pool_images(address(x), size, stride, padding, ceil, largest) }?;
    adopt(y).ok_or_else(|| Error("pooling gave no tensor".into()))
}

/// Every second pixel of `x` `[samples, channels, height, width]` in both directions. The first is
/// pixel `from`, which is 0 or 1. Height and width are halved and rounded up, and 0 is beyond the
/// border. Result and gradient have the layout of `x`. Takes any dtype and device.
///
/// # Errors
/// Tensors that are no images; out of memory.
pub fn every_second_pixel(x: &Tensor, from: i64) -> Result<Tensor> {
    // SAFETY: the tensor at this address is borrowed for the whole call.
    let y = unsafe { bridged::every_second_pixel(address(x), from) }?;
    adopt(y).ok_or_else(|| Error("every_second_pixel gave no tensor".into()))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Reduction};

    use super::*;
    use crate::vjp::{Request, vjp};

    /// Values in (-1, 1) that depend only on their position, in channels-last layout.
    fn images(shape: [i64; 4], seed: f64) -> Tensor {
        let [samples, channels, height, width] = shape;
        let count: i64 = shape.iter().product();
        let position = Tensor::arange(count, (Kind::Double, Device::Cpu)) + seed;
        let values = (position * 12.9898).sin().reshape([samples, height, width, channels]);
        values.permute([0, 3, 1, 2])
    }

    /// The gradients of `inputs` for that of `y`, in float64.
    fn gradients(y: &Tensor, dy: &Tensor, inputs: &[&Tensor]) -> Vec<Tensor> {
        let request = Request { outputs: &[y], output_grads: &[dy], inputs, parameters: &[] };
        let found = vjp(&request, &mut []).unwrap();
        found.into_iter().map(|one| one.unwrap().to_kind(Kind::Double)).collect()
    }

    fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
        (a - b).abs().max().double_value(&[])
    }

    const FLOAT: Kind = Kind::Float;

    /// Shapes with channels that fill registers and that do not, and with one pixel.
    const SHAPES: [[i64; 4]; 5] =
        [[2, 64, 5, 4], [3, 37, 8, 8], [2, 1, 2, 2], [6, 130, 1, 1], [4, 16, 40, 9]];

    #[test]
    fn oracle_batch_norm_is_that_of_libtorch_in_float64() {
        for shape in SHAPES {
            for (relu, eps) in [(false, 1e-5), (true, 1e-3)] {
                // A mean far from 0 would cost digits if squares were summed.
                let x = images(shape, 0.1) + 30.0;
                let channels = [shape[1]];
                let vector = |seed: f64| images([1, shape[1], 1, 1], seed).reshape(channels);
                let run = |kind: Kind| {
                    let leaf = |t: &Tensor| t.to_kind(kind).detach().set_requires_grad(true);
                    let (x, w, b) = (leaf(&x), leaf(&(vector(0.2) + 1.5)), leaf(&vector(0.3)));
                    let dy = images(shape, 0.4).to_kind(kind);
                    let none = None::<Tensor>;
                    let (y, mean, inverse) = if kind == Kind::Float {
                        assert!(takes(&x));
                        let Normed { y, mean, inverse } =
                            batch_norm(&x, &w, &b, eps, relu).unwrap();
                        (y, mean, inverse)
                    } else {
                        let (y, mean, inverse) = x.native_batch_norm(
                            Some(&w),
                            Some(&b),
                            none.as_ref(),
                            none.as_ref(),
                            true,
                            0.0,
                            eps,
                        );
                        (if relu { y.relu() } else { y }, mean, inverse)
                    };
                    let found = gradients(&y, &dy, &[&x, &w, &b]);
                    let all = [y, mean, inverse].map(|t| t.detach().to_kind(Kind::Double));
                    all.into_iter().chain(found).collect::<Vec<_>>()
                };
                let (own, exact) = (run(Kind::Float), run(Kind::Double));
                for (part, (own, exact)) in own.iter().zip(&exact).enumerate() {
                    // x has 22 bits below its mean of 30, 2e-6 a value. Sums of up to 1440 values
                    // of at most 1 are off by a few of that each.
                    let scale = exact.abs().max().double_value(&[]).max(1.0);
                    let off = largest_difference(own, exact) / scale;
                    assert!(off < 2e-5, "{shape:?} relu {relu} part {part}: off by {off}");
                }
            }
        }
    }

    /// A channel without variance and an eps of 0, and one with a value that is not a number.
    #[test]
    fn oracle_batch_norm_of_odd_channels_is_that_of_libtorch() {
        let x = images([3, 20, 4, 4], 0.1).to_kind(Kind::Float);
        let _ = x.select(1, 3).fill_(2.0);
        let _ = x.select(1, 5).select(0, 1).fill_(f64::NAN);
        let ones = || Tensor::ones([20], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let dy = images([3, 20, 4, 4], 0.4).to_kind(Kind::Float);
        let (w, b) = (ones(), ones());
        let Normed { y, inverse, .. } = batch_norm(&x, &w, &b, 0.0, true).unwrap();
        let own = gradients(&y, &dy, &[&w, &b]);
        let (w, b, none) = (ones(), ones(), None::<Tensor>);
        let (y, _, expected) =
            x.native_batch_norm(Some(&w), Some(&b), none.as_ref(), none.as_ref(), true, 0.0, 0.0);
        let theirs = gradients(&y.relu(), &dy, &[&w, &b]);
        assert_eq!(inverse.double_value(&[3]), expected.double_value(&[3]));
        for (own, theirs) in own.iter().zip(&theirs) {
            // Sums of 48 products of numbers of about 1, in another order.
            assert!(own.allclose(theirs, 1e-5, 1e-5, true), "{own} {theirs}");
        }
    }

    #[test]
    fn oracle_batch_norm_in_bfloat16_is_that_of_float32_rounded() {
        for shape in SHAPES {
            for relu in [false, true] {
                let [x, dy] = [images(shape, 0.1) + 3.0, images(shape, 0.4)]
                    .map(|one| one.to_kind(Kind::BFloat16));
                assert!(takes(&x));
                let vector = |seed: f64| {
                    let values = images([1, shape[1], 1, 1], seed).reshape([shape[1]]) + 1.5;
                    values.to_kind(Kind::Float).set_requires_grad(true)
                };
                let (w, b) = (vector(0.2), vector(0.3));
                let run = |kind: Kind| {
                    let x = x.to_kind(kind).detach().set_requires_grad(true);
                    let Normed { y, mean, inverse } = batch_norm(&x, &w, &b, 1e-5, relu).unwrap();
                    assert_eq!([&y, &mean, &inverse].map(Tensor::kind), [kind, FLOAT, FLOAT]);
                    let mut found = gradients(&y, &dy.to_kind(kind), &[&x, &w, &b]);
                    found[0] = found[0].to_kind(Kind::BFloat16);
                    found.extend([y.detach().to_kind(Kind::BFloat16), mean, inverse]);
                    found
                };
                let own = run(Kind::BFloat16);
                assert_eq!(own, run(Kind::Float), "{shape:?} relu {relu}");
                let none = None::<&Tensor>;
                let (y, ..) = x.native_batch_norm(Some(&w), Some(&b), none, none, true, 0.0, 1e-5);
                let theirs = if relu { y.relu() } else { y };
                // Both compute in float32. Rounded to 8 bits, that is a unit in the last place.
                let wide = |x: &Tensor| x.to_kind(Kind::Double);
                assert!(wide(&own[3]).allclose(&wide(&theirs), 1.0 / 128.0, 1e-4, false));
            }
        }
    }

    #[test]
    fn oracle_pooling_has_the_bits_of_libtorch() {
        for shape in SHAPES {
            for (size, stride, padding, ceil) in
                [(3, 1, 1, false), (3, 2, 1, false), (2, 2, 0, true), (3, 2, 0, true)]
            {
                let beyond = if ceil { stride - 1 } else { 0 };
                if shape[2].min(shape[3]) + 2 * padding + beyond < size {
                    continue;
                }
                let windows = Windows { size, stride, padding, ceil };
                // Rounded, so that windows have several values that are largest.
                let rounded = (images(shape, 0.7) * 2.0).round() / 2.0;
                for pooling in [Pooling::Maximum, Pooling::Average] {
                    let leaf = || rounded.to_kind(Kind::Float).detach().set_requires_grad(true);
                    let (own, theirs) = (leaf(), leaf());
                    let y = pool(&own, &windows, pooling).unwrap();
                    let (sizes, strides, paddings) = ([size; 2], [stride; 2], [padding; 2]);
                    let expected = match pooling {
                        Pooling::Maximum => {
                            theirs.max_pool2d(sizes, strides, paddings, [1; 2], ceil)
                        }
                        Pooling::Average => {
                            theirs.avg_pool2d(sizes, strides, paddings, ceil, false, None)
                        }
                    };
                    assert_eq!(y.size(), expected.size(), "{shape:?} {windows:?}");
                    assert!(y.equal(&expected), "{pooling:?} of {shape:?} {windows:?}");
                    // Quarters are summed without a rounding, in whatever order.
                    let dy = (images(y.size().try_into().unwrap(), 0.9) * 4.0).round() / 4.0;
                    let dy = dy.to_kind(Kind::Float);
                    let found = gradients(&y, &dy, &[&own]).remove(0);
                    let expected = gradients(&expected, &dy, &[&theirs]).remove(0);
                    let off = largest_difference(&found, &expected);
                    let limit = if pooling == Pooling::Maximum { 0.0 } else { 1e-6 };
                    assert!(off <= limit, "{pooling:?} of {shape:?} {windows:?}: off by {off}");
                }
            }
        }
    }

    #[test]
    fn oracle_pooling_in_bfloat16_is_that_of_float32_rounded() {
        for shape in SHAPES.into_iter().filter(|shape| shape[2].min(shape[3]) > 1) {
            let windows = Windows { size: 3, stride: 1, padding: 1, ceil: false };
            let x = images(shape, 0.7).to_kind(Kind::BFloat16);
            let dy = images(shape, 0.9).to_kind(Kind::BFloat16);
            assert!(takes(&x));
            for pooling in [Pooling::Maximum, Pooling::Average] {
                let run = |kind: Kind| {
                    let x = x.to_kind(kind).detach().set_requires_grad(true);
                    let y = pool(&x, &windows, pooling).unwrap();
                    assert_eq!(y.kind(), kind);
                    let found = gradients(&y, &dy.to_kind(kind), &[&x]).remove(0);
                    [y.detach(), found].map(|one| one.to_kind(Kind::BFloat16))
                };
                assert_eq!(run(Kind::BFloat16), run(Kind::Float), "{pooling:?} of {shape:?}");
                let theirs = match pooling {
                    Pooling::Maximum => x.max_pool2d([3; 2], [1; 2], [1; 2], [1; 2], false),
                    Pooling::Average => x.avg_pool2d([3; 2], [1; 2], [1; 2], false, false, None),
                };
                let [own, _] = run(Kind::BFloat16);
                assert!(own.equal(&theirs), "{pooling:?} of {shape:?} beside libtorch's");
            }
        }
    }

    #[test]
    fn oracle_every_second_pixel_is_a_slice() {
        for shape in [[2, 3, 6, 4], [1, 16, 5, 7], [2, 4, 1, 1]] {
            for from in [0, 1] {
                let leaf = || images(shape, 0.2).detach().set_requires_grad(true);
                let (own, theirs) = (leaf(), leaf());
                let (height, width) = (shape[2], shape[3]);
                let slice = theirs.slice(2, from, height, 1).slice(3, from, width, 1);
                let padded = slice.constant_pad_nd([0, from, 0, from]);
                let expected = padded.slice(2, 0, height, 2).slice(3, 0, width, 2);
                let y = every_second_pixel(&own, from).unwrap();
                assert_eq!(y, expected, "{shape:?} from {from}");
                let dy = images(y.size().try_into().unwrap(), 0.9);
                let found = gradients(&y, &dy, &[&own]);
                assert_eq!(found, gradients(&expected, &dy, &[&theirs]), "{shape:?} from {from}");
            }
        }
    }

    #[test]
    fn fault_what_does_not_fit_is_refused() {
        let x = images([2, 4, 3, 3], 0.0).to_kind(Kind::Float);
        let w = Tensor::ones([3], (Kind::Float, Device::Cpu));
        let said = batch_norm(&x, &w, &w, 1e-5, false).unwrap_err().to_string();
        assert!(said.contains("[2, 4, 3, 3] with vectors [3]"), "{said}");
        let windows = Windows { size: 16, stride: 1, padding: 0, ceil: false };
        let said = pool(&x, &windows, Pooling::Maximum).unwrap_err().to_string();
        assert!(said.contains("windows of 16 x 16"), "{said}");
        assert!(!takes(&x.to_kind(Kind::Double)) && !takes(&x.contiguous()));
        // A loss keeps the value alive; the second derivative is refused.
        let x = x.set_requires_grad(true);
        let windows = Windows { size: 3, stride: 1, padding: 1, ceil: false };
        let y = pool(&x, &windows, Pooling::Maximum).unwrap();
        let loss = y.mse_loss(&y.zeros_like(), Reduction::Sum);
        assert!(Tensor::f_run_backward(&[&loss], &[&x], false, true).is_err());
    }
}
