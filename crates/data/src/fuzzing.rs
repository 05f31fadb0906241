//! Readers exposed for fuzzing only. Users do not need them.

use std::path::Path;

use crate::{
    Result,
    images::{Image, decode},
    parallel,
};

/// Reads a TSV file of pairs and returns the number of pairs kept.
///
/// # Errors
/// Fails as [`crate::parallel::ParallelCorpus::read`] does.
pub fn pairs(path: &Path) -> Result<usize> {
    parallel::fuzzing::pairs(path)
}

/// Decodes an image.
///
/// # Errors
/// Returns what is wrong with the image.
pub fn image(bytes: &[u8]) -> std::result::Result<Image, String> {
    decode::guarded(bytes)
}
