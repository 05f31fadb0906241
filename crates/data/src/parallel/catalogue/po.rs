//! Catalogues as translators write them (`.po`), line by line:
//!
//! ```text
//! # comments; "#," has flags, and "#~" is before a line of a message that is no longer used
//! #, fuzzy
//! msgctxt "menu"                  entries of these keywords in this order; the first and the third may be absent
//! msgid "one %d file"
//! msgid_plural "%d files"
//! msgstr[0] "eine Datei"          with a plural, otherwise `msgstr`
//! msgstr[1] ""
//! "%d Dateien\n"                  more of the string before
//! ```
//!
//! The entry with an empty `msgid` is the header.

use super::{
    Catalogue, CatalogueError, FORMS_MAX, MESSAGE_BYTES_MAX, Message, Place, charset_of, error,
};

/// The header is looked for in this many first bytes.
const HEADER_BYTES: usize = 64 << 10;

pub(super) fn read(bytes: &[u8]) -> Result<Catalogue, CatalogueError> {
    let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
    let charset = charset_of(&header(bytes)).map_err(|reason| error(Place::Line(1), reason))?;
    let text = charset.decode(bytes).map_err(|bad| {
        let before = bytes.iter().take(bad).filter(|byte| **byte == b'\n').count();
        error(Place::Line(before + 1), "the text is not UTF-8")
    })?;
    let mut reader = Reader::default();
    for line in text.lines() {
        reader.line(line.trim())?;
    }
    reader.end_entry()?;
    Ok(reader.catalogue)
}

/// The header of a file whose charset is not known yet, as far as it can be read: what matters in it is ASCII.
fn header(bytes: &[u8]) -> String {
    let head = String::from_utf8_lossy(bytes.get(..HEADER_BYTES).unwrap_or(bytes));
    let mut reader = Reader::default();
    for line in head.lines() {
        if reader.header.is_some() || reader.line(line.trim()).is_err() {
            break;
        }
    }
    let _ = reader.end_entry();
    reader.header.unwrap_or_default()
}

#[derive(Default)]
struct Reader {
    /// The line that is read, from 1.
    line: usize,
    entry: Entry,
    header: Option<String>,
    catalogue: Catalogue,
}

/// The entry that is read.
#[derive(Default)]
struct Entry {
    is_fuzzy: bool,
    context: Option<String>,
    id: Option<String>,
    plural: Option<String>,
    strings: Vec<String>,
    last: Option<Keyword>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Keyword {
    Context,
    Id,
    Plural,
    Form,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), CatalogueError> {
        self.line += 1;
        if let Some(comment) = line.strip_prefix('#') {
            return self.comment(comment);
        }
        let end = line.find(['"', '[', ' ', '\t']).unwrap_or(line.len());
        let (keyword, rest) = line.split_at_checked(end).unwrap_or((line, ""));
        let rest = rest.trim_start();
        match keyword {
            "" if rest.is_empty() => Ok(()),
            "" => self.continue_string(rest),
            "msgctxt" => self.start(Keyword::Context, rest),
            "msgid" => self.start(Keyword::Id, rest),
            "msgid_plural" => self.start(Keyword::Plural, rest),
            "msgstr" => self.start_form(rest),
            "domain" => self.end_entry(),
            _ => Err(self.wrong(format!("`{}` is no keyword", shortened(keyword)))),
        }
    }

    fn comment(&mut self, comment: &str) -> Result<(), CatalogueError> {
        // A comment stands before its entry.
        if !self.entry.strings.is_empty() {
            self.end_entry()?;
        }
        match comment.chars().next() {
            // Flags of an obsolete message are none of the next one's.
            Some('~') => self.entry.is_fuzzy = false,
            Some(',') if comment.split([',', ' ', '\t']).any(|flag| flag == "fuzzy") => {
                self.entry.is_fuzzy = true;
            }
            _ => {}
        }
        Ok(())
    }

    /// A keyword before the translation, and its string.
    fn start(&mut self, keyword: Keyword, string: &str) -> Result<(), CatalogueError> {
        if keyword != Keyword::Plural && !self.entry.strings.is_empty() {
            self.end_entry()?;
        }
        let is_in_order = match keyword {
            Keyword::Context => self.entry.last.is_none(),
            Keyword::Id => matches!(self.entry.last, None | Some(Keyword::Context)),
            _ => self.entry.last == Some(Keyword::Id),
        };
        if !is_in_order {
            return Err(
                self.wrong("the message before has no `msgstr`, or keywords are out of order")
            );
        }
        self.entry.last = Some(keyword);
        match keyword {
            Keyword::Context => self.entry.context = Some(String::new()),
            Keyword::Plural => self.entry.plural = Some(String::new()),
            _ => self.entry.id = Some(String::new()),
        }
        self.continue_string(string)
    }

