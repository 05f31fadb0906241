//! Evaluates a text model on held-out text.

use gpipe_data::{JsonFiles, Texts, TokenSet};

use super::{Measured, measure};
use crate::{
    CliError,
    args::EvalArguments,
    config::{Config, Data},
    output::say,
    processes::Processes,
    run_folder::RunFolder,
    task::{Part, language},
};

pub(super) fn run(
    arguments: &EvalArguments,
    run: &RunFolder,
    processes: &Processes,
) -> Result<(), CliError> {
    if arguments.images.is_some() || arguments.confusion.is_some() {
        return Err(CliError::Usage(
            "the model is of text, and classifies nothing: leave --images and --confusion out"
                .into(),
        ));
    }
    let configured = run.config.train.validation_tokens;
    let all = if arguments.text.is_empty() { configured } else { usize::MAX };
    let tokens_max = arguments.tokens.unwrap_or(all);
    if tokens_max < 2 {
        return Err(CliError::Usage(format!(
            "--tokens {tokens_max}: a token is measured by the one before it, use at least 2"
        )));
    }
    let tokenizer = run.vocabulary.tokenizer()?;
    let mut pipeline = run.pipeline(processes)?;
    let (Texts { documents, report }, what) = texts(arguments, &run.config)?;
    let tokens = TokenSet::encode(tokenizer, &documents)?;
    let batches = language::batches(&tokens, &run.config, tokens_max)?;
    let Some(Measured { loss, metrics, count, .. }) =
        measure(&mut pipeline, Part::all(batches), &|| Ok(false))?
    else {
        return Ok(());
    };
    let accuracy = metrics.get("accuracy").copied().unwrap_or(f64::NAN);
    let bits_per_byte = tokens.bits_per_byte(loss);
    if arguments.json {
        let line = serde_json::json!({
            "loss": loss,
            "perplexity": loss.exp(),
            "bits_per_byte": bits_per_byte,
            "accuracy": accuracy,
            "tokens": count as u64,
        });
        say!("{line}");
        return Ok(());
    }
    say!("text           {what}: {} tokens", tokens.tokens.len());
    say!("               {report}");
    if tokens_max < tokens.tokens.len() {
        say!("measured       the first {tokens_max} tokens; --tokens N measures more");
    }
    let uniform = (tokenizer.vocabulary() as f64).ln();
    say!("loss           {loss:.6} nats/token (a uniform guess: {uniform:.6})");
    say!("perplexity     {:.4}", loss.exp());
    say!("bits per byte  {bits_per_byte:.6}");
    say!("accuracy       {:.2}% of {count} next tokens", 100.0 * accuracy);
    Ok(())
}

/// The text to measure on, with a description.
fn texts(arguments: &EvalArguments, config: &Config) -> Result<(Texts, String), CliError> {
    match &config.data {
        Data::Text(data) if arguments.text.is_empty() => language::held_out(data),
        data => {
            let names: Vec<String> =
                arguments.text.iter().map(|path| path.display().to_string()).collect();
            let json = match data {
                Data::Text(data) => language::json(data),
                _ => JsonFiles::Refuse,
            };
            Ok((Texts::from_paths(&arguments.text, json)?, names.join(", ")))
        }
    }
}
