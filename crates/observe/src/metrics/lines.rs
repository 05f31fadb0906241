//! Reads `metrics.jsonl` line by line. A line is a record, blank, or the torn last one.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use serde::Deserialize;
use serde_json::Value;

use gpipe_files::open;

use super::{
    Evaluation, FileError, LINE_BYTES_MAX, Record, Step,
    file::{failed, too_large},
};

/// A line of the file.
pub(super) enum Line {
    Record(Box<Record>),
    Blank,
    /// The last line, if it has no newline and is not a record. A killed run leaves such a line.
    Torn,
}

/// An open file, of which one line is in memory.
pub(super) struct Lines<'a> {
    path: &'a Path,
    file: BufReader<File>,
    /// Maximum size of the file.
    most: u64,
    bytes: Vec<u8>,
    bytes_read: u64,
    count: usize,
}

impl<'a> Lines<'a> {
    pub(super) fn open(path: &'a Path, most: u64) -> Result<Self, FileError> {
        let file = BufReader::new(open(path).map_err(|error| failed("read", path)(error.into()))?);
        Ok(Self { path, file, most, bytes: Vec::new(), bytes_read: 0, count: 0 })
    }

    /// Reads the next line; `None` at the end of the file.
    pub(super) fn next_line(&mut self) -> Result<Option<Line>, FileError> {
        self.bytes.clear();
        let mut limited = (&mut self.file).take(LINE_BYTES_MAX + 1);
        let read = limited.read_until(b'\n', &mut self.bytes);
        let length = read.map_err(failed("read", self.path))? as u64;
        self.count += 1;
        self.bytes_read += length;
        if length == 0 {
            return Ok(None);
        }
        if length > LINE_BYTES_MAX {
            let limit = format!("{LINE_BYTES_MAX} bytes in line {}", self.count);
            return Err(too_large(self.path, limit));
        }
        if self.bytes_read > self.most {
            return Err(too_large(self.path, format!("{} bytes", self.most)));
        }
        if self.bytes.trim_ascii().is_empty() {
            return Ok(Some(Line::Blank));
        }
        match parse(&self.bytes) {
            Ok(record) => Ok(Some(Line::Record(Box::new(record)))),
            Err(_) if !self.bytes.ends_with(b"\n") => Ok(Some(Line::Torn)),
            Err(reason) => {
                let (path, line) = (self.path.to_owned(), self.count);
                Err(FileError::Line { path, line, reason })
            }
        }
    }

    /// The line read last, including its newline.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of bytes before the line read last.
    pub(super) fn bytes_before(&self) -> u64 {
        self.bytes_read - self.bytes.len() as u64
    }
}

fn parse(line: &[u8]) -> Result<Record, String> {
    let value: Value =
        serde_json::from_slice(line).map_err(|error| format!("it is not JSON ({error})"))?;
    let Value::Object(fields) = &value else {
        return Err("it is not a JSON object".into());
    };
    match fields.get("kind") {
        None => Step::deserialize(&value).map(Record::Step),
        Some(Value::String(kind)) if kind == "step" => Step::deserialize(&value).map(Record::Step),
        Some(Value::String(kind)) if kind == "evaluation" => {
            Evaluation::deserialize(&value).map(Record::Evaluation)
        }
        Some(kind) => return Err(format!("its kind is {kind}, not \"step\" or \"evaluation\"")),
    }
    .map_err(|error| format!("it is not a record ({error})"))
}
