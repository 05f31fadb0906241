//! The device of one or several stages: its stream, copies to other devices, and its memory.
//!
//! A GPU does the work of a step in the order in which it is given, and the thread does not wait
//! for it. What passes from one stream to another has an event, for which the receiving stream
//! waits.
//!
//! Copies to and from a GPU have streams of their own, so that they overlap with kernels. The stage
//! of a GPU copies from it, and copies to it what comes from a CPU.
//!
//! With observers the thread waits for every layer, so that they see true times.

use std::cell::{Cell, RefCell};

use gpipe_bridge::{
    device::{self, Event, Stream},
    memory::{self, Arena, Refusal, Stats},
};
use gpipe_runtime::stage::{Progress, Span};
use tch::Tensor;

use super::{SHARED_ARENA, queue::Queue};
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
    copies_out: Stream,
    copies_in: Stream,
    /// The actions of the current step.
    queue: RefCell<Option<Queue>>,
    /// Whether the thread waits for every piece of work, because somebody looks at it.
    is_watched: Cell<bool>,
    /// The end of the last copy to the host.
    copied: RefCell<Option<Event>>,
}

impl HostCopies {
    /// Whether they are on their way back.
    pub(super) fn are_coming(&self) -> bool {
        self.coming.is_some()
    }
}

/// Copies of a GPU's memory on the host, in pinned memory.
pub(super) struct HostCopies {
    copies: Vec<Tensor>,
    /// When they are complete.
    copied: Event,
    /// The copies back, if they have begun.
    coming: Option<Vec<Coming>>,
}

/// A tensor that a copy to a GPU makes.
pub(super) struct Coming {
    tensor: Tensor,
    /// `None`: it is there.
    ready: Option<Event>,
}

impl StageDevice {
    /// Sets up `device` for the calling thread, with a cap in bytes.
    pub(super) fn enter(device: Device, cap: Option<u64>) -> Result<Self, LayerError> {
        let arena = Arena::acquire()?;
        memory::set_cap(arena.id(), cap.filter(|_| device == Device::Cpu))?;
        memory::enter(arena.id())?;
        let gpu = match device.gpu() {
            Some(number) => {
                let compute = Stream::new(number)?;
                compute.enter()?;
                device::require_determinism()?;
                // The first allocation creates the GPU's allocator. An earlier user may have left a
                // peak.
                drop(Tensor::f_zeros([1], (tch::Kind::Float, device.tch()))?);
                device::reset_peak(number)?;
                Some(Gpu {
                    number,
                    compute,
                    copies_out: Stream::new(number)?,
                    copies_in: Stream::new(number)?,
                    queue: RefCell::default(),
                    is_watched: Cell::default(),
                    copied: RefCell::default(),
                })
            }
            None => None,
        };
        Ok(Self { device, gpu, cap, held: Cell::new(0), arena })
    }

    /// Charges the thread's allocations from now on to the stage.
    pub(super) fn charge_stage(&self) -> Result<(), LayerError> {
        Ok(memory::enter(self.arena.id())?)
    }

    pub(super) fn tch(&self) -> tch::Device {
        self.device.tch()
    }

