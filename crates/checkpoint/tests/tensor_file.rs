//! Writing and reading one safetensors file: `oracle_` compares with bytes made by hand and other
//! readers of the format, `fault_` has what is refused. Damaged files are in `untrusted.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{collections::BTreeMap, fs, path::PathBuf};

use gpipe_checkpoint::tensor_file::{TensorFile, encode, write};
use tch::{Device, Kind, Tensor};

const KINDS: [(Kind, &str, usize); 10] = [
    (Kind::Double, "F64", 8),
    (Kind::Float, "F32", 4),
    (Kind::Half, "F16", 2),
    (Kind::BFloat16, "BF16", 2),
    (Kind::Int64, "I64", 8),
    (Kind::Int, "I32", 4),
    (Kind::Int16, "I16", 2),
    (Kind::Int8, "I8", 1),
    (Kind::Uint8, "U8", 1),
    (Kind::Bool, "BOOL", 1),
];

type Named = Vec<(String, Tensor)>;

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

/// Expects equal bits, including NaN and the sign of zero.
fn assert_same(a: &Tensor, b: &Tensor, name: &str) {
    assert_eq!((a.kind(), a.size()), (b.kind(), b.size()), "{name}");
    assert_eq!(bytes(a), bytes(b), "{name}");
}

/// Every dtype in every shape, with varied bytes: NaN of many payloads, infinities, subnormals.
fn all_sorts() -> Named {
    let mut all = Vec::new();
    for (kind, dtype, width) in KINDS {
        for shape in [vec![], vec![0], vec![3, 0, 2], vec![2, 3], vec![256, 3, 1]] {
            let count = shape.iter().product::<i64>() as usize * width;
            let mut state = 0x9e37_79b9u32;
            let mut bytes: Vec<u8> = (0..count)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .collect();
            // Set the first value's high bytes to an infinity or a NaN, with its sign.
            bytes
                .iter_mut()
                .take(width)
                .skip(width.saturating_sub(2))
                .for_each(|byte| *byte = 0xff);
            if kind == Kind::Bool {
                bytes.iter_mut().for_each(|byte| *byte &= 1);
            }
            let tensor = Tensor::from_data_size(&bytes, &shape, kind);
            all.push((format!("{dtype}{shape:?}"), tensor));
        }
    }
    all
}

fn none() -> BTreeMap<String, String> {
    BTreeMap::new()
}

fn many() -> BTreeMap<String, String> {
    (0..20).map(|n| (format!("key{n}"), format!("value \"{n}\"\n"))).collect()
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("t.safetensors")
    }

    fn open(&self, bytes: &[u8]) -> Result<TensorFile, String> {
        fs::write(self.path(), bytes).unwrap();
        TensorFile::open(&self.path()).map_err(|error| error.to_string())
    }

    fn files(&self) -> usize {
        fs::read_dir(self.0.path()).unwrap().count()
    }
}

/// A file with this header and data.
fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

#[test]
fn oracle_each_dtype_and_shape_comes_back_to_the_bit() {
    let folder = Folder::new();
    let tensors = all_sorts();
    write(&folder.path(), &tensors, &many()).unwrap();
    let mut file = TensorFile::open(&folder.path()).unwrap();
    assert_eq!(file.metadata(), &many());
    let mut names: Vec<_> = tensors.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(file.entries().iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), names);
    for (name, tensor) in &tensors {
        let entry = file.entries().iter().find(|entry| entry.name == *name).unwrap();
        assert_eq!(entry.kind, Some(tensor.kind()));
        assert_eq!(entry.shape, tensor.size());
        assert_eq!(entry.bytes, bytes(tensor).len() as u64);
        assert!(name.starts_with(&format!("{}[", entry.dtype)));
        assert_same(&file.read(name).unwrap(), tensor, name);
    }
}

