//! The chat template of a model's folder: a program in Jinja that makes one text of messages.
//!
//! It runs as transformers runs it: blocks are trimmed, texts have Python's methods, and there is
//! `raise_exception`. `strftime_now` is not defined, so that a sample does not depend on the day.
//! The number of steps of a run is bounded.
//!
//! What the assistant says is found by rendering a second time with marks in the place of its
//! messages. What lies between the marks is the template's own.

use std::ops::Range;

use minijinja::{Environment, Error, ErrorKind, Value as JinjaValue, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Value, json};

use super::{marked::Marked, records::is_assistants};

/// Steps of a template for one conversation.
const FUEL: u64 = 10_000_000;
/// Maximum size of a template.
const TEMPLATE_BYTES_MAX: usize = 4 << 20;
/// The name of the template in the environment.
const NAME: &str = "chat_template";

/// Why a template cannot be used, or what it says about a conversation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("chat template: {0}")]
pub struct TemplateError(String);

/// Texts of special tokens, which templates may write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a text.
    pub bos: Option<String>,
    /// Ends a text.
    pub eos: Option<String>,
    /// Fills up.
    pub pad: Option<String>,
}

/// A chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: SpecialTokens,
}

fn refused(error: &Error) -> TemplateError {
    let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    let detail = error.detail().map_or_else(|| error.kind().to_string(), ToOwned::to_owned);
    TemplateError(format!("{detail}{line}"))
}

/// `tojson` as transformers has it: nothing is escaped for HTML.
fn to_json(value: &JinjaValue, options: minijinja::value::Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let failed =
        |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    match indent {
        None => {
            // Python writes a blank after commas and colons.
            let mut bytes = Vec::new();
            let mut writer = serde_json::Serializer::with_formatter(&mut bytes, Spaced);
            serde::Serialize::serialize(value, &mut writer).map_err(failed)?;
            String::from_utf8(bytes)
                .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
        }
        Some(indent) => {
            let blanks = " ".repeat(indent.min(16));
            let mut bytes = Vec::new();
            let pretty = serde_json::ser::PrettyFormatter::with_indent(blanks.as_bytes());
            let mut writer = serde_json::Serializer::with_formatter(&mut bytes, pretty);
            serde::Serialize::serialize(value, &mut writer).map_err(failed)?;
            String::from_utf8(bytes)
                .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
        }
    }
}

/// Writes JSON as Python's `json.dumps` does.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The template with `if true` in the place of `generation`, a tag of transformers around what the
/// assistant says, which Jinja does not know. What is learned is found without it.
fn without_generation(source: &str) -> String {
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
    /// Reads a template.
    ///
    /// # Errors
    /// [`TemplateError`]: it is no template, with the line.
    pub fn new(source: &str, tokens: SpecialTokens) -> Result<Self, TemplateError> {
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(TemplateError(format!("it has more than {TEMPLATE_BYTES_MAX} bytes")));
        }
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.add_filter("tojson", |value: JinjaValue, options| to_json(&value, options));
        let raise = |reason: String| -> Result<JinjaValue, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        };
        environment.add_function("raise_exception", raise);
        let source = without_generation(source);
        environment.add_template_owned(NAME, source).map_err(|error| refused(&error))?;
        Ok(Self { environment, tokens })
    }

    /// The text of a conversation. `prompts` asks for the beginning of the assistant's next message
    /// at the end.
    ///
    /// # Errors
    /// [`TemplateError`]: what the template says is wrong with the conversation.
    pub fn render(&self, messages: &[Value], prompts: bool) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|error| refused(&error))?;
        let SpecialTokens { bos, eos, pad } = &self.tokens;
        let given = context! {
            messages => messages,
            add_generation_prompt => prompts,
            bos_token => bos.as_deref().unwrap_or_default(),
            eos_token => eos.as_deref().unwrap_or_default(),
            pad_token => pad.as_deref().unwrap_or_default(),
            tools => None::<()>,
            documents => None::<()>,
        };
        template.render(given).map_err(|error| refused(&error))
    }

    /// What the template writes after what the assistant says, such as `<|im_end|>` and a line's
    /// end: its turn ends there.
    ///
    /// # Errors
    /// As for [`ChatTemplate::marked`].
    pub fn turn_end(&self) -> Result<String, TemplateError> {
        let turn = |role: &str, number| json!({"role": role, "content": mark_of(number)});
        let text = self.render(&[turn("user", 0), turn("assistant", 1)], false)?;
        let (_, end) = text.rsplit_once(mark_of(1).as_str()).ok_or_else(lost)?;
        Ok(end.to_owned())
    }

    /// The text of a conversation, with what the assistant says marked as learned: from where it
    /// begins to speak to the end of its turn.
    ///
    /// # Errors
    /// As for [`ChatTemplate::render`]; and if what the assistant says cannot be found in the text.
    pub fn marked(&self, messages: &[Value]) -> Result<Marked, TemplateError> {
        let text = self.render(messages, false)?;
        let own: Vec<usize> = (0..messages.len())
            .filter(|&number| messages.get(number).is_some_and(is_assistants))
            .collect();
        let marks: Vec<Value> =
            messages.iter().enumerate().map(|(at, own)| mark(at, own)).collect();
        let frames = frames(&self.render(&marks, false)?, &own)?;
        let contents = contents(&text, &frames)?;
        let mut learned = Vec::with_capacity(own.len());
        for (number, &message) in own.iter().enumerate() {
            let (content, before) = match (contents.get(number), frames.get(number)) {
                (Some(content), Some(before)) => (content.clone(), before),
                _ => return Err(lost()),
            };
            // The assistant begins to speak where a prompt for it ends.
            let earlier = marks.get(..message).unwrap_or_default();
            let (without, with) = (self.render(earlier, false)?, self.render(earlier, true)?);
            let prompt = with.strip_prefix(without.as_str()).unwrap_or_default();
            let spoken = match (prompt.is_empty(), before.rfind(prompt)) {
                (false, Some(at)) => before.len() - at - prompt.len(),
                _ => 0,
            };
            // It ends its turn as it would if nothing followed.
            let alone = self.render(marks.get(..=message).unwrap_or_default(), false)?;
            let mark = mark_of(message);
            let closing = alone.rsplit_once(mark.as_str()).map_or("", |(_, closing)| closing);
            let after = frames.get(number + 1).map_or("", String::as_str);
            let closing = common(closing, after);
            learned.push(content.start - spoken..content.end + closing);
        }
        Ok(Marked { text, learned })
    }
}

