//! Messages between two processes: a head of bytes, and a body of tensors.
//!
//! ```text
//! frame   magic  head bytes  tensors  bytes of each tensor  head  0 ...    FRAME_BYTES, always
//! body    the tensors, one after the other
//! ```
//! The frame has a fixed size, so its receive can be posted before anything is known about the
//! message. It contains the sizes of the tensors, so that none is received into less memory: Gloo
//! would end the process.

use std::{collections::VecDeque, fmt, sync::Arc};

use tch::{Device, Kind, Tensor};

use super::{Error, Result, Work, group::Raw};

/// Maximum size of a head, in bytes.
pub const HEAD_BYTES_MAX: usize = 1024;
/// Maximum number of tensors in a body.
pub const BODY_MAX: usize = 8;
/// Size of a frame.
const FRAME_BYTES: usize = START_BYTES + 8 * BODY_MAX + HEAD_BYTES_MAX;
/// Size of the magic number and the two counts.
const START_BYTES: usize = 12;
const MAGIC: u32 = u32::from_le_bytes(*b"gpf1");

/// The direction of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Direction {
    Out,
    In,
    All,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Out => "sending",
            Self::In => "receiving",
            Self::All => "summing",
        })
    }
}

fn torch(error: tch::TchError) -> String {
    error.to_string()
}

/// The sending end of the messages with one tag to one process.
pub struct Outbox {
    group: Arc<Raw>,
    to: usize,
    tag: usize,
}

impl Outbox {
    pub(super) fn new(group: Arc<Raw>, to: usize, tag: usize) -> Self {
        Self { group, to, tag }
    }

    /// Starts to send a message, and returns the operations to wait for. Its tensors must not
    /// change until they have been sent. If an operation is dropped before it is done, its part may
    /// never be sent.
    ///
    /// # Errors
    /// The head or body is too large; a tensor is not on the CPU, not contiguous, or has no
    /// elements; the connection is lost.
    pub fn send(&mut self, head: &[u8], body: &[Tensor]) -> Result<Vec<Work>> {
        let frame = frame(head, body).map_err(|message| self.error(message))?;
        [frame].iter().chain(body).map(|part| self.group.send(part, self.to, self.tag)).collect()
    }

    fn error(&self, message: String) -> Error {
        Error { operation: "sending".into(), peer: Some(self.to), message }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.group.give_back((Direction::Out, self.to, self.tag));
    }
}

