//! Vector-Jacobian products in two halves: first the gradients of a layer's inputs, later those of its parameters. What schedules
//! that fill their bubble with weights' gradients need (Qi et al. 2023, arXiv 2401.10241).

use cxx::UniquePtr;
use tch::Tensor;

use crate::{Error, Result, address, addresses, adopt, ffi::bridged, vjp::Request};

/// What the first half gives.
pub struct First {
    /// The gradient of each input; `None` where the outputs do not depend on it.
    pub inputs: Vec<Option<Tensor>>,
    /// The second half.
    pub later: Later,
}

/// The second half of a backward: what the parameters' gradients are computed from. The graph is released with it.
pub struct Later(UniquePtr<bridged::Halves>);

/// Computes the gradients of a layer's inputs, and keeps of its graph what the parameters' need. Both halves together give the
/// bits of [`crate::vjp::vjp`]. `None`: a parameter is used twice, so that the order of the sum would be another; nothing was done.
///
/// # Errors
/// As of [`crate::vjp::vjp`].
///
/// ```
/// use gpipe_bridge::{split::split, vjp::Request};
/// use tch::Tensor;
/// let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
/// let w = Tensor::from_slice(&[3f32, 4.0]).set_requires_grad(true);
/// let y = &x * &w;
/// let dy = Tensor::from_slice(&[10f32, 100.0]);
/// let request = Request { outputs: &[&y], output_grads: &[&dy], inputs: &[&x], parameters: &[&w] };
/// let first = split(&request).unwrap().unwrap();
/// assert_eq!(first.inputs[0], Some(Tensor::from_slice(&[30f32, 400.0])));
/// let mut dw = vec![None];
/// first.later.finish(&mut dw).unwrap();
/// assert_eq!(dw[0], Some(Tensor::from_slice(&[10f32, 200.0])));
/// ```
pub fn split(request: &Request) -> Result<Option<First>> {
    // SAFETY: every address is of a tensor borrowed for the whole call.
    let mut halves = unsafe {
        bridged::split_vjp(
            &addresses(request.outputs.iter().copied()),
            &addresses(request.output_grads.iter().copied()),
            &addresses(request.inputs.iter().copied()),
            &addresses(request.parameters.iter().copied()),
        )
    }?;
    if !halves.can_split() {
        return Ok(None);
    }
    let inputs = halves.pin_mut().take_inputs()?.into_iter().map(adopt).collect();
    Ok(Some(First { inputs, later: Later(halves) }))
}

impl Later {
    /// Adds each parameter's gradient to the accumulator at its position in the request, as [`crate::vjp::vjp`] does.
    ///
    /// # Errors
    /// As there.
    pub fn finish(mut self, accumulators: &mut [Option<Tensor>]) -> Result<()> {
        let held: Vec<usize> =
            accumulators.iter().map(|tensor| tensor.as_ref().map_or(0, address)).collect();
        // SAFETY: every address is of a tensor borrowed for the whole call, or 0 where C++ accepts 0.
        let sums = unsafe { self.0.pin_mut().finish(&held) }?;
        if sums.len() != accumulators.len() {
            let (sums, accumulators) = (sums.len(), accumulators.len());
            return Err(Error(format!("split returned {sums} accumulators for {accumulators}")));
        }
        for (accumulator, sum) in accumulators.iter_mut().zip(sums.into_iter().map(adopt)) {
            *accumulator = sum;
        }
        Ok(())
    }
}
