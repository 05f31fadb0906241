//! Pictures of steps. Families: `golden_` (a tiny picture), `oracle_` (the content of pictures),
//! `property_` (any timeline makes a well-formed picture of bounded size), `fault_` (names with
//! markup).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_core::{
    Bytes, Nanos,
    lower::{Topology, lower},
    remat::Remat,
    schedule::Schedule,
    simulate::{Costs, LinkCost, StageCost, TimedAction, Timeline, simulate_with_room},
    splitmix::Stream,
};
use gpipe_observe::picture::{Panel, Scene, html, svg};
use serde_json::Value;

const SIZE_MAX: usize = 3_000_000;

/// A step whose forwards take `ms`, slightly more on every second stage. Messages take a twentieth.
fn step(stages: usize, micro_batches: usize, remat: Remat, ms: f64) -> Timeline {
    let nanos = |ms: f64| Nanos((1e6 * ms) as u64);
    let cost = |stage: usize| {
        let forward = nanos(ms * (1.0 + 0.1 * (stage % 2) as f64));
        StageCost {
            forward,
            forward_kept: forward,
            rematerialize: forward,
            backward: forward + forward,
            backward_kept: forward + forward,
            norm: nanos(0.1 * ms),
            update: nanos(0.5 * ms),
            ..StageCost::default()
        }
    };
    let compute = remat.apply(&Schedule::OneFOneB.actions(stages, micro_batches));
    let program = lower(&compute, &Topology::chain(stages), micro_batches).unwrap();
    let link = LinkCost { latency: nanos(0.05 * ms), ..LinkCost::default() };
    let links = vec![link; program.topology.edges.len()];
    let costs = Costs { links, ..Costs::of_stages((0..stages).map(cost).collect()) };
    simulate_with_room(&program, &costs).unwrap().1
}

/// A series that rises and falls with each action of a device.
fn bytes(timeline: &Timeline) -> Vec<Vec<(Nanos, Bytes)>> {
    let series = |(stage, actions): (usize, &Vec<TimedAction>)| {
        let points = actions.iter().enumerate();
        points.map(|(i, timed)| (timed.start, Bytes(((i % 7 + stage) as u64) << 24))).collect()
    };
    timeline.devices.iter().enumerate().map(series).collect()
}

/// The start tags of well-formed XML. Panics if it is not well-formed.
fn elements(xml: &str) -> Vec<&str> {
    let mut open: Vec<&str> = Vec::new();
    let mut all = Vec::new();
    for (index, part) in xml.split('<').enumerate() {
        if index == 0 {
            assert_eq!(part.trim(), "");
            continue;
        }
        let (tag, text) = part.split_once('>').unwrap_or_else(|| panic!("no end: <{part}"));
        assert!(!text.contains('>'), "{part}");
        for (at, _) in part.match_indices('&') {
            let name = part[at + 1..].split_once(';').unwrap().0;
            assert!(["amp", "lt", "gt", "quot", "#39", "#10"].contains(&name), "&{name};");
        }
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
            continue;
        }
        let (name, is_closed) = (tag.split([' ', '/']).next().unwrap(), tag.ends_with('/'));
        // Attributes have the form name="value", each name once.
        let mut rest = tag[name.len()..].trim_end_matches('/').trim();
        let mut names = Vec::new();
        while !rest.is_empty() {
            let (attribute, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("{tag}"));
            let (_, after) = after.split_once('"').unwrap();
            assert!(!names.contains(&attribute), "{attribute} twice: {tag}");
            names.push(attribute);
            rest = after.trim_start();
        }
        assert!(!open.is_empty() || all.is_empty(), "a second root");
        all.push(tag);
        if !is_closed {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?} not closed");
    all
}

