//! Tests of sizes, operation counts and initial values against the paper and hand calculations, and
//! of invalid sizes.

use gpipe::Sequence;
use gpipe_models::Translation;
use tch::Kind;

use super::{LENGTHS, batch, bits, builder, small, specs};

#[test]
fn oracle_parameter_counts_are_the_papers() {
    // Huang et al. 2019, section 5: T(L, H, A).
    let table = [
        (6, 8192, 16, 0.4),
        (24, 8192, 16, 1.3),
        (12, 16384, 32, 1.3),
        (32, 16384, 32, 3.0),
        (64, 16384, 32, 6.0),
    ];
    for (layers, hidden, heads, billions) in table {
        for split_blocks in [true, false] {
            let model = Translation {
                source_vocabulary: 64_000,
                target_vocabulary: 64_000,
                features: 1024,
                heads,
                head_size: 64,
                hidden,
                encoder_layers: layers,
                decoder_layers: layers,
                split_blocks,
                ..small()
            };
            let found = model.build().unwrap().parameter_count() as f64 / 1e9;
            let ratio = found / billions;
            assert!((ratio - 1.0).abs() <= 0.06, "T({layers}, {hidden}, {heads}): {found} billion");
        }
    }
}

#[test]
fn oracle_parameters_and_operations_by_hand() {
    let names = |model: &Translation| -> Vec<String> {
        let mut pipeline = builder(model).build().unwrap();
        let parameters = pipeline.parameters().unwrap();
        parameters.into_iter().map(|(name, t)| format!("{name} {:?}", t.size())).collect()
    };
    let one = Translation { encoder_layers: 1, decoder_layers: 1, ..small() };
    let norm = |layer: &str| ["weight", "bias"].map(|part| format!("{layer}.norm.{part} [16]"));
    let affine = |name: &str, outputs: i64, inputs: i64| {
        [format!("{name}.weight [{outputs}, {inputs}]"), format!("{name}.bias [{outputs}]")]
    };
    let own = |layer: &str| {
        let parts = [norm(layer), affine(&format!("{layer}.qkv"), 36, 16)];
        [parts.concat(), affine(&format!("{layer}.output"), 16, 12).into()].concat()
    };
    let cross = |layer: &str| {
        let parts = [norm(layer), affine(&format!("{layer}.q"), 12, 16)];
        let more =
            [affine(&format!("{layer}.kv"), 24, 16), affine(&format!("{layer}.output"), 16, 12)];
        [parts.concat(), more.concat()].concat()
    };
    let mlp = |layer: &str| {
        let parts = [
            affine(&format!("{layer}.hidden"), 24, 16),
            affine(&format!("{layer}.output"), 16, 24),
        ];
        [norm(layer).into(), parts.concat()].concat()
    };
    let expected = [
        vec!["source_embedding.tokens [29, 16]".to_owned()],
        own("encoder.0.attention"),
        mlp("encoder.0.mlp"),
        norm("target_embedding").into(),
        vec!["target_embedding.tokens [23, 16]".to_owned()],
        own("decoder.0.self_attention"),
        cross("decoder.0.cross_attention"),
        mlp("decoder.0.mlp"),
        norm("softmax").into(),
    ];
    assert_eq!(names(&one), expected.concat());
    let blocks = Translation { split_blocks: false, ..one.clone() };
    let unsplit = |name: String| {
        let parts = ["encoder.0.", "decoder.0."];
        parts.iter().fold(name, |name, part| name.replacen(part, &format!("{part}block."), 1))
    };
    let expected: Vec<String> = expected.concat().into_iter().map(unsplit).collect();
    assert_eq!(names(&blocks), expected);

    // Two operations per multiplication: N = 4, S = 6, T = 5, D = 16, attention 12, feed-forward
    // 24.
    let (n, s, t, d, w, h) = (4, 6, 5, 16, 12, 24);
    let own = |length: u64| 2 * n * (4 * length * d * w + 2 * length * length * w);
    let cross = 2 * n * (2 * t * d * w + 2 * s * d * w + 2 * t * s * w);
    let mlp = |length: u64| 2 * n * 2 * length * d * h;
    let costs =
        |model: &Translation| model.build().unwrap().costs(&specs(LENGTHS), Kind::Float).unwrap();
    let found = costs(&one);
    assert_eq!(found[1..3], [own(s), mlp(s)]);
    assert_eq!(found[4..7], [own(t), cross, mlp(t)]);
    assert_eq!(found[7], 2 * n * t * d * 23);
    let found = costs(&blocks);
    assert_eq!([found[1], found[3]], [own(s) + mlp(s), own(t) + cross + mlp(t)]);
}

