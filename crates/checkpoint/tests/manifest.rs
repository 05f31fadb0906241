//! `manifest.json`: its text, checksum and numbers, and hostile manifests with valid checksums.
//!
//! Every field of a hostile manifest is untrusted. Reading it ends in an error or equal content,
//! never in a panic, a file elsewhere, or memory beyond a small multiple of the manifest. All tests
//! share an allocator that grants 64 MiB beyond the initial use and aborts beyond that.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{
    alloc::System,
    cell::{Cell, RefCell},
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use cap::Cap;
use common::{Flat, bits, flat, info, model, names, newest, path, save, sealed, trained};
use gpipe::Pipeline;
use gpipe_checkpoint::{
    Checkpoint, Checkpoints, RunInfo, Settings, folder,
    manifest::{BYTES_MAX, Best, Manifest, sha256},
};
use proptest::{
    prelude::*,
    sample::Index,
    test_runner::{RngSeed, TestRunner},
};
use serde_json::{Value, json};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

static LIMIT: LazyLock<usize> = LazyLock::new(|| {
    let limit = ALLOCATOR.allocated() + (64 << 20);
    ALLOCATOR.set_limit(limit).unwrap();
    limit
});

/// A checkpoint whose manifest is replaced, and pipelines to restore into.
struct Victim {
    folder: tempfile::TempDir,
    text: String,
    manifest: Manifest,
    values: HashMap<String, Vec<u64>>,
    pipeline: Pipeline,
    before: Flat,
    other: Checkpoint,
}

impl Victim {
    fn new() -> Self {
        assert!(*LIMIT > 0);
        let folder = tempfile::tempdir().unwrap();
        let mut other = trained(model(), 2, 1);
        let other = save(folder.path(), Settings::default(), &mut other, info(1));
        let mut pipeline = trained(model(), 2, 2);
        pipeline.set_learning_rate(0.1 + 0.2);
        let best = Some(Best { batches: 1, loss: 1.0 / 3.0 });
        let saved =
            save(folder.path(), Settings::default(), &mut pipeline, RunInfo { best, ..info(2) });
        fs::write(folder.path().join("outside"), "outside").unwrap();
        let checkpoint = Checkpoint::open(&saved.folder).unwrap();
        let values = checkpoint.parameters().unwrap().into_iter();
        let values = values.map(|(name, tensor)| (name, bits(&tensor))).collect();
        let other = Checkpoint::open(&other.folder).unwrap();
        other.restore(&mut pipeline).unwrap();
        let before = flat(&mut pipeline);
        let text = fs::read_to_string(saved.folder.join("manifest.json")).unwrap();
        let manifest = checkpoint.manifest().clone();
        Self { folder, text, manifest, values, pipeline, before, other }
    }

    fn file(&self) -> PathBuf {
        path(self.folder.path(), 2).join("manifest.json")
    }

    fn fields(&self) -> Value {
        let mut fields: Value = serde_json::from_str(&self.text).unwrap();
        fields.as_object_mut().unwrap().remove("checksum");
        fields
    }

    /// Performs every operation on a checkpoint with this manifest. Returns the first error, if
    /// any.
    fn examine(&mut self, bytes: &[u8]) -> Result<(), String> {
        fs::write(self.file(), bytes).unwrap();
        let text = |error: gpipe_checkpoint::CheckpointError| {
            let text = error.to_string();
            assert!(text.len() < 10_000, "{} bytes of message", text.len());
            assert!(text.contains("step-00000002"), "{text}");
            text
        };
        let found = Checkpoint::open(&path(self.folder.path(), 2)).map_err(text)?;
        let named: Vec<&str> = found.manifest().all_files().map(|file| &*file.path).collect();
        let inside = |name: &&str| Path::new(name).components().count() == 1 && *name != "..";
        assert!(named.iter().all(inside), "{named:?}");
        let verified = found.verify().map_err(text);
        let newest = folder::newest(self.folder.path()).unwrap().found.unwrap();
        assert_eq!(newest.folder() == found.folder(), verified.is_ok());
        for (name, tensor) in found.parameters().into_iter().flatten() {
            assert_eq!(self.values.get(&name), Some(&bits(&tensor)), "{name}");
        }
        let _ = found.averages();
        let _ = found.run_file("tokenizer.json");
        match found.restore(&mut self.pipeline).map_err(text) {
            Ok(()) => {
                verified.as_ref().expect("what does not verify is not restored");
                let now = self.pipeline.parameters().unwrap();
                let now: HashMap<_, _> = now.into_iter().map(|(n, t)| (n, bits(&t))).collect();
                assert_eq!(now, self.values);
                self.other.restore(&mut self.pipeline).unwrap();
            }
            Err(error) => {
                assert!(flat(&mut self.pipeline) == self.before, "changed, although: {error}");
                return Err(error);
            }
        }
        verified
    }

