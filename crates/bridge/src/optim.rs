//! ATen's fused optimizer kernels. The caller owns every tensor; all lists have the same length.

use tch::Tensor;

use crate::{Result, addresses, ffi::bridged};

/// Settings of one Adam step (Kingma & Ba 2015; decoupled: Loshchilov & Hutter 2019).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay: added to the gradient, or decoupled from it (AdamW).
    pub weight_decay: f64,
    /// Whether weight decay is decoupled.
    pub decoupled: bool,
}

/// One Adam step in place. `steps` holds a float32 scalar per parameter: the number of this step,
/// from 1.
///
/// # Errors
/// Shapes or dtypes differ between the lists.
pub fn adam(
    parameters: &[&Tensor],
    grads: &[&Tensor],
    exp_avgs: &[&Tensor],
    exp_avg_sqs: &[&Tensor],
    steps: &[&Tensor],
    step: &AdamStep,
) -> Result<()> {
    let list = |tensors: &[&Tensor]| addresses(tensors.iter().copied());
    // SAFETY: the tensors at all addresses are borrowed for the whole call.
    unsafe {
        bridged::fused_adam(
            &list(parameters),
            &list(grads),
            &list(exp_avgs),
            &list(exp_avg_sqs),
            &list(steps),
            step.lr,
            step.beta1,
            step.beta2,
            step.weight_decay,
            step.eps,
            step.decoupled,
        )
    }?;
    Ok(())
}

/// Settings of one SGD step, as PyTorch defines them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Fraction of the last velocity that is kept.
    pub momentum: f64,
    /// Whether to use Nesterov momentum: the gradient is taken where the momentum leads.
    pub nesterov: bool,
    /// Weight decay: multiplied by the weight and added to the gradient.
    pub weight_decay: f64,
    /// Whether this is the first step, in which the momentum becomes the gradient itself.
    pub first: bool,
}

/// One step of SGD with momentum, in place; `momenta` may be empty if the momentum is 0.
///
/// # Errors
/// Shapes or dtypes differ between the lists.
pub fn sgd(
    parameters: &[&Tensor],
    grads: &[&Tensor],
    momenta: &[&Tensor],
    step: &SgdStep,
) -> Result<()> {
    let list = |tensors: &[&Tensor]| addresses(tensors.iter().copied());
    // SAFETY: the tensors at all addresses are borrowed for the whole call.
    unsafe {
        bridged::fused_sgd(
            &list(parameters),
            &list(grads),
            &list(momenta),
            step.lr,
            step.momentum,
            step.nesterov,
            step.weight_decay,
            step.first,
        )
    }?;
    Ok(())
}
