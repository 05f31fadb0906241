//! Losses. A loss is a sum over samples (or tokens) and a count, kept apart so that micro-batches
//! of unequal size give the exact loss of the mini-batch.
//!
//! - [`built_in`]: cross entropy, squared error, auxiliary heads; [`balanced`]: experts
//! - [`terms`]: several losses of one pipeline, and the layer that hands them what they ask for

mod balanced;
mod built_in;
mod terms;

use std::cell::RefCell;

pub use balanced::BalancedExperts;
pub use built_in::{CrossEntropy, LossOf, MeanSquaredError, WithAuxiliary};
use tch::Tensor;
pub use terms::LossTerm;
pub(crate) use terms::{InputsAndTargets, Losses, Term, check_handed, not_finite, record, total};

use crate::{
    arguments::{Given, Presence},
    error::LayerError,
    inspect::Inspections,
    parameter::ParameterSpec,
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// A loss function. The loss of a mini-batch is `sum` over all micro-batches divided by `count`
/// over the whole mini-batch.
///
/// A loss computes from outputs and targets. It may have parameters of its own, and it may see
/// skips and the pipeline's inputs, through its [`LossContext`]:
///
/// ```
/// use gpipe::{Init, LayerError, Loss, LossContext, ParameterSpec, TensorSpec};
/// use tch::Tensor;
///
/// /// The squared error, divided by a learned variance (Kendall et al. 2018, equation 5):
/// /// (output - target)^2 e^-s + s, with s one number.
/// struct LearnedVariance;
///
/// impl Loss for LearnedVariance {
///     fn parameters(&self) -> Vec<ParameterSpec> {
///         vec![ParameterSpec::new("log_variance", [1], Init::Zeros)]
///     }
///     fn check(
///         &self,
///         _: &LossContext<'_, TensorSpec>,
///         outputs: &[TensorSpec],
///         targets: &[TensorSpec],
///     ) -> Result<(), LayerError> {
///         match outputs == targets {
///             true => Ok(()),
///             false => Err(LayerError::Shape("outputs and targets differ in shape".into())),
///         }
///     }
///     fn sum(
///         &self,
///         ctx: &LossContext<'_>,
///         outputs: &[Tensor],
///         targets: &[Tensor],
///     ) -> Result<Tensor, LayerError> {
///         let s = ctx.parameter(0)?;
///         let square = outputs[0].f_sub(&targets[0])?.f_square()?;
///         Ok(square.f_mul(&s.f_neg()?.f_exp()?)?.f_add(s)?.f_sum(outputs[0].kind())?)
///     }
///     fn count(&self, _: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
///         Ok(targets[0].numel() as f64)
///     }
/// }
/// ```
pub trait Loss: Send + Sync + 'static {
    /// The loss's parameters, in the order that [`LossContext::parameter`] numbers them.
    ///
    /// They are those of a layer that the builder adds to the end of the sequence, named `loss`. So
    /// they are trained, frozen, grouped, tied, averaged and saved like all others, under names
    /// such as `loss.log_variance`.
    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    /// Names of the skips that the loss pops ([`crate::Forward::stash`]), so that it sees outputs
    /// of earlier layers. Gradients flow back through them.
    fn pops(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether the loss sees the pipeline's inputs. They are handed to the last stage then, without
    /// gradients.
    fn takes_inputs(&self) -> bool {
        false
    }

    /// Checks that outputs and targets fit. An implementation also calls
    /// [`LossContext::named_input`] and [`LossContext::named_target`] here for each of them that
    /// the loss uses: a name that no layer and no loss asks for is an error, because it may be
    /// misspelt.
    ///
    /// # Errors
    /// If they do not fit. The error names both sides.
    fn check(
        &self,
        ctx: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        targets: &[TensorSpec],
    ) -> Result<(), LayerError>;

    /// The sum over the samples of a micro-batch: a scalar, differentiable in the outputs, skips
    /// and parameters. These are in float32 when the pipeline computes in bfloat16 or float16, but
    /// have passed through that dtype.
    ///
    /// # Errors
    /// An error of libtorch, or targets out of range.
    fn sum(
        &self,
        ctx: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError>;

    /// The number that the sum over the whole mini-batch is divided by. It is computed before the
    /// step, from the whole mini-batch: `ctx` has neither parameters nor skips.
    ///
    /// # Errors
    /// An error of libtorch.
    fn count(&self, ctx: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError>;

    /// Whether the loss can be computed on some rows at a time, as
    /// [`PipelineBuilder::loss_rows`](crate::PipelineBuilder::loss_rows) needs. The default is
    /// `false`.
    ///
    /// The loss then depends only on outputs `[rows, ..]` and targets `[rows]`. Its sum over all
    /// rows is the sum of its sums over any partition of the rows.
    fn by_rows(&self) -> bool {
        false
    }

    /// Records the sum from shapes alone, as [`crate::Layer::record`] does for a forward. `None`:
    /// autograd is assumed to keep a copy of the outputs.
    fn record(&self, tape: &mut Tape, outputs: &[Var]) -> Option<Var> {
        let _ = (tape, outputs);
        None
    }
}

/// What a loss sees besides outputs and targets. In [`Loss::sum`] these are tensors of a
/// micro-batch, in [`Loss::count`] of the whole mini-batch, and in [`Loss::check`] specs.
pub struct LossContext<'a, T = Tensor> {
    pub(crate) parameters: &'a [T],
    /// By name.
    pub(crate) skips: &'a [(String, T)],
    pub(crate) inputs: Given<'a, T>,
    pub(crate) targets: Given<'a, T>,
    /// Names that the loss has asked for.
    pub(crate) asked: RefCell<Vec<String>>,
    pub(crate) inspections: Inspections,
}

impl<T> Default for LossContext<'_, T> {
    /// Nothing. For calling a loss that looks only at outputs and targets.
    fn default() -> Self {
        let (inputs, targets) = (Given::default(), Given::default());
        let (asked, inspections) = (RefCell::default(), Inspections::default());
        Self { parameters: &[], skips: &[], inputs, targets, asked, inspections }
    }
}

impl<T> LossContext<'_, T> {
    /// Parameter number `index` of [`Loss::parameters`].
    ///
    /// # Errors
    /// The loss has no such parameter, or it is not known here.
    pub fn parameter(&self, index: usize) -> Result<&T, LayerError> {
        self.parameters.get(index).ok_or_else(|| {
            LayerError::Value(format!(
                "the loss has {} parameters here, none with number {index}",
                self.parameters.len()
            ))
        })
    }

    /// The skip that a layer stashed under `name`.
    ///
    /// # Errors
    /// If [`Loss::pops`] does not name it, or it is not known here.
    pub fn skip(&self, name: &str) -> Result<&T, LayerError> {
        let own = self.skips.iter().find(|(own, _)| own == name);
        own.map(|(_, skip)| skip).ok_or_else(|| {
            LayerError::Value(format!("there is no skip '{name}' here: name it in the loss's pops"))
        })
    }

    /// Input number `index` of the pipeline, as the caller gave it: in [`Loss::sum`] on the last
    /// stage's device, in [`Loss::count`] on the CPU.
    ///
    /// # Errors
    /// If there is no such input, or [`Loss::takes_inputs`] is false.
    pub fn input(&self, index: usize) -> Result<&T, LayerError> {
        self.inputs.positional.get(index).ok_or_else(|| {
            LayerError::Value(format!(
                "there is no input {index} here: the loss has {}, and none unless its takes_inputs \
                is true",
                self.inputs.positional.len()
            ))
        })
    }
}

