//! Who may reach a run, and what it may write. What listens, listens on loopback unless it was told
//! otherwise; a stranger's connection changes nothing, or ends the run with a clear error; nothing
//! is written but the run's folder.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

use common::{
    Folder, TRAIN,
    listening::{family, listeners},
    mounts::with_mounts,
    process::{DEADLINE, Process},
    results, train,
};
use gpipe_bridge::c10d::TcpStore;
use gpipe_core::splitmix::Stream;

fn long<'a>(out: &'a str, steps: &'a str) -> Vec<&'a str> {
    let own = TRAIN.iter().map(|own| if *own == "12" { steps } else { own });
    own.chain(["--out", out, "--set", "pipeline.timeout_s=20"]).collect()
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

/// What someone may send who does not belong there, over 35 connections, of which some are held
/// open.
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

/// Both waited for ever.
#[test]
fn regression_a_process_that_was_stopped_while_another_joins_it() {
    let folder = Folder::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = listener.local_addr().unwrap();
    drop(listener);
    let start = |rank: &str, out: &str| {
        let mut command = folder.command(&[&long(out, "12")[..], DEADLINE_OF_3].concat());
        command.env("RANK", rank).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", store.port().to_string());
        Process::start(&mut command)
    };
    let first = start("0", "run");
    let end = Instant::now() + DEADLINE;
    while !listeners(first.number()).contains(&store) {
        assert!(Instant::now() < end, "rank 0 does not listen: {}", first.printed);
        std::thread::yield_now();
    }
    first.signal("STOP");
    let mut second = start("1", "run");
    assert_eq!(second.end(), Ok(1), "{}", second.printed);
    let named = second.printed.contains(&store.to_string()) || second.printed.contains("rank 0");
    assert!(named && second.printed.contains("3.0s"), "{}", second.printed);
    first.signal("KILL");
}

const DEADLINE_OF_3: &[&str] = &["--set", "pipeline.timeout_s=3"];

/// Processes that were launched, once they run: their numbers by rank.
fn ranks_of(launcher: &Process, count: usize) -> Vec<u32> {
    let end = Instant::now() + DEADLINE;
    loop {
        let mut found = vec![None; count];
        for process in family(launcher.number()) {
            let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
            let rank = environment.split(|byte| *byte == 0).find_map(|variable| {
                String::from_utf8_lossy(variable).strip_prefix("RANK=")?.parse::<usize>().ok()
            });
            if let Some(rank) = rank.filter(|_| process != launcher.number()) {
                found[rank] = Some(process);
            }
        }
        if found.iter().all(Option::is_some) {
            return found.into_iter().flatten().collect();
        }
        assert!(Instant::now() < end, "its processes do not start: {}", launcher.printed);
        std::thread::yield_now();
    }
}

fn signal(name: &str, process: u32) {
    let sent = Command::new("kill").args([&format!("-{name}"), &process.to_string()]).status();
    assert!(sent.unwrap().success(), "kill -{name} {process}");
}

/// Its processes waited for ever for the store that it serves.
#[test]
fn regression_a_launcher_that_was_stopped_once_its_processes_exist() {
    let folder = Folder::new();
    let run = [&["launch", "--processes", "2", "--"], &long("run", "12")[..], DEADLINE_OF_3];
    let launcher = Process::start(&mut folder.command(&run.concat()));
    let ranks = ranks_of(&launcher, 2);
    launcher.signal("STOP");
    let is_alive = |process: &u32| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        // A process that has ended stays as a zombie: its parent is stopped.
        stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
    };
    let end = Instant::now() + DEADLINE;
    while ranks.iter().any(is_alive) {
        assert!(Instant::now() < end, "its processes wait for ever");
        std::thread::yield_now();
    }
    launcher.signal("CONT");
}

/// The others noticed nothing until the launcher killed them, 15 seconds later.
#[test]
fn regression_a_process_that_is_killed_while_it_joins_is_named() {
    let folder = Folder::new();
    let run = [&["launch", "--processes", "3", "--"], &long("run", "12")[..]].concat();
    let mut launcher = Process::start(&mut folder.command(&run));
    // It has just begun to load libtorch.
    let ranks = ranks_of(&launcher, 3);
    signal("KILL", ranks[2]);
    let start = Instant::now();
    assert_eq!(launcher.end(), Ok(128 + 9), "{}", launcher.printed);
    assert!(start.elapsed() < Duration::from_secs(14), "{:?}", start.elapsed());
    assert!(launcher.printed.contains("rank 2: "), "{}", launcher.printed);
}

