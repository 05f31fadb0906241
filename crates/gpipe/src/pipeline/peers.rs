//! The other processes of a pipeline, as the runtime sees them: adapts a [`Transport`], and sends a
//! step's results as bytes (`pack`).

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use gpipe_bridge::memory;
use gpipe_core::{Bytes, DeviceId, Direction, Nanos, StageId, lower::Program};
use gpipe_runtime::{Peers, WorkerPool, peers::Share};

use super::pack::{pack, unpack};
use crate::{
    error::{Error, Result},
    processes::{Exchange, Inbound, Outbound, PeerError, RemoteEdge, Run, Transport, process_of},
    stage::Stage,
    value::Value,
};

/// Adapts a transport to the runtime's interface.
pub(crate) struct TransportPeers {
    transport: Arc<dyn Transport>,
    devices: usize,
    /// Memory arena of each stage in this process.
    arenas: Mutex<HashMap<StageId, u32>>,
    /// The program of the current run.
    program: Mutex<Option<Arc<Program>>>,
    /// The most bytes of a message, by edge.
    expected: Mutex<Vec<Bytes>>,
    /// Whether values pass from GPU to GPU, without a buffer.
    is_unbuffered: AtomicBool,
}

impl TransportPeers {
    /// Meets the other processes and checks that they have the same facts.
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
        let peers = Arc::new(Self {
            transport: Arc::clone(transport),
            devices,
            arenas: Mutex::default(),
            program: Mutex::default(),
            expected: Mutex::default(),
            is_unbuffered: AtomicBool::default(),
        });
        peers.agree(facts)?;
        Ok(peers)
    }

    /// Sets whether values pass from GPU to GPU.
    pub(crate) fn set_unbuffered(&self, is_unbuffered: bool) {
        self.is_unbuffered.store(is_unbuffered, Ordering::Relaxed);
    }

    /// Checks that the other processes have the same facts.
    pub(crate) fn agree(&self, facts: &[(String, String)]) -> Result<()> {
        self.transport.agree(facts).map_err(|error| Error::Setting(error.to_string()))
    }

    /// Looks up the arenas of the stages, so that messages are charged to the stage that receives
    /// them.
    pub(crate) fn charge(&self, pool: &mut WorkerPool<Stage>) -> Result<()> {
        let found = pool.visit_all(|_| {
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

    /// Sets the most bytes of a message in the next run, by edge.
    pub(crate) fn expect_at_most(&self, most: Vec<Bytes>) {
        *self.expected.lock().unwrap_or_else(PoisonError::into_inner) = most;
    }

    /// The most bytes of a message on `crossing`.
    fn most(&self, crossing: RemoteEdge) -> Bytes {
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        expected.get(crossing.edge.index()).copied().unwrap_or_default()
    }

    /// Squared norms of all processes, each with the number of its parameter.
    pub(crate) fn gather_squares(&self, own: &[(usize, f64)]) -> Result<Vec<(usize, f64)>> {
        let here = self.transport.rank();
        let failed = |rank, reason: String| Error::from(peer_error(rank, reason));
        let packed = postcard::to_stdvec(own).map_err(|error| failed(here, error.to_string()))?;
        let mut all = Vec::new();
        for (process, bytes) in self.transport.gather(packed)?.into_iter().enumerate() {
            let rank = self.transport.rank_of(process);
            let squares: Vec<(usize, f64)> = postcard::from_bytes(&bytes)
                .map_err(|error| failed(rank, format!("its squared norms: {error}")))?;
            all.extend(squares);
        }
        Ok(all)
    }

    fn program(&self) -> Option<Arc<Program>> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Charges this thread's allocations from now on to the stage that receives from `crossing`.
    fn enter_arena(&self, crossing: RemoteEdge) -> std::result::Result<(), PeerError> {
        let Some(program) = self.program() else { return Ok(()) };
        let edge = program.topology.edges.get(crossing.edge.index());
        let stage = edge.map(|edge| match crossing.direction {
            Direction::Forward => edge.to,
            Direction::Backward => edge.from,
        });
        let arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let arena = stage.and_then(|stage| arenas.get(&stage).copied());
        let entered = arena.map_or(Ok(()), memory::enter);
        entered.map_err(|error| peer_error(self.transport.rank(), error.to_string()))
    }
}

fn peer_error(rank: usize, reason: String) -> PeerError {
    PeerError { process: Some(rank), reason }
}

impl Peers<Stage> for TransportPeers {
    fn here(&self) -> usize {
        self.transport.rank()
    }

    fn process_of(&self, device: DeviceId) -> usize {
        process_of(device.index(), self.devices, self.transport.size())
    }

    fn rank_of(&self, process: usize) -> usize {
        self.transport.rank_of(process)
    }

    fn begin(&self, run: Run) -> std::result::Result<(), PeerError> {
        let mut program = self.program.lock().unwrap_or_else(PoisonError::into_inner);
        *program = Some(Arc::clone(&run.program));
        drop(program);
        self.transport.begin(run)
    }

    fn is_unbuffered(&self) -> bool {
        self.is_unbuffered.load(Ordering::Relaxed)
    }

    fn exchange(&self) -> std::result::Result<Box<dyn Exchange<Value>>, PeerError> {
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let most = move |crossing: RemoteEdge| {
            expected.get(crossing.edge.index()).copied().unwrap_or_default()
        };
        self.transport.exchange(Box::new(most))
    }

    fn outbound(
        &self,
        crossing: RemoteEdge,
    ) -> std::result::Result<Box<dyn Outbound<Value>>, PeerError> {
        self.transport.outbound(crossing)
    }

    fn inbound(
        &self,
        crossing: RemoteEdge,
    ) -> std::result::Result<Box<dyn Inbound<Value>>, PeerError> {
        self.enter_arena(crossing)?;
        self.transport.inbound(crossing, self.most(crossing))
    }

    fn fail(&self, why: &PeerError) {
        self.transport.fail(why);
    }

    fn share(&self, share: Share<Stage>) -> std::result::Result<Vec<Share<Stage>>, PeerError> {
        let here = self.transport.rank();
        let packed = pack(&share).map_err(|reason| peer_error(here, reason))?;
        let gathered = self.transport.gather(packed)?;
        let program = self.program();
        let unpack = |(process, bytes): (usize, Vec<u8>)| match process == here {
            true => Ok(None),
            false => unpack(&bytes, program.as_deref())
                .map(Some)
                .map_err(|reason| peer_error(self.transport.rank_of(process), reason)),
        };
        let others: Vec<_> =
            gathered.into_iter().enumerate().map(unpack).collect::<std::result::Result<_, _>>()?;
        Ok(others.into_iter().flatten().chain([share]).collect())
    }

    fn now(&self) -> Nanos {
        self.transport.now()
    }
}
