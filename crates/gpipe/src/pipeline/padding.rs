//! Padding of token batches. Sentences differ in length, and a micro-batch only needs the length of
//! its longest sentence.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// The padding values at the ends of rows in int64 inputs and targets `[samples, length]`, or
/// `None` for tensors without padding.
///
/// Padded tensors of one length are cut together. Training and evaluation cut off a column if it is
/// padding in all of these tensors of a micro-batch, so micro-batches may differ in length.
/// Prediction cuts nothing off, because its outputs are joined.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Padding {
    /// For each input: those by position, then those by name, as they were declared.
    pub inputs: Vec<Option<i64>>,
    /// For each target, likewise.
    pub targets: Vec<Option<i64>>,
}

impl Padding {
    /// Cuts off the columns that are only padding. At least one column remains.
    pub(super) fn trim(&self, inputs: &mut [Tensor], targets: &mut [Tensor]) -> Result<()> {
        let (given, own) = ((inputs.len(), targets.len()), (self.inputs.len(), self.targets.len()));
        if given != own {
            return Err(Error::Input(format!(
                "padding is set for {} inputs and {} targets, the mini-batch has {} and {}: name \
                what pads each of them, or None",
                own.0, own.1, given.0, given.1
            )));
        }
        let inputs = inputs.iter_mut().zip(&self.inputs);
        let padded = inputs.chain(targets.iter_mut().zip(&self.targets));
        let mut padded: Vec<(&mut Tensor, i64)> =
            padded.filter_map(|(tensor, pad)| Some((tensor, (*pad)?))).collect();
        padded.retain(|(tensor, _)| tensor.defined());
        let mut lengths: Vec<(i64, i64)> = Vec::new();
        for (tensor, pad) in &padded {
            let (length, used) = (length(tensor)?, used(tensor, *pad)?);
            match lengths.iter_mut().find(|(other, _)| *other == length) {
                Some((_, most)) => *most = used.max(*most),
                None => lengths.push((length, used)),
            }
        }
        for (tensor, _) in &mut padded {
            let length = length(tensor)?;
            let used = lengths.iter().find(|(other, _)| *other == length);
            if let Some(&(_, used)) = used.filter(|(_, used)| *used < length) {
                **tensor = tensor.f_narrow(1, 0, used.max(1))?;
            }
        }
        Ok(())
    }
}

fn length(tensor: &Tensor) -> Result<i64> {
    match (tensor.size()[..].len(), tensor.size().get(1), tensor.kind()) {
        (2, Some(&length), Kind::Int64) => Ok(length),
        _ => Err(Error::Input(format!(
            "padding is set for a tensor {:?} of {:?}: it must be int64 [samples, length]",
            tensor.size(),
            tensor.kind()
        ))),
    }
}

/// Number of columns up to the last one that is not only padding.
fn used(tensor: &Tensor, pad: i64) -> Result<i64> {
    let any = tensor.f_ne(pad)?.f_any_dim(0, false)?;
    let any: Vec<bool> = Vec::try_from(any)?;
    Ok(any.iter().rposition(|&any| any).map_or(0, |last| last as i64 + 1))
}
