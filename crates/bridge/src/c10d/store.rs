//! The store where processes find each other: one process serves it, and all are its clients.

use std::{net::TcpListener, os::fd::IntoRawFd, time::Duration};

use cxx::UniquePtr;

use super::{Error, Result, failed, milliseconds};
use crate::ffi::bridged;

/// A connection to a TCP store. Keys and values are small byte strings. Anyone who reaches the port
/// can read and write them.
pub struct TcpStore(UniquePtr<bridged::TcpStore>);

// SAFETY: c10d's stores are made to be shared by threads, and lock around every operation.
unsafe impl Send for TcpStore {}
// SAFETY: as above.
unsafe impl Sync for TcpStore {}

impl TcpStore {
    /// Serves a store on `listener` and connects to it. It serves until this and everything created
    /// from it is dropped.
    ///
    /// # Errors
    /// The listener has no address; c10d's errors.
    pub fn serve(listener: TcpListener, timeout: Duration) -> Result<Self> {
        let what = "serving the store";
        let address = listener.local_addr().map_err(|error| Error {
            operation: what.into(),
            peer: None,
            message: error.to_string(),
        })?;
        // The store owns the socket from here on, even if it fails.
        let socket = listener.into_raw_fd();
        // A server that listens on all interfaces is reached through the loopback interface.
        let host = match address.ip() {
            ip if ip.is_unspecified() => "localhost".to_owned(),
            ip => ip.to_string(),
        };
        let store = bridged::tcp_store(&host, address.port(), socket, milliseconds(timeout));
        Ok(Self(store.map_err(failed(format!("{what} at {address}"), None))?))
    }

    /// Connects to the store that `host` serves on `port`; waits for it up to `timeout`.
    ///
    /// # Errors
    /// Nothing answers there in time.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let store = bridged::tcp_store(host, port, -1, milliseconds(timeout));
        Ok(Self(store.map_err(failed(format!("connecting to the store at {host}:{port}"), None))?))
    }

    /// Opens another connection to the same store. An operation that waits blocks its connection
    /// until it ends.
    ///
    /// # Errors
    /// The server is gone.
    pub fn another(&self) -> Result<Self> {
        Ok(Self(self.0.another().map_err(failed("connecting to the store again", None))?))
    }

    /// A view of the same store that adds a prefix to all keys. It shares this connection.
    ///
    /// # Errors
    /// c10d's errors.
    pub fn prefixed(&self, prefix: &str) -> Result<Self> {
        Ok(Self(self.0.prefixed(prefix).map_err(failed("naming a part of the store", None))?))
    }

    /// The port of the store's server.
    pub fn port(&self) -> u16 {
        self.0.port()
    }

    /// Sets a key.
    ///
    /// # Errors
    /// The server is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value).map_err(failed(format!("setting {key} in the store"), None))
    }

    /// Returns the value of a key; waits until it is set.
    ///
    /// # Errors
    /// The key was not set in time; the server is gone.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let value = self.0.get(key, milliseconds(timeout));
        value.map_err(failed(format!("waiting for {key} in the store"), None))
    }

    /// Whether a key is set.
    ///
    /// # Errors
    /// The server is gone.
    pub fn check(&self, key: &str) -> Result<bool> {
        self.0.check(key).map_err(failed(format!("looking for {key} in the store"), None))
    }

    /// Adds to a counter (0 if not set), and returns its new value.
    ///
    /// # Errors
    /// The server is gone; the key's value is not a number.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.0.add(key, amount).map_err(failed(format!("counting {key} in the store"), None))
    }

    /// Sets a key if its value is `expected` (empty: if it is not set), and returns the resulting
    /// value.
    ///
    /// # Errors
    /// The server is gone.
    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let value = self.0.compare_set(key, expected, desired);
        value.map_err(failed(format!("setting {key} in the store"), None))
    }

    /// Removes a key, and returns whether it existed.
    ///
    /// # Errors
    /// The server is gone.
    pub fn remove(&self, key: &str) -> Result<bool> {
        self.0.remove(key).map_err(failed(format!("removing {key} from the store"), None))
    }

    pub(super) fn bridged(&self) -> &bridged::TcpStore {
        &self.0
    }
}

impl std::fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TcpStore(port {})", self.port())
    }
}
