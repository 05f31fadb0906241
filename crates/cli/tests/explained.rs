//! Mistakes, and what the command says of them: before any work, once, in the words that were
//! typed, and with what to do instead.

use std::fs;

use crate::common::{CONFIG, Folder};

/// A folder whose configuration names data that do not exist. A message about them would mean that
/// they were looked for before the mistake was found.
fn without_data() -> Folder {
    let folder = Folder::new();
    let text = CONFIG.replacen("[data]\n", "[data]\ntext = [\"none.txt\"]\n", 1);
    fs::write(folder.path("tiny.toml"), text).unwrap();
    folder
}

#[test]
fn fault_every_mistake_is_found_before_data_are_read() {
    let folder = without_data();
    let mistakes: [(&[&str], &str); 11] = [
        (&["--set", "optimizer.lr=nan"], "gpipe: --set optimizer.lr=nan: use a number of at least"),
        (&["--set", "optimizer.lr=-1"], "gpipe: --set optimizer.lr=-1: use a number of at least 0"),
        (&["--set", "optimizer.adam.beta1=2"], "beta1 = 2: use at least 0 and less than 1"),
        (&["--set", "model.heads=3"], "features = 16 is no multiple of heads = 3"),
        (&["--set", "model.dropout=1.5"], "dropout"),
        (&["--set", "model.blocks=eight"], "--set model.blocks=eight: give a whole number"),
        (&["--set", "pipeline.micro_batches=0"], "--set pipeline.micro_batches=0: use at least 1"),
        (&["--steps", "0"], "gpipe: --steps 0: use at least 1"),
        (&["--balance", "1,1,1"], "3"),
        (&["--set", "pipeline.threads_per_stage=0"], "0 threads per stage: use 1 to 1024"),
        (&["--memory", "1GiB,1GiB,1GiB"], "3 memory caps for 2 devices"),
    ];
    for command in ["train", "profile", "ledger", "trace"] {
        for (mistake, expected) in mistakes {
            folder.refuses(&[&[command, "tiny.toml"], mistake].concat(), &[expected]);
        }
    }
    let of_pipelines: [(&[&str], &str); 5] = [
        (&["--stages", "99"], "99 stages"),
        (&["--stages", "0"], "gpipe: --stages 0: use at least one stage"),
        (&["--micro-batches", "0"], "gpipe: --micro-batches 0: use at least 1"),
        (&["--remat", "never,never,never"], "3"),
        (&["--replicas", "0"], "gpipe: --replicas 0: use 1 to 7"),
    ];
    for command in ["train", "trace", "ledger"] {
        for (mistake, expected) in of_pipelines {
            folder.refuses(&[&[command, "tiny.toml"], mistake].concat(), &[expected]);
        }
    }
    folder.refuses(&["verify", "tiny.toml", "--stages", "1,99"], &["99 stages"]);
    folder.refuses(&["train", "tiny.toml", "--plan", "auto"], &["none.txt"]);
    assert!(!folder.path("out").join("tiny").exists(), "no folder is left");
}

/// A flag that takes several files takes the configuration, too.
#[test]
fn fault_a_configuration_behind_its_data_is_named() {
    let folder = without_data();
    for flag in ["--data", "--text"] {
        let expected = format!("gpipe: {flag} ... tiny.toml: name the configuration before {flag}");
        folder.refuses(&["train", flag, "text.txt", "tiny.toml"], &[&expected]);
    }
}

#[test]
fn fault_a_folder_in_the_place_of_the_configuration_is_explained() {
    let folder = without_data();
    fs::create_dir(folder.path("notes")).unwrap();
    let expected = "gpipe: notes: it is a folder: name a configuration. gpipe init --data FOLDER";
    folder.refuses(&["train", "notes"], &[expected]);
}

