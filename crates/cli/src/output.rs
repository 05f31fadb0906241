//! Lines for the user: [`say!`] and [`complain!`] in place of `println!` and `eprintln!`, which
//! panic where nobody reads (`gpipe train | head`) or the disk under a log is full. A run is worth
//! more than its lines.

use std::{
    fmt,
    io::{self, ErrorKind, Write},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// A line on the standard output.
macro_rules! say {
    ($($text:tt)*) => { $crate::output::line(format_args!($($text)*)) };
}

/// A line on the standard error.
macro_rules! complain {
    ($($text:tt)*) => { $crate::output::error_line(format_args!($($text)*)) };
}

pub(crate) use {complain, say};

/// Whether another process prints.
static QUIET: AtomicBool = AtomicBool::new(false);
/// Why the first line was lost.
static LOST: OnceLock<io::Error> = OnceLock::new();

/// From here on prints nothing but the error that ends the command: another process does.
pub(crate) fn quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether another process prints.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

pub(crate) fn line(text: fmt::Arguments<'_>) {
    if is_quiet() {
        return;
    }
    if let Err(error) = writeln!(io::stdout().lock(), "{text}")
        && error.kind() != ErrorKind::BrokenPipe
    {
        let _ = LOST.set(error);
    }
}

pub(crate) fn error_line(text: fmt::Arguments<'_>) {
    if !is_quiet() {
        last_words(text);
    }
}

/// What ends the command, which every process says.
pub(crate) fn last_words(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{text}"); // there is nowhere to say that it failed
}

/// Why lines are missing on the standard output, other than that its reader had enough.
pub(crate) fn lost() -> Option<&'static io::Error> {
    LOST.get()
}
