//! Scores of translations: BLEU and chrF, equal to sacreBLEU's to the rounding of a sum.
//!
//! ```text
//!              lower-case?, tokenize           count                    formula
//! hypothesis ─────────────────────► tokens ──────────► matches, totals ─────────► score
//! references                                            (sums over sentences)
//! ```
//!
//! [`Bleu`] and [`Chrf`] are accumulators: they keep counts and no text, so that a corpus may be as
//! long as it likes, and those of several languages merge into that of all. A corpus's score is
//! made of its summed counts. The mean of sentences' scores is another number, and nobody's BLEU.
//!
//! Equal to sacreBLEU also means equal where it surprises: white space is Python's, the tokenizer
//! is that of NIST's `mteval-v13a` whose substitutions do not overlap, n-grams longer than the
//! reference do not count in chrF, and chrF++ takes at most one punctuation mark off a word.
//! Nothing here is copied from it: `scripts/score_parity.py` compares the two, and its scores of
//! made-up sentences are recorded for the tests.
//!
//! Absent: other languages' tokenizers (targets are English), significance tests, files, threads.
//!
//! ```
//! use gpipe_score::{Bleu, BleuOptions, Chrf, ChrfOptions};
//!
//! # fn main() -> gpipe_score::Result<()> {
//! let mut bleu = Bleu::new(BleuOptions::default())?;
//! let mut chrf = Chrf::new(ChrfOptions::default());
//! for (hypothesis, reference) in [
//!     ("The file could not be opened.", "The file could not be opened."),
//!     ("Close all the windows", "Close every window"),
//! ] {
//!     bleu.add(hypothesis, &[reference])?;
//!     chrf.add(hypothesis, &[reference])?;
//! }
//! assert_eq!(bleu.score().matches, [8, 6, 5, 4]);
//! assert_eq!(format!("{:.2}", bleu.score().score), "72.55");
//! assert_eq!(bleu.signature(), "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp");
//! assert_eq!(format!("{} = {:.2}", chrf.name(), chrf.score()), "chrF2 = 77.41");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod bleu;
mod chrf;
mod error;
mod ngrams;
mod references;
mod text;
mod tokenizer;

pub use bleu::{BLEU_ORDER, Bleu, BleuOptions, BleuScore, Smoothing};
pub use chrf::{Chrf, ChrfOptions};
pub use error::{Error, Result};
pub use tokenizer::Tokenizer;
