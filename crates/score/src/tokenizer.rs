//! Splits lines into words for BLEU.

use std::fmt;

use crate::text::{is_space, words};

/// How a line is split into words before BLEU counts them. The names are those of sacreBLEU's
/// tokenizers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tokenizer {
    /// `13a`, which WMT uses. Most ASCII punctuation marks are separate words. Periods and commas
    /// are separate unless between digits, and a hyphen is separate after a digit. Four XML
    /// entities are decoded. An apostrophe stays within its word.
    #[default]
    V13a,
    /// `none`: splits at white space only, for lines that are already tokenized.
    None,
    /// `char`: every character except white space is a word.
    Char,
}

/// XML entities in decoding order: `&amp;lt;` becomes `<`, but `&amp;quot;` becomes `&quot;`.
const ENTITIES: [(&str, &str); 4] =
    [("&quot;", "\""), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")];

impl Tokenizer {
    /// Splits a line into words, joined by single spaces.
    ///
    /// ```
    /// use gpipe_score::Tokenizer;
    /// let line = "It's 1,234.5 km (one-way), &quot;roughly&quot;...";
    /// assert_eq!(
    ///     Tokenizer::V13a.apply(line),
    ///     "It's 1,234.5 km ( one-way ) , \" roughly \" . . .",
    /// );
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

/// The tokenizer's name in signatures.
impl fmt::Display for Tokenizer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::V13a => "13a",
            Self::None => "none",
            Self::Char => "char",
        })
    }
}

/// Puts white space around the words of `13a`.
fn separate_13a(line: &str) -> String {
    let mut text = line.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    for (entity, character) in ENTITIES {
        text = text.replace(entity, character);
    }
    // The rules below look at pairs, so the first and last characters need neighbours, too.
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

/// ASCII punctuation, symbols and space, except apostrophe, comma, hyphen and period.
fn is_symbol(character: char) -> bool {
    matches!(character, ' '..='&' | '('..='+' | '/' | ':'..='@' | '['..='`' | '{'..='~')
}

/// Inserts a space into each pair of characters that matches, and `before` and `after` around it.
/// Pairs are taken from the left and do not overlap: after a match, the search continues behind the
/// pair. So `..` is one match, not two.
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
