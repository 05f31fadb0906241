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

use super::{marked::Marked, python_json::to_json, records::is_assistants};

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
        environment.add_filter("tojson", |value: JinjaValue, options| to_json(&value, &options));
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
        let marked = self.render(&marks, false)?;
        let Frames { texts: frames, turns } = frames(&marked, &own)?;
        let contents = contents(&text, &frames)?;
        let mut learned = Vec::with_capacity(own.len());
        for (turn, &message) in turns.iter().zip(&own) {
            let (Some(first), Some(last), Some(before)) =
                (contents.get(turn.first), contents.get(turn.last), frames.get(turn.first))
            else {
                return Err(lost());
            };
            let spoken = self.spoken(&marks, message, &marked, turn, before)?;
            // It ends its turn as it would if nothing followed.
            let alone = self.render(marks.get(..=message).unwrap_or_default(), false)?;
            let mark = mark_of(message);
            let closing = alone.rsplit_once(mark.as_str()).map_or("", |(_, closing)| closing);
            let after = frames.get(turn.last + 1).map_or("", String::as_str);
            let closing = common(closing, after);
            learned.push(first.start - spoken..last.end + closing);
        }
        Ok(Marked { text, learned })
    }

    /// The number of bytes before what the assistant says in `message` that it speaks, too: it
    /// begins where a prompt for it ends. `before` is what the template writes between the last
    /// turn's words and its own.
    fn spoken(
        &self,
        marks: &[Value],
        message: usize,
        marked: &str,
        turn: &Turn,
        before: &str,
    ) -> Result<usize, TemplateError> {
        let earlier = marks.get(..message).unwrap_or_default();
        if earlier.is_empty() {
            return Ok(0); // many templates want a first message
        }
        let (without, with) = (self.render(earlier, false)?, self.render(earlier, true)?);
        if marked.starts_with(&with) && with.len() <= turn.offset {
            return Ok((turn.offset - with.len()).min(before.len()));
        }
        let prompt = with.strip_prefix(without.as_str()).unwrap_or_default();
        Ok(match (prompt.is_empty(), before.rfind(prompt)) {
            (false, Some(at)) => before.len() - at - prompt.len(),
            _ => 0,
        })
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

/// The same for the thoughts before what is said.
fn mark_of_thoughts(number: usize) -> String {
    format!("\u{f8f0}{number}\u{f8f2}")
}

/// The end of thoughts, which templates look for in what the assistant says.
const THOUGHTS_END: &str = "</think>";

/// A message with a mark in the place of what the assistant says, and one for its thoughts.
fn mark(number: usize, message: &Value) -> Value {
    let mut message = message.clone();
    if is_assistants(&message)
        && let Some(content) = message.get_mut("content")
    {
        let has_thoughts = content.as_str().is_some_and(|said| said.contains(THOUGHTS_END));
        let said = mark_of(number);
        *content = match has_thoughts {
            true => {
                let thoughts = mark_of_thoughts(number);
                format!("<think>\n{thoughts}\n{THOUGHTS_END}\n\n{said}").into()
            }
            false => said.into(),
        };
    }
    message
}

/// A turn of the assistant, by the marks in a text.
struct Turn {
    /// The number of its first mark: of its thoughts, if the template writes them.
    first: usize,
    /// The number of its last mark.
    last: usize,
    /// Where the first mark is, in bytes.
    offset: usize,
}

/// What the template writes before, between and after marks.
struct Frames {
    texts: Vec<String>,
    turns: Vec<Turn>,
}

fn frames(text: &str, own: &[usize]) -> Result<Frames, TemplateError> {
    let mut rest = text;
    let (mut texts, mut turns) = (Vec::with_capacity(own.len() + 1), Vec::with_capacity(own.len()));
    for &message in own {
        let first = texts.len();
        let (thoughts, said) = (mark_of_thoughts(message), mark_of(message));
        let at = |rest: &str, mark: &str| rest.find(mark);
        let end = at(rest, &said).ok_or_else(lost)?;
        let mut offset = text.len() - rest.len() + end;
        if let Some(begin) = at(rest, &thoughts).filter(|begin| *begin < end) {
            offset = text.len() - rest.len() + begin;
            texts.push(rest.get(..begin).unwrap_or_default().to_owned());
            rest = rest.get(begin + thoughts.len()..).unwrap_or_default();
        }
        let (before, after) = rest.split_once(said.as_str()).ok_or_else(lost)?;
        texts.push(before.to_owned());
        rest = after;
        turns.push(Turn { first, last: texts.len() - 1, offset });
    }
    texts.push(rest.to_owned());
    Ok(Frames { texts, turns })
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

    /// Answers with thoughts could not be found, because the template moves them.
    #[test]
    fn regression_thoughts_are_learned_where_the_template_writes_them() {
        let thinking = "{% for m in messages %}{% set said = m.content %}{% set thoughts = '' %}\
            {% if '</think>' in said %}\
            {% set thoughts = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}\
            {% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
            [{{ m.role }}]\
            {% if m.role == 'assistant' and loop.last %}<think>\\n{{ thoughts }}\\n</think>\\n\\n\
            {% endif %}{{ said }}[/]{% endfor %}\
            {% if add_generation_prompt %}[assistant]{% endif %}";
        let said = "<think>\n3 * 4\n</think>\n\n12";
        let turns = [("user", "a"), ("assistant", said), ("user", "b"), ("assistant", said)];
        let (text, parts) = learned(thinking, &turns);
        let last = "<think>\\n3 * 4\\n</think>\\n\\n12[/]";
        assert_eq!(text, format!("[user]a[/][assistant]12[/][user]b[/][assistant]{last}"));
        assert_eq!(parts, ["12[/]", last]);
    }

    #[test]
    fn oracle_an_assistant_may_speak_first() {
        let turns = [("assistant", "hi"), ("user", "a"), ("assistant", "b")];
        let template = "{% if messages[0].role == 'system' %}S{% endif %}\
            {% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}\
            {% if add_generation_prompt %}<assistant>{% endif %}";
        let (_, parts) = learned(template, &turns);
        assert_eq!(parts, ["hi</>", "b</>"]);
    }

    /// Templates with transformers' own tag were refused.
    #[test]
    fn regression_generation_tags_are_read() {
        let tagged = "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content }}\n\
            {% else %}A:{%- generation %} {{ m.content }}</s>{%- endgeneration -%}\n{% endif %}\
            {% endfor %}{% if add_generation_prompt %}A: {% endif %}";
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
        assert_eq!(parts, [" b </s>", " d </s>"]);
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
