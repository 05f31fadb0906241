//! Signs of life. Every deadline counts from the last sign of the worker that is waited for.
//!
//! A slow pipeline is therefore never mistaken for a dead one: a waiting worker still beats, and a
//! worker inside a kernel does not. Nor does a worker whose GPU does not come on with what it was
//! given.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Position of a worker that is not executing a list.
const IDLE: u64 = u64::MAX;

/// The pulses of all workers.
#[derive(Debug)]
pub struct Pulses {
    origin: Instant,
    devices: Vec<Pulse>,
    /// When a device that is none of these last completed an action, in ns since `origin`.
    elsewhere: AtomicU64,
}

#[derive(Debug)]
struct Pulse {
    /// Times of the last beat (`beat`) and the last completed action (`progress`), in ns since
    /// `origin`.
    beat: AtomicU64,
    progress: AtomicU64,
    /// Position in the device's list.
    position: AtomicU64,
    /// Position of the oldest action that the device had not done when it was last looked at.
    undone: AtomicU64,
}

impl Pulses {
    /// Creates pulses for `devices` workers, all alive from now on.
    pub fn new(devices: usize) -> Self {
        let pulse = || Pulse {
            beat: AtomicU64::new(0),
            progress: AtomicU64::new(0),
            position: AtomicU64::new(IDLE),
            undone: AtomicU64::new(IDLE),
        };
        let devices = (0..devices).map(|_| pulse()).collect();
        Self { origin: Instant::now(), devices, elsewhere: AtomicU64::new(0) }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn since(&self, time: u64) -> Duration {
        Duration::from_nanos(self.now().saturating_sub(time))
    }

    /// Records that `device` is alive.
    pub fn beat(&self, device: usize) {
        if let Some(pulse) = self.devices.get(device) {
            pulse.beat.store(self.now(), Ordering::Relaxed);
        }
    }

    /// Records that `device`, in another process, was alive `ago`.
    pub fn beat_before(&self, device: usize, ago: Duration) {
        if let Some(pulse) = self.devices.get(device) {
            let ago = u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX);
            pulse.beat.store(self.now().saturating_sub(ago), Ordering::Relaxed);
        }
    }

    /// Records that `device` reached `position` in its list (`None`: it left the list). This is
    /// also a beat.
    pub fn advance(&self, device: usize, position: Option<usize>) {
        if let Some(pulse) = self.devices.get(device) {
            let now = self.now();
            pulse.beat.store(now, Ordering::Relaxed);
            pulse.progress.store(now, Ordering::Relaxed);
            pulse.position.store(position.map_or(IDLE, |p| p as u64), Ordering::Relaxed);
        }
    }

    /// Records that `device` has done more of what it was given. This is also a beat.
    pub fn come_on(&self, device: usize) {
        if let Some(pulse) = self.devices.get(device) {
            let now = self.now();
            pulse.beat.store(now, Ordering::Relaxed);
            pulse.progress.store(now, Ordering::Relaxed);
        }
    }

    /// Records the position of the oldest action that `device` has not done (`None`: it has done
    /// all that it was given).
    pub fn leave_undone(&self, device: usize, position: Option<usize>) {
        if let Some(pulse) = self.devices.get(device) {
            pulse.undone.store(position.map_or(IDLE, |p| p as u64), Ordering::Relaxed);
        }
    }

    /// The position of the oldest action that `device` had not done when it was last looked at.
    pub fn undone(&self, device: usize) -> Option<usize> {
        let position = self.devices.get(device)?.undone.load(Ordering::Relaxed);
        (position != IDLE).then_some(position as usize)
    }

    /// How long ago `device` last gave a sign of life.
    pub fn silence(&self, device: usize) -> Duration {
        self.devices
            .get(device)
            .map_or(Duration::ZERO, |p| self.since(p.beat.load(Ordering::Relaxed)))
    }

    /// Records that a device of another pipeline has completed an action, for which these wait: one
    /// of another replica.
    pub fn elsewhere(&self) {
        self.elsewhere.store(self.now(), Ordering::Relaxed);
    }

    /// How long ago any device last completed an action, here or [elsewhere](Self::elsewhere).
    pub fn standstill(&self) -> Duration {
        let latest = self.devices.iter().map(|p| p.progress.load(Ordering::Relaxed)).max();
        let latest = latest.map(|here| here.max(self.elsewhere.load(Ordering::Relaxed)));
        latest.map_or(Duration::ZERO, |time| self.since(time))
    }

    /// The position of `device` in its list, if it is executing one.
    pub fn position(&self, device: usize) -> Option<usize> {
        let position = self.devices.get(device)?.position.load(Ordering::Relaxed);
        (position != IDLE).then_some(position as usize)
    }
}