/// A plan has stages, cuts and caps of its own. What the configuration says of them was checked
/// instead.
#[test]
fn regression_a_plan_takes_the_place_of_what_it_decides() {
    let folder = Folder::new();
    let data = ["--text", "text.txt", "--set", "train.validation_tokens=100"];
    let size = ["--set", "model.vocabulary=270"];
    let plan = ["plan", "tiny.toml", "--devices", "3", "--analytic", "--out", "p.json"];
    folder.succeeds(&[&plan[..], &size].concat());
    let unfit = ["--set", "pipeline.stages=7", "--set", "pipeline.balance=1,1"];
    let train = ["train", "tiny.toml", "--plan", "p.json", "--steps", "2", "--out", "run"];
    let printed = folder.succeeds(&[&train[..], &data, &size, &unfit].concat());
    assert!(printed.contains("K = 3"), "{printed}");
}

#[test]
fn fault_a_file_that_is_no_configuration_is_said_in_a_line() {
    let folder = Folder::new();
    fs::write(folder.path("notes.md"), "# Notes\n\nSome words, and no keys.\n").unwrap();
    folder.refuses(&["train", "notes.md"], &["notes.md: line 3, column 6: ", "configs/small.toml"]);
    folder.refuses(&["train", "none.toml"], &["none.toml: No such file or directory: give the"]);
    let output = folder.gpipe(&["train", "notes.md"]);
    assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
    folder.refuses(&["inspect", "notes.md"], &["notes.md: it is no safetensors file: give one"]);
    folder.refuses(&["export", "none", "--out", "x.safetensors"], &["there is no such folder"]);
}

#[test]
fn oracle_short_names_of_dtypes_are_read() {
    let folder = Folder::new();
    for (short, long) in [("bf16", "bfloat16"), ("fp32", "float32"), ("fp16", "float16")] {
        let printed = folder.train(&["--dtype", short, "--steps", "1", "--out", short]);
        assert!(printed.contains(long), "{printed}");
        let config = fs::read_to_string(folder.path(short).join("config.toml")).unwrap();
        assert!(config.contains(&format!("dtype = \"{long}\"")), "{config}");
    }
}

#[test]
fn fault_processes_say_the_same_mistake_once() {
    let folder = without_data();
    // With and without --, which other launchers need.
    for begin in [&["launch", "--processes", "3", "--"][..], &["launch", "--processes", "3"]] {
        for (mistake, expected) in [("none.toml", "none.toml"), ("tiny.toml", "none.txt")] {
            let output = folder.gpipe(&[begin, &["train", mistake]].concat());
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success());
            assert_eq!(text.matches(expected).count(), 1, "{text}");
        }
    }
}

/// Every key of the other network was listed, too.
#[test]
fn regression_a_run_of_another_network_is_refused_in_a_line() {
    let folder = Folder::new();
    folder.train(&["--steps", "1", "--out", "run", "--set", "train.validation_tokens=100"]);
    let llama = "[model]\nkind = \"llama\"\nvocabulary = 300\nfeatures = 16\nheads = 2\n\
        groups = 1\nhead_size = 8\nhidden = 24\nblocks = 2\n[data]\nsequence = 8\n";
    fs::write(folder.path("llama.toml"), llama).unwrap();
    let resume = ["train", "llama.toml", "--text", "text.txt", "--resume", "run"];
    folder.refuses(&resume, &["model.kind cannot change from \"transformer\" to \"llama\""]);
    let output = folder.gpipe(&resume);
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 3, "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr).matches(" cannot change").count(), 1);
}

#[test]
fn fault_a_folder_of_runs_lists_them() {
    let folder = Folder::new();
    for out in ["out/a", "out/b"] {
        folder.train(&["--steps", "1", "--out", out, "--checkpoint-every", "none"]);
    }
    for command in [&["eval", "out"][..], &["plot", "out"]] {
        folder.refuses(command, &["out: it is no run, but holds some", "out/a, out/b"]);
    }
}