impl LossContext<'_> {
    /// As [`Forward::inspect`](crate::Forward::inspect): checks values without waiting for a GPU.
    ///
    /// # Errors
    /// Errors of libtorch. Those of `check` fail the step, with the loss's name.
    pub fn inspect(
        &self,
        values: &Tensor,
        check: impl FnOnce(&Tensor) -> Result<(), LayerError> + 'static,
    ) -> Result<(), LayerError> {
        self.inspections.add(values, check)
    }
}

impl<T: Presence> LossContext<'_, T> {
    /// As [`LossContext::input`], the input `name` of the pipeline
    /// ([`PipelineBuilder::named_input`](crate::PipelineBuilder::named_input)). `None` if there is
    /// no such input, if it is `None` in this call, or if [`Loss::takes_inputs`] is false.
    pub fn named_input(&self, name: &str) -> Option<&T> {
        self.asked.borrow_mut().push(name.to_owned());
        self.inputs.get(name)
    }

    /// The target `name` ([`PipelineBuilder::named_target`](crate::PipelineBuilder::named_target)).
    /// `None` if there is no such target, or it is `None` in this call.
    pub fn named_target(&self, name: &str) -> Option<&T> {
        self.asked.borrow_mut().push(name.to_owned());
        self.targets.get(name)
    }
}
