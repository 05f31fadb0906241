//! From settings to a pipeline. Everything that can be checked is checked before anything is built.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    ops::Range,
    sync::Arc,
};

use gpipe_core::{
    StageId,
    lower::{Topology, lower},
    partition::PartitionError,
    remat::{Remat, RematPolicies},
    schedule::{ActionLists, Schedule},
    simulate::{Costs, simulate_with_room},
    validate::{Invalid, validate},
};
use gpipe_runtime::{Peers, Settings, WorkerPool, pool::BuildDevice};

use super::PipelineBuilder;
use crate::{
    LoraRole,
    device::Device,
    error::{Error, Result},
    loss::Losses,
    optim::{Group, ParameterSettings, name_matches, settings},
    pipeline::{
        Pipeline,
        accumulated::UpdateInParts,
        balance::{Balance, stage_weights},
        expected::Carried,
        model::Model,
        parameters::Averages,
        peers::TransportPeers,
        run::{Caches, Engine},
        topology,
        training::Training,
    },
    precision::{LossScale, Precision},
    sequence::{Skip, TieGroup},
    stage::{Edges, Stage, StageConfig},
};

/// An invalid setting, with its message for the user.
fn setting(error: impl std::fmt::Display) -> Error {
    Error::Setting(error.to_string())
}

/// The model cut into stages on devices. The stages' configurations are made from it.
pub(in crate::pipeline) struct Cut {
    precision: Precision,
    balance: Vec<usize>,
    /// Layers of each stage.
    pub(in crate::pipeline) ranges: Vec<Range<usize>>,
    /// Device of each stage.
    placement: Vec<usize>,
    pub(in crate::pipeline) topology: Topology,
    /// What each edge of the topology carries.
    pub(in crate::pipeline) carried: Vec<Carried>,
    /// Edges of each stage.
    edges: Vec<Edges>,
    skips: Arc<[Skip]>,
    pub(in crate::pipeline) ties: Arc<[TieGroup]>,
    /// For each layer, whether anything before it is trained.
    trained_before: Vec<bool>,
    /// Settings and full names by layer and parameter.
    grouped: Grouped,
}

/// The stages of a pipeline before they are built, checked and proven.
pub(in crate::pipeline) struct Staged {
    pub(in crate::pipeline) cut: Cut,
    /// The link capacity, in values, at which no stage waits for room.
    pub(in crate::pipeline) link_capacity: usize,
    pub(in crate::pipeline) on_device: Vec<Vec<StageConfig>>,
}

/// What parameter groups say of each parameter, by layer and parameter.
pub(in crate::pipeline) struct Grouped {
    settings: Vec<Vec<ParameterSettings>>,
    /// Full names. A tied weight has the name of its first use.
    names: Vec<Vec<String>>,
}

impl PipelineBuilder {
    /// Builds the pipeline: checks everything that can be checked without running, then builds each
    /// stage in its device's thread.
    ///
    /// # Errors
    /// [`Error::Model`] (shapes, names, ties), [`Error::Partition`], [`Error::Setting`], or
    /// [`Error::Step`] if a stage cannot be built, for example because its parameters exceed its
    /// memory cap.
    pub fn build(mut self) -> Result<Pipeline> {
        let settings = self.clone();
        let Staged { cut, link_capacity, on_device } = self.staged()?;
        let precision = cut.precision;
        let builds = on_device.into_iter().map(|configs| {
            let build: BuildDevice<Stage> = Box::new(move || Stage::build_all(configs));
            build
        });
        let runtime = Settings { link_capacity, deadline: self.timeout, ..Settings::default() };
        let (pool, peers) = self.spawn(builds.collect(), runtime, &cut.balance)?;
        let parameters = topology::owned(&self.sequence, &cut.ranges, &cut.ties);
        Ok(Pipeline {
            engine: Engine {
                pool,
                peers,
                remat: self.listed(),
                replicas: self.replicas,
                shards_optimizer: self.shard_optimizer,
                topology: cut.topology,
                carried: cut.carried,
                placement: cut.placement,
                schedule: self.schedule,
                rematerializes_early: self.rematerializes_early,
                micro_batches: self.micro_batches,
                link_capacity,
            },
            model: Model {
                by_name: parameters.iter().enumerate().map(|(i, p)| (p.name.clone(), i)).collect(),
                parameters,
                inputs: self.sequence.inputs.positional(self.inputs.len()),
                sequence: self.sequence,
                balance: cut.balance,
                padding: self.padding,
                targets: self.targets,
                precision,
                losses: self.losses,
                metrics: self.metrics,
                training_metrics: self.training_metrics,
                seed: self.seed,
            },
            training: Training {
                step: 0,
                optimizer: self.optimizer,
                rate: self.rate,
                lr_override: None,
                loss_scale: LossScale::new(precision.compute),
                averages: if self.average.is_some() { Averages::Kept } else { Averages::None },
                torn: None,
            },
            update: UpdateInParts::new(self.open_forwards),
            settings,
            shared_ties: Vec::new(),
            caches: Caches::default(),
        })
    }

