//! Prints lines for the user.
//!
//! [`say!`] and [`complain!`] replace `println!` and `eprintln!`, which panic when the reader is
//! gone (`gpipe train | head`) or the disk under a log is full. A lost line must not end a run.

use std::{
    cell::Cell,
    fmt,
    io::{self, ErrorKind, Write},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// Prints a line to standard output.
macro_rules! say {
    ($($text:tt)*) => { $crate::output::line(format_args!($($text)*)) };
}

/// Prints a line to standard error.
macro_rules! complain {
    ($($text:tt)*) => { $crate::output::error_line(format_args!($($text)*)) };
}

pub(crate) use {complain, say};

/// Whether this process prints nothing, because another process does.
static QUIET: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The same of this thread, because another thread prints.
    static QUIET_HERE: Cell<bool> = const { Cell::new(false) };
}

/// The error that lost the first line.
static LOST: OnceLock<io::Error> = OnceLock::new();

/// Silences this process, because another process prints. Only the error that ends the command is
/// still printed.
pub(crate) fn quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Silences this thread, because another one prints.
pub(crate) fn quiet_thread() {
    QUIET_HERE.set(true);
}

/// Whether this process or thread is silenced.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed) || QUIET_HERE.get()
}

/// The text. If GPUs are simulated, every line says so.
pub(crate) fn marked(text: fmt::Arguments<'_>) -> String {
    static ARE_SIMULATED: OnceLock<bool> = OnceLock::new();
    let text = text.to_string();
    match ARE_SIMULATED.get_or_init(gpipe::Device::gpus_are_simulated) {
        true => format!("simulated: {}", text.replace('\n', "\nsimulated: ")),
        false => text,
    }
}

pub(crate) fn line(text: fmt::Arguments<'_>) {
    if is_quiet() {
        return;
    }
    if let Err(error) = writeln!(io::stdout().lock(), "{}", marked(text))
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

/// Prints the error that ends the command, even in a silenced process.
pub(crate) fn last_words(text: fmt::Arguments<'_>) {
    // There is nowhere to report a failure.
    let _ = writeln!(io::stderr().lock(), "{}", marked(text));
}

/// The error that lost lines of standard output, except when the reader closed it.
pub(crate) fn lost() -> Option<&'static io::Error> {
    LOST.get()
}
