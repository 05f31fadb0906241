//! The driver's side: spawns one worker per device, runs programs on the workers, and watches their
//! pulses.

mod crossings;
mod errands;
mod settings;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

pub use errands::Errands;
use gpipe_core::{
    Bytes, DeviceId, Nanos, StageId, exchange::Exchanges, lower::Program, simulate::Timeline,
};
pub use settings::Settings;

use crate::{
    clock::Clock,
    failure::{Failure, StepError, describe_wait},
    peers::{Peers, Share},
    pulse::Pulses,
    report::Report,
    stage::StageExecutor,
    worker::{Command, Step, Updates, doing, panic_message, serve},
};

/// A step that succeeded.
#[derive(Debug)]
pub struct Ran<E: StageExecutor> {
    /// The executed actions, with times.
    pub timeline: Timeline,
    /// Each stage's outcome, in stage order.
    pub outcomes: Vec<E::Outcome>,
    /// Bytes of values that each device sent.
    pub sent: Vec<Bytes>,
}

/// A closure that builds a device's stages in the device's own thread.
pub type BuildDevice<E> =
    Box<dyn FnOnce() -> Result<Vec<E>, <E as StageExecutor>::Error> + Send + 'static>;

struct Worker<E: StageExecutor> {
    /// Shared with [`Errands`], which do not keep the thread.
    commands: Arc<mpsc::Sender<Command<E>>>,
    /// `None` once the thread was abandoned or joined.
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    ended: mpsc::Receiver<()>,
}

/// One worker per device of this process.
pub struct WorkerPool<E: StageExecutor> {
    /// The worker of each device; `None` where the device belongs to another process.
    workers: Vec<Option<Worker<E>>>,
    settings: Settings,
    /// The other processes, if any.
    peers: Option<Arc<dyn Peers<E>>>,
    /// The exchanges of recent programs, if links between processes have no buffer.
    exchanges: Vec<(Arc<Program>, Arc<Exchanges>)>,
    pulses: Arc<Pulses>,
    /// Why the pool can no longer run anything.
    unusable: Option<String>,
    /// Describes an update that only some stages applied, until the user accepts it.
    torn: Option<String>,
}

impl<E: StageExecutor> WorkerPool<E> {
    /// Starts a worker for each element of `devices` and builds its stages there, all in parallel.
    ///
    /// # Errors
    /// The first build error in device order; a build that panics or exceeds the deadline.
    pub fn spawn(
        devices: Vec<BuildDevice<E>>,
        settings: Settings,
    ) -> Result<Self, StepError<E::Error>> {
        Self::spawn_among(devices, settings, None)
    }

    /// Like [`WorkerPool::spawn`], in one of several processes: only the devices that `peers`
    /// places in this process get workers here. After a failed run this pool cannot run again,
    /// because messages between processes are lost.
    ///
    /// # Errors
    /// As for [`WorkerPool::spawn`].
    pub fn spawn_among(
        devices: Vec<BuildDevice<E>>,
        settings: Settings,
        peers: Option<Arc<dyn Peers<E>>>,
    ) -> Result<Self, StepError<E::Error>> {
        let pulses = Arc::new(Pulses::new(devices.len()));
        let mut workers = Vec::with_capacity(devices.len());
        let mut built = Vec::with_capacity(devices.len());
        let is_here = |device: usize| {
            let process = |p: &Arc<dyn Peers<E>>| p.process_of(DeviceId::from_index(device));
            peers.as_ref().is_none_or(|peers| process(peers) == peers.here())
        };
        for (device, build) in devices.into_iter().enumerate() {
            if !is_here(device) {
                workers.push(None);
                continue;
            }
            let (commands, receive) = mpsc::channel();
            let (done, ready) = mpsc::channel();
            let (ending, ended) = mpsc::channel::<()>();
            let pulses = Arc::clone(&pulses);
            let thread = std::thread::Builder::new().name(format!("gpipe-device-{device}"));
            let thread = thread.spawn(move || {
                let _ending = ending; // dropped when the thread ends, even by a panic
                match build() {
                    Ok(stages) => {
                        let _ = done.send(Ok(()));
                        serve(device, stages, &receive, &pulses);
                    }
                    Err(error) => {
                        let _ = done.send(Err(error));
                    }
                };
            });
            let thread = thread.map_err(|error| StepError::Unusable {
                reason: format!(
                    "no thread for device {device}: {error}; raise the limit on threads (ulimit -u)"
                ),
            })?;
            let commands = Arc::new(commands);
            workers.push(Some(Worker { commands, thread: Some(thread), ended }));
            built.push((device, ready));
        }
        let (exchanges, unusable, torn) = (Vec::new(), None, None);
        let mut pool = Self { workers, settings, peers, exchanges, pulses, unusable, torn };
        for (device, ready) in built {
            pool.await_build(device, &ready)?;
        }
        Ok(pool)
    }

