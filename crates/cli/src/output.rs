//! Prints lines for the user.
//!
//! [`say!`], [`prose!`] and [`complain!`] replace `println!` and `eprintln!`, which panic when the
//! reader is gone (`gpipe train | head`) or the disk under a log is full. A lost line must not end
//! a run.

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

/// Prints prose to standard output. Where that is a terminal, it is wrapped at words.
macro_rules! prose {
    ($($text:tt)*) => { $crate::output::prose_line(format_args!($($text)*)) };
}

/// Prints a line to standard error, which is wrapped like prose.
macro_rules! complain {
    ($($text:tt)*) => { $crate::output::error_line(format_args!($($text)*)) };
}

pub(crate) use {complain, prose, say};

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

/// The beginning of every line if GPUs are simulated.
const SIMULATED: &str = "simulated: ";

/// What is before every line.
fn mark() -> &'static str {
    static ARE_SIMULATED: OnceLock<bool> = OnceLock::new();
    if *ARE_SIMULATED.get_or_init(gpipe::Device::gpus_are_simulated) { SIMULATED } else { "" }
}

/// The text with the mark in all its lines.
pub(crate) fn marked(text: fmt::Arguments<'_>) -> String {
    let mark = mark();
    format!("{mark}{}", text.to_string().replace('\n', &format!("\n{mark}")))
}

/// The text as it is printed: without numbers of the system, wrapped if there are `columns`, and
/// marked.
fn shown(text: fmt::Arguments<'_>, columns: Option<u16>) -> String {
    let text = without_numbers(&text.to_string());
    let own = columns.map(|columns| usize::from(columns).saturating_sub(mark().len()));
    marked(format_args!("{}", wrapped(&text, own)))
}

pub(crate) fn line(text: fmt::Arguments<'_>) {
    print(&shown(text, None));
}

pub(crate) fn prose_line(text: fmt::Arguments<'_>) {
    let columns = terminal_size::terminal_size_of(io::stdout());
    print(&shown(text, columns.map(|(width, _)| width.0)));
}

fn print(text: &str) {
    if is_quiet() {
        return;
    }
    keep_error(writeln!(io::stdout().lock(), "{text}"));
}

/// Keeps the error that lost a line of standard output, except when the reader closed it.
fn keep_error(written: io::Result<()>) {
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
    {
        let _ = LOST.set(error);
    }
}

/// Prints lines of another process, as they are, to standard output.
pub(crate) fn bytes(lines: &[u8]) {
    keep_error(io::stdout().lock().write_all(lines));
}

/// Prints lines of another process, as they are, to standard error.
pub(crate) fn error_bytes(lines: &[u8]) {
    // There is nowhere to report a failure.
    let _ = io::stderr().lock().write_all(lines);
}

pub(crate) fn error_line(text: fmt::Arguments<'_>) {
    if !is_quiet() {
        always_line(text);
    }
}

/// Prints a line, such as the error that ends the command, even in a silenced process.
pub(crate) fn always_line(text: fmt::Arguments<'_>) {
    let columns = terminal_size::terminal_size_of(io::stderr());
    let text = shown(text, columns.map(|(width, _)| width.0));
    // There is nowhere to report a failure.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Breaks lines of more than `columns` characters between words, and indents what continues a line.
/// A word that is longer stays whole. A line with two spaces in a row is broken between its cells.
fn wrapped(text: &str, columns: Option<usize>) -> String {
    let Some(columns) = columns else { return text.to_owned() };
    let lines: Vec<String> = text.split('\n').map(|line| wrapped_line(line, columns)).collect();
    lines.join("\n")
}

fn wrapped_line(line: &str, columns: usize) -> String {
    if line.chars().count() <= columns {
        return line.to_owned();
    }
    let words = line.trim_start_matches(' ');
    let indent = line.len() - words.len();
    let between = if words.contains("  ") { "  " } else { " " };
    let mut out = line[..indent].to_owned();
    // The column, and the spaces before the next word.
    let (mut at, mut gap) = (indent, 0);
    for (index, part) in words.split(between).enumerate() {
        let word = part.trim_start_matches(' ');
        gap += if index > 0 { between.len() } else { 0 } + part.len() - word.len();
        if word.is_empty() {
            continue;
        }
        let length = word.chars().count();
        if index > 0 && at + gap + length > columns {
            (at, gap) = (0, indent + 2);
            out.push('\n');
        }
        out.extend(std::iter::repeat_n(' ', gap));
        out.push_str(word);
        (at, gap) = (at + gap + length, 0);
    }
    out
}

/// The text without the numbers of the system's errors, whose names are before them.
fn without_numbers(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(')') {
            Some((number, rest)) if number.bytes().all(|c| c.is_ascii_digit()) => plain += rest,
            _ => {
                plain += " (os error ";
                plain += part;
            }
        }
    }
    plain
}

/// The error that lost lines of standard output, except when the reader closed it.
pub(crate) fn lost() -> Option<&'static io::Error> {
    LOST.get()
}

#[cfg(test)]
mod tests {
    use super::{without_numbers, wrapped};

    #[test]
    fn oracle_long_lines_are_wrapped_at_words() {
        let wrapped = |text: &str, columns| wrapped(text, Some(columns));
        assert_eq!(wrapped("one two three", 80), "one two three");
        assert_eq!(wrapped("one two three", 7), "one two\n  three");
        assert_eq!(wrapped("one two three", 6), "one\n  two\n  three");
        assert_eq!(wrapped("a\n  bb cc dd", 7), "a\n  bb cc\n    dd");
        assert_eq!(wrapped("a/long/path is not cut", 5), "a/long/path\n  is\n  not\n  cut");
        assert_eq!(wrapped("two  spaces", 80), "two  spaces");
        assert_eq!(wrapped("one 1  two 2  three 3", 12), "one 1  two 2\n  three 3");
        assert_eq!(wrapped("one 1      two 2", 12), "one 1\n  two 2");
        assert_eq!(wrapped("one 1         two 2", 8), "one 1\n  two 2");
        assert_eq!(wrapped("one    two   three", 12), "one    two\n  three");
        assert_eq!(wrapped("ab  cd", 2), "ab\n  cd");
        assert_eq!(wrapped("ab cd", 0), "ab\n  cd");
        assert_eq!(wrapped("größer als groß", 10), "größer als\n  groß");
        assert_eq!(wrapped("\n", 80), "\n");
        assert_eq!(super::wrapped("a long line", None), "a long line");
    }

    #[test]
    fn oracle_errors_of_the_system_are_named_without_their_numbers() {
        let named = [
            (
                "a: No such file or directory (os error 2); look",
                "a: No such file or directory; look",
            ),
            ("a (os error 2) b (os error 13)", "a b"),
            ("a (os error x) b (os error 1", "a (os error x) b (os error 1"),
            ("", ""),
        ];
        for (text, expected) in named {
            assert_eq!(without_numbers(text), expected);
        }
    }
}
