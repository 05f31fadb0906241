//! Networks that classify images, through the command: train, eval, predict, verify, trace, resume,
//! fine-tune. Families: `oracle_` (what is learnt and written), `transparency_` (the same at every
//! K, and after an interruption). What is refused is in image_faults.rs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use std::fs;

use common::{
    Folder, bytes,
    images::{SHAPES, shapes, with_images},
    results, steps,
};
use serde_json::Value;

/// Twice the configuration's steps: with fewer, rounding decides about single images.
const LEARN: [&str; 4] = ["train", "resnet.toml", "--steps", "60"];

/// A folder with a ResNet that has learnt its images.
fn learnt() -> Folder {
    let folder = with_images();
    folder.succeeds(&[&LEARN[..], &["--out", "run"]].concat());
    folder
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

/// The last evaluation of a run.
fn evaluation(folder: &Folder, run: &str) -> Value {
    folder.lines(run).into_iter().rfind(|line| line["kind"] == "evaluation").unwrap()
}

/// The share of the images held out that a run ends with getting right.
fn top1(folder: &Folder, run: &str) -> f64 {
    number(&evaluation(folder, run)["metrics"]["top1"])
}

#[test]
fn oracle_both_networks_learn_shapes_and_write_what_they_promise() {
    let folder = with_images();
    for (config, last) in [("resnet", "60"), ("amoebanet", "80")] {
        let file = format!("{config}.toml");
        let train = ["train", &file, "--out", config, "--steps", last];
        let printed = folder.succeeds(&[&train[..], &["--checkpoint-every", "15"]].concat());
        for part in [
            "train: 36 images to train on, 12 to validate on, 3 classes\n",
            "layers per stage: ",
            &format!("step 1/{last}  loss "),
            "images/s  bubble ",
            &format!("step {last}: validation loss "),
            "% over 12 images\n",
            "(a uniform guess: 1.0986 nats/image)\n",
        ] {
            assert!(printed.contains(part), "'{part}' is not in: {printed}");
        }
        assert!(!printed.contains("token"), "{printed}");
        assert!(!printed.contains("top5"), "five of three classes: {printed}");
        let lines = folder.lines(config);
        let (end, steps_made) = lines.split_last().unwrap();
        assert_eq!(steps_made.len().to_string(), last);
        assert!(steps_made.iter().all(|line| number(&line["loss"]).is_finite()));
        assert_eq!((&end["kind"], &end["count"]), (&"evaluation".into(), &12.into()));
        let metrics = &end["metrics"];
        assert!(number(&metrics["top1"]) >= 0.9, "{config}: {end}");
        assert_eq!(number(&metrics["top5"]), 1.0, "of three classes all are among the first five");
        assert!(end.get("bits_per_byte").is_none_or(Value::is_null), "{end}");
        // Beside the weights and in each checkpoint.
        let saved = steps(&folder, config).into_iter();
        let saved: Vec<_> = saved.map(|step| format!("checkpoints/step-{step:08}")).collect();
        assert_eq!(saved.len(), 2);
        for place in saved.iter().map(String::as_str).chain([""]) {
            let path = folder.path(config).join(place).join("classes.json");
            let classes: Vec<String> = serde_json::from_slice(&bytes(&path)).unwrap();
            assert_eq!(classes, SHAPES, "{place}");
        }
        assert!(!folder.path(config).join("tokenizer.json").exists());
    }
}

#[test]
fn oracle_a_share_is_held_out_and_the_resolved_configuration_repeats_the_run() {
    let folder = with_images();
    let text = fs::read_to_string(folder.path("resnet.toml")).unwrap();
    let share = text.replace("validation = \"held-out\"", "validation_share = 0.3");
    fs::write(folder.path("share.toml"), share).unwrap();
    let printed = folder.succeeds(&["train", "share.toml", "--out", "run", "--steps", "3"]);
    let held_out = evaluation(&folder, "run")["count"].as_u64().unwrap();
    let line = format!("train: {} images to train on, {held_out} to validate on", 36 - held_out);
    assert!((1..36).contains(&held_out) && printed.contains(&line), "{printed}");
    let measured = json(&folder.succeeds(&["eval", "run", "--json"]));
    assert_eq!(measured["images"], held_out, "eval holds out the same");
    folder.succeeds(&["train", "run/config.toml", "--out", "again", "--stages", "3"]);
    assert!(folder.weights("again") == folder.weights("run"));
    assert_eq!(results(&folder.path("again")), results(&folder.path("run")));
    // Images on the way: the first of them only.
    let few = ["--set", "images.validation_images=2", "--set", "train.validate_every=1"];
    let train = ["train", "share.toml", "--out", "few", "--steps", "3"];
    folder.succeeds(&[&train[..], &few].concat());
    let counts: Vec<_> = folder
        .lines("few")
        .iter()
        .filter(|line| line["kind"] == "evaluation")
        .map(|line| line["count"].clone())
        .collect();
    assert_eq!(counts, [2, 2, 2]);
    assert!(folder.weights("few") == folder.weights("run"), "looking changes nothing");
}

#[test]
fn transparency_eval_is_the_same_at_every_k_and_what_training_ended_with() {
    let folder = learnt();
    let first = folder.succeeds(&["eval", "run", "--json", "--stages", "1"]);
    for k in ["2", "3"] {
        assert_eq!(folder.succeeds(&["eval", "run", "--json", "--stages", k]), first, "K = {k}");
    }
    let (measured, end) = (json(&first), evaluation(&folder, "run"));
    // Training sums what the network's dtype gives for each micro-batch, eval adds in float64.
    assert!((number(&measured["loss"]) - number(&end["loss"])).abs() < 1e-5, "{measured}, {end}");
    assert_eq!((&measured["images"], &measured["unreadable"]), (&12.into(), &0.into()));
    for name in ["top1", "top5"] {
        assert_eq!(measured[name], end["metrics"][name]);
    }
    let checkpoint = folder.succeeds(&["eval", "run/checkpoints/latest", "--json"]);
    assert_eq!(checkpoint, first);
}

#[test]
fn oracle_the_confusions_add_up() {
    let folder = with_images();
    folder.succeeds(&["train", "resnet.toml", "--out", "run", "--steps", "6"]);
    let printed = folder.succeeds(&["eval", "run", "--confusion", "table.tsv"]);
    for part in [
        "images         held out of train: 12\n",
        "nats/image (a uniform guess: 1.098612)\n",
        "top-1          ",
        "rows: true classes; columns: what they were taken for",
        "confusions     table.tsv\n",
    ] {
        assert!(printed.contains(part), "'{part}' is not in: {printed}");
    }
    let text = fs::read_to_string(folder.path("table.tsv")).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next().unwrap(), "true class\tcross\tdisc\tsquare");
    let rows: Vec<(String, Vec<u64>)> = lines
        .map(|line| {
            let (class, counts) = line.split_once('\t').unwrap();
            (class.to_owned(), counts.split('\t').map(|count| count.parse().unwrap()).collect())
        })
        .collect();
    assert!(rows.iter().map(|(class, _)| class).eq(SHAPES), "{text}");
    for (_, counts) in &rows {
        assert_eq!((counts.len(), counts.iter().sum()), (3, 4_u64), "{text}");
    }
    let right: u64 = rows.iter().enumerate().map(|(class, (_, counts))| counts[class]).sum();
    assert!(right < 12, "a table of a network that errs: {text}");
    assert!((right as f64 / 12.0 - top1(&folder, "run")).abs() < 1e-12, "{text}");
    // The same counts are printed, `.` for 0, and the worst first.
    for (class, counts) in &rows {
        let cell = |&count: &u64| if count == 0 { ".".into() } else { count.to_string() };
        let cells: Vec<String> = counts.iter().map(cell).collect();
        let shown = printed.lines().any(|line| {
            let parts: Vec<&str> = line.split_whitespace().collect();
            parts.len() == 5 && parts[0] == class && parts[1..4] == cells
        });
        assert!(shown, "{class} {cells:?} is not in: {printed}");
    }
}

