//! Random but correct programs, for property tests here and in `gpipe-runtime`: the same seed always
//! gives the same one.

use crate::{
    action::{Action, Op},
    ids::{MicroBatch, StageId},
    lower::{Edge, EdgeKind, Topology},
    schedule::ActionLists,
    splitmix::Stream,
};

/// Compute actions that a greedy, random scheduler came up with: at each moment a random device runs a
/// random one of what it could run. `stages` may share devices, and every micro-batch may or may not be
/// recomputed; backwards ascend, as they must.
pub fn random_compute(
    random: &mut Stream,
    stages: usize,
    devices: usize,
    micro_batches: usize,
) -> ActionLists {
    let mut lists = vec![Vec::new(); devices];
    let mut forwards = vec![0; stages];
    let mut backwards = vec![0; stages];
    loop {
        let ready: Vec<(usize, bool)> = (0..stages)
            .flat_map(|k| {
                let forward =
                    forwards[k] < micro_batches && (k == 0 || forwards[k - 1] > forwards[k]);
                let gradient = k + 1 == stages || backwards[k + 1] > backwards[k];
                let backward = backwards[k] < forwards[k] && gradient;
                [(forward, (k, true)), (backward, (k, false))]
            })
            .filter_map(|(ready, what)| ready.then_some(what))
            .collect();
        if ready.is_empty() {
            return lists;
        }
        let (k, is_forward) = ready[random.below(ready.len())];
        let stage = StageId::from_index(k);
        let list = &mut lists[k % devices];
        if is_forward {
            list.push(Action { stage, op: Op::Forward(MicroBatch::from_index(forwards[k])) });
            forwards[k] += 1;
        } else {
            let m = MicroBatch::from_index(backwards[k]);
            if random.below(2) == 0 {
                list.push(Action { stage, op: Op::Rematerialize(m) });
            }
            list.push(Action { stage, op: Op::Backward(m) });
            backwards[k] += 1;
        }
    }
}

/// A chain with random long skips and ties, some of whose edges carry no gradient.
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
