//! A switch that ends a running step from another thread, such as at Ctrl-C.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Ends a running step from another thread. Clones are the same switch.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Ends the step that runs, before its next layer. The step fails
    /// ([`Error::is_interrupted`](crate::Error::is_interrupted)), and nothing is updated. If an
    /// update has begun, the step completes. Later steps fail, too, until [`Interrupt::clear`].
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Lets steps run again.
    pub fn clear(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
