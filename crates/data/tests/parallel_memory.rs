//! No catalogue makes a reader ask for more memory than its size justifies: an allocator that gives no more ends the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

#[path = "parallel/writers.rs"]
mod writers;

use std::alloc::System;

use cap::Cap;
use gpipe_data::parallel::{Catalogue, CatalogueError, Message};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use writers::{BIG, LITTLE, header, message, mo, po};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// A message of few characters takes its own fields, which grow in a list that doubles.
const BYTES_PER_BYTE: usize = 20;

/// The allocator's limit is the process's: one test alone uses it.
fn within_limit(read: fn(&[u8]) -> Result<Catalogue, CatalogueError>, file: &[u8]) {
    let limit = ALLOCATOR.allocated() + BYTES_PER_BYTE * file.len() + (64 << 10);
    ALLOCATOR.set_limit(limit).unwrap();
    let result = read(file);
    ALLOCATOR.set_limit(usize::MAX).unwrap();
    drop(result);
}

#[test]
fn fault_no_file_asks_for_more_than_it_justifies() {
    let tiny: Vec<Message> = (0..20_000).map(|i| message(&format!("{i}"), "x")).collect();
    let forms =
        Message { plural: Some("s".into()), strings: vec![String::new(); 16], ..message("a", "") };
    let mut forms = vec![forms; 5000];
    forms.iter_mut().for_each(|message| message.strings[15].push('x'));
    let header = header("UTF-8", "de");
    for messages in [tiny, forms] {
        within_limit(Catalogue::from_mo, &mo(&header, &messages, LITTLE));
        within_limit(Catalogue::from_po, po(&header, &messages).as_bytes());
    }
    let nuls = message("a", &"\0".repeat(1 << 19));
    let nuls = Message { plural: Some("s".into()), ..nuls };
    within_limit(Catalogue::from_mo, &mo(&header, &[nuls], LITTLE));

    let config = ProptestConfig {
        rng_seed: RngSeed::Fixed(5),
        failure_persistence: None,
        ..ProptestConfig::with_cases(2000)
    };
    let messages = [message("File", "Datei"), message("Tree", "Baum"), message("House", "Haus")];
    let changes = prop::collection::vec((0usize..7, prop_oneof![0u32..400, any::<u32>()]), 1..4);
    let strategy = (changes, any::<bool>());
    proptest!(config, |((changes, big) in strategy)| {
        let layout = if big { BIG } else { LITTLE };
        let mut file = mo(&header, &messages, layout);
        // Words of the head and of the first rows: where the lengths and offsets are.
        for (word, value) in changes {
            let at = 8 + 4 * word;
            file[at..at + 4].copy_from_slice(&(layout.word)(value));
        }
        within_limit(Catalogue::from_mo, &file);
    });
}
