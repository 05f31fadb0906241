//! A user's schedule: one line of compute actions for each device, in order.
//!
//! ```text
//! # K = 2, M = 2; a comment extends to the end of its line, and empty lines are ignored
//! 0F0 0F1 0B0 0B1        # device 0
//! 1F0 1B0 1F1 1B1        # device 1
//! ```
//!
//! Stages and micro-batches are numbered from 0. Every stage has one device and runs every
//! micro-batch: F, then optionally R, then B, or I and later W. Like the built-in schedules, a
//! custom one is checked ([`crate::validate`]) on a chain of stages. A mistake is thus found before
//! a model is built, and reported with its line and column.

use std::fmt::Write;

use super::{
    ActionLists,
    csv::{self, Omitted},
};
use crate::{
    action::{Action, Direction, Op},
    ids::{DeviceId, MicroBatch, StageId},
    lower::{LowerError, Program, Topology, lower},
    simulate::{Costs, Waiting, simulate_with_room},
    units::counted,
    validate::{Invalid, validate},
};

/// The longest file, in bytes.
pub const BYTES_MAX: usize = 1 << 24;
/// The name of schedules that were made for a plan.
pub(super) const MADE: &str = "auto";
/// What separates the devices of a schedule in one line.
const LINE: &str = " | ";
/// The most stages, and therefore the most devices.
const STAGES_MAX: usize = 1 << 12;
/// The most micro-batches.
const MICRO_BATCHES_MAX: usize = 1 << 16;

/// A checked schedule for one number of devices (K) and of micro-batches (M).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CustomSchedule {
    name: String,
    lists: ActionLists,
    stages: usize,
    micro_batches: usize,
    omitted: Omitted,
    /// Whether the order was made for a plan, not read from a file.
    is_made: bool,
}

/// What is wrong with a schedule file, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("schedule file:{name}, line {line}, column {column}: {reason}")]
pub struct BadSchedule {
    /// The name of the file.
    pub name: String,
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// What is wrong, with the remedy.
    pub reason: String,
}

/// An action in the file, with its position.
#[derive(Clone, Copy)]
pub(super) struct Token<'a> {
    pub(super) line: usize,
    pub(super) column: usize,
    pub(super) text: &'a str,
}

/// The line, column and reason of an error.
pub(super) type Found = (usize, usize, String);

impl CustomSchedule {
    /// Reads and checks a schedule. Errors refer to it as `name`.
    ///
    /// # Errors
    /// [`BadSchedule`]: a word that is not a compute action, or an order that is incorrect or would
    /// deadlock.
    pub fn parse(name: &str, text: &str) -> Result<Self, BadSchedule> {
        Self::checked(name, read(text, |line, text| Ok(tokens(line, text))), Omitted::default())
    }

    /// Reads and checks a schedule file of `torch.distributed.pipelining` ([`csv`]).
    ///
    /// # Errors
    /// As [`CustomSchedule::parse`].
    pub fn parse_csv(name: &str, text: &str) -> Result<Self, BadSchedule> {
        let mut omitted = Omitted::default();
        let mut empty = None;
        let read = read(text, |line, text| {
            let tokens = csv::tokens(line, text, &mut omitted)?;
            match (tokens.is_empty(), empty) {
                (true, None) => empty = Some(line),
                (false, Some(empty)) => {
                    let reason =
                        "this row has no compute actions, and rows of other devices follow";
                    return Err((empty, 1, reason.to_owned()));
                }
                _ => {}
            }
            Ok(tokens)
        });
        let ascends = read.and_then(|(lists, places)| match csv::descends(&lists) {
            Some((device, position)) => {
                let at = places.get(device).and_then(|own| own.get(position)).copied();
                let (line, column) = at.unwrap_or((1, 1));
                Err((line, column, csv::DESCENDS.to_owned()))
            }
            None => Ok((lists, places)),
        });
        Self::checked(name, ascends, omitted)
    }

