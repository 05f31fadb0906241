//! Streams, events and memory of GPUs. Without a GPU, or without CUDA in libtorch, [`count`] is 0,
//! and streams, events and statistics return errors.

use std::time::Duration;

use tch::Tensor;

pub use crate::ffi::bridged::SimulatedCounts;
use crate::{
    Error, Result, address, adopt,
    ffi::bridged::{self, DeviceEvent, DeviceStream, Simulation},
    memory::Stats,
};

/// The environment variable that asks for simulated GPUs, and says how many.
pub const SIMULATED_GPUS: &str = "GPIPE_SIMULATED_GPUS";

/// Whether libtorch includes its CUDA part.
pub fn has_cuda() -> bool {
    bridged::has_cuda()
}

/// Whether the GPUs of this process are simulated.
///
/// # Errors
/// [`SIMULATED_GPUS`] is set, and the simulator is not there.
pub fn is_simulated() -> Result<bool> {
    match bridged::simulation() {
        Simulation::None => Ok(false),
        Simulation::Loaded => Ok(true),
        _ if bridged::has_nccl() => Err(Error(format!(
            "{SIMULATED_GPUS} is set, and this program was built with CUDA: simulated GPUs need \
             one that was built without it (make build); or unset the variable"
        ))),
        _ => Err(Error(format!(
            "{SIMULATED_GPUS} is set, and there is no simulated-gpu/libtorch_cuda.so beside the \
             program: cargo build --release --package gpipe-simulated-gpu puts it there; or unset \
             the variable"
        ))),
    }
}

/// What was asked of simulated GPUs since the process started. All 0 without them.
pub fn simulated_counts() -> SimulatedCounts {
    bridged::simulated_counts()
}

/// Number of GPUs that libtorch sees.
pub fn count() -> usize {
    usize::try_from(bridged::gpu_count().unwrap_or(0)).unwrap_or(0)
}

/// A queue of work on a GPU. Work in two streams may overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(DeviceStream);

impl Stream {
    /// Takes a stream of GPU number `device` from libtorch's pool.
    ///
    /// # Errors
    /// There is no such GPU.
    pub fn new(device: usize) -> Result<Self> {
        let device = i32::try_from(device).map_err(|error| Error(error.to_string()))?;
        Ok(Self(bridged::new_stream(device)?))
    }

    /// Makes this stream and its GPU current for this thread's libtorch kernels.
    ///
    /// # Errors
    /// libtorch's errors.
    pub fn enter(self) -> Result<()> {
        Ok(bridged::enter_stream(self.0)?)
    }

    /// Waits until the stream's work is done.
    ///
    /// # Errors
    /// A kernel failed.
    pub fn synchronize(self) -> Result<()> {
        Ok(bridged::synchronize_stream(self.0)?)
    }

    /// Records an event that completes when the stream's work so far is done.
    ///
    /// # Errors
    /// libtorch's errors.
    pub fn record(self) -> Result<Event> {
        Ok(Event(bridged::record_event(self.0, false)?))
    }

    /// As [`record`](Self::record), with the time at which the event completes.
    ///
    /// # Errors
    /// libtorch's errors.
    pub fn record_timed(self) -> Result<TimedEvent> {
        Ok(TimedEvent(Event(bridged::record_event(self.0, true)?)))
    }

    /// Copies `tensor` from this stream's GPU to GPU `to` (`None`: to pinned CPU memory). The copy
    /// is complete when an event recorded afterwards is.
    ///
    /// # Errors
    /// Out of memory.
    pub fn copy(self, tensor: &Tensor, to: Option<usize>) -> Result<Tensor> {
        let to = to.map_or(Ok(-1), i32::try_from).map_err(|error| Error(error.to_string()))?;
        // SAFETY: the tensor at this address is borrowed for the whole call.
        let copy = unsafe { bridged::copy_on_stream(address(tensor), self.0, to) }?;
        adopt(copy).ok_or_else(|| Error("a copy gave no tensor".into()))
    }

    /// Copies `tensor` from the CPU to this stream's GPU. The caller does not wait: the tensor goes
    /// through pinned memory. The copy is complete when an event recorded afterwards is.
    ///
    /// # Errors
    /// Out of memory.
    pub fn upload(self, tensor: &Tensor) -> Result<Tensor> {
        // SAFETY: the tensor at this address is borrowed for the whole call.
        let copy = unsafe { bridged::upload_on_stream(address(tensor), self.0) }?;
        adopt(copy).ok_or_else(|| Error("a copy gave no tensor".into()))
    }

    /// Declares that this stream uses `tensor`, which another stream created. Its memory is then
    /// not reused too early.
    ///
    /// # Errors
    /// `tensor` is not on a GPU.
    pub fn uses(self, tensor: &Tensor) -> Result<()> {
        // SAFETY: the tensor at this address is borrowed for the whole call.
        Ok(unsafe { bridged::record_use(address(tensor), self.0) }?)
    }
}

/// A point in a stream's work.
pub struct Event(cxx::UniquePtr<DeviceEvent>);

// SAFETY: any thread may wait for a recorded event, and an event is recorded on creation. It moves
// between threads, but two threads never use it at once.
unsafe impl Send for Event {}

impl Event {
    /// Makes `stream` wait for this point; the calling thread does not wait.
    ///
    /// # Errors
    /// libtorch's errors.
    pub fn block(&self, stream: Stream) -> Result<()> {
        Ok(self.0.block(stream.0)?)
    }

