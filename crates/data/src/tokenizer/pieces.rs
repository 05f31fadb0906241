//! Long texts cut for encoding.
//!
//! The `tokenizers` crate keeps about a hundred bytes per byte of the text that it encodes. A text
//! is therefore encoded in pieces, cut where the tokens do not change: before white space that
//! follows another character. White space after another character always starts a new word, because
//! a word that continues with white space consists of white space only.

/// Length of a piece, in bytes.
pub(super) const PIECE_BYTES: usize = 64 * 1024;

/// The pieces of a text, in order. They concatenate to the text.
pub(super) fn pieces(text: &str, piece_bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, after) = rest.split_at_checked(cut(rest, piece_bytes))?;
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Where the first piece ends: at the last seam within reach, or between two characters if there is
/// none (64 KiB without white space, or of white space only). A cut between characters may cut a
/// word in two, which costs a token and loses nothing.
fn cut(text: &str, piece_bytes: usize) -> usize {
    if text.len() <= piece_bytes {
        return text.len();
    }
    let end = text.floor_char_boundary(piece_bytes.max(char::MAX_LEN_UTF8));
    let (head, tail) = text.split_at_checked(end).unwrap_or((text, ""));
    let mut before_space = tail.starts_with(char::is_whitespace);
    for (at, c) in head.char_indices().rev() {
        if before_space && !c.is_whitespace() {
            return at + c.len_utf8();
        }
        before_space = c.is_whitespace();
    }
    end
}
