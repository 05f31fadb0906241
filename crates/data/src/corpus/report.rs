//! What was read of a text, and what was not.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use gpipe_core::Bytes;

use super::Document;
use crate::Omissions;

/// Ends of file names that are listed.
const KINDS_MAX: usize = 4;

/// What was read of files and folders, what was left out and why, and what limits cut. It displays
/// as one line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextReport {
    /// Files with text.
    pub files: usize,
    /// Bytes of text in them, before any limit.
    pub bytes: u64,
    /// Files by the end of their names, such as `.txt`; an empty end where a name has none.
    pub kinds: BTreeMap<String, usize>,
    /// Files, folders and crates that were left out.
    pub left_out: Omissions,
    /// Sides of the split that limits cut.
    pub cut: Vec<Cut>,
    /// The fingerprint of all documents before limits and split: 16 hexadecimal digits. Only of
    /// crates' sources.
    pub fingerprint: Option<String>,
}

/// A side of the split of which limits took only a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// `training` or `validation`.
    pub side: &'static str,
    /// Bytes that were taken.
    pub taken: u64,
    /// Bytes that there were.
    pub of: u64,
    /// The limits that were set, by name.
    pub limits: Vec<&'static str>,
}

impl TextReport {
    pub(super) fn read(&mut self, document: &Document) {
        self.files += 1;
        self.bytes += document.text.len() as u64;
        let end = Path::new(&document.name).extension();
        let end = end.map(|end| format!(".{}", end.to_string_lossy().to_lowercase()));
        *self.kinds.entry(end.unwrap_or_default()).or_default() += 1;
    }

    /// Compares what was taken of a side with what there was.
    pub(super) fn cut(
        &mut self,
        side: &'static str,
        (taken, of): (u64, u64),
        limits: &[(&'static str, Option<u64>)],
    ) {
        if taken < of {
            let set = limits.iter().filter(|(_, limit)| limit.is_some());
            let limits = set.map(|(name, _)| *name).collect();
            self.cut.push(Cut { side, taken, of, limits });
        }
    }

    /// The most frequent ends of names.
    fn kinds(&self) -> String {
        let mut kinds: Vec<(&String, &usize)> = self.kinds.iter().collect();
        kinds.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        let shown = kinds.iter().take(KINDS_MAX).map(|(end, count)| match end.as_str() {
            "" => format!("{count} without an extension"),
            end => format!("{count} {end}"),
        });
        let mut shown: Vec<String> = shown.collect();
        let others: usize = kinds.iter().skip(KINDS_MAX).map(|(_, count)| **count).sum();
        if others > 0 {
            shown.push(format!("{others} others"));
        }
        shown.join(", ")
    }
}

impl fmt::Display for TextReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = if self.files == 1 { "file" } else { "files" };
        write!(f, "read {} {files} ({}), {}", self.files, self.kinds(), Bytes(self.bytes))?;
        if !self.left_out.is_empty() {
            write!(f, "; left out {}", self.left_out)?;
        }
        for Cut { side, taken, of, limits } in &self.cut {
            let (taken, of, limits) = (Bytes(*taken), Bytes(*of), limits.join(" and "));
            write!(f, "; took {taken} of {of} of {side} text, as {limits} says")?;
        }
        Ok(())
    }
}
