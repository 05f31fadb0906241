//! The plans that trainings, traces and ledgers follow: `--plan FILE`, `--plan auto` and
//! `--schedule auto`.

use std::path::{Path, PathBuf};

use gpipe::{Nanos, Sequence, cost::ModelCosts, profile::Profile};

use crate::{
    CliError,
    args::{PipelineArguments, PlanChoice},
    config::Config,
    machine,
    output::prose,
    plan::{fixed_balance, placed},
    plan_choices::{Choices, all_schedules, file, find, usual_micro_batches},
    plan_costs::measured,
    plan_file::{Deployment, PlanFile, Source},
    plan_ways::{self, Way},
    processes::Processes,
    profile, setup,
    task::{self, Task, Vocabulary},
    values::ScheduleChoice,
};

/// Another way to use the cores replaces a pipeline if its step is below this part of the
/// pipeline's, because costs cannot be trusted more.
const OTHERS_BELOW: f64 = 0.98;

/// Where plans that are made here come from.
const PLAN_AUTO: &str = "--plan auto";
const SCHEDULE_AUTO: &str = "--schedule auto";

/// Changes the replicas and threads of `config` to the plan's, and says so. Replicas that the
/// command line gives stay.
pub(crate) fn deploy(origin: &str, plan: &PlanFile, config: &mut Config, replicas: Option<usize>) {
    let before = config.pipeline.replicas;
    let changed = plan.deploy(config, replicas);
    if !changed.is_empty() {
        let norms = norms(&plan.costs, before != config.pipeline.replicas);
        prose!("{origin}: {} (changes the last bits{norms})", changed.join(", "));
    }
}

/// What to add where the number of micro-batches or of replicas changes.
fn norms(costs: &ModelCosts, changes: bool) -> &'static str {
    if changes && costs.has_batch_norms() { ", and what batch norms see" } else { "" }
}

/// The plan that was requested for a training.
pub(crate) enum Wanted {
    /// `--plan auto`, until the plan is made.
    Automatic,
    /// A plan that was made here, for this flag.
    Made(&'static str, Box<PlanFile>),
    /// A plan from the file with this name.
    Given(String, Box<PlanFile>),
}

impl Wanted {
    /// The plan that `--plan auto` made.
    pub(crate) fn made(plan: PlanFile) -> Self {
        Self::Made(PLAN_AUTO, Box::new(plan))
    }

    /// The plan and where it is from, once there is one.
    pub(crate) fn plan(&self) -> Option<(&str, &PlanFile)> {
        match self {
            Self::Automatic => None,
            Self::Made(origin, plan) => Some((origin, plan)),
            Self::Given(origin, plan) => Some((origin, plan)),
        }
    }
}

/// Parses `--plan`, beside `--stages`. A file is read now, before any work.
pub(crate) fn wanted(
    PlanChoice { origin }: &PlanChoice,
    stages: Option<usize>,
) -> Result<Option<Wanted>, CliError> {
    let path = match origin.as_deref() {
        None => return Ok(None),
        Some("auto") => return Ok(Some(Wanted::Automatic)),
        Some(path) => path,
    };
    if let Some(stages) = stages {
        return Err(CliError::Usage(format!(
            "--stages {stages}: the plan {path} has a number of stages: leave --stages out, or use \
            --plan auto"
        )));
    }
    Ok(Some(Wanted::Given(path.to_owned(), Box::new(PlanFile::read(Path::new(path))?))))
}

/// Opens the data after everything has been checked that can be without them. A plan decides about
/// the pipeline: with one, only the rest is checked.
pub(crate) fn open(
    plan: &PlanChoice,
    config: &Config,
    given: Option<Vocabulary>,
) -> Result<Box<dyn Task>, CliError> {
    if plan.origin.is_none() {
        return setup::open(config, given);
    }
    setup::check(&config.before_plan(), given.as_ref())?;
    task::open(config, given)
}

/// The plan of a command that measures a few steps.
pub(crate) struct Following {
    wanted: Option<Wanted>,
    /// With the replicas of the configuration: a plan that is made here has as many.
    arguments: PipelineArguments,
}

impl Following {
    /// Reads the plan if it is a file, before any work, and changes the replicas and threads of
    /// `config` to its own.
    pub(crate) fn begin(
        plan: &PlanChoice,
        arguments: &PipelineArguments,
        config: &mut Config,
    ) -> Result<Self, CliError> {
        let wanted = wanted(plan, arguments.stages)?;
        if let Some((origin, plan)) = wanted.as_ref().and_then(Wanted::plan) {
            deploy(origin, plan, config, arguments.replicas);
        }
        let replicas = Some(config.pipeline.replicas);
        Ok(Self { wanted, arguments: PipelineArguments { replicas, ..arguments.clone() } })
    }

