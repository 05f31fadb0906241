//! The inputs and targets of a call: tensors by position, and by name.

use tch::Tensor;

use crate::{
    error::{Error, Result},
    spec::TensorSpec,
};

/// Inputs or targets: one tensor or several. All have the same first size, the number of samples,
/// except those that the builder declares as shared. `None` stands for a tensor that this call does
/// not have.
///
/// Layers and losses see `None` as an undefined tensor, for which [`Tensor::defined`] is false.
pub trait IntoTensors {
    /// Returns the tensors, without copying data.
    fn into_tensors(self) -> Tensors;
}

/// Tensors by position, and by name:
///
/// ```
/// use gpipe::Tensors;
/// use tch::{Kind, Tensor};
/// let tokens = Tensor::zeros([8, 128], (Kind::Int64, tch::Device::Cpu));
/// let mask = Tensor::ones([8, 128], (Kind::Bool, tch::Device::Cpu));
/// let inputs = Tensors::new(tokens).named("mask", mask).named("weights", None);
/// ```
#[derive(Debug, Default)]
pub struct Tensors {
    pub(crate) positional: Vec<Tensor>,
    pub(crate) named: Vec<(String, Tensor)>,
}

impl Tensors {
    /// Tensors by position.
    pub fn new(positional: impl IntoTensors) -> Self {
        positional.into_tensors()
    }

