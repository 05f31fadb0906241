//! Each kind of wait between streams, devices and the host: with it nothing is reported, and
//! without it a report names both sides.
#![allow(clippy::unwrap_used)]

mod common;

use common::{is_reported, passes};
use gpipe_bridge::device::Stream;
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cuda(0));

/// `x + 1` on a stream of GPU 0, and that stream.
fn made() -> (Stream, Tensor) {
    let stream = Stream::new(0).unwrap();
    stream.enter().unwrap();
    (stream, Tensor::ones([4], FLOAT) + 1.0)
}

#[test]
fn fault_a_read_on_another_stream_without_a_wait_is_reported() {
    let both = ["add", "mul", "cuda:0 stream 1", "cuda:0 stream 2", "without waiting"];
    is_reported("reads_without_a_wait", "", &both);
}

#[test]
#[ignore = "runs in a process of its own"]
fn reads_without_a_wait() {
    let (_, x) = made();
    let other = Stream::new(0).unwrap();
    other.enter().unwrap();
    let _y = x * 2.0;
}

#[test]
fn fault_a_write_over_what_another_stream_reads_is_reported() {
    is_reported("overwrites_an_operand", "", &["zero", "overwrites an operand of", "mul"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn overwrites_an_operand() {
    let (stream, mut x) = made();
    let ready = stream.record().unwrap();
    let other = Stream::new(0).unwrap();
    ready.block(other).unwrap();
    other.enter().unwrap();
    let _y = &x * 2.0;
    stream.enter().unwrap();
    let _x = x.zero_();
}

#[test]
fn fault_a_stream_that_does_not_wait_for_an_event_is_reported() {
    passes("waits_for_an_event");
    is_reported("waits_for_an_event", "event-block", &["mul", "reads the result of", "add"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn waits_for_an_event() {
    let (stream, x) = made();
    let ready = stream.record().unwrap();
    let other = Stream::new(0).unwrap();
    ready.block(other).unwrap();
    other.enter().unwrap();
    other.uses(&x).unwrap();
    let y = &x * 2.0;
    drop(x);
    other.synchronize().unwrap();
    assert_eq!(y.double_value(&[3]), 4.0);
}

#[test]
fn fault_memory_freed_while_another_stream_uses_it_is_reported() {
    is_reported("waits_for_an_event", "record-stream", &["is freed while", "mul", "stream 2"]);
}

#[test]
fn fault_a_host_that_does_not_wait_for_a_stream_is_reported() {
    passes("the_host_orders_two_streams");
    let both = ["mul", "reads the result of", "add"];
    is_reported("the_host_orders_two_streams", "stream-synchronize", &both);
}

#[test]
#[ignore = "runs in a process of its own"]
fn the_host_orders_two_streams() {
    let (stream, x) = made();
    stream.synchronize().unwrap();
    let other = Stream::new(0).unwrap();
    other.enter().unwrap();
    let _y = &x * 2.0;
    other.synchronize().unwrap();
}

#[test]
fn fault_a_host_that_does_not_wait_for_a_copy_is_reported() {
    passes("copies_to_the_host");
    let both = ["pinned memory", "without waiting for the copy to it"];
    is_reported("copies_to_the_host", "event-synchronize", &both);
}

#[test]
#[ignore = "runs in a process of its own"]
fn copies_to_the_host() {
    let (stream, x) = made();
    let copy = stream.copy(&x, None).unwrap();
    stream.record().unwrap().synchronize().unwrap();
    assert_eq!(copy.double_value(&[0]), 2.0);
}

#[test]
fn fault_two_gpus_without_a_wait_are_reported() {
    passes("copies_to_another_gpu");
    is_reported("copies_to_another_gpu", "event-block", &["cuda:1", "cuda:0", "copy between"]);
}

#[test]
#[ignore = "runs in a process of its own"]
fn copies_to_another_gpu() {
    let (stream, x) = made();
    let copy = stream.copy(&x, Some(1)).unwrap();
    let ready = stream.record().unwrap();
    let other = Stream::new(1).unwrap();
    other.enter().unwrap();
    ready.block(other).unwrap();
    other.uses(&copy).unwrap();
    let y = copy + 1.0;
    other.synchronize().unwrap();
    assert_eq!(y.double_value(&[0]), 3.0);
}

#[test]
fn fault_an_access_by_the_host_is_reported() {
    is_reported("reads_as_the_host", "", &["the host accesses memory of cuda:0"]);
}

#[test]
#[ignore = "runs in a process of its own"]
#[allow(unsafe_code)]
fn reads_as_the_host() {
    let (stream, x) = made();
    stream.synchronize().unwrap();
    // SAFETY: there is none. The address is a GPU's; that this ends the process is what is tested.
    let value = unsafe { x.data_ptr().cast::<f32>().read_volatile() };
    assert!(value.is_nan(), "it was read");
}
