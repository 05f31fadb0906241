//! What a reader left out: the reasons, the counts, and the first few names.
//!
//! Every reader of this crate that may skip something keeps such a tally, so that nothing is left
//! out silently.

use std::collections::BTreeMap;
use std::fmt;

/// Number of names that are kept for each reason.
const NAMES_MAX: usize = 3;

/// What was left out, by reason. Displays as
/// `3 binary files (a.png, b.zip, c.bin), 1 empty file (d.txt)`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Omissions(BTreeMap<Reason, Tally>);

/// The name of a kind in the singular and the plural: `binary file`, `binary files`.
type Reason = (&'static str, &'static str);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Tally {
    count: usize,
    first: Vec<String>,
}

impl Omissions {
    /// Counts one thing. `reason` names its kind in the singular and the plural.
    pub(crate) fn add(&mut self, reason: Reason, name: impl Into<String>) {
        let tally = self.0.entry(reason).or_default();
        tally.count += 1;
        if tally.first.len() < NAMES_MAX {
            tally.first.push(name.into());
        }
    }

    /// Whether nothing was left out.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What was left out, in brackets after a space; empty if nothing was.
    pub(crate) fn in_brackets(&self) -> String {
        if self.is_empty() { String::new() } else { format!(" (left out: {self})") }
    }

    /// Number of things that were left out, for all reasons.
    pub fn count(&self) -> usize {
        self.0.values().map(|tally| tally.count).sum()
    }
}

impl fmt::Display for Omissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, ((one, several), Tally { count, first })) in self.0.iter().enumerate() {
            let what = if *count == 1 { one } else { several };
            let before = if number == 0 { "" } else { ", " };
            let more = if *count > first.len() { ", ..." } else { "" };
            write!(f, "{before}{count} {what} ({}{more})", first.join(", "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_the_first_few_are_named_and_all_are_counted() {
        let mut left_out = Omissions::default();
        assert!(left_out.is_empty());
        left_out.add(("odd file", "odd files"), "z");
        for name in ["a", "b", "c", "d"] {
            left_out.add(("binary file", "binary files"), name);
        }
        assert_eq!(left_out.to_string(), "4 binary files (a, b, c, ...), 1 odd file (z)");
        assert_eq!(left_out.count(), 5);
    }
}
