//! The loss mask of a conversation: the assistant's turns in the text that a chat template renders.
//!
//! They are found with a second rendering, in which placeholders replace the assistant's messages.
//! The text between placeholders comes from the template and the other messages.
//!
//! Some templates write a message without content, such as one that only calls tools, in another
//! way. Then each turn is what the text has beyond the rendering of the messages before it.

use std::{cell::Cell, ops::Range};

use serde_json::Value;

use super::{
    marked::Marked,
    records::is_assistants,
    template::{ChatTemplate, TemplateError},
};

/// Maximum size of all renderings of one conversation. Each turn of the assistant needs two of what
/// was said before it, so they grow with the square of the number of turns.
const RENDERED_BYTES_MAX: usize = 1 << 30;

impl ChatTemplate {
    /// Renders a conversation with its loss mask: the assistant's turns, each from the end of the
    /// prompt for the turn to the end of the turn.
    ///
    /// # Errors
    /// As for [`ChatTemplate::render`], and [`TemplateError`] if an assistant's message cannot be
    /// found in the rendered text.
    pub fn marked(&self, messages: &[Value], tools: &Value) -> Result<Marked, TemplateError> {
        let texts = Renderings { template: self, tools, left: Cell::new(RENDERED_BYTES_MAX) };
        let text = texts.of(messages, false)?;
        let own: Vec<usize> = (0..messages.len())
            .filter(|&number| messages.get(number).is_some_and(is_assistants))
            .collect();
        let learned = match texts.by_placeholders(&text, messages, &own)? {
            Some(learned) => learned,
            None => texts.by_beginnings(&text, messages, &own)?.ok_or_else(lost)?,
        };
        Ok(Marked { text, learned })
    }
}

/// The renderings of one conversation and of its beginnings.
struct Renderings<'t> {
    template: &'t ChatTemplate,
    tools: &'t Value,
    /// The bytes that they may still have.
    left: Cell<usize>,
}

impl Renderings<'_> {
    fn of(&self, messages: &[Value], prompts: bool) -> Result<String, TemplateError> {
        let text = self.template.render(messages, self.tools, prompts)?;
        self.count(&text)?;
        Ok(text)
    }

    /// As `of`; `None` if the template refuses these messages, which are a part of what was given.
    fn of_part(&self, messages: &[Value], prompts: bool) -> Result<Option<String>, TemplateError> {
        let text = self.template.render(messages, self.tools, prompts).ok();
        text.as_ref().map_or(Ok(()), |text| self.count(text))?;
        Ok(text)
    }

    fn count(&self, text: &str) -> Result<(), TemplateError> {
        let left = self.left.get().checked_sub(text.len()).ok_or_else(|| {
            TemplateError(format!(
                "to find what is in the loss of so many turns takes more than {RENDERED_BYTES_MAX} \
                bytes of text: divide the conversation"
            ))
        })?;
        self.left.set(left);
        Ok(())
    }

    /// The turns of the messages `own`, found by placeholders; `None` if these are not where the
    /// messages are.
    fn by_placeholders(
        &self,
        text: &str,
        messages: &[Value],
        own: &[usize],
    ) -> Result<Option<Vec<Range<usize>>>, TemplateError> {
        let marks: Vec<Value> =
            messages.iter().enumerate().map(|(at, own)| mark(at, own)).collect();
        let marked = self.of(&marks, false)?;
        let Some(Frames { texts: frames, turns }) = frames(&marked, own) else { return Ok(None) };
        let Some(contents) = contents(text, &frames) else { return Ok(None) };
        let mut learned = Vec::with_capacity(own.len());
        for (turn, &message) in turns.iter().zip(own) {
            let (Some(first), Some(last), Some(before)) =
                (contents.get(turn.first), contents.get(turn.last), frames.get(turn.first))
            else {
                return Ok(None);
            };
            let spoken = self.spoken(&marks, message, &marked, turn, before)?;
            // The turn ends with the text that the template writes if no message follows.
            let alone = self.of(marks.get(..=message).unwrap_or_default(), false)?;
            let mark = mark_of(message);
            let closing = alone.rsplit_once(mark.as_str()).map_or("", |(_, closing)| closing);
            let after = frames.get(turn.last + 1).map_or("", String::as_str);
            let closing = common(closing, after);
            learned.push(first.start - spoken..last.end + closing);
        }
        Ok(Some(learned))
    }

    /// The turns of the messages `own`, each what follows the prompt for it in the rendering of the
    /// conversation up to it; `None` if the text does not begin with these renderings.
    fn by_beginnings(
        &self,
        text: &str,
        messages: &[Value],
        own: &[usize],
    ) -> Result<Option<Vec<Range<usize>>>, TemplateError> {
        let mut learned = Vec::with_capacity(own.len());
        for &message in own {
            let earlier = messages.get(..message).unwrap_or_default();
            if earlier.is_empty() {
                return Ok(None); // many templates need a first message
            }
            let prompt = self.of_part(earlier, true)?;
            let turn = self.of_part(messages.get(..=message).unwrap_or_default(), false)?;
            let (Some(prompt), Some(turn)) = (prompt, turn) else { return Ok(None) };
            if !(turn.starts_with(&prompt) && text.starts_with(&turn)) {
                return Ok(None);
            }
            learned.push(prompt.len()..turn.len());
        }
        Ok(Some(learned))
    }

    /// The number of bytes before the content of `message` that belong to the assistant's turn. The
    /// turn begins where the prompt for the turn ends. `before` is the text that the template
    /// writes between the previous turn's content and this content.
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
            return Ok(0); // many templates need a first message
        }
        let with = self.of(earlier, true)?;
        if marked.starts_with(&with) && with.len() <= turn.offset {
            return Ok((turn.offset - with.len()).min(before.len()));
        }
        let without = self.of(earlier, false)?;
        let prompt = with.strip_prefix(without.as_str()).unwrap_or_default();
        Ok(match (prompt.is_empty(), before.rfind(prompt)) {
            (false, Some(at)) => before.len() - at - prompt.len(),
            _ => 0,
        })
    }
}

