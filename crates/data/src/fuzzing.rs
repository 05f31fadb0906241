//! Readers without their files, for fuzzing: nothing that users need.

use std::path::Path;

use crate::{
    Result,
    images::{Image, decode},
    parallel,
};

/// Reads lines of pairs; how many there are.
///
/// # Errors
/// As of a corpus.
pub fn pairs(path: &Path) -> Result<usize> {
    parallel::fuzzing::pairs(path)
}

/// Decodes an image.
///
/// # Errors
/// What is wrong with it.
pub fn image(bytes: &[u8]) -> std::result::Result<Image, String> {
    decode::guarded(bytes)
}
