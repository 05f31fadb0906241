//! Vector-Jacobian products in two halves: first the gradients of a layer's inputs, later those of
//! its parameters. Schedules that fill their bubble with weight gradients need this (Qi et al.
//! 2023, arXiv 2401.10241).

use cxx::UniquePtr;
use tch::Tensor;

use crate::{Error, Result, address, addresses, adopt, ffi::bridged, vjp::Request};

/// The result of the first half.
pub struct First {
    /// The gradient of each input; `None` where the outputs do not depend on it.
    pub inputs: Vec<Option<Tensor>>,
    /// Whether each parameter's gradient has already been computed and added to its accumulator.
    pub summed: Vec<bool>,
    /// The second half.
    pub later: Later,
}

/// The second half of a backward: what is needed to compute the parameters' gradients. Dropping it
/// releases the graph.
pub struct Later(UniquePtr<bridged::Halves>);

/// Computes the gradients of a layer's inputs, and keeps the part of its graph that the parameters'
/// gradients need. Both halves together compute the same bits as [`crate::vjp::vjp`]. Returns
/// `None`, and does nothing, if a parameter is used twice: the order of its sum would change.
///
/// Some parameters' gradients are computed along the way. Those marked in `in_turn` are added to
/// `accumulators` at once; [`Later::finish`] adds the others. The accumulators are those of
/// [`crate::vjp::vjp`].
///
/// # Errors
/// As for [`crate::vjp::vjp`].
///
/// ```
/// use gpipe_bridge::{split::split, vjp::Request};
/// use tch::Tensor;
/// let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
/// let w = Tensor::from_slice(&[3f32, 4.0]).set_requires_grad(true);
/// let y = &x * &w;
/// let dy = Tensor::from_slice(&[10f32, 100.0]);
/// let request =
///     Request { outputs: &[&y], output_grads: &[&dy], inputs: &[&x], parameters: &[&w] };
/// let mut dw = vec![None];
/// let first = split(&request, &mut dw, &[false]).unwrap().unwrap();
/// assert_eq!(first.inputs[0], Some(Tensor::from_slice(&[30f32, 400.0])));
/// first.later.finish(&mut dw).unwrap();
/// assert_eq!(dw[0], Some(Tensor::from_slice(&[10f32, 200.0])));
/// ```
pub fn split(
    request: &Request,
    accumulators: &mut [Option<Tensor>],
    in_turn: &[bool],
) -> Result<Option<First>> {
    // SAFETY: the tensors at all addresses are borrowed for the whole call; C++ accepts 0 in
    // `held`.
    let mut halves = unsafe {
        bridged::split_vjp(
            &addresses(request.outputs.iter().copied()),
            &addresses(request.output_grads.iter().copied()),
            &addresses(request.inputs.iter().copied()),
            &addresses(request.parameters.iter().copied()),
            &held(accumulators),
            in_turn,
        )
    }?;
    if !halves.can_split() {
        return Ok(None);
    }
    replace(accumulators, halves.pin_mut().take_sums()?)?;
    let inputs = halves.pin_mut().take_inputs()?.into_iter().map(adopt).collect();
    let summed = (0..accumulators.len() as u32).map(|parameter| halves.is_summed(parameter));
    let summed = summed.collect::<std::result::Result<_, _>>()?;
    Ok(Some(First { inputs, summed, later: Later(halves) }))
}

/// The accumulators' addresses; 0 where nothing has been summed yet.
fn held(accumulators: &[Option<Tensor>]) -> Vec<usize> {
    accumulators.iter().map(|tensor| tensor.as_ref().map_or(0, address)).collect()
}

/// Replaces the accumulators with `sums`, which C++ computed from them.
fn replace(accumulators: &mut [Option<Tensor>], sums: Vec<usize>) -> Result<()> {
    if sums.len() != accumulators.len() {
        let (sums, accumulators) = (sums.len(), accumulators.len());
        return Err(Error(format!("split returned {sums} accumulators for {accumulators}")));
    }
    for (accumulator, sum) in accumulators.iter_mut().zip(sums.into_iter().map(adopt)) {
        *accumulator = sum;
    }
    Ok(())
}

