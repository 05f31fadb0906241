//! Values from GPU to GPU, over NCCL.
//!
//! The header of a message goes over Gloo, as for all other links: it says what comes. Its tensors
//! are part of a group call. The thread that makes the calls does not wait for the GPU; values know
//! when they are there.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use gpipe::{
    Value,
    processes::{Envelope, Exchange, Message, MostBytes, Outbound, PeerError, RemoteEdge},
};
use gpipe_bridge::{
    c10d::{self, GpuGroup, TcpStore, gpus::has_nccl},
    device::{Event, Stream},
};
use tch::{Device, Kind, Tensor};

use crate::{
    bounded::{GaveUp, no_thread, within},
    link::{LinkEnds, Receiver, Sender},
    shared::Shared,
    wire::{Layout, Part, encode},
};

/// How often the end of a run looks whether the GPU has sent everything.
const LOOK: Duration = Duration::from_millis(1);

/// The GPU of this process, connected with those of others. It outlives a run.
pub(crate) struct Gpus {
    group: GpuGroup,
    gpu: usize,
    stream: Stream,
}

/// The connection of a process's GPU, once it is made.
#[derive(Default)]
pub(crate) struct Connected {
    gpus: Mutex<Option<Arc<Gpus>>>,
    attempts: AtomicUsize,
}

impl Drop for Gpus {
    fn drop(&mut self) {
        // NCCL complains about a group that is left open.
        let _ = self.group.abort();
    }
}

impl Connected {
    /// Connects with the GPUs of `size` processes, of which this one is number `place`.
    pub(crate) fn connect(
        &self,
        shared: &Arc<Shared>,
        store: TcpStore,
        (place, size): (usize, usize),
        gpu: usize,
    ) -> Result<(), PeerError> {
        let mut connected = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        match &*connected {
            Some(own) if own.gpu == gpu => return Ok(()),
            Some(own) => {
                let other = own.gpu;
                return Err(shared.own(format!(
                    "it is connected with cuda:{other}, not {gpu}: use one GPU in each process"
                )));
            }
            None => {}
        }
        // What an earlier attempt left in the store is not taken for this one's.
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        let store = store.prefixed(&attempt.to_string());
        let store = store.map_err(|error| shared.own(error.to_string()))?;
        if !has_nccl() {
            return Err(shared.own(
                "this program was built without NCCL: build it against the libtorch with CUDA \
                (GPIPE_LIBTORCH=cuda make build), or pass values over Gloo (pipeline.links)"
                    .into(),
            ));
        }
        let (address, deadline) = (shared.address.clone(), shared.deadline);
        let join = move || {
            let group = GpuGroup::nccl(&store, place, size, gpu, &address, deadline);
            group.map_err(|error| error.to_string())
        };
        let group = within(deadline, || shared.failed(), join).map_err(|error| match error {
            GaveUp::Failed(known) => known,
            GaveUp::NoThread(error) => shared.own(no_thread(&error)),
            GaveUp::Late => shared.own(format!(
                "NCCL did not connect the GPUs within {deadline:.0?}: set NCCL_DEBUG=INFO to see \
                what it waits for"
            )),
        })?;
        // It may be another process that is gone.
        let group = group.map_err(|reason| PeerError { process: None, reason })?;
        let stream = Stream::new(gpu).map_err(|error| shared.own(error.to_string()))?;
        let made = Arc::new(Gpus { group, gpu, stream });
        let weak: Weak<Gpus> = Arc::downgrade(&made);
        shared.interrupt.and_end(move || {
            if let Some(gpus) = weak.upgrade() {
                let _ = gpus.group.abort();
            }
        });
        *connected = Some(made);
        Ok(())
    }

    /// Opens the end of all links for a run, in the thread that uses it. Process 0 of this pipeline
    /// has rank `first`.
    pub(crate) fn exchange(
        &self,
        shared: &Arc<Shared>,
        most: MostBytes,
        ends: &Arc<LinkEnds>,
        first: usize,
    ) -> Result<Box<dyn Exchange<Value>>, PeerError> {
        let connected = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        let gpus = connected.clone().ok_or_else(|| shared.own("no GPU is connected".into()))?;
        gpus.stream.enter().map_err(|error| shared.own(error.to_string()))?;
        let (senders, receivers) = (HashMap::new(), HashMap::new());
        let (shared, ends) = (Arc::clone(shared), Arc::clone(ends));
        Ok(Box::new(GpuExchange { shared, gpus, most, ends, first, senders, receivers }))
    }
}

/// All links of this process's GPU in one run.
struct GpuExchange {
    shared: Arc<Shared>,
    gpus: Arc<Gpus>,
    most: MostBytes,
    ends: Arc<LinkEnds>,
    first: usize,
    senders: HashMap<RemoteEdge, Sender>,
    receivers: HashMap<RemoteEdge, Receiver>,
}

/// A tensor's memory as bytes, because NCCL does not know every dtype.
fn as_bytes(flat: &Tensor) -> Result<Tensor, String> {
    flat.f_view_dtype(Kind::Uint8).map_err(|error| error.to_string())
}