    fn checked(
        name: &str,
        read: Result<(ActionLists, Places), Found>,
        omitted: Omitted,
    ) -> Result<Self, BadSchedule> {
        let own =
            |(line, column, reason)| BadSchedule { name: name.to_owned(), line, column, reason };
        let (lists, places) = read.map_err(own)?;
        let (stages, micro_batches) = size(&lists, &places).map_err(own)?;
        check(&lists, &places, stages, micro_batches).map_err(own)?;
        let name = name.to_owned();
        Ok(Self { name, lists, stages, micro_batches, omitted, is_made: false })
    }

    /// A schedule with an order that was made for a plan.
    ///
    /// # Errors
    /// As [`CustomSchedule::parse`].
    pub fn made(lists: &ActionLists) -> Result<Self, BadSchedule> {
        Ok(Self { is_made: true, ..Self::parse(MADE, &print(lists))? })
    }

    /// Reads what [`Schedule::in_full`](super::Schedule::in_full) writes of a made schedule, after
    /// its first word.
    pub(super) fn made_from(text: &str) -> Result<Self, BadSchedule> {
        Ok(Self { is_made: true, ..Self::parse(MADE, &text.replace(LINE, "\n"))? })
    }

    /// Whether the order was made for a plan.
    pub fn is_made(&self) -> bool {
        self.is_made
    }

    /// The lists in one line.
    pub(super) fn in_one_line(&self) -> String {
        print(&self.lists).trim_end().replace('\n', LINE)
    }

    /// What the file contains besides compute actions. Nothing for our own format.
    pub fn omitted(&self) -> Omitted {
        self.omitted
    }

    /// The name that was given to [`CustomSchedule::parse`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The actions of each device.
    pub fn lists(&self) -> &ActionLists {
        &self.lists
    }

    /// The device of each stage.
    pub fn placement(&self) -> Vec<usize> {
        let mut placement = vec![0; self.stages];
        for (device, list) in self.lists.iter().enumerate() {
            for action in list {
                if let Some(place) = placement.get_mut(action.stage.index()) {
                    *place = device;
                }
            }
        }
        placement
    }

    /// The number of stages.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// The number of micro-batches (M) that the schedule is for.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }
}

/// Prints lists in the form that [`CustomSchedule::parse`] reads.
pub fn print(lists: &ActionLists) -> String {
    let mut text = String::new();
    for list in lists {
        let actions: Vec<String> = list.iter().map(Action::to_string).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", actions.join(" "));
    }
    text
}

/// By device, the line and column of each action.
type Places = Vec<Vec<(usize, usize)>>;

fn read<'a>(
    text: &'a str,
    mut tokens: impl FnMut(usize, &'a str) -> Result<Vec<Token<'a>>, Found>,
) -> Result<(ActionLists, Places), Found> {
    if text.len() > BYTES_MAX {
        return Err((1, 1, format!("{} bytes, and the most is {BYTES_MAX}", text.len())));
    }
    let (mut lists, mut places) = (ActionLists::new(), Places::new());
    for (number, line) in text.lines().enumerate() {
        let tokens = tokens(number + 1, line)?;
        if tokens.is_empty() {
            continue;
        }
        let actions = tokens.iter().map(action).collect::<Result<_, _>>()?;
        lists.push(actions);
        places.push(tokens.iter().map(|token| (token.line, token.column)).collect());
    }
    if lists.is_empty() {
        return Err((1, 1, "there are no actions: write one line of them for each device".into()));
    }
    Ok((lists, places))
}

/// The words of a line, without its comment.
fn tokens(line: usize, text: &str) -> Vec<Token<'_>> {
    let text = text.split_once('#').map_or(text, |(before, _)| before);
    let mut found = Vec::new();
    let (mut rest, mut column) = (text, 1);
    loop {
        let start = rest.trim_start();
        column += rest[..rest.len() - start.len()].chars().count();
        if start.is_empty() {
            return found;
        }
        let end = start.find(char::is_whitespace).unwrap_or(start.len());
        found.push(Token { line, column, text: &start[..end] });
        column += start[..end].chars().count();
        rest = &start[end..];
    }
}

