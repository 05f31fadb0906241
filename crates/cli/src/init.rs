//! `gpipe init`: looks at data, and writes a configuration that trains on them at once.

mod jsonl;

use std::{
    ffi::OsStr,
    fmt, fs,
    io::Read,
    path::{Path, PathBuf},
};

use gpipe::Bytes;
use gpipe_data::{
    images::{ImageFolder, ImageSet},
    is_json,
};

use crate::{
    CliError,
    args::{ConfigArguments, InitArguments},
    config::Config,
    files::{io, write_aside},
    machine,
    model_folder::is_model_folder,
    numbers::counted,
    output::{complain, say},
    setup,
    task::classification,
};
use jsonl::{Fields, fields};

/// Maximum number of files and folders that are looked at, as for folders of images.
const ENTRIES_MAX: usize = 1 << 24;
/// The most images of a set that are decoded: some seconds for large photographs.
const DECODED_MAX: usize = 200;
/// Number of leading bytes by which a text is told from a binary file.
const PROBE_BYTES: u64 = 8 << 10;
/// Maximum depth of folders that are looked at.
const DEPTH_MAX: usize = 16;
/// Maximum number of JSONL files that a configuration names.
const FILES_MAX: usize = 1000;
/// Least text to learn from.
const TEXT_BYTES_MIN: u64 = 10_000;
/// Below this, a text gets a small vocabulary: few words repeat.
const TEXT_BYTES_SMALL: u64 = 1 << 20;
/// Names of folders of images to train on, and of those to validate on.
const TRAIN: [&str; 2] = ["train", "training"];
const VALIDATION: [&str; 4] = ["val", "valid", "validation", "test"];
/// What the data are.
enum Found {
    Text { files: usize, bytes: u64, has_json: bool },
    Jsonl { files: Vec<PathBuf>, bytes: u64, fields: Fields },
    Images { train: PathBuf, validation: Option<PathBuf>, classes: usize, images: usize },
    Pairs { languages: usize },
    Model,
}

/// Looks at the data, writes the configuration, and says what to run.
pub(crate) fn run(arguments: &InitArguments) -> Result<(), CliError> {
    let data = &arguments.data;
    let Some(shown) = data.to_str() else {
        return refused(
            data,
            "its name is not UTF-8, which a configuration cannot hold: rename it",
        );
    };
    if !data.exists() {
        return refused(data, "there is no such file or folder: correct the path");
    }
    let out = match &arguments.out {
        Some(out) => out.clone(),
        None => named_after(data)?,
    };
    if out.exists() {
        return refused(&out, "it exists already: remove it, or name another file with --out");
    }
    let found = find(data)?;
    let text = configuration(shown, &found);
    if !matches!(found, Found::Model | Found::Jsonl { fields: Fields::Messages, .. }) {
        // A configuration that does not train would be worse than none.
        setup::check(&Config::from_text(&text, &out, &ConfigArguments::default())?, None)?;
    }
    write_aside(&out, &text)?;
    tell(data, &out, &found);
    Ok(())
}

fn refused<T>(path: &Path, reason: &str) -> Result<T, CliError> {
    Err(CliError::Usage(format!("{}: {reason}", path.display())))
}

/// The name of the configuration of `data`, in the current folder.
fn named_after(data: &Path) -> Result<PathBuf, CliError> {
    let absolute = fs::canonicalize(data).map_err(io(data))?;
    let name = absolute.file_stem().unwrap_or(OsStr::new("data")).to_string_lossy().into_owned();
    Ok(PathBuf::from(format!("{name}.toml")))
}

/// Files of a folder by their kind.
#[derive(Default)]
struct Files {
    jsonl: Vec<PathBuf>,
    jsonl_bytes: u64,
    images: usize,
    pairs: usize,
    /// JSON files that are not JSONL, which are no text.
    json: usize,
    others: usize,
    other_bytes: u64,
    entries: usize,
}

