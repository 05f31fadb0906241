//! Messages encoded and decoded, and damaged headers.

// tests may panic
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use gpipe_core::splitmix::Stream;

fn encode(envelope: Envelope<Value>) -> Result<Vec<Part>> {
    super::encode(envelope, |_| Ok(()))
}

/// Encodes a message of exactly `most` bytes, transfers its parts, and decodes it.
fn through(envelope: Envelope<Value>, most: Bytes) -> (Option<MicroBatch>, Message<Value>) {
    let parts = encode(envelope).unwrap();
    let mut tensors = Vec::new();
    let mut last = None;
    let mut room = most;
    for part in parts {
        let header = Header::decode(&part.header, room).unwrap();
        room = room - header.bytes();
        assert_eq!(header.before, tensors.len());
        let mut payload = part.payload.into_iter();
        for layout in &header.tensors {
            let tensor = layout.as_ref().map(|layout| {
                let received = layout.elements().map(|elements| {
                    let sent = payload.next().unwrap();
                    assert!(sent.is_contiguous() && sent.size() == [elements]);
                    sent.copy()
                });
                layout.tensor(received, Device::Cpu).unwrap()
            });
            tensors.push(tensor);
        }
        assert!(payload.next().is_none());
        last = Some(header);
    }
    let header = last.unwrap();
    assert_eq!((header.total, room), (tensors.len(), Bytes(0)));
    (header.micro_batch, header.message(tensors).unwrap())
}

fn value(tensors: &[Option<Tensor>]) -> Envelope<Value> {
    let tensors = tensors.iter().map(|own| own.as_ref().map(Tensor::shallow_clone)).collect();
    Envelope { micro_batch: Some(MicroBatch(7)), message: Message::Value(Value::new(tensors)) }
}

