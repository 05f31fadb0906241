//! A mock transport: the processes are threads, with an in-memory network between them.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use gpipe_core::{DeviceId, Nanos};

use crate::{
    peers::{
        Alarm, Envelope, Exchange, Inbound, Outbound, PeerError, Peers, RemoteEdge, Run, Share,
    },
    report::Report,
    stage::StageExecutor,
};

/// The state that all processes of a test share.
pub struct Network<E: StageExecutor> {
    state: Mutex<State<E>>,
    changed: Condvar,
    start: Instant,
    /// The process of each device.
    placement: Vec<usize>,
    has_buffers: bool,
}

struct State<E: StageExecutor> {
    queues: HashMap<RemoteEdge, VecDeque<Envelope<E::Value>>>,
    /// The running group of each process.
    running: HashMap<usize, Running<E::Value>>,
    /// What the group that ended last brought each process.
    arrived: HashMap<usize, Vec<Envelope<E::Value>>>,
    /// How many messages on a link are announced and not yet expected.
    announced: HashMap<RemoteEdge, usize>,
    /// Each process's alarm, and whether its run was ended.
    alarms: Vec<Option<Alarm>>,
    /// The processes' parts of each run.
    shares: Vec<Vec<Share<E>>>,
    failed: Option<PeerError>,
}

impl<E: StageExecutor> Network<E> {
    /// Creates a network of `processes`; `placement` gives the process of each device.
    pub fn new(processes: usize, placement: Vec<usize>) -> Arc<Self> {
        Self::with(processes, placement, true)
    }

    /// Creates a network without buffers, for processes with one device each.
    pub fn unbuffered(processes: usize) -> Arc<Self> {
        Self::with(processes, (0..processes).collect(), false)
    }

