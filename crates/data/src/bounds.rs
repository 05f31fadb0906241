//! Limits that error messages name. Everything that is read or built has a limit.

/// Maximum number of bytes of a corpus of text, before a part is split off for validation: 64 GiB.
/// It is held in memory.
pub const TEXT_BYTES_MAX: u64 = 64 << 30;

/// Maximum number of files and folders in one folder of text.
pub const TEXT_ENTRIES_MAX: usize = 1 << 24;

/// Maximum depth of a loader's queue.
pub const LOADER_DEPTH_MAX: usize = 64;

/// Maximum number of values in an image batch: 2^28, which is 1 GiB.
pub const IMAGE_BATCH_VALUES_MAX: usize = 1 << 28;

/// Maximum number of threads that decode images.
pub const IMAGE_THREADS_MAX: usize = 64;

/// Maximum number of tokens in a sentence of a set: 2^16.
pub const PAIR_TOKENS_MAX: usize = 1 << 16;

/// Maximum number of pairs in a corpus, before duplicates are removed.
pub const PAIRS_MAX: usize = 1 << 27;

/// Maximum length of a language code, in bytes.
pub const CODE_BYTES_MAX: usize = 32;

/// Maximum vocabulary size: 2^20 tokens, several times what large models use.
pub const VOCABULARY_MAX: usize = 1 << 20;

/// Maximum number of tokens in a batch: 2^28, which is 4 GiB of inputs and targets.
pub const BATCH_TOKENS_MAX: usize = 1 << 28;

/// Maximum number of tokens in a file of samples: 2^31, which is 8 GiB.
pub const SAMPLE_TOKENS_MAX: usize = 1 << 31;
