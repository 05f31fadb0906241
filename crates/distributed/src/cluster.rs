//! The processes of a pipeline, joined: they meet in a store, see that they belong together, and connect to each other.

use std::{
    collections::HashMap,
    net::TcpListener,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use crate::{
    bounded::{GaveUp, within},
    facts::{self, Facts},
    gathers::Gathers,
    interrupt::Interrupt,
    link::{Receiver, Sender, tag},
    member::Member,
    watch::{self, GOODBYE_KEY, Watch, Watcher},
};
use gpipe::{
    Value,
    processes::{Crossing, Elsewhere, Inbound, Outbound, Run, Transport, process_of},
};
use gpipe_bridge::c10d::{self, Group, Inbox, Outbox, TcpStore};
use gpipe_core::{Bytes, DeviceId, Nanos};

/// Most processes.
pub const PROCESSES_MAX: usize = 4096;
/// Tags of the cluster's own messages; links' come after them.
const CLOCK_TAG: usize = 1;
const GATHER_TAG: usize = 2;
const BESIDE_TAG: usize = 4;
/// How long who serves the store waits, before it goes, for the others to have read what is in it.
const GOODBYE: Duration = Duration::from_secs(5);
/// How often it is looked whether another process has come.
const MEETING_LOOK: Duration = Duration::from_millis(20);
/// How often clocks are compared; the answer that took least is the truest.
const CLOCK_ROUNDS: usize = 8;

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
    Differs(Elsewhere),
    /// Whoever should answer does not.
    #[error("{0}")]
    Silent(String),
}

/// What the ends of links share.
pub(crate) struct Shared {
    rank: usize,
    pub(crate) group: Group,
    pub(crate) interrupt: Arc<Interrupt>,
    /// The runtime's deadlines end waits; this is for the case that they do not.
    pub(crate) longest_wait: Duration,
    pub(crate) deadline: Duration,
    /// Where this process is reached.
    pub(crate) address: String,
    pub(crate) watch: Arc<Watch>,
}

impl Shared {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The failure that all processes know, if there is one.
    pub(crate) fn failed(&self) -> Option<Elsewhere> {
        self.watch.failed()
    }

    /// An error of this process.
    pub(crate) fn own(&self, reason: String) -> Elsewhere {
        Elsewhere { process: Some(self.rank), reason }
    }

    /// The connection to a process failed: tells the others, and returns what all of them know.
    pub(crate) fn lost(&self, rank: usize, error: &c10d::Error) -> Elsewhere {
        match self.watch.failed() {
            Some(known) => known,
            None => self.watch.fail(&self.watch.lost(rank, &error.to_string())),
        }
    }
}

type Ends<T> = Mutex<HashMap<Crossing, Arc<Mutex<T>>>>;

/// This process among the others.
pub struct Cluster {
    shared: Arc<Shared>,
    /// The ends of links, which outlive a run.
    inboxes: Ends<Inbox>,
    outboxes: Ends<Outbox>,
    gathers: Gathers,
    beside: Gathers,
    clock: Clock,
    /// Before the store: it says goodbye there.
    watcher: Option<Watcher>,
    store: Arc<TcpStore>,
    serves: bool,
}

/// Names what was tried in an error of c10d.
fn connect(what: String) -> impl FnOnce(c10d::Error) -> JoinError {
    move |source| JoinError::Connect { what, source }
}

impl Store {
    /// In words, for messages.
    fn place(&self) -> String {
        match self {
            Self::Serve(_) => "this process's own store".into(),
            Self::At { host, port } => format!("the store at {host}:{port}"),
        }
    }
}

/// What c10d's own deadlines are longer by: their errors say more.
const GRACE: Duration = Duration::from_millis(500);

/// The steps of a meeting, each of which ends.
struct Joining {
    deadline: Duration,
    /// Where the store is, in words.
    store: String,
    /// Once there is one.
    watch: Option<Arc<Watch>>,
}

impl Joining {
    /// Connects to the store, or serves it.
    fn connect(&self, store: Store) -> Result<TcpStore, JoinError> {
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
    fn ask_store<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> c10d::Result<T> + Send + 'static,
    ) -> Result<T, JoinError> {
        let answer = self.ask(move || call().map_err(connect("the store".into())));
        self.or_silent(answer, "a question to it")
    }

    fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GaveUp> {
        let failed = || self.watch.as_ref().and_then(|watch| watch.failed());
        within(self.deadline + GRACE, failed, call)
    }

