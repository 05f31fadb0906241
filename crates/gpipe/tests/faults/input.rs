//! `fault_input_*`: mini-batches that the pipeline rejects, and values that layers reject.

use gpipe::{MeanSquaredError, Pipeline, Sequence, Sgd, TensorSpec, layers::Linear};
use tch::{Kind, Tensor};

use super::{
    Deed, M, Pair, SAMPLES, Trap, Way, assert_says,
    common::{Named, assert_same_bits, bits, uniform},
    data, refused, tokens_builder, tokens_model, ways,
};

#[test]
fn fault_input_shapes_and_dtypes() {
    let (x, y) = data();
    let of = |samples: i64, features: i64, kind| uniform(&[samples, features], 3, kind);
    let (float, double) = (Kind::Float, Kind::Double);
    let bad: Vec<(Vec<Tensor>, Vec<Tensor>, &[&str])> = vec![
        (vec![of(0, 4, float)], vec![of(0, 2, float)], &["N = 0", "at least 1"]),
        (vec![of(6, 4, float)], vec![of(5, 2, float)], &["6 samples", "[5, 2]", "same first size"]),
        (vec![], vec![of(6, 2, float)], &["no input tensor"]),
        (
            vec![of(6, 5, float)],
            vec![of(6, 2, float)],
            &["layer 'first' (linear)", "float32 [6, 5]"],
        ),
        (
            vec![of(6, 4, float)],
            vec![of(6, 3, float)],
            &["float32 [6, 2]", "float32 [6, 3]", "one shape"],
        ),
        (vec![of(6, 4, float)], vec![of(6, 2, double)], &["float32 [6, 2]", "float64 [6, 2]"]),
        (vec![of(6, 4, Kind::Int64)], vec![of(6, 2, float)], &["layer 'first'", "int64 [6, 4]"]),
        (
            vec![of(6, 4, float), of(6, 4, float)],
            vec![of(6, 2, float)],
            &["2 input tensors", "built for 1"],
        ),
        (vec![of(6, 4, float)], vec![], &["there is no target tensor"]),
        (vec![Tensor::from(1.0_f32)], vec![Tensor::from(1.0_f32)], &["scalar", "first size"]),
    ];
    for stages in [1, 4] {
        let mut pair = Pair::new(&Way::plain(stages), &Trap::new(Deed::Error));
        for (inputs, targets, says) in &bad {
            let (inputs, targets) = (inputs.as_slice(), targets.as_slice());
            assert_says(&pair.harm(|p| p.train_step(inputs, targets)), says);
            assert_says(&pair.harm(|p| p.evaluate(inputs, targets)), says);
        }
        let text = pair.harm(|p| p.predict(of(6, 5, float)));
        assert_says(&text, &["layer 'first'", "float32 [6, 5]"]);
        assert_says(&pair.harm(|p| p.predict(of(0, 4, float))), &["N = 0"]);
        let predicted = pair.harmed.predict(&x).unwrap();
        assert_eq!(predicted[0].size(), y.size());
    }
}

#[test]
fn fault_input_floats_of_another_width_name_the_first_layer() {
    let mut pair = Pair::new(&Way::plain(4), &Trap::new(Deed::Error));
    let of = |features| uniform(&[SAMPLES, features], 3, Kind::Double);
    for targets in [of(2), of(2).to_kind(Kind::Float)] {
        let text = pair.harm(|p| p.train_step(of(4), &targets));
        assert_says(&text, &["layer 'first'", "float32", "float64"]);
    }
    assert_says(&pair.harm(|p| p.predict(of(4))), &["layer 'first'", "float32", "float64"]);
}

#[test]
fn fault_input_training_without_a_loss_or_an_optimizer() {
    let (x, y) = data();
    let builder = || {
        let model = Sequence::new().push("one", Linear::new(4, 2));
        Pipeline::builder(model, TensorSpec::new([SAMPLES, 4], Kind::Float))
    };
    let mut neither = builder().build().unwrap();
    assert_says(&refused(neither.train_step(&x, &y)), &["cannot train", "a loss and an optimizer"]);
    assert_says(&refused(neither.evaluate(&x, &y)), &["cannot evaluate", "a loss"]);
    assert_eq!(neither.predict(&x).unwrap()[0].size(), y.size());
    let mut loss = builder().loss(MeanSquaredError).build().unwrap();
    assert_says(&refused(loss.train_step(&x, &y)), &["cannot train", "a loss and an optimizer"]);
    assert!(loss.evaluate(&x, &y).unwrap().loss.is_finite());
    let mut optimizer = builder().optimizer(Sgd::new(0.1)).build().unwrap();
    assert_says(&refused(optimizer.train_step(&x, &y)), &["cannot train"]);
}

