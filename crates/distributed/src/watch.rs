//! Signs of life and failures, through the store.
//!
//! One thread publishes the positions of this process's devices and reads those of the other
//! processes. A broken connection also reveals a killed process. A stopped process, or one behind a
//! cut link, is only noticed here.
//!
//! Calls to the store block until its server answers. So a second thread, which makes no such
//! calls, watches the first.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use gpipe::processes::{Alarm, PeerError, Pulses, Run};
use gpipe_bridge::c10d::{self, TcpStore};
use gpipe_core::{Action, DeviceId, StageId, lower::Program};

use crate::interrupt::Interrupt;

/// Who serves the store, in a user's words.
pub(crate) const SERVER: &str = "rank 0 (or its launcher)";
/// Key that counts the processes that have left; the host of the store leaves last.
pub(crate) const GOODBYE_KEY: &str = "goodbye";
/// Key that holds the first failure.
const FAILED: &str = "failed";
/// Maximum size of a failure's text.
const REASON_BYTES_MAX: usize = 4096;
/// Stands for a position when the device is between runs.
const IDLE: u32 = u32::MAX;
/// Longest silence of a process while the processes join. A join only waits, so a process that
/// misses several beats was killed or stopped. A step may keep a process busy for longer.
const JOIN_SILENCE: Duration = Duration::from_secs(5);

fn beat_key(rank: usize) -> String {
    format!("beat/{rank}")
}

fn left_key(rank: usize) -> String {
    format!("left/{rank}")
}

/// What is known about all processes. Shared by the threads here and by callers that wait for a
/// process.
pub(crate) struct Watch {
    rank: usize,
    deadline: Duration,
    /// Interval between signs of life.
    interval: Duration,
    state: Mutex<State>,
    interrupt: Arc<Interrupt>,
    /// Whether a launcher serves the store.
    launched: bool,
    /// To the thread that uses the store: a failure to report, and where to send the failure that
    /// all agree on.
    tell: mpsc::Sender<(PeerError, mpsc::Sender<PeerError>)>,
    ends: AtomicBool,
}

struct State {
    /// The last sign of life of each process.
    heard: Vec<Heard>,
    /// When the store last answered.
    answered: Instant,
    run: Option<(Arc<Program>, Arc<Pulses>, Alarm)>,
    /// The devices of each process.
    devices: Vec<Vec<DeviceId>>,
    failed: Option<PeerError>,
    /// How far the processes are in joining each other.
    phase: Phase,
    /// How long the last round of store calls took.
    round: Duration,
    /// When a device of another process was last seen to come on.
    moved: Instant,
}

/// How far the processes are in joining each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Some processes may not have come yet; silence counts only for those heard from.
    Meeting,
    /// All processes have come and are connecting to each other.
    Connecting,
    /// All processes are connected and at work.
    Joined,
}

/// The last sign of life of a process.
#[derive(Clone)]
struct Heard {
    at: Instant,
    number: u64,
    /// Each device's position in its list.
    positions: HashMap<usize, u32>,
    left: bool,
}

/// The watch's threads, which end when this is dropped.
pub(crate) struct Watcher {
    pub watch: Arc<Watch>,
    threads: Vec<JoinHandle<()>>,
}

