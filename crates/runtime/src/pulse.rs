//! Signs of life. Every deadline counts from the last one of whoever is waited for, so a slow
//! pipeline is never taken for a dead one: who waits still beats, who is inside a kernel does not.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Where a worker is when it is in no list.
const IDLE: u64 = u64::MAX;

/// All workers' pulses.
#[derive(Debug)]
pub struct Pulses {
    origin: Instant,
    devices: Vec<Pulse>,
}

#[derive(Debug)]
struct Pulse {
    /// Nanoseconds since `origin` of the last beat, and of the last completed action.
    beat: AtomicU64,
    progress: AtomicU64,
    /// Position in the device's list.
    position: AtomicU64,
}

impl Pulses {
    /// Everyone alive, from now.
    pub fn new(devices: usize) -> Self {
        let pulse = || Pulse {
            beat: AtomicU64::new(0),
            progress: AtomicU64::new(0),
            position: AtomicU64::new(IDLE),
        };
        Self { origin: Instant::now(), devices: (0..devices).map(|_| pulse()).collect() }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn since(&self, time: u64) -> Duration {
        Duration::from_nanos(self.now().saturating_sub(time))
    }

    /// `device` is alive.
    pub fn beat(&self, device: usize) {
        if let Some(pulse) = self.devices.get(device) {
            pulse.beat.store(self.now(), Ordering::Relaxed);
        }
    }

    /// `device`, which is in another process, was alive so long ago.
    pub fn beat_before(&self, device: usize, ago: Duration) {
        if let Some(pulse) = self.devices.get(device) {
            let ago = u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX);
            pulse.beat.store(self.now().saturating_sub(ago), Ordering::Relaxed);
        }
    }

    /// `device` came to `position` of its list (`None`: it left the list), which is also a beat.
    pub fn advance(&self, device: usize, position: Option<usize>) {
        if let Some(pulse) = self.devices.get(device) {
            let now = self.now();
            pulse.beat.store(now, Ordering::Relaxed);
            pulse.progress.store(now, Ordering::Relaxed);
            pulse.position.store(position.map_or(IDLE, |p| p as u64), Ordering::Relaxed);
        }
    }

    /// How long ago `device` last gave a sign of life.
    pub fn silence(&self, device: usize) -> Duration {
        self.devices
            .get(device)
            .map_or(Duration::ZERO, |p| self.since(p.beat.load(Ordering::Relaxed)))
    }

    /// How long ago any device last completed an action.
    pub fn standstill(&self) -> Duration {
        let latest = self.devices.iter().map(|p| p.progress.load(Ordering::Relaxed)).max();
        latest.map_or(Duration::ZERO, |time| self.since(time))
    }

    /// The position in its list that `device` is at.
    pub fn position(&self, device: usize) -> Option<usize> {
        let position = self.devices.get(device)?.position.load(Ordering::Relaxed);
        (position != IDLE).then_some(position as usize)
    }
}