    /// Adds a tensor by name, or `None`.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>, tensor: impl Into<Option<Tensor>>) -> Self {
        self.named.push((name.into(), or_undefined(tensor.into())));
        self
    }

    /// The tensors by position.
    pub fn positional(&self) -> &[Tensor] {
        &self.positional
    }

    /// Replaces each tensor, by position and by name, except those that are `None`.
    ///
    /// # Errors
    /// The first error of `replace`.
    pub fn try_map<E>(
        mut self,
        mut replace: impl FnMut(&Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Self, E> {
        let named = self.named.iter_mut().map(|(_, tensor)| tensor);
        for tensor in self.positional.iter_mut().chain(named).filter(|own| own.defined()) {
            *tensor = replace(tensor)?;
        }
        Ok(self)
    }
}

impl IntoTensors for Tensors {
    fn into_tensors(self) -> Tensors {
        self
    }
}

impl IntoTensors for &Tensors {
    fn into_tensors(self) -> Tensors {
        let named = self.named.iter().map(|(name, own)| (name.clone(), own.shallow_clone()));
        Tensors { named: named.collect(), ..self.positional[..].into_tensors() }
    }
}

impl IntoTensors for Vec<Tensor> {
    fn into_tensors(self) -> Tensors {
        Tensors { positional: self, named: Vec::new() }
    }
}

impl IntoTensors for &[Tensor] {
    fn into_tensors(self) -> Tensors {
        self.iter().map(Tensor::shallow_clone).collect::<Vec<_>>().into_tensors()
    }
}

impl IntoTensors for Vec<Option<Tensor>> {
    fn into_tensors(self) -> Tensors {
        self.into_iter().map(or_undefined).collect::<Vec<_>>().into_tensors()
    }
}

impl IntoTensors for Tensor {
    fn into_tensors(self) -> Tensors {
        vec![self].into_tensors()
    }
}

impl IntoTensors for &Tensor {
    fn into_tensors(self) -> Tensors {
        self.shallow_clone().into_tensors()
    }
}

/// `None` as layers see it.
pub(crate) fn or_undefined(tensor: Option<Tensor>) -> Tensor {
    tensor.unwrap_or_default()
}

/// The tensor, or `None` if it is undefined.
pub(crate) fn defined(tensor: Tensor) -> Option<Tensor> {
    tensor.defined().then_some(tensor)
}

/// Applies `change` to a tensor that is not `None`.
pub(crate) fn if_defined<E>(
    tensor: &Tensor,
    change: impl FnOnce(&Tensor) -> std::result::Result<Tensor, E>,
) -> std::result::Result<Tensor, E> {
    if tensor.defined() { change(tensor) } else { Ok(Tensor::new()) }
}

/// What is declared of the inputs of a pipeline, or of its targets. All tensors of a call are in
/// one list: first those by position, then those by name, in the order of their declaration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Arguments {
    /// Positions without a sample axis.
    pub shared: Vec<usize>,
    pub named: Vec<NamedArgument>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedArgument {
    pub name: String,
    /// Whether it has no sample axis.
    pub shared: bool,
}

impl Arguments {
    pub(crate) fn declare(&mut self, name: String, shared: bool) {
        self.named.push(NamedArgument { name, shared });
    }

    /// The number of tensors by position among `count` tensors.
    pub(crate) fn positional(&self, count: usize) -> usize {
        count.saturating_sub(self.named.len())
    }

    /// Whether tensor `at` of `count` has no sample axis.
    pub(crate) fn is_shared(&self, at: usize, count: usize) -> bool {
        match at.checked_sub(self.positional(count)) {
            None => self.shared.contains(&at),
            Some(named) => self.named.get(named).is_some_and(|own| own.shared),
        }
    }

    /// What messages call tensor `at` of `count`, which is an input or a target.
    pub(crate) fn title(&self, what: &str, at: usize, count: usize) -> String {
        let named = at.checked_sub(self.positional(count)).and_then(|at| self.named.get(at));
        named.map_or_else(|| format!("{what} {at}"), |own| format!("{what} '{}'", own.name))
    }

    /// What of the builder declares tensor `at` of `count` as shared.
    pub(crate) fn shared_by(&self, what: &str, at: usize, count: usize) -> String {
        match at < self.positional(count) {
            true => format!("shared_{what}s"),
            false => format!("shared_named_{what}"),
        }
    }

    /// The tensors of a call in one list. `what` they are: input or target.
    ///
    /// # Errors
    /// If a name is not declared, is given twice, or is missing.
    pub(crate) fn listed(&self, what: &str, tensors: Tensors) -> Result<Vec<Tensor>> {
        let Tensors { positional: mut all, named } = tensors;
        for (index, (name, _)) in named.iter().enumerate() {
            if named[..index].iter().any(|(other, _)| other == name) {
                return Err(Error::Input(format!("{what} '{name}' is given twice")));
            }
            if self.named.iter().all(|own| own.name != *name) {
                let names: Vec<&str> = self.named.iter().map(|own| own.name.as_str()).collect();
                return Err(Error::Input(format!(
                    "there is no {what} '{name}': the builder was told {names:?}, by \
                    named_{what} and shared_named_{what}"
                )));
            }
        }
        for own in &self.named {
            match named.iter().find(|(name, _)| *name == own.name) {
                Some((_, tensor)) => all.push(tensor.shallow_clone()),
                None => {
                    let name = &own.name;
                    return Err(Error::Input(format!(
                        "{what} '{name}' is missing: give a tensor, or None, by \
                        Tensors::named(\"{name}\", ..)"
                    )));
                }
            }
        }
        Ok(all)
    }

    /// The first name that is not in `asked`, the names that layers or losses ask for. It may be
    /// misspelt on one side.
    pub(crate) fn unasked(&self, asked: &[String]) -> Option<&str> {
        let mut names = self.named.iter().map(|own| own.name.as_str());
        names.find(|name| asked.iter().all(|own| own != name))
    }

    /// Splits the list of a call.
    pub(crate) fn split<'a, T>(&'a self, all: &'a [T]) -> Given<'a, T> {
        let (positional, named) = all.split_at(self.positional(all.len()));
        Given { positional, names: &self.named, named }
    }

    /// These specs for `samples` samples.
    pub(crate) fn with_samples(&self, specs: &[TensorSpec], samples: usize) -> Vec<TensorSpec> {
        let own = |(at, spec): (usize, &TensorSpec)| match self.is_shared(at, specs.len()) {
            true => spec.clone(),
            false => spec.with_samples(samples),
        };
        specs.iter().enumerate().map(own).collect()
    }
}

/// The tensors of a call, or their specs: by position, and by name.
pub(crate) struct Given<'a, T> {
    pub positional: &'a [T],
    names: &'a [NamedArgument],
    named: &'a [T],
}

impl<T> Default for Given<'_, T> {
    fn default() -> Self {
        Self { positional: &[], names: &[], named: &[] }
    }
}

impl<T> Clone for Given<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Given<'_, T> {}

impl<'a, T: Presence> Given<'a, T> {
    /// The tensor with this name; `None` if it is not declared, or `None` in this call.
    pub(crate) fn get(&self, name: &str) -> Option<&'a T> {
        let at = self.names.iter().position(|own| own.name == name)?;
        self.named.get(at).filter(|own| own.is_there())
    }
}

impl<T: Clone> Given<'_, T> {
    /// The tensors by name.
    pub(crate) fn named(&self) -> Vec<(String, T)> {
        let all = self.names.iter().zip(self.named);
        all.map(|(own, tensor)| (own.name.clone(), tensor.clone())).collect()
    }
}

/// Something that may stand for `None`.
pub trait Presence {
    /// Whether it does not.
    fn is_there(&self) -> bool;
}

impl Presence for Tensor {
    fn is_there(&self) -> bool {
        self.defined()
    }
}

impl Presence for TensorSpec {
    fn is_there(&self) -> bool {
        !self.is_none()
    }
}
