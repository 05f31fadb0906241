//! Evaluates a text model on held-out text.

use gpipe_data::{JsonFiles, Texts, TokenSet};

use super::Measured;
use crate::{
    CliError,
    args::EvalArguments,
    config::{Config, Data, JsonlConfig},
    output::say,
    processes::Processes,
    run_folder::RunFolder,
    task::{Part, jsonl, language},
};

pub(super) fn run(
    arguments: &EvalArguments,
    run: &mut RunFolder,
    processes: &Processes,
) -> Result<(), CliError> {
    if arguments.images.is_some() || arguments.confusion.is_some() {
        return Err(CliError::Usage(
            "the model is of text, and classifies nothing: leave --images and --confusion out"
                .into(),
        ));
    }
    let configured = run.config.train.validation_tokens;
    let is_own = arguments.text.is_empty() && arguments.data.is_empty();
    let tokens_max = arguments.tokens.unwrap_or(if is_own { configured } else { usize::MAX });
    if tokens_max < 2 {
        return Err(CliError::Usage(format!(
            "--tokens {tokens_max}: a token is measured by the one before it, use at least 2"
        )));
    }
    if let (Data::Text(text), false) = (&run.config.data, arguments.data.is_empty()) {
        let (files, sequence) = (arguments.data.clone(), text.sequence);
        run.config.data = Data::Jsonl(JsonlConfig { files, sequence, ..JsonlConfig::default() });
        run.config.check()?;
    }
    match run.config.data.clone() {
        Data::Jsonl(data) if arguments.text.is_empty() => {
            let samples =
                jsonl::Measured::open(&run.config, &data, &run.vocabulary, &arguments.data)?;
            processes.agree_on_held_out(&samples.fingerprint())?;
            let mut pipeline = run.pipeline(processes)?;
            let parts = samples.parts(&run.config, tokens_max)?;
            let measured = super::all(&mut pipeline, parts)?;
            if !arguments.json {
                say!("samples        {}", samples.what);
                if let Some(part) = samples.part_of_rows(tokens_max) {
                    say!("measured       {part}; --tokens N measures more");
                }
            }
            show(arguments, run, &measured, None)
        }
        _ => on_texts(arguments, run, tokens_max, processes),
    }
}

/// Measures on plain text.
fn on_texts(
    arguments: &EvalArguments,
    run: &mut RunFolder,
    tokens_max: usize,
    processes: &Processes,
) -> Result<(), CliError> {
    run.config.one_document_per_row();
    let tokenizer = run.vocabulary.tokenizer()?;
    let (Texts { documents, report }, what) = texts(arguments, &run.config)?;
    let tokens = TokenSet::encode(tokenizer, &documents)?;
    processes.agree_on_held_out(&language::fingerprint(&tokens))?;
    let mut pipeline = run.pipeline(processes)?;
    let batches = language::batches(&tokens, &run.config, tokens_max)?;
    let measured = super::all(&mut pipeline, Part::all(batches))?;
    if !arguments.json {
        say!("text           {what}: {} tokens", tokens.tokens.len());
        say!("               {report}");
        if tokens_max < tokens.tokens.len() {
            say!("measured       the first {tokens_max} tokens; --tokens N measures more");
        }
    }
    show(arguments, run, &measured, Some(tokens.bits_per_byte(measured.loss)))
}

/// Prints the results. Bits per byte exist only if all tokens are in the loss.
fn show(
    arguments: &EvalArguments,
    run: &RunFolder,
    Measured { loss, metrics, count, .. }: &Measured,
    bits_per_byte: Option<f64>,
) -> Result<(), CliError> {
    let accuracy = metrics.get("accuracy").copied().unwrap_or(f64::NAN);
    if arguments.json {
        let mut line = serde_json::json!({
            "loss": loss,
            "perplexity": loss.exp(),
            "accuracy": accuracy,
            "tokens": *count as u64,
        });
        if let (Some(bits), Some(keys)) = (bits_per_byte, line.as_object_mut()) {
            keys.insert("bits_per_byte".into(), bits.into());
        }
        say!("{line}");
        return Ok(());
    }
    let uniform = (run.vocabulary.size() as f64).ln();
    say!("loss           {loss:.6} nats/token (a uniform guess: {uniform:.6})");
    say!("perplexity     {:.4}", loss.exp());
    if let Some(bits) = bits_per_byte {
        say!("bits per byte  {bits:.6}");
    }
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
