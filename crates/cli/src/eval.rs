//! `gpipe eval`, and the measure that `gpipe train` ends with.
//!
//! The loss is a sum over all targets divided once by their number, so neither K nor how the text falls into batches
//! weighs a token more. At another K it is the same to the last bit; another M adds in another order.

use gpipe::Pipeline;
use gpipe_data::{Document, TokenSet, ValidationBatches};

use crate::{
    CliError, args::EvalArguments, config::Config, output::say, run_folder::RunFolder, setup,
};

/// The loss over the first tokens of a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Measured {
    /// The mean over the targets, in nats per token.
    pub nats: f64,
    pub bits_per_byte: f64,
    /// The share of targets that were the likeliest token.
    pub accuracy: f64,
    /// How many targets there were.
    pub count: f64,
}

/// Measures a trained model and prints what it found.
pub(crate) fn run(arguments: &EvalArguments) -> Result<(), CliError> {
    let mut run = RunFolder::open(&arguments.run)?;
    if let Some(micro_batches) = arguments.micro_batches {
        run.config.pipeline.micro_batches = micro_batches;
    }
    let configured = run.config.train.validation_tokens;
    let all = if arguments.text.is_empty() { configured } else { usize::MAX };
    let tokens_max = arguments.tokens.unwrap_or(all);
    if tokens_max < 2 {
        return Err(CliError::Usage(format!(
            "--tokens {tokens_max}: a token is measured by the one before it, use at least 2"
        )));
    }
    let mut pipeline = run.pipeline()?;
    let (documents, what) = documents(arguments, &run.config)?;
    let tokens = TokenSet::encode(&run.tokenizer, &documents)?;
    let measured = measure(&mut pipeline, &run.config, &tokens, tokens_max, &|| false)?;
    let Some(Measured { nats, bits_per_byte, accuracy, count }) = measured else { return Ok(()) };
    if arguments.json {
        let line = serde_json::json!({
            "loss": nats,
            "perplexity": nats.exp(),
            "bits_per_byte": bits_per_byte,
            "accuracy": accuracy,
            "tokens": count as u64,
        });
        say!("{line}");
        return Ok(());
    }
    say!("text           {what}: {} tokens", tokens.tokens.len());
    if tokens_max < tokens.tokens.len() {
        say!("measured       the first {tokens_max} tokens; --tokens N measures more");
    }
    let uniform = (run.tokenizer.vocabulary() as f64).ln();
    say!("loss           {nats:.6} nats/token (a uniform guess: {uniform:.6})");
    say!("perplexity     {:.4}", nats.exp());
    say!("bits per byte  {bits_per_byte:.6}");
    say!("accuracy       {:.2}% of {count} next tokens", 100.0 * accuracy);
    Ok(())
}

/// The text to measure on, and what it is.
fn documents(
    arguments: &EvalArguments,
    config: &Config,
) -> Result<(Vec<Document>, String), CliError> {
    if arguments.text.is_empty() {
        let (corpus, what) = setup::corpus(config).map_err(|error| match error {
            CliError::Data(source @ gpipe_data::Error::MissingPath { .. }) => {
                CliError::Usage(format!(
                    "{source}: it is the run's own text; run where you trained, or name another with --text PATH"
                ))
            }
            other => other,
        })?;
        return Ok((corpus.validation, format!("held out of {what}")));
    }
    let names: Vec<String> = arguments.text.iter().map(|path| path.display().to_string()).collect();
    Ok((Document::from_paths(&arguments.text)?, names.join(", ")))
}

/// Loss and accuracy over the first `tokens_max` tokens; none if it was to `stop` before the last of them.
pub(crate) fn measure(
    pipeline: &mut Pipeline,
    config: &Config,
    tokens: &TokenSet,
    tokens_max: usize,
    stop: &dyn Fn() -> bool,
) -> Result<Option<Measured>, CliError> {
    let (mut nats, mut correct, mut count) = (0.0, 0.0, 0.0);
    for batch in batches(config, tokens, tokens_max)? {
        if stop() {
            return Ok(None);
        }
        let (inputs, targets) = setup::tensors(&batch)?;
        let evaluation = pipeline.evaluate(inputs, targets)?;
        let sum =
            |name: &str| evaluation.metrics.iter().find(|m| m.name == name).map_or(0.0, |m| m.sum);
        nats += sum(setup::NATS);
        correct += sum("accuracy");
        count += evaluation.count;
    }
    let (nats, accuracy) = (nats / count, correct / count);
    Ok(Some(Measured { nats, bits_per_byte: tokens.bits_per_byte(nats), accuracy, count }))
}

fn batches<'a>(
    config: &Config,
    tokens: &'a TokenSet,
    tokens_max: usize,
) -> Result<ValidationBatches<'a>, CliError> {
    let (sequence, samples) = (config.data.sequence, config.train.mini_batch);
    Ok(ValidationBatches::new(tokens, sequence, samples, Some(tokens_max))?)
}
