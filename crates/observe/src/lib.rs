//! Seeing a run: what a training run leaves behind, and the pictures made of it.
//!
//! - [`metrics`]: the records of a run, and `metrics.jsonl`, which holds them
//! - [`tensorboard`]: the same records as event files
//! - [`plot`]: the records of one or several runs as one SVG page
//! - [`step_file`]: what a run leaves of one step
//! - [`picture`]: a step as one SVG or HTML page
//! - [`trace`]: the same for chrome://tracing and Perfetto
//!
//! Not here: tensors, the pipeline, printing. Who trains fills plain records. Drawings of a
//! timeline as text are in `gpipe_core::draw`.
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
