//! Image classification: the sources of images, their augmentation, and mini-batches.

use std::{ops::Range, path::Path, sync::Arc, time::Duration};

use gpipe::{IntoTensors, Pipeline, Tensors};
use gpipe_data::{
    Error, Loader, LoaderSettings,
    images::{
        Affine, Cifar, CifarKind, CifarPart, Crop, EvaluationImages, ImageBatch, ImageFolder,
        ImageSet, OnUnreadable, Tone, TrainImages, Transform,
    },
};
use tch::{Kind, Tensor};

use super::{Batch, MakeBatch, Part, Task, Vocabulary};
use crate::{
    CliError,
    config::{Config, CropChoice, Data, ImageFolderConfig, ImagesConfig, OnUnreadableChoice},
    output::complain,
};

/// Range of aspect ratios of [`CropChoice::Resized`] (Szegedy et al. 2015, section 6).
const RATIO: (f64, f64) = (3.0 / 4.0, 4.0 / 3.0);

/// Images with classes.
pub(crate) struct Classification {
    vocabulary: Vocabulary,
    train: Arc<dyn ImageSet>,
    held_out: Arc<dyn ImageSet>,
    batches: TrainImages,
    validation: EvaluationImages,
    summary: String,
    kind: Kind,
    config: Config,
}

/// The two sides of a set, with a description.
struct Sides {
    train: Arc<dyn ImageSet>,
    validation: Arc<dyn ImageSet>,
    what: String,
    /// One line per source: what was read, and what was left out.
    read: String,
}

impl Classification {
    /// Opens the images. Their classes must be those of `given`, if there are any.
    pub(crate) fn open(config: &Config, given: Option<Vocabulary>) -> Result<Self, CliError> {
        let Sides { train, validation, what, read } = sides(config)?;
        let classes = train.classes().to_vec();
        if let Some(given) = given {
            let given = given.classes()?;
            if given != classes {
                return Err(CliError::Usage(format!(
                    "{what}: its {} classes are not the {} that the model was trained for: bring \
                    those data back, or start another run (--init takes the weights)",
                    classes.len(),
                    given.len()
                )));
            }
        }
        check_classes(&what, &classes)?;
        let (images, mini_batch) = (&config.images, config.train.mini_batch);
        let (threads, on_unreadable) = (images.threads, on_unreadable(images));
        let transform = transform(images);
        let measured = match images.validation_images {
            most if most > 0 && most < validation.len() => {
                format!(" (of which images.validation_images = {most} are measured)")
            }
            _ => String::new(),
        };
        let often = match train.len() {
            images if images < mini_batch => format!(
                "; a mini-batch of {mini_batch} takes an image {:.1} times on average",
                mini_batch as f64 / images.max(1) as f64
            ),
            _ => String::new(),
        };
        let summary = format!(
            "{read}{what}: {} images to train on, {} to validate on{measured}, {} \
            classes{}{}{often}",
            train.len(),
            validation.len(),
            classes.len(),
            without_images(train.as_ref(), "to train on"),
            without_images(validation.as_ref(), "to validate on")
        );
        let batches = TrainImages::new(
            Arc::clone(&train),
            transform,
            mini_batch,
            config.seed,
            threads,
            on_unreadable,
        )?;
        let most = Some(images.validation_images).filter(|&most| most > 0);
        let held_out = Arc::clone(&validation);
        let validation = evaluation(config, validation, most)?;
        let (vocabulary, kind) = (Vocabulary::Classes(classes), super::kind(config));
        let config = config.clone();
        Ok(Self { vocabulary, train, held_out, batches, validation, summary, kind, config })
    }

    /// The held-out images, and their description.
    pub(crate) fn held_out(config: &Config) -> Result<(Arc<dyn ImageSet>, String), CliError> {
        let Sides { validation, what, .. } = sides(config)?;
        Ok((validation, format!("held out of {what}")))
    }
}

/// Refuses data with fewer than two classes.
pub(crate) fn check_classes(what: &str, classes: &[String]) -> Result<(), CliError> {
    if classes.len() >= 2 {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{what}: there is one class only, '{}', so there is nothing to learn: give a folder with \
        one for each class",
        classes.join("")
    )))
}

impl Task for Classification {
    fn summary(&self) -> &str {
        &self.summary
    }

    fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    fn fingerprint(&self) -> String {
        fingerprint(self.train.as_ref())
    }