fn action(token: &Token<'_>) -> Result<Action, Found> {
    let wrong = |reason: String| Err((token.line, token.column, reason));
    let shown: String = token.text.chars().take(40).collect();
    let action: Action = match shown.parse() {
        Ok(action) if shown.len() == token.text.len() => action,
        Ok(_) => return wrong(format!("'{shown}..' is too long for an action")),
        Err(error) => {
            return wrong(format!(
                "'{shown}' is not an action: {}; write it like 2F0, 2R0, 2B0, 2I0 or 2W0",
                error.reason()
            ));
        }
    };
    let Some(micro_batch) = action.op.computes() else {
        return wrong(format!(
            "'{shown}' is not a compute action (F, R, B, I or W): the others are added when it is \
            run"
        ));
    };
    if action.stage.index() >= STAGES_MAX {
        return wrong(format!("stage {}: at most {STAGES_MAX}, numbered from 0", action.stage));
    }
    if micro_batch.index() >= MICRO_BATCHES_MAX {
        return wrong(format!(
            "micro-batch {micro_batch}: at most {MICRO_BATCHES_MAX}, numbered from 0"
        ));
    }
    Ok(action)
}

/// The number of stages and of micro-batches. Every stage must have all its forwards, so neither
/// number can exceed the size of the file.
fn size(lists: &ActionLists, places: &Places) -> Result<(usize, usize), Found> {
    let all = || lists.iter().flatten().zip(places.iter().flatten());
    let largest = |of: fn(&Action) -> usize| all().max_by_key(|(action, _)| of(action));
    let stage = |action: &Action| action.stage.index();
    let micro_batch = |action: &Action| action.op.computes().unwrap_or_default().index();
    let (Some((last, at)), Some((latest, _))) = (largest(stage), largest(micro_batch)) else {
        return Ok((0, 0));
    };
    let (stages, micro_batches) = (stage(last) + 1, micro_batch(latest) + 1);
    let forwards = all().filter(|(action, _)| matches!(action.op, Op::Forward(_))).count();
    if forwards < stages * micro_batches {
        return Err((
            at.0,
            at.1,
            format!(
                "{} (to {}) and {} (to {}) need {}, there are {forwards}: every stage runs every \
                micro-batch, both numbered from 0",
                counted(stages, "stage"),
                stages - 1,
                counted(micro_batches, "micro-batch"),
                micro_batches - 1,
                counted(stages * micro_batches, "forward")
            ),
        ));
    }
    Ok((stages, micro_batches))
}