/// Without a launcher it was missed after `pipeline.timeout_s`.
#[test]
fn regression_a_process_that_was_started_by_hand_and_is_killed_while_it_joins() {
    let folder = Folder::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = listener.local_addr().unwrap();
    let _serves = TcpStore::serve(listener, DEADLINE).unwrap();
    let start = |rank: &str| {
        let mut command = folder.command(&train("run", &["--set", "pipeline.timeout_s=300"]));
        command.env("RANK", rank).env("WORLD_SIZE", "3");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", store.port().to_string());
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        Process::start(&mut command)
    };
    let (mut first, mut second) = (start("0"), start("1"));
    let meets = TcpStore::connect("127.0.0.1", store.port(), DEADLINE).unwrap();
    let meets = meets.prefixed("gpipe//").unwrap();
    for rank in [0, 1] {
        meets.get(&format!("facts/{rank}"), DEADLINE).unwrap();
        meets.get(&format!("beat/{rank}"), DEADLINE).unwrap();
    }
    // The third never comes, so that the first two wait.
    second.kill().unwrap_err();
    assert_eq!(first.end(), Ok(1), "{}", first.printed);
    // Five seconds, or a little more on a busy machine, and never the timeout.
    let (_, silence) = first.printed.split_once("rank 1: no sign of life for ").unwrap();
    let seconds: f64 = silence.split('s').next().unwrap().parse().unwrap();
    assert!((5.0..60.0).contains(&seconds), "{}", first.printed);
}

#[test]
fn fault_strangers_at_a_run_that_works() {
    let folder = Folder::new();
    folder.succeeds(&long("reference", "400"));
    let run = [&["launch", "--processes", "2", "--"], &long("run", "400")[..]].concat();
    let mut run = Process::start(&mut folder.command(&run));
    run.until("step 1/");
    let found = listeners(run.number());
    assert!(!found.is_empty(), "the store and the links listen somewhere");
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
    // Everything is read-only but one folder, also what is for temporary files and shared memory.
    let script = format!(
        "mkdir out; mount --bind out out
        for place in $(cut -d' ' -f2 /proc/self/mounts | sort -u); do
            case $place in /proc*|/sys*|$PWD/out) ;; *) mount -o remount,bind,ro $place;; esac
        done
        if touch elsewhere 2>&- || touch /dev/shm/elsewhere 2>&-; then exit 9; fi
        $GPIPE {own}; $GPIPE launch --processes 2 -- {launched}
        $GPIPE eval out/run; $GPIPE inspect out/run; $GPIPE trace out/run; $GPIPE generate \
        out/run --prompt a --tokens 3
        $GPIPE profile tiny.toml --text text.txt --steps 1 --out out/profile.json
        $GPIPE plan tiny.toml --profile out/profile.json --out out/plan.json
        $GPIPE plot out/run --out out/plot.svg; $GPIPE schedule 1f1b --stages 2 --micro-batches 3 \
        --svg out/step.svg
        mkdir out/tmp; TMPDIR=$PWD/out/tmp $GPIPE verify tiny.toml --text text.txt --stages 1,2 \
        --steps 1
        rmdir out/tmp
        $GPIPE export out/run --out out/exported.safetensors
        $GPIPE import out/exported.safetensors --out out/imported --config out/run/config.toml"
    );
    let test = "property_nothing_is_written_but_the_runs_folder";
    if with_mounts(&folder, test, &script).is_none() {
        return;
    }
    for run in ["out/run", "out/launched"] {
        assert!(folder.weights(run) == folder.weights("reference"), "{run}");
    }
    let left = fs::read_dir(folder.path("out")).unwrap();
    let left: BTreeSet<String> =
        left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let named = [
        "exported.safetensors",
        "imported",
        "launched",
        "plan.json",
        "plot.svg",
        "profile.json",
        "run",
        "step.svg",
    ];
    assert_eq!(left, named.map(str::to_owned).into());
}
