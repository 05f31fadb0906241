//! Fine-tuning on JSONL. `transparency_`: the same result at every K, schedule and policy, after a
//! resumption, and in a conversation; `oracle_`: packed samples have the loss of samples in
//! separate rows; `fault_`: invalid lines and settings.

use std::{
    fs,
    io::Write,
    process::{Output, Stdio},
};

use serde_json::{Value, json};

use crate::common::Folder;

const CONFIG: &str = r#"
[model]
kind = "llama"
vocabulary = 400
features = 16
heads = 4
groups = 2
head_size = 6
hidden = 24
blocks = 3

[data]
kind = "jsonl"
files = ["chats.jsonl"]
chat_template = "chat.jinja"
sequence = 64
validation_share = 0.1
cache = "kept"

[pipeline]
stages = 2
micro_batches = 3

[train]
steps = 4
mini_batch = 5
"#;

/// Writes the role, the content and an end for each message.
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}\
    {% if add_generation_prompt %}<assistant>{% endif %}";

/// Sixty samples of all three kinds.
fn lines() -> Vec<Value> {
    let words = ["stage", "bubble", "micro", "batch", "layer"];
    let said = |at: usize, count: usize| {
        let own: Vec<&str> = (0..count).map(|word| words[(at * 7 + word * 3) % 5]).collect();
        format!("{} {at}", own.join(" "))
    };
    let line = |at: usize| match at % 5 {
        0 => json!({"text": said(at, 12)}),
        1 => json!({"prompt": said(at, 4), "completion": said(at + 1, 3)}),
        _ => json!({"messages": [
            {"role": "user", "content": said(at, 2 + at % 4)},
            {"role": "assistant", "content": said(at + 2, 3 + at % 3)},
        ]}),
    };
    (0..60).map(line).collect()
}

