//! Readers without their files, for fuzzing: nothing that users need.

use std::path::Path;

use crate::{
    Result,
    images::{Image, decode, glyphs},
    parallel::{self, Catalogue},
};

/// Reads a catalogue's plural rule, and cleans its messages; how many pairs it has.
pub fn catalogue(catalogue: &Catalogue) -> usize {
    parallel::fuzzing::catalogue(catalogue)
}

/// Reads lines of pairs, cleaned and then as they are; how many there are.
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

/// Reads the fonts in a file; why those are left out that are.
pub fn font(bytes: &[u8]) -> Vec<String> {
    glyphs::fuzzed(bytes)
}