#[test]
fn oracle_eval_measures_other_images_even_of_some_classes() {
    let folder = learnt();
    shapes(&folder.path("only discs"), &["disc"], 5);
    let eval = ["eval", "run", "--images", "only discs"];
    let measured = json(&folder.succeeds(&[&eval[..], &["--json"]].concat()));
    assert_eq!((&measured["images"], number(&measured["top1"])), (&5.into(), 1.0));
    let printed = folder.succeeds(&eval);
    assert!(printed.contains("images         only discs: 5\n"), "{printed}");
    let square = printed.lines().find(|line| line.starts_with("square")).unwrap();
    assert!(!square.contains('%'), "of a class without images no share is right: {printed}");
}

#[test]
fn transparency_predict_names_what_is_on_images_at_every_k() {
    let folder = learnt();
    let images: Vec<String> =
        SHAPES.iter().map(|shape| format!("held-out/{shape}/00.png")).collect();
    let predict = ["predict", "run", &images[0], &images[1], &images[2]];
    let printed = folder.succeeds(&[&predict[..], &["--top", "1"]].concat());
    for (line, (image, shape)) in printed.lines().zip(images.iter().zip(SHAPES)) {
        assert!(line.starts_with(&format!("{image}: {shape} ")) && !line.contains(','), "{line}");
    }
    assert_eq!(printed.lines().count(), 3);
    let all = |k| folder.succeeds(&[&predict[..], &["--json", "--stages", k]].concat());
    assert_eq!(all("1"), all("2"));
    for (line, (image, shape)) in all("1").lines().zip(images.iter().zip(SHAPES)) {
        let line = json(line);
        let classes = line["classes"].as_array().unwrap();
        assert_eq!(line["image"], **image);
        assert_eq!(
            (classes.len(), &classes[0]["class"]),
            (3, &shape.into()),
            "no more than there are"
        );
        let shares: Vec<f64> = classes.iter().map(|class| number(&class["probability"])).collect();
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{line}");
        assert!(shares.is_sorted_by(|a, b| a >= b), "{line}");
    }
    // More images than go through the network at once are in order, too.
    let many: Vec<&str> = (0..40).map(|number| images[number % 3].as_str()).collect();
    let printed = folder.succeeds(&[&["predict", "run", "--top", "1"], &many[..]].concat());
    let expected = many.iter().zip(SHAPES.iter().cycle());
    for (line, (image, shape)) in printed.lines().zip(expected) {
        assert!(line.starts_with(&format!("{image}: {shape} ")), "{line}");
    }
    assert_eq!(printed.lines().count(), 40);
}

