//! Directives and tags in a text: what a translation must hold as it is.
//!
//! Directives are those of C (`%s`, `%1$d`, `%-5.2f`, `%%`), Python (`%(name)s`, `{0}`), Qt (`%1`), times (`%H`) and shells
//! (`$name`, `${name}`). Not `% d`: it is rare, and "50 % der Dateien" is not. Tags are `<...>` that begin with a letter or a
//! slash, which includes addresses.

use super::Reason;
use crate::hash;

/// No name in braces and no tag is longer than this, in bytes.
const NAME_BYTES_MAX: usize = 64;
const TAG_BYTES_MAX: usize = 300;

/// What a directive or a tag begins with.
const BEGINNINGS: [char; 4] = ['%', '{', '$', '<'];

/// A part of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece<'a> {
    Text(&'a str),
    Directive(&'a str),
    Tag(&'a str),
}

/// The parts of a text, in order.
struct Pieces<'a>(&'a str);

impl<'a> Iterator for Pieces<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        let text = self.0;
        let mut end = 0;
        for (at, _) in text.match_indices(BEGINNINGS) {
            let special = text.get(at..).and_then(special);
            match special {
                Some(piece) if at == 0 => {
                    let (Piece::Text(part) | Piece::Directive(part) | Piece::Tag(part)) = piece;
                    self.0 = text.get(part.len()..).unwrap_or_default();
                    return Some(piece);
                }
                Some(_) => {
                    end = at;
                    break;
                }
                None => {}
            }
        }
        let end = if end == 0 { text.len() } else { end };
        let (part, rest) = text.split_at_checked(end)?;
        self.0 = rest;
        (!part.is_empty()).then_some(Piece::Text(part))
    }
}

/// The directive or tag that a text begins with.
fn special(text: &str) -> Option<Piece<'_>> {
    let cut = |length: Option<usize>| text.get(..length?);
    match text.bytes().next()? {
        b'%' => cut(percent(text.as_bytes())).map(Piece::Directive),
        b'{' => cut(braces(text, 0)).map(Piece::Directive),
        b'$' => cut(dollar(text)).map(Piece::Directive),
        b'<' => cut(tag(text)).map(Piece::Tag),
        _ => None,
    }
}

/// Length of a directive that begins with a percent sign.
fn percent(bytes: &[u8]) -> Option<usize> {
    let mut cursor = Cursor { bytes, at: 1 };
    if cursor.eat(b"%") {
        return Some(cursor.at);
    }
    let is_named = cursor.eat(b"(");
    if is_named {
        cursor.skip(NAME_BYTES_MAX, |byte| byte != b')' && !byte.is_ascii_whitespace());
        if !cursor.eat(b")") {
            return None;
        }
    }
    let number = cursor.at;
    if cursor.eat(b"L") && cursor.skip(2, |byte| byte.is_ascii_digit()) > 0 {
        return Some(cursor.at); // Qt's number in the user's way of writing.
    }
    cursor.at = number;
    let digits = cursor.skip(4, |byte| byte.is_ascii_digit());
    let is_numbered = digits > 0 && cursor.eat(b"$");
    if !is_numbered {
        cursor.at = number; // The digits are a width.
    }
    let is_plain = !is_named && !is_numbered && digits > 0 && cursor.peek() != Some(b'0');
    cursor.skip(5, |byte| b"-+#0'".contains(&byte));
    cursor.skip(4, |byte| byte.is_ascii_digit() || byte == b'*');
    let width_end = cursor.at;
    if cursor.eat(b".") {
        cursor.skip(4, |byte| byte.is_ascii_digit() || byte == b'*');
    }
    let sizes = cursor.skip(2, |byte| b"hlLqjzt".contains(&byte));
    match cursor.peek() {
        Some(byte) if byte.is_ascii_alphabetic() || byte == b'@' => Some(cursor.at + 1),
        _ if sizes > 0 => Some(cursor.at), // %l, an hour.
        _ if is_plain => Some(width_end),  // Qt's %1.
        _ => None,
    }
}

/// Length of `{...}` from `at` on, without spaces in it.
fn braces(text: &str, at: usize) -> Option<usize> {
    let mut cursor = Cursor { bytes: text.as_bytes(), at };
    if !cursor.eat(b"{") {
        return None;
    }
    cursor.skip(NAME_BYTES_MAX, |byte| !b"{}".contains(&byte) && !byte.is_ascii_whitespace());
    cursor.eat(b"}").then_some(cursor.at)
}

