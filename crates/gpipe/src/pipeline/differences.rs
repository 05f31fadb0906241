//! Gradients against finite differences: for the author of a layer, a loss or a function, to find a
//! backward that does not fit its forward.

use gpipe_core::splitmix::Stream;
use gpipe_runtime::Ran;
use tch::{Kind, Tensor};

use super::{Count, Evaluation, Pipeline};
use crate::{
    arguments::IntoTensors,
    error::{Error, Result},
    stage::Stage,
};

/// One element's gradient, and what a finite difference says.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The parameter's full name, or `input 0`.
    pub name: String,
    /// The element, counted in row-major order.
    pub element: usize,
    /// The gradient that the backward computed.
    pub gradient: f64,
    /// (loss(v + h) - loss(v - h)) / 2h, with h = 1e-5.
    pub difference: f64,
}

impl Difference {
    /// The distance of the two.
    pub fn error(&self) -> f64 {
        (self.gradient - self.difference).abs()
    }
}

/// The change of an element. The truncation error of a central difference is h^2 / 6 of the third
/// derivative. The rounding of two losses adds about 2e-16 / h of the loss. Here both are near
/// 2e-11.
const H: f64 = 1e-5;

impl Pipeline {
    /// Compares gradients of the mean loss, through the whole pipeline, with central differences.
    /// It checks `elements` randomly chosen elements of each trained parameter. With
    /// [`PipelineBuilder::input_gradients`](crate::PipelineBuilder::input_gradients) also of each
    /// floating-point input.
    ///
    /// Losses are computed in training mode, with the dropout masks of the next step. Afterwards
    /// the parameters have their old values. A correct backward has errors near 1e-10 for losses
    /// near 1. A loss that takes inputs has no gradient for them, so there the two differ.
    ///
    /// # Errors
    /// [`Error::Setting`] unless the pipeline computes in float64, in one process. Else as for
    /// [`Pipeline::accumulate`].
    pub fn finite_differences(
        &mut self,
        inputs: impl IntoTensors,
        targets: impl IntoTensors,
        elements: usize,
    ) -> Result<Vec<Difference>> {
        if self.model.precision.compute != Kind::Double || self.engine.peers.is_some() {
            return Err(Error::Setting(
                "finite differences need float64 in one process: give the builder \
                kind(Kind::Double)"
                    .into(),
            ));
        }
        self.needs_no_update("compare gradients with differences")?;
        let inputs = self.model.listed_inputs(inputs)?;
        let targets = self.model.listed_targets(targets)?;
        self.loss_and_gradients(&inputs, &targets, false)?;
        let gradients = self.accumulated_gradients()?;
        self.discard_update()?;
        let values = self.parameters()?;
        let compared = self.compare(&inputs, &targets, &values, &gradients, elements);
        let restored = self.set_parameters(&values);
        let compared = compared?;
        restored.map(|()| compared)
    }

    fn compare(
        &mut self,
        inputs: &[Tensor],
        targets: &[Tensor],
        values: &[(String, Tensor)],
        gradients: &[(String, Tensor)],
        elements: usize,
    ) -> Result<Vec<Difference>> {
        let mut all = Vec::new();
        for (at, (name, gradient)) in gradients.iter().enumerate() {
            let Some((_, value)) = values.iter().find(|(own, _)| own == name) else { continue };
            for element in sampled(value, elements, at) {
                let mut loss = |by: f64| -> Result<f64> {
                    self.set_parameters(&[(name.clone(), moved(value, element, by)?)])?;
                    self.loss_of(inputs, targets)
                };
                let difference = (loss(H)? - loss(-H)?) / (2.0 * H);
                let gradient = gradient.f_reshape([-1])?.f_double_value(&[element as i64])?;
                all.push(Difference { name: name.clone(), element, gradient, difference });
            }
            self.set_parameters(&[(name.clone(), value.shallow_clone())])?;
        }
        for (at, gradient) in self.input_gradients(inputs, targets)?.iter().enumerate() {
            let Some(gradient) = gradient else { continue };
            for element in sampled(&inputs[at], elements, at) {
                let mut loss = |by: f64| -> Result<f64> {
                    let mut changed: Vec<Tensor> =
                        inputs.iter().map(Tensor::shallow_clone).collect();
                    changed[at] = moved(&inputs[at], element, by)?;
                    self.loss_of(&changed, targets)
                };
                let difference = (loss(H)? - loss(-H)?) / (2.0 * H);
                let gradient = gradient.f_reshape([-1])?.f_double_value(&[element as i64])?;
                all.push(Difference { name: format!("input {at}"), element, gradient, difference });
            }
        }
        Ok(all)
    }

    /// The mean loss in training mode.
    fn loss_of(&mut self, inputs: &[Tensor], targets: &[Tensor]) -> Result<f64> {
        let loss = self.loss_and_gradients(inputs, targets, false)?.0.loss;
        self.discard_update()?;
        Ok(loss)
    }

    /// Computes the loss and all gradients, with those of the inputs if `input_grads` is set.
    fn loss_and_gradients(
        &mut self,
        inputs: &[Tensor],
        targets: &[Tensor],
        input_grads: bool,
    ) -> Result<(Evaluation, Ran<Stage>)> {
        let count = Count::Totals(self.model.counts(inputs, targets)?);
        let own = |tensors: &[Tensor]| tensors.iter().map(Tensor::shallow_clone).collect();
        self.accumulated(own(inputs), own(targets), count, input_grads)
    }

    /// The gradients of the inputs, all `None` if the builder was not told `input_gradients`.
    fn input_gradients(
        &mut self,
        inputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let own = inputs.iter().map(Tensor::shallow_clone).collect();
        let specs = self.check(own, Some(targets), true)?.specs;
        let (_, ran) = self.loss_and_gradients(inputs, targets, true)?;
        let found = self.joined_input_grads(ran, &specs)?;
        self.discard_update()?;
        Ok(found)
    }
}

/// The elements to change: all of a small tensor.
fn sampled(value: &Tensor, elements: usize, seed: usize) -> Vec<usize> {
    let count = value.numel();
    if count <= elements {
        return (0..count).collect();
    }
    let mut random = Stream::new(seed as u64);
    (0..elements).map(|_| random.below(count)).collect()
}

/// A copy with one element changed.
fn moved(value: &Tensor, element: usize, by: f64) -> Result<Tensor> {
    let flat = value.f_reshape([-1])?.f_detach_copy()?;
    let _ = flat.f_narrow(0, element as i64, 1)?.f_add_scalar_(by)?;
    Ok(flat.f_reshape(value.size().as_slice())?)
}
