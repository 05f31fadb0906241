//! Random but correct programs for property tests here and in `gpipe-runtime`. The same seed always
//! yields the same program.

use crate::{
    action::{Action, Op},
    ids::{MicroBatch, StageId},
    lower::{Edge, EdgeKind, Topology},
    schedule::ActionLists,
    splitmix::Stream,
};

/// Generates compute actions with a greedy, random scheduler: at each moment a random device runs
/// one of its ready actions, chosen at random. Stages are placed at random, at least one on each
/// device. Any micro-batch may be recomputed, and its backward may be split. Backwards ascend, as a
/// correct program requires.
pub fn random_compute(
    random: &mut Stream,
    stages: usize,
    devices: usize,
    micro_batches: usize,
) -> ActionLists {
    let mut lists = vec![Vec::new(); devices];
    let placement = random_placement(random, stages, devices);
    // For each stage, how many forwards, input gradients and weight gradients are done.
    let mut done = vec![[0_usize; 3]; stages];
    loop {
        let ready: Vec<(usize, usize)> = (0..stages)
            .flat_map(|k| {
                let [forwards, inputs, weights] = done[k];
                let forward = forwards < micro_batches && (k == 0 || done[k - 1][0] > forwards);
                let gradient = k + 1 == stages || done[k + 1][1] > inputs;
                let kinds = [forward, inputs < forwards && gradient, weights < inputs];
                kinds.into_iter().enumerate().filter(|(_, ready)| *ready).map(move |(n, _)| (k, n))
            })
            .collect();
        if ready.is_empty() {
            return lists;
        }
        let (k, kind) = ready[random.below(ready.len())];
        let m = MicroBatch::from_index(done[k][kind]);
        let mut push = |op| lists[placement[k]].push(Action { stage: StageId::from_index(k), op });
        match kind {
            0 => push(Op::Forward(m)),
            1 => {
                if random.below(2) == 0 {
                    push(Op::Rematerialize(m));
                }
                // A whole backward would overtake any second half that is still due.
                if done[k][1] == done[k][2] && random.below(3) > 0 {
                    push(Op::Backward(m));
                    done[k][2] += 1;
                } else {
                    push(Op::BackwardInput(m));
                }
            }
            _ => push(Op::BackwardWeight(m)),
        }
        done[k][kind] += 1;
    }
}

/// The device of each stage, at random, with no device left out.
fn random_placement(random: &mut Stream, stages: usize, devices: usize) -> Vec<usize> {
    let mut placement: Vec<usize> =
        (0..stages).map(|k| if k < devices { k } else { random.below(devices) }).collect();
    for k in (1..stages).rev() {
        placement.swap(k, random.below(k + 1));
    }
    placement
}

/// Applies one random change to the lists: two actions of a device swapped, one left out, one done
/// twice, or one moved to the end of another device's list.
pub fn changed(random: &mut Stream, lists: &ActionLists) -> ActionLists {
    let mut changed = lists.clone();
    let devices = changed.len();
    let list = &mut changed[random.below(devices)];
    let (a, b) = (random.below(list.len()), random.below(list.len()));
    match random.below(4) {
        0 => list.swap(a, b),
        1 => drop(list.remove(a)),
        2 => list.insert(b, list[a]),
        _ => {
            let action = list.remove(a);
            changed[random.below(devices)].push(action);
        }
    }
    changed
}

/// A chain with random long skips and ties; some of its edges carry no gradient.
pub fn random_topology(random: &mut Stream, stages: usize) -> Topology {
    let mut topology = Topology::chain(stages);
    let extra = random.below(4);
    for _ in 0..extra {
        let (a, b) = (random.below(stages), random.below(stages));
        let (low, high) = (StageId::from_index(a.min(b)), StageId::from_index(a.max(b)));
        if low == high {
            continue;
        }
        topology.edges.push(match random.below(3) {
            0 => Edge { from: high, to: low, kind: EdgeKind::Tie },
            gradient => {
                Edge { from: low, to: high, kind: EdgeKind::Skip { gradient: gradient == 1 } }
            }
        });
    }
    topology
}