pub(super) fn lost() -> TemplateError {
    TemplateError(
        "the assistant's messages cannot be found in the rendered text: use prompt and completion \
        instead of messages"
            .into(),
    )
}

/// The placeholder for the content of message `number`, in private-use characters.
pub(super) fn mark_of(number: usize) -> String {
    format!("\u{f8f0}{number}\u{f8f1}")
}

/// The placeholder for the thoughts before the content of message `number`.
fn mark_of_thoughts(number: usize) -> String {
    format!("\u{f8f0}{number}\u{f8f2}")
}

/// The end of thoughts, which templates look for in an assistant's message.
const THOUGHTS_END: &str = "</think>";

/// The message with a placeholder in place of the assistant's content, and another for thoughts.
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

/// A turn of the assistant, located by placeholders.
struct Turn {
    /// Index of the turn's first placeholder: that of its thoughts, if the template writes them.
    first: usize,
    /// Index of the turn's last placeholder.
    last: usize,
    /// Byte offset of the first placeholder in the text.
    offset: usize,
}

/// The texts before, between and after placeholders.
struct Frames {
    texts: Vec<String>,
    turns: Vec<Turn>,
}

/// The texts around the placeholders of the messages `own`; `None` if one is missing.
fn frames(text: &str, own: &[usize]) -> Option<Frames> {
    let mut rest = text;
    let (mut texts, mut turns) = (Vec::with_capacity(own.len() + 1), Vec::with_capacity(own.len()));
    for &message in own {
        let first = texts.len();
        let (thoughts, said) = (mark_of_thoughts(message), mark_of(message));
        let at = |rest: &str, mark: &str| rest.find(mark);
        let end = at(rest, &said)?;
        let mut offset = text.len() - rest.len() + end;
        if let Some(begin) = at(rest, &thoughts).filter(|begin| *begin < end) {
            offset = text.len() - rest.len() + begin;
            texts.push(rest.get(..begin).unwrap_or_default().to_owned());
            rest = rest.get(begin + thoughts.len()..).unwrap_or_default();
        }
        let (before, after) = rest.split_once(said.as_str())?;
        texts.push(before.to_owned());
        rest = after;
        turns.push(Turn { first, last: texts.len() - 1, offset });
    }
    texts.push(rest.to_owned());
    Some(Frames { texts, turns })
}

/// The byte ranges of the contents between the frames in `text`; `None` if it has other frames.
fn contents(text: &str, frames: &[String]) -> Option<Vec<Range<usize>>> {
    let (first, last) = (frames.first()?, frames.last()?);
    let mut from = text.strip_prefix(first.as_str()).map(|_| first.len())?;
    let mut all = Vec::with_capacity(frames.len());
    for (number, frame) in frames.iter().enumerate().skip(1) {
        let rest = text.get(from..).unwrap_or_default();
        let is_last = number + 1 == frames.len();
        let at = match is_last {
            true if rest.ends_with(last.as_str()) => rest.len() - last.len(),
            true => return None,
            false => rest.find(frame.as_str())?,
        };
        all.push(from..from + at);
        from += at + frame.len();
    }
    Some(all)
}

