//! The readers of `.mo` and `.po`.

use gpipe_data::parallel::{Catalogue, CatalogueError, Message, Place};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::writers::{BIG, LITTLE, Layout, header, message, mo, po};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        rng_seed: RngSeed::Fixed(11),
        failure_persistence: None,
        ..ProptestConfig::with_cases(cases)
    }
}

/// Only for characters below U+0100.
fn latin1(text: &str) -> Vec<u8> {
    text.chars().map(|character| u8::try_from(u32::from(character)).unwrap()).collect()
}

fn some_messages() -> Vec<Message> {
    vec![
        message("File", "Datei"),
        message("a \"quoted\"\tword\\\nand a line", "ein \"Wort\"\tin\\\nAnführung"),
        Message { context: Some("menu".into()), ..message("File", "Akte") },
        Message {
            plural: Some("%d files".into()),
            strings: vec!["%d Datei".into(), "%d Dateien".into()],
            ..message("%d file", "")
        },
        Message {
            context: Some("disk".into()),
            plural: Some("blocks".into()),
            strings: vec!["Block".into(), "Blöcke".into()],
            ..message("block", "")
        },
    ]
}

fn sorted(mut messages: Vec<Message>) -> Vec<Message> {
    messages.sort();
    messages
}

fn po_error(text: &str) -> CatalogueError {
    Catalogue::from_po(text.as_bytes()).unwrap_err()
}

#[test]
fn oracle_both_formats_and_byte_orders_read_the_same() {
    let (header, messages) = (header("UTF-8", "de"), some_messages());
    let expected = sorted(messages.clone());
    for layout in [
        LITTLE,
        BIG,
        Layout { revision: 7, ..LITTLE },
        Layout { revision: (1 << 16) + 1, ..LITTLE },
    ] {
        let catalogue = Catalogue::from_mo(&mo(&header, &messages, layout)).unwrap();
        assert_eq!(sorted(catalogue.messages), expected);
        assert_eq!(catalogue.language.as_deref(), Some("de"));
        assert_eq!(catalogue.plural_forms.as_deref(), Some("nplurals=2; plural=(n != 1);"));
    }
    let catalogue = Catalogue::from_po(po(&header, &messages).as_bytes()).unwrap();
    assert_eq!(catalogue.messages, messages, "in the file's order");
    assert_eq!(catalogue.language.as_deref(), Some("de"));
    assert_eq!((catalogue.plural_forms.is_some(), catalogue.fuzzy), (true, 0));
}

#[test]
fn oracle_charsets_are_read() {
    let messages = [message("café", "Größe")];
    let header = header("ISO-8859-1", "de");
    let layout = Layout { encode: latin1, ..LITTLE };
    assert_eq!(Catalogue::from_mo(&mo(&header, &messages, layout)).unwrap().messages, messages);
    let text = po(&header, &messages);
    assert_eq!(Catalogue::from_po(&latin1(&text)).unwrap().messages, messages);
}

#[test]
fn oracle_without_a_header_it_is_utf8() {
    let text = "msgid \"size\"\nmsgstr \"Größe\"\n";
    assert_eq!(Catalogue::from_po(text.as_bytes()).unwrap().messages, [message("size", "Größe")]);
}

#[test]
fn oracle_fuzzy_obsolete_and_untranslated_messages_are_left_out() {
    let text = r#"
#, fuzzy
msgid ""
msgstr "Language: de\n"

#, fuzzy, c-format
#| msgid "was"
msgid "fuzzy"
msgstr "falsch"
# directly behind
msgid "kept"
msgstr "behalten"

msgid "none"
msgstr ""

#, c-format, fuzzy
#~ msgid "obsolete"
#~ msgstr "überholt"

#~| msgid "was"
msgid "after"
msgstr "danach"
"#;
    let catalogue = Catalogue::from_po(text.as_bytes()).unwrap();
    assert_eq!(catalogue.messages, [message("kept", "behalten"), message("after", "danach")]);
    assert_eq!((catalogue.fuzzy, catalogue.language.as_deref()), (1, Some("de")));
}

