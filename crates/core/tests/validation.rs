//! Families: `property_` (random correct programs pass, or deadlock if links are too small),
//! `fault_` (one change to a correct program is detected, or harmless by construction).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_core::{
    Action, Direction, EdgeId, Op,
    lower::{EdgeKind, Part, Program, Topology, lower},
    remat::Remat,
    schedule::Schedule,
    simulate::{Costs, simulate},
    splitmix::Stream,
    testing::{random_compute, random_topology},
    validate::{Invalid, validate},
};

fn one_f_one_b() -> Program {
    let compute = Remat::Always.apply(&Schedule::OneFOneB.actions(3, 4));
    lower(&compute, &Topology::chain(3), 4).unwrap()
}

fn refusal(program: &Program) -> String {
    validate(program, 2).unwrap_err().to_string()
}

fn swap(program: &mut Program, device: usize, a: &str, b: &str) {
    let list = &mut program.devices[device];
    let at = |list: &[Action], text: &str| list.iter().position(|x| x.to_string() == text).unwrap();
    let (a, b) = (at(list, a), at(list, b));
    list.swap(a, b);
}

#[test]
fn property_random_programs_are_valid_at_every_capacity() {
    for seed in 0..400 {
        let mut random = Stream::new(seed);
        let stages = 1 + random.below(6);
        let devices = 1 + random.below(stages);
        let micro_batches = 1 + random.below(7);
        let compute = random_compute(&mut random, stages, devices, micro_batches);
        let topology = random_topology(&mut random, stages);
        let program = lower(&compute, &topology, micro_batches).unwrap();
        // There is room for every message of a step, so only rules decide, never a full link.
        let held =
            validate(&program, micro_batches.max(2)).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(held.inputs.iter().all(|&n| n <= micro_batches));
        // With less room it is correct or deadlocks, but it never breaks a rule.
        if let Err(error) = validate(&program, 1) {
            assert!(matches!(error, Invalid::Deadlock(_)), "seed {seed}: {error}");
        }
    }
}

/// The ways to run a whole step in parts, one after the other.
const WAYS: [&[Part]; 5] = [
    &[Part::Step],
    &[Part::Gradients, Part::Finish],
    &[Part::Gradients, Part::Reduce, Part::Update],
    &[Part::Forward, Part::Backward, Part::Finish],
    &[Part::Forward, Part::Backward, Part::Reduce, Part::Update],
];

#[test]
fn property_parts_of_random_programs_are_valid_and_make_the_whole() {
    for seed in 0..200 {
        let mut random = Stream::new(9000 + seed);
        let stages = 1 + random.below(6);
        let devices = 1 + random.below(stages);
        let micro_batches = 1 + random.below(7);
        let compute = random_compute(&mut random, stages, devices, micro_batches);
        let topology = random_topology(&mut random, stages);
        let whole = lower(&compute, &topology, micro_batches).unwrap();
        for way in WAYS {
            let mut actions: Vec<Vec<Action>> = vec![Vec::new(); devices];
            let mut held = Vec::new();
            for &part in way {
                let program = whole.part(part);
                let found = validate(&program, micro_batches.max(2));
                held.push(found.unwrap_or_else(|e| panic!("seed {seed}, {part:?}: {e}")));
                for (all, own) in actions.iter_mut().zip(&program.devices) {
                    all.extend(own);
                }
            }
            for (parts, list) in actions.iter_mut().zip(&whole.devices) {
                let mut list = list.clone();
                parts.sort_unstable();
                list.sort_unstable();
                assert_eq!(*parts, list, "seed {seed}, {way:?}");
            }
            if let [forward, backward, ..] = &held[..]
                && way[0] == Part::Forward
            {
                // All that the forwards keep is what the backwards start from.
                assert_eq!(forward.inputs, vec![micro_batches; stages]);
                assert!(forward.inputs.iter().zip(&backward.inputs).all(|(a, b)| a == b));
            }
        }
    }
}

#[test]
fn fault_removing_any_action_is_found() {
    for part in Part::ALL.into_iter().filter(|&part| part != Part::Inference) {
        let program = one_f_one_b().part(part);
        for device in 0..3 {
            for position in 0..program.devices[device].len() {
                let mut broken = program.clone();
                let removed = broken.devices[device].remove(position);
                assert!(validate(&broken, 2).is_err(), "{part:?} without {removed}");
            }
        }
    }
}

#[test]
fn fault_doubling_any_action_is_found() {
    let program = one_f_one_b();
    for device in 0..3 {
        for position in 0..program.devices[device].len() {
            let mut broken = program.clone();
            let action = broken.devices[device][position];
            broken.devices[device].insert(position, action);
            assert!(validate(&broken, 2).is_err(), "{action} twice");
        }
    }
}

#[test]
fn fault_refusals_name_the_action_and_the_reason() {
    let mut descending = one_f_one_b();
    swap(&mut descending, 2, "2B0", "2B1");
    let text = refusal(&descending);
    assert!(text.contains("2B1") && text.contains("forward comes later"), "{text}");

    let mut unordered = lower(&Schedule::GPipe.actions(2, 3), &Topology::chain(2), 3).unwrap();
    swap(&mut unordered, 1, "1B0", "1B1");
    let text = refusal(&unordered);
    assert!(text.contains("(1B1)") && text.contains("ascending"), "{text}");

    let mut early = one_f_one_b();
    swap(&mut early, 1, "1F0", "1SEND_F0@1");
    assert!(refusal(&early).contains("its forward has to come before it"), "{}", refusal(&early));

    let mut foreign = one_f_one_b();
    foreign.devices[2].push("1F0".parse().unwrap());
    assert!(refusal(&foreign).contains("a stage has one device"), "{}", refusal(&foreign));

    let mut beyond = one_f_one_b();
    beyond.devices[0].push("7F0".parse().unwrap());
    assert!(refusal(&beyond).contains("only 3 stages"));
    let mut beyond = one_f_one_b();
    beyond.devices[0].insert(0, "0F9".parse().unwrap());
    assert!(refusal(&beyond).contains("only 4 micro-batches"));
    let mut beyond = one_f_one_b();
    beyond.devices[0].insert(0, "0SEND_F0@77".parse().unwrap());
    assert!(refusal(&beyond).contains("no edge 77"));
}