    /// Sets the capacity of links, in messages, for the runs from now on.
    pub fn set_link_capacity(&mut self, capacity: usize) {
        self.settings.link_capacity = capacity;
        self.exchanges.clear();
    }

    /// The devices that have workers in this process.
    pub fn here(&self) -> impl Iterator<Item = DeviceId> + '_ {
        let here = self.workers.iter().enumerate().filter(|(_, worker)| worker.is_some());
        here.map(|(device, _)| DeviceId::from_index(device))
    }

    fn worker(&self, device: usize) -> Option<&Worker<E>> {
        self.workers.get(device)?.as_ref()
    }

    fn worker_mut(&mut self, device: usize) -> Option<&mut Worker<E>> {
        self.workers.get_mut(device)?.as_mut()
    }

    fn await_build(
        &mut self,
        device: usize,
        ready: &mpsc::Receiver<Result<(), E::Error>>,
    ) -> Result<(), StepError<E::Error>> {
        match ready.recv_timeout(self.settings.deadline) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => {
                let device = DeviceId::from_index(device);
                Err(StepError::Build { device, source })
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                self.abandon(device);
                Err(StepError::Stuck {
                    device: DeviceId::from_index(device),
                    silence: self.settings.deadline,
                    doing: ", building its stages".into(),
                })
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(self.lost(device)),
        }
    }

    /// The error for a worker whose thread has ended.
    fn lost(&mut self, device: usize) -> StepError<E::Error> {
        let thread = self.worker_mut(device).and_then(|worker| worker.thread.take());
        let panic = thread.and_then(|thread| thread.join().err());
        let why = panic.map_or_else(|| "it ended".into(), |p| panic_message(p.as_ref()));
        let reason = format!("the thread of device {device} is gone: {why}");
        self.unusable = Some(reason.clone());
        StepError::Unusable { reason }
    }

    /// Abandons a thread that does not respond: it is neither used nor joined again.
    fn abandon(&mut self, device: usize) {
        if let Some(worker) = self.worker_mut(device) {
            worker.thread = None;
        }
        self.unusable =
            Some(format!("device {device} did not answer and its thread was abandoned"));
    }

    /// Runs `program` once. `feeds` has one feed per stage for each device, in the device's stage
    /// order; feeds of other processes' devices are ignored. The result covers all devices, in
    /// every process.
    ///
    /// # Errors
    /// The first failure of any worker. By then every worker has stopped. The pool can run again
    /// unless a thread was abandoned, the update was torn, or there are other processes.
    pub fn run(
        &mut self,
        program: &Arc<Program>,
        feeds: Vec<Vec<E::Feed>>,
    ) -> Result<Ran<E>, StepError<E::Error>> {
        self.check_usable(program, &feeds)?;
        let exchanges = self.exchanges_of(program)?;
        let step = Arc::new(Step {
            program: Arc::clone(program),
            recomputed: program.rematerialized().clone(),
            trains: program.trains(),
            links: self.links(program, exchanges.as_deref()),
            failure: Failure::default(),
            pulses: Arc::clone(&self.pulses),
            deadline: self.settings.deadline,
            updates: Mutex::default(),
            peers: self.peers.clone(),
        });
        // Before the first run, no sign of life of other processes arrives: that is not silence.
        for device in (0..self.workers.len()).filter(|&device| self.worker(device).is_none()) {
            self.pulses.beat(device);
        }
        let started = self.peers.as_ref().map(|peers| peers.now()).unwrap_or_default();
        let origin = Instant::now();
        let carrying = self.begin_crossings(&step, exchanges.as_deref(), &Clock::Real(origin));
        let mut replies = Vec::with_capacity(self.workers.len());
        for (device, feeds) in feeds.into_iter().enumerate() {
            let clock = match &self.settings.virtual_costs {
                None => Clock::Real(origin),
                Some(costs) => Clock::Virtual { now: Nanos(0), costs: Arc::clone(costs) },
            };
            let (reply, receive) = mpsc::channel();
            if self.worker(device).is_none() {
                continue;
            }
            self.pulses.advance(device, None);
            let command = Command::Run { step: Arc::clone(&step), feeds, clock, reply };
            let sent = self.worker(device).is_some_and(|w| w.commands.send(command).is_ok());
            if !sent {
                let lost = self.lost(device);
                step.fail(lost);
            }
            replies.push((device, receive));
        }
        let reports = self.collect(&step, &replies);
        self.end_crossings(&step, &carrying);
        let shares = self.share(&step, Share { origin: started, reports });
        self.conclude(&step, shares)
    }

    /// Accepts the stages' state after a torn update, so that they can be visited and run again.
    /// Returns whether there was a torn update.
    ///
    /// # Errors
    /// A thread is gone, or there are other processes: then the pipeline cannot continue at all.
    pub fn accept_torn_update(&mut self) -> Result<bool, StepError<E::Error>> {
        if let Some(reason) = &self.unusable {
            return Err(StepError::Unusable { reason: reason.clone() });
        }
        Ok(self.torn.take().is_some())
    }

    fn check_usable(
        &self,
        program: &Program,
        feeds: &[Vec<E::Feed>],
    ) -> Result<(), StepError<E::Error>> {
        let reason = match self.unusable.as_ref().or(self.torn.as_ref()) {
            Some(reason) => reason.clone(),
            None if program.devices.len() == self.workers.len()
                && feeds.len() == self.workers.len() =>
            {
                return Ok(());
            }
            None => format!(
                "the program is for {} devices, the feeds for {}, the pool has {}",
                program.devices.len(),
                feeds.len(),
                self.workers.len()
            ),
        };
        Err(StepError::Unusable { reason })
    }

    /// Waits for every worker's report, and fails the step if a worker is silent too long.
    fn collect(
        &mut self,
        step: &Step<E>,
        replies: &[(usize, mpsc::Receiver<Report<E>>)],
    ) -> Vec<(DeviceId, Report<E>)> {
        let slice = (step.deadline / 4).clamp(Duration::from_millis(1), Duration::from_millis(100));
        let mut reports = Vec::with_capacity(replies.len());
        for &(device, ref reply) in replies {
            let report = loop {
                match reply.recv_timeout(slice) {
                    Ok(report) => break Some(report),
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        self.watch(step, slice);
                        // After a failure every healthy worker ends soon; a silent one is
                        // abandoned.
                        let silent = self.pulses.silence(device) > step.deadline;
                        if step.failure.is_raised() && silent {
                            self.abandon(device);
                            break None;
                        }
                    }
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        let lost = self.lost(device);
                        step.fail(lost);
                        break None;
                    }
                }
            };
            reports.extend(report.map(|report| (DeviceId::from_index(device), report)));
        }
        reports
    }

    /// Fails the step if a worker is silent inside an action, or if all workers wait for each
    /// other.
    fn watch(&self, step: &Step<E>, slice: Duration) {
        if step.failure.is_raised() {
            return;
        }
        let devices = 0..self.workers.len();
        let running = |device: &usize| self.pulses.position(*device).is_some();
        // Slightly longer than the deadline, so that a worker that waits for the silent one reports
        // first: it gives the better error.
        let patience = step.deadline.saturating_add(slice * 8);
        // Other processes' devices are watched by their own drivers and by the transport.
        let here = |device: &usize| self.worker(*device).is_some();
        let silent = devices
            .clone()
            .filter(here)
            .filter(running)
            .find(|&device| self.pulses.silence(device) > patience);
        if let Some(device) = silent {
            step.fail(StepError::Stuck {
                device: DeviceId::from_index(device),
                silence: self.pulses.silence(device),
                doing: doing(step, device),
            });
        } else if self.pulses.standstill() > patience.saturating_mul(2) {
            let waiting = devices
                .filter_map(|device| {
                    let position = self.pulses.position(device)?;
                    let action = step.program.devices.get(device)?.get(position)?;
                    Some(describe_wait(&step.program, *action))
                })
                .collect();
            let standstill = self.pulses.standstill();
            step.fail(StepError::Standstill { standstill, waiting });
        }
    }

    fn conclude(
        &mut self,
        step: &Step<E>,
        shares: Vec<Share<E>>,
    ) -> Result<Ran<E>, StepError<E::Error>> {
        if let Some(cause) = step.failure.take() {
            let Updates { begun, applied } =
                std::mem::take(&mut *step.updates.lock().unwrap_or_else(PoisonError::into_inner));
            if self.peers.is_some() {
                self.unusable = Some(cause.to_string());
            }
            if applied.is_empty() && begun.is_empty() {
                return Err(cause);
            }
            let error = StepError::Torn { applied, begun, cause: cause.to_string() };
            self.torn = Some(error.to_string());
            return Err(error);
        }
        let first = shares.iter().map(|share| share.origin).min().unwrap_or_default();
        let mut reports: Vec<(DeviceId, Nanos, Report<E>)> = Vec::new();
        for Share { origin, reports: own } in shares {
            // Each process counts time from its own start of the run.
            let late = Nanos(origin.0.saturating_sub(first.0));
            reports.extend(own.into_iter().map(|(device, report)| (device, late, report)));
        }
        reports.sort_by_key(|(device, ..)| *device);
        let sent = reports.iter().map(|(.., report)| report.sent).collect();
        let mut outcomes = HashMap::new();
        let mut timeline = Timeline::default();
        for (_, late, report) in reports {
            let mut actions = report.actions;
            for timed in &mut actions {
                (timed.start, timed.end) = (timed.start + late, timed.end + late);
            }
            timeline.devices.push(actions);
            outcomes.extend(report.outcomes);
        }
        let ends = timeline.devices.iter().filter_map(|actions| actions.last());
        timeline.makespan = ends.map(|timed| timed.end).max().unwrap_or_default();
        let stages = (0..step.program.topology.stages).map(StageId::from_index);
        let outcomes = stages.filter_map(|stage| outcomes.remove(&stage)).collect();
        Ok(Ran { timeline, outcomes, sent })
    }

    /// Calls `visit` with the stages of `device`, in the device's thread, between steps.
    ///
    /// # Errors
    /// An earlier update was torn, a worker is gone, the visitor panicked, or it did not return
    /// within the deadline.
    pub fn visit<T: Send + 'static>(
        &mut self,
        device: DeviceId,
        visit: impl FnOnce(&mut [E]) -> T + Send + 'static,
    ) -> Result<T, StepError<E::Error>> {
        let answer = self.send_visitor(device, visit)?;
        self.await_answer(device, &answer)
    }

    /// Calls a visitor with the stages of each device of this process, in the devices' threads, in
    /// parallel. Returns the results in device order.
    ///
    /// # Errors
    /// As for [`WorkerPool::visit`], from the first device that fails.
    pub fn visit_all<T: Send + 'static, F>(
        &mut self,
        mut visitor: impl FnMut(DeviceId) -> F,
    ) -> Result<Vec<T>, StepError<E::Error>>
    where
        F: FnOnce(&mut [E]) -> T + Send + 'static,
    {
        let answers: Vec<_> = self
            .here()
            .map(|device| (device, self.send_visitor(device, visitor(device))))
            .collect();
        answers.into_iter().map(|(device, answer)| self.await_answer(device, &answer?)).collect()
    }

    /// A handle that calls the stages of this process later, without a borrow of the pool.
    pub fn errands(&self) -> Errands<E> {
        Errands::new(self.workers.iter().flatten().map(|worker| &worker.commands))
    }

    /// Sends `visit` to the device's thread; returns the channel for its result.
    fn send_visitor<T: Send + 'static>(
        &self,
        device: DeviceId,
        visit: impl FnOnce(&mut [E]) -> T + Send + 'static,
    ) -> Result<mpsc::Receiver<T>, StepError<E::Error>> {
        // State after a torn update is invalid until the user accepts it.
        if let Some(reason) = self.torn.as_ref().or(self.unusable.as_ref()) {
            return Err(StepError::Unusable { reason: reason.clone() });
        }
        let (reply, receive) = mpsc::channel();
        let visitor = Box::new(move |stages: &mut [E]| {
            let _ = reply.send(visit(stages));
        });
        let worker = self.worker(device.index());
        let alive = worker.is_some_and(|worker| worker.thread.is_some());
        let sent =
            alive && worker.is_some_and(|w| w.commands.send(Command::Visit(visitor)).is_ok());
        if sent {
            return Ok(receive);
        }
        Err(StepError::Unusable { reason: format!("device {device} has no worker any more") })
    }

    fn await_answer<T>(
        &mut self,
        device: DeviceId,
        answer: &mpsc::Receiver<T>,
    ) -> Result<T, StepError<E::Error>> {
        let deadline = self.settings.deadline;
        answer.recv_timeout(deadline).map_err(|error| {
            let how = if error == mpsc::RecvTimeoutError::Timeout {
                self.abandon(device.index());
                format!("within {deadline:?}: raise the timeout if it is only slow")
            } else {
                "because the call panicked".to_owned()
            };
            StepError::Unusable { reason: format!("device {device} did not answer {how}") }
        })
    }
}

impl<E: StageExecutor> Drop for WorkerPool<E> {
    fn drop(&mut self) {
        for worker in self.workers.drain(..).flatten() {
            drop(worker.commands); // ends the worker's loop
            let Some(thread) = worker.thread else { continue };
            let wait = worker.ended.recv_timeout(self.settings.deadline);
            if wait == Err(mpsc::RecvTimeoutError::Disconnected) {
                let _ = thread.join();
            }
        }
    }
}
