//! The lines of launched processes, as the launcher prints them: each with the rank in front, and
//! without those that repeat what another rank said.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Read},
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

/// Maximum length of a line that is printed at once.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// The beginning of a line that reports an error or a warning.
const COMPLAINT: &[u8] = b"gpipe: ";
/// Maximum number of different complaints that are compared.
const COMPLAINTS_MAX: usize = 1000;

/// The complaints of processes before a run begins, with the rank that printed each first. All
/// processes refuse the same wrong setting, and once is enough. Later, each says how it ended.
pub(super) struct Said {
    first: HashMap<String, usize>,
    /// The file that is no longer empty when a run has begun.
    note: PathBuf,
}

impl Said {
    /// No complaints yet. `note` is the file that is no longer empty when a run has begun.
    pub(super) fn new(note: PathBuf) -> Self {
        Self { first: HashMap::new(), note }
    }

    /// Whether `line` of `rank` repeats a complaint of another rank.
    fn repeats(&mut self, rank: usize, line: &[u8]) -> bool {
        let Some(text) = line.strip_prefix(COMPLAINT) else { return false };
        // A process that hears of another's error names its rank.
        let text = std::str::from_utf8(text).unwrap_or_default();
        let other = text.strip_prefix("rank ").and_then(|rest| rest.split_once(": "));
        let text = match other {
            Some((number, said)) if number.bytes().all(|c| c.is_ascii_digit()) => said,
            _ => text,
        };
        let has_begun = std::fs::metadata(&self.note).is_ok_and(|note| note.len() > 0);
        if has_begun || text.is_empty() || self.first.len() >= COMPLAINTS_MAX {
            return false;
        }
        *self.first.entry(text.to_owned()).or_insert(rank) != rank
    }
}

/// Gives the lines of a process to `print`, each with the rank in front, without those that repeat
/// what another rank `said`.
pub(super) fn prefixed(rank: usize, from: impl Read, print: fn(&[u8]), said: &Mutex<Said>) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        match from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        if said.lock().unwrap_or_else(PoisonError::into_inner).repeats(rank, &line) {
            continue;
        }
        let mut all = format!("[{rank}] ").into_bytes();
        all.append(&mut line);
        // If nobody reads the output, the process continues.
        print(&all);
    }
}
