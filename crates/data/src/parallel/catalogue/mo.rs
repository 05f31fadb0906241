//! Compiled catalogues (`.mo`), laid out as GNU gettext's manual says in "The Format of GNU MO Files":
//!
//! ```text
//!  0  magic number 0x950412de, in the byte order of the file
//!  4  revision: major in the high half, minor in the low one; 1.x differs from 0.x in system-dependent strings
//!  8  N, the number of messages
//! 12  where the table of originals is
//! 16  where the table of translations is
//! ```
//!
//! A table is N pairs (length, offset) of strings, each with a NUL after it. In a string, EOT ends the context and NUL
//! parts the singular from the plural, and the forms of a translation. The message without text is the header.

use std::borrow::Cow;

use super::charset::Charset;
use super::{
    Catalogue, CatalogueError, FORMS_MAX, MESSAGE_BYTES_MAX, Message, Place, charset_of, error,
};

const MAGIC: u32 = 0x9504_12de;
const AT_REVISION: usize = 4;
const AT_COUNT: usize = 8;
const AT_ORIGINALS: usize = 12;
const AT_TRANSLATIONS: usize = 16;

/// Bytes of a length and an offset.
const ROW_BYTES: usize = 8;

/// Ends the context of a message.
const EOT: char = '\u{4}';

pub(super) fn read(bytes: &[u8]) -> Result<Catalogue, CatalogueError> {
    let strings = File::new(bytes)?.strings()?;
    let header = strings.iter().find(|(id, _)| id.bytes.is_empty()).map(|(_, text)| *text);
    let header = header.unwrap_or(Text { at: 0, bytes: &[] });
    // A translator's name may be in any charset; the fields that are read are ASCII.
    let fields = String::from_utf8_lossy(header.bytes);
    let charset = charset_of(&fields).map_err(|reason| error(Place::Byte(header.at), reason))?;
    let mut catalogue = Catalogue::with_header(&fields);
    for (id, translation) in strings.iter().filter(|(id, _)| !id.bytes.is_empty()) {
        let forms = translation.bytes.split(|byte| *byte == 0).count();
        if forms > FORMS_MAX {
            let reason = format!("{forms} plural forms; at most {FORMS_MAX}");
            return Err(error(Place::Byte(translation.at), reason));
        }
        let (id, translation) = (id.decode(charset)?, translation.decode(charset)?);
        catalogue.messages.extend(message(&id, &translation));
    }
    Ok(catalogue)
}

/// A message out of its two strings, if it has a translation.
fn message(id: &str, translation: &str) -> Option<Message> {
    let (context, id) = match id.split_once(EOT) {
        Some((context, id)) => (Some(context.to_owned()), id),
        None => (None, id),
    };
    let (id, plural) = match id.split_once('\0') {
        Some((id, plural)) => (id, Some(plural.to_owned())),
        None => (id, None),
    };
    let strings: Vec<String> = match plural {
        Some(_) => translation.split('\0').map(str::to_owned).collect(),
        None => vec![translation.to_owned()],
    };
    let is_translated = strings.iter().any(|string| !string.is_empty());
    is_translated.then(|| Message { context, id: id.to_owned(), plural, strings })
}

/// A string of the file, and where it is.
#[derive(Clone, Copy)]
struct Text<'a> {
    at: usize,
    bytes: &'a [u8],
}

impl<'a> Text<'a> {
    fn decode(self, charset: Charset) -> Result<Cow<'a, str>, CatalogueError> {
        charset
            .decode(self.bytes)
            .map_err(|bad| error(Place::Byte(self.at + bad), "the text is not UTF-8"))
    }
}

struct File<'a> {
    bytes: &'a [u8],
    word: fn([u8; 4]) -> u32,
}

impl<'a> File<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, CatalogueError> {
        let little = File { bytes, word: u32::from_le_bytes };
        let magic = little.u32_at(0)?; //
        let file = match magic {
            MAGIC => little,
            _ if magic.swap_bytes() == MAGIC => File { bytes, word: u32::from_be_bytes },
            _ => return Err(error(Place::Byte(0), "this is no compiled catalogue (.mo)")),
        };
        let revision = file.u32_at(AT_REVISION)?; //
        if revision >> 16 > 1 {
            let reason = format!("revision {}.{} is beyond 1.x", revision >> 16, revision & 0xffff);
            return Err(error(Place::Byte(AT_REVISION), reason));
        }
        Ok(file)
    }

    /// All originals with their translations.
    fn strings(&self) -> Result<Vec<(Text<'a>, Text<'a>)>, CatalogueError> {
        let count = self.usize_at(AT_COUNT)?;
        let originals = self.usize_at(AT_ORIGINALS)?;
        let translations = self.usize_at(AT_TRANSLATIONS)?;
        for table in [originals, translations] {
            // [3] Before anything of that size is allocated.
            let end = count.checked_mul(ROW_BYTES).and_then(|bytes| bytes.checked_add(table));
            if end.is_none_or(|end| end > self.bytes.len()) {
                let reason = format!("{count} messages are more than the file has room for");
                return Err(error(Place::Byte(AT_COUNT), reason));
            }
        }
        // Strings that lie over each other would make much text of a small file.
        let mut left = self.bytes.len();
        let mut strings = Vec::with_capacity(count);
        for row in 0..count {
            let original = self.string(originals + row * ROW_BYTES, &mut left)?;
            let translation = self.string(translations + row * ROW_BYTES, &mut left)?;
            strings.push((original, translation));
        }
        Ok(strings)
    }

    /// The string of a table's row, if no more than `left` bytes of strings are before it.
    fn string(&self, row: usize, left: &mut usize) -> Result<Text<'a>, CatalogueError> {
        let (length, at) = (self.usize_at(row)?, self.usize_at(row + 4)?);
        let wrong = |reason: String| error(Place::Byte(row), reason);
        if length > MESSAGE_BYTES_MAX {
            return Err(wrong(format!("a string of {length} bytes; at most {MESSAGE_BYTES_MAX}")));
        }
        let with_nul = at.checked_add(length).and_then(|end| self.bytes.get(at..=end));
        let bytes = with_nul
            .and_then(|with_nul| with_nul.strip_suffix(&[0]))
            .ok_or_else(|| wrong(format!("no string of {length} bytes and a NUL is at {at}")))?;
        *left = left
            .checked_sub(length + 1)
            .ok_or_else(|| wrong("the strings lie over each other".into()))?;
        Ok(Text { at, bytes })
    }

    fn u32_at(&self, at: usize) -> Result<u32, CatalogueError> {
        let word = self.bytes.get(at..).and_then(|rest| rest.first_chunk::<4>());
        word.map(|word| (self.word)(*word))
            .ok_or_else(|| error(Place::Byte(self.bytes.len()), "the file ends too early"))
    }

    fn usize_at(&self, at: usize) -> Result<usize, CatalogueError> {
        let word = self.u32_at(at)?;
        usize::try_from(word).map_err(|_| error(Place::Byte(at), "a number beyond this machine's"))
    }
}
