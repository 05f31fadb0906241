//! Replicas as threads of one process. They meet as processes do, over the loopback interface, and
//! so share deadlines and failures. Their gradients do not travel: one replica adds those of all
//! replicas in the order of their ranks, which gives the bits that as many processes get, and all
//! of them read the sum.
//!
//! ```no_run
//! use std::{sync::Arc, thread, time::Duration};
//!
//! use gpipe_distributed::{Cluster, Member, threads::{SharedSums, meetings}};
//!
//! let sums = SharedSums::new();
//! let replicas = meetings(2, Duration::from_secs(60)).unwrap().into_iter().map(|meeting| {
//!     let sums = sums.clone();
//!     thread::spawn(move || {
//!         let cluster = Cluster::join(meeting).unwrap();
//!         let replica = Member::sharing(&cluster, 2, &sums).unwrap();
//!         // builder.processes(replica.clone()).replicas(replica) ...
//!     })
//! });
//! replicas.for_each(|replica| replica.join().unwrap());
//! ```

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::{Ipv4Addr, TcpListener},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use gpipe::processes::{PeerError, Summing};
use gpipe_core::StageId;
use tch::Tensor;

use crate::{
    joining::{Meeting, Store},
    shared::{ReplicaWait, Shared},
};

/// How often a wait looks whether another replica has failed.
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// One meeting for each of `count` threads of this process.
///
/// # Errors
/// There is no free port on the loopback interface.
pub fn meetings(count: usize, timeout: Duration) -> io::Result<Vec<Meeting>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let mut serving = Some(listener);
    let meeting = |rank| Meeting {
        rank,
        size: count,
        store: match serving.take() {
            Some(listener) => Store::Serve(listener),
            None => Store::At { host: Ipv4Addr::LOCALHOST.to_string(), port },
        },
        name: "threads".into(),
        address: Ipv4Addr::LOCALHOST.to_string(),
        timeout,
        facts: Vec::new(),
    };
    Ok((0..count).map(meeting).collect())
}

/// Where the replicas of one process leave their gradients for each other.
#[derive(Clone, Default)]
pub struct SharedSums(Arc<Board>);

impl SharedSums {
    /// A board without gradients.
    pub fn new() -> Self {
        Self::default()
    }

    /// The sums of one stage of pipeline number `pipeline`, as one of `replicas` replicas sees
    /// them.
    pub(crate) fn stage(
        &self,
        shared: Arc<Shared>,
        stage: StageId,
        pipeline: u64,
        (replica, replicas): (usize, usize),
    ) -> Box<dyn Summing> {
        let board = Arc::clone(&self.0);
        let begun = VecDeque::new();
        Box::new(StageBoard { board, shared, stage, pipeline, replica, replicas, next: 0, begun })
    }
}

/// A stage, the number of its pipeline, and the number of the exchange.
type Key = (StageId, u64, u64);

#[derive(Default)]
struct Board {
    exchanges: Mutex<HashMap<Key, Exchange>>,
    changed: Condvar,
}

/// One exchange of tensors.
struct Exchange {
    /// By replica; none once they are combined.
    tensors: Vec<Option<Tensor>>,
    /// What came of them, or why nothing did.
    combined: Option<Result<Tensor, String>>,
    /// How many replicas are done with it.
    ended: usize,
}

/// What a look at the board finds.
enum Look<T> {
    There(T),
    /// What is missing.
    Missing(String),
    Failed(String),
}

impl Board {
    fn exchanges(&self) -> MutexGuard<'_, HashMap<Key, Exchange>> {
        self.exchanges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct StageBoard {
    board: Arc<Board>,
    shared: Arc<Shared>,
    stage: StageId,
    pipeline: u64,
    replica: usize,
    replicas: usize,
    /// The number of the next exchange.
    next: u64,
    /// The exchanges under way.
    begun: VecDeque<u64>,
}

impl StageBoard {
    /// Leaves this replica's tensor. The last replica to do so combines those of all, so a layer's
    /// gradients are summed as soon as all have them.
    fn start(&mut self, tensor: Tensor, from: Option<usize>) -> Result<(), PeerError> {
        if self.replica == 0 {
            self.wait_for_release()?;
        }
        let key = (self.stage, self.pipeline, self.next);
        self.begun.push_back(self.next);
        self.next += 1;
        let empty = || Exchange {
            tensors: (0..self.replicas).map(|_| None).collect(),
            combined: None,
            ended: 0,
        };
        let mut exchanges = self.board.exchanges();
        let own = exchanges.entry(key).or_insert_with(empty);
        own.tensors[self.replica] = Some(tensor);
        if own.tensors.iter().any(Option::is_none) {
            return Ok(());
        }
        let all = std::mem::take(&mut own.tensors).into_iter().flatten().collect();
        drop(exchanges);
        let combined = combine(all, from);
        if let Some(own) = self.board.exchanges().get_mut(&key) {
            own.combined = Some(combined);
        }
        self.board.changed.notify_all();
        Ok(())
    }

