//! `gpipe launch`: runs a command in several processes of this machine under one supervisor.
//!
//! The supervisor serves the store in which they meet and prints their output. If one process
//! fails, it ends all of them.

use std::{
    ffi::{OsStr, OsString},
    io::{IsTerminal, Read},
    net::{Ipv4Addr, TcpListener},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            ffi::OsStringExt,
            process::{CommandExt, ExitStatusExt},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use gpipe_bridge::c10d::TcpStore;
use gpipe_distributed::{cluster::PROCESSES_MAX, tell_of_end};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
    low_level::signal_name,
};

use gpipe_distributed::environment::{
    AGENT_STORE, MASTER_ADDR, MASTER_PORT, RANK, RESTART_COUNT, WORLD_SIZE, launched_name,
};

use super::{
    RUN_NOTE,
    lines::{Said, prefixed},
};
use crate::{
    CliError,
    args::{Arguments, LaunchArguments},
    output::{self, complain},
    signals,
};

/// Grace period after a failure, in which the other processes may end by themselves and report why.
const GRACE: Duration = Duration::from_secs(15);
/// Delay before the others are told of a process's end. Most know it at once, and more about it.
const TELL: Duration = Duration::from_secs(1);
/// Interval between checks for ended processes. Usually the end of their output triggers a check
/// first.
const LOOK: Duration = Duration::from_millis(100);
/// The options of glibc's resolver. c10d looks up the name of each address that it connects to, for
/// its log. Where a name server does not answer, this took longer than a process may be silent
/// while it joins. All connections of a launched process are on loopback, so no name is needed.
const RESOLVER: &str = "RES_OPTIONS";
/// One second, then two.
const RESOLVER_QUICK: &str = "timeout:1 attempts:2";
/// Timeout of the store's connection to itself.
const STORE: Duration = Duration::from_secs(30);

/// Errors of a launch.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    /// The first process that failed.
    #[error("rank {rank} of {size} {}{}", how(*status), counted(*tries))]
    Failed { rank: usize, size: usize, status: ExitStatus, tries: u32 },
    #[error("gpipe launch cannot serve the address where its processes meet: {0}")]
    Store(#[from] gpipe_bridge::c10d::Error),
}

impl LaunchError {
    /// The exit code of the process that failed, or 128 plus the signal's number.
    pub(crate) fn exit_code(&self) -> u8 {
        let Self::Failed { status, .. } = self else { return 1 };
        u8::try_from(code(*status).unwrap_or(1)).unwrap_or(1)
    }
}

/// The exit code of a process, or 128 plus the number of the signal that ended it.
fn code(status: ExitStatus) -> Option<i32> {
    status.code().or(status.signal().map(|signal| 128 + signal))
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (_, Some(signal)) => {
            format!("was ended by {}", signal_name(signal).unwrap_or("a signal"))
        }
        (code, None) => format!("ended with exit code {}", code.unwrap_or(1)),
    }
}

fn counted(tries: u32) -> String {
    if tries > 1 { format!(", the last of {tries} tries") } else { String::new() }
}

/// Events that the supervisor waits for.
enum Event {
    /// An output of a process was closed, so the process has ended or will soon.
    Closed,
    /// SIGINT, SIGTERM or SIGHUP.
    Asked(i32),
}

