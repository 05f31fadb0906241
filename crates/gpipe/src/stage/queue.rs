//! The work of a step that a GPU was given and may not have done.
//!
//! A stage's thread does not wait for the GPU at the end of an action. Events on the stream tell
//! how far the GPU is, and when it began and ended each action.

use std::{collections::VecDeque, time::Instant};

use gpipe_bridge::device::{Event, Stream, TimedEvent};
use gpipe_runtime::stage::{Progress, Span};

use crate::error::LayerError;

/// The actions of one step on a stream, in order.
pub(super) struct Queue {
    stream: Stream,
    /// An event, and the time of the host at which it was done.
    origin: (TimedEvent, Instant),
    /// The oldest may be done.
    open: VecDeque<Given>,
    /// Copies that the next action waits for.
    arrivals: Vec<Event>,
    done: Vec<(TimedEvent, TimedEvent)>,
}

/// An action.
struct Given {
    /// Copies from other devices that it waits for.
    arrivals: Vec<Event>,
    began: TimedEvent,
    /// `None` while the action is being given.
    ended: Option<TimedEvent>,
}

impl Queue {
    /// Begins a step on `stream`. Waits for what was there before, so that the times of the stream
    /// and of the host can be compared.
    pub(super) fn begin(stream: Stream) -> Result<Self, LayerError> {
        let event = stream.record_timed()?;
        event.synchronize()?;
        let origin = (event, Instant::now());
        let (open, arrivals, done) = (VecDeque::new(), Vec::new(), Vec::new());
        Ok(Self { stream, origin, open, arrivals, done })
    }

    /// What follows on the stream belongs to the next action.
    pub(super) fn begin_action(&mut self) -> Result<(), LayerError> {
        let began = self.stream.record_timed()?;
        let arrivals = std::mem::take(&mut self.arrivals);
        self.open.push_back(Given { arrivals, began, ended: None });
        Ok(())
    }

    /// What follows on the stream waits for `event`, of another device. The action that is being
    /// given, or else the next one, begins after that.
    pub(super) fn wait_for(&mut self, event: Event) -> Result<(), LayerError> {
        event.block(self.stream)?;
        match self.open.back_mut().filter(|given| given.ended.is_none()) {
            Some(given) => {
                given.began = self.stream.record_timed()?;
                given.arrivals.push(event);
            }
            None => self.arrivals.push(event),
        }
        Ok(())
    }

    /// The action has been given.
    pub(super) fn end_action(&mut self) -> Result<(), LayerError> {
        if let Some(given) = self.open.back_mut() {
            given.ended = Some(self.stream.record_timed()?);
        }
        Ok(())
    }

    /// How far the GPU is.
    pub(super) fn progress(&mut self) -> Result<Progress, LayerError> {
        while let Some(Given { ended: Some(ended), .. }) = self.open.front() {
            if !ended.is_done()? {
                break;
            }
            let Some(Given { began, ended: Some(ended), .. }) = self.open.pop_front() else {
                break;
            };
            self.done.push((began, ended));
        }
        let arrivals = self.open.front().map_or(&[][..], |given| &given.arrivals);
        let mut waits = false;
        for arrival in arrivals {
            waits |= !arrival.is_done()?;
        }
        Ok(Progress { open: self.open.len(), waits })
    }

    /// When each action began and ended. All must be done.
    pub(super) fn spans(&self) -> Result<Vec<Span>, LayerError> {
        let (origin, at) = &self.origin;
        let time =
            |event: &TimedEvent| -> Result<Instant, LayerError> { Ok(*at + event.since(origin)?) };
        self.done.iter().map(|(began, ended)| Ok((time(began)?, time(ended)?))).collect()
    }
}
