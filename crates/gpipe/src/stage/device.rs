//! The device of one or several stages: its stream, copies to other devices, and its memory.
//!
//! On a GPU every action ends when its kernels have finished. The reported times are then true, and
//! a value is complete when it is handed over.
//!
//! Copies from a GPU to another device are the exception, so that they overlap with the next
//! action: they run on a separate stream, and the receiver waits for an event. The receiving GPU's
//! stage makes copies from a CPU, and waits for them.

use std::cell::Cell;

use gpipe_bridge::{
    device::{self, Event, Stream},
    memory::{self, Arena, Refusal, Stats},
};
use tch::Tensor;

use super::SHARED_ARENA;
use crate::{device::Device, error::LayerError, value::Value};

/// A device, as used by the thread of its stages.
pub(super) struct StageDevice {
    device: Device,
    gpu: Option<Gpu>,
    /// Of all stages on the device together.
    cap: Option<u64>,
    /// Bytes that a GPU with a cap held when the current layer or action began.
    held: Cell<u64>,
    /// CPU memory of the stages: all their memory, or the part of a GPU's stages that is on the
    /// CPU.
    arena: Arena,
}

struct Gpu {
    number: usize,
    compute: Stream,
    copies: Stream,
}

impl StageDevice {
    /// Sets up `device` for the calling thread, with a cap in bytes.
    pub(super) fn enter(device: Device, cap: Option<u64>) -> Result<Self, LayerError> {
        let arena = Arena::acquire()?;
        memory::set_cap(arena.id(), cap.filter(|_| device == Device::Cpu))?;
        memory::enter(arena.id())?;
        let gpu = match device.gpu() {
            Some(number) => {
                let (compute, copies) = (Stream::new(number)?, Stream::new(number)?);
                compute.enter()?;
                device::prefer_deterministic_kernels(true)?;
                // The first allocation creates the GPU's allocator. An earlier user may have left a
                // peak.
                drop(Tensor::f_zeros([1], (tch::Kind::Float, device.tch()))?);
                device::reset_peak(number)?;
                Some(Gpu { number, compute, copies })
            }
            None => None,
        };
        Ok(Self { device, gpu, cap, held: Cell::new(0), arena })
    }

    /// Charges the thread's allocations from now on to the stage.
    pub(super) fn charge_stage(&self) -> Result<(), LayerError> {
        Ok(memory::enter(self.arena.id())?)
    }

    /// The memory arena of the device.
    pub(super) fn arena(&self) -> u32 {
        self.arena.id()
    }

    /// Removes the stage's cap, for work that must not fail.
    pub(super) fn lift_cap(&self) -> Result<(), LayerError> {
        Ok(memory::set_cap(self.arena.id(), None)?)
    }

    /// Restores the stage's cap.
    pub(super) fn restore_cap(&self) -> Result<(), LayerError> {
        let cap = self.cap.filter(|_| self.device == Device::Cpu);
        Ok(memory::set_cap(self.arena.id(), cap)?)
    }

    /// Charges the thread's allocations to no stage: copies for the driver.
    pub(super) fn charge_nobody(&self) -> Result<(), LayerError> {
        Ok(memory::enter(SHARED_ARENA)?)
    }

    /// Makes copies for the driver, which are charged to no stage.
    pub(super) fn for_driver<T>(
        &self,
        copy: impl FnOnce() -> Result<T, LayerError>,
    ) -> Result<T, LayerError> {
        self.charge_nobody()?;
        let copies = copy();
        self.charge_stage()?;
        copies
    }

    /// Ends an action: waits for its kernels and checks the cap.
    pub(super) fn finish(&self) -> Result<(), LayerError> {
        self.synchronize()?;
        self.check_cap()
    }

    /// Begins a layer or an action, so that [`check_cap`](Self::check_cap) can tell what it asked
    /// for.
    pub(super) fn begin_work(&self) -> Result<(), LayerError> {
        if let (Some(gpu), Some(_)) = (&self.gpu, self.cap) {
            self.held.set(device::stats(gpu.number)?.live);
        }
        Ok(())
    }

    /// Checks the cap of a GPU, after the fact: its allocator cannot refuse allocations above a
    /// cap, as the CPU's does.
    pub(super) fn check_cap(&self) -> Result<(), LayerError> {
        let (Some(gpu), Some(cap)) = (&self.gpu, self.cap) else { return Ok(()) };
        let peak = device::stats(gpu.number)?.peak;
        if peak <= cap {
            return Ok(());
        }
        let live = self.held.get();
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

    /// Memory statistics of the device. Those of a GPU cover all stages on it.
    pub(super) fn memory(&self) -> Result<Stats, LayerError> {
        Ok(match &self.gpu {
            Some(gpu) => device::stats(gpu.number)?,
            None => memory::stats(self.arena.id())?,
        })
    }

    /// Restarts the measurement of the peak. A GPU's peak is only reset by its first stage, because
    /// other stages may already be running.
    pub(super) fn reset_peak(&self, first_on_device: bool) -> Result<(), LayerError> {
        if let Some(gpu) = self.gpu.as_ref().filter(|_| first_on_device) {
            device::reset_peak(gpu.number)?;
        }
        Ok(memory::reset_peak(self.arena.id())?)
    }

    /// Prepares tensors for a stage on device `to`. On the same device, and from a CPU, it sends
    /// the tensors themselves; the receiver of a CPU tensor copies it. Otherwise it starts copies.
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

    /// Returns the tensors of an arrived value, on this device.
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

    /// Returns `tensor` on this device, without a copy if it is there already.
    pub(super) fn own(&self, tensor: &Tensor) -> Result<Tensor, LayerError> {
        let Some(gpu) = &self.gpu else { return Ok(tensor.shallow_clone()) };
        if tensor.device() == self.device.tch() {
            gpu.compute.uses(tensor)?;
            return Ok(tensor.shallow_clone());
        }
        Ok(tensor.f_to(self.device.tch())?)
    }
}
