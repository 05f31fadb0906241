//! c10d, PyTorch's engine for distributed training: a key-value store where processes find each
//! other, and process groups that send, receive and sum tensors.
//!
//! - [`store`]: the store
//! - [`group`]: process groups, and the ends through which messages go
//! - [`gpus`]: groups of processes with a GPU each, over NCCL
//! - [`mail`]: messages between two processes; [`sums`]: sums over all of them
//! - [`work`]: operations in the background
//!
//! Bounding every wait is the caller's task.

pub mod gpus;
pub mod group;
pub mod mail;
pub mod store;
pub mod sums;
pub mod work;

pub use gpus::GpuGroup;
pub use group::Group;
pub use mail::{BODY_MAX, HEAD_BYTES_MAX, Inbox, Outbox};
pub use store::TcpStore;
pub use sums::Sums;
pub use work::Work;

use std::{fmt, time::Duration};

/// A failed operation: what it was, with which process, and c10d's message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    /// The operation.
    pub operation: String,
    /// The rank of the other process, if there is one.
    pub peer: Option<usize>,
    /// c10d's message.
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.operation)?;
        if let Some(peer) = self.peer {
            write!(f, " (rank {peer})")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// The result of an operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Converts an exception to an error that names the operation.
fn failed(
    operation: impl Into<String>,
    peer: Option<usize>,
) -> impl FnOnce(cxx::Exception) -> Error {
    let operation = operation.into();
    move |exception| Error { operation, peer, message: first_line(exception.what()) }
}

/// The first line of c10d's message, and NCCL's reason; the rest is source locations and a
/// backtrace.
fn first_line(message: &str) -> String {
    let mut lines = message.lines();
    let first = lines.next().unwrap_or("no message").trim();
    let reason = lines.skip_while(|line| line.trim() != "Last error:").nth(1);
    reason.map_or_else(|| first.to_owned(), |reason| format!("{first} {}", reason.trim()))
}

/// Converts a timeout to c10d's milliseconds, where 0 means forever.
fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX).max(1)
}

#[cfg(test)]
mod tests;
