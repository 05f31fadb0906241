//! `fault_stall_*`: a layer that never returns, and deadlines.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gpipe::{
    Balance, Forward, Infer, Layer, LayerError, Pipeline, Schedule, Sequence, TensorSpec,
    layers::Linear,
};
use tch::{Kind, Tensor};

use super::{Deed, SAMPLES, Trap, Way, assert_says, common::uniform, data, refused};

/// Opens the trap however the test ends, so that the abandoned thread ends, too.
struct OpenAtEnd(Arc<Trap>);

impl Drop for OpenAtEnd {
    fn drop(&mut self) {
        self.0.open();
    }
}

#[test]
fn fault_stall_ends_with_the_deadline_and_names_the_stage() {
    let deadline = Duration::from_millis(400);
    // If no other stage waits for the stalled one, the driver waits for twice the deadline. The
    // rest is slack for a busy machine.
    let bound = 2 * deadline + Duration::from_secs(4);
    for stages in [1, 2, 4] {
        for schedule in Schedule::SEARCHED_EXACTLY {
            let trap = Trap::new(Deed::Stall);
            let opens = OpenAtEnd(Arc::clone(&trap));
            let way = Way { schedule, ..Way::plain(stages) };
            let mut pipeline = way.builder(&trap).timeout(deadline).build().unwrap();
            let (x, y) = data();
            let healthy = pipeline.train_step(&x, &y).unwrap();
            assert!(healthy.loss.is_finite());
            trap.set(1);
            let start = Instant::now();
            let text = refused(pipeline.train_step(&x, &y));
            assert!(start.elapsed() < bound, "{:?}: {text}", start.elapsed());
            let stage = way.stage_of(1);
            let who = if stages == 1 { "device 0 ".into() } else { format!("stage {stage} ") };
            let doing = format!("in {stage}F1");
            assert_says(&text, &[&who, "sign of life", &doing, "raise the timeout"]);
            let start = Instant::now();
            for text in [
                refused(pipeline.train_step(&x, &y)),
                refused(pipeline.evaluate(&x, &y)),
                refused(pipeline.predict(&x)),
            ] {
                assert_says(&text, &["cannot go on", &format!("device {stage} did not answer")]);
            }
            assert_says(
                &refused(pipeline.parameters()),
                &["cannot go on", &format!("device {stage}")],
            );
            let all = [("first.weight".to_owned(), uniform(&[8, 4], 9, Kind::Float))];
            assert_says(&refused(pipeline.set_parameters(&all)), &["cannot go on"]);
            drop(pipeline);
            assert!(start.elapsed() < deadline + Duration::from_secs(4), "refusing and dropping");
            drop(opens);
        }
    }
}

/// y = x, after a quarter of a second of work.
struct Slow;

impl Layer for Slow {
    fn kind(&self) -> &'static str {
        "slow"
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, _: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let start = Instant::now();
        let mut y = inputs[0].shallow_clone();
        while start.elapsed() < Duration::from_millis(250) {
            y = y.f_add_scalar(0.0)?;
        }
        Ok(vec![y])
    }
}

#[test]
fn fault_stall_the_longest_deadline_is_a_deadline() {
    let model = Sequence::new().push("slow", Slow).push("one", Linear::new(4, 2));
    for stages in [1, 2] {
        let spec = TensorSpec::new([SAMPLES, 4], Kind::Float);
        let builder = Pipeline::builder(model.clone(), spec).stages(stages);
        let builder = builder.balance(Balance::Uniform).timeout(gpipe::TIMEOUT_MAX);
        let mut pipeline = builder.build().unwrap();
        pipeline.predict(&data().0).unwrap();
    }
}
