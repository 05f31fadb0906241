//! The readers, one after the other.

use std::{borrow::Cow, fs, path::Path};

use gpipe::profile::Profile;
use gpipe_checkpoint::{
    Checkpoint,
    manifest::{self, Manifest},
    names::NameMap,
    tensor_file::TensorFile,
};
use gpipe_core::{
    Action,
    schedule::{CustomSchedule, custom::print},
};
use gpipe_data::{Tokenizer, parallel::ParallelError};
use gpipe_observe::step_file::StepFile;

/// What errors call the input.
const ORIGIN: &str = "fuzzed";

fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// An error must say something, and not everything: it is shown to a user. (Where it is about bytes
/// alone, who read them adds their file or their sender.)
fn said(error: impl std::fmt::Display) -> String {
    let error = error.to_string();
    assert!(!error.is_empty() && error.len() < 1 << 20, "an error of {} bytes", error.len());
    error
}

/// An error must also name the file that it is about.
fn named(error: impl std::fmt::Display, file: &Path) {
    let error = said(error);
    assert!(error.contains(&*file.to_string_lossy()), "{file:?} is not in: {error}");
}

/// A file for readers that want one. Each process has its own.
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

/// What is written of a configuration that was read must read as the same.
pub(crate) fn config(bytes: &[u8]) {
    configured(&text(bytes), &[]);
}

/// The first line is a configuration's kind of model, the others are overrides.
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

/// A line that is an action prints as it was; a file that is a schedule does, too.
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

/// A plan that is accepted can be predicted.
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

/// With its checksum, and without: what no accident makes, someone may.
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

/// What opens covers the file, and each tensor reads or is refused.
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

/// A tokenizer that is accepted is lossless.
pub(crate) fn tokenizer(bytes: &[u8]) {
    match Tokenizer::from_json(&text(bytes), Path::new(ORIGIN)) {
        Ok(tokenizer) => {
            let sample = "Pipelines of 4 stages: π <|end|>\r\n";
            let tokens = tokenizer.encode(sample).expect("any text can be encoded");
            assert_eq!(tokenizer.decode(&tokens).expect("they are its tokens"), sample);
        }
        Err(error) => named(error, Path::new(ORIGIN)),
    }
}

pub(crate) fn pairs(bytes: &[u8]) {
    with_file(bytes, |path| {
        if let Err(error) = gpipe_data::fuzzing::pairs(path) {
            // Too few pairs are the sources' matter, not a file's.
            if !matches!(error, gpipe_data::Error::Parallel(ParallelError::NoPairs { .. })) {
                named(error, path);
            }
        }
    });
}

pub(crate) fn image(bytes: &[u8]) {
    match gpipe_data::fuzzing::image(bytes) {
        Ok(image) => assert_eq!(image.pixels.len(), 3 * image.height * image.width),
        // A run survives it, and its library's authors want to know.
        Err(error) => {
            assert!(!error.contains("panicked"), "{error}");
            said(error);
        }
    }
}

/// The header of a message between processes.
pub(crate) fn header(bytes: &[u8]) {
    let read = gpipe_distributed::fuzzing::header(bytes).expect("memory is counted");
    assert_eq!(read.beyond, None, "bytes that were asked for beyond what the message may have");
    if let Err(error) = read.result {
        said(error);
    }
}

/// What processes tell of themselves when they meet.
pub(crate) fn facts(bytes: &[u8]) {
    assert!(gpipe_distributed::fuzzing::facts(bytes), "facts read as others once they are written");
}

/// What a process tells the others of its part of a step.
pub(crate) fn share(bytes: &[u8]) {
    if let Err(error) = gpipe::fuzzing::share(bytes) {
        said(error);
    }
}
