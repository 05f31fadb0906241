//! Pipelines in several processes and on several hosts, over c10d, the engine on which PyTorch scales out.
//!
//! - [`cluster`]: [`Cluster`], the processes, joined; what a pipeline is given by `PipelineBuilder::processes`
//! - `link`: the two ends of a link between processes
//! - `wire`: messages as headers and contiguous tensors
//! - `watch`: signs of life, and the one failure that all of them know
//! - `interrupt`: waits that end when the run has failed
//! - `facts`: what processes must have alike
//!
//! What does not live here: what runs where (that is the pipeline's), and how processes are started (the command's).

pub mod cluster;
mod facts;
mod interrupt;
mod link;
mod watch;
mod wire;

pub use cluster::{Cluster, JoinError, Meeting, Store};
