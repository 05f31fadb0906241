//! Several documents in one row. `oracle_`: as if each had a row of its own. `transparency_`: the
//! same bits at every cut, schedule and policy. `fault_`: inputs that do not fit.

use gpipe::{
    BalancedExperts, CrossEntropy, Pipeline, TensorSpec, Tensors,
    layers::{DOCUMENTS, RotaryScaling},
};
use gpipe_models::Llama;
use tch::{Kind, Tensor};

use crate::{
    common::{Run, assert_same_bits},
    llama::{LENGTH, after_two_steps, experts, model, tokens},
};

/// Documents of five, three and one positions; of nine; of two and four, and three that are empty.
const ROWS: [[i64; 9]; 3] = [[0, 0, 0, 0, 0, 5, 5, 5, 8], [0; 9], [0, 0, 2, 2, 2, 2, -1, -1, -1]];

pub fn documents(samples: i64) -> Tensor {
    let rows = (0..samples as usize).flat_map(|row| ROWS[row % ROWS.len()]);
    Tensor::from_slice(&rows.collect::<Vec<i64>>()).reshape([samples, LENGTH])
}

/// The first and the number of positions of each document in row `row`.
fn ranges(row: usize) -> Vec<(i64, i64)> {
    let mut starts: Vec<i64> = ROWS[row].into_iter().filter(|start| *start >= 0).collect();
    starts.dedup();
    let length = |start: &i64| ROWS[row].iter().filter(|own| *own == start).count() as i64;
    starts.iter().map(|start| (*start, length(start))).collect()
}

pub fn spec(samples: i64) -> TensorSpec {
    TensorSpec::new([samples, LENGTH], Kind::Int64)
}

fn pipeline(model: &Llama, kind: Kind) -> Pipeline {
    let builder = Pipeline::builder(model.build().unwrap(), vec![spec(3)]);
    let builder = builder.named_input(DOCUMENTS, spec(3)).kind(kind).loss(CrossEntropy::default());
    builder.keep_gradients().optimizer(gpipe::Sgd::new(0.1)).build().unwrap()
}

#[test]
fn oracle_documents_in_a_row_are_as_alone() {
    for model in [model(), experts(0.0)] {
        let mut own = pipeline(&model, Kind::Double);
        let all = tokens(3, LENGTH, 1);
        let given = Tensors::new(&all).named(DOCUMENTS, documents(3));
        let packed = own.predict(given).unwrap().remove(0);
        let mut compared = 0;
        for row in 0..3 {
            for (start, length) in ranges(row as usize) {
                let alone = all.narrow(0, row, 1).narrow(1, start, length);
                let alone = Tensors::new(alone).named(DOCUMENTS, None);
                let alone = own.predict(alone).unwrap().remove(0);
                let part = packed.narrow(0, row, 1).narrow(1, start, length);
                let apart = (&part - &alone).abs().max().double_value(&[]);
                assert!(apart < 1e-12 * alone.abs().max().double_value(&[]), "{apart:e}");
                compared += length;
            }
        }
        assert_eq!(compared, 24);
    }
}

/// Gradients, too: of packed rows, and of the same documents in rows of their own.
#[test]
fn oracle_gradients_of_packed_rows_are_those_of_documents_alone() {
    let model = model();
    let (all, targets) = (tokens(3, LENGTH, 1), tokens(3, LENGTH, 4));
    let empty = documents(3).lt(0);
    let targets = targets.masked_fill(&empty, -100);
    let gradients = |inputs: Tensors, targets: &Tensor| {
        let mut own = pipeline(&model, Kind::Double);
        let loss = own.train_step(inputs, targets).unwrap().loss;
        (loss, own.gradients().unwrap())
    };
    let packed = Tensors::new(&all).named(DOCUMENTS, documents(3));
    let (packed_loss, packed) = gradients(packed, &targets);
    // One row for each document, filled up on the right, where nothing attends to.
    let (mut rows, mut row_targets) = (Vec::new(), Vec::new());
    for row in 0..3 {
        for (start, length) in ranges(row as usize) {
            let part = |of: &Tensor| of.narrow(0, row, 1).narrow(1, start, length);
            rows.push(part(&all).constant_pad_nd([0, LENGTH - length]));
            let options = (Kind::Int64, tch::Device::Cpu);
            let filling = Tensor::full([1, LENGTH - length], -100, options);
            row_targets.push(Tensor::cat(&[part(&targets), filling], 1));
        }
    }
    let alone = Tensors::new(Tensor::cat(&rows, 0)).named(DOCUMENTS, None);
    let (loss, alone) = gradients(alone, &Tensor::cat(&row_targets, 0));
    assert!((packed_loss - loss).abs() < 1e-12 * loss, "{packed_loss} {loss}");
    for ((name, a), (_, b)) in packed.iter().zip(&alone) {
        let apart = (a - b).abs().max().double_value(&[]);
        assert!(apart <= 1e-10 * b.abs().max().double_value(&[]).max(1e-6), "{name}: {apart:e}");
    }
}

