//! The losses of a pipeline, and the layer that hands them skips and parameters.

use std::{cell::RefCell, fmt, sync::Arc};

use tch::{Kind, Tensor};

use super::{Loss, LossContext};
use crate::{
    arguments::Given,
    error::{Error, LayerError, Result},
    guard::catching,
    inspect::Inspections,
    layer::{Forward, Infer, Layer},
    observer::LOSS,
    parameter::ParameterSpec,
    precision::Precision,
    sequence::Sequence,
    spec::TensorSpec,
    tape::{Node, Tape, Var},
};

/// One of the losses of a pipeline, over a mini-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct LossTerm {
    /// The name given to [`named_loss`](crate::PipelineBuilder::named_loss); `loss` for that of
    /// [`loss`](crate::PipelineBuilder::loss).
    pub name: String,
    /// The factor of its value in the total loss.
    pub weight: f64,
    /// The sum over samples (or tokens), without the weight.
    pub sum: f64,
    /// The number to divide the sum by.
    pub count: f64,
}

impl LossTerm {
    /// `sum` / `count`, without the weight; 0 if the count is 0, because the loss then has no part
    /// in the gradients.
    pub fn value(&self) -> f64 {
        if self.count == 0.0 { 0.0 } else { self.sum / self.count }
    }
}

/// What is not finite, for an error.
pub(crate) fn not_finite(name: &str, value: &str) -> String {
    match name == LOSS {
        true => format!("the loss ({value})"),
        false => format!("the loss '{name}' ({value})"),
    }
}

/// A loss with its name and weight.
#[derive(Clone)]
pub(crate) struct Term {
    pub name: String,
    pub weight: f64,
    pub loss: Arc<dyn Loss>,
    is_named: bool,
}

impl Term {
    /// Whether it has gradients. One of weight 0 is only reported.
    pub(crate) fn trains(&self) -> bool {
        self.weight != 0.0
    }

    /// The error of a mini-batch that does not fit.
    pub(crate) fn input_error(&self, error: &LayerError) -> Error {
        Error::Input(match self.name == LOSS {
            true => error.to_string(),
            false => format!("loss '{}': {error}", self.name),
        })
    }

    /// What messages call it.
    pub(crate) fn layer(&self) -> String {
        match self.name == LOSS {
            true => LOSS.into(),
            false => format!("{LOSS} {}", self.name),
        }
    }
}

/// The losses of a pipeline, in the order in which the builder was given them.
#[derive(Clone, Default)]
pub(crate) struct Losses(pub Vec<Term>);

/// The inputs and the targets of a pipeline.
pub(crate) type InputsAndTargets<'a, T> = (Given<'a, T>, Given<'a, T>);

/// What the last layer hands to the losses, apart: outputs, skips by name, and parameters.
pub(crate) type Handed<T> = (Vec<T>, Vec<(String, T)>, Vec<T>);

impl fmt::Display for Losses {
    /// What must be equal in all processes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let told = |term: &Term| {
            let (loss, inputs) = (&term.loss, term.loss.takes_inputs());
            format!("'{}' times {} {:?} {inputs}", term.name, term.weight, loss.pops())
        };
        f.write_str(&self.0.iter().map(told).collect::<Vec<_>>().join(", "))
    }
}

impl Losses {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the loss that has no name of its own, or replaces it in its place.
    pub(crate) fn set(&mut self, loss: impl Loss) {
        let (name, loss) = (LOSS.to_owned(), Arc::new(loss));
        let term = Term { name, weight: 1.0, loss, is_named: false };
        match self.0.iter_mut().find(|term| !term.is_named) {
            Some(own) => *own = term,
            None => self.0.push(term),
        }
    }

    pub(crate) fn push(&mut self, name: String, weight: f64, loss: impl Loss) {
        self.0.push(Term { name, weight, loss: Arc::new(loss), is_named: true });
    }

    /// Checks names and weights.
    pub(crate) fn check_settings(&self) -> std::result::Result<(), String> {
        for (index, term) in self.0.iter().enumerate() {
            let Term { name, weight, .. } = term;
            if self.0[..index].iter().any(|other| other.name == *name) {
                return Err(format!("two losses are named '{name}': give each its own name"));
            }
            if !weight.is_finite() {
                return Err(format!("the weight of loss '{name}' is {weight}: give a number"));
            }
        }
        match !self.0.is_empty() && self.0.iter().all(|term| term.weight == 0.0) {
            true => Err("every loss has weight 0, so nothing would learn".into()),
            false => Ok(()),
        }
    }

