//! Fuzz targets for every reader of untrusted input in gpipe. No input may cause a panic, unbounded
//! memory or unbounded time. Accepted input must be consistent: when written and read again, it is
//! the same.
//!
//! `cargo xtask fuzz` runs the targets under libFuzzer, guided by coverage. `tests/corpora.rs` runs
//! them in every CI over the kept inputs (`corpus/TARGET/`) and seeded mutations of them.

mod targets;

/// A reader as a fuzz target.
#[derive(Debug)]
pub struct Target {
    /// The name of the target and of its folder of kept inputs.
    pub name: &'static str,
    /// Reads the bytes. A panic is a finding.
    pub run: fn(&[u8]),
}

impl Target {
    /// The target with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TARGETS.iter().find(|target| target.name == name)
    }
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "config", run: targets::config },
    Target { name: "override", run: targets::override_ },
    Target { name: "schedule", run: targets::schedule },
    Target { name: "schedule_csv", run: targets::schedule_csv },
    Target { name: "plan", run: targets::plan },
    Target { name: "profile", run: targets::profile },
    Target { name: "step", run: targets::step },
    Target { name: "metrics", run: targets::metrics },
    Target { name: "manifest", run: targets::manifest },
    Target { name: "safetensors", run: targets::safetensors },
    Target { name: "names", run: targets::names },
    Target { name: "tokenizer", run: targets::tokenizer },
    Target { name: "model_config", run: targets::model_config },
    Target { name: "shards", run: targets::shards },
    Target { name: "generation", run: targets::generation },
    Target { name: "pairs", run: targets::pairs },
    Target { name: "lines", run: targets::lines },
    Target { name: "chat_template", run: targets::chat_template },
    Target { name: "kept_samples", run: targets::kept_samples },
    Target { name: "image", run: targets::image },
    Target { name: "header", run: targets::header },
    Target { name: "facts", run: targets::facts },
    Target { name: "share", run: targets::share },
];