    /// Expects that a manifest with changed fields is refused.
    fn refuses(&mut self, change: impl FnOnce(&mut Value), part: &str) {
        let mut fields = self.fields();
        change(&mut fields);
        let text = serde_json::to_string(&fields).unwrap();
        let message = self.examine(&sealed(&text)).expect_err(part);
        assert!(message.contains(part), "'{part}' is not in: {message}");
    }
}

#[test]
fn golden_manifest() {
    let folder = tempfile::tempdir().unwrap();
    let mut pipeline = trained(common::tiny(), 2, 1);
    let mut info = info(1);
    info.best = Some(Best { batches: 1, loss: 0.1 + 0.2 });
    info.progress.data = "sha256:0123".into();
    let saved = save(folder.path(), Settings::default(), &mut pipeline, info);
    let text = fs::read_to_string(saved.folder.join("manifest.json")).unwrap();
    // The last bits of values may differ between processors, and the version changes over time.
    let without = |line: &str| {
        let found = ["checksum", "sha256", "written_by"].iter().find_map(|key| {
            line.split_once(&format!("\"{key}\": \"")).map(|(start, _)| (start, key))
        });
        match found {
            Some((start, key)) => {
                let comma = if line.ends_with(',') { "," } else { "" };
                format!("{start}\"{key}\": \"...\"{comma}")
            }
            None => line.to_owned(),
        }
    };
    let redacted = text.lines().map(without).collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!("manifest", redacted);
}

/// The checksum is as documented: `sed 's/"checksum": "[0-9a-f]*"/.../' | sha256sum`, with zeros.
#[test]
fn oracle_the_checksum_is_the_files_own_with_zeros_in_its_place() {
    let victim = Victim::new();
    let (start, rest) = victim.text.split_once("\"checksum\": \"").unwrap();
    let (digits, rest) = rest.split_at(64);
    assert_eq!(start, "{\n  ");
    let zeros = format!("{start}\"checksum\": \"{}{rest}", "0".repeat(64));
    assert_eq!(sha256(zeros.as_bytes()), digits);
    // `sha256` matches the standard (first example of FIPS 180-4).
    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(sha256(b"abc"), abc);
    // The tests' `sealed` produces what the writer does.
    let fields = serde_json::to_string_pretty(&victim.manifest).unwrap();
    assert_eq!(sealed(&fields), victim.text.as_bytes());
    assert_eq!(victim.manifest.encode().unwrap(), victim.text.as_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500,
        rng_seed: RngSeed::Fixed(26),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn property_numbers_are_read_back_to_the_bit(
        all in any::<[u64; 8]>(), small in any::<u32>(), has in any::<[bool; 3]>()
    ) {
        let finite = |bits: u64| Some(f64::from_bits(bits)).filter(|value| value.is_finite());
        let mut manifest = TEMPLATE.clone();
        let counters = &mut manifest.counters;
        (counters.step, counters.seed, counters.averaged, counters.good_steps) =
            (all[0], all[1], all[2], small);
        counters.learning_rate = finite(all[3]).filter(|_| has[0]);
        counters.loss_scale = finite(all[4]).filter(|_| has[1]);
        manifest.best =
            finite(all[5]).filter(|_| has[2]).map(|loss| Best { batches: all[6], loss });
        manifest.progress.batches = all[7];
        let found = Manifest::decode(&manifest.encode().unwrap()).unwrap();
        prop_assert_eq!(&found, &manifest);
        let bits = |m: &Manifest| {
            let floats = [m.counters.learning_rate, m.counters.loss_scale, m.best.map(|b| b.loss)];
            floats.map(|value| value.map(f64::to_bits))
        };
        prop_assert_eq!(bits(&found), bits(&manifest));
    }

    #[test]
    fn property_random_bytes_are_no_manifest(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Manifest::decode(&bytes).is_err());
        let text = String::from_utf8_lossy(&bytes);
        let sealed = sealed(&format!("{{{text}"));
        prop_assert!(Manifest::decode(&sealed).is_err());
    }
}

