//! The product that a low-rank adapter adds to a linear layer ([`crate::lora`] says what adapters
//! are).

use gpipe_bridge::linear::{Kernels, linear};
use tch::Tensor;

use crate::{error::LayerError, rng::Random};

/// The adapter of a weight, by the numbers of the layer's parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Adapter {
    /// The frozen weight.
    pub weight: usize,
    /// The number of A. That of B follows it.
    pub first: usize,
    /// Its number in the layer, by which its dropout is keyed.
    pub number: u64,
    pub scale: f64,
    pub dropout: f64,
}

impl Adapter {
    /// What it adds to the linear layer's output for `x`.
    pub fn apply(
        &self,
        x: &Tensor,
        parameters: &[Tensor],
        random: &Random,
        training: bool,
        kernels: Kernels,
    ) -> Result<Tensor, LayerError> {
        let of = |number: usize| {
            parameters
                .get(number)
                .ok_or_else(|| LayerError::Value(format!("it has no parameter {number}")))
        };
        let dropped = match training && self.dropout > 0.0 {
            true => Some(random.of_adapter(self.number).dropout(x, self.dropout)?),
            false => None,
        };
        let x = dropped.as_ref().unwrap_or(x);
        let low = linear(x, of(self.first)?, None, kernels)?.f_mul_scalar(self.scale)?;
        Ok(linear(&low, of(self.first + 1)?, None, kernels)?)
    }
}