    /// The parameters of all losses. Those of a loss with a name of its own begin with it.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let of = |term: &Term| {
            let name = match term.name == LOSS {
                true => String::new(),
                false => format!("{}.", term.name),
            };
            let own = term.loss.parameters().into_iter();
            own.map(move |spec| ParameterSpec { name: format!("{name}{}", spec.name), ..spec })
        };
        self.0.iter().flat_map(of).collect()
    }

    fn pops(&self) -> Vec<String> {
        pops(self.refs().into_iter())
    }

    pub(crate) fn refs(&self) -> Vec<&dyn Loss> {
        self.0.iter().map(|term| term.loss.as_ref()).collect()
    }

    pub(crate) fn take_inputs(&self) -> bool {
        self.0.iter().any(|term| term.loss.takes_inputs())
    }

    /// Adds the layer that hands skips and parameters to the losses, if they have any. Replaces the
    /// one that was added for other losses.
    pub(crate) fn add_layer(&self, sequence: Sequence) -> Sequence {
        let sequence = sequence.without_last(|layer| layer.kind() == HandToLoss::KIND);
        match self.have_layer() {
            false => sequence,
            true => {
                let layer = HandToLoss { parameters: self.parameters(), pops: self.pops() };
                sequence.push(LOSS, layer)
            }
        }
    }

    /// Whether the losses need a layer of their own.
    pub(crate) fn have_layer(&self) -> bool {
        handed(&self.refs()) > 0
    }

    /// The number of outputs of the network itself, of `all` outputs of the last layer.
    pub(crate) fn own_outputs(&self, all: usize) -> usize {
        all.saturating_sub(handed(&self.refs()))
    }

    /// Splits the outputs of the last layer.
    pub(crate) fn split<T>(&self, outputs: Vec<T>) -> Handed<T> {
        let own = self.own_outputs(outputs.len());
        let mut rest = outputs.into_iter();
        let outputs: Vec<T> = rest.by_ref().take(own).collect();
        let skips = self.pops().into_iter().zip(rest.by_ref()).collect();
        (outputs, skips, rest.collect())
    }

    /// Checks that every loss fits `outputs`, which are those of the last layer. Returns the names
    /// of inputs and targets that they ask for.
    pub(crate) fn check(
        &self,
        outputs: Vec<TensorSpec>,
        given: InputsAndTargets<'_, TensorSpec>,
    ) -> Result<Vec<String>> {
        let handed = self.split(outputs);
        let targets = given.1.positional;
        let each = self.each(&handed, given, |term, ctx| {
            catching(|| term.loss.check(ctx, &handed.0, targets))?;
            Ok(ctx.asked.take())
        });
        let asked = each.map_err(|(term, error)| term.input_error(&error))?;
        Ok(asked.into_iter().flatten().collect())
    }

    /// Calls `call` for each loss, with its own context.
    pub(crate) fn each<'s, T, R>(
        &'s self,
        (_, skips, parameters): &Handed<T>,
        (inputs, targets): InputsAndTargets<'_, T>,
        mut call: impl FnMut(&Term, &LossContext<'_, T>) -> std::result::Result<R, LayerError>,
    ) -> std::result::Result<Vec<R>, (&'s Term, LayerError)> {
        let mut rest = &parameters[..];
        let each = |term: &'s Term| {
            let (own, others) = rest.split_at(term.loss.parameters().len().min(rest.len()));
            rest = others;
            let inputs = if term.loss.takes_inputs() { inputs } else { Given::default() };
            let (asked, inspections) = (RefCell::default(), Inspections::default());
            let parameters = own;
            let ctx = LossContext { parameters, skips, inputs, targets, asked, inspections };
            call(term, &ctx).map_err(|error| (term, error))
        };
        self.0.iter().map(each).collect()
    }

    /// The losses over a mini-batch, from the sums of each micro-batch, in their order.
    pub(crate) fn terms(&self, sums: &[Vec<f64>], counts: &[f64]) -> Vec<LossTerm> {
        let term = |(index, (term, &count)): (usize, (&Term, &f64))| LossTerm {
            name: term.name.clone(),
            weight: term.weight,
            sum: sums.iter().filter_map(|sums| sums.get(index)).sum(),
            count,
        };
        self.0.iter().zip(counts).enumerate().map(term).collect()
    }
}

