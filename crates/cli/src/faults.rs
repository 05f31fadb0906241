//! Fault injection for the tests of this command, controlled by the environment.
//!
//! It delays file operations, and kills or stops the process at a chosen moment. Only builds with
//! the feature `fault-injection` have it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use gpipe::PipelineBuilder;
use gpipe_checkpoint::files::Files;
use gpipe_core::Action;
use signal_hook::{
    consts::{SIGKILL, SIGSTOP},
    low_level::raise,
};

/// Delay of every file operation of a checkpoint, in milliseconds.
const DELAY: &str = "GPIPE_TEST_FILE_DELAY_MS";
/// The number, from 1, of the file operation before which the process kills itself. `7@1` applies
/// only if `RANK` is 1.
const KILL: &str = "GPIPE_TEST_KILL_AT_FILE_OPERATION";
/// A signal (`KILL` or `STOP`), an action and a count, such as `KILL 1B2 5`. The process sends
/// itself the signal before it runs that action for the fifth time.
///
/// Several processes may have the variable. It takes effect in the one with the action's stage.
const AT_ACTION: &str = "GPIPE_TEST_AT_ACTION";

/// The file system for checkpoints, with faults.
pub(crate) fn files() -> Files {
    let text = |name: &str| std::env::var(name).ok();
    let number = |text: String| text.parse::<u64>().ok();
    let delay = text(DELAY).and_then(number);
    let kill = text(KILL).and_then(|asked| match asked.split_once('@') {
        Some((operation, rank)) => {
            number(operation.to_owned()).filter(|_| text("RANK").is_some_and(|own| own == rank))
        }
        None => number(asked),
    });
    if delay.is_none() && kill.is_none() {
        return Files::default();
    }
    let operations = AtomicU64::new(0);
    Files::with_hook(Arc::new(move |_, _| {
        std::thread::sleep(Duration::from_millis(delay.unwrap_or(0)));
        if kill == Some(operations.fetch_add(1, Ordering::SeqCst) + 1) {
            raise(SIGKILL)?;
        }
        Ok(())
    }))
}

/// Adds the faults before actions to a pipeline.
pub(crate) fn actions(builder: PipelineBuilder) -> PipelineBuilder {
    let Some((signal, at, time)) = std::env::var(AT_ACTION).ok().and_then(|text| parse(&text))
    else {
        return builder;
    };
    let times = AtomicU64::new(0);
    builder.before_action(move |action| {
        if action == at && times.fetch_add(1, Ordering::SeqCst) + 1 == time {
            let failed = |error: std::io::Error| gpipe::LayerError::Value(error.to_string());
            raise(signal).map_err(failed)?;
        }
        Ok(())
    })
}

fn parse(text: &str) -> Option<(i32, Action, u64)> {
    let mut words = text.split(' ');
    let signal = match words.next()? {
        "KILL" => SIGKILL,
        "STOP" => SIGSTOP,
        _ => return None,
    };
    Some((signal, words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}
