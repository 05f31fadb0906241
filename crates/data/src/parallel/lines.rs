//! Reads files of pairs: lines of text, plain or gzip.

use std::io::Read;
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::ParallelError;
use crate::corpus::read;
use crate::{FILE_BYTES_MAX, Result};

/// The first bytes of a gzip file, whatever its name.
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];

/// A file's text in memory.
pub(super) struct Lines<'a> {
    path: &'a Path,
    bytes: Vec<u8>,
}

impl<'a> Lines<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self> {
        let bytes = read::bytes(path)?;
        let bytes = if bytes.starts_with(GZIP_MAGIC) {
            unpacked(path, &bytes, FILE_BYTES_MAX)?
        } else {
            bytes
        };
        Ok(Self { path, bytes })
    }

    /// The lines, without line ends, numbered from 1. Only `\n` and `\r\n` end a line, because
    /// other programs that write aligned files use no other line ends.
    pub(super) fn iter(&self) -> impl Iterator<Item = Result<(usize, &str)>> {
        let bytes = self.bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&self.bytes);
        let lines = bytes.split_inclusive(|byte| *byte == b'\n').enumerate();
        lines.map(|(index, line)| {
            let line = line.strip_suffix(b"\n").unwrap_or(line);
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let text = std::str::from_utf8(line).map_err(|error| ParallelError::NotUtf8 {
                path: self.path.to_path_buf(),
                line: index + 1,
                byte: error.valid_up_to() + 1,
            })?;
            Ok((index + 1, text))
        })
    }

    pub(super) fn count(&self) -> usize {
        self.bytes.split_inclusive(|byte| *byte == b'\n').count()
    }
}

/// The content of a gzip file of one or more members, if it has at most `bytes_max` bytes.
fn unpacked(path: &Path, bytes: &[u8], bytes_max: u64) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    let mut decoder = MultiGzDecoder::new(bytes).take(bytes_max.saturating_add(1));
    decoder.read_to_end(&mut content).map_err(|error| ParallelError::Gzip {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })?;
    if content.len() as u64 > bytes_max {
        return Err(ParallelError::Unpacked { path: path.to_path_buf(), bytes_max }.into());
    }
    Ok(content)
}

/// Calls `pair` with each line's two columns.
pub(super) fn read_tsv(path: &Path, mut pair: impl FnMut(&str, &str) -> Result<()>) -> Result<()> {
    for line in Lines::open(path)?.iter() {
        let (number, text) = line?;
        match text.split_once('\t') {
            Some((source, target)) if !target.contains('\t') => pair(source, target)?,
            _ => {
                let columns = text.split('\t').count();
                return Err(ParallelError::Columns {
                    path: path.to_path_buf(),
                    line: number,
                    columns,
                }
                .into());
            }
        }
    }
    Ok(())
}

/// Calls `pair` with each pair of corresponding lines of two files.
pub(super) fn read_aligned(
    source: &Path,
    target: &Path,
    mut pair: impl FnMut(&str, &str) -> Result<()>,
) -> Result<()> {
    let (sources, targets) = (Lines::open(source)?, Lines::open(target)?);
    let (foreign_lines, english_lines) = (sources.count(), targets.count());
    if foreign_lines != english_lines {
        let (foreign, english) = (source.to_path_buf(), target.to_path_buf());
        return Err(
            ParallelError::Misaligned { foreign, foreign_lines, english, english_lines }.into()
        );
    }
    for (source, target) in sources.iter().zip(targets.iter()) {
        pair(source?.1, target?.1)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn packed(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn fault_an_archive_that_unpacks_to_too_much() {
        let bomb = packed(&vec![0; 1_000_000]);
        assert!(bomb.len() < 10_000);
        let path = Path::new("bomb.gz");
        assert_eq!(unpacked(path, &bomb, 1_000_000).unwrap().len(), 1_000_000);
        let error = unpacked(path, &bomb, 999_999).unwrap_err();
        assert!(
            error.to_string().contains("`bomb.gz` unpacks to more than 999999 bytes"),
            "{error}"
        );
    }

    #[test]
    fn oracle_members_of_an_archive_follow_each_other() {
        let both = [packed(b"a\n"), packed(b"b\n")].concat();
        assert_eq!(unpacked(Path::new("x"), &both, 100).unwrap(), b"a\nb\n");
    }
}
