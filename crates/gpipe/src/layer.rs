//! A layer: the smallest unit the partitioner moves. A description, not a container: it says which
//! parameters it wants and how to compute, and the stage that gets it builds and holds the
//! parameters.
//!
//! To write one, implement [`Layer`]:
//!
//! ```
//! use gpipe::{Forward, Infer, Init, Layer, LayerError, ParameterSpec, TensorSpec};
//! use tch::Tensor;
//!
//! /// y = x * scale, with one scale per feature.
//! struct Scale { features: i64 }
//!
//! impl Layer for Scale {
//!     fn kind(&self) -> &'static str { "scale" }
//!     fn parameters(&self) -> Vec<ParameterSpec> {
//!         vec![ParameterSpec::new("scale", [self.features], Init::Ones)]
//!     }
//!     fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
//!         Ok(inputs.to_vec())
//!     }
//!     fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
//!         Ok(vec![inputs[0].f_mul(ctx.parameter(0)?)?])
//!     }
//! }
//! ```

use gpipe_bridge::{
    convolution::{Geometry, convolution},
    linear::{Kernels, linear},
};
use tch::{Kind, Tensor};

pub use crate::parameter::{Init, ParameterSpec};
use crate::{
    batch_norm::{BatchNorm, BatchStatistics, batch_norm},
    cache::Cache,
    error::LayerError,
    rng::{MaskKey, dropout},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// One layer of a sequence. It is shared between threads and holds no tensors.
pub trait Layer: Send + Sync + 'static {
    /// What it is, in one word, for messages.
    fn kind(&self) -> &'static str;

    /// Its parameters, in the order in which [`Forward::parameter`] numbers them.
    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    /// Shapes and dtypes of its outputs. Also says which skips it stashes and pops, through `ctx`.
    ///
    /// # Errors
    /// Inputs that do not fit: it is told to the user with the layer's name, before anything runs.
    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError>;

    /// Its outputs; affine maps are fastest through [`Forward::linear`]. It must be a pure function
    /// of inputs, parameters and `ctx`, because it is run again for re-materialization, and must
    /// not change its inputs or parameters in place. tch: only the `f_*` forms.
    ///
    /// # Errors
    /// libtorch's, and values that the layer cannot take.
    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError>;

    /// The paper's c_i: an estimate of the floating-point operations of one forward, if it is more
    /// than passing over its elements.
    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let _ = inputs;
        None
    }

    /// The forward once more, in shapes alone, so that [`estimate`](crate::estimate::estimate)
    /// knows what it holds; its outputs, or `None`: as if autograd kept nothing else.
    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let _ = (tape, inputs);
        None
    }
}

/// What [`Layer::infer`] can see and say besides its inputs and outputs.
#[derive(Debug)]
pub struct Infer {
    kind: Kind,
    /// Skips stashed by earlier layers and not yet popped.
    pub(crate) open: Vec<(String, TensorSpec)>,
    pub(crate) stashed: Vec<String>,
    pub(crate) popped: Vec<String>,
}

impl Infer {
    pub(crate) fn new(kind: Kind) -> Self {
        Self::with_open(kind, Vec::new())
    }

    /// As it stands at a layer that may pop the skips in `open`.
    pub(crate) fn with_open(kind: Kind, open: Vec<(String, TensorSpec)>) -> Self {
        Self { kind, open, stashed: Vec::new(), popped: Vec::new() }
    }

    /// The dtype in which layers see all parameters of the pipeline.
    pub fn parameter_kind(&self) -> Kind {
        self.kind
    }

    /// The layer stashes a skip under `name`.
    ///
    /// # Errors
    /// A name that is already stashed and not yet popped.
    pub fn stash(&mut self, name: &str, spec: TensorSpec) -> Result<(), LayerError> {
        if self.open.iter().any(|(open, _)| open == name) {
            return Err(LayerError::Shape(format!(
                "skip '{name}' is stashed twice before it is popped: give each its own name"
            )));
        }
        self.open.push((name.to_owned(), spec));
        self.stashed.push(name.to_owned());
        Ok(())
    }

    /// The layer pops the skip that an earlier layer stashed under `name`.
    ///
    /// # Errors
    /// Nothing is stashed under that name.
    pub fn pop(&mut self, name: &str) -> Result<TensorSpec, LayerError> {
        let Some(at) = self.open.iter().position(|(open, _)| open == name) else {
            let open: Vec<_> = self.open.iter().map(|(name, _)| name.as_str()).collect();
            return Err(LayerError::Shape(format!(
                "no earlier layer stashes a skip '{name}'; stashed and not yet popped: {open:?}"
            )));
        };
        self.popped.push(name.to_owned());
        Ok(self.open.remove(at).1)
    }
}

/// What a forward knows besides its inputs.
pub struct Forward<'a> {
    pub(crate) parameters: &'a [Tensor],
    pub(crate) kernels: Kernels,
    pub(crate) training: bool,
    pub(crate) mask: MaskKey,
    pub(crate) samples: i64,
    /// Skips that this layer pops, by name.
    pub(crate) pops: Vec<(String, Tensor)>,
    /// Skips that this layer has stashed.
    pub(crate) stashed: Vec<(String, Tensor)>,
    /// What its batch norms saw.
    pub(crate) statistics: Vec<BatchStatistics>,
    /// In a decoding.
    pub(crate) cache: Option<Cache>,
}

