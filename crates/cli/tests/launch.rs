//! The command in several processes of this machine: what comes out is what one process makes, to
//! the last bit, and whatever fails ends all of them in time with the one error.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{
    ffi::OsStr,
    fs,
    net::TcpListener,
    os::unix::ffi::OsStrExt,
    process::{Command, Stdio},
    time::Duration,
};

use common::{Folder, TRAIN, process::Process, results, skip, steps, train};

/// A run with all that its files depend on: averages, validations on the way, a best checkpoint.
const MORE: &[&str] = &[
    "--keep-best",
    "--set",
    "train.validate_every=5",
    "--set",
    "optimizer.average=0.9",
    "--set",
    "pipeline.timeout_s=20",
];

/// The same training with other numbers of steps, and of steps between checkpoints.
fn train_for<'a>(out: &'a str, steps: &'a str, every: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let changed = |(index, own): (usize, &&'a str)| match index.checked_sub(1).map(|n| TRAIN[n]) {
        Some("--steps") => steps,
        Some("--checkpoint-every") => every,
        _ => *own,
    };
    let own: Vec<&str> = TRAIN.iter().enumerate().map(changed).collect();
    [&own[..], &["--out", out], more].concat()
}

fn launched<'a>(processes: &'a str, command: &[&'a str]) -> Vec<&'a str> {
    [&["launch", "--processes", processes, "--"], command].concat()
}

/// Everything that two runs must have alike, but for the times in them.
fn assert_same_run(folder: &Folder, one: &str, other: &str) {
    assert!(folder.weights(one) == folder.weights(other), "{one} and {other}: weights");
    let bytes = |run: &str, file: &str| fs::read(folder.path(run).join(file)).unwrap();
    for file in ["averages.safetensors", "tokenizer.json"] {
        assert!(bytes(one, file) == bytes(other, file), "{one} and {other}: {file}");
    }
    assert_eq!(results(&folder.path(one)), results(&folder.path(other)), "{one} and {other}");
    let state = |run: &str| {
        let newest = folder.path(run).join("checkpoints/latest");
        let mut files: Vec<_> = fs::read_dir(newest)
            .unwrap()
            .map(|entry| entry.unwrap())
            .filter(|entry| entry.file_name() != "manifest.json")
            .map(|entry| (entry.file_name(), fs::read(entry.path()).unwrap()))
            .collect();
        files.sort();
        files
    };
    assert!(state(one) == state(other), "{one} and {other}: the newest checkpoint");
    let left = fs::read_dir(folder.path(other)).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains("part")).collect();
    assert!(left.is_empty(), "{other}: {left:?}");
}

/// What TensorBoard is shown of a run, in the order of its one file, but for times and bytes.
fn curves(folder: &Folder, run: &str) -> Vec<(&'static str, f32)> {
    let files: Vec<_> = fs::read_dir(folder.path(run).join("tensorboard")).unwrap().collect();
    assert_eq!(files.len(), 1, "{run}: {files:?}");
    let bytes = fs::read(files[0].as_ref().unwrap().path()).unwrap();
    let tags = ["train/loss", "train/lr", "train/grad_norm", "validation/loss"];
    let mut found = Vec::new();
    for at in 0..bytes.len() {
        for tag in tags {
            // A name, the mark of a float, and its bytes.
            let rest = bytes[at..].strip_prefix(tag.as_bytes());
            let value = rest.and_then(|rest| rest.strip_prefix(&[0x15])?.first_chunk());
            found.extend(value.map(|value| (tag, f32::from_le_bytes(*value))));
        }
    }
    found
}

