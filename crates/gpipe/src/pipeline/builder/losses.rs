//! Settings of losses and metrics.

use std::sync::Arc;

use super::PipelineBuilder;
use crate::{loss::Loss, metric::Metric};

impl PipelineBuilder {
    /// The loss. Required for training and evaluation, unless there are named losses.
    ///
    /// A loss with parameters or skips ([`Loss::parameters`], [`Loss::pops`]) adds a layer named
    /// `loss` to the end of the sequence, which is cut with the others.
    /// [`Balance::Layers`](crate::Balance::Layers) may leave it out: it then goes with the last
    /// layer.
    #[must_use]
    pub fn loss(mut self, loss: impl Loss) -> Self {
        self.losses.set(loss);
        self.with_losses()
    }

    /// Adds a loss with a name and a weight. The total loss is the sum of all losses, each the mean
    /// over its own count, times its weight. Reports and evaluations show each apart
    /// ([`StepReport::losses`](crate::StepReport::losses)).
    ///
    /// A loss of weight 0 is only reported: it has no gradient. The loss that is given to
    /// [`PipelineBuilder::loss`] is one of the losses: its name is `loss` and its weight 1.
    #[must_use]
    pub fn named_loss(mut self, name: impl Into<String>, weight: f64, loss: impl Loss) -> Self {
        self.losses.push(name.into(), weight, loss);
        self.with_losses()
    }

    /// Adds the layer of the losses to the sequence, if they need one.
    fn with_losses(mut self) -> Self {
        self.sequence = self.losses.add_layer(self.sequence);
        self
    }

    /// Adds a metric for [`Pipeline::evaluate`](crate::Pipeline::evaluate).
    #[must_use]
    pub fn metric(mut self, metric: impl Metric) -> Self {
        self.metrics.push(Arc::new(metric));
        self
    }

    /// Computes the metrics in training steps, too.
    #[must_use]
    pub fn training_metrics(mut self) -> Self {
        self.training_metrics = true;
        self
    }

    /// Computes the last layer, the losses and the metrics on `rows` rows of a micro-batch at a
    /// time, in forward and backward.
    ///
    /// A row is a position of a sample: an index of all axes but the last. The outputs of all rows
    /// are never in memory at once. With a large vocabulary the logits are by far the largest
    /// tensors: in float32, 151,936 logits take 0.6 MB per position. The backward computes the
    /// outputs of a chunk and takes their gradients at once, so nothing is computed twice.
    ///
    /// `rows` decides the order of summation, so it changes the last bits. Stages, schedule and
    /// re-materialization change none. Predictions and [`Pipeline::forward`] compute all outputs.
    ///
    /// # Errors
    /// [`PipelineBuilder::build`] fails if `rows` is 0, or if the last layer, a loss or a metric
    /// cannot be computed on some rows at a time ([`Layer::by_rows`], [`Loss::by_rows`],
    /// [`Metric::by_rows`]).
    ///
    /// [`Pipeline::forward`]: crate::Pipeline::forward
    /// [`Layer::by_rows`]: crate::Layer::by_rows
    /// [`Loss::by_rows`]: crate::Loss::by_rows
    #[must_use]
    pub fn loss_rows(mut self, rows: usize) -> Self {
        self.loss_rows = Some(rows);
        self
    }
}