impl Files {
    /// Adds what is in `folder`, but nothing hidden.
    fn add(&mut self, folder: &Path, depth: usize) -> Result<(), CliError> {
        for entry in fs::read_dir(folder).map_err(io(folder))? {
            let path = entry.map_err(io(folder))?.path();
            self.entries += 1;
            if self.entries > ENTRIES_MAX {
                return refused(
                    folder,
                    "there are more than 16 million files: name a part of them",
                );
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
            let Ok(metadata) = path.metadata() else { continue };
            if name.starts_with('.') {
                continue;
            }
            let is_link = path.is_symlink();
            if metadata.is_dir() {
                if depth < DEPTH_MAX && !is_link {
                    self.add(&path, depth + 1)?;
                }
                continue;
            }
            if !metadata.is_file() {
                continue; // to open a named pipe would wait for its other end
            }
            let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
            if is_jsonl(&path) {
                self.jsonl.push(path);
                self.jsonl_bytes += metadata.len();
            } else if ends(&[".jpg", ".jpeg", ".png"]) {
                self.images += 1;
            } else if ends(&[".tsv", ".tsv.gz"]) && depth == 0 {
                self.pairs += 1;
            } else if is_json(&path) {
                self.json += 1;
            } else if !is_link && is_text(&path)? {
                self.others += 1;
                self.other_bytes += metadata.len();
            }
        }
        Ok(())
    }
}

fn is_jsonl(path: &Path) -> bool {
    let end = path.extension().unwrap_or_default();
    ["jsonl", "ndjson"].iter().any(|known| end.eq_ignore_ascii_case(known))
}

/// Whether a file is text, and not a binary file, which training leaves out.
///
/// # Errors
/// It is text in another encoding than UTF-8, which training refuses.
fn is_text(path: &Path) -> Result<bool, CliError> {
    let mut bytes = Vec::new();
    let file = gpipe_files::open(path).map_err(|error| io(path)(error.into()))?;
    file.take(PROBE_BYTES).read_to_end(&mut bytes).map_err(io(path))?;
    if bytes.contains(&0) {
        return Ok(false);
    }
    match std::str::from_utf8(&bytes) {
        Err(error) if error.error_len().is_some() => refused(
            path,
            "it is text, but not UTF-8: convert it, for example with iconv -f ISO-8859-2 -t \
            UTF-8, or move it elsewhere",
        ),
        _ => Ok(true),
    }
}

/// Finds out what the data are.
fn find(data: &Path) -> Result<Found, CliError> {
    let mut files = Files::default();
    if data.is_dir() {
        if is_model_folder(data) {
            return Ok(Found::Model);
        }
        files.add(data, 0)?;
    } else {
        let bytes = data.metadata().map_err(io(data))?.len();
        match is_jsonl(data) {
            true => (files.jsonl, files.jsonl_bytes) = (vec![data.to_owned()], bytes),
            false if is_json(data) => {
                return refused(
                    data,
                    "it is JSON, which is no text: write it as JSONL, one object on each line",
                );
            }
            false if is_text(data)? => (files.others, files.other_bytes) = (1, bytes),
            false => {}
        }
    }
    if files.images > files.others + files.jsonl.len() {
        return images(data);
    }
    if files.pairs > 0 && files.jsonl.is_empty() && files.pairs >= files.others {
        return Ok(Found::Pairs { languages: files.pairs });
    }
    if files.jsonl_bytes > files.other_bytes {
        let (mut all, bytes) = (files.jsonl, files.jsonl_bytes);
        all.sort_unstable();
        if all.len() > FILES_MAX {
            return refused(data, "there are more than 1000 JSONL files: join some of them");
        }
        if let Some(odd) = all.iter().find(|path| path.to_str().is_none()) {
            return refused(odd, "its name is not UTF-8: rename it");
        }
        let fields = fields(&all[0])?;
        return Ok(Found::Jsonl { files: all, bytes, fields });
    }
    match files.other_bytes {
        0 => refused(
            data,
            "it holds nothing to learn from: give a folder of text, of JSONL, of a folder of \
            images (JPEG or PNG) for each class, or of pairs of sentences (LANGUAGE.tsv)",
        ),
        bytes if bytes < TEXT_BYTES_MIN => {
            refused(data, &format!("{bytes} bytes of text are too few: give at least 10,000"))
        }
        bytes => {
            let has_json = files.json + files.jsonl.len() > 0;
            Ok(Found::Text { files: files.others, bytes, has_json })
        }
    }
}

/// A folder of images for each class, or of a part of the data set in each.
fn images(data: &Path) -> Result<Found, CliError> {
    let part = |names: &[&str]| names.iter().map(|name| data.join(name)).find(|own| own.is_dir());
    let (train, validation) = match part(&TRAIN) {
        Some(train) => (train, part(&VALIDATION)),
        None => (data.to_owned(), None),
    };
    let set = ImageFolder::open(&train)?;
    classification::check_classes(&train.display().to_string(), set.classes())?;
    let (classes, images) = (set.classes().len(), set.len());
    tell_unreadable(&set);
    if let Some(validation) = &validation {
        tell_unreadable(&ImageFolder::with_classes(validation, set.classes())?);
    }
    Ok(Found::Images { train, validation, classes, images })
}

/// Decodes images, evenly spread over the set, and warns of those that training would stop at.
fn tell_unreadable(set: &ImageFolder) {
    let tried = set.len().min(DECODED_MAX);
    let chosen = (0..tried).map(|number| number * set.len() / tried);
    let failed: Vec<_> = chosen.filter_map(|index| set.image(index).err()).collect();
    if let Some(first) = failed.first() {
        complain!(
            "gpipe: warning: of {} that were tried, {} cannot be read; the first: {first}",
            counted(tried, "image"),
            failed.len()
        );
    }
}

/// Recipes with `{names}` in the place of what depends on the data.
const TEXT: &str = include_str!("init/text.toml");
const IMAGES: &str = include_str!("init/images.toml");
const PAIRS: &str = include_str!("init/pairs.toml");
const ADAPTERS: &str = include_str!("init/adapters.toml");

/// The text of the configuration, with comments.
fn configuration(data: &str, found: &Found) -> String {
    let stages = machine::cores().clamp(1, 2).to_string();
    let data = quoted(data);
    let (what, lines) = (found.to_string(), found.lines(&data));
    let command = format!("gpipe train FILE.toml{}", found.flags(&data));
    let (recipe, own) = match found {
        Found::Text { bytes, .. }
        | Found::Jsonl { bytes, fields: Fields::Prompt(..), .. }
        | Found::Jsonl { bytes, fields: Fields::Text, .. } => {
            let vocabulary = if *bytes < TEXT_BYTES_SMALL { 1024 } else { 4096 };
            (TEXT, ("vocabulary", vocabulary.to_string()))
        }
        Found::Images { images, .. } => {
            (IMAGES, ("mini_batch", (images / 2).clamp(4, 32).to_string()))
        }
        Found::Pairs { .. } => (PAIRS, ("", String::new())),
        Found::Jsonl { .. } | Found::Model => (ADAPTERS, ("command", command)),
    };
    filled(
        recipe,
        &[
            ("data", &data),
            ("found", &what),
            ("lines", &lines),
            ("stages", &stages),
            (own.0, &own.1),
        ],
    )
}

/// `recipe` with each `{name}` replaced. What takes a place is not looked at again.
fn filled(recipe: &str, values: &[(&str, &str)]) -> String {
    let mut text = String::new();
    let mut rest = recipe;
    while let Some((before, (name, after))) =
        rest.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)))
    {
        text += before;
        text += values.iter().find(|(own, _)| *own == name).map_or("", |(_, value)| *value);
        rest = after;
    }
    text + rest
}