#[test]
fn oracle_a_file_made_by_hand_is_read() {
    let header = concat!(
        "{ \"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[3,11]},\n",
        "\"__metadata__\":{\"made\":\"by hand\"},",
        "\"é.\\u0061\":{\"shape\":[1,3],\"data_offsets\":[0,3],\"dtype\":\"U8\"}}   "
    );
    let data = [7, 8, 9, 0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0];
    let folder = Folder::new();
    let mut file = folder.open(&file(header, &data)).unwrap();
    assert_eq!(file.metadata(), &BTreeMap::from([("made".to_owned(), "by hand".to_owned())]));
    assert_same(&file.read("b").unwrap(), &Tensor::from_slice(&[1.0f32, -2.5]), "b");
    assert_same(&file.read("é.a").unwrap(), &Tensor::from_slice(&[7u8, 8, 9]).view([1, 3]), "é.a");
    assert!(file.read("c").unwrap_err().to_string().contains("no tensor c"));
}

#[test]
fn oracle_a_file_without_tensors_is_one() {
    let folder = Folder::new();
    for (metadata, header) in
        [(none(), "{}      "), (many(), ""), (BTreeMap::from([("a".into(), "b".into())]), "")]
    {
        let bytes = encode(&[], &metadata).unwrap();
        if !header.is_empty() {
            assert_eq!(bytes, file(header, &[]));
        }
        let file = folder.open(&bytes).unwrap();
        assert!(file.entries().is_empty());
        assert_eq!(file.metadata(), &metadata);
    }
    assert!(folder.open(&file("{\"__metadata__\":null}", &[])).unwrap().metadata().is_empty());
}

#[test]
fn oracle_the_written_bytes_are_the_crates_own() {
    let tensors = all_sorts();
    let raw: Vec<_> = tensors.iter().map(|(name, tensor)| (name, bytes(tensor), tensor)).collect();
    let views = raw.iter().map(|(name, bytes, tensor)| {
        let dtype = KINDS.iter().find(|(kind, ..)| *kind == tensor.kind()).unwrap().1;
        let dtype = serde_json::from_value(dtype.into()).unwrap();
        let shape = tensor.size().iter().map(|&axis| axis as usize).collect();
        (name, safetensors::tensor::TensorView::new(dtype, shape, bytes).unwrap())
    });
    assert_eq!(encode(&tensors, &none()).unwrap(), safetensors::serialize(views, None).unwrap());
}

#[test]
fn oracle_tch_reads_what_we_write_and_we_what_tch_writes() {
    let folder = Folder::new();
    // tch cannot read empty tensors.
    let mut tensors = all_sorts();
    tensors.retain(|(_, tensor)| tensor.numel() > 0);
    write(&folder.path(), &tensors, &many()).unwrap();
    let read: BTreeMap<_, _> =
        Tensor::read_safetensors(folder.path()).unwrap().into_iter().collect();
    assert_eq!(read.len(), tensors.len());
    for (name, tensor) in &tensors {
        assert_same(&read[name], tensor, name);
    }
    Tensor::write_safetensors(&tensors, folder.path()).unwrap();
    let mut file = TensorFile::open(&folder.path()).unwrap();
    assert_eq!(file.entries().len(), tensors.len());
    for (name, tensor) in &tensors {
        assert_same(&file.read(name).unwrap(), tensor, name);
    }
}

#[test]
fn oracle_the_bytes_depend_on_content_alone() {
    let folder = Folder::new();
    let mut tensors = all_sorts();
    let expected = encode(&tensors, &many()).unwrap();
    write(&folder.path(), &tensors, &many()).unwrap();
    let written = fs::read(folder.path()).unwrap();
    for _ in 0..3 {
        tensors.rotate_left(7);
        assert!(encode(&tensors, &many()).unwrap() == expected);
        write(&folder.path(), &tensors, &many()).unwrap();
        assert!(fs::read(folder.path()).unwrap() == written);
    }
    assert_eq!(folder.files(), 1, "nothing is left aside");
}

