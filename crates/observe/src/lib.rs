//! Observing a run: the files that a training run writes, and pictures made of them.
//!
//! - [`metrics`]: the records of a run, and `metrics.jsonl`, which holds them
//! - [`tensorboard`]: the same records as event files
//! - [`plot`]: the records of one or several runs as one SVG page
//! - [`step_file`]: one step of a run as a file
//! - [`picture`]: a step as one SVG or HTML page
//! - [`trace`]: a step for chrome://tracing and Perfetto
//!
//! This crate knows no tensors and no pipeline, and does not print. The training program fills
//! plain records. `gpipe_core::draw` draws a timeline as text.
//!
//! ```
//! use gpipe_observe::{metrics::{Record, Run, Step}, plot};
//! let steps = (1..=100).map(|step| Step { step, loss: 9.0 / step as f64, ..Step::default() });
//! let run = Run::new("small", steps.map(Record::Step).collect());
//! assert!(plot::svg(&[run]).unwrap().starts_with("<svg"));
//! ```

mod append;
pub mod metrics;
pub mod picture;
pub mod plot;
pub mod step_file;
pub mod tensorboard;
pub mod trace;