    /// Waits for this point in the calling thread.
    ///
    /// # Errors
    /// A kernel failed.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.0.synchronize()?)
    }

    /// Makes the event's GPU the current one of the calling thread. A thread that belongs to no
    /// stage does this first: what it calls would otherwise begin to use GPU 0, too.
    ///
    /// # Errors
    /// libtorch's errors.
    pub fn make_current(&self) -> Result<()> {
        Ok(self.0.make_current()?)
    }

    /// Whether the stream has reached this point. It does not wait.
    ///
    /// # Errors
    /// A kernel failed.
    pub fn is_done(&self) -> Result<bool> {
        Ok(self.0.is_done()?)
    }
}

/// An [`Event`] with its time.
#[derive(Debug)]
pub struct TimedEvent(Event);

impl TimedEvent {
    /// Whether the stream has reached this point. It does not wait.
    ///
    /// # Errors
    /// A kernel failed.
    pub fn is_done(&self) -> Result<bool> {
        self.0.is_done()
    }

    /// Waits for this point in the calling thread.
    ///
    /// # Errors
    /// A kernel failed.
    pub fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    /// The time from `earlier`, on the same GPU, to this point. Both must be done.
    ///
    /// # Errors
    /// One of them is not done, or a kernel failed.
    pub fn since(&self, earlier: &Self) -> Result<Duration> {
        let ms = self.0.0.ms_since(&earlier.0.0)?;
        Ok(Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default())
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Event")
    }
}

/// Copies `tensor` from the CPU to `device`, on the thread's current stream. The caller does not
/// wait: to a GPU the tensor goes through pinned memory.
///
/// # Errors
/// Out of memory.
pub fn upload(tensor: &Tensor, device: tch::Device) -> Result<Tensor> {
    let tch::Device::Cuda(device) = device else { return Ok(tensor.shallow_clone()) };
    let device = i32::try_from(device).map_err(|error| Error(error.to_string()))?;
    // SAFETY: the tensor at this address is borrowed for the whole call.
    let copy = unsafe { bridged::upload(address(tensor), device) }?;
    adopt(copy).ok_or_else(|| Error("a copy gave no tensor".into()))
}

/// What libtorch does on GPUs where an operator has no deterministic kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Determinism {
    /// Such an operator is an error. This is what stages on GPUs have unless the process has chosen
    /// something else before.
    Required,
    /// It warns. It also takes fused attention's backward without determinism, which is faster.
    Preferred,
    /// Any kernel may run.
    Off,
}

/// Sets [`Determinism`] for the whole process. Stages on GPUs that begin later keep it, except for
/// [`Determinism::Off`]. New tensors stay uninitialized.
///
/// # Errors
/// libtorch's errors.
pub fn set_determinism(own: Determinism) -> Result<()> {
    let (deterministic, warn_only) = match own {
        Determinism::Required => (true, false),
        Determinism::Preferred => (true, true),
        Determinism::Off => (false, false),
    };
    Ok(bridged::use_deterministic_kernels(deterministic, warn_only)?)
}

/// Sets [`Determinism::Required`] unless the process has chosen that or
/// [`Determinism::Preferred`]. New tensors stay uninitialized from then on.
///
/// # Errors
/// libtorch's errors.
pub fn require_determinism() -> Result<()> {
    Ok(bridged::require_deterministic_kernels()?)
}

/// Memory that libtorch's allocator holds on GPU number `device`, for all its users in this
/// process. Bytes are as the tensors asked for them. The allocator rounds each up to 512; the
/// difference counts as kept.
///
/// # Errors
/// There is no such GPU.
pub fn stats(device: usize) -> Result<Stats> {
    let device = i32::try_from(device).map_err(|error| Error(error.to_string()))?;
    let bridged::MemoryStats { live, peak, kept } = bridged::gpu_stats(device)?;
    Ok(Stats { live, peak, kept })
}

/// Resets the peak of GPU number `device`.
///
/// # Errors
/// There is no such GPU.
pub fn reset_peak(device: usize) -> Result<()> {
    let device = i32::try_from(device).map_err(|error| Error(error.to_string()))?;
    Ok(bridged::reset_gpu_peak(device)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_a_gpu_that_is_not_there_is_an_error() {
        let missing = count();
        assert!(missing == 0 || has_cuda());
        // A CUDA build has this library beside libtorch_cpu, and the linker must not leave it out.
        let set = concat!(env!("GPIPE_LIBTORCH_LIB"), "/libtorch_cuda.so");
        let is_simulated = is_simulated().unwrap();
        assert_eq!(has_cuda(), is_simulated || std::path::Path::new(set).exists());
        assert!(Stream::new(missing).is_err());
        assert!(stats(missing).is_err());
        assert!(reset_peak(missing + 1000).is_err());
    }

    /// With deterministic kernels, libtorch filled every new tensor with NaN. On a GPU that was an
    /// extra kernel per tensor.
    #[test]
    fn regression_deterministic_kernels_leave_new_tensors_unfilled() {
        set_determinism(Determinism::Required).unwrap();
        let options = (tch::Kind::Float, tch::Device::Cpu);
        drop(Tensor::f_zeros([1 << 16], options).unwrap());
        let filled = Tensor::f_empty([1 << 16], options).unwrap().f_isnan().unwrap();
        let all = filled.f_all().unwrap().f_int64_value(&[]).unwrap();
        set_determinism(Determinism::Off).unwrap();
        assert_eq!(all, 0, "every element of a new tensor is NaN");
    }
}
