//! Pipelines in several processes and on several hosts, over c10d, PyTorch's engine for distributed
//! training.
//!
//! - [`cluster`]: [`Cluster`], the joined processes; `PipelineBuilder::processes` takes it
//! - `shared`: what all parts of a cluster share
//! - [`member`]: [`Member`], a process in one of several replicas of a pipeline
//! - `gathers`: all-gather of bytes, for whatever is not a value on a link
//! - `link`: the two ends of a link between processes
//! - `gpus`: values from GPU to GPU, over NCCL
//! - `tags`: the tags of all messages
//! - `wire`: messages of links as headers and contiguous tensors
//! - `watch`: signs of life, and the first failure, which all processes agree on
//! - [`environment`]: the variables that torchrun and `gpipe launch` set
//! - [`threads`]: replicas as threads of one process
//! - [`joining`]: how processes meet, and what can go wrong; `clock`: their shared clock
//! - `bounded`: a deadline for c10d calls that may block forever
//! - `interrupt`: waits that end when the run has failed
//! - `facts`: values that must be equal in all processes
//!
//! What runs where, and how processes are started, is not decided here: the pipeline and the
//! command do that.

mod bounded;
mod clock;
pub mod cluster;
pub mod environment;
mod facts;
#[doc(hidden)]
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gathers;
mod gpus;
mod interrupt;
pub mod joining;
mod link;
pub mod member;
mod shared;
mod tags;
pub mod threads;
mod watch;
mod wire;

pub use cluster::Cluster;
pub use joining::{JoinError, Meeting, Store, tell_of_end};
pub use member::Member;
