//! The losses that the library has.

use gpipe_bridge::loss::{cross_entropy_sum, is_one_pass, overwrites};
use tch::{Kind, Reduction, Tensor};

use super::{Loss, LossContext};
use crate::{
    error::LayerError,
    layer::only,
    parameter::ParameterSpec,
    spec::TensorSpec,
    tape::{Node, Tape, Var},
};

/// Cross entropy with class indices, averaged over targets: outputs `[..., classes]`, int64 targets
/// `[...]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropy {
    /// Targets with this value are neither summed nor counted.
    pub ignore: i64,
    /// The share of each target that is spread evenly over all classes (Szegedy et al. 2016,
    /// section 7): at least 0, below 1. It also applies in evaluation; use another loss or a metric
    /// to measure without it.
    pub label_smoothing: f64,
}

impl Default for CrossEntropy {
    /// Ignores -100, as PyTorch does.
    fn default() -> Self {
        Self { ignore: -100, label_smoothing: 0.0 }
    }
}

impl Loss for CrossEntropy {
    fn check(
        &self,
        _: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        targets: &[TensorSpec],
    ) -> Result<(), LayerError> {
        let (output, target) = (only(outputs)?, only(targets)?);
        if !(0.0..1.0).contains(&self.label_smoothing) {
            let smoothing = self.label_smoothing;
            return Err(LayerError::Value(format!(
                "label_smoothing is {smoothing}: it must be at least 0 and below 1"
            )));
        }
        let fits = output.is_float()
            && target.kind == Kind::Int64
            && output.shape.split_last().is_some_and(|(_, rest)| rest == target.shape);
        if fits {
            return Ok(());
        }
        Err(LayerError::Shape(format!(
            "cross entropy takes outputs [..., classes] and int64 targets [...], it got {output} \
            and {target}"
        )))
    }

    fn sum(
        &self,
        ctx: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        let (logits, target) = (only(outputs)?, only(targets)?);
        let classes = logits.size().last().copied().unwrap_or(0);
        let target = known_classes(ctx, target, classes, self.ignore)?;
        let (logits, target) = (logits.f_reshape([-1, classes])?, target.f_reshape([-1])?);
        Ok(cross_entropy_sum(&logits, &target, self.ignore, self.label_smoothing)?)
    }

    fn count(&self, _: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        Ok(only(targets)?.f_ne(self.ignore)?.f_sum(Kind::Int64)?.f_double_value(&[])?)
    }

    fn by_rows(&self) -> bool {
        true
    }

    /// Autograd saves a tensor of the logits' size, and what makes it of rows and targets where the
    /// forward does not compute the gradient.
    fn record(&self, tape: &mut Tape, outputs: &[Var]) -> Option<Var> {
        let logits = *outputs.first()?;
        let spec = tape.spec(logits);
        let kind = spec.kind;
        let rows = spec.elements() / spec.last().max(1) as f64;
        let (scalar, saved) = (TensorSpec::new([], kind), tape.bytes(logits));
        let flags = if is_one_pass(kind) { 0.0 } else { INDEX_AND_FLAG * rows };
        let node = Node::new(&[logits], scalar).saving_bytes(saved + flags);
        Some(tape.push(match overwrites(kind, self.label_smoothing) {
            true => node.overwriting_saved(),
            false => node.backward_bytes(saved),
        }))
    }
}

/// Bytes per row: the int64 target and its flag.
const INDEX_AND_FLAG: f64 = 9.0;

/// Checks class indices on a GPU, where one out of range makes the GPU unusable for this process:
/// such an index is ignored, and the step fails later. CPU kernels check the range themselves.
fn known_classes(
    ctx: &LossContext<'_>,
    target: &Tensor,
    classes: i64,
    ignore: i64,
) -> Result<Tensor, LayerError> {
    if target.device() == tch::Device::Cpu || target.numel() == 0 {
        return Ok(target.shallow_clone());
    }
    let outside = target.f_lt(0)?.f_logical_or(&target.f_ge(classes)?)?;
    let outside = outside.f_logical_and(&target.f_ne(ignore)?)?;
    let flat = |tensor: &Tensor| tensor.f_reshape([-1])?.f_to_kind(Kind::Int64);
    let first = flat(&outside)?.f_argmax(0, true)?;
    let seen = [flat(&outside)?, flat(target)?].map(|all| all.f_gather(0, &first, false));
    let [is_outside, class] = seen;
    ctx.inspect(
        &Tensor::f_cat(&[is_outside?, class?], 0)?,
        move |seen| match Vec::<i64>::try_from(seen)?[..] {
            [1, class] => Err(LayerError::Value(format!(
                "target {class} is out of bounds: the classes are 0..{classes}"
            ))),
            _ => Ok(()),
        },
    )?;
    Ok(target.f_masked_fill(&outside, ignore)?)
}

/// A loss of some of the outputs and targets: for networks with several heads.
///
/// ```
/// use gpipe::{CrossEntropy, LossOf, MeanSquaredError, Pipeline, Sequence, TensorSpec};
/// # let (model, inputs) = (Sequence::new(), TensorSpec::new([8, 4], tch::Kind::Float));
/// let class = LossOf { outputs: vec![0], targets: vec![0], loss: CrossEntropy::default() };
/// let place = LossOf { outputs: vec![1], targets: vec![1], loss: MeanSquaredError };
/// let builder = Pipeline::builder(model, inputs)
///     .named_loss("class", 1.0, class)
///     .named_loss("place", 0.5, place);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LossOf<L> {
    /// Positions of the outputs, in the order in which the loss gets them.
    pub outputs: Vec<usize>,
    /// Positions of the targets.
    pub targets: Vec<usize>,
    /// The loss of these.
    pub loss: L,
}

