//! `gpipe translate`: translates sentences into English, line by line.

use std::{
    io::{BufRead, ErrorKind, Write},
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, RecvTimeoutError, sync_channel},
    thread,
    time::Duration,
};

use gpipe::{
    Pipeline,
    decode::{BeamSearch, Hypothesis, Sentence},
};
use gpipe_data::parallel::TranslationVocabulary;
use gpipe_models::CachedLogits;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use gpipe_distributed::environment::Environment;

use crate::{
    CliError,
    args::{RunArguments, SearchArguments, TranslateArguments},
    config::{Config, Data},
    files::{io, without_mark},
    output::complain,
    processes::Processes,
    run_folder::RunFolder,
    task::translation::{PAD, check_pad},
};

/// Maximum length of a line. The rest of a longer line is discarded.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of lines that are translated together.
const BATCH_MAX: usize = 4096;
/// Number of bytes of a sentence that are encoded per token of the model's length. No token of text
/// is that long.
const BYTES_PER_TOKEN: usize = 64;
/// Maximum number of logits of a step. More would take gigabytes.
const LOGITS_MAX: usize = 1 << 25;
/// An output may have three times the tokens of its source, plus this many.
const TOKENS_MORE: usize = 20;

/// Maximum interval at which a process that waits for lines tells the others that it is alive.
const SIGN_OF_LIFE: Duration = Duration::from_secs(30);

/// How lines are translated.
pub(crate) struct Translator<'a> {
    pub vocabulary: &'a TranslationVocabulary,
    pub search: BeamSearch,
    /// Number of groups of sentences that go through the stages at the same time.
    pub groups: usize,
    /// Maximum number of tokens of a source, including tag and end.
    pub length: usize,
}

/// A line of input.
struct Line {
    text: Vec<u8>,
    /// Whether its end was discarded.
    cut: bool,
}

impl<'a> Translator<'a> {
    /// The configured translator, for at most `batch` sentences at once.
    pub(crate) fn new(
        config: &Config,
        vocabulary: &'a TranslationVocabulary,
        search: &SearchArguments,
        batch: usize,
    ) -> Result<Self, CliError> {
        let Data::Parallel(data) = &config.data else {
            return Err(CliError::Usage(
                "the model does not translate: name the run of a translation".into(),
            ));
        };
        check_pad(vocabulary)?;
        let SearchArguments { beam, length_penalty } = *search;
        let size = vocabulary.tokenizer().vocabulary();
        let logits = batch.saturating_mul(beam).saturating_mul(size);
        if logits > LOGITS_MAX {
            return Err(CliError::Usage(format!(
                "{batch} sentences at once with --beam {beam} and a vocabulary of {size} are \
                {logits} logits in each step, at most {LOGITS_MAX} are computed: use less of the \
                first two"
            )));
        }
        // A translation never contains a tag.
        let tags = vocabulary.languages().map(|language| vocabulary.tag(language));
        let tags = tags.collect::<Result<Vec<u32>, _>>()?;
        let specials =
            [vocabulary.tokenizer().end_of_document(), vocabulary.pad(), vocabulary.begin()];
        let never = specials.into_iter().chain(tags).map(i64::from).collect();
        let search = BeamSearch { beam, length_penalty, end: i64::from(vocabulary.end()), never };
        search.check().map_err(|error| {
            CliError::Usage(format!("--beam {beam}, --length-penalty {length_penalty}: {error}"))
        })?;
        let groups = config.pipeline.stages.max(1);
        Ok(Self { vocabulary, search, groups, length: data.length })
    }