/// Length of `$name` or `${name}`.
fn dollar(text: &str) -> Option<usize> {
    let mut cursor = Cursor { bytes: text.as_bytes(), at: 1 };
    if cursor.peek().is_some_and(|byte| byte.is_ascii_digit()) {
        return None; // Money.
    }
    let name = cursor.skip(NAME_BYTES_MAX, |byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if name > 0 { Some(cursor.at) } else { braces(text, 1) }
}

/// Length of `<...>`.
fn tag(text: &str) -> Option<usize> {
    let mut cursor = Cursor { bytes: text.as_bytes(), at: 1 };
    cursor.eat(b"/");
    cursor.peek().filter(u8::is_ascii_alphabetic)?;
    cursor.skip(TAG_BYTES_MAX, |byte| !b"<>".contains(&byte));
    cursor.eat(b">").then_some(cursor.at)
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn eat(&mut self, token: &[u8; 1]) -> bool {
        let is_there = self.peek() == Some(token[0]);
        self.at += usize::from(is_there);
        is_there
    }

    /// Passes over at most `most` bytes of a kind, and says over how many.
    fn skip(&mut self, most: usize, is_of_kind: impl Fn(u8) -> bool) -> usize {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let count = rest.iter().take(most).take_while(|byte| is_of_kind(**byte)).count();
        self.at += count;
        count
    }
}

/// Whether there is a letter outside of directives and tags.
pub(super) fn has_words(text: &str) -> bool {
    Pieces(text)
        .any(|piece| matches!(piece, Piece::Text(text) if text.contains(char::is_alphabetic)))
}

/// Whether both sides have the same directives and the same tags, each as often.
pub(super) fn compared(source: &str, target: &str) -> Result<(), Reason> {
    let directive = |piece| if let Piece::Directive(text) = piece { Some(text) } else { None };
    let tag = |piece| if let Piece::Tag(text) = piece { Some(text) } else { None };
    if sorted(source, directive) != sorted(target, directive) {
        Err(Reason::Directives)
    } else if sorted(source, tag) != sorted(target, tag) {
        Err(Reason::Tags)
    } else {
        Ok(())
    }
}

fn sorted<'a>(text: &'a str, kind: impl Fn(Piece<'a>) -> Option<&'a str>) -> Vec<&'a str> {
    let mut found: Vec<_> = Pieces(text).filter_map(kind).collect();
    found.sort_unstable();
    found
}

/// A stable hash of what a sentence says: of its letters and digits in lower case, without directives and tags. Sentences
/// that differ in nothing else are near-duplicates, and have the same.
pub(in crate::parallel) fn sentence_key(text: &str) -> u64 {
    let words =
        |piece: Piece| if let Piece::Text(text) = piece { letters(text) } else { String::new() };
    let said: String = Pieces(text).map(words).collect();
    hash::stable(if said.is_empty() { text } else { &said })
}

fn letters(text: &str) -> String {
    text.chars()
        .filter(|character| character.is_alphanumeric())
        .flat_map(char::to_lowercase)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directives(text: &str) -> Vec<&str> {
        Pieces(text)
            .filter_map(|piece| if let Piece::Directive(text) = piece { Some(text) } else { None })
            .collect()
    }

    #[test]
    fn oracle_directives() {
        for (text, expected) in [
            ("%s of %d", &["%s", "%d"][..]),
            ("%1$s and %2$-5.2f", &["%1$s", "%2$-5.2f"]),
            (
                "%-5.2f|%05d|%.*s|%*d|%+d|%#x|%'d",
                &["%-5.2f", "%05d", "%.*s", "%*d", "%+d", "%#x", "%'d"],
            ),
            ("%ld %llu %zu %hhd %Lf", &["%ld", "%llu", "%zu", "%hhd", "%Lf"]),
            ("%(name)s %(n)3d", &["%(name)s", "%(n)3d"]),
            ("{0} {} {name} {0:.2f}", &["{0}", "{}", "{name}", "{0:.2f}"]),
            ("%1 of %2, %L1 %10", &["%1", "%2", "%L1", "%10"]),
            ("%H:%M", &["%H", "%M"]),
            ("%l o'clock", &["%l"]),
            ("100%% sure", &["%%"]),
            ("$HOME and ${name} cost $5", &["$HOME", "${name}"]),
            ("%@", &["%@"]),
            ("50% of, 100%, 5 % der", &[]),
            ("{ not one } {", &[]),
            ("%(no name)s %(open", &[]),
            ("%", &[]),
            ("日本%s語", &["%s"]),
        ] {
            assert_eq!(directives(text), expected, "{text}");
        }
    }

    #[test]
    fn oracle_tags() {
        let tags = |text| {
            sorted(text, |piece| if let Piece::Tag(text) = piece { Some(text) } else { None })
        };
        assert_eq!(tags("<b>x</b> <a href=\"%s\">"), ["</b>", "<a href=\"%s\">", "<b>"]);
        assert_eq!(tags("<me@example.org> a < b > c <3"), ["<me@example.org>"]);
    }

    #[test]
    fn oracle_sides_are_compared() {
        assert_eq!(compared("%2$s von %1$s", "%1$s of %2$s"), Ok(()));
        assert_eq!(compared("%s von %s", "%s of %d"), Err(Reason::Directives));
        assert_eq!(compared("%s", "%s %s"), Err(Reason::Directives));
        assert_eq!(compared("<i>a</i><b>", "<b>b<i></i>"), Ok(()));
        assert_eq!(compared("<Datei>", "<file>"), Err(Reason::Tags));
    }

    #[test]
    fn oracle_near_duplicates_have_one_key() {
        let key = sentence_key("Cannot open the file.");
        for same in [
            "cannot open the file",
            "Cannot open the file…",
            "Cannot open the  File: %s",
            "<b>Cannot open</b> the file!",
        ] {
            assert_eq!(sentence_key(same), key, "{same}");
        }
        for other in ["Cannot open the files", "", "%s", "…", "cannot open file"] {
            assert_ne!(sentence_key(other), key, "{other}");
        }
        assert_ne!(sentence_key("%s"), sentence_key("%d"));
    }
}
