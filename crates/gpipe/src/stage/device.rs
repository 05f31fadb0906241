//! The device of one stage or several: its stream, what crosses to other devices, and its memory.
//!
//! On a GPU every action ends when its kernels have: the times that a step reports are then true,
//! and a value is complete when it is handed over. Copies from a GPU to another device are the
//! exception: they have a stream of their own and an event that the receiver waits for, so that
//! they overlap with the next action. Copies from a CPU are made by the receiving GPU's stage, and
//! waited for.

use gpipe_bridge::{
    device::{self, Event, Stream},
    memory::{self, Arena, Refusal, Stats},
};
use tch::Tensor;

use super::SHARED_ARENA;
use crate::{device::Device, error::LayerError, value::Value};

/// A device as the thread of its stages uses it.
pub(super) struct StageDevice {
    device: Device,
    gpu: Option<Gpu>,
    cap: Option<u64>,
    /// The CPU memory of its stages: all of it, or a GPU's share that is on the CPU.
    arena: Arena,
}

struct Gpu {
    number: usize,
    compute: Stream,
    copies: Stream,
}

impl StageDevice {
    /// Makes `device` the calling thread's own, with a cap in bytes.
    pub(super) fn enter(device: Device, cap: Option<u64>) -> Result<Self, LayerError> {
        let arena = Arena::acquire()?;
        memory::set_cap(arena.id(), cap.filter(|_| device == Device::Cpu))?;
        memory::enter(arena.id())?;
        let gpu = match device.gpu() {
            Some(number) => {
                let (compute, copies) = (Stream::new(number)?, Stream::new(number)?);
                compute.enter()?;
                device::prefer_deterministic_kernels(true)?;
                // The first allocation brings the GPU's allocator into being; its peak may be an
                // earlier user's.
                drop(Tensor::f_zeros([1], (tch::Kind::Float, device.tch()))?);
                device::reset_peak(number)?;
                Some(Gpu { number, compute, copies })
            }
            None => None,
        };
        Ok(Self { device, gpu, cap, arena })
    }

    /// Charges what the thread allocates from now on to the stage.
    pub(super) fn charge_stage(&self) -> Result<(), LayerError> {
        Ok(memory::enter(self.arena.id())?)
    }

    /// Where its memory is counted.
    pub(super) fn arena(&self) -> u32 {
        self.arena.id()
    }

    /// Takes the stage's cap away, for work that must not fail.
    pub(super) fn lift_cap(&self) -> Result<(), LayerError> {
        Ok(memory::set_cap(self.arena.id(), None)?)
    }

    /// Gives it back.
    pub(super) fn restore_cap(&self) -> Result<(), LayerError> {
        let cap = self.cap.filter(|_| self.device == Device::Cpu);
        Ok(memory::set_cap(self.arena.id(), cap)?)
    }

    /// Charges it to nobody: copies for the driver.
    pub(super) fn charge_nobody(&self) -> Result<(), LayerError> {
        Ok(memory::enter(SHARED_ARENA)?)
    }

    /// The end of an action: waits for its kernels, and looks whether they went over the cap. (The
    /// CPU's allocator refuses what goes over; a GPU's cannot, so there the action fails after it.)
    pub(super) fn finish(&self) -> Result<(), LayerError> {
        self.synchronize()?;
        let (Some(gpu), Some(cap)) = (&self.gpu, self.cap) else { return Ok(()) };
        let Stats { live, peak, .. } = device::stats(gpu.number)?;
        if peak <= cap {
            return Ok(());
        }
        let requested = peak.saturating_sub(live);
        Err(LayerError::OutOfMemory(Refusal { requested, live, cap: Some(cap) }))
    }

    /// Waits for the stage's kernels.
    pub(super) fn synchronize(&self) -> Result<(), LayerError> {
        match &self.gpu {
            Some(gpu) => Ok(gpu.compute.synchronize()?),
            None => Ok(()),
        }
    }

    /// What it holds; a GPU's number counts all stages on it.
    pub(super) fn memory(&self) -> Result<Stats, LayerError> {
        Ok(match &self.gpu {
            Some(gpu) => device::stats(gpu.number)?,
            None => memory::stats(self.arena.id())?,
        })
    }

    /// Starts a new measurement of the peak: the GPU's only where this stage is its first, because
    /// another may be at work already.
    pub(super) fn reset_peak(&self, first_on_device: bool) -> Result<(), LayerError> {
        if let Some(gpu) = self.gpu.as_ref().filter(|_| first_on_device) {
            device::reset_peak(gpu.number)?;
        }
        Ok(memory::reset_peak(self.arena.id())?)
    }

    /// What a stage on device `to` is sent: the tensors themselves on the same device (and from the
    /// CPU, whose receiver copies), else copies that are under way.
    pub(super) fn send(
        &self,
        tensors: Vec<Option<Tensor>>,
        to: Device,
    ) -> Result<Value, LayerError> {
        let Some(gpu) = self.gpu.as_ref().filter(|_| to != self.device) else {
            return Ok(Value::new(tensors));
        };
        let copy = |tensor: Tensor| Ok(gpu.copies.copy(&tensor, to.gpu())?);
        let copies = tensors.into_iter().map(|tensor| tensor.map(copy).transpose());
        let copies = copies.collect::<Result<_, LayerError>>()?;
        Ok(Value::under_way(copies, gpu.copies.record()?))
    }

    /// The tensors of a value that has arrived, on this device.
    pub(super) fn receive(&self, value: Value) -> Result<Vec<Option<Tensor>>, LayerError> {
        let (tensors, ready) = value.into_parts();
        self.wait(ready.as_ref())?;
        let own = |tensor: Tensor| self.own(&tensor);
        tensors.into_iter().map(|tensor| tensor.map(own).transpose()).collect()
    }

    fn wait(&self, ready: Option<&Event>) -> Result<(), LayerError> {
        match (ready, &self.gpu) {
            (Some(event), Some(gpu)) => Ok(event.block(gpu.compute)?),
            (Some(event), None) => Ok(event.synchronize()?),
            (None, _) => Ok(()),
        }
    }

    /// `tensor` on this device, not copied where it is there already.
    pub(super) fn own(&self, tensor: &Tensor) -> Result<Tensor, LayerError> {
        let Some(gpu) = &self.gpu else { return Ok(tensor.shallow_clone()) };
        if tensor.device() == self.device.tch() {
            gpu.compute.uses(tensor)?;
            return Ok(tensor.shallow_clone());
        }
        Ok(tensor.f_to(self.device.tch())?)
    }
}
