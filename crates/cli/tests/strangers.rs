//! Who may reach a run, and what it may write. What listens, listens on loopback unless it was told otherwise; a stranger's connection
//! changes nothing, or ends the run with a clear error; nothing is written but the run's folder.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

use common::{
    Folder, TRAIN,
    process::{DEADLINE, Process},
    results, skip, train,
};
use gpipe_core::splitmix::Stream;

/// A process and all that it has started.
fn family(of: u32) -> Vec<u32> {
    let mut family = vec![of];
    let mut seen = 0;
    while let Some(&parent) = family.get(seen) {
        seen += 1;
        for entry in fs::read_dir("/proc").unwrap() {
            let path = entry.unwrap().path();
            let Ok(stat) = fs::read_to_string(path.join("stat")) else { continue };
            let Some(own) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) else {
                continue;
            };
            if stat.rsplit(") ").next().unwrap().split(' ').nth(1) == Some(&parent.to_string()) {
                family.push(own);
            }
        }
    }
    family
}

/// An address as the kernel writes it: hexadecimal words in the machine's order of bytes.
fn address(text: &str) -> SocketAddr {
    let (address, port) = text.split_once(':').unwrap();
    let words: Vec<[u8; 4]> = (0..address.len() / 8)
        .map(|word| {
            u32::from_str_radix(&address[8 * word..8 * word + 8], 16).unwrap().to_ne_bytes()
        })
        .collect();
    let ip = match words[..] {
        [word] => IpAddr::V4(Ipv4Addr::from(word)),
        _ => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(words.concat()).unwrap())),
    };
    SocketAddr::new(ip, u16::from_str_radix(port, 16).unwrap())
}

/// Where a process and its children listen.
fn listeners(of: u32) -> BTreeSet<SocketAddr> {
    let mut all = BTreeSet::new();
    for process in family(of) {
        let Ok(open) = fs::read_dir(format!("/proc/{process}/fd")) else { continue };
        let links = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let sockets: BTreeSet<String> = links
            .filter_map(|link| {
                let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
                Some(inode.to_owned())
            })
            .collect();
        for table in ["tcp", "tcp6"] {
            let Ok(text) = fs::read_to_string(format!("/proc/{process}/net/{table}")) else {
                continue;
            };
            for line in text.lines().skip(1) {
                let words: Vec<&str> = line.split_whitespace().collect();
                if words[3] == "0A" && sockets.contains(words[9]) {
                    all.insert(address(words[1]));
                }
            }
        }
    }
    all
}

fn long<'a>(out: &'a str, steps: &'a str) -> Vec<&'a str> {
    let own = TRAIN.iter().map(|own| if *own == "12" { steps } else { own });
    own.chain(["--out", out, "--set", "pipeline.deadline_s=20"]).collect()
}

#[test]
fn property_what_listens_is_on_loopback() {
    let folder = Folder::new();
    let mut alone = Process::start(&mut folder.command(&long("alone", "100000")));
    alone.until("saved");
    assert_eq!(listeners(alone.number()), BTreeSet::new(), "one process listens nowhere");
    alone.kill().unwrap_err();
    for replicas in [&[][..], &["--replicas", "2", "--stages", "1"]] {
        let run = [&["launch", "--processes", "2", "--"], &long("run", "100000")[..], replicas];
        let mut run = Process::start(&mut folder.command(&run.concat()));
        run.until("saved");
        let found = listeners(run.number());
        assert!(!found.is_empty(), "the store and the links listen somewhere");
        assert!(found.iter().all(|own| own.ip().is_loopback()), "{found:?}");
        run.signal("TERM");
        assert_eq!(run.end(), Ok(143), "{}", run.printed);
        fs::remove_dir_all(folder.path("run")).unwrap();
    }
}

