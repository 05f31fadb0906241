//! Scores translations, and prints BLEU and chrF as JSON.
//!
//! ```text
//! cargo run --package gpipe-drivers --bin score -- [OPTIONS] HYPOTHESES REFERENCES...
//!                                        (files, line by line)
//! cargo run --package gpipe-drivers --bin score -- [OPTIONS] < LINES.jsonl
//!                                        ({"hypothesis": "a file",
//!                                          "references": ["a file", "one file"]})
//!
//! --tokenizer 13a | none | char     --smooth exp | floor=0.1 | add-k=1 | none
//! --effective-order
//! --char-order 6     --word-order 0     --beta 2     --lowercase
//! --sentences        print the scores and the words of each sentence, too
//! ```

use std::{
    error::Error,
    fs::File,
    io::{self, BufRead, BufReader, Read},
};

use gpipe_score::{Bleu, BleuOptions, BleuScore, Chrf, ChrfOptions, Smoothing, Tokenizer};
use serde::Deserialize;
use serde_json::{Value, json};

/// Maximum length of a line, in bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;

#[derive(Deserialize)]
struct Pair {
    hypothesis: String,
    references: Vec<String>,
}

struct Options {
    bleu: BleuOptions,
    chrf: ChrfOptions,
    sentences: bool,
    files: Vec<String>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let (mut bleu, mut chrf) = (BleuOptions::default(), ChrfOptions::default());
        let (mut sentences, mut files) = (false, Vec::new());
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--tokenizer" => bleu.tokenizer = tokenizer(&value()?)?,
                "--smooth" => bleu.smoothing = smoothing(&value()?)?,
                "--effective-order" => bleu.effective_order = true,
                "--char-order" => chrf.char_order = value()?.parse()?,
                "--word-order" => chrf.word_order = value()?.parse()?,
                "--beta" => chrf.beta = value()?.parse()?,
                "--lowercase" => (bleu.lowercase, chrf.lowercase) = (true, true),
                "--sentences" => sentences = true,
                file if !file.starts_with("--") => files.push(argument),
                other => return Err(format!("unknown option {other}").into()),
            }
        }
        Ok(Self { bleu, chrf, sentences, files })
    }
}

fn tokenizer(name: &str) -> Result<Tokenizer, String> {
    [Tokenizer::V13a, Tokenizer::None, Tokenizer::Char]
        .into_iter()
        .find(|tokenizer| tokenizer.to_string() == name)
        .ok_or(format!("no tokenizer {name}: take 13a, none or char"))
}

fn smoothing(text: &str) -> Result<Smoothing, Box<dyn Error>> {
    Ok(match text.split_once('=') {
        None if text == "exp" => Smoothing::Exp,
        None if text == "none" => Smoothing::None,
        Some(("floor", value)) => Smoothing::Floor(value.parse()?),
        Some(("add-k", value)) => Smoothing::AddK(value.parse()?),
        _ => {
            return Err(format!("no smoothing {text}: take exp, floor=0.1, add-k=1 or none").into());
        }
    })
}

/// The next line without its line end, or `None` after the last.
fn line(reader: &mut impl BufRead) -> Result<Option<String>, Box<dyn Error>> {
    let mut bytes = Vec::new();
    reader.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut bytes)?;
    if bytes.len() as u64 > LINE_BYTES_MAX {
        return Err(format!("a line is longer than {LINE_BYTES_MAX} bytes").into());
    }
    if bytes.is_empty() {
        return Ok(None);
    }
    let mut text = String::from_utf8(bytes)?;
    text.truncate(text.trim_end_matches('\n').len());
    Ok(Some(text))
}

/// Returns the next sentence of the input, if there is one.
type Next = Box<dyn FnMut() -> Result<Option<Pair>, Box<dyn Error>>>;

fn from_json() -> Next {
    let mut reader = io::stdin().lock();
    Box::new(move || Ok(line(&mut reader)?.map(|text| serde_json::from_str(&text)).transpose()?))
}

fn from_files(paths: &[String]) -> Result<Next, Box<dyn Error>> {
    let open = |path: &String| {
        File::open(path).map(BufReader::new).map_err(|error| format!("cannot read {path}: {error}"))
    };
    let mut readers = paths.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let mut number = 0;
    Ok(Box::new(move || {
        number += 1;
        let lines = readers.iter_mut().map(line).collect::<Result<Vec<_>, _>>()?;
        if lines.iter().all(Option::is_none) {
            return Ok(None);
        }
        let mut lines = lines
            .into_iter()
            .collect::<Option<Vec<String>>>()
            .ok_or(format!("line {number}: one file ends before another"))?
            .into_iter();
        let hypothesis = lines.next().unwrap_or_default();
        Ok(Some(Pair { hypothesis, references: lines.collect() }))
    }))
}

fn json(bleu: &BleuScore) -> Value {
    let BleuScore { score, precisions, bp, sys_len, ref_len, matches, totals } = bleu;
    json!({"score": score, "precisions": precisions, "bp": bp, "sys_len": sys_len,
           "ref_len": ref_len, "matches": matches, "totals": totals})
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    let mut next = if options.files.is_empty() { from_json() } else { from_files(&options.files)? };
    let mut bleu = Bleu::new(options.bleu)?;
    let mut chrf = Chrf::new(options.chrf);
    let mut sentences = Vec::new();
    while let Some(Pair { hypothesis, references }) = next()? {
        let references: Vec<&str> = references.iter().map(String::as_str).collect();
        bleu.add(&hypothesis, &references)?;
        chrf.add(&hypothesis, &references)?;
        if options.sentences {
            sentences.push(json!({
                "words": options.bleu.tokenizer.apply(&hypothesis),
                "bleu": Bleu::sentence(options.bleu, &hypothesis, &references)?.score,
                "chrf": Chrf::sentence(options.chrf, &hypothesis, &references)?,
            }));
        }
    }
    let mut result = json!({
        "bleu": json(&bleu.score()),
        "bleu_signature": bleu.signature(),
        "chrf": chrf.score(),
        "chrf_signature": chrf.signature(),
        "chrf_name": chrf.name(),
    });
    if options.sentences {
        result["sentences"] = sentences.into();
    }
    println!("{result}");
    Ok(())
}
