//! Beam search with a length penalty (Wu et al. 2016, section 7; Graves 2012).
//!
//! Ties go to the earlier hypothesis, then to the smaller token, so the result is a function of the
//! logits alone.

use tch::{Kind, Tensor};

use crate::error::LayerError;

/// Largest supported beam.
const BEAM_MAX: usize = 256;

/// Settings of a beam search.
#[derive(Debug, Clone, PartialEq)]
pub struct BeamSearch {
    /// Hypotheses kept per sentence; 1 is greedy search.
    pub beam: usize,
    /// Exponent alpha of the length penalty ((5 + length) / 6)^alpha, which divides a hypothesis'
    /// log-probability. 0 disables it.
    pub length_penalty: f64,
    /// The token that ends a sentence.
    pub end: i64,
    /// Tokens that are never chosen.
    pub never: Vec<i64>,
}

/// A sentence to decode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sentence {
    /// The tokens that the output begins with.
    pub begin: Vec<i64>,
    /// Most tokens to generate, including the end token; at least 1.
    pub most: usize,
}

/// A decoded output.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// The generated tokens, without the beginning and the end token.
    pub tokens: Vec<i64>,
    /// The sum of the tokens' log-probabilities, including the end token's.
    pub log_probability: f64,
    /// The log-probability with the length penalty applied: larger is better.
    pub score: f64,
}

/// The unfinished hypotheses of a group of sentences.
#[derive(Debug)]
pub struct Continuation<'a> {
    /// The group's number.
    pub group: usize,
    /// All tokens of each hypothesis so far.
    pub prefixes: &'a [Vec<i64>],
    /// The sentence of each hypothesis, within its group.
    pub sentences: &'a [usize],
    /// The hypothesis of the previous step that each one extends; `None` in the first step.
    pub rows: Option<&'a [i64]>,
}

/// A model that computes the logits of the next token.
pub trait NextLogits {
    /// The error of a failed step.
    type Error: From<LayerError>;

    /// For each group, the logits [hypotheses, vocabulary] of the next token.
    ///
    /// # Errors
    /// Errors of the model.
    fn next(&mut self, groups: &[Continuation<'_>]) -> Result<Vec<Tensor>, Self::Error>;
}

/// An unfinished hypothesis.
#[derive(Debug, Clone)]
struct Alive {
    sentence: usize,
    log_probability: f64,
}

/// The state of a group of sentences.
struct Group<'s> {
    number: usize,
    sentences: &'s [Sentence],
    prefixes: Vec<Vec<i64>>,
    of: Vec<usize>,
    alive: Vec<Alive>,
    rows: Option<Vec<i64>>,
    done: Vec<Vec<Hypothesis>>,
}

/// One extension of a hypothesis by a token.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    row: usize,
    token: i64,
    log_probability: f64,
}

impl BeamSearch {
    /// Decodes all sentences. Returns the hypotheses of each, by group, best first: at least one
    /// and at most as many as the beam is wide.
    ///
    /// All groups go through `next` together, so they can overlap in a pipeline's stages.
    ///
    /// # Errors
    /// Errors of `next`, or settings out of range.
    pub fn run<N: NextLogits>(
        &self,
        groups: &[Vec<Sentence>],
        next: &mut N,
    ) -> Result<Vec<Vec<Vec<Hypothesis>>>, N::Error> {
        self.check()?;
        if groups.iter().flatten().any(|one| one.begin.is_empty() || one.most == 0) {
            let reason = "a sentence begins with nothing, or may have no token";
            return Err(LayerError::Value(reason.into()).into());
        }
        let mut all: Vec<Group<'_>> = groups.iter().enumerate().map(Group::begin).collect();
        while all.iter().any(|group| !group.prefixes.is_empty()) {
            let active: Vec<usize> =
                (0..all.len()).filter(|&group| !all[group].prefixes.is_empty()).collect();
            let steps: Vec<Continuation<'_>> =
                active.iter().map(|&group| all[group].continuation()).collect();
            let logits = next.next(&steps)?;
            if logits.len() != active.len() {
                let reason = format!("{} logits for {} groups", logits.len(), active.len());
                return Err(LayerError::Value(reason).into());
            }
            for (&group, logits) in active.iter().zip(&logits) {
                self.advance(&mut all[group], logits)?;
            }
        }
        Ok(all.into_iter().map(|group| group.done).collect())
    }

    /// Checks the settings before any work.
    ///
    /// # Errors
    /// Names the setting that is out of range, and its valid range.
    pub fn check(&self) -> Result<(), LayerError> {
        let bad = |reason: String| Err(LayerError::Value(reason));
        if !(1..=BEAM_MAX).contains(&self.beam) {
            return bad(format!("the beam is {}: use 1 to {BEAM_MAX}", self.beam));
        }
        if !(self.length_penalty.is_finite() && self.length_penalty >= 0.0) {
            let penalty = self.length_penalty;
            return bad(format!("the length penalty is {penalty}: use a number of at least 0"));
        }
        if self.never.contains(&self.end) {
            return bad("the end is among the tokens that are never chosen".into());
        }
        Ok(())
    }

    /// The log-probability under the length penalty.
    fn score(&self, log_probability: f64, tokens: usize) -> f64 {
        log_probability / ((5.0 + tokens as f64) / 6.0).powf(self.length_penalty)
    }