/// `text` as a string of TOML.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

impl Found {
    /// The lines of `[data]` that depend on the data. `data` is quoted.
    fn lines(&self, data: &str) -> String {
        match self {
            Self::Text { has_json: true, .. } => {
                format!("text = [{data}]\n# JSON files are no text.\njson = \"skip\"")
            }
            Self::Text { .. } => format!("text = [{data}]"),
            Self::Jsonl { files, fields, .. } => {
                let files = files.iter().map(|own| quoted(&own.to_string_lossy()));
                let files = files.collect::<Vec<_>>().join(", ");
                let files = format!("kind = \"jsonl\"\nfiles = [{files}]");
                match fields {
                    Fields::Text => files,
                    Fields::Prompt(prompt, completion) => format!(
                        "{files}\n# The completion is learned, the prompt is given.\n\
                        fields.prompt = {}\nfields.completion = {}",
                        quoted(prompt),
                        quoted(completion)
                    ),
                    Fields::Messages => format!("\n[data]\n{files}\n"),
                }
            }
            Self::Images { train, validation, .. } => {
                let held_out = match validation {
                    Some(own) => format!("validation = {}", quoted(&own.to_string_lossy())),
                    None => "# Fraction that is held out.\nvalidation_share = 0.1".to_owned(),
                };
                format!("folder = {}\n{held_out}", quoted(&train.to_string_lossy()))
            }
            Self::Pairs { .. } | Self::Model => String::new(),
        }
    }

    /// What `gpipe train` needs beside the configuration. `data` is quoted.
    fn flags(&self, data: &str) -> String {
        match self {
            Self::Jsonl { fields: Fields::Messages, .. } => " --from MODEL_FOLDER".to_owned(),
            Self::Model => format!(" --from {data} --data YOURS.jsonl"),
            _ => String::new(),
        }
    }