#[test]
fn transparency_an_image_run_in_two_processes() {
    let folder = learnt();
    let launched = |command: &[&'static str]| {
        [&["launch", "--processes", "2", "--no-prefix", "--"], command].concat()
    };
    folder.succeeds(&launched(&[&LEARN[..], &["--out", "two"]].concat()));
    assert!(folder.weights("two") == folder.weights("run"));
    assert_eq!(results(&folder.path("two")), results(&folder.path("run")));
    let images = ["held-out/disc/00.png", "held-out/square/00.png"];
    for command in
        [&["predict", "two", images[0], images[1], "--json"][..], &["eval", "two", "--json"]]
    {
        assert_eq!(folder.succeeds(&launched(command)), folder.succeeds(command));
    }
    // One step of both processes on one clock.
    folder.succeeds(&launched(&["trace", "resnet.toml", "--steps", "3", "--out", "trace.json"]));
    let trace = json(&fs::read_to_string(folder.path("trace.json")).unwrap());
    let of = |device: usize| {
        let events = trace["traceEvents"].as_array().unwrap().iter();
        let measured = events.filter(|event| event["cat"] == "forward" && event["pid"] == 0);
        measured.filter(|event| event["tid"] == device).count()
    };
    assert_eq!((of(0), of(1)), (2, 2), "two stages, two micro-batches");
}

