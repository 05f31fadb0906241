//! `gpipe inspect`: what is on disk, and whether it is as it was written.

use std::path::Path;

use gpipe::Bytes;
use gpipe_checkpoint::{
    Checkpoint, folder,
    manifest::{self, FileKind, Manifest},
    tensor_file::{TensorFile, shown},
};
use serde_json::json;

use crate::{
    CliError,
    args::InspectArguments,
    output::say,
    run_folder::{CHECKPOINTS, WEIGHTS},
};

/// Longest list of layers or tensors that is printed without --json.
const ROWS_MAX: usize = 1000;

/// Prints what `arguments.path` is.
pub(crate) fn run(arguments: &InspectArguments) -> Result<(), CliError> {
    let path = &arguments.path;
    if path.is_file() {
        return tensors(&TensorFile::open(path)?, arguments.json);
    }
    if path.join(manifest::NAME).exists() {
        return checkpoint(&Checkpoint::open(path)?, arguments.json);
    }
    let checkpoints = path.join(CHECKPOINTS);
    let checkpoints = if checkpoints.is_dir() { checkpoints } else { path.clone() };
    let all = folder::list(&checkpoints)?;
    if !all.is_empty() {
        return folder_of(&all, arguments.json);
    }
    let weights = path.join(WEIGHTS);
    if weights.is_file() {
        return tensors(&TensorFile::open(&weights)?, arguments.json);
    }
    let reason = match path.exists() {
        true => "it is no checkpoint, no run, no folder of checkpoints and no safetensors file",
        false => "there is no such file or folder",
    };
    Err(CliError::Usage(format!("{}: {reason}", path.display())))
}

/// One line for each checkpoint of a run.
fn folder_of(all: &[(u64, std::path::PathBuf)], json: bool) -> Result<(), CliError> {
    let mut damaged = 0;
    // The newest one knows; an older one may have been the best once.
    let newest = all.iter().find_map(|(_, path)| Checkpoint::open(path).ok());
    let best = newest.and_then(|newest| newest.manifest().best);
    for (_, path) in all.iter().rev() {
        let found = Checkpoint::open(path).and_then(|found| found.verify().map(|()| found));
        let shown = path.display();
        match found {
            Ok(found) => {
                let progress = &found.manifest().progress;
                let is_best = best.is_some_and(|best| best.batches == progress.batches);
                let bytes = found.manifest().bytes();
                if json {
                    let line = json!({ "path": path, "batches": progress.batches, "tokens": progress.tokens, "bytes": bytes, "complete": true, "best": is_best });
                    say!("{line}");
                } else {
                    let best = if is_best { ", the best so far" } else { "" };
                    say!(
                        "{shown}: step {}, {} tokens, {}, complete{best}",
                        progress.batches,
                        progress.tokens,
                        Bytes(bytes)
                    );
                }
            }
            Err(error) => {
                damaged += 1;
                match json {
                    true => say!(
                        "{}",
                        json!({ "path": path, "complete": false, "reason": error.to_string() })
                    ),
                    false => say!("{shown}: DAMAGED: {error}"),
                }
            }
        }
    }
    match damaged {
        0 => Ok(()),
        count => Err(CliError::Usage(format!("{count} of {} checkpoints are damaged", all.len()))),
    }
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

/// Sizes come from files, and may be anything.
fn elements(shape: &[i64]) -> i64 {
    shape.iter().fold(1, |all, &size| all.saturating_mul(size))
}

fn tensors(file: &TensorFile, json: bool) -> Result<(), CliError> {
    if json {
        let entries = file.entries().iter();
        let entries: Vec<_> = entries
            .map(|entry| json!({ "name": entry.name, "dtype": entry.dtype, "shape": entry.shape }))
            .collect();
        say!("{}", json!({ "metadata": file.metadata(), "tensors": entries }));
        return Ok(());
    }
    let bytes = file.entries().iter().map(|entry| entry.bytes).sum();
    let total = file.entries().iter().fold(0, |all: i64, e| all.saturating_add(elements(&e.shape)));
    say!(
        "{}: {} tensors, {total} elements, {}",
        file.path().display(),
        file.entries().len(),
        Bytes(bytes)
    );
    for (key, value) in file.metadata() {
        say!("metadata: {} = {}", shown(key), shown(value));
    }
    for entry in file.entries().iter().take(ROWS_MAX) {
        say!("  {:<44} {:<5} {:?}", shown(&entry.name), entry.dtype, entry.shape);
    }
    if file.entries().len() > ROWS_MAX {
        say!("  and {} more: --json lists all", file.entries().len() - ROWS_MAX);
    }
    Ok(())
}
