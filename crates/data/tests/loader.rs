//! Tests of the loader: order, bounds, and every way in which its thread can end. Families:
//! `property_`, `fault_`. Slow or stuck producers wait on a channel that the test holds, so nothing
//! here sleeps.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use gpipe_data::{Error, LOADER_DEPTH_MAX, Loaded, Loader, LoaderSettings, TokenSet, TrainBatches};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

fn depth(depth: usize) -> LoaderSettings {
    LoaderSettings { depth, ..LoaderSettings::default() }
}

fn tiny_timeout() -> LoaderSettings {
    LoaderSettings { depth: 2, timeout: Duration::from_millis(1) }
}

/// A producer that waits for a permit before each step, and the sender of the permits.
fn gated() -> (Sender<()>, impl Fn(u64) -> Result<u64, String> + Send + 'static) {
    let (permit, permits): (_, Receiver<()>) = channel();
    let permits = Mutex::new(permits);
    (permit, move |step| {
        permits.lock().unwrap().recv().map_err(|_| "no more permits".to_owned())?;
        Ok(step)
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        rng_seed: RngSeed::Fixed(5),
        failure_persistence: None,
        ..ProptestConfig::with_cases(60)
    })]

    #[test]
    fn property_the_loader_gives_what_direct_calls_give(
        depth_asked in 1usize..=LOADER_DEPTH_MAX, first in 0u64..1000, count in 0u64..100,
        seed: u64,
    ) {
        let tokens = Arc::new(TokenSet { tokens: (0..101).collect(), bytes: 101 });
        let batches = TrainBatches::new(Arc::clone(&tokens), 7, 4, seed).unwrap();
        let ahead = batches.clone();
        let steps = first..first + count;
        let loader = Loader::start(steps.clone(), depth(depth_asked), move |step| {
            Ok::<_, Infallible>(ahead.batch(step))
        }).unwrap();
        let mut expected = steps;
        for loaded in loader {
            let Loaded { step, batch, .. } = loaded.unwrap();
            prop_assert_eq!(Some(step), expected.next());
            prop_assert_eq!(batch, batches.batch(step));
        }
        prop_assert_eq!(expected.next(), None, "every step came");
    }

    #[test]
    fn property_no_more_is_made_than_the_queue_holds_and_one(depth_asked in 1usize..=8) {
        let taken = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&taken);
        let most = Arc::new(AtomicU64::new(0));
        let lead = Arc::clone(&most);
        let (made, started) = channel();
        let loader = Loader::start(0..200, depth(depth_asked), move |step| {
            lead.fetch_max(step - seen.load(Ordering::SeqCst), Ordering::SeqCst);
            let _ = made.send(step);
            Ok::<_, Infallible>(step)
        }).unwrap();
        // If no batch is taken, exactly depth + 1 are made, and the last one waits for room.
        for step in 0..=depth_asked as u64 {
            prop_assert_eq!(started.recv().unwrap(), step);
        }
        prop_assert!(started.try_recv().is_err());
        for loaded in loader {
            prop_assert!(loaded.is_ok());
            taken.fetch_add(1, Ordering::SeqCst);
        }
        // One more than depth + 1, because `taken` is counted after the slot in the queue is free.
        prop_assert!(most.load(Ordering::SeqCst) <= depth_asked as u64 + 1);
    }
}

#[test]
fn fault_an_error_arrives_at_its_step_and_is_the_last_item() {
    let mut loader = Loader::start(3..100, depth(4), |step| {
        if step == 5 { Err("the disk is gone: plug it in") } else { Ok(step) }
    })
    .unwrap();
    assert_eq!(loader.next().unwrap().unwrap().batch, 3);
    assert_eq!(loader.next().unwrap().unwrap().batch, 4);
    let error = loader.next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "cannot make the batch of step 6: the disk is gone: plug it in");
    assert!(loader.next().is_none() && loader.next().is_none());
}

#[test]
fn fault_a_panic_arrives_at_its_step_with_its_message() {
    for (formatted, expected) in [(false, "plain"), (true, "of step 1")] {
        let mut loader = Loader::start(0..100, depth(4), move |step| match step {
            1 if formatted => panic!("of step {step}"),
            1 => panic!("plain"),
            _ => Ok::<_, Infallible>(step),
        })
        .unwrap();
        assert!(loader.next().unwrap().is_ok());
        let error = loader.next().unwrap().unwrap_err();
        assert!(matches!(&error, Error::LoaderPanicked { step: 1, .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(loader.next().is_none());
    }
}

#[test]
fn fault_a_loader_that_is_dropped_half_way_ends_its_thread() {
    for taken in 0..4 {
        let owned = Arc::new(());
        let held = Arc::clone(&owned);
        let mut loader = Loader::start(0..u64::MAX, depth(2), move |step| {
            let _ = &held;
            Ok::<_, Infallible>(step)
        })
        .unwrap();
        for step in 0..taken {
            assert_eq!(loader.next().unwrap().unwrap().step, step);
        }
        drop(loader);
        assert_eq!(Arc::strong_count(&owned), 1, "the thread and its closure are gone");
    }
}

#[test]
fn fault_a_slow_producer_is_waited_for_and_the_wait_counted() {
    let (permit, slow) = gated();
    let mut loader = Loader::start(0..3, LoaderSettings::default(), slow).unwrap();
    let waiting = std::thread::spawn(move || {
        let loaded: Vec<_> = loader.by_ref().map(Result::unwrap).collect();
        loaded
    });
    for _ in 0..3 {
        permit.send(()).unwrap();
    }
    let loaded = waiting.join().unwrap();
    assert_eq!(loaded.iter().map(|loaded| loaded.batch).collect::<Vec<_>>(), [0, 1, 2]);

    // Batches in the queue cost no wait. The thread has ended, so all batches are there.
    let (made, all_made) = channel();
    let ready = Loader::start(0..2, depth(2), move |step| {
        let _ = made.send(()); // Disconnected when the thread's closure is dropped.
        Ok::<_, Infallible>(step)
    })
    .unwrap();
    while all_made.recv().is_ok() {}
    for loaded in ready {
        assert_eq!(loaded.unwrap().waited, Duration::ZERO);
    }
}

#[test]
fn fault_a_stuck_producer_is_named_at_the_deadline_and_left_alone() {
    let (permit, stuck) = gated();
    let mut loader = Loader::start(8..100, tiny_timeout(), stuck).unwrap();
    let error = loader.next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("waited 1ms for the batch of step 9"), "{error}");
    assert!(error.contains("raise the timeout"), "{error}");
    assert!(loader.next().is_none());
    drop(loader); // Returns, though the thread still waits for a permit.

    // If the loader is dropped before use, the wait for the thread's end also has the timeout.
    let (never, stuck) = gated();
    drop(Loader::start(0..1, tiny_timeout(), stuck).unwrap());
    drop((never, permit));
}

#[test]
fn fault_depths_out_of_range_are_refused() {
    for wrong in [0, LOADER_DEPTH_MAX + 1, usize::MAX] {
        let error = Loader::start(0..1, depth(wrong), Ok::<_, Infallible>).unwrap_err();
        assert!(error.to_string().contains("use 1 to 64"), "{error}");
    }
    assert!(Loader::start(0..1, depth(LOADER_DEPTH_MAX), Ok::<_, Infallible>).is_ok());
}
