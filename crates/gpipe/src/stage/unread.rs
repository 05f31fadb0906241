//! Values on a GPU that the stage reads once, at the end of the step: reading one earlier would
//! make the thread wait for the GPU.

use gpipe_core::{Action, MicroBatch};
use tch::Tensor;

use super::{StageResult, in_operation, step::ActiveStage};
use crate::{
    error::{LayerError, StageError},
    inspect::{Check, Inspection, Values},
    observer::LOSS,
};

/// Values of a micro-batch, and what they are for.
pub(super) struct Unread {
    /// The action that computed them.
    action: Option<Action>,
    micro_batch: MicroBatch,
    values: Values,
    of: Of,
}

enum Of {
    /// A check that the layer at this position asked for; a loss, if there is no such layer.
    Layer(usize, Check),
    /// The sums of the losses.
    Losses,
}

impl ActiveStage<'_> {
    /// Makes the checks that a layer asked for: now, or at the end of the step where the thread
    /// does not wait for the GPU. `position` is past the last layer for those of a loss.
    pub(super) fn inspect(
        &self,
        micro_batch: MicroBatch,
        position: usize,
        inspections: Vec<Inspection>,
    ) -> StageResult<()> {
        for Inspection { values, check } in inspections {
            if self.device.runs_ahead() {
                let of = Of::Layer(position, check);
                self.leave_unread(micro_batch, values, of);
                continue;
            }
            let read = Values::read(&[&values]).map_err(in_operation("reading values"))?;
            read.first().map_or(Ok(()), |values| self.check_layer(position, check, values))?;
        }
        Ok(())
    }

    fn check_layer(&self, position: usize, check: Check, values: &Tensor) -> StageResult<()> {
        check(values).map_err(|source| StageError::Layer {
            layer: self.config.named.get(position).map_or(LOSS, |own| &own.name).to_owned(),
            source,
        })
    }

    /// Records the sums of the losses over a micro-batch: now, or at the end of the step where the
    /// thread does not wait for the GPU.
    pub(super) fn record_losses(
        &mut self,
        micro_batch: MicroBatch,
        sums: &[Tensor],
    ) -> StageResult<()> {
        let values = || -> Result<Values, LayerError> {
            let _no_grad = tch::no_grad_guard();
            let flat = sums.iter().map(|sum| sum.f_detach()?.f_reshape([1]));
            Values::new(&Tensor::f_cat(&flat.collect::<Result<Vec<_>, _>>()?, 0)?)
        };
        let values = values().map_err(in_operation("the losses"))?;
        self.leave_unread(micro_batch, values, Of::Losses);
        match self.device.runs_ahead() {
            true => Ok(()),
            false => self.read_values(),
        }
    }

    fn leave_unread(&self, micro_batch: MicroBatch, values: Values, of: Of) {
        let action = self.step.action;
        self.step.unread.borrow_mut().push(Unread { action, micro_batch, values, of });
    }

    /// Reads everything in one copy, and checks it in order.
    pub(super) fn read_values(&mut self) -> StageResult<()> {
        let all = self.step.unread.take();
        let values: Vec<&Values> = all.iter().map(|own| &own.values).collect();
        let read = Values::read(&values).map_err(in_operation("reading values"))?;
        for (Unread { action, micro_batch, of, .. }, values) in all.into_iter().zip(read) {
            self.check_values(micro_batch, of, &values).inspect_err(|_| {
                self.step.failed.set(action.filter(|_| self.device.runs_ahead()));
            })?;
        }
        Ok(())
    }

    fn check_values(
        &mut self,
        micro_batch: MicroBatch,
        of: Of,
        values: &Tensor,
    ) -> StageResult<()> {
        match of {
            Of::Layer(position, check) => self.check_layer(position, check, values),
            Of::Losses => {
                let sums = Vec::<f64>::try_from(values);
                let sums = sums.map_err(|error| in_operation("the losses")(error.into()))?;
                self.step.loss_is_not_finite |= self.check_losses(&sums)?;
                self.step.loss_sums.push((micro_batch, sums));
                Ok(())
            }
        }
    }
}
