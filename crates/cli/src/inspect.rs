//! `gpipe inspect`: shows files of a run and verifies their checksums.

use std::{
    fmt::Display,
    path::{Path, PathBuf},
};

use gpipe::Bytes;
use gpipe_checkpoint::{
    Checkpoint, folder,
    manifest::{self, FileKind, Manifest},
    tensor_file::{FileError, TensorFile, shown},
};
use serde_json::json;

use crate::{
    CliError,
    args::InspectArguments,
    model_folder::{self, ModelFolder},
    output::say,
    run_folder::{AVERAGES, CHECKPOINTS, EARLIER, WEIGHTS},
    task::Vocabulary,
};

/// The message for a file from elsewhere.
const NO_DIGESTS: &str = "it has no digests: whether it is as it was written cannot be seen";
/// Maximum number of layers or tensors that are listed without --json.
const ROWS_MAX: usize = 1000;

/// Weights files in a run's folder.
const FILES: [&str; 2] = [WEIGHTS, AVERAGES];

/// Prints the contents of `arguments.path`.
pub(crate) fn run(arguments: &InspectArguments) -> Result<(), CliError> {
    let (path, json) = (&arguments.path, arguments.json);
    if path.is_file() {
        let is_named = path.extension().is_some_and(|own| own == "safetensors");
        return match TensorFile::open(path) {
            Err(FileError::Format { .. }) if !is_named => Err(CliError::Usage(format!(
                "{}: it is no safetensors file: give one, or the folder of a run, of a checkpoint \
                or of a model",
                path.display()
            ))),
            opened => tensors(opened?, json),
        };
    }
    if model_folder::is_model_folder(path) {
        return model_folder(&ModelFolder::open(path)?, json);
    }
    if path.join(manifest::NAME).exists() {
        return checkpoint(&Checkpoint::open(path)?, json);
    }
    let checkpoints = path.join(CHECKPOINTS);
    let checkpoints = if checkpoints.is_dir() { checkpoints } else { path.clone() };
    let all = folder::list(&checkpoints)?;
    let names = FILES.iter().flat_map(|name| [(*name).to_owned(), format!("{EARLIER}{name}")]);
    let files: Vec<_> = names.map(|name| path.join(name)).filter(|path| path.is_file()).collect();
    match (all.is_empty(), &files[..]) {
        (true, []) => {
            let reason = match path.exists() {
                true => {
                    "it is no checkpoint, no run, no folder of checkpoints and no safetensors file"
                }
                false => "there is no such file or folder",
            };
            Err(CliError::Usage(format!("{}: {reason}", path.display())))
        }
        (true, [one]) => tensors(TensorFile::open(one)?, json),
        _ => folder_of(&all, &files, json),
    }
}

/// Prints what is in a model's folder, and whether its parts fit each other.
fn model_folder(folder: &ModelFolder, json: bool) -> Result<(), CliError> {
    let network = &folder.described.network;
    let model = network.build().map_err(|error| CliError::Usage(error.to_string()))?;
    let (tokens, mut weights) = (Vocabulary::of_folder(folder)?.size(), folder.weights()?);
    let fit = folder.fit(&mut weights)?;
    let mut dtypes: Vec<String> = weights.entries().map(|entry| entry.dtype.clone()).collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    let (files, bytes) = (weights.files().len(), weights.bytes());
    let digests = weights.files().iter().all(TensorFile::has_digests);
    weights.verify()?;
    let described = &folder.described;
    if json {
        let tensors = weights
            .entries()
            .map(|entry| json!({ "name": entry.name, "dtype": entry.dtype, "shape": entry.shape }));
        say!(
            "{}",
            json!({
                "model_type": described.model_type, "layers": model.len(),
                "parameters": model.parameter_count(), "vocabulary": network.vocabulary(),
                "tokens": tokens, "positions": network.positions(), "tied": network.tied(),
                "ends": described.ends, "dtypes": dtypes, "files": files, "bytes": bytes,
                "digests": digests, "tensors": tensors.collect::<Vec<_>>()
            })
        );
        return Ok(());
    }
    say!("model          {}, {} layers", described.model_type, model.len());
    say!("parameters     {}", model.parameter_count());
    say!("vocabulary     {}, the tokenizer has {tokens}", network.vocabulary());
    say!("positions      {}", network.positions());
    let plural = if files == 1 { "file" } else { "files" };
    say!("weights        {} in {files} {plural}, {}", Bytes(bytes), dtypes.join(", "));
    say!("{fit}");
    match digests {
        true => say!("complete: all tensors are as they were written (SHA-256)"),
        false => say!("{NO_DIGESTS}"),
    }
    Ok(())
}