/// The length of the common prefix of two texts, in bytes of whole characters.
fn common(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::jsonl::template::{SpecialTokens, without_generation};

    /// A template in the style of ChatML, in which the last answer has thoughts.
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
        let marked = template(source).marked(&chat(turns), &Value::Null).unwrap();
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

    /// Answers with thoughts were not found, because the template moves the thoughts.
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

    /// Messages that only call tools were refused, where the template writes them otherwise than
    /// those with content, or writes no content beside calls at all.
    #[test]
    fn regression_messages_that_only_call_tools_are_learned() {
        let with_content = "{% for m in messages %}<{{ m.role }}>\
            {% if m.content %}{{ '\n' + m.content }}{% endif %}\
            {% for call in m.tool_calls or [] %}{{ '\n[' + call.name }}]{% endfor %}</>\
            {% endfor %}\
            {% if add_generation_prompt %}<assistant>{% endif %}";
        let calls_alone = "{% for m in messages %}{{ '<' + m.role + '>\n' }}\
            {% if m.tool_calls %}{% for call in m.tool_calls %}[{{ call.name }}]{% endfor %}\
            {% else %}{{ m.content }}{% endif %}</>{% endfor %}\
            {% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}";
        let turns = |said: &str| {
            let turns = [("user", "a"), ("assistant", said), ("tool", "7"), ("assistant", "b")];
            let mut turns = chat(&turns);
            turns[1]["tool_calls"] = json!([{"name": "f"}]);
            turns
        };
        for (source, said, expected) in [
            (with_content, "", ["\n[f]</>", "\nb</>"]),
            (with_content, "I look.", ["\nI look.\n[f]</>", "\nb</>"]),
            (calls_alone, "", ["[f]</>", "b</>"]),
            (calls_alone, "I look.", ["[f]</>", "b</>"]),
        ] {
            let marked = template(source).marked(&turns(said), &Value::Null).unwrap();
            let parts = marked.learned.iter().map(|range| &marked.text[range.clone()]);
            assert_eq!(parts.collect::<Vec<_>>(), expected, "{source}");
        }
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

    /// Templates with transformers' `generation` tag were refused.
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
            template(python).render(&messages, &Value::Null, false).unwrap(),
            "USER:y;ASSISTANT:z[{\"name\": \"<f>\", \"arguments\": {\"a\": 1, \"b\": \"é\"}}];2"
        );
    }

    #[test]
    fn fault_templates_and_conversations_that_do_not_fit_are_told() {
        let none = SpecialTokens::default();
        let error = ChatTemplate::new("{% if %}", none.clone()).unwrap_err().to_string();
        assert!(error.starts_with("chat template: ") && error.contains("line 1"), "{error}");
        let odd = chat(&[("tool", "a"), ("assistant", "b")]);
        let error = template(TURNS).render(&odd, &Value::Null, false).unwrap_err().to_string();
        assert!(error.contains("Unknown role: tool"), "{error}");
        // A template that hides the assistant's messages, and one with too many steps.
        let hides = "{% for m in messages %}{{ m.content | length }}{% endfor %}";
        let said = chat(&[("assistant", "b")]);
        let error = template(hides).marked(&said, &Value::Null).unwrap_err().to_string();
        assert!(error.contains("cannot be found") && error.contains("completion"), "{error}");
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}\
            {% endfor %}";
        let endless = ChatTemplate::new(endless, none).unwrap();
        let error = endless.render(&[], &Value::Null, false).unwrap_err();
        assert!(error.to_string().contains("needs more than 10000000 steps"), "{error}");
        // Renderings grow with the square of the turns: one line kept a training busy for minutes.
        let word = "word ".repeat(4000);
        let turns: Vec<_> = (0..600).flat_map(|_| [("user", &*word), ("assistant", "b")]).collect();
        let error = template(TURNS).marked(&chat(&turns), &Value::Null).unwrap_err().to_string();
        assert!(error.contains("divide the conversation"), "{error}");
    }

    /// They were left out without a word, so that a model learned to call what it was not told of.
    #[test]
    fn regression_tools_reach_the_template() {
        let source = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}\
            [{{ m.role }}]{{ m.content }}[/]{% endfor %}\
            {% if add_generation_prompt %}[assistant]{% endif %}";
        let turns = chat(&[("user", "a"), ("assistant", "b")]);
        let marked = template(source).marked(&turns, &json!([{"name": "f"}])).unwrap();
        assert_eq!(marked.text, "[{\"name\": \"f\"}][user]a[/][assistant]b[/]");
        assert_eq!(&marked.text[marked.learned[0].clone()], "b[/]");
        let (text, _) = learned(source, &[("user", "a"), ("assistant", "b")]);
        assert_eq!(text, "[user]a[/][assistant]b[/]");
    }
}