    fn held_out_fingerprint(&self) -> String {
        fingerprint(self.held_out.as_ref())
    }

    fn training(
        &self,
        batches: u64,
        samples: u64,
        fed: Range<usize>,
    ) -> Result<MakeBatch, CliError> {
        let (all, kind) = (self.batches.clone().starting_at(batches, samples), self.kind);
        Ok(Box::new(move |number| Ok(tensors(all.batch_with(number, fed.clone())?, kind)?)))
    }

    fn validation(&self, fed: bool) -> Result<Vec<Part<'_>>, CliError> {
        let batches = readable(&self.validation, &self.config, fed)?;
        Ok(Part::all(Box::new(batches.map(|batch| Ok(tensors(batch?, self.kind)?)))))
    }

    fn unreadable(&self) -> Vec<(String, String)> {
        let mut all = self.batches.unreadable();
        all.extend(self.validation.unreadable());
        all
    }
}

/// The fingerprint of a set, as text.
pub(crate) fn fingerprint(set: &dyn ImageSet) -> String {
    format!("{:016x}", set.fingerprint())
}

/// A set for evaluation: all of its images, or the first `most`.
pub(crate) fn evaluation(
    config: &Config,
    set: Arc<dyn ImageSet>,
    most: Option<usize>,
) -> Result<EvaluationImages, CliError> {
    let images = &config.images;
    Ok(EvaluationImages::new(
        set,
        transform(images),
        config.train.mini_batch,
        most,
        images.threads,
        on_unreadable(images),
    )?)
}

/// The batches in order, prepared ahead on a thread, without those whose images were all left out.
/// Unless this process is `fed`, the batches have no pixels.
pub(crate) fn readable(
    images: &EvaluationImages,
    config: &Config,
    fed: bool,
) -> Result<impl Iterator<Item = gpipe_data::Result<ImageBatch>> + use<>, CliError> {
    let settings = LoaderSettings {
        timeout: Duration::from_secs(config.pipeline.timeout_s),
        depth: config.train.prefetch,
    };
    let ahead = match fed {
        true => images.clone(),
        false => images.clone().classes_only(),
    };
    let make = move |number| ahead.batch(number as usize).unwrap_or(Err(Error::NoImages));
    let loader = Loader::start(0..images.batches() as u64, settings, make)?;
    let batches = loader.map(|loaded| match loaded {
        Ok(loaded) => Ok(loaded.batch),
        // The batch number of an evaluation is of no interest, so only the image's error remains.
        Err(Error::Loader { step, source }) => Err(match source.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::Loader { step, source },
        }),
        Err(error) => Err(error),
    });
    Ok(batches.filter(|batch| !matches!(batch, Ok(batch) if batch.samples == 0)))
}

/// Images [samples, 3, size, size] and classes [samples] as tensors.
pub(crate) fn tensors(batch: ImageBatch, kind: Kind) -> Result<Batch, tch::TchError> {
    let (samples, size) = (batch.samples as i64, batch.size as i64);
    let inputs = Tensor::f_from_slice(&batch.pixels)?.f_reshape([samples, 3, size, size])?;
    let targets = Tensor::f_from_slice(&batch.classes)?;
    let inputs = inputs.f_to_kind(kind)?.into_tensors();
    Ok(Batch { inputs, targets, samples: batch.samples as u64 })
}

/// The network's outputs for images [samples, channels, height, width]: float64 [samples, classes].
///
/// # Errors
/// Fails if an output is not finite, because there is no most likely class then.
pub(crate) fn logits(pipeline: &mut Pipeline, images: Tensors) -> Result<Tensor, CliError> {
    let logits = super::logits(pipeline, images)?.f_to_kind(Kind::Double)?;
    if logits.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0 {
        return Ok(logits);
    }
    let reason =
        "the network's outputs are not finite: its weights are ruined, use an earlier checkpoint";
    Err(CliError::Usage(reason.into()))
}

/// The configured transformation of images.
pub(crate) fn transform(images: &ImagesConfig) -> Transform {
    Transform {
        size: images.size,
        resize: if images.resize == 0 { images.size } else { images.resize },
        mean: images.mean,
        std: images.std,
        crop: match images.crop {
            CropChoice::None => Crop::None,
            CropChoice::Padded(pixels) => Crop::Padded { pixels },
            CropChoice::Resized(least) => Crop::RandomResized { scale: (least, 1.0), ratio: RATIO },
        },
        flip: images.flip,
        cutout: images.cutout,
        affine: Affine {
            degrees: images.degrees,
            scale: images.scale.into(),
            shear: images.shear.into(),
            translate: images.translate,
        },
        tone: Tone { contrast: images.contrast, invert: images.invert },
    }
}