#[test]
fn oracle_ties_are_those_that_are_asked_for() {
    let count = |tied, shared| {
        let model = Translation { tied, shared, source_vocabulary: 23, ..small() };
        model.build().unwrap().parameter_count()
    };
    let table = 23 * 16;
    assert_eq!(count(true, false), count(true, true) + table);
    assert_eq!(count(false, false), count(true, false) + table);
    assert_eq!(count(false, true), count(true, false));
}

#[test]
fn fault_sizes_that_make_no_model() {
    let refused = |model: Translation| model.build().err().unwrap().to_string();
    let says = |model: Translation, text: &str| {
        let error = refused(model);
        assert!(error.contains(text), "{error}");
    };
    says(Translation { source_vocabulary: 0, ..small() }, "source_vocabulary is 0");
    says(Translation { hidden: i64::MAX, ..small() }, "hidden is 9223372036854775807");
    says(Translation { features: 15, ..small() }, "even number");
    says(Translation { encoder_layers: 0, ..small() }, "encoder_layers is 0");
    says(Translation { decoder_layers: usize::MAX, ..small() }, "decoder_layers is");
    let wide = Translation { heads: 1 << 20, head_size: 1 << 20, ..small() };
    says(wide, "1048576 heads of size 1048576");
    says(Translation { pad: 23, ..small() }, "a token of both vocabularies, of 29 and 23");
    says(Translation { pad: -1, ..small() }, "pad is -1");
    says(Translation { shared: true, ..small() }, "29 and 23 cannot share");
    says(Translation { dropout: 1.5, ..small() }, "dropout is 1.5");
    says(Translation { attention_dropout: f64::NAN, ..small() }, "attention_dropout is NaN");
    says(Translation { logit_clip: -1.0, ..small() }, "logit_clip is -1");
}

/// The standard deviation is one over the square root of a weight's inputs. Output projections also
/// divide by the square root of the stack's branches.
#[test]
fn oracle_initial_values_and_what_they_give() {
    for layers in [1, 6] {
        let (heads, head_size, features, hidden) = (4, 24, 64, 160);
        let (encoder_layers, decoder_layers) = (layers, layers);
        let sizes = Translation { heads, head_size, features, hidden, tied: false, ..small() };
        let model = Translation { encoder_layers, decoder_layers, ..sizes };
        let mut pipeline = builder(&model).build().unwrap();
        for (name, value) in pipeline.parameters().unwrap() {
            let branches = if name.starts_with("encoder") { 2.0 } else { 3.0 } * layers as f64;
            let part = name.rsplit_once('.').unwrap();
            let expected = match (part.0, part.1) {
                (layer, "weight") if layer.ends_with("norm") => {
                    assert!(bits(&value) == bits(&value.ones_like()), "{name}");
                    continue;
                }
                (_, "bias") => 0.0,
                (layer, _) if layer.ends_with("output") => {
                    (value.size()[1] as f64 * branches).powf(-0.5)
                }
                _ => (features as f64).powf(-0.5),
            };
            let found = value.std(false).double_value(&[]);
            // Five standard errors of a standard deviation.
            let error = 5.0 * expected / (2.0 * value.numel() as f64).sqrt();
            assert!((found - expected).abs() <= error, "{name}: {found} instead of {expected}");
        }
        // Normalised states times a weight with variance 1 / features.
        let logits = pipeline.predict(&batch(20, 6).0[..]).unwrap().remove(0);
        let deviation = logits.std(false).double_value(&[]);
        assert!((0.8..1.25).contains(&deviation), "{layers} layers: logits deviate by {deviation}");
    }
}

#[test]
fn property_a_model_of_six_billion_parameters_is_only_described() {
    let paper = Translation {
        source_vocabulary: 64_000,
        target_vocabulary: 64_000,
        features: 1024,
        heads: 32,
        head_size: 64,
        hidden: 16384,
        encoder_layers: 64,
        decoder_layers: 64,
        ..small()
    };
    let model: Sequence = paper.build().unwrap();
    assert_eq!(model.len(), 3 + 64 * 5);
    let costs = model.costs(&specs([100, 80]), Kind::BFloat16).unwrap();
    assert!(costs.iter().all(|&cost| cost > 1));
}
