//! Families: `oracle_` (the content of a page), `property_` (any numbers make a page), `fault_` (no
//! runs, too many runs).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_core::splitmix::Stream;
use gpipe_observe::{
    metrics::{Evaluation, Record, Run, Stage, Step},
    plot::{PlotError, RUNS_MAX, svg},
};

/// A run whose loss falls from 6 to 2, with an evaluation every 50 steps.
fn run(name: &str, steps: u64, stages: usize) -> Run {
    let mut records = Vec::new();
    for step in 1..=steps {
        let loss = 2.0 + 4.0 / step as f64;
        let stage = |k| Stage { peak_bytes: (k as u64 + 1) << 28, ..Stage::default() };
        records.push(Record::Step(Step {
            step,
            loss,
            tokens_total: 1000 * step,
            tokens_per_s: 21_500.0,
            bubble: 0.25,
            stages: (0..stages).map(stage).collect(),
            ..Step::default()
        }));
        if step % 50 == 0 {
            let bits_per_byte = Some(1.25);
            let evaluation = Evaluation { step, loss, bits_per_byte, ..Evaluation::default() };
            records.push(Record::Evaluation(evaluation));
        }
    }
    Run::new(name, records)
}

/// The texts of a page.
fn texts(page: &str) -> Vec<&str> {
    let inside = page.split("</text>").filter_map(|part| part.rsplit_once('>'));
    inside.map(|(_, text)| text.trim()).filter(|text| !text.is_empty()).collect()
}

fn assert_says(page: &str, expected: &[&str]) {
    let texts = texts(page);
    for part in expected {
        assert!(texts.contains(part), "'{part}' is not in {texts:?}");
    }
}

#[test]
fn oracle_the_page_of_one_run() {
    let page = svg(&[run("out/a<b>&c", 200, 4)]).unwrap();
    assert!(page.starts_with("<svg") && page.trim_end().ends_with("</svg>"));
    assert_says(
        &page,
        &[
            "out/a&lt;b&gt;&amp;c",
            "200 steps, 200k tokens, 4 stages, last loss 2.0200, last validation 2.0200 (1.2500 \
            bits/byte)",
            "Loss",
            "Tokens per second",
            "Learning rate",
            "Gradient norm, before clipping",
            "20k",
            "Bubble: idle share of devices x time (%)",
            "Peak memory of each stage&apos;s tensors (GiB)",
            "stage 0",
            "stage 3",
            "each step",
            "mean of 5% of the steps",
            "validation",
            "step",
            "100",
        ],
    );
    assert!(!page.contains("NaN") && !page.contains("not finite") && !page.contains("no data"));
    assert_eq!(page, svg(&[run("out/a<b>&c", 200, 4)]).unwrap(), "the same text each time");
}

#[test]
fn oracle_the_page_of_several_runs_has_a_legend() {
    let long = "long-".repeat(40) + "end";
    let page = svg(&[run("a", 100, 2), run(&long, 60, 4), run("c", 10, 3)]).unwrap();
    let shown = texts(&page);
    assert_says(&page, &["3 runs", "Peak memory of the largest stage&apos;s tensors (GiB)"]);
    let legends = ["a: 100 steps, ", "long-end: 60 steps, ", "c: 10 steps, "];
    for part in legends {
        assert!(shown.iter().any(|text| text.contains(part)), "'{part}' is not in {shown:?}");
    }
    assert!(shown.iter().all(|text| text.chars().count() < 140), "{shown:?}");
}

#[test]
fn oracle_a_run_of_none_or_few_records_has_a_page() {
    let empty = svg(&[run("empty", 0, 4)]).unwrap();
    assert_says(&empty, &["no steps"]);
    assert_eq!(empty.matches("no data").count(), 6);
    assert!(svg(&[run("one", 1, 1)]).unwrap().contains("1 step, 1k tokens, 1 stage, "));
    for steps in 1..=3 {
        let page = svg(&[run("short", steps, 2)]).unwrap();
        assert!(!page.contains("no data") && !page.contains("mean of"));
        assert!(page.matches("<circle").count() >= 5 * steps as usize, "each value is a dot");
    }
    let evaluated = Run { steps: Vec::new(), ..run("evaluated", 50, 2) };
    assert_eq!(svg(&[evaluated]).unwrap().matches("no data").count(), 5, "a dot, but no curve");
}

