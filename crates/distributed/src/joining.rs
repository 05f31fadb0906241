//! How processes meet: they find each other in a store and check that they belong together. Every
//! step ends by its deadline.

use std::{
    net::TcpListener,
    sync::Arc,
    time::{Duration, Instant},
};

use gpipe::processes::PeerError;
use gpipe_bridge::c10d::{self, TcpStore};

use crate::{
    bounded::{GaveUp, no_thread, within},
    facts::{self, Facts},
    watch::{self, SERVER, Watch},
};

/// Grace period before the host of the store exits, so that the other ranks can read the final
/// keys.
pub(crate) const GOODBYE: Duration = Duration::from_secs(5);
/// How often a process checks whether another one has come.
const MEETING_LOOK: Duration = Duration::from_millis(20);

/// The store where the processes meet.
#[derive(Debug)]
pub enum Store {
    /// This process serves the store on this listener.
    Serve(TcpListener),
    /// Another process of the meeting serves the store. It ends with that process.
    At {
        /// Its host name or address.
        host: String,
        /// Its port.
        port: u16,
    },
    /// A launcher serves the store. Joined processes go on without it, up to the timeout.
    Launcher {
        /// Its host name or address.
        host: String,
        /// Its port.
        port: u16,
    },
}

/// How this process finds the others.
#[derive(Debug)]
pub struct Meeting {
    /// The rank of this process, from 0.
    pub rank: usize,
    /// The number of processes.
    pub size: usize,
    /// The store.
    pub store: Store,
    /// Prefix of this run's keys in the store; a retry must not see the keys of an earlier attempt.
    pub name: String,
    /// Host name or address of this machine; the other processes connect to it.
    pub address: String,
    /// Longest wait for another process to come, and longest silence of one that has come.
    pub timeout: Duration,
    /// Named values that must be equal in all processes: versions, configuration.
    pub facts: Vec<(String, String)>,
}

/// Why processes could not join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// An invalid setting.
    #[error("{0}")]
    Setting(String),
    /// The store or a connection failed.
    #[error("{what}: {source}")]
    Connect {
        /// What was tried, and the remedy.
        what: String,
        /// c10d's error.
        source: c10d::Error,
    },
    /// The processes do not belong together, or another process failed or is silent.
    #[error("{0}")]
    Differs(PeerError),
    /// Another process did not come within the deadline.
    #[error("{0}")]
    Missing(PeerError),
    /// The store or a process does not answer.
    #[error("{0}")]
    Silent(String),
}

/// Wraps an error of c10d with a description of what was tried.
pub(crate) fn connect(what: String) -> impl FnOnce(c10d::Error) -> JoinError {
    move |source| JoinError::Connect { what, source }
}

impl Store {
    /// The store's address as text, for messages.
    pub(crate) fn place(&self) -> String {
        match self {
            Self::Serve(_) => "this process, which is rank 0,".into(),
            Self::At { host, port } | Self::Launcher { host, port } => {
                format!("{SERVER} at {host}:{port}")
            }
        }
    }
}

/// Extra time for c10d's own deadlines to expire first, because c10d's errors say more.
const GRACE: Duration = Duration::from_millis(500);

/// Runs the steps of a meeting, each with a deadline.
pub(crate) struct Joining {
    pub deadline: Duration,
    /// The store's address, as text.
    pub store: String,
    /// `None` until the watcher has started.
    pub watch: Option<Arc<Watch>>,
}

impl Joining {
    /// Connects to the store, or starts to serve it.
    pub(crate) fn connect(&self, store: Store) -> Result<TcpStore, JoinError> {
        let deadline = self.deadline;
        self.ask_store(move || match store {
            Store::Serve(listener) => TcpStore::serve(listener, deadline),
            Store::At { host, port } | Store::Launcher { host, port } => {
                TcpStore::connect(&host, port, deadline)
            }
        })
        .map_err(|error| match error {
            JoinError::Connect { source, .. } => {
                let what = format!(
                    "{} does not answer: start it, or correct MASTER_ADDR and MASTER_PORT",
                    self.store
                );
                JoinError::Connect { what, source }
            }
            other => other,
        })
    }

