//! Damaged and hostile files: reading ends in an error or a consistent file, never in a panic, and
//! never takes more memory than the file's length. All tests share an allocator that grants 64 MiB
//! beyond the initial use and aborts beyond that.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{alloc::System, fs, path::Path, sync::LazyLock};

use cap::Cap;
use gpipe_checkpoint::tensor_file::{TensorFile, encode};
use proptest::{prelude::*, test_runner::RngSeed};
use tch::{Kind, Tensor};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

static LIMIT: LazyLock<usize> = LazyLock::new(|| {
    let limit = ALLOCATOR.allocated() + (64 << 20);
    ALLOCATOR.set_limit(limit).unwrap();
    limit
});

/// A small file in which every kind of false claim is possible.
static SMALL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let tensors = [
        ("a.weight".to_owned(), Tensor::from_slice(&[1.0f32, -2.0, 3.5, 0.0]).view([2, 2])),
        ("b".to_owned(), Tensor::from_slice(&[1i64, 2])),
        ("empty".to_owned(), Tensor::zeros([3, 0], (Kind::Half, tch::Device::Cpu))),
        ("flag".to_owned(), Tensor::from_slice(&[true, false])),
    ];
    let metadata = [("format".to_owned(), "gpipe".to_owned())].into();
    encode(&tensors, &metadata).unwrap()
});

fn header_end(file: &[u8]) -> usize {
    8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize
}

/// Opens `bytes` and reads all tensors. A file that opens must be consistent. Returns the number of
/// tensors read, or the error.
fn examine(path: &Path, bytes: &[u8]) -> Result<usize, String> {
    assert!(*LIMIT > 0);
    fs::write(path, bytes).unwrap();
    let mut file = TensorFile::open(path).map_err(|error| error.to_string())?;
    let entries = file.entries().to_vec();
    assert!(entries.is_sorted_by(|a, b| a.name < b.name), "sorted, and no two of one name");
    let total: u64 = entries.iter().map(|entry| entry.bytes).sum();
    assert_eq!(header_end(bytes) as u64 + total, bytes.len() as u64, "covered without a gap");
    let mut read = 0;
    for entry in entries {
        match (file.read(&entry.name), entry.kind) {
            (Ok(tensor), Some(kind)) => {
                assert_eq!((tensor.kind(), tensor.size()), (kind, entry.shape));
                read += 1;
            }
            (Err(_), None | Some(Kind::Bool)) => {}
            (result, kind) => panic!("{kind:?}: {result:?}"),
        }
    }
    Ok(read)
}

fn refusal(path: &Path, bytes: &[u8]) -> String {
    let message = examine(path, bytes).unwrap_err();
    assert!(message.contains("untrusted.safetensors"), "{message}");
    assert!(message.len() < 1500, "{} bytes of message", message.len());
    message
}

fn with_path<T>(test: impl FnOnce(&Path) -> T) -> T {
    let folder = tempfile::tempdir().unwrap();
    test(&folder.path().join("untrusted.safetensors"))
}

