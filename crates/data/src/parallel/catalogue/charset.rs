//! Bytes as text, in the charset that a catalogue names: UTF-8, or one of Western Europe's.
//!
//! Of the messages in Debian's packages 99.4% are in UTF-8 and most of the others in these. The rest is refused: tables of
//! twenty more charsets would be a dependency of six crates for one message in seven hundred.

use std::borrow::Cow;
use std::str;

/// A charset in which ASCII bytes mean ASCII.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Charset {
    Utf8,
    /// ISO-8859-1, where each byte is the character of that number, but for these.
    Latin(&'static [(u8, char)]),
}

const LATIN_1: Charset = Charset::Latin(&[]);
const LATIN_5: Charset =
    Charset::Latin(&[(0xd0, 'Ğ'), (0xdd, 'İ'), (0xde, 'Ş'), (0xf0, 'ğ'), (0xfd, 'ı'), (0xfe, 'ş')]);
const LATIN_9: Charset = Charset::Latin(&[
    (0xa4, '€'),
    (0xa6, 'Š'),
    (0xa8, 'š'),
    (0xb4, 'Ž'),
    (0xb8, 'ž'),
    (0xbc, 'Œ'),
    (0xbd, 'œ'),
    (0xbe, 'Ÿ'),
]);

/// By the names that headers give, in capitals. What declares ASCII and has other bytes is UTF-8 in practice, and "CHARSET"
/// is what templates have.
const NAMES: [(&str, Charset); 12] = [
    ("UTF-8", Charset::Utf8),
    ("UTF8", Charset::Utf8),
    ("", Charset::Utf8),
    ("CHARSET", Charset::Utf8),
    ("ASCII", Charset::Utf8),
    ("US-ASCII", Charset::Utf8),
    ("ANSI_X3.4-1968", Charset::Utf8),
    ("ISO-8859-1", LATIN_1),
    ("ISO_8859-1", LATIN_1),
    ("ISO-8859-9", LATIN_5),
    ("ISO-8859-15", LATIN_9),
    ("ISO_8859-15", LATIN_9),
];

impl Charset {
    pub(super) fn named(label: &str) -> Option<Charset> {
        let named = NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(label));
        named.map(|(_, charset)| *charset)
    }

    /// The bytes as text, or the offset of the first that has no meaning in UTF-8; in the others all have one.
    pub(super) fn decode(self, bytes: &[u8]) -> Result<Cow<'_, str>, usize> {
        match self {
            Self::Utf8 => str::from_utf8(bytes).map(Cow::from).map_err(|error| error.valid_up_to()),
            Self::Latin(others) => {
                Ok(Cow::from(bytes.iter().map(|byte| character(*byte, others)).collect::<String>()))
            }
        }
    }
}

fn character(byte: u8, others: &[(u8, char)]) -> char {
    let other = others.iter().find(|(number, _)| *number == byte);
    other.map_or(char::from(byte), |(_, character)| *character)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_charsets_that_catalogues_name() {
        let decode =
            |label, bytes: &[u8]| Charset::named(label).unwrap().decode(bytes).map(Cow::into_owned);
        assert_eq!(decode("UTF-8", "é日".as_bytes()), Ok("é日".into()));
        assert_eq!(decode("CHARSET", b"plain"), Ok("plain".into()));
        assert_eq!(decode("ISO-8859-1", b"caf\xe9 \xa4"), Ok("café ¤".into()));
        assert_eq!(decode("iso-8859-15", b"caf\xe9 \xa4"), Ok("café €".into()));
        assert_eq!(decode("ISO-8859-9", b"\xd0\xfd\xe9"), Ok("Ğıé".into()));
        assert_eq!(decode("utf-8", b"ab\xff"), Err(2));
    }

    #[test]
    fn fault_charsets_that_are_not_known() {
        for label in ["UTF-16", "UTF-7", "KOI8-R", "ISO-8859-2", "EUC-JP", "no such"] {
            assert_eq!(Charset::named(label), None, "{label}");
        }
    }
}
