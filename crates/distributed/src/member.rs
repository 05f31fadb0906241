//! A process in one of several replicas of a pipeline. Each replica numbers its processes from 0,
//! as if there were no other replica. A failure anywhere is known to all processes.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use gpipe::{
    Value,
    processes::{
        Exchange, Inbound, MostBytes, Outbound, PeerError, RemoteEdge, Replicas, Run, Summing,
        Transport, process_of,
    },
};
use gpipe_bridge::c10d::{Group, Sums, TcpStore, Work};
use gpipe_core::{Bytes, DeviceId, Nanos, StageId};
use tch::Tensor;

use crate::{
    bounded::{GaveUp, no_thread, within},
    cluster::Cluster,
    gathers::Gathers,
    gpus::Connected,
    interrupt::Longest,
    joining::JoinError,
    shared::{ReplicaWait, Shared},
    tags,
    threads::{LOOK, SharedSums},
};

/// How long a member probes for an unreachable process.
const PROBE: Duration = Duration::from_millis(500);

/// This process, its replica, and the processes that hold the same stages in other replicas.
pub struct Member {
    cluster: Arc<Cluster>,
    store: TcpStore,
    /// The number of this replica.
    replica: usize,
    /// The number of replicas.
    replicas: usize,
    /// Processes per replica.
    processes: usize,
    pipeline: Gathers,
    beside: Gathers,
    across: Gathers,
    gpus: Connected,
    /// For each stage, the number of pipelines that have built the stage so far, and the last
    /// pipeline's connections. The connections outlive the pipeline, because another replica may
    /// still read its last sum. All replicas are done with them once the stage is built again.
    built: Mutex<HashMap<StageId, (u64, Option<Group>)>>,
    /// Where replicas in one process leave their gradients.
    sums: Option<SharedSums>,
}

impl Member {
    /// Makes this process part of one of `replicas` replicas. All replicas have the same number of
    /// processes: the first replica has the first ranks, and so on.
    ///
    /// # Errors
    /// The number of processes is not a multiple of `replicas`.
    pub fn new(cluster: &Arc<Cluster>, replicas: usize) -> Result<Arc<Self>, JoinError> {
        Self::with(cluster, replicas, None)
    }

    /// Like [`Member::new`], for replicas that are threads of one process ([`crate::threads`]).
    /// Gradients are summed in memory.
    ///
    /// # Errors
    /// There are not as many threads in the cluster as replicas.
    pub fn sharing(
        cluster: &Arc<Cluster>,
        replicas: usize,
        sums: &SharedSums,
    ) -> Result<Arc<Self>, JoinError> {
        if cluster.size() != replicas {
            return Err(JoinError::Setting(format!(
                "{} threads for {replicas} replicas: start one for each",
                cluster.size()
            )));
        }
        Self::with(cluster, replicas, Some(sums.clone()))
    }

    fn with(
        cluster: &Arc<Cluster>,
        replicas: usize,
        sums: Option<SharedSums>,
    ) -> Result<Arc<Self>, JoinError> {
        let (rank, size) = (cluster.rank(), cluster.size());
        if replicas == 0 || !size.is_multiple_of(replicas) {
            return Err(JoinError::Setting(format!(
                "{size} processes for {replicas} replicas: each replica needs the same number of \
                processes, so start a multiple of {replicas}"
            )));
        }
        let store = cluster.another_store()?;
        let processes = size / replicas;
        let (replica, place) = (rank / processes, rank % processes);
        let own = replica * processes..(replica + 1) * processes;
        Ok(Arc::new(Self {
            cluster: Arc::clone(cluster),
            store,
            replica,
            replicas,
            processes,
            pipeline: Gathers::new(tags::REPLICA, own.clone()),
            beside: Gathers::new(tags::REPLICA_BESIDE, own),
            across: Gathers::new(tags::ACROSS, (0..replicas).map(|r| r * processes + place)),
            gpus: Connected::default(),
            built: Mutex::default(),
            sums,
        }))
    }

    fn shared(&self) -> &Arc<Shared> {
        self.cluster.shared()
    }

