//! `[data]`: the data to learn from, by `kind`; `[images]`: how images are read, augmented and
//! presented.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize, de::Error};

use super::kind::{DATA, KINDS_ARE, with_kind};
use crate::values::{
    CacheChoice, CropChoice, JsonChoice, MostBytes, OnBadLineChoice, OnUnreadableChoice,
    PackingChoice, TokenizerChoice, as_text,
};

/// The data to learn from. The other keys of the table depend on `kind`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Data {
    /// Plain text, for a transformer.
    Text(TextConfig),
    /// JSONL: texts, prompts with completions, or conversations.
    Jsonl(JsonlConfig),
    /// Sentences with English translations, for a translation model.
    Parallel(ParallelConfig),
    /// A folder of images for each class.
    ImageFolder(ImageFolderConfig),
    /// CIFAR-10.
    Cifar10(CifarConfig),
    /// CIFAR-100.
    Cifar100(CifarConfig),
}

/// Plain text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TextConfig {
    /// Files or folders of UTF-8 text to learn from. An empty list reads the sources of the crates
    /// in `cargo_lock`, as cargo fetched them. A single text file may have at most 1 GiB.
    pub text: Vec<PathBuf>,
    /// Path of the `Cargo.lock` that names the crates to learn from when `text` is empty.
    pub cargo_lock: PathBuf,
    /// How to treat JSON files. `refuse` makes them an error, `text` reads them as plain text, and
    /// `skip` leaves out those in folders.
    #[serde(with = "as_text")]
    pub json: JsonChoice,
    /// Where the tokenizer comes from. `auto` keeps that of the weights named by `--init`, and
    /// without such weights trains a new one. `new` always trains a new one. Any other value is the
    /// path of a `tokenizer.json`.
    #[serde(with = "as_text")]
    pub tokenizer: TokenizerChoice,
    /// Length of a sample, in tokens.
    pub sequence: usize,
    /// Whether to join the training documents in an order drawn from the seed instead of by name.
    pub shuffle_documents: bool,
    /// Maximum amount of training text, such as `16MiB`. `all` sets no limit.
    #[serde(with = "as_text")]
    pub train_bytes: MostBytes,
    /// Maximum amount of validation text, such as `1MiB`. `all` sets no limit.
    #[serde(with = "as_text")]
    pub validation_bytes: MostBytes,
    /// Maximum amount of text taken from one crate, such as `1MiB`. `all` sets no limit.
    #[serde(with = "as_text")]
    pub crate_bytes: MostBytes,
    /// Folder in which tokens are cached for later runs, keyed by the content of the data and by
    /// the settings that they depend on. `auto` is `gpipe/tokens` in the user's cache folder. `off`
    /// caches nothing.
    #[serde(with = "as_text")]
    pub cache: CacheChoice,
}

/// JSONL, each line a sample: a text, a prompt with its completion, or the messages of a
/// conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct JsonlConfig {
    /// JSONL files to train on: one JSON object per line.
    pub files: Vec<PathBuf>,
    /// Files to mix by weight, in place of `files`: `[[data.sources]]` with `path` and `weight`.
    pub sources: Vec<SourceConfig>,
    /// Files to validate on. An empty list holds out `validation_share` of the samples.
    pub validation: Vec<PathBuf>,
    /// Fraction of the samples that is held out for validation when `validation` is empty.
    pub validation_share: f64,
    /// Names of the fields in a line: `data.fields.text`, `data.fields.prompt`,
    /// `data.fields.completion` and `data.fields.messages`. Each defaults to the last part of its
    /// key.
    pub fields: FieldsConfig,
    /// Path of the chat template that renders messages as text. Empty means the template in the
    /// tokenizer's folder.
    pub chat_template: PathBuf,
    /// Where the tokenizer comes from. `auto` keeps that of the weights named by `--init`, and
    /// without such weights trains a new one. `new` always trains a new one. Any other value is the
    /// path of a `tokenizer.json`.
    #[serde(with = "as_text")]
    pub tokenizer: TokenizerChoice,
    /// Length of a row, in tokens. With `--from` the default is 512, or the number of the model's
    /// positions if that is smaller.
    pub sequence: usize,
    /// How samples are packed into rows. `separate` packs several into a row, and they do not
    /// attend to each other. `joined` packs, too, but later samples attend to earlier ones. `none`
    /// gives each sample a row. `auto` is `separate` for models of the Llama family and `none` for
    /// other models.
    #[serde(with = "as_text")]
    pub packing: PackingChoice,
    /// Whether each row is a text that comes from elsewhere, without padding.
    #[serde(skip)]
    pub texts_only: bool,
    /// What to do with an invalid line. `stop` ends the command and names the line. `skip` skips
    /// invalid lines and counts them.
    #[serde(with = "as_text")]
    pub on_bad_line: OnBadLineChoice,
    /// Folder in which tokens are cached for later runs, keyed by the content of the file, the
    /// tokenizer and the template. `auto` is `gpipe/tokens` in the user's cache folder. `off`
    /// caches nothing.
    #[serde(with = "as_text")]
    pub cache: CacheChoice,
}