/// Starts the processes, waits for their end, and restarts them as requested.
pub(crate) fn run(arguments: &LaunchArguments) -> Result<(), CliError> {
    let size = arguments.processes;
    if !(1..=PROCESSES_MAX).contains(&size) {
        return Err(CliError::Usage(format!("--processes {size}: use 1 to {PROCESSES_MAX}")));
    }
    if arguments.command.first().is_some_and(|command| command == "launch") {
        return Err(CliError::Usage("launch cannot launch itself: name another command".into()));
    }
    // Refuse an invalid command line here, once.
    let line = std::iter::once("gpipe").chain(arguments.command.iter().map(String::as_str));
    if let Err(error) = Arguments::grouped().try_get_matches_from(line) {
        error.exit();
    }
    let (sender, events) = channel();
    watch_signals(sender.clone())?;
    let note = Note::new()?;
    let mut command: Vec<OsString> = arguments.command.iter().map(OsString::from).collect();
    for attempt in 0..=arguments.restarts {
        let mut supervisor = Supervisor::start(arguments, &command, attempt, &note, &sender)?;
        let (first, asked) = supervisor.wait(&events);
        let Some((rank, status)) = first else { return Ok(()) };
        let failed = LaunchError::Failed { rank, size, status, tries: attempt + 1 };
        // An end that was requested, here or in a process, is not restarted.
        let asked = asked || signals::has_ended(code(status));
        if asked || attempt == arguments.restarts {
            return Err(failed.into());
        }
        let folder = OsString::from_vec(std::fs::read(&note.path).unwrap_or_default());
        let Some(again) = again(&arguments.command, &folder) else {
            complain!(
                "gpipe launch: its run had not begun: it would fail again, and is not restarted"
            );
            return Err(failed.into());
        };
        command = again;
        complain!("gpipe launch: {failed}; try {} of {}", attempt + 2, arguments.restarts + 1);
    }
    Ok(())
}

/// The file in which a process records its run's folder. It is in memory, so it needs no folder for
/// temporary files and leaves nothing in one.
struct Note {
    path: PathBuf,
    /// Keeps the file alive.
    _file: OwnedFd,
}

impl Note {
    fn new() -> Result<Self, CliError> {
        let file = rustix::fs::memfd_create("gpipe-run", rustix::fs::MemfdFlags::CLOEXEC);
        let failed = |error: rustix::io::Errno| CliError::Io {
            what: "gpipe launch: a file in memory".into(),
            source: error.into(),
        };
        let file = file.map_err(failed)?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Ok(Self { path: path.into(), _file: file })
    }
}

/// Makes a launched process end when its launcher is killed, as by Ctrl-C.
pub(crate) fn end_with_launcher() {
    let Some(note) = std::env::var_os(RUN_NOTE) else { return };
    // On systems without this feature, processes later notice that the launcher's store is gone.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    // The launcher may have been killed before.
    let parent = rustix::process::getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
    if !Path::new(&note).starts_with(format!("/proc/{parent}")) {
        let _ = signal_hook::low_level::raise(SIGTERM);
    }
}

