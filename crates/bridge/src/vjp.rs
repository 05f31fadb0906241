//! Vector-Jacobian products: the backward computation of a stage, one layer at a time.

use tch::Tensor;

use crate::{Error, Result, address, addresses, adopt, ffi::bridged};

/// The arguments of [`vjp`]. Gradients are taken with respect to `inputs` and `parameters`.
pub struct Request<'a> {
    /// Outputs of the layer, each part of an autograd graph. Any shape.
    pub outputs: &'a [&'a Tensor],
    /// The gradient of the loss with respect to each output: same length and shapes as `outputs`.
    pub output_grads: &'a [&'a Tensor],
    /// Leaves whose gradient is returned.
    pub inputs: &'a [&'a Tensor],
    /// Leaves whose gradient is added to the accumulator at the same position.
    pub parameters: &'a [&'a Tensor],
}

/// Computes the VJP of one layer and releases its graph. Returns the gradient of each input (`None`
/// where the outputs do not depend on it). Adds each parameter's gradient to `accumulators`, in
/// place from the second one on.
///
/// The first gradient itself becomes the accumulator if that is `None`, as in PyTorch: no zeros are
/// added, so -0.0 stays -0.0 whatever the number of stages. Gradients in bfloat16 and float16 are
/// summed in float32.
///
/// # Errors
/// Lengths that do not match, and any error of libtorch (shape of a gradient, out of memory). The
/// accumulators may then hold partial sums and must be discarded.
///
/// ```
/// use gpipe_bridge::vjp::{Request, vjp};
/// use tch::{Kind, Tensor};
/// let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
/// let w = Tensor::from_slice(&[3f32, 4.0]).set_requires_grad(true);
/// let y = &x * &w;
/// let dy = Tensor::from_slice(&[10f32, 100.0]);
/// let mut dw = vec![None];
/// let request =
///     Request { outputs: &[&y], output_grads: &[&dy], inputs: &[&x], parameters: &[&w] };
/// let dx = vjp(&request, &mut dw).unwrap();
/// assert_eq!(dx[0], Some(Tensor::from_slice(&[30f32, 400.0])));
/// assert_eq!(dw[0], Some(Tensor::from_slice(&[10f32, 200.0])));
/// ```
pub fn vjp(request: &Request, accumulators: &mut [Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
    let held: Vec<usize> =
        accumulators.iter().map(|tensor| tensor.as_ref().map_or(0, address)).collect();
    // SAFETY: the tensors at all addresses are borrowed for the whole call; C++ accepts 0 in
    // `held`.
    let mut grads = unsafe {
        bridged::vjp(
            &addresses(request.outputs.iter().copied()),
            &addresses(request.output_grads.iter().copied()),
            &addresses(request.inputs.iter().copied()),
            &addresses(request.parameters.iter().copied()),
            &held,
        )
    }?
    .into_iter()
    .map(adopt);
    let inputs: Vec<_> = grads.by_ref().take(request.inputs.len()).collect();
    let summed: Vec<_> = grads.collect();
    if summed.len() != accumulators.len() {
        return Err(Error(format!(
            "vjp returned {} accumulators for {}",
            summed.len(),
            accumulators.len()
        )));
    }
    for (accumulator, sum) in accumulators.iter_mut().zip(summed) {
        *accumulator = sum;
    }
    Ok(inputs)
}
