//! Bounds that messages of errors name. Everything that is read or made has one.

/// The deepest queue.
pub const LOADER_DEPTH_MAX: usize = 64;

/// No batch has more numbers than this: 2^28, which is 1 GiB.
pub const IMAGE_BATCH_VALUES_MAX: usize = 1 << 28;

/// No more threads than this decode images.
pub const IMAGE_THREADS_MAX: usize = 64;

/// No sentence of a set has more tokens than this: 2^16.
pub const PAIR_TOKENS_MAX: usize = 1 << 16;

/// No corpus has more pairs than this, before duplicates are taken out.
pub const PAIRS_MAX: usize = 1 << 27;

/// No code of a language is longer than this.
pub const CODE_BYTES_MAX: usize = 32;

/// The greatest vocabulary: 2^20 tokens, several times what large models use.
pub const VOCABULARY_MAX: usize = 1 << 20;

/// No batch has more tokens than this: 2^28, which is 4 GiB of inputs and targets.
pub const BATCH_TOKENS_MAX: usize = 1 << 28;
