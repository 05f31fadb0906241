//! Layers: the smallest units that the partitioner moves.
//!
//! A layer is a description, not a container. It declares its parameters and computes its outputs.
//! The stage that runs it creates and holds the parameters.
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
//!     fn infer(
//!         &self,
//!         _: &mut Infer,
//!         inputs: &[TensorSpec],
//!     ) -> Result<Vec<TensorSpec>, LayerError> {
//!         Ok(inputs.to_vec())
//!     }
//!     fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
//!         Ok(vec![inputs[0].f_mul(ctx.parameter(0)?)?])
//!     }
//! }
//! ```

use std::{cell::RefCell, sync::Arc};

use gpipe_bridge::{
    convolution::{Geometry, convolution},
    fused,
    images::{self, Pooling, Windows},
    layout::concatenate,
    linear::{Kernels, linear},
    op_cache::unread,
};
use tch::Tensor;

use crate::{
    adapter::Adapter,
    batch_norm::{BatchNorm, BatchStatistics, Normalising, batch_norm},
    cache::Cache,
    error::LayerError,
    inspect::Inspections,
    rng::Random,
    spec::TensorSpec,
    tape::{Tape, Var},
};
pub use crate::{
    infer::Infer,
    parameter::{Init, ParameterSpec},
};

/// One layer of a sequence. It is shared between threads and holds no tensors.
pub trait Layer: Send + Sync + 'static {
    /// What the layer is, in one word, for messages.
    fn kind(&self) -> &'static str;

    /// The layer's parameters, in the order that [`Forward::parameter`] numbers them.
    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    /// The shapes and dtypes of the outputs. Also declares, through `ctx`, which skips the layer
    /// stashes and pops, and which of the pipeline's inputs it uses by name.
    ///
    /// An input that is `None` has the spec [`TensorSpec::none`], and so has an output that is.
    ///
    /// # Errors
    /// If the inputs do not fit. The user sees the error with the layer's name, before anything
    /// runs.
    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError>;

    /// Computes the outputs. [`Forward::linear`] is the fastest way to compute an affine map.
    ///
    /// An input that is `None` is undefined: [`Tensor::defined`] is false. Return `Tensor::new()`
    /// for an output that is `None`.
    ///
    /// It must be a pure function of the inputs, the parameters and `ctx`, because
    /// re-materialization runs it again. It must not change inputs or parameters in place. Of tch,
    /// use only the `f_*` forms, which return errors. Random operators of libtorch draw the same
    /// numbers again ([`Random::enter`]); other sources of random numbers must not be used.
    ///
    /// # Errors
    /// An error of libtorch, or values that the layer cannot take.
    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError>;

    /// Called with an error of the layer's forward or backward, on the thread where it happened.
    /// A layer in another language takes its own form of the error from that thread here.
    fn failed(&self, error: &LayerError) {
        let _ = error;
    }

    /// An estimate of the floating-point operations of one forward, by which the default cut
    /// balances stages. `None` stands for one operation per element of the inputs and outputs.
    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let _ = inputs;
        None
    }

    /// Whether the layer can be computed on some rows at a time, as
    /// [`PipelineBuilder::loss_rows`](crate::PipelineBuilder::loss_rows) needs. The default is
    /// `false`.
    ///
    /// The layer then has one input [.., features] and one output [.., outputs]. A row is an index
    /// of all axes but the last. Each output row depends only on the same input row, so a call with
    /// an input [rows, features] computes these rows alone. The layer has no dropout.
    fn by_rows(&self) -> bool {
        false
    }

    /// The numbers of the weights to which low-rank adapters can be added
    /// ([`Sequence::with_lora`](crate::Sequence::with_lora)): every forward of training passes each
    /// of them to [`Forward::linear`] as [`Forward::parameter`] returns it, and [`Layer::record`]
    /// to [`Tape::linear`]. Their shapes are `[outputs, inputs]`; their names end with `weight`. A
    /// forward that misses one fails.
    fn adaptable(&self) -> Vec<usize> {
        Vec::new()
    }

    /// The number of the weight of a product whose result no backward reads, typically the layer's
    /// last. The default is none. The forward passes the weight to [`Forward::linear`] once, as
    /// [`Forward::parameter`] returns it. On its way to the outputs, the result passes only through
    /// operations whose backward reads no values: additions, dropout, changes of shape. Nothing
    /// else reads it.
    ///
    /// Re-materialization leaves this product out where nobody reads the outputs either: in the
    /// last layer of a stage or segment. PyTorch's checkpoints stop early for the same reason. A
    /// wrong answer gives wrong gradients.
    fn unread(&self) -> Option<usize> {
        None
    }

    /// Whether re-materialization may end the forward before its last operation. It does so in the
    /// last layer of a stage or segment, once everything that the backward reads is there, as
    /// PyTorch's checkpoints do (`early_stop`): the operation fails that would save the next
    /// tensor. The default is no.
    ///
    /// Say yes if the forward returns errors of libtorch, as it does with the methods of tch that
    /// begin with `f_`. Others panic, which is printed. Results are the same either way.
    fn may_end_early(&self) -> bool {
        false
    }

    /// Records the forward from shapes alone and returns its outputs, so that
    /// [`estimate`](crate::estimate::estimate) knows what the layer holds. `None`: autograd is
    /// assumed to save nothing. The layer then keeps only its outputs for the backward, besides its
    /// inputs and parameters.
    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let _ = (tape, inputs);
        None
    }
}

