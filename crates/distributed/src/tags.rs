//! The tags of all messages between processes. Messages with the same tag keep their order.
//! Messages with different tags are independent.

/// Comparing clocks.
pub(crate) const CLOCK: usize = 1;
/// All-gathers of a run's processes, on the thread that trains.
pub(crate) const GATHER: usize = 2;
/// The same on another thread.
pub(crate) const GATHER_BESIDE: usize = 4;
/// All-gathers of one replica's processes, on the thread that trains.
pub(crate) const REPLICA: usize = 6;
/// The same on another thread.
pub(crate) const REPLICA_BESIDE: usize = 8;
/// All-gathers of the processes that hold the same stages in all replicas.
pub(crate) const ACROSS: usize = 10;
/// Probing whether a process still answers.
pub(crate) const PROBE: usize = 12;
/// The first tag of links between stages: two for each edge, one for each direction.
pub(crate) const LINKS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_no_two_tags_are_equal_and_links_come_last() {
        let all = [CLOCK, GATHER, GATHER_BESIDE, REPLICA, REPLICA_BESIDE, ACROSS, PROBE, LINKS];
        assert!(all.windows(2).all(|two| two[0] < two[1]), "{all:?}");
    }
}
