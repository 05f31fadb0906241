//! Threads of a pipeline in Python.

use std::cell::Cell;

use pyo3::prelude::*;

thread_local! {
    static ATTACHED: Cell<bool> = const { Cell::new(false) };
}

/// Gives this thread a state in the interpreter that lasts as long as the thread. Without it every
/// call would make and destroy one, which takes longer than the call itself.
fn attach() {
    if ATTACHED.replace(true) {
        return;
    }
    // SAFETY: `PyGILState_Ensure` may be called on any thread while the interpreter lives, and
    // `PyEval_SaveThread` right after it, by the thread that holds the lock. The state is never
    // released, so that it outlives every later call on this thread.
    unsafe {
        let _ = pyo3::ffi::PyGILState_Ensure();
        let _ = pyo3::ffi::PyEval_SaveThread();
    }
}

/// Calls `work` with the interpreter's lock, on a thread of a pipeline.
pub(crate) fn with<T>(work: impl FnOnce(Python<'_>) -> T) -> T {
    attach();
    Python::with_gil(work)
}
