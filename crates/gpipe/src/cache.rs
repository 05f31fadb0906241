//! What layers keep of earlier positions in a decoding, so that a step computes only the new one
//! (Vaswani et al. 2017, section 3.2.3: a position of the decoder sees those before it, which do
//! not change any more).

use std::collections::BTreeMap;

use tch::Tensor;

use crate::error::LayerError;

/// What one layer keeps for one group of samples: tensors by slot, whose first axis is samples. The
/// framework reorders, repeats and drops samples as the search that decodes does.
#[derive(Debug, Default)]
pub struct Cache {
    past: i64,
    slots: BTreeMap<usize, Tensor>,
}

impl Cache {
    /// As it stands before a step that `past` positions came before. `rows`, if there are any:
    /// which sample each new one goes on from.
    pub(crate) fn before(mut self, past: i64, rows: Option<&Tensor>) -> Result<Self, LayerError> {
        self.past = past;
        if let Some(rows) = rows {
            for slot in self.slots.values_mut() {
                *slot = slot.f_index_select(0, rows)?;
            }
        }
        Ok(self)
    }

    /// Positions that came before; 0 in a decoding's first step.
    pub fn past(&self) -> i64 {
        self.past
    }

    /// Keeps `x` `[samples, ...]` in `slot`, instead of what is there.
    pub fn keep(&mut self, slot: usize, x: &Tensor) {
        self.slots.insert(slot, x.shallow_clone());
    }

    /// What `slot` has.
    ///
    /// # Errors
    /// Nothing.
    pub fn kept(&self, slot: usize) -> Result<Tensor, LayerError> {
        let kept = self.slots.get(&slot).map(Tensor::shallow_clone);
        kept.ok_or_else(|| LayerError::Value(format!("slot {slot} of its cache is empty")))
    }

    /// Appends `x` along `axis` to what `slot` has, keeps that, and gives it; in a decoding's first
    /// step that is `x` itself.
    ///
    /// # Errors
    /// Shapes that do not fit; after the first step nothing to append to.
    pub fn append(&mut self, slot: usize, x: &Tensor, axis: i64) -> Result<Tensor, LayerError> {
        let whole = match self.past {
            0 => x.shallow_clone(),
            _ => Tensor::f_cat(&[&self.kept(slot)?, x], axis)?,
        };
        self.keep(slot, &whole);
        Ok(whole)
    }
}
