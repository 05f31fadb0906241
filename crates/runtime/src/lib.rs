//! Executes a lowered schedule: one worker thread per device, bounded links, deadlines, and one
//! error.
//!
//! ```text
//!   driver (pool)  --command-->  worker 0   runs device 0's list, action by action,
//!        |                          |       on its StageExecutors
//!        |                          | link (bounded, poisonable)
//!        |         --command-->  worker 1   ...
//!        +--- watches every worker's pulse; the first failure stops everyone
//! ```
//!
//! - [`stage`]: [`stage::StageExecutor`], the only seam; tensors are behind it
//! - [`link`]: the queues between stages
//! - [`worker`]: interprets actions; it knows no schedule's name
//! - [`peers`]: the seam to the pool's other processes; the transport is behind it
//! - `carrier`: threads that move messages on links that cross processes
//! - [`pool`]: spawns the workers, runs programs on them, watches
//! - [`failure`]: the first error wins and ends every wait
//! - [`report`]: a worker's results for a step
//! - [`pulse`]: signs of life; every deadline counts from the last one
//! - `sync`: the locks that links and failures use
//! - [`clock`]: real, or virtual for tests
//! - `testing` (a feature): a mock stage with integer arithmetic, and fault injection
//!
//! Tensors, and any decision about what to run, do not live here.

mod carrier;
pub mod clock;
pub mod failure;
pub mod link;
mod mailbox;
pub mod peers;
pub mod pool;
pub mod pulse;
pub mod report;
pub mod stage;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
pub mod worker;

pub use failure::{Failure, StepError};
pub use peers::{PeerError, Peers};
pub use pool::{Errands, Ran, Settings, WorkerPool};
pub use stage::{Keep, Payload, StageExecutor, Verdict, Vote};
pub use worker::panic_message;
