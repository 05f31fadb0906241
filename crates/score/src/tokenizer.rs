//! Where BLEU's words end.

use std::fmt;

use crate::text::{is_space, words};

/// How a line is cut into words before BLEU counts them. sacreBLEU's tokenizers of the same names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tokenizer {
    /// `13a`, the one of WMT's tables: most ASCII punctuation is a word of its own; points and
    /// commas are, unless between digits; a hyphen is, after a digit; four entities of XML are
    /// read. An apostrophe stays within its word.
    #[default]
    V13a,
    /// `none`: white space alone, for lines that are tokenized already.
    None,
    /// `char`: each character but white space is a word.
    Char,
}

/// XML's entities, in the order in which they are read: `&amp;lt;` ends as `<`, but `&amp;quot;` as
/// `&quot;`.
const ENTITIES: [(&str, &str); 4] =
    [("&quot;", "\""), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")];

impl Tokenizer {
    /// The words of a line, with a space between two.
    ///
    /// ```
    /// use gpipe_score::Tokenizer;
    /// let line = "It's 1,234.5 km (one-way), &quot;roughly&quot;...";
    /// assert_eq!(Tokenizer::V13a.apply(line), "It's 1,234.5 km ( one-way ) , \" roughly \" . . .");
    /// assert_eq!(Tokenizer::Char.apply("a b."), "a b .");
    /// ```
    pub fn apply(self, line: &str) -> String {
        let line = line.trim_end_matches(is_space);
        let separated = match self {
            Self::V13a => separate_13a(line),
            Self::None => line.to_owned(),
            Self::Char => line.chars().flat_map(|character| [character, ' ']).collect(),
        };
        words(&separated).collect::<Vec<_>>().join(" ")
    }
}

/// Its name in signatures.
impl fmt::Display for Tokenizer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::V13a => "13a",
            Self::None => "none",
            Self::Char => "char",
        })
    }
}

/// White space around what is a word by `13a`.
fn separate_13a(line: &str) -> String {
    let mut text = line.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    for (entity, character) in ENTITIES {
        text = text.replace(entity, character);
    }
    // The rules below look at neighbours: the first and the last character get one, too.
    let mut spaced = String::from(" ");
    for character in text.chars() {
        if is_symbol(character) {
            spaced.extend([' ', character, ' ']);
        } else {
            spaced.push(character);
        }
    }
    spaced.push(' ');
    let is_digit = |character: char| character.is_ascii_digit();
    let is_point = |character: char| matches!(character, '.' | ',');
    let text = separate_pairs(&spaced, ["", " "], |a, b| !is_digit(a) && is_point(b));
    let text = separate_pairs(&text, [" ", ""], |a, b| is_point(a) && !is_digit(b));
    separate_pairs(&text, ["", " "], |a, b| is_digit(a) && b == '-')
}

/// ASCII's punctuation and symbols (and its space) but apostrophe, comma, hyphen and point.
fn is_symbol(character: char) -> bool {
    matches!(character, ' '..='&' | '('..='+' | '/' | ':'..='@' | '['..='`' | '{'..='~')
}

/// Puts a space into each pair of neighbours that matches, and the two texts around it. From the
/// left and without overlap: the second of a pair is not the first of another, which is why `..` is
/// looked at once and not twice.
fn separate_pairs(
    text: &str,
    [before, after]: [&str; 2],
    matches: impl Fn(char, char) -> bool,
) -> String {
    let mut separated = String::with_capacity(text.len() + text.len() / 4);
    let mut rest = text.chars();
    while let Some(first) = rest.next() {
        let mut ahead = rest.clone();
        match ahead.next() {
            Some(second) if matches(first, second) => {
                separated.push_str(before);
                separated.extend([first, ' ', second]);
                separated.push_str(after);
                rest = ahead;
            }
            _ => separated.push(first),
        }
    }
    separated
}