    /// Extends each sentence's hypotheses by one token.
    fn advance(&self, group: &mut Group<'_>, logits: &Tensor) -> Result<(), LayerError> {
        let rows = group.prefixes.len();
        let size = logits.size();
        let [have, vocabulary] = size[..] else {
            return Err(LayerError::Shape(format!("logits [rows, vocabulary] were {size:?}")));
        };
        if have != rows as i64 || !(0..vocabulary).contains(&self.end) {
            return Err(LayerError::Shape(format!(
                "logits {size:?} for {rows} hypotheses, whose end is token {}",
                self.end
            )));
        }
        let mut logits = logits.f_to_kind(Kind::Double)?;
        if !self.never.is_empty() {
            let never = Tensor::f_from_slice(&self.never)?;
            logits = logits.f_index_fill(1, &never, f64::NEG_INFINITY)?;
        }
        let logs = logits.f_log_softmax(-1, Kind::Double)?.f_contiguous()?;
        let logs: Vec<f64> = Vec::try_from(logs.f_reshape([-1])?)?;
        let (mut prefixes, mut of, mut alive, mut parents) = (vec![], vec![], vec![], vec![]);
        for sentence in 0..group.sentences.len() {
            let own = (0..rows).filter(|&row| group.alive[row].sentence == sentence);
            let own: Vec<usize> = own.collect();
            let Some(&first) = own.first() else { continue };
            let Sentence { begin, most } = &group.sentences[sentence];
            let made = group.prefixes[first].len() - begin.len() + 1;
            let is_last = made >= *most;
            let done = &mut group.done[sentence];
            let (before, mut kept) = (alive.len(), 0);
            let candidates = self.candidates(&own, &group.alive, &logs, is_last);
            if candidates.is_empty() {
                let reason = "the next token's logits are no numbers, or only those of tokens \
                    that are never chosen";
                return Err(LayerError::Value(reason.into()));
            }
            for (rank, candidate) in candidates.into_iter().enumerate() {
                let Candidate { row, token, log_probability } = candidate;
                if token == self.end {
                    // An end token counts only if it is among the best. Otherwise a beam of 1 would
                    // end at an end token that is only second best.
                    if (rank < self.beam || is_last) && done.len() < self.beam {
                        done.push(Hypothesis {
                            tokens: group.prefixes[row][begin.len()..].to_vec(),
                            log_probability,
                            score: self.score(log_probability, made),
                        });
                    }
                } else if kept < self.beam {
                    kept += 1;
                    let mut prefix = group.prefixes[row].clone();
                    prefix.push(token);
                    prefixes.push(prefix);
                    of.push(sentence);
                    parents.push(row as i64);
                    alive.push(Alive { sentence, log_probability });
                }
            }
            if done.len() >= self.beam || is_last || kept == 0 {
                parents.truncate(before);
                prefixes.truncate(before);
                of.truncate(before);
                alive.truncate(before);
                // The sort is stable: among equals, the one found first stays first.
                done.sort_by(|a, b| b.score.total_cmp(&a.score));
            }
        }
        (group.prefixes, group.of, group.alive) = (prefixes, of, alive);
        group.rows = Some(parents);
        Ok(())
    }

    /// The best extensions of one sentence's hypotheses, best first. If this is the `last` token,
    /// only end tokens count.
    fn candidates(
        &self,
        own: &[usize],
        alive: &[Alive],
        logs: &[f64],
        last: bool,
    ) -> Vec<Candidate> {
        let vocabulary = logs.len() / alive.len().max(1);
        // Each hypothesis has at most one candidate that ends it. Of twice the beam, at least one
        // beam continues.
        let most = 2 * self.beam;
        let mut best: Vec<Candidate> = Vec::with_capacity(most + 1);
        for &row in own {
            let so_far = alive[row].log_probability;
            let tokens = &logs[row * vocabulary..(row + 1) * vocabulary];
            for (token, log) in tokens.iter().enumerate() {
                let log_probability = so_far + log;
                let token = token as i64;
                // Skips impossible tokens and NaN.
                let is_possible = log_probability > f64::NEG_INFINITY;
                if !is_possible || last && token != self.end {
                    continue;
                }
                let is_full = best.len() >= most;
                if is_full && best[most - 1].log_probability >= log_probability {
                    continue;
                }
                // Insert after equals: earlier hypotheses and smaller tokens come first.
                let at = best.partition_point(|other| other.log_probability >= log_probability);
                best.insert(at, Candidate { row, token, log_probability });
                best.truncate(most);
            }
        }
        best
    }
}

impl<'s> Group<'s> {
    fn begin((number, sentences): (usize, &'s Vec<Sentence>)) -> Self {
        let alive = |sentence| Alive { sentence, log_probability: 0.0 };
        Self {
            number,
            sentences,
            prefixes: sentences.iter().map(|sentence| sentence.begin.clone()).collect(),
            of: (0..sentences.len()).collect(),
            alive: (0..sentences.len()).map(alive).collect(),
            rows: None,
            done: vec![Vec::new(); sentences.len()],
        }
    }

    fn continuation(&self) -> Continuation<'_> {
        Continuation {
            group: self.number,
            prefixes: &self.prefixes,
            sentences: &self.of,
            rows: self.rows.as_deref(),
        }
    }
}