    fn crossing(&self, crossing: RemoteEdge) -> RemoteEdge {
        let (from, to) = (self.rank_of(crossing.from), self.rank_of(crossing.to));
        RemoteEdge { from, to, ..crossing }
    }
}

impl Transport for Member {
    fn rank(&self) -> usize {
        self.cluster.rank() % self.processes
    }

    fn size(&self) -> usize {
        self.processes
    }

    /// The rank among all replicas of a process of this replica.
    fn rank_of(&self, process: usize) -> usize {
        self.replica * self.processes + process
    }

    /// Compares facts with the processes of all replicas, because replicas must be equal.
    fn agree(&self, own: &[(String, String)]) -> Result<(), PeerError> {
        self.cluster.agree(own)
    }

    fn begin(&self, run: Run) -> Result<(), PeerError> {
        let devices = run.program.devices.len();
        let mut placed = vec![Vec::new(); self.cluster.size()];
        for device in 0..devices {
            let rank = self.rank_of(process_of(device, devices, self.processes));
            placed[rank].push(DeviceId::from_index(device));
        }
        self.shared().watch.place(placed);
        self.shared().watch.begin(run)
    }

    fn outbound(&self, crossing: RemoteEdge) -> Result<Box<dyn Outbound<Value>>, PeerError> {
        Ok(Box::new(self.cluster.ends().sender(self.crossing(crossing))?))
    }

    fn inbound(
        &self,
        crossing: RemoteEdge,
        most: Bytes,
    ) -> Result<Box<dyn Inbound<Value>>, PeerError> {
        Ok(Box::new(self.cluster.ends().receiver(self.crossing(crossing), most)?))
    }

    fn connect_gpus(&self, gpu: usize) -> Result<(), PeerError> {
        let shared = self.shared();
        let store = self.cluster.another_store().map_err(|error| error.to_string());
        let store = store.and_then(|store| {
            store.prefixed(&format!("nccl/{}", self.replica)).map_err(|error| error.to_string())
        });
        let store = store.map_err(|reason| shared.own(reason))?;
        self.gpus.connect(shared, store, (self.rank(), self.processes), gpu)
    }

    fn exchange(&self, most: MostBytes) -> Result<Box<dyn Exchange<Value>>, PeerError> {
        let first = self.replica * self.processes;
        self.gpus.exchange(self.shared(), most, self.cluster.ends(), first)
    }

    fn fail(&self, why: &PeerError) {
        // The runtime knows this process by its number in the replica. Any other failed process is
        // already given by its rank.
        let is_own = why.process == Some(self.rank());
        let process = if is_own { Some(self.cluster.rank()) } else { why.process };
        self.cluster.fail(&PeerError { process, ..why.clone() });
    }

    fn gather(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, PeerError> {
        self.pipeline.exchange(self.shared(), &own, self.shared().longest())
    }

    fn gather_beside(&self, own: Vec<u8>, longest: Duration) -> Result<Vec<Vec<u8>>, PeerError> {
        self.beside.exchange(self.shared(), &own, Longest::Wait(longest))
    }

    fn now(&self) -> Nanos {
        self.cluster.now()
    }
}

impl Replicas for Member {
    fn index(&self) -> usize {
        self.replica
    }

    fn count(&self) -> usize {
        self.replicas
    }

