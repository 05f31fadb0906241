//! State on disk, by layer.
//!
//! So far: the weights of a finished run in one safetensors file, keyed `layer.parameter`. Checkpoints that
//! a run resumes from will live here too.

pub mod weights;
