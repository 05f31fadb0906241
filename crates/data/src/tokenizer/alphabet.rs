//! The 256 characters that stand for the 256 bytes in a byte-level vocabulary.
//!
//! The mapping is GPT-2's. A byte that is printable in Latin-1 stands for itself. The other bytes,
//! in order, take the characters from U+0100. A vocabulary is thus plain text, and the `tokenizers`
//! crate reads and writes the same.

/// The character of each byte, indexed by byte.
pub(super) fn byte_chars() -> [char; 256] {
    let mut chars = ['\0'; 256];
    let mut unprintable = 0x100;
    for (byte, slot) in (0..=255u8).zip(&mut chars) {
        *slot = match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
            _ => {
                unprintable += 1;
                char::from_u32(unprintable - 1).unwrap_or_default() // 0x100..0x144 are characters.
            }
        };
    }
    chars
}

/// The bytes that characters of the alphabet stand for. Other characters are skipped.
pub(super) fn bytes(text: &str) -> Vec<u8> {
    let alphabet = byte_chars();
    let byte = |char| (0..=255u8).zip(alphabet).find_map(|(byte, c)| (c == char).then_some(byte));
    text.chars().filter_map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    #[test]
    fn oracle_the_dependency_has_the_same_alphabet() {
        let theirs = ByteLevel::alphabet();
        let ours = byte_chars();
        assert_eq!(theirs.len(), 256);
        assert!(ours.iter().all(|c| theirs.contains(c)));
        assert_eq!(ours[usize::from(b' ')], 'Ġ');
        assert_eq!(ours[usize::from(b'\n')], 'Ċ');
    }
}
