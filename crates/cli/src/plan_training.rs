//! The plans of a training: `--plan FILE`, `--plan auto` and `--schedule auto`.

use std::path::Path;

use gpipe::{Nanos, Sequence, cost::ModelCosts};

use crate::{
    CliError,
    args::ConfigArguments,
    config::Config,
    output::say,
    plan::{file, fixed_balance, placed},
    plan_choices::{Choices, all_schedules, find},
    plan_costs::{has_batch_norms, measured},
    plan_file::{Deployment, PlanFile, Source},
    plan_ways,
    processes::Processes,
    profile,
    task::Task,
    values::ScheduleChoice,
};

/// One stage replaces a pipeline if its step is below this part of the pipeline's.
const ONE_STAGE_BELOW: f64 = 0.98;

/// Changes the replicas and threads of `config` to the plan's, and says so. Replicas that the
/// command line gives stay.
pub(crate) fn deploy(origin: &str, plan: &PlanFile, config: &mut Config, replicas: Option<usize>) {
    let before = config.pipeline.replicas;
    let changed = plan.deploy(config, replicas);
    if !changed.is_empty() {
        let norms = norms(&plan.costs, before != config.pipeline.replicas);
        say!("{origin}: {} (changes the last bits{norms})", changed.join(", "));
    }
}

/// What to add where the number of micro-batches or of replicas changes.
fn norms(costs: &ModelCosts, changes: bool) -> &'static str {
    if changes && has_batch_norms(costs) { ", and what batch norms see" } else { "" }
}

/// The plan that was requested for a training.
pub(crate) enum Wanted {
    Automatic,
    /// A plan from the file with this name.
    Given(String, Box<PlanFile>),
}

/// Parses `--plan`. A file is read now, before any work.
pub(crate) fn wanted(argument: Option<&str>) -> Result<Option<Wanted>, CliError> {
    Ok(match argument {
        None => None,
        Some("auto") => Some(Wanted::Automatic),
        Some(path) => {
            Some(Wanted::Given(path.to_owned(), Box::new(PlanFile::read(Path::new(path))?)))
        }
    })
}

