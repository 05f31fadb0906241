//! State on disk, by layer: checkpoints that a run goes on from at any K, and weights for and from
//! elsewhere.
//!
//! A checkpoint is a folder: for each layer a safetensors file of its parameters, one of what the
//! optimizer keeps for them and one of their moving averages, and a manifest with everything else
//! and the SHA-256 of every file. It is written aside, synced and renamed, so that what has a
//! checkpoint's name is complete.
//!
//! ```no_run
//! # use gpipe::Pipeline;
//! # use gpipe_checkpoint::{Checkpoints, CheckpointError, RunInfo, Settings, folder};
//! # use std::path::Path;
//! # fn example(pipeline: &mut Pipeline) -> Result<(), CheckpointError> {
//! let mut checkpoints = Checkpoints::open(Path::new("run/checkpoints"), Settings::default())?;
//! checkpoints.save(pipeline, RunInfo::default())?; // copies, and writes while training goes on
//! checkpoints.wait()?;
//!
//! if let Some(checkpoint) = folder::newest(checkpoints.folder())?.found {
//!     checkpoint.restore(pipeline)?; // at any number of stages; the next step is the same to the bit
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - [`Checkpoints`]: saving; [`folder`]: names, search, what is kept; [`Checkpoint`]: one of them
//! - [`manifest`]: `manifest.json`; [`files`]: every change to the file system
//! - [`tensor_file`]: one safetensors file, read and written tensor by tensor
//! - [`weights`]: a run's weights in such a file
//! - [`names`]: from a foreign state dict's names to `layer.parameter`
//! - `multi_process`: saving by several processes, each the state of its own stages
//! - [`fit`]: how a file's tensors fit a model, and reading those that do

mod checkpoint;
mod error;
pub mod files;
pub mod fit;
pub mod folder;
mod identity;
mod layer_files;
pub mod manifest;
mod multi_process;
pub mod names;
mod remedy;
mod save;
mod settings;
pub mod tensor_file;
pub mod weights;

pub use checkpoint::Checkpoint;
pub use error::CheckpointError;
pub use identity::FolderIdentity;
pub use save::{Checkpoints, RunInfo, Saved};
pub use settings::Settings;