#[test]
fn transparency_of_launched_processes() {
    let folder = Folder::new();
    folder.succeeds(&train("one", MORE));
    let shown = curves(&folder, "one");
    assert!(shown.len() > 3 * 12, "12 steps and validations, not {shown:?}");
    for (out, processes, stages) in
        [("two", "2", "2"), ("two of four", "2", "4"), ("four", "4", "4")]
    {
        let command = train(out, &[MORE, &["--stages", stages]].concat());
        let printed = folder.succeeds(&launched(processes, &command));
        assert_same_run(&folder, "one", out);
        assert_eq!(steps(&folder, "one"), steps(&folder, out), "{out}");
        assert_eq!(curves(&folder, out), shown, "{out}");
        // Printed once, by rank 0.
        assert!(printed.lines().all(|line| line.starts_with("[0] ")), "{printed}");
        assert_eq!(printed.matches("where the time went").count(), 1, "{printed}");
        assert!(folder.path(out).join("step.json").exists());
    }
    // The step of all processes, as one picture.
    let traced = folder.succeeds(&["trace", "four", "--svg", "--width", "100"]);
    assert!(traced.contains("measured"), "{traced}");
}

#[test]
fn transparency_of_a_run_that_goes_on_in_other_processes() {
    let folder = Folder::new();
    let all = [MORE, &["--keep", "9"]].concat();
    folder.succeeds(&train("whole", &all));
    folder.succeeds(&launched("2", &train("parted", &all)));
    // From a checkpoint on the way, in processes and in one.
    let on = |from, out| ["train", "--resume", from, "--out", out];
    folder.succeeds(&launched("2", &on("whole/checkpoints/step-00000004", "there")));
    folder.succeeds(&on("parted/checkpoints/step-00000004", "here"));
    for run in ["parted", "there", "here"] {
        assert_same_run(&folder, "whole", run);
    }
}

#[test]
fn transparency_of_what_is_done_with_a_model() {
    let folder = Folder::new();
    folder.succeeds(&train("run", MORE));
    let plain = |command: &[&'static str]| {
        [&["launch", "--processes", "2", "--no-prefix", "--"], command].concat()
    };
    let eval = ["eval", "run", "--json"];
    assert_eq!(folder.succeeds(&plain(&eval)), folder.succeeds(&eval));
    let generate = ["generate", "run", "--prompt", "pipeline", "--tokens", "20"];
    assert_eq!(folder.succeeds(&plain(&generate)), folder.succeeds(&generate));
    // What is piped in goes to rank 0.
    let mut command = folder.command(&plain(&["generate", "run", "--tokens", "20"]));
    let text = folder.path("prompt.txt");
    fs::write(&text, "pipeline").unwrap();
    let piped = command.stdin(fs::File::open(&text).unwrap()).stderr(Stdio::null()).output();
    assert_eq!(String::from_utf8(piped.unwrap().stdout).unwrap(), folder.succeeds(&generate));
    // One process is enough for others.
    let inspected = folder.succeeds(&launched("2", &["inspect", "run"]));
    assert!(inspected.lines().all(|line| line.starts_with("[0] ")), "{inspected}");
    let of = |command, more: &[&'static str]| {
        [&[command, "tiny.toml", "--text", "text.txt", "--set", "model.blocks=1"], more].concat()
    };
    let profile = of("profile", &["--micro-batches", "2", "--steps", "1", "--out", "two.json"]);
    folder.succeeds(&launched("2", &profile));
    let plan = ["--profile", "two.json", "--devices", "2", "--out", "plan.json"];
    folder.succeeds(&of("plan", &plan));
    // A plan that one process made, run by two and by one.
    folder.succeeds(&train("planned", &["--plan", "plan.json"]));
    folder.succeeds(&launched("2", &train("planned by two", &["--plan", "plan.json"])));
    assert!(folder.weights("planned") == folder.weights("planned by two"));
}

