//! Families: `oracle_` (the search against all plans), `property_`, `fault_` (requests and files that are wrong), and snapshots
//! of the explanations.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod support;

use gpipe_core::{
    Bytes, Nanos,
    cost::ModelCosts,
    plan::{Plan, PlanDevice, PlanError, Request, explain, predict, search},
    remat::{Remat, RematPolicies},
    schedule::Schedule,
    splitmix::Stream,
};
use support::{Kind, balances, model};

/// All policies that a search may try for a stage of so many layers.
fn policies(layers: usize, micro_batches: usize) -> Vec<Remat> {
    let mut all = vec![Remat::Never, Remat::UnlessAdjacent, Remat::Always];
    all.extend((1..micro_batches as u32).map(Remat::Keep));
    all.extend((2..=layers as u32).map(Remat::Segments));
    all
}

fn products<T: Copy>(lists: &[Vec<T>]) -> Vec<Vec<T>> {
    lists.iter().fold(vec![Vec::new()], |all, list| {
        let longer = |start: &Vec<T>| {
            list.iter().map(|&item| [start.as_slice(), &[item]].concat()).collect::<Vec<_>>()
        };
        all.iter().flat_map(longer).collect()
    })
}

struct Case {
    model: ModelCosts,
    devices: Vec<PlanDevice>,
    samples: usize,
    stages: Vec<usize>,
    micro_batches: Vec<usize>,
}

impl Case {
    fn new(seed: u64, kind: Kind) -> Self {
        let mut random = Stream::new(seed);
        let most = [1, 2, 2, 3][random.below(4)];
        let layers = match most {
            3 => 3 + random.below(2),
            _ => most + random.below(5),
        };
        let samples = 1 + random.below(5);
        let model = model(&mut random, layers, samples, kind);
        let speeds = [1.0, 1.0, 0.5, 1.7];
        let device =
            |random: &mut Stream| PlanDevice { speed: speeds[random.below(4)], memory: None };
        let devices = (0..most).map(|_| device(&mut random)).collect();
        let micro_batches = match random.below(2) {
            0 => vec![1, 3],
            _ => vec![2 + random.below(2)],
        };
        let stages = if most == 2 { vec![1, 2] } else { vec![most] };
        Self { model, devices, samples, stages, micro_batches }
    }

    fn request(&self, budget: u64) -> Request<'_> {
        Request {
            model: &self.model,
            devices: &self.devices,
            samples: self.samples,
            stages: self.stages.clone(),
            micro_batches: self.micro_batches.clone(),
            schedules: Schedule::TRAINING.to_vec(),
            balance: None,
            remat: None,
            budget,
        }
    }

    /// Step and peaks of every plan.
    fn all(&self) -> Vec<(Nanos, Vec<Bytes>)> {
        let mut all = Vec::new();
        let layers = self.model.layers.len();
        for &stages in &self.stages {
            for &m in &self.micro_batches {
                for schedule in Schedule::TRAINING {
                    for balance in balances(layers, stages) {
                        let lists: Vec<Vec<Remat>> =
                            balance.iter().map(|&n| policies(n, m.min(self.samples))).collect();
                        for remat in products(&lists) {
                            let remat = RematPolicies::by_stage(remat);
                            let balance = balance.clone();
                            let plan = Plan { balance, micro_batches: m, schedule, remat };
                            let devices = &self.devices[..stages];
                            let own = predict(&self.model, devices, self.samples, &plan).unwrap();
                            let peaks = own.stages.iter().map(|stage| stage.peak).collect();
                            all.push((own.step(), peaks));
                        }
                    }
                }
            }
        }
        all
    }
}

/// Random caps around what plans need; each case is searched under several.
fn oracle(seed: u64, kind: Kind) {
    let mut case = Case::new(seed, kind);
    let mut random = Stream::new(seed ^ 0xcafe);
    let all = case.all();
    let loads: Vec<u64> = all.iter().map(|(_, peaks)| peaks.iter().max().unwrap().0).collect();
    let (least, most) = (*loads.iter().min().unwrap(), *loads.iter().max().unwrap());
    for round in 0..5 {
        let cap = least + random.below((most - least + 1) as usize) as u64;
        let cap = match round {
            0 => None,
            1 => Some(Bytes(least)),
            2 => Some(Bytes(least - 1)),
            _ => Some(Bytes(cap)),
        };
        for device in &mut case.devices {
            let spread = if round == 4 { random.below(20) as u64 } else { 0 };
            device.memory = cap.map(|cap| cap + Bytes(spread));
        }
        let fits = |peaks: &[Bytes]| {
            peaks
                .iter()
                .zip(&case.devices)
                .all(|(peak, device)| device.memory.is_none_or(|cap| *peak <= cap))
        };
        let best = all.iter().filter(|(_, peaks)| fits(peaks)).map(|(step, _)| *step).min();
        let context = format!("seed {seed}, {kind:?}, round {round}, cap {cap:?}");
        match (search(&case.request(50_000_000)), best) {
            (Ok(found), Some(best)) => {
                let peaks: Vec<Bytes> = found.prediction.stages.iter().map(|s| s.peak).collect();
                assert!(fits(&peaks), "{context}");
                assert!(found.bound <= best, "{context}: bound {} {best}", found.bound);
                if found.exact {
                    assert_eq!(found.prediction.step(), best, "{context}: {:?}", found.plan);
                }
                assert!(found.exact || kind != Kind::Plain, "{context}: not exact");
                let shown = explain(&found);
                assert!(shown.contains(&found.prediction.step().to_string()));
            }
            (Err(PlanError::Memory(shortage)), None) => {
                if let Some(smallest) = shortage.smallest {
                    assert!(smallest.0 >= least, "{context}: {shortage}");
                    assert!(!shortage.exact || smallest.0 == least, "{context}: {shortage}");
                }
                assert!(shortage.exact || kind != Kind::Plain, "{context}");
            }
            (found, best) => panic!("{context}: best {best:?}, found {found:?}"),
        }
    }
}

#[test]
fn oracle_search_finds_the_best_of_all_plans_of_a_chain() {
    (0..60).for_each(|seed| oracle(seed, Kind::Plain));
}

#[test]
fn oracle_search_finds_the_best_of_all_plans_with_skips_ties_and_frozen_layers() {
    (0..60).for_each(|seed| oracle(seed, Kind::Crossed));
}

#[test]
fn oracle_search_believes_costs_that_contradict_themselves() {
    (0..40).for_each(|seed| oracle(seed, Kind::Wild));
}
