//! Evaluates a translation model on held-out pairs, by language.

use std::fmt::Write;

use gpipe::Pipeline;
use gpipe_data::parallel::{PairSet, TranslationVocabulary, unigram};
use gpipe_observe::plot::{Point, Scatter};
use gpipe_score::{Bleu, BleuOptions, Chrf, ChrfOptions};

use super::Measured;
use crate::{
    CliError,
    args::EvalArguments,
    config::ParallelConfig,
    files::{check_writable, write_aside},
    output::{complain, say},
    processes::Processes,
    run_folder::RunFolder,
    task::{
        Task,
        translation::{Translation, parts, validation_pairs},
    },
    translate::Translator,
};

/// Seed by which sources are shuffled.
const SHUFFLE_SEED: u64 = 1;
/// Number of sentences that are translated at once.
const TRANSLATED: usize = 64;

/// The results of a language.
struct Row {
    code: String,
    /// Number of training pairs, and number of held-out targets.
    pairs: usize,
    tokens: usize,
    /// Mean losses over the targets, in nats.
    loss: f64,
    unigram: f64,
    shuffled: f64,
    /// Scores of the translations, if there are any.
    scores: Option<Scores>,
}

/// BLEU and chrF of translations.
struct Scores {
    sentences: u64,
    bleu: f64,
    chrf: f64,
}

pub(super) fn run(
    arguments: &EvalArguments,
    run: &RunFolder,
    data: &ParallelConfig,
    processes: &Processes,
) -> Result<(), CliError> {
    if arguments.images.is_some()
        || arguments.confusion.is_some()
        || !arguments.text.is_empty()
        || !arguments.data.is_empty()
    {
        return Err(CliError::Usage(
            "the model translates: leave --text, --images and --confusion out; --set data.tsv=.. \
            names other pairs"
                .into(),
        ));
    }
    for path in [&arguments.table, &arguments.svg].into_iter().flatten() {
        processes.decided(|| check_writable(path))?; // before any work
    }
    let task = Translation::open(&run.config, data, Some(run.vocabulary.clone()))?;
    processes.agree_on_held_out(&task.held_out_fingerprint())?;
    let own = TranslationVocabulary::from_tokenizer(run.vocabulary.tokenizer()?.clone())?;
    let translator = Translator::new(&run.config, &own, &arguments.search, TRANSLATED)?;
    let mut pipeline = run.pipeline(processes)?;
    let mut rows = measured(&mut pipeline, &task, data)?;
    let (mut bleu, mut chrf) = accumulators()?;
    if arguments.translate > 0 {
        let (_, set) = task.sets();
        for row in &mut rows {
            let Some(language) = set.languages().position(|code| code == row.code) else {
                continue;
            };
            let most = set.pairs(language).min(arguments.translate);
            let of = Sample { set, language, most };
            let (own_bleu, own_chrf) = scored(&mut pipeline, &translator, &own, &of)?;
            row.scores = Some(Scores {
                sentences: own_bleu.sentences(),
                bleu: own_bleu.score().score,
                chrf: own_chrf.score(),
            });
            bleu.merge(&own_bleu)?;
            chrf.merge(&own_chrf)?;
        }
    }
    let all = (bleu.sentences() > 0).then(|| Scores {
        sentences: bleu.sentences(),
        bleu: bleu.score().score,
        chrf: chrf.score(),
    });
    if let Some(path) = &arguments.table {
        processes.decided(|| write_aside(path, &tsv(&rows)))?;
    }
    if let Some(path) = &arguments.svg {
        let drawn = picture(&rows)?;
        processes.decided(|| write_aside(path, &drawn))?;
    }
    if arguments.json {
        say!("{}", json(&rows, all.as_ref()));
        return Ok(());
    }
    show(&rows, all.as_ref(), task.summary());
    if all.is_some() {
        say!("BLEU {}; {} {}", bleu.signature(), chrf.name(), chrf.signature());
    }
    for path in [&arguments.table, &arguments.svg].into_iter().flatten() {
        say!("written: {}", path.display());
    }
    Ok(())
}

