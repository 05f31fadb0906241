//! The short version of `cargo xtask fuzz`: runs every kept input, including all earlier findings,
//! and seeded mutations of them. No input may panic or exceed a memory limit. All targets share an
//! allocator that aborts beyond the limit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::{alloc::System, fs, path::PathBuf, sync::LazyLock};

use cap::Cap;
use gpipe_core::splitmix::Stream;
use gpipe_fuzz::TARGETS;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Limit beyond the memory in use at the start: twice the output of the largest image that a small
/// file can request.
static LIMIT: LazyLock<()> =
    LazyLock::new(|| ALLOCATOR.set_limit(ALLOCATOR.allocated() + (1 << 30)).unwrap());

/// Number of mutated inputs per target.
const CHANGED: usize = 6000;

/// The kept inputs of a target, by name.
fn kept(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut all: Vec<_> = entries
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(path).unwrap())
        })
        .collect();
    all.sort();
    all
}

/// Numbers and delimiters that readers treat specially.
const PIECES: [&[u8]; 14] = [
    b"-1",
    b"0",
    b"18446744073709551615",
    b"9223372036854775807",
    b"4294967295",
    b"1e308",
    b"null",
    b"\"",
    b"[",
    b"{",
    b"\n",
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\x7f\xff\xff\xff\xff\xff\xff\xff",
];

/// Mutates `bytes` one to four times. Some mutations insert parts of `other`.
fn changed(mut bytes: Vec<u8>, other: &[u8], random: &mut Stream) -> Vec<u8> {
    for _ in 0..1 + random.below(4) {
        if bytes.is_empty() {
            bytes.push(random.below(256) as u8);
        }
        let at = random.below(bytes.len());
        let end = (at + 1 + random.below(24)).min(bytes.len());
        match random.below(7) {
            0 => bytes.truncate(at),
            1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes[at] = random.below(256) as u8,
            3 => drop(bytes.drain(at..end)),
            4 => drop(bytes.splice(at..end, PIECES[random.below(PIECES.len())].iter().copied())),
            5 => drop(bytes.splice(at..at, bytes[at..end].to_vec())),
            _ if other.is_empty() => {}
            _ => {
                let from = random.below(other.len());
                let to = (from + 1 + random.below(64)).min(other.len());
                drop(bytes.splice(at..end, other[from..to].iter().copied()));
            }
        }
    }
    bytes
}

#[test]
fn property_no_input_panics_or_asks_for_much_memory() {
    LazyLock::force(&LIMIT);
    for target in TARGETS {
        let kept = kept(target.name);
        assert!(!kept.is_empty(), "{} has no kept inputs", target.name);
        for (name, bytes) in &kept {
            println!("{} {name}", target.name);
            (target.run)(bytes);
        }
        println!("{} changed", target.name);
        let mut random = Stream::new(0xf022);
        for _ in 0..CHANGED {
            let [one, other] = [0, 1].map(|_| &kept[random.below(kept.len())].1);
            (target.run)(&changed(one.clone(), other, &mut random));
        }
    }
}

/// Checks that a kept binary input equals the one generated today. `INSTA_UPDATE=always` rewrites
/// it.
fn assert_kept(target: &str, name: &str, bytes: &[u8]) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    if std::env::var("INSTA_UPDATE").is_ok_and(|update| update == "always") {
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(name), bytes).unwrap();
    }
    let found = fs::read(folder.join(name)).unwrap_or_default();
    assert!(found == bytes, "{target}/{name} is not that of today");
}

#[test]
fn golden_kept_inputs_are_those_of_today() {
    for (number, header) in gpipe_distributed::fuzzing::headers().unwrap().iter().enumerate() {
        assert_kept("header", &format!("message-{number}"), header);
    }
    let pixels: Vec<u8> = (0..16 * 12 * 3).map(|byte| (byte * 7 % 256) as u8).collect();
    let image = image::RgbImage::from_raw(16, 12, pixels).unwrap();
    let mut jpeg = std::io::Cursor::new(Vec::new());
    image.write_to(&mut jpeg, image::ImageFormat::Jpeg).unwrap();
    assert_kept("image", "rgb.jpg", &jpeg.into_inner());
}
