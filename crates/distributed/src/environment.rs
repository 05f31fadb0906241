//! Environment variables about the other processes of a program: those that torchrun sets.
//!
//! `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are all set, or none of them. `gpipe
//! launch` sets them too. A launcher that serves the store itself sets
//! `TORCHELASTIC_USE_AGENT_STORE=True`; otherwise rank 0 serves it. `TORCHELASTIC_RESTART_COUNT`
//! distinguishes restarts at a launcher's store. `GPIPE_ADDRESS` is the address by which the other
//! processes reach this machine, if it has several.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket},
    time::Duration,
};

use crate::joining::{Meeting, Store};

/// Variables that do not fit, or an address that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable is missing or wrong; the message names it.
    #[error("{0}")]
    Variable(String),
    /// An address that the variables name cannot be used.
    #[error("{what}: {source}")]
    Address {
        /// The address, and the remedy.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The rank of this process, from 0.
pub const RANK: &str = "RANK";
/// The number of processes.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// The host of the store.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// The port of the store.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// PyTorch's name for "the launcher serves the store".
pub const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// PyTorch's name for the number of restarts.
pub const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
const ADDRESS: &str = "GPIPE_ADDRESS";

/// One of several processes of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// The rank of this process, from 0.
    pub rank: usize,
    /// The number of processes.
    pub size: usize,
    host: String,
    port: u16,
    /// Whether a launcher serves the store.
    agent: bool,
    /// Distinguishes this attempt from others at the same store.
    name: String,
    address: Option<String>,
}

