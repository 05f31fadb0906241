//! The joined processes of a pipeline: they meet in a store, check that they belong together, and
//! connect to each other.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::{
    bounded::no_thread,
    clock::Clock,
    facts,
    gathers::Gathers,
    gpus::Connected,
    interrupt::{Interrupt, Longest},
    joining::{GOODBYE, JoinError, Joining, Meeting, Met, Store, connect, meet, wait_for},
    link::LinkEnds,
    shared::Shared,
    tags,
    watch::{GOODBYE_KEY, SERVER, Watcher},
};
use gpipe::{
    Value,
    processes::{
        Exchange, Inbound, MostBytes, Outbound, PeerError, RemoteEdge, Run, Transport, process_of,
    },
};
use gpipe_bridge::c10d::{Group, TcpStore};
use gpipe_core::{Bytes, DeviceId, Nanos};

/// Maximum number of processes.
pub const PROCESSES_MAX: usize = 4096;

/// This process as a member of the cluster.
pub struct Cluster {
    shared: Arc<Shared>,
    ends: Arc<LinkEnds>,
    gpus: Connected,
    gathers: Gathers,
    beside: Gathers,
    clock: Clock,
    /// Declared before the store, because it says goodbye there.
    watcher: Option<Watcher>,
    store: Arc<TcpStore>,
    serves: bool,
}

impl Cluster {
    /// Joins the other processes: waits for them, compares facts, and connects. No step waits
    /// longer than the meeting's deadline, whatever answers at the other end. A step that does not
    /// return leaves its thread behind.
    ///
    /// # Errors
    /// [`JoinError`]: an invalid rank or size; a process that does not come, is gone or is silent;
    /// a store that does not answer; a process whose facts differ.
    pub fn join(meeting: Meeting) -> Result<Arc<Self>, JoinError> {
        let Meeting { rank, size, store, name, address, timeout: deadline, facts } = meeting;
        if size == 0 || size > PROCESSES_MAX || rank >= size {
            return Err(JoinError::Setting(format!(
                "rank {rank} of {size} processes: there are 1 to {PROCESSES_MAX}, ranks count \
                from 0"
            )));
        }
        if deadline > gpipe::TIMEOUT_MAX {
            return Err(JoinError::Setting(format!(
                "a timeout of {deadline:.0?}: use at most {:.0?}",
                gpipe::TIMEOUT_MAX
            )));
        }
        let serves = matches!(store, Store::Serve(_));
        let launched = matches!(store, Store::Launcher { .. });
        let mut joining = Joining { deadline, store: store.place(), watch: None };
        let store = joining.connect(store)?;
        let meeting = store.prefixed(&name).map_err(connect(SERVER.into()))?;
        let meeting = Arc::new(meeting);
        let arrived = {
            let meeting = Arc::clone(&meeting);
            joining.ask_store(move || meeting.add(&format!("arrived/{rank}"), 1))?
        };
        if arrived > 1 {
            return Err(JoinError::Setting(format!(
                "two processes are rank {rank}: every process needs a rank of its own"
            )));
        }
        let interrupt = Arc::new(Interrupt::default());
        let speaks = {
            let meeting = Arc::clone(&meeting);
            joining.ask_store(move || meeting.another())?
        };
        // From here on, each process learns of the others' signs of life and failures.
        let watcher = Watcher::start(speaks, rank, size, deadline, &interrupt, launched)
            .map_err(|error| JoinError::Setting(no_thread(&error)))?;
        let watch = Arc::clone(&watcher.watch);
        joining.watch = Some(Arc::clone(&watch));
        let found = {
            let meeting = Arc::clone(&meeting);
            joining.ask(move || meet(&meeting, rank, size, deadline, facts, serves))
        };
        match joining.of_store(found)? {
            Met::All => watch.met(),
            Met::Without(other) => {
                let reason = format!(
                    "rank {other} of {size} did not come within {deadline:.0?}: start it, or \
                    raise the timeout"
                );
                let missing = PeerError { process: None, reason };
                let known = watch.fail(&missing);
                return Err(match known == missing {
                    true => JoinError::Missing(missing),
                    false => JoinError::Differs(known),
                });
            }
        }
        let group = {
            let (meeting, address) = (Arc::clone(&meeting), address.clone());
            joining.ask(move || {
                let gloo = meeting.prefixed("gloo")?;
                Group::gloo(&gloo, rank, size, &address, deadline)
            })
        };
        let what = format!("the processes cannot reach each other (this one is at {address})");
        let group = joining
            .of_processes(group.map(|group| group.map_err(connect(what))), "the other processes")?;
        let probing = Mutex::default();
        let shared = Shared { rank, group, interrupt, deadline, address, watch, probing };
        let shared = Arc::new(shared);
        let clock = {
            let shared = Arc::clone(&shared);
            joining.ask(move || Clock::agree(&shared).map_err(JoinError::Differs))
        };
        let clock = joining.of_processes(clock, "a process that compares clocks")?;
        shared.watch.joined();
        Ok(Arc::new(Self {
            ends: Arc::new(LinkEnds::new(&shared)),
            gpus: Connected::default(),
            shared,
            gathers: Gathers::new(tags::GATHER, 0..size),
            beside: Gathers::new(tags::GATHER_BESIDE, 0..size),
            clock,
            watcher: Some(watcher),
            store: meeting,
            serves,
        }))
    }

