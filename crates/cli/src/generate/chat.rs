//! A chat in the terminal: the model answers each line of standard input.

use std::io::{BufRead, IsTerminal, Read};

use gpipe::Pipeline;
use gpipe_data::{Tokenizer, jsonl::ChatTemplate};
use serde_json::{Value, json};

use super::{
    Batch, Positions,
    settings::Settings,
    texts::{End, Text},
    writer::show,
};
use crate::{
    CliError,
    files::io,
    output::complain,
    processes::Processes,
    task::{Vocabulary, template::Template},
};

/// Maximum size of a message: 1 MiB.
const MESSAGE_BYTES_MAX: u64 = 1 << 20;
/// The command that begins a new conversation.
const RESET: &str = "/reset";

/// A conversation.
pub(super) struct Chat<'t> {
    pub template: ChatTemplate,
    pub tokenizer: &'t Tokenizer,
    pub settings: Settings,
    pub seed: u64,
    pub positions: Positions,
}

/// The chat template of a model. Adds the end of the assistant's turn to the ends in `settings`.
///
/// # Errors
/// There are several processes, or the model has no valid chat template.
pub(super) fn template(
    vocabulary: &Vocabulary,
    settings: &mut Settings,
    processes: &Processes,
) -> Result<ChatTemplate, CliError> {
    if processes.are_several() {
        return Err(CliError::Usage(
            "--chat runs in one process: omit launch, and use --stages".into(),
        ));
    }
    let Some(Template { compiled, .. }) = Template::of(vocabulary)? else {
        return Err(CliError::Usage(
            "--chat: the model has no chat template: train it on conversations, or add \
            chat_template.jinja to the folder of its tokenizer.json; --prompt continues any text"
                .into(),
        ));
    };
    let end = compiled.turn_end().map_err(|error| CliError::Usage(error.to_string()))?;
    let end = end.trim();
    match vocabulary.tokenizer()?.special(end) {
        Some(token) => settings.ends.push(token),
        None if !end.is_empty() => settings.stops.push(end.to_owned()),
        None => {}
    }
    Ok(compiled)
}

impl Chat<'_> {
    /// Answers the messages of standard input until it ends.
    pub fn hold(self, pipeline: &mut Pipeline, system: Option<&str>) -> Result<(), CliError> {
        let begin: Vec<Value> = system.map(|text| message("system", text)).into_iter().collect();
        let mut messages = begin.clone();
        let is_terminal = std::io::stdin().is_terminal();
        if is_terminal {
            complain!(
                "gpipe: type a message, then Enter; {RESET} begins a new conversation, Ctrl-D ends"
            );
        }
        for number in 0.. {
            if is_terminal && !show("> ")? {
                return Ok(());
            }
            let Some(line) = next_message()? else { break };
            match line.trim() {
                "" => continue,
                RESET => {
                    messages.clone_from(&begin);
                    continue;
                }
                text if is_command(text) => {
                    complain!("gpipe: there is no {text}: {RESET} begins a new conversation");
                    continue;
                }
                text => messages.push(message("user", text)),
            }
            let Some(answer) = self.answer(number, &messages, pipeline)? else { return Ok(()) };
            messages.push(message("assistant", &answer));
        }
        if is_terminal {
            show("\n")?;
        }
        Ok(())
    }

    /// Generates the answer to `messages`, prints it token by token, and returns it. `None` if
    /// standard output is closed.
    fn answer(
        &self,
        number: usize,
        messages: &[Value],
        pipeline: &mut Pipeline,
    ) -> Result<Option<String>, CliError> {
        let conversation = self.template.render(messages, &Value::Null, true);
        let conversation = conversation.map_err(|error| CliError::Usage(error.to_string()))?;
        let text = Text::answer(number, conversation, self.tokenizer, &self.settings)?;
        if text.tokens.len() > self.positions.most {
            complain!(
                "gpipe: the conversation has {} tokens: the model reads only the last {}",
                text.tokens.len(),
                self.positions.most
            );
        }
        let (settings, seed, positions) = (&self.settings, self.seed, &self.positions);
        let mut batch = Batch { texts: vec![text], settings, seed, positions };
        if !batch.complete(pipeline, show)? {
            return Ok(None);
        }
        let Some(text) = batch.texts.pop() else { return Ok(None) };
        if !show("\n")? {
            return Ok(None);
        }
        if text.end == Some(End::Length) {
            complain!("gpipe: the answer was cut after {} tokens: raise --tokens", settings.tokens);
        }
        Ok(Some(text.made))
    }
}

/// Whether a message looks like a command: a slash and letters.
fn is_command(text: &str) -> bool {
    let name = text.strip_prefix('/').unwrap_or_default();
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphabetic())
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// The next line of standard input. `None` at its end.
fn next_message() -> Result<Option<String>, CliError> {
    let mut bytes = Vec::new();
    let name = std::path::Path::new("the standard input");
    let stdin = std::io::stdin().lock();
    stdin.take(MESSAGE_BYTES_MAX + 1).read_until(b'\n', &mut bytes).map_err(io(name))?;
    if bytes.is_empty() {
        return Ok(None);
    }
    if bytes.len() as u64 > MESSAGE_BYTES_MAX {
        let reason = format!("a message has at most {MESSAGE_BYTES_MAX} bytes: send it in parts");
        return Err(CliError::Usage(reason));
    }
    let refused = |_| CliError::Usage("the message is not UTF-8: set the terminal to UTF-8".into());
    String::from_utf8(bytes).map(Some).map_err(refused)
}