fn watch_signals(events: Sender<Event>) -> Result<(), CliError> {
    let failed = |source| CliError::Io { what: "signals".into(), source };
    let mut signals = Signals::new(signals::ends()).map_err(failed)?;
    let watch = move || {
        for signal in signals.forever() {
            if events.send(Event::Asked(signal)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("gpipe-signals".into()).spawn(watch).map_err(failed)?;
    Ok(())
}

/// The processes of one attempt.
struct Supervisor {
    /// Children by rank. `None` after they have been waited for.
    children: Vec<Option<Child>>,
    /// Threads that print the children's output. They end with it.
    readers: Vec<thread::JoinHandle<()>>,
    /// The store, which is served while this value lives.
    store: Arc<TcpStore>,
    /// The name of the meeting in the store.
    meeting: String,
    /// What the processes complained of.
    said: Arc<Mutex<Said>>,
}

impl Supervisor {
    fn start(
        arguments: &LaunchArguments,
        own_arguments: &[OsString],
        attempt: u32,
        note: &Note,
        events: &Sender<Event>,
    ) -> Result<Self, CliError> {
        let failed = |what: &'static str| {
            move |source| CliError::Io { what: format!("gpipe launch: {what}"), source }
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .map_err(failed("listening at 127.0.0.1"))?;
        let port = listener.local_addr().map_err(failed("listening at 127.0.0.1"))?.port();
        let store = TcpStore::serve(listener, STORE).map_err(LaunchError::from)?;
        let program = std::env::current_exe().map_err(failed("finding its own program"))?;
        let (store, meeting) = (Arc::new(store), launched_name(attempt));
        let mut supervisor = Self {
            children: Vec::new(),
            readers: Vec::new(),
            store,
            meeting,
            said: Arc::new(Mutex::new(Said::new(note.path.clone()))),
        };
        for rank in 0..arguments.processes {
            let mut command = Command::new(&program);
            command
                .args(own_arguments)
                .env(RUN_NOTE, &note.path)
                .env(RANK, rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env(WORLD_SIZE, arguments.processes.to_string())
                .env(MASTER_ADDR, Ipv4Addr::LOCALHOST.to_string())
                .env(MASTER_PORT, port.to_string())
                .env(AGENT_STORE, "True")
                .env(RESTART_COUNT, attempt.to_string())
                .env(RESOLVER, std::env::var_os(RESOLVER).unwrap_or(RESOLVER_QUICK.into()))
                .stdin(stdin_of(rank))
                .stdout(if rank == 0 && arguments.no_prefix {
                    Stdio::inherit()
                } else {
                    Stdio::piped()
                })
                .stderr(Stdio::piped())
                // Ctrl-C in a terminal reaches only the supervisor, which passes it on once.
                .process_group(0);
            let mut child = command.spawn().map_err(failed("starting a process"))?;
            let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
            supervisor.children.push(Some(child));
            if let Some(stdout) = stdout {
                supervisor.show(rank, stdout, output::bytes, events)?;
            }
            if let Some(stderr) = stderr {
                supervisor.show(rank, stderr, output::error_bytes, events)?;
            }
        }
        Ok(supervisor)
    }

    /// Gives the lines of a process to `print`, each with its rank in front.
    fn show(
        &mut self,
        rank: usize,
        from: impl Read + Send + 'static,
        print: fn(&[u8]),
        events: &Sender<Event>,
    ) -> Result<(), CliError> {
        let (events, said) = (events.clone(), Arc::clone(&self.said));
        let copy = move || {
            prefixed(rank, from, print, &said);
            let _ = events.send(Event::Closed); // there is nobody left to tell
        };
        let thread = thread::Builder::new().name(format!("gpipe-output-{rank}")).spawn(copy);
        let failed = |source| CliError::Io { what: "gpipe launch: a thread".into(), source };
        self.readers.push(thread.map_err(failed)?);
        Ok(())
    }

    /// Waits until all processes have ended. Returns the first that failed, and whether a signal
    /// asked for the end.
    fn wait(&mut self, events: &Receiver<Event>) -> (Option<(usize, ExitStatus)>, bool) {
        let (mut first, mut asked): (Option<(usize, ExitStatus)>, _) = (None, false);
        let (mut ended, mut ended_here): (Option<(Instant, usize, ExitStatus)>, _) = (None, false);
        let mut told = false;
        loop {
            for rank in 0..self.children.len() {
                let Some(child) = &mut self.children[rank] else { continue };
                // A process that cannot be waited for is not our child any more.
                let Some(status) =
                    child.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(256)))
                else {
                    continue;
                };
                self.children[rank] = None;
                if status.success() {
                    continue;
                }
                // A killed process closes its connections before it can be waited for. Others may
                // have ended by then, but they only report the lost connection, so the killed
                // process is the first failure.
                let tells = first.is_some_and(|(_, first)| first.signal().is_none());
                let killed = status.signal().is_some() && !ended_here;
                if first.is_none() || tells && killed {
                    first = Some((rank, status));
                }
                ended.get_or_insert_with(|| (Instant::now(), rank, status));
            }
            if self.children.iter().all(Option::is_none) {
                for reader in self.readers.drain(..) {
                    let _ = reader.join();
                }
                return (first, asked);
            }
            if let Some((at, rank, status)) = ended {
                if at.elapsed() >= TELL && !told {
                    told = true;
                    self.tell(rank, status);
                }
                let late = at.elapsed() >= GRACE;
                // A stopped process would not end by itself.
                ended_here |= self.signal(Signal::KILL, |child| late || is_stopped(child));
            }
            match events.recv_timeout(LOOK) {
                Ok(Event::Asked(signal)) => {
                    asked = true;
                    self.signal(if signal == SIGINT { Signal::INT } else { Signal::TERM }, |_| {
                        true
                    });
                }
                Ok(Event::Closed) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => thread::park_timeout(LOOK),
            }
        }
    }

    /// Tells the other processes that one has ended. Those that are still meeting have no
    /// connection to it yet.
    fn tell(&self, rank: usize, status: ExitStatus) {
        let reason = match status.signal() {
            Some(signal) => {
                format!("it was ended by {}", signal_name(signal).unwrap_or("a signal"))
            }
            None => format!("it has ended with exit code {}", status.code().unwrap_or_default()),
        };
        let (store, meeting) = (Arc::clone(&self.store), self.meeting.clone());
        // A separate thread, because the store may be busy with an unknown client. Without this
        // message, the others end at the deadline.
        let tell = move || drop(tell_of_end(&store, &meeting, rank, &reason));
        let _ = thread::Builder::new().name("gpipe-tell".into()).spawn(tell);
    }

    /// Sends a signal to the selected processes, and returns whether there were any. Processes that
    /// have been waited for are skipped, because their ids may have been reused.
    fn signal(&self, signal: Signal, is_meant: impl Fn(u32) -> bool) -> bool {
        let meant = self.children.iter().flatten().filter(|child| is_meant(child.id()));
        let meant =
            meant.filter_map(|child| i32::try_from(child.id()).ok().and_then(Pid::from_raw));
        // The process may just have ended.
        meant.map(|pid| kill_process(pid, signal).is_ok()).fold(false, |any, own| any | own)
    }
}

/// Whether a process is stopped, as by SIGSTOP.
fn is_stopped(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name is in parentheses and may contain some. The state follows it.
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
}

impl Drop for Supervisor {
    /// Ends the processes that were started if not all could be.
    fn drop(&mut self) {
        self.signal(Signal::KILL, |_| true);
        for child in self.children.iter_mut().flatten() {
            let _ = child.wait();
        }
    }
}

/// The command for a restart. A training resumes in the folder that it had begun to write.
///
/// A run that resumed another one must not start from the beginning, and may take its configuration
/// from the checkpoint. So it resumes its folder, which is an error without a checkpoint there.
///
/// `None` if a training had no folder yet: its own folder arguments would lead elsewhere now.
fn again(given: &[String], folder: &OsStr) -> Option<Vec<OsString>> {
    if given.first().is_none_or(|first| first != "train") {
        return Some(given.iter().map(OsString::from).collect());
    }
    let (mut left, mut resumed) = (Vec::<OsString>::new(), "auto".to_owned());
    let mut arguments = given.iter();
    while let Some(argument) = arguments.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument.as_str(), None),
        };
        if !["--resume", "--out"].contains(&name) {
            left.push(argument.into());
            continue;
        }
        let value = value.or_else(|| arguments.next().cloned());
        if name == "--resume" {
            resumed = value.unwrap_or(resumed);
        }
    }
    left.push("--resume".into());
    if resumed == "auto" {
        left.extend(["auto", "--out"].map(OsString::from));
    }
    left.push(folder.to_owned());
    (!folder.is_empty()).then_some(left)
}

/// Piped input goes to rank 0. A terminal stays with the supervisor.
fn stdin_of(rank: usize) -> Stdio {
    match rank == 0 && !std::io::stdin().is_terminal() {
        true => Stdio::inherit(),
        false => Stdio::null(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_a_training_that_starts_again_goes_on_where_it_had_begun() {
        let given = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let wanted = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let run = OsStr::new("/run");
        for own in ["--out x", "--out=x", "--resume auto", "--resume=auto --out z", "--steps 9"] {
            let rest = if own.contains("steps") { " --steps 9" } else { "" };
            let expected = wanted(&format!("train a.toml{rest} --resume auto --out /run"));
            assert_eq!(again(&given(&format!("train a.toml {own}")), run), Some(expected));
        }
        for own in ["--resume y", "--resume=y --out z", "--out=z --resume y"] {
            let expected = wanted("train --resume /run");
            assert_eq!(again(&given(&format!("train {own}")), run), Some(expected));
        }
        // The command was refused before it had a folder.
        assert_eq!(again(&given("train a.toml --out x"), OsStr::new("")), None);
        assert_eq!(again(&given("eval out/x"), OsStr::new("")), Some(wanted("eval out/x")));
    }
}
