//! Files that grow by whole pieces: a line, an event. A piece is in the file completely or, after a
//! failed write, not at all, so that the next one continues a valid file.
//!
//! Not here: what a piece is. A process killed while it writes can still leave a torn piece; who
//! reads passes over it.

use std::{
    fmt::Debug,
    fs::File,
    io::{self, Seek, SeekFrom, Write},
};

/// What is appended to: a file, or in tests a disk that fills up.
pub(crate) trait Sink: Write + Debug + Send + Sync {
    /// Makes it `length` bytes long; the next write begins there.
    fn cut(&mut self, length: u64) -> io::Result<()>;

    /// Waits until all of it is on disk.
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

/// A sink, and how much of it is good.
#[derive(Debug)]
pub(crate) struct Append {
    sink: Box<dyn Sink>,
    /// Of the whole pieces.
    length: u64,
    /// Whether part of a piece may follow them.
    is_torn: bool,
}

impl Append {
    /// After the `length` bytes that `sink` holds, where its next write begins.
    pub(crate) fn after(length: u64, sink: impl Sink + 'static) -> Self {
        Self { sink: Box::new(sink), length, is_torn: false }
    }

    /// Hands `piece` to the system, in one call where it takes all of it. After an error nothing of
    /// it is left, and the next piece may succeed; where even that failed, it is tried again before
    /// the next piece.
    pub(crate) fn piece(&mut self, piece: &[u8]) -> io::Result<()> {
        self.cut_torn()?;
        let written = self.sink.write_all(piece);
        match written {
            Ok(()) => self.length += piece.len() as u64,
            Err(_) => {
                self.is_torn = true;
                // The write's error says more, and the next piece meets this one.
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

/// A disk in memory that can be full.
#[cfg(test)]
pub(crate) mod testing {
    use std::sync::{Arc, Mutex, MutexGuard};

    use super::*;

    /// What the disk holds, and when it refuses.
    #[derive(Debug)]
    pub(crate) struct State {
        pub(crate) bytes: Vec<u8>,
        pub(crate) bytes_max: usize,
        pub(crate) refuses_cuts: bool,
        /// Calls that wrote something.
        pub(crate) writes: usize,
    }

    /// Clones share the one disk.
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
        /// As a file does: what there is room for, then an error.
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
