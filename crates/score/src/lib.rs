//! Translation scores: BLEU and chrF, equal to sacreBLEU's up to rounding.
//!
//! ```text
//!              lower-case?, tokenize           count                    formula
//! hypothesis ─────────────────────► tokens ──────────► matches, totals ─────────► score
//! references                                            (sums over sentences)
//! ```
//!
//! [`Bleu`] and [`Chrf`] are accumulators that keep counts and no text, so a corpus may have any
//! length. The accumulators of several languages can be merged. The score of a corpus is computed
//! from its summed counts. The mean of the sentences' scores is a different number, and is not
//! BLEU.
//!
//! The scores equal sacreBLEU's also where it is surprising. White space is Python's. The tokenizer
//! is that of NIST's `mteval-v13a`, whose substitutions do not overlap. In chrF, n-grams longer
//! than the reference do not count. chrF++ splits at most one punctuation mark off a word. No code
//! is copied from sacreBLEU. `scripts/score_parity.py` compares the two and records sacreBLEU's
//! scores of made-up sentences for the tests.
//!
//! Not supported: tokenizers of other languages (targets are English), significance tests, files,
//! threads.
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