/// Each process for itself and all of them together, against the reference of one.
#[test]
fn transparency_verify_among_processes() {
    let folder = Folder::new();
    let verify = ["verify", "tiny.toml", "--text", "text.txt", "--steps", "2"];
    let verify = |processes: &'static str, more: &[&'static str]| {
        launched(processes, &[&verify[..], more].concat())
    };
    let schedules = ["--stages", "1,2,3", "--schedule", "gpipe,1f1b,zb-h1,interleaved:2"];
    for (processes, resume) in [("2", &["--resume"][..]), ("3", &[])] {
        let printed = folder.succeeds(&verify(processes, &[&schedules[..], resume].concat()));
        // Stages for each process, or one process.
        let alone = if processes == "2" { 4 } else { 8 };
        let places =
            (printed.matches("in one process").count(), format!("in {processes} processes"));
        assert_eq!(places.0, alone, "{printed}");
        assert_eq!(printed.matches(&places.1).count(), 12 - alone, "{printed}");
        assert_eq!(printed.matches("identical: ").count(), 11, "{printed}");
        assert_eq!(printed.matches("same to the last bit").count(), 1, "{printed}");
    }
    // All that is compared is among them: the reference is one process's all the same.
    let printed = folder.succeeds(&verify("2", &["--stages", "2", "--schedule", "1f1b"]));
    assert!(
        printed.contains("in one process   loss ") && printed.contains("identical"),
        "{printed}"
    );
    let parts = ["--stages", "2", "--schedule", "1f1b", "--micro-batches", "3,2"];
    let output = folder.gpipe(&verify("2", &parts));
    let (out, text) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(out.contains("DIFFERS first in step 1: ") && out.contains("identical"), "{out}{text}");
}

/// However many processes each replica has; and a run that goes on with one pipeline alone.
#[test]
fn transparency_of_replicas_that_are_launched() {
    let folder = Folder::new();
    let more = [MORE, &["--replicas", "2", "--micro-batches", "2"]].concat();
    folder.succeeds(&launched("2", &train("two", &more)));
    folder.succeeds(&launched("4", &train("four", &more)));
    assert_same_run(&folder, "two", "four");
    assert_eq!(steps(&folder, "two"), steps(&folder, "four"));
    folder.succeeds(&["eval", "four", "--json"]);
    let on = folder.succeeds(&["train", "--resume", "four", "--steps", "14", "--replicas", "1"]);
    assert!(on.contains("pipeline.replicas: 2 -> 1 (changes the last bits)"), "{on}");

    // A signal to one of them: the replica that saves does so, and the other waits for it.
    let launch = ["launch", "--processes", "2", "--"];
    let run = train_for("asked", "100000", "2", &more);
    let mut run = Process::start(&mut folder.command(&[&launch[..], &run].concat()));
    run.until("saved");
    send("-TERM", &process_of(run.number(), 1));
    assert_eq!(run.end(), Ok(143), "{}", run.printed);
    assert!(run.printed.contains("is saved; to continue: gpipe train --resume"), "{}", run.printed);

    // The step of the first, in as many processes as the run has; what is compared bit by bit is
    // one pipeline.
    let of = |command| [command, "tiny.toml", "--text", "text.txt", "--set", "pipeline.replicas=2"];
    let traced = folder.succeeds(&launched("2", &of("trace")));
    assert!(traced.contains("measured") && folder.path("trace.json").exists(), "{traced}");
    folder.refuses(&of("trace"), &["there is one process", "--replicas 1"]);
    let verified = folder.succeeds(&[&of("verify")[..], &["--steps", "1"]].concat());
    assert!(verified.contains("one pipeline is verified, not its 2 replicas"), "{verified}");

    // Without other processes, replicas are threads, with the same bits.
    folder.succeeds(&train("threads", &more));
    assert_same_run(&folder, "two", "threads");
    let three = [MORE, &["--replicas", "3", "--micro-batches", "2", "--stages", "1"]].concat();
    folder.succeeds(&launched("3", &train("processes", &three)));
    folder.succeeds(&train("three-threads", &three));
    assert_same_run(&folder, "processes", "three-threads");
    let mut run = Process::start(&mut folder.command(&train_for("stopped", "100000", "2", &more)));
    run.until("saved");
    run.signal("TERM");
    assert_eq!(run.end(), Ok(143), "{}", run.printed);
    assert_eq!(run.printed.matches("saving after this step").count(), 1, "{}", run.printed);
    assert!(run.printed.contains("is saved; to continue: gpipe train --resume"), "{}", run.printed);
    let output = folder.gpipe(&launched("3", &train("three", &more)));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("3 processes for 2 replicas"), "{text}");
}