static TEMPLATE: LazyLock<Manifest> = LazyLock::new(|| Victim::new().manifest.clone());

/// Values that would harm a reader that trusts them.
fn hostile() -> Vec<Value> {
    let names =
        ["", ".", "..", "../outside", "../../outside", "/etc/passwd", "manifest.json", "a/b"];
    let names =
        names.iter().chain(&["tokenizer.json/", "./tokenizer.json", "nul\0", "enter", "\u{1b}[2J"]);
    let files = ["0000-enter.parameters.safetensors", "0004-leave.optimizer.safetensors"];
    let mut all: Vec<Value> = names.chain(&files).map(|name| json!(name)).collect();
    all.extend([json!(null), json!(true), json!(0), json!(1), json!(-1), json!(u64::MAX)]);
    all.extend([json!(i64::MIN), json!(i64::MAX), json!(1e308), json!(-0.0), json!(0.5)]);
    all.extend([json!([]), json!({}), json!([i64::MAX, i64::MAX]), json!([-1]), json!([4, 4])]);
    all.extend([json!("x".repeat(5000)), json!("parameters"), json!("run"), json!("float64")]);
    all
}

/// The value number `index` within `value`, in traversal order.
fn nth<'a>(value: &'a mut Value, index: &mut usize) -> Option<&'a mut Value> {
    if *index == 0 {
        return Some(value);
    }
    *index -= 1;
    match value {
        Value::Array(all) => all.iter_mut().find_map(|value| nth(value, index)),
        Value::Object(all) => all.values_mut().find_map(|value| nth(value, index)),
        _ => None,
    }
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(all) => all.iter().map(count).sum(),
        Value::Object(all) => all.values().map(count).sum(),
        _ => 0,
    }
}

/// Changes one value: replaces it, removes it, repeats it, or swaps it with its neighbour.
fn mutate(fields: &mut Value, place: Index, how: Index) {
    let hostile = hostile();
    let how = how.index(hostile.len() + 12);
    let places = count(fields);
    let chosen = nth(fields, &mut place.index(places)).unwrap();
    match (chosen, how) {
        (Value::Array(all), 0..4) => drop(all.pop()),
        (Value::Array(all), 4..8) => all.extend(all.last().cloned()),
        (Value::Array(all), 8..12) => all.reverse(),
        (Value::Object(all), 0..4) => {
            let key = all.keys().nth(how % all.len().max(1)).cloned();
            key.map(|key| all.remove(&key));
        }
        (Value::Object(all), 4..8) => drop(all.insert("more".into(), json!(1))),
        (Value::Number(number), 0..12) => *number = (how as u64).into(),
        (chosen, how) => *chosen = hostile[how % hostile.len()].clone(),
    }
}