    /// Checks everything that [`Self::build`] checks before it builds stages: settings, shapes,
    /// names, cuts and the schedule. It creates no parameter and starts no thread.
    ///
    /// # Errors
    /// [`Error::Model`], [`Error::Partition`] or [`Error::Setting`], as [`Self::build`].
    pub fn check(&self) -> Result<()> {
        self.clone().staged().map(drop)
    }

    /// Checks everything, and makes the configuration of each stage.
    pub(in crate::pipeline) fn staged(&mut self) -> Result<Staged> {
        let precision = self.check_settings()?;
        self.inputs = precision.fed(&self.inputs);
        let grouped = self.apply_groups()?;
        let mut cut = self.cut(precision, grouped)?;
        let link_capacity = self.check_schedule(&cut.topology)?;
        let mut on_device: Vec<Vec<StageConfig>> = self.devices.iter().map(|_| vec![]).collect();
        for (stage, edges) in std::mem::take(&mut cut.edges).into_iter().enumerate() {
            on_device[cut.placement[stage]].push(self.stage_config(stage, edges, &cut));
        }
        Ok(Staged { cut, link_capacity, on_device })
    }

    /// Cuts the model into stages on devices.
    fn cut(&self, precision: Precision, grouped: Grouped) -> Result<Cut> {
        let inferred = self.sequence.infer(&self.inputs, self.kind)?;
        self.check_asked(&inferred.asked)?;
        self.check_rows(&inferred.specs)?;
        let ties = self.sequence.ties()?;
        let stages = self.schedule.stages(self.devices.len()).map_err(setting)?;
        let layers = self.sequence.len();
        if layers == 0 {
            return Err(Error::Setting(
                "an empty network: add at least one layer to the sequence".into(),
            ));
        }
        if stages > layers {
            // Checked before the lists of actions are made, which may be very long.
            return Err(PartitionError::TooManyStages { stages, layers }.into());
        }
        let placement = self.schedule.placement(self.devices.len());
        let cost = || self.sequence.costs(&self.inputs, self.kind);
        let actions = self.compute_actions();
        self.check_order_of_rows(&actions, stages)?;
        let weights = stage_weights(&actions, &self.remat, stages, self.micro_batches);
        let mut balance = self.balance.clone();
        if let (Balance::Layers(given), true) = (&mut balance, self.losses.have_layer()) {
            // The caller need not know of the losses' layer: it goes with the last one.
            let all = given.iter().copied().fold(0, usize::saturating_add);
            if let Some(last) = given.last_mut().filter(|_| all == layers - 1) {
                *last += 1;
            }
        }
        let balance = balance.cut(layers, cost, &weights)?;
        let ranges = topology::ranges(&balance);
        let placed: Vec<Device> = placement.iter().map(|&device| self.devices[device]).collect();
        topology::check_ties(&ranges, &placed, &ties)?;
        let trained_before = match self.input_gradients {
            true => vec![true; layers],
            false => self.sequence.trained_before(),
        };
        let (topology, purposes, edges) =
            topology::build(&ranges, &inferred.skips, &ties, &trained_before);
        let carried = Carried::of(&topology, &purposes, &ranges, &self.sequence, &ties, precision);
        Ok(Cut {
            precision,
            balance,
            ranges,
            placement,
            topology,
            carried,
            edges,
            skips: inferred.skips.into(),
            ties: ties.into(),
            trained_before,
            grouped,
        })
    }

    /// Lowers and validates the schedule. Returns the link capacity, in values, at which no stage
    /// waits for room.
    fn check_schedule(&self, topology: &Topology) -> Result<usize> {
        let program = lower(&self.compute_actions(), topology, self.micro_batches)?;
        let (link_capacity, _) =
            simulate_with_room(&program, &Costs::unit(topology.stages)).map_err(Invalid::from)?;
        validate(&program, link_capacity)?;
        self.check_links(&program, link_capacity)?;
        Ok(link_capacity)
    }

