//! A command in several processes: how they meet, what they agree on, and how they are started.
//!
//! Every process runs the same command on the same configuration and data, with its share of the
//! stages. Only rank 0 prints, and writes what is written once.
//!
//! - [`launch`]: `gpipe launch`, which sets the variables that identify a process; [`lines`]: what
//!   it prints of the processes
//! - here: the processes of a command, once they have met

pub(crate) mod launch;
mod lines;

use std::{
    cell::OnceCell,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Arc, mpsc},
    thread::ScopedJoinHandle,
    time::Duration,
};

use gpipe::{
    Device,
    processes::{PeerError, Replicas, Transport},
};
use gpipe_distributed::{
    Cluster, Meeting, Member, Store,
    environment::Environment,
    threads::{self, SharedSums},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::{CliError, args::ConfigArguments, config::Config, output};

/// The most replicas in one process.
pub(crate) const REPLICAS_MAX: usize = 256;

/// Path of the file in which a training that has begun writes its run's folder, for the launcher.
pub(crate) const RUN_NOTE: &str = "GPIPE_RUN_NOTE";
/// torchrun's name for the number of processes that it started on this host.
const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";

/// The process timeout, in seconds, as far as the command line and its configuration file determine
/// it. Errors in them are reported later, when the other processes can receive them.
pub(crate) fn timeout_s(arguments: &ConfigArguments) -> u64 {
    preliminary(arguments).pipeline.timeout_s
}

/// The configuration as far as it can be read before processes meet. Its errors are reported later.
fn preliminary(arguments: &ConfigArguments) -> Config {
    let config = match (&arguments.config, &arguments.from) {
        (Some(_), _) | (_, Some(_)) => Config::read(arguments),
        (None, None) => Config::from_text("", Path::new("--set"), arguments),
    };
    config.unwrap_or_default()
}

/// The processes of a command, as seen by one of them. Often there is only one.
pub(crate) struct Processes {
    /// All processes, if there are several.
    cluster: Option<Arc<Cluster>>,
    /// The processes of this process's replica, if there are several replicas.
    member: OnceCell<Arc<Member>>,
    /// If replicas are threads of this process: where they add their gradients.
    sums: Option<SharedSums>,
    /// How many of the processes are on this host, as far as it is known.
    on_this_host: usize,
}

/// How many of `size` processes are on this host, as far as their launcher says it.
fn on_this_host(size: usize) -> usize {
    if std::env::var_os(RUN_NOTE).is_some() {
        return size; // gpipe launch starts all of them here
    }
    let told = std::env::var(LOCAL_WORLD_SIZE).ok();
    told.and_then(|text| text.trim().parse::<usize>().ok()).unwrap_or(1).clamp(1, size)
}

/// How long processes meet without a word.
const SILENCE: Duration = Duration::from_secs(5);

/// A line that is printed if something takes long.
struct Waiting {
    /// Ends the wait when dropped.
    _ends: Option<mpsc::Sender<()>>,
}

impl Waiting {
    /// Prints the line even in a silenced process.
    fn tell_after(time: Duration, line: String) -> Self {
        let (ends, ended) = mpsc::channel::<()>();
        let wait = move || {
            if ended.recv_timeout(time) == Err(mpsc::RecvTimeoutError::Timeout) {
                output::always_line(format_args!("gpipe: {line}"));
            }
        };
        // Without a thread to spare nothing is told, and nothing is lost.
        let thread = std::thread::Builder::new().name("gpipe-waiting".into()).spawn(wait);
        Self { _ends: thread.is_ok().then_some(ends) }
    }
}

/// What this process waits for when it meets the others.
fn whom_it_awaits(environment: &Environment, meeting: &Meeting) -> String {
    let Environment { rank, size, .. } = environment;
    match &meeting.store {
        Store::At { host, port } | Store::Launcher { host, port } => {
            format!("rank {rank} of {size} waits for all of them at {host}:{port}")
        }
        Store::Serve(listener) => {
            let address = listener.local_addr();
            let is_here = address.as_ref().is_ok_and(|address| address.ip().is_loopback());
            let at = address.map_or_else(|_| String::new(), |address| format!(" at {address}"));
            let hint = match is_here {
                true => ", an address that only this host reaches: for several, set GPIPE_ADDRESS",
                false => "",
            };
            format!("rank {rank} of {size} waits for the others{at}{hint}")
        }
    }
}

impl Processes {
    /// Meets the other processes in `environment` and calls `command`. If it fails, the other
    /// processes end too.
    pub(crate) fn among(
        environment: Option<&Environment>,
        timeout_s: u64,
        command: impl FnOnce(&Self) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let alone = Self { cluster: None, member: OnceCell::new(), sums: None, on_this_host: 1 };
        let Some(environment) = environment else { return command(&alone) };
        if environment.rank > 0 {
            output::quiet();
        }
        let facts = [
            ("gpipe", env!("CARGO_PKG_VERSION").to_owned()),
            ("libtorch", gpipe_bridge::version().to_owned()),
        ];
        let facts = facts.map(|(name, value)| (format!("version of {name}"), value)).into();
        let meeting = environment.meeting(Duration::from_secs(timeout_s), facts)?;
        // Of processes that gpipe launch started, rank 0 tells for all. Others may have logs apart.
        let tells = environment.rank == 0 || std::env::var_os(RUN_NOTE).is_none();
        let waiting =
            tells.then(|| Waiting::tell_after(SILENCE, whom_it_awaits(environment, &meeting)));
        let cluster = Some(Cluster::join(meeting)?);
        drop(waiting);
        let on_this_host = on_this_host(environment.size);
        let processes = Self { cluster, on_this_host, ..alone };
        let done = command(&processes);
        if let Err(error) = &done {
            processes.fail(error);
        }
        done
    }

    /// Like [`Processes::among`], for commands that train. Without other processes, the replicas
    /// that the configuration asks for are threads of this process.
    pub(crate) fn among_replicas(
        environment: Option<&Environment>,
        arguments: &ConfigArguments,
        command: impl Fn(&Self) -> Result<(), CliError> + Sync,
    ) -> Result<(), CliError> {
        let config = preliminary(arguments);
        let (timeout_s, replicas) = (config.pipeline.timeout_s, config.pipeline.replicas);
        // A GPU is no place for several pipelines at once.
        let are_cpus = config.pipeline.devices.0.iter().all(|device| *device == Device::Cpu);
        if environment.is_some() || replicas <= 1 || replicas > REPLICAS_MAX || !are_cpus {
            return Self::among(environment, timeout_s, command);
        }
        let failed = |source| CliError::Io { what: "replicas in this process".into(), source };
        let meetings = threads::meetings(replicas, Duration::from_secs(timeout_s));
        let sums = SharedSums::new();
        let replica = |meeting: Meeting| {
            gpipe::compute_on_this_thread_alone();
            if meeting.rank > 0 {
                output::quiet_thread();
            }
            let cluster = Some(Cluster::join(meeting)?);
            let sums = Some(sums.clone());
            let processes = Self { cluster, member: OnceCell::new(), sums, on_this_host: 1 };
            // The others would wait for the gradients of one that panicked.
            let done = catch_unwind(AssertUnwindSafe(|| command(&processes)))
                .unwrap_or_else(|_| Err(failed(io::Error::other("its thread panicked"))));
            if let Err(error) = &done {
                processes.fail(error);
            }
            done
        };
        let ended: Vec<Result<(), CliError>> = std::thread::scope(|scope| {
            let begin = |meeting: Meeting| {
                let name = format!("gpipe-replica-{}", meeting.rank);
                let replica = &replica;
                std::thread::Builder::new().name(name).spawn_scoped(scope, || replica(meeting))
            };
            let begun: Vec<_> = meetings.map_err(failed)?.into_iter().map(begin).collect();
            let end = |begun: io::Result<ScopedJoinHandle<'_, Result<(), CliError>>>| {
                let ended = begun.map_err(failed)?.join();
                ended.unwrap_or_else(|_| Err(failed(io::Error::other("its thread panicked"))))
            };
            Ok::<_, CliError>(begun.into_iter().map(end).collect())
        })?;
        ended.into_iter().collect()
    }

    /// How many replicas this process has.
    pub(crate) fn replicas_here(&self) -> usize {
        if self.sums.is_some() { self.count() } else { 1 }
    }

    /// How many of the processes are on this host, as far as a launcher says it. Replicas that are
    /// threads are in one process.
    pub(crate) fn on_this_host(&self) -> usize {
        self.on_this_host
    }

    /// Tells the waiting processes why this one stops, unless they have reached the same error.
    pub(crate) fn fail(&self, error: &CliError) {
        if let Some(cluster) = self.cluster.as_ref().filter(|_| !error.is_of_all()) {
            let process = Some(cluster.rank());
            cluster.fail(&PeerError { process, reason: error.to_string() });
        }
    }

    /// Waits for the replica that saves. It may take long, and a long wait inside a step would be a
    /// timeout.
    pub(crate) fn meet_replicas(&self) -> Result<(), CliError> {
        if self.member.get().is_some() { self.all(Ok(())) } else { Ok(()) }
    }

    /// Divides the processes among `count` replicas of the pipeline.
    pub(crate) fn replicate(&self, count: usize) -> Result<(), CliError> {
        if count == 1 {
            return Ok(());
        }
        let Some(cluster) = &self.cluster else {
            return Err(CliError::Usage(format!(
                "pipeline.replicas is {count}, and there is one process: give --replicas {count} \
                to run them as threads of it, or --replicas 1, or start as many processes or a \
                multiple, with gpipe launch --processes {count} or torchrun"
            )));
        };
        let member = match &self.sums {
            Some(sums) => Member::sharing(cluster, count, sums)?,
            None => Member::new(cluster, count)?,
        };
        self.member.get_or_init(|| member);
        Ok(())
    }

    /// The processes that share this process's pipeline, which are those of its replica.
    pub(crate) fn transport(&self) -> Option<Arc<dyn Transport>> {
        match self.member.get() {
            Some(member) => Some(Arc::clone(member) as Arc<dyn Transport>),
            None => self.cluster.as_ref().map(|cluster| Arc::clone(cluster) as Arc<dyn Transport>),
        }
    }

    /// The other replicas, if there are any.
    pub(crate) fn replicas(&self) -> Option<Arc<dyn Replicas>> {
        self.member.get().map(|member| Arc::clone(member) as Arc<dyn Replicas>)
    }

    /// Whether this process's replica saves the state, which all replicas share.
    pub(crate) fn saves(&self) -> bool {
        self.member.get().is_none_or(|member| member.index() == 0)
    }

    /// Whether this is rank 0, which prints, and writes what is written once.
    pub(crate) fn is_first(&self) -> bool {
        self.cluster.as_ref().is_none_or(|cluster| cluster.rank() == 0)
    }

    /// Whether there are several processes.
    pub(crate) fn are_several(&self) -> bool {
        self.cluster.is_some()
    }

    /// The number of processes.
    pub(crate) fn count(&self) -> usize {
        self.cluster.as_ref().map_or(1, |cluster| cluster.size())
    }

    /// Calls `decide` on rank 0 and returns its result, or its error, on all processes.
    pub(crate) fn decided<T: Serialize + DeserializeOwned>(
        &self,
        decide: impl FnOnce() -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let Some(cluster) = &self.cluster else { return decide() };
        if self.is_first() {
            let mut decided = decide();
            let told = serde_json::to_vec(&decided.as_ref().map_err(ToString::to_string));
            let told = told.unwrap_or_else(|error| {
                let reason = format!("{error}: several processes need paths in UTF-8: rename it");
                let told = serde_json::to_vec(&Err::<(), _>(&reason)).unwrap_or_default();
                decided = Err(failed(Some(0), reason));
                told
            });
            let gathered = cluster.gather(told);
            return decided.and_then(|decided| gathered.map(|_| decided).map_err(CliError::from));
        }
        let gathered = cluster.gather(Vec::new())?;
        let first = gathered.first().map_or(&[][..], Vec::as_slice);
        let told: Result<T, String> =
            serde_json::from_slice(first).map_err(|error| failed(Some(0), error.to_string()))?;
        told.map_err(|reason| failed(Some(0), reason))
    }

    /// The values of all processes, by rank.
    pub(crate) fn gathered<T: Serialize + DeserializeOwned>(
        &self,
        own: &T,
    ) -> Result<Vec<T>, CliError> {
        let own = serde_json::to_vec(own).map_err(|error| failed(None, error.to_string()))?;
        let all = match &self.cluster {
            Some(cluster) => cluster.gather(own)?,
            None => vec![own],
        };
        let read = |(rank, told): (usize, Vec<u8>)| {
            serde_json::from_slice(&told).map_err(|error| failed(Some(rank), error.to_string()))
        };
        all.into_iter().enumerate().map(read).collect()
    }

    /// Waits for all processes. Returns `own`, or the error of any process.
    pub(crate) fn all<T>(&self, own: Result<T, CliError>) -> Result<T, CliError> {
        let told = own.as_ref().map_or_else(ToString::to_string, |_| String::new());
        let gathered = self.gathered(&told);
        let own = own?;
        let told = gathered?.into_iter().enumerate().find(|(_, told)| !told.is_empty());
        told.map_or(Ok(own), |(rank, reason)| Err(failed(Some(rank), reason)))
    }

    /// Refuses processes with another configuration.
    pub(crate) fn agree_on(&self, config: &Config) -> Result<(), CliError> {
        let Some(cluster) = &self.cluster else { return Ok(()) };
        let facts = config.resolved().keys()?.into_iter();
        let facts = facts.map(|(key, value)| (format!("configuration: {key}"), value));
        Ok(cluster.agree(&facts.collect::<Vec<_>>())?)
    }

    /// Refuses processes with other arguments.
    pub(crate) fn agree_on_facts(&self, facts: &[(String, String)]) -> Result<(), CliError> {
        match &self.cluster {
            Some(cluster) => Ok(cluster.agree(facts)?),
            None => Ok(()),
        }
    }

    /// Refuses processes with other training data.
    pub(crate) fn agree_on_data(&self, fingerprint: &str) -> Result<(), CliError> {
        self.agree_on_facts(&[("training data".into(), fingerprint.to_owned())])
    }

    /// Refuses processes with other held-out data. The process of the first stage takes the inputs
    /// from its own data, and that of the last stage the targets.
    pub(crate) fn agree_on_held_out(&self, fingerprint: &str) -> Result<(), CliError> {
        self.agree_on_facts(&[("held-out data".into(), fingerprint.to_owned())])
    }
}

