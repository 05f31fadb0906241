//! Calls of observers, with the checks that hold around all user code.

use std::time::Instant;

use gpipe_bridge::memory::Stats;
use gpipe_core::{Action, Bytes, MicroBatch, Nanos, Op};
use tch::Tensor;

use super::{Stage, StageResult, in_operation, recorder::ProfiledOp, step::ActiveStage};
use crate::{
    error::{LayerError, StageError},
    guard::{Untouched, catching},
    observer::{
        ActionEvent, DeviceMemory, FiniteCheck, LOSS, LayerEvent, Observer, Pass, StepEvent, When,
    },
};

/// When a pass began; `None` if nothing observes it.
pub(super) type Since = Option<Instant>;

impl Stage {
    pub(super) fn observe_step(&self, when: When) -> StageResult<()> {
        let Some(step) = &self.step else { return Ok(()) };
        let (stage, part) = (self.config.stage.index(), step.feed.part);
        let event = StepEvent { stage, step: step.feed.step, part, when };
        self.observe(|observer| observer.step(&event))
    }

    fn observe(&self, call: impl Fn(&dyn Observer) -> Result<(), LayerError>) -> StageResult<()> {
        let all = self.config.observers.iter();
        let called = all.map(|observer| catching(|| call(observer.as_ref())));
        called.collect::<Result<(), _>>().map_err(in_operation("an observer"))
    }
}

impl ActiveStage<'_> {
    /// The user's observers, and the pipeline's own: for a second run after a NaN, and for
    /// profiling.
    fn observers(&self) -> impl Iterator<Item = &dyn Observer> {
        let check = self.step.feed.check_finite.then_some(&FiniteCheck as &dyn Observer);
        let samples = self.step.recorder.as_ref().map(|own| &own.samples as &dyn Observer);
        let users = self.config.observers.iter().map(|own| own.as_ref() as &dyn Observer);
        users.chain(check).chain(samples)
    }

    /// Whether what recomputations give is shown to somebody, so that they run to the end.
    pub(super) fn shows_recomputed(&self) -> bool {
        self.step.recorder.is_some() || !self.config.observers.is_empty()
    }

    pub(super) fn is_observed(&self) -> bool {
        self.observers().next().is_some()
    }

    pub(super) fn observe_action(&self, action: Action, when: When) -> StageResult<()> {
        if !self.is_observed() {
            return Ok(());
        }
        // An update that has begun must not fail.
        let may_fail = action.op != Op::Update || when == When::Before;
        let event = ActionEvent { action, when, memory: self.device_memory(may_fail)? };
        for observer in self.observers() {
            catching(|| observer.action(&event)).map_err(in_operation("an observer"))?;
        }
        Ok(())
    }

    /// The device's memory for an event. Begins to measure the peak until the next one, unless
    /// other threads use the device, too. An update `may_fail` no more once it has begun.
    fn device_memory(&self, may_fail: bool) -> StageResult<DeviceMemory> {
        let measure = || {
            match may_fail {
                // Here, because a peak above the cap of a GPU is forgotten below.
                true => self.device.finish()?,
                false => self.device.settle()?,
            }
            let Stats { live, peak, .. } = self.device.memory()?;
            if !self.config.shares_device {
                self.device.reset_peak(true)?;
            }
            self.step.peak.set(self.step.peak.get().max(peak));
            Ok(DeviceMemory { live: Bytes(live), peak: Bytes(peak) })
        };
        measure().map_err(in_operation("memory"))
    }

    /// Called before a layer's pass, with what goes into it.
    pub(super) fn before_layer<'t>(
        &self,
        position: usize,
        micro_batch: MicroBatch,
        work: ProfiledOp,
        tensors: impl IntoIterator<Item = Option<&'t Tensor>>,
    ) -> StageResult<Since> {
        if self.config.interrupt.is_set() {
            return Err(in_operation("before a layer")(LayerError::Interrupted));
        }
        self.device.begin_work().map_err(in_operation("memory"))?;
        if !self.is_observed() {
            return Ok(None);
        }
        self.observe_layer(position, micro_batch, work, When::Before, defined(tensors))?;
        Ok(Some(Instant::now()))
    }

    /// Called after a layer's pass, with what came out of it.
    pub(super) fn after_layer<'t>(
        &self,
        since: Since,
        position: usize,
        micro_batch: MicroBatch,
        work: ProfiledOp,
        tensors: impl IntoIterator<Item = Option<&'t Tensor>>,
    ) -> StageResult<()> {
        self.device.check_cap().map_err(|source| StageError::Layer {
            layer: self.config.named.get(position).map_or(LOSS, |named| &named.name).to_owned(),
            source,
        })?;
        let Some(since) = since else { return Ok(()) };
        self.device.settle().map_err(in_operation("an observer"))?;
        let time = Nanos(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
        self.observe_layer(position, micro_batch, work, When::After(time), defined(tensors))
    }

    fn observe_layer(
        &self,
        position: usize,
        micro_batch: MicroBatch,
        work: ProfiledOp,
        when: When,
        tensors: Vec<Option<&Tensor>>,
    ) -> StageResult<()> {
        let pass = work.pass();
        let index = self.config.layers.start + position;
        let named = self.config.named.get(position);
        let layer = named.map_or(LOSS, |named| &named.name);
        let slice = self.step.feed.slice(micro_batch);
        let is_backward = !matches!(pass, Pass::Forward | Pass::Recompute);
        let mut parameter_gradients = Vec::new();
        if is_backward && when != When::Before {
            let parameters = named.map_or(&[][..], |named| &named.parameters);
            for (slot, spec) in parameters.iter().enumerate() {
                let sum = self.step.gradients.of((position, slot));
                parameter_gradients.extend(sum.map(|sum| (spec.name.as_str(), sum)));
            }
        }
        let event = LayerEvent {
            stage: self.config.stage.index(),
            layer,
            index,
            step: self.step.feed.step,
            micro_batch: micro_batch.index(),
            samples: slice.first..slice.first + slice.count,
            pass,
            keeps: work.keeps(),
            when,
            memory: self.device_memory(true)?,
            tensors,
            parameter_gradients,
            is_loss: named.is_none(),
        };
        let in_layer = |source: LayerError| match source {
            LayerError::NotFinite(what) => StageError::NotFinite { layer: layer.to_owned(), what },
            source => StageError::Layer { layer: layer.to_owned(), source },
        };
        let _no_grad = tch::no_grad_guard();
        let shown = event.tensors.iter().flatten().copied();
        let shown = shown.chain(event.parameter_gradients.iter().map(|(_, sum)| *sum));
        let given = Untouched::new(shown).map_err(in_layer)?;
        for observer in self.observers() {
            catching(|| observer.layer(&event)).map_err(in_layer)?;
        }
        match given.changed().map_err(in_layer)? {
            None => Ok(()),
            Some(_) => Err(in_layer(LayerError::Value(
                "an observer changes a tensor in place: observers may only look".into(),
            ))),
        }
    }
}

/// As observers see tensors: an undefined one is `None`.
fn defined<'t>(tensors: impl IntoIterator<Item = Option<&'t Tensor>>) -> Vec<Option<&'t Tensor>> {
    tensors.into_iter().map(|tensor| tensor.filter(|tensor| tensor.defined())).collect()
}
