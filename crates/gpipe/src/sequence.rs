//! A network as a sequence of named layers, and its analysis before anything is built.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use gpipe_core::LayerId;
use tch::Kind;

use crate::{
    arguments::Arguments,
    error::{Error, LayerError},
    guard::catching,
    layer::{Infer, Init, Layer, ParameterSpec},
    optim::name_matches,
    spec::TensorSpec,
};

/// A layer in a sequence.
#[derive(Clone)]
pub(crate) struct NamedLayer {
    pub name: String,
    pub layer: Arc<dyn Layer>,
    pub parameters: Vec<ParameterSpec>,
}

/// Layers in order. Building a sequence allocates nothing: each stage later creates only its own
/// parameters.
#[derive(Clone, Default)]
pub struct Sequence {
    pub(crate) layers: Vec<NamedLayer>,
    /// What a pipeline's builder was told of the inputs.
    pub(crate) inputs: Arguments,
    /// Freeze patterns that matched no parameter.
    unmatched: Vec<String>,
}

/// A long skip: one layer stashes a value, a later layer pops it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skip {
    pub name: String,
    pub stash: LayerId,
    pub pop: LayerId,
    /// Shape and dtype of the value.
    pub spec: TensorSpec,
}

/// A weight that several layers use.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TieGroup {
    pub name: String,
    /// Parameter name at the first use; its initial value is `init`.
    pub parameter: String,
    pub init: Init,
    /// Each use: the layer, and the parameter's position in it. In layer order.
    pub uses: Vec<(LayerId, usize)>,
}

/// The result of shape inference over a sequence.
pub(crate) struct Inferred {
    /// Inputs of each layer; the last entry holds the outputs of the sequence.
    pub specs: Vec<Vec<TensorSpec>>,
    pub skips: Vec<Skip>,
    /// Names of the inputs that layers ask for.
    pub asked: Vec<String>,
}

impl Sequence {
    /// An empty sequence.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a layer. Names must be unique; [`crate::PipelineBuilder::build`] rejects duplicates.
    #[must_use]
    pub fn push(mut self, name: impl Into<String>, layer: impl Layer) -> Self {
        let parameters = layer.parameters();
        self.layers.push(NamedLayer { name: name.into(), layer: Arc::new(layer), parameters });
        self
    }

    /// Appends a layer named by its position and kind, such as `3.linear`.
    #[must_use]
    pub fn layer(self, layer: impl Layer) -> Self {
        let name = format!("{}.{}", self.layers.len(), layer.kind());
        self.push(name, layer)
    }

    /// The sequence without its last layer, if that one `is` it.
    pub(crate) fn without_last(mut self, is: impl FnOnce(&dyn Layer) -> bool) -> Self {
        self.layers.pop_if(|last| is(last.layer.as_ref()));
        self
    }

    /// Freezes every parameter whose full name (`layer.parameter`) matches one of `patterns`. In a
    /// pattern `*` stands for any text.
    ///
    /// A frozen parameter is not trained and has no gradient and no optimizer state. No gradient is
    /// computed below the lowest trained parameter. Running statistics of batch norms are still
    /// updated.
    ///
    /// A pattern that matches no parameter of the layers so far is an error of
    /// [`crate::PipelineBuilder::build`].
    #[must_use]
    pub fn freeze<P: Into<String>>(self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.freeze_where(patterns, true)
    }

    /// Freezes every parameter whose full name matches none of `patterns`; the opposite of
    /// [`Sequence::freeze`].
    #[must_use]
    pub fn freeze_except<P: Into<String>>(self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.freeze_where(patterns, false)
    }

