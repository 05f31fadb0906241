//! How files fit models: `oracle_` compares each category and conversion with plain formulas,
//! `fault_` has what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::path::PathBuf;

use gpipe_checkpoint::{
    TensorSet,
    fit::{Fit, Mismatch, Pair, convert},
    names::NameMap,
    tensor_file::{FileError, TensorFile, write},
};
use tch::{Device, Kind, Tensor};

type Named = Vec<(String, Tensor)>;

struct Saved {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn save(tensors: &[(&str, Tensor)]) -> Saved {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors: Named =
        tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.shallow_clone())).collect();
    write(&path, &tensors, &[].into()).unwrap();
    Saved { _folder: folder, path }
}

impl Saved {
    fn open(&self) -> TensorSet {
        TensorFile::open(&self.path).unwrap().into()
    }
}

fn ones(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::ones(shape, (kind, Device::Cpu))
}

fn model(parameters: &[(&str, &[i64])]) -> Vec<(String, Vec<i64>)> {
    parameters.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect()
}

fn rules(text: &str) -> NameMap {
    NameMap::parse(text, "map.toml").unwrap()
}

fn read(fit: &Fit, file: &mut TensorSet, kind: Kind) -> Result<Named, FileError> {
    fit.read(file, |_| kind, |_| true)?.collect()
}

const GPT2: &str = r#"
    [[names]]
    from = "h.*.c_attn.weight"
    to = "block*.qkv.weight"
    transpose = true
    [[names]]
    from = "h.*.bias_mask"
    ignore = true
    [[names]]
    from = "wte.weight"
    to = "embedding.weight"
    [[names]]
    from = "h.*.ln.weight"
    to = "block*.norm.gain"
"#;

#[test]
fn oracle_each_category_has_its_names() {
    let matrix = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
    let saved = save(&[
        ("h.0.c_attn.weight", matrix.shallow_clone()),
        ("h.1.c_attn.weight", ones(&[3, 2], Kind::Float)),
        ("h.0.bias_mask", ones(&[4], Kind::Bool)),
        ("wte.weight", ones(&[10, 2], Kind::BFloat16)),
        ("h.7.ln.weight", ones(&[2], Kind::Float)),
        ("lm_head.weight", ones(&[2], Kind::Int64)),
    ]);
    let mut file = saved.open();
    let parameters = model(&[
        ("embedding.weight", &[12, 2]),
        ("block1.qkv.weight", &[2, 3]),
        ("block0.qkv.weight", &[3, 2]),
        ("head.weight", &[2]),
        ("head.bias", &[]),
    ]);
    let fit = Fit::new(&parameters, &file, &rules(GPT2)).unwrap();
    let pair = |n: usize, shape: &[i64]| Pair {
        parameter: format!("block{n}.qkv.weight"),
        from: format!("h.{n}.c_attn.weight"),
        transpose: true,
        kind: Kind::Float,
        shape: shape.to_vec(),
    };
    let expected = Fit {
        loaded: vec![pair(1, &[2, 3]), pair(0, &[3, 2])],
        missing: vec!["head.weight".into(), "head.bias".into()],
        unexpected: vec!["h.7.ln.weight".into(), "lm_head.weight".into()],
        mismatched: vec![Mismatch {
            parameter: "embedding.weight".into(),
            from: "wte.weight".into(),
            expected: vec![12, 2],
            found: vec![10, 2],
        }],
        ignored: vec!["h.0.bias_mask".into()],
        reinit: vec![],
        copies: vec![],
    };
    assert_eq!(fit, expected);
    assert!(!fit.is_exact());
    assert_eq!(
        fit.to_string(),
        "2 of 5 parameters are in the file\n\
         2 missing from the file:\n  head.weight\n  head.bias\n\
         2 in the file but not in the model:\n  h.7.ln.weight\n  lm_head.weight\n\
         1 mismatched in shape:\n  embedding.weight: [12, 2], but wte.weight is [10, 2]\n\
         1 ignored:\n  h.0.bias_mask"
    );
    let tensors = read(&fit, &mut file, Kind::Float).unwrap();
    assert_eq!(tensors[1].0, "block0.qkv.weight");
    assert_eq!(tensors[1].1, Tensor::from_slice(&[0f32, 3., 1., 4., 2., 5.]).view([3, 2]));
    assert!(tensors[1].1.is_contiguous());
}

