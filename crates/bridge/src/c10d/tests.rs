//! Several ranks in one process, each with its own connection to the store and its own group.

use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

use tch::{Kind, Tensor};

use super::{
    BODY_MAX, GpuGroup, Group, HEAD_BYTES_MAX, Inbox, Outbox, Result, TcpStore, gpus::has_nccl,
};

const TIMEOUT: Duration = Duration::from_secs(20);

fn served() -> TcpStore {
    TcpStore::serve(TcpListener::bind("127.0.0.1:0").unwrap(), TIMEOUT).unwrap()
}

/// Calls `rank` in a thread for each of `size` ranks, which form a group; returns their results.
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
    // This machine has all addresses of 127/8, so a server on all interfaces would answer there.
    let elsewhere = std::net::SocketAddr::from(([127, 0, 0, 2], store.port()));
    assert!(std::net::TcpStream::connect_timeout(&elsewhere, TIMEOUT).is_err());
}

/// Receives the next message: its head and its tensors.
fn receive(inbox: &mut Inbox, kinds: &[(i64, Kind)]) -> Result<(Vec<u8>, Vec<Tensor>)> {
    inbox.post_head()?.wait(TIMEOUT)?;
    let head = inbox.head()?;
    let mut tensors = Vec::new();
    for &(elements, kind) in kinds {
        inbox.post_tensor(elements, kind)?.wait(TIMEOUT)?;
        tensors.push(inbox.tensor()?);
    }
    Ok((head, tensors))
}

fn send(outbox: &mut Outbox, head: &[u8], body: &[Tensor]) -> Result<()> {
    outbox.send(head, body)?.iter().try_for_each(|work| work.wait(TIMEOUT))
}

#[test]
fn oracle_sums_are_those_of_all_processes() {
    let found = ranks(3, |group| -> Result<_> {
        let mut sums = group.sums()?;
        let own = group.rank() as i64;
        assert!(sums.end(TIMEOUT).unwrap_err().to_string().contains("has not begun"));
        sums.begin(numbers(own..own + 4))?;
        sums.begin(numbers(0..0))?;
        sums.begin(Tensor::from_slice(&[1_i64 << own]))?;
        let mut ended = Vec::new();
        for _ in 0..3 {
            ended.extend(sums.end(TIMEOUT)?);
        }
        Ok(ended)
    });
    for found in found {
        let found = found.unwrap();
        assert_eq!(found[0], Tensor::from_slice(&[3f32, 6.0, 9.0, 12.0]));
        assert_eq!((found[1].numel(), found.len()), (0, 3));
        assert_eq!(found[2], Tensor::from_slice(&[7_i64]));
    }
}

/// Values whose sum depends on the order: the order of ranks gives these bits, wherever an element
/// is in its tensor.
#[test]
fn oracle_sums_are_in_the_order_of_ranks() {
    for size in [2, 3, 4, 5] {
        for count in [1, 3, 4, 7, 1000, 4099] {
            let own = |rank: i64| {
                let values = (0..count).map(|i| {
                    let mixed = (i * 7919 + rank * 104_729) % 1009;
                    (mixed as f32 - 500.0) * 1.1_f32.powi((mixed % 60) as i32)
                });
                Tensor::from_slice(&values.collect::<Vec<_>>())
            };
            let found = ranks(size, |group| -> Result<_> {
                let mut sums = group.sums()?;
                sums.begin(own(group.rank() as i64))?;
                sums.begin(own(group.rank() as i64 + 9))?;
                Ok((sums.end(TIMEOUT)?.unwrap(), sums.end(TIMEOUT)?.unwrap()))
            });
            let expected = |first: i64| {
                let mut sum = own(first);
                for rank in 1..size as i64 {
                    sum += own(first + rank);
                }
                sum
            };
            for found in found {
                let (first, second) = found.unwrap();
                assert_eq!(first, expected(0), "{size} processes, {count} elements");
                assert_eq!(second, expected(9), "{size} processes, {count} elements");
            }
        }
    }
}

#[test]
fn oracle_a_broadcast_is_the_tensor_of_one_process_in_all() {
    let own = |rank: i64, kind: Kind| (numbers(0..6) + rank * 10).to_kind(kind).reshape([2, 3]);
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Int64, Kind::Bool, Kind::Double];
    let found = ranks(3, |group| -> Result<_> {
        let mut sums = group.sums()?;
        let rank = group.rank() as i64;
        for (at, kind) in kinds.into_iter().enumerate() {
            sums.begin_broadcast(own(rank, kind), at % 3)?;
        }
        // A scalar, an empty tensor, and a sum among them.
        sums.begin_broadcast(Tensor::from(rank + 5), 2)?;
        sums.begin(numbers(rank..rank + 1))?;
        sums.begin_broadcast(numbers(0..0), 1)?;
        (0..kinds.len() + 3).map(|_| Ok(sums.end(TIMEOUT)?.unwrap())).collect::<Result<Vec<_>>>()
    });
    for found in found {
        let found = found.unwrap();
        for (at, kind) in kinds.into_iter().enumerate() {
            assert_eq!(found[at], own(at as i64 % 3, kind), "{kind:?}");
        }
        assert_eq!(found[kinds.len()], Tensor::from(7_i64));
        assert_eq!(found[kinds.len() + 1], numbers(3..4));
        assert_eq!(found[kinds.len() + 2].numel(), 0);
    }
}

