//! A recomputation ends where no backward reads further (`Layer::may_end_early`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use gpipe::{
    Balance, Forward, Infer, Layer, LayerError, MeanSquaredError, ParameterSpec, Pipeline, Remat,
    Schedule, Sequence, Sgd, TensorSpec, layers::Linear,
};
use tch::{Kind, Tensor};

use crate::common::uniform;

/// Products with values that are saved after them, and work at the end that nothing saves.
struct Tail {
    linear: Linear,
    early: bool,
    /// How many forwards came to their end.
    ended: Arc<AtomicUsize>,
    /// The forward, counted from 0, that fails before anything is saved.
    fails: Option<usize>,
    begun: AtomicUsize,
}

impl Layer for Tail {
    fn kind(&self) -> &'static str {
        "tail"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.linear.parameters()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        self.linear.infer(ctx, inputs)
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        if Some(self.begun.fetch_add(1, Ordering::Relaxed)) == self.fails {
            return Err(LayerError::Value("out of order".into()));
        }
        let y = self.linear.forward(ctx, inputs)?.remove(0).f_tanh()?;
        let y = ctx.dropout(&y, 0.25)?.f_add(&inputs[0])?.f_neg()?;
        self.ended.fetch_add(1, Ordering::Relaxed);
        Ok(vec![y])
    }

    fn may_end_early(&self) -> bool {
        self.early
    }
}

struct Way {
    early: bool,
    layers: &'static [usize],
    remat: Remat,
    schedule: Schedule,
    fails: Option<usize>,
}

const MICRO_BATCHES: usize = 3;

/// How many forwards came to their end, the step's peak of saved bytes on the first device, and all
/// parameters after two steps.
fn trained(way: &Way) -> gpipe::Result<(usize, u64, Vec<Tensor>)> {
    let ended = Arc::new(AtomicUsize::new(0));
    let tail = |fails| Tail {
        linear: Linear::new(64, 64),
        early: way.early,
        ended: Arc::clone(&ended),
        fails,
        begun: AtomicUsize::new(0),
    };
    let model = Sequence::new()
        .push("first", Linear::new(3, 64))
        .push("one", tail(None))
        .push("two", tail(way.fails))
        .push("last", Linear::new(64, 2));
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([8, 3], Kind::Float))
        .stages(way.layers.len())
        .balance(Balance::Layers(way.layers.to_vec()))
        .micro_batches(MICRO_BATCHES)
        .schedule(way.schedule.clone())
        .remat(way.remat)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .build()?;
    let rows = 8 * MICRO_BATCHES as i64;
    let mut peak = 0;
    for step in 0..2 {
        let x = uniform(&[rows, 3], step, Kind::Float);
        let report = pipeline.train_step(x, uniform(&[rows, 2], 7, Kind::Float))?;
        peak = report.devices[0].peak.0;
    }
    let parameters = pipeline.parameters()?.into_iter().map(|(_, own)| own).collect();
    Ok((ended.load(Ordering::Relaxed), peak, parameters))
}

#[test]
fn transparency_a_recomputation_that_ends_early_changes_no_bit() {
    let way = |early, layers, remat, schedule| Way { early, layers, remat, schedule, fails: None };
    let all = 2 * 2 * MICRO_BATCHES; // two layers in two steps
    let plain = trained(&way(false, &[4], Remat::Never, Schedule::GPipe)).unwrap();
    assert_eq!(plain.0, all);
    // How often the end of a layer is computed again: the first of a segment's two feeds the other.
    let ways: [(&'static [usize], Remat, usize); 5] = [
        (&[3, 1], Remat::Always, all / 2),
        (&[2, 2], Remat::Always, all / 2),
        (&[2, 1, 1], Remat::Always, 0),
        (&[4], Remat::Segments(4), 0),
        (&[3, 1], Remat::Selective, all / 2),
    ];
    for (layers, remat, again) in ways {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1] {
            let case = format!("{layers:?} {remat} {schedule}");
            let whole = trained(&way(false, layers, remat, schedule.clone())).unwrap();
            let early = trained(&way(true, layers, remat, schedule)).unwrap();
            assert_eq!((whole.0, early.0), (2 * all, all + again), "{case}");
            // With several stages the peak depends on when values arrive.
            if layers.len() == 1 {
                assert!(early.1 <= whole.1, "{case}: {} of {} bytes", early.1, whole.1);
            }
            assert!(early.2 == plain.2 && whole.2 == plain.2, "{case}");
        }
    }
}

#[test]
fn fault_a_recomputation_that_fails_before_its_end_fails_the_step() {
    let layers = &[3, 1];
    let (remat, schedule) = (Remat::Always, Schedule::GPipe);
    let way = Way { early: true, layers, remat, schedule, fails: Some(MICRO_BATCHES) };
    let error = trained(&way).unwrap_err().to_string();
    assert!(error.contains("two") && error.contains("out of order"), "{error}");
}