#[test]
fn transparency_an_image_run_goes_on_as_if_it_had_not_been_interrupted() {
    let folder = with_images();
    // All that has a state or draws random numbers: drop path, augmentation, batch norm, averages.
    let random = [
        "--set",
        "images.flip=0.5",
        "--set",
        "images.crop=padded:4",
        "--set",
        "images.cutout=8",
        "--set",
        "images.degrees=10",
        "--set",
        "images.scale=[0.7, 1.0]",
        "--set",
        "images.shear=[-0.15, 0.25]",
        "--set",
        "images.translate=0.1",
        "--set",
        "images.contrast=0.4",
        "--set",
        "images.invert=0.5",
        "--set",
        "optimizer.average=0.9",
        "--set",
        "optimizer.decay=constant",
        "--set",
        "optimizer.warmup_steps=2", // no more than the shorter run has
        "--checkpoint-every",
        "3",
    ];
    let train = |out, steps| {
        let arguments = ["train", "amoebanet.toml", "--out", out, "--steps", steps];
        folder.succeeds(&[&arguments[..], &random].concat())
    };
    train("whole", "6");
    train("run", "3");
    let printed = folder.succeeds(&["train", "--resume", "run", "--steps", "6", "--stages", "3"]);
    assert!(printed.starts_with("resuming run/checkpoints/step-00000003: step 3, "), "{printed}");
    assert_eq!(steps(&folder, "run"), [3, 6]);
    for file in ["weights.safetensors", "averages.safetensors"] {
        let of = |run: &str| bytes(&folder.path(run).join(file));
        assert!(of("run") == of("whole"), "{file}");
    }
}

#[test]
fn transparency_verify_passes_on_an_image_recipe() {
    let folder = with_images();
    let recipe = [
        "--set",
        "optimizer.name=rmsprop",
        "--set",
        "optimizer.rmsprop.momentum=0.9",
        "--set",
        "train.label_smoothing=0.1",
        "--set",
        "images.flip=0.5",
        "--set",
        "images.crop=resized:0.5",
    ];
    let verify = ["verify", "amoebanet.toml", "--stages", "1,2,3,4", "--steps", "2"];
    let resume = ["--schedule", "1f1b", "--remat", "always,never", "--resume"];
    let printed = folder.succeeds(&[&verify[..], &recipe, &resume].concat());
    assert!(printed.contains("every loss, gradient and parameter is the same to the last bit"));
    assert_eq!(printed.matches("identical: ").count(), 7, "{printed}");
    // It can fail: another number of micro-batches has other batch statistics.
    let other = ["verify", "resnet.toml", "--stages", "1", "--micro-batches", "2,3"];
    let output = folder.gpipe(&[&other[..], &["--steps", "2", "--schedule", "gpipe"]].concat());
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(!output.status.success() && printed.contains("DIFFERS first in "), "{printed}");
}

#[test]
fn oracle_recipes_and_dtypes_learn() {
    let folder = with_images();
    let all: [(&str, &[&str]); 5] = [
        ("rmsprop", &["optimizer.name=rmsprop", "optimizer.lr=0.1"]),
        ("sgd", &["optimizer.name=sgd", "optimizer.sgd.momentum=0.9", "optimizer.lr=0.1"]),
        ("adamw", &["optimizer.name=adamw", "optimizer.weight_decay=0.01"]),
        ("bfloat16", &["pipeline.dtype=bfloat16"]),
        ("float64", &["pipeline.dtype=float64"]),
    ];
    let mut weights = Vec::new();
    for (run, set) in all {
        let mut arguments = vec!["train", "resnet.toml", "--out", run, "--steps", "60"];
        for set in set.iter().chain(&["train.label_smoothing=0.05", "optimizer.average=0.8"]) {
            arguments.extend(["--set", set]);
        }
        let printed = folder.succeeds(&arguments);
        assert!(printed.contains("step 60: averaged weights loss "), "{printed}");
        assert!(top1(&folder, run) >= 0.75, "{run}: {}", evaluation(&folder, run));
        let averaged = number(&evaluation(&folder, run)["metrics"]["averaged_top1"]);
        let measured = json(&folder.succeeds(&["eval", run, "--averages", "--json"]));
        assert_eq!(number(&measured["top1"]), averaged, "{run}");
        weights.push(folder.weights(run));
    }
    for (first, (one, _)) in all.iter().enumerate() {
        for (second, (other, _)) in all.iter().enumerate().skip(first + 1) {
            assert!(weights[first] != weights[second], "{one} and {other}");
        }
    }
}