    /// The best translation of each source. A source consists of tokens: tag, sentence, end.
    pub(crate) fn best(
        &self,
        pipeline: &mut Pipeline,
        sources: &[Vec<u32>],
    ) -> Result<Vec<Option<Hypothesis>>, CliError> {
        // Group sentences of similar length, to reduce padding.
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|&index| sources[index].len());
        let size = order.len().div_ceil(self.groups).max(1);
        let groups: Vec<&[usize]> = order.chunks(size).collect();
        let begin = vec![i64::from(self.vocabulary.begin())];
        let sentence = |&index: &usize| Sentence {
            begin: begin.clone(),
            most: (3 * sources[index].len() + TOKENS_MORE).min(4 * self.length),
        };
        let sentences: Vec<Vec<Sentence>> =
            groups.iter().map(|group| group.iter().map(sentence).collect()).collect();
        let tensors = groups.iter().map(|group| padded(group, sources));
        let tensors = tensors.collect::<Result<_, tch::TchError>>()?;
        let found = self.search.run(&sentences, &mut CachedLogits::new(pipeline, tensors))?;
        let mut best: Vec<Option<Hypothesis>> = vec![None; sources.len()];
        for (&index, hypotheses) in order.iter().zip(found.into_iter().flatten()) {
            best[index] = hypotheses.into_iter().next();
        }
        Ok(best)
    }

    /// A translation as one line of text.
    pub(crate) fn text(&self, found: Option<Hypothesis>) -> Result<String, CliError> {
        let tokens = found.iter().flat_map(|found| &found.tokens);
        let tokens: Vec<u32> = tokens.map(|&token| token as u32).collect();
        Ok(self.vocabulary.decode(&tokens)?.replace(['\n', '\r'], " "))
    }

    /// Translates lines of one language, in order. An empty line stays empty. `number` is that of
    /// the first line, for warnings.
    fn translate(
        &self,
        pipeline: &mut Pipeline,
        language: &str,
        sentences: &[&str],
        number: u64,
    ) -> Result<Vec<String>, CliError> {
        let mut sources = Vec::new();
        let mut places = Vec::new();
        for (place, sentence) in sentences.iter().enumerate() {
            if sentence.trim().is_empty() {
                continue;
            }
            let sentence = sentence.trim();
            let seen = sentence.floor_char_boundary(self.length * BYTES_PER_TOKEN);
            let mut tokens = self.vocabulary.encode_source(language, &sentence[..seen])?;
            if tokens.len() > self.length || seen < sentence.len() {
                complain!(
                    "gpipe: warning: line {} is longer than the {} tokens that the model takes, \
                    and translated up to there: cut it into shorter ones",
                    number + place as u64,
                    self.length - 2 // without tag and end
                );
                tokens.truncate(self.length - 1);
                tokens.push(self.vocabulary.end());
            }
            sources.push(tokens);
            places.push(place);
        }
        let mut texts = vec![String::new(); sentences.len()];
        for (place, found) in places.into_iter().zip(self.best(pipeline, &sources)?) {
            texts[place] = self.text(found)?;
        }
        Ok(texts)
    }
}

/// Sources of a group, padded at their ends: int64 [sentences, length].
fn padded(group: &[usize], sources: &[Vec<u32>]) -> Result<Tensor, tch::TchError> {
    let longest = group.iter().map(|&index| sources[index].len()).max().unwrap_or(0);
    let row = |&index: &usize| {
        let own = sources[index].iter().map(|&token| i64::from(token));
        own.chain(std::iter::repeat(PAD)).take(longest)
    };
    let tokens: Vec<i64> = group.iter().flat_map(row).collect();
    Tensor::f_from_slice(&tokens)?.f_reshape([group.len() as i64, longest as i64])
}

/// Translates standard input line by line, as lines arrive.
pub(crate) fn run(
    arguments: &TranslateArguments,
    here: Option<&Environment>,
) -> Result<(), CliError> {
    let timeout_s = arguments.run.timeout_s();
    Processes::among(here, timeout_s, |processes| translate(arguments, processes))
}

