//! Reads JSONL files as samples, or takes the samples from the cache.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use gpipe_data::{
    Tokenizer,
    jsonl::{Encoded, Encoder, Fields, OnBadLine, Samples},
};

use super::counted;
use crate::{
    CliError,
    config::{JsonlConfig, OnBadLineChoice},
    files::io,
    progress::Work,
    task::{Vocabulary, cache, template::Template},
};

/// Maximum number of skipped lines that are listed.
const LISTED_MAX: usize = 5;

/// The encoder of lines that `[data]` describes.
pub(super) fn encoder<'a>(data: &JsonlConfig, template: Option<&'a Template>) -> Encoder<'a> {
    let names = data.fields.clone();
    Encoder {
        template: template.map(|own| &own.compiled),
        fields: Fields {
            text: names.text,
            prompt: names.prompt,
            completion: names.completion,
            messages: names.messages,
        },
        on_bad_line: match data.on_bad_line {
            OnBadLineChoice::Stop => OnBadLine::Stop,
            OnBadLineChoice::Skip => OnBadLine::Skip,
        },
    }
}

/// Reads files as samples, or takes the samples from the cache.
pub(super) struct Reader<'a> {
    encoder: Encoder<'a>,
    tokenizer: &'a Tokenizer,
    /// The cache folder, if samples are cached.
    cache: Option<PathBuf>,
    /// Everything except the file that samples depend on: tokenizer, template and field names.
    settings: Vec<Vec<u8>>,
    left_out: u64,
    bad: Vec<String>,
}

impl<'a> Reader<'a> {
    pub fn new(
        data: &JsonlConfig,
        vocabulary: &'a Vocabulary,
        template: Option<&'a Template>,
    ) -> Result<Self, CliError> {
        let cache = cache::folder(&data.cache);
        let encoder = encoder(data, template);
        let tokenizer = vocabulary.tokenizer()?;
        let mut settings = vec![tokenizer.to_json()?.into_bytes()];
        settings.push(tokenizer.end_of_document().to_le_bytes().to_vec());
        if let Some(Template { source, tokens, .. }) = template {
            settings.push(source.clone().into_bytes());
            settings.push(format!("{tokens:?}").into_bytes());
        }
        settings.push(format!("{:?}", encoder.fields).into_bytes());
        Ok(Self { encoder, tokenizer, cache, settings, left_out: 0, bad: Vec::new() })
    }

    /// The samples of all files in `paths`, in order.
    pub fn samples(&mut self, paths: &[PathBuf]) -> Result<Samples, CliError> {
        let mut all = Samples::default();
        for path in paths {
            let Encoded { samples, left_out, bad } = self.encoded(path)?;
            all.append(&samples);
            self.left_out += left_out;
            let listed = bad
                .into_iter()
                .map(|bad| format!("{}, line {}: {}", bad.path.display(), bad.line, bad.reason));
            self.bad.extend(listed.take(LISTED_MAX - self.bad.len().min(LISTED_MAX)));
        }
        Ok(all)
    }

    fn encoded(&self, path: &Path) -> Result<Encoded, CliError> {
        let state = || -> Result<(u64, SystemTime), CliError> {
            let own = fs::metadata(path).and_then(|own| Ok((own.len(), own.modified()?)));
            own.map_err(io(path))
        };
        let before = state()?;
        let kept = match &self.cache {
            None => None,
            Some(folder) => Some(folder.join(self.key(path)?)),
        };
        if let Some(samples) = kept.as_deref().and_then(Samples::kept) {
            return Ok(Encoded { samples, ..Encoded::default() });
        }
        let progress = Work::new(path.display().to_string(), before.0);
        let encoded = self.encoder.encode(path, self.tokenizer, |bytes| progress.tell(bytes))?;
        drop(progress);
        // If the file changed meanwhile, the key is not that of its samples. Skipped lines are
        // listed in every run.
        if let Some(kept) = kept
            && state()? == before
            && encoded.left_out == 0
        {
            cache::tell(&kept, encoded.samples.keep(&kept));
        }
        Ok(encoded)
    }

    fn key(&self, path: &Path) -> Result<String, CliError> {
        let mut key = cache::key();
        for setting in &self.settings {
            key = key.with(setting);
        }
        Ok(key.with_file(path).map_err(io(path))?.name())
    }

    /// Appends the number of skipped lines to `text`, and lists the first of them.
    pub fn tell_skipped(&self, text: &mut String) {
        if self.left_out == 0 {
            return;
        }
        let _ = writeln!(
            text,
            "skipped {} (data.on_bad_line = \"skip\")",
            counted(self.left_out, "invalid line")
        );
        for bad in &self.bad {
            let _ = writeln!(text, "  {bad}");
        }
        let more = self.left_out - self.bad.len() as u64;
        if more > 0 {
            let _ = writeln!(text, "  and {more} more");
        }
    }
}