#[test]
fn oracle_losses_that_are_not_finite_are_marked() {
    let mut broken = run("broken", 100, 2);
    broken.steps[40].loss = f64::NAN;
    broken.steps[41].loss = f64::INFINITY;
    let page = svg(&[broken]).unwrap();
    assert_says(&page, &["not finite"]);
    assert!(!page.contains("NaN") && !page.contains("inf"), "no such coordinate");
    let mut lost = run("lost", 20, 2);
    lost.steps.iter_mut().for_each(|step| step.loss = f64::NAN);
    assert_eq!(svg(&[lost]).unwrap().matches("no data").count(), 1);
}

#[test]
fn oracle_skipped_steps_without_a_loss_are_left_out() {
    let whole = run("r", 100, 2);
    // A skipped step has the number of the last update. One is the first record and one the last.
    let mut skipping = whole.clone();
    for position in [100, 41, 40, 0] {
        let step = position as u64;
        let skipped = Step {
            step,
            skipped: true,
            loss: f64::NAN,
            grad_norm: f64::NAN,
            ..whole.steps[0].clone()
        };
        skipping.steps.insert(position, skipped);
    }
    let page = svg(&[skipping.clone()]).unwrap();
    assert_says(&page, &["not finite"]);
    assert!(!page.contains("NaN") && !page.contains("inf"), "no such coordinate or text");
    assert!(page.contains("last loss 2.0400"), "that of the last update");
    let only = Run { steps: vec![skipping.steps[0].clone()], ..Run::default() };
    assert!(svg(&[only]).unwrap().contains("no data"));
}

#[test]
fn oracle_a_long_run_has_a_page_of_bounded_size() {
    let page = svg(&[run("long", 100_000, 7)]).unwrap();
    assert!(page.len() < 1 << 20, "{} bytes", page.len());
}

#[test]
fn property_any_numbers_make_a_page() {
    let extremes = [
        0.0,
        -0.0,
        f64::MIN_POSITIVE,
        1e-12,
        1.0,
        1.0 + f64::EPSILON,
        1e15,
        1e15 + 0.125,
        -1e30,
        f64::MAX,
        f64::MIN,
        f64::NAN,
        f64::INFINITY,
    ];
    let mut random = Stream::new(7);
    for case in 0..300 {
        let mut any = || extremes[random.below(extremes.len())];
        let records = (0..case % 7).map(|index| {
            let last = if case % 3 == 0 { u64::MAX } else { 1 << (case % 60) };
            let stage = Stage { peak_bytes: last, ..Stage::default() };
            Record::Step(Step {
                step: if index % 2 == 0 { index } else { last },
                loss: any(),
                tokens_per_s: any(),
                bubble: any(),
                stages: vec![stage; index as usize],
                ..Step::default()
            })
        });
        let page = svg(&[Run::new("any", records.collect())]).unwrap();
        assert!(page.len() < 1 << 20, "case {case}");
    }
}

#[test]
fn fault_no_runs_and_too_many_are_refused() {
    assert_eq!(svg(&[]), Err(PlotError::NoRuns));
    let many = vec![run("r", 1, 1); RUNS_MAX + 1];
    assert_eq!(svg(&many), Err(PlotError::TooManyRuns(RUNS_MAX + 1)));
    assert!(svg(&many[1..]).is_ok());
}

#[test]
fn oracle_a_run_on_images_counts_images_and_is_not_mixed_with_text() {
    let images = run("images", 50, 2).counting("image");
    let page = svg(std::slice::from_ref(&images)).unwrap();
    assert_says(&page, &["Images per second"]);
    assert!(texts(&page).iter().any(|text| text.contains("k images, ")), "{:?}", texts(&page));
    let error = svg(&[run("text", 50, 2).counting("token"), images]).unwrap_err().to_string();
    assert_eq!(error, "text counts tokens and images counts images: plot them apart");
}

#[test]
fn oracle_a_page_takes_the_width_of_its_place() {
    let page = svg(&[run("a", 10, 2)]).unwrap();
    let tag = page.split('>').next().unwrap();
    assert!(tag.contains("width=\"100%\"") && tag.contains("viewBox="), "{tag}");
    assert!(!tag.contains("height="), "{tag}");
}