impl Environment {
    /// Reads the environment. `None` if there is a single process.
    ///
    /// # Errors
    /// If some variables are set and others are not, or one has no sense.
    pub fn read() -> Result<Option<Self>, EnvironmentError> {
        Self::from(|name| std::env::var(name).ok())
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, EnvironmentError> {
        let refuse = |reason: String| Err(EnvironmentError::Variable(reason));
        let names = [RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT];
        let values = names.map(&variable);
        let [Some(rank), Some(size), Some(host), Some(port)] = &values else {
            let is_alone = match &values {
                // Another system's rank, or the store of another program.
                [_, None, None, None] | [None, None, ..] => true,
                [_, Some(size), ..] => size.trim() == "1",
                _ => false,
            };
            if is_alone {
                return Ok(None);
            }
            let (missing, set): (Vec<_>, Vec<_>) =
                names.iter().zip(&values).partition(|(_, value)| value.is_none());
            let list = |those: Vec<(&&str, _)>| {
                those.iter().map(|(name, _)| **name).collect::<Vec<_>>().join(", ")
            };
            return refuse(format!(
                "the environment sets {}, but not {}: set all four, or none of them; gpipe launch \
                and torchrun set them",
                list(set),
                list(missing)
            ));
        };
        let number = |name: &str, text: &str| {
            text.trim().parse::<usize>().map_err(|_| {
                EnvironmentError::Variable(format!(
                    "{name} is '{text}' in the environment: give a number"
                ))
            })
        };
        let (rank, size) = (number(RANK, rank)?, number(WORLD_SIZE, size)?);
        if rank >= size {
            return refuse(format!(
                "{RANK} is {rank} and {WORLD_SIZE} {size}: ranks are 0 to {WORLD_SIZE} - 1"
            ));
        }
        let found = u16::try_from(number(MASTER_PORT, port)?).ok().filter(|found| *found > 0);
        let Some(port) = found else {
            return refuse(format!("{MASTER_PORT} is {port}: ports are 1 to 65535"));
        };
        let agent = variable(AGENT_STORE).is_some_and(|value| value.eq_ignore_ascii_case("true"));
        // A store that rank 0 serves is new in each attempt. torchrun's hosts count their own
        // restarts, and one that came back would not meet the others.
        let attempt = variable(RESTART_COUNT).filter(|_| agent).unwrap_or_default();
        let run = variable(RUN_ID).unwrap_or_default();
        Ok((size > 1).then(|| Self {
            rank,
            size,
            host: host.trim().to_owned(),
            port,
            agent,
            name: meeting_name(&run, &attempt),
            address: variable(ADDRESS),
        }))
    }

    /// How this process meets the others.
    ///
    /// # Errors
    /// If the store's host is unknown, if this is rank 0 and that host is another machine, or if
    /// rank 0 cannot listen at its port.
    pub fn meeting(
        &self,
        timeout: Duration,
        facts: Vec<(String, String)>,
    ) -> Result<Meeting, EnvironmentError> {
        let serves = self.rank == 0 && !self.agent;
        let address = self.own_address(serves)?;
        let (host, port) = (self.host.clone(), self.port);
        let store = match (serves, self.agent) {
            (true, _) => Store::Serve(listen(&address, port)?),
            (false, true) => Store::Launcher { host, port },
            (false, false) => Store::At { host, port },
        };
        let (rank, size, name) = (self.rank, self.size, self.name.clone());
        Ok(Meeting { rank, size, store, name, address, timeout, facts })
    }

    /// The address of this machine on the route to the master: loopback if the master is on this
    /// machine.
    ///
    /// # Errors
    /// The host is unknown. Or this process `serves` the store, and the host is another machine,
    /// where the others would look for rank 0 in vain.
    fn own_address(&self, serves: bool) -> Result<String, EnvironmentError> {
        if let Some(address) = &self.address {
            return Ok(address.clone());
        }
        let at = format!("{MASTER_ADDR}={}", self.host);
        let failed = |error: std::io::Error| EnvironmentError::Address {
            what: format!(
                "{at}: no such host, or no way to it (or set {ADDRESS} to this machine's address)"
            ),
            source: error,
        };
        let all: Vec<SocketAddr> =
            (self.host.as_str(), self.port).to_socket_addrs().map_err(failed)?.collect();
        let master = all.iter().find(|address| address.is_ipv4()).or(all.first());
        let Some(master) = master else {
            return Err(EnvironmentError::Variable(format!("{at}: the name has no address")));
        };
        // No packet is sent: `connect` only makes the system choose the interface.
        let any: IpAddr = match master {
            SocketAddr::V4(_) => [0_u8; 4].into(),
            SocketAddr::V6(_) => [0_u16; 8].into(),
        };
        let socket = UdpSocket::bind((any, 0)).map_err(failed)?;
        socket.connect(master).map_err(failed)?;
        let own = socket.local_addr().map_err(failed)?.ip();
        // Of the other family of addresses, this machine may have none.
        let alike = all.iter().filter(|one| one.is_ipv4() == master.is_ipv4());
        if serves && !alike.copied().any(is_here) {
            return Err(EnvironmentError::Variable(format!(
                "{at} is not an address of this machine, and rank 0 serves the store here: start \
                rank 0 on {}, or set {MASTER_ADDR}={own} for every process. If {} forwards to this \
                machine, set {ADDRESS}={own} for rank 0",
                self.host, self.host
            )));
        }
        Ok(own.to_string())
    }
}

/// Distinguishes an attempt of a run from others at the same store.
fn meeting_name(run: &str, attempt: &str) -> String {
    format!("gpipe/{run}/{attempt}")
}

/// The name of the meeting of launched processes, which inherit this process's environment.
pub fn launched_name(attempt: u32) -> String {
    meeting_name(&std::env::var(RUN_ID).unwrap_or_default(), &attempt.to_string())
}

/// Whether an address is one of this machine.
fn is_here(mut address: SocketAddr) -> bool {
    address.set_port(0);
    match UdpSocket::bind(address) {
        Ok(_) => true,
        // Other errors say nothing of the address.
        Err(error) => error.kind() != ErrorKind::AddrNotAvailable,
    }
}

/// A listener at exactly one address of this machine.
fn listen(address: &str, port: u16) -> Result<TcpListener, EnvironmentError> {
    TcpListener::bind((address, port)).map_err(|source| EnvironmentError::Address {
        what: format!(
            "rank 0 cannot listen at {address}:{port}: give {MASTER_ADDR} and {MASTER_PORT} of \
            this machine, and a port that is free, or its own address in {ADDRESS}"
        ),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Environment>, String> {
        let find = |name: &str| {
            let found = variables.iter().find(|(own, _)| *own == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Environment::from(find).map_err(|error| error.to_string())
    }

    const ALL: [(&str, &str); 4] =
        [(RANK, "1"), (WORLD_SIZE, "3"), (MASTER_ADDR, "127.0.0.1"), (MASTER_PORT, "29500")];

    #[test]
    fn oracle_torchruns_variables_are_read() {
        let one = read(&ALL).unwrap().unwrap();
        assert_eq!((one.rank, one.size, one.port, one.agent), (1, 3, 29500, false));
        assert_eq!(one.own_address(false).unwrap(), "127.0.0.1");
        let torchrun = [(AGENT_STORE, "True"), (RESTART_COUNT, "2"), (RUN_ID, "x")];
        let one = read(&[&ALL[..], &torchrun].concat()).unwrap().unwrap();
        assert_eq!((one.agent, one.name.as_str()), (true, "gpipe/x/2"));
        let one = read(&[&ALL[..], &[(ADDRESS, "10.0.0.7")]].concat()).unwrap().unwrap();
        assert_eq!(one.own_address(false).unwrap(), "10.0.0.7");
    }

    /// torchrun's hosts count their own restarts. A host that came back had another count, and the
    /// processes looked for each other under different names.
    #[test]
    fn regression_hosts_with_other_counts_of_restarts_meet_where_rank_0_serves() {
        let of = |count: &str, agent: &str| {
            let own = [(AGENT_STORE, agent), (RESTART_COUNT, count), (RUN_ID, "x")];
            read(&[&ALL[..], &own].concat()).unwrap().unwrap().name
        };
        assert_eq!(of("0", "False"), of("3", "False"));
        assert_ne!(of("0", "True"), of("3", "True"), "a launcher's store outlives an attempt");
    }

    /// Rank 0 listened at another address than that at which the others looked for it.
    #[test]
    fn regression_rank_0_serves_only_at_an_address_of_its_machine() {
        let seconds = Duration::from_secs(1);
        let free = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let port = free.to_string();
        let meeting = |more: &[(&str, &str)]| {
            let own = [(RANK, "0"), (WORLD_SIZE, "2"), (MASTER_PORT, port.as_str())];
            let one = read(&[&own[..], more].concat()).unwrap().unwrap();
            one.meeting(seconds, Vec::new()).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(meeting(&[(MASTER_ADDR, "127.0.0.1")]), Ok(()));
        // An address for documentation (RFC 5737). No packet is sent to it.
        let elsewhere = (MASTER_ADDR, "192.0.2.1");
        let error = meeting(&[elsewhere]).unwrap_err();
        assert!(
            error.contains("192.0.2.1 is not an address of this machine")
                || error.contains("no way"),
            "{error}"
        );
        assert_eq!(meeting(&[elsewhere, (ADDRESS, "127.0.0.1")]), Ok(()));
    }

    #[test]
    fn oracle_one_process_is_alone() {
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[(MASTER_ADDR, "elsewhere")]).unwrap(), None);
        assert_eq!(read(&[(RANK, "7")]).unwrap(), None); // set by another system
        assert_eq!(read(&[(WORLD_SIZE, "1"), ALL[2], ALL[3]]).unwrap(), None);
        assert_eq!(read(&[(RANK, "0"), (WORLD_SIZE, "1")]).unwrap(), None);
        let one = [(RANK, "0"), (WORLD_SIZE, "1"), ALL[2], ALL[3]];
        assert_eq!(read(&one).unwrap(), None);
    }

    #[test]
    fn fault_what_does_not_fit_is_named() {
        for (set, told) in [
            (&ALL[..3], "sets RANK, WORLD_SIZE, MASTER_ADDR, but not MASTER_PORT"),
            (&ALL[1..], "sets WORLD_SIZE, MASTER_ADDR, MASTER_PORT, but not RANK"),
            (&[ALL[1]], "sets WORLD_SIZE, but not RANK, MASTER_ADDR, MASTER_PORT"),
            (&[ALL[0], ALL[2], ALL[3]], "sets RANK, MASTER_ADDR, MASTER_PORT, but not WORLD_SIZE"),
        ] {
            // Each process would train alone, and nobody would notice.
            let error = read(set).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
        for (name, value, part) in [
            (RANK, "3", "RANK is 3 and WORLD_SIZE 3"),
            (RANK, "one", "RANK is 'one'"),
            (MASTER_PORT, "70000", "MASTER_PORT is 70000"),
            (MASTER_PORT, "0", "MASTER_PORT is 0: ports are 1 to 65535"),
        ] {
            let mut all = ALL;
            all.iter_mut().filter(|(own, _)| *own == name).for_each(|own| own.1 = value);
            let error = read(&all).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
