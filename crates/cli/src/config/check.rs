//! Checks that no other module makes when it receives its part of a configuration, or makes only
//! after long work.

use gpipe_data::{
    jsonl::is_share,
    parallel::{PAIR_TOKENS_MAX, PAIR_TOKENS_MIN},
};
use gpipe_observe::step_file::STAGES_MAX;

use super::{
    Config, ConfigError, Data, JsonlConfig, Model, PackingChoice, ParallelConfig, TextConfig,
};

/// Maximum number of seconds of a timeout.
const TIMEOUT_S_MAX: u64 = gpipe::TIMEOUT_MAX.as_secs();

type Result = std::result::Result<(), ConfigError>;

fn refuse(key: &'static str, value: impl ToString, reason: &str) -> Result {
    Err(ConfigError::Value { key, value: value.to_string(), reason: reason.into() })
}

fn check_parallel(data: &ParallelConfig) -> Result {
    if !(PAIR_TOKENS_MIN..=PAIR_TOKENS_MAX).contains(&data.length) {
        let reason = format!("use {PAIR_TOKENS_MIN} to {PAIR_TOKENS_MAX} tokens");
        return refuse("data.length", data.length, &reason);
    }
    if data.temperature.is_nan() || data.temperature < 1.0 {
        return refuse("data.temperature", data.temperature, "use a number of at least 1");
    }
    if data.batch_tokens == 0 {
        return refuse("data.batch_tokens", 0, "use at least 1");
    }
    Ok(())
}

impl Config {
    /// Checks every key.
    ///
    /// # Errors
    /// Fails at the first invalid value, and names its key and the valid values.
    pub(crate) fn check(&self) -> Result {
        self.check_train()?;
        self.check_pipeline()?;
        self.check_optimizer()?;
        self.check_kinds()?;
        self.check_devices()?;
        self.check_checkpoint()
    }

    fn check_train(&self) -> Result {
        let train = &self.train;
        if train.steps == 0 {
            return refuse("train.steps", 0, "use at least 1");
        }
        if train.mini_batch == 0 {
            return refuse("train.mini_batch", 0, "use at least 1");
        }
        match &self.data {
            Data::Text(TextConfig { sequence: 0, .. })
            | Data::Jsonl(JsonlConfig { sequence: 0, .. }) => {
                return refuse("data.sequence", 0, "use at least 1");
            }
            Data::Jsonl(data) => self.check_jsonl(data)?,
            Data::Parallel(data) => check_parallel(data)?,
            _ => {}
        }
        let least = match self.data {
            Data::Text(_) => 2,
            Data::Jsonl(_) => 1,
            _ => 0,
        };
        if train.validation_tokens < least {
            let reason = format!("use at least {least}: a run validates when it ends");
            return refuse("train.validation_tokens", train.validation_tokens, &reason);
        }
        if !(0.0..1.0).contains(&train.label_smoothing) {
            let value = train.label_smoothing;
            return refuse("train.label_smoothing", value, "use at least 0 and less than 1");
        }
        if !(1..=64).contains(&train.prefetch) {
            return refuse("train.prefetch", train.prefetch, "use 1 to 64");
        }
        Ok(())
    }

    fn check_jsonl(&self, data: &JsonlConfig) -> Result {
        if data.files.is_empty() == data.sources.is_empty() {
            let reason = "name the files to train on with --data FILE, in data.files, or with \
                their weights in [[data.sources]]; one of the three";
            let found = data.files.iter().map(|path| path.display().to_string());
            return refuse("data.files", found.collect::<Vec<_>>().join(", "), reason);
        }
        let sum: f64 = data.sources.iter().map(|own| own.weight).sum();
        if let Some(own) = data.sources.iter().find(|own| !is_share(own.weight, sum)) {
            let value = format!("{} of {}", own.weight, own.path.display());
            let reason = "use positive weights, each at least a thousandth of their sum";
            return refuse("data.sources.weight", value, reason);
        }
        let share = data.validation_share;
        if data.validation.is_empty() && !(share > 0.0 && share < 1.0) {
            let reason = "use a number between 0 and 1, or name files in data.validation";
            return refuse("data.validation_share", share, reason);
        }
        let names = &data.fields;
        let names = [&names.text, &names.prompt, &names.completion, &names.messages];
        let twice = (1..names.len()).find(|at| names[..*at].contains(&names[*at]));
        if let Some(at) = twice.or_else(|| names.iter().position(|name| name.is_empty())) {
            return refuse("data.fields", names[at], "give each field a name of its own");
        }
        if self.packing() == Some(PackingChoice::Separate) && !self.separates_documents() {
            let reason = "only models like Llama keep samples of a row apart: use joined or none";
            return refuse("data.packing", "separate", reason);
        }
        Ok(())
    }