    fn stage(&self, stage: StageId) -> Result<Box<dyn Summing>, PeerError> {
        let shared = Arc::clone(self.shared());
        let lost = |error: gpipe_bridge::c10d::Error| {
            shared.failed().unwrap_or_else(|| shared.own(error.to_string()))
        };
        // A number per pipeline, so that a later pipeline does not meet the connections of an
        // earlier one.
        let number = {
            let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
            let (number, _) = built.entry(stage).or_default();
            *number += 1;
            *number
        };
        if let Some(sums) = &self.sums {
            return Ok(sums.stage(shared, stage, number, (self.replica, self.replicas)));
        }
        // Stages connect concurrently, and a waiting call blocks its connection to the store.
        let store = self.store.another().map_err(lost)?;
        let store = store.prefixed(&format!("replicas/{stage}/{number}")).map_err(lost)?;
        let (replica, replicas) = (self.replica, self.replicas);
        let (address, deadline) = (shared.address.clone(), shared.deadline);
        let connect = move || Group::gloo(&store, replica, replicas, &address, deadline);
        // Below the runtime's limit for building a stage, whose error would not say what it awaits.
        let longest = deadline / 10 * 9;
        let group = within(longest, || shared.failed(), connect).map_err(|error| match error {
            GaveUp::Failed(known) => known,
            GaveUp::NoThread(error) => shared.own(no_thread(&error)),
            GaveUp::Late => shared.own(format!(
                "other replicas did not connect stage {stage} within {longest:.0?}; raise the \
                timeout if they take longer to build it"
            )),
        })?;
        let group = group.map_err(lost)?;
        let sums = group.sums().map_err(lost)?;
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        let before = built.insert(stage, (number, Some(group)));
        drop(built); // before the connections, because closing them can take a while
        drop(before);
        let place = self.cluster.rank() % self.processes;
        let others = (0..self.replicas).filter(|replica| *replica != self.replica);
        let others = others.map(|replica| replica * self.processes + place).collect();
        Ok(Box::new(StageSums { shared, stage, sums, others }))
    }

    fn gather(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, PeerError> {
        self.across.exchange(self.shared(), &own, self.shared().longest())
    }
}

/// All-reduces and broadcasts of one stage over all replicas.
struct StageSums {
    shared: Arc<Shared>,
    stage: StageId,
    sums: Sums,
    /// The ranks of the processes that hold the stage in other replicas.
    others: Vec<usize>,
}

impl StageSums {
    fn lost(&self, error: &gpipe_bridge::c10d::Error) -> PeerError {
        // The stages of a process fail at once. The others wait for what the first one finds: their
        // probes would find the ways to other processes in use, and take those for lost.
        let _alone = self.shared.probing.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = self.shared.failed();
        let lost = lost.or_else(|| Some(self.shared.lost(self.unreachable()?, error)));
        lost.unwrap_or_else(|| PeerError {
            process: None,
            reason: format!("another replica cannot be reached any more ({error})"),
        })
    }

    /// Finds the process that made a sum fail, because the error does not name it. It is the one to
    /// which nothing can be sent any more: the others do not answer either, but their connections
    /// are intact.
    fn unreachable(&self) -> Option<usize> {
        if let [one] = self.others[..] {
            return Some(one);
        }
        let mut sent = Vec::new();
        for &rank in &self.others {
            let outbox = self.shared.group.outbox(rank, tags::PROBE);
            match outbox.and_then(|mut outbox| outbox.send(&[], &[])) {
                Ok(works) => sent.extend(works.into_iter().map(|work| (rank, work))),
                Err(_) => return Some(rank),
            }
        }
        let end = Instant::now() + PROBE;
        let is_lost = |(_, work): &(usize, Work)| {
            let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            work.wait(left).is_err_and(|error| !error.message.contains("imed out"))
        };
        sent.iter().find(|own| is_lost(own)).map(|(rank, _)| *rank)
    }
}

impl Summing for StageSums {
    fn begin(&mut self, tensor: Tensor) -> Result<(), PeerError> {
        self.sums.begin(tensor).map_err(|error| self.lost(&error))
    }

    fn begin_broadcast(&mut self, tensor: Tensor, from: usize) -> Result<(), PeerError> {
        self.sums.begin_broadcast(tensor, from).map_err(|error| self.lost(&error))
    }

    fn end(&mut self) -> Result<Tensor, PeerError> {
        let wait = ReplicaWait::new(&self.shared, self.stage);
        loop {
            if let Some(sum) = self.sums.end(LOOK).map_err(|error| self.lost(&error))? {
                return Ok(sum);
            }
            if let Some(failed) = self.shared.failed() {
                return Err(failed);
            }
            if let Some(waited) = wait.too_long() {
                let stage = self.stage;
                let process = match self.others[..] {
                    [one] => Some(one),
                    _ => None,
                };
                let reason = format!(
                    "a replica did not bring its part of stage {stage} within {waited:.0?}"
                );
                return Err(PeerError { process, reason });
            }
        }
    }
}