fn bytes_of(tensor: &Tensor) -> Bytes {
    Bytes((tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64)
}

fn random(sizes: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(sizes, (Kind::Float, Device::Cpu)).to_kind(kind)
}

#[track_caller]
fn assert_arrives(tensors: &[Option<Tensor>]) {
    let most = tensors.iter().flatten().map(bytes_of).sum();
    let (micro_batch, message) = through(value(tensors), most);
    assert_eq!(micro_batch, Some(MicroBatch(7)));
    let Message::Value(found) = message else { panic!("not a value") };
    let found = found.into_parts().0;
    assert_eq!(found.len(), tensors.len());
    for (found, own) in found.iter().zip(tensors) {
        assert_eq!(found.is_some(), own.is_some());
        let Some((found, own)) = found.as_ref().zip(own.as_ref()) else { continue };
        assert_eq!((found.kind(), found.size()), (own.kind(), own.size()));
        assert_eq!(found.stride(), own.stride(), "{:?}", own.size());
        assert!(found.equal(own) || own.numel() == 0);
    }
}

#[test]
fn oracle_tensors_arrive_with_their_strides() {
    let images = random(&[2, 3, 5, 4], Kind::Float);
    let last = images.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
    let rows = random(&[6, 10], Kind::BFloat16);
    assert_arrives(&[
        Some(images.shallow_clone()),
        Some(last),
        None,
        Some(rows.narrow(0, 3, 1).tr()), // an offset, a dimension of one
        Some(rows.narrow(0, 1, 3).tr()), // an offset
        Some(Tensor::from(3.5)),         // no dimension
        Some(Tensor::zeros([0, 4], (Kind::Int64, Device::Cpu))),
        Some(Tensor::from_slice(&[true, false])),
        Some(random(&[1, 1, 1, 1, 1, 2, 1, 2], Kind::Int)),
    ]);
    assert_arrives(&[]);
    assert_arrives(&[None]);
    for count in [TENSORS_MAX - 1, TENSORS_MAX, TENSORS_MAX + 1, 3 * TENSORS_MAX + 2] {
        let many: Vec<_> =
            (0..count as i64).map(|i| Some(random(&[i % 3 + 1], Kind::Float))).collect();
        assert_arrives(&many);
    }
}

#[test]
fn oracle_votes_and_verdicts_arrive_to_the_bit() {
    let vote =
        Vote { squares: vec![(LayerId(3), f64::NAN), (LayerId(9), -0.0), (LayerId(0), 1.0 / 3.0)] };
    let (micro_batch, message) = through(
        Envelope { micro_batch: None, message: Message::Vote(vote.clone()) },
        Bytes(3 * 12),
    );
    assert_eq!(micro_batch, None);
    let Message::Vote(found) = message else { panic!("no vote") };
    let bits = |vote: &Vote| -> Vec<(LayerId, u64)> {
        vote.squares.iter().map(|(layer, square)| (*layer, square.to_bits())).collect()
    };
    assert_eq!(bits(&found), bits(&vote));
    let verdict = Verdict { apply: true, norm: 0.1, scale: f64::MIN_POSITIVE };
    let (_, message) =
        through(Envelope { micro_batch: None, message: Message::Verdict(verdict) }, Bytes(17));
    let Message::Verdict(found) = message else { panic!("no verdict") };
    assert_eq!(found, verdict);
}

/// A tensor that is not dense arrives as contiguous memory with the same elements.
#[test]
fn oracle_views_arrive_contiguous() {
    let rows = random(&[6, 10], Kind::Float);
    let views = [
        rows.unfold(0, 3, 1), // overlaps
        rows.narrow(1, 2, 3), // has gaps
        rows.narrow(1, 0, 1).expand([6, 4], false),
        random(&[3, 1, 2], Kind::Double).expand([3, 5, 2], false).narrow(2, 1, 1),
    ];
    for view in views {
        let (_, message) = through(value(&[Some(view.shallow_clone())]), bytes_of(&view));
        let Message::Value(found) = message else { panic!("not a value") };
        let found = found.into_parts().0.remove(0).unwrap();
        assert!(found.is_contiguous());
        assert_eq!(found, view);
    }
}

/// A header may request memory for what its message may still contain, to the byte, and no more.
/// Earlier headers of the message count.
#[test]
fn fault_a_header_that_asks_for_more_than_its_message_may_have_is_refused() {
    let many: Vec<_> = (0..TENSORS_MAX + 2).map(|_| Some(random(&[2, 3], Kind::Float))).collect();
    let headers: Vec<Vec<u8>> =
        encode(value(&many)).unwrap().into_iter().map(|part| part.header).collect();
    let first = Bytes(24 * TENSORS_MAX as u64);
    for (header, own) in headers.iter().zip([first, Bytes(48)]) {
        assert_eq!(Header::decode(header, own).unwrap().bytes(), own);
        let error = Header::decode(header, own - Bytes(1)).unwrap_err();
        assert!(error.contains(&format!("it sends {own} of tensors where at most")), "{error}");
    }
    // Tensors without elements whose other sizes overflow when multiplied.
    let empty = [([1 << 62, 2, 0], [1, 1 << 62, 1]), ([0, 1 << 62, 1 << 62], [1, 1, 1 << 62])];
    for (sizes, strides) in empty {
        let layout = Layout { kind: Kind::Float, sizes: sizes.to_vec(), strides: strides.to_vec() };
        let mut header = start(Content::Value, None, 1, 0);
        put_layout(&mut header, Some(&layout)).unwrap();
        header.resize(HEADER_BYTES, 0);
        for layout in Header::decode(&header, Bytes(0)).unwrap().tensors.iter().flatten() {
            assert!(layout.elements().is_none());
            drop(layout.tensor(None, Device::Cpu)); // an error or a tensor without elements
        }
    }
    // One element in memory, expanded to many: computing with it would cost as much as its sizes
    // say.
    for size in [1_i64 << 10, 1 << 40] {
        let layout = Layout { kind: Kind::Float, sizes: vec![size, size], strides: vec![0, 0] };
        let mut header = start(Content::Value, None, 1, 0);
        put_layout(&mut header, Some(&layout)).unwrap();
        header.resize(HEADER_BYTES, 0);
        assert!(Header::decode(&header, Bytes(1 << 20)).is_err());
    }
}

#[test]
fn fault_what_cannot_be_sent_is_an_error() {
    let nine = random(&[1; 9], Kind::Float);
    assert!(encode(value(&[Some(nine)])).is_err_and(|error| error.contains("9 dimensions")));
    let complex = Tensor::zeros([2], (Kind::ComplexFloat, Device::Cpu));
    assert!(encode(value(&[Some(complex)])).is_err_and(|error| error.contains("ComplexFloat")));
}

/// A damaged header causes at most an error, and never requests more memory than allowed.
#[test]
fn fault_damaged_headers_are_errors_or_harmless() {
    let envelope =
        value(&[Some(random(&[2, 3], Kind::Float)), None, Some(random(&[4], Kind::Half))]);
    let header = encode(envelope).unwrap().remove(0).header;
    let most = Bytes(4 * 6 + 2 * 4);
    assert!(Header::decode(&header, most).is_ok());
    assert!(Header::decode(&header[..HEADER_BYTES - 1], most).is_err());
    let (mut stream, mut refused) = (Stream::new(11), 0);
    for _ in 0..20_000 {
        let mut damaged = header.clone();
        for _ in 0..=stream.below(4) {
            let at =
                if stream.below(2) == 0 { stream.below(80) } else { stream.below(HEADER_BYTES) };
            damaged[at] = stream.below(256) as u8;
        }
        match Header::decode(&damaged, most) {
            Err(_) => refused += 1,
            Ok(header) => {
                assert!(header.bytes() <= most);
                let layouts = header.tensors.iter().flatten();
                for layout in layouts {
                    assert!(layout.is_dense(), "{layout:?}");
                }
            }
        }
    }
    assert!(refused > 5_000, "{refused}");
}
