//! `gpipe schedule`: prints a schedule in the form that is read.

use gpipe::{Nanos, Schedule};
use gpipe_core::{
    draw::grid,
    lower::{Topology, lower},
    schedule::{DoesNotFit, custom::print},
    simulate::{Costs, Timeline, simulate_with_room},
    validate::validate,
};
use gpipe_observe::picture::{self, Panel, Scene};

use crate::{CliError, args::ScheduleArguments, files::write_aside, output::say};

/// Most actions that are printed.
const ACTIONS_MAX: usize = 1 << 22;

/// Prints a schedule, with its bubble and what it holds.
pub(crate) fn run(arguments: &ScheduleArguments) -> Result<(), CliError> {
    let (schedule, remat) = (arguments.name.schedule()?, &arguments.remat);
    let (devices, micro_batches) = size(arguments, &schedule)?;
    let stages = schedule.stages(devices).map_err(misfit)?;
    remat.check(stages).map_err(CliError::Usage)?;
    let lists = remat.apply(&schedule.actions(devices, micro_batches));
    let program = lower(&lists, &Topology::chain(stages), micro_batches);
    let program = program.map_err(|error| CliError::Usage(error.to_string()))?;
    let (capacity, timeline) = simulate_with_room(&program, &Costs::unit_halves(stages))
        .map_err(|error| CliError::Usage(error.to_string()))?;
    let held = validate(&program, capacity).map_err(|error| CliError::Usage(error.to_string()))?;
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
    say!("# inputs held at most, by stage: {}", list(&held.inputs));
    say!("# activations held at most, by stage: {}", list(&held.activations));
    if arguments.draw {
        for line in grid(&timeline, Nanos(1)).lines() {
            say!("# {line}");
        }
    }
    say!("{}", print(&lists).trim_end());
    if let Some(path) = &arguments.svg {
        let timeline = in_milliseconds(timeline);
        let note = "simulated: forwards and halves of backwards take 1 ms each";
        let scene = Scene {
            title: format!("{schedule}: {devices} devices, {micro_batches} micro-batches"),
            subtitle: Vec::new(),
            panels: vec![Panel::new("schedule", note, &timeline)],
        };
        write_aside(path, &picture::svg(&scene))?;
    }
    Ok(())
}

/// How many devices and micro-batches it is for: as the arguments say, or the file.
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
    // An interleaved one is made for a multiple of its devices.
    let whole = micro_batches.div_ceil(devices).saturating_mul(devices);
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

/// A timeline in units of time, of which one becomes a millisecond.
fn in_milliseconds(mut timeline: Timeline) -> Timeline {
    let longer = |time: &mut Nanos| *time = Nanos(time.0 * 1_000_000);
    timeline.devices.iter_mut().flatten().for_each(|timed| {
        longer(&mut timed.start);
        longer(&mut timed.end);
    });
    longer(&mut timeline.makespan);
    timeline
}
