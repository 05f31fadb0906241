//! Files of lines of JSON as samples, read or kept by an earlier run.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use gpipe_data::{
    Tokenizer,
    jsonl::{
        Encoded, Encoder, Fields, OnBadLine, Samples,
        cache::{self, Key},
    },
};

use super::counted;
use crate::{
    CliError,
    config::{CacheChoice, JsonlConfig, OnBadLineChoice},
    files::io,
    output::complain,
    progress::Reading,
    task::{Vocabulary, template::Template},
};

/// Lines that were left out and are listed.
const LISTED_MAX: usize = 5;

/// How lines become samples.
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

/// Reads files as samples, or takes them from an earlier run.
pub(super) struct Reader<'a> {
    encoder: Encoder<'a>,
    tokenizer: &'a Tokenizer,
    /// The folder of earlier samples.
    cache: Option<PathBuf>,
    /// What samples depend on besides the file.
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
        let cache = match &data.cache {
            CacheChoice::Off => None,
            CacheChoice::Folder(folder) => Some(folder.clone()),
            CacheChoice::Auto => default_cache(),
        };
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

    /// The samples of some files.
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
        if let Some(encoded) = kept.as_deref().and_then(cache::read) {
            return Ok(encoded);
        }
        let mut progress = Reading::new(path, before.0);
        let encoded = self.encoder.encode(path, self.tokenizer, |bytes| progress.tell(bytes))?;
        progress.finish();
        // A file that changed meanwhile is not what the key says.
        if let Some(kept) = kept
            && state()? == before
            && let Err(error) = cache::write(&kept, &encoded)
        {
            complain!("gpipe: warning: the tokens are not kept: {}: {error}", kept.display());
        }
        Ok(encoded)
    }

    fn key(&self, path: &Path) -> Result<String, CliError> {
        let mut key = Key::default();
        for setting in &self.settings {
            key = key.with(setting);
        }
        Ok(key.with_file(path).map_err(io(path))?.name())
    }

    /// Adds lines about the lines that were left out.
    pub fn tell_left_out(&self, text: &mut String) {
        if self.left_out == 0 {
            return;
        }
        let _ = writeln!(
            text,
            "left out {} (data.on_bad_line = \"skip\")",
            counted(self.left_out as usize, "bad line")
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

/// `gpipe/tokens` in the user's folder for caches. `None` if there is no such folder.
fn default_cache() -> Option<PathBuf> {
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let named = named.filter(|folder| folder.is_absolute());
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    Some(named.or_else(home)?.join("gpipe").join("tokens"))
}
