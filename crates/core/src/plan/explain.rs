//! A plan in words and numbers.

use std::fmt::Write as _;

use super::{Faster, Found, Plan, rejected::Percent};
use crate::{report::stage_times, schedule::Schedule, topology::ranges, units::Bytes};

/// Describes a plan: a table of its stages, what it takes, what limits it, and what lost against
/// it.
pub fn explain(found: &Found) -> String {
    let Plan { balance, micro_batches, schedule, .. } = &found.plan;
    let prediction = &found.prediction;
    let mut text = format!("K {}, M {micro_batches}, {schedule}", balance.len());
    if found.devices.len() != balance.len() {
        let _ = write!(text, " on {} devices", found.devices.len());
    }
    text.push_str("\n\n");
    let rows = rows(found);
    // Two tables, one of times and one of memory, so that each fits a terminal's 80 columns.
    let times: Vec<_> = rows.iter().map(|row| row[..MEMORY].to_vec()).collect();
    let memory = rows.iter().map(|row| [&row[..1], &row[MEMORY..]].concat());
    text.push_str(&table(&times));
    text.push('\n');
    text.push_str(&table(&memory.collect::<Vec<_>>()));
    let step = prediction.step();
    let peak = prediction.device_peaks().into_iter().max().unwrap_or_default();
    let exact = if let Some(made) = found.made_text() {
        made
    } else if found.exact {
        "optimal among the requested plans and the policies tried".to_owned()
    } else {
        let over = Percent::more(step.0, found.bound.0);
        format!("at most {over} above the best possible ({})", found.bound)
    };
    let interval = match found.interval {
        Some([low, high]) => format!(" [{low} .. {high}]"),
        None => String::new(),
    };
    let exact = match (found.within(), &found.made) {
        (Some(within), Some(_)) => format!("{exact}\n{within}"),
        (Some(within), None) => within,
        (None, _) => exact,
    };
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "\nstep {step}{interval}, bubble {:.1}%, peak {peak}\n{exact}; plans simulated: \
        {}\nlimited by {}",
        100.0 * prediction.bubble(),
        found.examined,
        found.limits
    );
    if !found.rejected.is_empty() {
        text.push_str("\nrejected\n");
        let rows = found.rejected.iter().map(|rejected| {
            let step = rejected.step.map_or("-".to_owned(), |step| step.to_string());
            vec![rejected.what.clone(), step, rejected.why.clone()]
        });
        text.push_str(&table(&rows.collect::<Vec<_>>()));
    }
    if found.others > 0 {
        let _ =
            writeln!(text, "{} other combinations of K, M and schedule take no less", found.others);
    }
    for advice in &found.advice {
        let _ = writeln!(text, "\nadvice: {advice}");
    }
    text
}

impl Found {
    /// How good a made order is, if there is one.
    pub fn made_text(&self) -> Option<String> {
        let made = self.made.as_ref()?;
        let (named, least) = &made.named;
        if !matches!(&self.plan.schedule, Schedule::Custom(own) if own.is_made()) {
            return Some(format!(
                "{} is within {} of any order of these stages ({})",
                self.plan.schedule,
                Percent::more(self.prediction.step().0, made.bound.0),
                made.bound
            ));
        }
        Some(format!(
            "the order is made for these costs: within {} of any order of these stages ({}); the \
            best named schedule, {} with K {} and M {}, takes {least}",
            Percent::more(self.prediction.step().0, made.bound.0),
            made.bound,
            named.schedule,
            named.balance.len(),
            named.micro_batches
        ))
    }

    /// Which plan is faster and why it was not chosen, if there is one.
    pub fn within(&self) -> Option<String> {
        let Faster { plan, step, interval: [low, high] } = self.faster.as_ref()?;
        let Plan { balance, micro_batches, schedule, .. } = plan;
        let less = Percent::more(self.prediction.step().0, step.0);
        let kept = if self.made.is_some() { "M" } else { "this" };
        Some(format!(
            "K {}, M {micro_batches}, {schedule} would be {less} faster ({step} [{low} .. \
            {high}]): that is within the spread of the costs, so {kept} is what is configured",
            balance.len(),
        ))
    }
}

/// The columns of a plan's stages. The times of actions are those of a micro-batch.
const HEAD: [&str; 12] = [
    "stage",
    "layers",
    "names",
    "forward ms",
    "recompute",
    "backward",
    "busy",
    "peak",
    "states",
    "activations",
    "cap",
    "re-materialized",
];
/// The first column about memory.
const MEMORY: usize = 7;
/// Maximum width of layers' names. The tables then fit 80 columns.
const NAMES: usize = 18;

/// The text, with its middle left out if it is longer than `width` characters.
pub fn shortened(text: &str, width: usize) -> String {
    let letters: Vec<char> = text.chars().collect();
    if letters.len() <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(2);
    let (first, last) = (&letters[..kept / 2], &letters[letters.len() - kept.div_ceil(2)..]);
    first.iter().chain(&['.', '.']).chain(last).collect()
}

fn rows(found: &Found) -> Vec<Vec<String>> {
    let prediction = &found.prediction;
    let step = prediction.step().0.max(1) as f64;
    let times = stage_times(&prediction.timeline);
    let mut rows = vec![HEAD.map(str::to_owned).to_vec()];
    for (stage, range) in ranges(&found.plan.balance).into_iter().enumerate() {
        let own = &prediction.stages[stage];
        let times = times.get(stage).copied().unwrap_or_default();
        let device = prediction.placement[stage];
        let per_micro_batch =
            |time: crate::Nanos| format!("{:.3}", time.as_ms() / found.plan.micro_batches as f64);
        let last = range.end - 1;
        let (names, layers) = if range.len() == 1 {
            (shortened(&found.layers[last], NAMES), last.to_string())
        } else {
            let names = format!("{}..{}", found.layers[range.start], found.layers[last]);
            let names = shortened(&names, NAMES);
            (names, format!("{}-{last}", range.start))
        };
        let states = own.bytes.resident + own.bytes.gradients;
        let cap = found.devices[device].memory.map_or("-".to_owned(), |cap: Bytes| cap.to_string());
        rows.push(vec![
            match device == stage {
                true => stage.to_string(),
                false => format!("{stage} (device {device})"),
            },
            layers,
            names,
            per_micro_batch(times.forward),
            per_micro_batch(times.recompute),
            per_micro_batch(times.backward),
            format!("{:.1}%", 100.0 * times.busy().0 as f64 / step),
            own.peak.to_string(),
            states.to_string(),
            (own.peak - states).to_string(),
            cap,
            found.plan.remat.of(stage).to_string(),
        ]);
    }
    rows
}

/// Formats columns as wide as their widest entry, two spaces apart.
fn table(rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, entry) in widths.iter_mut().zip(row) {
            *width = (*width).max(entry.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let entries = row.iter().zip(&widths).map(|(entry, width)| format!("{entry:width$}"));
        let line = entries.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
