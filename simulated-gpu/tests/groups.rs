//! The stand-in for NCCL: values pass between GPUs, a missing wait is reported, and wrong calls are
//! errors.
#![allow(clippy::unwrap_used)]

mod common;

use std::{net::TcpListener, time::Duration};

use common::{is_reported, passes};
use gpipe_bridge::{
    c10d::{GpuGroup, TcpStore, gpus::TENSORS_MAX},
    device::Stream,
};
use tch::{Device, Kind, Tensor};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Calls `rank` in a thread for each of two ranks, which have a GPU each.
fn two_ranks(rank: impl Fn(usize, GpuGroup) + Sync) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::serve(listener, TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        for number in 0..2 {
            let own = TcpStore::connect("127.0.0.1", store.port(), TIMEOUT).unwrap();
            let rank = &rank;
            scope.spawn(move || {
                let joined = GpuGroup::nccl(&own, number, 2, number, "127.0.0.1", TIMEOUT);
                rank(number, joined.unwrap());
            });
        }
    });
}

/// `[from, from + count)` on a GPU.
fn numbers(gpu: usize, from: i64, count: i64) -> Tensor {
    Tensor::arange_start(from, from + count, (Kind::Int64, Device::Cuda(gpu)))
}

fn empty(gpu: usize, count: i64) -> Tensor {
    Tensor::empty([count], (Kind::Int64, Device::Cuda(gpu)))
}

#[test]
fn oracle_values_pass_in_order_both_ways_at_once() {
    passes("values_pass");
}

#[test]
#[ignore = "runs in a process of its own"]
fn values_pass() {
    two_ranks(|rank, group| {
        Stream::new(rank).unwrap().enter().unwrap();
        let other = 1 - rank;
        for round in 0..20 {
            let first = 100 * rank as i64 + round;
            let sends = [(numbers(rank, first, 3), other), (numbers(rank, -first, 5), other)];
            let receives = [(empty(rank, 3), other), (empty(rank, 5), other)];
            group.exchange(&sends, &receives).unwrap();
            let theirs = 100 * other as i64 + round;
            let [a, b] = receives.map(|(tensor, _)| tensor.to_device(Device::Cpu));
            assert_eq!(Vec::<i64>::try_from(&a).unwrap(), [theirs, theirs + 1, theirs + 2]);
            assert_eq!(b.int64_value(&[4]), 4 - theirs);
        }
    });
}

#[test]
fn fault_a_value_that_is_read_before_it_arrives_is_reported() {
    let words = ["mul", "reads the result of", "a group of sends and receives"];
    is_reported("reads_before_it_arrives", "", &words);
}

#[test]
#[ignore = "runs in a process of its own"]
fn reads_before_it_arrives() {
    two_ranks(|rank, group| {
        Stream::new(rank).unwrap().enter().unwrap();
        let (sent, received) = (numbers(rank, 0, 3), empty(rank, 3));
        match rank {
            0 => group.exchange(&[(sent, 1)], &[]).unwrap(),
            _ => group.exchange(&[], &[(received.shallow_clone(), 0)]).unwrap(),
        }
        if rank == 1 {
            Stream::new(rank).unwrap().enter().unwrap();
            let _twice = received * 2;
        }
    });
}

#[test]
fn fault_a_value_that_is_sent_before_it_is_made_is_reported() {
    let words = ["a group of sends and receives", "reads the result of", "add"];
    is_reported("sends_before_it_is_made", "", &words);
}

#[test]
#[ignore = "runs in a process of its own"]
fn sends_before_it_is_made() {
    two_ranks(|rank, group| {
        let compute = Stream::new(rank).unwrap();
        compute.enter().unwrap();
        let made = numbers(rank, 0, 3) + 1;
        Stream::new(rank).unwrap().enter().unwrap();
        match rank {
            0 => group.exchange(&[(made, 1)], &[]).unwrap(),
            _ => group.exchange(&[], &[(empty(rank, 3), 0)]).unwrap(),
        }
    });
}

#[test]
fn fault_memory_that_is_freed_while_it_is_sent_is_reported() {
    passes("frees_what_the_stream_uses");
    let words = ["is freed while", "a group of sends and receives", "was not recorded"];
    is_reported("frees_while_it_is_sent", "", &words);
}

#[test]
#[ignore = "runs in a process of its own"]
fn frees_while_it_is_sent() {
    send_and_free(false);
}

#[test]
#[ignore = "runs in a process of its own"]
fn frees_what_the_stream_uses() {
    send_and_free(true);
}

fn send_and_free(is_recorded: bool) {
    two_ranks(|rank, group| {
        let compute = Stream::new(rank).unwrap();
        compute.enter().unwrap();
        let made = numbers(rank, 0, 3);
        let exchanges = Stream::new(rank).unwrap();
        exchanges.enter().unwrap();
        compute.record().unwrap().block(exchanges).unwrap();
        if is_recorded {
            exchanges.uses(&made).unwrap();
        }
        match rank {
            0 => group.exchange(&[(made, 1)], &[]).unwrap(),
            _ => {
                compute.synchronize().unwrap();
                group.exchange(&[], &[(empty(rank, 3), 0)]).unwrap();
            }
        }
    });
}

#[test]
fn fault_wrong_calls_are_errors() {
    passes("wrong_calls");
}

#[test]
#[ignore = "runs in a process of its own"]
fn wrong_calls() {
    two_ranks(|rank, group| {
        Stream::new(rank).unwrap().enter().unwrap();
        let other = 1 - rank;
        let refused = |tensor: Tensor, to: usize| {
            group.exchange(&[(tensor, to)], &[]).unwrap_err().to_string()
        };
        assert!(refused(numbers(rank, 0, 3), rank).contains("not another one of the 2 processes"));
        assert!(refused(numbers(rank, 0, 3), 2).contains("not another one of the 2 processes"));
        assert!(refused(numbers(other, 0, 3), other).contains("is contiguous, not empty"));
        assert!(refused(empty(rank, 0), other).contains("is contiguous, not empty"));
        let apart = numbers(rank, 0, 6).view([2, 3]).tr();
        assert!(refused(apart, other).contains("is contiguous, not empty"));
        let many: Vec<_> = (0..=TENSORS_MAX).map(|_| (numbers(rank, 0, 1), other)).collect();
        let error = group.exchange(&many, &[]).unwrap_err().to_string();
        assert!(error.contains("1024 can be exchanged"), "{error}");
        // Nothing of this was sent: the group still works.
        group.exchange(&[(numbers(rank, 7, 1), other)], &[(empty(rank, 1), other)]).unwrap();
    });
}

#[test]
fn fault_an_aborted_group_ends_its_calls() {
    passes("aborts");
}

#[test]
#[ignore = "runs in a process of its own"]
fn aborts() {
    two_ranks(|rank, group| {
        Stream::new(rank).unwrap().enter().unwrap();
        if rank == 1 {
            return; // it sends nothing, and leaves
        }
        std::thread::scope(|scope| {
            scope.spawn(|| group.abort().unwrap());
            group.exchange(&[], &[(empty(rank, 3), 1)]).unwrap_err();
        });
        group.exchange(&[(numbers(rank, 0, 1), 1)], &[]).unwrap_err();
    });
}