/// Verifies all checkpoints and weights files of a run, and prints one line for each.
fn folder_of(all: &[(u64, PathBuf)], files: &[PathBuf], json: bool) -> Result<(), CliError> {
    // The newest checkpoint names the best one. An older checkpoint may have been the best at its
    // time.
    let newest = all.iter().find_map(|(_, path)| Checkpoint::open(path).ok());
    let best = newest.and_then(|newest| newest.manifest().best).map(|best| best.batches);
    let damaged = all.iter().rev().filter(|(_, path)| !checkpoint_line(path, best, json)).count();
    let damaged_files = files.iter().filter(|path| !weights_line(path, json)).count();
    let count = |damaged: usize, all: usize, what: &str| {
        (damaged > 0).then(|| format!("{damaged} of {all} {what} are damaged"))
    };
    let told = [
        count(damaged, all.len(), "checkpoints"),
        count(damaged_files, files.len(), "files of weights"),
    ];
    let told: Vec<String> = told.into_iter().flatten().collect();
    if told.is_empty() { Ok(()) } else { Err(CliError::Usage(told.join(", "))) }
}

/// Prints the line of a checkpoint. Returns whether it is complete.
fn checkpoint_line(path: &Path, best: Option<u64>, json: bool) -> bool {
    match Checkpoint::open(path).and_then(|found| found.verify().map(|()| found)) {
        Ok(found) => {
            let progress = &found.manifest().progress;
            let (batches, tokens, bytes) =
                (progress.batches, progress.tokens, found.manifest().bytes());
            let best = best == Some(batches);
            if json {
                let shown = path.display().to_string();
                say!(
                    "{}",
                    json!({
                        "path": shown, "batches": batches, "tokens": tokens, "bytes": bytes,
                        "complete": true, "best": best
                    })
                );
            } else {
                let best = if best { ", the best so far" } else { "" };
                let (path, bytes) = (path.display(), Bytes(bytes));
                say!("{path}: step {batches}, {tokens} tokens, {bytes}, complete{best}");
            }
            true
        }
        Err(error) => damage(path, &error, json),
    }
}

/// Prints the line of a weights file. Returns whether it is undamaged.
fn weights_line(path: &Path, json: bool) -> bool {
    match TensorFile::open(path).and_then(|mut file| file.verify().map(|()| file)) {
        Ok(file) => {
            let (count, bytes) = (file.entries().len(), size(&file));
            if json {
                let shown = path.display().to_string();
                let complete = file.has_digests().then_some(true);
                say!(
                    "{}",
                    json!({
                        "path": shown, "tensors": count, "bytes": bytes,
                        "digests": file.has_digests(), "complete": complete
                    })
                );
            } else {
                let state = if file.has_digests() { "complete" } else { NO_DIGESTS };
                say!("{}: {count} tensors, {}, {state}", path.display(), Bytes(bytes));
            }
            true
        }
        Err(error) => damage(path, &error, json),
    }
}

/// Prints the line of a damaged file or checkpoint. Returns false.
fn damage(path: &Path, reason: &dyn Display, json: bool) -> bool {
    let (shown, reason) = (path.display(), reason.to_string());
    match json {
        true => {
            say!("{}", json!({ "path": shown.to_string(), "complete": false, "reason": reason }))
        }
        false => say!("{shown}: DAMAGED: {reason}"),
    }
    false
}

fn checkpoint(checkpoint: &Checkpoint, json: bool) -> Result<(), CliError> {
    let verified = checkpoint.verify();
    if json {
        let mut value = serde_json::to_value(checkpoint.manifest()).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            fields.insert("complete".into(), verified.is_ok().into());
        }
        say!("{value}");
    } else {
        describe(checkpoint.folder(), checkpoint.manifest());
        if verified.is_ok() {
            let files = checkpoint.manifest().all_files().count();
            say!("complete: all {files} files are as they were written (SHA-256)");
        }
    }
    Ok(verified?)
}

