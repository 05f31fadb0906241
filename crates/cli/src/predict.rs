//! `gpipe predict`: classifies images.

use std::path::Path;

use gpipe_data::images::{ImageBatch, decode};
use tch::Kind;

use gpipe_distributed::environment::Environment;

use crate::{
    CliError,
    args::{PredictArguments, RunArguments},
    output::{complain, say},
    processes::Processes,
    run_folder::RunFolder,
    task::{Batch, classification, kind},
};

/// Maximum number of images that go through the network at once.
const BATCH_MAX: usize = 32;

/// Prints the most likely classes of each image. An image that cannot be read is reported, and the
/// others continue.
pub(crate) fn run(
    arguments: &PredictArguments,
    here: Option<&Environment>,
) -> Result<(), CliError> {
    let run = RunArguments {
        folder: Some(arguments.run.clone()),
        stages: arguments.stages,
        device: arguments.device.clone(),
        averages: arguments.averages,
        ..RunArguments::default()
    };
    Processes::among(here, run.timeout_s(), |processes| name(arguments, &run, processes))
}

fn name(
    arguments: &PredictArguments,
    run: &RunArguments,
    processes: &Processes,
) -> Result<(), CliError> {
    let run = RunFolder::open(run, processes)?;
    let classes = run.vocabulary.classes()?;
    if arguments.top == 0 {
        return Err(CliError::Usage("--top 0: name at least one class".into()));
    }
    let mut pipeline = run.pipeline(processes)?;
    let transform = classification::transform(&run.config.images);
    let mut unreadable = 0;
    for paths in arguments.images.chunks(BATCH_MAX) {
        let mut batch = ImageBatch {
            pixels: Vec::new(),
            classes: Vec::new(),
            samples: 0,
            size: transform.size,
        };
        let mut read = Vec::new();
        for path in paths {
            let start = batch.pixels.len();
            batch.pixels.resize(start + transform.values(), 0.0);
            let pixels = batch.pixels.get_mut(start..).unwrap_or_default();
            match decode(path).and_then(|image| transform.apply(&image, None, pixels)) {
                Ok(()) => {
                    batch.samples += 1;
                    batch.classes.push(0);
                    read.push(path);
                }
                Err(error) => {
                    batch.pixels.truncate(start);
                    unreadable += 1;
                    complain!("gpipe: {}", told(path, error));
                }
            }
        }
        if read.is_empty() {
            continue;
        }
        let Batch { inputs, .. } = classification::tensors(batch, kind(&run.config))?;
        let logits = classification::logits(&mut pipeline, inputs)?;
        let all = logits.f_softmax(1, Kind::Double)?;
        let most = arguments.top.min(classes.len()) as i64;
        let (values, indices) = all.f_topk(most, 1, true, true)?;
        for (row, path) in read.iter().enumerate() {
            let values = Vec::<f64>::try_from(values.f_get(row as i64)?)?;
            let indices = Vec::<i64>::try_from(indices.f_get(row as i64)?)?;
            let found = indices.iter().zip(&values);
            let found = found.filter_map(|(&index, &p)| Some((classes.get(index as usize)?, p)));
            print(arguments.json, &path.display().to_string(), &found.collect::<Vec<_>>());
        }
    }
    match unreadable {
        0 => Ok(()),
        count => Err(CliError::Usage(format!(
            "{count} of {} images could not be read: see above",
            arguments.images.len()
        ))),
    }
}

/// Why an image is not read. What the training's error advises is of no use here.
fn told(path: &Path, error: gpipe_data::Error) -> String {
    match error {
        _ if path.is_dir() => {
            let folder = path.display();
            format!("{folder} is a folder: name the images in it, such as {folder}/*")
        }
        gpipe_data::Error::Image { path, reason } => {
            format!("cannot decode the image `{}`: {reason}", path.display())
        }
        other => other.to_string(),
    }
}

fn print(json: bool, path: &str, found: &[(&String, f64)]) {
    if json {
        let classes = found.iter().map(|(class, probability)| {
            serde_json::json!({ "class": class, "probability": probability })
        });
        say!("{}", serde_json::json!({ "image": path, "classes": classes.collect::<Vec<_>>() }));
        return;
    }
    let shown = found.iter().map(|(class, p)| format!("{class} {:.1}%", 100.0 * p));
    say!("{path}: {}", shown.collect::<Vec<_>>().join(", "));
}