    /// The outcome of `step`; a failure here is told to the others, one of theirs is the one that all know.
    fn or_silent<T>(
        &self,
        outcome: Result<Result<T, JoinError>, GaveUp>,
        step: &str,
    ) -> Result<T, JoinError> {
        let (store, deadline) = (&self.store, self.deadline);
        let error = match outcome {
            Ok(Ok(result)) => return Ok(result),
            Ok(Err(error)) => error,
            Err(GaveUp::Failed(why)) => return Err(JoinError::Differs(why)),
            Err(GaveUp::NoThread(error)) => JoinError::Setting(format!("no thread: {error}")),
            Err(GaveUp::Late) => JoinError::Silent(format!(
                "{store} did not answer within {deadline:.1?} ({step}): who serves it was stopped, or it is \
                 no store of gpipe: look at its process, or at MASTER_ADDR and MASTER_PORT"
            )),
        };
        if let (Some(watch), false) = (&self.watch, matches!(error, JoinError::Differs(_))) {
            watch.fail(&Elsewhere { process: Some(watch.rank()), reason: error.to_string() });
        }
        Err(error)
    }
}

impl Cluster {
    /// Meets the other processes: waits for them, compares facts, and connects. No step of it waits longer than the
    /// meeting's deadline, whoever answers at the other end; one that does not end leaves its thread behind.
    ///
    /// # Errors
    /// [`JoinError`]: numbers that do not fit, a process that does not come, is gone or is silent, a store that does not
    /// answer, another process with other facts.
    pub fn join(meeting: Meeting) -> Result<Arc<Self>, JoinError> {
        let Meeting { rank, size, store, name, address, deadline, facts } = meeting;
        if size == 0 || size > PROCESSES_MAX || rank >= size {
            return Err(JoinError::Setting(format!(
                "rank {rank} of {size} processes: there are 1 to {PROCESSES_MAX}, ranks count from 0"
            )));
        }
        let serves = matches!(store, Store::Serve(_));
        let mut joining = Joining { deadline, store: store.place(), watch: None };
        let store = joining.connect(store)?;
        let meeting = store.prefixed(&name).map_err(connect("the store".into()))?;
        let meeting = Arc::new(meeting);
        let arrived = {
            let meeting = Arc::clone(&meeting);
            joining.ask_store(move || meeting.add(&format!("arrived/{rank}"), 1))?
        };
        if arrived > 1 {
            return Err(JoinError::Setting(format!(
                "two processes are rank {rank}: every process needs a rank of its own"
            )));
        }
        let interrupt = Arc::new(Interrupt::default());
        let speaks = {
            let meeting = Arc::clone(&meeting);
            joining.ask_store(move || meeting.another())?
        };
        // From here on every process hears of the others, and of what has failed.
        let watcher = Watcher::start(speaks, rank, size, deadline, &interrupt)
            .map_err(|error| JoinError::Setting(format!("no thread: {error}")))?;
        let watch = Arc::clone(&watcher.watch);
        joining.watch = Some(Arc::clone(&watch));
        let found = {
            let meeting = Arc::clone(&meeting);
            joining.ask(move || meet(&meeting, rank, size, deadline, facts, serves))
        };
        match joining.or_silent(found, "the meeting of all processes")? {
            Met::All => watch.met(),
            Met::Without(other) => {
                let reason = format!(
                    "rank {other} of {size} did not come within {deadline:.0?}: start it, or raise the deadline"
                );
                return Err(JoinError::Differs(watch.fail(&Elsewhere { process: None, reason })));
            }
        }
        let group = {
            let (meeting, address) = (Arc::clone(&meeting), address.clone());
            joining.ask(move || {
                let gloo = meeting.prefixed("gloo")?;
                Group::gloo(&gloo, rank, size, &address, deadline)
            })
        };
        let what = format!("the processes cannot reach each other (this one is at {address})");
        let group =
            joining.or_silent(group.map(|group| group.map_err(connect(what.clone()))), &what)?;
        let longest_wait = deadline.saturating_mul(4);
        let shared = Shared { rank, group, interrupt, longest_wait, deadline, address, watch };
        let shared = Arc::new(shared);
        let clock = {
            let shared = Arc::clone(&shared);
            joining.ask(move || Clock::agree(&shared).map_err(JoinError::Differs))
        };
        let clock = joining.or_silent(clock, "comparing clocks with rank 0")?;
        Ok(Arc::new(Self {
            shared,
            inboxes: Mutex::default(),
            outboxes: Mutex::default(),
            gathers: Gathers::new(GATHER_TAG, 0..size),
            beside: Gathers::new(BESIDE_TAG, 0..size),
            clock,
            watcher: Some(watcher),
            store: meeting,
            serves,
        }))
    }

