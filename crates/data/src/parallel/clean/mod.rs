//! What makes a message and its translation a pair to learn from, and what keeps it out.
//!
//! - `markup`: directives (`%s`) and tags (`<b>`) in a text;
//! - `accelerators`: the marks of keys in menus (`_File`).

mod accelerators;
mod markup;

use super::{Pair, ParallelOptions, Reason};
pub(super) use markup::sentence_key;

/// Message texts by which programs ask for the translators' names, in lower case.
const CREDITS: [&str; 9] = [
    "translator-credits",
    "translator_credits",
    "translators-credits",
    "translator credits",
    "your names",
    "your emails",
    "credit_for_translators",
    "roles_of_translators",
    "others_roles_of_translators",
];

/// Contexts in which KDE asks for them.
const CREDITS_CONTEXTS: [&str; 2] = ["NAME OF TRANSLATORS", "EMAIL OF TRANSLATORS"];

/// What stands between a remark for translators and the text itself in an English message (GLib and Wesnoth).
const PREFIX_ENDS: [char; 2] = ['|', '^'];

/// Characters by which both lengths grow before their ratio is taken: short words may differ by more than sentences.
const RATIO_CHARACTERS: usize = 10;

/// Whether a message is no sentence, but asks the translators for their names.
pub(super) fn is_credits(context: Option<&str>, id: &str, translation: &str) -> bool {
    let id = id.trim();
    context.is_some_and(|context| CREDITS_CONTEXTS.contains(&context))
        || CREDITS.iter().any(|credits| id.eq_ignore_ascii_case(credits))
        || translation.contains("Launchpad Contributions:")
}

/// A translation and its English text as a clean pair, or why they are none.
pub(super) fn cleaned(
    source: &str,
    target: &str,
    options: &ParallelOptions,
) -> Result<Pair, Reason> {
    let (source, target) = (normalized(source), normalized(target));
    if source.is_empty() || target.is_empty() {
        return Err(Reason::Empty);
    }
    if [&source, &target].iter().any(|text| text.chars().any(is_broken)) {
        return Err(Reason::ControlCharacters);
    }
    let target = without_prefix(&source, &target).trim_start();
    let (source, target) = accelerators::removed(&source, target);
    if !markup::has_words(&source) || !markup::has_words(&target) {
        return Err(Reason::NoWords);
    }
    if source == target {
        return Err(Reason::Identical);
    }
    markup::compared(&source, &target)?;
    let pair = Pair { source, target };
    measured(&pair, options)?;
    Ok(pair)
}

/// Two lines as a pair with no more change than their ends trimmed, or why they are none.
pub(super) fn as_it_is(
    source: &str,
    target: &str,
    options: &ParallelOptions,
) -> Result<Pair, Reason> {
    let pair = Pair { source: source.trim().to_owned(), target: target.trim().to_owned() };
    if pair.source.is_empty() || pair.target.is_empty() {
        return Err(Reason::Empty);
    }
    measured(&pair, options)?;
    Ok(pair)
}

fn measured(pair: &Pair, options: &ParallelOptions) -> Result<(), Reason> {
    if pair.source.len().max(pair.target.len()) > options.bytes_max {
        return Err(Reason::TooLong);
    }
    let (source, target) = (width(&pair.source), width(&pair.target));
    let [longer, shorter] =
        [source.max(target), source.min(target)].map(|width| (width + RATIO_CHARACTERS) as f64);
    if longer > options.ratio_max * shorter { Err(Reason::Ratio) } else { Ok(()) }
}

/// Characters; those of Chinese, Japanese and Korean count twice, as on a terminal and in what they say.
fn width(text: &str) -> usize {
    let is_wide = |character: char| {
        matches!(u32::from(character), 0x1100..=0x115f | 0x2e80..=0xa4cf | 0xac00..=0xd7a3 | 0xf900..=0xfaff
            | 0xff00..=0xff60 | 0x2_0000..=0x3_ffff)
    };
    text.chars().map(|character| 1 + usize::from(is_wide(character))).sum()
}