#[test]
fn oracle_escapes_are_those_of_c() {
    let text = r#"msgid "a"
msgstr "\a\b\f\n\r\t\v\"\\\101\x42\7z"
"#;
    let catalogue = Catalogue::from_po(text.as_bytes()).unwrap();
    assert_eq!(catalogue.messages[0].strings, ["\u{7}\u{8}\u{c}\n\r\t\u{b}\"\\AB\u{7}z"]);
}

#[test]
fn fault_a_broken_text_catalogue_is_an_error_with_its_line() {
    for (text, line, reason) in [
        ("msgid \"a\"\nmsgstr \"b\nmsgid \"c\"\n", 2, "does not end with a quote"),
        ("msgid \"a\"\nmsgstr \"b\" c\n", 2, "something behind a string"),
        ("msgid \"a\"\nmsgstr b\n", 2, "does not begin with a quote"),
        ("msgid a\n", 1, "does not begin with a quote"),
        ("\n<<<<<<< HEAD\n", 2, "`<<<<<<<` is no keyword"),
        ("\"a\"\n", 1, "belongs to no keyword"),
        ("msgid \"a\"\n\nmsgid \"b\"\n", 3, "out of order"),
        ("msgid \"a\"\n", 1, "no `msgstr`"),
        ("msgctxt \"a\"\nmsgstr \"b\"\n", 2, "without a `msgid`"),
        ("msgstr \"b\"\n", 1, "without a `msgid`"),
        ("msgid \"a\"\nmsgstr \"b\"\nmsgstr \"c\"\n", 3, "a second `msgstr`"),
        ("msgid \"a\"\nmsgid_plural \"b\"\nmsgstr \"c\"\n", 3, "without [0]"),
        ("msgid \"a\"\nmsgid_plural \"b\"\nmsgstr[1] \"c\"\n", 3, "out of order"),
        ("msgid \"a\"\nmsgstr[0] \"c\"\n", 2, "without a plural"),
        ("msgid \"a\"\nmsgstr \"\\q\"\n", 2, "escape \\q is unknown"),
        ("msgid \"a\"\nmsgstr \"\\377\"\n", 2, "not ASCII"),
        (
            "msgid \"\"\nmsgstr \"Content-Type: text/plain; charset=UTF-16\\n\"\n",
            1,
            "charset \"UTF-16\"",
        ),
    ] {
        let error = po_error(text);
        assert_eq!(error.place, Place::Line(line), "{text:?}: {error}");
        assert!(error.reason.contains(reason), "{text:?}: {error}");
    }
    let error = Catalogue::from_po(b"# \xc3\xa9\n# \xe9\n").unwrap_err();
    assert_eq!(error.to_string(), "line 2: the text is not UTF-8");
}

#[test]
fn fault_a_broken_compiled_catalogue_is_an_error_with_its_byte() {
    let valid = mo(&header("UTF-8", "de"), &some_messages(), LITTLE);
    let with = |at: usize, word: u32| {
        let mut file = valid.clone();
        file[at..at + 4].copy_from_slice(&word.to_le_bytes());
        Catalogue::from_mo(&file).unwrap_err()
    };
    for (at, word, place, reason) in [
        (0, 0x1234, 0, "no compiled catalogue"),
        (4, 2 << 16, 4, "revision 2.0 is beyond 1.x"),
        (8, u32::MAX, 8, "4294967295 messages are more"),
        (8, valid.len() as u32 / 8, 8, "more than the file has room for"),
        (12, u32::MAX, 8, "more than the file has room for"),
        (16, valid.len() as u32 - 4, 8, "more than the file has room for"),
        (36, u32::MAX, 36, "a string of 4294967295 bytes"),
        (36, 1 << 19, 36, "no string of 524288 bytes"),
        (40, u32::MAX, 36, "no string of"),
        (36, 2, 36, "no string of 2 bytes and a NUL"),
    ] {
        let error = with(at, word);
        assert_eq!(error.place, Place::Byte(place), "{at}: {error}");
        assert!(error.reason.contains(reason), "{at}: {error}");
    }
    let error = Catalogue::from_mo(&valid[..10]).unwrap_err();
    assert_eq!(error.to_string(), "byte 10: the file ends too early");
    assert!(Catalogue::from_mo(&[]).is_err());
}