/// A JSONL file and its weight in the mixture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SourceConfig {
    /// Path of the file.
    pub path: PathBuf,
    /// Weight of the file. Its share of the training samples is the weight divided by the sum of
    /// all weights.
    pub weight: f64,
}

/// Names of the fields in a line of JSONL.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct FieldsConfig {
    /// Field of a text. All its tokens are in the loss.
    pub text: String,
    /// Field of a prompt, which is not in the loss.
    pub prompt: String,
    /// Field of the completion of a prompt, which is in the loss.
    pub completion: String,
    /// Field of a conversation: a list of objects with the strings `role` and `content`. The
    /// assistant's messages are in the loss.
    pub messages: String,
}

/// Sentences and their English translations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ParallelConfig {
    /// Folder with a file `LANGUAGE.tsv` or `LANGUAGE.tsv.gz` for each language, as `make
    /// catalogues` writes them. Empty means no folder.
    pub folder: PathBuf,
    /// Files of `sentence<TAB>translation` lines, plain or gzip: `[[data.tsv]]` with `language` and
    /// `path`.
    pub tsv: Vec<TsvConfig>,
    /// Pairs of files whose lines correspond, plain or gzip: `[[data.lines]]` with `language`,
    /// `source` and `target`.
    pub lines: Vec<LinesConfig>,
    /// Where the tokenizer comes from. `auto` keeps that of the weights named by `--init`, and
    /// without such weights trains a new one. `new` always trains a new one. Any other value is the
    /// path of a `tokenizer.json`.
    #[serde(with = "as_text")]
    pub tokenizer: TokenizerChoice,
    /// Codes of the languages to learn from. An empty list keeps all of them.
    pub languages: Vec<String>,
    /// Fraction of the English sentences that are held out for validation.
    pub validation_share: f64,
    /// Maximum number of pairs per language that a validation measures. 0 measures all.
    pub validation_pairs: usize,
    /// Maximum number of pairs per language. 0 keeps all.
    pub most_pairs: usize,
    /// Minimum number of pairs per language. A language with fewer is left out.
    pub min_pairs: usize,
    /// Maximum length of a sentence, in bytes. Pairs with a longer sentence are left out.
    pub sentence_bytes: usize,
    /// Maximum length ratio between the two sides of a pair. Other pairs are left out.
    pub ratio: f64,
    /// Maximum length of a sentence, in tokens. Longer pairs are left out.
    pub length: usize,
    /// Approximate size of a mini-batch, in target tokens.
    pub batch_tokens: usize,
    /// Temperature T of the language mixture: languages are drawn in proportion to the 1/T-th power
    /// of their number of pairs. 1 draws them by size, and higher values favor small languages.
    pub temperature: f64,
    /// Folder in which tokens are cached for later runs, keyed by the content of the data and by
    /// the settings that they depend on. `auto` is `gpipe/tokens` in the user's cache folder. `off`
    /// caches nothing.
    #[serde(with = "as_text")]
    pub cache: CacheChoice,
}

/// A file of sentence pairs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TsvConfig {
    /// Language code of the sentences, such as `de`.
    pub language: String,
    /// Path of the file, plain or gzip.
    pub path: PathBuf,
}

/// A file of sentences and a file of their translations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LinesConfig {
    /// Language code of the source sentences, such as `de`.
    pub language: String,
    /// Path of the file with one sentence per line, plain or gzip.
    pub source: PathBuf,
    /// Path of the file with the English translations, line by line, plain or gzip.
    pub target: PathBuf,
}

/// A folder with one folder of JPEG and PNG files per class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ImageFolderConfig {
    /// Folder with one folder per class, which holds the JPEG and PNG files of that class.
    pub folder: PathBuf,
    /// Folder of the same layout to validate on. Without it, `validation_share` of `folder` is held
    /// out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<PathBuf>,
    /// Fraction of `folder` that is held out for validation when `validation` is not set.
    pub validation_share: f64,
}

/// The binary version of CIFAR.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct CifarConfig {
    /// Folder with the files of the binary version of CIFAR.
    pub folder: PathBuf,
}

