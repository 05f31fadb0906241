//! The settings of a pipeline that its costs depend on, and the estimated costs.

use gpipe_bridge::linear::Kernels;
use gpipe_core::cost::{ModelCosts, OffloadSpeed};
use tch::Kind;

use super::PipelineBuilder;
use crate::{
    arguments::Tensors,
    device::Device,
    error::{Error, Result},
    estimate::{Rate, Training, estimate},
    loss::Losses,
    optim::Optimizer,
    sequence::Sequence,
    spec::TensorSpec,
    stage::bandwidth::offload_speed,
};

/// The settings of a pipeline that its costs depend on.
pub(crate) struct CostInputs<'a> {
    pub sequence: &'a Sequence,
    pub inputs: &'a [TensorSpec],
    pub devices: &'a [Device],
    pub kind: Kind,
    pub kernels: Kernels,
    pub threads: usize,
    pub losses: &'a Losses,
    pub optimizer: Option<&'a dyn Optimizer>,
    pub average: bool,
    pub loss_rows: Option<usize>,
}

impl PipelineBuilder {
    /// Returns the settings that costs depend on, after applying the parameter groups.
    ///
    /// # Errors
    /// If a setting is invalid.
    pub(crate) fn seen(&mut self) -> Result<CostInputs<'_>> {
        let precision = self.check_settings()?;
        self.inputs = precision.fed(&self.inputs);
        self.apply_groups()?;
        self.check_rows(&self.sequence.infer(&self.inputs, self.kind)?.specs)?;
        Ok(CostInputs {
            sequence: &self.sequence,
            inputs: &self.inputs,
            devices: &self.devices,
            kind: self.kind,
            kernels: self.kernels,
            threads: self.threads,
            losses: &self.losses,
            optimizer: self.optimizer.as_deref(),
            average: self.average.is_some(),
            loss_rows: self.loss_rows,
        })
    }

    /// The number of samples of these inputs.
    pub(crate) fn samples_of(&self, inputs: &Tensors) -> Option<i64> {
        let arguments = &self.sequence.inputs;
        let positional = inputs.positional.iter().enumerate();
        let positional = positional.filter(|(at, _)| !arguments.shared.contains(at));
        let named = inputs
            .named
            .iter()
            .filter(|(name, _)| arguments.named.iter().any(|own| own.name == *name && !own.shared));
        let own = positional.map(|(_, own)| own).chain(named.map(|(_, own)| own));
        let mut own = own.filter(|own| own.defined());
        own.next()?.size().first().copied()
    }

    /// Estimates the costs of this pipeline's model from shapes alone, for micro-batches of each of
    /// `sizes` samples. See [`crate::estimate`].
    ///
    /// # Errors
    /// If settings or shapes do not fit, or if there is no loss or no optimizer.
    pub fn estimate(&mut self, sizes: &[usize], rate: &Rate) -> Result<ModelCosts> {
        let seen = self.seen()?;
        let needed = seen.optimizer.filter(|_| !seen.losses.is_empty());
        let Some(optimizer) = needed else {
            return Err(Error::Setting(
                "costs are of training: give the builder a loss and an optimizer".into(),
            ));
        };
        let CostInputs { kind, kernels, losses, average, loss_rows, devices, .. } = seen;
        let own_memory = devices.iter().any(|device| *device != Device::Cpu);
        let inputs = seen.sequence.inputs.with_samples(seen.inputs, 1);
        let losses = &losses.refs()[..];
        let training = Training { kind, kernels, losses, optimizer, average, loss_rows };
        let costs = estimate(seen.sequence, &inputs, &training, sizes, rate)?;
        Ok(ModelCosts { own_memory, ..costs })
    }

    /// Measures the speed at which the first device offloads activations. `None` if no folder is
    /// set and the system's temporary folder cannot be used.
    ///
    /// # Errors
    /// [`Error::Setting`] if the folder that was set cannot be used.
    pub(crate) fn offload_speed(&self) -> Result<Option<OffloadSpeed>> {
        let (device, folder, patience) = self.offload_inputs();
        match offload_speed(device, folder, patience) {
            Ok(speed) => Ok(Some(speed)),
            Err(_) if folder.is_none() => Ok(None),
            Err(error) => Err(Error::Setting(error.to_string())),
        }
    }
}
