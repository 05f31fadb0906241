//! Processes that join: every step ends, whatever answers at the other end, and its error names
//! what it waited for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use common::{DEADLINE, joined, meeting};
use gpipe_bridge::c10d::TcpStore;
use gpipe_distributed::{Cluster, Meeting, Store, tell_of_end};

/// Deadline of the meetings in these tests; a wait ends soon after it.
const SHORT: Duration = Duration::from_secs(1);

/// The error of rank 1 of 2 at the store on `listener`. Also checks that it comes in time.
#[track_caller]
fn refused(listener: &TcpListener) -> String {
    let start = Instant::now();
    let error = Cluster::join(meeting(1, 2, listener, SHORT)).err().expect("nobody answered");
    // The deadline of the step, with a margin for a busy machine.
    assert!(start.elapsed() < DEADLINE / 2, "{:?}: {error}", start.elapsed());
    error.to_string()
}

/// The end of the wait could not be computed, which panicked.
#[test]
fn regression_a_timeout_beyond_all_clocks() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = Cluster::join(meeting(1, 2, &listener, Duration::MAX)).err().expect("too long");
    assert!(error.to_string().contains("use at most 31622400s"), "{error}");
}

/// Joining blocked forever.
#[test]
fn regression_a_store_that_accepts_and_is_silent() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let text = refused(&listener);
    assert!(text.contains(&format!("127.0.0.1:{port}")), "{text}");
}

/// Joining blocked forever here, too.
#[test]
fn regression_a_store_that_is_an_http_server() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut held: Vec<TcpStream> = Vec::new();
        while let Ok((mut stream, _)) = server.accept() {
            let mut bytes = [0; 16];
            let _ = stream.read(&mut bytes);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
            held.push(stream);
        }
    });
    let text = refused(&listener);
    let port = listener.local_addr().unwrap().port();
    assert!(text.contains(&format!("127.0.0.1:{port}")), "{text}");
}

/// A meeting at a store that another process serves, as a launcher does.
fn launched(listener: &TcpListener, rank: usize, size: usize, deadline: Duration) -> Meeting {
    let port = listener.local_addr().unwrap().port();
    let store = Store::At { host: "127.0.0.1".into(), port };
    Meeting { store, ..meeting(rank, size, listener, deadline) }
}

/// The other processes waited for its facts until the deadline, or until a launcher killed them 15
/// seconds later.
#[test]
fn regression_a_process_that_ends_while_others_wait_for_it_is_named_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::serve(listener.try_clone().unwrap(), DEADLINE).unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let meeting = launched(&listener, rank, 3, DEADLINE * 10);
            scope.spawn(move || Cluster::join(meeting).err().unwrap().to_string())
        });
        // Wait until both ranks are there, so that the report ends their wait.
        let meets = store.prefixed("test").unwrap();
        for rank in [0, 1] {
            meets.get(&format!("facts/{rank}"), DEADLINE).unwrap();
        }
        tell_of_end(&store, "test", 2, "it was ended by SIGKILL").unwrap();
        // A later report is ignored.
        tell_of_end(&store, "test", 1, "no").unwrap();
        for rank in ranks {
            let text = rank.join().unwrap();
            assert_eq!(text, "rank 2: it was ended by SIGKILL");
        }
    });
    assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
}

/// Two ranks keep beating and the third never comes: every error names the missing rank.
#[test]
fn fault_a_process_that_does_not_come_is_named_by_all() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _store = TcpStore::serve(listener.try_clone().unwrap(), DEADLINE).unwrap();
    std::thread::scope(|scope| {
        let ranks = [0, 2].map(|rank| {
            let meeting = launched(&listener, rank, 3, SHORT);
            scope.spawn(move || Cluster::join(meeting).err().unwrap().to_string())
        });
        for rank in ranks {
            let text = rank.join().unwrap();
            assert!(text.contains("rank 1 of 3 did not come within 1s"), "{text}");
        }
    });
}

/// A process that has come and then falls silent is missed before all the others are there.
#[test]
fn fault_a_process_that_has_come_and_falls_silent_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::serve(listener.try_clone().unwrap(), DEADLINE).unwrap();
    let meets = store.prefixed("test").unwrap();
    // Rank 1 gave one sign of life; its facts never come.
    meets.set("beat/1", &[7_u64.to_le_bytes()].concat()).unwrap();
    let error = Cluster::join(launched(&listener, 0, 3, SHORT)).err().unwrap().to_string();
    let silent = error.contains("rank 1: no sign of life") || error.contains("rank 1 of 3 did not");
    assert!(silent, "{error}");
}

/// Without a launcher, nothing reports a killed process. It was missed only at the deadline.
#[test]
fn regression_a_process_that_is_killed_while_it_joins_is_missed_within_seconds() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::serve(listener.try_clone().unwrap(), DEADLINE).unwrap();
    for all_have_come in [false, true] {
        let name = format!("all have come: {all_have_come}");
        let meets = store.prefixed(&name).unwrap();
        meets.set("beat/1", &7_u64.to_le_bytes()).unwrap();
        let start = Instant::now();
        let meeting = Meeting { name, ..launched(&listener, 0, 2, DEADLINE * 10) };
        let waits = std::thread::spawn(move || Cluster::join(meeting).err().unwrap().to_string());
        if all_have_come {
            // Rank 1 dies after all have met, before they connect.
            meets.set("facts/1", &meets.get("facts/0", DEADLINE).unwrap()).unwrap();
        }
        let error = waits.join().unwrap();
        assert!(error.contains("rank 1: no sign of life for 5."), "{error}");
        assert!(error.contains("killed or stopped while it joined"), "{error}");
        assert!(start.elapsed() < DEADLINE, "{:?}", start.elapsed());
    }
}

#[test]
fn fault_two_processes_of_one_rank_and_numbers_that_do_not_fit() {
    let found = joined(
        2,
        DEADLINE,
        |meeting| Meeting { rank: 5, ..meeting },
        |cluster| cluster.err().unwrap().to_string(),
    );
    assert!(found.iter().all(|text| text.contains("rank 5 of 2 processes")), "{found:?}");
}
