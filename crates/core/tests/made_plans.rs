//! Plans with orders that are made for their costs (`--schedule auto`). Families: `property_`
//! (never worse than named schedules under the same caps, never below the proven bound, read again
//! as written), `fault_` (wrong orders).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod support;

use gpipe_core::{
    Bytes, Nanos,
    cost::{LayerCost, ModelCosts},
    plan::{Found, Plan, PlanDevice, PlanError, Request, explain, predict, search},
    remat::Remat,
    schedule::Schedule,
    splitmix::Stream,
};
use support::{Kind, model};

/// Plans of random models under random caps, with and without made orders.
#[test]
fn property_a_made_order_is_never_worse_and_fits() {
    let (mut better, mut all) = (0, 0);
    for seed in 0..60 {
        let mut random = Stream::new(seed);
        let kind = [Kind::Plain, Kind::Crossed, Kind::Wild][random.below(3)];
        let (count, layers, samples) = (2 + random.below(2), 6 + random.below(3), 4);
        let model = model(&mut random, layers, samples, kind);
        let device = |memory| PlanDevice { speed: 1.0, memory };
        let mut devices = vec![device(None); count];
        let mut request = Request {
            model: &model,
            devices: &devices.clone(),
            samples,
            stages: vec![count],
            micro_batches: vec![2, 4],
            schedules: Schedule::NAMED.to_vec(),
            makes_orders: false,
            balance: None,
            remat: None,
            budget: 200_000,
            usual: None,
        };
        let plain = search(&request).unwrap();
        if seed % 2 == 1 {
            // Caps that the best plan without caps exceeds.
            let peaks = plain.prediction.device_peaks();
            let cap = |peak: &Bytes| device(Some(Bytes(peak.0 * (80 + seed % 20) / 100)));
            devices = peaks.iter().map(cap).collect();
        }
        request.devices = &devices;
        let plain = match search(&request) {
            Ok(found) => found,
            Err(PlanError::Memory(_) | PlanError::Setting(_)) => continue,
            Err(error) => panic!("seed {seed}: {error}"),
        };
        request.makes_orders = true;
        let found = search(&request).unwrap();
        all += 1;
        let step = found.prediction.step();
        assert!(step <= plain.prediction.step(), "seed {seed}");
        for (peak, own) in found.prediction.device_peaks().iter().zip(&devices) {
            assert!(own.memory.is_none_or(|cap| *peak <= cap), "seed {seed}");
        }
        let Some(made) = &found.made else { continue };
        assert!(made.bound <= step && made.named.1 >= step, "seed {seed}");
        let text = explain(&found);
        assert!(text.contains("of any order of these stages"), "{text}");
        let is_made = matches!(&found.plan.schedule, Schedule::Custom(own) if own.is_made());
        assert_eq!(is_made, text.contains("the order is made for these costs"), "{text}");
        better += usize::from(is_made);
        // No named schedule of the same stages is below the bound.
        for schedule in Schedule::NAMED {
            if schedule.placement(count) == found.prediction.placement {
                let plan = Plan { schedule, ..found.plan.clone() };
                let other = predict(&model, &devices, samples, &plan).unwrap().step();
                assert!(other >= made.bound, "seed {seed}: {}", plan.schedule);
            }
        }
        // A plan's file holds the order.
        let json = serde_json::to_string(&found.plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), found.plan);
        let again = predict(&model, &devices, samples, &found.plan).unwrap();
        assert_eq!(again, found.prediction, "seed {seed}");
    }
    assert!(better > 20 && all > 40, "{better} of {all}");
}

/// The bound was once computed with the costs measured under ZB-H1, also for a plan that was priced
/// with others. Where ZB-H1 happened to be measured slower, the bound was above the step, and the
/// plan was said to be within 0.0% of any order.
#[test]
fn regression_the_bound_has_the_costs_of_the_plan() {
    let mut compared = 0;
    for seed in 0..20 {
        let mut random = Stream::new(seed);
        let own = model(&mut random, 6, 4, Kind::Plain);
        let devices = [PlanDevice::default(); 2];
        let request = |model| Request {
            model,
            devices: &devices,
            samples: 4,
            stages: vec![2],
            micro_batches: vec![4],
            schedules: vec![Schedule::OneFOneB],
            makes_orders: true,
            balance: Some(vec![3, 3]),
            remat: Some(Remat::Never.into()),
            budget: 200_000,
            usual: None,
        };
        let slow = |cost: &LayerCost| LayerCost {
            forward: Nanos(3 * cost.forward.0),
            forward_kept: Nanos(3 * cost.forward_kept.0),
            backward: Nanos(3 * cost.backward.0),
            backward_kept: Nanos(3 * cost.backward_kept.0),
            ..*cost
        };
        let slower = own.sizes.iter().map(|(n, all)| (*n, all.iter().map(slow).collect()));
        let disturbed =
            ModelCosts { under: [("zb-h1".to_owned(), slower.collect())].into(), ..own.clone() };
        let found = search(&request(&disturbed)).unwrap();
        if found.plan.schedule != Schedule::OneFOneB {
            continue;
        }
        let bound = |found: &Found| found.made.as_ref().unwrap().bound;
        assert!(bound(&found) <= bound(&search(&request(&own)).unwrap()), "seed {seed}");
        compared += usize::from(bound(&found) < found.prediction.step());
    }
    assert!(compared > 5, "{compared}");
}

/// An order in a plan's file is checked as a schedule's file is.
#[test]
fn fault_an_order_that_is_wrong_is_refused() {
    let parse = |text: &str| text.parse::<Schedule>().map(|own| own.to_string());
    assert_eq!(parse("auto: 0F0 0B0 | 1F0 1B0").as_deref(), Ok("auto"));
    for wrong in ["auto: 0F0 0B0 | 1B0 1F0", "auto: 0F0", "auto:", "auto: 0X0", "autox"] {
        let error = parse(wrong).unwrap_err().to_string();
        assert!(error.starts_with("there is no schedule 'auto"), "{error}");
    }
    let own: Schedule = "auto: 0F0 0B0 | 1F0 1B0".parse().unwrap();
    assert_eq!(own.in_full().parse(), Ok(own.clone()));
    assert_eq!((own.stages(2), own.placement(2)), (Ok(2), vec![0, 1]));
    assert!(own.check_micro_batches(2).unwrap_err().to_string().contains("auto is for 1"));
}
