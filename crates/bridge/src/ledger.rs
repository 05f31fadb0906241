//! What libtorch's operations take on a thread: their time, the bytes that they read and write, and
//! their floating-point operations.
//!
//! The dispatcher reports each operation. Time is an operation's own, without that of the
//! operations that it calls. What a kernel does without the dispatcher is part of its time.

use cxx::UniquePtr;

use crate::{Result, ffi::bridged};

/// All calls of one operation while its thread counted.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Name of the operation, such as `aten::add`. A copy adds what it is for: `(cast)`,
    /// `(layout)`, or `(device)`. A product or a convolution adds the shapes of its operands. An
    /// operation inside a [`Scope`] begins with the scope's name and a space.
    pub name: String,
    /// Number of calls.
    pub calls: u64,
    /// Time in ns, without that of operations inside.
    pub time_ns: u64,
    /// Bytes of tensors read and written. Each operand counts once, as if nothing of it were in a
    /// cache before.
    pub bytes: u64,
    /// Multiplications and additions of products, convolutions, and fused attention. Attention
    /// counts all keys, also those that a causal mask hides.
    pub flops: f64,
}

/// Begins to count the operations of this thread. What it counted before, and [`end`] did not
/// return, is forgotten.
///
/// # Errors
/// Out of memory.
pub fn begin() -> Result<()> {
    Ok(bridged::begin_ledger()?)
}

/// Ends the count, and returns it in no particular order.
///
/// # Errors
/// This thread does not count.
///
/// ```
/// use gpipe_bridge::ledger;
/// use tch::{Device, Kind, Tensor};
/// let x = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
/// ledger::begin().unwrap();
/// let _ = x.matmul(&x.tr());
/// let all = ledger::end().unwrap();
/// let product = all.iter().find(|entry| entry.name == "aten::mm [8 4][4 8]").unwrap();
/// assert_eq!((product.calls, product.flops), (1, 2.0 * 8.0 * 4.0 * 8.0));
/// ```
pub fn end() -> Result<Vec<Entry>> {
    let entry = |one: bridged::LedgerEntry| {
        let bridged::LedgerEntry { name, calls, time_ns, bytes, flops } = one;
        Entry { name, calls, time_ns, bytes, flops }
    };
    Ok(bridged::end_ledger()?.into_iter().map(entry).collect())
}

/// Ends the count, and forgets it.
pub fn forget() {
    bridged::forget_ledger();
}

/// Work that is counted as one operation, with the operations inside, until it is dropped. It costs
/// nothing while its thread does not count.
pub struct Scope(#[allow(dead_code)] UniquePtr<bridged::LedgerScope>);

impl Scope {
    /// Enters a scope. Its name begins with `gpipe::`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn enter(name: &'static str) -> Result<Self> {
        Ok(Self(bridged::ledger_scope(name)?))
    }
}