    pub(super) fn is_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Whether the thread goes on before the work that it gave is done.
    pub(super) fn runs_ahead(&self) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| !gpu.is_watched.get())
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

    /// Begins a step, or its part. `is_watched`: somebody looks at every action or layer.
    pub(super) fn begin_step(&self, is_watched: bool) -> Result<(), LayerError> {
        let Some(gpu) = &self.gpu else { return Ok(()) };
        let mut queue = gpu.queue.borrow_mut();
        // The first of the device's stages that begins it has done so.
        if queue.is_none() {
            *queue = Some(Queue::begin(gpu.compute)?);
        }
        gpu.is_watched.set(is_watched);
        Ok(())
    }

    /// What the GPU is given from now on belongs to the next action.
    pub(super) fn begin_action(&self) -> Result<(), LayerError> {
        self.in_queue(Queue::begin_action).map(Option::unwrap_or_default)
    }

    /// The action has been given to the GPU.
    pub(super) fn end_action(&self) -> Result<(), LayerError> {
        self.in_queue(Queue::end_action).map(Option::unwrap_or_default)
    }

    /// How far the GPU is in the step.
    pub(super) fn progress(&self) -> Result<Progress, LayerError> {
        self.in_queue(Queue::progress).map(Option::unwrap_or_default)
    }

    /// Ends the step on the GPU, and returns when it began and ended each action.
    pub(super) fn end_step(&self) -> Result<Vec<Span>, LayerError> {
        let Some(gpu) = &self.gpu else { return Ok(Vec::new()) };
        // The actions are done. Memory that copies still read would count as held.
        gpu.copies_out.synchronize()?;
        let queue = gpu.queue.take();
        queue.map(|queue| queue.spans()).transpose().map(Option::unwrap_or_default)
    }

    /// Forgets the step.
    pub(super) fn abort_step(&self) {
        if let Some(gpu) = &self.gpu {
            gpu.queue.take();
        }
    }

    fn in_queue<T>(
        &self,
        call: impl FnOnce(&mut Queue) -> Result<T, LayerError>,
    ) -> Result<Option<T>, LayerError> {
        let Some(gpu) = &self.gpu else { return Ok(None) };
        gpu.queue.borrow_mut().as_mut().map(call).transpose()
    }

    /// Ends a piece of work, and checks the cap.
    pub(super) fn finish(&self) -> Result<(), LayerError> {
        self.settle()?;
        self.check_cap()
    }

    /// Ends a piece of work. Waits for its kernels if somebody looks, or outside of a step.
    pub(super) fn settle(&self) -> Result<(), LayerError> {
        match &self.gpu {
            Some(gpu) if gpu.is_watched.get() || gpu.queue.borrow().is_none() => {
                Ok(gpu.compute.synchronize()?)
            }
            _ => Ok(()),
        }
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
        let Some(gpu) = &self.gpu else { return Ok(Value::new(tensors)) };
        let computed = gpu.compute.record()?;
        if to == self.device {
            return Ok(Value::under_way(tensors, computed));
        }
        computed.block(gpu.copies_out)?;
        let copy = |tensor: Tensor| Ok(gpu.copies_out.copy(&tensor, to.gpu())?);
        let copies = tensors.into_iter().map(|tensor| tensor.map(copy).transpose());
        let copies = copies.collect::<Result<_, LayerError>>()?;
        Ok(Value::under_way(copies, gpu.copies_out.record()?))
    }

    /// Returns the tensors of an arrived value, on this device.
    pub(super) fn receive(&self, value: Value) -> Result<Vec<Option<Tensor>>, LayerError> {
        let (tensors, ready) = value.into_parts();
        let mut queue = self.gpu.as_ref().map(|gpu| gpu.queue.borrow_mut());
        match (ready, queue.as_deref_mut().and_then(Option::as_mut)) {
            (Some(event), Some(queue)) => queue.wait_for(event)?,
            (Some(event), None) => event.synchronize()?,
            (None, _) => {}
        }
        let own = |tensor: Tensor| self.own(&tensor);
        tensors.into_iter().map(|tensor| tensor.map(own).transpose()).collect()
    }

    /// Returns `tensor` on this device, without a copy if it is there already.
    pub(super) fn own(&self, tensor: &Tensor) -> Result<Tensor, LayerError> {
        self.take(self.bring(tensor)?)
    }

    /// Starts to copy `tensor` to this device, if it is not there.
    pub(super) fn bring(&self, tensor: &Tensor) -> Result<Coming, LayerError> {
        let there = |tensor| Coming { tensor, ready: None };
        let Some(gpu) = &self.gpu else { return Ok(there(tensor.shallow_clone())) };
        if tensor.device() == self.device.tch() {
            gpu.compute.uses(tensor)?;
            return Ok(there(tensor.shallow_clone()));
        }
        if tensor.device() != tch::Device::Cpu {
            return Ok(there(tensor.f_to(self.device.tch())?));
        }
        let tensor = gpu.copies_in.upload(tensor)?;
        // Before it can be dropped: its memory belongs to the stream of the copy.
        gpu.compute.uses(&tensor)?;
        Ok(Coming { tensor, ready: Some(gpu.copies_in.record()?) })
    }

    /// What [`bring`](Self::bring) started. What follows on the device waits for it.
    pub(super) fn take(&self, coming: Coming) -> Result<Tensor, LayerError> {
        if let (Some(gpu), Some(ready)) = (&self.gpu, coming.ready) {
            ready.block(gpu.compute)?;
        }
        Ok(coming.tensor)
    }

    /// Starts to copy `tensors` of this GPU to the host. Waits for the copies before, so that the
    /// memory of at most one call is still held for its copies.
    pub(super) fn copy_to_host(&self, tensors: Vec<Tensor>) -> Result<HostCopies, LayerError> {
        self.finish_copies_to_host()?;
        let gpu = self.gpu.as_ref().ok_or_else(no_gpu)?;
        gpu.compute.record()?.block(gpu.copies_out)?;
        let copies = tensors.iter().map(|tensor| Ok(gpu.copies_out.copy(tensor, None)?));
        let copies = copies.collect::<Result<_, LayerError>>()?;
        gpu.copied.replace(Some(gpu.copies_out.record()?));
        Ok(HostCopies { copies, copied: gpu.copies_out.record()?, coming: None })
    }

    /// Waits until what was copied to the host is there, and its memory on the GPU is free.
    pub(super) fn finish_copies_to_host(&self) -> Result<(), LayerError> {
        let before = self.gpu.as_ref().and_then(|gpu| gpu.copied.take());
        before.map_or(Ok(()), |before| Ok(before.synchronize()?))
    }

    /// Starts to copy back what [`copy_to_host`](Self::copy_to_host) copied.
    pub(super) fn start_from_host(&self, host: &mut HostCopies) -> Result<(), LayerError> {
        let gpu = self.gpu.as_ref().ok_or_else(no_gpu)?;
        if host.coming.is_none() {
            self.finish_copies_to_host()?;
            host.copied.block(gpu.copies_in)?;
            let coming = host.copies.iter().map(|copy| self.bring(copy));
            host.coming = Some(coming.collect::<Result<_, _>>()?);
        }
        Ok(())
    }

    /// The tensors that were copied to the host, on the GPU again.
    pub(super) fn copy_from_host(&self, mut host: HostCopies) -> Result<Vec<Tensor>, LayerError> {
        self.start_from_host(&mut host)?;
        host.coming.into_iter().flatten().map(|coming| self.take(coming)).collect()
    }
}

fn no_gpu() -> LayerError {
    LayerError::Value("copies to the host need a GPU".into())
}
