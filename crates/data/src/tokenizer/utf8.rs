//! Decodes UTF-8 incrementally, and holds back incomplete characters.
//!
//! Byte-level tokens may end inside a character. The stream of the `tokenizers` library holds back
//! its text until all of it is valid. After an invalid byte from a model, that never happens. This
//! one prints U+FFFD for such a byte and continues.

/// A decoder that holds back at most 3 bytes, the beginning of one character.
#[derive(Debug, Default)]
pub(super) struct Utf8Stream {
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Adds `bytes` and returns the text that is complete now. However the bytes are split, the
    /// concatenated results equal those of `String::from_utf8_lossy` on all of them.
    pub(super) fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        let mut incomplete = Vec::new();
        let mut chunks = self.held.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let is_last = chunks.peek().is_none();
            match std::str::from_utf8(chunk.invalid()) {
                Ok(_) => {} // nothing is invalid
                Err(error) if is_last && error.error_len().is_none() => {
                    incomplete = chunk.invalid().to_vec();
                }
                Err(_) => text.push(char::REPLACEMENT_CHARACTER),
            }
        }
        self.held = incomplete;
        text
    }

    /// The rest at the end of the stream: empty, or U+FFFD for an incomplete character.
    pub(super) fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use gpipe_core::splitmix::Stream;

    use super::*;

    /// Pushes `bytes` in random parts.
    fn in_parts(bytes: &[u8], stream: &mut Stream) -> String {
        let (mut rest, mut utf8, mut text) = (bytes, Utf8Stream::default(), String::new());
        while !rest.is_empty() {
            let (part, after) = rest.split_at(stream.below(rest.len().min(4) + 1));
            text.push_str(&utf8.push(part));
            assert!(utf8.held.len() <= 3, "{:?}", utf8.held);
            rest = after;
        }
        text + &utf8.finish()
    }

    #[test]
    fn property_parts_read_as_the_whole() {
        let mut stream = Stream::new(7);
        let characters = ["a", "é", "漢", "🦀", "\n", "\u{fffd}"];
        for _ in 0..300 {
            let text: String =
                (0..20).map(|_| characters[stream.below(characters.len())]).collect();
            assert_eq!(in_parts(text.as_bytes(), &mut stream), text);
            // Damage the text with random bytes, mostly leading and continuation bytes.
            let mut bytes = text.into_bytes();
            for _ in 0..6 {
                let at = stream.below(bytes.len());
                bytes[at] = 0x80 | stream.below(0x80) as u8;
            }
            assert_eq!(in_parts(&bytes, &mut stream), String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn oracle_a_character_appears_when_it_is_whole() {
        let mut utf8 = Utf8Stream::default();
        let shown: Vec<String> = "é🦀!".bytes().map(|byte| utf8.push(&[byte])).collect();
        assert_eq!(shown, ["", "é", "", "", "", "🦀", "!"]);
        assert_eq!(utf8.push(&[b'x', 0xe6]), "x");
        assert_eq!(utf8.push(b"y"), "\u{fffd}y", "a follower that does not come");
        assert_eq!(utf8.push(&[0xf0, 0x9f]), "");
        assert_eq!(utf8.finish(), "\u{fffd}");
    }
}