/// Checks that the schedule is correct on a chain of stages.
fn check(
    lists: &ActionLists,
    places: &Places,
    stages: usize,
    micro_batches: usize,
) -> Result<(), Found> {
    let last_of = |stage: usize| {
        let devices = lists.iter().zip(places);
        let own = devices.flat_map(|(list, places)| list.iter().zip(places));
        own.filter(|(action, _)| action.stage.index() == stage).map(|(_, at)| *at).next_back()
    };
    if let Some(action) = missing(lists, stages, micro_batches) {
        let (line, column) = last_of(action.stage.index()).unwrap_or((1, 1));
        return Err((
            line,
            column,
            format!("{action} is missing, which stage {} owes", action.stage),
        ));
    }
    let program = lower(lists, &Topology::chain(stages), micro_batches).map_err(|error| {
        let at = match &error {
            LowerError::UnknownStage { action, .. } => last_of(action.stage.index()),
            _ => None,
        };
        let (line, column) = at.unwrap_or((1, 1));
        (line, column, error.to_string())
    })?;
    let checked = match simulate_with_room(&program, &Costs::unit(stages)) {
        // Report a broken rule rather than a deadlock: it explains more.
        Ok((capacity, _)) => validate(&program, capacity),
        Err(_) => validate(&program, micro_batches + 1),
    };
    let error = match checked {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    let place = |device: DeviceId, position: usize| place(&program, places, device, position);
    Err(match error {
        Invalid::Action { device, position, action, reason } => {
            let (line, column) = place(device, position);
            (line, column, format!("{action}: {reason}"))
        }
        Invalid::Missing { stage, reason } => {
            let (line, column) = last_of(stage.index()).unwrap_or((1, 1));
            (line, column, format!("stage {stage}: {reason}"))
        }
        Invalid::Deadlock(deadlock) => {
            let wait = |own: &Waiting| {
                let (line, column) = place(own.device, own.position);
                format!("{} at line {line}, column {column}", awaited(own.action))
            };
            let waits: Vec<String> = deadlock.waiting.iter().take(8).map(wait).collect();
            let (line, column) =
                deadlock.waiting.first().map_or((1, 1), |own| place(own.device, own.position));
            (line, column, format!("deadlock: all wait for each other: {}", waits.join("; ")))
        }
    })
}

/// The first action that is missing to complete a micro-batch.
fn missing(lists: &ActionLists, stages: usize, micro_batches: usize) -> Option<Action> {
    let mut seen = vec![[false; 3]; stages * micro_batches];
    for action in lists.iter().flatten() {
        let Some(m) = action.op.computes() else { continue };
        let own = &mut seen[action.stage.index() * micro_batches + m.index()];
        own[0] |= matches!(action.op, Op::Forward(_));
        own[1] |= matches!(action.op, Op::BackwardInput(_));
        own[2] |= action.op.completes().is_some();
    }
    let owed = seen.iter().enumerate().find_map(|(at, own)| match own {
        [true, _, true] => None,
        [false, ..] => Some((at, Op::Forward as fn(MicroBatch) -> Op)),
        [true, true, false] => Some((at, Op::BackwardWeight)),
        [true, false, false] => Some((at, Op::Backward)),
    });
    let (at, op) = owed?;
    let stage = StageId::from_index(at / micro_batches);
    Some(Action { stage, op: op(MicroBatch::from_index(at % micro_batches)) })
}

/// What a compute action waits for, from the send or receive of a chain that blocks it.
fn awaited(action: Action) -> String {
    let stage = action.stage.index();
    let (Some(transfer), (before, after)) =
        (action.op.transfer(), (stage.saturating_sub(1), stage + 1))
    else {
        return action.to_string();
    };
    let micro_batch = transfer.micro_batch.unwrap_or_default();
    let (letters, from, to) = match transfer.direction {
        Direction::Forward => ("F", before, after),
        Direction::Backward => ("B or I", after, before),
    };
    match action.op {
        Op::Send(_) => format!(
            "stage {stage} waits until stage {to} takes a message before that of micro-batch \
            {micro_batch}"
        ),
        _ => format!("stage {stage} awaits {letters} of micro-batch {micro_batch} on stage {from}"),
    }
}

/// The place of the compute action that a lowered action belongs to. Sends come after their compute
/// action, all other actions before or at it.
fn place(program: &Program, places: &Places, device: DeviceId, position: usize) -> (usize, usize) {
    let list = program.devices.get(device.index()).map_or(&[][..], Vec::as_slice);
    let computes = |action: &&Action| action.op.computes().is_some();
    let before = list.iter().take(position).filter(computes).count();
    let is_send = list.get(position).is_some_and(|action| matches!(action.op, Op::Send(_)));
    let number = if is_send { before.saturating_sub(1) } else { before };
    let own = places.get(device.index()).map_or(&[][..], Vec::as_slice);
    own.get(number).or(own.last()).copied().unwrap_or((1, 1))
}
