//! c10d, the engine on which PyTorch scales out: a key-value store that processes find each other
//! by, and groups of processes that send and receive tensors, and sum them.
//!
//! - [`store`]: the store
//! - [`group`]: groups, which give out the ends that messages go through
//! - [`mail`]: messages between two processes; [`sums`]: sums over all of them
//! - [`work`]: what goes on in the background
//!
//! What it does not do, its caller must: bound every wait.

pub mod group;
pub mod mail;
pub mod store;
pub mod sums;
pub mod work;

pub use group::Group;
pub use mail::{BODY_MAX, HEAD_BYTES_MAX, Inbox, Outbox};
pub use store::TcpStore;
pub use sums::Sums;
pub use work::Work;

use std::{fmt, time::Duration};

/// An operation that failed: what it was, with whom, and c10d's own words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    /// What was being done.
    pub operation: String,
    /// The rank of the process at the other end, where there is one.
    pub peer: Option<usize>,
    /// What c10d says.
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

/// Names the operation in an exception.
fn failed(
    operation: impl Into<String>,
    peer: Option<usize>,
) -> impl FnOnce(cxx::Exception) -> Error {
    let operation = operation.into();
    move |exception| Error { operation, peer, message: first_line(exception.what()) }
}

/// c10d's messages go on with where in its sources they come from, and with a backtrace.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or("no message").trim().to_owned()
}

/// c10d counts in milliseconds, and 0 is for ever.
fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX).max(1)
}

#[cfg(test)]
mod tests;
