//! Groups of processes with a GPU each, over NCCL.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cxx::UniquePtr;
use tch::{Device, Tensor};

use super::{Error, Result, TcpStore, failed, milliseconds};
use crate::{address, ffi::bridged};

/// Most tensors that one call of [`GpuGroup::exchange`] moves. NCCL takes 2,048 sends and receives
/// in a group.
pub const TENSORS_MAX: usize = 1 << 10;

/// Whether this program has NCCL: it was built against a libtorch with CUDA, or its GPUs are
/// simulated and so is NCCL.
pub fn has_nccl() -> bool {
    bridged::has_nccl()
}

/// Processes with a GPU each, which pass tensors directly. NCCL has no buffers: a send ends when
/// its receive runs. It has no tags: tensors between two processes are received in the order in
/// which they are sent, into as many bytes.
pub struct GpuGroup {
    group: UniquePtr<bridged::GpuGroup>,
    rank: usize,
    size: usize,
    gpu: usize,
    /// Held during an exchange.
    alone: Mutex<()>,
}

// SAFETY: c10d's groups may be used from any thread. Exchanges are made one at a time; `abort` is
// for other threads.
unsafe impl Send for GpuGroup {}
// SAFETY: as above.
unsafe impl Sync for GpuGroup {}

impl GpuGroup {
    /// Joins a group of `size` processes as number `rank`, with GPU number `gpu` of this host. All
    /// of them meet in `store`, and each of them waits for the others. Simulated GPUs listen at
    /// `address`.
    ///
    /// # Errors
    /// This program has no NCCL; there is no such GPU; a process did not come.
    pub fn nccl(
        store: &TcpStore,
        rank: usize,
        size: usize,
        gpu: usize,
        address: &str,
        timeout: Duration,
    ) -> Result<Self> {
        let what = || format!("joining {size} processes with NCCL as number {rank} on cuda:{gpu}");
        let number = |number: usize| {
            i32::try_from(number).map_err(|error: std::num::TryFromIntError| Error {
                operation: what(),
                peer: None,
                message: error.to_string(),
            })
        };
        let (own, all, device) = (number(rank)?, number(size)?, number(gpu)?);
        let timeout = milliseconds(timeout);
        let group = bridged::gpu_group(store.bridged(), own, all, device, address, timeout);
        let group = group.map_err(failed(what(), None))?;
        Ok(Self { group, rank, size, gpu, alone: Mutex::default() })
    }

    /// Sends and receives at the same time, each with the number of the other process. The work is
    /// on the calling thread's current stream: it begins after what is there, and what follows
    /// there comes after it. The thread waits only for the first message between two processes.
    ///
    /// What is received is undefined if a process sends another number of bytes.
    ///
    /// # Errors
    /// A tensor is not contiguous, is empty, or is not on this process's GPU; there is no such
    /// process; too many tensors; the group was aborted.
    pub fn exchange(&self, sends: &[(Tensor, usize)], receives: &[(Tensor, usize)]) -> Result<()> {
        if sends.len().max(receives.len()) > TENSORS_MAX {
            let count = sends.len().max(receives.len());
            let message = format!("{count} tensors at once: {TENSORS_MAX} can be exchanged");
            return Err(self.error(None, message));
        }
        let (sent, to) = self.ends(sends)?;
        let (received, from) = self.ends(receives)?;
        let _alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the tensors at these addresses are borrowed for the whole call. c10d keeps them
        // until the work is done, and their memory is ordered by streams.
        let done = unsafe { self.group.exchange(&sent, &to, &received, &from) };
        done.map_err(failed("exchanging values of GPUs", None))
    }

    fn ends(&self, tensors: &[(Tensor, usize)]) -> Result<(Vec<usize>, Vec<i32>)> {
        let end = |(tensor, process): &(Tensor, usize)| {
            if *process >= self.size || *process == self.rank {
                let message = format!("it is not another one of the {} processes", self.size);
                return Err(self.error(Some(*process), message));
            }
            let is_ours = tensor.defined() && tensor.device() == Device::Cuda(self.gpu);
            if !is_ours || !tensor.is_contiguous() || tensor.numel() == 0 {
                let message = format!(
                    "a tensor to exchange is contiguous, not empty, and on cuda:{}: {tensor:?}",
                    self.gpu
                );
                return Err(self.error(Some(*process), message));
            }
            let process = i32::try_from(*process);
            let process = process.map_err(|error| self.error(None, error.to_string()))?;
            Ok((address(tensor), process))
        };
        Ok(tensors.iter().map(end).collect::<Result<Vec<_>>>()?.into_iter().unzip())
    }

    /// Ends what is under way. The group cannot be used any more.
    ///
    /// # Errors
    /// c10d's errors.
    pub fn abort(&self) -> Result<()> {
        self.group.abort().map_err(failed("ending the work of NCCL", None))
    }

    fn error(&self, peer: Option<usize>, message: String) -> Error {
        Error { operation: "exchanging values of GPUs".into(), peer, message }
    }
}

impl std::fmt::Debug for GpuGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuGroup({} of {} on cuda:{})", self.rank, self.size, self.gpu)
    }
}