/// With the optimizer state divided among replicas, all metrics, weights and checkpoints are equal,
/// and a run resumes with or without sharding.
#[test]
fn transparency_of_an_optimizer_sharded_over_replicas() {
    let folder = Folder::new();
    let rounded = ["--set", "optimizer.adam.moments=bfloat16"];
    let plain = [MORE, &["--replicas", "2", "--micro-batches", "2"], &rounded].concat();
    let sharded = [&plain[..], &["--shard-optimizer"]].concat();
    folder.succeeds(&launched("2", &train("plain", &plain)));
    let told = folder.succeeds(&launched("2", &train("sharded", &sharded)));
    assert!(told.contains("each keeps a part of the optimizer state"), "{told}");
    folder.succeeds(&launched("4", &train("four", &sharded)));
    for other in ["sharded", "four"] {
        assert_same_run(&folder, "plain", other);
        assert_eq!(steps(&folder, "plain"), steps(&folder, other));
    }
    // Each run resumes with the setting of the other.
    let on = |from, more: &[&'static str]| {
        let resume = ["train", "--resume", from, "--steps", "14"];
        folder.succeeds(&launched("2", &[&resume, more].concat()))
    };
    on("plain", &["--shard-optimizer"]);
    on("sharded", &["--set", "pipeline.shard_optimizer=false"]);
    assert!(folder.weights("plain") == folder.weights("sharded"));
    let one = ["train", "--resume", "four", "--steps", "14", "--replicas", "1"];
    let refused = [&one[..], &["--set", "optimizer.adam.moments=float32"]].concat();
    folder.refuses(&refused, &["optimizer.adam.moments", "have the other dtype"]);
    folder.succeeds(&one);

    // A signal to the replica that does not save: it still sends its part of the state.
    let launch = ["launch", "--processes", "2", "--"];
    let run = train_for("asked", "100000", "2", &sharded);
    let mut run = Process::start(&mut folder.command(&[&launch[..], &run].concat()));
    run.until("saved");
    send("-TERM", &process_of(run.number(), 1));
    assert_eq!(run.end(), Ok(143), "{}", run.printed);
    assert!(run.printed.contains("is saved; to continue: gpipe train --resume"), "{}", run.printed);
}

/// A run that takes long, and saves often.
fn long(folder: &Folder, launch: &[&str], out: &str) -> Process {
    let train = train_for(out, "100000", "2", MORE);
    let mut run = Process::start(&mut folder.command(&[launch, &train].concat()));
    run.until("saved");
    run
}

/// The number of the process that a supervisor started as this rank.
fn process_of(supervisor: u32, rank: usize) -> String {
    let wanted = format!("RANK={rank}");
    for entry in fs::read_dir("/proc").unwrap() {
        let path = entry.unwrap().path();
        let Ok(stat) = fs::read_to_string(path.join("stat")) else { continue };
        // After the name, which may have spaces: the state, and the number of the parent.
        let parent = stat.rsplit(") ").next().unwrap().split(' ').nth(1).unwrap();
        let Ok(variables) = fs::read(path.join("environ")) else { continue };
        if parent == supervisor.to_string()
            && variables.split(|byte| *byte == 0).any(|own| own == wanted.as_bytes())
        {
            return path.file_name().unwrap().to_str().unwrap().to_owned();
        }
    }
    panic!("no process of rank {rank}");
}

fn send(signal: &str, process: &str) {
    assert!(Command::new("kill").args([signal, process]).status().unwrap().success());
}

/// No process of the run is left, and its newest checkpoint is whole.
fn assert_over(folder: &Folder, run: &str) {
    let newest = gpipe_checkpoint::folder::newest(&folder.path(run).join("checkpoints")).unwrap();
    let newest = newest.found.expect("a complete checkpoint");
    assert!(newest.manifest().progress.batches >= 2);
    let own = folder.path("").display().to_string();
    for entry in fs::read_dir("/proc").unwrap() {
        let path = entry.unwrap().path();
        let Ok(place) = fs::read_link(path.join("cwd")) else { continue };
        assert!(
            !place.display().to_string().starts_with(own.trim_end_matches('/')),
            "{path:?} is left"
        );
    }
}

