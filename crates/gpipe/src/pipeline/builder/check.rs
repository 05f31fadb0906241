//! The checks of the settings that need no shapes.

use std::time::Duration;

use gpipe_bridge::memory::IS_COUNTED;
use gpipe_core::{
    MicroBatch,
    schedule::{ActionLists, Schedule},
};

use super::PipelineBuilder;
use crate::{
    arguments::NamedArgument,
    batch_norm::NormsFollow,
    error::{Error, Result},
    precision::Precision,
    spec::TensorSpec,
};

/// The longest timeout, in a pipeline and between processes: a year.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// The most micro-batches of a mini-batch.
const MICRO_BATCHES_MAX: usize = 1 << 16;

impl PipelineBuilder {
    pub(in crate::pipeline) fn check_settings(&self) -> Result<Precision> {
        let refuse = |reason: String| Err(Error::Setting(reason));
        let devices = self.devices.len();
        self.check_arguments()?;
        let stages =
            self.schedule.stages(devices).map_err(|error| Error::Setting(error.to_string()))?;
        self.schedule
            .check_micro_batches(self.micro_batches)
            .map_err(|error| Error::Setting(error.to_string()))?;
        if self.micro_batches == 0 || self.micro_batches > MICRO_BATCHES_MAX {
            return refuse(format!(
                "{} micro-batches: use 1 to {MICRO_BATCHES_MAX}",
                self.micro_batches
            ));
        }
        if self.threads == 0 || self.threads > 1024 {
            return refuse(format!("{} threads per stage: use 1 to 1024", self.threads));
        }
        self.devices.iter().try_for_each(|device| device.check())?;
        if let Some(decay) = self.average.filter(|decay| !(0.0..1.0).contains(decay)) {
            return refuse(format!("average is {decay}: use at least 0 and less than 1"));
        }
        self.rate.check().map_err(Error::Setting)?;
        self.losses.check_settings().map_err(Error::Setting)?;
        for (index, metric) in self.metrics.iter().enumerate() {
            if self.metrics[..index].iter().any(|other| other.name() == metric.name()) {
                let name = metric.name();
                return refuse(format!("two metrics are named '{name}': give each its own name"));
            }
        }
        if self.caps.len() > 1 && self.caps.len() != devices {
            return refuse(format!(
                "{} memory caps for {devices} devices: give one for all, or one per device",
                self.caps.len()
            ));
        }
        let has_cpu = self.devices.iter().any(|device| device.gpu().is_none());
        if !IS_COUNTED && !self.caps.is_empty() && has_cpu {
            return refuse(
                "memory of CPUs is not counted, so it cannot be capped: build gpipe with its \
                feature `allocator`"
                    .into(),
            );
        }
        self.remat.check(stages).map_err(Error::Setting)?;
        if let Some(norm) = self.max_norm.filter(|norm| norm.is_nan() || *norm <= 0.0) {
            return refuse(format!("clip_norm is {norm}: use a number above 0"));
        }
        if self.norms_follow == NormsFollow::MicroBatches && self.replicas.is_some() {
            return refuse(
                "with replicas, running statistics of batch norms follow mini-batches: leave \
                norms_follow out"
                    .into(),
            );
        }
        if self.open_forwards == 0 {
            return refuse("no forward may be open: set open_forwards to at least 1".into());
        }
        if self.timeout.is_zero() || self.timeout > TIMEOUT_MAX {
            return refuse(format!(
                "timeout is {:?}: use more than 0, and at most {} days",
                self.timeout,
                TIMEOUT_MAX.as_secs() / (24 * 3600)
            ));
        }
        if let Some(optimizer) = &self.optimizer {
            let name = optimizer.name();
            optimizer.check().map_err(|reason| Error::Setting(format!("{name}: {reason}")))?;
        }
        if self.schedule == Schedule::ForwardOnly {
            return refuse("forward-only is no training schedule: use 1f1b or another".into());
        }
        Precision::of(self.kind).ok_or_else(|| {
            let kind = self.kind;
            Error::Setting(format!(
                "dtype {kind:?} is not supported: use Float, Double, BFloat16 or Half"
            ))
        })
    }

