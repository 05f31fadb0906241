//! A pipeline in several processes: what it asks of a transport, and how a run's results become those of all of them.
//!
//! Every process builds the same pipeline and makes the same calls in the same order. A stage is in one process; values
//! between stages of two processes go through the transport, which is c10d's in `gpipe-distributed`.
//!
//! - `pack`: a step's results as bytes
//! - [`dtype`]: dtypes as numbers; [`replicas`]: the seam to other replicas of the pipeline
//! - here: the seam to the transport, and the runtime's [`Peers`] on it

pub mod dtype;
mod pack;
pub mod replicas;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use gpipe_bridge::memory;
use gpipe_core::{Bytes, DeviceId, Half, Nanos, StageId, lower::Program};
use gpipe_runtime::{Crew, Peers, peers::Share};
pub use gpipe_runtime::{
    Elsewhere, Verdict, Vote,
    link::Message,
    peers::{Alarm, Crossing, Inbound, Outbound, Parcel, Run},
    pulse::Pulses,
};
use pack::{pack, unpack};
pub use replicas::{Replicas, Summing};

use crate::{
    error::{Error, Result},
    stage::Stage,
    value::Value,
};

/// Bytes of a layer's part of a vote: its number, and its sum of squares.
pub const SQUARE_BYTES: usize = 4 + 8;
/// Bytes of a verdict: whether to apply the update, the norm, the scale.
pub const VERDICT_BYTES: usize = 1 + 8 + 8;

/// As [`crate::fuzzing::share`].
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzzed(bytes: &[u8], program: &Program) -> std::result::Result<(), String> {
    unpack(bytes, Some(program)).map(drop)
}

/// The other processes of a pipeline, as one of them sees them. Ranks count from 0.
pub trait Transport: Send + Sync + 'static {
    /// The number of this process.
    fn rank(&self) -> usize;

    /// How many there are.
    fn size(&self) -> usize;

    /// The number that messages call a process by, where there are others besides these.
    fn rank_of(&self, process: usize) -> usize {
        process
    }

    /// Compares facts, by name, with those of the other processes; every process calls it with its own.
    ///
    /// # Errors
    /// The first fact that is another elsewhere, with both sides; a process that does not come.
    fn agree(&self, facts: &[(String, String)]) -> std::result::Result<(), Elsewhere>;

    /// As [`gpipe_runtime::Peers::begin`].
    ///
    /// # Errors
    /// Another process is gone.
    fn begin(&self, run: Run) -> std::result::Result<(), Elsewhere>;

    /// As [`gpipe_runtime::Peers::outbound`]. Tensors are on the CPU.
    ///
    /// # Errors
    /// The connection is lost.
    fn outbound(
        &self,
        crossing: Crossing,
    ) -> std::result::Result<Box<dyn Outbound<Value>>, Elsewhere>;

    /// As [`gpipe_runtime::Peers::inbound`]. Tensors come as they were sent, with their strides, and are allocated in
    /// the calling thread. What says that it brings more than the `most` bytes of a message is refused before memory
    /// is asked for.
    ///
    /// # Errors
    /// The connection is lost.
    fn inbound(
        &self,
        crossing: Crossing,
        most: Bytes,
    ) -> std::result::Result<Box<dyn Inbound<Value>>, Elsewhere>;

    /// As [`gpipe_runtime::Peers::fail`].
    fn fail(&self, why: &Elsewhere);

    /// Gives `own` to every process, and waits for theirs; by rank.
    ///
    /// # Errors
    /// Another process failed or is gone.
    fn gather(&self, own: Vec<u8>) -> std::result::Result<Vec<Vec<u8>>, Elsewhere>;

    /// As [`Transport::gather`], for a thread of each process beside the one that trains: independent of what that one gathers. It
    /// waits no longer than `longest` for each process, which a disk may be slow for.
    ///
    /// # Errors
    /// As there.
    fn gather_beside(
        &self,
        own: Vec<u8>,
        longest: Duration,
    ) -> std::result::Result<Vec<Vec<u8>>, Elsewhere>;

    /// The time now on a clock that all processes share.
    fn now(&self) -> Nanos;
}

/// The process of a device: contiguous blocks, as equal as can be.
pub fn process_of(device: usize, devices: usize, processes: usize) -> usize {
    device * processes / devices.max(1)
}

/// A transport as the runtime sees it.
pub(crate) struct Joined {
    transport: Arc<dyn Transport>,
    devices: usize,
    /// Where the memory of each stage that is here is counted.
    arenas: Mutex<HashMap<StageId, u32>>,
    /// What is run.
    program: Mutex<Option<Arc<Program>>>,
    /// The most bytes of a message, by edge.
    expected: Mutex<Vec<Bytes>>,
}

