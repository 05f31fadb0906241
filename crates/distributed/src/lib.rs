//! Pipelines in several processes and on several hosts, over c10d, the engine on which PyTorch
//! scales out.
//!
//! - [`cluster`]: [`Cluster`], the processes, joined; what a pipeline is given by
//!   `PipelineBuilder::processes`
//! - `shared`: what all parts of a cluster have in common
//! - [`member`]: [`Member`], a process of one of several replicas of a pipeline
//! - `gathers`: bytes of each process, given to all
//! - `link`: the two ends of a link between processes
//! - `wire`: messages as headers and contiguous tensors
//! - `watch`: signs of life, and the one failure that all of them know
//! - [`joining`]: how they meet, and what can go wrong; `clock`: the clock that they share
//! - `bounded`: calls of c10d that may wait for ever, with a deadline
//! - `interrupt`: waits that end when the run has failed
//! - `facts`: what processes must have alike
//!
//! What does not live here: what runs where (that is the pipeline's), and how processes are started
//! (the command's).

mod bounded;
mod clock;
pub mod cluster;
mod facts;
#[doc(hidden)]
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gathers;
mod interrupt;
pub mod joining;
mod link;
pub mod member;
mod shared;
mod watch;
mod wire;

pub use cluster::Cluster;
pub use joining::{JoinError, Meeting, Store, tell_of_end};
pub use member::Member;
