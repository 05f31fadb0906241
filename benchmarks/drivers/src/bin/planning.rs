//! Times the planner's search: a GPT for 8 devices, and 400 layers for 64 devices with 512
//! micro-batches.
//!
//! `cargo run --release -p gpipe-drivers --bin planning`

use std::time::Instant;

use gpipe_core::{
    Bytes, Nanos,
    cost::{LayerCost, LayerState, ModelCosts, TieCost, Transport},
    plan::{PlanDevice, PlanError, Request, explain, search},
    schedule::Schedule,
    splitmix::Stream,
};

const MIB: u64 = 1 << 20;

/// Costs of one sample: an embedding, blocks that differ by a few percent, and a head tied to the
/// embedding.
fn gpt(layers: usize) -> ModelCosts {
    let mut random = Stream::new(layers as u64);
    let (mut states, mut costs) = (Vec::new(), Vec::new());
    for layer in 0..=layers {
        let weight = match layer {
            0 => 0.1,
            _ if layer + 1 == layers => 2.5,
            _ if layer == layers => 0.5,
            _ => 1.0,
        };
        let mut vary = |x: f64| (x * weight * (0.97 + 0.0006 * random.below(100) as f64)) as u64;
        let forward = vary(2e6);
        costs.push(LayerCost {
            forward: Nanos(forward),
            forward_kept: Nanos(forward),
            rematerialize: Nanos(forward),
            backward: Nanos(vary(4e6)),
            backward_kept: Nanos(0),
            inputs: Bytes(3 * MIB),
            input_gradients: Bytes(if layer == 0 { 0 } else { 3 * MIB }),
            kept: Bytes(vary(40e6)),
            forward_peak: Bytes(vary(50e6)),
            backward_peak: Bytes(vary(30e6)),
            first_backward_peak: Bytes(vary(50e6)),
            ..LayerCost::default()
        });
        if let Some(cost) = costs.last_mut() {
            cost.backward_kept = cost.backward;
        }
        states.push(LayerState {
            name: if layer == 0 { "embedding".into() } else { format!("block.{layer}") },
            parameters: Bytes(28 * MIB),
            gradients: Bytes(28 * MIB),
            statistics: Bytes(0),
            optimizer: Bytes(56 * MIB),
            shardable: vec![Bytes(56 * MIB)],
            norm: Nanos(vary(1e5)),
            update: Nanos(vary(1e6)),
            update_peak: Bytes(28 * MIB),
            flops: 1,
            unsplit: false,
            early: Bytes(0),
        });
    }
    states.pop();
    let tie = TieCost {
        layers: vec![0, layers - 1],
        parameters: Bytes(96 * MIB),
        optimizer: Bytes(192 * MIB),
        shardable: Bytes(192 * MIB),
    };
    ModelCosts {
        fed: Bytes(0),
        layers: states,
        sizes: [(1, costs)].into(),
        under: Default::default(),
        skips: Vec::new(),
        ties: vec![tie],
        trained_before: (0..=layers).map(|layer| layer > 0).collect(),
        transport: Transport { latency: Nanos(5_000), bytes_per_s: 10_000_000_000 },
        replicated: false,
        ..ModelCosts::default()
    }
}

fn timed(what: &str, request: &Request<'_>, show: bool) {
    let start = Instant::now();
    let result = search(request);
    let seconds = start.elapsed().as_secs_f64();
    match result {
        Ok(found) => {
            let over =
                100.0 * (found.prediction.step().0 as f64 / found.bound.0.max(1) as f64 - 1.0);
            println!(
                "{what}: {seconds:.2} s, exact {}, at most {over:.2}% above, {} plans",
                found.exact, found.examined
            );
            if show {
                println!("{}", explain(&found));
            }
        }
        Err(PlanError::Memory(shortage)) => println!("{what}: {seconds:.2} s, {shortage}"),
        Err(error) => println!("{what}: {seconds:.2} s, {error}"),
    }
}

fn main() {
    let show = std::env::args().any(|argument| argument == "--show");
    for layers in [10, 16, 26] {
        let model = gpt(layers);
        for gib in [None, Some(16), Some(6), Some(4), Some(3), Some(1)] {
            let memory = gib.map(|gib| Bytes(gib << 30));
            let devices = vec![PlanDevice { speed: 1.0, memory }; 8];
            let request = Request {
                model: &model,
                devices: &devices,
                samples: 32,
                stages: vec![8],
                micro_batches: vec![1, 2, 4, 8, 16, 32],
                schedules: Schedule::SEARCHED_EXACTLY.to_vec(),
                makes_orders: false,
                balance: None,
                remat: None,
                budget: Request::BUDGET,
                usual: None,
            };
            timed(&format!("{layers} layers, 8 devices, {gib:?} GiB"), &request, show);
            let all = Request { stages: (1..=8).collect(), ..request };
            timed(&format!("{layers} layers, 1 to 8 devices, {gib:?} GiB"), &all, false);
        }
    }
    let model = gpt(400);
    for gib in [None, Some(16), Some(6), Some(4), Some(1)] {
        let memory = gib.map(|gib| Bytes(gib << 30));
        let devices = vec![PlanDevice { speed: 1.0, memory }; 64];
        let request = Request {
            model: &model,
            devices: &devices,
            samples: 512,
            stages: vec![64],
            micro_batches: vec![512],
            schedules: Schedule::SEARCHED_EXACTLY.to_vec(),
            makes_orders: false,
            balance: None,
            remat: None,
            budget: Request::BUDGET,
            usual: None,
        };
        timed(&format!("400 layers, 64 devices, M 512, {gib:?} GiB"), &request, false);
    }
}