#[test]
fn fault_a_killed_process_ends_all_with_the_one_error() {
    let folder = Folder::new();
    let mut run = long(&folder, &["launch", "--processes", "2", "--"], "run");
    send("-KILL", &process_of(run.number(), 1));
    assert_eq!(run.end(), Ok(137), "{}", run.printed);
    let error = run.printed.lines().find(|line| line.starts_with("[0] gpipe: rank 1: "));
    let error = error.unwrap_or_else(|| panic!("{}", run.printed));
    // What it was doing, when it was last heard of, or at what this one waited for it.
    assert!(error.contains("last sign of life") || error.contains("no sign of life"), "{error}");
    assert!(run.printed.contains("gpipe: rank 1 of 2 was ended by SIGKILL"), "{}", run.printed);
    assert_over(&folder, "run");
}

#[test]
fn fault_a_stopped_process_is_named_within_the_deadline() {
    let folder = Folder::new();
    let launch = ["launch", "--processes", "3", "--"];
    let more = ["--stages", "3", "--set", "pipeline.timeout_s=3"];
    let train = train_for("run", "100000", "2", &more);
    let mut run = Process::start(&mut folder.command(&[&launch[..], &train].concat()));
    run.until("saved");
    send("-STOP", &process_of(run.number(), 2));
    assert_eq!(run.end(), Ok(1), "{}", run.printed);
    for rank in [0, 1] {
        // Who waits for its message and who watches its pulse notice at the same deadline: either
        // may be first.
        let named = run.printed.lines().any(|line| {
            line.starts_with(&format!("[{rank}] gpipe: "))
                && (line.contains("rank 2: no sign of life")
                    || line.contains("last sign of life of stage 2") && line.contains("on rank 2"))
        });
        assert!(named, "{}", run.printed);
    }
    assert_over(&folder, "run");
}

/// Processes whose values pass from GPU to GPU: one of them is killed, or stopped, in the middle.
#[test]
fn fault_a_lost_process_ends_those_whose_gpus_it_is_connected_with() {
    let gpus = ["--device", "cuda:0,cuda:1,cuda:2", "--set", "pipeline.links=nccl"];
    for (signal, code) in [("-KILL", 137), ("-STOP", 1)] {
        let folder = Folder::new();
        let launch = ["launch", "--processes", "3", "--"];
        let more = [&["--stages", "3", "--set", "pipeline.timeout_s=5"][..], &gpus].concat();
        let train = train_for("run", "100000", "2", &more);
        let mut command = folder.command(&[&launch[..], &train].concat());
        command.env("GPIPE_SIMULATED_GPUS", "3").env("GPIPE_SIMULATED_GPU_MEMORY", "1GiB");
        let mut run = Process::start(&mut command);
        run.until("saved");
        send(signal, &process_of(run.number(), 1));
        assert_eq!(run.end(), Ok(code), "{signal}: {}", run.printed);
        let named = run.printed.lines().any(|line| {
            line.contains("gpipe: ") && line.contains("rank 1") && line.contains("sign of life")
        });
        assert!(named, "{signal}: {}", run.printed);
        assert_over(&folder, "run");
    }
}

#[test]
fn fault_an_error_of_one_process_is_that_of_all() {
    let folder = Folder::new();
    // Only rank 1 cannot read its text: it is another host's.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    drop(listener);
    let start = |rank: &str, text: &str| {
        let mut arguments = train("run", &["--set", "pipeline.timeout_s=20"]);
        arguments[3] = text;
        let mut command = folder.command(&arguments);
        command.env("RANK", rank).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        Process::start(&mut command)
    };
    let (mut first, mut second) = (start("0", "text.txt"), start("1", "text.txt"));
    assert_eq!((first.end(), second.end()), (Ok(0), Ok(0)), "{}{}", first.printed, second.printed);
    assert!(second.printed.is_empty(), "{}", second.printed);

    fs::remove_dir_all(folder.path("run")).unwrap();
    let (mut first, mut second) = (start("0", "text.txt"), start("1", "other.txt"));
    assert_eq!((first.end(), second.end()), (Ok(1), Ok(1)));
    let difference = "rank 1: configuration: data.text is [\"other.txt\"], \
        but [\"text.txt\"] on rank 0";
    assert!(first.printed.contains(difference), "{}", first.printed);
    assert!(second.printed.contains(difference), "{}", second.printed);
    assert!(!folder.path("run").exists());
}

