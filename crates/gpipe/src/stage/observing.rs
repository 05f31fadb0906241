//! Calls of observers, with the checks that hold around all user code.

use std::time::Instant;

use gpipe_core::{Action, MicroBatch, Nanos};
use tch::Tensor;

use super::{
    Stage, StageResult,
    guard::{Untouched, catching},
    in_operation,
    recorder::ProfiledOp,
    step::ActiveStage,
};
use crate::{
    error::{LayerError, StageError},
    observer::{ActionEvent, FiniteCheck, LOSS, LayerEvent, Observer, Pass, StepEvent, When},
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

    pub(super) fn observe_action(&self, action: Action, when: When) -> StageResult<()> {
        let event = ActionEvent { action, when };
        self.observe(|observer| observer.action(&event))
    }

    fn observe(&self, call: impl Fn(&dyn Observer) -> Result<(), LayerError>) -> StageResult<()> {
        let all = self.config.observers.iter();
        let called = all.map(|observer| catching(|| call(observer.as_ref())));
        called.collect::<Result<(), _>>().map_err(in_operation("an observer"))
    }
}

impl ActiveStage<'_> {
    fn observers(&self) -> impl Iterator<Item = &dyn Observer> {
        let check = self.step.feed.check_finite.then_some(&FiniteCheck as &dyn Observer);
        self.config.observers.iter().map(|own| own.as_ref() as &dyn Observer).chain(check)
    }

    /// Called before a layer's pass, with what goes into it.
    pub(super) fn before_layer<'t>(
        &self,
        position: usize,
        micro_batch: MicroBatch,
        pass: Pass,
        tensors: impl IntoIterator<Item = Option<&'t Tensor>>,
    ) -> StageResult<Since> {
        if self.observers().next().is_none() {
            return Ok(None);
        }
        self.observe_layer(position, micro_batch, pass, When::Before, defined(tensors))?;
        self.device.synchronize().map_err(in_operation("an observer"))?;
        Ok(Some(Instant::now()))
    }

    /// Called after a layer's pass, with what came out of it.
    pub(super) fn after_layer<'t>(
        &self,
        since: Since,
        position: usize,
        micro_batch: MicroBatch,
        pass: Pass,
        tensors: impl IntoIterator<Item = Option<&'t Tensor>>,
    ) -> StageResult<()> {
        let Some(since) = since else { return Ok(()) };
        self.device.synchronize().map_err(in_operation("an observer"))?;
        let time = Nanos(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
        self.observe_layer(position, micro_batch, pass, When::After(time), defined(tensors))
    }

    fn observe_layer(
        &self,
        position: usize,
        micro_batch: MicroBatch,
        pass: Pass,
        when: When,
        tensors: Vec<Option<&Tensor>>,
    ) -> StageResult<()> {
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
            when,
            tensors,
            parameter_gradients,
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

impl ProfiledOp {
    /// The pass of a layer in this operation.
    pub(super) fn pass(self) -> Pass {
        match self {
            ProfiledOp::Rematerialize => Pass::Recompute,
            ProfiledOp::Backward { .. } => Pass::Backward,
            ProfiledOp::BackwardInput { .. } => Pass::BackwardInput,
            ProfiledOp::BackwardWeight => Pass::BackwardWeight,
            ProfiledOp::Forward
            | ProfiledOp::ForwardKept
            | ProfiledOp::Norm
            | ProfiledOp::Update => Pass::Forward,
        }
    }
}