    /// `msgstr "..."` or `msgstr[0] "..."`, from after the word.
    fn start_form(&mut self, rest: &str) -> Result<(), CatalogueError> {
        let next = self.entry.strings.len();
        let string = match rest.strip_prefix('[') {
            Some(indexed) => {
                let parts = indexed.split_once(']');
                let index = parts.and_then(|(index, _)| index.trim().parse().ok());
                if index != Some(next) || next >= FORMS_MAX || self.entry.plural.is_none() {
                    return Err(self.wrong("a plural form without a plural, or out of order"));
                }
                parts.map_or("", |(_, string)| string.trim_start())
            }
            None if next > 0 || self.entry.plural.is_some() => {
                return Err(self.wrong("a second `msgstr`, or one without [0] after a plural"));
            }
            None => rest,
        };
        if self.entry.id.is_none() {
            return Err(self.wrong("a `msgstr` without a `msgid`"));
        }
        self.entry.strings.push(String::new());
        self.entry.last = Some(Keyword::Form);
        self.continue_string(string)
    }

    /// Adds to the string of the last keyword.
    fn continue_string(&mut self, quoted: &str) -> Result<(), CatalogueError> {
        let place = Place::Line(self.line);
        let entry = &mut self.entry;
        let string = match entry.last {
            None => None,
            Some(Keyword::Context) => entry.context.as_mut(),
            Some(Keyword::Id) => entry.id.as_mut(),
            Some(Keyword::Plural) => entry.plural.as_mut(),
            Some(Keyword::Form) => entry.strings.last_mut(),
        };
        let string = string.ok_or_else(|| error(place, "a string that belongs to no keyword"))?;
        unquote(quoted, string).map_err(|reason| error(place, reason))
    }

    fn end_entry(&mut self) -> Result<(), CatalogueError> {
        let Entry { is_fuzzy, context, id, plural, strings, .. } = std::mem::take(&mut self.entry);
        let id = match id {
            None if context.is_none() => return Ok(()), // Comments alone.
            Some(id) if !strings.is_empty() => id,
            _ => return Err(self.wrong("the message before has no `msgstr`")),
        };
        let is_translated = strings.iter().any(|string| !string.is_empty());
        if id.is_empty() && context.is_none() {
            if self.header.is_none() {
                let header = strings.concat();
                self.catalogue = Catalogue {
                    messages: std::mem::take(&mut self.catalogue.messages),
                    fuzzy: self.catalogue.fuzzy,
                    ..Catalogue::with_header(&header)
                };
                self.header = Some(header);
            }
        } else if is_fuzzy {
            self.catalogue.fuzzy += 1;
        } else if is_translated {
            self.catalogue.messages.push(Message { context, id, plural, strings });
        }
        Ok(())
    }

    fn wrong(&self, reason: impl Into<String>) -> CatalogueError {
        error(Place::Line(self.line), reason)
    }
}

/// Adds what stands between quotes, without its escapes.
fn unquote(quoted: &str, string: &mut String) -> Result<(), String> {
    let mut chars = quoted.chars();
    if chars.next() != Some('"') {
        return Err("a string does not begin with a quote".into());
    }
    loop {
        let character = match chars.next() {
            None => return Err("a string does not end with a quote".into()),
            Some('"') => break,
            Some('\\') => escape(&mut chars)?,
            Some(character) => character,
        };
        string.push(character);
    }
    if !chars.as_str().is_empty() {
        return Err("there is something behind a string".into());
    }
    if string.len() > MESSAGE_BYTES_MAX {
        return Err(format!("a string of more than {MESSAGE_BYTES_MAX} bytes"));
    }
    Ok(())
}

/// The character that an escape stands for, as in C; `chars` are behind the backslash.
fn escape(chars: &mut std::str::Chars<'_>) -> Result<char, String> {
    let first = chars.next().ok_or("a string ends within an escape")?;
    let (base, digits_max, code) = match first {
        'n' => return Ok('\n'),
        't' => return Ok('\t'),
        'r' => return Ok('\r'),
        'a' => return Ok('\u{7}'),
        'b' => return Ok('\u{8}'),
        'v' => return Ok('\u{b}'),
        'f' => return Ok('\u{c}'),
        '"' | '\\' | '\'' | '?' => return Ok(first),
        'x' => (16, 2, 0),
        _ => (8, 2, first.to_digit(8).ok_or_else(|| format!("the escape \\{first} is unknown"))?),
    };
    let mut code = code;
    for _ in 0..digits_max {
        let Some(digit) = chars.clone().next().and_then(|digit| digit.to_digit(base)) else {
            break;
        };
        chars.next();
        code = code * base + digit;
    }
    // A byte of a longer character would have to be put together with others: nobody writes that.
    char::from_u32(code).filter(char::is_ascii).ok_or_else(|| {
        format!("the escape of byte {code} is not ASCII; write the character itself")
    })
}

fn shortened(text: &str) -> String {
    text.chars().take(20).collect()
}