/// A file with this header, followed by `data` bytes.
fn file(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

fn tensor(shape: &str, offsets: &str) -> String {
    format!("{{\"a\":{{\"dtype\":\"U8\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
}

#[test]
fn oracle_the_undamaged_file_is_read() {
    with_path(|path| assert_eq!(examine(path, &SMALL), Ok(4)));
}

#[test]
fn fault_each_truncation_is_refused() {
    with_path(|path| {
        for length in 0..SMALL.len() {
            let message = refusal(path, &SMALL[..length]);
            assert!(message.contains(&format!("truncated: {length} bytes")), "{message}");
        }
        let said = format!("truncated: {} bytes, the header says {}", SMALL.len() - 1, SMALL.len());
        assert!(refusal(path, &SMALL[..SMALL.len() - 1]).contains(&said));
        let message = refusal(path, &[&SMALL[..], &[0; 5]].concat());
        assert!(message.contains("has 5 bytes after its last tensor"), "{message}");
    });
}

#[test]
fn fault_each_flipped_bit_is_refused_or_consistent() {
    with_path(|path| {
        let mut refused = 0;
        for bit in 0..SMALL.len() * 8 {
            let mut bytes = SMALL.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let result = examine(path, &bytes);
            assert!(result.is_err() || bit >= 64, "bit {bit}: the length is another");
            assert!(result.is_ok() || bit < header_end(&SMALL) * 8, "bit {bit}: {result:?}");
            refused += usize::from(result.is_err());
        }
        // Most of a header is structure, where a changed bit is an error.
        assert!(refused > header_end(&SMALL) * 8 / 2, "{refused}");
    });
}

const EMPTY: &str = "[0],\"data_offsets\":[0,0]";

#[test]
fn fault_false_and_huge_claims_are_refused_without_taking_memory() {
    let deep = "[".repeat(200_000);
    let ones = format!("[{}1]", "1,".repeat(100_000));
    let long = format!(
        "{{\"{}\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}}}",
        "x".repeat(1 << 20)
    );
    let dtype = format!(
        "{{\"a\":{{\"dtype\":\"{}\",\"shape\":[],\"data_offsets\":[0,1]}}}}",
        "x".repeat(1 << 20)
    );
    let two = "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}";
    with_path(|path| {
        for length in
            [u64::MAX, u64::MAX - 8, i64::MAX as u64, 100_000_001, 100_000_000, 99_999_999, 13]
        {
            let message = refusal(path, &[&length.to_le_bytes()[..], b"{\"a\":{}}    "].concat());
            assert!(message.contains("header"), "{message}");
        }
        for (header, data) in [
            (tensor("[18446744073709551615]", "[0,18446744073709551615]"), 4),
            (tensor("[9223372036854775808]", "[0,9223372036854775808]"), 4),
            (tensor("[4294967296,4294967296]", "[0,0]"), 0),
            (tensor("[4294967296,4294967297]", "[0,4294967296]"), 4),
            (tensor("[1099511627776]", "[0,1099511627776]"), 4),
            (tensor("[18446744073709551616]", "[0,4]"), 4),
            (tensor("[0,9223372036854775808]", "[0,0]"), 0),
            (tensor("[0,4294967296,4294967296]", "[0,0]"), 0),
            (tensor("[4]", "[0,5]"), 5),
            (tensor("[5]", "[0,4]"), 4),
            (tensor("[4]", "[1,5]"), 5),
            (tensor("[4]", "[4,0]"), 4),
            (tensor("[4]", "[-4,0]"), 4),
            (tensor("[4.0]", "[0,4]"), 4),
            (tensor("[-4]", "[0,-4]"), 4),
            (tensor(&ones, "[0,1]"), 1),
            (long, 1),
            (dtype, 1),
            (deep, 0),
            (format!("{{{two},{}}}", two.replace('a', "b")), 1), // overlapping bytes
            (format!("{{{two},{}}}", two.replace('a', "b").replace("[0,1]", "[2,3]")), 3), // a gap
            ("{\"__metadata__\":{\"a\":3}}".to_owned(), 0),
            ("{\"__metadata__\":{},\"__metadata__\":{}}".to_owned(), 0),
            ("[]".to_owned(), 0),
            ("{} {}".to_owned(), 0),
            ("{\"a\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,1]}}".to_owned(), 1),
            ("\u{0}\u{0}".to_owned(), 0),
            (String::new(), 0),
        ] {
            let message = refusal(path, &file(&header, data));
            assert!(!message.contains('\u{0}'), "{message}");
        }
        // Other readers of the format would take the last one.
        for (places, data) in
            [(["[1],\"data_offsets\":[0,1]", "[2],\"data_offsets\":[1,3]"], 3), ([EMPTY; 2], 0)]
        {
            let twice = places.map(|place| format!("\"a\":{{\"dtype\":\"U8\",\"shape\":{place}}}"));
            let message = refusal(path, &file(&format!("{{{}}}", twice.join(",")), data));
            assert!(message.contains("two tensors are named a"), "{message}");
        }
    });
}

#[test]
fn fault_a_tensor_larger_than_memory_is_an_error() {
    assert!(*LIMIT > 0);
    with_path(|path| {
        let length = 1u64 << 28;
        let header = tensor(&format!("[{length}]"), &format!("[0,{length}]"));
        let sparse = |bytes: &[u8], length| {
            fs::write(path, bytes).unwrap();
            fs::File::options().write(true).open(path).unwrap().set_len(length).unwrap();
        };
        sparse(&file(&header, 0), 8 + header.len() as u64 + length);
        let mut file = TensorFile::open(path).unwrap();
        assert_eq!(file.entries()[0].bytes, length);
        let message = file.read("a").unwrap_err().to_string();
        assert!(message.contains("untrusted.safetensors: "), "{message}");
        assert!(message.contains("memory"), "{message}");
        // A header of the maximum length, which the file does contain.
        sparse(&100_000_000u64.to_le_bytes(), length);
        let message = TensorFile::open(path).unwrap_err().to_string();
        assert!(message.contains("memory"), "{message}");
    });
}

/// A change of a header: one byte replaced, inserted or removed.
#[derive(Debug, Clone)]
enum Change {
    Replace(prop::sample::Index, u8),
    Insert(prop::sample::Index, u8),
    Remove(prop::sample::Index),
}

fn change() -> impl Strategy<Value = Change> {
    // Half of the bytes are meaningful in a header.
    let byte =
        || prop_oneof![any::<u8>(), prop::sample::select(b"0123456789,:[]{}\"\\-FBIU_ ".to_vec())];
    prop_oneof![
        4 => (any::<prop::sample::Index>(), byte())
            .prop_map(|(at, byte)| Change::Replace(at, byte)),
        1 => (any::<prop::sample::Index>(), byte()).prop_map(|(at, byte)| Change::Insert(at, byte)),
        1 => any::<prop::sample::Index>().prop_map(Change::Remove),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        rng_seed: RngSeed::Fixed(13),
        failure_persistence: None,
        ..ProptestConfig::with_cases(4000)
    })]

    #[test]
    fn property_a_changed_header_is_refused_or_consistent(
        changes in prop::collection::vec(change(), 1..4),
        keep_length in any::<bool>(),
    ) {
        let end = header_end(&SMALL);
        let mut header = SMALL[8..end].to_vec();
        for change in changes {
            match change {
                Change::Replace(at, byte) => { let at = at.index(header.len()); header[at] = byte; }
                Change::Insert(at, byte) => header.insert(at.index(header.len()), byte),
                Change::Remove(at) => { header.remove(at.index(header.len())); }
            }
        }
        let length = if keep_length { end - 8 } else { header.len() } as u64;
        let bytes = [&length.to_le_bytes()[..], &header, &SMALL[end..]].concat();
        let _ = with_path(|path| examine(path, &bytes));
    }
}
