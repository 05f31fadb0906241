//! Which side of the corpus a name is on, and where a text is cut.

use super::Document;
use crate::hash;

/// Whether a name is on the validation side, which about one in `one_in` names is. The result does
/// not depend on other names, so a growing corpus does not move documents between sides.
pub(super) fn is_validation(name: &str, one_in: u64) -> bool {
    hash::stable(name).is_multiple_of(one_in)
}

/// Splits named things into (training, validation), with about 1 in `one_in` in validation.
///
/// With two things or more, neither side is empty. If the hashes leave a side empty, it gets the
/// thing with the least hash, which does not depend on the order either.
pub(super) fn split<T>(things: Vec<T>, one_in: u64, name: impl Fn(&T) -> &str) -> (Vec<T>, Vec<T>) {
    let (mut validation, mut train): (Vec<T>, Vec<T>) =
        things.into_iter().partition(|thing| is_validation(name(thing), one_in));
    if validation.is_empty() {
        move_one(&mut train, &mut validation, &name);
    } else if train.is_empty() {
        move_one(&mut validation, &mut train, &name);
    }
    (train, validation)
}

fn move_one<T>(from: &mut Vec<T>, to: &mut Vec<T>, name: impl Fn(&T) -> &str) {
    let least = (0..from.len()).min_by_key(|&i| from.get(i).map(|t| hash::stable(name(t))));
    if let Some(least) = least
        && from.len() > 1
    {
        to.push(from.remove(least));
    }
}

/// Sorts by the stable hash of the name, the order in which a limit is filled.
pub(super) fn shuffle<T>(things: &mut [T], name: impl Fn(&T) -> &str) {
    things.sort_by_cached_key(|thing| (hash::stable(name(thing)), name(thing).to_owned()));
}

/// A line longer than this may be cut within: it is data, or text without line breaks.
const LINE_BYTES_MAX: u64 = 4096;

/// What fits within a limit.
pub(super) struct Filled {
    pub(super) documents: Vec<Document>,
    pub(super) bytes: u64,
    /// Whether the limit was reached. It counts as reached when a document is cut, even if the cut
    /// leaves some bytes free. Otherwise the first lines of other documents would fill the gap.
    pub(super) is_full: bool,
}

/// Takes whole documents in order until `limit_bytes`. The document that crosses the limit is cut.
pub(super) fn fill(documents: Vec<Document>, limit_bytes: u64) -> Filled {
    let mut filled = Filled { documents: Vec::new(), bytes: 0, is_full: limit_bytes == 0 };
    for mut document in documents {
        if filled.is_full {
            break;
        }
        let was_cut = truncate(&mut document.text, limit_bytes - filled.bytes);
        filled.bytes += document.text.len() as u64; // At most `limit_bytes`, after the cut.
        filled.is_full = was_cut || filled.bytes == limit_bytes;
        if !document.text.is_empty() {
            filled.documents.push(document);
        }
    }
    filled
}

/// Cuts a text to at most `limit_bytes` and returns whether it did. The cut falls after the last
/// line end in that range, or between two characters of a line longer than [`LINE_BYTES_MAX`].
/// Otherwise nothing is left, because half a line is not useful text.
fn truncate(text: &mut String, limit_bytes: u64) -> bool {
    let limit = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
    if text.len() <= limit {
        return false;
    }
    let end = text.floor_char_boundary(limit);
    let newline = text.get(..end).and_then(|head| head.rfind('\n'));
    let without_line = if limit_bytes > LINE_BYTES_MAX { end } else { 0 };
    text.truncate(newline.map_or(without_line, |newline| newline + 1));
    true
}

