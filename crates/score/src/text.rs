//! White space and case as in Python, which sacreBLEU uses to split and compare.

use std::borrow::Cow;

/// Whether Python treats it as white space: Unicode's white space and ASCII's four separators.
pub(crate) fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// The words between white space.
pub(crate) fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(is_space).filter(|word| !word.is_empty())
}

/// The line, in lower case if requested.
pub(crate) fn cased(line: &str, lowercase: bool) -> Cow<'_, str> {
    if lowercase { Cow::Owned(line.to_lowercase()) } else { Cow::Borrowed(line) }
}
