//! Several ranks in one process: each has its own connection to the store and its own group.

use std::{
    net::TcpListener,
    sync::Arc,
    time::{Duration, Instant},
};

use tch::{Kind, Tensor};

use super::{Group, Result, TcpStore};

const TIMEOUT: Duration = Duration::from_secs(20);

fn served() -> TcpStore {
    TcpStore::serve(TcpListener::bind("127.0.0.1:0").unwrap(), TIMEOUT).unwrap()
}

/// Calls `rank` in a thread for each of `size` ranks, which meet; what each returns.
fn ranks<T: Send>(size: usize, rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let store = served();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|number| {
                let own = TcpStore::connect("127.0.0.1", store.port(), TIMEOUT).unwrap();
                let rank = &rank;
                scope.spawn(move || {
                    rank(Group::gloo(&own, number, size, "127.0.0.1", TIMEOUT).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn numbers(range: std::ops::Range<i64>) -> Tensor {
    Tensor::arange_start(range.start, range.end, (Kind::Float, tch::Device::Cpu))
}

#[test]
fn oracle_a_store_gives_back_what_it_was_given() {
    let store = served();
    let other = TcpStore::connect("127.0.0.1", store.port(), TIMEOUT).unwrap();
    assert!(!other.check("a").unwrap());
    store.set("a", b"\0one").unwrap();
    assert_eq!(other.get("a", TIMEOUT).unwrap(), b"\0one");
    assert_eq!(other.add("n", 3).unwrap(), 3);
    assert_eq!(store.add("n", -1).unwrap(), 2);
    assert_eq!(store.compare_set("first", b"", b"mine").unwrap(), b"mine");
    assert_eq!(other.compare_set("first", b"", b"yours").unwrap(), b"mine");
    let part = other.prefixed("part").unwrap();
    part.set("a", b"two").unwrap();
    assert_eq!(store.another().unwrap().get("a", TIMEOUT).unwrap(), b"\0one");
    assert_eq!(part.get("a", TIMEOUT).unwrap(), b"two");
    assert!(store.remove("a").unwrap());
    assert!(!other.check("a").unwrap());
}

#[test]
fn fault_a_key_that_nobody_sets_ends_at_its_deadline() {
    let store = served();
    let start = Instant::now();
    let error = store.get("never", Duration::from_millis(200)).unwrap_err();
    assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
    assert!(error.to_string().starts_with("waiting for never in the store: "), "{error}");
    store.set("after", b"it").unwrap();
    assert_eq!(store.get("after", TIMEOUT).unwrap(), b"it");
}

#[test]
fn fault_no_store_is_an_error_that_names_the_address() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = TcpStore::connect("127.0.0.1", free, Duration::from_millis(300)).unwrap_err();
    assert!(error.operation.ends_with(&format!("127.0.0.1:{free}")), "{error}");
}

#[test]
fn oracle_the_store_listens_on_its_own_address_only() {
    let store = served();
    // All of 127/8 is this machine's: a server on all interfaces would answer there.
    let elsewhere = std::net::SocketAddr::from(([127, 0, 0, 2], store.port()));
    assert!(std::net::TcpStream::connect_timeout(&elsewhere, TIMEOUT).is_err());
}

#[test]
fn oracle_collectives_are_those_of_their_definition() {
    let found = ranks(3, |group| -> Result<_> {
        let own = group.rank() as i64;
        let (sum, root) = (numbers(own..own + 4), numbers(own..own + 2));
        group.all_reduce(&sum)?.wait(TIMEOUT)?;
        group.broadcast(&root, 2)?.wait(TIMEOUT)?;
        let all: Vec<Tensor> = (0..3).map(|_| numbers(0..1)).collect();
        group.all_gather(&all, &numbers(own..own + 1))?.wait(TIMEOUT)?;
        group.barrier()?.wait(TIMEOUT)?;
        Ok((sum, root, Tensor::cat(&all, 0)))
    });
    for found in found {
        let (sum, root, all) = found.unwrap();
        assert_eq!(sum, Tensor::from_slice(&[3f32, 6.0, 9.0, 12.0]));
        assert_eq!(root, Tensor::from_slice(&[2f32, 3.0]));
        assert_eq!(all, Tensor::from_slice(&[0f32, 1.0, 2.0]));
    }
}

#[test]
fn oracle_tags_are_apart_and_each_is_in_order_both_ways_at_once() {
    ranks(2, |group| {
        let peer = 1 - group.rank();
        let group = &group;
        std::thread::scope(|scope| {
            for tag in 0..4usize {
                scope.spawn(move || {
                    for i in 0..20 {
                        let value = (1000 * tag + i) as i64;
                        group
                            .send(&numbers(value..value + 3), peer, tag)
                            .unwrap()
                            .wait(TIMEOUT)
                            .unwrap();
                    }
                });
                scope.spawn(move || {
                    for i in 0..20 {
                        let (value, into) = ((1000 * tag + i) as i64, numbers(0..3));
                        group.receive(&into, peer, tag).unwrap().wait(TIMEOUT).unwrap();
                        assert_eq!(into, numbers(value..value + 3));
                    }
                });
            }
        });
    });
}

#[test]
fn fault_an_abort_ends_a_wait_and_leaves_the_connection() {
    ranks(2, |group| {
        let into = numbers(0..3);
        if group.rank() == 0 {
            let work = Arc::new(group.receive(&into, 1, 0).unwrap());
            let waiting = Arc::clone(&work);
            let waits = std::thread::spawn(move || waiting.wait(TIMEOUT));
            // Whichever comes first, the wait or the abort, it ends.
            work.abort().unwrap();
            let error = waits.join().unwrap().unwrap_err();
            assert_eq!((error.peer, error.operation.as_str()), (Some(1), "receiving"));
        }
        group.barrier().unwrap().wait(TIMEOUT).unwrap();
        if group.rank() == 0 {
            group.receive(&into, 1, 1).unwrap().wait(TIMEOUT).unwrap();
            assert_eq!(into, numbers(5..8));
        } else {
            group.send(&numbers(5..8), 0, 1).unwrap().wait(TIMEOUT).unwrap();
        }
        group.barrier().unwrap().wait(TIMEOUT).unwrap();
    });
}

#[test]
fn fault_a_peer_that_is_gone_is_named() {
    let errors = ranks(2, |group| {
        if group.rank() == 1 {
            drop(group);
            return None;
        }
        group.receive(&numbers(0..3), 1, 0).and_then(|work| work.wait(TIMEOUT)).err()
    });
    let error = errors.into_iter().flatten().next().unwrap();
    assert_eq!(error.peer, Some(1));
    assert!(error.to_string().starts_with("receiving (rank 1): "), "{error}");
}

#[test]
fn fault_a_rank_that_does_not_come_ends_at_the_deadline() {
    let store = served();
    let start = Instant::now();
    let error = Group::gloo(&store, 0, 2, "127.0.0.1", Duration::from_millis(500)).unwrap_err();
    assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
    assert!(error.operation.contains("2 processes as rank 0"), "{error}");
}

#[test]
fn fault_a_tensor_that_gloo_cannot_send_is_an_error() {
    ranks(2, |group| {
        let transposed = numbers(0..6).reshape([2, 3]).tr();
        let error = group.send(&transposed, 1 - group.rank(), 0).unwrap_err();
        assert!(error.message.contains("contiguous"), "{error}");
        group.barrier().unwrap().wait(TIMEOUT).unwrap();
    });
}

/// Two stages of a process that summed over replicas for the first time at the same moment crashed the process now and then: c10d enters
/// each group in a table of its own without a lock. The table is off since (c10d.cc).
#[test]
fn regression_groups_of_one_process_begin_at_once() {
    // The crash was rare: that the table is off is what can be seen every time.
    assert_eq!(std::env::var("TORCH_FR_BUFFER_SIZE").as_deref(), Ok("0"));
    for _ in 0..2 {
        let start = std::sync::Barrier::new(16);
        std::thread::scope(|scope| {
            let pair = || {
                ranks(2, |group| {
                    let sum = numbers(0..3);
                    start.wait();
                    group.all_reduce(&sum).unwrap().wait(TIMEOUT).unwrap();
                    assert_eq!(sum, numbers(0..3) * 2);
                })
            };
            let pairs: Vec<_> = (0..8).map(|_| scope.spawn(pair)).collect();
            pairs.into_iter().for_each(|pair| drop(pair.join().unwrap()));
        });
    }
}
