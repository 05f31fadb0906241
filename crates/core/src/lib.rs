//! The pure core of gpipe: everything about a pipeline that can be decided without running it.
//!
//! No threads, clocks, I/O, tensors or `unsafe` live here, so each part can be compared with brute
//! force. The path of a mini-batch through this crate:
//!
//! ```text
//! schedule  ->  remat  ->  lower  ->  Program  ->  validate  is it correct, can it deadlock?
//! (F and B)    (adds R)   (adds the rest)      ->  simulate  a timeline from costs, and the bubble
//!                                              ->  memory    the most that each stage holds
//!                                              ->  exchange  its order for links without a buffer
//!                                              ->  (gpipe-runtime executes this same list)
//! ```
//!
//! The inputs come from two modules: [`cost`] says what layers take and hold, and [`plan`] predicts
//! the step of a cut and searches for the best one:
//!
//! ```text
//! cost  ->  plan  ->  balance, M, schedule, re-materialization
//! ```
//!
//! ```
//! use gpipe_core::{
//!     lower::{Topology, lower},
//!     remat::Remat,
//!     schedule::Schedule,
//!     simulate::{Costs, simulate},
//! };
//! let compute = Schedule::OneFOneB.actions(4, 8);
//! let program = lower(&Remat::Never.apply(&compute), &Topology::chain(4), 8).unwrap();
//! let timeline = simulate(&program, &Costs::unit(4), 2).unwrap();
//! assert!((timeline.bubble() - 3.0 / 11.0).abs() < 1e-12); // (K-1)/(M+K-1)
//! ```

pub mod action;
pub mod cost;
pub mod draw;
pub mod exchange;
pub mod ids;
pub mod lower;
pub mod made;
pub mod memory;
pub mod partition;
pub mod plan;
mod recomputed;
pub mod remat;
pub mod report;
pub mod schedule;
pub mod shard;
pub mod simulate;
pub mod splitmix;
#[cfg(feature = "testing")]
pub mod testing;
pub mod topology;
pub mod units;
pub mod validate;

pub use action::{Action, Direction, Op, Transfer};
pub use ids::{DeviceId, EdgeId, LayerId, MicroBatch, StageId};
pub use units::{Bytes, Nanos};