    fn check_pipeline(&self) -> Result {
        let pipeline = &self.pipeline;
        if pipeline.stages == 0 {
            return refuse("pipeline.stages", 0, "use at least one stage");
        }
        if pipeline.stages > STAGES_MAX {
            let reason = format!("use at most {STAGES_MAX} stages");
            return refuse("pipeline.stages", pipeline.stages, &reason);
        }
        if pipeline.micro_batches == 0 {
            return refuse("pipeline.micro_batches", 0, "use at least 1");
        }
        for (key, seconds) in [
            ("pipeline.timeout_s", pipeline.timeout_s),
            ("checkpoint.timeout_s", self.checkpoint.timeout_s),
        ] {
            if !(1..=TIMEOUT_S_MAX).contains(&seconds) {
                return refuse(key, seconds, &format!("use 1 to {TIMEOUT_S_MAX} seconds"));
            }
        }
        let (replicas, mini_batch) = (pipeline.replicas, self.train.mini_batch);
        if replicas == 0 || replicas > mini_batch {
            let reason = format!("use 1 to {mini_batch}, the samples of a mini-batch");
            return refuse("pipeline.replicas", replicas, &reason);
        }
        Ok(())
    }

    fn check_optimizer(&self) -> Result {
        let optimizer = &self.optimizer;
        for (key, value) in
            [("optimizer.lr", optimizer.lr), ("optimizer.weight_decay", optimizer.weight_decay)]
        {
            if !(value.is_finite() && value >= 0.0) {
                return refuse(key, value, "use a number of at least 0");
            }
        }
        if optimizer.clip_norm.is_nan() || optimizer.clip_norm < 0.0 {
            let value = optimizer.clip_norm;
            return refuse("optimizer.clip_norm", value, "use 0 (off) or a positive number");
        }
        if !(0.0..1.0).contains(&optimizer.average) {
            let reason = "use 0 (off) or less than 1, such as 0.999";
            return refuse("optimizer.average", optimizer.average, reason);
        }
        Ok(())
    }

    /// Checks that the kind of network fits the kind of data.
    fn check_kinds(&self) -> Result {
        let fit = match self.model {
            Model::Transformer(_) | Model::Llama(_) | Model::HuggingFace(_) => {
                matches!(self.data, Data::Text(_) | Data::Jsonl(_))
            }
            Model::Translation(_) => matches!(self.data, Data::Parallel(_)),
            _ => !matches!(self.data, Data::Text(_) | Data::Jsonl(_) | Data::Parallel(_)),
        };
        if !fit {
            let (model, data) = (self.shown("model.kind")?, self.shown("data.kind")?);
            return Err(ConfigError::Kinds { model, data });
        }
        if let (
            Model::HuggingFace(model),
            Data::Text(TextConfig { sequence, .. }) | Data::Jsonl(JsonlConfig { sequence, .. }),
        ) = (&self.model, &self.data)
        {
            if model.config.is_empty() {
                let reason = "name a model's folder with --from FOLDER, whose config.json this is";
                return refuse("model.config", "\"\"", reason);
            }
            let network = self.network()?;
            let most = network.positions();
            if network.ends_with_positions() && *sequence as i64 > most {
                let reason = format!("the model has positions for {most} tokens: use at most that");
                return refuse("data.sequence", sequence, &reason);
            }
        }
        if let Model::AmoebaNet(model) = &self.model
            && !(model.auxiliary >= 0.0 && model.auxiliary.is_finite())
        {
            let reason = "use 0 (no auxiliary head) or a positive number, such as 0.4";
            return refuse("model.auxiliary", model.auxiliary, reason);
        }
        Ok(())
    }

    fn check_devices(&self) -> Result {
        let pipeline = &self.pipeline;
        let (devices, stages) = (pipeline.devices.0.len(), pipeline.stages);
        if devices != 1 && devices != stages {
            let reason = format!(
                "that is {devices} devices for {stages} stages: name one for all, or one per stage"
            );
            return refuse("pipeline.devices", &pipeline.devices, &reason);
        }
        for device in &pipeline.devices.0 {
            if let Err(error) = device.check() {
                return refuse("pipeline.devices", device, &error.to_string());
            }
        }
        Ok(())
    }

    fn check_checkpoint(&self) -> Result {
        let checkpoint = &self.checkpoint;
        if checkpoint.keep == 0 {
            return refuse("checkpoint.keep", 0, "keep at least 1");
        }
        if checkpoint.keep_best && self.train.validate_every == 0 {
            let reason = "there is nothing to compare: set train.validate_every to the steps \
                between validations";
            return refuse("checkpoint.keep_best", true, reason);
        }
        Ok(())
    }
}