/// The error that another process reported.
fn failed(process: Option<usize>, reason: String) -> CliError {
    PeerError { process, reason }.into()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{ffi::OsStr, net::TcpListener, os::unix::ffi::OsStrExt};

    use gpipe_distributed::{Meeting, Store};

    use super::*;

    /// Calls `command` in two connected processes, which are threads here. Returns the results by
    /// rank.
    pub(crate) fn in_two<T: Send>(command: impl Fn(&Processes) -> T + Sync) -> Vec<T> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let meeting = |rank, store| Meeting {
            rank,
            size: 2,
            store,
            name: "test".into(),
            address: "127.0.0.1".into(),
            timeout: Duration::from_secs(60),
            facts: Vec::new(),
        };
        let meetings = [
            meeting(0, Store::Serve(listener)),
            meeting(1, Store::At { host: "127.0.0.1".into(), port }),
        ];
        std::thread::scope(|scope| {
            let ranks = meetings.map(|meeting| {
                scope.spawn(|| {
                    let cluster = Some(Cluster::join(meeting).unwrap());
                    let (member, sums) = (OnceCell::new(), None);
                    command(&Processes { cluster, member, sums, on_this_host: 2 })
                })
            });
            ranks.map(|rank| rank.join().unwrap()).into()
        })
    }

    /// Rank 0 sent nothing where it decided on a path that is not UTF-8, such as a run's folder.
    /// The others reported "EOF while parsing a value".
    #[test]
    fn regression_a_path_that_cannot_be_sent_is_named_by_all() {
        let path = || Ok(Path::new(OsStr::from_bytes(b"out/\xff")).to_owned());
        let found = in_two(|processes| processes.decided(path).map_err(|error| error.to_string()));
        for error in found {
            let error = error.unwrap_err();
            assert!(error.contains("rank 0: ") && error.contains("UTF-8"), "{error}");
        }
    }
}