impl GpuExchange {
    fn device(&self) -> Device {
        Device::Cuda(self.gpus.gpu)
    }

    /// A link between processes of this pipeline, by ranks.
    fn ranks(&self, crossing: RemoteEdge) -> RemoteEdge {
        let (from, to) = (self.first + crossing.from, self.first + crossing.to);
        RemoteEdge { from, to, ..crossing }
    }

    /// Sends the headers of a message, and returns its tensors, which `stream` uses.
    fn announce(
        &mut self,
        crossing: RemoteEdge,
        envelope: Envelope<Value>,
    ) -> Result<Vec<Tensor>, PeerError> {
        let (stream, device) = (self.gpus.stream, self.device());
        let own = |reason: String| self.shared.own(reason);
        let parts = encode(envelope, |ready: Event| ready.block(stream)).map_err(own)?;
        let mut tensors = Vec::new();
        let mut headers = Vec::new();
        for Part { header, payload } in parts {
            for flat in payload {
                let flat = flat.f_to(device).map_err(|error| own(error.to_string()))?;
                stream.uses(&flat).map_err(|error| own(error.to_string()))?;
                tensors.push(as_bytes(&flat).map_err(own)?);
            }
            headers.push(Part { header, payload: Vec::new() });
        }
        let ranks = self.ranks(crossing);
        let sender = match self.senders.entry(crossing) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(none) => none.insert(self.ends.sender(ranks)?),
        };
        sender.send_parts(headers)?;
        Ok(tensors)
    }

    /// Waits for the headers of a message, and makes its tensors. Adds their memory to `arriving`.
    fn expect(
        &mut self,
        crossing: RemoteEdge,
        arriving: &mut Vec<(Tensor, usize)>,
    ) -> Result<Envelope<Value>, PeerError> {
        let device = self.device();
        let ranks = self.ranks(crossing);
        let receiver = match self.receivers.entry(crossing) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(none) => none.insert(self.ends.receiver(ranks, (self.most)(crossing))?),
        };
        receiver.receive_announced(|layout: &Layout| {
            let Some(elements) = layout.elements() else { return layout.tensor(None, device) };
            let flat = Tensor::f_empty([elements], (layout.kind, device));
            let flat = flat.map_err(|error| error.to_string())?;
            arriving.push((as_bytes(&flat)?, crossing.from));
            layout.tensor(Some(flat), device)
        })
    }

    /// Reports that an exchange with these processes failed.
    fn lost<'a>(
        &self,
        error: &c10d::Error,
        tensors: impl Iterator<Item = &'a (Tensor, usize)>,
    ) -> PeerError {
        let mut others: Vec<usize> = tensors.map(|(_, process)| *process).collect();
        others.sort_unstable();
        others.dedup();
        match others[..] {
            [one] => self.shared.lost(self.first + one, error),
            _ => self
                .shared
                .failed()
                .unwrap_or_else(|| PeerError { process: None, reason: error.to_string() }),
        }
    }

    fn record(&self) -> Result<Event, PeerError> {
        self.gpus.stream.record().map_err(|error| self.shared.own(error.to_string()))
    }
}

impl Exchange<Value> for GpuExchange {
    fn exchange(
        &mut self,
        sends: Vec<(RemoteEdge, Envelope<Value>)>,
        receives: &[RemoteEdge],
    ) -> Result<Vec<Envelope<Value>>, PeerError> {
        let mut leaving = Vec::new();
        for (crossing, envelope) in sends {
            let tensors = self.announce(crossing, envelope)?;
            leaving.extend(tensors.into_iter().map(|tensor| (tensor, crossing.to)));
        }
        let (mut arriving, mut envelopes) = (Vec::new(), Vec::with_capacity(receives.len()));
        for &crossing in receives {
            envelopes.push(self.expect(crossing, &mut arriving)?);
        }
        let exchanged = self.gpus.group.exchange(&leaving, &arriving);
        exchanged.map_err(|error| self.lost(&error, leaving.iter().chain(&arriving)))?;
        for envelope in &mut envelopes {
            if let Message::Value(value) = &mut envelope.message {
                let (tensors, _) = std::mem::take(value).into_parts();
                *value = Value::under_way(tensors, self.record()?);
            }
        }
        Ok(envelopes)
    }

    fn flush(&mut self) -> Result<(), PeerError> {
        for sender in self.senders.values_mut() {
            sender.flush()?;
        }
        let sent = self.record()?;
        loop {
            match sent.is_done() {
                Ok(true) => return Ok(()),
                Ok(false) if self.shared.interrupt.is_interrupted() => {
                    let failed = self.shared.failed();
                    return Err(failed.unwrap_or_else(|| self.shared.own("it was ended".into())));
                }
                Ok(false) => std::thread::park_timeout(LOOK),
                Err(error) => return Err(self.shared.own(error.to_string())),
            }
        }
    }
}
