//! The losses of a pipeline, and the layer that hands them skips and parameters.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::{Loss, LossContext};
use crate::{
    arguments::Given,
    error::{Error, LayerError, Result},
    layer::{Forward, Infer, Layer},
    observer::LOSS,
    parameter::ParameterSpec,
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
    /// `sum` / `count`, without the weight.
    pub fn value(&self) -> f64 {
        self.sum / self.count
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
}

impl Term {
    /// What messages call it.
    pub(crate) fn layer(&self) -> String {
        match self.name == LOSS {
            true => LOSS.into(),
            false => format!("{LOSS} '{}'", self.name),
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

impl Losses {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Replaces the loss that has no name of its own.
    pub(crate) fn set(&mut self, loss: impl Loss) {
        self.0.retain(|term| term.name != LOSS);
        self.0.insert(0, Term { name: LOSS.into(), weight: 1.0, loss: Arc::new(loss) });
    }

    pub(crate) fn push(&mut self, name: String, weight: f64, loss: impl Loss) {
        self.0.push(Term { name, weight, loss: Arc::new(loss) });
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

    /// Checks that every loss fits `outputs`, which are those of the last layer.
    pub(crate) fn check(
        &self,
        outputs: Vec<TensorSpec>,
        given: InputsAndTargets<'_, TensorSpec>,
    ) -> Result<()> {
        let handed = self.split(outputs);
        let targets = given.1.positional;
        let each = self.each(&handed, given, |term, ctx| term.loss.check(ctx, &handed.0, targets));
        each.map(drop).map_err(|(term, error)| {
            Error::Input(match term.name == LOSS {
                true => error.to_string(),
                false => format!("loss '{}': {error}", term.name),
            })
        })
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
            let ctx = LossContext { parameters: own, skips, inputs, targets };
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

/// The total loss: the values of the terms, times their weights.
pub(crate) fn total(terms: &[LossTerm]) -> f64 {
    terms.iter().map(|term| term.weight * term.value()).sum()
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
        let spec = |own: &ParameterSpec| TensorSpec::new(own.shape.clone(), kind);
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
