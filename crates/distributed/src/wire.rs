//! The wire format: a header, then the elements of each tensor, contiguous.
//!
//! Tensors arrive with the strides that they had, because the choice of a layer's kernels, and so
//! the bits of its results, may depend on strides. Values between layers are dense
//! ([`gpipe_bridge::layout`]), so no message has gaps.

use gpipe::Value;
use gpipe::processes::{Envelope, Message, SQUARE_BYTES, VERDICT_BYTES, Verdict, Vote, dtype};
use gpipe_bridge::{device::Event, layout::settled};
use gpipe_core::{Bytes, LayerId, MicroBatch};
use tch::{Device, Kind, Tensor};

/// Size of a header.
const HEADER_BYTES: usize = gpipe_bridge::c10d::HEAD_BYTES_MAX;
/// Size of the part of a header before the tensors.
const START_BYTES: usize = 32;
/// Size of one tensor's entry: dtype, number of dimensions, sizes and strides.
const TENSOR_BYTES: usize = 2 + 16 * DIMENSIONS_MAX;
/// Maximum number of dimensions of a tensor.
const DIMENSIONS_MAX: usize = 8;
/// Maximum number of tensors per header; a message with more tensors has several headers.
pub(crate) const TENSORS_MAX: usize = (HEADER_BYTES - START_BYTES) / TENSOR_BYTES;
/// Maximum number of tensors per message.
const MESSAGE_TENSORS_MAX: usize = 1 << 12;
/// First bytes of every header.
const MAGIC: u32 = u32::from_le_bytes(*b"gpw1");
/// Stands for a dtype where there is no tensor.
const ABSENT: u8 = u8::MAX;
/// Stands for a micro-batch in a message that is sent once per step.
const NO_MICRO_BATCH: u32 = u32::MAX;

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Value = 0,
    Vote = 1,
    Verdict = 2,
}

impl Content {
    fn of(byte: u8) -> Option<Self> {
        [Self::Value, Self::Vote, Self::Verdict].into_iter().find(|content| *content as u8 == byte)
    }
}

/// A header and the contiguous tensors that follow it.
pub(crate) struct Part {
    pub header: Vec<u8>,
    pub payload: Vec<Tensor>,
}

/// The memory layout of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    pub kind: Kind,
    pub sizes: Vec<i64>,
    pub strides: Vec<i64>,
}

/// A decoded header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    content: Content,
    pub micro_batch: Option<MicroBatch>,
    /// The message's total number of tensors (`total`), and how many came with earlier headers
    /// (`before`).
    pub total: usize,
    pub before: usize,
    pub tensors: Vec<Option<Layout>>,
}

type Result<T> = std::result::Result<T, String>;

fn torch(error: tch::TchError) -> String {
    error.to_string()
}

/// Encodes a message as parts, to be sent in order. Dense tensors are not copied. `wait` waits for
/// a value that is not ready.
pub(crate) fn encode(
    envelope: Envelope<Value>,
    wait: impl FnOnce(Event) -> gpipe_bridge::Result<()>,
) -> Result<Vec<Part>> {
    let (content, tensors) = match envelope.message {
        Message::Value(value) => {
            let (tensors, ready) = value.into_parts();
            if let Some(ready) = ready {
                wait(ready).map_err(|error| error.to_string())?;
            }
            (Content::Value, tensors)
        }
        Message::Vote(vote) => (Content::Vote, vec![Some(bytes_tensor(&vote_bytes(&vote))?)]),
        Message::Verdict(verdict) => {
            (Content::Verdict, vec![Some(bytes_tensor(&verdict_bytes(verdict))?)])
        }
    };
    if tensors.len() > MESSAGE_TENSORS_MAX {
        return Err(format!(
            "a value of {} tensors: {MESSAGE_TENSORS_MAX} can be sent",
            tensors.len()
        ));
    }
    let total = tensors.len();
    let mut parts = Vec::new();
    let mut before = 0;
    let mut rest = tensors.into_iter().peekable();
    // A value without tensors still has one header.
    while parts.is_empty() || rest.peek().is_some() {
        let mut header = start(content, envelope.micro_batch, total, before);
        let mut payload = Vec::new();
        for tensor in rest.by_ref().take(TENSORS_MAX) {
            before += 1;
            // A stage's outputs are dense already, so this normally copies nothing.
            let tensor = tensor.map(settled).transpose().map_err(|error| error.to_string())?;
            put_layout(&mut header, tensor.as_ref().map(Layout::of).as_ref())?;
            let Some(tensor) = tensor else { continue };
            let count = tensor.numel() as i64;
            if count > 0 {
                let flat = tensor.f_detach().and_then(|own| own.f_as_strided([count], [1], None));
                payload.push(flat.map_err(torch)?);
            }
        }
        header.resize(HEADER_BYTES, 0);
        parts.push(Part { header, payload });
    }
    Ok(parts)
}