fn frame(head: &[u8], body: &[Tensor]) -> std::result::Result<Tensor, String> {
    if head.len() > HEAD_BYTES_MAX || body.len() > BODY_MAX {
        let (bytes, tensors) = (head.len(), body.len());
        return Err(format!(
            "a head of {bytes} bytes and {tensors} tensors: at most {HEAD_BYTES_MAX} and \
            {BODY_MAX} \
             can be sent at once"
        ));
    }
    let mut frame = Vec::with_capacity(FRAME_BYTES);
    frame.extend(MAGIC.to_le_bytes());
    frame.extend((head.len() as u32).to_le_bytes());
    frame.extend((body.len() as u32).to_le_bytes());
    for tensor in body {
        if !tensor.defined() || tensor.numel() == 0 {
            return Err("a tensor without elements has nothing to send".into());
        }
        if tensor.device() != Device::Cpu || !tensor.is_contiguous() {
            return Err(format!("a tensor to send is contiguous and on the CPU: {tensor:?}"));
        }
        let bytes = (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        frame.extend(bytes.to_le_bytes());
    }
    frame.resize(START_BYTES + 8 * BODY_MAX, 0);
    frame.extend(head);
    frame.resize(FRAME_BYTES, 0);
    Tensor::f_from_slice(&frame).map_err(torch)
}

/// The receiving end of the messages with one tag from one process. To receive a message, post its
/// head, wait for it and take it; then do the same for each tensor of its body.
pub struct Inbox {
    group: Arc<Raw>,
    from: usize,
    tag: usize,
    head: Option<(Work, Tensor)>,
    /// Sizes in bytes of the tensors not yet posted.
    announced: VecDeque<u64>,
    coming: VecDeque<(Work, Tensor)>,
    /// Why this end can no longer receive.
    broken: Option<Error>,
}

impl Inbox {
    pub(super) fn new(group: Arc<Raw>, from: usize, tag: usize) -> Self {
        let (announced, coming) = (VecDeque::new(), VecDeque::new());
        Self { group, from, tag, head: None, announced, coming, broken: None }
    }

    /// Posts the receive of the next head, if not posted yet, and returns the operation to wait
    /// for.
    ///
    /// # Errors
    /// The previous message's body is not fully posted; the connection is lost.
    pub fn post_head(&mut self) -> Result<Work> {
        self.whole()?;
        if let Some((work, _)) = &self.head {
            return Ok(work.clone());
        }
        if !self.announced.is_empty() {
            let left = self.announced.len();
            return Err(self.error(format!("{left} tensors of a message are not received yet")));
        }
        let (work, frame) = self.receive(FRAME_BYTES as i64, Kind::Uint8)?;
        self.head = Some((work.clone(), frame));
        Ok(work)
    }

    /// Takes the head that has arrived.
    ///
    /// # Errors
    /// No wait for it has completed; the head is damaged.
    pub fn head(&mut self) -> Result<Vec<u8>> {
        self.whole()?;
        let Some((_, frame)) = self.head.take_if(|(work, _)| work.is_done()) else {
            return Err(self.error("its head has not come: wait for it first".into()));
        };
        let mut bytes = vec![0; FRAME_BYTES];
        let copied = frame.f_copy_data_u8(&mut bytes, FRAME_BYTES).map_err(torch);
        let opened = copied.and_then(|()| open(&bytes));
        let (head, announced) = opened.map_err(|message| self.break_(message))?;
        self.announced = announced;
        Ok(head)
    }

    /// Sizes in bytes of the message's tensors that are not posted yet.
    pub fn announced(&self) -> impl Iterator<Item = u64> {
        self.announced.iter().copied()
    }

    /// Posts the receive of the next tensor, with one dimension of `elements` of `kind`. Returns
    /// the operation to wait for.
    ///
    /// # Errors
    /// The announced tensor has another size, or there is none; out of memory; the connection is
    /// lost.
    pub fn post_tensor(&mut self, elements: i64, kind: Kind) -> Result<Work> {
        self.whole()?;
        let expected = u64::try_from(elements).ok();
        let expected = expected.and_then(|n| n.checked_mul(kind.elt_size_in_bytes() as u64));
        let Some(&announced) = self.announced.front() else {
            return Err(self.error("the message has no more tensors".into()));
        };
        if expected != Some(announced) {
            let due = format!("{elements} of {kind:?} are due");
            return Err(self.break_(format!("a tensor of {announced} bytes comes where {due}")));
        }
        let posted = self.receive(elements, kind)?;
        self.announced.pop_front();
        let work = posted.0.clone();
        self.coming.push_back(posted);
        Ok(work)
    }

    /// Takes the oldest posted tensor, once it has arrived.
    ///
    /// # Errors
    /// None is posted; no wait for it has completed.
    pub fn tensor(&mut self) -> Result<Tensor> {
        self.whole()?;
        match self.coming.pop_front_if(|(work, _)| work.is_done()) {
            Some((_, tensor)) => Ok(tensor),
            None => Err(self.error("its tensor has not come: wait for it first".into())),
        }
    }

    fn receive(&self, elements: i64, kind: Kind) -> Result<(Work, Tensor)> {
        let into = Tensor::f_empty([elements], (kind, Device::Cpu));
        let into = into.map_err(|error| self.error(torch(error)))?;
        Ok((self.group.receive(&into, self.from, self.tag)?, into))
    }

    fn whole(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Marks this end as broken, because message boundaries are lost.
    fn break_(&mut self, message: String) -> Error {
        let error = self.error(message);
        self.broken.get_or_insert(error).clone()
    }

    fn error(&self, message: String) -> Error {
        Error { operation: "receiving".into(), peer: Some(self.from), message }
    }
}

impl Drop for Inbox {
    /// Frees this end for a successor, if it is dropped between two messages.
    fn drop(&mut self) {
        let between = self.head.is_none() && self.announced.is_empty() && self.coming.is_empty();
        if between && self.broken.is_none() {
            self.group.give_back((Direction::In, self.from, self.tag));
        }
    }
}

/// Parses a frame: its head, and the size in bytes of each tensor that follows.
fn open(frame: &[u8]) -> std::result::Result<(Vec<u8>, VecDeque<u64>), String> {
    let damaged = || "what comes is not a message's head, or a damaged one".to_owned();
    let word = |at: usize| {
        let word = frame.get(at..at + 4).and_then(|word| word.try_into().ok());
        word.map(u32::from_le_bytes).ok_or_else(damaged)
    };
    let (head, tensors) = (word(4)? as usize, word(8)? as usize);
    if word(0)? != MAGIC || head > HEAD_BYTES_MAX || tensors > BODY_MAX {
        return Err(damaged());
    }
    let (_, rest) = frame.split_at_checked(START_BYTES).ok_or_else(damaged)?;
    let (sizes, rest) = rest.split_at_checked(8 * BODY_MAX).ok_or_else(damaged)?;
    let sizes = sizes.chunks_exact(8).take(tensors);
    let sizes = sizes.filter_map(|size| size.try_into().ok().map(u64::from_le_bytes)).collect();
    Ok((rest.get(..head).ok_or_else(damaged)?.to_vec(), sizes))
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Outbox(to {}, tag {})", self.to, self.tag)
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inbox(from {}, tag {})", self.from, self.tag)
    }
}