    /// What to do with the model of the run `run`.
    fn use_of(&self, run: &str) -> String {
        match self {
            Self::Images { .. } => format!("gpipe predict {run} IMAGE.png"),
            Self::Pairs { .. } => format!("gpipe translate {run} --from LANGUAGE < LINES.txt"),
            Self::Jsonl { fields: Fields::Messages, .. } => format!("gpipe generate {run} --chat"),
            Self::Jsonl { fields: Fields::Prompt(..), .. } => {
                format!("gpipe generate {run} --prompt 'a prompt like those of the data'")
            }
            _ => format!("gpipe generate {run} --prompt 'The '"),
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text { files, bytes, .. } => {
                write!(f, "text, {}, {}", counted(*files, "file"), Bytes(*bytes))
            }
            Self::Jsonl { files, bytes, .. } => {
                write!(f, "JSONL, {}, {}", counted(files.len(), "file"), Bytes(*bytes))
            }
            Self::Images { classes, images, .. } => {
                write!(f, "{images} images of {classes} classes")
            }
            Self::Pairs { languages } => {
                write!(f, "pairs of sentences in {}", counted(*languages, "language"))
            }
            Self::Model => f.write_str("a model as Hugging Face distributes it"),
        }
    }
}

/// Says what was found, and what to run.
fn tell(data: &Path, out: &Path, found: &Found) {
    let (shown, config) = (data.display(), out.display());
    let run = format!("out/{}", out.file_stem().unwrap_or_default().to_string_lossy());
    say!("{shown}: {found}");
    say!("written: {config}");
    say!("train:   gpipe train {config}{}", found.flags(&shown.to_string()));
    say!("then:    {}", found.use_of(&run));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The configuration of a folder with these files. It is read and checked.
    fn made(files: &[(&str, &str)]) -> Result<(String, Config), CliError> {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = folder.path().join("data").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let out = folder.path().join("made.toml");
        run(&InitArguments { data: folder.path().join("data"), out: Some(out.clone()) })?;
        let text = fs::read_to_string(&out).unwrap();
        let config = Config::from_text(&text, &out, &ConfigArguments::default())?;
        Ok((text, config))
    }

    const CHAT: &str = r#"{"messages": [{"role": "assistant", "content": "hi"}]}"#;

    #[test]
    fn oracle_each_kind_of_data_gets_its_configuration() {
        let long = "Some words. ".repeat(1000);
        for (files, kind) in [
            (vec![("a.txt", &long[..])], "kind = \"transformer\""),
            (vec![("a.txt", &long[..]), ("b.JSON", "{}")], "json = \"skip\""),
            (vec![("a.jsonl", "{\"text\": \"x\"}\n"), ("b.txt", "few")], "kind = \"jsonl\""),
            (vec![("a.JSONL", CHAT)], "--from MODEL_FOLDER\nseed"),
            (vec![("a.jsonl", "{\"instruction\": \"x\", \"output\": \"y\"}")], "\"instruction\""),
            (vec![("a.jsonl", "\u{feff}\n{\"text\": \"x\"}\n")], "kind = \"jsonl\""),
            (vec![("de.tsv", "Hallo\thello\n"), ("fr.tsv", "Salut\thello\n")], "\"parallel\""),
        ] {
            let (text, _) = made(&files).unwrap();
            assert!(text.contains(kind), "{text}");
        }
    }

    /// Its prompt was the instruction alone, without the input that it is about.
    const ALPACA: &str = r#"{"instruction": "Translate.", "input": "Hallo", "output": "Hello"}"#;
    const BOTH: &str = r#"{"prompt": "a", "completion": "b", "text": "ab"}"#;

    #[test]
    fn fault_what_cannot_be_learned_from_is_refused() {
        for (files, expected) in [
            (vec![("a.txt", "short")], "too few"),
            (vec![(".hidden", "x")], "nothing to learn from"),
            (vec![("a.jsonl", "\n[1]")], "line 2 is no JSON object"),
            (vec![("a.jsonl", "{\"body\": \"x\"}")], "the fields body"),
            (vec![("a.jsonl", ALPACA)], "has instruction and input beside output"),
            (vec![("a.jsonl", BOTH)], "line 1: it has several of text, prompt with completion"),
        ] {
            let error = made(&files).map(|(text, _)| text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// Configurations were written that training then refused: of one JSON file as text, and of
    /// links, which training leaves out of a folder of text.
    #[test]
    fn regression_no_configuration_is_made_of_what_training_refuses() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let error_of = |name| {
            run(&InitArguments { data: path(name), out: Some(path("made.toml")) }).unwrap_err()
        };
        for name in ["a.json", "notes.IPYNB"] {
            fs::write(path(name), "{}\n".repeat(10_000)).unwrap();
            let error = error_of(name).to_string();
            assert!(error.contains("it is JSON") && error.contains("as JSONL"), "{error}");
        }
        fs::create_dir(path("links")).unwrap();
        fs::write(path("long.txt"), "Some words. ".repeat(1000)).unwrap();
        std::os::unix::fs::symlink(path("long.txt"), path("links/long.txt")).unwrap();
        let error = error_of("links").to_string();
        assert!(error.contains("nothing to learn from"), "{error}");
    }
}
