//! `[data]`: what is learned from, by `kind`; `[images]`: how images are read, changed and
//! presented.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize, de::Error};

use super::kind::{DATA, KINDS_ARE, with_kind};
use crate::values::{
    CropChoice, JsonChoice, MostBytes, OnUnreadableChoice, TokenizerChoice, as_text,
};

/// What is learned from. Its other keys depend on `kind`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Data {
    Text(TextConfig),
    Parallel(ParallelConfig),
    ImageFolder(ImageFolderConfig),
    Cifar10(CifarConfig),
    Cifar100(CifarConfig),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TextConfig {
    /// Files or folders; none: the sources of the crates in `cargo_lock`, as cargo fetched them.
    pub text: Vec<PathBuf>,
    pub cargo_lock: PathBuf,
    /// What is done with files of JSON.
    #[serde(with = "as_text")]
    pub json: JsonChoice,
    #[serde(with = "as_text")]
    pub tokenizer: TokenizerChoice,
    /// Tokens of a sample.
    pub sequence: usize,
    /// Whether training documents are joined in an order that the seed chooses, and not by name.
    pub shuffle_documents: bool,
    #[serde(with = "as_text")]
    pub train_bytes: MostBytes,
    #[serde(with = "as_text")]
    pub validation_bytes: MostBytes,
    #[serde(with = "as_text")]
    pub crate_bytes: MostBytes,
}

/// Sentences and their English translations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ParallelConfig {
    /// Folder of `LANGUAGE.tsv` or `LANGUAGE.tsv.gz` files, such as `make catalogues` makes; empty:
    /// none.
    pub folder: PathBuf,
    /// Files of `sentence<TAB>translation`, plain or gzip.
    pub tsv: Vec<TsvConfig>,
    /// Pairs of files with a sentence a line, plain or gzip.
    pub lines: Vec<LinesConfig>,
    #[serde(with = "as_text")]
    pub tokenizer: TokenizerChoice,
    /// The only languages; none: all.
    pub languages: Vec<String>,
    /// Share of the English sentences that are only validated on.
    pub validation_share: f64,
    /// Most validation pairs of a language that a validation measures; 0: all.
    pub validation_pairs: usize,
    /// Most pairs of a language; 0: all.
    pub most_pairs: usize,
    /// A language with fewer is left out.
    pub min_pairs: usize,
    /// Most bytes of a sentence.
    pub sentence_bytes: usize,
    /// Most times that one side may be as long as the other.
    pub ratio: f64,
    /// Most tokens of a sentence.
    pub length: usize,
    /// Target tokens of a mini-batch, about.
    pub batch_tokens: usize,
    /// Languages are drawn in proportion to the 1/temperature-th power of their pairs: 1: as they
    /// are; 5: small ones more often.
    pub temperature: f64,
}

/// A file of pairs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TsvConfig {
    pub language: String,
    pub path: PathBuf,
}

/// A file of sentences, and one of their translations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LinesConfig {
    pub language: String,
    pub source: PathBuf,
    pub target: PathBuf,
}

/// A folder for each class, in it its JPEG and PNG files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ImageFolderConfig {
    pub folder: PathBuf,
    /// Another such folder to validate on; none: a share of the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<PathBuf>,
    /// That share.
    pub validation_share: f64,
}

/// The binary version of CIFAR.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct CifarConfig {
    pub folder: PathBuf,
}

/// How images are read, changed and presented.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ImagesConfig {
    /// Height and width that the network sees.
    pub size: usize,
    /// Before the middle of an image is cut out in evaluation: its shorter side; 0: as `size`.
    pub resize: usize,
    /// What training cuts out.
    #[serde(with = "as_text")]
    pub crop: CropChoice,
    /// Probability that training mirrors an image.
    pub flip: f64,
    /// Side of the square that training blanks, in pixels; 0 for none.
    pub cutout: usize,
    /// Degrees that training turns an image, at most and either way.
    pub degrees: f64,
    /// Least and greatest scale in training.
    pub scale: [f64; 2],
    /// Least and greatest slant in training: how far the top moves to the right, per height.
    pub shear: [f64; 2],
    /// Share of the side that training moves an image, at most, along each axis.
    pub translate: f64,
    /// Least share of the range of values that training keeps.
    pub contrast: f64,
    /// Probability that training exchanges dark and light.
    pub invert: f64,
    /// Of red, green and blue, from 0 to 1.
    pub mean: [f32; 3],
    pub std: [f32; 3],
    #[serde(with = "as_text")]
    pub on_unreadable: OnUnreadableChoice,
    /// Threads that read and change images.
    pub threads: usize,
    /// Most images that a validation in training looks at; 0: all.
    pub validation_images: usize,
}

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (kind, rest) = with_kind(deserializer, "text")?;
        match kind.as_str() {
            "text" => rest.try_into().map(Self::Text),
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
        }
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
        }
    }
}

impl Default for ImageFolderConfig {
    fn default() -> Self {
        Self { folder: PathBuf::new(), validation: None, validation_share: 0.1 }
    }
}

impl Default for ImagesConfig {
    /// ImageNet's mean and deviation.
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
