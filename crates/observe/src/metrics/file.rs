//! `metrics.jsonl`: written in whole lines, readable even after a kill, and continued by a resumed
//! run.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use super::{
    Record,
    lines::{Line, Lines},
};
use crate::append::Append;

/// Maximum length of a line, in bytes. A record of thousands of stages fits.
pub const LINE_BYTES_MAX: u64 = 2 << 20;
/// Maximum number of records read from one file.
pub const RECORDS_MAX: usize = 2_000_000;
/// Maximum number of bytes read from one file.
pub const FILE_BYTES_MAX: u64 = 1 << 30;

/// An error of a metrics file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The operating system reported an error.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The attempted action: "create", "write", "sync", "read" or "replace".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A line is neither a record nor the torn last line of a killed run.
    #[error("{} line {line}: {reason}; repair or remove that line", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The file exceeds a limit.
    #[error("{} has more than {limit}, which is the most that is read: split it", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: String,
    },
}

/// A metrics file, open for the duration of a run.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: Append,
}

impl Writer {
    /// Creates `path`, replacing an existing file.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let file = File::create(path).map_err(failed("create", path))?;
        Ok(Self { path: path.to_owned(), file: Append::after(0, file) })
    }

    /// Opens `path` to continue it, and creates it if it does not exist. Removes the records that
    /// `keep` rejects, and a torn last line.
    ///
    /// The other lines stay byte for byte. If only the last record's newline is missing, it is
    /// added. If anything must change, the new content is written to `path` + `.writing`, which is
    /// then renamed to `path`, so a crash leaves either the old file or the new one. One line is in
    /// memory at a time.
    ///
    /// # Errors
    /// [`FileError`]: the file cannot be read or written, exceeds a limit, or has a line that is
    /// not a record. The file is unchanged then.
    pub fn resume(path: &Path, keep: impl FnMut(&Record) -> bool) -> Result<Self, FileError> {
        match fs::exists(path) {
            Ok(true) => {}
            Ok(false) => return Self::create(path),
            Err(source) => return Err(failed("read", path)(source)),
        }
        let mut aside = path.as_os_str().to_owned();
        aside.push(".writing");
        let aside = PathBuf::from(aside);
        let copy = copy_of_kept(path, &aside, keep).and_then(|copy| {
            if copy.is_some() {
                fs::rename(&aside, path).map_err(failed("replace", path))?;
            }
            Ok(copy)
        });
        if copy.is_err() {
            let _ = fs::remove_file(&aside);
        }
        let mut file = match copy? {
            Some(file) => file,
            None => OpenOptions::new().write(true).open(path).map_err(failed("write", path))?,
        };
        let length = file.seek(SeekFrom::End(0)).map_err(failed("write", path))?;
        Ok(Self { path: path.to_owned(), file: Append::after(length, file) })
    }

    /// Appends one line in a single write, so a killed run loses at most the line being written.
    /// After an error nothing of the line is in the file, and later writes may succeed.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn write(&mut self, record: &Record) -> Result<(), FileError> {
        let line = serde_json::to_vec(record).map_err(io::Error::from);
        let mut line = line.map_err(failed("write", &self.path))?;
        line.push(b'\n');
        self.file.piece(&line).map_err(failed("write", &self.path))
    }

    /// Waits until all lines are on disk, where they survive a power failure.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn sync(&mut self) -> Result<(), FileError> {
        self.file.sync().map_err(failed("sync", &self.path))
    }
}