/// Runs of white space as one space, and none at the ends; marks that are not seen are left out, but for the joiners that
/// Persian and the scripts of India are spelt with.
fn normalized(text: &str) -> String {
    let is_mark = |character: char| matches!(u32::from(character), 0xad | 0x200e | 0x200f | 0x202a..=0x202e | 0x2060 | 0x2066..=0x2069 | 0xfeff);
    let mut clean = String::with_capacity(text.len());
    let mut is_space_due = false;
    for character in text.chars().filter(|character| !is_mark(*character)) {
        if character.is_whitespace() {
            is_space_due = !clean.is_empty();
        } else {
            if is_space_due {
                clean.push(' ');
            }
            is_space_due = false;
            clean.push(character);
        }
    }
    clean
}

/// Controls, and what stands for a character that was lost.
fn is_broken(character: char) -> bool {
    character.is_control() || character == char::REPLACEMENT_CHARACTER
}

/// The English text behind its remark for translators, which the translation does not have: `menu|Open`.
fn without_prefix<'a>(source: &str, target: &'a str) -> &'a str {
    let split = PREFIX_ENDS
        .iter()
        .find_map(|end| target.split_once(*end).filter(|_| !source.contains(*end)));
    split.map_or(target, |(_, text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clean(source: &str, target: &str) -> Result<(String, String), Reason> {
        cleaned(source, target, &ParallelOptions::default()).map(|pair| (pair.source, pair.target))
    }

    fn kept(source: &str, target: &str) -> Result<(String, String), Reason> {
        Ok((source.into(), target.into()))
    }

    #[test]
    fn oracle_pairs_are_cleaned() {
        assert_eq!(clean("_Datei öffnen…", "_Open File…"), kept("Datei öffnen…", "Open File…"));
        assert_eq!(
            clean("  Zwei\n\tZeilen\u{a0}! ", "Two\nlines!"),
            kept("Zwei Zeilen !", "Two lines!")
        );
        assert_eq!(clean("Öffnen", "menu|Open"), kept("Öffnen", "Open"));
        assert_eq!(clean("Kämpferin", "female^Fighter"), kept("Kämpferin", "Fighter"));
        assert_eq!(clean("a|ä", "a|b"), kept("a|ä", "a|b"));
        assert_eq!(clean("می\u{200c}خواهم", "I want"), kept("می\u{200c}خواهم", "I want"));
        assert_eq!(clean("\u{200f}קובץ", "File"), kept("קובץ", "File"));
    }

    #[test]
    fn oracle_each_reason() {
        for (source, target, reason) in [
            ("", "File", Reason::Empty),
            ("Datei", " \n", Reason::Empty),
            ("Datei\u{1b}", "File", Reason::ControlCharacters),
            ("Dat\u{fffd}i", "File", Reason::ControlCharacters),
            ("%s: %d", "%s - %d", Reason::NoWords),
            ("Linux", "Linux", Reason::Identical),
            ("_Linux", "Linux", Reason::Identical),
            ("%s Datei", "%d file", Reason::Directives),
            ("<b>Datei</b>", "<i>file</i>", Reason::Tags),
            ("Ja", "Yes, of course, and many thanks", Reason::Ratio),
        ] {
            assert_eq!(clean(source, target), Err(reason), "{source:?} {target:?}");
        }
        let long = "lang ".repeat(200);
        assert_eq!(clean(&long, &"long ".repeat(200)), Err(Reason::TooLong));
    }

    #[test]
    fn oracle_lines_as_they_are() {
        let options = ParallelOptions::default();
        let pair = as_it_is(" _Datei  %s ", "_File %d", &options).unwrap();
        assert_eq!((pair.source.as_str(), pair.target.as_str()), ("_Datei  %s", "_File %d"));
        assert_eq!(
            as_it_is("Linux", "Linux", &options).map(|pair| pair.source),
            Ok("Linux".into())
        );
        assert_eq!(as_it_is(" ", "File", &options), Err(Reason::Empty));
        assert_eq!(as_it_is("Ja", "Yes, of course, and many thanks", &options), Err(Reason::Ratio));
    }

    #[test]
    fn oracle_credits() {
        assert!(is_credits(None, "translator-credits", "Hans"));
        assert!(is_credits(Some("NAME OF TRANSLATORS"), "Your names", "Hans"));
        assert!(is_credits(
            None,
            "About",
            "Launchpad Contributions:\n  Hans https://launchpad.net/~hans"
        ));
        assert!(!is_credits(Some("menu"), "Translate", "Übersetzen"));
    }

    #[test]
    fn oracle_wide_characters_say_more() {
        assert_eq!((width("abc"), width("файл"), width("打开文件"), width("파일")), (3, 4, 8, 4));
    }
}
