//! `gpipe train`.

use std::{
    collections::BTreeMap,
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
    write("config.toml", &config.resolved().to_toml()?)?;
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
        run.step(step + 1, &report, batch.samples as u64, waited)?;
        let every = config.train.validate_every;
        if every > 0 && (step + 1) % every == 0 && step + 1 < config.train.steps {
            run.validate(&mut pipeline)?;
        }
    }
    run.progress.finish();
    run.summary.print(start.elapsed().as_secs_f64() * 1e3);

    gpipe_checkpoint::weights::save(&out.join(WEIGHTS), &pipeline.parameters()?)?;
    run.validate(&mut pipeline)?;
    let vocabulary = text.tokenizer.vocabulary() as f64;
    println!("(a uniform guess: {:.4} nats/token)", vocabulary.ln());
    if config.optimizer.average > 0.0 {
        gpipe_checkpoint::weights::save(&out.join(AVERAGES), &pipeline.averages()?)?;
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
    /// After step number `step` of the loop, of `samples` samples, for whose batch it waited.
    fn step(
        &mut self,
        step: u64,
        report: &StepReport,
        samples: u64,
        waited: Duration,
    ) -> Result<(), CliError> {
        self.seen.tokens += report.count as u64;
        self.seen.samples += samples;
        self.metrics.step(report, samples, self.seen, waited)?;
        self.progress.step(step, report);
        self.summary.add(report, waited);
        Ok(())
    }

    /// Evaluates on held-out text, the averages of the weights too if there are any; prints and records what it
    /// found.
    fn validate(&mut self, pipeline: &mut Pipeline) -> Result<(), CliError> {
        let start = Instant::now();
        let own = self.measure(pipeline, "validation")?;
        let mut metrics = BTreeMap::from([("accuracy".to_owned(), own.accuracy)]);
        if self.config.optimizer.average > 0.0 {
            let measured = pipeline
                .with_averages(|averaged| Ok(self.measure(averaged, "averaged weights")))??;
            metrics.insert("averaged_loss".into(), measured.nats);
            metrics.insert("averaged_accuracy".into(), measured.accuracy);
        }
        self.summary.validated(start.elapsed());
        self.metrics.evaluation(Evaluation {
            step: pipeline.steps(),
            tokens_total: self.seen.tokens,
            loss: own.nats,
            bits_per_byte: Some(own.bits_per_byte),
            metrics,
            count: own.count as u64,
        })
    }

    /// The loss of what the parameters are now, also as a line.
    fn measure(&self, pipeline: &mut Pipeline, what: &str) -> Result<Measured, CliError> {
        let most = self.config.train.validation_tokens;
        let measured = eval::measure(pipeline, self.config, &self.validation, most)?;
        let Measured { nats, bits_per_byte, accuracy, count } = measured;
        self.progress.say(&format!(
            "step {}: {what} loss {nats:.4} nats/token, {bits_per_byte:.4} bits/byte, accuracy {:.1}% over {count} tokens",
            pipeline.steps(),
            100.0 * accuracy
        ));
        Ok(measured)
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