    fn freeze_where<P: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = P>,
        matching: bool,
    ) -> Self {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        let mut unmatched = vec![true; patterns.len()];
        for layer in &mut self.layers {
            for parameter in &mut layer.parameters {
                let name = format!("{}.{}", layer.name, parameter.name);
                let mut matches = false;
                for (pattern, unmatched) in patterns.iter().zip(&mut unmatched) {
                    let own = name_matches(pattern, &name);
                    *unmatched &= !own;
                    matches |= own;
                }
                parameter.trainable &= matches != matching;
            }
        }
        let missed = patterns.into_iter().zip(unmatched).filter(|(_, unmatched)| *unmatched);
        self.unmatched.extend(missed.map(|(pattern, _)| pattern));
        self
    }

    /// Returns an error for the first pattern that matched no parameter.
    pub(crate) fn check_frozen(&self) -> Result<(), Error> {
        let Some(pattern) = self.unmatched.first() else { return Ok(()) };
        let names = self.layers.iter().flat_map(|layer| {
            layer.parameters.iter().map(|own| format!("{}.{}", layer.name, own.name))
        });
        let some: Vec<String> = names.take(4).collect();
        Err(Error::Setting(format!(
            "no parameter matches the pattern '{pattern}' of freeze: names are such as {}",
            some.join(", ")
        )))
    }

    /// Number of layers (L).
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether the sequence has no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Layer names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.layers.iter().map(|layer| layer.name.as_str())
    }

    /// The parameters in layer order: full names and shapes. A tied weight occurs once, under its
    /// first use.
    pub fn parameters(&self) -> Vec<(String, Vec<i64>)> {
        let mut seen = HashSet::new();
        let mut all = Vec::new();
        for layer in &self.layers {
            for own in &layer.parameters {
                if own.tie.as_ref().is_none_or(|tie| seen.insert(tie.clone())) {
                    all.push((format!("{}.{}", layer.name, own.name), own.shape.clone()));
                }
            }
        }
        all
    }

    /// Number of parameter elements. Tied weights count once; running statistics do not count.
    pub fn parameter_count(&self) -> u64 {
        let mut seen = HashSet::new();
        let parameters = self.layers.iter().flat_map(|layer| &layer.parameters);
        parameters
            .filter(|parameter| !parameter.buffer)
            .filter(|parameter| parameter.tie.as_ref().is_none_or(|tie| seen.insert(tie.clone())))
            .map(ParameterSpec::elements)
            .fold(0, u64::saturating_add)
    }

    /// The cost of each layer's forward in floating-point operations, at least 1 each. The default
    /// cut balances stages by it.
    ///
    /// The costs hold for these inputs and this parameter dtype. A layer without an estimate costs
    /// one operation per element that it reads or writes.
    ///
    /// # Errors
    /// If the shapes do not fit. The error names the layer.
    pub fn costs(&self, inputs: &[TensorSpec], kind: Kind) -> Result<Vec<u64>, Error> {
        let inferred = self.infer(inputs, kind)?;
        let pairs = self.layers.iter().zip(inferred.specs.windows(2));
        Ok(pairs
            .map(|(layer, specs)| {
                let touched = || specs.iter().flatten().map(TensorSpec::elements).sum();
                layer.layer.flops(&specs[0]).unwrap_or_else(touched).max(1.0) as u64
            })
            .collect())
    }

    pub(crate) fn error(&self, index: usize, reason: impl ToString) -> Error {
        let layer = &self.layers[index];
        Error::Model {
            layer: layer.name.clone(),
            kind: layer.layer.kind().to_owned(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn infer(&self, inputs: &[TensorSpec], kind: Kind) -> Result<Inferred, Error> {
        let given = self.inputs.split(inputs);
        let mut specs = vec![given.positional.to_vec()];
        let mut ctx = Infer::new(kind);
        ctx.named = given.named();
        let mut stashes: HashMap<String, (LayerId, TensorSpec)> = HashMap::new();
        let mut skips = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let id = LayerId::from_index(index);
            let outputs = catching(|| layer.layer.infer(&mut ctx, &specs[index]));
            let outputs = outputs.map_err(|error| self.error(index, error))?;
            if outputs.is_empty() {
                return Err(self.error(index, LayerError::Shape("it has no output".into())));
            }
            if let Some(spec) = outputs.iter().find(|spec| !spec.is_supported()) {
                let reason =
                    format!("its output {spec} is of a dtype that gradients do not pass here");
                return Err(self.error(index, reason));
            }
            for name in ctx.popped.drain(..) {
                match stashes.remove(&name) {
                    Some((stash, spec)) if stash != id => {
                        skips.push(Skip { name, stash, pop: id, spec });
                    }
                    _ => {
                        let reason = format!("it stashes and pops the skip '{name}' itself");
                        return Err(self.error(index, reason));
                    }
                }
            }
            for name in std::mem::take(&mut ctx.stashed) {
                let open = ctx.open.iter().find(|(open, _)| *open == name);
                stashes.extend(open.map(|(_, spec)| (name, (id, spec.clone()))));
            }
            specs.push(outputs);
        }
        if let Some((name, (stash, _))) = stashes.into_iter().min_by(|a, b| a.0.cmp(&b.0)) {
            let reason =
                format!("no later layer pops its skip '{name}': pop it, or do not stash it");
            return Err(self.error(stash.index(), reason));
        }
        skips.sort_by_key(|skip| (skip.stash, skip.pop));
        Ok(Inferred { specs, skips, asked: ctx.asked })
    }

    /// Checks names and parameters, and collects the ties.
    pub(crate) fn ties(&self) -> Result<Vec<TieGroup>, Error> {
        let mut names: HashMap<&str, usize> = HashMap::new();
        let mut groups: Vec<TieGroup> = Vec::new();
        let mut full_names = HashSet::new();
        for (index, layer) in self.layers.iter().enumerate() {
            if let Some(first) = names.insert(&layer.name, index) {
                let reason = format!("layer {first} has the same name: give each layer its own");
                return Err(self.error(index, reason));
            }
            let mut own = HashSet::new();
            for (position, parameter) in layer.parameters.iter().enumerate() {
                if !own.insert(&parameter.name) {
                    let reason = format!("it has two parameters named '{}'", parameter.name);
                    return Err(self.error(index, reason));
                }
                let full = format!("{}.{}", layer.name, parameter.name);
                if let Some(full) = full_names.replace(full) {
                    let reason =
                        format!("another layer has a parameter with the full name '{full}'");
                    return Err(self.error(index, reason));
                }
                if parameter.shape.iter().any(|&size| size <= 0) {
                    let (name, shape) = (&parameter.name, &parameter.shape);
                    let reason =
                        format!("parameter '{name}' has shape {shape:?}: sizes start at 1");
                    return Err(self.error(index, reason));
                }
                let Some(tie) = &parameter.tie else { continue };
                if parameter.buffer {
                    let name = &parameter.name;
                    let reason = format!(
                        "the running statistic '{name}' is tied: it would be counted twice"
                    );
                    return Err(self.error(index, reason));
                }
                let place = (LayerId::from_index(index), position);
                match groups.iter_mut().find(|group| group.name == *tie) {
                    None => groups.push(TieGroup {
                        name: tie.clone(),
                        parameter: parameter.name.clone(),
                        init: parameter.init,
                        uses: vec![place],
                    }),
                    Some(group) => {
                        let (owner, slot) = group.uses[0];
                        let first = &self.layers[owner.index()];
                        let other = &first.parameters[slot];
                        if other.shape != parameter.shape || other.trainable != parameter.trainable
                        {
                            let reason = format!(
                                "parameter '{}' {:?} is tied to '{}.{}' {:?}: tied parameters \
                                need one shape, and are trained or frozen together",
                                parameter.name,
                                parameter.shape,
                                first.name,
                                other.name,
                                other.shape
                            );
                            return Err(self.error(index, reason));
                        }
                        group.uses.push(place);
                    }
                }
            }
        }
        Ok(groups)
    }

    /// For each layer, whether anything before it is trained. Only then is the gradient of its
    /// input needed.
    pub(crate) fn trained_before(&self) -> Vec<bool> {
        let mut any = false;
        let mut before = Vec::with_capacity(self.layers.len() + 1);
        for layer in &self.layers {
            before.push(any);
            any |= layer.parameters.iter().any(|parameter| parameter.trainable);
        }
        before.push(any);
        before
    }
}
