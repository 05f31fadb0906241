//! Measures held-out data, during the run and at the end.

use std::time::Instant;

use gpipe::Pipeline;
use gpipe_checkpoint::manifest::TrainPosition;
use gpipe_observe::metrics::Evaluation;

use super::steps::Run;
use crate::{
    CliError,
    eval::{self, Measured},
    task,
};

impl Run<'_> {
    /// Evaluates the weights on held-out data, and their averages if there are any. Prints and
    /// records the results. If the run is asked to stop, it stops early.
    pub(super) fn validate(
        &mut self,
        pipeline: &mut Pipeline,
        position: &mut TrainPosition,
    ) -> Result<(), CliError> {
        let start = Instant::now();
        let Some(own) = self.measure(pipeline, position, "validation")? else { return Ok(()) };
        let mut metrics = own.metrics;
        metrics.extend(own.parts.into_iter().map(|(name, loss)| (format!("loss.{name}"), loss)));
        if self.config.optimizer.average > 0.0 {
            let measured = pipeline.with_averages(|averaged| {
                Ok(self.measure(averaged, position, "averaged weights"))
            })??;
            let Some(measured) = measured else { return Ok(()) };
            metrics.insert("averaged_loss".into(), measured.loss);
            let named = measured.metrics.into_iter();
            metrics.extend(named.map(|(name, value)| (format!("averaged_{name}"), value)));
        }
        self.tell_unreadable();
        self.summary.validated(start.elapsed());
        position.evaluated = true;
        self.saving.validated(position.batches, own.loss);
        if let Some(written) = &mut self.metrics {
            written.evaluation(Evaluation {
                step: pipeline.steps(),
                tokens_total: position.tokens,
                loss: own.loss,
                bits_per_byte: self.task.bits_per_byte(own.loss),
                metrics,
                count: own.count as u64,
            });
        }
        Ok(())
    }

    /// Measures the present parameters and prints a line. `None` if the run was asked to stop
    /// meanwhile.
    fn measure(
        &self,
        pipeline: &mut Pipeline,
        position: &TrainPosition,
        what: &str,
    ) -> Result<Option<Measured>, CliError> {
        let stop = || Ok(self.asked()?.signal.is_some());
        let parts = self.task.validation(pipeline.is_fed())?;
        let work = self.progress.between(what, eval::batches_of(&parts));
        let measured = eval::measure(pipeline, parts, &work, &stop);
        drop(work);
        let measured = match measured {
            // A failed measurement must not lose what was learned.
            Err(CliError::Pipeline(error)) if error.is_not_finite() => {
                self.progress.warn(&format!("the loss of the {what} is NaN or infinite: {error}"));
                return Ok(Some(Measured::none()));
            }
            measured => measured?,
        };
        let Some(Measured { loss, metrics, count, parts }) = &measured else { return Ok(None) };
        let unit = task::unit(self.config);
        let mut line = format!("step {}: {what} loss {loss:.4} nats/{unit}", position.batches);
        if let Some(bits) = self.task.bits_per_byte(*loss) {
            line += &format!(", {bits:.4} bits/byte");
        }
        let vocabulary = self.task.vocabulary();
        for (name, value) in metrics.iter().filter(|(name, _)| vocabulary.is_telling(name)) {
            line += &format!(", {name} {:.1}%", 100.0 * value);
        }
        self.progress.say(&format!("{line} over {count} {unit}s"));
        if !parts.is_empty() {
            let all = parts.iter().map(|(name, loss)| format!("{name} {loss:.3}"));
            self.progress.say(&format!("  by language: {}", all.collect::<Vec<_>>().join(", ")));
        }
        Ok(measured)
    }
}
