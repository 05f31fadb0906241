//! The two ends of a link between processes.
//!
//! A message is a header and its tensors ([`crate::wire`]), all with the link's own tag, in order. The receiver posts the receive of the next
//! header before it waits for a message's tensors, so that a header never waits for its receiver; tensors have theirs as soon as
//! their header says how large they are.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use gpipe::{
    Value,
    processes::{Crossing, Elsewhere, Inbound, Outbound, Parcel},
};
use gpipe_bridge::c10d::{Error, Work};
use gpipe_core::{Bytes, Half};
use tch::{Kind, Tensor};

use crate::{
    cluster::Shared,
    wire::{HEADER_BYTES, Header, Layout, Part, bytes_tensor, encode, tensor_bytes},
};

/// Tags below are the cluster's own.
const FIRST_TAG: usize = 16;
/// Messages that may be under way at once: the next one is computed, and its header has left, while one is being sent.
const UNDER_WAY_MAX: usize = 2;

fn tag(crossing: Crossing) -> usize {
    FIRST_TAG + 2 * crossing.edge.index() + usize::from(crossing.half == Half::Backward)
}

/// The sending end.
pub(crate) struct Sender {
    shared: Arc<Shared>,
    crossing: Crossing,
    /// What was begun and not waited for, by message; each part holds its tensor until it has left.
    under_way: VecDeque<Vec<Work>>,
}

impl Sender {
    pub(crate) fn new(shared: &Arc<Shared>, crossing: Crossing) -> Self {
        Self { shared: Arc::clone(shared), crossing, under_way: VecDeque::new() }
    }

    fn begin(&self, parts: Vec<Part>) -> Result<Vec<Work>, Elsewhere> {
        let (to, tag) = (self.crossing.to, tag(self.crossing));
        let mut works = Vec::new();
        for part in parts {
            let header = bytes_tensor(&part.header).map_err(|reason| self.shared.own(reason))?;
            for tensor in [header].iter().chain(&part.payload) {
                let work = self.shared.group.send(tensor, to, tag);
                works.push(work.map_err(|error| self.lost(&error))?);
            }
        }
        Ok(works)
    }

    fn finish_oldest(&mut self) -> Result<(), Elsewhere> {
        for work in self.under_way.pop_front().unwrap_or_default() {
            let done = self.shared.interrupt.wait(work, self.shared.longest_wait);
            done.map_err(|error| self.lost(&error))?;
        }
        Ok(())
    }

    fn lost(&self, error: &Error) -> Elsewhere {
        self.shared.lost(self.crossing.to, error)
    }
}

impl Outbound<Value> for Sender {
    fn send(&mut self, parcel: Parcel<Value>) -> Result<(), Elsewhere> {
        let parts = encode(parcel).map_err(|reason| self.shared.own(reason))?;
        let works = self.begin(parts)?;
        self.under_way.push_back(works);
        while self.under_way.len() >= UNDER_WAY_MAX {
            self.finish_oldest()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Elsewhere> {
        while !self.under_way.is_empty() {
            self.finish_oldest()?;
        }
        Ok(())
    }
}

/// The receive of a header that is waiting for it, with what it is received in. It outlives a run: the next one's first header comes
/// into it.
pub(crate) type Posted = Arc<Mutex<Option<(Work, Tensor)>>>;

/// The receiving end.
pub(crate) struct Receiver {
    shared: Arc<Shared>,
    crossing: Crossing,
    /// Of a message.
    most: Bytes,
    posted: Posted,
}

impl Receiver {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        crossing: Crossing,
        most: Bytes,
        posted: Posted,
    ) -> Self {
        Self { shared: Arc::clone(shared), crossing, most, posted }
    }

    fn post(&self, into: &Tensor) -> Result<Work, Elsewhere> {
        let posted = self.shared.group.receive(into, self.crossing.from, tag(self.crossing));
        posted.map_err(|error| self.lost(&error))
    }

    fn lost(&self, error: &Error) -> Elsewhere {
        self.shared.lost(self.crossing.from, error)
    }

    fn wait(&self, work: Work) -> Result<(), Elsewhere> {
        let done = self.shared.interrupt.wait(work, self.shared.longest_wait);
        done.map_err(|error| self.lost(&error))
    }

    fn post_header(&self) -> Result<(Work, Tensor), Elsewhere> {
        let header = Tensor::f_zeros([HEADER_BYTES as i64], (Kind::Uint8, tch::Device::Cpu))
            .map_err(|error| self.shared.own(error.to_string()))?;
        Ok((self.post(&header)?, header))
    }

    /// The next header, of a message that may have `room` more.
    fn header(&self, room: Bytes) -> Result<Header, Elsewhere> {
        let posted = self.posted.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (work, header) = posted.map_or_else(|| self.post_header(), Ok)?;
        self.wait(work)?;
        let read = tensor_bytes(&header).and_then(|bytes| Header::decode(&bytes, room));
        read.map_err(|reason| Elsewhere { process: Some(self.crossing.from), reason })
    }

    /// The tensors of one header. The next header's receive is posted behind them.
    fn tensors(&self, layouts: &[Option<Layout>]) -> Result<Vec<Option<Tensor>>, Elsewhere> {
        let failed = |reason: String| self.shared.own(reason);
        let mut arriving = Vec::with_capacity(layouts.len());
        for layout in layouts {
            let into = layout.as_ref().map(Layout::receiver).transpose().map_err(failed)?.flatten();
            let work = into.as_ref().map(|into| self.post(into)).transpose()?;
            arriving.push((work, into));
        }
        let next = self.post_header()?;
        *self.posted.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
        let mut tensors = Vec::with_capacity(layouts.len());
        for (layout, (work, into)) in layouts.iter().zip(arriving) {
            work.map(|work| self.wait(work)).transpose()?;
            let tensor = layout.as_ref().map(|layout| layout.tensor(into)).transpose();
            tensors.push(tensor.map_err(failed)?);
        }
        Ok(tensors)
    }
}

impl Inbound<Value> for Receiver {
    fn receive(&mut self) -> Result<Parcel<Value>, Elsewhere> {
        let mut tensors = Vec::new();
        let mut room = self.most;
        loop {
            let header = self.header(room)?;
            room = room - header.bytes();
            if header.before != tensors.len() {
                let reason = format!(
                    "a header came out of order ({} tensors, not {})",
                    header.before,
                    tensors.len()
                );
                return Err(Elsewhere { process: Some(self.crossing.from), reason });
            }
            tensors.extend(self.tensors(&header.tensors)?);
            if tensors.len() == header.total {
                let micro_batch = header.micro_batch;
                let message = header.message(tensors);
                let message = message
                    .map_err(|reason| Elsewhere { process: Some(self.crossing.from), reason })?;
                return Ok(Parcel { micro_batch, message });
            }
        }
    }
}
