//! Compares with sacreBLEU's scores of made-up sentences, recorded by `scripts/score_parity.py
//! --write`.
//!
//! Families: `oracle_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_score::{Bleu, BleuOptions, Chrf, ChrfOptions, Smoothing, Tokenizer};
use serde::Deserialize;

/// Tolerance of scores that range from 0 to 100.
const TOLERANCE: f64 = 1e-9;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
    corpora: Vec<Corpus>,
    bleu: Vec<Run<BleuSettings, BleuResult>>,
    chrf: Vec<Run<ChrfSettings, ChrfResult>>,
}

#[derive(Deserialize)]
struct Case {
    kind: String,
    hypothesis: String,
    references: Vec<String>,
    words: String,
}

impl Case {
    fn references(&self) -> Vec<&str> {
        self.references.iter().map(String::as_str).collect()
    }
}

/// The cases of a corpus.
#[derive(Deserialize)]
struct Corpus {
    name: String,
    cases: Vec<usize>,
}

/// Scores of each corpus, and of each case alone.
#[derive(Deserialize)]
struct Run<Settings, Score> {
    options: Settings,
    corpora: Vec<Score>,
    sentences: Vec<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct BleuSettings {
    tokenizer: Option<String>,
    smooth: Option<String>,
    lowercase: bool,
    effective_order: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BleuResult {
    score: f64,
    precisions: [f64; 4],
    bp: f64,
    sys_len: u64,
    ref_len: u64,
    signature: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ChrfSettings {
    char_order: Option<u8>,
    word_order: Option<u8>,
    beta: Option<u8>,
    lowercase: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChrfResult {
    score: f64,
    name: String,
    signature: String,
}

impl BleuSettings {
    fn options(&self) -> BleuOptions {
        let smoothing = match self.smooth.as_deref().unwrap_or("exp").split_once('=') {
            Some(("floor", value)) => Smoothing::Floor(value.parse().unwrap()),
            Some(("add-k", value)) => Smoothing::AddK(value.parse().unwrap()),
            None if self.smooth.as_deref() == Some("none") => Smoothing::None,
            None => Smoothing::Exp,
            _ => panic!("{:?}", self.smooth),
        };
        let tokenizer = match self.tokenizer.as_deref() {
            None | Some("13a") => Tokenizer::V13a,
            Some("none") => Tokenizer::None,
            Some("char") => Tokenizer::Char,
            _ => panic!("{:?}", self.tokenizer),
        };
        let (lowercase, effective_order) = (self.lowercase, self.effective_order);
        BleuOptions { tokenizer, lowercase, smoothing, effective_order }
    }
}

impl ChrfSettings {
    fn options(&self) -> ChrfOptions {
        let ChrfOptions { char_order, word_order, beta, .. } = ChrfOptions::default();
        ChrfOptions {
            char_order: self.char_order.unwrap_or(char_order),
            word_order: self.word_order.unwrap_or(word_order),
            beta: self.beta.unwrap_or(beta),
            lowercase: self.lowercase,
        }
    }
}

fn golden() -> Golden {
    let golden: Golden = serde_json::from_str(include_str!("sacrebleu.json")).unwrap();
    assert!(golden.cases.len() >= 300 && golden.corpora.len() >= 20, "nothing was left out");
    assert!(golden.bleu.len() >= 14 && golden.chrf.len() >= 6);
    golden
}

fn assert_near(ours: f64, theirs: f64, what: &str) {
    assert!((ours - theirs).abs() <= TOLERANCE, "{what}: {ours}, sacreBLEU has {theirs}");
}

#[test]
fn oracle_words_are_sacrebleus() {
    for case in golden().cases {
        let words = Tokenizer::V13a.apply(&case.hypothesis);
        assert_eq!(words, case.words, "{}: {:?}", case.kind, case.hypothesis);
    }
}

#[test]
fn oracle_bleu_of_corpora_is_sacrebleus() {
    let golden = golden();
    for run in &golden.bleu {
        assert_eq!(run.corpora.len(), golden.corpora.len());
        for (corpus, theirs) in golden.corpora.iter().zip(&run.corpora) {
            let what = format!("{} {:?}", corpus.name, run.options);
            let mut bleu = Bleu::new(run.options.options()).unwrap();
            for case in corpus.cases.iter().map(|&at| &golden.cases[at]) {
                bleu.add(&case.hypothesis, &case.references()).unwrap();
            }
            let ours = bleu.score();
            assert_near(ours.score, theirs.score, &what);
            assert_near(ours.bp, theirs.bp, &what);
            for (ours, theirs) in ours.precisions.into_iter().zip(theirs.precisions) {
                assert_near(ours, theirs, &what);
            }
            assert_eq!((ours.sys_len, ours.ref_len), (theirs.sys_len, theirs.ref_len), "{what}");
            assert_eq!(bleu.signature(), theirs.signature, "{what}");
        }
    }
}

#[test]
fn oracle_bleu_of_sentences_is_sacrebleus() {
    let golden = golden();
    for run in &golden.bleu {
        assert_eq!(run.sentences.len(), golden.cases.len());
        for (case, &theirs) in golden.cases.iter().zip(&run.sentences) {
            let options = run.options.options();
            let ours = Bleu::sentence(options, &case.hypothesis, &case.references()).unwrap();
            let what = format!("{:?} {:?} {:?}", run.options, case.hypothesis, case.references);
            assert_near(ours.score, theirs, &what);
        }
    }
}

#[test]
fn oracle_chrf_of_corpora_is_sacrebleus() {
    let golden = golden();
    for run in &golden.chrf {
        assert_eq!(run.corpora.len(), golden.corpora.len());
        for (corpus, theirs) in golden.corpora.iter().zip(&run.corpora) {
            let what = format!("{} {:?}", corpus.name, run.options);
            let mut chrf = Chrf::new(run.options.options());
            for case in corpus.cases.iter().map(|&at| &golden.cases[at]) {
                chrf.add(&case.hypothesis, &case.references()).unwrap();
            }
            assert_near(chrf.score(), theirs.score, &what);
            assert_eq!(
                (chrf.name(), chrf.signature()),
                (theirs.name.clone(), theirs.signature.clone())
            );
        }
    }
}

#[test]
fn oracle_chrf_of_sentences_is_sacrebleus() {
    let golden = golden();
    for run in &golden.chrf {
        assert_eq!(run.sentences.len(), golden.cases.len());
        for (case, &theirs) in golden.cases.iter().zip(&run.sentences) {
            let options = run.options.options();
            let ours = Chrf::sentence(options, &case.hypothesis, &case.references()).unwrap();
            let what = format!("{:?} {:?} {:?}", run.options, case.hypothesis, case.references);
            assert_near(ours, theirs, &what);
        }
    }
}