/// Cuts a document into its head and about the last `1 / one_in` of its bytes.
///
/// The cut falls after the first line that ends in that tail. If the tail is a single line, the cut
/// falls after the last line before it, unless that takes more than half of the text. Otherwise the
/// cut falls between two characters.
pub(super) fn tail(document: Document, one_in: usize) -> (Document, Document) {
    let Document { name, mut text } = document;
    let at = text.floor_char_boundary(text.len() - text.len() / one_in.max(1));
    // Search from one byte earlier, because a line may end exactly at the cut. Search bytes,
    // because the cut may fall within a character.
    let tail = text.as_bytes().iter().skip(at.saturating_sub(1));
    let newline_after = tail.copied().position(|byte| byte == b'\n');
    let line_after = newline_after.map(|i| at.saturating_sub(1) + i + 1);
    let line_before = text.get(..at).and_then(|head| head.rfind('\n')).map(|i| i + 1);
    let cut = line_after
        .filter(|&cut| cut < text.len())
        .or(line_before.filter(|&cut| cut > text.len() / 2))
        .unwrap_or(at);
    let tail = text.split_off(cut);
    let tail = Document { name: format!("{name} (tail)"), text: tail };
    (Document { name, text }, tail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    fn config() -> ProptestConfig {
        ProptestConfig {
            rng_seed: RngSeed::Fixed(7),
            failure_persistence: None,
            ..ProptestConfig::with_cases(200)
        }
    }

    fn document(name: &str, text: &str) -> Document {
        Document { name: name.into(), text: text.into() }
    }

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn property_limits_hold_and_nothing_is_invented(
            texts in prop::collection::vec("[a-zé\n]{0,20}", 0..8),
            limit in 0u64..60,
        ) {
            let documents: Vec<_> = texts.iter().map(|t| document("d", t)).collect();
            let taken = fill(documents, limit).documents;
            let bytes: u64 = taken.iter().map(|d| d.text.len() as u64).sum();
            prop_assert!(bytes <= limit);
            prop_assert!(taken.iter().all(|d| texts.iter().any(|t| t.starts_with(&d.text))));
            prop_assert!(taken.iter().all(|d| !d.text.is_empty()));
        }

        #[test]
        fn property_head_and_tail_make_the_whole(text in "[a-zé\n]{0,200}") {
            let (head, tail) = tail(document("d", &text), 10);
            prop_assert_eq!(&(head.text.clone() + &tail.text), &text);
            prop_assert!(tail.text.len() <= text.len() / 2 + 4);
            prop_assert!(text.len() < 10 || !tail.text.is_empty());
        }

        #[test]
        fn property_neither_side_is_empty(count in 2usize..40) {
            let names: Vec<_> = (0..count).map(|i| format!("n{i}")).collect();
            let (train, validation) = split(names, 12, String::as_str);
            prop_assert!(!train.is_empty() && !validation.is_empty());
            prop_assert_eq!(train.len() + validation.len(), count);
        }
    }

    #[test]
    fn oracle_tail_is_cut_at_a_line() {
        let (head, tail) = tail(document("d", &"12345678\n".repeat(20)), 10);
        assert_eq!((head.text.len(), tail.text.len()), (162, 18));
        assert_eq!(tail.name, "d (tail)");
    }

    #[test]
    fn oracle_cuts_are_at_lines_unless_lines_are_endless() {
        let cut = |text: &str, limit| {
            let mut text = text.to_owned();
            assert!(truncate(&mut text, limit));
            text.len()
        };
        assert_eq!(cut("ab\ncd\nef\n", 7), 6);
        assert_eq!(cut("ab\ncd\nef\n", 2), 0);
        assert_eq!(cut(&"é".repeat(5000), LINE_BYTES_MAX), 0);
        assert_eq!(cut(&"é".repeat(5000), 5001), 5000);
    }

    #[test]
    fn regression_a_limit_is_not_filled_with_scraps() {
        let documents = ["12345678\n123\n", "a\n", "b\n"].map(|text| document("d", text));
        let filled = fill(documents.into(), 11);
        assert_eq!(filled.documents, [document("d", "12345678\n")]);
        assert!(filled.is_full);
    }

    #[test]
    fn oracle_about_one_in_twelve() {
        let validation = (0..12_000).filter(|i| is_validation(&format!("crate-{i}"), 12));
        assert!((900..1100).contains(&validation.count()));
    }
}
