//! The fuzzer of one target, which `GPIPE_FUZZ_TARGET` names. `cargo xtask fuzz` builds it with
//! coverage and runs it.
#![no_main]
#![allow(unsafe_code)] // in the macro

use std::{alloc::System, sync::LazyLock};

use cap::Cap;
use gpipe_fuzz::Target;
use libfuzzer_sys::fuzz_target;

/// A request for more memory is a finding, whether or not the memory is touched. The largest image
/// that is read takes a third.
#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, 2 << 30);

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("GPIPE_FUZZ_TARGET").unwrap_or_default();
    Target::named(&name).unwrap_or_else(|| panic!("GPIPE_FUZZ_TARGET='{name}' is no target"))
});

fuzz_target!(|bytes: &[u8]| (TARGET.run)(bytes));