/// The context of [`Layer::forward`]: parameters, training mode, dropout, skips and caches.
pub struct Forward<'a> {
    pub(crate) parameters: &'a [Tensor],
    pub(crate) kernels: Kernels,
    pub(crate) training: bool,
    pub(crate) random: Random,
    /// The pipeline's inputs by name.
    pub(crate) named: &'a [(String, Tensor)],
    /// Skips that this layer pops, by name.
    pub(crate) pops: Vec<(String, Tensor)>,
    /// Skips that this layer has stashed.
    pub(crate) stashed: Vec<(String, Tensor)>,
    /// The statistics of the layer's batch norms.
    pub(crate) statistics: Vec<BatchStatistics>,
    /// The layer's cache, while decoding.
    pub(crate) cache: Option<Cache>,
    pub(crate) inspections: Inspections,
    /// Adapters of the layer's weights.
    pub(crate) adapters: Arc<[Adapter]>,
    /// The numbers of the adapters that were applied.
    pub(crate) adapted: RefCell<Vec<u64>>,
    /// The weight whose product is left out ([`Layer::unread`]).
    pub(crate) unread: Option<usize>,
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

    /// An affine map of the last axis: `x` `[..., inputs]`, `weight` `[outputs, inputs]`, `bias`
    /// `[outputs]` to `[..., outputs]`.
    ///
    /// Uses the pipeline's [`Kernels`], which may be faster than libtorch's own. Selective
    /// re-materialization keeps the result instead of recomputing it. Differentiable once: the
    /// gradient of its gradient is an error.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor, LayerError> {
        let is_weight =
            |number| self.parameters.get(number).is_some_and(|own| std::ptr::eq(own, weight));
        let product = || linear(x, weight, bias, self.kernels);
        let y = if self.unread.is_some_and(is_weight) { unread(product) } else { product() }?;
        let is_own = |own: &&Adapter| is_weight(own.weight);
        let Some(adapter) = self.adapters.iter().find(is_own) else { return Ok(y) };
        self.adapted.borrow_mut().push(adapter.number);
        let added = adapter.apply(x, self.parameters, &self.random, self.training, self.kernels)?;
        Ok(y.f_add(&added)?)
    }

    /// Joins `tensors` along `axis`, counted from 0. The gradient of each is contiguous, in the
    /// layout of the first tensor. `Tensor::cat` gives gradients with gaps in memory, for which
    /// libtorch's batch norm has a slow backward.
    ///
    /// # Errors
    /// No tensors; shapes that do not fit; an axis that is not there.
    pub fn concatenate(&self, tensors: &[&Tensor], axis: i64) -> Result<Tensor, LayerError> {
        Ok(concatenate(tensors, axis)?)
    }

    /// Whether layers use the bridge's fused operations for `x` and what depends on it, instead of
    /// several of libtorch's.
    pub(crate) fn fuses(&self, x: &Tensor) -> bool {
        self.kernels != Kernels::Aten && fused::takes(x)
    }

    /// Convolves `x` `[samples, inputs, height, width]` with `weight` `[outputs, inputs / groups,
    /// height, width]`.
    ///
    /// Uses the pipeline's [`Kernels`], some of which return channels-last layout; elementwise
    /// layers keep that layout. Selective re-materialization keeps the result instead of
    /// recomputing it. Differentiable once: the gradient of its gradient is an error.
    ///
    /// # Errors
    /// If the shapes do not fit, or if a stride is below 1.
    pub fn convolution(
        &self,
        x: &Tensor,
        weight: &Tensor,
        geometry: &Geometry,
    ) -> Result<Tensor, LayerError> {
        Ok(convolution(x, weight, geometry, self.kernels)?)
    }

    /// The pipeline's input `name`, of this micro-batch
    /// ([`PipelineBuilder::named_input`](crate::PipelineBuilder::named_input)). `None` if the
    /// pipeline has no such input, or it is `None` in this call. It has no gradient.
    pub fn named(&self, name: &str) -> Option<&Tensor> {
        let own = self.named.iter().find(|(own, _)| own == name);
        own.map(|(_, tensor)| tensor).filter(|tensor| tensor.defined())
    }

    /// Whether the layer runs in training mode, where dropout applies.
    pub fn training(&self) -> bool {
        self.training
    }

    /// Applies dropout to `x` `[samples, ...]` with probability `p` (Srivastava et al. 2014).
    ///
    /// In training mode each element is zeroed or scaled by 1 / (1 - p); otherwise `x` is returned
    /// unchanged. The mask depends only on seed, layer, step, global sample and element, and on
    /// which of the layer's calls of `dropout` this is.
    ///
    /// # Errors
    /// If `p` is not in [0, 1], if the first size of `x` is not the number of samples, or an error
    /// of libtorch.
    pub fn dropout(&mut self, x: &Tensor, p: f64) -> Result<Tensor, LayerError> {
        if !(0.0..=1.0).contains(&p) {
            return Err(LayerError::Value(format!(
                "a dropout probability of {p}: give one from 0 to 1"
            )));
        }
        if !self.training || p == 0.0 {
            return Ok(x.shallow_clone());
        }
        let (shape, samples) = (x.size(), self.random.samples());
        if shape.first() != Some(&samples) {
            return Err(LayerError::Shape(format!(
                "dropout wants [{samples} samples, ...], it got {shape:?}"
            )));
        }
        self.random.dropout(x, p)
    }

    /// What this run's random numbers depend on. The forward already runs inside
    /// [`Random::enter`]; a layer needs this to compute a part of itself again later.
    pub fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    /// Applies batch normalisation to `x` `[samples, channels, ...]` (Ioffe & Szegedy 2015).
    ///
    /// Uses the five parameters of [`BatchNorm::parameters`](crate::layers::BatchNorm::parameters),
    /// starting at index `first`. Training normalises by the statistics of the micro-batch (GPipe
    /// paper, section 2.2); evaluation uses the running statistics. The running statistics are
    /// updated once per mini-batch, from the whole of it. Re-materialization does not update them.
    ///
    /// # Errors
    /// If the number of channels differs, or in training if there are fewer than two values per
    /// channel.
    pub fn batch_norm(
        &mut self,
        first: usize,
        norm: &BatchNorm,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        self.normalised(first, norm, x, false)
    }

    /// [`Forward::batch_norm`] with a ReLU behind it, where possible in one pass over memory.
    ///
    /// # Errors
    /// Those of [`Forward::batch_norm`].
    pub fn batch_norm_relu(
        &mut self,
        first: usize,
        norm: &BatchNorm,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        self.normalised(first, norm, x, true)
    }

    fn normalised(
        &mut self,
        first: usize,
        norm: &BatchNorm,
        x: &Tensor,
        relu: bool,
    ) -> Result<Tensor, LayerError> {
        let parameter = |number| self.parameter(first + number);
        let how = Normalising { training: self.training, relu, fused: self.fuses_images(x) };
        let (y, statistics) = batch_norm(parameter, how, first, norm, x)?;
        self.statistics.extend(statistics);
        Ok(y)
    }

    /// The maximum or the average of each window of `x` `[samples, channels, height, width]`.
    /// Differentiable once.
    ///
    /// # Errors
    /// If the windows do not fit the images.
    pub fn pool(
        &self,
        x: &Tensor,
        windows: &Windows,
        pooling: Pooling,
    ) -> Result<Tensor, LayerError> {
        if self.fuses_images(x) && windows.size <= Windows::SIZE_MAX {
            return Ok(images::pool(x, windows, pooling)?);
        }
        let Windows { size, stride, padding, ceil } = *windows;
        let (size, stride, padding) = ([size; 2], [stride; 2], [padding; 2]);
        Ok(match pooling {
            Pooling::Maximum => x.f_max_pool2d(size, stride, padding, [1; 2], ceil)?,
            Pooling::Average => x.f_avg_pool2d(size, stride, padding, ceil, false, None)?,
        })
    }

    /// Every second pixel of `x` `[samples, channels, height, width]` in both directions. The first
    /// is pixel `from`, which is 0 or 1. Height and width are halved and rounded up, and 0 is
    /// beyond the border. Differentiable once.
    ///
    /// # Errors
    /// If `x` are no images.
    pub fn every_second_pixel(&self, x: &Tensor, from: i64) -> Result<Tensor, LayerError> {
        Ok(images::every_second_pixel(x, from)?)
    }

    fn fuses_images(&self, x: &Tensor) -> bool {
        self.kernels != Kernels::Aten && images::takes(x)
    }

    /// Calls `check` with the elements of `values`: a tensor on the CPU with one dimension. It is
    /// float64, or int64 for integers and truth values.
    ///
    /// On a CPU this happens at once. On a GPU it happens after the step's work, before anything is
    /// updated or returned, so that the layer does not wait for the GPU. Until then the layer goes
    /// on with what it has. It must replace an index out of range, which would make the GPU
    /// unusable for the process.
    ///
    /// # Errors
    /// Errors of libtorch. Those of `check` fail the step, with the layer's name.
    pub fn inspect(
        &self,
        values: &Tensor,
        check: impl FnOnce(&Tensor) -> Result<(), LayerError> + 'static,
    ) -> Result<(), LayerError> {
        self.inspections.add(values, check)
    }

    /// The layer's cache of earlier positions, or `None` outside decoding. While decoding, the
    /// inputs hold only the new positions.
    pub fn cache(&mut self) -> Option<&mut Cache> {
        self.cache.as_mut()
    }

    /// Number of positions decoded before those in the inputs; 0 outside of a decoding.
    pub fn past(&self) -> i64 {
        self.cache.as_ref().map_or(0, Cache::past)
    }

    /// Sends `x` over a long skip to the layer that pops `name`.
    pub fn stash(&mut self, name: &str, x: &Tensor) {
        self.stashed.push((name.to_owned(), x.shallow_clone()));
    }

    /// Takes the tensor that an earlier layer stashed under `name`. It can be taken once.
    ///
    /// # Errors
    /// If `infer` did not declare that this layer pops `name`, or if it was taken already.
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

/// Returns the only input of a layer that takes one.
///
/// # Errors
/// If there is any other number of inputs.
pub fn only<T>(inputs: &[T]) -> Result<&T, LayerError> {
    match inputs {
        [input] => Ok(input),
        _ => Err(LayerError::Shape(format!("it takes 1 tensor, it got {}", inputs.len()))),
    }
}