impl Later {
    /// Adds each parameter's gradient to the accumulator at the same position, as
    /// [`crate::vjp::vjp`] does.
    ///
    /// # Errors
    /// As for [`crate::vjp::vjp`].
    pub fn finish(mut self, accumulators: &mut [Option<Tensor>]) -> Result<()> {
        let held = held(accumulators);
        // SAFETY: the tensors at all addresses are borrowed for the whole call; C++ accepts 0 in
        // `held`.
        let sums = unsafe { self.0.pin_mut().finish(&held) }?;
        replace(accumulators, sums)
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;
    use crate::{testing::leaf, vjp::vjp};

    /// The gradients from both halves and from the whole VJP, each on a new graph. The halves run
    /// twice: early gradients are added at once, then later, with equal results.
    fn both(
        inputs: &[Tensor],
        parameters: &[Tensor],
        f: impl Fn(&[Tensor], &[Tensor]) -> Tensor,
    ) -> Option<[Vec<Option<Tensor>>; 2]> {
        let (x, w): (Vec<&Tensor>, Vec<&Tensor>) =
            (inputs.iter().collect(), parameters.iter().collect());
        // The accumulators already hold something.
        let before = || parameters.iter().map(|w| Some(Tensor::ones_like(w))).collect::<Vec<_>>();
        let with = |back: &dyn Fn(&Request) -> Option<Vec<Option<Tensor>>>| {
            let y = f(inputs, parameters);
            let grad = Tensor::ones_like(&y) * 0.5;
            let (outputs, output_grads) = (&[&y], &[&grad]);
            back(&Request { outputs, output_grads, inputs: &x, parameters: &w })
        };
        let halves = |at_once: bool| {
            with(&|request| {
                let mut sums = before();
                let in_turn = vec![at_once; sums.len()];
                let found = split(request, &mut sums, &in_turn).unwrap()?;
                found.later.finish(&mut sums).unwrap();
                Some(found.inputs.into_iter().chain(sums).collect())
            })
        };
        let whole = with(&|request| {
            let mut sums = before();
            let found = vjp(request, &mut sums).unwrap();
            Some(found.into_iter().chain(sums).collect())
        });
        let later = halves(false)?;
        assert_eq!(halves(true)?, later);
        Some([later, whole?])
    }

    #[test]
    fn transparency_halves_have_the_bits_of_the_whole() {
        let x = [leaf(&[4, 6], 1)];
        let w = [leaf(&[8, 6], 2), leaf(&[8], 3), leaf(&[8], 4), leaf(&[8], 5), leaf(&[5, 8], 6)];
        let block = |x: &[Tensor], w: &[Tensor]| {
            let h = x[0].linear(&w[0], Some(&w[1])).gelu("none");
            let normed = h.layer_norm([8], Some(&w[2]), Some(&w[3]), 1e-5, false);
            (&normed + &h).linear(&w[4], None::<&Tensor>)
        };
        let [halves, whole] = both(&x, &w, block).unwrap();
        assert_eq!(halves.len(), 6);
        assert!(halves.iter().all(Option::is_some));
        assert_eq!(halves, whole);
    }

    /// Two convolutions: one with many inputs per output, whose kernel gradient is left to the
    /// second half, and one with few.
    fn images(x: &[Tensor], w: &[Tensor]) -> Tensor {
        let convolution = |x: &Tensor, w: &Tensor| x.conv2d(w, None::<&Tensor>, 1, 1, 1, 1);
        let normed = convolution(&x[0].relu(), &w[0]).batch_norm(
            Some(&w[1]),
            Some(&w[2]),
            None::<&Tensor>,
            None::<&Tensor>,
            true,
            0.1,
            1e-5,
            false,
        );
        convolution(&normed.relu(), &w[3])
    }

    fn kernels() -> [Tensor; 4] {
        [leaf(&[8, 64, 3, 3], 2), leaf(&[8], 3), leaf(&[8], 4), leaf(&[4, 8, 3, 3], 5)]
    }

    #[test]
    fn transparency_of_convolutions() {
        let (x, w) = ([leaf(&[2, 64, 6, 6], 1)], kernels());
        let [halves, whole] = both(&x, &w, images).unwrap();
        assert!(halves.iter().all(Option::is_some));
        assert_eq!(halves, whole);
    }

    #[test]
    fn property_what_is_found_early_is_added_where_it_is_its_turn() {
        let (x, w) = (leaf(&[2, 64, 6, 6], 1), kernels());
        let y = images(&[x.shallow_clone()], &w);
        let grad = Tensor::ones_like(&y);
        let parameters: Vec<&Tensor> = w.iter().collect();
        let (outputs, output_grads) = (&[&y], &[&grad]);
        let request = Request { outputs, output_grads, inputs: &[&x], parameters: &parameters };
        let mut sums = [None, None, None, None];
        let first = split(&request, &mut sums, &[true, true, false, true]).unwrap().unwrap();
        let is_there: Vec<bool> = sums.iter().map(Option::is_some).collect();
        assert_eq!(is_there, [false, true, false, true]);
        assert_eq!(first.summed, is_there);
        first.later.finish(&mut sums).unwrap();
        assert!(sums.iter().all(Option::is_some));
    }

    #[test]
    fn transparency_where_there_is_no_input_or_no_parameter() {
        let w = [leaf(&[7, 3], 1)];
        let tokens = Tensor::from_slice(&[1_i64, 5, 1, 2]);
        let [halves, whole] =
            both(&[], &w, |_, w| Tensor::embedding(&w[0], &tokens, -1, false, false)).unwrap();
        assert_eq!(halves, whole);
        let x = [leaf(&[3], 1), leaf(&[3], 2)];
        let [halves, whole] = both(&x, &[], |x, _| &x[0] * &x[1]).unwrap();
        assert_eq!(halves, whole);
        // One of the output's two branches has no input; an unused parameter has no gradient.
        let (x, w) = ([leaf(&[3], 1)], [leaf(&[3, 3], 2), leaf(&[3, 3], 3), leaf(&[3], 4)]);
        let [halves, whole] =
            both(&x, &w, |x, w| w[0].matmul(&x[0]) + w[1].exp().sum(Kind::Float)).unwrap();
        assert_eq!(halves, whole);
    }

    #[test]
    fn fault_a_weight_that_is_used_twice_is_not_split() {
        let (x, w) = ([leaf(&[4, 4], 1)], [leaf(&[4, 4], 2)]);
        let twice = |x: &[Tensor], w: &[Tensor]| x[0].matmul(&w[0]).tanh().matmul(&w[0]);
        assert!(both(&x, &w, twice).is_none());
        // Nothing was done, so the whole VJP can still be computed.
        let y = twice(&x, &w);
        let grad = Tensor::ones_like(&y);
        let request = Request {
            outputs: &[&y],
            output_grads: &[&grad],
            inputs: &[&x[0]],
            parameters: &[&w[0]],
        };
        assert!(split(&request, &mut [None], &[true]).unwrap().is_none());
        assert!(vjp(&request, &mut [None]).unwrap()[0].is_some());
    }

    /// The first half releases what the second does not need: here, everything but what the product
    /// saved.
    #[test]
    fn property_the_first_half_gives_back_what_the_second_does_not_need() {
        let arena = crate::memory::Arena::acquire().unwrap();
        crate::memory::enter(arena.id()).unwrap();
        let (x, w) = (leaf(&[256, 64], 1), leaf(&[64, 64], 2));
        let live = || crate::memory::stats(arena.id()).unwrap().live as i64;
        let before = live();
        // The product saves x and w, which exist anyway; each tanh saves its output.
        let mut y = x.matmul(&w);
        for _ in 0..4 {
            y = y.tanh();
        }
        let grad = Tensor::ones_like(&y);
        let (kept, one) = (live() - before, 256 * 64 * 4);
        assert!(kept >= 5 * one, "{kept}");
        let request =
            Request { outputs: &[&y], output_grads: &[&grad], inputs: &[&x], parameters: &[&w] };
        let mut sums = [None];
        let first = split(&request, &mut sums, &[true]).unwrap().unwrap();
        drop(y);
        drop(grad);
        // The input's gradient, and the incoming gradient of the product.
        let held = live() - before;
        assert!((2 * one..3 * one).contains(&held), "{held}");
        first.later.finish(&mut sums).unwrap();
        drop((first.inputs, sums));
        assert!(live() - before < one, "{}", live() - before);
        crate::memory::enter(0).unwrap();
    }

    /// Nodes of the first half release their saved values before the next nodes allocate, as in a
    /// whole VJP.
    #[test]
    fn property_the_first_half_gives_back_as_it_goes() {
        let arena = crate::memory::Arena::acquire().unwrap();
        crate::memory::enter(arena.id()).unwrap();
        // The gradient of x is computed last, and is as large as all that the eight tanh functions
        // save.
        let (x, w) = (leaf(&[256, 512], 1), leaf(&[512, 64], 2));
        let live = || crate::memory::stats(arena.id()).unwrap().live;
        let one = 256 * 64 * 4;
        let mut y = x.matmul(&w);
        for _ in 0..8 {
            y = y.tanh();
        }
        let grad = Tensor::ones_like(&y);
        let before = live();
        crate::memory::reset_peak(arena.id()).unwrap();
        let (outputs, output_grads) = (&[&y], &[&grad]);
        let request = Request { outputs, output_grads, inputs: &[&x], parameters: &[&w] };
        let first = split(&request, &mut [None], &[true]).unwrap().unwrap();
        let peak = crate::memory::stats(arena.id()).unwrap().peak;
        // Besides that gradient: the incoming gradient of the product, and the last tanh's output.
        assert!(peak - before < 4 * one, "{} of {one}", peak - before);
        drop(first);
        crate::memory::enter(0).unwrap();
    }
}
