//! What a layer's `infer` sees besides its inputs: skips and inputs by name, as shapes.

use tch::Kind;

use crate::{error::LayerError, spec::TensorSpec};

/// The context of [`Layer::infer`](crate::Layer::infer): skips, inputs by name, and the dtype of
/// the parameters.
#[derive(Debug)]
pub struct Infer {
    kind: Kind,
    /// The pipeline's inputs by name.
    pub(crate) named: Vec<(String, TensorSpec)>,
    /// Names that layers asked for.
    pub(crate) asked: Vec<String>,
    /// Skips stashed by earlier layers and not yet popped.
    pub(crate) open: Vec<(String, TensorSpec)>,
    pub(crate) stashed: Vec<String>,
    pub(crate) popped: Vec<String>,
}

impl Infer {
    pub(crate) fn new(kind: Kind) -> Self {
        Self::with_open(kind, Vec::new())
    }

    /// A context in which the skips in `open` may be popped.
    pub(crate) fn with_open(kind: Kind, open: Vec<(String, TensorSpec)>) -> Self {
        let (named, asked) = (Vec::new(), Vec::new());
        Self { kind, named, asked, open, stashed: Vec::new(), popped: Vec::new() }
    }

    /// The dtype of all parameters as layers see them. Only buffers stay in float32 (or float64).
    pub fn parameter_kind(&self) -> Kind {
        self.kind
    }

    /// Declares that the layer uses the pipeline's input `name`. Returns its shape and dtype;
    /// `None` if the pipeline has no such input, or it is `None` in this call.
    pub fn named(&mut self, name: &str) -> Option<TensorSpec> {
        let (_, spec) = self.named.iter().find(|(own, _)| own == name)?;
        if self.asked.iter().all(|own| own != name) {
            self.asked.push(name.to_owned());
        }
        (!spec.is_none()).then(|| spec.clone())
    }

    /// Declares that the layer stashes a skip under `name`.
    ///
    /// # Errors
    /// If `name` is stashed already and not yet popped.
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

    /// Declares that the layer pops the skip that an earlier layer stashed under `name`. Returns
    /// the shape and dtype of the skip.
    ///
    /// # Errors
    /// If nothing is stashed under `name`.
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
