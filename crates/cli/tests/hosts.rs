//! Two hosts, each a network namespace of this machine, with a link between them that can be cut
//! and made slow. Skipped, with the reason, where namespaces are not permitted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use common::{Folder, TRAIN, listening::listeners, process::Process, results, skip};

/// Two namespaces and what connects them; gone when this is dropped.
struct Hosts {
    names: [String; 2],
    /// The ends of the link.
    ends: [String; 2],
    /// The program that is the link, if it is a slow one.
    wire: Option<Child>,
    /// A network of its own, so that tests do not meet.
    network: usize,
}

fn run(arguments: &[&str]) -> Result<(), String> {
    let (program, arguments) = arguments.split_first().unwrap();
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

/// What a slow link is given; a round trip takes twice the delay.
const DELAY_MS: u32 = 20;
const MBIT_PER_S: u32 = 100;

impl Hosts {
    /// None where this machine does not let us.
    fn new(test: &str) -> Option<Self> {
        Self::connected(test, Self::cable)
    }

    /// With a slow link between them.
    fn far(test: &str) -> Option<Self> {
        Self::connected(test, Self::slow_wire)
    }

    fn connected(test: &str, link: impl Fn(&mut Self) -> Result<(), String>) -> Option<Self> {
        static NETWORKS: AtomicUsize = AtomicUsize::new(0);
        let (own, network) = (std::process::id(), NETWORKS.fetch_add(1, Ordering::SeqCst));
        let names = [0, 1].map(|host| format!("gpipe-{own}-{network}-{host}"));
        let ends = [0, 1].map(|host| format!("gp{}n{network}h{host}", own % 100_000));
        let mut hosts = Self { names, ends, wire: None, network: 1 + network + own as usize % 200 };
        match link(&mut hosts).and_then(|()| hosts.set_up()) {
            Ok(()) => Some(hosts),
            Err(reason) => {
                skip(test, &format!("no such hosts here: {reason}"));
                None
            }
        }
    }

    fn cable(&mut self) -> Result<(), String> {
        let [one, other] = &self.ends;
        run(&["ip", "link", "add", one, "type", "veth", "peer", "name", other])
    }

    /// A program, because not every kernel has netem.
    fn slow_wire(&mut self) -> Result<(), String> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/common/slow_wire.py");
        let mut command = Command::new("python3");
        command.arg(script).args(&self.ends).args([DELAY_MS, MBIT_PER_S].map(|n| n.to_string()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut wire = command.spawn().map_err(|error| format!("python3: {error}"))?;
        let mut said = String::new();
        let _ = BufReader::new(wire.stdout.take().unwrap()).read_line(&mut said);
        self.wire = Some(wire);
        match said.trim() {
            "ready" => Ok(()),
            _ => Err("no tun devices".to_owned()),
        }
    }

    fn set_up(&self) -> Result<(), String> {
        let Self { names, ends, .. } = self;
        for name in names {
            run(&["ip", "netns", "add", name])?;
        }
        for host in [0, 1] {
            let address = format!("{}/24", self.address(host));
            run(&["ip", "link", "set", &ends[host], "netns", &names[host]])?;
            self.on(host, &["ip", "address", "add", &address, "dev", &ends[host]])?;
            self.on(host, &["ip", "link", "set", &ends[host], "up"])?;
            self.on(host, &["ip", "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    fn address(&self, host: usize) -> String {
        format!("10.213.{}.{}", self.network, host + 1)
    }

    /// Runs a command there.
    fn on(&self, host: usize, command: &[&str]) -> Result<(), String> {
        run(&[&["ip", "netns", "exec", &self.names[host]], command].concat())
    }

    fn cut(&self) {
        self.on(0, &["ip", "link", "set", &self.ends[0], "down"]).unwrap();
    }

    /// The same training in both, of which each has one stage.
    fn train(&self, folder: &Folder, out: &str, steps: &str, more: &[&str]) -> [Process; 2] {
        let own = TRAIN.iter().enumerate().map(|(index, own)| match index {
            _ if index > 0 && TRAIN[index - 1] == "--steps" => steps,
            _ => own,
        });
        let arguments: Vec<&str> = own.chain(["--out", out]).chain(more.iter().copied()).collect();
        [0, 1].map(|host| {
            let gpipe = folder.command(&arguments);
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &self.names[host]]);
            command.arg(gpipe.get_program()).args(gpipe.get_args());
            command.current_dir(gpipe.get_current_dir().unwrap());
            for (name, value) in gpipe.get_envs() {
                command.env(name, value.unwrap());
            }
            command.env("RANK", host.to_string()).env("WORLD_SIZE", "2");
            command.env("MASTER_ADDR", self.address(0)).env("MASTER_PORT", "29500");
            Process::start(&mut command)
        })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = run(&["ip", "netns", "del", name]); // with its end of the link
        }
        let _ = run(&["ip", "link", "del", &self.ends[0]]);
        if let Some(mut wire) = self.wire.take() {
            drop(wire.stdin.take()); // it ends with its input
            let _ = wire.wait();
        }
    }
}

/// Both ended well.
fn end(mut hosts: [Process; 2]) {
    for host in &mut hosts {
        let ended = host.end();
        assert_eq!(ended, Ok(0), "{}", host.printed);
    }
}

/// Whether the last words are of this rank's silence: as its own, or as what a stage waited for
/// when the deadline came.
fn names(host: &Process, rank: usize) -> bool {
    let own = format!("gpipe: rank {rank}: no sign of life");
    host.printed.lines().any(|line| {
        line.starts_with(&own)
            || line.contains("last sign of life") && line.contains(&format!("on rank {rank};"))
    })
}

#[test]
fn transparency_of_two_hosts() {
    let Some(hosts) = Hosts::new("transparency_of_two_hosts") else { return };
    let folder = Folder::new();
    folder.succeeds(&[TRAIN, &["--out", "one"]].concat());
    end(hosts.train(&folder, "two", "12", &[]));
    assert!(folder.weights("one") == folder.weights("two"));
    assert_eq!(results(&folder.path("one")), results(&folder.path("two")));
}

#[test]
fn transparency_of_a_slow_link() {
    let Some(hosts) = Hosts::far("transparency_of_a_slow_link") else { return };
    // Nobody listens there: the refusal has come and gone over the link.
    let refused = format!("socket.create_connection(('{}', 9), timeout=30)", hosts.address(1));
    let asks = [
        "import socket, time",
        "start = time.monotonic()",
        &format!("try: {refused}"),
        "except ConnectionRefusedError: pass",
        &format!("assert time.monotonic() - start >= 2 * {DELAY_MS} / 1000"),
    ];
    hosts.on(0, &["python3", "-c", &asks.join("\n")]).unwrap();
    let folder = Folder::new();
    folder.succeeds(&[TRAIN, &["--out", "one"]].concat());
    end(hosts.train(&folder, "two", "12", &[]));
    assert!(folder.weights("one") == folder.weights("two"));
    assert_eq!(results(&folder.path("one")), results(&folder.path("two")));
}

/// Neither at all addresses nor at a loopback one that the other cannot reach.
#[test]
fn property_a_host_listens_at_its_own_address() {
    let Some(hosts) = Hosts::new("property_a_host_listens_at_its_own_address") else { return };
    let folder = Folder::new();
    let mut processes = hosts.train(&folder, "run", "100000", &[]);
    processes[0].until("saved");
    for (host, process) in processes.iter().enumerate() {
        let found = listeners(process.number());
        assert!(!found.is_empty(), "the links of host {host} listen somewhere");
        let own = |at: &std::net::SocketAddr| at.ip().to_string() == hosts.address(host);
        assert!(found.iter().all(own), "host {host}: {found:?}");
    }
}

/// The link is down before the host dies, so that nothing says goodbye: only silence tells.
#[test]
fn fault_a_host_that_dies_is_named() {
    let Some(hosts) = Hosts::new("fault_a_host_that_dies_is_named") else { return };
    let folder = Folder::new();
    let [mut first, mut second] =
        hosts.train(&folder, "run", "100000", &["--set", "pipeline.timeout_s=3"]);
    first.until("saved");
    hosts.cut();
    assert_eq!(second.kill(), Err(9));
    assert_eq!(first.end(), Ok(1), "{}", first.printed);
    assert!(names(&first, 1), "{}", first.printed);
    assert!(
        gpipe_checkpoint::folder::newest(&folder.path("run/checkpoints")).unwrap().found.is_some()
    );
}

#[test]
fn fault_a_cut_link_ends_both_sides() {
    let Some(hosts) = Hosts::new("fault_a_cut_link_ends_both_sides") else { return };
    let folder = Folder::new();
    let [mut first, mut second] =
        hosts.train(&folder, "run", "100000", &["--set", "pipeline.timeout_s=3"]);
    first.until("saved");
    hosts.cut();
    assert_eq!((first.end(), second.end()), (Ok(1), Ok(1)), "{}{}", first.printed, second.printed);
    assert!(names(&first, 1), "{}", first.printed);
    // Here rank 0's silence may also be that of the store, which is there.
    let named = names(&second, 0) || second.printed.contains("(or its launcher) has not answered");
    assert!(named, "{}", second.printed);
}
