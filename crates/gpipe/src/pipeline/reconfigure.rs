//! Changes of a pipeline between steps: what is trained, parameter groups, the optimizer's
//! settings.
//!
//! Every change goes through the builder's code once more, with one setting changed: settings are
//! checked, edges are made, the schedule is proven, and each stage gets a new configuration. Values
//! stay on their stages.
//!
//! | change | optimizer state and averages | bytes of a plan |
//! |---|---|---|
//! | freeze | saved with each state; optimizer state stays, averages go on towards the values | less: no gradients of the frozen; the rest stays |
//! | unfreeze | go on; start with the next update where there are none | more: gradients, then state |
//! | regroup | stay | equal, unless groups freeze or unfreeze |
//! | optimizer | stay where names, shapes and dtypes fit, else start anew | as its state says |
//! | learning rate, clipping | stay | equal |

use std::sync::Arc;

use super::{Balance, Pipeline, builder::PipelineBuilder, run::Caches, topology};
use crate::{
    error::Result,
    optim::{Group, LearningRate, Optimizer},
    stage::Stage,
};

impl Pipeline {
    /// Freezes the parameters whose full names match one of `patterns` (`*` stands for any text):
    /// they get no gradient and no update any more. Buffers, such as running statistics, are not
    /// affected.
    ///
    /// Optimizer state of frozen parameters stays as it is, and averages go on towards their
    /// values. Both are saved. (A [`Pipeline::restore`] into a pipeline in which they are frozen
    /// ignores them.)
    ///
    /// Layers before the first trained parameter no longer run backwards.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) if a pattern matches no parameter, if an update is
    /// under way, or if something else does not fit; nothing is changed then. All processes make
    /// the same calls.
    pub fn freeze<P: Into<String>>(&mut self, patterns: impl IntoIterator<Item = P>) -> Result<()> {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        self.reconfigure("freeze parameters", |builder| builder.set_frozen(patterns, true))
    }

    /// Trains the parameters whose full names match one of `patterns`, whoever froze them. Their
    /// optimizer state goes on where it stopped; a parameter that has none starts with the next
    /// update.
    ///
    /// # Errors
    /// As for [`Pipeline::freeze`].
    pub fn unfreeze<P: Into<String>>(
        &mut self,
        patterns: impl IntoIterator<Item = P>,
    ) -> Result<()> {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        self.reconfigure("unfreeze parameters", |builder| builder.set_frozen(patterns, false))
    }

    /// Replaces all parameter groups. Optimizer state stays. What [`Pipeline::freeze`] and
    /// [`Pipeline::unfreeze`] were told stays in force.
    ///
    /// # Errors
    /// As for [`PipelineBuilder::build`]; nothing is changed then.
    pub fn regroup(&mut self, groups: impl Into<Vec<Group>>) -> Result<()> {
        let groups = groups.into();
        self.reconfigure("change groups", |builder| builder.groups = groups)
    }

    /// Replaces the optimizer or its settings.
    ///
    /// Each parameter keeps its state if the new rule keeps tensors of the same names, shapes and
    /// dtypes. Otherwise its state, and its count of updates, start anew. A rate that
    /// [`Pipeline::set_learning_rate`] set is gone.
    ///
    /// # Errors
    /// If the settings are out of range; nothing is changed then.
    pub fn set_optimizer(&mut self, optimizer: impl Optimizer) -> Result<()> {
        let optimizer: Arc<dyn Optimizer> = Arc::new(optimizer);
        self.reconfigure("change the optimizer", |builder| {
            builder.optimizer = Some(Arc::clone(&optimizer));
        })?;
        self.training.optimizer = Some(optimizer);
        self.training.lr_override = None;
        Ok(())
    }

    /// Replaces the schedule of the learning rate, which counts all steps so far.
    ///
    /// # Errors
    /// If the schedule is out of range; nothing is changed then.
    pub fn set_learning_rate_schedule(&mut self, rate: LearningRate) -> Result<()> {
        self.reconfigure("change the learning rate", |builder| builder.rate = rate)?;
        self.training.rate = rate;
        Ok(())
    }

    /// Changes whether the gradients of inputs are computed
    /// ([`PipelineBuilder::input_gradients`]).
    ///
    /// # Errors
    /// If an update is under way, or if something else does not fit.
    pub fn set_input_gradients(&mut self, wanted: bool) -> Result<()> {
        let change = |builder: &mut PipelineBuilder| builder.input_gradients = wanted;
        self.reconfigure("change the gradients of inputs", change)
    }

    /// Changes the largest gradient norm; `None` clips no longer.
    ///
    /// # Errors
    /// If the norm is not above 0; nothing is changed then.
    pub fn set_clip_norm(&mut self, max_norm: Option<f64>) -> Result<()> {
        self.reconfigure("change clipping", |builder| builder.max_norm = max_norm)
    }

    /// Builds the configuration of every stage again, with one setting changed, and gives it to
    /// the stages.
    fn reconfigure(&mut self, what: &str, change: impl FnOnce(&mut PipelineBuilder)) -> Result<()> {
        self.needs_own_parameters(what)?;
        self.needs_no_update(what)?;
        let mut settings = self.settings.clone();
        change(&mut settings);
        settings.balance = Balance::Layers(self.model.balance.clone());
        let mut own = settings.clone();
        let staged = own.staged()?;
        if let Some(peers) = &self.engine.peers {
            peers.agree(&own.facts(&self.model.balance))?;
        }
        let mut configs: Vec<_> =
            staged.on_device.into_iter().flatten().map(|config| (config.stage, config)).collect();
        configs.sort_by_key(|(stage, _)| *stage);
        let mut configs: Vec<_> = configs.into_iter().map(|(_, config)| Some(config)).collect();
        let changed = self.visit_all(|stage| {
            let config = configs.get_mut(stage).and_then(Option::take);
            move |stage: &mut Stage| config.map(|config| stage.reconfigure(config))
        });
        // A stage that did not change is of another mind than the others.
        if changed.as_ref().map_or(true, |all| !all.iter().all(|own| matches!(own, Some(Ok(()))))) {
            self.training.torn = Some("a change of the pipeline");
        }
        changed?.into_iter().flatten().collect::<std::result::Result<(), _>>()?;
        self.engine.pool.set_link_capacity(staged.link_capacity);
        self.engine.link_capacity = staged.link_capacity;
        self.engine.topology = staged.cut.topology;
        self.engine.carried = staged.cut.carried;
        self.model.parameters =
            topology::owned(&own.sequence, &staged.cut.ranges, &staged.cut.ties);
        self.model.sequence = own.sequence;
        self.caches = Caches::default();
        self.settings = settings;
        Ok(())
    }
}
