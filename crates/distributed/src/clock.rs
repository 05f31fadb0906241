//! A clock that the processes of a pipeline share.

use std::time::{Instant, SystemTime};

use gpipe::processes::PeerError;
use gpipe_bridge::c10d::{self, Inbox, Outbox};
use gpipe_core::Nanos;

use crate::{shared::Shared, tags};

/// Number of round trips per comparison; the one with the shortest round trip counts.
const CLOCK_ROUNDS: usize = 8;

/// A clock that all processes share: the clock of rank 0.
pub(crate) struct Clock {
    start: Instant,
    /// The time on rank 0's clock at `start`.
    origin: i128,
}

impl Clock {
    /// Measures the offset between this process's clock and that of rank 0. Rank 0 serves one
    /// process after the other.
    pub(crate) fn agree(shared: &Shared) -> Result<Self, PeerError> {
        let start = Instant::now();
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let own = Self { start, origin: unix.as_nanos() as i128 };
        if shared.rank() == 0 {
            for rank in 1..shared.group.size() {
                let mut line = Line::open(shared, rank)?;
                for _ in 0..CLOCK_ROUNDS {
                    line.receive(shared)?;
                    line.send(shared, own.now().0)?;
                }
            }
            return Ok(own);
        }
        let mut best: Option<(u64, i128)> = None;
        let mut line = Line::open(shared, 0)?;
        for _ in 0..CLOCK_ROUNDS {
            let before = own.now().0;
            line.send(shared, before)?;
            let theirs = line.receive(shared)?;
            let took = own.now().0.saturating_sub(before);
            // Assumes that rank 0 answered in the middle of the round trip.
            let ahead = i128::from(theirs) - i128::from(before + took / 2);
            if best.is_none_or(|(least, _)| took < least) {
                best = Some((took, ahead));
            }
        }
        let ahead = best.map_or(0, |(_, ahead)| ahead);
        Ok(Self { origin: own.origin + ahead, ..own })
    }

    pub(crate) fn now(&self) -> Nanos {
        let now = self.origin + self.start.elapsed().as_nanos() as i128;
        Nanos(u64::try_from(now).unwrap_or_default())
    }
}

/// A connection that exchanges numbers with another process.
struct Line {
    rank: usize,
    outbox: Outbox,
    inbox: Inbox,
}

impl Line {
    fn open(shared: &Shared, rank: usize) -> Result<Self, PeerError> {
        let open = || -> c10d::Result<Self> {
            let outbox = shared.group.outbox(rank, tags::CLOCK)?;
            Ok(Self { rank, outbox, inbox: shared.group.inbox(rank, tags::CLOCK)? })
        };
        open().map_err(|error| shared.lost(rank, &error))
    }

    fn send(&mut self, shared: &Shared, number: u64) -> Result<(), PeerError> {
        let lost = |error: c10d::Error| shared.lost(self.rank, &error);
        let works = self.outbox.send(&number.to_le_bytes(), &[]).map_err(lost)?;
        works
            .iter()
            .try_for_each(|work| shared.interrupt.wait(work, shared.longest()).map_err(lost))
    }

    fn receive(&mut self, shared: &Shared) -> Result<u64, PeerError> {
        let lost = |error: c10d::Error| shared.lost(self.rank, &error);
        let work = self.inbox.post_head().map_err(lost)?;
        shared.interrupt.wait(&work, shared.longest()).map_err(lost)?;
        let number = self.inbox.head().map_err(lost)?;
        Ok(u64::from_le_bytes(number.try_into().unwrap_or_default()))
    }
}
