//! Writes one step's timeline in the trace-event format, which chrome://tracing and
//! <https://ui.perfetto.dev> show.
//!
//! Each timeline is a process and each device a thread. Times are microseconds from the start of
//! the step. Compute actions are slices of category `forward`, `recompute`, `backward` or
//! `optimizer`. Sends and receives, which include waiting, are slices of category `wait`. An arrow,
//! a pair of flow events, connects each send to its receive.

use std::{collections::HashMap, io};

use gpipe_core::{
    Action, Nanos, Op, Transfer,
    simulate::{TimedAction, Timeline},
};
use serde_json::{Value, json};

/// Writes named timelines of a step as JSON, on a common time scale.
///
/// # Errors
/// Those of `out`.
pub fn write(mut out: impl io::Write, timelines: &[(&str, &Timeline)]) -> io::Result<()> {
    out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut process = Process { out: &mut out, pid: 0, is_first: true };
    for (pid, (name, timeline)) in timelines.iter().enumerate() {
        process.pid = pid;
        process.write(name, timeline)?;
    }
    out.write_all(b"\n]}\n")?;
    out.flush()
}

/// Writes the events of one timeline, one per line.
struct Process<'a, W> {
    out: &'a mut W,
    pid: usize,
    is_first: bool,
}

impl<W: io::Write> Process<'_, W> {
    fn write(&mut self, name: &str, timeline: &Timeline) -> io::Result<()> {
        self.metadata("process_name", 0, json!({ "name": name }))?;
        self.metadata("process_sort_index", 0, json!({ "sort_index": self.pid }))?;
        for (device, actions) in timeline.devices.iter().enumerate() {
            self.metadata("thread_name", device, json!({ "name": format!("device {device}") }))?;
            self.metadata("thread_sort_index", device, json!({ "sort_index": device }))?;
            for timed in actions {
                self.slice(device, timed)?;
            }
        }
        self.arrows(timeline)
    }

    fn event(&mut self, event: &Value) -> io::Result<()> {
        self.out.write_all(if self.is_first { b"\n" } else { b",\n" })?;
        self.is_first = false;
        serde_json::to_writer(&mut *self.out, event).map_err(io::Error::from)
    }

    fn metadata(&mut self, name: &str, device: usize, args: Value) -> io::Result<()> {
        self.event(
            &json!({ "ph": "M", "name": name, "pid": self.pid, "tid": device, "args": args }),
        )
    }

    fn slice(&mut self, device: usize, timed: &TimedAction) -> io::Result<()> {
        let action = timed.action;
        let mut args = json!({ "stage": action.stage.0 });
        if let Some(m) = micro_batch(action) {
            args["micro_batch"] = json!(m);
        }
        self.event(&json!({
            "ph": "X",
            "name": action.to_string(),
            "cat": category(action.op),
            "pid": self.pid,
            "tid": device,
            "ts": microseconds(timed.start),
            "dur": microseconds(timed.end - timed.start),
            "args": args,
        }))
    }

    /// Writes an arrow for each message that has both a send and a receive in the timeline. A
    /// transfer occurs at most once per step, so it identifies the message.
    fn arrows(&mut self, timeline: &Timeline) -> io::Result<()> {
        let mut sends: HashMap<Transfer, (usize, Nanos)> = HashMap::new();
        let each = || timeline.devices.iter().enumerate();
        for (device, actions) in each() {
            for timed in actions {
                if let Op::Send(transfer) = timed.action.op {
                    sends.insert(transfer, (device, timed.start));
                }
            }
        }
        for (device, actions) in each() {
            for timed in actions {
                let Op::Receive(transfer) = timed.action.op else { continue };
                let Some((sender, sent)) = sends.remove(&transfer) else { continue };
                // A viewer attaches an arrow to the slice around its time, excluding the slice's
                // end.
                let received = timed.start.max(timed.end - Nanos(1));
                self.arrow_end("s", transfer, sender, sent)?;
                self.arrow_end("f", transfer, device, received)?;
            }
        }
        Ok(())
    }

    fn arrow_end(
        &mut self,
        phase: &str,
        transfer: Transfer,
        device: usize,
        time: Nanos,
    ) -> io::Result<()> {
        self.event(&json!({
            "ph": phase,
            "bp": "e",
            "name": "message",
            "cat": "message",
            "id": format!("{}:{transfer}", self.pid),
            "pid": self.pid,
            "tid": device,
            "ts": microseconds(time),
        }))
    }
}

fn category(op: Op) -> &'static str {
    match op {
        Op::Forward(_) => "forward",
        Op::Rematerialize(_) => "recompute",
        Op::Backward(_) | Op::BackwardInput(_) | Op::BackwardWeight(_) => "backward",
        Op::Reduce | Op::Norm | Op::Decide | Op::Update => "optimizer",
        Op::Send(_) | Op::Receive(_) => "wait",
    }
}

fn micro_batch(action: Action) -> Option<u32> {
    match action.op {
        Op::Send(transfer) | Op::Receive(transfer) => transfer.micro_batch.map(|m| m.0),
        op => op.computes().map(|m| m.0),
    }
}

fn microseconds(time: Nanos) -> f64 {
    time.0 as f64 / 1e3
}