#[test]
fn oracle_strides_and_gradients_do_not_matter() {
    let folder = Folder::new();
    let base = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([4, 6]);
    let tensors: Named = vec![
        ("transposed".into(), base.tr()),
        ("sliced".into(), base.slice(1, 1, 6, 2)),
        ("expanded".into(), base.select(0, 1).expand([3, 6], false)),
        ("trained".into(), (&base + 1).set_requires_grad(true)),
    ];
    write(&folder.path(), &tensors, &none()).unwrap();
    let mut file = TensorFile::open(&folder.path()).unwrap();
    for (name, tensor) in &tensors {
        let read = file.read(name).unwrap();
        assert!(!read.requires_grad());
        assert_same(&read, &tensor.detach().contiguous(), name);
    }
}

#[test]
fn oracle_a_tensor_is_read_without_the_others() {
    let folder = Folder::new();
    let tensors: Named = ["a", "b"]
        .map(|name| (name.to_owned(), Tensor::ones([64], (Kind::Float, Device::Cpu))))
        .into();
    write(&folder.path(), &tensors, &none()).unwrap();
    let mut file = TensorFile::open(&folder.path()).unwrap();
    let length = fs::metadata(folder.path()).unwrap().len();
    fs::File::options().write(true).open(folder.path()).unwrap().set_len(length - 1).unwrap();
    assert_same(&file.read("a").unwrap(), &tensors[0].1, "a");
    let message = file.read("b").unwrap_err().to_string();
    assert!(message.contains("t.safetensors"), "{message}");
}

#[test]
fn fault_a_dtype_that_cannot_be_read_is_listed() {
    let header = concat!(
        "{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[2],\"data_offsets\":[0,2]},",
        "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}"
    );
    let folder = Folder::new();
    let mut file = folder.open(&file(header, &[1, 2, 3])).unwrap();
    assert_eq!((file.entries()[0].dtype.as_str(), file.entries()[0].kind), ("F8_E4M3", None));
    assert_eq!(file.entries()[0].bytes, 2);
    let message = file.read("a").unwrap_err().to_string();
    assert!(message.contains("t.safetensors: a is F8_E4M3"), "{message}");
    assert_same(&file.read("b").unwrap(), &Tensor::from_slice(&[3u8]), "b");
}

#[test]
fn fault_a_bool_is_zero_or_one() {
    let header = "{\"a\":{\"dtype\":\"BOOL\",\"shape\":[2],\"data_offsets\":[0,2]}}";
    let message = Folder::new().open(&file(header, &[1, 2])).unwrap().read("a").unwrap_err();
    assert!(message.to_string().contains("a: a BOOL is 0 or 1, not 2"), "{message}");
}

#[test]
fn fault_what_has_no_place_in_a_file_is_not_written() {
    let folder = Folder::new();
    let one = |name: &str, kind| (name.to_owned(), Tensor::ones([2], (kind, Device::Cpu)));
    let good = vec![one("a", Kind::Float)];
    write(&folder.path(), &good, &none()).unwrap();
    let before = fs::read(folder.path()).unwrap();
    let long = "x".repeat(1025);
    for (bad, reason) in [
        (vec![one("a", Kind::Float), one("a", Kind::Int)], "two tensors are named a"),
        (vec![one("a", Kind::ComplexFloat)], "a: ComplexFloat cannot be written"),
        (vec![("a".to_owned(), Tensor::new())], "a: it is undefined"),
        (vec![one("__metadata__", Kind::Float)], "cannot be named __metadata__"),
        (vec![one(&long, Kind::Float)], "name has 1025 bytes"),
        (vec![("a".to_owned(), Tensor::ones(vec![1; 65], (Kind::Float, Device::Cpu)))], "65 axes"),
        (vec![("a".to_owned(), good[0].1.to_sparse_sparse_dim(1))], "a: "),
    ] {
        let message = write(&folder.path(), &bad, &none()).unwrap_err().to_string();
        assert!(message.contains("t.safetensors"), "{message}");
        assert!(message.contains(reason), "{message}");
        assert!(encode(&bad, &none()).unwrap_err().to_string().contains(reason));
        assert_eq!(fs::read(folder.path()).unwrap(), before, "the old file stays");
        assert_eq!(folder.files(), 1, "nothing is left aside");
    }
}

