//! `gpipe train`.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use gpipe::{Pipeline, StepReport};
use gpipe_data::{TokenSet, TrainBatches, ValidationBatches};
use gpipe_observe::metrics::Evaluation;

use crate::{
    CliError,
    args::TrainArguments,
    config::Config,
    metrics::{Metrics, Seen, io},
    progress::Progress,
    setup,
};

/// Numbered folders tried for a run without --out.
const FOLDERS_MAX: usize = 10_000;

/// Trains, evaluates, and writes the run's files.
pub(crate) fn run(arguments: &TrainArguments) -> Result<(), CliError> {
    let mut config = Config::load(&arguments.config)?;
    config.apply_train(arguments)?;
    refuse_used_folder(arguments)?; // before any work
    let text = setup::text(&config)?;
    println!("{}", text.summary);
    let batches =
        TrainBatches::new(&text.train, config.data.sequence, config.train.mini_batch, config.seed)?;
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
    let mut metrics = Metrics::create(&out)?;
    let mut progress = Progress::new(config.train.steps);
    let (mut totals, mut seen) = (Totals::default(), Seen::default());
    let start = Instant::now();
    for step in 0..config.train.steps {
        let batch = batches.batch(step);
        let (inputs, targets) = setup::tensors(&batch)?;
        let lr = setup::learning_rate(&config, step);
        pipeline.set_learning_rate(lr);
        let report = pipeline.train_step(inputs, targets)?;
        let samples = batch.samples as u64;
        seen.tokens += report.count as u64;
        seen.samples += samples;
        metrics.step(&report, lr, samples, seen)?;
        progress.step(&report);
        totals.add(&report);
    }
    progress.finish();
    let elapsed_s = start.elapsed().as_secs_f64();
    totals.print(elapsed_s);

    let weights = out.join("weights.safetensors");
    gpipe_checkpoint::weights::save(&weights, &pipeline.parameters()?)?;
    let vocabulary = text.tokenizer.vocabulary();
    let evaluation = validate(&mut pipeline, &config, &text.validation, vocabulary)?;
    let (step, tokens_total) = (config.train.steps, seen.tokens);
    metrics.evaluation(Evaluation { step, tokens_total, ..evaluation })?;
    println!("files: {}", out.display());
    Ok(())
}

fn describe(config: &Config, model: &gpipe::Sequence) {
    let pipeline = &config.pipeline;
    println!(
        "{} parameters in {} layers; K = {}, M = {}, {}, re-materialization {}",
        model.parameter_count(),
        model.len(),
        pipeline.stages,
        pipeline.micro_batches,
        pipeline.schedule,
        pipeline.remat
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
    let name = arguments.config.config.file_stem().unwrap_or_default().to_string_lossy();
    let numbered = |number: usize| match number {
        1 => PathBuf::from("out").join(name.as_ref()),
        _ => PathBuf::from("out").join(format!("{name}-{number}")),
    };
    let free = (1..FOLDERS_MAX).map(numbered).find(|path| !path.exists());
    let out = free.ok_or_else(|| CliError::Usage("out/ is full: give --out DIR".into()))?;
    create(&out)?;
    Ok(out)
}

/// Evaluates on held-out text and prints nats per token and bits per byte. The record knows of no step yet.
fn validate(
    pipeline: &mut Pipeline,
    config: &Config,
    tokens: &TokenSet,
    vocabulary: usize,
) -> Result<Evaluation, CliError> {
    let (sequence, samples) = (config.data.sequence, config.train.mini_batch);
    let most = Some(config.train.validation_tokens);
    let (mut sum, mut count) = (0.0, 0.0);
    for batch in ValidationBatches::new(tokens, sequence, samples, most)? {
        let (inputs, targets) = setup::tensors(&batch)?;
        let evaluation = pipeline.evaluate(inputs, targets)?;
        sum += evaluation.sum;
        count += evaluation.count;
    }
    let nats = sum / count;
    let bits_per_byte = tokens.bits_per_byte(nats);
    println!(
        "validation loss {nats:.4} nats/token, {bits_per_byte:.4} bits/byte over {count} tokens (a uniform guess: {:.4} nats/token)",
        (vocabulary as f64).ln()
    );
    let (bits_per_byte, count) = (Some(bits_per_byte), count as u64);
    Ok(Evaluation { loss: nats, bits_per_byte, count, ..Evaluation::default() })
}

/// Sums over a run, for the table at its end.
#[derive(Default)]
struct Totals {
    steps: u64,
    tokens: f64,
    step_ms: f64,
    bubble: f64,
    /// By stage: forward, recompute, backward, optimizer, wait in ms; peak bytes.
    stages: Vec<([f64; 5], u64)>,
}

impl Totals {
    fn add(&mut self, report: &StepReport) {
        self.steps += 1;
        self.tokens += report.count;
        self.step_ms += report.time.as_ms();
        self.bubble += report.bubble;
        self.stages.resize(report.stages.len(), ([0.0; 5], 0));
        for ((times, peak), stage) in self.stages.iter_mut().zip(&report.stages) {
            let parts =
                [stage.forward, stage.recompute, stage.backward, stage.optimizer, stage.wait];
            for (total, part) in times.iter_mut().zip(parts) {
                *total += part.as_ms();
            }
            *peak = (*peak).max(stage.peak.0);
        }
    }

    fn print(&self, elapsed_s: f64) {
        let steps = self.steps as f64;
        println!(
            "trained {} steps, {:.0} tokens in {elapsed_s:.1} s: {:.1} ms/step, {:.0} tokens/s, bubble {:.1}%",
            self.steps,
            self.tokens,
            self.step_ms / steps,
            self.tokens / elapsed_s,
            100.0 * self.bubble / steps
        );
        println!("stage  forward  recompute  backward  optimizer  wait (ms/step)  peak memory");
        for (stage, (times, peak)) in self.stages.iter().enumerate() {
            let [forward, recompute, backward, optimizer, wait] = times.map(|ms| ms / steps);
            println!(
                "{stage:>5}  {forward:>7.1}  {recompute:>9.1}  {backward:>8.1}  {optimizer:>9.1}  {wait:>4.1}            {}",
                gpipe::Bytes(*peak)
            );
        }
    }
}
