//! c10d, the engine on which PyTorch scales out: a key-value store that processes find each other by, and groups
//! of processes that send, receive, reduce and broadcast tensors.
//!
//! - [`store`]: the store
//! - [`group`]: groups, and their work that is under way
//!
//! What it does not do, its caller must: agree on sizes before a receive, and bound every wait.

pub mod group;
pub mod store;

pub use group::{Group, Work};
pub use store::TcpStore;

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