#[test]
fn fault_what_is_in_the_way_is_named_and_nothing_is_left_aside() {
    let folder = Folder::new();
    fs::create_dir(folder.path()).unwrap();
    for message in [
        write(&folder.path(), &[], &none()).unwrap_err().to_string(),
        TensorFile::open(&folder.path()).unwrap_err().to_string(),
    ] {
        assert!(message.contains("t.safetensors"), "{message}");
    }
    assert_eq!(folder.files(), 1);
    let device = TensorFile::open("/dev/zero".as_ref()).unwrap_err().to_string();
    assert_eq!(device, "/dev/zero: it is not a regular file");
    // A temporary file left by a crash is harmless.
    let path = folder.0.path().join("other");
    fs::write(folder.0.path().join("other.writing"), "half a file, and longer than the new one")
        .unwrap();
    write(&path, &[], &none()).unwrap();
    assert!(TensorFile::open(&path).unwrap().entries().is_empty());
    assert_eq!(folder.files(), 3);
    // A name too long for a suffix.
    let long = folder.0.path().join("x".repeat(250));
    write(&long, &[], &none()).unwrap();
    assert!(TensorFile::open(&long).unwrap().entries().is_empty());
}

/// A small file with digests, and its tensors.
fn with_digests(folder: &Folder) -> (Vec<u8>, Named) {
    let tensors: Named = vec![
        ("a.weight".into(), Tensor::from_slice(&[1.0f32, -2.0, 3.5, 0.0]).view([2, 2])),
        ("b".into(), Tensor::from_slice(&[1i64, 2])),
        ("empty".into(), Tensor::zeros([3, 0], (Kind::Half, Device::Cpu))),
    ];
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    write(&folder.path(), &tensors, &metadata).unwrap();
    (fs::read(folder.path()).unwrap(), tensors)
}

/// Reads all tensors and the metadata in `bytes`.
fn read_all(bytes: &[u8]) -> Result<(Named, BTreeMap<String, String>), String> {
    let path = PathBuf::from("t.safetensors");
    let said = |error: gpipe_checkpoint::tensor_file::FileError| error.to_string();
    let mut file = TensorFile::from_bytes(bytes.to_vec(), &path).map_err(said)?;
    file.verify().map_err(said)?;
    let names: Vec<_> = file.entries().iter().map(|entry| entry.name.clone()).collect();
    let read = names.into_iter().map(|name| Ok((name.clone(), file.read(&name).map_err(said)?)));
    let tensors = read.collect::<Result<Vec<_>, String>>()?;
    Ok((tensors, file.metadata().clone()))
}

/// Regression: without digests, `inspect`, `eval` and `export` do not notice a flipped bit, not
/// even in a name, dtype or shape.
#[test]
fn regression_each_changed_byte_of_a_file_with_digests_is_an_error() {
    let folder = Folder::new();
    let (whole, tensors) = with_digests(&folder);
    let (read, metadata) = read_all(&whole).unwrap();
    assert_eq!(metadata, BTreeMap::from([("format".to_owned(), "pt".to_owned())]));
    for ((name, value), (expected, tensor)) in read.iter().zip(&tensors) {
        assert_eq!(name, expected);
        assert_same(value, tensor, name);
    }
    for at in 0..whole.len() {
        // Flip each bit alone, and all of them.
        for change in [1, 2, 4, 8, 16, 32, 64, 128, 255] {
            let mut bytes = whole.clone();
            bytes[at] ^= change;
            match read_all(&bytes) {
                Err(message) => assert!(message.contains("t.safetensors: "), "{message}"),
                // A harmless change: the offset of the empty tensor.
                Ok((found, kept)) => {
                    assert_eq!(kept, metadata, "byte {at}");
                    for ((name, value), (expected, tensor)) in found.iter().zip(&tensors) {
                        assert_eq!(name, expected, "byte {at}");
                        assert_same(value, tensor, name);
                    }
                    assert_eq!(found.len(), tensors.len(), "byte {at}");
                }
            }
        }
    }
}

