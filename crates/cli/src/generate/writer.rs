//! Where the new text goes: one text as it is made, several when they are ready.

use std::{
    io::{ErrorKind, IsTerminal, Write},
    path::Path,
};

use serde_json::json;

use super::texts::{End, Text};
use crate::{CliError, files::io};

/// Maximum number of characters of a prompt in a heading.
const HEADING_MAX: usize = 60;

/// How the texts are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writer {
    /// One text, piece by piece, and nothing else.
    Stream,
    /// Each text below its prompt, in order.
    Headings,
    /// Each text as a line of JSON, in order.
    Json,
}

impl Writer {
    /// Prints new text, if it is printed piece by piece. Returns false if the reader is gone.
    pub fn piece(self, piece: &str) -> Result<bool, CliError> {
        match self {
            Self::Stream => show(piece),
            Self::Headings | Self::Json => Ok(true),
        }
    }

    /// Prints a text that has ended.
    pub fn whole(self, number: usize, text: &Text) -> Result<bool, CliError> {
        match self {
            // In a terminal the line is ended; elsewhere the output is exactly the text.
            Self::Stream if std::io::stdout().is_terminal() => show("\n"),
            Self::Stream => Ok(true),
            Self::Headings => {
                let line = text.prompt.lines().next_back().unwrap_or_default();
                let more = line.chars().count().saturating_sub(HEADING_MAX);
                let shown: String = line.chars().skip(more).collect();
                let cut = if more > 0 { "..." } else { "" };
                let blank = if number == 0 { "" } else { "\n" };
                show(&format!("{blank}==> {}: {cut}{shown} <==\n{}\n", number + 1, text.made))
            }
            Self::Json => {
                let end = match text.end {
                    Some(End::Token) => "end",
                    Some(End::String) => "stop",
                    Some(End::Length) | None => "length",
                };
                let line = json!({
                    "prompt": text.prompt, "text": text.made, "tokens": text.new_tokens(),
                    "end": end
                });
                show(&format!("{line}\n"))
            }
        }
    }
}

/// Prints text at once. Returns false if the reader is gone.
pub(super) fn show(text: &str) -> Result<bool, CliError> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false), // the reader has enough
        Err(error) => Err(io(Path::new("the standard output"))(error)),
    }
}
