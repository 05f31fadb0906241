//! All-gather of bytes: each process sends bytes and receives those of all others.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Mutex, PoisonError},
};

use gpipe::processes::PeerError;
use gpipe_bridge::c10d::{BODY_MAX, Error, HEAD_BYTES_MAX, Inbox, Outbox};
use tch::Kind;

use crate::{
    interrupt::Longest,
    shared::Shared,
    wire::{bytes_tensor, tensor_bytes},
};

/// Size of one tensor. The receiver allocates memory as tensors arrive, whatever length was
/// announced.
const CHUNK_BYTES: usize = 64 << 20;
/// Bytes that fit into a head beside the total length. They need no tensor, and so no wait for one.
const FIRST_BYTES: usize = HEAD_BYTES_MAX - 8;
/// Maximum number of bytes per process.
const GATHERED_BYTES_MAX: u64 = 1 << 36;

/// All-gathers with one tag. They run one after the other, in the same order in every process.
/// Those with other tags run concurrently.
pub(crate) struct Gathers {
    tag: usize,
    /// The ranks that take part.
    members: Vec<usize>,
    /// The ends of the connections to the other ranks, opened at their first use.
    ends: Mutex<HashMap<usize, (Outbox, Inbox)>>,
}

impl Gathers {
    pub(crate) fn new(tag: usize, members: impl IntoIterator<Item = usize>) -> Self {
        Self { tag, members: members.into_iter().collect(), ends: Mutex::default() }
    }

    /// Sends `own` to every other process, and returns the bytes of all processes in the order of
    /// `members`. `longest` is for each process.
    pub(crate) fn exchange(
        &self,
        shared: &Shared,
        own: &[u8],
        longest: Longest,
    ) -> Result<Vec<Vec<u8>>, PeerError> {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(failed) = shared.failed() {
            return Err(failed);
        }
        let others: Vec<usize> =
            self.members.iter().copied().filter(|rank| *rank != shared.rank()).collect();
        let mut leaving = Vec::new();
        for &rank in &others {
            let open = || -> Result<_, Error> {
                let group = &shared.group;
                Ok((group.outbox(rank, self.tag)?, group.inbox(rank, self.tag)?))
            };
            let (outbox, inbox) = match ends.entry(rank) {
                Entry::Occupied(opened) => opened.into_mut(),
                Entry::Vacant(none) => {
                    none.insert(open().map_err(|error| shared.lost(rank, &error))?)
                }
            };
            inbox.post_head().map_err(|error| shared.lost(rank, &error))?;
            leaving.extend(send(shared, outbox, rank, own)?.into_iter().map(|work| (rank, work)));
        }
        let mut all = Vec::with_capacity(self.members.len());
        for &rank in &self.members {
            match ends.get_mut(&rank) {
                Some((_, inbox)) => all.push(receive(shared, inbox, rank, longest)?),
                None => all.push(own.to_vec()),
            }
        }
        for (rank, work) in leaving {
            let done = shared.interrupt.wait(&work, longest);
            done.map_err(|error| shared.lost(rank, &error))?;
        }
        Ok(all)
    }
}

/// Starts to send bytes: the total length and the first bytes in a head, the rest in tensors.
fn send(
    shared: &Shared,
    outbox: &mut Outbox,
    rank: usize,
    own: &[u8],
) -> Result<Vec<gpipe_bridge::c10d::Work>, PeerError> {
    let (first, rest) = own.split_at(own.len().min(FIRST_BYTES));
    let mut head = (own.len() as u64).to_le_bytes().to_vec();
    head.extend(first);
    let chunks: Vec<&[u8]> = rest.chunks(CHUNK_BYTES).collect();
    let mut works = Vec::new();
    let mut groups = chunks.chunks(BODY_MAX);
    loop {
        let body = groups.next().unwrap_or_default();
        let body = body.iter().map(|chunk| bytes_tensor(chunk)).collect::<Result<Vec<_>, _>>();
        let body = body.map_err(|reason| shared.own(reason))?;
        let sent = outbox.send(&head, &body);
        works.extend(sent.map_err(|error| shared.lost(rank, &error))?);
        head.clear();
        if groups.len() == 0 {
            return Ok(works);
        }
    }
}

fn receive(
    shared: &Shared,
    inbox: &mut Inbox,
    rank: usize,
    longest: Longest,
) -> Result<Vec<u8>, PeerError> {
    let lost = |error: Error| shared.lost(rank, &error);
    let from = |reason: String| PeerError { process: Some(rank), reason };
    let (mut all, mut length) = (Vec::new(), None);
    loop {
        let work = inbox.post_head().map_err(lost)?;
        shared.interrupt.wait(&work, longest).map_err(lost)?;
        let head = inbox.head().map_err(lost)?;
        let due = match length {
            Some(length) => length,
            None => {
                let (told, first) = head.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
                all.extend(first);
                *length.insert(u64::from_le_bytes(*told))
            }
        };
        if due > GATHERED_BYTES_MAX {
            return Err(from(format!("it gave {due} bytes: {GATHERED_BYTES_MAX} can be gathered")));
        }
        let sizes: Vec<u64> = inbox.announced().collect();
        for size in sizes {
            if size > CHUNK_BYTES as u64 || size > due.saturating_sub(all.len() as u64) {
                return Err(from(format!("it gave a part of {size} bytes, of {due} in all")));
            }
            let work = inbox.post_tensor(size as i64, Kind::Uint8).map_err(lost)?;
            shared.interrupt.wait(&work, longest).map_err(lost)?;
            let part = inbox.tensor().map_err(lost)?;
            all.extend(tensor_bytes(&part).map_err(|reason| shared.own(reason))?);
        }
        if all.len() as u64 >= due {
            return Ok(all);
        }
    }
}
