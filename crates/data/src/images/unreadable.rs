//! Images that cannot be read: what to do, and which they were.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Image, ImageSet};
use crate::{Error, Result};

/// No more unreadable images than this are remembered.
pub const UNREADABLE_MAX: usize = 1000;

/// How many images in a row are tried in place of one that cannot be read.
const TRIES_MAX: usize = 100;

/// What to do about an image that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnUnreadable {
    /// Report its error.
    Stop,
    /// In training take the next readable one of the set in its place; in evaluation leave it out.
    Skip,
}

/// The unreadable images met so far, by name. Clones share one list.
#[derive(Debug, Clone, Default)]
pub(super) struct Unreadable(Arc<Mutex<BTreeMap<String, String>>>);

impl Unreadable {
    fn remember(&self, name: String, reason: &Error) {
        // A list of names is whole whatever panicked beside it.
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() < UNREADABLE_MAX {
            list.entry(name).or_insert_with(|| reason.to_string());
        }
    }

    pub(super) fn list(&self) -> Vec<(String, String)> {
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().map(|(name, reason)| (name.clone(), reason.clone())).collect()
    }

    /// An image, or none where it is to be left out.
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

    /// An image, or the next readable one, with its number. Which one is a function of the files
    /// alone.
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
