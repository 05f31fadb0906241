//! Threads of a pipeline in Python.

use std::cell::Cell;

use pyo3::prelude::*;

use crate::failure::Failure;

thread_local! {
    static ATTACHED: Cell<bool> = const { Cell::new(false) };
    /// The pipeline that the thread belongs to, by its [`Failure`]; 0 if to none.
    static OWNER: Cell<usize> = const { Cell::new(0) };
}

/// The pipeline that this thread belongs to, by [`Failure::id`]; 0 if to none.
pub(crate) fn owner() -> usize {
    OWNER.get()
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

/// Calls `work` with the interpreter's lock, on a thread of the pipeline whose failures those are.
pub(crate) fn with<T>(failure: &Failure, work: impl FnOnce(Python<'_>) -> T) -> T {
    attach();
    // Such a thread serves one pipeline for as long as it lives.
    OWNER.set(failure.id());
    Python::with_gil(work)
}