impl Forward<'_> {
    /// Parameter number `index` of [`Layer::parameters`].
    ///
    /// # Errors
    /// The layer has no such parameter.
    pub fn parameter(&self, index: usize) -> Result<&Tensor, LayerError> {
        self.parameters.get(index).ok_or_else(|| {
            LayerError::Value(format!(
                "it has {} parameters, none with number {index}",
                self.parameters.len()
            ))
        })
    }

    /// The affine map of the last axis: `x` `[..., inputs]`, `weight` `[outputs, inputs]`, `bias`
    /// `[outputs]` to `[..., outputs]`; through the pipeline's [`Kernels`], which may be faster
    /// than libtorch's own. A selective re-materialization finds what it gave. Differentiable once:
    /// a gradient of its gradient is an error.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor, LayerError> {
        Ok(linear(x, weight, bias, self.kernels)?)
    }

    /// `x` `[samples, inputs, height, width]` convolved with `weight` `[outputs, inputs / groups,
    /// height, width]`; through the pipeline's [`Kernels`], of which some give channels-last
    /// layout: layers that pass through elements keep it. A selective re-materialization finds what
    /// it gave. Differentiable once: a gradient of its gradient is an error.
    ///
    /// # Errors
    /// Shapes that do not fit; a stride below 1.
    pub fn convolution(
        &self,
        x: &Tensor,
        weight: &Tensor,
        geometry: &Geometry,
    ) -> Result<Tensor, LayerError> {
        Ok(convolution(x, weight, geometry, self.kernels)?)
    }

    /// Whether this is training (dropout applies) or evaluation.
    pub fn training(&self) -> bool {
        self.training
    }

    /// Dropout of `x` ([samples, ...]) with probability `p` (Srivastava et al. 2014): in training
    /// each element is zeroed or scaled by 1 / (1 - p); else `x` itself. The mask depends on seed,
    /// layer, step, global sample and element alone.
    ///
    /// # Errors
    /// `x` whose first size is not the number of samples, or libtorch's.
    pub fn dropout(&mut self, x: &Tensor, p: f64) -> Result<Tensor, LayerError> {
        if !self.training || p <= 0.0 {
            return Ok(x.shallow_clone());
        }
        let shape = x.size();
        if shape.first() != Some(&self.samples) {
            return Err(LayerError::Shape(format!(
                "dropout wants [{} samples, ...], it got {shape:?}",
                self.samples
            )));
        }
        let dropped = dropout(x, p, self.mask)?;
        self.mask.site += 1;
        Ok(dropped)
    }

    /// Batch normalisation of `x` `[samples, channels, ...]` (Ioffe & Szegedy 2015) with the five
    /// parameters of [`BatchNorm::parameters`](crate::layers::BatchNorm::parameters) from number
    /// `first` on. In training it is normalised by the micro-batch's own statistics, as the paper
    /// on GPipe has it (section 2.2), and what they are is counted for the running ones: once per
    /// mini-batch, from all of it, and never by a re-materialization. Else by the running ones.
    ///
    /// # Errors
    /// Another number of channels, or fewer than two values a channel in training.
    pub fn batch_norm(
        &mut self,
        first: usize,
        norm: &BatchNorm,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let parameter = |number| self.parameter(first + number);
        let (y, statistics) = batch_norm(parameter, self.training, first, norm, x)?;
        self.statistics.extend(statistics);
        Ok(y)
    }

    /// In a decoding, where outputs are made one position after the other: what this layer kept of
    /// the earlier ones. Its inputs have only the new positions then.
    pub fn cache(&mut self) -> Option<&mut Cache> {
        self.cache.as_mut()
    }

    /// Positions of a decoding that came before those in the inputs; 0 outside of one.
    pub fn past(&self) -> i64 {
        self.cache.as_ref().map_or(0, Cache::past)
    }

    /// Sends `x` over a long skip to the layer that pops `name`.
    pub fn stash(&mut self, name: &str, x: &Tensor) {
        self.stashed.push((name.to_owned(), x.shallow_clone()));
    }

    /// Takes what an earlier layer stashed under `name`, once.
    ///
    /// # Errors
    /// `infer` did not say that this layer pops `name`, or it was taken already.
    pub fn pop(&mut self, name: &str) -> Result<Tensor, LayerError> {
        let at = self.pops.iter().position(|(open, _)| open == name);
        match at {
            Some(at) => Ok(self.pops.swap_remove(at).1),
            None => Err(LayerError::Value(format!(
                "its infer does not pop a skip '{name}', or its forward took it already"
            ))),
        }
    }
}

/// The only input of a layer that takes one.
///
/// # Errors
/// Any other number of inputs.
pub fn only<T>(inputs: &[T]) -> Result<&T, LayerError> {
    match inputs {
        [input] => Ok(input),
        _ => Err(LayerError::Shape(format!("it takes 1 tensor, it got {}", inputs.len()))),
    }
}