impl Joined {
    /// Meets the other processes, which must have the same facts.
    pub(crate) fn new(
        transport: &Arc<dyn Transport>,
        devices: usize,
        facts: &[(String, String)],
    ) -> Result<Arc<Self>> {
        let processes = transport.size();
        if processes > devices {
            return Err(Error::Setting(format!(
                "{processes} processes for {devices} stages: use as many stages, or fewer processes"
            )));
        }
        transport.agree(facts).map_err(|error| Error::Setting(error.to_string()))?;
        Ok(Arc::new(Self {
            transport: Arc::clone(transport),
            devices,
            arenas: Mutex::default(),
            program: Mutex::default(),
            expected: Mutex::default(),
        }))
    }

    /// Lets what arrives for a stage be counted as its own.
    pub(crate) fn charge(&self, crew: &mut Crew<Stage>) -> Result<()> {
        let found = crew.visit_all(|_| {
            |stages: &mut [Stage]| -> Vec<(StageId, u32)> {
                let arena =
                    |stage: &Stage| (gpipe_runtime::StageExecutor::stage(stage), stage.arena());
                stages.iter().map(arena).collect()
            }
        })?;
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        arenas.extend(found.into_iter().flatten());
        Ok(())
    }

    /// Tells what a message of the next run has at most, by edge.
    pub(crate) fn expect(&self, most: Vec<Bytes>) {
        *self.expected.lock().unwrap_or_else(PoisonError::into_inner) = most;
    }

    /// The most bytes of a message of `crossing`.
    fn most(&self, crossing: Crossing) -> Bytes {
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        expected.get(crossing.edge.index()).copied().unwrap_or_default()
    }

    fn program(&self) -> Option<Arc<Program>> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Charges what this thread allocates from now on to the stage that `crossing` goes to.
    fn enter_arena(&self, crossing: Crossing) -> std::result::Result<(), Elsewhere> {
        let Some(program) = self.program() else { return Ok(()) };
        let edge = program.topology.edges.get(crossing.edge.index());
        let stage = edge.map(|edge| match crossing.half {
            Half::Forward => edge.to,
            Half::Backward => edge.from,
        });
        let arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let arena = stage.and_then(|stage| arenas.get(&stage).copied());
        let entered = arena.map_or(Ok(()), memory::enter);
        entered.map_err(|error| own(self.transport.rank(), error.to_string()))
    }
}

fn own(rank: usize, reason: String) -> Elsewhere {
    Elsewhere { process: Some(rank), reason }
}

impl Peers<Stage> for Joined {
    fn here(&self) -> usize {
        self.transport.rank()
    }

    fn process_of(&self, device: DeviceId) -> usize {
        process_of(device.index(), self.devices, self.transport.size())
    }

    fn rank_of(&self, process: usize) -> usize {
        self.transport.rank_of(process)
    }

    fn begin(&self, run: Run) -> std::result::Result<(), Elsewhere> {
        let mut program = self.program.lock().unwrap_or_else(PoisonError::into_inner);
        *program = Some(Arc::clone(&run.program));
        drop(program);
        self.transport.begin(run)
    }

    fn outbound(
        &self,
        crossing: Crossing,
    ) -> std::result::Result<Box<dyn Outbound<Value>>, Elsewhere> {
        self.transport.outbound(crossing)
    }

    fn inbound(
        &self,
        crossing: Crossing,
    ) -> std::result::Result<Box<dyn Inbound<Value>>, Elsewhere> {
        self.enter_arena(crossing)?;
        self.transport.inbound(crossing, self.most(crossing))
    }

    fn fail(&self, why: &Elsewhere) {
        self.transport.fail(why);
    }

    fn share(&self, share: Share<Stage>) -> std::result::Result<Vec<Share<Stage>>, Elsewhere> {
        let here = self.transport.rank();
        let packed = pack(&share).map_err(|reason| own(here, reason))?;
        let gathered = self.transport.gather(packed)?;
        let program = self.program();
        let unpack = |(rank, bytes): (usize, Vec<u8>)| match rank == here {
            true => Ok(None),
            false => {
                unpack(&bytes, program.as_deref()).map(Some).map_err(|reason| own(rank, reason))
            }
        };
        let others: Vec<_> =
            gathered.into_iter().enumerate().map(unpack).collect::<std::result::Result<_, _>>()?;
        Ok(others.into_iter().flatten().chain([share]).collect())
    }

    fn now(&self) -> Nanos {
        self.transport.now()
    }
}
