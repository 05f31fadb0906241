//! Everything of gpipe that reads what others wrote, each as a target for fuzzing: bytes in, and no
//! panic, no unbounded memory and no unbounded time out. What is accepted must be consistent:
//! written again it reads as the same.
//!
//! `cargo xtask fuzz` runs them under libFuzzer, guided by coverage. `tests/corpora.rs` runs them
//! in every CI over the kept inputs (`corpus/TARGET/`) and seeded changes of these.

mod targets;

/// A reader of something.
#[derive(Debug)]
pub struct Target {
    /// Its name, also of its folder of kept inputs.
    pub name: &'static str,
    /// Reads the bytes. A panic is a finding.
    pub run: fn(&[u8]),
}

impl Target {
    /// The one of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TARGETS.iter().find(|target| target.name == name)
    }
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "config", run: targets::config },
    Target { name: "override", run: targets::override_ },
    Target { name: "schedule", run: targets::schedule },
    Target { name: "plan", run: targets::plan },
    Target { name: "profile", run: targets::profile },
    Target { name: "step", run: targets::step },
    Target { name: "metrics", run: targets::metrics },
    Target { name: "manifest", run: targets::manifest },
    Target { name: "safetensors", run: targets::safetensors },
    Target { name: "names", run: targets::names },
    Target { name: "tokenizer", run: targets::tokenizer },
    Target { name: "pairs", run: targets::pairs },
    Target { name: "image", run: targets::image },
    Target { name: "header", run: targets::header },
    Target { name: "facts", run: targets::facts },
    Target { name: "share", run: targets::share },
];
