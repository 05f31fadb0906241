//! How a worker waits: for its device, and for other stages.

use std::time::{Duration, Instant};

use gpipe_core::{Action, DeviceId, Transfer};

use super::{Step, Stop, Worker};
use crate::{
    failure::{StepError, describe_wait, peer},
    link::WaitEnd,
    stage::{Progress, StageExecutor},
};

/// An action is given to a device that has not done this many earlier ones: one runs, and the next
/// is there when it ends. It also bounds how long a device that hangs goes unnoticed.
pub(super) const RUN_AHEAD: usize = 2;

impl<'a, E: StageExecutor> Worker<'a, E> {
    /// Waits until the device has at most `most` open actions.
    pub(super) fn await_device(&mut self, action: Action, most: usize) -> Result<(), Stop> {
        let mut pause = Pause::default();
        while self.look(action)? > most {
            if self.step.failure.is_raised() {
                return Err(Stop);
            }
            pause.take();
        }
        Ok(())
    }

    /// Asks the device how many actions are open. It shows life if it has come on since it was last
    /// asked, or has nothing to do.
    fn look(&mut self, action: Action) -> Result<usize, Stop> {
        // What fails on the device failed in the oldest action that was open.
        let oldest = self.oldest(self.open).map_or(action, |position| self.list()[position]);
        let Progress { open, waits } = self.guard(oldest, 0, E::progress)?;
        if open < self.open {
            self.step.pulses.come_on(self.device);
        } else if open == 0 || waits {
            self.step.pulses.beat(self.device);
        }
        self.step.pulses.leave_undone(self.device, self.oldest(open));
        self.open = open;
        Ok(open)
    }

    /// The position of the oldest of `open` actions, which are the last that were given.
    fn oldest(&self, open: usize) -> Option<usize> {
        let given = self.list().iter().enumerate().take(self.actions.len()).rev();
        let computing = given.filter(|(_, action)| !action.op.communicates());
        computing.take(open).last().map(|(position, _)| position)
    }

    fn list(&self) -> &'a [Action] {
        self.step.program.devices.get(self.device).map_or(&[], Vec::as_slice)
    }

    /// Waits until the stage's thread may use a value that has arrived.
    pub(super) fn await_value(
        &mut self,
        action: Action,
        index: usize,
        transfer: Transfer,
        value: &E::Value,
    ) -> Result<(), Stop> {
        let (mut pause, slice) = (Pause::default(), self.slice());
        while !self.guard(action, index, |executor| executor.is_ready(transfer, value))? {
            if self.step.failure.is_raised() {
                return Err(Stop);
            }
            if pause.take() > slice {
                pause = Pause::default();
                if !self.is_patient(action) {
                    return Err(self.waited(action, WaitEnd::Expired));
                }
            }
        }
        Ok(())
    }

    /// The interval at which a wait for another stage is looked after.
    pub(super) fn slice(&self) -> Duration {
        (self.step.deadline / 4).clamp(Duration::from_millis(1), Duration::from_millis(50))
    }

    /// Looks after a wait for another stage. Shows life, and returns whether the other stage's
    /// pulse allows another interval.
    pub(super) fn is_patient(&mut self, action: Action) -> bool {
        if self.look(action).is_err() {
            return false;
        }
        let (step, peer) = (self.step, self.peer_device(action));
        peer.is_none_or(|peer| peer == self.device || step.pulses.silence(peer) <= step.deadline)
    }

    fn peer_device(&self, action: Action) -> Option<usize> {
        let peer = peer(&self.step.program, action)?;
        self.step.program.placement().get(peer.index()).copied().flatten().map(DeviceId::index)
    }

    pub(super) fn waited(&self, action: Action, end: WaitEnd) -> Stop {
        if end == WaitEnd::Expired {
            let program = &self.step.program;
            let peer_stage = peer(program, action).unwrap_or_default();
            let device = self.peer_device(action).unwrap_or_default();
            self.step.fail(StepError::Deadline {
                what: describe_wait(program, action),
                peer: peer_stage,
                silence: self.step.pulses.silence(device),
                doing: doing(self.step, device) + &self.step.process(device),
            });
        }
        Stop
    }
}

/// ", in 3F4" if `device` is inside an action, else empty. For a GPU that is behind also what it
/// had not done.
pub(crate) fn doing<E: StageExecutor>(step: &Step<E>, device: usize) -> String {
    let list = step.program.devices.get(device).map_or(&[][..], Vec::as_slice);
    let at = |position: Option<usize>| list.get(position?);
    let Some(action) = at(step.pulses.position(device)) else { return String::new() };
    match at(step.pulses.undone(device)) {
        Some(undone) => format!(", in {action}; when last asked, the GPU had not done {undone}"),
        None => format!(", in {action}"),
    }
}

/// The pauses between looks at a device. The first are short, because most waits are.
#[derive(Default)]
struct Pause {
    since: Option<Instant>,
}

impl Pause {
    /// Pauses, and returns how long this wait has taken.
    fn take(&mut self) -> Duration {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        match waited < Duration::from_micros(50) {
            true => std::thread::yield_now(),
            false => std::thread::sleep(Duration::from_micros(20)),
        }
        waited
    }
}
