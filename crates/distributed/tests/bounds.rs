//! A process bounds what it receives by its own knowledge: the shapes of its mini-batch, to the
//! byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{
    DEADLINE, in_processes,
    model::{Features, Run, batch, model},
};
use gpipe::{
    Value,
    processes::{
        Envelope, Inbound, Message, Outbound, PeerError, RemoteEdge, Run as OneRun, Transport,
    },
};
use gpipe_core::{Bytes, Direction, Nanos};
use gpipe_distributed::Cluster;
use tch::{Kind, Tensor};

fn tensor_bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

/// By edge and direction: the maximum size of a message, and the largest size received.
type Announced = Arc<Mutex<HashMap<(usize, Direction), (Bytes, Bytes)>>>;

/// A transport that records what arrives.
struct Watched {
    inner: Arc<Cluster>,
    seen: Announced,
}

struct WatchedInbound {
    inner: Box<dyn Inbound<Value>>,
    crossing: RemoteEdge,
    seen: Announced,
}

impl Inbound<Value> for WatchedInbound {
    fn receive(&mut self) -> Result<Envelope<Value>, PeerError> {
        let Envelope { micro_batch, message } = self.inner.receive()?;
        let (message, had) = match message {
            Message::Value(value) => {
                let (tensors, _) = value.into_parts();
                let had = tensors.iter().flatten().map(tensor_bytes).sum();
                (Message::Value(Value::new(tensors)), had)
            }
            Message::Vote(vote) => {
                let had = 12 * vote.squares.len() as u64;
                (Message::Vote(vote), had)
            }
            Message::Verdict(verdict) => (Message::Verdict(verdict), 17),
        };
        let mut seen = self.seen.lock().unwrap();
        let own = seen.get_mut(&(self.crossing.edge.index(), self.crossing.direction)).unwrap();
        own.1 = own.1.max(Bytes(had));
        Ok(Envelope { micro_batch, message })
    }
}

impl Transport for Watched {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn agree(&self, facts: &[(String, String)]) -> Result<(), PeerError> {
        self.inner.agree(facts)
    }

    fn begin(&self, run: OneRun) -> Result<(), PeerError> {
        self.inner.begin(run)
    }

    fn outbound(&self, crossing: RemoteEdge) -> Result<Box<dyn Outbound<Value>>, PeerError> {
        self.inner.outbound(crossing)
    }

    fn inbound(
        &self,
        crossing: RemoteEdge,
        most: Bytes,
    ) -> Result<Box<dyn Inbound<Value>>, PeerError> {
        let inner = self.inner.inbound(crossing, most)?;
        let key = (crossing.edge.index(), crossing.direction);
        self.seen.lock().unwrap().insert(key, (most, Bytes(0)));
        Ok(Box::new(WatchedInbound { inner, crossing, seen: Arc::clone(&self.seen) }))
    }

    fn fail(&self, why: &PeerError) {
        self.inner.fail(why);
    }

    fn gather(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, PeerError> {
        self.inner.gather(own)
    }

    fn gather_beside(&self, own: Vec<u8>, longest: Duration) -> Result<Vec<Vec<u8>>, PeerError> {
        self.inner.gather_beside(own, longest)
    }

    fn now(&self) -> Nanos {
        self.inner.now()
    }
}

/// For every kind of edge (cuts, long skips, a tied weight, votes) and both directions, the bound
/// equals the size of the largest message. Covers float32 and float16, with micro-batches of three
/// and two samples.
#[test]
fn property_a_bound_is_the_largest_message_to_the_byte() {
    for kind in [Kind::Float, Kind::Half] {
        let features = Features { tied: true, skip: true, kind, ..Features::plain() };
        let all = in_processes(3, DEADLINE, |cluster| {
            let seen = Announced::default();
            let watched = Watched { inner: cluster, seen: Arc::clone(&seen) };
            let run = Run { stages: 3, ..Run::plain() };
            let mut pipeline =
                run.builder(model(features), 3).processes(Arc::new(watched)).build().unwrap();
            let (inputs, targets) = batch(8, 1);
            pipeline.train_step(inputs, targets).unwrap();
            drop(pipeline);
            seen.lock().unwrap().clone()
        });
        let all: HashMap<_, _> = all.into_iter().flatten().collect();
        // Two cuts, two skips, a tie and two votes, in both directions.
        assert_eq!(all.len(), 2 * (2 + 2 + 1 + 2), "{all:?}");
        let votes = all.iter().filter(|(_, (most, had))| most != had);
        for ((edge, direction), (most, had)) in votes {
            // A vote for fewer layers than the stage has, or a verdict, which is smaller.
            assert!(
                *edge >= 5 && *had < *most && *most <= Bytes(12 * 6),
                "{edge} {direction:?} {all:?}"
            );
        }
    }
}

/// A process limits what it receives by the shapes of its own mini-batch, whatever the sender
/// announces.
#[test]
fn fault_a_process_with_another_mini_batch_sends_more_than_is_taken() {
    let errors = in_processes(2, DEADLINE, |cluster| {
        let samples = if cluster.rank() == 0 { 40 } else { 4 };
        let (inputs, targets) = batch(samples, 1);
        let run = Run { stages: 2, ..Run::plain() };
        let builder = run.builder(model(Features::plain()), 3).processes(cluster);
        let mut pipeline = builder.build().unwrap();
        pipeline.train_step(inputs, targets).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 0") && error.contains("where at most"), "{error}");
    }
}

/// Lengths around the first block and around the chunks of the rest (64 MiB each).
#[test]
fn oracle_bytes_of_any_length_are_gathered() {
    const CHUNK: usize = 64 << 20;
    let own = |rank: usize, length: usize| -> Vec<u8> {
        (0..length).map(|i| (i * 7 + i / 251 + rank) as u8).collect()
    };
    let lengths = [[0, 1], [8184, 8185], [8183, 8184 + 3], [8184 + CHUNK, 8184 + CHUNK + 1]];
    in_processes(2, DEADLINE, |cluster| {
        for lengths in lengths {
            let rank = cluster.rank();
            let gathered = cluster.gather(own(rank, lengths[rank])).unwrap();
            let is_whole = gathered == [own(0, lengths[0]), own(1, lengths[1])];
            assert!(is_whole, "{lengths:?}");
        }
    });
}
