//! The chat template of a model's folder: a Jinja template that renders messages as text.
//!
//! Templates render as in transformers: blocks are trimmed, strings have Python's methods, and
//! `raise_exception` is defined. `strftime_now` is not defined, so that a sample does not depend on
//! the day. The number of steps of a rendering is limited.

use minijinja::{Environment, Error, ErrorKind, Value as JinjaValue, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Value, json};

use super::{
    python_json::to_json,
    turns::{lost, mark_of},
};

/// Maximum number of steps of a template for one conversation.
const FUEL: u64 = 10_000_000;
/// Maximum size of a template: 4 MiB.
const TEMPLATE_BYTES_MAX: usize = 4 << 20;
/// The name of the template in the environment.
const NAME: &str = "chat_template";

/// A template is invalid, or cannot render a conversation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("chat template: {0}")]
pub struct TemplateError(pub(super) String);

/// Texts of the special tokens that a template can use. A missing one renders as an empty text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// `bos_token`, which begins a text.
    pub bos: Option<String>,
    /// `eos_token`, which ends a text.
    pub eos: Option<String>,
    /// `pad_token`, which fills up a row.
    pub pad: Option<String>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: SpecialTokens,
}

/// The error of a template in the user's terms.
fn refused(error: &Error) -> TemplateError {
    let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    let detail = match error.kind() {
        ErrorKind::OutOfFuel => format!("needs more than {FUEL} steps"),
        kind => error.detail().map_or_else(|| kind.to_string(), ToOwned::to_owned),
    };
    TemplateError(format!("{detail}{line}"))
}

/// Replaces the tag `generation` by `if true`. transformers wraps the assistant's messages in this
/// tag, which Jinja does not know. The loss mask does not depend on it.
pub(super) fn without_generation(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        text.push_str(before);
        text.push_str("{%");
        let Some((own, after)) = tag.split_once("%}") else {
            rest = tag;
            break;
        };
        let name = own.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match name {
            "generation" => text.push_str(&own.replace(name, "if true")),
            "endgeneration" => text.push_str(&own.replace(name, "endif")),
            _ => text.push_str(own),
        }
        text.push_str("%}");
        rest = after;
    }
    text + rest
}

impl ChatTemplate {
    /// Compiles a template from its `source`.
    ///
    /// # Errors
    /// [`TemplateError`] if the source is larger than 4 MiB or is not a template. The error names
    /// the line.
    pub fn new(source: &str, tokens: SpecialTokens) -> Result<Self, TemplateError> {
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(TemplateError(format!("has more than {TEMPLATE_BYTES_MAX} bytes")));
        }
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.add_filter("tojson", |value: JinjaValue, options| to_json(&value, &options));
        let raise = |reason: String| -> Result<JinjaValue, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        };
        environment.add_function("raise_exception", raise);
        let source = without_generation(source);
        environment.add_template_owned(NAME, source).map_err(|error| refused(&error))?;
        Ok(Self { environment, tokens })
    }

    /// Renders a conversation. `tools` describes what the assistant may call, as a list of JSON
    /// schemas, or is null. With `prompts`, the text ends with the beginning of the assistant's
    /// next message (`add_generation_prompt`).
    ///
    /// # Errors
    /// [`TemplateError`] if the template refuses the conversation, uses an unknown function or
    /// filter, or needs too many steps.
    pub fn render(
        &self,
        messages: &[Value],
        tools: &Value,
        prompts: bool,
    ) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|error| refused(&error))?;
        let SpecialTokens { bos, eos, pad } = &self.tokens;
        let given = context! {
            messages => messages,
            add_generation_prompt => prompts,
            bos_token => bos.as_deref().unwrap_or_default(),
            eos_token => eos.as_deref().unwrap_or_default(),
            pad_token => pad.as_deref().unwrap_or_default(),
            tools => JinjaValue::from_serialize(tools),
            documents => None::<()>,
        };
        template.render(given).map_err(|error| refused(&error))
    }

    /// The text that the template writes after an assistant's message to end its turn, such as
    /// `<|im_end|>` and a line end.
    ///
    /// # Errors
    /// As for [`ChatTemplate::marked`].
    pub fn turn_end(&self) -> Result<String, TemplateError> {
        let turn = |role: &str, number| json!({"role": role, "content": mark_of(number)});
        let text = self.render(&[turn("user", 0), turn("assistant", 1)], &Value::Null, false)?;
        let (_, end) = text.rsplit_once(mark_of(1).as_str()).ok_or_else(lost)?;
        Ok(end.to_owned())
    }
}
