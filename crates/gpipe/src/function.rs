//! Operations with a backward of their own, for use inside layers and losses.
//!
//! ```
//! use gpipe::{Computed, Function, LayerError, apply};
//! use tch::{Kind, Tensor};
//!
//! /// The identity, whose backward turns the gradient around (Ganin & Lempitsky 2015, section 4.2).
//! #[derive(Clone, Copy)]
//! struct Reverse;
//!
//! impl Function for Reverse {
//!     fn name(&self) -> &'static str { "reverse" }
//!     fn forward(&self, inputs: &[Tensor]) -> Result<Computed, LayerError> {
//!         Ok(Computed { outputs: vec![inputs[0].shallow_clone()], saved: vec![] })
//!     }
//!     fn backward(
//!         &self,
//!         _: &[Tensor],
//!         grads: &[Option<Tensor>],
//!         _: &[bool],
//!     ) -> Result<Vec<Option<Tensor>>, LayerError> {
//!         Ok(vec![grads[0].as_ref().map(|grad| grad.f_neg()).transpose()?])
//!     }
//! }
//!
//! let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
//! apply(Reverse, &[&x])?[0].sum(Kind::Double).backward();
//! assert_eq!(x.grad(), Tensor::from_slice(&[-1.0, -1.0]));
//! # Ok::<(), LayerError>(())
//! ```

use gpipe_bridge::custom::custom;
use tch::Tensor;

use crate::error::LayerError;

/// An operation with a backward of its own.
///
/// Inside a layer it is treated like any other operation. Re-materialization runs its forward
/// again. A split backward runs its backward twice, first for the inputs that are activations,
/// later for those that are parameters. Both must therefore be pure functions, and change nothing
/// in place.
pub trait Function: Send + Sync + 'static {
    /// What the operation is, in one word, for messages.
    fn name(&self) -> &'static str;

    /// Computes the outputs, and what the backward needs. It runs without a graph.
    ///
    /// # Errors
    /// An error of libtorch, or inputs that do not fit.
    fn forward(&self, inputs: &[Tensor]) -> Result<Computed, LayerError>;

    /// Computes the gradient of each input: of its shape and dtype, or `None` for no gradient.
    ///
    /// `saved` is what the forward saved. `grads` are the gradients of the outputs, `None` where
    /// there is none. `wanted` says which inputs need a gradient in this call; those of others are
    /// dropped.
    ///
    /// # Errors
    /// An error of libtorch.
    fn backward(
        &self,
        saved: &[Tensor],
        grads: &[Option<Tensor>],
        wanted: &[bool],
    ) -> Result<Vec<Option<Tensor>>, LayerError>;
}

/// The result of a [`Function`]'s forward.
#[derive(Debug, Default)]
pub struct Computed {
    /// The outputs.
    pub outputs: Vec<Tensor>,
    /// What the backward needs. It is kept from the forward, or from the re-materialization, to the
    /// backward.
    pub saved: Vec<Tensor>,
}

/// Applies `function` to `inputs`. The outputs are part of autograd's graph, with the function's
/// backward; they are differentiable once.
///
/// # Errors
/// As for [`Function::forward`]. An error or panic of the backward is the error of the layer's
/// backward, with the function's name.
pub fn apply(function: impl Function, inputs: &[&Tensor]) -> Result<Vec<Tensor>, LayerError> {
    if let Some(absent) = inputs.iter().position(|input| !input.defined()) {
        return Err(LayerError::Value(format!(
            "input {} of '{}' is absent: give a function only what is there",
            absent + 1,
            function.name()
        )));
    }
    let plain: Vec<Tensor> =
        inputs.iter().map(|input| input.f_detach()).collect::<Result<_, _>>()?;
    let Computed { outputs, saved } = {
        let _no_grad = tch::no_grad_guard();
        function.forward(&plain)?
    };
    let made = custom(inputs, &outputs, &saved, move |saved, grads, wanted| {
        let back = function.backward(saved, grads, wanted);
        back.map_err(|error| gpipe_bridge::Error(format!("'{}': {error}", function.name())))
    });
    Ok(made?)
}