    /// If `loss_rows` is set, checks that the last stage's backwards ascend by micro-batch, because
    /// rows are summed into the gradients in the order in which they run.
    pub(in crate::pipeline) fn check_order_of_rows(
        &self,
        actions: &ActionLists,
        stages: usize,
    ) -> Result<()> {
        if self.loss_rows.is_none() || self.losses.is_empty() {
            return Ok(());
        }
        let mut before: Option<MicroBatch> = None;
        for action in actions.iter().flatten().filter(|own| own.stage.index() + 1 == stages) {
            let Some(micro_batch) = action.op.goes_back() else { continue };
            if let Some(before) = before.filter(|before| *before > micro_batch) {
                return Err(Error::Setting(format!(
                    "loss_rows: the schedule goes back through micro-batch {} before micro-batch \
                    {} on the last stage: order its backwards by micro-batch, or omit loss_rows",
                    before.0, micro_batch.0
                )));
            }
            before = Some(micro_batch);
        }
        Ok(())
    }

    /// If `loss_rows` is set, checks that the last layer, the losses and the metrics can be
    /// computed on some rows at a time.
    ///
    /// `specs`: the inputs of each layer, then the outputs.
    pub(in crate::pipeline) fn check_rows(&self, specs: &[Vec<TensorSpec>]) -> Result<()> {
        let refuse = |what: String| {
            Err(Error::Setting(format!("loss_rows: {what} needs all rows at once: omit loss_rows")))
        };
        match self.loss_rows {
            None => return Ok(()),
            Some(0) => return Err(Error::Setting("loss_rows is 0: use at least 1".into())),
            Some(_) => {}
        }
        if let Some(term) = self.losses.0.iter().find(|term| !term.loss.by_rows()) {
            return refuse(format!("the loss '{}'", term.name));
        }
        if let Some(metric) = self.metrics.iter().find(|metric| !metric.by_rows()) {
            return refuse(format!("the metric '{}'", metric.name()));
        }
        let Some(last) = self.sequence.layers.last() else { return Ok(()) };
        let ends = specs.iter().rev().take(2).all(|own| own.len() == 1 && own[0].shape.len() > 1);
        match last.layer.by_rows() && ends && !self.losses.have_layer() {
            true => Ok(()),
            false => refuse(format!("the last layer '{}' ({})", last.name, last.layer.kind())),
        }
    }

    /// Checks what is declared of inputs and targets.
    fn check_arguments(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Setting(reason));
        let (inputs, count) = (&self.sequence.inputs, self.inputs.len());
        for (what, own) in [("input", inputs), ("target", &self.targets)] {
            for (index, NamedArgument { name, .. }) in own.named.iter().enumerate() {
                if own.named[..index].iter().any(|other| other.name == *name) {
                    return refuse(format!("two {what}s are named '{name}': rename one"));
                }
            }
        }
        let positional = inputs.positional(count);
        if let Some(at) = inputs.shared.iter().find(|&&at| at >= positional) {
            return refuse(format!(
                "shared input {at}: there are {positional} inputs, numbered from 0"
            ));
        }
        let specs = || self.inputs.iter().enumerate().filter(|(_, spec)| !spec.is_none());
        let shared = |at: usize| inputs.is_shared(at, count);
        if specs().all(|(at, _)| shared(at)) && specs().any(|(at, _)| shared(at)) {
            return refuse("every input is shared: at least one needs samples".into());
        }
        match specs().find(|(at, spec)| spec.shape.is_empty() && !shared(*at)) {
            None => Ok(()),
            Some((at, _)) => refuse(format!(
                "{} is a scalar, which has no samples: the first size of an input is the number \
                of samples; or declare it as shared ({})",
                inputs.title("input", at, count),
                inputs.shared_by("input", at, count)
            )),
        }
    }

    /// Checks that layers ask for every input by name, unless a loss may: they ask for those in
    /// `asked`.
    pub(super) fn check_asked(&self, asked: &[String]) -> Result<()> {
        match self.sequence.inputs.unasked(asked).filter(|_| !self.losses.take_inputs()) {
            None => Ok(()),
            Some(name) => Err(Error::Setting(format!(
                "no layer asks for the input '{name}': a layer that uses it calls \
                named(\"{name}\") in its infer, too"
            ))),
        }
    }
}
