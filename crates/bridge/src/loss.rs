//! Cross entropy with a backward that needs no extra memory.

use tch::{Kind, Tensor};

use crate::{Error, Result, address, adopt, ffi::bridged};

/// The sum over the rows of -log softmax of `logits` at `target`. A row whose target is `ignore`
/// does not count. `logits` is `[rows, classes]` of floats, `target` `[rows]` int64. The share
/// `smoothing` of each target is spread evenly over all classes (Szegedy et al. 2016, section 7).
///
/// Differentiable once in `logits`. Where [`overwrites`] says so, the backward overwrites what the
/// forward saved, and a second backward is an error.
///
/// # Errors
/// Shapes that do not fit; a target outside 0..classes (on a CPU); out of memory.
pub fn cross_entropy_sum(
    logits: &Tensor,
    target: &Tensor,
    ignore: i64,
    smoothing: f64,
) -> Result<Tensor> {
    let (logits, target) = (address(logits), address(target));
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    let sum = unsafe { bridged::cross_entropy_sum(logits, target, ignore, smoothing) }?;
    adopt(sum).ok_or_else(|| Error("cross entropy gave no tensor".into()))
}

/// Whether the forward of [`cross_entropy_sum`] on a CPU computes the gradient, too: for logits of
/// this dtype. The backward then has only to scale it.
pub fn is_one_pass(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::BFloat16)
}

/// Whether the backward of [`cross_entropy_sum`] overwrites what its forward saved, and so needs no
/// memory of the logits' size.
pub fn overwrites(kind: Kind, smoothing: f64) -> bool {
    smoothing == 0.0 || is_one_pass(kind)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Reduction};

    use super::*;
    use crate::{
        memory::{self, Arena},
        vjp::{Request, vjp},
    };

    fn logits(rows: i64, classes: i64, kind: Kind) -> Tensor {
        let position = Tensor::arange(rows * classes, (Kind::Double, Device::Cpu));
        ((position * 12.9898).sin() * 5.0).reshape([rows, classes]).to_kind(kind)
    }

    fn gradient(sum: &Tensor, of: &Tensor) -> Tensor {
        let seed = sum.ones_like() * 0.25;
        let request =
            Request { outputs: &[sum], output_grads: &[&seed], inputs: &[of], parameters: &[] };
        vjp(&request, &mut []).unwrap().remove(0).unwrap()
    }

    /// The loss was rounded as numbers of the size of the logits are: to 1e-3 beside 1e4.
    #[test]
    fn regression_large_logits_leave_small_losses_exact() {
        let exact = logits(6, 40, Kind::Double);
        let target = exact.argmax(1, false);
        for offset in [0.0, 100.0, 1e4] {
            // Numbers that float32 has, so that only the loss is rounded.
            let x = (&exact * 64.0).round() / 64.0 + offset;
            let wanted = cross_entropy_sum(&x, &target, -100, 0.0).unwrap().double_value(&[]);
            let found = cross_entropy_sum(&x.to_kind(Kind::Float), &target, -100, 0.0).unwrap();
            let difference = (found.double_value(&[]) - wanted).abs();
            // A few roundings of each row's loss, of about 1.
            assert!(difference < 6e-6, "{offset}: {difference:e} of {wanted}");
        }
    }

    #[test]
    fn oracle_values_and_gradients_are_libtorchs() {
        // Fewer classes than a register has room for, and more than one block of them.
        for classes in [7, 16, 100] {
            let target = Tensor::from_slice(&[3_i64, -100, 0, 6, 6, -100]);
            // A few roundings of numbers of about 10 (losses) and 1 (gradients).
            for (kind, tolerance) in [(Kind::Double, 1e-13), (Kind::Float, 4e-6)] {
                for smoothing in [0.0, 0.1] {
                    let leaf = || logits(6, classes, kind).set_requires_grad(true);
                    let (x, y) = (leaf(), leaf());
                    let found = cross_entropy_sum(&x, &target, -100, smoothing).unwrap();
                    let none = None::<Tensor>;
                    let expected =
                        y.cross_entropy_loss(&target, none, Reduction::Sum, -100, smoothing);
                    let what = format!("{classes} classes, {kind:?}, smoothing {smoothing}");
                    let difference = (&found - &expected).abs().double_value(&[]);
                    assert!(difference <= 10.0 * tolerance, "{what}: {difference:e}");
                    let difference = (gradient(&found, &x) - gradient(&expected, &y)).abs().max();
                    assert!(difference.double_value(&[]) <= tolerance, "{what}");
                }
            }
        }
    }

    #[test]
    fn oracle_bfloat16_is_rounded_once() {
        let x = logits(5, 70, Kind::BFloat16).set_requires_grad(true);
        let target = Tensor::from_slice(&[3_i64, 69, 0, -100, 7]);
        let found = cross_entropy_sum(&x, &target, -100, 0.0).unwrap();
        let exact = x.detach().to_kind(Kind::Double).set_requires_grad(true);
        let expected = cross_entropy_sum(&exact, &target, -100, 0.0).unwrap();
        // bfloat16 has 8 bits: half a unit of the last is 2^-9 of the value. Twice, for the scale.
        let off = (gradient(&found, &x).to_kind(Kind::Double) - gradient(&expected, &exact)).abs();
        assert!(off.max().double_value(&[]) <= 0.25 / 256.0, "{off}");
        assert_eq!(found.kind(), Kind::BFloat16);
        let said = cross_entropy_sum(&x, &target.f_add_scalar(1).unwrap(), -99, 0.0);
        let said = said.unwrap_err().to_string();
        assert!(said.contains("target 70 is out of bounds: the classes are 0..70"), "{said}");
    }

    #[test]
    fn oracle_logits_without_a_gradient_are_only_read() {
        let x = logits(4, 50, Kind::Float);
        let target = Tensor::from_slice(&[3_i64, 49, 0, 7]);
        let sum = cross_entropy_sum(&x, &target, -100, 0.0).unwrap();
        let with = cross_entropy_sum(&x.copy().set_requires_grad(true), &target, -100, 0.0);
        assert_eq!(sum, with.unwrap().detach());
        assert!(!sum.requires_grad());
    }

    #[test]
    fn oracle_the_backward_allocates_nothing_of_the_logits_size() {
        let (rows, classes) = (64, 1000);
        let size = (rows * classes * 4) as u64;
        let arena = Arena::acquire().unwrap();
        memory::enter(arena.id()).unwrap();
        let x = logits(rows, classes, Kind::Float).set_requires_grad(true);
        let target = Tensor::zeros([rows], (Kind::Int64, Device::Cpu));
        let sum = cross_entropy_sum(&x, &target, -100, 0.0).unwrap();
        memory::reset_peak(arena.id()).unwrap();
        let before = memory::stats(arena.id()).unwrap().live;
        let gradient = gradient(&sum, &x);
        let added = memory::stats(arena.id()).unwrap().peak - before;
        assert!(added < size / 10, "{added} of {size}");
        assert_eq!(gradient.size(), [rows, classes]);
        memory::enter(0).unwrap();
    }

    #[test]
    fn fault_targets_and_shapes_that_do_not_fit_are_errors() {
        let x = logits(3, 4, Kind::Float);
        assert!(cross_entropy_sum(&x, &Tensor::from_slice(&[0_i64, 1, 4]), -100, 0.0).is_err());
        assert!(cross_entropy_sum(&x, &Tensor::from_slice(&[0_i64, -1, 3]), -100, 0.0).is_err());
        assert!(cross_entropy_sum(&x, &Tensor::from_slice(&[0_i64, 1]), -100, 0.0).is_err());
    }
}
