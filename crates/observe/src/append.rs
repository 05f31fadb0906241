//! Files that grow by whole pieces, such as lines or events. A piece is written completely or, if
//! the write fails, not at all, so the next piece continues a valid file.
//!
//! This module does not know what a piece is. A process killed while writing can still leave a torn
//! piece, which readers skip.

use std::{
    fmt::Debug,
    fs::File,
    io::{self, Seek, SeekFrom, Write},
};

/// The destination: a file or, in tests, a disk that fills up.
pub(crate) trait Sink: Write + Debug + Send + Sync {
    /// Sets the length to `length` bytes. The next write starts there.
    fn cut(&mut self, length: u64) -> io::Result<()>;

    /// Waits until all content is on disk.
    fn sync(&mut self) -> io::Result<()>;
}

impl Sink for File {
    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)?;
        self.seek(SeekFrom::Start(length)).map(drop)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}

/// A sink that knows how many of its bytes are complete pieces.
#[derive(Debug)]
pub(crate) struct Append {
    sink: Box<dyn Sink>,
    /// Length of the complete pieces.
    length: u64,
    /// Whether part of a piece may follow the complete ones.
    is_torn: bool,
}

impl Append {
    /// Appends to `sink`, which holds `length` bytes and whose next write starts after them.
    pub(crate) fn after(length: u64, sink: impl Sink + 'static) -> Self {
        Self { sink: Box::new(sink), length, is_torn: false }
    }

    /// Writes `piece`, in a single call if the system accepts all of it. After an error the written
    /// part is cut off, and the next piece may succeed. If cutting fails, the next call retries it.
    pub(crate) fn piece(&mut self, piece: &[u8]) -> io::Result<()> {
        self.cut_torn()?;
        let written = self.sink.write_all(piece);
        match written {
            Ok(()) => self.length += piece.len() as u64,
            Err(_) => {
                self.is_torn = true;
                // Report the write's error, which says more. The next call retries the cut.
                let _ = self.cut_torn();
            }
        }
        written
    }

    /// Waits until all pieces are on disk.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        self.sink.sync()
    }

    fn cut_torn(&mut self) -> io::Result<()> {
        if self.is_torn {
            self.sink.cut(self.length)?;
            self.is_torn = false;
        }
        Ok(())
    }
}

/// An in-memory disk that can be full.
#[cfg(test)]
pub(crate) mod testing {
    use std::sync::{Arc, Mutex, MutexGuard};

    use super::*;

    /// The disk's content and when it fails.
    #[derive(Debug)]
    pub(crate) struct State {
        pub(crate) bytes: Vec<u8>,
        pub(crate) bytes_max: usize,
        pub(crate) refuses_cuts: bool,
        /// Number of calls that wrote something.
        pub(crate) writes: usize,
    }

    /// A handle to a disk; clones share it.
    #[derive(Debug, Clone)]
    pub(crate) struct Disk(Arc<Mutex<State>>);

    impl Disk {
        pub(crate) fn new(bytes: &[u8]) -> Self {
            let (bytes, bytes_max) = (bytes.to_vec(), usize::MAX);
            Self(Arc::new(Mutex::new(State { bytes, bytes_max, refuses_cuts: false, writes: 0 })))
        }

        pub(crate) fn state(&self) -> MutexGuard<'_, State> {
            self.0.lock().unwrap()
        }

        /// A writer over this disk.
        pub(crate) fn append(&self) -> Append {
            Append::after(self.state().bytes.len() as u64, self.clone())
        }
    }

    impl Write for Disk {
        /// Writes as much as fits, as a file does, and fails once the disk is full.
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut state = self.state();
            match bytes.len().min(state.bytes_max.saturating_sub(state.bytes.len())) {
                0 => Err(io::ErrorKind::StorageFull.into()),
                room => {
                    state.bytes.extend(&bytes[..room]);
                    state.writes += 1;
                    Ok(room)
                }
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Sink for Disk {
        fn cut(&mut self, length: u64) -> io::Result<()> {
            let mut state = self.state();
            if state.refuses_cuts {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            state.bytes.truncate(length as usize);
            Ok(())
        }

        fn sync(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{testing::Disk, *};

    #[test]
    fn fault_a_torn_piece_that_could_not_be_cut_off_is_cut_off_before_the_next() {
        let disk = Disk::new(b"good");
        let mut file = disk.append();
        (disk.state().bytes_max, disk.state().refuses_cuts) = (6, true);
        let error = file.piece(b"piece").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull, "not the cut's error");
        disk.state().bytes_max = usize::MAX;
        let error = file.piece(b"next").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(disk.state().bytes, b"goodpi", "nothing is written after a torn piece");
        disk.state().refuses_cuts = false;
        file.piece(b"next").unwrap();
        assert_eq!(disk.state().bytes, b"goodnext");
    }

    #[test]
    fn oracle_a_file_that_is_cut_goes_on_where_it_was_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"good, torn").unwrap();
        file.cut(4).unwrap();
        file.write_all(b", whole").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"good, whole");
    }
}