    /// Runs a call that only the store answers.
    pub(crate) fn ask_store<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> c10d::Result<T> + Send + 'static,
    ) -> Result<T, JoinError> {
        let server = self.store.clone();
        let answer = self.ask(move || call().map_err(connect(server)));
        self.of_store(answer)
    }

    pub(crate) fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GaveUp> {
        let failed = || self.watch.as_ref().and_then(|watch| watch.failed());
        within(self.deadline + GRACE, failed, call)
    }

    /// Converts the outcome of a step that only the store answers.
    pub(crate) fn of_store<T>(
        &self,
        outcome: Result<Result<T, JoinError>, GaveUp>,
    ) -> Result<T, JoinError> {
        let remedy = "it was stopped, or another program listens there: look at its process, or \
            correct MASTER_ADDR and MASTER_PORT";
        self.outcome(outcome, &self.store, remedy)
    }

    /// Converts the outcome of a step that waits for other processes (`awaited`).
    pub(crate) fn of_processes<T>(
        &self,
        outcome: Result<Result<T, JoinError>, GaveUp>,
        awaited: &str,
    ) -> Result<T, JoinError> {
        self.outcome(outcome, awaited, "a process was stopped, or the network between them is cut")
    }

    /// Converts an outcome. A failure of this process is reported to the others; a failure reported
    /// by others is returned as the common one.
    fn outcome<T>(
        &self,
        outcome: Result<Result<T, JoinError>, GaveUp>,
        awaited: &str,
        remedy: &str,
    ) -> Result<T, JoinError> {
        let deadline = self.deadline;
        let error = match outcome {
            Ok(Ok(result)) => return Ok(result),
            Ok(Err(error)) => error,
            Err(GaveUp::Failed(why)) => return Err(JoinError::Differs(why)),
            Err(GaveUp::NoThread(error)) => JoinError::Setting(no_thread(&error)),
            Err(GaveUp::Late) => JoinError::Silent(format!(
                "{awaited} did not answer within {deadline:.1?}: {remedy}"
            )),
        };
        if let (Some(watch), false) = (&self.watch, matches!(error, JoinError::Differs(_))) {
            watch.fail(&PeerError { process: Some(watch.rank()), reason: error.to_string() });
        }
        Err(error)
    }
}

/// Which processes came to the meeting.
pub(crate) enum Met {
    All,
    Without(usize),
}

/// Waits for all processes and compares their facts.
pub(crate) fn meet(
    store: &TcpStore,
    rank: usize,
    size: usize,
    deadline: Duration,
    mut own: Facts,
    serves: bool,
) -> Result<Met, JoinError> {
    let failed = || connect(SERVER.into());
    own.insert(0, ("number of processes".into(), size.to_string()));
    store.set(&format!("facts/{rank}"), &facts::encode(&own)).map_err(failed())?;
    let end = Instant::now() + deadline;
    let mut all = Vec::with_capacity(size);
    for other in 0..size {
        let key = format!("facts/{other}");
        while !store.check(&key).map_err(failed())? {
            if Instant::now() >= end {
                return Ok(Met::Without(other));
            }
            std::thread::park_timeout(MEETING_LOOK);
        }
        all.push(facts::decode(&store.get(&key, deadline).map_err(failed())?));
    }
    let compared = facts::compare(&all).map_err(JoinError::Differs);
    let looked = store.add("looked", 1);
    if serves && compared.is_err() && looked.is_ok() {
        // The store must not go before the other processes have also seen the reason.
        wait_for(store, "looked", size, GOODBYE.min(deadline));
    }
    compared.map(|()| Met::All)
}

/// Waits until every process has incremented `key`, at most `longest`.
pub(crate) fn wait_for(store: &TcpStore, key: &str, size: usize, longest: Duration) {
    let patience = Instant::now() + longest;
    while Instant::now() < patience && store.add(key, 0).is_ok_and(|count| count < size as i64) {
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// Reports to the processes of the meeting `name` that `rank` has ended. A failure reported earlier
/// takes precedence. A launcher calls this, because it is the first to know.
///
/// # Errors
/// The store does not answer.
pub fn tell_of_end(store: &TcpStore, name: &str, rank: usize, reason: &str) -> c10d::Result<()> {
    let why = PeerError { process: Some(rank), reason: reason.to_owned() };
    watch::tell(&store.prefixed(name)?, &why).map(drop)
}
