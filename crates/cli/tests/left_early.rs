//! Runs that do not come to their end as planned: signals, numbers that are none, memory and disks
//! that are full, and outputs that nobody reads. Families: `fault_` (what is told, and that the
//! state is saved), `transparency_` (what goes on afterwards is as if nothing had happened, bit for
//! bit).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use std::{fs, process::Command, time::Duration};

use common::{
    Folder, TRAIN, bytes,
    mounts::with_mounts,
    process::{Process, output},
    results, steps, train,
};
use gpipe_checkpoint::weights;
use gpipe_data::Tokenizer;

/// A run of so many steps that a signal meets it in the middle.
fn long(out: &str) -> Vec<&str> {
    [&TRAIN[..4], &["--steps", "300", "--out", out], &TRAIN[8..]].concat()
}

/// The step in `... after step N ...`.
fn step_told(printed: &str) -> u64 {
    let rest = printed.split("the state after step ").nth(1).unwrap_or_else(|| panic!("{printed}"));
    rest.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn transparency_a_signal_saves_exactly_the_last_step_and_says_how_to_go_on() {
    let folder = Folder::new();
    folder.succeeds(&long("reference"));
    for (signal, code, every) in
        [("TERM", 143, "none"), ("INT", 130, "10min"), ("HUP", 129, "none")]
    {
        let arguments = [&long(signal)[..], &["--checkpoint-every", every]].concat();
        let own = folder.command(&arguments);
        // Under `nohup`, the tests and what they start ignore SIGHUP.
        let mut command = Command::new("env");
        command.arg(format!("--default-signal={signal}")).arg(own.get_program()).args(&arguments);
        command.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.current_dir(folder.path(""));
        let mut process = Process::start(&mut command);
        process.until("step 1/300");
        process.signal(signal);
        assert_eq!(process.end(), Ok(code), "{}", process.printed);
        let step = step_told(&process.printed);
        for part in [
            format!("gpipe: SIG{signal}: saving after this step; a second signal ends the run"),
            format!(
                "gpipe: the state after step {step} is saved; to continue: gpipe train --resume \
                {signal}"
            ),
            format!("gpipe: stopped by SIG{signal} after step {step}"),
        ] {
            assert!(process.printed.contains(&part), "'{part}': {}", process.printed);
        }
        assert_eq!(steps(&folder, signal), [step]);
        assert_eq!(folder.lines(signal).len() as u64, step);

        folder.succeeds(&["train", "--resume", signal]);
        assert!(folder.weights(signal) == folder.weights("reference"));
        assert_eq!(results(&folder.path(signal)), results(&folder.path("reference")));
        // Also where none are asked for, the newest checkpoint is not behind the run, which would
        // train again from there.
        assert_eq!(steps(&folder, signal).last(), Some(&300), "--checkpoint-every {every}");
        let printed = folder.succeeds(&["train", "--resume", signal]);
        assert!(printed.contains("all 300 steps are done"), "{printed}");
    }
}

/// A signal in the validation after the last step was told of and not obeyed, and what had been
/// learned since the last checkpoint was lost to the SIGKILL that follows.
#[test]
fn regression_a_signal_in_the_last_validation_saves() {
    let folder = Folder::new();
    let text = fs::read_to_string(folder.path("text.txt")).unwrap();
    fs::write(folder.path("text.txt"), text.repeat(1 + 100_000 / text.len())).unwrap();
    let long = ["--set", "train.validation_tokens=50000", "--checkpoint-every", "none"];
    let train = ["train", "tiny.toml", "--text", "text.txt", "--steps", "12", "--out", "run"];
    let train = [&train[..], &long].concat();
    let mut process = Process::start(&mut folder.command(&train));
    process.until("step 12/12");
    process.signal("TERM");
    assert_eq!(process.end(), Ok(143), "{}", process.printed);
    assert!(process.printed.contains("the state after step 12 is saved"), "{}", process.printed);
    assert_eq!(steps(&folder, "run"), [12]);
    folder.succeeds(&["train", "--resume", "run"]);
    assert!(folder.path("run/weights.safetensors").exists());
}

#[test]
fn fault_a_second_signal_ends_at_once_and_the_run_still_goes_on() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &[]));
    folder.succeeds(&train("run", &[])); // whose checkpoints are 8 and 12
    fs::remove_dir_all(folder.path("run/checkpoints/step-00000012")).unwrap();
    let resume = train("run", &["--resume", "auto"]);
    // Saving the last step takes forever.
    let mut process =
        Process::start(folder.command(&resume).env("GPIPE_TEST_FILE_DELAY_MS", "1000"));
    process.until("step 9/12");
    process.signal("TERM");
    process.until("saving after this step");
    // At once it is the same request: `timeout` signals a process, and then its group.
    process.signal("TERM");
    assert_eq!(process.ends_within(Duration::from_millis(300)), None, "{}", process.printed);
    let mut ended = None;
    while ended.is_none() {
        process.signal("TERM");
        ended = process.ends_within(Duration::from_millis(200));
    }
    assert_eq!(process.end(), Err(15), "{}", process.printed);
    assert_eq!(steps(&folder, "run"), [8]);
    folder.succeeds(&resume);
    assert!(folder.weights("run") == folder.weights("reference"));
    assert_eq!(results(&folder.path("run")), results(&folder.path("reference")));
}