#[test]
fn fault_processes_that_do_not_fit_are_refused() {
    let folder = Folder::new();
    let fails = |arguments: &[&str], parts: &[&str]| {
        let output = folder.gpipe(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    let three = launched("3", &train("run", &[]).clone());
    fails(&three, &["3 processes for 2 stages", "rank "]);
    fails(&["launch", "--processes", "0", "--", "train"], &["--processes 0: use 1 to"]);
    fails(&["launch", "--processes", "2", "--", "launch"], &["cannot launch itself"]);
    fails(&["launch", "--processes", "2", "train", "none.toml"], &["none.toml"]);
    let verify = ["verify", "tiny.toml", "--text", "text.txt", "--stages", "1"];
    fails(&launched("2", &verify), &["2 processes, and fewer stages", "give --stages 2 or more"]);
    fails(&launched("2", &["train", "none.toml"]), &["none.toml"]);
    let skip = ["train", "tiny.toml", "--set", "images.on_unreadable=skip"];
    fails(&launched("2", &skip), &["on_unreadable", "mini-batches would differ"]);
    // What no process could read is said once.
    let output = folder.gpipe(&launched("2", &["train", "--wrong"]));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), text.matches("unexpected").count()), (Some(2), 1), "{text}");
    assert!(!folder.path("run").exists());
}

#[test]
fn fault_restarts_go_on_from_the_last_checkpoint() {
    let folder = Folder::new();
    folder.succeeds(&train_for("undisturbed", "60", "3", MORE));
    let launch = ["launch", "--processes", "2", "--restarts", "2", "--"];
    let mut run = Process::start(
        &mut folder.command(&[&launch[..], &train_for("run", "60", "3", MORE)].concat()),
    );
    for rank in [1, 0] {
        run.until("saved");
        send("-KILL", &process_of(run.number(), rank));
        run.until("try ");
        run.until("resuming");
    }
    assert_eq!(run.end(), Ok(0), "{}", run.printed);
    assert!(folder.weights("run") == folder.weights("undisturbed"));
    assert_eq!(results(&folder.path("run")), results(&folder.path("undisturbed")));

    // What was refused is not started again: it would go on in another run's folder.
    let before = folder.weights("run");
    let output = folder.gpipe(&[&launch[..], &train_for("run", "90", "3", MORE)].concat());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("already holds a run") && text.contains("had not begun"), "{text}");
    assert!(folder.weights("run") == before);
}

/// A restart named no configuration, which `--resume RUN` takes from the checkpoint.
#[test]
fn regression_a_resumed_run_restarts() {
    let folder = Folder::new();
    let resume = |run| ["train", "--resume", run, "--steps", "60"];
    for run in ["undisturbed", "run"] {
        folder.succeeds(&train_for(run, "6", "3", MORE));
    }
    folder.succeeds(&resume("undisturbed"));
    let launch = ["launch", "--processes", "2", "--restarts", "1", "--"];
    let mut run = Process::start(&mut folder.command(&[&launch[..], &resume("run")].concat()));
    run.until("saved");
    send("-KILL", &process_of(run.number(), 1));
    run.until("try 2 of 2");
    assert_eq!(run.end(), Ok(0), "{}", run.printed);
    assert!(folder.weights("run") == folder.weights("undisturbed"));
}

#[test]
fn fault_a_signal_saves_in_all_processes() {
    let folder = Folder::new();
    let mut run = long(&folder, &["launch", "--processes", "2", "--"], "run");
    run.signal("TERM");
    assert_eq!(run.end(), Ok(143), "{}", run.printed);
    assert!(run.printed.contains("is saved; to continue: gpipe train --resume"), "{}", run.printed);
    assert_over(&folder, "run");
    // By hand only one of them hears it, and all of them stop.
    let mut run = long(&folder, &["launch", "--processes", "2", "--"], "other");
    send("-TERM", &process_of(run.number(), 1));
    assert_eq!(run.end(), Ok(143), "{}", run.printed);
    assert!(run.printed.contains("is saved; to continue: gpipe train --resume"), "{}", run.printed);
}