/// The plan that a training follows, if one was requested: read from a file, or made here. Changes
/// `config` to follow it.
pub(crate) fn for_training(
    wanted: Option<Wanted>,
    arguments: &ConfigArguments,
    config: &mut Config,
    (task, model): (&dyn Task, &Sequence),
    processes: &Processes,
) -> Result<Option<PlanFile>, CliError> {
    let (plan, origin) = match wanted {
        None if config.pipeline.schedule == ScheduleChoice::Auto => {
            let pipeline = &config.pipeline;
            let choices = Choices {
                micro_batches: vec![pipeline.micro_batches.min(config.samples_of_a_pipeline())],
                balance: fixed_balance(config, true),
                remat: Some(pipeline.remat.clone()),
                takes_the_best: true,
                ..Choices::default()
            };
            let own = config.before_order();
            let plan = automatic(arguments, &own, (task, model), choices, processes)?;
            (plan, "--schedule auto".to_owned())
        }
        None => return Ok(None),
        Some(Wanted::Automatic) => {
            let (own, choices) = (config.before_order(), Choices::default());
            let plan = automatic(arguments, &own, (task, model), choices, processes)?;
            deploy("--plan auto", &plan, config, None);
            (plan, "--plan auto".to_owned())
        }
        Some(Wanted::Given(path, plan)) => {
            // Replicas and threads were taken from it before processes met.
            if arguments.memory.is_some() {
                return Err(CliError::Usage(format!(
                    "--memory: the caps of {path} hold; leave it out, or plan again with it"
                )));
            }
            let own = profile::subject(config, model)?;
            let own = if plan.analytic { own.of_shapes() } else { own };
            plan.subject.check(&own, &path).map_err(profile::measure_again)?;
            (*plan, path)
        }
    };
    let before = config.pipeline.micro_batches;
    plan.apply(config, &origin)?;
    let after = config.pipeline.micro_batches;
    if before != after {
        let norms = norms(&plan.costs, true);
        say!("{origin}: pipeline.micro_batches {before} -> {after} (changes the last bits{norms})");
    }
    let predicted = &plan.predicted;
    say!(
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
    Ok(Some(plan))
}

/// Plans for the configured stages and memory, with an existing profile or one that is measured
/// now.
fn automatic(
    arguments: &ConfigArguments,
    config: &Config,
    (task, model): (&dyn Task, &Sequence),
    mut choices: Choices,
    processes: &Processes,
) -> Result<PlanFile, CliError> {
    let path = profile::default_path(arguments);
    let mut source = profiled(&path, config, (task, model), processes)?;
    let pipeline = &config.pipeline;
    let devices = placed(pipeline.stages, &pipeline.memory.0, &[])?;
    // What fixes M or the cut is about this pipeline.
    let tries_one_stage = choices.micro_batches.is_empty() && choices.balance.is_none();
    choices.schedules = all_schedules(&source);
    choices.makes_orders = true;
    if source.costs.layers.iter().any(|layer| layer.statistics.0 > 0) {
        // Batch norms depend on the size of micro-batches, so M must not change.
        choices.micro_batches = vec![pipeline.micro_batches];
    }
    let found = find(&mut source, &devices, config, choices.clone())?;
    if let Some(text) = found.within().or_else(|| found.made_text()) {
        say!("{text}");
    }
    let own = file(&source, &devices, config, &found);
    if processes.are_several() || !tries_one_stage {
        return Ok(own);
    }
    let step = found.prediction.step();
    let other = one_stage(arguments, config, (task, model), &choices, step, processes)?;
    Ok(other.unwrap_or(own))
}

/// The costs in the profile at `path`, which is measured now unless it is there.
fn profiled(
    path: &Path,
    config: &Config,
    (task, model): (&dyn Task, &Sequence),
    processes: &Processes,
) -> Result<Source, CliError> {
    let subject = profile::subject(config, model)?;
    // Of several processes, rank 0 looks for a profile, and all of them plan with it.
    let there = processes.decided(|| {
        let found = match path.exists() {
            true => match profile::read(path) {
                Ok(found) => Some(found).filter(|found| found.subject == subject),
                Err(error) => {
                    say!("{error}: it is measured anew");
                    None
                }
            },
            false => None,
        };
        Ok(found)
    })?;
    let found = match there {
        Some(found) => found,
        None => {
            let own = profile::measure_for_plan(config, (task, model), processes)?;
            processes.decided(|| profile::write(path, &own).map(|()| own))?
        }
    };
    Ok(measured(found, path))
}

/// The plan of one stage on as many threads as there are stages, if it is better than `pipeline` by
/// more than costs can be trusted.
fn one_stage(
    arguments: &ConfigArguments,
    config: &Config,
    of: (&dyn Task, &Sequence),
    choices: &Choices,
    pipeline: Nanos,
    processes: &Processes,
) -> Result<Option<PlanFile>, CliError> {
    let devices = placed(config.pipeline.stages, &config.pipeline.memory.0, &[])?;
    let is_it = |deployment: &Deployment| deployment.replicas == 1;
    let mut others = plan_ways::others(config, &devices).into_iter();
    let Some((deployment, own, devices)) =
        others.find(|(deployment, _, left)| is_it(deployment) && left.len() == 1)
    else {
        return Ok(None);
    };
    let path = profile::path_of_threads(arguments, deployment.threads);
    let mut source = profiled(&path, &own, of, processes)?;
    let choices = Choices { takes_the_best: true, is_quiet: true, ..choices.clone() };
    let found = match find(&mut source, &devices, &own, choices) {
        Ok(found) => found,
        // Such as a cap that one stage exceeds.
        Err(error) => {
            say!("left out: one stage with {} threads: {error}", deployment.threads);
            return Ok(None);
        }
    };
    let step = found.prediction.step();
    let is_better = (step.0 as f64) < pipeline.0 as f64 * ONE_STAGE_BELOW;
    say!("one stage with {} threads: {step}; the pipeline: {pipeline}", deployment.threads);
    let mut plan = file(&source, &devices, &own, &found);
    plan.deployment = Some(deployment);
    Ok(is_better.then_some(plan))
}