#[test]
fn fault_damaged_weights_point_to_the_checkpoint() {
    let folder = Folder::new();
    folder.train(&["--steps", "2", "--out", "run", "--set", "train.validation_tokens=100"]);
    let weights = folder.path("run").join("weights.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let checkpoint = "run/checkpoints/step-00000002";
    let parts = ["SHA-256", "checkpoint of step 2", checkpoint];
    folder.refuses(&["eval", "run", "--text", "text.txt"], &parts);
    folder.succeeds(&["eval", checkpoint, "--text", "text.txt", "--tokens", "100"]);
}

#[test]
fn oracle_a_runs_configuration_has_comments_and_repeats_it() {
    let folder = Folder::new();
    folder.train(&["--steps", "2", "--out", "run", "--set", "train.validation_tokens=100"]);
    let config = fs::read_to_string(folder.path("run").join("config.toml")).unwrap();
    for part in ["# Number of training steps.\nsteps = 2\n", "[optimizer.adam]", "# Width of the"] {
        assert!(config.contains(part), "'{part}' is not in: {config}");
    }
    for part in ["[images]", "[lora]", "[optimizer.sgd]", "[optimizer.rmsprop]"] {
        assert!(!config.contains(part), "'{part}' is in: {config}");
    }
    assert!(config.lines().all(|line| !line.starts_with('#') || line.len() <= 80), "{config}");
    folder.succeeds(&["train", "run/config.toml", "--out", "again"]);
    assert!(folder.weights("run") == folder.weights("again"));
}

#[test]
fn oracle_lines_of_a_run_stay_and_say_how_it_learns() {
    let folder = Folder::new();
    let steps = |printed: &str| -> Vec<u64> {
        let line = |line: &str| line.strip_prefix("step ")?.split_once('/')?.0.parse().ok();
        printed.lines().filter_map(line).collect()
    };
    let more = ["--set", "train.validation_tokens=100", "--set", "model.blocks=1"];
    let run = |more: &[&str]| folder.train(more);
    let printed = run(&[&["--steps", "60", "--out", "a"], &more[..]].concat());
    assert_eq!(steps(&printed), [1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60], "{printed}");
    for part in ["estimate: about ", " for a stage; ", "  lr 1.0e-3", "  grad ", "left"] {
        assert!(printed.contains(part), "'{part}' is not in: {printed}");
    }
    let printed = run(&[&["--steps", "60", "--log-every", "25", "--out", "b"], &more[..]].concat());
    assert_eq!(steps(&printed), [1, 25, 50, 60], "{printed}");
    let smooth = ["--set", "train.label_smoothing=0.1", "--steps", "1", "--out", "c"];
    let printed = run(&[&smooth[..], &more].concat());
    assert!(printed.contains(" with label smoothing  lr"), "{printed}");
}

#[test]
fn oracle_text_is_prepared_once() {
    let folder = Folder::new();
    let text = fs::read_to_string(folder.path("text.txt")).unwrap().repeat(40);
    assert!(text.len() > 1 << 20);
    fs::write(folder.path("long.txt"), text).unwrap();
    let run = |out: &str, more: &[&str]| {
        let own = ["train", "tiny.toml", "--text", "long.txt", "--steps", "1", "--out", out];
        let cache = ["--set", "data.cache=kept", "--set", "train.validation_tokens=100"];
        folder.succeeds(&[&own[..], &cache, more].concat());
        fs::read_dir(folder.path("kept")).map_or(0, Iterator::count)
    };
    assert_eq!(run("a", &[]), 1);
    assert_eq!(run("b", &["--stages", "1"]), 1, "it is read again");
    assert!(folder.weights("a") == folder.weights("b"));
    assert_eq!(run("c", &["--set", "model.vocabulary=280"]), 2, "another tokenizer");
    assert_eq!(run("d", &["--set", "data.shuffle_documents=true"]), 3);
    // A damaged file is made again.
    for entry in fs::read_dir(folder.path("kept")).unwrap() {
        fs::write(entry.unwrap().path(), "damaged").unwrap();
    }
    assert_eq!(run("e", &[]), 3);
    assert!(folder.weights("a") == folder.weights("e"));
}
