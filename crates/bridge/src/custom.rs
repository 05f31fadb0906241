//! Operations whose backward is Rust code.

use tch::Tensor;

pub use crate::custom_backward::failure;
use crate::{Error, Result, addresses, adopt, custom_backward::CustomBackward, ffi::bridged};

/// Returns `outputs`, which were computed from `inputs` without a graph, as outputs of an operation
/// whose backward is `compute`. `saved` is what the backward needs; it is kept until then.
///
/// The backward may run twice, each time for other inputs. It runs without a graph, so the result
/// is differentiable once. An error or panic of `compute` is the error of the whole backward.
///
/// # Errors
/// If libtorch cannot allocate.
///
/// ```
/// use gpipe_bridge::custom::custom;
/// use tch::Tensor;
/// let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
/// let y = tch::no_grad(|| &x * &x);
/// let y = custom(&[&x], &[y], &[x.detach()], |saved, grads, _| {
///     Ok(vec![grads[0].as_ref().map(|grad| grad * &saved[0] * 2.0)])
/// });
/// y.unwrap()[0].sum(tch::Kind::Float).backward();
/// assert_eq!(x.grad(), Tensor::from_slice(&[2f32, 4.0]));
/// ```
pub fn custom(
    inputs: &[&Tensor],
    outputs: &[Tensor],
    saved: &[Tensor],
    compute: impl Fn(&[Tensor], &[Option<Tensor>], &[bool]) -> Result<Vec<Option<Tensor>>>
    + Send
    + Sync
    + 'static,
) -> Result<Vec<Tensor>> {
    let specs = inputs.iter().map(|input| (input.size(), input.kind())).collect();
    let backward = Box::new(CustomBackward::new(Box::new(compute), specs));
    let (from, made, kept) =
        (addresses(inputs.iter().copied()), addresses(outputs), addresses(saved));
    // SAFETY: the tensors at all addresses are borrowed for the whole call.
    let found = unsafe { bridged::custom(&from, &made, &kept, backward) }?;
    let found: Vec<Tensor> = found.into_iter().filter_map(adopt).collect();
    match found.len() == outputs.len() {
        true => Ok(found),
        false => Err(Error("a custom function lost an output".into())),
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::{
        split::split,
        vjp::{Request, vjp},
    };

    fn numbers(values: &[f64]) -> Tensor {
        Tensor::from_slice(values).set_requires_grad(true)
    }

    /// x * w, with its gradients in Rust.
    fn product(x: &Tensor, w: &Tensor) -> Tensor {
        let y = tch::no_grad(|| x * w);
        let saved = [x.detach(), w.detach()];
        let made = custom(&[x, w], &[y], &saved, |saved, grads, wanted| {
            let grad = grads[0].as_ref().ok_or_else(|| Error("no gradient".into()))?;
            let of = |wanted: bool, other: &Tensor| wanted.then(|| grad * other);
            Ok(vec![of(wanted[0], &saved[1]), of(wanted[1], &saved[0])])
        });
        made.unwrap().remove(0)
    }

    #[test]
    fn oracle_a_backward_in_rust_equals_libtorchs_whole_and_split() {
        let (x, w) = (numbers(&[1.0, 2.0, -3.0]), numbers(&[4.0, 5.0, 6.0]));
        let seed = Tensor::from_slice(&[10.0_f64, 100.0, 1000.0]);
        let request = |y: &Tensor| {
            let (y, x, w) = (y.shallow_clone(), x.shallow_clone(), w.shallow_clone());
            (y, x, w)
        };
        for splits in [false, true] {
            let (y, x, w) = request(&product(&x, &w));
            // Something before and after it, so that the node is inside a graph.
            let z = &y * 2.0;
            let request = Request {
                outputs: &[&z],
                output_grads: &[&seed],
                inputs: &[&x],
                parameters: &[&w],
            };
            let mut sums = vec![None];
            let inputs = if splits {
                let first = split(&request, &mut sums, &[false]).unwrap().unwrap();
                first.later.finish(&mut sums).unwrap();
                first.inputs
            } else {
                vjp(&request, &mut sums).unwrap()
            };
            assert_eq!(inputs[0], Some(&seed * &w.detach() * 2.0));
            assert_eq!(sums[0], Some(&seed * &x.detach() * 2.0));
        }
    }

    #[test]
    fn fault_errors_and_panics_of_a_backward_are_errors_of_the_whole() {
        type Own = fn(&[Tensor], &[Option<Tensor>], &[bool]) -> Result<Vec<Option<Tensor>>>;
        let cases: [(Own, &str); 4] = [
            (|_, _, _| Err(Error("the reason".into())), "the reason"),
            (|_, _, _| panic!("a panic"), "its code panicked: a panic"),
            (|_, _, _| Ok(vec![]), "0 gradients for 1 inputs"),
            (|saved, _, _| Ok(vec![Some(saved[0].sum(Kind::Double))]), "for input 0"),
        ];
        for (compute, text) in cases {
            let x = numbers(&[1.0, 2.0]);
            let y = custom(&[&x], &[x.detach() * 2.0], &[x.detach()], compute).unwrap().remove(0);
            let seed = y.ones_like();
            let request =
                Request { outputs: &[&y], output_grads: &[&seed], inputs: &[&x], parameters: &[] };
            let error = vjp(&request, &mut []).unwrap_err();
            let reason = failure(&error).unwrap();
            assert!(reason.contains(text), "{reason} lacks {text}");
        }
    }

    #[test]
    fn oracle_without_a_gradient_nothing_is_kept() {
        let x = Tensor::from_slice(&[1.0_f64, 2.0]);
        let y = custom(&[&x], &[&x * 2.0], &[], |_, _, _| Ok(vec![None])).unwrap().remove(0);
        assert!(!y.requires_grad());
        assert_eq!(y, &x * 2.0);
    }
}
