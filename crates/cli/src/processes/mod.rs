//! A command in several processes: how they meet, what they agree on, and how they are started.
//!
//! Every process runs the same command on the same configuration and data, and has its share of the
//! stages. What is printed and written once is the first one's.
//!
//! - [`environment`]: the variables that say which process this is; [`launch`]: `gpipe launch`,
//!   which sets them
//! - here: the processes of a command, joined

pub(crate) mod environment;
pub(crate) mod launch;

use std::{cell::OnceCell, path::Path, sync::Arc, time::Duration};

use gpipe::processes::{PeerError, Replicas, Transport};
use gpipe_distributed::{Cluster, Member};
use serde::{Serialize, de::DeserializeOwned};

use self::environment::Environment;
use crate::{CliError, args::ConfigArguments, config::Config, output};

/// The longest silence of a process, as far as the command line and the file that it names say.
/// What is wrong with them is said later, when the others can hear it.
pub(crate) fn timeout_s(arguments: &ConfigArguments) -> u64 {
    let config = match &arguments.config {
        Some(_) => Config::read(arguments),
        None => Config::from_text("", Path::new("--set"), arguments),
    };
    config.unwrap_or_default().pipeline.timeout_s
}

/// The processes of a command, as one of them sees them; often it is the only one.
pub(crate) struct Processes {
    /// All of them.
    cluster: Option<Arc<Cluster>>,
    /// Those of this one's replica, once there are several.
    member: OnceCell<Arc<Member>>,
}

impl Processes {
    /// Meets the other processes that `environment` speaks of, and calls `command`. An error of it
    /// ends theirs, too.
    pub(crate) fn among(
        environment: Option<&Environment>,
        timeout_s: u64,
        command: impl FnOnce(&Self) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let alone = Self { cluster: None, member: OnceCell::new() };
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
        let processes = Self { cluster: Some(Cluster::join(meeting)?), ..alone };
        let done = command(&processes);
        if let Err(error) = &done {
            processes.fail(error);
        }
        done
    }

    /// Tells the other processes why this one goes no further, unless they have come to the same:
    /// they wait for it.
    pub(crate) fn fail(&self, error: &CliError) {
        if let Some(cluster) = self.cluster.as_ref().filter(|_| !error.is_of_all()) {
            let process = Some(cluster.rank());
            cluster.fail(&PeerError { process, reason: error.to_string() });
        }
    }

    /// Replicas that do not save wait here for the one that does, which may have been held up: a
    /// long wait in a step would be an error.
    pub(crate) fn meet_replicas(&self) -> Result<(), CliError> {
        if self.member.get().is_some() { self.all(Ok(())) } else { Ok(()) }
    }

    /// Shares the processes out among `count` replicas of the pipeline.
    pub(crate) fn replicate(&self, count: usize) -> Result<(), CliError> {
        if count == 1 {
            return Ok(());
        }
        let Some(cluster) = &self.cluster else {
            return Err(CliError::Usage(format!(
                "pipeline.replicas is {count}, and there is one process: start as many or a \
                multiple, with gpipe launch --processes {count} or torchrun, or give --replicas 1"
            )));
        };
        let member = Member::new(cluster, count)?;
        self.member.get_or_init(|| member);
        Ok(())
    }

    /// What a pipeline is given of them: those of its replica.
    pub(crate) fn transport(&self) -> Option<Arc<dyn Transport>> {
        match self.member.get() {
            Some(member) => Some(Arc::clone(member) as Arc<dyn Transport>),
            None => self.cluster.as_ref().map(|cluster| Arc::clone(cluster) as Arc<dyn Transport>),
        }
    }

    /// And the other replicas, if there are any.
    pub(crate) fn replicas(&self) -> Option<Arc<dyn Replicas>> {
        self.member.get().map(|member| Arc::clone(member) as Arc<dyn Replicas>)
    }

    /// Whether the replica of this process saves its state: all of them have the same.
    pub(crate) fn saves(&self) -> bool {
        self.member.get().is_none_or(|member| member.index() == 0)
    }

    /// Whether this process prints, and writes what is written once.
    pub(crate) fn is_first(&self) -> bool {
        self.cluster.as_ref().is_none_or(|cluster| cluster.rank() == 0)
    }

    /// Whether there are others.
    pub(crate) fn are_several(&self) -> bool {
        self.cluster.is_some()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.cluster.as_ref().map_or(1, |cluster| cluster.size())
    }

    /// What the first process decides, in all of them; its error is theirs.
    pub(crate) fn decided<T: Serialize + DeserializeOwned>(
        &self,
        decide: impl FnOnce() -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let Some(cluster) = &self.cluster else { return decide() };
        if self.is_first() {
            let decided = decide();
            let told = decided.as_ref().map_err(ToString::to_string);
            let gathered = cluster.gather(serde_json::to_vec(&told).unwrap_or_default());
            return decided.and_then(|decided| gathered.map(|_| decided).map_err(CliError::from));
        }
        let gathered = cluster.gather(Vec::new())?;
        let first = gathered.first().map_or(&[][..], Vec::as_slice);
        let told: Result<T, String> =
            serde_json::from_slice(first).map_err(|error| failed(Some(0), error.to_string()))?;
        told.map_err(|reason| failed(Some(0), reason))
    }

    /// What every process has to say, by rank.
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

    /// `own`, once all processes have come as far; the error of any of them otherwise.
    pub(crate) fn all<T>(&self, own: Result<T, CliError>) -> Result<T, CliError> {
        let told = own.as_ref().map_or_else(ToString::to_string, |_| String::new());
        let gathered = self.gathered(&told);
        let own = own?;
        let told = gathered?.into_iter().enumerate().find(|(_, told)| !told.is_empty());
        told.map_or(Ok(own), |(rank, reason)| Err(failed(Some(rank), reason)))
    }

    /// Refuses processes that have another configuration.
    pub(crate) fn agree_on(&self, config: &Config) -> Result<(), CliError> {
        let Some(cluster) = &self.cluster else { return Ok(()) };
        let facts = config.resolved().keys()?.into_iter();
        let facts = facts.map(|(key, value)| (format!("configuration: {key}"), value));
        Ok(cluster.agree(&facts.collect::<Vec<_>>())?)
    }

    /// Refuses processes that were told something else.
    pub(crate) fn agree_on_facts(&self, facts: &[(String, String)]) -> Result<(), CliError> {
        match &self.cluster {
            Some(cluster) => Ok(cluster.agree(facts)?),
            None => Ok(()),
        }
    }

    /// Refuses processes that have other data.
    pub(crate) fn agree_on_data(&self, fingerprint: &str) -> Result<(), CliError> {
        self.agree_on_facts(&[("training data".into(), fingerprint.to_owned())])
    }
}

/// The error that another process told of.
fn failed(process: Option<usize>, reason: String) -> CliError {
    PeerError { process, reason }.into()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::TcpListener;

    use gpipe_distributed::{Meeting, Store};

    use super::*;

    /// Calls `command` in two processes that have met, which are threads here; the results by rank.
    pub(crate) fn in_two<T: Send>(command: impl Fn(&Processes) -> T + Sync) -> Vec<T> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let meeting = |rank, store| Meeting {
            rank,
            size: 2,
            store,
            name: "test".into(),
            address: "127.0.0.1".into(),
            deadline: Duration::from_secs(60),
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
                    command(&Processes { cluster, member: OnceCell::new() })
                })
            });
            ranks.map(|rank| rank.join().unwrap()).into()
        })
    }
}