#[test]
fn oracle_our_own_files_fit_exactly() {
    let saved = save(&[("a.w", ones(&[2, 2], Kind::Float)), ("b.w", ones(&[], Kind::Float))]);
    let mut file = saved.open();
    let parameters = model(&[("b.w", &[]), ("a.w", &[2, 2])]);
    let fit = Fit::new(&parameters, &file, &NameMap::identity()).unwrap();
    assert!(fit.is_exact());
    assert_eq!(fit.to_string(), "2 of 2 parameters are in the file");
    let names: Vec<_> =
        read(&fit, &mut file, Kind::Float).unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["b.w", "a.w"], "in the model's order");
    for (less, exact) in [
        (model(&[("b.w", &[])]), false),
        (model(&[("b.w", &[]), ("a.w", &[4])]), false),
        (model(&[("b.w", &[1]), ("a.w", &[2, 2])]), false),
        (model(&[("b.w", &[]), ("a.w", &[2, 2]), ("c.w", &[])]), false),
        (parameters, true),
    ] {
        let fit = Fit::new(&less, &file, &NameMap::identity()).unwrap();
        assert_eq!(fit.is_exact(), exact, "{less:?}");
    }
}

#[test]
fn oracle_long_lists_are_cut_and_names_made_harmless() {
    let parameters: Vec<_> = (0..13).map(|n| (format!("p{n:02}"), vec![1])).collect();
    let saved = save(&[("\u{1b}[2J", ones(&[], Kind::Float))]);
    let report = Fit::new(&parameters, &saved.open(), &NameMap::identity()).unwrap().to_string();
    assert!(report.contains("\n13 missing from the file:\n  p00\n"), "{report}");
    assert!(report.contains("\n  p09\n  ... and 3 more\n"), "{report}");
    assert!(!report.contains("p10") && !report.contains('\u{1b}'), "{report}");
    let fit = Fit::new(&parameters[..10], &saved.open(), &NameMap::identity()).unwrap();
    assert!(!fit.to_string().contains("more"));
}

#[test]
fn fault_two_tensors_of_one_parameter_are_refused() {
    let saved = save(&[("x.a.w", ones(&[], Kind::Float)), ("y.a.w", ones(&[], Kind::Float))]);
    let map = rules("[[names]]\nfrom = \"*.a.w\"\nto = \"a.w\"");
    let message = Fit::new(&[], &saved.open(), &map).unwrap_err().to_string();
    assert!(message.contains("model.safetensors: x.a.w and y.a.w both become a.w"), "{message}");
}

#[test]
fn fault_integers_are_no_parameters() {
    for kind in [Kind::Int64, Kind::Int, Kind::Int16, Kind::Int8, Kind::Uint8, Kind::Bool] {
        let saved = save(&[("a.w", ones(&[2], kind))]);
        let parameters = model(&[("a.w", &[2])]);
        let refused = Fit::new(&parameters, &saved.open(), &NameMap::identity());
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("model.safetensors: a.w ([2], "), "{message}");
        assert!(convert(&[("a.w".into(), ones(&[2], kind))], Kind::Float).is_err());
        assert!(convert(&[("a.w".into(), ones(&[2], Kind::Float))], kind).is_err());
    }
    let saved = save(&[("a.w", ones(&[2], Kind::Float))]);
    let mut file = saved.open();
    let fit = Fit::new(&model(&[("a.w", &[2])]), &file, &NameMap::identity()).unwrap();
    assert!(read(&fit, &mut file, Kind::Int64).is_err());
}

