//! What layers keep of earlier positions while decoding, so that a step computes only the new
//! positions. A decoder position sees only earlier positions, which no longer change (Vaswani et
//! al. 2017, section 3.2.3).

use std::collections::BTreeMap;

use tch::Tensor;

use crate::error::LayerError;

/// The tensors that one layer keeps for one group of samples, by slot. The first axis of each
/// tensor is samples. The framework reorders, repeats and drops samples as the decoding search
/// does.
#[derive(Debug, Default)]
pub struct Cache {
    past: i64,
    slots: BTreeMap<usize, Tensor>,
}

impl Cache {
    /// Prepares the cache for a step that `past` positions precede. `rows` holds, for each new
    /// sample, the index of the sample that it continues; without it, the samples stay as they are.
    pub(crate) fn before(mut self, past: i64, rows: Option<&Tensor>) -> Result<Self, LayerError> {
        self.past = past;
        if let Some(rows) = rows {
            for slot in self.slots.values_mut() {
                *slot = slot.f_index_select(0, rows)?;
            }
        }
        Ok(self)
    }

    /// Number of earlier positions; 0 in the first step of a decoding.
    pub fn past(&self) -> i64 {
        self.past
    }

    /// Stores `x` `[samples, ...]` in `slot`, replacing the tensor there.
    pub fn keep(&mut self, slot: usize, x: &Tensor) {
        self.slots.insert(slot, x.shallow_clone());
    }

    /// The tensor in `slot`.
    ///
    /// # Errors
    /// If the slot is empty.
    pub fn kept(&self, slot: usize) -> Result<Tensor, LayerError> {
        let kept = self.slots.get(&slot).map(Tensor::shallow_clone);
        kept.ok_or_else(|| LayerError::Value(format!("slot {slot} of its cache is empty")))
    }

    /// Appends `x` along `axis` to the tensor in `slot`, stores the result and returns it. In the
    /// first step of a decoding the result is `x` itself.
    ///
    /// # Errors
    /// If the shapes do not fit, or if the slot is empty after the first step.
    pub fn append(&mut self, slot: usize, x: &Tensor, axis: i64) -> Result<Tensor, LayerError> {
        let whole = match self.past {
            0 => x.shallow_clone(),
            _ => Tensor::f_cat(&[&self.kept(slot)?, x], axis)?,
        };
        self.keep(slot, &whole);
        Ok(whole)
    }
}