/// Writes the kept lines of `path` to `aside`. Returns `None` if `path` needs no change.
fn copy_of_kept(
    path: &Path,
    aside: &Path,
    mut keep: impl FnMut(&Record) -> bool,
) -> Result<Option<File>, FileError> {
    let mut lines = Lines::open(path, u64::MAX)?;
    let mut copy = None;
    while let Some(line) = lines.next_line()? {
        let is_kept = match line {
            Line::Record(record) => keep(&record),
            Line::Blank => true,
            Line::Torn => false,
        };
        // A kill may have cut off only the newline, which the next line needs.
        let has_end = lines.bytes().ends_with(b"\n");
        if copy.is_none() && !(is_kept && has_end) {
            copy = Some(copy_of_head(path, lines.bytes_before(), aside)?);
        }
        if let (Some(copy), true) = (&mut copy, is_kept) {
            let end: &[u8] = if has_end { b"" } else { b"\n" };
            let written = copy.write_all(lines.bytes()).and_then(|()| copy.write_all(end));
            written.map_err(failed("write", aside))?;
        }
    }
    let finish = |copy: BufWriter<File>| {
        let file = copy.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all().map(|()| file)
    };
    copy.map(finish).transpose().map_err(failed("write", aside))
}

/// Creates `aside` with the first `length` bytes of `path`.
fn copy_of_head(path: &Path, length: u64, aside: &Path) -> Result<BufWriter<File>, FileError> {
    let mut head = File::open(path).map_err(failed("read", path))?.take(length);
    let mut copy = BufWriter::new(File::create(aside).map_err(failed("create", aside))?);
    io::copy(&mut head, &mut copy).map_err(failed("write", aside))?;
    Ok(copy)
}

/// Calls `each` with every record of `path`, in order. One record is in memory at a time. A torn
/// last line is skipped.
///
/// # Errors
/// As [`read`], except that neither the size nor the number of records is limited: a run that has
/// written a large file can go on.
pub fn scan(path: &Path, mut each: impl FnMut(&Record)) -> Result<(), FileError> {
    let mut lines = Lines::open(path, u64::MAX)?;
    while let Some(line) = lines.next_line()? {
        if let Line::Record(record) = line {
            each(&record);
        }
    }
    Ok(())
}

/// Reads all records of `path`, in order. A last line that has no newline and is not a record was
/// torn by a kill, and is skipped.
///
/// # Errors
/// [`FileError`]: the file cannot be read, exceeds a limit, or has another line that is not a
/// record.
pub fn read(path: &Path) -> Result<Vec<Record>, FileError> {
    let mut lines = Lines::open(path, FILE_BYTES_MAX)?;
    let mut records = Vec::new();
    while let Some(line) = lines.next_line()? {
        let Line::Record(record) = line else { continue };
        if records.len() == RECORDS_MAX {
            return Err(too_large(path, format!("{RECORDS_MAX} records")));
        }
        records.push(*record);
    }
    Ok(records)
}

pub(super) fn too_large(path: &Path, limit: String) -> FileError {
    FileError::TooLarge { path: path.to_owned(), limit }
}

pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError::Io { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{append::testing::Disk, metrics::Step};

    fn record(step: u64) -> Record {
        Record::Step(Step { step, loss: f64::NAN, ..Step::default() })
    }

    #[test]
    fn fault_a_line_that_a_full_disk_refuses_leaves_nothing_wherever_it_was_torn() {
        let line = serde_json::to_string(&record(2)).unwrap() + "\n";
        for room in 0..line.len() {
            let disk = Disk::new(b"");
            let mut writer = Writer { path: "metrics.jsonl".into(), file: disk.append() };
            writer.write(&record(1)).unwrap();
            let whole = disk.state().bytes.clone();
            disk.state().bytes_max = whole.len() + room;
            let error = writer.write(&record(2)).unwrap_err().to_string();
            assert!(error.starts_with("cannot write metrics.jsonl: "), "{error}");
            assert_eq!(disk.state().bytes, whole, "room for {room} bytes");
            disk.state().bytes_max = usize::MAX;
            writer.write(&record(2)).unwrap();
            assert_eq!(disk.state().bytes, [&whole, line.as_bytes()].concat());
        }
    }

    #[test]
    fn oracle_each_line_is_written_by_one_call() {
        let disk = Disk::new(b"");
        let mut writer = Writer { path: "metrics.jsonl".into(), file: disk.append() };
        for step in 1..=3 {
            writer.write(&record(step)).unwrap();
            assert_eq!(disk.state().writes as u64, step);
        }
    }
}