fn lost() -> TemplateError {
    TemplateError(
        "what the assistant says cannot be found in the text that it makes: use prompt and \
        completion instead of messages"
            .into(),
    )
}

/// A text that no message has: characters for private use.
fn mark_of(number: usize) -> String {
    format!("\u{f8f0}{number}\u{f8f1}")
}

/// A message with a mark in the place of what the assistant says.
fn mark(number: usize, message: &Value) -> Value {
    let mut message = message.clone();
    if is_assistants(&message)
        && let Some(content) = message.get_mut("content")
    {
        *content = mark_of(number).into();
    }
    message
}

/// What the template writes before, between and after the marks of these messages.
fn frames(text: &str, own: &[usize]) -> Result<Vec<String>, TemplateError> {
    let mut rest = text;
    let mut frames = Vec::with_capacity(own.len() + 1);
    for &message in own {
        let (before, after) = rest.split_once(mark_of(message).as_str()).ok_or_else(lost)?;
        frames.push(before.to_owned());
        rest = after;
    }
    frames.push(rest.to_owned());
    Ok(frames)
}

/// Where the contents between the frames are in `text`.
fn contents(text: &str, frames: &[String]) -> Result<Vec<Range<usize>>, TemplateError> {
    let (Some(first), Some(last)) = (frames.first(), frames.last()) else { return Err(lost()) };
    let mut from = text.strip_prefix(first.as_str()).map(|_| first.len()).ok_or_else(lost)?;
    let mut all = Vec::with_capacity(frames.len());
    for (number, frame) in frames.iter().enumerate().skip(1) {
        let rest = text.get(from..).unwrap_or_default();
        let is_last = number + 1 == frames.len();
        let at = match is_last {
            true if rest.ends_with(last.as_str()) => rest.len() - last.len(),
            true => return Err(lost()),
            false => rest.find(frame.as_str()).ok_or_else(lost)?,
        };
        all.push(from..from + at);
        from += at + frame.len();
    }
    Ok(all)
}