fn translate(arguments: &TranslateArguments, processes: &Processes) -> Result<(), CliError> {
    if !(1..=BATCH_MAX).contains(&arguments.batch) {
        let batch = arguments.batch;
        return Err(CliError::Usage(format!("--batch {batch}: use 1 to {BATCH_MAX}")));
    }
    let run = RunFolder::open(&arguments.run, processes)?;
    if !matches!(run.config.data, Data::Parallel(_)) {
        let RunArguments { folder, config, .. } = &arguments.run;
        return Err(CliError::Usage(format!(
            "{}: its model does not translate (data.kind = {}): give the run of a translation \
            model",
            folder.as_ref().or(config.as_ref()).map_or(Path::new(""), PathBuf::as_path).display(),
            run.config.shown("data.kind")?
        )));
    }
    let vocabulary = TranslationVocabulary::from_tokenizer(run.vocabulary.tokenizer()?.clone())?;
    vocabulary.tag(&arguments.from)?; // before the weights are read
    let translator = Translator::new(&run.config, &vocabulary, &arguments.search, arguments.batch)?;
    let mut pipeline = run.pipeline(processes)?;
    // Of several processes, rank 0 reads and prints.
    let deadline = Duration::from_secs(run.config.pipeline.timeout_s);
    let patience = SIGN_OF_LIFE.min(deadline / 2);
    let mut source = processes.is_first().then(|| Source::new(arguments.batch, patience));
    loop {
        let next = processes.decided(|| Ok(source.as_mut().map_or(Next::End, Source::next)))?;
        let (texts, first, failed) = match next {
            Next::Waiting => continue,
            Next::End => return Ok(()),
            Next::Lines { texts, first, failed } => (texts, first, failed),
        };
        let sentences: Vec<&str> = texts.iter().map(String::as_str).collect();
        let translated = translator.translate(&mut pipeline, &arguments.from, &sentences, first)?;
        if !processes.decided(|| show(&translated))? {
            return Ok(());
        }
        if let Some(reason) = failed {
            return Err(CliError::Usage(reason));
        }
    }
}

/// What to translate next.
#[derive(Serialize, Deserialize)]
enum Next {
    /// No line has arrived for a while.
    Waiting,
    End,
    /// Lines that have arrived, the number of the first, and why the line after them failed, if it
    /// did.
    Lines {
        texts: Vec<String>,
        first: u64,
        failed: Option<String>,
    },
}

/// Standard input.
struct Source {
    lines: Receiver<Result<Line, std::io::Error>>,
    batch: usize,
    /// How long to wait for a line.
    patience: Duration,
    /// Number of lines so far.
    number: u64,
}

impl Source {
    fn new(batch: usize, patience: Duration) -> Self {
        Self { lines: lines(batch), batch, patience, number: 0 }
    }

    /// The lines that have arrived, without waiting for more.
    fn next(&mut self) -> Next {
        // A timeout makes this process tell the others, which wait for it, that it is alive.
        let next = match self.lines.recv_timeout(self.patience) {
            Ok(next) => next,
            Err(RecvTimeoutError::Timeout) => return Next::Waiting,
            Err(RecvTimeoutError::Disconnected) => return Next::End,
        };
        let rest = std::iter::from_fn(|| self.lines.try_recv().ok()).take(self.batch - 1);
        let (mut texts, mut failed) = (Vec::new(), None);
        let first = self.number + 1;
        for line in std::iter::once(next).chain(rest) {
            self.number += 1;
            match text(line, self.number) {
                Ok(text) => texts.push(text),
                Err(error) => {
                    failed = Some(error.to_string());
                    break;
                }
            }
        }
        Next::Lines { texts, first, failed }
    }
}

/// Converts a line to text.
fn text(line: Result<Line, std::io::Error>, number: u64) -> Result<String, CliError> {
    let Line { mut text, cut } = line.map_err(io(Path::new("the standard input")))?;
    if cut {
        complain!(
            "gpipe: warning: line {number} has more than {LINE_BYTES_MAX} bytes; the rest of it \
            is passed over"
        );
        // The cut may be inside a character.
        while text.last().is_some_and(|byte| byte & 0xC0 == 0x80) {
            text.pop();
        }
        if text.last().is_some_and(|byte| *byte >= 0x80) {
            text.pop();
        }
    }
    let text = String::from_utf8(text).map_err(|error| {
        let byte = error.utf8_error().valid_up_to() + 1;
        CliError::Usage(format!(
            "the standard input, line {number}: no UTF-8 at byte {byte}: convert it, for example \
            with `iconv -t UTF-8`"
        ))
    })?;
    Ok(if number == 1 { without_mark(text) } else { text })
}