/// The data of a page.
fn data(page: &str) -> Value {
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

fn scene<'a>(title: &str, predicted: &'a Timeline, measured: &'a Timeline) -> Scene<'a> {
    let panels = vec![
        Panel::new("predicted", "simulated", predicted),
        Panel::new("measured", "step 3", measured),
    ];
    Scene { title: title.into(), subtitle: vec!["K = 2".into()], panels }
}

#[test]
fn golden_a_tiny_picture() {
    let (predicted, measured) =
        (step(2, 2, Remat::UnlessAdjacent, 1.0), step(2, 2, Remat::Never, 1.2));
    let bytes = bytes(&predicted);
    let mut scene = scene("tiny", &predicted, &measured);
    let caps = [Some(Bytes(150 << 20)), None];
    scene.panels[0].bytes = &bytes;
    scene.panels[0].caps = &caps;
    let peaks = [Bytes(100 << 20), Bytes(90 << 20)];
    scene.panels[1].peaks = &peaks;
    let picture = svg(&scene);
    elements(&picture);
    let (head, rest) = picture.split_once("<style>").unwrap();
    let (_, body) = rest.split_once("</style>").unwrap();
    insta::assert_snapshot!("tiny", format!("{head}<style/>{body}"));
    insta::assert_snapshot!(
        "tiny_data",
        serde_json::to_string_pretty(&data(&html(&scene))["panels"][0]["devices"]).unwrap()
    );
}

#[test]
fn oracle_every_action_is_in_the_pictures() {
    let (predicted, measured) =
        (step(8, 32, Remat::UnlessAdjacent, 10.0), step(8, 32, Remat::Always, 11.0));
    let scene = scene("K = 8", &predicted, &measured);
    let picture = svg(&scene);
    let rects = elements(&picture).into_iter().filter(|tag| tag.starts_with("rect class="));
    let mut counts = std::collections::BTreeMap::new();
    for rect in rects {
        *counts.entry(rect.split('"').nth(1).unwrap().to_owned()).or_insert(0) += 1;
    }
    let page = data(&html(&scene));
    for timeline in [&predicted, &measured] {
        for timed in timeline.devices.iter().flatten() {
            let name = timed.action.to_string();
            if timed.action.op.computes().is_some() {
                assert!(picture.contains(&format!("<title>{name}: stage ")), "{name}");
            }
        }
    }
    // One rectangle for each action, and one in the legend.
    let of = |letter: char| {
        let actions = predicted.actions().chain(measured.actions());
        actions.filter(|a| a.to_string().contains(letter) && a.op.computes().is_some()).count()
    };
    assert_eq!((counts["f"], counts["r"], counts["b"]), (of('F') + 1, of('R') + 1, of('B') + 1));
    assert!(!picture.contains("drawn together"));
    for (panel, timeline) in page["panels"].as_array().unwrap().iter().zip([&predicted, &measured])
    {
        for (flat, actions) in panel["devices"].as_array().unwrap().iter().zip(&timeline.devices) {
            let drawn: Vec<(String, u64, u64)> = decoded(flat);
            let busy = actions.iter().filter(|timed| timed.action.op.computes().is_some());
            let busy: Vec<_> =
                busy.map(|timed| (timed.action.to_string(), timed.start.0, timed.end.0)).collect();
            let computing: Vec<_> =
                drawn.into_iter().filter(|(name, ..)| !name.contains(['_', 'N', 'U'])).collect();
            assert_eq!(computing, busy);
        }
    }
}

/// Decodes a device's list as the page does, if it has no merged spans.
fn decoded(flat: &Value) -> Vec<(String, u64, u64)> {
    let flat = flat.as_array().unwrap();
    let (mut at, mut now, mut all) = (0, 0, Vec::new());
    while at < flat.len() {
        let code = flat[at].as_u64().unwrap() as usize;
        let name = match code {
            0..=2 => format!("{}{}{}", flat[at + 1], ["F", "R", "B"][code], flat[at + 2]),
            _ => flat[at + 1].as_str().unwrap().to_owned(),
        };
        at += if code <= 2 { 3 } else { 2 };
        let start = now + flat[at].as_u64().unwrap();
        now = start + flat[at + 1].as_u64().unwrap();
        all.push((name, start, now));
        at += 2;
    }
    all
}

#[test]
fn oracle_the_numbers_are_said() {
    let (predicted, measured) = (step(2, 4, Remat::Never, 10.0), step(2, 4, Remat::Never, 12.0));
    let scene = scene("numbers", &predicted, &measured);
    let bubble = format!("bubble {:.1}%", 100.0 * measured.bubble());
    let step = format!("measured: {}, {bubble}", measured.makespan);
    for picture in [svg(&scene), html(&scene)] {
        for part in [&step, "measured / predicted: 1.200", "simulated", "step 3", "K = 2"] {
            assert!(picture.contains(part), "'{part}' is not in the picture");
        }
    }
    let picture = svg(&scene);
    assert!(!picture.contains(">recompute<"), "what there is not is not in the legend");
    assert!(picture.contains("prefers-color-scheme:dark") && !picture.contains("http://127"));
    let one = Scene { panels: vec![Panel::new("plan", "", &predicted)], ..Scene::default() };
    assert!(!svg(&one).contains(" / "), "no ratio of one");
}

#[test]
fn oracle_a_page_needs_nothing_else() {
    let timeline = step(2, 2, Remat::Never, 1.0);
    let scene = scene("alone", &timeline, &timeline);
    for (picture, links) in [(svg(&scene), 1), (html(&scene), 0)] {
        for part in ["src=", "href=", "@import", "url("] {
            assert!(!picture.contains(part), "{part}");
        }
        assert_eq!(picture.matches("://").count(), links, "the name space of SVG");
    }
}

#[test]
fn fault_names_are_no_markup() {
    let timeline = step(1, 1, Remat::Never, 1.0);
    let nasty = "</script><script>alert('1')</script>]]>&\"<!--\u{0}\u{7}\u{ffff} \u{e4}\u{1f600}";
    let panel = Panel::new(nasty, nasty, &timeline);
    let scene = Scene { title: nasty.into(), subtitle: vec![nasty.into(); 2], panels: vec![panel] };
    let picture = svg(&scene);
    let tags = elements(&picture);
    assert!(!tags.iter().any(|tag| tag.starts_with("script")), "{tags:?}");
    assert!(
        picture.contains("&lt;/script&gt;&lt;script&gt;") && picture.contains("\u{e4}\u{1f600}")
    );
    let page = html(&scene);
    assert_eq!(page.matches("</script>").count(), 2, "those of the page");
    assert_eq!(page.matches("<!--").count(), 0);
    let data = data(&page);
    assert_eq!(
        (data["title"].as_str(), data["panels"][0]["note"].as_str()),
        (Some(nasty), Some(nasty))
    );
}

/// Stages take different times, so for some M only every second box has room for a label.
#[test]
fn property_all_actions_of_a_kind_are_labelled_or_none() {
    let (mut with, mut without) = (0, 0);
    for (stages, micro_batches) in (2..=4).flat_map(|k| (1..300).step_by(5).map(move |m| (k, m))) {
        let timeline = step(stages, micro_batches, Remat::Always, 40.0);
        let scene = Scene { panels: vec![Panel::new("p", "", &timeline)], ..Scene::default() };
        let picture = svg(&scene);
        let labels = picture.split("<text class=\"l\"").skip(1).filter_map(|text| {
            let (_, rest) = text.split_once('>')?;
            Some(rest.split('<').next()?.to_owned())
        });
        let (updates, others): (Vec<_>, Vec<_>) = labels.partition(|label| label == "U");
        assert!(
            others.len().is_multiple_of(stages * micro_batches),
            "K = {stages}, M = {micro_batches}: {others:?}"
        );
        let boxes = picture.matches("<rect class=\"o\"").count();
        // One of the boxes is the legend's.
        assert!([0, boxes - 1].contains(&updates.len()), "{updates:?} of {boxes}");
        match others.len() {
            0 => without += 1,
            _ => with += 1,
        }
    }
    assert!(with > 20 && without > 20, "{with} {without}");
}

#[test]
fn property_large_steps_make_small_pictures() {
    let (predicted, measured) =
        (step(64, 512, Remat::Always, 40.0), step(64, 512, Remat::UnlessAdjacent, 42.0));
    let bytes = bytes(&predicted);
    let peaks = vec![Bytes(1 << 30); 64];
    let caps: Vec<_> = (0..64).map(|k| Some(Bytes((2 << 30) + k))).collect();
    for panels in [1, 2] {
        let mut scene = scene("K = 64, M = 512", &predicted, &measured);
        scene.panels[0].bytes = &bytes;
        scene.panels[0].caps = &caps;
        scene.panels[1].peaks = &peaks;
        scene.panels.truncate(panels);
        let (picture, page) = (svg(&scene), html(&scene));
        assert!(picture.len() < SIZE_MAX, "{}", picture.len());
        assert!(page.len() < SIZE_MAX, "{}", page.len());
        elements(&picture);
        data(&page);
        assert!(picture.contains("are drawn together, each colour as high as its share"));
        let said = if panels == 1 { "Communication is left out." } else { "are kept together" };
        assert!(page.contains(said), "{said}");
        assert_eq!((picture, page), (svg(&scene), html(&scene)), "the same text each time");
    }
}

/// Long waits keep actions apart. Where too many pairs of actions were drawn together, the time
/// below which waits are merged grew for ever, and the one for actions never did.
#[test]
fn regression_many_short_actions_between_long_waits_make_a_picture() {
    let pairs = |at: u64| {
        let timed = |name: &str, start: u64, end: u64| {
            let action = name.parse().unwrap();
            TimedAction { action, start: Nanos(start), end: Nanos(end) }
        };
        let start = 2000 * at;
        let (forward, backward) = (format!("0F{at}"), format!("0B{at}"));
        [timed(&forward, start, start + 100), timed(&backward, start + 100, start + 300)]
    };
    let devices = (0..17).map(|_| (0..1000).flat_map(pairs).collect()).collect();
    let timeline = Timeline { makespan: Nanos(2_000_000), devices };
    let scene = Scene { panels: vec![Panel::new("waits", "", &timeline)], ..Scene::default() };
    let picture = svg(&scene);
    elements(&picture);
    assert!(picture.len() < SIZE_MAX, "{}", picture.len());
}

#[test]
fn property_any_timeline_makes_pictures() {
    let names =
        ["0F0", "1B12345", "0R7", "0UPDATE", "3SEND_F0@1", "2RECV_F0@1", "4000F1", "0REDUCE"];
    let mut random = Stream::new(17);
    for case in 0..300 {
        let mut any = || {
            let devices = (0..random.below(5)).map(|_| {
                let mut now = 0_u64;
                let actions = (0..random.below(12)).map(|_| {
                    let start = Nanos(now.saturating_add(random.below(3) as u64));
                    // Some actions end before they start and some overlap: any input must make a
                    // picture.
                    let end = Nanos(
                        start
                            .0
                            .saturating_add(1 << random.below(64))
                            .wrapping_sub(random.below(2) as u64 * 2),
                    );
                    now = if random.below(20) == 0 { 0 } else { end.0 };
                    TimedAction { action: names[random.below(8)].parse().unwrap(), start, end }
                });
                actions.collect()
            });
            let devices: Vec<Vec<TimedAction>> = devices.collect();
            let ends = devices.iter().flatten().map(|timed| timed.end);
            Timeline {
                makespan: Nanos(ends.max().unwrap_or_default().0 / (1 + random.below(2) as u64)),
                devices,
            }
        };
        let timelines = [any(), any(), any()];
        let panels =
            timelines.iter().take(case % 4).map(|timeline| Panel::new("any", "", timeline));
        let mut scene = Scene { panels: panels.collect(), ..Scene::default() };
        let series = vec![vec![(Nanos(u64::MAX), Bytes(u64::MAX)), (Nanos(0), Bytes(3))], vec![]];
        let (peaks, caps) =
            (vec![Bytes(0); case % 3], vec![None, Some(Bytes(u64::MAX)), Some(Bytes(0))]);
        for panel in scene.panels.iter_mut().filter(|_| case % 5 > 1) {
            (panel.bytes, panel.peaks, panel.caps) = (&series, &peaks, &caps);
        }
        let picture = svg(&scene);
        elements(&picture);
        for part in ["NaN", "inf\""] {
            assert!(!picture.contains(part), "{part}: {picture}");
        }
        data(&html(&scene));
    }
}
