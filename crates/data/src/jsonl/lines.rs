//! The lines of a JSONL file, and what happens to invalid lines.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use super::{Fields, Record};
use crate::{Error, Result};

/// Maximum length of a line: 16 MiB.
pub const LINE_BYTES_MAX: u64 = 16 << 20;
/// The first bytes of a gzip file.
const GZIP: &[u8] = &[0x1f, 0x8b];
/// The byte order mark, which some editors write at the beginning of a file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// Maximum number of skipped lines whose reasons are stored.
const REMEMBERED_MAX: usize = 100;

/// What happens to an invalid line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnBadLine {
    /// Reading ends with an error.
    #[default]
    Stop,
    /// The line is skipped and counted.
    Skip,
}

/// An invalid line that was skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadLine {
    /// The file.
    pub path: PathBuf,
    /// The line's number, from 1.
    pub line: u64,
    /// What is wrong with the line.
    pub reason: String,
}

/// An iterator over the records of a JSONL file. At most one line is in memory.
///
/// Blank lines are ignored. An item is an error if the file cannot be read, or if a line is invalid
/// and such lines are not skipped. The iterator ends after an error.
#[derive(Debug)]
pub struct Lines {
    path: PathBuf,
    file: BufReader<File>,
    fields: Fields,
    on_bad_line: OnBadLine,
    line: u64,
    bytes: u64,
    left_out: u64,
    remembered: Vec<BadLine>,
    ended: bool,
}

impl Lines {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be opened.
    pub fn open(path: &Path, fields: Fields, on_bad_line: OnBadLine) -> Result<Self> {
        let opened = gpipe_files::open(path).map_err(std::io::Error::from);
        let file = opened.map_err(Error::io("open", path))?;
        Ok(Self {
            path: path.to_owned(),
            file: BufReader::new(file),
            fields,
            on_bad_line,
            line: 0,
            bytes: 0,
            left_out: 0,
            remembered: Vec::new(),
            ended: false,
        })
    }

    /// The number and text of the next line that is not blank. `None` after the last line.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, and [`Error::BadLine`] if the line is too long or
    /// not UTF-8.
    pub fn next_text(&mut self) -> Result<Option<(u64, String)>> {
        while let Some(line) = self.next_line()? {
            match line {
                Ok(text) if text.trim().is_empty() => {}
                Ok(text) => return Ok(Some((self.line, text))),
                Err(reason) => {
                    let (path, line) = (self.path.clone(), self.line);
                    return Err(Error::BadLine { path, line, reason });
                }
            }
        }
        Ok(None)
    }

    /// The number of skipped lines, and the first 100 of them.
    #[must_use]
    pub fn left_out(&self) -> (u64, &[BadLine]) {
        (self.left_out, &self.remembered)
    }

    /// The number of the line that was read last, from 1; 0 before the first.
    #[must_use]
    pub fn line(&self) -> u64 {
        self.line
    }

    /// The number of bytes read so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Treats the line that was read last as invalid, for a `reason` found after parsing, such as
    /// an error of the chat template.
    ///
    /// # Errors
    /// [`Error::BadLine`] unless invalid lines are skipped.
    pub fn refuse(&mut self, reason: String) -> Result<()> {
        let (path, line) = (self.path.clone(), self.line);
        if self.on_bad_line == OnBadLine::Stop {
            self.ended = true;
            return Err(Error::BadLine { path, line, reason });
        }
        let bad = BadLine { path, line, reason };
        self.left_out += 1;
        if self.remembered.len() < REMEMBERED_MAX {
            self.remembered.push(bad);
        }
        Ok(())
    }

    /// The next line, or the reason why it is invalid. `None` after the last line.
    fn next_line(&mut self) -> Result<Option<std::result::Result<String, String>>> {
        let mut bytes = Vec::new();
        let read = (&mut self.file).take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut bytes);
        read.map_err(Error::io("read", &self.path))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        self.line += 1;
        self.bytes += bytes.len() as u64;
        if bytes.len() as u64 > LINE_BYTES_MAX {
            self.pass_over()?;
            return Ok(Some(Err(format!("it has more than {LINE_BYTES_MAX} bytes"))));
        }
        if self.line == 1 && bytes.starts_with(GZIP) {
            return Ok(Some(Err("the file is compressed: unpack it with gunzip".into())));
        }
        if self.line == 1 && bytes.starts_with(BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            format!("it is not UTF-8: invalid byte at {}", error.utf8_error().valid_up_to())
        });
        Ok(Some(text))
    }

    /// Skips the rest of a line that is too long.
    fn pass_over(&mut self) -> Result<()> {
        loop {
            let buffer = self.file.fill_buf().map_err(Error::io("read", &self.path))?;
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let (count, is_end) = (end.map_or(buffer.len(), |at| at + 1), end.is_some());
            let is_last = buffer.is_empty();
            self.file.consume(count);
            self.bytes += count as u64;
            if is_end || is_last {
                return Ok(());
            }
        }
    }
}

impl Iterator for Lines {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            let line = match self.next_line() {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            };
            let record = line.and_then(|line| {
                if line.trim().is_empty() {
                    return Ok(None);
                }
                Record::parse(&line, &self.fields).map(Some)
            });
            match record {
                Ok(Some(record)) => return Some(Ok(record)),
                Ok(None) => {} // a blank line
                Err(reason) => {
                    if let Err(error) = self.refuse(reason) {
                        return Some(Err(error));
                    }
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &[u8], on_bad_line: OnBadLine) -> (Vec<Result<Record>>, Lines) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let mut lines = Lines::open(file.path(), Fields::default(), on_bad_line).unwrap();
        let all = lines.by_ref().collect();
        (all, lines)
    }

    #[test]
    fn oracle_records_are_the_lines() {
        let text = b"{\"text\": \"a\"}\r\n\n{\"text\": \"b\"}\n  \n{\"text\": \"c\"}";
        let (all, lines) = lines(text, OnBadLine::Stop);
        let texts: Vec<Record> = all.into_iter().map(|record| record.unwrap()).collect();
        assert_eq!(texts, ["a", "b", "c"].map(|text| Record::Text(text.into())));
        assert_eq!((lines.line(), lines.left_out().0), (5, 0));
    }

    #[test]
    fn fault_bad_lines_are_named_or_counted() {
        let long =
            [b"{\"text\": \"".as_slice(), &vec![b'x'; (LINE_BYTES_MAX + 9) as usize], b"\"}"];
        let text = [
            b"{\"text\": \"a\"}\n{\n".as_slice(),
            &long.concat(),
            b"\n\xff\n{\"text\": 3}\n{\"text\": \"z\"}\n",
        ]
        .concat();
        let (all, _) = lines(&text, OnBadLine::Stop);
        assert_eq!(all.len(), 2, "it ends at the first");
        let error = all[1].as_ref().unwrap_err().to_string();
        assert!(error.contains("line 2: the JSON is incomplete"), "{error}");
        let (all, lines) = lines(&text, OnBadLine::Skip);
        assert_eq!(all.len(), 2);
        assert_eq!(*all[1].as_ref().unwrap(), Record::Text("z".into()));
        let (count, told) = lines.left_out();
        let numbers: Vec<u64> = told.iter().map(|bad| bad.line).collect();
        assert_eq!((count, numbers), (4, vec![2, 3, 4, 5]));
        assert!(told[1].reason.contains("more than"), "{told:?}");
        assert!(told[2].reason.contains("not UTF-8: invalid byte at 0"), "{told:?}");
    }
}