/// Joining failed where a name server did not answer, because c10d asks it for names of loopback
/// addresses, too.
#[test]
fn regression_launched_processes_wait_briefly_for_a_name_server() {
    let folder = Folder::new();
    let train = train_for("run", "100000", "2", MORE);
    for (own, wanted) in
        [(None, "RES_OPTIONS=timeout:1 attempts:2"), (Some("timeout:4"), "RES_OPTIONS=timeout:4")]
    {
        let mut command = folder.command(&launched("2", &train));
        match own {
            Some(own) => command.env("RES_OPTIONS", own),
            None => command.env_remove("RES_OPTIONS"),
        };
        let mut run = Process::start(&mut command);
        run.until("saved");
        for rank in 0..2 {
            let process = process_of(run.number(), rank);
            let variables = fs::read(format!("/proc/{process}/environ")).unwrap();
            let mut all = variables.split(|byte| *byte == 0);
            assert!(all.any(|variable| variable == wanted.as_bytes()), "{wanted}");
        }
        run.signal("TERM");
        assert_eq!(run.end(), Ok(143), "{}", run.printed);
        fs::remove_dir_all(folder.path("run")).unwrap();
    }
}

#[test]
fn fault_what_the_environment_lacks_is_named() {
    let folder = Folder::new();
    let mut command = folder.command(&train("run", &[]));
    command.env("RANK", "0").env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
    let mut run = Process::start(&mut command);
    assert_eq!(run.end(), Ok(1));
    assert!(
        run.printed.contains("sets RANK, WORLD_SIZE, MASTER_ADDR, but not MASTER_PORT"),
        "{}",
        run.printed
    );
    // Nobody else comes.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    command.env("MASTER_PORT", port.to_string()).args(["--set", "pipeline.timeout_s=1"]);
    let mut run = Process::start(&mut command);
    assert_eq!(run.ends_within(Duration::from_secs(30)).unwrap().code(), Some(1));
    assert!(run.printed.contains("rank 1 of 2 did not come"), "{}", run.printed);
}

