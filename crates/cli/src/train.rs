//! `gpipe train`.

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use gpipe::{Pipeline, StepReport};
use gpipe_data::{Loaded, Loader, LoaderSettings, TokenSet, TrainBatches};
use gpipe_observe::metrics::Evaluation;

use crate::{
    CliError,
    args::TrainArguments,
    config::Config,
    eval::{self, Measured},
    metrics::{Metrics, Seen, io},
    progress::Progress,
    run_folder::{AVERAGES, WEIGHTS},
    setup,
    summary::Summary,
};

/// Numbered folders tried for a run without --out.
const FOLDERS_MAX: usize = 10_000;

/// Trains, evaluates, and writes the run's files.
pub(crate) fn run(arguments: &TrainArguments) -> Result<(), CliError> {
    let config = Config::load_for_training(&arguments.pipeline)?;
    refuse_used_folder(arguments)?; // before any work
    let text = setup::text(&config)?;
    println!("{}", text.summary);
    let (sequence, samples) = (config.data.sequence, config.train.mini_batch);
    let batches = TrainBatches::new(Arc::new(text.train), sequence, samples, config.seed)?;
    let model = setup::model(&config, text.tokenizer.vocabulary())?;
    describe(&config, &model);
    let mut pipeline = setup::pipeline(&config, model).build()?;
    println!("layers per stage: {:?}", pipeline.balance());

    let out = out_folder(arguments)?;
    let write = |name: &str, text: &str| {
        let path = out.join(name);
        std::fs::write(&path, text).map_err(io(&path))
    };
    write("config.toml", &config.to_toml()?)?;
    text.tokenizer.save(&out.join("tokenizer.json"))?;
    let mut run = Run {
        metrics: Metrics::create(&out)?,
        progress: Progress::new(config.train.steps),
        summary: Summary::default(),
        seen: Seen::default(),
        validation: text.validation,
        config: &config,
    };
    let start = Instant::now();
    let deadline = Duration::from_secs(config.pipeline.deadline_s);
    let ahead = LoaderSettings { deadline, depth: config.train.batches_ahead };
    let make = move |step| Ok::<_, Infallible>(batches.batch(step));
    for loaded in Loader::start(0..config.train.steps, ahead, make)? {
        let Loaded { step, batch, waited } = loaded?;
        let (inputs, targets) = setup::tensors(&batch)?;
        let report = pipeline.train_step(inputs, targets)?;
        run.step(&report, batch.samples as u64, waited)?;
        let every = config.train.validate_every;
        if every > 0 && (step + 1) % every == 0 && step + 1 < config.train.steps {
            run.validate(&mut pipeline, "validation")?;
        }
    }
    run.progress.finish();
    run.summary.print(start.elapsed().as_secs_f64() * 1e3);

    gpipe_checkpoint::weights::save(&out.join(WEIGHTS), &pipeline.parameters()?)?;
    run.validate(&mut pipeline, "validation")?;
    let vocabulary = text.tokenizer.vocabulary() as f64;
    println!("(a uniform guess: {:.4} nats/token)", vocabulary.ln());
    if config.optimizer.average > 0.0 {
        gpipe_checkpoint::weights::save(&out.join(AVERAGES), &pipeline.averages()?)?;
        pipeline.with_averages(|averaged| Ok(run.validate(averaged, "averaged weights")))??;
    }
    println!("files: {}", out.display());
    Ok(())
}

/// What goes on beside the training.
struct Run<'a> {
    metrics: Metrics,
    progress: Progress,
    summary: Summary,
    seen: Seen,
    validation: TokenSet,
    config: &'a Config,
}

impl Run<'_> {
    /// After a step of `samples` samples, for whose batch the loop waited.
    fn step(
        &mut self,
        report: &StepReport,
        samples: u64,
        waited: Duration,
    ) -> Result<(), CliError> {
        self.seen.tokens += report.count as u64;
        self.seen.samples += samples;
        self.metrics.step(report, samples, self.seen, waited)?;
        self.progress.step(report);
        self.summary.add(report, waited);
        Ok(())
    }

    /// Evaluates on held-out text; prints and records what it found.
    fn validate(&mut self, pipeline: &mut Pipeline, what: &str) -> Result<(), CliError> {
        let start = Instant::now();
        let most = self.config.train.validation_tokens;
        let Measured { nats, bits_per_byte, accuracy, count } =
            eval::measure(pipeline, self.config, &self.validation, most)?;
        let step = pipeline.steps();
        self.progress.say(&format!(
            "step {step}: {what} loss {nats:.4} nats/token, {bits_per_byte:.4} bits/byte, accuracy {:.1}% over {count} tokens",
            100.0 * accuracy
        ));
        self.summary.validated(start.elapsed());
        let metrics = [("accuracy".to_owned(), accuracy)].into_iter().collect();
        self.metrics.evaluation(Evaluation {
            step,
            tokens_total: self.seen.tokens,
            loss: nats,
            bits_per_byte: Some(bits_per_byte),
            metrics,
            count: count as u64,
        })
    }
}

fn describe(config: &Config, model: &gpipe::Sequence) {
    let pipeline = &config.pipeline;
    println!(
        "{} parameters in {} layers; K = {} on {}, M = {}, {}, re-materialization {}, {}",
        model.parameter_count(),
        model.len(),
        pipeline.stages,
        pipeline.devices,
        pipeline.micro_batches,
        pipeline.schedule,
        pipeline.remat,
        pipeline.dtype
    );
}

/// A run's files are never written over another's.
fn refuse_used_folder(arguments: &TrainArguments) -> Result<(), CliError> {
    match &arguments.out {
        Some(out) if out.join("metrics.jsonl").exists() => Err(CliError::Usage(format!(
            "{} already holds a run: give another --out, or remove it",
            out.display()
        ))),
        _ => Ok(()),
    }
}

/// The folder of this run: the one named, or the next free one under `out/`.
fn out_folder(arguments: &TrainArguments) -> Result<PathBuf, CliError> {
    let create = |path: &Path| std::fs::create_dir_all(path).map_err(io(path));
    if let Some(out) = &arguments.out {
        create(out)?;
        return Ok(out.clone());
    }
    let name = arguments.pipeline.config.config.file_stem().unwrap_or_default().to_string_lossy();
    let numbered = |number: usize| match number {
        1 => PathBuf::from("out").join(name.as_ref()),
        _ => PathBuf::from("out").join(format!("{name}-{number}")),
    };
    let free = (1..FOLDERS_MAX).map(numbered).find(|path| !path.exists());
    let out = free.ok_or_else(|| CliError::Usage("out/ is full: give --out DIR".into()))?;
    create(&out)?;
    Ok(out)
}