#[test]
fn property_changed_fields_are_refused_or_change_no_content() {
    let config = ProptestConfig {
        cases: 800,
        rng_seed: RngSeed::Fixed(27),
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let victim = RefCell::new(Victim::new());
    let (accepted, refused) = (Cell::new(0), Cell::new(0));
    let changes = prop::collection::vec(any::<(Index, Index)>(), 1..3);
    TestRunner::new(config)
        .run(&changes, |changes| {
            let mut victim = victim.borrow_mut();
            let mut fields = victim.fields();
            changes.into_iter().for_each(|(place, how)| mutate(&mut fields, place, how));
            let text = serde_json::to_string_pretty(&fields).unwrap();
            let result = text.starts_with('{').then(|| victim.examine(&sealed(&text)));
            match result {
                Some(Ok(())) => accepted.set(accepted.get() + 1),
                Some(Err(_)) => refused.set(refused.get() + 1),
                None => {}
            }
            Ok(())
        })
        .unwrap();
    // Numbers and texts that only the run interprets may be anything.
    let (accepted, refused) = (accepted.get(), refused.get());
    assert!(accepted > 10 && refused > 200, "{accepted} accepted, {refused} refused");
}

#[test]
fn oracle_the_unchanged_fields_are_restored() {
    let mut victim = Victim::new();
    let text = victim.text.clone();
    assert_eq!(victim.examine(text.as_bytes()), Ok(()));
    let fields = serde_json::to_string(&victim.fields()).unwrap();
    assert_eq!(victim.examine(&sealed(&fields)), Ok(()), "in any order, without spaces");
}

#[test]
fn fault_paths_and_kinds_and_claims_are_refused() {
    let mut victim = Victim::new();
    let place = "/layers/0/files/0/path";
    let paths = ["", ".", "..", "../outside", "/etc/passwd", "manifest.json", "a/b", "a/", "./a"];
    for path in paths {
        victim
            .refuses(|all| *all.pointer_mut(place).unwrap() = json!(path), "is no name for a file");
        victim.refuses(|all| all["files"][0]["path"] = json!(path), "is no name for a file");
    }
    let outside =
        json!({"kind": "run", "path": "../../outside", "bytes": 7, "sha256": sha256(b"outside")});
    victim.refuses(|all| all["files"][0] = outside, "is no name for a file");
    let set = |place: &'static str, value: Value| {
        move |all: &mut Value| *all.pointer_mut(place).unwrap() = value
    };
    victim.refuses(set("/layers/0/files/0/bytes", json!(u64::MAX)), "18446744073709551615");
    victim.refuses(set("/files/0/bytes", json!(u64::MAX)), "18446744073709551615");
    victim.refuses(set("/files/0/bytes", json!(0)), "the manifest says 0");
    victim.refuses(set("/files/0/bytes", json!(-1)), "no manifest");
    victim.refuses(set("/files/0/kind", json!("parameters")), "is of no layer");
    victim.refuses(set("/layers/0/files/0/kind", json!("run")), "files of kind");
    victim.refuses(set("/layers/0/files/0/kind", json!("averages")), "files of kind");
    victim.refuses(
        set("/layers/0/parameters/0/shape", json!([i64::MAX, i64::MAX])),
        "enter.weight is",
    );
    victim.refuses(set("/layers/0/parameters/0/averaged", json!(false)), "does not name");
    victim.refuses(set("/layers/0/parameters/0/updates", json!(null)), "does not name");
    victim.refuses(set("/layers/0/parameters/0/optimizer/0", json!("m")), "its optimizer keeps");
    victim.refuses(set("/layers/1/name", json!("enter")), "the layer 'enter' twice");
    victim
        .refuses(set("/layers/0/name", json!("\u{1b}[2J")), "the model has no layer '\u{fffd}[2J'");
    victim.refuses(set("/counters/seed", json!(12)), "seed 12");
    victim.refuses(set("/format", json!(2)), "format 2, this version of gpipe reads 1");
    victim.refuses(set("/format", json!("2")), "no manifest");
    victim.refuses(|all| all["more"] = json!(1), "unknown field `more`");
    victim.refuses(|all| drop(all.as_object_mut().unwrap().remove("config")), "missing field");
    let twice = |all: &mut Value| {
        let file = all["files"][0].clone();
        all["files"].as_array_mut().unwrap().push(file);
    };
    victim.refuses(twice, "the file 'tokenizer.json' twice");
}

