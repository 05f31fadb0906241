//! What was read of a text, and what was left out.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use gpipe_core::Bytes;

use super::Document;
use crate::Omissions;

/// Maximum number of file extensions that are listed.
const KINDS_MAX: usize = 4;

/// What was read from files and folders, what was left out and why, and what limits cut. Displays
/// as one line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextReport {
    /// Number of files with text.
    pub files: usize,
    /// Bytes of text in those files, before any limit.
    pub bytes: u64,
    /// Number of files per extension, such as `.txt`. The extension is empty if a name has none.
    pub kinds: BTreeMap<String, usize>,
    /// Files, folders and crates that were left out.
    pub left_out: Omissions,
    /// The sides of the split that limits cut.
    pub cut: Vec<Cut>,
    /// The fingerprint of all documents before limits and split: 16 hexadecimal digits. Present
    /// only for sources of crates.
    pub fingerprint: Option<String>,
}

/// A side of the split that limits reduced to a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// `training` or `validation`.
    pub side: &'static str,
    /// Bytes taken.
    pub taken: u64,
    /// Bytes available.
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

    /// Records a cut if less of a side was taken than was available.
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

    /// The most frequent extensions.
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
            let limits: Vec<String> = limits.iter().map(|name| format!("data.{name}")).collect();
            let (taken, of, limits) = (Bytes(*taken), Bytes(*of), limits.join(" and "));
            write!(f, "; took {taken} of {of} of {side} text, as {limits} says")?;
        }
        Ok(())
    }
}
