//! A `gpipe` that runs while a test looks on: lines as they come, signals, and deadlines instead of
//! sleeps.

use std::{
    io::{BufRead, BufReader, Read},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant},
};

/// Longest wait for anything, on a machine that runs other tests, too.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// What a command printed and how it ended, which it must within the deadline.
pub fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (stdout, stderr) =
        (read_all(child.stdout.take().unwrap()), read_all(child.stderr.take().unwrap()));
    let (Ok(stdout), Ok(stderr)) = (stdout.recv_timeout(DEADLINE), stderr.recv_timeout(DEADLINE))
    else {
        child.kill().unwrap();
        panic!("{command:?} does not end");
    };
    Output { status: child.wait().unwrap(), stdout, stderr }
}

fn read_all(mut from: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, all) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        let _ = sender.send(bytes);
    });
    all
}

/// A process that is killed when this is dropped.
pub struct Process {
    child: Child,
    /// Closed when the process has ended.
    lines: Receiver<String>,
    /// What it printed so far, both outputs.
    pub printed: String,
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (sender, lines) = channel();
        read_lines(child.stdout.take().unwrap(), sender.clone());
        read_lines(child.stderr.take().unwrap(), sender);
        Self { child, lines, printed: String::new() }
    }

    /// The number that the system knows it by.
    pub fn number(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line with `part`, which must come.
    pub fn until(&mut self, part: &str) {
        let end = Instant::now() + DEADLINE;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    let is_it = line.contains(part);
                    self.printed += &(line + "\n");
                    if is_it {
                        return;
                    }
                }
                Err(error) => panic!("no '{part}' ({error}) in: {}", self.printed),
            }
        }
    }

    /// Sends a signal by its name, such as TERM.
    pub fn signal(&self, name: &str) {
        // The process is not waited for yet, so that its number is its own even if it has ended.
        let number = self.child.id().to_string();
        let sent = Command::new("kill").args([&format!("-{name}"), &number]).status().unwrap();
        assert!(sent.success(), "kill -{name}");
    }

    /// How it ended, if it does within `time`.
    pub fn ends_within(&mut self, time: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + time;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => self.printed += &(line + "\n"),
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => return Some(self.child.wait().unwrap()),
            }
        }
    }

    /// How it ended: the exit code, or else the signal.
    pub fn end(&mut self) -> Result<i32, i32> {
        let Some(status) = self.ends_within(DEADLINE) else {
            panic!("it does not end: {}", self.printed);
        };
        status.code().ok_or_else(|| status.signal().unwrap())
    }

    /// SIGKILL; how it ended.
    pub fn kill(&mut self) -> Result<i32, i32> {
        self.child.kill().unwrap();
        self.end()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_lines(from: impl Read + Send + 'static, to: Sender<String>) {
    thread::spawn(move || {
        for line in BufReader::new(from).lines() {
            let Ok(line) = line else { return };
            if to.send(line).is_err() {
                return;
            }
        }
    });
}
