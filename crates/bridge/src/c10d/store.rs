//! The store that processes find each other by: one of them serves it, all of them are its clients.

use std::{net::TcpListener, os::fd::IntoRawFd, time::Duration};

use cxx::UniquePtr;

use super::{Error, Result, failed, milliseconds};
use crate::ffi::bridged;

/// A connection to a TCP store. Keys and values are bytes; both are small, and whoever reaches the
/// port may read and write them.
pub struct TcpStore(UniquePtr<bridged::TcpStore>);

// SAFETY: c10d's stores lock around every operation, for they are made to be shared by threads.
unsafe impl Send for TcpStore {}
// SAFETY: as above.
unsafe impl Sync for TcpStore {}

impl TcpStore {
    /// Serves a store at `listener`, and connects to it. It serves until it and all that were made
    /// of it are dropped.
    ///
    /// # Errors
    /// The listener has no address; c10d's.
    pub fn serve(listener: TcpListener, timeout: Duration) -> Result<Self> {
        let what = "serving the store";
        let address = listener.local_addr().map_err(|error| Error {
            operation: what.into(),
            peer: None,
            message: error.to_string(),
        })?;
        // The store owns the socket from here on, also when it fails.
        let socket = listener.into_raw_fd();
        // A server that listens on all interfaces is reached through this one's own.
        let host = match address.ip() {
            ip if ip.is_unspecified() => "localhost".to_owned(),
            ip => ip.to_string(),
        };
        let store = bridged::tcp_store(&host, address.port(), socket, milliseconds(timeout));
        Ok(Self(store.map_err(failed(format!("{what} at {address}"), None))?))
    }

    /// Connects to the store that `host` serves at `port`; waits for it as long as `timeout`.
    ///
    /// # Errors
    /// Nobody answers there in time.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let store = bridged::tcp_store(host, port, -1, milliseconds(timeout));
        Ok(Self(store.map_err(failed(format!("connecting to the store at {host}:{port}"), None))?))
    }

    /// Another connection to the same store. An operation that waits holds its connection until it
    /// ends.
    ///
    /// # Errors
    /// The server is gone.
    pub fn another(&self) -> Result<Self> {
        Ok(Self(self.0.another().map_err(failed("connecting to the store again", None))?))
    }

    /// The same store through a prefix of all keys; it shares this connection.
    ///
    /// # Errors
    /// c10d's.
    pub fn prefixed(&self, prefix: &str) -> Result<Self> {
        Ok(Self(self.0.prefixed(prefix).map_err(failed("naming a part of the store", None))?))
    }

    /// The port that it is served at.
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

    /// The value of a key; waits until it is set.
    ///
    /// # Errors
    /// It was not set in time; the server is gone.
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

    /// Adds to a counter (0 if it was not set), and returns what it is now.
    ///
    /// # Errors
    /// The server is gone; the key's value is no number.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.0.add(key, amount).map_err(failed(format!("counting {key} in the store"), None))
    }

    /// Sets a key if its value is `expected` (empty: if it is not set); returns what its value is
    /// then.
    ///
    /// # Errors
    /// The server is gone.
    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let value = self.0.compare_set(key, expected, desired);
        value.map_err(failed(format!("setting {key} in the store"), None))
    }

    /// Removes a key; whether it was there.
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
