//! Groups of processes with a GPU each, over NCCL.

use std::{
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    time::{Duration, Instant},
};

use cxx::UniquePtr;
use tch::{Device, Kind, Tensor};

use super::{Error, Result, TcpStore, failed, milliseconds};
use crate::{
    address,
    device::{self, Stream},
    ffi::bridged,
};

/// How long an abort waits for a call that another thread makes.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

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
        let group = Self { group, rank, size, gpu, alone: Mutex::default() };
        group.meet_all()?;
        Ok(group)
    }

    /// Passes a byte from each process to each other one, so that NCCL connects all of them now. It
    /// connects two processes in the first group in which they meet, and all that meet there wait
    /// for each other.
    fn meet_all(&self) -> Result<()> {
        let failed = |error: &dyn std::fmt::Display| self.error(None, error.to_string());
        let stream = Stream::new(self.gpu).map_err(|error| failed(&error))?;
        stream.enter().map_err(|error| failed(&error))?;
        let others = || (0..self.size).filter(|other| *other != self.rank);
        let byte = |other| {
            let byte = Tensor::f_zeros([1], (Kind::Uint8, Device::Cuda(self.gpu)));
            Ok((byte.map_err(|error| failed(&error))?, other))
        };
        let sends = others().map(byte).collect::<Result<Vec<_>>>()?;
        let receives = others().map(byte).collect::<Result<Vec<_>>>()?;
        if !sends.is_empty() {
            self.exchange(&sends, &receives)?;
        }
        stream.synchronize().map_err(|error| failed(&error))
    }

    /// Sends and receives at the same time, each with the number of the other process. The work is
    /// on the calling thread's current stream: it begins after what is there, and what follows
    /// there comes after it. Nothing of it need end before all of it runs on all sides.
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

    /// Ends what is under way. The group cannot be used any more. It may wait for the GPU.
    ///
    /// # Errors
    /// A call of [`GpuGroup::exchange`] did not return for a second; c10d's errors.
    pub fn abort(&self) -> Result<()> {
        // NCCL frees what a call under way uses. The stand-in's calls wait, and end by this.
        let _alone = match device::is_simulated() {
            Ok(true) => None,
            _ => Some(self.alone_within(ABORT_PATIENCE)?),
        };
        self.group.abort().map_err(failed("ending the work of NCCL", None))
    }

    fn alone_within(&self, longest: Duration) -> Result<MutexGuard<'_, ()>> {
        let end = Instant::now() + longest;
        loop {
            match self.alone.try_lock() {
                Ok(alone) => return Ok(alone),
                Err(TryLockError::Poisoned(alone)) => return Ok(alone.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < end => {
                    std::thread::park_timeout(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(self.error(None, "a call of NCCL does not return".into()));
                }
            }
        }
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