#[test]
fn fault_strings_that_lie_over_each_other_are_refused() {
    // A thousand messages whose strings are all the same 8,000 bytes: 16 MB of text from a file of 24 kB.
    let mut file = Vec::new();
    let count = 1000u32;
    for word in [0x9504_12de, 0, count, 20, 20 + 8 * count] {
        file.extend(word.to_le_bytes());
    }
    for _ in 0..2 * count {
        file.extend(8000u32.to_le_bytes());
        file.extend((20 + 16 * count).to_le_bytes());
    }
    file.extend([b'a'; 8000]);
    file.push(0);
    let error = Catalogue::from_mo(&file).unwrap_err();
    assert!(error.reason.contains("lie over each other"), "{error}");
}

#[test]
fn fault_a_string_of_another_charset_is_an_error() {
    let messages = [message("size", "Größe")];
    let layout = Layout { encode: latin1, ..LITTLE };
    let error = Catalogue::from_mo(&mo(&header("UTF-8", "de"), &messages, layout)).unwrap_err();
    assert!(error.reason.contains("not UTF-8"), "{error}");
    let error = Catalogue::from_mo(&mo(&header("KLINGON", "de"), &messages, LITTLE)).unwrap_err();
    assert!(
        error.reason.contains("charset \"KLINGON\"") && error.reason.contains("msgconv"),
        "{error}"
    );
}

#[test]
fn fault_more_plural_forms_than_there_are() {
    let strings = vec!["a".to_owned(); 17];
    let messages = [Message { plural: Some("b".into()), strings, ..message("a", "") }];
    let header = header("UTF-8", "de");
    let error = Catalogue::from_mo(&mo(&header, &messages, LITTLE)).unwrap_err();
    assert!(error.reason.contains("17 plural forms"), "{error}");
    assert!(Catalogue::from_po(po(&header, &messages).as_bytes()).is_err());
}

/// Text with all that the formats treat in a way of their own, but for what parts strings in a compiled catalogue.
const TEXT: &str = "[a-dé日\"\\\\\n\t\r#~\\[\\] %{}\u{7}\u{85}]{0,12}";
const TEXT_NOT_EMPTY: &str = "[a-dé日\"\\\\\n\t\r#~\\[\\] %{}\u{7}\u{85}]{1,12}";

fn any_message() -> impl Strategy<Value = Message> {
    let strings = prop::collection::vec(TEXT, 1..5);
    (prop::option::of(TEXT), TEXT_NOT_EMPTY, prop::option::of(TEXT), strings).prop_map(
        |(context, id, plural, mut strings)| {
            strings.truncate(if plural.is_some() { 5 } else { 1 });
            if strings.iter().all(String::is_empty) {
                strings[0].push('x');
            }
            Message { context, id, plural, strings }
        },
    )
}

fn any_messages() -> impl Strategy<Value = Vec<Message>> {
    prop::collection::vec(any_message(), 0..8)
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn property_what_is_written_is_read(messages in any_messages()) {
        let header = header("UTF-8", "de");
        let expected = sorted(messages.clone());
        for layout in [LITTLE, BIG] {
            let catalogue = Catalogue::from_mo(&mo(&header, &messages, layout));
            prop_assert_eq!(sorted(catalogue.unwrap().messages), expected.clone());
        }
        let catalogue = Catalogue::from_po(po(&header, &messages).as_bytes());
        prop_assert_eq!(sorted(catalogue.unwrap().messages), expected);
    }
}

/// A change of a file: bytes overwritten, left out or put in, or the end cut off.
#[derive(Debug, Clone)]
enum Damage {
    Overwrite(prop::sample::Index, u8),
    Remove(prop::sample::Index, usize),
    Insert(prop::sample::Index, Vec<u8>),
    Truncate(prop::sample::Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (index(), any::<u8>()).prop_map(|(at, byte)| Damage::Overwrite(at, byte)),
        1 => (index(), 1usize..20).prop_map(|(at, count)| Damage::Remove(at, count)),
        1 => (index(), prop::collection::vec(any::<u8>(), 1..20)).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        1 => index().prop_map(Damage::Truncate),
    ]
}