/// How images are read, augmented and presented to the network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ImagesConfig {
    /// Height and width of the network's input, in pixels.
    pub size: usize,
    /// Length that evaluation scales an image's shorter side to, in pixels, before it crops the
    /// center. 0 scales it to `size`.
    pub resize: usize,
    /// What training crops. `none` crops as evaluation does. `padded:N` moves that crop by up to N
    /// pixels. `resized:S` takes at least a fraction S of the area, with an aspect ratio from 3/4
    /// to 4/3.
    #[serde(with = "as_text")]
    pub crop: CropChoice,
    /// Probability that training mirrors an image.
    pub flip: f64,
    /// Side of the square that training blanks, in pixels. 0 turns cutout off.
    pub cutout: usize,
    /// Maximum rotation in training, in degrees, in either direction.
    pub degrees: f64,
    /// Minimum and maximum scale factor in training.
    pub scale: [f64; 2],
    /// Minimum and maximum shear in training: the shift of the top to the right, relative to the
    /// height.
    pub shear: [f64; 2],
    /// Maximum translation in training along each axis, as a fraction of the image's side.
    pub translate: f64,
    /// Minimum fraction of the range of values that training keeps. 1 keeps the whole range.
    pub contrast: f64,
    /// Probability that training inverts dark and light.
    pub invert: f64,
    /// Mean of the red, green and blue channels, from 0 to 1, which is subtracted from each image.
    pub mean: [f32; 3],
    /// Standard deviation of the red, green and blue channels, from 0 to 1, which divides each
    /// image.
    pub std: [f32; 3],
    /// What to do with an image that cannot be read. `stop` ends the command. `skip` names the
    /// image; training then takes the next one, and evaluation leaves it out.
    #[serde(with = "as_text")]
    pub on_unreadable: OnUnreadableChoice,
    /// Number of threads that read and transform images.
    pub threads: usize,
    /// Maximum number of images that a validation during training measures. 0 measures all.
    pub validation_images: usize,
}

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (kind, rest) = with_kind(deserializer, "text")?;
        match kind.as_str() {
            "text" => rest.try_into().map(Self::Text),
            "jsonl" => rest.try_into().map(Self::Jsonl),
            "parallel" => rest.try_into().map(Self::Parallel),
            "image-folder" => rest.try_into().map(Self::ImageFolder),
            "cifar10" => rest.try_into().map(Self::Cifar10),
            "cifar100" => rest.try_into().map(Self::Cifar100),
            _ => {
                return Err(Error::custom(format!("'{kind}' {KINDS_ARE} {}", DATA.join(", "))));
            }
        }
        .map_err(Error::custom)
    }
}

impl Default for Data {
    fn default() -> Self {
        Self::Text(TextConfig::default())
    }
}

impl Default for TextConfig {
    fn default() -> Self {
        Self {
            text: Vec::new(),
            cargo_lock: "configs/text/Cargo.lock".into(),
            json: JsonChoice::Refuse,
            tokenizer: TokenizerChoice::Auto,
            sequence: 128,
            shuffle_documents: false,
            train_bytes: MostBytes::All,
            validation_bytes: MostBytes::All,
            crate_bytes: MostBytes::All,
            cache: CacheChoice::Auto,
        }
    }
}

impl Default for JsonlConfig {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            sources: Vec::new(),
            validation: Vec::new(),
            validation_share: 0.05,
            fields: FieldsConfig::default(),
            chat_template: PathBuf::new(),
            tokenizer: TokenizerChoice::Auto,
            sequence: 512,
            packing: PackingChoice::Auto,
            texts_only: false,
            on_bad_line: OnBadLineChoice::Stop,
            cache: CacheChoice::Auto,
        }
    }
}

impl Default for FieldsConfig {
    fn default() -> Self {
        let [text, prompt, completion, messages] =
            ["text", "prompt", "completion", "messages"].map(str::to_owned);
        Self { text, prompt, completion, messages }
    }
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self {
            folder: PathBuf::new(),
            tsv: Vec::new(),
            lines: Vec::new(),
            tokenizer: TokenizerChoice::Auto,
            languages: Vec::new(),
            validation_share: 0.02,
            validation_pairs: 300,
            most_pairs: 0,
            min_pairs: 1000,
            sentence_bytes: 300,
            ratio: 3.0,
            length: 64,
            batch_tokens: 4096,
            temperature: 5.0,
            cache: CacheChoice::Auto,
        }
    }
}

impl Default for ImageFolderConfig {
    fn default() -> Self {
        Self { folder: PathBuf::new(), validation: None, validation_share: 0.1 }
    }
}

impl Default for ImagesConfig {
    /// Mean and standard deviation are ImageNet's.
    fn default() -> Self {
        Self {
            size: 224,
            resize: 0,
            crop: CropChoice::None,
            flip: 0.0,
            cutout: 0,
            degrees: 0.0,
            scale: [1.0, 1.0],
            shear: [0.0, 0.0],
            translate: 0.0,
            contrast: 1.0,
            invert: 0.0,
            mean: [0.485, 0.456, 0.406],
            std: [0.229, 0.224, 0.225],
            on_unreadable: OnUnreadableChoice::Stop,
            threads: 2,
            validation_images: 0,
        }
    }
}
