//! `metrics.jsonl`: written a flushed line at a time, and read back even after a kill.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;

use super::{Evaluation, Record, Step};

/// Longest line read: thousands of stages fit.
pub const LINE_BYTES_MAX: u64 = 2 << 20;
/// Most records read from one file.
pub const RECORDS_MAX: usize = 2_000_000;
/// Most bytes read from one file.
pub const FILE_BYTES_MAX: u64 = 1 << 30;

/// What goes wrong with a metrics file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "create", "write" or "read".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line that is not a record, and not the torn last one of a killed run.
    #[error("{} line {line}: {reason}; repair or remove that line", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A file beyond one of the bounds.
    #[error("{} has more than {limit}, which is the most that is read: split it", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The bound.
        limit: String,
    },
}

/// A metrics file, open for the length of a run.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Writer {
    /// Creates `path`, over whatever was there.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let file = File::create(path).map_err(failed("create", path))?;
        Ok(Self { path: path.to_owned(), file: BufWriter::new(file) })
    }

    /// Appends one line, and hands it to the system: a run that is killed loses at most the line it writes.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn write(&mut self, record: &Record) -> Result<(), FileError> {
        let write = |file: &mut BufWriter<File>| {
            serde_json::to_writer(&mut *file, record)?;
            file.write_all(b"\n")?;
            file.flush()
        };
        write(&mut self.file).map_err(failed("write", &self.path))
    }
}

/// All records of `path`, in order. A last line without its end that is no record is what a killed run
/// left, and is passed over.
///
/// # Errors
/// [`FileError`]: the file cannot be read, is beyond a bound, or another line is no record.
pub fn read(path: &Path) -> Result<Vec<Record>, FileError> {
    let too_large = |limit: String| FileError::TooLarge { path: path.to_owned(), limit };
    let mut file = BufReader::new(File::open(path).map_err(failed("read", path))?);
    let (mut records, mut bytes_read) = (Vec::new(), 0);
    for line in 1.. {
        let mut bytes = Vec::new();
        let mut limited = (&mut file).take(LINE_BYTES_MAX + 1);
        let length = limited.read_until(b'\n', &mut bytes).map_err(failed("read", path))? as u64;
        bytes_read += length;
        if length == 0 {
            break;
        }
        if length > LINE_BYTES_MAX {
            return Err(too_large(format!("{LINE_BYTES_MAX} bytes in line {line}")));
        }
        if bytes_read > FILE_BYTES_MAX {
            return Err(too_large(format!("{FILE_BYTES_MAX} bytes")));
        }
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        if records.len() == RECORDS_MAX {
            return Err(too_large(format!("{RECORDS_MAX} records")));
        }
        match parse(&bytes) {
            Ok(record) => records.push(record),
            Err(_) if !bytes.ends_with(b"\n") => break, // torn
            Err(reason) => return Err(FileError::Line { path: path.to_owned(), line, reason }),
        }
    }
    Ok(records)
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

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError::Io { action, path, source }
}
