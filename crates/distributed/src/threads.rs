//! Replicas as threads of one process. They meet as processes do, over the loopback interface, and
//! so share deadlines and failures. Their gradients do not travel: each replica adds those of all
//! replicas in the order of their ranks, which gives the bits that as many processes get.
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
//!         // builder.distributed(replica.clone()).replicas(replica) ...
//!     })
//! });
//! replicas.for_each(|replica| replica.join().unwrap());
//! ```

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::{Ipv4Addr, TcpListener},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use gpipe::processes::{PeerError, Summing};
use gpipe_core::StageId;
use tch::{TchError, Tensor};

use crate::{
    joining::{Meeting, Store},
    shared::Shared,
};

/// How often a wait looks whether another replica has failed.
const LOOK: Duration = Duration::from_millis(20);

/// One meeting for each of `count` threads of this process.
///
/// # Errors
/// There is no free port on the loopback interface.
pub fn meetings(count: usize, deadline: Duration) -> io::Result<Vec<Meeting>> {
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
        deadline,
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

/// The tensors of one exchange, by replica.
struct Exchange {
    tensors: Vec<Option<Tensor>>,
    /// How many replicas are done with it.
    ended: usize,
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
    /// The exchanges under way, and for a broadcast the replica whose tensor all get.
    begun: VecDeque<(u64, Option<usize>)>,
}

impl StageBoard {
    fn start(&mut self, tensor: Tensor, from: Option<usize>) {
        let key = (self.stage, self.pipeline, self.next);
        let mut exchanges = self.board.exchanges();
        let empty = || Exchange { tensors: (0..self.replicas).map(|_| None).collect(), ended: 0 };
        exchanges.entry(key).or_insert_with(empty).tensors[self.replica] = Some(tensor);
        drop(exchanges);
        self.board.changed.notify_all();
        self.begun.push_back((self.next, from));
        self.next += 1;
    }

    /// The tensors of all replicas in exchange `number`. They share memory with the replicas' own.
    fn all(&self, number: u64) -> Result<Vec<Tensor>, PeerError> {
        let key = (self.stage, self.pipeline, number);
        let longest = self.shared.longest_wait;
        let until = Instant::now() + longest;
        let mut exchanges = self.board.exchanges();
        loop {
            let found = exchanges.get(&key);
            let there: Vec<Option<Tensor>> = found
                .map(|own| own.tensors.iter().map(|t| t.as_ref().map(Tensor::shallow_clone)))
                .into_iter()
                .flatten()
                .collect();
            let missing = there.iter().position(Option::is_none);
            if missing.is_none() && !there.is_empty() {
                return Ok(there.into_iter().flatten().collect());
            }
            if let Some(failed) = self.shared.failed() {
                return Err(failed);
            }
            if Instant::now() >= until {
                let missing = missing.unwrap_or_default();
                return Err(self.shared.own(format!(
                    "replica {missing} did not bring its part of stage {} within {longest:.0?}",
                    self.stage
                )));
            }
            let waited = self.board.changed.wait_timeout(exchanges, LOOK);
            exchanges = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
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
    }

    fn combined(&self, all: &[Tensor], from: Option<usize>) -> Result<Tensor, PeerError> {
        let own = &all[self.replica];
        if all.iter().any(|t| t.size() != own.size() || t.kind() != own.kind()) {
            let reason = "the replicas' tensors differ in size or dtype".to_owned();
            return Err(self.shared.own(reason));
        }
        let combined = match from {
            Some(from) => all[from].f_detach_copy(),
            None => in_rank_order(all),
        };
        combined.map_err(|error| self.shared.own(error.to_string()))
    }
}

/// The sum, in the order of the ranks.
fn in_rank_order(all: &[Tensor]) -> Result<Tensor, TchError> {
    let _no_grad = tch::no_grad_guard();
    let mut sum = all[0].f_detach_copy()?;
    for other in &all[1..] {
        let _ = sum.f_add_(other)?;
    }
    Ok(sum)
}

impl Summing for StageBoard {
    fn begin(&mut self, tensor: Tensor) -> Result<(), PeerError> {
        self.start(tensor, None);
        Ok(())
    }

    fn begin_broadcast(&mut self, tensor: Tensor, from: usize) -> Result<(), PeerError> {
        self.start(tensor, Some(from));
        Ok(())
    }

    fn end(&mut self) -> Result<Tensor, PeerError> {
        let Some((number, from)) = self.begun.pop_front() else {
            return Err(self.shared.own("a sum ends that has not begun".into()));
        };
        let all = self.all(number)?;
        let combined = self.combined(&all, from);
        drop(all);
        self.done(number);
        combined
    }
}

impl Drop for StageBoard {
    /// Removes what a failed step left, so that a later pipeline finds nothing of it.
    fn drop(&mut self) {
        while let Some((number, _)) = self.begun.pop_front() {
            self.done(number);
        }
    }
}