fn start(
    content: Content,
    micro_batch: Option<MicroBatch>,
    total: usize,
    before: usize,
) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend(MAGIC.to_le_bytes());
    header.extend([content as u8, 0, 0, 0]);
    header.extend(micro_batch.map_or(NO_MICRO_BATCH, |m| m.0).to_le_bytes());
    header.extend((total as u32).to_le_bytes());
    header.extend((before as u32).to_le_bytes());
    header.resize(START_BYTES, 0);
    header
}

fn put_layout(header: &mut Vec<u8>, layout: Option<&Layout>) -> Result<()> {
    let end = header.len() + TENSOR_BYTES;
    match layout {
        None => header.push(ABSENT),
        Some(Layout { kind, sizes, strides }) => {
            let dtype = dtype::code(*kind).ok_or_else(|| format!("{kind:?} cannot be sent"))?;
            if sizes.len() > DIMENSIONS_MAX {
                return Err(format!(
                    "a tensor of {} dimensions: {DIMENSIONS_MAX} can be sent",
                    sizes.len()
                ));
            }
            header.extend([dtype, sizes.len() as u8]);
            header.extend(sizes.iter().chain(strides).flat_map(|number| number.to_le_bytes()));
        }
    }
    header.resize(end, 0);
    Ok(())
}

impl Header {
    /// Decodes a header of a message that may have at most `room` more bytes of tensors. Whatever
    /// the header says, no more memory than that is requested.
    pub(crate) fn decode(bytes: &[u8], room: Bytes) -> Result<Self> {
        let bad = |what: &str| format!("a damaged header: {what}");
        let word = |at: usize| -> Result<u32> {
            let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
            word.map(u32::from_le_bytes).ok_or_else(|| bad("it is too short"))
        };
        if bytes.len() != HEADER_BYTES || word(0)? != MAGIC {
            return Err(bad("it does not begin as one"));
        }
        let content = bytes.get(4).copied().and_then(Content::of);
        let content = content.ok_or_else(|| bad("its content"))?;
        let micro_batch = Some(word(8)?).filter(|m| *m != NO_MICRO_BATCH).map(MicroBatch);
        let (total, before) = (word(12)? as usize, word(16)? as usize);
        if total > MESSAGE_TENSORS_MAX || before > total {
            return Err(bad("its counts"));
        }
        let here = (total - before).min(TENSORS_MAX);
        let rest = bytes.get(START_BYTES..).unwrap_or_default().chunks(TENSOR_BYTES).take(here);
        let tensors = rest.map(Layout::decode).collect::<Option<Vec<_>>>();
        let tensors = tensors.ok_or_else(|| bad("a tensor's layout"))?;
        let header = Self { content, micro_batch, total, before, tensors };
        if header.bytes() > room {
            return Err(format!(
                "it sends {} of tensors where at most {room} more are due by the shapes of the \
                mini-batch here: its model or its mini-batch is another one, or the header is \
                damaged",
                header.bytes()
            ));
        }
        Ok(header)
    }

