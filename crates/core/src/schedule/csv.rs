//! Schedule files of `torch.distributed.pipelining`: one row for each device (PyTorch says rank),
//! one cell for each action.
//!
//! ```text
//! 0F0,0F1,,,0B0,,0B1
//! ,1F0,1F1,1B0,,1B1
//! ```
//!
//! PyTorch writes two dialects, and both are read:
//!
//! - *compute only*: F, B, I and W as in our own files, and empty cells where a device idles.
//!   `(0F3;7B1)OVERLAP_F_B` is a forward and a backward that PyTorch runs in one action. They are
//!   read as the forward, then the backward.
//! - *with communication*: also SEND_F, RECV_F, SEND_B and RECV_B, and UNSHARD, RESHARD and
//!   REDUCE_GRAD of sharded stages. These are left out, because [`crate::lower`] adds what a model
//!   needs. [`Omitted`] counts them.
//!
//! PyTorch's files know no R: whether it re-materializes is not a part of its schedule.

use std::{collections::HashSet, fmt};

use super::{
    ActionLists,
    custom::{Found, Token},
};
use crate::action::{Action, Op};

/// What a file contains that is no compute action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Omitted {
    /// Sends and receives.
    pub messages: usize,
    /// UNSHARD, RESHARD and REDUCE_GRAD.
    pub sharding: usize,
    /// OVERLAP_F_B: their forward and backward run one after the other.
    pub overlapped: usize,
}

impl Omitted {
    /// Whether the file has nothing but compute actions.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Omitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.messages > 0 {
            parts.push(format!(
                "{} sends and receives of the file are left out: gpipe adds its own",
                self.messages
            ));
        }
        if self.sharding > 0 {
            parts.push(format!(
                "{} UNSHARD, RESHARD and REDUCE_GRAD of the file are left out: gpipe does not \
                shard parameters",
                self.sharding
            ));
        }
        if self.overlapped > 0 {
            parts.push(format!(
                "the forward and the backward of {} OVERLAP_F_B run one after the other",
                self.overlapped
            ));
        }
        f.write_str(&parts.join("; "))
    }
}

/// What PyTorch's files name besides compute actions.
const MESSAGES: [&str; 4] = ["SEND_F", "RECV_F", "SEND_B", "RECV_B"];
const SHARDING: [&str; 3] = ["UNSHARD", "RESHARD", "REDUCE_GRAD"];
const OVERLAP: &str = "OVERLAP_F_B";

/// The compute actions of a row, as words.
pub(super) fn tokens<'a>(
    line: usize,
    text: &'a str,
    omitted: &mut Omitted,
) -> Result<Vec<Token<'a>>, Found> {
    let mut found = Vec::new();
    let mut column = 1;
    // Spreadsheets begin a file with a mark of the byte order.
    let text = if line == 1 { text.trim_start_matches('\u{feff}') } else { text };
    for cell in text.split(',') {
        let start = cell.len() - cell.trim_start().len();
        let at = column + cell[..start].chars().count();
        column += cell.chars().count() + 1;
        let word = Token { line, column: at, text: cell.trim() };
        if let Some(inside) = word.text.strip_suffix(OVERLAP) {
            omitted.overlapped += 1;
            found.extend(overlapped(word, inside)?);
        } else if is_one_of(word.text, &MESSAGES) {
            omitted.messages += 1;
        } else if is_one_of(word.text, &SHARDING) {
            omitted.sharding += 1;
        } else if !word.text.is_empty() {
            found.push(word);
        }
    }
    Ok(found)
}

/// The actions inside `(0F3;7B1)`.
fn overlapped<'a>(word: Token<'a>, inside: &'a str) -> Result<Vec<Token<'a>>, Found> {
    let actions = inside.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
    let Some(actions) = actions else {
        let shown: String = word.text.chars().take(40).collect();
        let reason = format!("'{shown}' is not an {OVERLAP}: write it like (0F3;7B1){OVERLAP}");
        return Err((word.line, word.column, reason));
    };
    let mut column = word.column + 1;
    let mut found = Vec::new();
    for action in actions.split(';') {
        found.push(Token { column, text: action.trim(), ..word });
        column += action.chars().count() + 1;
    }
    let kinds: Vec<bool> = found.iter().map(|action| action.text.contains('F')).collect();
    if kinds != [true, false] {
        let reason = format!("an {OVERLAP} is a forward, then a backward, like (0F3;7B1){OVERLAP}");
        return Err((word.line, word.column, reason));
    }
    Ok(found)
}

/// Whether `word` is a stage, one of `names`, and perhaps a micro-batch.
fn is_one_of(word: &str, names: &[&str]) -> bool {
    let rest = word.trim_start_matches(|c: char| c.is_ascii_digit());
    let name = rest.trim_end_matches(|c: char| c.is_ascii_digit());
    rest.len() < word.len() && names.contains(&name)
}

/// Why files of LoopedBFS are refused.
pub(super) const DESCENDS: &str = "the first backward of this stage is not micro-batch 0's: \
    backwards run in ascending micro-batch order, so that gradients are summed in one order; \
    LoopedBFS descends, so use breadth-first:V instead of its file";

/// The device and position of the first weight gradient of a stage, if it is not micro-batch 0's.
pub(super) fn descends(lists: &ActionLists) -> Option<(usize, usize)> {
    let mut begun = HashSet::new();
    lists.iter().enumerate().find_map(|(device, list)| {
        let late = |action: &Action| {
            let completed = action.op.completes();
            completed.is_some_and(|m| begun.insert(action.stage) && m.index() > 0)
        };
        list.iter().position(late).map(|position| (device, position))
    })
}

/// Prints lists in the compute-only dialect, one row for each device. Returns the first R instead,
/// if there is one: PyTorch has no word for it.
///
/// # Errors
/// The re-materialization that cannot be written.
pub fn print(lists: &ActionLists) -> Result<String, Action> {
    let mut text = String::new();
    for list in lists {
        if let Some(&again) = list.iter().find(|action| matches!(action.op, Op::Rematerialize(_))) {
            return Err(again);
        }
        let actions: Vec<String> = list.iter().map(Action::to_string).collect();
        text += &actions.join(",");
        text.push('\n');
    }
    Ok(text)
}