fn on_unreadable(images: &ImagesConfig) -> OnUnreadable {
    match images.on_unreadable {
        OnUnreadableChoice::Stop => OnUnreadable::Stop,
        OnUnreadableChoice::Skip => OnUnreadable::Skip,
    }
}

fn sides(config: &Config) -> Result<Sides, CliError> {
    match &config.data {
        Data::Text(_) | Data::Jsonl(_) | Data::Parallel(_) => {
            Err(CliError::Usage("the data are text".into()))
        }
        Data::ImageFolder(data) => folder(data, config.seed),
        Data::Cifar10(data) => cifar(&data.folder, CifarKind::Cifar10),
        Data::Cifar100(data) => cifar(&data.folder, CifarKind::Cifar100),
    }
}

/// The configured folder of the data. Fails if none is configured.
fn named(folder: &Path) -> Result<&Path, CliError> {
    if folder.as_os_str().is_empty() {
        return Err(CliError::Usage(
            "data.folder is not set: name the folder of the images, such as --set \
            data.folder=images"
                .into(),
        ));
    }
    Ok(folder)
}

fn folder(data: &ImageFolderConfig, seed: u64) -> Result<Sides, CliError> {
    let all = ImageFolder::open(named(&data.folder)?)?;
    let what = data.folder.display().to_string();
    let mut read = read_of(&data.folder, &all);
    let (train, validation) = match &data.validation {
        Some(folder) => {
            let validation = ImageFolder::with_classes(folder, all.classes())?;
            read += &read_of(folder, &validation);
            (all, validation)
        }
        None => all.split(data.validation_share, seed)?,
    };
    Ok(Sides { train: Arc::new(train), validation: Arc::new(validation), what, read })
}

/// The number of classes, if it is known of the data or their folder is there.
pub(super) fn classes_of_data(config: &Config) -> Result<Option<usize>, CliError> {
    match &config.data {
        Data::ImageFolder(data) if data.folder.is_dir() => {
            Ok(Some(ImageFolder::open(&data.folder)?.classes().len()))
        }
        Data::Cifar10(_) => Ok(Some(CifarKind::Cifar10.classes())),
        Data::Cifar100(_) => Ok(Some(CifarKind::Cifar100.classes())),
        _ => Ok(None),
    }
}

/// A line about what was read from a folder and what was left out.
fn read_of(folder: &Path, set: &ImageFolder) -> String {
    let (folder, bytes) = (folder.display(), gpipe::Bytes(set.bytes()));
    format!("{folder}: read {} images, {bytes}{}\n", set.len(), left_out(set))
}

/// A description of what was left out of a folder, or nothing.
pub(crate) fn left_out(set: &ImageFolder) -> String {
    match set.left_out() {
        none if none.is_empty() => String::new(),
        some => format!("; left out {some}"),
    }
}

/// A note about classes without an image of this kind, or nothing.
fn without_images(set: &dyn ImageSet, kind: &str) -> String {
    let mut seen = vec![false; set.classes().len()];
    for index in 0..set.len() {
        if let Some(seen) = seen.get_mut(set.class(index)) {
            *seen = true;
        }
    }
    match seen.iter().filter(|seen| !**seen).count() {
        0 => String::new(),
        empty => format!(", {empty} of them without an image {kind}"),
    }
}

fn cifar(folder: &Path, kind: CifarKind) -> Result<Sides, CliError> {
    let open = |part| Cifar::open(named(folder)?, kind, part).map_err(CliError::from);
    let (train, validation) = (open(CifarPart::Train)?, open(CifarPart::Test)?);
    let what = folder.display().to_string();
    let read = String::new(); // all of the files are read, or there is an error
    Ok(Sides { train: Arc::new(train), validation: Arc::new(validation), what, read })
}

/// Warns about the images that were left out, the first of them by name.
pub(crate) fn tell_unreadable(all: &[(String, String)]) {
    /// Maximum number of names.
    const TOLD: usize = 20;
    for (name, reason) in all.iter().take(TOLD) {
        complain!("gpipe: warning: left out {name}: {reason}");
    }
    if all.len() > TOLD {
        complain!("gpipe: warning: and {} other images that cannot be read", all.len() - TOLD);
    }
}