#[test]
fn oracle_fine_tuning_starts_the_softmax_afresh_where_classes_are_others() {
    let folder = with_images();
    folder.succeeds(&["train", "amoebanet.toml", "--out", "run", "--steps", "2"]);
    let train = |out: &str, more: &[&str]| {
        let init = ["train", "amoebanet.toml", "--steps", "1", "--out", out, "--init"];
        // A rate of 0, so that the weights are those that it starts with.
        folder.succeeds(&[&init[..], more, &["--set", "optimizer.lr=0"]].concat())
    };
    let of = |run: &str, name: &str| {
        let path = folder.path(run).join("weights.safetensors");
        let all = gpipe_checkpoint::weights::load(&path).unwrap();
        all.into_iter().find(|(own, _)| own == name).unwrap().1
    };
    let printed = train("same", &["run"]);
    assert!(printed.contains("weights of run/weights.safetensors:\n"), "{printed}");
    assert!(!printed.contains("start from random values"), "{printed}");
    assert!(of("same", "classifier.weight") == of("run", "classifier.weight"));

    shapes(&folder.path("two"), &SHAPES[1..], 6);
    let two = ["--set", "data.folder=two", "--set", "data.validation=two"];
    for from in ["run", "run/weights.safetensors", "run/checkpoints/latest"] {
        let out = format!("two of {}", from.len());
        let printed = train(&out, &[&[from], &two[..]].concat());
        let all = "4 start from random values:\n  auxiliary.weight\n  auxiliary.bias\n  \
            classifier.weight\n  classifier.bias\n";
        assert!(printed.contains(all), "{from}: {printed}");
        assert_eq!(of(&out, "classifier.weight").size()[0], 2);
        assert!(of(&out, "stem.conv.weight") == of("run", "stem.conv.weight"));
    }
    // As many classes of other names are other classes.
    folder.copy("train", "renamed");
    fs::rename(folder.path("renamed/disc"), folder.path("renamed/ring")).unwrap();
    let renamed = ["--set", "data.folder=renamed", "--set", "data.validation=renamed"];
    let printed = train("renamed run", &[&["run"], &renamed[..]].concat());
    assert!(printed.contains("4 start from random values:"), "{printed}");

    let printed = train("asked", &["run", "--reinit", "classifier.*"]);
    let two = "\n2 start from random values:\n  classifier.weight\n  classifier.bias\n";
    assert!(printed.contains(two), "{printed}");
    assert!(of("asked", "classifier.weight") != of("run", "classifier.weight"));
    assert!(of("asked", "auxiliary.weight") == of("run", "auxiliary.weight"));
}

