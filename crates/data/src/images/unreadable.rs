//! Handling of images that cannot be read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Image, ImageSet};
use crate::{Error, Result};

/// Maximum number of unreadable images that are remembered.
pub const UNREADABLE_MAX: usize = 1000;

/// Maximum number of images in a row to try in place of an unreadable one.
const TRIES_MAX: usize = 100;

/// What to do about an image that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnUnreadable {
    /// Report its error.
    Stop,
    /// Training takes the next readable image of the set instead. Evaluation leaves the image out.
    Skip,
}

/// The unreadable images met so far, by name. Clones share one list.
#[derive(Debug, Clone, Default)]
pub(super) struct Unreadable(Arc<Mutex<BTreeMap<String, String>>>);

impl Unreadable {
    fn remember(&self, name: String, reason: &Error) {
        // A panic elsewhere cannot leave the list of names inconsistent.
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() < UNREADABLE_MAX {
            list.entry(name).or_insert_with(|| reason.to_string());
        }
    }

    pub(super) fn list(&self) -> Vec<(String, String)> {
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().map(|(name, reason)| (name.clone(), reason.clone())).collect()
    }

    /// Reads an image. Returns `None` if it cannot be read and is to be left out.
    pub(super) fn read(
        &self,
        set: &dyn ImageSet,
        index: usize,
        on_unreadable: OnUnreadable,
    ) -> Result<Option<Image>> {
        match (set.image(index), on_unreadable) {
            (Ok(image), _) => Ok(Some(image)),
            (Err(error), OnUnreadable::Stop) => Err(error),
            (Err(error), OnUnreadable::Skip) => {
                self.remember(set.name(index), &error);
                Ok(None)
            }
        }
    }

    /// Reads an image, or the next readable one, and returns it with its index. The choice depends
    /// only on the files.
    pub(super) fn read_or_next(
        &self,
        set: &dyn ImageSet,
        index: usize,
        on_unreadable: OnUnreadable,
    ) -> Result<(usize, Image)> {
        let tries = set.len().min(TRIES_MAX);
        let mut last = String::new();
        for candidate in (index..set.len()).chain(0..index).take(tries) {
            match (set.image(candidate), on_unreadable) {
                (Ok(image), _) => return Ok((candidate, image)),
                (Err(error), OnUnreadable::Stop) => return Err(error),
                (Err(error), OnUnreadable::Skip) => {
                    last = error.to_string();
                    self.remember(set.name(candidate), &error);
                }
            }
        }
        Err(Error::NothingReadable { tried: tries, name: set.name(index), last })
    }
}