#[test]
fn fault_only_matrices_are_transposed() {
    let map = rules("[[names]]\nfrom = \"*\"\nto = \"*\"\ntranspose = true");
    for shape in [&[][..], &[2], &[2, 2, 2]] {
        let saved = save(&[("a.w", ones(shape, Kind::Float))]);
        let message = Fit::new(&model(&[("a.w", shape)]), &saved.open(), &map).unwrap_err();
        assert!(message.to_string().contains("is no matrix"), "{message}");
    }
    // Shapes are compared after transposing.
    let saved = save(&[("a.w", ones(&[2, 3], Kind::Float))]);
    let fit = Fit::new(&model(&[("a.w", &[2, 3])]), &saved.open(), &map).unwrap();
    assert_eq!(fit.mismatched[0].found, [3, 2]);
}

#[test]
fn fault_another_file_is_not_reshaped() {
    let first = save(&[("a.w", ones(&[2, 3], Kind::Float))]);
    let other = save(&[("a.w", ones(&[3, 2], Kind::Float))]);
    let parameters = model(&[("a.w", &[2, 3])]);
    let fit = Fit::new(&parameters, &first.open(), &NameMap::identity()).unwrap();
    assert!(read(&fit, &mut first.open(), Kind::Float).is_ok());
    assert!(read(&fit, &mut other.open(), Kind::Float).is_err());
}

/// All bfloat16 bit patterns, which are also all upper halves of a float32.
fn all_halves() -> Vec<u16> {
    (0..=u16::MAX).collect()
}

fn bits16(tensor: &Tensor) -> Vec<u16> {
    Vec::try_from(tensor.view_dtype(Kind::Int16).to_kind(Kind::Int64))
        .map(|all: Vec<i64>| all.into_iter().map(|bits| bits as u16).collect())
        .unwrap()
}

fn bits32(tensor: &Tensor) -> Vec<u32> {
    Vec::try_from(tensor.view_dtype(Kind::Int).to_kind(Kind::Int64))
        .map(|all: Vec<i64>| all.into_iter().map(|bits| bits as u32).collect())
        .unwrap()
}

#[test]
fn oracle_bfloat16_to_float32_is_exact() {
    let halves = all_halves();
    let bytes: Vec<u8> = halves.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let tensor = Tensor::from_data_size(&bytes, &[1 << 16], Kind::BFloat16);
    let saved = save(&[("a.w", tensor)]);
    let mut file = saved.open();
    let fit = Fit::new(&model(&[("a.w", &[1 << 16])]), &file, &NameMap::identity()).unwrap();
    let same = read(&fit, &mut file, Kind::BFloat16).unwrap();
    assert_eq!(bits16(&same[0].1), halves);
    let wide = read(&fit, &mut file, Kind::Float).unwrap();
    let expected: Vec<_> = halves.iter().map(|&bits| u32::from(bits) << 16).collect();
    assert_eq!(bits32(&wide[0].1), expected);
}

#[test]
fn oracle_float32_to_bfloat16_rounds_to_nearest_even() {
    // Test around each rounding boundary, for every finite value.
    let floats: Vec<u32> = all_halves()
        .into_iter()
        .filter(|bits| bits & 0x7f80 != 0x7f80)
        .flat_map(|bits| {
            [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| u32::from(bits) << 16 | low)
        })
        .collect();
    let expected: Vec<u16> =
        floats.iter().map(|bits| ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16).collect();
    let bytes: Vec<u8> = floats.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let tensor = Tensor::from_data_size(&bytes, &[floats.len() as i64], Kind::Float);
    let tensors = [("a.w".to_owned(), tensor)];
    let narrow = convert(&tensors, Kind::BFloat16).unwrap();
    assert_eq!(narrow[0].0, "a.w");
    assert_eq!(bits16(&narrow[0].1), expected);
    assert_eq!(bits16(&narrow[0].1), bits16(&tensors[0].1.to_kind(Kind::BFloat16)));
}

