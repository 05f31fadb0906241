//! `gpipe schedule`, and trainings under every schedule, as their user runs them. Families:
//! `transparency_` (none changes the result), `oracle_` (what is printed is what is run, and
//! planned), `fault_` (files that are no schedules).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::{fs, path::Path};

use common::{Folder, bytes, train};
use gpipe_observe::step_file::StepFile;

#[test]
fn transparency_of_every_schedule_in_one_process_and_in_two() {
    let folder = Folder::new();
    let printed = folder.succeeds(&["schedule", "zb-h1", "--stages", "2", "--micro-batches", "3"]);
    fs::write(folder.path("mine.txt"), &printed).unwrap();
    folder.succeeds(&train("plain", &["--schedule", "gpipe", "--remat", "never"]));
    let schedules = ["zb-h1", "interleaved:2", "file:mine.txt", "zb-v", "v-half", "v-min"];
    for (number, schedule) in schedules.into_iter().enumerate() {
        // The one model has four layers: two stages on each of two devices.
        let out = format!("own-{number}");
        let text = folder.succeeds(&train(&out, &["--schedule", schedule]));
        assert!(text.contains(schedule), "{text}");
        assert_eq!(folder.weights(&out), folder.weights("plain"), "{schedule}");
        let step = StepFile::read(&folder.path(&out).join("step.json")).unwrap();
        assert_eq!(step.measured.devices.len(), 2);
        let acts = |letter: char| {
            let mut all = step.measured.actions().map(ToString::to_string);
            all.any(|action| {
                action.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with(letter)
            })
        };
        assert_eq!(acts('W'), schedule != "interleaved:2", "{schedule}");
        assert_eq!(acts('B'), schedule == "interleaved:2", "{schedule}");
        let more = ["--schedule", schedule, "--remat", "always"];
        let parted = format!("parted-{number}");
        let command = train(&parted, &more);
        folder.succeeds(&[&["launch", "--processes", "2", "--"], &command[..]].concat());
        assert_eq!(folder.weights(&parted), folder.weights("plain"), "{schedule} in two processes");
    }
    // What one of them saved goes on under another, and without the file.
    fs::remove_file(folder.path("mine.txt")).unwrap();
    let on = ["--resume", "own-2/checkpoints/step-00000008", "--out", "on"];
    folder.succeeds(&[&["train"], &on[..], &["--schedule", "1f1b", "--stages", "3"]].concat());
    assert_eq!(folder.weights("on"), folder.weights("plain"));
    folder.succeeds(&["eval", "own-2", "--stages", "1"]);
    folder.refuses(&["train", "--resume", "own-2", "--steps", "13"], &["mine.txt"]);
}

#[test]
fn oracle_verify_compares_every_schedule() {
    let folder = Folder::new();
    let verify = ["verify", "tiny.toml", "--text", "text.txt", "--stages", "1,2", "--steps", "2"];
    let schedules = ["--schedule", "gpipe,zb-h1,interleaved:2", "--remat", "never,always"];
    let text = folder.succeeds(&[&verify[..], &schedules].concat());
    assert!(text.contains("zb-h1") && text.contains("interleaved:2"), "{text}");
}

/// The documentation shows what the command draws today. `cargo xtask golden --bless` draws again.
#[test]
fn golden_the_pictures_in_the_documentation_are_what_is_drawn() {
    let folder = Folder::new();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
    let named = gpipe::Schedule::NAMED.map(|schedule| schedule.to_string());
    let mut pictures: Vec<(String, Vec<&str>)> =
        named.iter().map(|name| (name.replace(':', "-"), vec![name.as_str()])).collect();
    pictures.push(("1f1b-and-zb-h1".into(), vec!["1f1b", "--beside", "zb-h1"]));
    for (name, of) in &pictures {
        let size = ["--stages", "4", "--micro-batches", "8", "--svg", "own.svg"];
        folder.succeeds(&[&["schedule"], &of[..], &size[..]].concat());
        let picture = docs.join(format!("{name}.svg"));
        if std::env::var_os("GPIPE_BLESS").is_some() {
            fs::copy(folder.path("own.svg"), &picture).unwrap();
        }
        assert!(bytes(&folder.path("own.svg")) == bytes(&picture), "{name}: draw it again");
    }
    assert_eq!(fs::read_dir(docs).unwrap().count(), pictures.len());
}

