//! The two ends of a long skip. The value goes directly from the stash's stage to the pop's stage
//! (a "portal" in torchgpipe), not through the stages between.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, Layer, only},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Stashes its input for the [`Pop`] of the same name, and passes it on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stash {
    /// The skip's name.
    pub name: String,
}

/// Adds the value from the [`Stash`] of the same name to its input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pop {
    /// The skip's name.
    pub name: String,
}

impl Stash {
    /// A stash named `name`.
    pub fn new(name: &str) -> Self {
        Self { name: name.into() }
    }
}

impl Pop {
    /// A pop of the stash named `name`.
    pub fn new(name: &str) -> Self {
        Self { name: name.into() }
    }
}

impl Layer for Stash {
    fn kind(&self) -> &'static str {
        "stash"
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let input = only(inputs)?;
        ctx.stash(&self.name, input.clone())?;
        Ok(vec![input.clone()])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let x = only(inputs)?;
        ctx.stash(&self.name, x);
        Ok(vec![x.shallow_clone()])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let x = *inputs.first()?;
        tape.stash(&self.name, x);
        Some(vec![x])
    }
}

impl Layer for Pop {
    fn kind(&self) -> &'static str {
        "pop"
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (input, skip) = (only(inputs)?, ctx.pop(&self.name)?);
        if *input != skip {
            let name = &self.name;
            let reason =
                format!("it adds the skip '{name}' {skip} to {input}: they need one shape");
            return Err(LayerError::Shape(reason));
        }
        Ok(vec![input.clone()])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let skip = ctx.pop(&self.name)?;
        Ok(vec![only(inputs)?.f_add(&skip)?])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let skip = tape.pop(&self.name)?;
        Some(vec![tape.add(*inputs.first()?, skip)])
    }
}