    /// Opens another connection to the store, for a call that may wait there for long.
    pub(crate) fn another_store(&self) -> Result<TcpStore, JoinError> {
        let (watch, deadline) = (Some(Arc::clone(&self.shared.watch)), self.shared.deadline);
        let joining = Joining { deadline, store: SERVER.into(), watch };
        let store = Arc::clone(&self.store);
        joining.ask_store(move || store.another())
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn ends(&self) -> &Arc<LinkEnds> {
        &self.ends
    }
}

impl Transport for Cluster {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn size(&self) -> usize {
        self.shared.group.size()
    }

    fn agree(&self, own: &[(String, String)]) -> Result<(), PeerError> {
        let all = self.gather(facts::encode(own))?;
        facts::compare(&all.iter().map(|bytes| facts::decode(bytes)).collect::<Vec<_>>())
    }

    fn begin(&self, run: Run) -> Result<(), PeerError> {
        let (devices, size) = (run.program.devices.len(), self.size());
        let mut placed = vec![Vec::new(); size];
        for device in 0..devices {
            placed[process_of(device, devices, size)].push(DeviceId::from_index(device));
        }
        self.shared.watch.place(placed);
        self.shared.watch.begin(run)
    }

    fn outbound(&self, crossing: RemoteEdge) -> Result<Box<dyn Outbound<Value>>, PeerError> {
        Ok(Box::new(self.ends.sender(crossing)?))
    }

    fn inbound(
        &self,
        crossing: RemoteEdge,
        most: Bytes,
    ) -> Result<Box<dyn Inbound<Value>>, PeerError> {
        Ok(Box::new(self.ends.receiver(crossing, most)?))
    }

    fn connect_gpus(&self, gpu: usize) -> Result<(), PeerError> {
        let store = self
            .another_store()
            .and_then(|store| store.prefixed("nccl").map_err(connect(SERVER.into())));
        let store = store.map_err(|error| self.shared.own(error.to_string()))?;
        self.gpus.connect(&self.shared, store, (self.rank(), self.size()), gpu)
    }

    fn exchange(&self, most: MostBytes) -> Result<Box<dyn Exchange<Value>>, PeerError> {
        self.gpus.exchange(&self.shared, most, &self.ends, 0)
    }

    fn fail(&self, why: &PeerError) {
        self.shared.watch.fail(why);
    }

    fn gather(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, PeerError> {
        self.gathers.exchange(&self.shared, &own, self.shared.longest())
    }

    fn gather_beside(&self, own: Vec<u8>, longest: Duration) -> Result<Vec<Vec<u8>>, PeerError> {
        self.beside.exchange(&self.shared, &own, Longest::Wait(longest))
    }

    fn now(&self) -> Nanos {
        self.clock.now()
    }
}

impl Drop for Cluster {
    /// Says goodbye. The host of the store then waits briefly for the other ranks' goodbyes.
    fn drop(&mut self) {
        self.shared.interrupt.interrupt();
        self.ends.stop_receiving();
        // Behind a cut link, a call to the store blocks for as long as TCP allows. So the watcher's
        // thread says goodbye: it may be left behind.
        drop(self.watcher.take());
        if self.serves {
            wait_for(&self.store, GOODBYE_KEY, self.shared.group.size(), GOODBYE);
        }
    }
}
