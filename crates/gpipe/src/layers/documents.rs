//! Several documents in one row, which do not see each other.

use tch::{Kind, Tensor};

use super::heads::latest;
use crate::{error::LayerError, layer::Infer, spec::TensorSpec};

/// Name of the pipeline's input that says where documents begin: int64 [samples, positions]. For
/// each position, the position in its row at which its document begins; any other number, such as
/// -1, for positions that hold nothing.
///
/// A position attends only to its own document, and positions count from the document's beginning,
/// as if each document had a row of its own (Krell et al. 2021, section 3.2). Without this input,
/// or where it is `None`, a row is one document.
pub const DOCUMENTS: &str = "documents";

/// Declares that a layer uses [`DOCUMENTS`], and checks its shape for an input [samples, positions,
/// ...]. Returns whether a row may have several documents.
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

/// For each position, the positions that it sees: those of its document up to itself, at most
/// `window` of them. Bool [samples, 1, positions, positions].
pub(super) fn visible(documents: &Tensor, window: Option<i64>) -> Result<Tensor, LayerError> {
    let (_, length) = documents.size2()?;
    let row = documents.f_unsqueeze(1)?;
    let same = row.f_unsqueeze(-1)?.f_eq_tensor(&row.f_unsqueeze(-2)?)?;
    let window = window.unwrap_or(length).min(length);
    Ok(same.f_logical_and(&latest(length, window, documents.device())?)?)
}