/// Those of `all` at these positions.
fn at<T>(
    all: &[T],
    positions: &[usize],
    what: &str,
    copy: impl Fn(&T) -> T,
) -> Result<Vec<T>, LayerError> {
    let own = |&position: &usize| {
        all.get(position).map(&copy).ok_or_else(|| {
            let count = all.len();
            LayerError::Shape(format!("it takes {what} {position}, there are {count} {what}s"))
        })
    };
    positions.iter().map(own).collect()
}

impl<L: Loss> Loss for LossOf<L> {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.loss.parameters()
    }

    fn pops(&self) -> Vec<String> {
        self.loss.pops()
    }

    fn takes_inputs(&self) -> bool {
        self.loss.takes_inputs()
    }

    fn check(
        &self,
        ctx: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        targets: &[TensorSpec],
    ) -> Result<(), LayerError> {
        let outputs = at(outputs, &self.outputs, "output", TensorSpec::clone)?;
        self.loss.check(ctx, &outputs, &at(targets, &self.targets, "target", TensorSpec::clone)?)
    }

    fn sum(
        &self,
        ctx: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        let outputs = at(outputs, &self.outputs, "output", Tensor::shallow_clone)?;
        self.loss.sum(ctx, &outputs, &at(targets, &self.targets, "target", Tensor::shallow_clone)?)
    }

    fn count(&self, ctx: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        self.loss.count(ctx, &at(targets, &self.targets, "target", Tensor::shallow_clone)?)
    }

    fn record(&self, tape: &mut Tape, outputs: &[Var]) -> Option<Var> {
        let own = |&position: &usize| outputs.get(position).copied();
        self.loss.record(tape, &self.outputs.iter().map(own).collect::<Option<Vec<_>>>()?)
    }
}

/// A loss of the first output plus a fraction of the same loss of each further output, which are
/// those of auxiliary heads (Szegedy et al. 2015, section 5). Evaluation adds them, too.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WithAuxiliary<L> {
    /// The loss of each output.
    pub loss: L,
    /// Weight of each auxiliary output's loss; 0.4 in AmoebaNet's recipe.
    pub weight: f64,
}

impl<L: Loss> Loss for WithAuxiliary<L> {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.loss.parameters()
    }

    fn pops(&self) -> Vec<String> {
        self.loss.pops()
    }

    fn takes_inputs(&self) -> bool {
        self.loss.takes_inputs()
    }

    fn check(
        &self,
        ctx: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        targets: &[TensorSpec],
    ) -> Result<(), LayerError> {
        let weight = self.weight;
        if !weight.is_finite() || weight < 0.0 {
            return Err(LayerError::Value(format!(
                "the weight of the auxiliary loss is {weight}: it must be a number of at least 0"
            )));
        }
        if outputs.is_empty() {
            return Err(LayerError::Shape("a loss takes an output".into()));
        }
        outputs.chunks(1).try_for_each(|output| self.loss.check(ctx, output, targets))
    }

    fn sum(
        &self,
        ctx: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        let (first, auxiliary) = outputs.split_at(outputs.len().min(1));
        let sum = self.loss.sum(ctx, first, targets)?;
        auxiliary.chunks(1).try_fold(sum, |sum, output| {
            let own = self.loss.sum(ctx, output, targets)?;
            Ok(sum.f_add(&own.f_mul_scalar(self.weight)?)?)
        })
    }

    fn count(&self, ctx: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        self.loss.count(ctx, targets)
    }

    fn record(&self, tape: &mut Tape, outputs: &[Var]) -> Option<Var> {
        let sums = outputs.iter().map(|&output| self.loss.record(tape, &[output]));
        let sums: Vec<Var> = sums.collect::<Option<_>>()?;
        sums.into_iter().reduce(|a, b| tape.add(a, b))
    }
}

/// Mean squared error over all elements. Outputs and targets have the same shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MeanSquaredError;

impl Loss for MeanSquaredError {
    fn check(
        &self,
        _: &LossContext<'_, TensorSpec>,
        outputs: &[TensorSpec],
        targets: &[TensorSpec],
    ) -> Result<(), LayerError> {
        let (output, target) = (only(outputs)?, only(targets)?);
        if output == target && output.is_float() {
            return Ok(());
        }
        Err(LayerError::Shape(format!(
            "mean squared error takes outputs and targets of one shape and dtype, it got {output} \
            and {target}"
        )))
    }

    fn sum(
        &self,
        _: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        Ok(only(outputs)?.f_mse_loss(only(targets)?, Reduction::Sum)?)
    }

    fn count(&self, _: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        Ok(only(targets)?.numel() as f64)
    }

    /// All squares are computed before they are summed.
    fn record(&self, tape: &mut Tape, outputs: &[Var]) -> Option<Var> {
        let output = *outputs.first()?;
        let (scalar, squares) = (TensorSpec::new([], tape.spec(output).kind), tape.bytes(output));
        let node = Node::new(&[output], scalar).saving(&[output]);
        Some(tape.push(node.saving_bytes(squares).forward_bytes(squares)))
    }
}
