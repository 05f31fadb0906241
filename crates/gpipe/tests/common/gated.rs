//! A network whose layers and loss use inputs and targets by name, and `None`.
#![allow(dead_code)] // not every test program uses all of it

use gpipe::{
    Adam, Forward, Infer, Layer, LayerError, Loss, LossContext, ParameterSpec, Pipeline,
    PipelineBuilder, Sequence, TensorSpec, Tensors, layers::Linear,
};
use tch::{Kind, Tensor};

use super::{Run, uniform};

pub const WIDTH: i64 = 4;
pub const SAMPLES: i64 = 7;
pub const LAYERS: usize = 5;

/// y = tanh(scale * (x * mask) W^T + b) + other. The input `other`, the named `mask`
/// `[samples, WIDTH]` and the named, shared `scale` `[]` may be `None`.
///
/// Even layers pass x / 2 on as the next `other`, odd ones `None`. The first layer stashes its own
/// `other`, the last one adds it.
pub struct Gated {
    pub index: usize,
}

impl Gated {
    fn is_last(&self) -> bool {
        self.index + 1 == LAYERS
    }
}

impl Layer for Gated {
    fn kind(&self) -> &'static str {
        "gated"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Linear::new(WIDTH, WIDTH).parameters()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let [x, other] = inputs else { return Err(LayerError::Shape("it takes two".into())) };
        if ctx.named("mask").is_some_and(|mask| mask != *x) {
            return Err(LayerError::Shape("the mask does not fit".into()));
        }
        let _ = ctx.named("scale");
        if self.index == 0 {
            ctx.stash("other", other.clone())?;
        }
        if self.is_last() {
            ctx.pop("other")?;
        }
        let next = if self.index.is_multiple_of(2) { x.clone() } else { TensorSpec::none() };
        Ok(if self.is_last() { vec![x.clone()] } else { vec![x.clone(), next] })
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (x, other) = (&inputs[0], &inputs[1]);
        let masked = ctx.named("mask").map_or(Ok(x.shallow_clone()), |mask| x.f_mul(mask))?;
        let mut y = ctx.linear(&masked, ctx.parameter(0)?, Some(ctx.parameter(1)?))?;
        if let Some(scale) = ctx.named("scale") {
            y = y.f_mul(scale)?;
        }
        y = y.f_tanh()?;
        if other.defined() {
            y = y.f_add(other)?;
        }
        if self.index == 0 {
            ctx.stash("other", other);
        }
        if self.is_last() {
            let far = ctx.pop("other")?;
            return Ok(vec![if far.defined() { y.f_add(&far)? } else { y }]);
        }
        let half = || x.f_mul_scalar(0.5);
        let next = if self.index.is_multiple_of(2) { half()? } else { Tensor::new() };
        Ok(vec![y, next])
    }
}

/// The squared distance from the target, which may be `None`, times the named target `weights` and
/// the named input `mask`, if they are given.
pub struct Distance;

impl Loss for Distance {
    fn takes_inputs(&self) -> bool {
        true
    }

    fn check(
        &self,
        ctx: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        _: &[TensorSpec],
    ) -> Result<(), LayerError> {
        match ctx.named_target("weights").is_none_or(|own| own.shape[0] == outputs[0].shape[0]) {
            true => Ok(()),
            false => Err(LayerError::Shape("the weights do not fit".into())),
        }
    }

    fn sum(
        &self,
        ctx: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        let target = &targets[0];
        let apart =
            if target.defined() { outputs[0].f_sub(target)? } else { outputs[0].f_exp()? };
        let mut square = apart.f_square()?;
        for weights in [ctx.named_target("weights"), ctx.named_input("mask")].into_iter().flatten()
        {
            square = square.f_mul(weights)?;
        }
        Ok(square.f_sum(outputs[0].kind())?)
    }

    fn count(&self, ctx: &LossContext<'_>, _: &[Tensor]) -> Result<f64, LayerError> {
        Ok(ctx.input(0)?.numel() as f64)
    }
}

pub fn network() -> Sequence {
    (0..LAYERS)
        .fold(Sequence::new(), |model, index| model.push(format!("layer {index}"), Gated { index }))
}

pub fn builder(run: &Run, kind: Kind) -> PipelineBuilder {
    let x = TensorSpec::new([SAMPLES, WIDTH], kind);
    Pipeline::builder(network(), vec![x.clone(), TensorSpec::none()])
        .named_input("mask", x)
        .shared_named_input("scale", TensorSpec::none())
        .named_target("weights")
        .stages(run.stages)
        .schedule(run.schedule.clone())
        .remat(run.remat)
        .balance(run.balance.clone())
        .micro_batches(3)
        .kind(kind)
        .loss(Distance)
        .optimizer(Adam { lr: 1e-2, ..Adam::default() })
        .input_gradients()
        .keep_gradients()
}

/// The tensors of a call.
pub struct Call {
    pub x: Tensor,
    pub other: Option<Tensor>,
    pub mask: Option<Tensor>,
    pub scale: Option<Tensor>,
    pub target: Option<Tensor>,
    pub weights: Option<Tensor>,
}

impl Call {
    /// In which of the tensors that may be `None` are given as the bits of `form` say.
    pub fn new(form: u64, kind: Kind) -> Self {
        let value = |seed: u64| uniform(&[SAMPLES, WIDTH], 10 * seed + form, kind);
        let given = |bit: u64| form >> bit & 1 == 1;
        Self {
            x: value(0),
            other: given(0).then(|| value(1)),
            mask: given(1).then(|| value(2).gt(-0.4).to_kind(kind)),
            scale: given(2).then(|| Tensor::from(0.7).to_kind(kind)),
            target: given(3).then(|| value(3)),
            weights: given(4).then(|| value(4).abs()),
        }
    }

    pub fn inputs(&self) -> Tensors {
        let copy = |own: &Option<Tensor>| own.as_ref().map(Tensor::shallow_clone);
        Tensors::new(vec![Some(self.x.shallow_clone()), copy(&self.other)])
            .named("scale", copy(&self.scale))
            .named("mask", copy(&self.mask))
    }

    pub fn targets(&self) -> Tensors {
        let copy = |own: &Option<Tensor>| own.as_ref().map(Tensor::shallow_clone);
        Tensors::new(vec![copy(&self.target)]).named("weights", copy(&self.weights))
    }

    /// The outputs by plain autograd, from (weight, bias) of each layer.
    pub fn outputs(&self, parameters: &[Tensor]) -> Tensor {
        let (mut x, mut other) = (self.x.shallow_clone(), self.other.as_ref().map(|own| own * 1));
        for (index, own) in parameters.chunks(2).enumerate() {
            let masked = self.mask.as_ref().map_or(x.shallow_clone(), |mask| &x * mask);
            let y = masked.linear(&own[0], Some(&own[1]));
            let mut y = self.scale.as_ref().map_or(y.shallow_clone(), |scale| &y * scale).tanh();
            if let Some(other) = &other {
                y = &y + other;
            }
            other = index.is_multiple_of(2).then(|| &x * 0.5);
            x = y;
        }
        self.other.as_ref().map_or(x.shallow_clone(), |other| &x + other)
    }

    pub fn loss(&self, outputs: &Tensor) -> Tensor {
        let apart = self.target.as_ref().map_or_else(|| outputs.exp(), |target| outputs - target);
        let mut square = apart.square();
        for weights in [&self.weights, &self.mask].into_iter().flatten() {
            square = &square * weights;
        }
        square.mean(outputs.kind())
    }
}
