//! Cross entropy with a backward that needs no extra memory.

use tch::Tensor;

use crate::{Error, Result, address, adopt, ffi::bridged};

/// The sum over the rows of -log softmax of `logits` at `target`. A row whose target is `ignore`
/// does not count. `logits` is `[rows, classes]` of floats, `target` `[rows]` int64. Differentiable
/// once in `logits`: the backward overwrites what the forward saved, and a second backward is an
/// error.
///
/// # Errors
/// Shapes that do not fit; a target outside 0..classes (on a CPU); out of memory.
pub fn cross_entropy_sum(logits: &Tensor, target: &Tensor, ignore: i64) -> Result<Tensor> {
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    let sum = unsafe { bridged::cross_entropy_sum(address(logits), address(target), ignore) }?;
    adopt(sum).ok_or_else(|| Error("cross entropy gave no tensor".into()))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Reduction};

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

    #[test]
    fn oracle_values_and_gradients_are_libtorchs() {
        let target = Tensor::from_slice(&[3_i64, -100, 0, 6, 6, -100]);
        // A few roundings of numbers of about 10 (losses) and 1 (gradients).
        for (kind, tolerance) in [(Kind::Double, 1e-13), (Kind::Float, 4e-6)] {
            let leaf = || logits(6, 7, kind).set_requires_grad(true);
            let (x, y) = (leaf(), leaf());
            let found = cross_entropy_sum(&x, &target, -100).unwrap();
            let none = None::<Tensor>;
            let expected = y.cross_entropy_loss(&target, none, Reduction::Sum, -100, 0.0);
            let difference = (&found - &expected).abs().double_value(&[]);
            assert!(difference <= 10.0 * tolerance, "{kind:?}: {difference:e}");
            let difference = (gradient(&found, &x) - gradient(&expected, &y)).abs().max();
            assert!(difference.double_value(&[]) <= tolerance, "{kind:?}");
        }
    }

    #[test]
    fn oracle_the_backward_allocates_nothing_of_the_logits_size() {
        let (rows, classes) = (64, 1000);
        let size = (rows * classes * 4) as u64;
        let arena = Arena::acquire().unwrap();
        memory::enter(arena.id()).unwrap();
        let x = logits(rows, classes, Kind::Float).set_requires_grad(true);
        let target = Tensor::zeros([rows], (Kind::Int64, Device::Cpu));
        let sum = cross_entropy_sum(&x, &target, -100).unwrap();
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
        assert!(cross_entropy_sum(&x, &Tensor::from_slice(&[0_i64, 1, 4]), -100).is_err());
        assert!(cross_entropy_sum(&x, &Tensor::from_slice(&[0_i64, -1, 3]), -100).is_err());
        assert!(cross_entropy_sum(&x, &Tensor::from_slice(&[0_i64, 1]), -100).is_err());
    }
}
