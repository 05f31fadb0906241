//! Settings of a pool.

use std::{sync::Arc, time::Duration};

use gpipe_core::simulate::Costs;

/// Settings of a pool.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Capacity of a link in messages, in each direction.
    pub link_capacity: usize,
    /// Longest silence of a worker before the step fails. It must exceed the longest single action,
    /// because a worker inside a kernel gives no sign of life.
    pub deadline: Duration,
    /// Costs for a virtual clock; `None`: the real clock.
    pub virtual_costs: Option<Arc<Costs>>,
}

impl Default for Settings {
    /// Two messages per link, five minutes, the real clock.
    fn default() -> Self {
        Self { link_capacity: 2, deadline: Duration::from_secs(300), virtual_costs: None }
    }
}