fn describe(folder: &Path, manifest: &Manifest) {
    let Manifest { progress, counters, plan, best, .. } = manifest;
    say!("checkpoint     {}", folder.display());
    say!("written by     {}, format {}", shown(&manifest.written_by), manifest.format);
    say!(
        "position       {} mini-batches, {} samples, {} tokens; {} left out",
        progress.batches,
        progress.samples,
        progress.tokens,
        progress.skipped
    );
    say!("updates        {}, seed {}", counters.step, counters.seed);
    if let Some(scale) = counters.loss_scale {
        say!("loss scale     {scale}, for {} steps", counters.good_steps);
    }
    if let Some(best) = best {
        say!("best           {:.6} nats/token at step {}", best.loss, best.batches);
    }
    say!(
        "was run at     K = {}, M = {}, {}, re-materialization {}, layers per stage {:?}, {}",
        plan.stages,
        plan.micro_batches,
        shown(&plan.schedule),
        shown(&plan.remat),
        plan.balance,
        shown(&plan.dtype)
    );
    say!("size           {} in {} files", Bytes(manifest.bytes()), manifest.all_files().count());
    let parameters = manifest.layers.iter().flat_map(|layer| &layer.parameters);
    let total = parameters.map(|own| elements(&own.shape)).fold(0, i64::saturating_add);
    say!("parameters     {total} in {} layers", manifest.layers.len());
    for layer in manifest.layers.iter().take(ROWS_MAX) {
        let bytes = |kind: FileKind| -> u64 {
            layer.files.iter().filter(|file| file.kind == kind).map(|file| file.bytes).sum()
        };
        let part = |name: &str, kind| match bytes(kind) {
            0 => String::new(),
            bytes => format!(", {name} {}", Bytes(bytes)),
        };
        say!(
            "  {}: parameters {}{}{}",
            shown(&layer.name),
            Bytes(bytes(FileKind::Parameters)),
            part("optimizer", FileKind::Optimizer),
            part("averages", FileKind::Averages)
        );
        for parameter in &layer.parameters {
            let kept = match parameter.updates {
                None => String::new(),
                Some(updates) => {
                    let names = parameter.optimizer.join(", ");
                    format!("  {} after {updates} updates", shown(&names))
                }
            };
            let (name, dtype) = (shown(&parameter.name), shown(&parameter.dtype));
            say!("    {name:<28} {dtype} {:?}{kept}", parameter.shape);
        }
    }
}

/// The number of elements of a shape, which comes from a file and may be arbitrary.
fn elements(shape: &[i64]) -> i64 {
    shape.iter().fold(1, |all, &size| all.saturating_mul(size))
}

/// The bytes of a file's tensors.
fn size(file: &TensorFile) -> u64 {
    file.entries().iter().map(|entry| entry.bytes).sum()
}

/// Prints the contents of a file of tensors and verifies it, which reads all of it.
fn tensors(mut file: TensorFile, json: bool) -> Result<(), CliError> {
    if file.entries().is_empty() {
        let path = file.path().display();
        return Err(CliError::Usage(format!("{path}: its header has no tensors: it is empty")));
    }
    let verified = file.verify();
    if json {
        let complete = file.has_digests().then_some(verified.is_ok());
        let entries = file.entries().iter();
        let entries: Vec<_> = entries
            .map(|entry| {
                json!({
                    "name": entry.name, "dtype": entry.dtype, "shape": entry.shape,
                    "sha256": entry.sha256
                })
            })
            .collect();
        say!(
            "{}",
            json!({
                "metadata": file.metadata(), "tensors": entries, "digests": file.has_digests(),
                "complete": complete
            })
        );
        return Ok(verified?);
    }
    let total = file.entries().iter().fold(0, |all: i64, e| all.saturating_add(elements(&e.shape)));
    let count = file.entries().len();
    say!("{}: {count} tensors, {total} elements, {}", file.path().display(), Bytes(size(&file)));
    for (key, value) in file.metadata() {
        say!("metadata: {} = {}", shown(key), shown(value));
    }
    for entry in file.entries().iter().take(ROWS_MAX) {
        say!("  {:<44} {:<5} {:?}", shown(&entry.name), entry.dtype, entry.shape);
    }
    if count > ROWS_MAX {
        say!("  and {} more: --json lists all", count - ROWS_MAX);
    }
    match (&verified, file.has_digests()) {
        (Err(_), _) => {}
        (Ok(()), true) => say!("complete: all {count} tensors are as they were written (SHA-256)"),
        (Ok(()), false) => say!("{NO_DIGESTS}"),
    }
    Ok(verified?)
}
