//! Products that a recomputation leaves out, because no backward reads them (`Layer::unread`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe::{
    Balance, Forward, Infer, Layer, LayerError, MeanSquaredError, Observer, ParameterSpec,
    Pipeline, Remat, Sequence, Sgd, StepEvent, TensorSpec, layers::Linear,
};
use tch::{Kind, Tensor};

use crate::common::uniform;

/// The square of a linear map: the backward of the square reads the map's result.
struct Squared {
    linear: Linear,
    /// Says that no backward reads it, which is wrong.
    denies: bool,
}

impl Layer for Squared {
    fn kind(&self) -> &'static str {
        "squared"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.linear.parameters()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        self.linear.infer(ctx, inputs)
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        self.linear.forward(ctx, inputs)?.iter().map(|y| Ok(y.f_mul(y)?)).collect()
    }

    fn unread(&self) -> Option<usize> {
        self.denies.then_some(0)
    }
}

struct Watches;

impl Observer for Watches {
    fn step(&self, _: &StepEvent) -> Result<(), LayerError> {
        Ok(())
    }
}

/// The largest gradient of the squared map's weight.
fn gradient(denies: bool, layers: &[usize], remat: Remat, observed: bool) -> f64 {
    let squared = Squared { linear: Linear::new(4, 4), denies };
    let model = Sequence::new()
        .push("first", Linear::new(3, 4))
        .push("squared", squared)
        .push("last", Linear::new(4, 2));
    let inputs = TensorSpec::new([2, 3], Kind::Float);
    let mut builder = Pipeline::builder(model, inputs)
        .stages(layers.len())
        .balance(Balance::Layers(layers.to_vec()))
        .micro_batches(2)
        .remat(remat)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .keep_gradients();
    if observed {
        builder = builder.observer(Watches);
    }
    let mut pipeline = builder.build().unwrap();
    pipeline
        .train_step(uniform(&[4, 3], 1, Kind::Float), uniform(&[4, 2], 2, Kind::Float))
        .unwrap();
    let gradients = pipeline.gradients().unwrap();
    let (_, own) = gradients.iter().find(|(name, _)| name == "squared.weight").unwrap();
    own.abs().max().double_value(&[])
}

/// A layer that says the wrong thing shows where products are left out: the square's backward then
/// reads zeros. Whole transformers, whose layers say the right thing, are in the shared matrix.
#[test]
fn property_an_unread_product_is_left_out_only_at_the_end_of_what_is_computed_again() {
    let ends = [(&[2, 1][..], Remat::Always), (&[3], Remat::Segments(3))];
    let middles =
        [(&[1, 2][..], Remat::Always), (&[3], Remat::Segments(2)), (&[2, 1], Remat::Never)];
    for (layers, remat) in ends {
        assert!(gradient(false, layers, remat, false) > 0.0, "{layers:?} {remat}");
        assert_eq!(gradient(true, layers, remat, false), 0.0, "{layers:?} {remat}");
        assert!(gradient(true, layers, remat, true) > 0.0, "an observer sees the outputs");
    }
    for (layers, remat) in middles {
        let (honest, denying) = (false, true);
        let all = [honest, denying].map(|denies| gradient(denies, layers, remat, false));
        assert!(all[0] > 0.0 && all[0] == all[1], "{layers:?} {remat}: {all:?}");
    }
}