    /// This process as one of `count` replicas of a pipeline, each of which has as many processes: the first of them the first ranks and so on.
    ///
    /// # Errors
    /// The processes cannot be shared out evenly.
    pub fn replicas(self: &Arc<Self>, count: usize) -> Result<Arc<Member>, JoinError> {
        let size = self.shared.group.size();
        if count == 0 || !size.is_multiple_of(count) {
            return Err(JoinError::Setting(format!(
                "{size} processes for {count} replicas: each replica has as many processes, use a multiple of {count}"
            )));
        }
        let (watch, deadline) = (Some(Arc::clone(&self.shared.watch)), self.shared.deadline);
        let joining = Joining { deadline, store: "the store".into(), watch };
        let store = Arc::clone(&self.store);
        let store = joining.ask_store(move || store.another())?;
        Ok(Arc::new(Member::new(Arc::clone(self), store, count)))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The receiving end of a crossing between these ranks.
    pub(crate) fn receiver(&self, crossing: Crossing, most: Bytes) -> Result<Receiver, Elsewhere> {
        let from = crossing.from;
        let inbox = end(&self.inboxes, crossing, || self.shared.group.inbox(from, tag(crossing)));
        let inbox = inbox.map_err(|error| self.shared.lost(from, &error))?;
        Ok(Receiver::new(&self.shared, from, most, inbox))
    }

    /// The sending end of a crossing between these ranks.
    pub(crate) fn sender(&self, crossing: Crossing) -> Result<Sender, Elsewhere> {
        let to = crossing.to;
        let outbox = end(&self.outboxes, crossing, || self.shared.group.outbox(to, tag(crossing)));
        let outbox = outbox.map_err(|error| self.shared.lost(to, &error))?;
        Ok(Sender::new(&self.shared, to, outbox))
    }
}

/// The end of a crossing, which is opened once.
fn end<T>(
    ends: &Ends<T>,
    crossing: Crossing,
    open: impl FnOnce() -> c10d::Result<T>,
) -> c10d::Result<Arc<Mutex<T>>> {
    let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(end) = ends.get(&crossing) {
        return Ok(Arc::clone(end));
    }
    let end = Arc::new(Mutex::new(open()?));
    ends.insert(crossing, Arc::clone(&end));
    Ok(end)
}

/// Whether all processes came.
enum Met {
    All,
    Without(usize),
}

/// Waits for everyone, and compares what they must have alike.
fn meet(
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

impl Transport for Cluster {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn size(&self) -> usize {
        self.shared.group.size()
    }

    fn agree(&self, own: &[(String, String)]) -> Result<(), Elsewhere> {
        let all = self.gather(facts::encode(own))?;
        facts::compare(&all.iter().map(|bytes| facts::decode(bytes)).collect::<Vec<_>>())
    }

    fn begin(&self, run: Run) -> Result<(), Elsewhere> {
        let (devices, size) = (run.program.devices.len(), self.size());
        let mut placed = vec![Vec::new(); size];
        for device in 0..devices {
            placed[process_of(device, devices, size)].push(DeviceId::from_index(device));
        }
        self.shared.watch.place(placed);
        self.shared.watch.begin(run)
    }

    fn outbound(&self, crossing: Crossing) -> Result<Box<dyn Outbound<Value>>, Elsewhere> {
        Ok(Box::new(self.sender(crossing)?))
    }

    fn inbound(
        &self,
        crossing: Crossing,
        most: Bytes,
    ) -> Result<Box<dyn Inbound<Value>>, Elsewhere> {
        Ok(Box::new(self.receiver(crossing, most)?))
    }

    fn fail(&self, why: &Elsewhere) {
        self.shared.watch.fail(why);
    }

    fn gather(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, Elsewhere> {
        self.gathers.exchange(&self.shared, &own, self.shared.longest_wait)
    }

    fn gather_beside(&self, own: Vec<u8>, longest: Duration) -> Result<Vec<Vec<u8>>, Elsewhere> {
        self.beside.exchange(&self.shared, &own, longest)
    }

    fn now(&self) -> Nanos {
        self.clock.now()
    }
}

impl Drop for Cluster {
    /// Says goodbye. Who serves the store waits for the others to do so, as long as a little while.
    fn drop(&mut self) {
        self.shared.interrupt.interrupt();
        self.inboxes.lock().unwrap_or_else(PoisonError::into_inner).clear();
        // A store behind a cut link answers nobody, for as long as TCP may take: its goodbye is the watcher's, which may be left behind.
        drop(self.watcher.take());
        if self.serves {
            wait_for(&self.store, GOODBYE_KEY, self.shared.group.size(), GOODBYE);
        }
    }
}

/// Waits until all processes have counted `key`, at most so long.
fn wait_for(store: &TcpStore, key: &str, size: usize, longest: Duration) {
    let patience = Instant::now() + longest;
    while Instant::now() < patience && store.add(key, 0).is_ok_and(|count| count < size as i64) {
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// Tells the processes of the meeting `name` in `store` that `rank` has ended, if they know of no other failure:
/// what a launcher does that sees it first.
///
/// # Errors
/// The store does not answer.
pub fn tell_of_end(store: &TcpStore, name: &str, rank: usize, reason: &str) -> c10d::Result<()> {
    let why = Elsewhere { process: Some(rank), reason: reason.to_owned() };
    watch::tell(&store.prefixed(name)?, &why).map(drop)
}

/// A clock that all processes share: rank 0's.
struct Clock {
    start: Instant,
    /// What rank 0's clock says at `start`.
    origin: i128,
}

impl Clock {
    /// Compares this process's clock with that of rank 0, which answers one process after the other.
    fn agree(shared: &Shared) -> Result<Self, Elsewhere> {
        let start = Instant::now();
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let own = Self { start, origin: unix.as_nanos() as i128 };
        if shared.rank == 0 {
            for rank in 1..shared.group.size() {
                let mut line = Line::open(shared, rank)?;
                for _ in 0..CLOCK_ROUNDS {
                    line.receive(shared)?;
                    line.send(shared, own.now().0)?;
                }
            }
            return Ok(own);
        }
        let mut best: Option<(u64, i128)> = None;
        let mut line = Line::open(shared, 0)?;
        for _ in 0..CLOCK_ROUNDS {
            let before = own.now().0;
            line.send(shared, before)?;
            let theirs = line.receive(shared)?;
            let took = own.now().0.saturating_sub(before);
            // Their answer was made half-way.
            let ahead = i128::from(theirs) - i128::from(before + took / 2);
            if best.is_none_or(|(least, _)| took < least) {
                best = Some((took, ahead));
            }
        }
        let ahead = best.map_or(0, |(_, ahead)| ahead);
        Ok(Self { origin: own.origin + ahead, ..own })
    }

    fn now(&self) -> Nanos {
        let now = self.origin + self.start.elapsed().as_nanos() as i128;
        Nanos(u64::try_from(now).unwrap_or_default())
    }
}

/// Numbers to and from another process.
struct Line {
    rank: usize,
    outbox: Outbox,
    inbox: Inbox,
}

impl Line {
    fn open(shared: &Shared, rank: usize) -> Result<Self, Elsewhere> {
        let open = || -> c10d::Result<Self> {
            let outbox = shared.group.outbox(rank, CLOCK_TAG)?;
            Ok(Self { rank, outbox, inbox: shared.group.inbox(rank, CLOCK_TAG)? })
        };
        open().map_err(|error| shared.lost(rank, &error))
    }

    fn send(&mut self, shared: &Shared, number: u64) -> Result<(), Elsewhere> {
        let lost = |error: c10d::Error| shared.lost(self.rank, &error);
        let works = self.outbox.send(&number.to_le_bytes(), &[]).map_err(lost)?;
        works
            .iter()
            .try_for_each(|work| shared.interrupt.wait(work, shared.longest_wait).map_err(lost))
    }

    fn receive(&mut self, shared: &Shared) -> Result<u64, Elsewhere> {
        let lost = |error: c10d::Error| shared.lost(self.rank, &error);
        let work = self.inbox.post().map_err(lost)?;
        shared.interrupt.wait(&work, shared.longest_wait).map_err(lost)?;
        let number = self.inbox.head().map_err(lost)?;
        Ok(u64::from_le_bytes(number.try_into().unwrap_or_default()))
    }
}