fn written(lines: &[Value]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

pub fn folder() -> Folder {
    let folder = Folder::new();
    fs::write(folder.path("tuned.toml"), CONFIG).unwrap();
    fs::write(folder.path("chat.jinja"), TEMPLATE).unwrap();
    fs::write(folder.path("chats.jsonl"), written(&lines())).unwrap();
    folder
}

/// The measured loss of an evaluation.
pub fn loss(folder: &Folder, more: &[&str]) -> f64 {
    let printed = folder.succeeds(&[&["eval", "two", "--json"], more].concat());
    serde_json::from_str::<Value>(&printed).unwrap()["loss"].as_f64().unwrap()
}

fn chat(folder: &Folder, said: &str, more: &[&str]) -> Output {
    let mut command = folder.command(&[&["generate", "two", "--chat"], more].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let _ = child.stdin.take().unwrap().write_all(said.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn transparency_of_a_training_on_samples() {
    let folder = folder();
    let train = |more: &[&str]| folder.succeeds(&[&["train", "tuned.toml"], more].concat());
    let printed = train(&["--out", "two"]);
    assert!(printed.contains("chats.jsonl: 54 samples"), "{printed}");
    assert!(printed.contains("held out: 6 samples"), "{printed}");
    assert!(printed.contains("samples do not attend to each other"), "{printed}");
    train(&["--out", "three", "--stages", "3", "--schedule", "zb-h1", "--remat", "always"]);
    assert!(folder.weights("two") == folder.weights("three"));
    folder.succeeds(&["verify", "tuned.toml", "--steps", "2"]);
    // A resumed run has the weights of an uninterrupted run.
    train(&["--out", "six", "--steps", "6", "--checkpoint-every", "3"]);
    let middle = "six/checkpoints/step-00000003";
    train(&["--out", "resumed", "--steps", "6", "--resume", middle, "--stages", "1"]);
    assert!(folder.weights("six") == folder.weights("resumed"));
    // The second run found the cached tokens of the first.
    assert_eq!(fs::read_dir(folder.path("kept")).unwrap().count(), 1);

    folder.succeeds(&["eval", "two", "--text", "text.txt", "--tokens", "50"]);
    folder.succeeds(&["generate", "two", "--prompt", "stage", "--tokens", "3"]);
}

/// Every answer is what `generate` continues the conversation with, as the template writes it.
#[test]
fn oracle_a_chat_continues_what_its_template_writes() {
    let folder = folder();
    // Large steps, so that answers depend on every message.
    let large = ["--steps", "3", "--set", "optimizer.lr=0.3", "--set", "optimizer.warmup_steps=1"];
    folder.succeeds(&[&["train", "tuned.toml", "--out", "two"], &large[..]].concat());
    let greedy = ["--temperature", "0", "--tokens", "9", "--system", "layer"];
    // The system's message begins each conversation.
    let answer = |conversation: &str| {
        let prompt = format!("<system>layer</>{conversation}<assistant>");
        let generate = ["generate", "two", "--prompt", &prompt, "--stop", "</>", "--json"];
        let line = folder.succeeds(&[&generate[..], &greedy[..4]].concat());
        let line: Value = serde_json::from_str(&line).unwrap();
        line["text"].as_str().unwrap().to_owned()
    };
    let texts = ["stage bubble", "micro", "layer batch", "bubble"];
    let anew: Vec<String> = texts.iter().map(|text| answer(&format!("<user>{text}</>"))).collect();
    assert!(anew.iter().any(|own| *own != anew[0]), "or nothing is tested: {anew:?}");
    let said = format!("{}\n\n", texts.join("\n/reset\n"));
    let talked = chat(&folder, &said, &greedy);
    assert!(talked.status.success(), "{}", String::from_utf8_lossy(&talked.stderr));
    assert_eq!(String::from_utf8(talked.stdout.clone()).unwrap(), anew.join("\n") + "\n");
    let more = [&greedy[..], &["--stages", "3"]].concat();
    assert_eq!(talked.stdout, chat(&folder, &said, &more).stdout);
    let first = &anew[0];
    let further = answer(&format!("<user>stage bubble</><assistant>{first}</><user>micro</>"));
    let talked = chat(&folder, "stage bubble\nmicro\n", &greedy).stdout;
    assert_eq!(String::from_utf8(talked).unwrap(), format!("{first}\n{further}\n"));
}

#[test]
fn oracle_packed_samples_are_as_samples_in_rows_of_their_own() {
    let folder = folder();
    folder.succeeds(&["train", "tuned.toml", "--out", "two"]);
    let own = ["--data", "chats.jsonl"];
    let with = |packing: &'static str| loss(&folder, &[&own[..], &["--set", packing]].concat());
    let (packed, alone) = (with("data.packing=separate"), with("data.packing=none"));
    // The order of summation differs.
    assert!((packed - alone).abs() < 1e-6 * alone, "{packed} {alone}");
    assert!((with("data.packing=joined") - alone).abs() > 1e-4 * alone, "joined has no effect");
}

#[test]
fn oracle_sources_have_their_weights() {
    let folder = folder();
    let (first, second) = (lines()[..30].to_vec(), lines()[30..].to_vec());
    fs::write(folder.path("a.jsonl"), written(&first)).unwrap();
    fs::write(folder.path("b.jsonl"), written(&second)).unwrap();
    let weighted = CONFIG.replace("files = [\"chats.jsonl\"]", "")
        + "\
        [[data.sources]]\npath = \"a.jsonl\"\nweight = 3\n\
        [[data.sources]]\npath = \"b.jsonl\"\nweight = 1\n";
    fs::write(folder.path("weighted.toml"), &weighted).unwrap();
    let printed = folder.succeeds(&["train", "weighted.toml", "--out", "mixed"]);
    assert!(printed.contains("a.jsonl: 27 samples"), "{printed}");
    assert!(printed.contains("weight 3") && printed.contains("weight 1"), "{printed}");
    let even = weighted.replace("weight = 3", "weight = 1");
    fs::write(folder.path("even.toml"), &even).unwrap();
    folder.succeeds(&["train", "even.toml", "--out", "even"]);
    assert!(folder.weights("mixed") != folder.weights("even"), "the weights have no effect");
    folder.refuses(
        &["train", "weighted.toml", "--resume", "mixed", "--set", "data.sources=[]"],
        &["data.files"],
    );
    // The file does not exist: the weight is looked at before the samples.
    let uneven = weighted.replace("weight = 1\n", "weight = 0.001\n").replace("b.jsonl", "none");
    fs::write(folder.path("uneven.toml"), uneven).unwrap();
    folder.refuses(&["train", "uneven.toml"], &["data.sources.weight", "0.001", "a thousandth"]);
}

/// The first rows were measured, which are those with the longest samples, and nothing said so.
#[test]
fn regression_a_validation_of_a_part_says_so() {
    let folder = folder();
    let part = ["--set", "data.packing=none", "--set", "train.validation_tokens=9"];
    let train = ["train", "tuned.toml", "--steps", "1", "--out", "part"];
    let printed = folder.succeeds(&[&train[..], &part].concat());
    assert!(printed.contains("rows, spread evenly (train.validation_tokens = 9)"), "{printed}");
    let printed = folder.succeeds(&["eval", "part"]);
    assert!(printed.contains("rows, spread evenly; --tokens N measures more"), "{printed}");
    let printed = folder.succeeds(&["eval", "part", "--tokens", "9999"]);
    assert!(!printed.contains("spread evenly"), "{printed}");
}

#[test]
fn fault_bad_lines_are_named_or_counted() {
    let folder = folder();
    let mut all = lines();
    all[6] = json!({"txt": "no such field"});
    all[8] = json!({"messages": [{"role": "user", "content": 5}]});
    fs::write(folder.path("chats.jsonl"), written(&all)).unwrap();
    folder.refuses(&["train", "tuned.toml"], &["chats.jsonl", "line 7", "data.on_bad_line"]);
    let skip = ["train", "tuned.toml", "--set", "data.on_bad_line=skip", "--out", "two"];
    let printed = folder.succeeds(&skip);
    assert!(printed.contains("skipped 2 invalid lines"), "{printed}");
    assert!(printed.contains("chats.jsonl, line 9: "), "{printed}");
    // The lines are listed again, because samples with skipped lines are not cached.
    assert!(folder.succeeds(&["eval", "two"]).contains("skipped 2 invalid lines"));
    fs::write(folder.path("few.jsonl"), "{\"text\": \"a\"}\n{\"txt\": \"b\"}\n").unwrap();
    let few = ["train", "tuned.toml", "--data", "few.jsonl", "--out", "few"];
    folder.refuses(
        &[&few[..], &["--set", "data.on_bad_line=skip"]].concat(),
        &["there is one sample", "skipped 1 invalid line", "few.jsonl, line 2"],
    );
}

#[test]
fn fault_settings_that_do_not_fit_are_refused() {
    let folder = folder();
    let refused = |set: &str, parts: &[&str]| {
        folder.refuses(&["train", "tuned.toml", "--set", set], parts);
    };
    refused("data.chat_template=", &["chats.jsonl", "line 3", "chat_template"]);
    refused("data.chat_template=none.jinja", &["none.jinja"]);
    refused("data.files=[]", &["--data FILE"]);
    refused("data.files=[\"none.jsonl\"]", &["none.jsonl"]);
    refused("data.validation_share=1.5", &["data.validation_share", "between 0 and 1"]);
    refused("data.fields.prompt=text", &["data.fields", "a name of its own"]);
    refused("data.packing=packed", &["data.packing", "separate"]);
    refused("data.on_bad_line=warn", &["data.on_bad_line", "skip"]);
    refused("data.sequence=0", &["data.sequence"]);
    folder.refuses(
        &["train", "tuned.toml", "--text", "text.txt"],
        &["--text text.txt", "plain text"],
    );
    folder.refuses(
        &["train", "tiny.toml", "--data", "chats.jsonl", "--set", "data.packing=separate"],
        &["data.packing", "joined or none"],
    );
    folder.succeeds(&["train", "tuned.toml", "--out", "two"]);
    let said = String::from_utf8(chat(&folder, "a\n", &["--prompt", "b"]).stderr);
    assert!(said.unwrap().contains("--prompt"));
    folder.refuses(&["generate", "two", "--system", "a", "--prompt", "b"], &["--chat"]);
    let one = |text: &str, parts: &[&str]| {
        fs::write(folder.path("one.jsonl"), text).unwrap();
        folder.refuses(&["train", "tuned.toml", "--data", "one.jsonl"], parts);
    };
    one("{\"text\": \"stage\"}\n", &["there is one sample", "data.validation"]);
    one(&"{\"text\": \"stage\"}\n".repeat(9), &["all samples are equal", "data.validation"]);
    one("", &["one.jsonl: there is no sample in it"]);
    one("[\n{\"text\": \"stage\"}\n]\n", &["line 1", "begins a JSON array", "jq -c"]);
    one("{\"text\": \"stage\n", &["line 1", "the JSON is incomplete"]);
    one("a,b\nc,d\n", &["line 1", "is not JSON (column 1)", "one object per line"]);
    fs::write(folder.path("bad.jinja"), "{{ messages").unwrap();
    refused("data.chat_template=bad.jinja", &["bad.jinja: chat template:"]);
    // A byte order mark and CRLF, as editors on Windows write.
    let lines = fs::read_to_string(folder.path("chats.jsonl")).unwrap().replace('\n', "\r\n");
    fs::write(folder.path("windows.jsonl"), format!("\u{feff}{lines}")).unwrap();
    folder.succeeds(&["train", "tuned.toml", "--data", "windows.jsonl", "--out", "windows"]);
    let said = chat(&folder, "/help\n", &["--temperature", "0"]);
    assert!(String::from_utf8(said.stderr).unwrap().contains("there is no /help"));
}
