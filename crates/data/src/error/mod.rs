//! The errors of this crate: what went wrong, where, and what to do about it.

mod pairs;
mod parallel;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{bounds, omissions::Omissions};

pub use self::{pairs::PairError, parallel::ParallelError};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error from the `tokenizers` crate or a caller's function.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why text or images could not be turned into batches. Every message ends in a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file system operation failed.
    #[error("cannot {action} `{}`: {source}; check the path and its permissions", path.display())]
    Io {
        /// The operation: "read", "list" or "write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// A path named by the user does not exist.
    #[error("`{}` does not exist; correct the path or leave it out", path.display())]
    MissingPath {
        /// The path as it was named.
        path: PathBuf,
    },

    /// A path named by the user is a socket, a device or another unbounded file.
    #[error("`{}` is neither a regular file nor a folder; name files of text", path.display())]
    NotAFile {
        /// The path as it was named.
        path: PathBuf,
    },

    /// The lock file was not written by Cargo.
    #[error("`{}` is not a usable Cargo.lock: {reason}; run `cargo generate-lockfile` to write it \
        anew", path.display())]
    LockFile {
        /// The lock file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// Too few crates of the lock file have sources on disk.
    #[error(
        "{usable} of the {locked} registry crates in `{}` have Rust sources under `{}`, and 2 are \
        needed (one to train \
         on, one to validate on); run `cargo fetch` beside the lock file, or check the folder",
        lock.display(), registry.display()
    )]
    NoSources {
        /// The lock file.
        lock: PathBuf,
        /// The folder that was searched.
        registry: PathBuf,
        /// Number of crates that the lock file takes from a registry.
        locked: usize,
        /// Number of those crates with usable sources on disk.
        usable: usize,
    },

    /// A file is not UTF-8 text.
    #[error(
        "`{}` is not UTF-8: invalid byte at offset {offset}; convert it (for example with `iconv \
        -t UTF-8`) or leave \
         it out", path.display()
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first invalid byte in the file, from 0.
        offset: usize,
    },

    /// A file is larger than the limit that protects memory.
    #[error(
        "`{}` has {bytes} bytes and the limit for such a file is {most}; name another, or split it",
        path.display()
    )]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// Size of the file.
        bytes: u64,
        /// The limit.
        most: u64,
    },

    /// A corpus of text exceeds a limit, which protects memory: the path being read, and the limit.
    #[error("`{}` goes beyond {}, a corpus's limit; name a part of it", .0.display(), .1)]
    TooMuchText(PathBuf, String),

    /// A file of JSON records would be read as plain text.
    #[error(
        "`{}` is JSON, and would be read as plain text, with braces and field names; train on \
        JSONL samples with --data, extract the text (for example with `jq -r .text`), or accept \
        JSON with data.json = \"text\" (\"skip\" skips the JSON files in folders)",
        path.display()
    )]
    Json {
        /// The file.
        path: PathBuf,
    },

    /// The named paths hold no usable text.
    #[error(
        "there is no text in {}{}; name files or folders with UTF-8 text",
        list(.paths),
        left_out.in_brackets()
    )]
    Empty {
        /// The paths named.
        paths: Vec<PathBuf>,
        /// What was left out.
        left_out: Omissions,
    },

    /// One side of the split has no text.
    #[error(
        "there are {train_bytes} bytes of text to train on and {validation_bytes} to validate on, \
        and both sides need some; name more text, or raise data.train_bytes, \
        data.validation_bytes or data.crate_bytes"
    )]
    NoText {
        /// Bytes of training text, after the limits.
        train_bytes: u64,
        /// Bytes of validation text, after the limits.
        validation_bytes: u64,
    },

    /// A limit is 0, which leaves no text.
    #[error("data.{limit} = 0 leaves no text; raise it, or leave it out")]
    ZeroLimit {
        /// Name of the limit in a configuration.
        limit: &'static str,
    },

    /// The vocabulary size is out of range.
    #[error(
        "model.vocabulary = {asked}: use {least} (256 bytes and the special tokens) to {}",
        bounds::VOCABULARY_MAX
    )]
    Vocabulary {
        /// The size requested.
        asked: usize,
        /// The smallest size with the same special tokens.
        least: usize,
    },

    /// A special token could be mistaken for text or for another special token.
    #[error("the special token `{special}` {reason}; name it otherwise")]
    SpecialToken {
        /// The text of the token.
        special: String,
        /// What is wrong with it.
        reason: String,
    },

    /// The `tokenizers` crate failed.
    #[error("cannot {action}: {source}; the tokenizer is damaged: bring it again")]
    Tokenizer {
        /// The operation.
        action: &'static str,
        /// The error of the `tokenizers` crate.
        source: BoxError,
    },

    /// A tokenizer file is damaged or of another kind.
    #[error(
        "`{}` cannot be used as a tokenizer: {reason}; bring the model's own tokenizer.json, or \
        name another one",
        path.display()
    )]
    TokenizerFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A line of a JSONL file is invalid.
    #[error(
        "{path}: line {line}: {reason}; correct the line, or skip invalid lines with \
        data.on_bad_line = \"skip\""
    )]
    BadLine {
        /// The file.
        path: PathBuf,
        /// The line's number, from 1.
        line: u64,
        /// What is wrong.
        reason: String,
    },

    /// A line has messages, but there is no chat template to render them.
    #[error(
        "{}: line {line} has messages, but the model has no chat template: set \
        data.chat_template, or use prompt and completion instead of messages",
        path.display()
    )]
    NoTemplate {
        /// The file.
        path: PathBuf,
        /// The line's number, from 1.
        line: u64,
    },

    /// A JSONL file has too many tokens.
    #[error(
        "{}: the file has more than {} tokens: split it into several files",
        path.display(),
        bounds::SAMPLE_TOKENS_MAX
    )]
    TooManyTokens {
        /// The file.
        path: PathBuf,
    },

    /// There is no sample to train on, or none to validate on.
    #[error(
        "there are no samples: training and validation each need a sample with a token in the \
        loss within its first data.sequence tokens"
    )]
    NoSamples,

    /// The weight of a source is not positive, or too small beside the other weights.
    #[error(
        "data.sources has the weight {weight}: use positive weights, each at least a thousandth \
        of their sum"
    )]
    SourceWeight {
        /// The weight.
        weight: f64,
    },

    /// A token is outside the vocabulary.
    #[error(
        "token {token} is outside of the vocabulary of {vocabulary} tokens; decode with the \
        tokenizer that encoded"
    )]
    UnknownToken {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },

    /// There is too little text for one window.
    #[error(
        "there are {tokens} tokens and a sample needs {needed}; name more text, lower \
        data.sequence, or raise train.validation_tokens"
    )]
    TooFewTokens {
        /// Number of tokens available.
        tokens: usize,
        /// Number of tokens that a window needs.
        needed: usize,
    },

    /// A batch has no samples, no tokens or too many tokens.
    #[error(
        "train.mini_batch = {mini_batch}, data.sequence = {sequence}: use 1 to {} tokens in a \
        mini-batch",
        bounds::BATCH_TOKENS_MAX
    )]
    BatchShape {
        /// Samples per mini-batch.
        mini_batch: usize,
        /// Tokens per sample.
        sequence: usize,
    },

    /// Pairs of sentences could not be encoded or put into batches.
    #[error(transparent)]
    Pairs(#[from] PairError),

    /// A loader's queue depth is out of range.
    #[error("a loader of depth {depth} is out of range; use 1 to {}", bounds::LOADER_DEPTH_MAX)]
    LoaderDepth {
        /// Requested number of batches in the queue.
        depth: usize,
    },

    /// The system could not start a loader's thread.
    #[error("cannot start a thread that makes batches: {source}; raise the limit on threads")]
    LoaderThread {
        /// The system's error.
        source: io::Error,
    },

    /// The function that a loader calls returned an error.
    #[error("cannot make the batch of step {}: {source}", step + 1)]
    Loader {
        /// The step, from 0.
        step: u64,
        /// The function's error, which has the remedy.
        source: BoxError,
    },

    /// The function that a loader calls panicked.
    #[error(
        "the thread that makes batches broke off at step {}: {reason}; this is a bug: report it",
        step + 1
    )]
    LoaderPanicked {
        /// The step, from 0.
        step: u64,
        /// The panic's message.
        reason: String,
    },

    /// A batch was not ready before the timeout.
    #[error(
        "waited {waited:?} for the batch of step {}, which is not made yet; see what holds up \
        the thread `gpipe-loader` (a slow disk?), or raise the timeout (pipeline.timeout_s, or \
        LoaderSettings::timeout)",
        step + 1
    )]
    LoaderLate {
        /// The step, from 0.
        step: u64,
        /// The timeout.
        waited: Duration,
    },

    /// An image file cannot be used.
    #[error("cannot decode the image `{}`: {reason}; replace the file, remove it, or (in one \
        process) set images.on_unreadable = \"skip\"", path.display())]
    Image {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A folder of images is not laid out by class.
    #[error(
        "`{}` is not a folder of images by class (FOLDER/CLASS/IMAGE.jpg): {reason}", path.display()
    )]
    ImageFolder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },

    /// A split leaves no image on one of its sides.
    #[error(
        "data.validation_share = {share} leaves {train} images to train on and {validation} to \
        validate on; use a share between 0 and 1 that leaves both sides some"
    )]
    ImageShare {
        /// The share for validation.
        share: f64,
        /// Number of images to train on.
        train: usize,
        /// Number of images to validate on.
        validation: usize,
    },

    /// A folder or file is not in CIFAR's binary format.
    #[error(
        "`{}` is not CIFAR in its binary version: {reason}; see \
        https://www.cs.toronto.edu/~kriz/cifar.html for the \
         format and for the archive to unpack", path.display()
    )]
    Cifar {
        /// The folder or file.
        path: PathBuf,
        /// What is missing or wrong.
        reason: String,
    },

    /// An image index is out of range.
    #[error("there is no image {index} in a set of {images} images; ask for one from 0")]
    NoSuchImage {
        /// The index.
        index: usize,
        /// Number of images in the set.
        images: usize,
    },

    /// A set of images is empty.
    #[error("there are no images to make batches of; name a set that has some")]
    NoImages,

    /// A field of a [`Transform`](crate::images::Transform) is out of range.
    #[error("images.{field} = {reason}")]
    Transform {
        /// The field.
        field: &'static str,
        /// Its value, and what to use instead.
        reason: String,
    },

    /// The length of an image's pixels or of its output buffer does not match its sides.
    #[error(
        "an image of {height} x {width} pixels has {bytes} bytes and {out} numbers of output at \
        size {size}; give it \
         height * width * 3 bytes, at least 3, and 3 * size * size numbers"
    )]
    ImageShape {
        /// Rows.
        height: usize,
        /// Pixels of a row.
        width: usize,
        /// Length of the pixels, in bytes.
        bytes: usize,
        /// Length of the output buffer, in values.
        out: usize,
        /// Rows and columns of the output.
        size: usize,
    },

    /// A batch has no images or too many values.
    #[error(
        "train.mini_batch = {mini_batch}, images.size = {size}: use at least 1 image and at most \
        {} numbers (3 for each pixel) in a mini-batch",
        bounds::IMAGE_BATCH_VALUES_MAX
    )]
    ImageBatchShape {
        /// Images per mini-batch.
        mini_batch: usize,
        /// Rows and columns of each.
        size: usize,
    },

    /// The number of threads that decode images is out of range.
    #[error("images.threads = {threads}: use 1 to {}", bounds::IMAGE_THREADS_MAX)]
    ImageThreads {
        /// The number requested.
        threads: usize,
    },

    /// The system could not start a thread to decode images.
    #[error(
        "cannot start a thread that decodes images: {source}; lower images.threads, or raise the \
        limit on threads"
    )]
    ImageThread {
        /// The system's error.
        source: io::Error,
    },

    /// An [`ImageSet`](crate::images::ImageSet) panicked.
    #[error("a thread that reads images broke off: {reason}; this is a bug: report it")]
    ImageThreadPanicked {
        /// The panic's message.
        reason: String,
    },

    /// Too many images in a row are unreadable, so the cause is probably elsewhere.
    #[error(
        "{tried} images in a row cannot be read, from `{name}` on; the last: {last}. Check that \
        the folder is complete"
    )]
    NothingReadable {
        /// Number of images tried.
        tried: usize,
        /// The first image tried.
        name: String,
        /// Why the last one could not be read.
        last: String,
    },

    /// Parallel text cannot be used.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
}

impl Error {
    /// For `map_err`: builds an [`Error::Io`] with the operation and the path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { action, path: path.to_path_buf(), source }
    }

    /// For `map_err`: builds an [`Error::Tokenizer`] with the operation.
    pub(crate) fn tokenizer(action: &'static str) -> impl FnOnce(BoxError) -> Error {
        move |source| Error::Tokenizer { action, source }
    }
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