    /// Waits until all replicas are done with the exchanges that replica 0 is done with. Sums are
    /// in its memory, where there is room for those under way.
    fn wait_for_release(&self) -> Result<(), PeerError> {
        let first = self.begun.front().copied().unwrap_or(self.next);
        let own = (self.stage, self.pipeline);
        self.wait(|exchanges| {
            match exchanges.keys().any(|key| (key.0, key.1) == own && key.2 < first) {
                true => Look::Missing("another replica did not take the sums".into()),
                false => Look::There(()),
            }
        })
    }

    /// Waits until `look` finds something, or another replica fails, or nothing comes on. A wait
    /// for a slow replica gives signs of life.
    fn wait<T>(
        &self,
        mut look: impl FnMut(&mut HashMap<Key, Exchange>) -> Look<T>,
    ) -> Result<T, PeerError> {
        let wait = ReplicaWait::new(&self.shared, self.stage);
        let mut exchanges = self.board.exchanges();
        loop {
            let missing = match look(&mut exchanges) {
                Look::There(found) => return Ok(found),
                Look::Failed(reason) => return Err(self.shared.own(reason)),
                Look::Missing(what) => what,
            };
            if let Some(failed) = self.shared.failed() {
                return Err(failed);
            }
            if let Some(waited) = wait.too_long() {
                return Err(self
                    .shared
                    .own(format!("{missing} of stage {} within {waited:.0?}", self.stage)));
            }
            let waited = self.board.changed.wait_timeout(exchanges, LOOK);
            exchanges = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What came of the tensors of all replicas. All of them get the same memory.
    fn combined(&self, number: u64) -> Result<Tensor, PeerError> {
        let key = (self.stage, self.pipeline, number);
        self.wait(|exchanges| {
            let Some(own) = exchanges.get(&key) else {
                return Look::Missing("an exchange did not begin".into());
            };
            match &own.combined {
                Some(Ok(tensor)) => Look::There(tensor.shallow_clone()),
                Some(Err(reason)) => Look::Failed(reason.clone()),
                None => Look::Missing(match own.tensors.iter().position(Option::is_none) {
                    Some(missing) => format!("replica {missing} did not bring its part"),
                    None => "another replica did not finish the sum".into(),
                }),
            }
        })
    }

    /// Records that this replica is done with an exchange. The last one removes it.
    fn done(&self, number: u64) {
        let key = (self.stage, self.pipeline, number);
        let mut exchanges = self.board.exchanges();
        if let Some(own) = exchanges.get_mut(&key) {
            own.ended += 1;
            if own.ended == self.replicas {
                exchanges.remove(&key);
            }
        }
        drop(exchanges);
        self.board.changed.notify_all();
    }
}

/// The tensor of replica `from`, or the sum of all in the order of the ranks, which is added into
/// the first. Whoever receives it only reads it.
fn combine(all: Vec<Tensor>, from: Option<usize>) -> Result<Tensor, String> {
    let _no_grad = tch::no_grad_guard();
    let alike = |tensor: &Tensor| tensor.size() == all[0].size() && tensor.kind() == all[0].kind();
    if !all.iter().all(alike) {
        return Err("the replicas' tensors differ in size or dtype".into());
    }
    if let Some(from) = from {
        // Its owner changes it in an update, which cannot come before all have begun the next step.
        return Ok(all[from].shallow_clone());
    }
    let mut sum = all[0].shallow_clone();
    for other in &all[1..] {
        let _ = sum.f_add_(other).map_err(|error| error.to_string())?;
    }
    Ok(sum)
}

impl Summing for StageBoard {
    fn begin(&mut self, tensor: Tensor) -> Result<(), PeerError> {
        self.start(tensor, None)
    }

    fn begin_broadcast(&mut self, tensor: Tensor, from: usize) -> Result<(), PeerError> {
        self.start(tensor, Some(from))
    }

    fn end(&mut self) -> Result<Tensor, PeerError> {
        let Some(number) = self.begun.pop_front() else {
            return Err(self.shared.own("a sum ends that has not begun".into()));
        };
        let combined = self.combined(number);
        self.done(number);
        combined
    }
}

impl Drop for StageBoard {
    /// Removes what a failed step left, so that a later pipeline finds nothing of it.
    fn drop(&mut self) {
        if self.shared.failed().is_some() {
            // Of all replicas: some have begun exchanges that others never will.
            let own = (self.stage, self.pipeline);
            self.board.exchanges().retain(|key, _| (key.0, key.1) != own);
            self.board.changed.notify_all();
            return;
        }
        while let Some(number) = self.begun.pop_front() {
            self.done(number);
        }
    }
}