/// A folder with weights that make no number of some mini-batches: the embedding of a rare letter
/// is none.
fn poisoned() -> (Folder, Vec<&'static str>) {
    let folder = Folder::new();
    let text = fs::read_to_string(folder.path("text.txt")).unwrap();
    let words: Vec<&str> = text.split(' ').collect();
    let training = words.len() / 2;
    let rare = |(i, word): (usize, &&str)| match i % 400 == 7 && i < training {
        true => format!("Q{word} "),
        false => format!("{word} "),
    };
    fs::write(folder.path("text.txt"), words.iter().enumerate().map(rare).collect::<String>())
        .unwrap();
    let untied = ["--set", "model.tied=false", "--set", "train.mini_batch=3"];
    folder.succeeds(&train("source", &[&untied[..], &["--set", "optimizer.lr=0"]].concat()));

    let tokenizer = Tokenizer::load(&folder.path("source/tokenizer.json")).unwrap();
    let weights = weights::load(&folder.path("source/weights.safetensors")).unwrap();
    let (_, table) = weights.iter().find(|(name, _)| name == "embedding.tokens").unwrap();
    for token in 0..tokenizer.vocabulary() {
        if tokenizer.token_bytes(u32::try_from(token).unwrap()).unwrap().contains(&b'Q') {
            let _ = table.get(token as i64).fill_(3e38); // the first norm overflows
        }
    }
    weights::save(&folder.path("poisoned.safetensors"), &weights).unwrap();
    let tokens = ["--set", "data.tokenizer=source/tokenizer.json"];
    (folder, [&untied[..], &tokens, &["--init", "poisoned.safetensors"]].concat())
}

