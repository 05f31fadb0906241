//! A file of lines of JSON as samples.

use std::path::Path;

use super::{BadLine, ChatTemplate, Fields, Lines, Marked, OnBadLine, Record, Sample, Samples};
use crate::{Error, Result, Tokenizer, bounds::SAMPLE_TOKENS_MAX};

/// Lines between two reports of progress.
const TELL_EVERY: u64 = 256;

/// How lines become samples.
#[derive(Debug)]
pub struct Encoder<'a> {
    /// Makes tokens.
    pub tokenizer: &'a Tokenizer,
    /// Makes one text of messages.
    pub template: Option<&'a ChatTemplate>,
    /// Names of the fields.
    pub fields: Fields,
    /// What happens to bad lines.
    pub on_bad_line: OnBadLine,
}

/// The samples of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The samples, in the order of the lines.
    pub samples: Samples,
    /// Number of lines that were left out.
    pub left_out: u64,
    /// The first of them.
    pub bad: Vec<BadLine>,
}

impl Encoder<'_> {
    /// Reads a file. `tell` is called now and then with the number of bytes read.
    ///
    /// # Errors
    /// The file cannot be read; a line is bad, unless such lines are skipped; there are messages
    /// and no template; there are too many tokens.
    pub fn encode(&self, path: &Path, mut tell: impl FnMut(u64)) -> Result<Encoded> {
        let mut lines = Lines::open(path, self.fields.clone(), self.on_bad_line)?;
        let mut samples = Samples::default();
        while let Some(record) = lines.next() {
            match self.sample(&record?, path, lines.line())? {
                Ok(sample) if samples.push(&sample) => {}
                Ok(_) => lines.refuse("nothing in it is learned: it is too short".into())?,
                Err(reason) => lines.refuse(reason)?,
            }
            if samples.tokens() > SAMPLE_TOKENS_MAX {
                return Err(Error::TooManyTokens { path: path.to_owned() });
            }
            if lines.line().is_multiple_of(TELL_EVERY) {
                tell(lines.bytes());
            }
        }
        tell(lines.bytes());
        let (left_out, bad) = lines.left_out();
        Ok(Encoded { samples, left_out, bad: bad.to_vec() })
    }

    /// The sample of a record, or what is wrong with it. A plain text and a completion get the
    /// token that ends a document, which is learned.
    fn sample(
        &self,
        record: &Record,
        path: &Path,
        line: u64,
    ) -> Result<std::result::Result<Sample, String>> {
        let (marked, is_chat) = match record {
            Record::Text(text) => (Marked::all(text.clone()), false),
            Record::Completion { prompt, completion } => {
                (Marked::completion(prompt, completion), false)
            }
            Record::Messages(messages) => {
                let Some(template) = self.template else {
                    return Err(Error::NoTemplate { path: path.to_owned(), line });
                };
                match template.marked(messages) {
                    Ok(marked) => (marked, true),
                    Err(error) => return Ok(Err(error.to_string())),
                }
            }
        };
        let mut sample = match marked.tokens(self.tokenizer, !is_chat) {
            Ok(sample) => sample,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let end = self.tokenizer.end_of_document();
        if !is_chat {
            // The post-processor of another program's tokenizer may have added it.
            match (sample.tokens.last(), sample.learned.last_mut()) {
                (Some(last), Some(learned)) if *last == end => *learned = true,
                _ => {
                    sample.tokens.push(end);
                    sample.learned.push(true);
                }
            }
        }
        Ok(Ok(sample))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Document;

    /// A tokenizer that learned next to nothing: tokens are nearly bytes.
    pub fn tokenizer() -> Tokenizer {
        let text = "the cat sat on the mat; the dog sat on the log\n".repeat(4);
        Tokenizer::train(&[Document { name: "t".into(), text }], 280).unwrap()
    }

    fn encoded(text: &str, on_bad_line: OnBadLine) -> Result<Encoded> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}\
            {% if add_generation_prompt %}<assistant>{% endif %}";
        let template = ChatTemplate::new(source, Default::default()).unwrap();
        let tokenizer = tokenizer();
        let (tokenizer, template) = (&tokenizer, Some(&template));
        let encoder = Encoder { tokenizer, template, fields: Fields::default(), on_bad_line };
        let mut told = 0;
        let encoded = encoder.encode(file.path(), |bytes| told = bytes);
        if encoded.is_ok() {
            assert_eq!(told, text.len() as u64);
        }
        encoded
    }

    /// The text of a sample, and the part of it that is learned.
    fn shown(samples: &Samples, number: usize) -> (String, String) {
        let view = samples.view(number);
        let text = |learned_only: bool| {
            let own = (0..view.len()).filter(|at| !learned_only || view.is_learned(*at));
            let tokens: Vec<u32> = own.map(|at| view.token(at) as u32).collect();
            tokenizer().decode(&tokens).unwrap()
        };
        (text(false), text(true))
    }

    #[test]
    fn oracle_what_is_learned_of_each_kind_of_line() {
        let text = "{\"text\": \"the cat\"}\n\
            {\"prompt\": \"cat?\", \"completion\": \" the dog\"}\n\
            {\"messages\": [{\"role\": \"user\", \"content\": \"hé\"}, \
            {\"role\": \"assistant\", \"content\": \"mat\"}]}\n";
        let Encoded { samples, left_out, .. } = encoded(text, OnBadLine::Stop).unwrap();
        assert_eq!((samples.len(), left_out), (3, 0));
        let both = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(shown(&samples, 0), both("the cat<|end|>", "the cat<|end|>"));
        assert_eq!(shown(&samples, 1), both("cat? the dog<|end|>", " the dog<|end|>"));
        assert_eq!(shown(&samples, 2), both("<user>hé</><assistant>mat</>", "mat</>"));
    }

    #[test]
    fn fault_lines_that_cannot_be_samples_are_named_or_counted() {
        let text = "{\"text\": \"\"}\n{\"text\": \"the cat\"}\n{\"txt\": 1}\n";
        let error = encoded(text, OnBadLine::Stop).unwrap_err().to_string();
        assert!(error.contains("line 1: nothing in it is learned"), "{error}");
        assert!(error.contains("on_bad_line"), "{error}");
        let Encoded { samples, left_out, bad } = encoded(text, OnBadLine::Skip).unwrap();
        assert_eq!((samples.len(), left_out), (1, 2));
        assert_eq!(bad.iter().map(|bad| bad.line).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn fault_messages_without_a_template_end_the_reading_whatever_bad_lines_do() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"mat\"}]}\n";
        std::fs::write(file.path(), line).unwrap();
        let (tokenizer, fields) = (tokenizer(), Fields::default());
        let (template, on_bad_line) = (None, OnBadLine::Skip);
        let encoder = Encoder { tokenizer: &tokenizer, template, fields, on_bad_line };
        let error = encoder.encode(file.path(), |_| ()).unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("chat_template"), "{error}");
    }
}