#[test]
fn fault_a_broadcast_of_unequal_tensors_is_an_error_everywhere() {
    let errors = ranks(2, |group| {
        let mut sums = group.sums().unwrap();
        sums.begin_broadcast(numbers(0..4 + group.rank() as i64), 0).unwrap();
        sums.end(TIMEOUT).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("all must give as many")), "{errors:?}");
}

/// Gloo ended the process whose tensor was smaller than what arrived.
#[test]
fn regression_sums_of_unequal_tensors_are_errors_everywhere() {
    for other in [numbers(0..5), numbers(0..4).to_kind(Kind::Double), numbers(0..4_000_000)] {
        let other = std::sync::Mutex::new(other);
        let errors = ranks(2, |group| {
            let mut sums = group.sums().unwrap();
            let other = other.lock().unwrap().shallow_clone();
            sums.begin(if group.rank() == 0 { numbers(0..4) } else { other }).unwrap();
            // Later sums work as if nothing had happened.
            sums.begin(numbers(0..2)).unwrap();
            let error = sums.end(TIMEOUT).unwrap_err();
            assert_eq!(sums.end(TIMEOUT).unwrap(), Some(numbers(0..2) * 2));
            error.to_string()
        });
        assert!(errors.iter().all(|error| error.contains("all must give as many")), "{errors:?}");
    }
}

#[test]
fn oracle_tags_are_apart_and_each_is_in_order_both_ways_at_once() {
    ranks(2, |group| {
        let peer = 1 - group.rank();
        std::thread::scope(|scope| {
            for tag in 0..4usize {
                let mut outbox = group.outbox(peer, tag).unwrap();
                let mut inbox = group.inbox(peer, tag).unwrap();
                let value = move |i: usize| (1000 * tag + i) as i64;
                scope.spawn(move || {
                    for i in 0..20 {
                        let body = [numbers(value(i)..value(i) + 3), numbers(0..1 + i as i64)];
                        send(&mut outbox, &[i as u8], &body[..i % 3]).unwrap();
                    }
                });
                scope.spawn(move || {
                    for i in 0..20 {
                        let due = [(3, Kind::Float), (1 + i as i64, Kind::Float)];
                        let (head, body) = receive(&mut inbox, &due[..i % 3]).unwrap();
                        assert_eq!((head, body.len()), (vec![i as u8], i % 3));
                        if let [first, ..] = &body[..] {
                            assert_eq!(*first, numbers(value(i)..value(i) + 3));
                        }
                    }
                });
            }
        });
    });
}

#[test]
fn oracle_a_head_and_a_body_of_the_largest_size_arrive() {
    ranks(2, |group| {
        let peer = 1 - group.rank();
        let head: Vec<u8> = (0..HEAD_BYTES_MAX).map(|i| i as u8).collect();
        let body: Vec<Tensor> = (0..BODY_MAX as i64).map(|i| numbers(i..i + 1000)).collect();
        let (mut outbox, mut inbox) =
            (group.outbox(peer, 3).unwrap(), group.inbox(peer, 3).unwrap());
        let leaving = outbox.send(&head, &body).unwrap();
        let (found, tensors) = receive(&mut inbox, &[(1000, Kind::Float); BODY_MAX]).unwrap();
        assert_eq!((found, tensors), (head.clone(), body));
        leaving.iter().for_each(|work| work.wait(TIMEOUT).unwrap());
        assert!(outbox.send(&[head, vec![0]].concat(), &[]).is_err());
        let many: Vec<Tensor> = (0..=BODY_MAX).map(|_| numbers(0..1)).collect();
        assert!(outbox.send(&[], &many).is_err());
    });
}

/// A receive smaller than what arrived ended the process. Gloo also wrote into a tensor after its
/// borrow had ended.
#[test]
fn regression_a_receive_of_another_size_is_an_error_and_nothing_is_written() {
    ranks(2, |group| {
        let peer = 1 - group.rank();
        if group.rank() == 1 {
            let mut outbox = group.outbox(0, 0).unwrap();
            // Kept until the end, because a part dropped before it is sent never leaves.
            let _leaving = outbox.send(&[], &[numbers(0..100)]).unwrap();
            send(&mut group.outbox(0, 1).unwrap(), b"done", &[]).unwrap();
            return;
        }
        let mut inbox = group.inbox(peer, 0).unwrap();
        inbox.post_head().unwrap().wait(TIMEOUT).unwrap();
        assert!(inbox.post_tensor(100, Kind::Float).is_err(), "before its head is taken");
        assert_eq!(inbox.head().unwrap(), b"");
        assert_eq!(inbox.announced().collect::<Vec<_>>(), [400]);
        assert!(inbox.post_head().is_err(), "the tensor comes first");
        let error = inbox.post_tensor(3, Kind::Float).unwrap_err().to_string();
        assert!(error.contains("a tensor of 400 bytes comes where 3 of Float are due"), "{error}");
        // The tensor would arrive next, but nothing receives it.
        assert_eq!(inbox.post_tensor(100, Kind::Float).unwrap_err().to_string(), error);
        assert!(inbox.post_head().is_err() && inbox.head().is_err() && inbox.tensor().is_err());
        drop(inbox);
        let error = group.inbox(peer, 0).unwrap_err().to_string();
        assert!(error.contains("given up in the middle"), "{error}");
        // Other tags still work.
        assert_eq!(receive(&mut group.inbox(peer, 1).unwrap(), &[]).unwrap().0, b"done");
    });
}