/// What someone may send who does not belong there, over 35 connections, of which some are held open.
fn strangers(to: SocketAddr) -> Vec<TcpStream> {
    let mut random = Stream::new(u64::from(to.port()));
    let noise: Vec<u8> = (0..4096).map(|_| random.below(256) as u8).collect();
    let huge = [&[0x3c, 0x85, 0xf7, 0xce][..], &[0xff; 64]].concat();
    let said: [&[u8]; 7] = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        &noise,
        &[0; 1024],
        &[0xff; 1024],
        &huge,
        b"\x01",
    ];
    let mut held = Vec::new();
    for round in 0..5 {
        for words in said {
            let mut stream = TcpStream::connect_timeout(&to, DEADLINE)
                .unwrap_or_else(|error| panic!("{to}: {error}"));
            let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
            let _ = stream.write_all(words);
            // Some leave at once, some stay.
            if round % 2 == 0 {
                held.push(stream);
            }
        }
    }
    held
}

/// A process of a run that is started by hand.
fn by_hand(folder: &Folder, rank: &str, port: u16, out: &str) -> Process {
    let mut command = folder.command(&long(out, "12"));
    command.env("RANK", rank).env("WORLD_SIZE", "2");
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    Process::start(&mut command)
}

#[test]
fn fault_strangers_at_a_run_that_waits() {
    let folder = Folder::new();
    folder.succeeds(&long("reference", "12"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = listener.local_addr().unwrap();
    drop(listener);
    let mut first = by_hand(&folder, "0", store.port(), "run");
    let end = Instant::now() + DEADLINE;
    while !listeners(first.number()).contains(&store) {
        assert!(Instant::now() < end, "rank 0 does not listen: {}", first.printed);
        std::thread::yield_now();
    }
    let held = strangers(store);
    let mut second = by_hand(&folder, "1", store.port(), "run");
    let ends = (first.end(), second.end());
    assert_eq!(ends, (Ok(0), Ok(0)), "{}{}", first.printed, second.printed);
    assert!(folder.weights("run") == folder.weights("reference"));
    assert_eq!(results(&folder.path("run")), results(&folder.path("reference")));
    drop(held);
}

#[test]
fn fault_strangers_at_a_run_that_works() {
    let folder = Folder::new();
    folder.succeeds(&long("reference", "400"));
    let run = [&["launch", "--processes", "2", "--"], &long("run", "400")[..]].concat();
    let mut run = Process::start(&mut folder.command(&run));
    run.until("step 1/");
    let found = listeners(run.number());
    let held: Vec<_> = found.iter().map(|own| strangers(*own)).collect();
    match run.end() {
        Ok(0) => {
            assert!(folder.weights("run") == folder.weights("reference"));
            assert_eq!(results(&folder.path("run")), results(&folder.path("reference")));
        }
        other => panic!("{other:?}: {}", run.printed),
    }
    // Nobody was told more than that the store did not understand.
    for mut stream in held.into_iter().flatten() {
        let _ = stream.set_read_timeout(Some(Duration::from_millis(1)));
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        assert!(bytes.len() < 64, "a stranger was sent {} bytes", bytes.len());
    }
}

#[test]
fn property_nothing_is_written_but_the_runs_folder() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &[]));
    let own = train("out/run", &[]).join(" ");
    let launched = train("out/launched", &[]).join(" ");
    // All of the file system is read-only but one folder, also what is for temporary files.
    let script = format!(
        "mkdir out; mount --bind out out; mount -o remount,bind,ro /
        if touch elsewhere 2>&-; then exit 9; fi
        $GPIPE {own}; $GPIPE launch --processes 2 -- {launched}
        $GPIPE eval out/run; $GPIPE inspect out/run; $GPIPE trace out/run; $GPIPE generate out/run --prompt a --tokens 3
        $GPIPE profile tiny.toml --text text.txt --steps 1 --out out/profile.json
        $GPIPE export out/run --out out/exported.safetensors"
    );
    let mut command = Command::new("bash");
    command.args(["-c", r#"exec unshare --mount bash -ec "$1""#, "bash", &script]);
    command.current_dir(folder.path("")).env("GPIPE", env!("CARGO_BIN_EXE_gpipe"));
    let allowed = ["--mount", "mount", "-o", "remount,bind,ro", "/"];
    let allowed = Command::new("unshare").args(allowed).output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        let test = "property_nothing_is_written_but_the_runs_folder";
        return skip(test, "a process may not have mounts of its own here");
    }
    let ran = common::process::output(&mut command);
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{:?}: {errors}", ran.status);
    for run in ["out/run", "out/launched"] {
        assert!(folder.weights(run) == folder.weights("reference"), "{run}");
    }
}