/// Measures three losses of each language: the model's, a unigram model's, and the model's with the
/// sources of other sentences.
fn measured(
    pipeline: &mut Pipeline,
    task: &Translation,
    data: &ParallelConfig,
) -> Result<Vec<Row>, CliError> {
    let (train, validation) = task.sets();
    let of = |pipeline: &mut Pipeline, set: &PairSet| -> Result<Measured, CliError> {
        super::all(pipeline, parts(set, data)?)
    };
    let own = of(pipeline, validation)?;
    let exchanged = validation.with_shuffled_sources(SHUFFLE_SEED);
    let shuffled = of(pipeline, &exchanged)?;
    let baseline = unigram(train, validation, validation_pairs(data))?;
    let without: Vec<&str> = baseline
        .languages
        .iter()
        .filter(|language| language.nats.is_none())
        .map(|language| language.code.as_str())
        .collect();
    if !without.is_empty() {
        complain!("gpipe: no pair is held out of {}", without.join(", "));
    }
    let rows = baseline.languages.into_iter().filter_map(|language| {
        let pairs = train.languages().position(|code| code == language.code);
        Some(Row {
            pairs: pairs.map_or(0, |number| train.pairs(number)),
            tokens: language.target_tokens,
            loss: *own.parts.get(&language.code)?,
            unigram: language.nats?,
            shuffled: *shuffled.parts.get(&language.code)?,
            scores: None,
            code: language.code,
        })
    });
    Ok(rows.collect())
}

fn accumulators() -> Result<(Bleu, Chrf), CliError> {
    Ok((Bleu::new(BleuOptions::default())?, Chrf::new(ChrfOptions::default())))
}

/// The first pairs of a language.
struct Sample<'a> {
    set: &'a PairSet,
    language: usize,
    most: usize,
}

/// Translates the sources and compares the translations with the targets.
fn scored(
    pipeline: &mut Pipeline,
    translator: &Translator,
    vocabulary: &TranslationVocabulary,
    of: &Sample,
) -> Result<(Bleu, Chrf), CliError> {
    let (mut bleu, mut chrf) = accumulators()?;
    let pairs: Vec<usize> = (0..of.most).collect();
    for some in pairs.chunks(TRANSLATED) {
        let sources: Vec<Vec<u32>> =
            some.iter().map(|&pair| of.set.source(of.language, pair).to_vec()).collect();
        for (&pair, found) in some.iter().zip(translator.best(pipeline, &sources)?) {
            let hypothesis = translator.text(found)?;
            let reference = vocabulary.decode(of.set.target(of.language, pair))?;
            bleu.add(&hypothesis, &[&reference])?;
            chrf.add(&hypothesis, &[&reference])?;
        }
    }
    Ok((bleu, chrf))
}

/// The mean of a loss over the languages, with equal weights, as a perplexity.
fn average(rows: &[Row], loss: fn(&Row) -> f64) -> f64 {
    (rows.iter().map(loss).sum::<f64>() / rows.len().max(1) as f64).exp()
}

