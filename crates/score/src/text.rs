//! White space and case as Python's: what sacreBLEU splits and compares by.

use std::borrow::Cow;

/// Whether Python calls it white space: Unicode does so, or it is one of ASCII's four separators.
pub(crate) fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// What is between white space.
pub(crate) fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(is_space).filter(|word| !word.is_empty())
}

/// The line, in lower case if asked.
pub(crate) fn cased(line: &str, lowercase: bool) -> Cow<'_, str> {
    if lowercase { Cow::Owned(line.to_lowercase()) } else { Cow::Borrowed(line) }
}
