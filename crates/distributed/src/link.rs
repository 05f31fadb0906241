//! The two ends of a link between processes.
//!
//! A message is a header and its tensors ([`crate::wire`]), sent in order with the link's own tag.
//! The receiver posts the receive of the next header before it waits for a message's tensors, so a
//! header never waits for its receiver. The receives of tensors are posted as soon as their header
//! gives their sizes.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gpipe::{
    Value,
    processes::{Envelope, Inbound, Outbound, PeerError, RemoteEdge},
};
use gpipe_bridge::c10d::{Error, Inbox, Outbox, Work};
use gpipe_core::{Bytes, Direction};
use tch::{Device, Tensor};

use crate::{
    shared::Shared,
    tags,
    wire::{Header, Layout, Part, encode},
};

/// The tensors of a header; some may be absent.
type Tensors = Vec<Option<Tensor>>;

/// Maximum number of messages in flight. While one is sent, the next one is computed and its header
/// is sent ahead.
const UNDER_WAY_MAX: usize = 2;

fn tag(crossing: RemoteEdge) -> usize {
    tags::LINKS + 2 * crossing.edge.index() + usize::from(crossing.direction == Direction::Backward)
}

fn lock<T>(end: &Mutex<T>) -> MutexGuard<'_, T> {
    end.lock().unwrap_or_else(PoisonError::into_inner)
}

type Ends<T> = Mutex<HashMap<RemoteEdge, Arc<Mutex<T>>>>;

/// The ends of links between stages; they outlive a run. Crossings hold ranks.
pub(crate) struct LinkEnds {
    shared: Arc<Shared>,
    inboxes: Ends<Inbox>,
    outboxes: Ends<Outbox>,
}

impl LinkEnds {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        let (inboxes, outboxes) = (Mutex::default(), Mutex::default());
        Self { shared: Arc::clone(shared), inboxes, outboxes }
    }

    /// Drops the receiving ends.
    pub(crate) fn stop_receiving(&self) {
        lock(&self.inboxes).clear();
    }

    /// The receiving end of a remote edge.
    pub(crate) fn receiver(
        &self,
        crossing: RemoteEdge,
        most: Bytes,
    ) -> Result<Receiver, PeerError> {
        let from = crossing.from;
        let inbox = end(&self.inboxes, crossing, || self.shared.group.inbox(from, tag(crossing)));
        let inbox = inbox.map_err(|error| self.shared.lost(from, &error))?;
        Ok(Receiver::new(&self.shared, from, most, inbox))
    }

    /// The sending end of a remote edge.
    pub(crate) fn sender(&self, crossing: RemoteEdge) -> Result<Sender, PeerError> {
        let to = crossing.to;
        let outbox = end(&self.outboxes, crossing, || self.shared.group.outbox(to, tag(crossing)));
        let outbox = outbox.map_err(|error| self.shared.lost(to, &error))?;
        Ok(Sender::new(&self.shared, to, outbox))
    }
}

/// The end of a remote edge, opened at its first use.
fn end<T>(
    ends: &Ends<T>,
    crossing: RemoteEdge,
    open: impl FnOnce() -> Result<T, Error>,
) -> Result<Arc<Mutex<T>>, Error> {
    let mut ends = lock(ends);
    if let Some(end) = ends.get(&crossing) {
        return Ok(Arc::clone(end));
    }
    let end = Arc::new(Mutex::new(open()?));
    ends.insert(crossing, Arc::clone(&end));
    Ok(end)
}

/// The sending end of a link.
pub(crate) struct Sender {
    shared: Arc<Shared>,
    to: usize,
    /// It outlives a run.
    outbox: Arc<Mutex<Outbox>>,
    /// Sends in flight, by message. Each part holds its tensor until it has been sent.
    under_way: VecDeque<Vec<Work>>,
}

impl Sender {
    pub(crate) fn new(shared: &Arc<Shared>, to: usize, outbox: Arc<Mutex<Outbox>>) -> Self {
        Self { shared: Arc::clone(shared), to, outbox, under_way: VecDeque::new() }
    }

    fn begin(&self, parts: Vec<Part>) -> Result<Vec<Work>, PeerError> {
        let mut outbox = lock(&self.outbox);
        let mut works = Vec::new();
        for Part { header, payload } in parts {
            works.extend(outbox.send(&header, &payload).map_err(|error| self.lost(&error))?);
        }
        Ok(works)
    }

    /// Starts to send a message; returns once another one may be sent.
    pub(crate) fn send_parts(&mut self, parts: Vec<Part>) -> Result<(), PeerError> {
        let works = self.begin(parts)?;
        self.under_way.push_back(works);
        while self.under_way.len() >= UNDER_WAY_MAX {
            self.finish_oldest()?;
        }
        Ok(())
    }

    fn finish_oldest(&mut self) -> Result<(), PeerError> {
        for work in self.under_way.pop_front().unwrap_or_default() {
            let done = self.shared.interrupt.wait(&work, self.shared.longest());
            done.map_err(|error| self.lost(&error))?;
        }
        Ok(())
    }