/// Records the sums of all losses from shapes, as [`Loss::record`] does. `outputs` are those of the
/// last layer.
pub(crate) fn record(
    losses: &[&dyn Loss],
    tape: &mut Tape,
    outputs: &[Var],
    master: Kind,
) -> Option<Var> {
    let own = &outputs[..outputs.len().saturating_sub(handed(losses))];
    let sums = losses.iter().map(|loss| {
        loss.record(tape, own).unwrap_or_else(|| {
            let saved: f64 = own.iter().map(|&var| tape.bytes(var)).sum();
            tape.push(Node::new(own, TensorSpec::new([], master)).saving_bytes(saved))
        })
    });
    let sums: Vec<Var> = sums.collect();
    sums.into_iter().reduce(|a, b| tape.add(a, b))
}

/// The number of skips and parameters that the last layer hands to these losses.
fn handed(losses: &[&dyn Loss]) -> usize {
    let parameters: usize = losses.iter().map(|loss| loss.parameters().len()).sum();
    parameters + pops(losses.iter().copied()).len()
}

/// The skips that losses pop, each once.
fn pops<'l>(losses: impl Iterator<Item = &'l dyn Loss>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for name in losses.flat_map(Loss::pops) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Checks that `sequence` ends with the layer that hands these losses what they ask for.
///
/// # Errors
/// If it does not.
pub(crate) fn check_handed(losses: &[&dyn Loss], sequence: &Sequence) -> Result<()> {
    let last = sequence.layers.last().map(|last| last.layer.kind());
    match handed(losses) > 0 && last != Some(HandToLoss::KIND) {
        false => Ok(()),
        true => Err(Error::Setting(
            "a loss has parameters or skips, for which a pipeline's builder adds a layer: use \
            PipelineBuilder::estimate"
                .into(),
        )),
    }
}

/// The total loss: the values of the terms, times their weights. Those of weight 0 are only
/// reported.
pub(crate) fn total(terms: &[LossTerm]) -> f64 {
    let told = terms.iter().filter(|term| term.weight != 0.0);
    told.map(|term| term.weight * term.value()).sum()
}

/// Hands skips and parameters to the losses, as outputs behind the network's own. It is the last
/// layer, so that the parameters of losses are a layer's, with all that follows from it.
struct HandToLoss {
    parameters: Vec<ParameterSpec>,
    pops: Vec<String>,
}

impl HandToLoss {
    const KIND: &'static str = "loss-inputs";
}

impl Layer for HandToLoss {
    fn kind(&self) -> &'static str {
        Self::KIND
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.parameters.clone()
    }

    fn infer(
        &self,
        ctx: &mut Infer,
        inputs: &[TensorSpec],
    ) -> std::result::Result<Vec<TensorSpec>, LayerError> {
        let mut outputs = inputs.to_vec();
        for name in &self.pops {
            outputs.push(ctx.pop(name)?);
        }
        let kind = ctx.parameter_kind();
        // Buffers are not converted.
        let stored = Precision::of(kind).map_or(kind, |precision| precision.master);
        let spec = |own: &ParameterSpec| {
            TensorSpec::new(own.shape.clone(), if own.buffer { stored } else { kind })
        };
        outputs.extend(self.parameters.iter().map(spec));
        Ok(outputs)
    }

    fn forward(
        &self,
        ctx: &mut Forward,
        inputs: &[Tensor],
    ) -> std::result::Result<Vec<Tensor>, LayerError> {
        let mut outputs: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
        for name in &self.pops {
            outputs.push(ctx.pop(name)?);
        }
        for index in 0..self.parameters.len() {
            outputs.push(ctx.parameter(index)?.shallow_clone());
        }
        Ok(outputs)
    }

    fn flops(&self, _: &[TensorSpec]) -> Option<f64> {
        Some(0.0)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let mut outputs = inputs.to_vec();
        for name in &self.pops {
            outputs.push(tape.pop(name)?);
        }
        for (index, own) in self.parameters.iter().enumerate() {
            let spec = TensorSpec::new(own.shape.clone(), tape.compute_kind());
            outputs.push(tape.push(Node::new(&[], spec).parameter(index).passing_gradient()));
        }
        Some(outputs)
    }
}