#[test]
fn oracle_each_floating_dtype_becomes_each_other() {
    let kinds = [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16];
    for from in kinds {
        let values = Tensor::from_slice(&[0.1f64, -3.0, 1e5, f64::NEG_INFINITY]).to_kind(from);
        let saved = save(&[("a.w", values.shallow_clone())]);
        let mut file = saved.open();
        let fit = Fit::new(&model(&[("a.w", &[4])]), &file, &NameMap::identity()).unwrap();
        assert_eq!(fit.loaded[0].kind, from);
        for to in kinds {
            let read = read(&fit, &mut file, to).unwrap();
            assert_eq!(read[0].1.kind(), to);
            assert_eq!(read[0].1, values.to_kind(to), "{from:?} {to:?}");
            let trained = [("a.w".to_owned(), values.set_requires_grad(true))];
            let converted = convert(&trained, to).unwrap();
            assert_eq!(converted[0].1, values.to_kind(to), "{from:?} {to:?}");
            assert!(!converted[0].1.requires_grad());
        }
    }
}

#[test]
fn oracle_what_is_to_start_afresh_is_neither_loaded_nor_missed() {
    let saved = save(&[
        ("body.weight", ones(&[2, 2], Kind::Float)),
        ("head.weight", ones(&[3, 2], Kind::Float)),
        ("head.bias", ones(&[4], Kind::Float)),
        ("head.scale", ones(&[], Kind::Float)),
    ]);
    let parameters = model(&[
        ("body.weight", &[2, 2]),
        ("head.weight", &[3, 2]), // fits, but is left out all the same
        ("head.bias", &[3]),
        ("head.shift", &[3]),
    ]);
    let fit = Fit::new(&parameters, &saved.open(), &NameMap::identity()).unwrap();
    assert!(!fit.is_exact());
    let fit = fit.without(&["head.*"]);
    assert!(fit.is_exact(), "{fit}");
    assert_eq!(fit.loaded.len(), 1);
    assert_eq!(fit.reinit, ["head.weight", "head.bias", "head.shift"]);
    assert_eq!(fit.ignored, ["head.scale"]);
    assert!(
        fit.to_string()
            .starts_with("1 of 4 parameters are in the file\n3 start from random values:\n")
    );
}

const TIED: &str = r#"
    prefix = "transformer."
    [[names]]
    from = "wte.weight"
    to = "embedding.weight"
    [[names]]
    from = "lm_head.weight"
    to = "head.weight"
    copy_of = "wte.weight"
    optional = true
"#;

/// Regression: the head of an untied GPT-2 must not be left out as a copy of the embedding because
/// of its name alone. Doing so would import another network.
#[test]
fn regression_what_is_left_out_as_a_copy_is_one_to_the_bit() {
    let table = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([3, 2]);
    let head = |head: Tensor| {
        save(&[("transformer.wte.weight", table.shallow_clone()), ("lm_head.weight", head)])
    };
    let tied = model(&[("embedding.weight", &[3, 2])]);
    let fit = |saved: &Saved| Fit::new(&tied, &saved.open(), &rules(TIED)).unwrap();
    let same = head(table.copy());
    let found = fit(&same);
    assert!(found.is_exact());
    assert!(found.to_string().ends_with("lm_head.weight of transformer.wte.weight"), "{found}");
    assert_eq!(read(&found, &mut same.open(), Kind::Float).unwrap().len(), 1);
    // A difference in one bit (the sign of a zero), in dtype, and in shape.
    let negative = table.copy();
    let _ = negative.get(0).get(0).fill_(-0.0);
    for other in [negative, table.to_kind(Kind::Double), table.view([2, 3])] {
        let saved = head(other);
        let message = read(&fit(&saved), &mut saved.open(), Kind::Float).unwrap_err().to_string();
        for part in [
            "model.safetensors",
            "lm_head.weight differs from transformer.wte.weight",
            "model.tied = false",
            "head.weight",
        ] {
            assert!(message.contains(part), "'{part}' is not in: {message}");
        }
    }
    // In a model with an untied head, the tensor is a parameter, whether it is equal or not.
    let untied = model(&[("embedding.weight", &[3, 2]), ("head.weight", &[3, 2])]);
    let saved = head(&table + 1);
    let found = Fit::new(&untied, &saved.open(), &rules(TIED)).unwrap();
    assert!(found.is_exact() && found.copies.is_empty());
    let tensors = read(&found, &mut saved.open(), Kind::Float).unwrap();
    assert_eq!(tensors[1], ("head.weight".into(), &table + 1));
    // With an optional rule, a file may lack the copy.
    let alone = save(&[("wte.weight", table.copy())]);
    assert!(Fit::new(&tied, &alone.open(), &rules(TIED)).unwrap().is_exact());
    // What has no original is refused, unless it can stand in for it.
    let orphan = save(&[("lm_head.weight", table.copy()), ("wte.weight", table.copy())]);
    let map = TIED.replace("copy_of = \"wte", "copy_of = \"xte");
    let message = Fit::new(&tied, &orphan.open(), &rules(&map)).unwrap_err().to_string();
    assert!(message.contains("a copy of xte.weight, which is not there"), "{message}");
}