    /// Total size of its tensors' elements.
    pub(crate) fn bytes(&self) -> Bytes {
        let layouts = self.tensors.iter().flatten();
        Bytes(layouts.map(Layout::bytes).fold(0, u64::saturating_add))
    }

    /// Assembles the message from the tensors of all its headers.
    pub(crate) fn message(&self, tensors: Vec<Option<Tensor>>) -> Result<Message<Value>> {
        let bytes = |tensors: Vec<Option<Tensor>>| -> Result<Vec<u8>> {
            let first = tensors.into_iter().flatten().next();
            Ok(first.map(|tensor| tensor_bytes(&tensor)).transpose()?.unwrap_or_default())
        };
        let message = match self.content {
            Content::Value => Some(Message::Value(Value::new(tensors))),
            Content::Vote => read_vote(&bytes(tensors)?).map(Message::Vote),
            Content::Verdict => read_verdict(&bytes(tensors)?).map(Message::Verdict),
        };
        message.ok_or_else(|| "a damaged part of the norm, or verdict".to_owned())
    }
}

impl Layout {
    fn of(tensor: &Tensor) -> Self {
        Self { kind: tensor.kind(), sizes: tensor.size(), strides: tensor.stride() }
    }

    fn decode(bytes: &[u8]) -> Option<Option<Self>> {
        let (&code, rest) = bytes.split_first()?;
        if code == ABSENT {
            return Some(None);
        }
        let kind = dtype::kind(code)?;
        let (&dimensions, rest) = rest.split_first()?;
        let dimensions = usize::from(dimensions);
        let numbers = rest.get(..16 * dimensions)?.chunks_exact(8);
        let numbers: Vec<i64> =
            numbers.filter_map(|n| n.try_into().ok().map(i64::from_le_bytes)).collect();
        let (sizes, strides) = numbers.split_at_checked(dimensions)?;
        let layout = Self { kind, sizes: sizes.to_vec(), strides: strides.to_vec() };
        let fits = dimensions <= DIMENSIONS_MAX && layout.is_dense();
        fits.then_some(Some(layout))
    }

    /// Size of its elements; `u64::MAX` on overflow.
    fn bytes(&self) -> u64 {
        let count = |all: u64, &size: &i64| all.saturating_mul(size.max(0) as u64);
        let elements = match self.sizes.contains(&0) {
            true => 0,
            false => self.sizes.iter().fold(1, count),
        };
        elements.saturating_mul(self.kind.elt_size_in_bytes() as u64)
    }

    /// Whether the elements fill one piece of memory, each exactly once. True for a tensor without
    /// elements.
    fn is_dense(&self) -> bool {
        if self.sizes.iter().chain(&self.strides).any(|&number| number < 0) {
            return false;
        }
        let sized = self.sizes.iter().zip(&self.strides).filter(|(size, _)| **size > 1);
        let mut inner: Vec<(i64, i64)> = sized.map(|(&size, &stride)| (stride, size)).collect();
        inner.sort_unstable();
        let mut next = Some(1_i64);
        let follows = inner.into_iter().all(|(stride, size)| {
            let follows = next == Some(stride);
            next = next.and_then(|next| next.checked_mul(size));
            follows
        });
        follows || self.sizes.contains(&0)
    }

    /// How many elements to receive; `None` for a tensor without elements, whose other sizes are
    /// arbitrary.
    pub(crate) fn elements(&self) -> Option<i64> {
        (!self.sizes.contains(&0)).then(|| self.sizes.iter().product())
    }

    /// Creates the tensor on `device` from its received elements.
    pub(crate) fn tensor(&self, received: Option<Tensor>, device: Device) -> Result<Tensor> {
        match received {
            Some(flat) => flat.f_as_strided(&self.sizes, &self.strides, None).map_err(torch),
            None => Tensor::f_empty_strided(&self.sizes, &self.strides, (self.kind, device))
                .map_err(torch),
        }
    }
}

