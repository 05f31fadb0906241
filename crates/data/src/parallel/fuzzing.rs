//! The implementation of [`crate::fuzzing::pairs`].

use std::path::Path;

use super::{ParallelCorpus, ParallelOptions, Source};
use crate::Result;

/// Implements [`crate::fuzzing::pairs`].
pub(crate) fn pairs(path: &Path) -> Result<usize> {
    let source = Source::Tsv { language: "xx".into(), path: path.into() };
    let options = ParallelOptions { min_pairs: 1, ..ParallelOptions::default() };
    let (_, report) = ParallelCorpus::read(&[source], &options)?;
    Ok(report.kept())
}