/// Reads the lines of standard input on a separate thread, at most `ahead` of them in advance.
fn lines(ahead: usize) -> Receiver<Result<Line, std::io::Error>> {
    let (sender, receiver) = sync_channel(ahead.max(1));
    let reading = sender.clone();
    let read = move || {
        let (mut input, sender) = (std::io::stdin().lock(), reading);
        loop {
            let line = read_line(&mut input).transpose();
            let Some(line) = line else { return };
            let is_error = line.is_err();
            if sender.send(line).is_err() || is_error {
                return;
            }
        }
    };
    if let Err(error) = thread::Builder::new().spawn(read) {
        // There is room, because nobody else sends.
        let _ = sender.try_send(Err(error));
    }
    receiver
}

/// The next line without its end. `None` at the end of the input.
fn read_line(input: &mut impl BufRead) -> std::io::Result<Option<Line>> {
    let (mut text, mut cut, mut any) = (Vec::new(), false, false);
    loop {
        let part = match input.fill_buf() {
            Ok(part) => part,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if part.is_empty() {
            return Ok(any.then_some(Line { text, cut }));
        }
        any = true;
        let end = part.iter().position(|&byte| byte == b'\n');
        let own = &part[..end.unwrap_or(part.len())];
        let room = LINE_BYTES_MAX - text.len();
        cut |= own.len() > room;
        text.extend_from_slice(&own[..own.len().min(room)]);
        let used = end.map_or(part.len(), |end| end + 1);
        input.consume(used);
        if end.is_some() {
            return Ok(Some(Line { text, cut }));
        }
    }
}

/// Prints lines. Returns false if the reader is gone.
fn show(lines: &[String]) -> Result<bool, CliError> {
    let mut stdout = std::io::stdout().lock();
    let written =
        lines.iter().try_for_each(|line| writeln!(stdout, "{line}")).and_then(|()| stdout.flush());
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(io(Path::new("the standard output"))(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_lines_are_read_as_they_are_and_no_longer_than_the_bound() {
        let long = "x".repeat(LINE_BYTES_MAX + 5);
        let text = format!("a\n\nb\r\n{long}\nlast");
        let mut input = std::io::BufReader::with_capacity(7, text.as_bytes());
        let mut lines = Vec::new();
        while let Some(line) = read_line(&mut input).unwrap() {
            lines.push((line.text, line.cut));
        }
        assert_eq!(lines.len(), 5);
        assert_eq!(lines[0], (b"a".to_vec(), false));
        assert_eq!(lines[1], (Vec::new(), false));
        assert_eq!(lines[2], (b"b\r".to_vec(), false));
        assert_eq!((lines[3].0.len(), lines[3].1), (LINE_BYTES_MAX, true));
        assert_eq!(lines[4], (b"last".to_vec(), false));
    }

    #[test]
    fn fault_a_line_in_another_charset_is_named() {
        let line = |text: &[u8], cut| Ok(Line { text: text.to_vec(), cut });
        let error = text(line(b"caf\xe9", false), 7).unwrap_err().to_string();
        assert!(error.contains("line 7") && error.contains("byte 4"), "{error}");
        assert_eq!(text(line("caf\u{e9}".as_bytes(), false), 1).unwrap(), "caf\u{e9}");
        // The byte order mark became a part of the first sentence.
        assert_eq!(text(line("\u{feff}a".as_bytes(), false), 1).unwrap(), "a");
        assert_eq!(text(line("\u{feff}a".as_bytes(), false), 2).unwrap(), "\u{feff}a");
        // A cut inside a character loses that character and nothing else.
        assert_eq!(text(line(b"caf\xc3", true), 1).unwrap(), "caf");
    }
}