    /// Builds the stages of this process, each in its device's thread, after the processes have
    /// agreed on all facts.
    fn spawn(
        &self,
        builds: Vec<BuildDevice<Stage>>,
        settings: Settings,
        balance: &[usize],
    ) -> Result<(WorkerPool<Stage>, Option<Arc<TransportPeers>>)> {
        let Some(transport) = &self.transport else {
            return Ok((WorkerPool::spawn(builds, settings)?, None));
        };
        let others = TransportPeers::new(transport, self.devices.len(), &self.facts(balance))?;
        others.set_unbuffered(self.connect_gpus(transport.as_ref())?);
        let peers: Arc<dyn Peers<Stage>> = Arc::clone(&others) as _;
        let mut pool = WorkerPool::spawn_among(builds, settings, Some(peers))?;
        others.charge(&mut pool)?;
        Ok((pool, Some(others)))
    }

    /// Named facts that must be equal in all processes of the pipeline.
    pub(in crate::pipeline) fn facts(&self, balance: &[usize]) -> Vec<(String, String)> {
        let mut facts: Vec<(String, String)> = [
            ("stages", self.devices.len().to_string()),
            ("layers per stage", format!("{balance:?}")),
            ("micro-batches", self.micro_batches.to_string()),
            ("schedule", self.schedule.to_string()),
            // Processes may read different schedule files under one name.
            ("order of the schedule", self.order()),
            ("re-materialization", self.remat.to_string()),
            ("start of re-materialization", self.rematerializes_early.to_string()),
            ("threads per stage", self.threads.to_string()),
            ("seed", self.seed.to_string()),
            ("dtype", format!("{:?}", self.kind)),
            ("kernels", format!("{:?}", self.kernels)),
            ("largest gradient norm", format!("{:?}", self.max_norm)),
            ("optimizer", format!("{:?}", self.optimizer)),
            ("learning rate", format!("{:?}", self.rate)),
            (
                "parameter groups",
                self.groups.iter().map(Group::fact).collect::<Vec<_>>().join("; "),
            ),
            ("averages", format!("{:?}", self.average)),
            ("inputs", format!("{:?}", self.inputs)),
            ("gradients of the inputs", self.input_gradients.to_string()),
            ("declared inputs", format!("{:?}", self.sequence.inputs)),
            ("padding", format!("{:?}", self.padding)),
            ("declared targets", format!("{:?}", self.targets)),
            ("losses", self.losses.to_string()),
            ("rows of the losses", format!("{:?}", self.loss_rows)),
            ("batch norms follow", format!("{:?}", self.norms_follow)),
            ("links", self.links_fact()),
            ("sharded optimizer state", self.shard_optimizer.to_string()),
            ("number of replicas", self.replicas.as_ref().map_or(1, |all| all.count()).to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        // Each replica computes the norm and the update, which must not differ in a bit.
        if self.replicas.is_some() && self.devices.iter().any(|device| device.gpu().is_none()) {
            let name = "CPU capability (ATEN_CPU_CAPABILITY lowers it)".to_owned();
            facts.push((name, gpipe_bridge::threads::cpu_capability().unwrap_or_default()));
        }
        for layer in &self.sequence.layers {
            let shapes: Vec<String> = layer
                .parameters
                .iter()
                .map(|own| format!("{} {:?} {}", own.name, own.shape, own.trainable))
                .collect();
            facts.push((format!("layer '{}'", layer.name), shapes.join(", ")));
        }
        facts
    }

    /// A hash of the order of a custom schedule; empty for other schedules.
    fn order(&self) -> String {
        let Schedule::Custom(own) = &self.schedule else { return String::new() };
        let mut hasher = DefaultHasher::new();
        own.lists().hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }

    /// The re-materialization policies that the lists of actions follow.
    fn listed(&self) -> RematPolicies {
        match self.profile && self.remat == Remat::Selective.into() {
            // Profiling re-materializes everywhere, so that every layer is measured at it even
            // where a backward immediately follows its forward.
            true => Remat::Always.into(),
            false => self.remat.clone(),
        }
    }

    fn compute_actions(&self) -> ActionLists {
        let actions = self.schedule.actions(self.devices.len(), self.micro_batches);
        self.listed().apply(&actions)
    }

    /// Freezes the parameters of frozen groups. Returns the settings and the full name of every
    /// parameter.
    pub(in crate::pipeline) fn apply_groups(&mut self) -> Result<Grouped> {
        self.sequence.check_frozen()?;
        let mut owners: HashMap<String, String> = HashMap::new();
        let mut names = Vec::new();
        for layer in &self.sequence.layers {
            for parameter in &layer.parameters {
                let full = format!("{}.{}", layer.name, parameter.name);
                // A tied weight is matched by the name of its first use.
                let owner = parameter.tie.as_ref().map(|tie| owners.entry(tie.clone()));
                names.push(owner.map_or(full.clone(), |entry| entry.or_insert(full).clone()));
            }
        }
        let found = settings(&self.groups, &names).map_err(Error::Setting)?;
        let of_optimizer = self.optimizer.iter().flat_map(|own| own.patterns());
        for pattern in self.frozen.iter().map(|(pattern, _)| pattern).chain(of_optimizer) {
            if !names.iter().any(|name| name_matches(pattern, name)) {
                let some: Vec<&str> = names.iter().take(4).map(String::as_str).collect();
                return Err(Error::Setting(format!(
                    "no parameter matches '{pattern}': names are such as {}",
                    some.join(", ")
                )));
            }
        }
        let mut found = found.into_iter().zip(names);
        let is_reduced = Precision::of(self.kind).is_some_and(Precision::is_reduced);
        let mut all = Grouped { settings: Vec::new(), names: Vec::new() };
        for layer in &mut self.sequence.layers {
            let (mut settings, mut names) = (Vec::new(), Vec::new());
            for (parameter, (group, name)) in layer.parameters.iter_mut().zip(&mut found) {
                parameter.trainable &= group.is_none_or(|group| !group.frozen);
                // The last word counts.
                let told = self.frozen.iter().rfind(|(pattern, _)| name_matches(pattern, &name));
                if let (Some((_, frozen)), false) = (told, parameter.buffer) {
                    parameter.trainable = !frozen;
                }
                if parameter.trainable && parameter.lora == LoraRole::Base && is_reduced {
                    return Err(Error::Setting(format!(
                        "{name} cannot be trained: with adapters, the weights of the model are \
                        kept in {:?} alone: leave it frozen, or compute in float32",
                        self.kind
                    )));
                }
                let own = group.map_or_else(ParameterSettings::default, |group| group.settings);
                settings.push(own);
                names.push(name);
            }
            all.settings.push(settings);
            all.names.push(names);
        }
        Ok(all)
    }

    /// The devices of the pipeline that are the GPU of `device`, in order. None on a CPU, and none
    /// of other processes, whose GPUs may have the same number.
    fn on_its_gpu(&self, device: usize) -> impl Iterator<Item = usize> {
        let (own, process) = (self.devices[device], self.process(device));
        let is_it = move |&other: &usize| {
            own.gpu().is_some() && self.devices[other] == own && self.process(other) == process
        };
        (0..self.devices.len()).filter(is_it)
    }

    /// The cap of a device, in bytes. Devices that share a GPU share the sum of their caps: its
    /// statistics do not tell them apart.
    fn cap(&self, device: usize) -> Option<u64> {
        let of = |device: usize| match self.caps.as_slice() {
            [all] => Some(all.0),
            caps => caps.get(device).map(|cap| cap.0),
        };
        let others = self.on_its_gpu(device).filter(|&other| other != device);
        others.map(of).fold(of(device), |sum, cap| Some(sum?.saturating_add(cap?)))
    }

    /// The configuration of one stage.
    fn stage_config(&self, stage: usize, edges: Edges, cut: &Cut) -> StageConfig {
        let (layers, placement) = (cut.ranges[stage].clone(), &cut.placement);
        let (last, device) = (stage + 1 == placement.len(), placement[stage]);
        StageConfig {
            stage: StageId::from_index(stage),
            last,
            named: self.sequence.layers[layers.clone()].to_vec(),
            input_grads: cut.trained_before[layers.clone()].to_vec(),
            settings: cut.grouped.settings[layers.clone()].to_vec(),
            names: cut.grouped.names[layers.clone()].to_vec(),
            layers,
            skips: Arc::clone(&cut.skips),
            ties: Arc::clone(&cut.ties),
            edges: Arc::new(edges),
            peers: self.peers(stage, placement, &cut.topology),
            device: self.devices[device],
            first_on_device: !placement[..stage].contains(&device)
                && self.on_its_gpu(device).all(|other| other >= device),
            shares_device: self.on_its_gpu(device).any(|other| other != device),
            remat: self.remat.of(stage),
            offload_folder: self.offload_folder.clone(),
            deadline: self.timeout,
            seed: self.seed,
            precision: cut.precision,
            kernels: self.kernels,
            cap: self.cap(device),
            max_norm: self.max_norm,
            keep_gradients: self.keep_gradients,
            threads: i32::try_from(self.threads).unwrap_or(1),
            inputs: self.sequence.inputs.clone(),
            targets: self.targets.clone(),
            losses: if last { self.losses.clone() } else { Losses::default() },
            metrics: self.metrics.clone(),
            training_metrics: self.training_metrics,
            loss_rows: self.loss_rows,
            optimizer: self.optimizer.clone(),
            average: self.average,
            norms_follow: self.norms_follow,
            given_parameters: self.given_parameters,
            profile: self.profile,
            alone: self.transport.is_none(),
            replicas: self.replicas.clone(),
            shards_optimizer: self.shard_optimizer,
            observers: self.observers.clone(),
            interrupt: self.interrupt.clone(),
        }
    }
}
