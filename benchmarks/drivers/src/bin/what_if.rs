//! What two designs would save that gpipe does not have, simulated from measured costs: for
//! `docs/design/decisions`. Prints rows of Markdown tables.
//!
//! - *overlap*: a device begins the next step's forwards as soon as its own update is done, instead
//!   of after the update of all. Several steps are simulated as one program with as many
//!   micro-batches, and the time of one is the difference between eight steps and four, divided by
//!   four. The norm and the update of the slowest device are added to it.
//! - *vocabulary*: the last layer and the loss are divided evenly over all devices. Messages and
//!   waits between the parts take no time here, so this is the most that it could save.
//!
//! Usage: `what_if profile=FILE [repeat=3]`
//!
//! `repeat`: how often the layers between the first and the last are repeated, to have enough for
//! 16 devices. There are four micro-batches for each device, of the smallest size that was
//! measured.

use gpipe::{Remat, Schedule, profile::Profile};
use gpipe_core::{
    Action, MicroBatch, Nanos, Op,
    cost::ModelCosts,
    lower::{Topology, lower},
    partition::by_cost,
    plan::{Plan, PlanDevice, Request, predict, search},
    schedule::ActionLists,
    simulate::{Costs, StageCost, simulate_with_room},
    topology::ranges,
};
use gpipe_drivers::{Arguments, Failure, longer};

const DEVICES: [usize; 4] = [2, 4, 8, 16];
/// Numbers of steps whose difference is taken.
const STEPS: [usize; 2] = [4, 8];

fn main() -> Result<(), Failure> {
    let mut arguments = Arguments::read()?;
    let path: String = arguments.take("profile", "out/gpt.profile.json")?;
    let profile = Profile::from_json(&std::fs::read_to_string(&path)?, &path)?;
    let costs = longer(&profile.costs, arguments.take("repeat", "3")?);
    let samples = costs.sizes.keys().next().copied().ok_or("the profile has no sizes")?;
    println!("| K | M | schedule | step, ms | overlapped, ms | saved, % |");
    println!("|---|---|---|---|---|---|");
    for count in DEVICES {
        for schedule in [Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbV] {
            overlap(&costs, samples, count, &schedule)?;
        }
    }
    println!("\n| K | M | schedule | step, ms | head divided, ms | saved, % |");
    println!("|---|---|---|---|---|---|");
    for count in DEVICES {
        for schedule in [Schedule::OneFOneB, Schedule::ZbH1] {
            vocabulary(&costs, samples, count, &schedule)?;
        }
    }
    Ok(())
}

/// The best cut that the planner finds, without re-materialization.
fn planned(
    costs: &ModelCosts,
    samples: usize,
    count: usize,
    schedule: &Schedule,
) -> Result<Option<Plan>, Failure> {
    let devices = vec![PlanDevice::default(); count];
    let micro_batches = 4 * count;
    let found = search(&Request {
        model: costs,
        devices: &devices,
        samples: micro_batches * samples,
        stages: vec![count],
        micro_batches: vec![micro_batches],
        schedules: vec![schedule.clone()],
        makes_orders: false,
        balance: None,
        remat: Some(Remat::Never.into()),
        budget: Request::BUDGET,
        usual: None,
    });
    Ok(found.ok().map(|found| found.plan))
}

fn row(count: usize, schedule: &Schedule, now: Nanos, then: Nanos) {
    let (now, then) = (now.as_ms(), then.as_ms());
    let saved = 100.0 * (1.0 - then / now);
    println!("| {count} | {} | `{schedule}` | {now:.0} | {then:.0} | {saved:.1} |", 4 * count);
}

/// How long the lists take, one after the other and `steps` times.
fn repeated(
    lists: &ActionLists,
    micro_batches: usize,
    stages: &[StageCost],
    steps: usize,
) -> Result<Nanos, Failure> {
    let later = |action: &Action, step: usize| {
        let m = |m: MicroBatch| MicroBatch::from_index(step * micro_batches + m.index());
        let op = match action.op {
            Op::Forward(own) => Op::Forward(m(own)),
            Op::Backward(own) => Op::Backward(m(own)),
            Op::BackwardInput(own) => Op::BackwardInput(m(own)),
            Op::BackwardWeight(own) => Op::BackwardWeight(m(own)),
            op => op,
        };
        Action { op, ..*action }
    };
    let all: ActionLists = lists
        .iter()
        .map(|list| {
            (0..steps).flat_map(|step| list.iter().map(move |own| later(own, step))).collect()
        })
        .collect();
    let program = lower(&all, &Topology::chain(stages.len()), steps * micro_batches)?;
    Ok(simulate_with_room(&program, &Costs::of_stages(stages.to_vec()))?.1.makespan)
}

fn overlap(
    costs: &ModelCosts,
    samples: usize,
    count: usize,
    schedule: &Schedule,
) -> Result<(), Failure> {
    let Some(plan) = planned(costs, samples, count, schedule)? else { return Ok(()) };
    let devices = vec![PlanDevice::default(); count];
    let prediction = predict(costs, &devices, plan.micro_batches * samples, &plan)?;
    let stages: Vec<StageCost> = prediction.stages.iter().map(|stage| stage.cost).collect();
    let lists = schedule.actions(count, plan.micro_batches);
    let [few, many] = STEPS.map(|steps| repeated(&lists, plan.micro_batches, &stages, steps));
    let mut ends = vec![Nanos(0); count];
    for (stage, &device) in stages.iter().zip(&prediction.placement) {
        ends[device] += stage.norm + stage.update;
    }
    let end = ends.into_iter().max().unwrap_or_default();
    let each = Nanos((many? - few?).0 / (STEPS[1] - STEPS[0]) as u64) + end;
    row(count, schedule, prediction.step(), each.min(prediction.step()));
    Ok(())
}

fn vocabulary(
    costs: &ModelCosts,
    samples: usize,
    count: usize,
    schedule: &Schedule,
) -> Result<(), Failure> {
    let Some(plan) = planned(costs, samples, count, schedule)? else { return Ok(()) };
    let devices = vec![PlanDevice::default(); count];
    let micro_batches = plan.micro_batches;
    let now = predict(costs, &devices, micro_batches * samples, &plan)?.step();
    let layers = costs.at(samples, schedule);
    let head = costs.layers.len() - 1;
    let time = |layer: usize| {
        let own = layers[layer];
        (own.forward_kept + own.backward_kept.max(own.backward_input + own.backward_weight)).0
    };
    // The last range of `stage_cost` would bring the loss, so the head is taken off before.
    let balance = by_cost(&(0..head).map(time).collect::<Vec<_>>(), count)?;
    let whole = costs.stage_cost(head..head + 1, &layers, Remat::Never, count as f64);
    let stages = ranges(&balance).into_iter().map(|range| {
        let own = costs.stage_cost(range, &layers, Remat::Never, 1.0);
        StageCost {
            forward_kept: own.forward_kept + whole.forward_kept,
            backward_kept: own.backward_kept + whole.backward_kept,
            backward_input_kept: own.backward_input_kept + whole.backward_input_kept,
            backward_weight: own.backward_weight + whole.backward_weight,
            norm: own.norm + whole.norm,
            update: own.update + whole.update,
            ..own
        }
    });
    let stages: Vec<StageCost> = stages.collect();
    let then = repeated(&schedule.actions(count, micro_batches), micro_batches, &stages, 1)?;
    row(count, schedule, now, then.min(now));
    Ok(())
}