#[test]
fn oracle_what_is_printed_is_read_again() {
    let folder = Folder::new();
    for name in gpipe::Schedule::NAMED.map(|schedule| schedule.to_string()) {
        let name = name.as_str();
        let of = ["--stages", "3", "--micro-batches", "5", "--draw"];
        let printed = folder.succeeds(&[&["schedule", name], &of[..]].concat());
        fs::write(folder.path("own.txt"), &printed).unwrap();
        let again = folder.succeeds(&["schedule", "file:own.txt", "--draw", "--svg", "own.svg"]);
        // But for its name, with which it begins.
        assert_eq!(printed.split_once(": ").unwrap().1, again.split_once("txt: ").unwrap().1);
        assert!(fs::read_to_string(folder.path("own.svg")).unwrap().contains("<svg"));
        // Through PyTorch's format, too.
        let of = ["--stages", "3", "--micro-batches", "5", "--csv", "own.csv"];
        folder.succeeds(&[&["schedule", name], &of[..]].concat());
        let again = folder.succeeds(&["schedule", "file:own.csv", "--draw"]);
        assert_eq!(printed.split_once(": ").unwrap().1, again.split_once("csv: ").unwrap().1);
    }
    let text = folder.succeeds(&["schedule", "zb-h1", "--stages", "4", "--micro-batches", "8"]);
    assert!(
        text.contains("# bubble 11.1%, step 27 (") && text.contains("by stage: 4 4 4 4"),
        "{text}"
    );
    let text = folder.succeeds(&["schedule", "1f1b", "--stages", "4", "--micro-batches", "8"]);
    assert!(
        text.contains("# bubble 27.3%, step 33 (") && text.contains("by stage: 4 3 2 1"),
        "{text}"
    );
}

#[test]
fn oracle_other_schedules_are_planned_and_run() {
    let folder = Folder::new();
    let plan = ["plan", "tiny.toml", "--text", "text.txt", "--analytic", "--devices", "2"];
    let choose = ["--micro-batches", "2,4", "--out", "p.json", "--svg", "p.svg"];
    let all = [&plan[..], &choose, &["--schedule", "1f1b,zb-h1,interleaved:2"]].concat();
    let text = folder.succeeds(&all);
    for part in ["K 2, M 4, zb-h1", "interleaved:2", "1f1b", "step "] {
        assert!(text.contains(part), "'{part}' is not in {text}");
    }
    let only = [&plan[..], &choose, &["--schedule", "interleaved:2"]].concat();
    let text = folder.succeeds(&only);
    assert!(text.contains("interleaved:2 on 2 devices") && text.contains("(device 0)"), "{text}");
    // Many stages with few micro-batches are few actions.
    folder.succeeds(&["schedule", "1f1b", "--stages", "1500", "--micro-batches", "1"]);
    let text = ["--text", "text.txt", "--stages", "10000000000000"];
    folder.refuses(&[&["train", "tiny.toml"], &text[..]].concat(), &["use at most 4096 stages"]);
    // Every profile knows what the halves of backwards take.
    let profile = ["profile", "tiny.toml", "--text", "text.txt", "--steps", "1"];
    folder.succeeds(&[&profile[..], &["--out", "own.json"]].concat());
    let measured = ["plan", "tiny.toml", "--text", "text.txt", "--profile", "own.json"];
    for schedule in ["zb-h1", "interleaved:2"] {
        let out = ["--schedule", schedule, "--out", "q.json"];
        let text = folder.succeeds(&[&measured[..], &out].concat());
        assert!(text.contains(schedule), "{text}");
        let run = format!("planned-{}", &schedule[..2]);
        let text = folder.train(&["--steps", "2", "--plan", "q.json", "--out", &run]);
        assert!(text.contains(schedule) && text.contains("predicted "), "{text}");
    }
    let file = ["--schedule", "1f1b,file:mine.txt"];
    folder.refuses(&[&measured[..], &file].concat(), &["a plan chooses among named schedules"]);
}

