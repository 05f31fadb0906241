//! Ranks as threads of one process. Each rank has separate connections, over c10d on loopback, and
//! a separate pipeline.
// helpers of tests may panic
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../gpipe/tests/common/mod.rs"]
pub mod model;

use std::{net::TcpListener, sync::Arc, time::Duration};

use gpipe_distributed::{Cluster, JoinError, Meeting, Store};

pub const DEADLINE: Duration = Duration::from_secs(60);

/// The meeting of `rank` among `size` ranks, at the store that rank 0 serves.
pub fn meeting(rank: usize, size: usize, listener: &TcpListener, deadline: Duration) -> Meeting {
    let port = listener.local_addr().unwrap().port();
    let store = match rank {
        0 => Store::Serve(listener.try_clone().unwrap()),
        _ => Store::At { host: "127.0.0.1".into(), port },
    };
    Meeting {
        rank,
        size,
        store,
        name: "test".into(),
        address: "127.0.0.1".into(),
        timeout: deadline,
        facts: vec![("version".into(), "1".into())],
    }
}

/// Calls `process` in parallel for each of `size` ranks that have joined.
pub fn in_processes<T: Send>(
    size: usize,
    deadline: Duration,
    process: impl Fn(Arc<Cluster>) -> T + Sync,
) -> Vec<T> {
    joined(size, deadline, |meeting| meeting, |cluster| process(cluster.unwrap()))
}

/// Like [`in_processes`], with meetings changed by `change`; joining may fail.
pub fn joined<T: Send>(
    size: usize,
    deadline: Duration,
    change: impl Fn(Meeting) -> Meeting + Sync,
    process: impl Fn(Result<Arc<Cluster>, JoinError>) -> T + Sync,
) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let (listener, change, process) = (&listener, &change, &process);
                scope.spawn(move || {
                    process(Cluster::join(change(meeting(rank, size, listener, deadline))))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