fn damaged(mut file: Vec<u8>, damages: &[Damage]) -> Vec<u8> {
    for damage in damages {
        if file.is_empty() {
            break;
        }
        let length = file.len();
        match damage {
            Damage::Overwrite(at, byte) => file[at.index(length)] = *byte,
            Damage::Remove(at, count) => {
                let at = at.index(length);
                file.drain(at..length.min(at + count));
            }
            Damage::Insert(at, bytes) => {
                let at = at.index(length);
                file.splice(at..at, bytes.iter().copied());
            }
            Damage::Truncate(at) => file.truncate(at.index(length)),
        }
    }
    file
}

/// A file may be refused; what is read of it is no more than it holds, in UTF-8.
fn examine(result: Result<Catalogue, CatalogueError>, file: &[u8]) -> Result<(), TestCaseError> {
    match result {
        Ok(catalogue) => {
            let text: usize = (catalogue.messages.iter())
                .map(|m| {
                    let optional =
                        [&m.context, &m.plural].map(|t| t.as_ref().map_or(0, String::len));
                    m.id.len()
                        + optional.iter().sum::<usize>()
                        + m.strings.iter().map(String::len).sum::<usize>()
                })
                .sum();
            prop_assert!(text <= 3 * file.len());
            prop_assert!(
                catalogue.messages.iter().all(|m| m.strings.iter().any(|s| !s.is_empty()))
            );
        }
        Err(error) => match error.place {
            Place::Byte(byte) => prop_assert!(byte <= file.len()),
            Place::Line(line) => {
                let lines = file.iter().filter(|byte| **byte == b'\n').count() + 1;
                prop_assert!((1..=lines).contains(&line), "{error} of {lines}");
            }
        },
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(3000))]

    #[test]
    fn fault_damaged_files_are_read_or_refused(
        messages in any_messages(),
        damages in prop::collection::vec(damage(), 1..6),
        big in any::<bool>(),
        charset in prop::sample::select(vec!["UTF-8", "ISO-8859-15", "ISO-8859-9", "KOI8-R", "CHARSET"]),
    ) {
        let header = header(charset, "de");
        let file = damaged(mo(&header, &messages, if big { BIG } else { LITTLE }), &damages);
        examine(Catalogue::from_mo(&file), &file)?;
        let file = damaged(po(&header, &messages).into_bytes(), &damages);
        examine(Catalogue::from_po(&file), &file)?;
    }

    #[test]
    fn fault_noise_is_read_or_refused(
        noise in prop::collection::vec(any::<u8>(), 0..300),
        words in prop::collection::vec(prop_oneof![0u32..64, any::<u32>()], 4),
    ) {
        examine(Catalogue::from_po(&noise), &noise)?;
        // Behind a magic number, so that there is something to read.
        let mut file = 0x9504_12de_u32.to_le_bytes().to_vec();
        file.extend((words[0] & 1).to_le_bytes());
        file.extend(words[1..].iter().flat_map(|word| word.to_le_bytes()));
        file.extend(&noise);
        examine(Catalogue::from_mo(&file), &file)?;
    }

    #[test]
    fn fault_pieces_of_the_format_in_any_order(
        lines in prop::collection::vec(prop::sample::select(vec![
            "msgid \"\"", "msgid \"a\"", "msgstr \"b\"", "msgstr \"\"", "msgctxt \"c\"", "msgid_plural \"d\"",
            "msgstr[0] \"e\"", "msgstr[1] \"f\"", "msgstr[99999999999999999999] \"g\"", "\"more\"", "\"\\n\"", "\"\\",
            "#, fuzzy", "#~ msgid \"h\"", "#", "", "domain \"i\"", "\"Content-Type: text/plain; charset=ISO-8859-15\\n\"", "msgstr[", "msgid",
        ]), 0..30),
    ) {
        let file = lines.join("\n").into_bytes();
        examine(Catalogue::from_po(&file), &file)?;
    }
}
