//! `gpipe generate`: continues a text token by token, and prints it as it is generated.
//!
//! ```text
//! prompt  a b c              (a transformer of 5 learned positions)
//! see     a b c  ->  d       layers keep keys and values of these positions
//! see           d  ->  e     one position at a time
//! see             e  ->  f
//! see     b c d e f  ->  g   the window slides: every token has another position now, so all is
//! see     c d e f g  ->  h   computed again
//! ```
//!
//! Rotary positions have no last one, so a model built like Llama goes on with what it keeps. K
//! does not change a bit.

use std::{
    io::{ErrorKind, IsTerminal, Read, Write},
    path::Path,
};

use gpipe::{
    Pipeline,
    decode::{Decoding, GroupStep},
};
use tch::{Kind, Tensor};

use gpipe_distributed::environment::Environment;

use crate::{
    CliError,
    args::GenerateArguments,
    config::{Data, Model},
    files::io,
    output::complain,
    processes::Processes,
    run_folder::RunFolder,
    sampling::{Sampling, uniform},
    task::{logits, sequence},
    utf8_stream::Utf8Stream,
};

/// Maximum number of tokens of one call.
const TOKENS_MAX: usize = 1 << 20;
/// Maximum size of a prompt: 1 MiB. The model sees only its last tokens.
const PROMPT_BYTES_MAX: u64 = 1 << 20;

/// Continues the prompt and prints the new text.
pub(crate) fn run(
    arguments: &GenerateArguments,
    here: Option<&Environment>,
) -> Result<(), CliError> {
    let timeout_s = arguments.run.timeout_s();
    Processes::among(here, timeout_s, |processes| go_on(arguments, processes))
}

fn go_on(arguments: &GenerateArguments, processes: &Processes) -> Result<(), CliError> {
    let sampling = Sampling::new(arguments.temperature, arguments.top_k, arguments.top_p)?;
    if !(1..=TOKENS_MAX).contains(&arguments.tokens) {
        return Err(CliError::Usage(format!(
            "--tokens {}: use 1 to {TOKENS_MAX}",
            arguments.tokens
        )));
    }
    let mut run = RunFolder::open(&arguments.run, processes)?;
    if matches!(run.config.data, Data::Parallel(_)) {
        return Err(CliError::Usage(
            "the model translates, and does not continue a text: use gpipe translate".into(),
        ));
    }
    run.config.train.mini_batch = 1; // cuts by cost are for one sample
    let mut pipeline = run.pipeline(processes)?;
    let tokenizer = run.vocabulary.tokenizer()?;
    let end = tokenizer.end_of_document();
    let mut context = tokenizer.encode(&processes.decided(|| prompt(arguments))?)?;
    if context.is_empty() {
        context.push(end); // a new document begins after the end of another
    }
    let positions = match run.config.model {
        Model::Llama(_) => usize::MAX,
        _ => sequence(&run.config),
    };
    let mut printer = Printer::default();
    // Writes the next token. Returns whether to go on.
    let mut write = |context: &mut Vec<u32>, logits: &[f32]| -> Result<bool, CliError> {
        let number = uniform(arguments.seed, context.len() as u64);
        let token = sampling.sample(logits, number)? as u32;
        if token == end {
            return Ok(false);
        }
        context.push(token);
        let bytes = tokenizer.token_bytes(token)?;
        processes.decided(|| printer.print(&bytes))
    };
    let last = context.len().saturating_add(arguments.tokens);
    let mut goes_on = true;
    let (mut decoding, mut kept) = (pipeline.decoding(), 0);
    while goes_on && context.len() < last.min(positions.saturating_add(1)) {
        let new = context.get(kept..).unwrap_or_default();
        let logits = continued_logits(&mut decoding, new)?;
        kept = context.len();
        goes_on = write(&mut context, &logits)?;
    }
    while goes_on && context.len() < last {
        let logits = next_logits(&mut pipeline, &context, positions)?;
        goes_on = write(&mut context, &logits)?;
    }
    processes.decided(|| printer.finish())
}

/// The logits after the last of some `new` tokens, which follow what the layers keep.
fn continued_logits(decoding: &mut Decoding<'_>, new: &[u32]) -> Result<Vec<f32>, CliError> {
    let tokens: Vec<i64> = new.iter().map(|&token| i64::from(token)).collect();
    let tokens = Tensor::f_from_slice(&tokens)?.f_reshape([1, -1])?;
    let step = GroupStep { group: 0, inputs: vec![tokens], rows: None };
    let outputs = decoding.step(vec![step])?.into_iter().flatten().next();
    let logits = outputs.ok_or_else(|| CliError::Usage("the model has no output".into()))?;
    Ok(Vec::try_from(&logits.f_select(1, -1)?.f_to_kind(Kind::Float)?.f_reshape([-1])?)?)
}

/// The logits after the last token of `context`. The model sees its last `positions` tokens.
fn next_logits(
    pipeline: &mut Pipeline,
    context: &[u32],
    positions: usize,
) -> Result<Vec<f32>, CliError> {
    let seen = context.len().min(positions);
    let mut window: Vec<i64> =
        context.iter().skip(context.len() - seen).map(|&token| i64::from(token)).collect();
    window.resize(positions, 0); // any token would do, because attention is causal
    let tokens = Tensor::f_from_slice(&window)?.f_reshape([1, positions as i64])?;
    let last = logits(pipeline, tokens)?.f_select(1, seen as i64 - 1)?;
    let last = last.f_to_kind(Kind::Float)?.f_reshape([-1])?;
    Ok(Vec::try_from(&last)?)
}

/// The text to continue, exactly as given.
fn prompt(arguments: &GenerateArguments) -> Result<String, CliError> {
    if let Some(prompt) = &arguments.prompt {
        return Ok(prompt.clone());
    }
    if let Some(path) = &arguments.prompt_file {
        return read(std::fs::File::open(path).map_err(io(path))?, path);
    }
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        complain!("gpipe: type the text to continue, then Ctrl-D");
    }
    read(stdin.lock(), Path::new("the standard input"))
}

fn read(from: impl Read, name: &Path) -> Result<String, CliError> {
    let mut bytes = Vec::new();
    from.take(PROMPT_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io(name))?;
    let name = name.display();
    if bytes.len() as u64 > PROMPT_BYTES_MAX {
        return Err(CliError::Usage(format!(
            "{name}: a prompt has at most {PROMPT_BYTES_MAX} bytes, and only its end is seen: \
            give that"
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        CliError::Usage(format!(
            "{name} is not UTF-8: invalid byte at offset {offset}: convert it, for example with \
            `iconv -t UTF-8`"
        ))
    })
}

/// Prints text as its characters become complete.
#[derive(Default)]
struct Printer {
    utf8: Utf8Stream,
}

impl Printer {
    /// Prints the characters that `bytes` complete. Returns false if the reader is gone.
    fn print(&mut self, bytes: &[u8]) -> Result<bool, CliError> {
        let text = self.utf8.push(bytes);
        show(&text)
    }

    /// Prints the rest. In a terminal it also ends the line; elsewhere the output is exactly the
    /// text.
    fn finish(self) -> Result<(), CliError> {
        let mut text = self.utf8.finish();
        if std::io::stdout().is_terminal() {
            text.push('\n');
        }
        show(&text).map(|_| ())
    }
}

fn show(text: &str) -> Result<bool, CliError> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false), // the reader has enough
        Err(error) => Err(io(Path::new("the standard output"))(error)),
    }
}
