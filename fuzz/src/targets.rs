//! The readers, as functions of bytes.

use std::{borrow::Cow, fs, path::Path};

use gpipe::profile::Profile;
use gpipe_checkpoint::{
    Checkpoint,
    manifest::{self, Manifest},
    model_folder,
    names::NameMap,
    tensor_file::{self, TensorFile},
};
use gpipe_core::{
    Action,
    schedule::{CustomSchedule, csv, custom::print},
};
use gpipe_data::{Tokenizer, parallel::ParallelError};
use gpipe_models::huggingface;
use gpipe_observe::step_file::StepFile;

/// The name of the input in errors.
const ORIGIN: &str = "fuzzed";

fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// Checks that an error has a message, and one short enough to show to a user. Errors about bytes
/// alone need not name a source, because the reader's caller adds the file or the sender.
fn said(error: impl std::fmt::Display) -> String {
    let error = error.to_string();
    assert!(!error.is_empty() && error.len() < 1 << 20, "an error of {} bytes", error.len());
    error
}

/// Checks that an error also names the file that it is about.
fn named(error: impl std::fmt::Display, file: &Path) {
    let error = said(error);
    assert!(error.contains(&*file.to_string_lossy()), "{file:?} is not in: {error}");
}

/// Writes a file for readers that need one. Each process uses a separate folder.
fn with_file(bytes: &[u8], read: impl FnOnce(&Path)) {
    with_file_named("file", bytes, read);
}

