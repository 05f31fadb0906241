//! Checks every interleaving of threads at a link and at a failure, with loom.
//!
//! No message is lost or out of order, and no wake-up is missed. Loom's waits have no timeouts, so
//! loom reports a wait that only its slice would end as a deadlock.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --package gpipe-runtime --release --test interleavings`
#![cfg(loom)]
// helpers of tests may panic
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use gpipe_core::{Action, MicroBatch, Nanos, Op, StageId};
use gpipe_runtime::{
    Failure, StepError,
    link::{Link, Message, WaitEnd},
    testing::MockError,
};
use loom::{sync::Arc, thread};

const SLICE: Duration = Duration::from_millis(1);

/// Number of interleavings tried by all tests.
static TRIED: AtomicUsize = AtomicUsize::new(0);

/// Runs `f` under loom. `preemptions` bounds how often loom interrupts a thread, where all
/// interleavings would be too many. Three find nearly every fault.
fn model(preemptions: Option<usize>, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    let before = TRIED.load(Ordering::Relaxed);
    builder.check(move || {
        TRIED.fetch_add(1, Ordering::Relaxed);
        f();
    });
    let tried = TRIED.load(Ordering::Relaxed);
    assert!(tried > before);
    println!("soak: {tried} interleavings so far");
}

fn link(capacity: usize) -> Arc<Link<u32>> {
    Arc::new(Link::new(capacity))
}

fn send(link: &Link<u32>, value: u32) -> Result<(), WaitEnd> {
    link.reserve(SLICE, || true)?;
    link.put(Some(MicroBatch(value)), Message::Value(value), |busy| (busy, busy));
    Ok(())
}

fn receive(link: &Link<u32>) -> Result<u32, WaitEnd> {
    let envelope = link.take(SLICE, || true)?;
    link.release(Nanos(0));
    match envelope.message {
        Message::Value(value) if envelope.micro_batch == Some(MicroBatch(value)) => Ok(value),
        other => panic!("{other:?} of {:?}", envelope.micro_batch),
    }
}

#[test]
fn property_messages_arrive_once_and_in_order() {
    for capacity in [1, 2] {
        model(None, move || {
            let link = link(capacity);
            let sender = Arc::clone(&link);
            let sender = thread::spawn(move || (0..3).try_for_each(|value| send(&sender, value)));
            let received: Vec<u32> = (0..3).map(|_| receive(&link).unwrap()).collect();
            sender.join().unwrap().unwrap();
            assert_eq!(received, [0, 1, 2]);
        });
    }
}

#[test]
fn property_a_full_link_holds_its_sender_until_there_is_room() {
    model(None, || {
        let link = link(1);
        let sender = Arc::clone(&link);
        let sent = Arc::new(loom::sync::atomic::AtomicUsize::new(0));
        let count = Arc::clone(&sent);
        let sender = thread::spawn(move || {
            for value in 0..2 {
                send(&sender, value).unwrap();
                count.fetch_add(1, loom::sync::atomic::Ordering::SeqCst);
            }
        });
        let first = link.take(SLICE, || true).unwrap();
        // The slot of the first message is still occupied.
        assert!(sent.load(loom::sync::atomic::Ordering::SeqCst) <= 1);
        assert!(matches!(first.message, Message::Value(0)));
        link.release(Nanos(0));
        assert_eq!(receive(&link), Ok(1));
        sender.join().unwrap();
    });
}

/// Activations in one direction and gradients in the other, with one slot per link, as between two
/// stages of 1F1B.
#[test]
fn property_both_directions_at_once() {
    model(Some(3), || {
        let (there, back) = (link(1), link(1));
        let ends = (Arc::clone(&there), Arc::clone(&back));
        let last = thread::spawn(move || {
            for m in 0..2 {
                let value = receive(&ends.0).unwrap();
                assert_eq!(value, m);
                send(&ends.1, value + 10).unwrap();
            }
        });
        send(&there, 0).unwrap();
        send(&there, 1).unwrap();
        assert_eq!((receive(&back), receive(&back)), (Ok(10), Ok(11)));
        last.join().unwrap();
    });
}

/// After a failure at any moment, a sender waiting for room and a receiver waiting for a message
/// both stop.
#[test]
fn fault_a_failure_ends_every_wait() {
    model(Some(3), || {
        let (empty, full) = (link(1), link(1));
        send(&full, 7).unwrap();
        let (receiving, sending) = (Arc::clone(&empty), Arc::clone(&full));
        let receiver = thread::spawn(move || receive(&receiving));
        let sender = thread::spawn(move || send(&sending, 8));
        empty.poison();
        full.poison();
        assert_eq!(receiver.join().unwrap(), Err(WaitEnd::Poisoned));
        assert_eq!(sender.join().unwrap(), Err(WaitEnd::Poisoned));
        // Later waits do not begin.
        assert_eq!(receive(&full), Err(WaitEnd::Poisoned));
    });
}

fn error(stage: u32) -> StepError<MockError> {
    let action = Action { stage: StageId(stage), op: Op::Norm };
    StepError::Stage { action, source: MockError::Injected }
}

/// The order that workers follow: record the error, then poison the links. Each worker checks the
/// failure before each action.
#[test]
fn fault_the_first_error_wins_and_everyone_sees_it() {
    model(Some(3), || {
        let failure = Arc::new(Failure::<MockError>::default());
        let link = link(1);
        let failing = |stage| {
            let (failure, link) = (Arc::clone(&failure), Arc::clone(&link));
            thread::spawn(move || {
                let first = failure.raise(error(stage));
                link.poison();
                first
            })
        };
        let (one, two) = (failing(1), failing(2));
        let waited = if failure.is_raised() { Err(WaitEnd::Poisoned) } else { receive(&link) };
        assert_eq!(waited, Err(WaitEnd::Poisoned));
        // A worker that is woken finds the reason.
        assert!(failure.is_raised());
        let firsts = [one.join().unwrap(), two.join().unwrap()];
        let winner = if firsts[0] { 1 } else { 2 };
        assert_eq!(firsts.iter().filter(|first| **first).count(), 1);
        let text = failure.take().unwrap().to_string();
        assert!(text.starts_with(&format!("{winner}NORM")), "{text}");
        assert!(failure.take().is_none());
    });
}