/// An order that is made for measured costs: in a plan, in a training, and when that goes on.
#[test]
fn transparency_of_an_order_made_for_the_costs() {
    let folder = Folder::new();
    folder.succeeds(&train("plain", &["--schedule", "gpipe"]));
    let text = folder.succeeds(&train("made", &["--schedule", "auto"]));
    assert!(text.contains("stages, M = 3, ") && text.contains("of any order of"), "{text}");
    assert_eq!(folder.weights("made"), folder.weights("plain"));
    folder.succeeds(&["eval", "made", "--stages", "1"]);
    for run in ["plain", "made"] {
        let text = folder.succeeds(&["train", "--resume", run, "--steps", "16"]);
        let changed = text.lines().filter(|line| line.contains(" -> "));
        assert!(changed.clone().all(|line| line.contains("train.steps")), "{text}");
    }
    assert_eq!(folder.weights("made"), folder.weights("plain"));

    let plan = ["plan", "tiny.toml", "--text", "text.txt", "--analytic", "--devices", "2"];
    let choose = ["--schedule", "auto", "--micro-batches", "3", "--out", "p.json"];
    let text = folder.succeeds(&[&plan[..], &choose, &["--set", "model.blocks=1"]].concat());
    assert!(text.contains("M 3, ") && text.contains("of any order of these stages"), "{text}");
    folder.refuses(
        &["schedule", "auto", "--stages", "2"],
        &["gpipe train, trace, ledger and plan make"],
    );

    // The configuration of a run with a made order: what is for its M alone is not measured.
    let config = fs::read_to_string(folder.path("tiny.toml")).unwrap();
    let order = "schedule = \"auto: 0F0 0B0 3F0 3B0 | 1F0 1B0 2F0 2B0\"\nbalance = \"1,1,2,2\"";
    let order = order.replace("0F0 0B0 3F0 3B0", "0F0 3F0 3B0 0B0");
    let order = order.replace("1F0 1B0 2F0 2B0", "1F0 2F0 2B0 1B0");
    let config = config.replace("micro_batches = 3", &format!("micro_batches = 1\n{order}"));
    fs::write(folder.path("made.toml"), config.replace("mini_batch = 7", "mini_batch = 2"))
        .unwrap();
    let made = ["made.toml", "--text", "text.txt"];
    folder.succeeds(&[&["profile"], &made[..], &["--steps", "1", "--out", "q.json"]].concat());
    let plan = ["--steps", "2", "--plan", "auto", "--set", "train.validation_tokens=100"];
    folder.succeeds(&[&["train"], &made[..], &plan, &["--out", "again"]].concat());
}