fn show(rows: &[Row], all: Option<&Scores>, what: &str) {
    say!("{what}");
    say!(
        "{:<12} {:>9} {:>9} {:>11} {:>9} {:>17} {:>6} {:>6}",
        "language",
        "pairs",
        "targets",
        "perplexity",
        "unigram",
        "shuffled sources",
        "BLEU",
        "chrF"
    );
    for row in rows {
        let score = |score: fn(&Scores) -> f64| {
            row.scores.as_ref().map_or("-".to_owned(), |own| format!("{:.1}", score(own)))
        };
        say!(
            "{:<12} {:>9} {:>9} {:>11.2} {:>9.1} {:>17.2} {:>6} {:>6}",
            row.code,
            row.pairs,
            row.tokens,
            row.loss.exp(),
            row.unigram.exp(),
            row.shuffled.exp(),
            score(|own| own.bleu),
            score(|own| own.chrf)
        );
    }
    let [own, unigram, shuffled] =
        [average(rows, |r| r.loss), average(rows, |r| r.unigram), average(rows, |r| r.shuffled)];
    let scores = all.map_or(String::new(), |all| format!(" {:>6.1} {:>6.1}", all.bleu, all.chrf));
    say!(
        "{:<12} {:>9} {:>9} {own:>11.2} {unigram:>9.1} {shuffled:>17.2}{scores}",
        "average",
        "",
        ""
    );
    say!(
        "perplexity: {:.3} of the unigram model's, {:.3} of the model's own with shuffled sources",
        own / unigram,
        own / shuffled
    );
}

fn tsv(rows: &[Row]) -> String {
    let mut text = String::from(
        "language\tpairs\ttargets\tperplexity\tunigram\tshuffled_sources\tsentences\tbleu\tchrf\n",
    );
    for row in rows {
        let (sentences, bleu, chrf) =
            row.scores.as_ref().map_or((0, f64::NAN, f64::NAN), |s| (s.sentences, s.bleu, s.chrf));
        let _ = writeln!(
            text,
            "{}\t{}\t{}\t{:.4}\t{:.4}\t{:.4}\t{sentences}\t{bleu:.4}\t{chrf:.4}",
            row.code,
            row.pairs,
            row.tokens,
            row.loss.exp(),
            row.unigram.exp(),
            row.shuffled.exp()
        );
    }
    text
}

fn json(rows: &[Row], all: Option<&Scores>) -> serde_json::Value {
    let scores = |scores: Option<&Scores>| {
        scores.map(
            |s| serde_json::json!({ "sentences": s.sentences, "bleu": s.bleu, "chrf": s.chrf }),
        )
    };
    let languages = rows.iter().map(|row| {
        serde_json::json!({
            "language": row.code, "pairs": row.pairs, "targets": row.tokens,
            "perplexity": row.loss.exp(), "unigram": row.unigram.exp(),
            "shuffled_sources": row.shuffled.exp(),
            "scores": scores(row.scores.as_ref()),
        })
    });
    serde_json::json!({
        "languages": languages.collect::<Vec<_>>(),
        "perplexity": average(rows, |r| r.loss),
        "unigram": average(rows, |r| r.unigram),
        "shuffled_sources": average(rows, |r| r.shuffled),
        "scores": scores(all),
    })
}

/// Plots the scores of each language against the size of its data.
fn picture(rows: &[Row]) -> Result<String, CliError> {
    let points = |score: fn(&Scores) -> f64| -> Vec<Point> {
        let point = |row: &Row| {
            let y = score(row.scores.as_ref()?);
            Some(Point { x: row.pairs as f64, y, label: row.code.clone() })
        };
        rows.iter().filter_map(point).collect()
    };
    let page = Scatter {
        title: "translations into English".to_owned(),
        x: "training pairs".to_owned(),
        panels: vec![
            ("BLEU".to_owned(), points(|own| own.bleu)),
            ("chrF".to_owned(), points(|own| own.chrf)),
        ],
    };
    Ok(page.svg()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_an_average_weighs_languages_alike() {
        let row = |loss: f64, tokens: usize| Row {
            code: "de".into(),
            pairs: 1,
            tokens,
            loss,
            unigram: 2.0 * loss,
            shuffled: loss,
            scores: None,
        };
        let rows = [row(1.0, 10), row(3.0, 1000)];
        assert!((average(&rows, |r| r.loss) - 2.0_f64.exp()).abs() < 1e-12);
        let table = tsv(&rows);
        assert_eq!(table.lines().count(), 3);
        assert!(
            table.lines().nth(1).is_some_and(|line| line.starts_with("de\t1\t10\t2.7183\t7.3891"))
        );
    }
}