/// Converts bytes to a tensor.
pub(crate) fn bytes_tensor(bytes: &[u8]) -> Result<Tensor> {
    Tensor::f_from_slice(bytes).map_err(torch)
}

/// Copies the bytes out of a tensor of bytes.
pub(crate) fn tensor_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0; tensor.numel()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel()).map_err(torch)?;
    Ok(bytes)
}

fn vote_bytes(vote: &Vote) -> Vec<u8> {
    let square = |(layer, square): &(LayerId, f64)| {
        layer.0.to_le_bytes().into_iter().chain(square.to_le_bytes())
    };
    vote.squares.iter().flat_map(square).collect()
}

fn read_vote(bytes: &[u8]) -> Option<Vote> {
    let squares = bytes.chunks(SQUARE_BYTES).map(|pair| {
        let (layer, square) = pair.split_at_checked(4)?;
        let layer = LayerId(u32::from_le_bytes(layer.try_into().ok()?));
        Some((layer, f64::from_le_bytes(square.try_into().ok()?)))
    });
    Some(Vote { squares: squares.collect::<Option<_>>()? })
}

fn verdict_bytes(verdict: Verdict) -> Vec<u8> {
    let numbers = [verdict.norm, verdict.scale].into_iter().flat_map(f64::to_le_bytes);
    [u8::from(verdict.apply)].into_iter().chain(numbers).collect()
}

fn read_verdict(bytes: &[u8]) -> Option<Verdict> {
    let (&apply, rest) = bytes.get(..VERDICT_BYTES)?.split_first()?;
    let (norm, scale) = rest.split_at_checked(8)?;
    let number = |bytes: &[u8]| Some(f64::from_le_bytes(bytes.try_into().ok()?));
    Some(Verdict { apply: apply == 1, norm: number(norm)?, scale: number(scale)? })
}

/// Implements [`crate::fuzzing::header`] for a message of at most `most` bytes.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzzed(bytes: &[u8], most: Bytes) -> Result<()> {
    let mut bytes = bytes.to_vec();
    bytes.resize(HEADER_BYTES, 0);
    let header = Header::decode(&bytes, most)?;
    let receiver = |layout: &Layout| {
        let options = (layout.kind, Device::Cpu);
        let empty = |count| Tensor::f_empty([count], options).map_err(torch);
        layout.elements().map(empty).transpose()
    };
    let receivers = header.tensors.iter().flatten().map(|layout| Ok((layout, receiver(layout)?)));
    let receivers = receivers.collect::<Result<Vec<_>>>()?;
    let tensors =
        receivers.into_iter().map(|(layout, received)| layout.tensor(received, Device::Cpu));
    drop(tensors.collect::<Result<Vec<_>>>()?);
    let bytes = bytes_tensor(&bytes)?;
    header.message(vec![Some(bytes)]).map(drop)
}

/// Implements [`crate::fuzzing::headers`].
#[cfg(feature = "fuzzing")]
pub(crate) fn samples() -> Result<Vec<Vec<u8>>> {
    let zeros = |sizes: &[i64], kind| Tensor::f_zeros(sizes, (kind, Device::Cpu)).map_err(torch);
    let strided = zeros(&[2, 3, 4], Kind::Float)?.f_transpose(0, 2).map_err(torch)?;
    let tensors = vec![Some(zeros(&[3], Kind::BFloat16)?), None, Some(strided)];
    let messages = [
        Message::Value(Value::new(tensors)),
        Message::Vote(Vote { squares: vec![(LayerId(1), 2.5)] }),
        Message::Verdict(Verdict { apply: true, norm: 1.5, scale: 0.5 }),
    ];
    let mut headers = Vec::new();
    for message in messages {
        let parts = encode(Envelope { micro_batch: Some(MicroBatch(1)), message }, |_| Ok(()))?;
        headers.extend(parts.into_iter().map(|part| part.header));
    }
    Ok(headers)
}

#[cfg(test)]
mod tests;