#[test]
fn transparency_skipped_mini_batches_are_recorded_and_survive_an_interruption() {
    let (folder, poisoned) = poisoned();
    let skip = [&poisoned[..], &["--on-nan", "skip"]].concat();
    let output = folder.gpipe(&[&long("reference"), &skip[..]].concat());
    let warned = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{warned}");
    let lines = folder.lines("reference");
    let (lines, evaluation) = lines.split_at(300);
    assert!(evaluation.len() == 1 && evaluation[0]["loss"].as_f64().is_some());
    let skipped: Vec<usize> = (0..300).filter(|&i| lines[i]["skipped"] == true).collect();
    assert!((2..60).contains(&skipped.len()), "{skipped:?}: some, or nothing is tested");
    let mut updates = 0;
    for (i, line) in lines.iter().enumerate() {
        let is_skipped = skipped.contains(&i);
        updates += u64::from(!is_skipped);
        assert_eq!(line["loss"].is_null(), is_skipped, "{line}");
        assert_eq!(line["samples_total"], 3 * (i + 1));
        assert_eq!(
            (&line["step"], &line["tokens_total"]),
            (&updates.into(), &(updates * 24).into())
        );
        let warning = format!("gpipe: warning: step {} is skipped: stage ", i + 1);
        assert_eq!(warned.contains(&warning), is_skipped, "{warning}: {warned}");
    }
    assert!(warned.contains("layer '0.attention'") && warned.contains("not finite"), "{warned}");

    // Two processes leave out the same ones. There the layer is not looked for.
    fn launch(out: &str) -> Vec<&str> {
        [&["launch", "--processes", "2", "--"], &long(out)[..]].concat()
    }
    folder.succeeds(&[&launch("parted"), &skip[..]].concat());
    assert_eq!(results(&folder.path("parted")), results(&folder.path("reference")));
    assert!(folder.weights("parted") == folder.weights("reference"));
    let output = folder.gpipe(&[&launch("parted stop"), &poisoned[..]].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains(&format!("step {}: ", skipped[0] + 1)), "{said}");
    assert!(said.contains("not finite") && said.contains("is saved"), "{said}");
    assert_eq!(steps(&folder, "parted stop"), [skipped[0] as u64]);

    // Without skipping the first one ends the run; what it saved goes on.
    let number = skipped[0] + 1;
    let named = [
        format!(
            "the state after step {} is saved; to continue: gpipe train --resume run",
            skipped[0]
        ),
        format!("step {number}: stage "),
        "layer '0.attention'".into(),
        "not finite".into(),
        "--on-nan skip".into(),
    ];
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    folder.refuses(&[&long("run"), &poisoned[..]].concat(), &named);
    assert_eq!(steps(&folder, "run"), [skipped[0] as u64]);
    folder.refuses(&["train", "--resume", "run"], &named[..3]);

    // Skipping now, killed in a save after the first one, and once more.
    let again = ["train", "--resume", "run", "--on-nan", "skip", "--stages", "1"];
    let mut command =
        folder.command(&[&again[..], &["--checkpoint-every", &number.to_string()]].concat());
    let mut process = Process::start(command.env("GPIPE_TEST_KILL_AT_FILE_OPERATION", "90"));
    assert_eq!(process.end(), Err(9), "{}", process.printed);
    folder.succeeds(&again);
    assert!(folder.weights("run") == folder.weights("reference"));
    assert_eq!(results(&folder.path("run")), results(&folder.path("reference")));
}

#[test]
fn fault_weights_that_are_beyond_numbers_end_the_run_and_an_older_checkpoint_goes_on() {
    let folder = Folder::new();
    let sgd = ["--set", "optimizer.name=sgd"];
    folder.succeeds(&train("run", &[&sgd[..], &["--steps", "4"][..0]].concat()));
    folder.copy("run", "skip");
    let high = ["--steps", "40", "--set", "optimizer.lr=1e30"];
    let resume = |run: &'static str, more: &[&'static str]| {
        [&["train", "--resume", run], &high[..], more].concat()
    };
    let parts = [
        "step 14: stage ",
        "micro-batch ",
        "layer '",
        "not finite",
        "--on-nan skip",
        "the state after step 13 is saved; to continue: gpipe train --resume run",
    ];
    folder.refuses(&resume("run", &[]), &parts);
    assert_eq!(steps(&folder, "run"), [12, 13]);
    // The weights of step 13 are lost, and the way back is told.
    let older = ["train", "--resume", "run/checkpoints/step-00000012", "--steps", "14"];
    folder.refuses(&older, &["later checkpoint", "step-00000013", "another --out"]);
    folder.succeeds(&[&older[..], &["--out", "lower"]].concat());

    let parts = ["mini-batches in a row are not finite, which is no accident; the last: stage "];
    folder.refuses(&resume("skip", &["--on-nan", "skip"]), &parts);
    let lines = folder.lines("skip");
    let skipped = lines.iter().filter(|line| line["skipped"] == true).count();
    assert_eq!((skipped, steps(&folder, "skip").last()), (10, Some(&23)));
}