#[test]
fn fault_a_deadlock_names_everyone_who_waits() {
    // Receiving the second activation directly before its forward is valid with links of one
    // message.
    let mut program = lower(&Schedule::GPipe.actions(2, 2), &Topology::chain(2), 2).unwrap();
    let list = &mut program.devices[1];
    let receive = list.iter().position(|a| a.to_string() == "1RECV_F1@0").unwrap();
    let action = list.remove(receive);
    let forward = list.iter().position(|a| a.to_string() == "1F1").unwrap();
    list.insert(forward, action);
    assert!(validate(&program, 1).is_ok());

    // Neither device receives before it has sent everything, so links with room for 1 fill up.
    let program = lower(&Schedule::BreadthFirst(2).actions(2, 6), &Topology::chain(4), 6).unwrap();
    assert!(validate(&program, 6).is_ok());
    let text = validate(&program, 1).unwrap_err().to_string();
    assert!(
        text.starts_with("deadlock: device 0 waits at action 7 (0SEND_F3@0), whose link is full"),
        "{text}"
    );
}

/// Stages of one device hand over without a message, and the order of the list decides.
#[test]
fn fault_a_hand_over_needs_the_order_of_the_list() {
    let lists = |text: &str| vec![text.split(' ').map(|word| word.parse().unwrap()).collect()];
    let program = |text| lower(&lists(text), &Topology::chain(2), 1).unwrap();
    let whole = program("0F0 1F0 1B0 0B0");
    assert_eq!(validate(&whole, 1).unwrap().on_devices, [2]);
    let is_of_micro_batch = |action: &&Action| {
        action.op.transfer().is_some_and(|transfer| transfer.micro_batch.is_some())
    };
    assert_eq!(whole.devices[0].iter().filter(is_of_micro_batch).count(), 0);
    let text = refusal(&program("1F0 0F0 1B0 0B0"));
    assert!(text.contains("(1F0): it needs F of stage 0, which is on the same device"), "{text}");
    let text = refusal(&program("0F0 1F0 0B0 1B0"));
    assert!(text.contains("(0B0): it needs B or I of stage 1"), "{text}");
    let mut sends = whole;
    sends.devices[0].insert(1, "0SEND_F0@0".parse().unwrap());
    let text = refusal(&sends);
    assert!(text.contains("stages 0 and 1 are on one device: edge 0 has no messages"), "{text}");
}

#[test]
fn property_a_frozen_front_sends_no_gradients() {
    let mut topology = Topology::chain(3);
    topology.edges[0].kind = EdgeKind::Boundary { gradient: false };
    let program = lower(&Schedule::OneFOneB.actions(3, 4), &topology, 4).unwrap();
    validate(&program, 1).unwrap();
    let back_on_edge_0 = |action: &&Action| match action.op {
        Op::Send(t) | Op::Receive(t) => t.edge == EdgeId(0) && t.direction == Direction::Backward,
        _ => false,
    };
    assert_eq!(program.devices.iter().flatten().filter(back_on_edge_0).count(), 0);
    assert!(simulate(&program, &Costs::unit(3), 1).is_ok());
}

/// A file may contain anything. Whatever is moved, the result is a refusal or a program that runs.
#[test]
fn property_random_changes_are_refused_or_run() {
    let (mut refused, mut accepted) = (0, 0);
    for seed in 0..3000 {
        let mut random = Stream::new(70_000 + seed);
        let stages = 1 + random.below(4);
        let micro_batches = 1 + random.below(4);
        let compute = random_compute(&mut random, stages, stages, micro_batches);
        let topology = random_topology(&mut random, stages);
        let mut program = lower(&compute, &topology, micro_batches).unwrap();
        for _ in 0..1 + random.below(2) {
            let list = random.below(stages);
            let length = program.devices[list].len();
            let (a, b) = (random.below(length), random.below(length));
            program.devices[list].swap(a, b);
        }
        match validate(&program, 2) {
            Err(_) => refused += 1,
            Ok(held) => {
                accepted += 1;
                assert!(simulate(&program, &Costs::unit(stages), 2).is_ok(), "seed {seed}");
                assert!(held.inputs.iter().all(|&inputs| inputs <= program.micro_batches));
            }
        }
    }
    assert!(refused > 1000 && accepted > 100, "{refused} refused, {accepted} accepted");
}

#[test]
fn regression_a_rematerialization_after_its_backward_is_refused_at_the_backward() {
    // The count of held activations dropped below zero before the misplaced R was reached.
    let compute = vec![["0F0", "0B0", "0R0"].map(|text| text.parse().unwrap()).to_vec()];
    let program = lower(&compute, &Topology::chain(1), 1).unwrap();
    let text = refusal(&program);
    assert!(
        text.contains("(0B0)") && text.contains("its re-materialization comes later"),
        "{text}"
    );
}