    fn with(processes: usize, placement: Vec<usize>, has_buffers: bool) -> Arc<Self> {
        let state = State {
            queues: HashMap::new(),
            running: HashMap::new(),
            arrived: HashMap::new(),
            announced: HashMap::new(),
            alarms: vec![None; processes],
            shares: Vec::new(),
            failed: None,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            start: Instant::now(),
            placement,
            has_buffers,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` returns a value or a process has failed.
    fn wait<T>(&self, mut ready: impl FnMut(&mut State<E>) -> Option<T>) -> Result<T, PeerError> {
        let mut state = self.lock();
        loop {
            if let Some(failed) = &state.failed {
                return Err(failed.clone());
            }
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// One process's view of a [`Network`].
pub struct MockPeers<E: StageExecutor> {
    network: Arc<Network<E>>,
    here: usize,
    /// How many runs this process has shared.
    runs: AtomicUsize,
}

impl<E: StageExecutor> MockPeers<E> {
    /// Creates the view of process number `here`.
    pub fn new(network: &Arc<Network<E>>, here: usize) -> Arc<Self> {
        Arc::new(Self { network: Arc::clone(network), here, runs: AtomicUsize::new(0) })
    }
}

struct End<E: StageExecutor> {
    network: Arc<Network<E>>,
    crossing: RemoteEdge,
}

impl<E: StageExecutor> Outbound<E::Value> for End<E> {
    fn send(&mut self, envelope: Envelope<E::Value>) -> Result<(), PeerError> {
        self.network.lock().queues.entry(self.crossing).or_default().push_back(envelope);
        self.network.changed.notify_all();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), PeerError> {
        Ok(())
    }
}

impl<E: StageExecutor> Inbound<E::Value> for End<E> {
    fn receive(&mut self) -> Result<Envelope<E::Value>, PeerError> {
        self.network.wait(|state| state.queues.get_mut(&self.crossing)?.pop_front())
    }
}

/// A group starts when all that it receives is announced. It ends together with all groups that it
/// meets, when all of those run. Values between two processes have no tags.
struct Group<E: StageExecutor> {
    network: Arc<Network<E>>,
    here: usize,
}

/// What a process sends and receives at the same time.
struct Running<V> {
    sends: Vec<(RemoteEdge, Envelope<V>)>,
    receives: Vec<RemoteEdge>,
}

impl<V> Running<V> {
    /// The values that pass from or to process `other`, in order.
    fn with(&self, other: usize, sends: bool) -> Vec<RemoteEdge> {
        let sent = self.sends.iter().map(|(crossing, _)| *crossing);
        match sends {
            true => sent.filter(|crossing| crossing.to == other).collect(),
            false => self.receives.iter().filter(|own| own.from == other).copied().collect(),
        }
    }
}

impl<E: StageExecutor> State<E> {
    /// Ends the group of process `here` and all that it meets, if they run and agree.
    fn end_groups(&mut self, here: usize) -> Option<()> {
        let (mut met, mut at) = (vec![here], 0);
        while let Some(&process) = met.get(at) {
            let own = self.running.get(&process)?;
            let others = own.sends.iter().map(|(crossing, _)| crossing.to);
            for other in others.chain(own.receives.iter().map(|crossing| crossing.from)) {
                if !met.contains(&other) {
                    met.push(other);
                }
            }
            at += 1;
        }
        let running = &self.running;
        let agrees = |one: &usize| {
            let sends = running.get(one);
            met.iter().all(|other| {
                let receives = running.get(other).map(|own| own.with(*one, false));
                sends.map(|own| own.with(*other, true)) == receives
            })
        };
        if !met.iter().all(agrees) {
            return None;
        }
        let mut values = HashMap::new();
        let ended: Vec<_> =
            met.iter().filter_map(|one| Some((*one, self.running.remove(one)?))).collect();
        let mut receives = Vec::new();
        for (process, own) in ended {
            values.extend(own.sends);
            receives.push((process, own.receives));
        }
        for (process, due) in receives {
            let arrived = due.iter().filter_map(|crossing| values.remove(crossing)).collect();
            self.arrived.insert(process, arrived);
        }
        Some(())
    }
}

impl<E: StageExecutor> Exchange<E::Value> for Group<E> {
    fn exchange(
        &mut self,
        sends: Vec<(RemoteEdge, Envelope<E::Value>)>,
        receives: &[RemoteEdge],
    ) -> Result<Vec<Envelope<E::Value>>, PeerError> {
        for (crossing, _) in &sends {
            *self.network.lock().announced.entry(*crossing).or_default() += 1;
        }
        self.network.changed.notify_all();
        for crossing in receives {
            self.network.wait(|state| {
                let announced = state.announced.get_mut(crossing)?;
                *announced = announced.checked_sub(1)?;
                Some(())
            })?;
        }
        let group = Running { sends, receives: receives.to_vec() };
        self.network.lock().running.insert(self.here, group);
        let arrived = self.network.wait(|state| {
            state.end_groups(self.here);
            state.arrived.remove(&self.here)
        })?;
        self.network.changed.notify_all();
        Ok(arrived)
    }

    fn flush(&mut self) -> Result<(), PeerError> {
        Ok(())
    }
}

fn copy<E: StageExecutor<Outcome: Clone>>(share: &Share<E>) -> Share<E> {
    let report = |(device, report): &(DeviceId, Report<E>)| {
        let Report { actions, outcomes, sent } = report;
        let report = Report { actions: actions.clone(), outcomes: outcomes.clone(), sent: *sent };
        (*device, report)
    };
    Share { origin: share.origin, reports: share.reports.iter().map(report).collect() }
}

impl<E: StageExecutor<Outcome: Clone>> Peers<E> for MockPeers<E> {
    fn here(&self) -> usize {
        self.here
    }

    fn process_of(&self, device: DeviceId) -> usize {
        self.network.placement.get(device.index()).copied().unwrap_or_default()
    }

    fn begin(&self, run: Run) -> Result<(), PeerError> {
        let mut state = self.network.lock();
        if let Some(failed) = &state.failed {
            return Err(failed.clone());
        }
        if let Some(own) = state.alarms.get_mut(self.here) {
            *own = Some(run.alarm);
        }
        Ok(())
    }

    fn is_unbuffered(&self) -> bool {
        !self.network.has_buffers
    }

    fn exchange(&self) -> Result<Box<dyn Exchange<E::Value>>, PeerError> {
        Ok(Box::new(Group { network: Arc::clone(&self.network), here: self.here }))
    }

    fn outbound(&self, crossing: RemoteEdge) -> Result<Box<dyn Outbound<E::Value>>, PeerError> {
        Ok(Box::new(End { network: Arc::clone(&self.network), crossing }))
    }

    fn inbound(&self, crossing: RemoteEdge) -> Result<Box<dyn Inbound<E::Value>>, PeerError> {
        Ok(Box::new(End { network: Arc::clone(&self.network), crossing }))
    }

    fn fail(&self, why: &PeerError) {
        let alarms = {
            let mut state = self.network.lock();
            if state.failed.is_some() {
                return;
            }
            state.failed = Some(why.clone());
            std::mem::take(&mut state.alarms)
        };
        self.network.changed.notify_all();
        for alarm in alarms.into_iter().flatten() {
            alarm(why.clone());
        }
    }

    fn share(&self, own: Share<E>) -> Result<Vec<Share<E>>, PeerError> {
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        {
            let mut state = self.network.lock();
            if state.shares.len() <= run {
                state.shares.resize_with(run + 1, Vec::new);
            }
            state.shares[run].push(own);
        }
        self.network.changed.notify_all();
        self.network.wait(|state| {
            let shares = &state.shares[run];
            (shares.len() == state.alarms.len()).then(|| shares.iter().map(copy).collect())
        })
    }

    fn now(&self) -> Nanos {
        Nanos(u64::try_from(self.network.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}