/// Padding chose experts like a token. It is the same everywhere, so it chose the same ones, and
/// the balance of experts was that of padding.
#[test]
fn regression_padding_has_no_part_in_the_balance_of_experts() {
    let model = experts(0.5);
    let loss = BalancedExperts { loss: CrossEntropy::default(), weight: 0.5, top_k: 2 };
    let trained = |inputs: Tensors, targets: &Tensor| {
        let builder = Pipeline::builder(model.build().unwrap(), vec![spec(3)]);
        let builder = builder.named_input(DOCUMENTS, spec(3)).kind(Kind::Double).loss(loss);
        let builder = builder.keep_gradients().optimizer(gpipe::Sgd::new(0.1));
        let mut own = builder.build().unwrap();
        let loss = own.train_step(inputs, targets).unwrap().loss;
        (loss, own.gradients().unwrap())
    };
    let (all, targets) = (tokens(3, LENGTH, 1), tokens(3, LENGTH, 4));
    let short = |of: &Tensor| of.narrow(1, 0, 4);
    let alone = Tensors::new(short(&all)).named(DOCUMENTS, None);
    let (expected, alone) = trained(alone, &short(&targets));
    let padding = |of: &Tensor, with: i64| {
        let filling = Tensor::full([3, LENGTH - 4], with, (Kind::Int64, tch::Device::Cpu));
        Tensor::cat(&[short(of), filling], 1)
    };
    let documents = padding(&all.zeros_like(), -1);
    let padded = Tensors::new(padding(&all, 0)).named(DOCUMENTS, documents);
    let (loss, padded) = trained(padded, &padding(&targets, -100));
    assert!((loss - expected).abs() < 1e-12 * expected, "{loss} {expected}");
    for ((name, a), (_, b)) in padded.iter().zip(&alone) {
        let apart = (a - b).abs().max().double_value(&[]);
        assert!(apart <= 1e-10 * b.abs().max().double_value(&[]).max(1e-6), "{name}: {apart:e}");
    }
}

#[test]
fn transparency_of_documents() {
    let layers = model().build().unwrap().len();
    for (model, kind) in [(model(), Kind::Float), (experts(0.0), Kind::BFloat16)] {
        let trained = |run: &Run| {
            let builder = run.builder_of(model.build().unwrap(), vec![spec(2)], 3);
            let builder = builder.named_input(DOCUMENTS, spec(2));
            let pipeline = builder.kind(kind).clip_norm(1.0).build().unwrap();
            after_two_steps(pipeline, |step| {
                let inputs = Tensors::new(tokens(7, LENGTH, step)).named(DOCUMENTS, documents(7));
                (inputs, tokens(7, LENGTH, step + 5))
            })
        };
        let expected = trained(&Run::plain());
        for run in Run::all(layers).into_iter().step_by(5) {
            assert_same_bits(&trained(&run), &expected, &format!("{run:?} {kind:?}"));
        }
    }
}

#[test]
fn fault_documents_that_do_not_fit_are_refused() {
    let refused = |model: &Llama, spec: TensorSpec| {
        let builder = Pipeline::builder(model.build().unwrap(), vec![self::spec(2)]);
        builder.named_input(DOCUMENTS, spec).build().err().unwrap().to_string()
    };
    let error = refused(&model(), TensorSpec::new([2, 5], Kind::Int64));
    assert!(error.contains("the input 'documents' must be int64 [2, 9]"), "{error}");
    let mut dynamic = model();
    dynamic.rotary.positions = 8;
    dynamic.rotary.scaling = RotaryScaling::Dynamic { factor: 2.0 };
    let error = refused(&dynamic, spec(2));
    assert!(error.contains("rows of at most 8 positions, not 9"), "{error}");
}