    fn lost(&self, error: &Error) -> PeerError {
        self.shared.lost(self.to, error)
    }
}

impl Outbound<Value> for Sender {
    fn send(&mut self, envelope: Envelope<Value>) -> Result<(), PeerError> {
        let parts =
            encode(envelope, |ready| ready.make_current().and_then(|()| ready.synchronize()));
        self.send_parts(parts.map_err(|reason| self.shared.own(reason))?)
    }

    fn flush(&mut self) -> Result<(), PeerError> {
        while !self.under_way.is_empty() {
            self.finish_oldest()?;
        }
        Ok(())
    }
}

/// The receiving end of a link.
pub(crate) struct Receiver {
    shared: Arc<Shared>,
    from: usize,
    /// Maximum size of a message.
    most: Bytes,
    /// It outlives a run: the receive of the next run's first header is already posted in it.
    inbox: Arc<Mutex<Inbox>>,
}

impl Receiver {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        from: usize,
        most: Bytes,
        inbox: Arc<Mutex<Inbox>>,
    ) -> Self {
        Self { shared: Arc::clone(shared), from, most, inbox }
    }

    fn lost(&self, error: &Error) -> PeerError {
        self.shared.lost(self.from, error)
    }

    fn wait(&self, work: &Work) -> Result<(), PeerError> {
        let done = self.shared.interrupt.wait(work, self.shared.longest());
        done.map_err(|error| self.lost(&error))
    }

    /// Receives the next header, of a message that may have at most `room` more bytes.
    fn header(&self, inbox: &mut Inbox, room: Bytes) -> Result<Header, PeerError> {
        let work = inbox.post_head().map_err(|error| self.lost(&error))?;
        self.wait(&work)?;
        let header = inbox.head().map_err(|error| self.lost(&error))?;
        let read = Header::decode(&header, room);
        read.map_err(|reason| PeerError { process: Some(self.from), reason })
    }

    /// Receives the tensors of one header, after posting the receive of the next header.
    fn tensors(&self, inbox: &mut Inbox, layouts: &[Option<Layout>]) -> Result<Tensors, PeerError> {
        let mut arriving = Vec::with_capacity(layouts.len());
        for layout in layouts {
            let expect = |elements| {
                let kind = layout.as_ref().map_or(tch::Kind::Uint8, |layout| layout.kind);
                inbox.post_tensor(elements, kind).map_err(|error| self.lost(&error))
            };
            let elements = layout.as_ref().and_then(Layout::elements);
            arriving.push(elements.map(expect).transpose()?);
        }
        inbox.post_head().map_err(|error| self.lost(&error))?;
        let mut tensors = Vec::with_capacity(layouts.len());
        for (layout, work) in layouts.iter().zip(arriving) {
            let mut received = None;
            if let Some(work) = work {
                self.wait(&work)?;
                received = Some(inbox.tensor().map_err(|error| self.lost(&error))?);
            }
            let tensor = layout.as_ref().map(|layout| layout.tensor(received, Device::Cpu));
            let tensor = tensor.transpose();
            tensors.push(tensor.map_err(|reason| self.shared.own(reason))?);
        }
        Ok(tensors)
    }
}

impl Receiver {
    /// Receives a message. `fetch` receives the tensors of one header.
    pub(crate) fn receive_with(
        &self,
        mut fetch: impl FnMut(&mut Inbox, &[Option<Layout>]) -> Result<Tensors, PeerError>,
    ) -> Result<Envelope<Value>, PeerError> {
        let inbox = Arc::clone(&self.inbox);
        let mut inbox = lock(&inbox);
        let mut tensors = Vec::new();
        let mut room = self.most;
        loop {
            let header = self.header(&mut inbox, room)?;
            room = room - header.bytes();
            if header.before != tensors.len() {
                let reason = format!(
                    "a header came out of order ({} tensors, not {})",
                    header.before,
                    tensors.len()
                );
                return Err(PeerError { process: Some(self.from), reason });
            }
            tensors.extend(fetch(&mut inbox, &header.tensors)?);
            if tensors.len() == header.total {
                let micro_batch = header.micro_batch;
                let message = header.message(tensors);
                let message =
                    message.map_err(|reason| PeerError { process: Some(self.from), reason })?;
                return Ok(Envelope { micro_batch, message });
            }
        }
    }

    /// Receives a message whose tensors come another way; `take` gives a tensor for each layout.
    pub(crate) fn receive_announced(
        &self,
        mut take: impl FnMut(&Layout) -> Result<Tensor, String>,
    ) -> Result<Envelope<Value>, PeerError> {
        self.receive_with(|inbox, layouts| {
            inbox.post_head().map_err(|error| self.lost(&error))?;
            let tensors = layouts.iter().map(|layout| layout.as_ref().map(&mut take).transpose());
            tensors.collect::<Result<_, _>>().map_err(|reason| self.shared.own(reason))
        })
    }
}

impl Inbound<Value> for Receiver {
    fn receive(&mut self) -> Result<Envelope<Value>, PeerError> {
        self.receive_with(|inbox, layouts| self.tensors(inbox, layouts))
    }
}
