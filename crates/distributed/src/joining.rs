//! How processes meet: they find each other in a store, and see that they belong together. Every
//! step ends.

use std::{
    net::TcpListener,
    sync::Arc,
    time::{Duration, Instant},
};

use gpipe::processes::PeerError;
use gpipe_bridge::c10d::{self, TcpStore};

use crate::{
    bounded::{GaveUp, within},
    facts::{self, Facts},
    watch::{self, Watch},
};

/// How long who serves the store waits, before it goes, for the others to have read what is in it.
pub(crate) const GOODBYE: Duration = Duration::from_secs(5);
/// How often it is looked whether another process has come.
const MEETING_LOOK: Duration = Duration::from_millis(20);

/// Who serves the store.
#[derive(Debug)]
pub enum Store {
    /// This process, at this listener.
    Serve(TcpListener),
    /// Another process, or a launcher.
    At {
        /// Its host.
        host: String,
        /// And port.
        port: u16,
    },
}

/// How a process finds the others.
#[derive(Debug)]
pub struct Meeting {
    /// The number of this process, from 0.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Where they meet.
    pub store: Store,
    /// What is served there for this run: a later try must not meet an earlier one.
    pub name: String,
    /// The host name or address of this machine that the others connect to.
    pub address: String,
    /// Longest wait for another process to come, and longest silence of one that has.
    pub deadline: Duration,
    /// What all processes must have alike: versions, configuration.
    pub facts: Vec<(String, String)>,
}

/// Why processes do not come together.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Numbers that do not fit.
    #[error("{0}")]
    Setting(String),
    /// The store or a connection.
    #[error("{what}: {source}")]
    Connect {
        /// What was tried, and the remedy.
        what: String,
        /// What c10d says.
        source: c10d::Error,
    },
    /// They do not belong together, or another process failed or is silent.
    #[error("{0}")]
    Differs(PeerError),
    /// Whoever should answer does not.
    #[error("{0}")]
    Silent(String),
}

/// Names what was tried in an error of c10d.
pub(crate) fn connect(what: String) -> impl FnOnce(c10d::Error) -> JoinError {
    move |source| JoinError::Connect { what, source }
}

impl Store {
    /// In words, for messages.
    pub(crate) fn place(&self) -> String {
        match self {
            Self::Serve(_) => "this process's own store".into(),
            Self::At { host, port } => format!("the store at {host}:{port}"),
        }
    }
}

/// What c10d's own deadlines are longer by: their errors say more.
const GRACE: Duration = Duration::from_millis(500);

/// The steps of a meeting, each of which ends.
pub(crate) struct Joining {
    pub deadline: Duration,
    /// Where the store is, in words.
    pub store: String,
    /// Once there is one.
    pub watch: Option<Arc<Watch>>,
}

impl Joining {
    /// Connects to the store, or serves it.
    pub(crate) fn connect(&self, store: Store) -> Result<TcpStore, JoinError> {
        let deadline = self.deadline;
        self.ask_store(move || match store {
            Store::Serve(listener) => TcpStore::serve(listener, deadline),
            Store::At { host, port } => TcpStore::connect(&host, port, deadline),
        })
        .map_err(|error| match error {
            JoinError::Connect { source, .. } => {
                let what =
                    format!("no store ({}): start rank 0, or look at its address", self.store);
                JoinError::Connect { what, source }
            }
            other => other,
        })
    }

    /// A call that nobody but the store answers.
    pub(crate) fn ask_store<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> c10d::Result<T> + Send + 'static,
    ) -> Result<T, JoinError> {
        let answer = self.ask(move || call().map_err(connect("the store".into())));
        self.of_store(answer)
    }

    pub(crate) fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GaveUp> {
        let failed = || self.watch.as_ref().and_then(|watch| watch.failed());
        within(self.deadline + GRACE, failed, call)
    }

    /// The outcome of a step that only the store answers.
    pub(crate) fn of_store<T>(
        &self,
        outcome: Result<Result<T, JoinError>, GaveUp>,
    ) -> Result<T, JoinError> {
        let remedy = "who serves it was stopped, or it is no store of gpipe: look at its process, \
            or at \
                      MASTER_ADDR and MASTER_PORT";
        self.outcome(outcome, &self.store, remedy)
    }

    /// The outcome of a step that other processes, `awaited`, answer.
    pub(crate) fn of_processes<T>(
        &self,
        outcome: Result<Result<T, JoinError>, GaveUp>,
        awaited: &str,
    ) -> Result<T, JoinError> {
        self.outcome(outcome, awaited, "a process was stopped, or the network between them is cut")
    }

    /// A failure here is told to the others. One of theirs is the one that all know.
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
            Err(GaveUp::NoThread(error)) => JoinError::Setting(format!("no thread: {error}")),
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

/// Whether all processes came.
pub(crate) enum Met {
    All,
    Without(usize),
}

/// Waits for everyone, and compares what they must have alike.
pub(crate) fn meet(
    store: &TcpStore,
    rank: usize,
    size: usize,
    deadline: Duration,
    mut own: Facts,
    serves: bool,
) -> Result<Met, JoinError> {
    let failed = || connect("the store".into());
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
        // The others must have seen why, too, before the store is gone.
        wait_for(store, "looked", size, GOODBYE.min(deadline));
    }
    compared.map(|()| Met::All)
}

/// Waits until all processes have counted `key`, at most so long.
pub(crate) fn wait_for(store: &TcpStore, key: &str, size: usize, longest: Duration) {
    let patience = Instant::now() + longest;
    while Instant::now() < patience && store.add(key, 0).is_ok_and(|count| count < size as i64) {
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// Tells the processes of the meeting `name` in `store` that `rank` has ended, if they know of no
/// other failure: what a launcher does that sees it first.
///
/// # Errors
/// The store does not answer.
pub fn tell_of_end(store: &TcpStore, name: &str, rank: usize, reason: &str) -> c10d::Result<()> {
    let why = PeerError { process: Some(rank), reason: reason.to_owned() };
    watch::tell(&store.prefixed(name)?, &why).map(drop)
}
