//! Several documents in one row, which do not attend to each other.

use tch::{Kind, Tensor};

use super::heads::latest;
use crate::{error::LayerError, layer::Infer, spec::TensorSpec};

/// The name of the pipeline's input that gives the beginnings of documents: int64 [samples,
/// positions].
///
/// Each value is the position in the row at which the document of that position begins. Padding has
/// -1, and no part in the balance of experts. A position attends only to positions of the same
/// document, and position numbers restart at 0 with each document, as if each document had a
/// separate row (Krell et al. 2021, section 3.2). Without this input, or if it is `None`, a row is
/// one document.
pub const DOCUMENTS: &str = "documents";

/// Declares that a layer uses [`DOCUMENTS`]. Returns whether the pipeline has this input.
///
/// `input`: the spec of the layer's input, [samples, positions, ...].
///
/// # Errors
/// [`LayerError::Shape`] if the input is not int64 [samples, positions].
pub(super) fn declare(ctx: &mut Infer, input: &TensorSpec) -> Result<bool, LayerError> {
    let Some(found) = ctx.named(DOCUMENTS) else { return Ok(false) };
    let wanted = TensorSpec::new(input.shape.get(..2).unwrap_or_default(), Kind::Int64);
    match found == wanted {
        true => Ok(true),
        false => Err(LayerError::Shape(format!(
            "the input '{DOCUMENTS}' must be {wanted} with {input}, it is {found}"
        ))),
    }
}

/// The attention mask of `documents`, int64 [samples, positions]: bool [samples, 1, queries, keys].
///
/// A query attends to the keys of its document up to its position, and at most to the last `window`
/// of them.
pub(super) fn visible(documents: &Tensor, window: Option<i64>) -> Result<Tensor, LayerError> {
    let (_, length) = documents.size2()?;
    let row = documents.f_unsqueeze(1)?;
    let same = row.f_unsqueeze(-1)?.f_eq_tensor(&row.f_unsqueeze(-2)?)?;
    let window = window.unwrap_or(length).min(length);
    Ok(same.f_logical_and(&latest(length, window, documents.device())?)?)
}
