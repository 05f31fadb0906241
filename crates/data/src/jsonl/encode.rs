//! Encodes the lines of a JSONL file as samples.

use std::path::Path;

use super::{BadLine, ChatTemplate, Fields, Lines, Marked, OnBadLine, Record, Sample, Samples};
use crate::{Document, Error, Result, Tokenizer, bounds::SAMPLE_TOKENS_MAX};

/// Number of lines between two reports of progress.
const TELL_EVERY: u64 = 256;

/// Encodes the lines of JSONL files as samples: tokens with a loss mask.
#[derive(Debug)]
pub struct Encoder<'a> {
    /// Renders messages. Without a template, a line with messages is an error.
    pub template: Option<&'a ChatTemplate>,
    /// Names of the fields in a line.
    pub fields: Fields,
    /// What happens to invalid lines.
    pub on_bad_line: OnBadLine,
}

/// The samples of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The samples, in the order of the lines.
    pub samples: Samples,
    /// Number of skipped lines.
    pub left_out: u64,
    /// The first 100 skipped lines.
    pub bad: Vec<BadLine>,
}

impl Encoder<'_> {
    /// Encodes the file at `path`. `tell` is called every 256 lines and at the end, with the number
    /// of bytes read.
    ///
    /// # Errors
    /// - [`Error::Io`] if the file cannot be read
    /// - [`Error::BadLine`] if a line is invalid, unless such lines are skipped
    /// - [`Error::NoTemplate`] if a line has messages and there is no template
    /// - [`Error::TooManyTokens`] if the file has more than 2^31 tokens
    pub fn encode(
        &self,
        path: &Path,
        tokenizer: &Tokenizer,
        mut tell: impl FnMut(u64),
    ) -> Result<Encoded> {
        let mut lines = Lines::open(path, self.fields.clone(), self.on_bad_line)?;
        let mut samples = Samples::default();
        while let Some(record) = lines.next() {
            let marked = self.marked(&record?, path, lines.line())?;
            match marked.and_then(|(marked, is_chat)| sample(&marked, is_chat, tokenizer)) {
                Ok(sample) if samples.push(&sample) => {}
                Ok(_) => lines.refuse("no token is in the loss: the sample is too short".into())?,
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

    /// Reads up to `bytes_max` bytes of text from the file at `path`, to train a tokenizer on.
    /// Returns the texts, and whether they are all of the file's texts.
    ///
    /// # Errors
    /// As for [`Encoder::encode`], but without a limit on tokens.
    pub fn texts(&self, path: &Path, bytes_max: u64) -> Result<(Vec<Document>, bool)> {
        let mut lines = Lines::open(path, self.fields.clone(), self.on_bad_line)?;
        let (mut documents, mut bytes) = (Vec::new(), 0);
        while let Some(record) = lines.next() {
            match self.marked(&record?, path, lines.line())? {
                Ok((Marked { text, .. }, _)) => {
                    bytes += text.len() as u64;
                    if bytes > bytes_max {
                        return Ok((documents, false));
                    }
                    let name = format!("{}:{}", path.display(), lines.line());
                    documents.push(Document { name, text });
                }
                Err(reason) => lines.refuse(reason)?,
            }
        }
        Ok((documents, true))
    }

    /// The text of a record and whether a template rendered it, or the reason why it is invalid.
    fn marked(
        &self,
        record: &Record,
        path: &Path,
        line: u64,
    ) -> Result<std::result::Result<(Marked, bool), String>> {
        Ok(match record {
            Record::Text(text) => Ok((Marked::all(text.clone()), false)),
            Record::Completion { prompt, completion } => {
                Ok((Marked::completion(prompt, completion), false))
            }
            Record::Messages { messages, tools } => {
                let Some(template) = self.template else {
                    return Err(Error::NoTemplate { path: path.to_owned(), line });
                };
                let marked = template.marked(messages, tools);
                marked.map(|marked| (marked, true)).map_err(|error| error.to_string())
            }
        })
    }
}

/// The tokens and loss mask of a text. The token that ends a document is appended and is in the
/// loss, unless a chat template rendered the text.
fn sample(
    marked: &Marked,
    is_chat: bool,
    tokenizer: &Tokenizer,
) -> std::result::Result<Sample, String> {
    let mut sample = marked.tokens(tokenizer, !is_chat).map_err(|error| error.to_string())?;
    if is_chat {
        return Ok(sample);
    }
    let end = tokenizer.end_of_document();
    // The tokenizer's post-processor may already have appended the token.
    match (sample.tokens.last(), sample.learned.last_mut()) {
        (Some(last), Some(learned)) if *last == end => *learned = true,
        _ => {
            sample.tokens.push(end);
            sample.learned.push(true);
        }
    }
    Ok(sample)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Document;

    /// A tokenizer trained on little text: most tokens are bytes.
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
        let template = Some(&template);
        let encoder = Encoder { template, fields: Fields::default(), on_bad_line };
        let mut told = 0;
        let encoded = encoder.encode(file.path(), &tokenizer, |bytes| told = bytes);
        if encoded.is_ok() {
            assert_eq!(told, text.len() as u64);
        }
        encoded
    }

    /// The text of a sample, and the part of the text that is in the loss.
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
        assert!(error.contains("line 1: no token is in the loss"), "{error}");
        assert!(error.contains("on_bad_line"), "{error}");
        let Encoded { samples, left_out, bad } = encoded(text, OnBadLine::Skip).unwrap();
        assert_eq!((samples.len(), left_out), (1, 2));
        assert_eq!(bad.iter().map(|bad| bad.line).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn oracle_texts_are_those_of_the_lines() {
        let text = "{\"text\": \"the cat\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n";
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let on_bad_line = OnBadLine::Stop;
        let encoder = Encoder { template: None, fields: Fields::default(), on_bad_line };
        let texts = |bytes_max| {
            let (documents, is_all) = encoder.texts(file.path(), bytes_max).unwrap();
            (documents.into_iter().map(|own| own.text).collect::<Vec<_>>(), is_all)
        };
        assert_eq!(texts(9), (vec!["the cat".to_owned(), "ab".into()], true));
        assert_eq!(texts(8), (vec!["the cat".to_owned()], false));
    }

    #[test]
    fn fault_messages_without_a_template_end_the_reading_whatever_bad_lines_do() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"mat\"}]}\n";
        std::fs::write(file.path(), line).unwrap();
        let (tokenizer, fields) = (tokenizer(), Fields::default());
        let (template, on_bad_line) = (None, OnBadLine::Skip);
        let encoder = Encoder { template, fields, on_bad_line };
        let error = encoder.encode(file.path(), &tokenizer, |_| ()).unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("chat_template"), "{error}");
    }
}