/// Of two tied tensors safetensors writes the first by name, the head's. The folder was refused,
/// although it has every weight.
#[test]
fn regression_a_copy_stands_in_for_an_original_that_was_left_out() {
    let table = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([3, 2]);
    let saved = save(&[("lm_head.weight", table.shallow_clone())]);
    let tied = model(&[("embedding.weight", &[3, 2])]);
    let to = "to = \"embedding.weight\"";
    let map = TIED.replace(to, &format!("{to}\n    optional = true"));
    let found = Fit::new(&tied, &saved.open(), &rules(&map)).unwrap();
    assert!(found.is_exact() && found.copies.is_empty(), "{found}");
    let tensors = read(&found, &mut saved.open(), Kind::Float).unwrap();
    assert_eq!(tensors, [("embedding.weight".to_owned(), table)]);
}

/// Regression: a rule with a misspelt pattern must be reported, or its tensors are silently ignored
/// or missing.
#[test]
fn regression_a_rule_that_matches_no_tensor_is_named() {
    let saved = save(&[("h.0.w", ones(&[2], Kind::Float)), ("h.0.mask", ones(&[2], Kind::Float))]);
    let parameters = model(&[("block0.w", &[2])]);
    let good = "[[names]]\nfrom = \"h.*.w\"\nto = \"block*.w\"\n";
    let rest = "[[names]]\nfrom = \"*.mask\"\nignore = true\n";
    let fit = |text: &str| Fit::new(&parameters, &saved.open(), &rules(text));
    assert!(fit(&format!("{good}{rest}")).unwrap().is_exact());
    let typo = "[[names]]\nfrom = \"*.maks\"\nignore = true\n";
    // A tensor that an earlier rule matches does not count for a later rule.
    let late = "[[names]]\nfrom = \"h.0.w\"\nto = \"other\"\n";
    for (rule, pattern) in [(typo, "*.maks"), (late, "h.0.w")] {
        let message = fit(&format!("{good}{rest}{rule}")).unwrap_err().to_string();
        for part in ["map.toml: rule 3 (", pattern, "model.safetensors", "optional = true"] {
            assert!(message.contains(part), "'{part}' is not in: {message}");
        }
        assert!(fit(&format!("{good}{rest}{rule}optional = true\n")).unwrap().is_exact());
    }
}

/// Only what is wanted is read: another process's tensor may be damaged, and nothing notices.
#[test]
fn oracle_only_wanted_tensors_are_read() {
    let saved = save(&[("a", ones(&[4], Kind::Float)), ("b", ones(&[4], Kind::Float))]);
    let mut bytes = std::fs::read(&saved.path).unwrap();
    *bytes.last_mut().unwrap() ^= 1; // of b
    std::fs::write(&saved.path, bytes).unwrap();
    let mut file = saved.open();
    let fit = Fit::new(&model(&[("a", &[4]), ("b", &[4])]), &file, &NameMap::identity()).unwrap();
    let own: Result<Named, FileError> =
        fit.read(&mut file, |_| Kind::Float, |name| name == "a").unwrap().collect();
    assert_eq!(own.unwrap()[0].0, "a");
    let all: Result<Named, FileError> =
        fit.read(&mut file, |_| Kind::Float, |_| true).unwrap().collect();
    assert!(all.unwrap_err().to_string().contains('b'));
}
