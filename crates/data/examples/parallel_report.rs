//! Reads the catalogues below folders and prints what became of them: a table by language, what was left out, and some
//! pairs to look at.
//!
//! `cargo run -p gpipe-data --example parallel_report -- [--pairs N] [--only de,ja] FOLDER...`
#![allow(clippy::print_stdout)] // it is there to print

use std::process::ExitCode;
use std::time::Instant;

use gpipe_data::parallel::{ParallelCorpus, ParallelOptions, Source};

fn main() -> ExitCode {
    match report() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn report() -> Result<(), Box<dyn std::error::Error>> {
    let (mut sources, mut shown) = (Vec::new(), 0);
    let mut options = ParallelOptions::default();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--pairs" => shown = arguments.next().ok_or("--pairs needs a number")?.parse()?,
            "--only" => {
                let codes = arguments.next().ok_or("--only needs codes")?;
                options.languages = codes.split(',').map(str::to_owned).collect();
            }
            folder => sources.push(Source::Catalogues { folder: folder.into() }),
        }
    }
    let started = Instant::now();
    let (corpus, report) = ParallelCorpus::read(&sources, &options)?;
    println!(
        "{report}\nread in {:.1} s; fingerprint {}",
        started.elapsed().as_secs_f64(),
        corpus.fingerprint()
    );
    let mut languages: Vec<_> = corpus.languages.iter().collect();
    languages.sort_by_key(|language| std::cmp::Reverse(language.train.len()));
    println!("{:12} {:>8} {:>10} {:>10}", "language", "train", "validation", "MB source");
    for language in languages {
        let bytes: usize = language.train.iter().map(|pair| pair.source.len()).sum();
        let (train, validation) = (language.train.len(), language.validation.len());
        println!("{:12} {train:>8} {validation:>10} {:>10.1}", language.code, bytes as f64 / 1e6);
        for pair in language.train.iter().take(shown) {
            println!("    {}\n        {}", pair.source, pair.target);
        }
    }
    Ok(())
}