#[test]
fn fault_a_file_whose_digests_do_not_belong_to_it_is_refused() {
    let folder = Folder::new();
    let (whole, _) = with_digests(&folder);
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let (header, data) = whole[8..].split_at(length);
    let header = std::str::from_utf8(header).unwrap().trim_end();
    let refuses = |header: &str, data: &[u8], part: &str| {
        let message = read_all(&file(header, data)).unwrap_err();
        assert!(message.contains(part) && message.contains("another program"), "{message}");
    };
    // Digests of another file, as left by a program that copies metadata to other tensors.
    let mut other = data.to_vec();
    other[0] ^= 1;
    refuses(header, &other, "b: its SHA-256 is ");
    refuses(&header.replace("a.weight\":{", "c.weight\":{"), data, "its header's SHA-256 is ");
    refuses(&header.replace("[2,2]", "[4,1]"), data, "its header's SHA-256 is ");
    refuses(&header.replace("\"F32\"", "\"I32\""), data, "its header's SHA-256 is ");
    refuses(&header.replace("\"pt\"", "\"pd\""), data, "its header's SHA-256 is ");
    refuses(&header.replace("gpipe.sha256\"", "gpipe.sha257\""), data, "no 'gpipe.sha256'");
    // Without any digests it is a file as any other program writes it.
    let mut fields: serde_json::Value = serde_json::from_str(header).unwrap();
    let metadata = fields["__metadata__"].as_object_mut().unwrap();
    metadata.retain(|key, _| !key.starts_with("gpipe.sha256"));
    assert_eq!(metadata.len(), 1);
    let bare = file(&fields.to_string(), &other);
    assert!(read_all(&bare).is_ok());
    let bare = TensorFile::from_bytes(bare, &folder.path()).unwrap();
    assert!(!bare.has_digests() && bare.entries().iter().all(|entry| entry.sha256.is_none()));
}

#[test]
fn oracle_digests_are_what_the_format_says() {
    use sha2::{Digest, Sha256};
    let folder = Folder::new();
    with_digests(&folder);
    let file = TensorFile::open(&folder.path()).unwrap();
    let number = |n: u64| n.to_le_bytes();
    let mut hash = Sha256::new();
    hash.update(number(1));
    hash.update("b");
    hash.update(number(3));
    hash.update("I64");
    hash.update(number(1));
    hash.update(number(2));
    hash.update(1i64.to_le_bytes());
    hash.update(2i64.to_le_bytes());
    let expected: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let entry = file.entries().iter().find(|entry| entry.name == "b").unwrap();
    assert_eq!(entry.sha256.as_ref(), Some(&expected));
    assert!(file.has_digests());
}

/// Regression: a header must not start with blanks, and its padding must be spaces only, as the
/// format requires.
#[test]
fn regression_a_header_is_an_object_with_blanks_behind_it_alone() {
    let one = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
    let folder = Folder::new();
    for (header, data) in [
        (" ".repeat(64), 0),
        (" ".repeat(64), 4),
        (format!("  {one}"), 1),
        (format!("\n{one}"), 1),
        (format!("{one}\n"), 1),
        (format!("{one} \t"), 1),
        ("{".to_owned() + &" ".repeat(63), 0),
    ] {
        let message = folder.open(&file(&header, &vec![0; data])).unwrap_err();
        assert!(message.contains("it is not a safetensors file"), "{header:?}: {message}");
    }
    assert!(folder.open(&file(&format!("{one}    "), &[1])).is_ok());
}

/// A file whose digests a Python program made according to the description in `digest.rs`.
#[test]
fn oracle_digests_that_another_program_made_are_right() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/safetensors/digests");
    let mut file = TensorFile::open(path.as_ref()).unwrap();
    assert!(file.has_digests() && file.entries().len() == 2);
    file.verify().unwrap();
    assert_same(&file.read("b").unwrap(), &Tensor::from_slice(&[1i64, 2]), "b");
    assert_eq!(file.metadata()["names"], "layer.parameter");
}