#[test]
fn fault_an_abort_ends_a_wait_and_leaves_the_connection() {
    ranks(2, |group| {
        if group.rank() == 0 {
            let mut inbox = group.inbox(1, 0).unwrap();
            let work = inbox.post_head().unwrap();
            let waiting = work.clone();
            let waits = std::thread::spawn(move || waiting.wait(TIMEOUT));
            // Whichever comes first, the wait or the abort, the wait ends.
            work.abort().unwrap();
            let error = waits.join().unwrap().unwrap_err();
            assert_eq!((error.peer, error.operation.as_str()), (Some(1), "receiving"));
            assert_eq!(work.wait(TIMEOUT).unwrap_err(), error);
            assert!(inbox.head().is_err());
            let found = receive(&mut group.inbox(1, 1).unwrap(), &[(3, Kind::Float)]).unwrap();
            assert_eq!(found.1, [numbers(5..8)]);
        } else {
            send(&mut group.outbox(0, 1).unwrap(), &[], &[numbers(5..8)]).unwrap();
        }
    });
}

#[test]
fn fault_a_peer_that_is_gone_is_named() {
    let errors = ranks(2, |group| {
        if group.rank() == 1 {
            drop(group);
            return None;
        }
        receive(&mut group.inbox(1, 0).unwrap(), &[]).err()
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
fn fault_what_gloo_cannot_move_is_an_error() {
    ranks(2, |group| {
        let peer = 1 - group.rank();
        let transposed = || numbers(0..6).reshape([2, 3]).tr();
        let mut outbox = group.outbox(peer, 0).unwrap();
        for (tensor, word) in [
            (transposed(), "contiguous"),
            (numbers(0..0), "without elements"),
            (Tensor::new(), "without elements"),
        ] {
            let error = outbox.send(&[], &[tensor]).unwrap_err();
            assert!(error.message.contains(word), "{error}");
        }
        let mut sums = group.sums().unwrap();
        for tensor in [transposed(), Tensor::new()] {
            assert!(sums.begin(tensor).is_err());
        }
        // An end can be in use only once, and must lead to another process.
        for error in [
            group.outbox(peer, 0).unwrap_err(),
            group.outbox(group.rank(), 1).unwrap_err(),
            group.outbox(2, 1).unwrap_err(),
            group.inbox(peer, 1 << 40).unwrap_err(),
            group.sums().unwrap_err(),
        ] {
            assert!(!error.message.is_empty(), "{error}");
        }
        drop(outbox);
        assert!(group.outbox(peer, 0).is_ok());
        sums.begin(numbers(0..1)).unwrap();
        assert!(sums.end(TIMEOUT).is_ok());
    });
}

/// The process sometimes crashed when two of its stages first summed over replicas at the same
/// moment. c10d records each group in a table without a lock. That table is now off (c10d.cc).
#[test]
fn regression_groups_of_one_process_begin_at_once() {
    // The crash was rare, so the test checks that the table is off.
    assert_eq!(std::env::var("TORCH_FR_BUFFER_SIZE").as_deref(), Ok("0"));
    for _ in 0..2 {
        let start = std::sync::Barrier::new(16);
        std::thread::scope(|scope| {
            let pair = || {
                ranks(2, |group| {
                    let mut sums = group.sums().unwrap();
                    start.wait();
                    sums.begin(numbers(0..3)).unwrap();
                    assert_eq!(sums.end(TIMEOUT).unwrap(), Some(numbers(0..3) * 2));
                })
            };
            let pairs: Vec<_> = (0..8).map(|_| scope.spawn(pair)).collect();
            pairs.into_iter().for_each(|pair| drop(pair.join().unwrap()));
        });
    }
}

/// Where libtorch has CUDA, NCCL is compiled, linked and started. Without a GPU it then refuses.
#[test]
fn nccl_starts_up_to_the_point_where_it_needs_a_gpu() {
    let store = served();
    let error = match GpuGroup::nccl(&store, 0, 1, 0, "127.0.0.1", TIMEOUT) {
        Ok(_) => return assert!(crate::device::count() > 0),
        Err(error) => error.to_string(),
    };
    println!("{error}");
    let expected = if has_nccl() { "no GPUs found" } else { "built without NCCL" };
    assert!(error.contains(expected), "{error}");
}
