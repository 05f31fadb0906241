//! Catalogues as the readers should understand them, written in the plainest way.

use gpipe_data::parallel::Message;

/// A message without a context and a plural.
pub fn message(id: &str, string: &str) -> Message {
    Message { context: None, id: id.into(), plural: None, strings: vec![string.into()] }
}

/// A header of a charset, a language and the plurals of most.
pub fn header(charset: &str, language: &str) -> String {
    format!(
        "Project-Id-Version: made 1\nLanguage: {language}\nContent-Type: text/plain; charset={charset}\n\
         Plural-Forms: nplurals=2; plural=(n != 1);\n"
    )
}

/// How a compiled catalogue is laid out.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    pub word: fn(u32) -> [u8; 4],
    pub revision: u32,
    pub encode: fn(&str) -> Vec<u8>,
}

fn utf8(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}

pub const LITTLE: Layout = Layout { word: u32::to_le_bytes, revision: 0, encode: utf8 };
pub const BIG: Layout = Layout { word: u32::to_be_bytes, revision: 1, encode: utf8 };

/// A compiled catalogue.
pub fn mo(header: &str, messages: &[Message], layout: Layout) -> Vec<u8> {
    let mut pairs = vec![(Vec::new(), (layout.encode)(header))];
    for message in messages {
        let context = message.context.as_ref().map(|context| format!("{context}\u{4}"));
        let plural = message.plural.as_ref().map(|plural| format!("\0{plural}"));
        let id = context.unwrap_or_default() + &message.id + &plural.unwrap_or_default();
        pairs.push(((layout.encode)(&id), (layout.encode)(&message.strings.join("\0"))));
    }
    pairs.sort();
    let count = pairs.len();
    let (originals, translations) = (28, 28 + 8 * count);
    let mut file = Vec::new();
    for word in [0x9504_12de, layout.revision, count as u32, originals, translations as u32, 0, 0] {
        file.extend((layout.word)(word));
    }
    let mut at = translations + 8 * count;
    let strings = || pairs.iter().map(|(id, _)| id).chain(pairs.iter().map(|(_, text)| text));
    for string in strings() {
        file.extend((layout.word)(string.len() as u32));
        file.extend((layout.word)(at as u32));
        at += string.len() + 1;
    }
    for string in strings() {
        file.extend(string);
        file.push(0);
    }
    file
}

/// A catalogue as text, with comments between the messages.
pub fn po(header: &str, messages: &[Message]) -> String {
    let mut file = format!("# Made by a test.\nmsgid \"\"\nmsgstr {}\n", quoted(header));
    for message in messages {
        file += "\n# remark \"\n#. extracted\n#: file.c:1\n#, c-format\n#| msgid \"before\"\n";
        if let Some(context) = &message.context {
            file += &format!("msgctxt {}\n", quoted(context));
        }
        file += &format!("msgid {}\n", quoted(&message.id));
        match &message.plural {
            None => file += &format!("msgstr {}\n", quoted(&message.strings[0])),
            Some(plural) => {
                file += &format!("msgid_plural {}\n", quoted(plural));
                for (form, string) in message.strings.iter().enumerate() {
                    file += &format!("msgstr[{form}] {}\n", quoted(string));
                }
            }
        }
    }
    file + "\n#, fuzzy\n#~ msgid \"obsolete\"\n#~ msgstr \"überholt\"\n"
}

/// In quotes, on a line for each line of the text where there are several.
fn quoted(text: &str) -> String {
    let escaped = |line: &str| {
        let mut out = String::from("\"");
        for character in line.chars() {
            match character {
                '\n' => out += "\\n",
                '\t' => out += "\\t",
                '\r' => out += "\\r",
                '"' => out += "\\\"",
                '\\' => out += "\\\\",
                other if other.is_ascii_control() => out += &format!("\\{:03o}", u32::from(other)),
                other => out.push(other),
            }
        }
        out + "\""
    };
    let lines: Vec<String> = text.split_inclusive('\n').map(escaped).collect();
    match lines.len() {
        0 => "\"\"".into(),
        1 => lines[0].clone(),
        _ => format!("\"\"\n{}", lines.join("\n")),
    }
}
