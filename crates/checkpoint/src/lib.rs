//! State on disk, by layer: checkpoints from which a run resumes at any K, and import and export of
//! weights.
//!
//! A checkpoint is a folder. Each layer has up to three safetensors files: its parameters, their
//! optimizer state and their moving averages. A manifest holds everything else and the SHA-256 of
//! every file. A checkpoint is written under a temporary name, synced and renamed, so a folder with
//! a checkpoint's name is complete.
//!
//! ```no_run
//! # use gpipe::Pipeline;
//! # use gpipe_checkpoint::{Checkpoints, CheckpointError, RunInfo, Settings, folder};
//! # use std::path::Path;
//! # fn example(pipeline: &mut Pipeline) -> Result<(), CheckpointError> {
//! let mut checkpoints = Checkpoints::open(Path::new("run/checkpoints"), Settings::default())?;
//! checkpoints.save(pipeline, RunInfo::default())?; // copies, then writes while training continues
//! checkpoints.wait()?;
//!
//! if let Some(checkpoint) = folder::newest(checkpoints.folder())?.found {
//!     checkpoint.restore(pipeline)?; // at any K; the next step is the same bit for bit
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - [`Checkpoints`]: saves; [`folder`]: names, search, pruning; [`Checkpoint`]: verifies, restores
//! - [`manifest`]: `manifest.json`; [`files`]: every change to the file system
//! - [`tensor_file`]: one safetensors file, read and written tensor by tensor; [`TensorSet`]:
//!   several that belong together
//! - [`model_folder`]: weights as Hugging Face's transformers writes them, in shards
//! - [`weights`]: a run's weights in one safetensors file
//! - [`names`]: maps a foreign state dict's names to `layer.parameter`
//! - `multi_process`: coordinates ranks, each of which saves the state of its stages
//! - [`fit`]: matches a file's tensors to a model and reads those that fit

mod checkpoint;
mod error;
pub mod files;
pub mod fit;
pub mod folder;
mod identity;
mod layer_files;
pub mod manifest;
pub mod model_folder;
mod multi_process;
pub mod names;
mod remedy;
mod save;
mod settings;
pub mod tensor_file;
mod tensor_set;
pub mod weights;

pub use checkpoint::Checkpoint;
pub use error::CheckpointError;
pub use identity::FolderIdentity;
pub use save::{Checkpoints, RunInfo, Saved};
pub use settings::Settings;
pub use tensor_set::TensorSet;
