//! Bytes of each process, given to all of them.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use gpipe::processes::Elsewhere;
use tch::{Kind, Tensor};

use crate::{
    cluster::Shared,
    wire::{bytes_tensor, tensor_bytes},
};

/// Bytes that are sent at once, without asking how many there are: a step's outcome, mostly.
const BLOCK_BYTES: usize = 8192;
/// Bytes of the rest that are received at once: memory is asked for as they come, whatever length was told.
const CHUNK_BYTES: usize = 64 << 20;
/// Most bytes of a process.
const GATHERED_BYTES_MAX: u64 = 1 << 36;

/// One gathering after the other, in the same order in every process; those of other tags go on at the same time.
pub(crate) struct Gathers {
    /// Of the first block; what does not fit into it has the next one.
    tag: usize,
    /// The ranks of those that gather.
    members: Vec<usize>,
    one: Mutex<()>,
}

impl Gathers {
    pub(crate) fn new(tag: usize, members: impl IntoIterator<Item = usize>) -> Self {
        Self { tag, members: members.into_iter().collect(), one: Mutex::new(()) }
    }

    /// One process's bytes to every other, and theirs, for each of which it waits no longer than `longest`; in the order of the members.
    pub(crate) fn exchange(
        &self,
        shared: &Shared,
        own: &[u8],
        longest: Duration,
    ) -> Result<Vec<Vec<u8>>, Elsewhere> {
        let _one = self.one.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(failed) = shared.failed() {
            return Err(failed);
        }
        let (first, rest) = own.split_at(own.len().min(BLOCK_BYTES - 8));
        let mut block = (own.len() as u64).to_le_bytes().to_vec();
        block.extend(first);
        block.resize(BLOCK_BYTES, 0);
        let failed = |reason: String| shared.own(reason);
        let block = bytes_tensor(&block).map_err(failed)?;
        let members = self.members.iter().copied();
        let others: Vec<usize> = members.filter(|rank| *rank != shared.rank()).collect();
        let sizes = vec![BLOCK_BYTES; others.len()];
        let blocks = swap(shared, &others, &block, (self.tag, longest), &sizes)?;
        let (mut all, mut left) = (Vec::new(), Vec::new());
        for (&rank, block) in others.iter().zip(&blocks) {
            let bytes = tensor_bytes(block).map_err(failed)?;
            let (length, first) = bytes.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
            let length = u64::from_le_bytes(*length);
            if length > GATHERED_BYTES_MAX {
                let reason =
                    format!("it gave {length} bytes: {GATHERED_BYTES_MAX} can be gathered");
                return Err(Elsewhere { process: Some(rank), reason });
            }
            left.push((length as usize).saturating_sub(BLOCK_BYTES - 8));
            all.push(first[..first.len().min(length as usize)].to_vec());
        }
        // What did not fit; nothing is sent where everything did.
        let mut chunks = rest.chunks(CHUNK_BYTES);
        loop {
            let chunk = chunks.next().unwrap_or_default();
            let sizes: Vec<usize> = left.iter().map(|&left| CHUNK_BYTES.min(left)).collect();
            if chunk.is_empty() && sizes.iter().all(|&size| size == 0) {
                break;
            }
            let chunk = bytes_tensor(chunk).map_err(failed)?;
            let received = swap(shared, &others, &chunk, (self.tag + 1, longest), &sizes)?;
            for ((all, left), received) in all.iter_mut().zip(&mut left).zip(&received) {
                let received = tensor_bytes(received).map_err(failed)?;
                *left -= received.len();
                all.extend(received);
            }
        }
        let here = self.members.iter().position(|rank| *rank == shared.rank());
        all.insert(here.unwrap_or_default().min(all.len()), own.to_vec());
        Ok(all)
    }
}

/// Sends `own` to each of `others`, and receives from each so many bytes.
fn swap(
    shared: &Shared,
    others: &[usize],
    own: &Tensor,
    (tag, longest): (usize, Duration),
    sizes: &[usize],
) -> Result<Vec<Tensor>, Elsewhere> {
    let (mut works, mut received) = (Vec::new(), Vec::new());
    for (&rank, &bytes) in others.iter().zip(sizes) {
        let into = Tensor::f_empty([bytes as i64], (Kind::Uint8, tch::Device::Cpu))
            .map_err(|error| shared.own(error.to_string()))?;
        if bytes > 0 {
            works.push((rank, shared.group.receive(&into, rank, tag)));
        }
        if own.numel() > 0 {
            works.push((rank, shared.group.send(own, rank, tag)));
        }
        received.push(into);
    }
    for (rank, work) in works {
        let done = work.and_then(|work| shared.interrupt.wait(work, longest));
        done.map_err(|error| shared.lost(rank, &error))?;
    }
    Ok(received)
}