#[test]
fn fault_text_that_is_no_manifest_is_refused_without_taking_memory() {
    let mut victim = Victim::new();
    let text = victim.text.clone();
    let mut refuses = |bytes: &[u8], part: &str| {
        let message = victim.examine(bytes).expect_err(part);
        assert!(message.contains(part), "'{part}' is not in: {message}");
    };
    refuses(b"", "does not open with its checksum");
    refuses(b"{\n  \"checksum\": \"", "does not open with its checksum");
    refuses("{\n  \"checksum\": \"é".repeat(9).as_bytes(), "does not open with its checksum");
    refuses(&sealed("{")[..17 + 64], "damaged");
    let digits_alone = sha256(format!("{{\n  \"checksum\": \"{}", "0".repeat(64)).as_bytes());
    refuses(
        format!("{{\n  \"checksum\": \"{digits_alone}").as_bytes(),
        "nothing after its checksum",
    );
    refuses(&sealed("{}"), "no manifest");
    refuses(&sealed("{ \"format\": 1, \"format\": 1 }"), "duplicate field `format`");
    let many = 1 << 20;
    refuses(&sealed(&format!("{{\"format\": 1, \"more\": {}", "[".repeat(many))), "no manifest");
    refuses(
        &sealed(&format!("{{\"format\": 1, \"more\": [{}0]}}", "0,".repeat(many))),
        "no manifest",
    );
    refuses(&sealed(&format!("{{\"format\": 1, \"{}\": 0}}", "x".repeat(many))), "no manifest");
    // Endless shapes and layers take no more memory than a small multiple of their text.
    let fields = text.split_once("\",").unwrap().1;
    let shape = fields.replacen("\"shape\": [", &format!("\"shape\": [{}", "0,".repeat(many)), 1);
    refuses(&sealed(&format!("{{{}", shape.trim_end())), "enter.");
    let layer = "{\"name\": \"@\", \"parameters\": [], \"files\": []},";
    let layers: String = (0..50_000).map(|n| layer.replace('@', &n.to_string())).collect();
    let fields = fields.replacen("\"layers\": [", &format!("\"layers\": [{layers}"), 1);
    refuses(&sealed(&format!("{{{}", fields.trim_end())), "the model has no layer '0'");
    // A manifest above the size limit is not read at all.
    let file = fs::File::options().write(true).open(victim.file()).unwrap();
    file.set_len(1 << 40).unwrap();
    let message = Checkpoint::open(&path(victim.folder.path(), 2)).unwrap_err().to_string();
    assert!(message.contains(&format!("at most {BYTES_MAX} are read")), "{message}");
}

/// Regression: a manifest that could not be read back must not be saved. Such a checkpoint gets its
/// name and replaces the good ones before it, but cannot be opened.
#[test]
fn regression_what_could_not_be_read_back_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut pipeline = trained(model(), 1, 1);
    let settings = Settings { keep: 1, keep_best: true, ..Settings::default() };
    save(folder.path(), settings.clone(), &mut pipeline, info(1));
    let mut checkpoints = Checkpoints::open(folder.path(), settings).unwrap();
    let mut refuses = |pipeline: &mut Pipeline, info: RunInfo, part: &str| {
        checkpoints.save(pipeline, info).unwrap();
        let message = checkpoints.wait().unwrap_err().to_string();
        assert!(message.contains(part) && message.contains("step-00000002"), "{message}");
        assert_eq!(names(folder.path()), ["latest", "step-00000001"], "{part}");
        assert_eq!(newest(folder.path()), Some(1));
    };
    for (loss, part) in [(f64::NAN, "best loss is NaN"), (f64::INFINITY, "best loss is inf")] {
        let best = Some(Best { batches: 2, loss });
        refuses(&mut pipeline, RunInfo { best, ..info(2) }, part);
    }
    for name in ["../outside", "manifest.json", "", "/outside", "a/b"] {
        let mut info = info(2);
        info.files.push((name.into(), b"bytes".to_vec()));
        refuses(&mut pipeline, info, "is no name for a file");
    }
    for name in ["tokenizer.json", "0000-enter.parameters.safetensors"] {
        let mut info = info(2);
        info.files.push((name.into(), b"bytes".to_vec()));
        refuses(&mut pipeline, info, "something else has its name");
    }
    pipeline.set_learning_rate(f64::NAN);
    refuses(&mut pipeline, info(2), "learning rate is NaN");
}
