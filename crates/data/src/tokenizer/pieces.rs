//! Long texts cut for encoding.
//!
//! The dependency keeps about a hundred bytes per byte of the text that it encodes. A text is
//! therefore encoded in pieces, cut where the tokens come out the same: before white space that
//! follows something else. A word may begin with white space, but goes on with it only if it is
//! nothing else, so each such place is where a word begins.

/// Length of a piece.
pub(super) const PIECE_BYTES: usize = 64 * 1024;

/// The pieces of a text, in order. Together they are the text.
pub(super) fn pieces(text: &str, piece_bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, after) = rest.split_at_checked(cut(rest, piece_bytes))?;
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Where the first piece ends: at the last seam in reach. Where there is none (64 KiB without white
/// space, or of nothing else) between two characters: that may cut a word in two, which costs a
/// token and loses nothing.
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