#[test]
fn fault_out_of_memory_saves_the_state_and_names_the_layer() {
    let folder = Folder::new();
    let parts = [
        "layer '",
        "out of memory",
        "cap 80.0 KiB",
        "the state after step 0 is saved; to continue: gpipe train",
    ];
    folder.refuses(&train("run", &["--memory", "80KiB"]), &parts);
    assert_eq!(steps(&folder, "run"), [0]);
    folder.succeeds(&["train", "--resume", "run", "--memory", "none"]);
    folder.succeeds(&train("reference", &[]));
    assert!(folder.weights("run") == folder.weights("reference"));
    assert_eq!(results(&folder.path("run")), results(&folder.path("reference")));
}

#[test]
fn regression_outputs_that_nobody_reads_end_no_run() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &[]));
    let through = |shell: &str, arguments: &[&str]| {
        let gpipe = [&[env!("CARGO_BIN_EXE_gpipe")], arguments].concat();
        let mut command = Command::new("bash");
        command.args(["-c", shell, "bash"]).args(gpipe).current_dir(folder.path(""));
        let output = output(&mut command);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let head = r#"{ "$@" 2>&1; echo $? > code; } | head -n 1"#;
    let (_, line, _) = through(head, &train("run", &[]));
    assert_eq!(line.lines().count(), 1, "{line}");
    assert_eq!(fs::read_to_string(folder.path("code")).unwrap(), "0\n");
    assert!(folder.weights("run") == folder.weights("reference"));

    // A log on a full disk: the run comes to its end, and the command tells that lines are missing.
    let full = r#"exec "$@" > /dev/full"#;
    let (code, _, errors) = through(full, &train("full", &[]));
    let told = "gpipe: not everything was printed: the standard output: No space left";
    assert!(code == Some(1) && errors.starts_with(told), "{errors}");
    assert!(folder.weights("full") == folder.weights("reference"));
    // No outputs at all.
    let (code, ..) = through(r#"exec "$@" <&- >&- 2>&-"#, &train("closed", &[]));
    assert_eq!(code, Some(0));
    assert!(folder.weights("closed") == folder.weights("reference"));
    let (code, ..) = through(full, &["eval", "run", "--json"]);
    assert_eq!(code, Some(1), "a result that is not printed is no success");
}

#[test]
fn fault_a_full_disk_costs_checkpoints_and_not_the_run() {
    let folder = Folder::new();
    folder.succeeds(&train("reference", &[]));
    let arguments = train("disk/run", &["--keep", "50", "--resume", "auto"]).join(" ");
    let script = format!(
        "mkdir disk; mount -t tmpfs -o size=250k tmpfs disk
        code=0; $GPIPE {arguments} > first.out 2> first.err || code=$?; echo $code
        $GPIPE inspect disk/run; ls disk/run/checkpoints
        cp -r disk/run full
        mount -o remount,size=8m disk
        $GPIPE {arguments} > second.out
        $GPIPE inspect disk/run > /dev/null
        cp -r disk/run run"
    );
    let test = "fault_a_full_disk_costs_checkpoints_and_not_the_run";
    let Some(printed) = with_mounts(&folder, test, &script) else { return };
    let read = |name: &str| fs::read_to_string(folder.path(name)).unwrap();
    let (out, errors) = (read("first.out"), read("first.err"));
    assert!(out.contains("saved step 4: disk/run/checkpoints/step-00000004 "), "{out}");
    let warning = errors.lines().find(|line| line.contains("a checkpoint was not saved")).unwrap();
    for part in ["gpipe: warning: ", "cannot write ", ".writing/", "make room", "the run goes on"] {
        assert!(warning.contains(part), "'{part}' is not in: {warning}");
    }
    // All steps were trained; that the last state could not be saved is an error; its weights found
    // room.
    let last = errors.lines().last().unwrap();
    assert!(last.starts_with("gpipe: cannot ") && last.contains("step-00000012"), "{errors}");
    assert!(out.contains("step 12/12") && !out.contains("files: "), "{out}");
    assert!(printed.starts_with("1\n"), "{printed}");
    assert!(
        printed.contains("step-00000004: step 4, ") && !printed.contains(".writing"),
        "{printed}"
    );
    assert!(folder.weights("full") == folder.weights("reference"));
    assert_eq!(folder.lines("full").len(), 12 + 1);
    // With more room it goes on from the checkpoint that there is.
    let second = read("second.out");
    assert!(second.contains("resuming disk/run/checkpoints/step-00000004: "), "{second}");
    assert!(folder.weights("run") == folder.weights("reference"));
    assert_eq!(results(&folder.path("run")), results(&folder.path("reference")));
}

/// Room for one process's part of a checkpoint, and not for both: whichever is later has none.
#[test]
fn fault_a_disk_that_two_processes_fill_costs_checkpoints_and_not_the_run() {
    let folder = Folder::new();
    let more = ["--set", "model.hidden=4096", "--balance", "1,3"];
    folder.succeeds(&train("reference", &more));
    let script = format!(
        "mkdir disk; mount -t tmpfs -o size=1500k tmpfs disk
        $GPIPE launch --processes 2 -- {} > out 2> err || echo code $?
        ls disk/run/checkpoints; cp -r disk/run full",
        train("disk/run", &more).join(" ")
    );
    let test = "fault_a_disk_that_two_processes_fill_costs_checkpoints_and_not_the_run";
    let Some(printed) = with_mounts(&folder, test, &script) else { return };
    let read = |name: &str| fs::read_to_string(folder.path(name)).unwrap();
    let (out, errors) = (read("out"), read("err"));
    // Both write to it at once: either may be the one that finds no room, and rank 0 says which one
    // it was.
    let warnings = errors.lines().filter(|line| {
        let what = line.strip_prefix("[0] gpipe: warning: a checkpoint was not saved: ");
        what.is_some_and(|what| what.trim_start_matches("rank 1: ").starts_with("cannot write "))
    });
    assert_eq!(warnings.count(), 2, "{errors}");
    assert!(errors.contains("make room"), "{errors}");
    // All steps were trained; that their last state is not saved is an error of both.
    assert!(out.contains("step 12/12") && printed.contains("code 1\n"), "{out}{printed}");
    assert!(!printed.contains("step-") && !printed.contains(".writing"), "{printed}");
    assert!(folder.weights("full") == folder.weights("reference"));
}

#[test]
fn fault_a_disk_without_room_for_the_last_files_is_an_error_that_names_them() {
    let folder = Folder::new();
    let mut arguments = train("disk/run", &[]);
    arguments[5] = "none";
    let script = format!(
        "mkdir disk; mount -t tmpfs -o size=44k tmpfs disk
        $GPIPE {} 2>&1 || echo code $?; ls disk/run",
        arguments.join(" ")
    );
    let test = "fault_a_disk_without_room_for_the_last_files_is_an_error_that_names_them";
    let Some(printed) = with_mounts(&folder, test, &script) else { return };
    assert!(printed.contains("step 12/12") && printed.contains("code 1\n"), "{printed}");
    let error = printed.lines().find(|line| line.starts_with("gpipe: ")).unwrap();
    assert!(error.contains("weights.safetensors") && error.contains("No space left"), "{printed}");
    let (_, files) = printed.split_once("code 1\n").unwrap();
    assert!(!files.contains("weights.safetensors"), "{files}");
}

#[test]
fn fault_a_folder_that_cannot_be_written_is_named_before_any_work() {
    let folder = Folder::new();
    folder.succeeds(&train("ro/run", &[]));
    let go_on = train("ro/run", &["--resume", "auto"]).join(" ");
    let (new, empty) = (train("ro/new", &[]).join(" "), train("ro/empty", &[]).join(" "));
    fs::create_dir(folder.path("ro/empty")).unwrap();
    let script = format!(
        "mount --bind ro ro; mount -o remount,bind,ro ro
        for run in '{go_on}' '{new}' '{empty}'; do $GPIPE $run 2>&1 || echo code $?; done"
    );
    let test = "fault_a_folder_that_cannot_be_written_is_named_before_any_work";
    let Some(printed) = with_mounts(&folder, test, &script) else { return };
    assert_eq!(printed.matches("code 1\n").count(), 3, "{printed}");
    for run in ["ro/run", "ro/new", "ro/empty"] {
        let error =
            printed.lines().find(|line| line.starts_with(&format!("gpipe: {run}"))).unwrap();
        assert!(error.contains("Read-only file system"), "{error}");
    }
    assert!(!printed.contains("training tokens"), "the text was read: {printed}");
    assert!(!bytes(&folder.path("ro/run/weights.safetensors")).is_empty());
}

#[test]
fn regression_only_a_state_that_is_on_disk_is_said_to_be_saved() {
    // A worker without a sign of life may leave a pipeline that cannot be copied any more. The
    // command said all the same that the state was saved.
    let folder = Folder::new();
    let short = ["--steps", "1000000", "--set", "pipeline.timeout_s=1", "--out", "run"];
    let arguments = [&TRAIN[..4], &short, &TRAIN[8..]].concat();
    let mut process = Process::start(&mut folder.command(&arguments));
    process.until("step 1/");
    // Standing still for longer than the deadline looks like silence, at most moments.
    let ended = (0..20).any(|_| {
        process.signal("STOP");
        assert_eq!(process.ends_within(Duration::from_millis(1500)), None);
        process.signal("CONT");
        process.ends_within(Duration::from_millis(1000)).is_some()
    });
    let printed = &process.printed;
    assert!(ended && printed.contains("sign of life"), "{printed}");
    let (own, pipeline) =
        (steps(&folder, "run"), "gpipe: the state could not be saved: the pipeline ");
    match printed.contains(pipeline) {
        true => assert!(own.is_empty() && !printed.contains(" is saved; "), "{own:?}: {printed}"),
        false => assert_eq!(own, [step_told(printed)], "{printed}"),
    }
}

/// A host with a run of that name on a disk of its own trained to the end, and nothing was saved.
#[test]
fn regression_hosts_that_do_not_share_the_folder_say_so_before_the_first_step() {
    let test = "regression_hosts_that_do_not_share_the_folder_say_so_before_the_first_step";
    let folder = Folder::new();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let script = format!(
        "mkdir -p out other/run/checkpoints
        export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
        unshare --mount bash -c 'mount --bind other out; RANK=1 $GPIPE {train}; echo code $?' \
          > b.out 2>&1 &
        RANK=0 $GPIPE {train} > a.out 2>&1 || echo code $? >> a.out
        wait",
        train = train("out/run", &["--stages", "2"]).join(" ")
    );
    if with_mounts(&folder, test, &script).is_none() {
        return;
    }
    for (name, who) in [("a.out", "rank 1: "), ("b.out", "")] {
        let said = fs::read_to_string(folder.path(name)).unwrap();
        assert!(said.contains("code 1"), "{name}: {said}");
        assert!(said.contains(who) && said.contains("a file system that they share"), "{said}");
        assert!(!said.contains("step 1/"), "{name}: {said}");
    }
    let left = fs::read_dir(folder.path("out/run/checkpoints")).unwrap();
    assert_eq!(left.count(), 0, "nothing of the meeting stays");
}