impl Watcher {
    /// Starts to publish signs of life through `store`, and to watch those of the other processes.
    pub(crate) fn start(
        store: TcpStore,
        rank: usize,
        size: usize,
        deadline: Duration,
        interrupt: &Arc<Interrupt>,
        launched: bool,
    ) -> std::io::Result<Self> {
        let (tell, told) = mpsc::channel();
        let watch = Arc::new(Watch {
            rank,
            deadline,
            interval: (deadline / 10).clamp(Duration::from_millis(20), Duration::from_secs(1)),
            state: Mutex::new(State::new(size)),
            interrupt: Arc::clone(interrupt),
            launched,
            tell,
            ends: AtomicBool::new(false),
        });
        let (speaks, looks) = (Arc::clone(&watch), Arc::clone(&watch));
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        let threads = vec![
            thread("gpipe-beat").spawn(move || speaks.speak(&store, &told))?,
            thread("gpipe-watch").spawn(move || looks.look())?,
        ];
        Ok(Self { watch, threads })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.watch.ends.store(true, Ordering::SeqCst);
        let patience = Instant::now() + Duration::from_secs(2);
        for thread in self.threads.drain(..) {
            // A store that does not answer blocks its thread, which is then left behind.
            while !thread.is_finished() && Instant::now() < patience {
                std::thread::park_timeout(Duration::from_millis(5));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rank of this process.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Records that all processes have come: from now on, the silence of each one counts.
    pub(crate) fn met(&self) {
        let mut state = self.lock();
        state.phase = Phase::Connecting;
        let now = Instant::now();
        state.heard.iter_mut().for_each(|heard| heard.at = now);
    }

    /// Records that this process has joined: from now on, the limit for silence is the deadline.
    pub(crate) fn joined(&self) {
        self.lock().phase = Phase::Joined;
    }

    /// Sets the devices of each process, from now on.
    pub(crate) fn place(&self, devices: Vec<Vec<DeviceId>>) {
        self.lock().devices = devices;
    }

    /// Starts a run.
    pub(crate) fn begin(&self, run: Run) -> Result<(), PeerError> {
        let mut state = self.lock();
        if let Some(failed) = &state.failed {
            return Err(failed.clone());
        }
        state.run = Some((run.program, run.pulses, run.alarm));
        Ok(())
    }

    /// As [`State::standstill`].
    pub(crate) fn standstill(&self) -> Duration {
        self.lock().standstill(self.rank)
    }

    /// Records that the device of `stage` is alive: it waits for other replicas.
    pub(crate) fn beat(&self, stage: StageId) {
        let state = self.lock();
        let Some((program, pulses, _)) = &state.run else { return };
        let has_stage = |actions: &Vec<Action>| actions.iter().any(|own| own.stage == stage);
        if let Some(device) = program.devices.iter().position(has_stage) {
            pulses.beat(device);
        }
    }

    /// The known failure, if any.
    pub(crate) fn failed(&self) -> Option<PeerError> {
        self.lock().failed.clone()
    }

    /// Reports a failure: ends every wait here and tells the other processes, unless they already
    /// know of another failure. Returns the failure that all agree on.
    pub(crate) fn fail(&self, why: &PeerError) -> PeerError {
        if let Some(known) = self.failed() {
            return known;
        }
        let (answer, answered) = mpsc::channel();
        let told = self.tell.send((why.clone(), answer)).is_ok();
        let longest = (2 * self.interval).max(Duration::from_secs(2));
        let first = told.then(|| answered.recv_timeout(longest).ok()).flatten();
        self.conclude(first.unwrap_or_else(|| why.clone()))
    }

    /// Records the first failure, ends all waits, and raises the alarm.
    fn conclude(&self, why: PeerError) -> PeerError {
        let (known, alarm, is_new) = {
            let mut state = self.lock();
            let is_new = state.failed.is_none();
            let known = state.failed.get_or_insert(why).clone();
            let alarm = state.run.as_ref().map(|(.., alarm)| Arc::clone(alarm));
            (known, alarm.filter(|_| is_new), is_new)
        };
        if let Some(alarm) = alarm {
            alarm(known.clone());
        }
        if is_new {
            self.interrupt.interrupt();
        }
        known
    }

    /// Describes a process that is unreachable.
    pub(crate) fn lost(&self, rank: usize, why: &str) -> PeerError {
        let known = {
            let state = self.lock();
            let last = state.heard.get(rank).map(|heard| {
                let left = if heard.left { ", it had left" } else { "" };
                let ago = heard.at.elapsed();
                format!("; last sign of life {ago:.1?} ago{left}{}", state.doing(rank))
            });
            last.unwrap_or_default()
        };
        PeerError {
            process: Some(rank),
            reason: format!("it cannot be reached any more ({why}){known}"),
        }
    }

    /// The loop of the thread that uses the store.
    fn speak(&self, store: &TcpStore, told: &mpsc::Receiver<(PeerError, mpsc::Sender<PeerError>)>) {
        let mut number = 0;
        loop {
            let ends = self.ends.load(Ordering::SeqCst);
            number += 1;
            let spoke = self.round(store, number);
            if ends {
                let _ = store.set(&left_key(self.rank), b"1");
                let _ = store.add(GOODBYE_KEY, 1);
                return;
            }
            if let Err(error) = spoke {
                // The system asks the processes of a killed launcher to end, and they save first.
                if !self.launched || self.lock().phase != Phase::Joined {
                    let reason = format!("{SERVER} does not answer any more ({})", error.message);
                    self.conclude(PeerError { process: None, reason });
                }
                return;
            }
            // Until the next round, failures are forwarded at once.
            let next = Instant::now() + self.interval;
            while let Some(rest) = next.checked_duration_since(Instant::now()) {
                let slice = rest.min(Duration::from_millis(20));
                if let Ok((why, answer)) = told.recv_timeout(slice) {
                    let _ = answer.send(tell(store, &why).unwrap_or(why));
                }
                if self.ends.load(Ordering::SeqCst) {
                    break;
                }
            }
        }
    }

    /// One round: publishes this process's sign of life and reads those of the others.
    fn round(&self, store: &TcpStore, number: u64) -> c10d::Result<()> {
        let start = Instant::now();
        let own = self.lock().own_beat(self.rank, number);
        store.set(&beat_key(self.rank), &own)?;
        if store.check(FAILED)? {
            let why = read_failure(&store.get(FAILED, self.deadline)?);
            self.conclude(why);
        }
        let size = self.lock().heard.len();
        for rank in (0..size).filter(|rank| *rank != self.rank) {
            let key = beat_key(rank);
            if store.check(&key)? {
                let beat = store.get(&key, self.deadline)?;
                let left = store.check(&left_key(rank))?;
                self.lock().hear(rank, &beat, left);
            }
        }
        let mut state = self.lock();
        state.answered = Instant::now();
        state.round = start.elapsed();
        Ok(())
    }

    /// The loop of the thread that checks for silence and for a standstill.
    fn look(&self) {
        let slice = (self.interval / 2).min(Duration::from_millis(100));
        while !self.ends.load(Ordering::SeqCst) {
            std::thread::park_timeout(slice);
            self.interrupt.end_standstills(self.standstill());
            let silent = {
                let state = self.lock();
                if state.failed.is_some() {
                    continue;
                }
                state.silent(self.rank, self.deadline)
            };
            if let Some(why) = silent {
                self.fail(&why);
            }
        }
    }
}

impl State {
    fn new(size: usize) -> Self {
        let now = Instant::now();
        let heard = Heard { at: now, number: 0, positions: HashMap::new(), left: false };
        Self {
            heard: vec![heard; size],
            answered: now,
            run: None,
            devices: vec![Vec::new(); size],
            failed: None,
            phase: Phase::Meeting,
            round: Duration::ZERO,
            moved: now,
        }
    }

    /// How long ago any device of any process last came on. Before the first run: the longest
    /// silence of a process other than `own`.
    fn standstill(&self, own: usize) -> Duration {
        if let Some((_, pulses, _)) = &self.run {
            return pulses.standstill().min(self.moved.elapsed());
        }
        let others = self.heard.iter().enumerate().filter(|(rank, _)| *rank != own);
        others.map(|(_, heard)| heard.at.elapsed()).max().unwrap_or_default()
    }

    /// Encodes this process's sign of life.
    fn own_beat(&self, rank: usize, number: u64) -> Vec<u8> {
        let mut beat = number.to_le_bytes().to_vec();
        let devices = self.devices.get(rank).map_or(&[][..], Vec::as_slice);
        for device in devices {
            let pulses = self.run.as_ref().map(|(_, pulses, _)| pulses);
            let position = pulses.and_then(|pulses| pulses.position(device.index()));
            let silence = pulses.filter(|_| position.is_some()).map(|p| p.silence(device.index()));
            let silence_ms = u32::try_from(silence.unwrap_or_default().as_millis());
            let position = position.and_then(|at| u32::try_from(at).ok()).unwrap_or(IDLE);
            beat.extend(device.0.to_le_bytes());
            beat.extend(position.to_le_bytes());
            beat.extend(silence_ms.unwrap_or(u32::MAX).to_le_bytes());
        }
        beat
    }

    /// Records another process's sign of life, and passes its devices' beats on to the run's
    /// pulses.
    fn hear(&mut self, rank: usize, beat: &[u8], left: bool) {
        let Some(heard) = self.heard.get_mut(rank) else { return };
        heard.left = left;
        let Some((number, devices)) = beat.split_first_chunk::<8>() else { return };
        let number = u64::from_le_bytes(*number);
        if number == heard.number {
            return;
        }
        (heard.number, heard.at) = (number, Instant::now());
        let pulses = self.run.as_ref().map(|(_, pulses, _)| pulses);
        let devices_max = self.run.as_ref().map_or(0, |(program, ..)| program.devices.len());
        for device in devices.chunks_exact(12) {
            let word = |at: usize| {
                let word = device.get(at..at + 4).and_then(|word| word.try_into().ok());
                u32::from_le_bytes(word.unwrap_or_default())
            };
            let (own, position, silence) = (word(0) as usize, word(4), word(8));
            if own >= devices_max {
                continue; // not in the program, so ignored
            }
            let before = heard.positions.insert(own, position);
            if before != Some(position) {
                self.moved = Instant::now();
                if let Some(pulses) = pulses {
                    pulses.elsewhere();
                }
            }
            // Devices of other replicas have the same numbers.
            let is_ours =
                self.devices.get(rank).is_some_and(|d| d.contains(&DeviceId::from_index(own)));
            let Some(pulses) = pulses.filter(|_| is_ours) else { continue };
            if before != Some(position) {
                pulses.advance(own, (position != IDLE).then_some(position as usize));
            }
            pulses.beat_before(own, Duration::from_millis(u64::from(silence)));
        }
    }

    /// Finds a process, or the store, that has been silent for too long.
    fn silent(&self, own: usize, deadline: Duration) -> Option<PeerError> {
        if self.answered.elapsed() > deadline {
            // The host of the store is silent, or this process is cut off from everything.
            let reason = format!(
                "{SERVER} has not answered for {:.1?}: it was stopped, or the network is cut",
                self.answered.elapsed()
            );
            return Some(PeerError { process: None, reason });
        }
        let (longest, why) = match self.phase {
            Phase::Joined => (deadline, "it was stopped, or the network is cut"),
            // A slow store also delays the other processes' beats.
            _ => (
                deadline.min(JOIN_SILENCE + 4 * self.round),
                "it was killed or stopped while it joined, the network is cut, or its name server \
                does not answer (set RES_OPTIONS='timeout:1 attempts:2')",
            ),
        };
        let others = self.heard.iter().enumerate().filter(|(rank, _)| *rank != own);
        let known = others.filter(|(_, heard)| self.phase != Phase::Meeting || heard.number > 0);
        let mut silent = known.filter(|(_, heard)| !heard.left && heard.at.elapsed() > longest);
        let (rank, heard) = silent.next()?;
        let (ago, doing) = (heard.at.elapsed(), self.doing(rank));
        let reason = format!("no sign of life for {ago:.1?}{doing}: {why}");
        Some(PeerError { process: Some(rank), reason })
    }

    /// ", in 1F3": the actions that the devices of a process were last known to execute. Empty if
    /// none.
    fn doing(&self, rank: usize) -> String {
        let Some((program, ..)) = &self.run else { return String::new() };
        let Some(heard) = self.heard.get(rank) else { return String::new() };
        // Valid for another replica too, because all replicas run the same program.
        let mut positions: Vec<(&usize, &u32)> = heard.positions.iter().collect();
        positions.sort_unstable();
        let action = |(device, position): (&usize, &u32)| {
            program.devices.get(*device)?.get(*position as usize)
        };
        let actions: Vec<String> =
            positions.into_iter().filter_map(action).map(ToString::to_string).collect();
        if actions.is_empty() { String::new() } else { format!(", in {}", actions.join(" and ")) }
    }
}

/// Publishes a failure if it is the first; returns the first failure.
pub(crate) fn tell(store: &TcpStore, why: &PeerError) -> c10d::Result<PeerError> {
    let mut text = why.process.map_or_else(|| "-".to_owned(), |rank| rank.to_string());
    text.push(' ');
    text.push_str(&why.reason);
    let end = (0..=REASON_BYTES_MAX.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or_default());
    let first = store.compare_set(FAILED, b"", text.as_bytes())?;
    Ok(read_failure(&first))
}

fn read_failure(bytes: &[u8]) -> PeerError {
    let text = String::from_utf8_lossy(bytes);
    let (rank, reason) = text.split_once(' ').unwrap_or(("-", &text));
    PeerError { process: rank.parse().ok(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that prepared data for longer than four timeouts was called lost.
    #[test]
    fn regression_a_process_that_prepares_does_not_stand_still() {
        let (mut state, long) = (State::new(2), Duration::from_secs(100));
        state.moved -= long;
        state.heard[0].at -= long;
        assert!(state.standstill(0) < long);
        state.heard[1].at -= long;
        assert!(state.standstill(0) >= long);
    }
}