#[test]
fn oracle_imported_weights_are_measured_as_the_run_they_are_from() {
    let folder = learnt();
    let import = |more: &[&'static str]| {
        let from = ["import", "run/weights.safetensors", "--config", "resnet.toml"];
        [&from[..], &["--out", "in.safetensors"], more].concat()
    };
    folder.refuses(&import(&[]), &["model.classes is 0: say how many classes"]);
    let four = ["classifier.weight: [4, ", "is [3, "];
    folder.refuses(&import(&["--set", "model.classes=4"]), &four);
    folder.succeeds(&import(&["--set", "model.classes=3"]));
    let eval = ["eval", "--config", "resnet.toml", "--weights", "in.safetensors", "--json"];
    folder.refuses(&eval, &["classes.json: there is no such file"]);
    for (text, parts) in [
        ("{", "a JSON list of the names of the classes"),
        ("[]", "it names no class"),
        (r#"["a", "b"]"#, "does not fit the model"),
    ] {
        fs::write(folder.path("classes.json"), text).unwrap();
        folder.refuses(&eval, &[parts]);
    }
    fs::copy(folder.path("run/classes.json"), folder.path("classes.json")).unwrap();
    assert_eq!(folder.succeeds(&eval), folder.succeeds(&["eval", "run", "--json"]));
}

/// R replicas with M micro-batches each are to batch norms as R x M micro-batches are.
#[test]
fn oracle_a_plan_with_replicas_says_what_batch_norms_see() {
    let folder = with_images();
    folder.succeeds(&["profile", "resnet.toml", "--micro-batches", "1", "--steps", "1"]);
    let plan = ["plan", "resnet.toml", "--devices", "2", "--micro-batches", "1", "--out", "p.json"];
    let text = folder.succeeds(&plan);
    assert!(text.contains("2 replicas of 1 stage, M 1, "), "{text}");
    // Two replicas see 6 samples at once, as is configured. One pipeline sees all 12.
    let chosen = text.lines().find(|line| line.ends_with("(chosen)")).unwrap();
    let seen = "batch norms see micro-batches of 12 samples, not of 6 as configured\n";
    assert_eq!(text.contains(seen), !chosen.contains("replicas"), "{text}");
    // Whichever was chosen here: two replicas are run.
    let mut plan = json(&fs::read_to_string(folder.path("p.json")).unwrap());
    let layers = plan["costs"]["layers"].as_array().unwrap().len();
    plan["plan"]["balance"] = serde_json::json!([layers]);
    plan["plan"]["schedule"] = "1f1b".into();
    plan["plan"]["remat"] = "never".into();
    let device = plan["devices"][0].clone();
    plan["devices"] = serde_json::json!([device]);
    plan["deployment"] = serde_json::json!({"replicas": 2, "threads": 1});
    plan["samples"] = 6.into();
    plan["costs"]["replicated"] = true.into();
    fs::write(folder.path("p.json"), plan.to_string()).unwrap();
    let run = ["train", "resnet.toml", "--steps", "3", "--plan", "p.json", "--out", "run"];
    let text = folder.succeeds(&run);
    let said = "pipeline.replicas 1 -> 2 (changes the last bits, and what batch norms see)";
    assert!(text.contains(said), "{text}");
}

#[test]
fn oracle_a_step_on_images_is_traced() {
    let folder = with_images();
    let printed = folder.succeeds(&["trace", "resnet.toml", "--width", "80", "--steps", "3"]);
    for part in ["device 0", "device 1", "measured: ", "predicted: ", "trace.json"] {
        assert!(printed.contains(part), "'{part}' is not in: {printed}");
    }
    let trace: Value = serde_json::from_slice(&bytes(&folder.path("trace.json"))).unwrap();
    let forwards = trace["traceEvents"].as_array().unwrap().iter();
    let forwards = forwards.filter(|event| event["cat"] == "forward" && event["pid"] == 0);
    assert_eq!(forwards.count(), 4, "two stages, two micro-batches");
}

#[test]
fn oracle_cifar_is_read_in_its_official_sizes() {
    let folder = with_images();
    let own = folder.path("cifar/cifar-10-batches-bin");
    fs::create_dir_all(&own).unwrap();
    let train = (1..=5).map(|number| format!("data_batch_{number}.bin"));
    for name in train.chain(["test_batch.bin".to_owned()]) {
        // Black airplanes, of which the file system keeps nothing.
        let file = fs::File::create(own.join(name)).unwrap();
        file.set_len(10_000 * 3073).unwrap();
    }
    let text = fs::read_to_string(folder.path("resnet.toml")).unwrap();
    let data = "kind = \"image-folder\"\nfolder = \"train\"\nvalidation = \"held-out\"";
    let text = text.replace(data, "kind = \"cifar10\"\nfolder = \"cifar\"");
    fs::write(folder.path("cifar.toml"), text).unwrap();
    let few = ["--steps", "3", "--set", "images.validation_images=8"];
    let printed = folder.succeeds(&[&["train", "cifar.toml", "--out", "run"], &few[..]].concat());
    let line = "cifar: 50000 images to train on, 10000 to validate on (of which \
        images.validation_images = 8 are measured), 10 classes, 9 of them without an image \
        to train on, 9 of them without an image to validate on\n";
    assert!(printed.starts_with(line) && printed.contains("over 8 images\n"), "{printed}");
    let classes = folder.path("run/classes.json");
    let classes: Vec<String> = serde_json::from_slice(&bytes(&classes)).unwrap();
    assert_eq!(
        (classes.len(), classes[0].as_str(), classes[9].as_str()),
        (10, "airplane", "truck")
    );
    assert_eq!(evaluation(&folder, "run")["count"], 8);
}

/// Sizes that a plan cannot use are not measured for it.
#[test]
fn property_a_plan_measures_the_size_that_batch_norms_keep() {
    let folder = with_images();
    let train = ["train", "resnet.toml", "--steps", "1", "--plan", "auto", "--out", "run"];
    let text = folder.succeeds(&train);
    assert!(text.contains("size of micro-batches: measuring only M = 2; "), "{text}");
    let profile = json(&fs::read_to_string(folder.path("out/resnet.profile.json")).unwrap());
    let sizes: Vec<&String> = profile["costs"]["sizes"].as_object().unwrap().keys().collect();
    assert_eq!(sizes, ["6"]);
}