/// Both dialects of PyTorch's files, and the two examples.
#[test]
fn oracle_pytorchs_files_are_read() {
    let folder = Folder::new();
    let only = "0F0,0F1,,3F0,(0F2;3B0)OVERLAP_F_B,3F1,0B0,3B1,0B1,3F2,3B2,0I2,0W2\n\
                ,1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1,1F2,2F2,2B2,1B2\n";
    fs::write(folder.path("only.csv"), only).unwrap();
    let text = folder.succeeds(&["schedule", "file:only.csv"]);
    assert!(
        text.contains("# the forward and the backward of 1 OVERLAP_F_B run one after"),
        "{text}"
    );
    assert!(text.contains("\n0F0 0F1 3F0 0F2 3B0 3F1 0B0"), "{text}");
    let messages = only
        .replace(",3F0", ",3RECV_F0,3F0,3UNSHARD")
        .replace("1F0,", "1RECV_F0,1F0,")
        .replace("0W2", "0W2,0REDUCE_GRAD");
    fs::write(folder.path("comms.csv"), messages).unwrap();
    let text = folder.succeeds(&["schedule", "file:comms.csv"]);
    let said = "# 2 sends and receives of the file are left out: gpipe adds its own; 2 UNSHARD, \
                RESHARD and REDUCE_GRAD of the file are left out";
    assert!(text.contains(said), "{text}");
    folder.succeeds(&train("plain", &["--schedule", "gpipe"]));
    let text = folder.succeeds(&train("csv", &["--schedule", "file:comms.csv"]));
    assert!(text.contains("schedule file:comms.csv: 2 sends and receives"), "{text}");
    assert_eq!(folder.weights("csv"), folder.weights("plain"));

    let refused = |text: &str, part: &str| {
        fs::write(folder.path("bad.csv"), text).unwrap();
        folder.refuses(&["schedule", "file:bad.csv"], &["file:bad.csv, line ", part]);
    };
    refused(
        "0F0,0F1,0B1,0B0\n",
        "column 9: the first backward of this stage is not micro-batch 0's",
    );
    refused("0F0,0F1,0B1,0B0\n", "use breadth-first:V");
    refused("0F0, 0X0\n", "column 6: '0X0' is not an action");
    refused("0F0,[0F1;0B0]OVERLAP_F_B\n", "column 5: '[0F1;0B0]OVERLAP_F_B' is not an OVERLAP_F_B");
    refused("0F0,(0F1;)OVERLAP_F_B\n", "column 10: '' is not an action");
    for wrong in ["(0B0;0F1)", "(0F1)", "(0F1;0B0;0B1)"] {
        let text = format!("0F0,{wrong}OVERLAP_F_B\n");
        refused(&text, "column 5: an OVERLAP_F_B is a forward, then a backward");
    }
    refused(",,\n", "there are no actions");
    refused("0F0,0B0\n,,\n1F0,1B0\n", "line 2, column 1: this row has no compute actions");
    // As spreadsheets write it.
    fs::write(folder.path("marked.csv"), "\u{feff}0F0,0B0\r\n1F0,1B0\r\n,\r\n").unwrap();
    let text = folder.succeeds(&["schedule", "file:marked.csv"]);
    assert!(text.contains("\n0F0 0B0\n1F0 1B0"), "{text}");
    let again = ["schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--remat", "always"];
    let csv = [&again[..], &["--csv", "x.csv"]].concat();
    folder.refuses(&csv, &["--csv x.csv", "0R0", "leave --remat out"]);
    assert!(!folder.path("x.csv").exists());

    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/schedules");
    let example = |name: &str| format!("file:{}", configs.join(name).display());
    let text = folder.succeeds(&["schedule", &example("zb-h2.txt")]);
    assert!(text.contains("step 27 ") && text.contains("papers count it: 0.0%"), "{text}");
    let text = folder.succeeds(&["schedule", &example("dualpipe-v.csv")]);
    assert!(text.contains("4 devices, 8 stages, 8 micro-batches"), "{text}");
}

#[test]
fn fault_what_is_no_schedule_is_refused_by_line_and_column() {
    let folder = Folder::new();
    let with = |schedule: &str, parts: &[&str]| {
        folder.refuses(&train("run", &["--schedule", schedule]), parts);
    };
    with("2f2b", &["--schedule", "'2f2b'", "use gpipe, 1f1b, zb-h1, zb-v"]);
    with("interleaved:1", &["from 2 to 64"]);
    with("interleaved:9", &["18 stages", "layers"]);
    with("file:none.txt", &["none.txt"]);
    fs::write(folder.path("bad.txt"), "# mine\n0F0 0B0 0X1\n").unwrap();
    with("file:bad.txt", &["file:bad.txt, line 2, column 9: '0X1' is not an action"]);
    fs::write(folder.path("bad.txt"), "0F0 0B0\n1F0 1B0\n").unwrap();
    with("file:bad.txt", &["file:bad.txt is for 1 micro-batch, not for 3"]);
    fs::write(folder.path("bad.txt"), [0xff, 0xfe]).unwrap();
    with("file:bad.txt", &["bad.txt"]);
    folder.refuses(&["schedule", "zb-h1", "--stages", "2"], &["give --micro-batches"]);
    folder.refuses(&["schedule", "zb-h1", "--micro-batches", "2"], &["give --stages"]);
    let many = ["schedule", "gpipe", "--stages", "100000", "--micro-batches", "100000"];
    folder.refuses(&many, &["more than"]);
    assert!(!folder.path("run").exists());
}