/// The number of bytes at the beginning that two texts have in common, in whole characters.
fn common(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written for these tests, in the style of ChatML: the last answer may have thoughts.
    const TURNS: &str = "\
{%- if messages[0].role == 'system' -%}
    {{- '<|begin|>system\\n' + messages[0].content.strip() + '<|stop|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' %}
        {{- '<|begin|>user\\n' + message.content + '<|stop|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|begin|>assistant\\n' }}
        {%- if loop.last %}{{- '<think>\\n\\n</think>\\n' }}{% endif %}
        {{- message.content.strip() + '<|stop|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin|>assistant\\n' }}{% endif %}";

    fn template(source: &str) -> ChatTemplate {
        let tokens = SpecialTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), pad: None };
        ChatTemplate::new(source, tokens).unwrap()
    }

    fn chat(turns: &[(&str, &str)]) -> Vec<Value> {
        turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
    }

    fn learned(source: &str, turns: &[(&str, &str)]) -> (String, Vec<String>) {
        let marked = template(source).marked(&chat(turns)).unwrap();
        let parts = marked.learned.iter().map(|range| marked.text[range.clone()].to_owned());
        (marked.text.clone(), parts.collect())
    }

    #[test]
    fn oracle_what_the_assistant_says_is_learned_to_the_end_of_its_turn() {
        let turns = [
            ("system", " Be brief. "),
            ("user", "Hi"),
            ("assistant", " Hello, Hi "),
            ("user", "Hello, Hi"),
            ("assistant", "Bye"),
        ];
        let (text, parts) = learned(TURNS, &turns);
        assert_eq!(
            text,
            "<|begin|>system\nBe brief.<|stop|>\n<|begin|>user\nHi<|stop|>\n\
            <|begin|>assistant\nHello, Hi<|stop|>\n<|begin|>user\nHello, Hi<|stop|>\n\
            <|begin|>assistant\n<think>\n\n</think>\nBye<|stop|>\n"
        );
        assert_eq!(parts, ["Hello, Hi<|stop|>\n", "<think>\n\n</think>\nBye<|stop|>\n"]);
        assert_eq!(template(TURNS).turn_end().unwrap(), "<|stop|>\n");
    }

    /// Templates with transformers' own tag were refused.
    #[test]
    fn regression_generation_tags_are_read() {
        let tagged = "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content }}\n\
            {% else %}A:{%- generation %} {{ m.content }}</s>{%- endgeneration -%}\n{% endif %}\
            {% endfor %}";
        let (text, parts) = learned(tagged, &[("user", "a"), ("assistant", "b")]);
        assert_eq!(text, "U: a\nA: b</s>");
        assert_eq!(parts, ["b</s>"]);
        assert_eq!(
            without_generation("a {% b {%+ generation -%} {%"),
            "a {% b {%+ generation -%} {%"
        );
    }

    #[test]
    fn oracle_other_styles_are_understood() {
        // Llama 2's: turns in brackets, no prompt for the assistant.
        let brackets = "{% for message in messages %}{% if message['role'] == 'user' %}\
            {{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}\
            {% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}";
        let turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];
        let (text, parts) = learned(brackets, &turns);
        assert_eq!(text, "<s>[INST] a [/INST] b </s><s>[INST] c [/INST] d </s>");
        assert_eq!(parts, ["b </s>", "d </s>"]);
        // Python's methods, slices, namespaces, JSON.
        let python = "{% set state = namespace(count=0) %}{% for m in messages[::1] %}\
            {% set state.count = state.count + 1 %}\
            {{ m.role.upper() ~ ':' ~ m.content.split('|')[-1].lstrip('\\n') }}\
            {%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %};{% endfor %}\
            {{ state.count }}";
        let messages = vec![
            json!({"role": "user", "content": "x|y"}),
            json!({"role": "assistant", "content": "z",
                   "tool_calls": [{"name": "<f>", "arguments": {"a": 1, "b": "é"}}]}),
        ];
        assert_eq!(
            template(python).render(&messages, false).unwrap(),
            "USER:y;ASSISTANT:z[{\"name\": \"<f>\", \"arguments\": {\"a\": 1, \"b\": \"é\"}}];2"
        );
    }

    #[test]
    fn fault_templates_and_conversations_that_do_not_fit_are_told() {
        let none = SpecialTokens::default();
        let error = ChatTemplate::new("{% if %}", none.clone()).unwrap_err().to_string();
        assert!(error.starts_with("chat template: ") && error.contains("line 1"), "{error}");
        let odd = chat(&[("tool", "a"), ("assistant", "b")]);
        let error = template(TURNS).render(&odd, false).unwrap_err().to_string();
        assert!(error.contains("Unknown role: tool"), "{error}");
        // A template that hides what the assistant says, and one that never ends.
        let hides = "{% for m in messages %}{{ m.content | length }}{% endfor %}";
        let error = template(hides).marked(&chat(&[("assistant", "b")])).unwrap_err().to_string();
        assert!(error.contains("cannot be found") && error.contains("completion"), "{error}");
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}\
            {% endfor %}";
        let error = ChatTemplate::new(endless, none).unwrap().render(&[], false).unwrap_err();
        assert!(error.to_string().contains("fuel"), "{error}");
    }
}