#[test]
fn fault_input_tokens_and_classes_out_of_range_name_layer_stage_and_micro_batch() {
    let tokens = || (uniform(&[SAMPLES, 3], 4, Kind::Double).abs() * 6.9).to_kind(Kind::Int64);
    for stages in 1..=3 {
        let mut pipeline = tokens_builder(tokens_model([7, 7])).stages(stages).build().unwrap();
        pipeline.train_step(tokens(), tokens()).unwrap();
        let before = pipeline.parameters().unwrap();
        for micro_batch in 0..M as i64 {
            for bad in [7, -1, i64::MAX] {
                let wrong = tokens();
                let _ = wrong.narrow(0, 2 * micro_batch + 1, 1).narrow(1, 2, 1).fill_(bad);
                let place = |stage: usize| format!("stage {stage}, micro-batch {micro_batch}");
                let range = format!("token {bad} is outside the vocabulary 0..7");
                let says = [&place(0), "layer 'embedding'", &range];
                assert_says(&refused(pipeline.train_step(&wrong, tokens())), &says);
                assert_says(&refused(pipeline.evaluate(&wrong, tokens())), &says);
                assert_says(&refused(pipeline.predict(&wrong)), &says);
                let says = [&place(stages - 1), "layer 'loss'", &bad.to_string(), "out of bounds"];
                assert_says(&refused(pipeline.train_step(tokens(), &wrong)), &says);
                assert_says(&refused(pipeline.evaluate(tokens(), &wrong)), &says);
            }
        }
        let ignored = tokens().fill_(-100);
        assert_says(
            &refused(pipeline.train_step(tokens(), &ignored)),
            &["no target counts", "ignored"],
        );
        assert_says(&refused(pipeline.evaluate(tokens(), &ignored)), &["no target counts"]);
        assert_same_bits(&pipeline.parameters().unwrap(), &before, "after bad tokens and classes");
        assert_eq!(pipeline.steps(), 1);
        pipeline.train_step(tokens(), tokens()).unwrap();
    }
}

#[test]
fn fault_input_nan_names_layer_stage_and_micro_batch() {
    for way in ways() {
        let mut pair = Pair::new(&way, &Trap::new(Deed::Error));
        for micro_batch in 0..M as i64 {
            for value in [f64::NAN, f64::INFINITY] {
                let (x, y) = data();
                let _ = x.narrow(0, 2 * micro_batch, 1).narrow(1, 3, 1).fill_(value);
                let place = format!("stage 0, micro-batch {micro_batch}");
                let text = pair.harm(|p| p.train_step(&x, &y));
                assert_says(&text, &[&place, "layer 'first': its input", "nothing was updated"]);
                let (x, y) = data();
                let _ = y.narrow(0, 2 * micro_batch, 1).narrow(1, 1, 1).fill_(value);
                let place = format!("stage {}, micro-batch {micro_batch}", way.stages - 1);
                let text = pair.harm(|p| p.train_step(&x, &y));
                assert_says(&text, &[&place, "layer 'loss': the loss", "nothing was updated"]);
            }
        }
    }
}

#[test]
fn fault_input_parameters_of_another_name_or_shape_change_nothing() {
    for stages in [1, 4] {
        let mut pair = Pair::new(&Way::plain(stages), &Trap::new(Deed::Error));
        let good = || ("first.weight".to_owned(), uniform(&[8, 4], 9, Kind::Float));
        let bias = |shape: &[i64]| ("last.bias".to_owned(), uniform(shape, 9, Kind::Float));
        let other = ("last.bulk".to_owned(), uniform(&[2], 9, Kind::Float));
        let text = pair.harm(|p| p.set_parameters(&[good(), other]));
        assert_says(&text, &["no parameter 'last.bulk'"]);
        for shape in [&[3][..], &[1], &[2, 1], &[]] {
            let text = pair.harm(|p| p.set_parameters(&[good(), bias(shape)]));
            assert_says(&text, &["'last.bias' is [2]", &format!("{shape:?}")]);
        }
        pair.harmed.set_parameters(&[good(), bias(&[2])]).unwrap();
        let found: Named = pair.harmed.parameters().unwrap();
        for (name, value) in [good(), bias(&[2])] {
            let (_, own) = found.iter().find(|(own, _)| *own == name).unwrap();
            assert!(bits(own) == bits(&value), "{name}");
        }
    }
}

#[test]
fn fault_input_a_learning_rate_that_is_no_number_is_refused_by_the_step() {
    for lr in [f64::NAN, f64::INFINITY, -1.0] {
        let mut pair = Pair::new(&Way::plain(2), &Trap::new(Deed::Error));
        pair.harmed.set_learning_rate(lr);
        let (x, y) = data();
        let text = refused(pair.harmed.train_step(&x, &y));
        assert_says(&text, &["lr", &lr.to_string()]);
        pair.harmed.set_learning_rate(0.01);
        pair.harm(|p| p.predict(Vec::<Tensor>::new()));
    }
}