    /// Makes the plan unless it is there, and changes `config` to follow it.
    pub(crate) fn follow(
        self,
        config: &mut Config,
        of: (&dyn Task, &Sequence),
        processes: &Processes,
    ) -> Result<(), CliError> {
        let wanted = made(self.wanted, &self.arguments, config, of, processes)?;
        follow(wanted, &self.arguments, config, of.1).map(drop)
    }
}

/// Makes the plan of `--plan auto` and of `--schedule auto`.
pub(crate) fn made(
    wanted: Option<Wanted>,
    arguments: &PipelineArguments,
    config: &Config,
    of: (&dyn Task, &Sequence),
    processes: &Processes,
) -> Result<Option<Wanted>, CliError> {
    let (name, choices) = match wanted {
        None if config.pipeline.schedule == ScheduleChoice::Auto => {
            let pipeline = &config.pipeline;
            let choices = Choices {
                micro_batches: vec![pipeline.micro_batches.min(config.samples_of_a_pipeline())],
                balance: fixed_balance(config, of.1.len(), pipeline.stages)?,
                remat: Some(pipeline.remat.clone()),
                takes_the_best: true,
                ..Choices::default()
            };
            (SCHEDULE_AUTO, choices)
        }
        Some(Wanted::Automatic) => (PLAN_AUTO, Choices::default()),
        wanted => return Ok(wanted),
    };
    let plan = automatic(arguments, &config.before_order(), of, choices, processes)?;
    Ok(Some(Wanted::Made(name, Box::new(plan))))
}

/// Changes `config` to follow a plan, and returns the plan.
pub(crate) fn follow(
    wanted: Option<Wanted>,
    arguments: &PipelineArguments,
    config: &mut Config,
    model: &Sequence,
) -> Result<Option<PlanFile>, CliError> {
    let Some((origin, plan)) = wanted.as_ref().and_then(Wanted::plan) else { return Ok(None) };
    if let Some(Wanted::Given(..)) = &wanted {
        if arguments.config.memory.is_some() {
            return Err(CliError::Usage(format!(
                "--memory: the caps of {origin} hold; leave it out, or plan again with it"
            )));
        }
        let own = profile::subject(config, model)?;
        let own = if plan.analytic { own.of_shapes() } else { own };
        plan.subject.check(&own, origin).map_err(profile::measure_again)?;
    }
    // Before several processes or replicas meet, this was done for the plan of a file.
    deploy(origin, plan, config, arguments.replicas);
    let before = config.pipeline.micro_batches;
    plan.apply(config, origin)?;
    let after = config.pipeline.micro_batches;
    if before != after {
        let norms = norms(&plan.costs, true);
        prose!(
            "{origin}: pipeline.micro_batches {before} -> {after} (changes the last bits{norms})"
        );
    }
    let predicted = &plan.predicted;
    prose!(
        "plan: {} stages, M = {}, {}, re-materialization {}; predicted: {}{} per step, bubble \
        {:.1}%, peak {} ({})",
        plan.plan.balance.len(),
        plan.plan.micro_batches,
        plan.plan.schedule,
        plan.plan.remat,
        predicted.step,
        predicted.quartiles(),
        100.0 * predicted.bubble,
        predicted.peaks.iter().max().copied().unwrap_or_default(),
        plan.source
    );
    Ok(Some(plan.clone()))
}

/// Plans for the configured stages and memory, with an existing profile or one that is measured
/// now.
fn automatic(
    arguments: &PipelineArguments,
    config: &Config,
    (task, model): (&dyn Task, &Sequence),
    mut choices: Choices,
    processes: &Processes,
) -> Result<PlanFile, CliError> {
    let chooses = choices.micro_batches.is_empty();
    let path = profile::default_path(&arguments.config);
    let mut source = profiled(&path, config, chooses, (task, model), processes)?;
    let pipeline = &config.pipeline;
    let devices = placed(pipeline.stages, &pipeline.memory.0, &[])?;
    // What fixes M or the cut is about this pipeline.
    let has_other_ways = choices.micro_batches.is_empty() && choices.balance.is_none();
    choices.schedules = all_schedules(&source);
    choices.makes_orders = true;
    if source.costs.has_batch_norms() {
        choices.keep_sizes(pipeline.micro_batches);
    }
    let found = find(&mut source, &devices, config, choices.clone())?;
    if let Some(text) = found.within().or_else(|| found.made_text()) {
        prose!("{text}");
    }
    let are_alike = pipeline.memory.0.len() <= 1;
    let are_here = devices.len() <= machine::cores();
    if processes.are_several() || !has_other_ways || !are_alike || !are_here {
        return Ok(file(&source, &devices, config, &found));
    }
    let of_threads = |config: &Config, deployment: Deployment| {
        let path = profile::path_of_threads(&arguments.config, deployment.threads);
        match config.pipeline.stages == 1 && deployment.replicas == 1 {
            true => profiled(&path, config, chooses, (task, model), processes).map(Some),
            // Measuring all of them would take longer than a short training.
            false => plan_ways::costs_of_threads(config, profile::existing(path).as_deref()),
        }
    };
    choices.takes_the_best = true;
    choices.one_replica = arguments.replicas.is_some();
    let mut others = plan_ways::planned((config, &devices, &source), &choices, of_threads)?;
    let deployment = Deployment { replicas: 1, threads: pipeline.threads_per_stage };
    let (config, sums) = (config.clone(), Nanos(0));
    let own = Way { deployment, source, devices, config, found, sums };
    let step = own.step();
    others.sort_by_key(Way::step);
    let best = others.first().filter(|way| way.step().0 as f64 <= step.0 as f64 * OTHERS_BELOW);
    let mark = |is_chosen: bool| if is_chosen { " (chosen)" } else { "" };
    if !others.is_empty() {
        prose!("ways to use the cores, a step of each:\n  {}{}", own.text(), mark(best.is_none()));
    }
    for (index, way) in others.iter().enumerate() {
        prose!("  {}{}", way.text(), mark(index == 0 && best.is_some()));
    }
    Ok(best.unwrap_or(&own).file())
}

/// The costs in the profile at `path`, which is measured now unless it is there. `chooses` says
/// whether a number of micro-batches is still to be chosen, among sizes that were measured.
fn profiled(
    path: &Path,
    config: &Config,
    chooses: bool,
    (task, model): (&dyn Task, &Sequence),
    processes: &Processes,
) -> Result<Source, CliError> {
    let subject = profile::subject(config, model)?;
    let extent = profile::for_plan(config, model)?;
    let short = extent.is_short.then(|| profile::path_of_short(path));
    // Of several processes, rank 0 looks for profiles, and all of them plan with these.
    let mut there: Vec<(PathBuf, Profile)> = processes.decided(|| {
        let mut all = Vec::new();
        for path in [Some(path), short.as_deref()].into_iter().flatten() {
            match path.exists().then(|| profile::read(path)) {
                Some(Ok(found)) if found.subject == subject => all.push((path.to_owned(), found)),
                Some(Err(error)) => prose!("{error}: it is not used"),
                _ => {}
            }
        }
        Ok(all)
    })?;
    let (size, samples) = (config.samples_of_a_micro_batch(), config.samples_of_a_pipeline());
    let candidates = usual_micro_batches(config);
    let is_of_use = |costs: &ModelCosts| match costs.has_batch_norms() {
        // They fix the size of micro-batches.
        true => costs.has_size(size),
        false => !chooses || candidates.iter().any(|m| costs.has_size(samples.div_ceil(*m))),
    };
    if let Some(at) = there.iter().position(|(_, found)| is_of_use(&found.costs)) {
        let (path, found) = there.swap_remove(at);
        return Ok(measured(found, &path));
    }
    let path = short.as_deref().unwrap_or(path);
    let mut own = profile::measure_for_plan(config, (task, model), &extent, processes)?;
    if !there.is_empty() {
        prose!("{}: micro-batches of {size} samples are added", path.display());
    }
    // What was there may have been measured with more care.
    for (_, old) in there.into_iter().rev() {
        let added = std::mem::replace(&mut own.costs, old.costs);
        own.costs.add_sizes_of(added);
    }
    let own = processes.decided(|| profile::write(path, &own).map(|()| own))?;
    Ok(measured(own, path))
}