fn with_file_named(name: &str, bytes: &[u8], read: impl FnOnce(&Path)) {
    let folder = std::env::temp_dir().join(format!("gpipe-fuzz-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("the folder for temporary files takes one");
    let path = folder.join(name);
    fs::write(&path, bytes).expect("the folder takes a file");
    read(&path);
    fs::remove_dir_all(&folder).expect("it is there");
}

/// A configuration that was read must be the same when written and read again.
pub(crate) fn config(bytes: &[u8]) {
    configured(&text(bytes), &[]);
}

/// Each line is an override of a configuration.
pub(crate) fn override_(bytes: &[u8]) {
    let overrides: Vec<String> = text(bytes).lines().map(str::to_owned).collect();
    configured("", &overrides);
}

fn configured(text: &str, overrides: &[String]) {
    match gpipe_cli::fuzzing::config(text, overrides) {
        Ok([written, again]) => assert_eq!(written, again),
        Err(error) => {
            let error = said(error);
            assert!(names_a_setting(&error), "no file, flag or key: {error}");
        }
    }
}

/// Whether an error begins with the file, the flag or the key that it is about.
fn names_a_setting(error: &str) -> bool {
    let key = error.split_whitespace().next().unwrap_or_default();
    let is_key =
        key.chars().all(|c| c.is_ascii_lowercase() || "._".contains(c)) && key.contains('.');
    is_key || error.starts_with(ORIGIN) || error.starts_with("--set")
}

/// A word that parses as an action must print as it was. A file that parses as a schedule must be
/// the same when printed and parsed again.
pub(crate) fn schedule(bytes: &[u8]) {
    let text = text(bytes);
    for word in text.split_whitespace().take(64) {
        match word.parse::<Action>() {
            Ok(action) => assert_eq!(action.to_string(), word),
            Err(error) => assert!(said(&error).contains(word), "{word} is not in: {error}"),
        }
    }
    match CustomSchedule::parse(ORIGIN, &text) {
        Ok(listed) => {
            let again =
                CustomSchedule::parse(ORIGIN, &print(listed.lists())).expect("it was accepted");
            assert_eq!(again.lists(), listed.lists());
        }
        Err(error) => {
            assert!(1 <= error.line && error.line <= text.lines().count().max(1), "{error}");
            named(error, Path::new(ORIGIN));
        }
    }
}

/// PyTorch's format: a file that parses must be the same when written and parsed again.
pub(crate) fn schedule_csv(bytes: &[u8]) {
    let text = text(bytes);
    match CustomSchedule::parse_csv(ORIGIN, &text) {
        Ok(listed) => {
            let Ok(written) = csv::print(listed.lists()) else { return };
            let again = CustomSchedule::parse_csv(ORIGIN, &written).expect("it was accepted");
            assert_eq!(again.lists(), listed.lists());
            assert!(again.omitted().is_empty());
        }
        Err(error) => {
            assert!(1 <= error.line && error.line <= text.lines().count().max(1), "{error}");
            named(error, Path::new(ORIGIN));
        }
    }
}

/// An accepted plan must be predictable.
pub(crate) fn plan(bytes: &[u8]) {
    with_file(bytes, |path| {
        if let Err(error) = gpipe_cli::fuzzing::plan(path) {
            named(error, path);
        }
    });
}

pub(crate) fn profile(bytes: &[u8]) {
    match Profile::from_json(&text(bytes), ORIGIN) {
        Ok(profile) => {
            let written = profile.to_json().expect("it was read");
            let again = Profile::from_json(&written, ORIGIN).expect("it was written");
            assert_eq!(again.to_json().expect("it was read"), written);
        }
        Err(error) => named(error, Path::new(ORIGIN)),
    }
}

pub(crate) fn step(bytes: &[u8]) {
    with_file(bytes, |path| {
        if let Err(error) = StepFile::read(path) {
            named(error, path);
        }
    });
}

pub(crate) fn metrics(bytes: &[u8]) {
    with_file(bytes, |path| {
        if let Err(error) = gpipe_observe::metrics::read(path) {
            named(error, path);
        }
    });
}

/// Reads the bytes with and without a valid checksum, because a malicious author can compute one.
pub(crate) fn manifest(bytes: &[u8]) {
    with_file_named(manifest::NAME, bytes, |path| {
        if let Err(error) = Checkpoint::open(path.parent().expect("it is in a folder")) {
            named(error, path);
        }
    });
    match Manifest::parse(bytes) {
        Ok(manifest) => {
            for file in manifest.all_files() {
                let path = Path::new(&file.path);
                let inside =
                    path.components().all(|part| matches!(part, std::path::Component::Normal(_)));
                assert!(inside, "{path:?} leads out of the folder");
            }
            if let Ok(written) = manifest.encode() {
                Manifest::decode(&written).expect("it was written");
            }
        }
        Err(error) => drop(said(error)),
    }
}

/// An opened file must cover its bytes, and each of its tensors must be read or rejected.
pub(crate) fn safetensors(bytes: &[u8]) {
    let mut file = match TensorFile::from_bytes(bytes.to_vec(), Path::new(ORIGIN)) {
        Ok(file) => file,
        Err(error) => return named(error, Path::new(ORIGIN)),
    };
    let entries = file.entries().to_vec();
    let total: u64 = entries.iter().map(|entry| entry.bytes).sum();
    assert!(total <= bytes.len() as u64);
    if let Err(error) = file.verify() {
        named(error, Path::new(ORIGIN));
    }
    for entry in entries {
        match file.read(&entry.name) {
            Ok(tensor) => {
                assert_eq!((Some(tensor.kind()), tensor.size()), (entry.kind, entry.shape))
            }
            Err(error) => named(error, Path::new(ORIGIN)),
        }
    }
}

pub(crate) fn names(bytes: &[u8]) {
    if let Err(error) = NameMap::parse(&text(bytes), ORIGIN) {
        named(error, Path::new(ORIGIN));
    }
}

/// An accepted tokenizer of gpipe must be lossless. Those of other programs are read by a library,
/// whose panics end a fuzzer even where they are caught: this target keeps to what gpipe reads
/// itself.
pub(crate) fn tokenizer(bytes: &[u8]) {
    let text = text(bytes);
    let end = serde_json::from_str(&text).ok().and_then(|root: serde_json::Value| {
        Some(root.get("model")?.get("vocab")?.get("<|end|>")? == 0)
    });
    if end != Some(true) {
        return;
    }
    match Tokenizer::from_json(&text, Path::new(ORIGIN)) {
        Ok(tokenizer) if tokenizer.is_general() => {}
        Ok(tokenizer) => {
            let sample = "Pipelines of 4 stages: π <|end|>\r\n";
            let tokens = tokenizer.encode(sample).expect("any text can be encoded");
            assert_eq!(tokenizer.decode(&tokens).expect("they are its tokens"), sample);
        }
        Err(error) => named(error, Path::new(ORIGIN)),
    }
}

/// A `config.json`: a network is built of what is accepted, and a written one reads as the same.
pub(crate) fn model_config(bytes: &[u8]) {
    let read = match huggingface::config(&text(bytes)) {
        Ok(read) => read,
        Err(error) => return named(error, Path::new("config.json")),
    };
    match read.network.build() {
        Ok(layers) => assert!(!layers.is_empty()),
        Err(error) => drop(said(error)),
    }
    if let Ok(text) = huggingface::written(&read.network, 0, "float32") {
        let again = huggingface::config(&text).expect("it was written");
        assert_eq!(again.network, read.network);
    }
}

/// The list of a folder's shards, beside one of them.
pub(crate) fn shards(bytes: &[u8]) {
    with_file_named(model_folder::INDEX, bytes, |path| {
        let folder = path.parent().expect("it is in a folder");
        let one = [("a".to_owned(), tch::Tensor::from(1_i64))];
        let shard = folder.join("model-00001-of-00002.safetensors");
        tensor_file::write(&shard, &one, &[].into()).expect("the folder takes a file");
        if let Err(error) = model_folder::open(folder) {
            named(error, folder);
        }
    });
}

/// A model's recommended settings of generation.
pub(crate) fn generation(bytes: &[u8]) {
    if let Err(error) = gpipe_cli::fuzzing::generation(bytes) {
        let error = said(error);
        assert!(
            error.starts_with("generation_config.json: ") || error.starts_with("--"),
            "{error}"
        );
    }
}

pub(crate) fn pairs(bytes: &[u8]) {
    with_file(bytes, |path| {
        if let Err(error) = gpipe_data::fuzzing::pairs(path) {
            // Too few pairs are an error of the sources, not of one file.
            if !matches!(error, gpipe_data::Error::Parallel(ParallelError::NoPairs { .. })) {
                named(error, path);
            }
        }
    });
}

pub(crate) fn lines(bytes: &[u8]) {
    with_file(bytes, |path| {
        if let Err(error) = gpipe_data::fuzzing::lines(path) {
            named(error, path);
        }
    });
}

pub(crate) fn chat_template(bytes: &[u8]) {
    if let Err(error) = gpipe_data::fuzzing::chat_template(&text(bytes)) {
        assert!(said(error).starts_with("chat template: "));
    }
}

/// Appends the SHA-256 of the bytes, so that the reader accepts the hash and parses the content.
pub(crate) fn kept_samples(bytes: &[u8]) {
    use sha2::{Digest, Sha256};
    let hash = Sha256::digest(bytes);
    with_file(&[bytes, &hash[..]].concat(), |path| {
        gpipe_data::fuzzing::kept_samples(path);
    });
}

pub(crate) fn image(bytes: &[u8]) {
    match gpipe_data::fuzzing::image(bytes) {
        Ok(image) => assert_eq!(image.pixels.len(), 3 * image.height * image.width),
        // A run survives a panic in the decoder, but the library's authors want to know.
        Err(error) => {
            assert!(!error.contains("panicked"), "{error}");
            said(error);
        }
    }
}

/// Reads the header of a message between processes.
pub(crate) fn header(bytes: &[u8]) {
    let read = gpipe_distributed::fuzzing::header(bytes).expect("memory is counted");
    assert_eq!(read.beyond, None, "bytes that were asked for beyond what the message may have");
    if let Err(error) = read.result {
        said(error);
    }
}

/// Reads the facts that processes exchange when they meet.
pub(crate) fn facts(bytes: &[u8]) {
    assert!(gpipe_distributed::fuzzing::facts(bytes), "facts read as others once they are written");
}

/// Reads a process's report on its part of a step.
pub(crate) fn share(bytes: &[u8]) {
    if let Err(error) = gpipe::fuzzing::share(bytes) {
        said(error);
    }
}
