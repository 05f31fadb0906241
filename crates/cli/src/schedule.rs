//! `gpipe schedule`: prints a schedule in the format that `--schedule file:PATH` reads, or writes
//! it as PyTorch's CSV.

use gpipe::{Nanos, Schedule};
use gpipe_core::{
    draw::grid,
    lower::{Topology, lower},
    schedule::{ActionLists, DoesNotFit, csv, custom::print},
    simulate::{Costs, Timeline, simulate_with_room},
    validate::{HeldMicroBatches, validate},
};
use gpipe_observe::picture::{self, Panel, Scene};

use crate::{CliError, args::ScheduleArguments, files::write_aside, output::say};

/// Maximum number of actions that are printed.
const ACTIONS_MAX: usize = 1 << 22;

/// Prints a schedule, its bubble, and what each stage holds.
pub(crate) fn run(arguments: &ScheduleArguments) -> Result<(), CliError> {
    let remat = &arguments.remat;
    let names = std::iter::once(&arguments.name).chain(&arguments.beside);
    let all = names.map(|name| Simulated::new(&name.schedule()?, arguments));
    let all = all.collect::<Result<Vec<_>, CliError>>()?;
    let Some(shown) = all.first() else { return Ok(()) };
    let Simulated { schedule, devices, stages, micro_batches, lists, timeline, held } = shown;
    let list = |numbers: &[usize]| {
        let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        numbers.join(" ")
    };
    say!(
        "# {schedule}: {devices} devices, {stages} stages, {micro_batches} micro-batches, \
        re-materialization {remat}"
    );
    say!(
        "# bubble {:.1}%, step {} (a forward and each half of a backward take 1, a whole backward \
        2; messages nothing)",
        100.0 * timeline.bubble(),
        timeline.makespan.0
    );
    say!(
        "# bubble between each device's first and last action, as the zero-bubble papers count it: \
        {:.1}%",
        100.0 * timeline.bubble_within_devices()
    );
    if let Schedule::Custom(own) = schedule
        && !own.omitted().is_empty()
    {
        say!("# {}", own.omitted());
    }
    say!("# inputs held at most, by stage: {}", list(&held.inputs));
    if stages > devices {
        say!("# inputs held at most, by device, each for one stage: {}", list(&held.on_devices));
    }
    say!("# activations held at most, by stage: {}", list(&held.activations));
    if arguments.draw {
        for line in grid(timeline, Nanos(1)).lines() {
            say!("# {line}");
        }
    }
    say!("{}", print(lists).trim_end());
    if let Some(path) = &arguments.svg {
        write_aside(path, &drawing(&all))?;
    }
    if let Some(path) = &arguments.csv {
        let text = csv::print(lists).map_err(|again| {
            CliError::Usage(format!(
                "--csv {}: PyTorch's files have no word for {again}, a re-materialization: leave \
                --remat out",
                path.display()
            ))
        })?;
        write_aside(path, &text)?;
    }
    Ok(())
}

/// A schedule, and a simulation of its step in units of time.
struct Simulated {
    schedule: Schedule,
    devices: usize,
    stages: usize,
    micro_batches: usize,
    lists: ActionLists,
    timeline: Timeline,
    held: HeldMicroBatches,
}

impl Simulated {
    fn new(schedule: &Schedule, arguments: &ScheduleArguments) -> Result<Self, CliError> {
        let (devices, micro_batches) = size(arguments, schedule)?;
        let stages = schedule.stages(devices).map_err(misfit)?;
        arguments.remat.check(stages).map_err(CliError::Usage)?;
        let usage = |error: &dyn std::fmt::Display| CliError::Usage(error.to_string());
        let lists = arguments.remat.apply(&schedule.actions(devices, micro_batches));
        let program = lower(&lists, &Topology::chain(stages), micro_batches);
        let program = program.map_err(|error| usage(&error))?;
        let (capacity, timeline) = simulate_with_room(&program, &Costs::unit_halves(stages))
            .map_err(|error| usage(&error))?;
        let held = validate(&program, capacity).map_err(|error| usage(&error))?;
        let schedule = schedule.clone();
        Ok(Self { schedule, devices, stages, micro_batches, lists, timeline, held })
    }
}

/// The schedules as SVG, one below the other on the same time axis.
fn drawing(all: &[Simulated]) -> String {
    let names: Vec<String> = all.iter().map(|own| own.schedule.to_string()).collect();
    let timelines: Vec<Timeline> =
        all.iter().map(|own| in_milliseconds(own.timeline.clone())).collect();
    let note = "simulated: forwards and halves of backwards take 1 ms each";
    let panels = names.iter().zip(&timelines);
    let title = all.first().map_or_else(String::new, |first| {
        let Simulated { devices, micro_batches, .. } = first;
        format!("{}: {devices} devices, {micro_batches} micro-batches", names.join(" and "))
    });
    picture::svg(&Scene {
        title,
        subtitle: Vec::new(),
        panels: panels.map(|(name, timeline)| Panel::new(name, note, timeline)).collect(),
    })
}

/// The number of devices and micro-batches, from the arguments or from the schedule's file.
fn size(arguments: &ScheduleArguments, schedule: &Schedule) -> Result<(usize, usize), CliError> {
    let (own_devices, own_micro_batches) = match schedule {
        Schedule::Custom(own) => (Some(own.lists().len()), Some(own.micro_batches())),
        _ => (None, None),
    };
    let needs = |name: &str| {
        CliError::Usage(format!(
            "a schedule is for a number of stages and of micro-batches: give {name}"
        ))
    };
    let devices = arguments.stages.or(own_devices).ok_or_else(|| needs("--stages"))?;
    let micro_batches = arguments.micro_batches.or(own_micro_batches);
    let micro_batches = micro_batches.ok_or_else(|| needs("--micro-batches"))?;
    if devices == 0 || micro_batches == 0 {
        return Err(CliError::Usage("--stages and --micro-batches: use 1 or more".into()));
    }
    let stages = schedule.stages(devices).map_err(misfit)?;
    schedule.check_micro_batches(micro_batches).map_err(misfit)?;
    let whole = match schedule {
        // It is made for a multiple of its devices.
        Schedule::Interleaved(_) | Schedule::InterleavedZb(_) => {
            micro_batches.div_ceil(devices).saturating_mul(devices)
        }
        _ => micro_batches,
    };
    if stages.saturating_mul(whole).saturating_mul(4) > ACTIONS_MAX {
        return Err(CliError::Usage(format!(
            "{stages} stages and {micro_batches} micro-batches are more than {ACTIONS_MAX} \
            actions: use fewer"
        )));
    }
    Ok((devices, micro_batches))
}

fn misfit(error: DoesNotFit) -> CliError {
    CliError::Usage(error.to_string())
}

/// Converts a timeline in units of time so that one unit is a millisecond.
fn in_milliseconds(mut timeline: Timeline) -> Timeline {
    let longer = |time: &mut Nanos| *time = Nanos(time.0 * 1_000_000);
    timeline.devices.iter_mut().flatten().for_each(|timed| {
        longer(&mut timed.start);
        longer(&mut timed.end);
    });
    longer(&mut timeline.makespan);
    timeline
}