/// The commands of two processes that are started by hand, each in the folder of its host.
fn on_two_hosts(folders: [&Folder; 2], arguments: [&[&str]; 2]) -> [Command; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    drop(listener);
    [0_usize, 1].map(|rank| {
        let mut command = folders[rank].command(arguments[rank]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command
    })
}

/// Both processes end with the same difference.
fn assert_refused(mut commands: [Command; 2], difference: &str) {
    for mut process in commands.each_mut().map(Process::start) {
        assert_eq!(process.end(), Ok(1), "{}", process.printed);
        assert!(process.printed.contains(difference), "{}", process.printed);
    }
}

/// Processes compared the training data alone, and those of `eval` did not compare any. Where the
/// hosts had other copies, a loss was that of the inputs of one and the targets of another.
#[test]
fn regression_processes_compare_what_they_measure() {
    let hosts = [Folder::new(), Folder::new()];
    for (host, word) in hosts.iter().zip(["stage ", "layer "]) {
        let line = |number: usize| format!("{{\"text\": \"pipeline {number}\"}}\n");
        fs::write(host.path("train.jsonl"), (0..40).map(line).collect::<String>()).unwrap();
        fs::write(host.path("held.jsonl"), format!("{{\"text\": \"{word}\"}}\n")).unwrap();
        fs::write(host.path("notes.txt"), word.repeat(50)).unwrap();
    }
    let run = hosts[0].path("run").display().to_string();
    hosts[0].succeeds(&train(&run, &[]));
    let of_both = |arguments: &[&str]| on_two_hosts(hosts.each_ref(), [arguments; 2]);
    assert_refused(of_both(&["eval", &run, "--text", "notes.txt"]), "rank 1: held-out data is ");
    assert_refused(of_both(&["eval", &run, "--data", "held.jsonl"]), "rank 1: held-out data is ");
    let (other, held) = (run.clone() + "-2", "data.validation=[\"held.jsonl\"]");
    let train = ["train", "tiny.toml", "--data", "train.jsonl", "--set", held, "--out", &other];
    assert_refused(of_both(&train), "rank 1: held-out data is ");
}

/// Arguments of `generate`, `translate` and `eval` were not compared. With another number of
/// tokens, one process ended, and the other lost it in the middle of its output.
#[test]
fn regression_processes_compare_how_they_use_a_model() {
    let folder = Folder::new();
    folder.succeeds(&train("run", &[]));
    for (command, flag) in [
        (&["generate", "run", "--prompt", "a"][..], "--tokens"),
        (&["generate", "run", "--prompt", "a"], "--seed"),
        (&["eval", "run"], "--tokens"),
    ] {
        let with = |value| [command, &[flag, value]].concat();
        let (first, second) = (with("20"), with("30"));
        let hosts = on_two_hosts([&folder, &folder], [&first, &second]);
        assert_refused(hosts, &format!("rank 1: {flag} is 30, but 20 on rank 0"));
    }
}

/// Replicas on processors with other vector units began. Each computed the update with other bits,
/// so their parameters drifted apart.
#[test]
#[cfg(target_arch = "x86_64")]
fn regression_replicas_compare_their_vector_units() {
    if !std::is_x86_feature_detected!("avx2") {
        return skip("regression_replicas_compare_their_vector_units", "no AVX2 here");
    }
    let folder = Folder::new();
    let train = train("run", &["--replicas", "2", "--stages", "1"]);
    let [first, mut second] = on_two_hosts([&folder, &folder], [&train, &train]);
    second.env("ATEN_CPU_CAPABILITY", "default");
    assert_refused([first, second], "rank 1: CPU capability (ATEN_CPU_CAPABILITY lowers it) is ");
}

/// A process that a signal ended has no exit code. `--restarts` took it for one that had crashed,
/// and began again what somebody had ended with `kill`.
#[test]
fn regression_a_process_that_a_signal_ended_is_not_restarted() {
    let folder = Folder::new();
    let launch = ["launch", "--processes", "2", "--restarts", "1", "--"];
    let trace = ["trace", "tiny.toml", "--text", "text.txt", "--steps", "100000"];
    let mut run = Process::start(&mut folder.command(&[&launch[..], &trace].concat()));
    run.until("training tokens");
    send("-TERM", &process_of(run.number(), 1));
    assert_eq!(run.end(), Ok(143), "{}", run.printed);
    assert!(!run.printed.contains("try 2"), "{}", run.printed);
}

/// The launcher dropped errors of its output: a full disk lost what the processes printed, and the
/// exit code was 0.
#[test]
fn regression_output_that_a_launcher_cannot_write_is_an_error() {
    let folder = Folder::new();
    let schedule = ["schedule", "1f1b", "--stages", "2", "--micro-batches", "2"];
    let mut command = folder.command(&launched("2", &schedule));
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = command.stdin(Stdio::null()).stdout(full).stderr(Stdio::piped()).output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("not everything was printed"), "{text}");
}

/// The launcher was told the run's folder as text. In a working folder whose name is not UTF-8, a
/// restart began again in another folder.
#[test]
fn regression_a_restart_in_a_folder_that_is_not_utf_8() {
    let folder = Folder::new();
    let here = folder.path("").join(OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&here).unwrap();
    for name in ["tiny.toml", "text.txt"] {
        fs::copy(folder.path(name), here.join(name)).unwrap();
    }
    let launch = ["launch", "--processes", "1", "--restarts", "1", "--"];
    let run = train_for("run", "60", "3", MORE);
    let mut command = folder.command(&[&launch[..], &run].concat());
    let mut run = Process::start(command.current_dir(&here));
    run.until("saved");
    send("-KILL", &process_of(run.number(), 0));
    run.until("try 2 of 2");
    run.until("resuming");
    assert_eq!(run.end(), Ok(0), "{}", run.printed);
    assert!(here.join("run/weights.safetensors").exists());
}
