//! State on disk, by layer.
//!
//! So far: the weights of a finished run in one safetensors file, keyed `layer.parameter`. Checkpoints that
//! a run resumes from will live here too.
//!
//! - [`tensor_file`]: one safetensors file, read and written tensor by tensor
//! - [`weights`]: a run's weights in such a file
//! - [`names`]: from a foreign state dict's names to `layer.parameter`
//! - [`fit`]: how a file's tensors fit a model, and reading those that do

pub mod fit;
pub mod names;
pub mod tensor_file;
pub mod weights;
