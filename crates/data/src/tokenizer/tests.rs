//! Families: `oracle_` compares with the `tokenizers` crate's trainer and whole-text encoding;
//! `property_` checks that encoding is lossless; `fault_` checks that damaged files are rejected.

use std::collections::HashSet;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::models::{ModelWrapper, TrainerWrapper};

use super::*;

const PROSE: &str = "fn main() {\n    let value = compute(value);\n    println!(\"{value}\");\n}\n\
    // It's the value that we'd computed: naïve, 漢字 and 3.14159.\nfn compute(value: u32) -> u32 { \
    value * 2 }\n";

/// Text that is varied enough for hundreds of merges.
fn documents() -> Vec<Document> {
    let sources =
        [include_str!("mod.rs"), include_str!("mod.rs"), include_str!("../corpus/split.rs"), PROSE];
    let document = |text: &&str| Document { name: "source".into(), text: (*text).into() };
    sources.iter().map(document).collect()
}

/// What the `tokenizers` crate's trainer learns from the same text.
fn theirs(documents: &[Document], vocabulary: usize) -> String {
    let mut alphabet = HashSet::new();
    alphabet.extend(ByteLevel::alphabet());
    let mut trainer: TrainerWrapper = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocabulary)
        .min_frequency(2)
        .initial_alphabet(alphabet)
        .special_tokens(vec![AddedToken::from(END_OF_DOCUMENT, true)])
        .build()
        .into();
    let bytes = ByteLevel::new(false, false, true);
    let mut tokenizer = tokenizers::Tokenizer::new(ModelWrapper::BPE(BPE::default()));
    tokenizer.with_pre_tokenizer(Some(bytes));
    tokenizer.with_decoder(Some(bytes));
    let texts = documents.iter().map(|document| document.text.as_str());
    tokenizer.train(&mut trainer, texts).unwrap();
    tokenizer.to_string(false).unwrap()
}

#[test]
fn oracle_training_equals_the_dependencys() {
    let documents = documents();
    for vocabulary in [257, 300, 700] {
        let ours = Tokenizer::train(&documents, vocabulary).unwrap();
        assert_eq!(ours.vocabulary(), vocabulary);
        assert_eq!(ours.to_json().unwrap(), theirs(&documents, vocabulary));
    }
}

#[test]
fn property_training_again_gives_the_same_bytes() {
    // The trainer's hash maps get new seeds each time.
    let documents = documents();
    let json = || Tokenizer::train(&documents, 600).unwrap().to_json().unwrap();
    let first = json();
    assert!((0..20).all(|_| json() == first));
}

#[test]
fn oracle_pieces_encode_as_the_whole() {
    let tokenizer = Tokenizer::train(&documents(), 600).unwrap();
    for document in documents() {
        let whole = tokenizer.encode_pieces(&document.text, usize::MAX).unwrap();
        let cut = tokenizer.encode_pieces(&document.text, 3000).unwrap();
        assert!(document.text.len() < 3000 || pieces::pieces(&document.text, 3000).count() > 1);
        assert_eq!(whole, cut);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        rng_seed: RngSeed::Fixed(5),
        failure_persistence: None,
        ..ProptestConfig::with_cases(150)
    })]

    #[test]
    fn property_pieces_make_the_text(text in "[a-c \n漢]{0,80}", piece_bytes in 0usize..20) {
        let pieces: Vec<_> = pieces::pieces(&text, piece_bytes).collect();
        prop_assert_eq!(pieces.concat(), text.as_str());
        prop_assert!(pieces.iter().all(|piece| piece.len() <= piece_bytes.max(4)));
    }

    #[test]
    fn property_seams_change_no_token(
        text in "([ab'=.é1]{1,5}(\n|\r\n|[ \t\n\u{a0}]{1,3})){1,20}", piece_bytes in 16usize..40,
    ) {
        // 16 bytes hold the longest run of either kind and the seam after it.
        prop_assert_eq!(
            small().encode_pieces(&text, piece_bytes).unwrap(),
            small().encode_pieces(&text, usize::MAX).unwrap()
        );
    }

    #[test]
    fn property_any_text_round_trips(
        text in any::<String>(),
        code in "[a-zA-Z_(){};'\"<|>\\s]{0,200}",
    ) {
        for text in [text, code] {
            let tokens = small().encode(&text).unwrap();
            prop_assert!(tokens.iter().all(|&token| (token as usize) < small().vocabulary()));
            prop_assert_eq!(small().decode(&tokens).unwrap(), text);
        }
    }
}

/// Trained only once, because proptest uses it hundreds of times.
fn small() -> &'static Tokenizer {
    static SMALL: std::sync::LazyLock<Tokenizer> =
        std::sync::LazyLock::new(|| Tokenizer::train(&documents(), 400).unwrap());
    &SMALL
}

#[test]
fn fault_files_of_another_kind_are_refused() {
    let good = small().to_json().unwrap();
    assert!(file::parse(&good).is_ok());
    let refused = |from: &str, to: &str| {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from} is not in the file");
        file::parse(&bad).err().expect(from)
    };
    assert!(refused("\"add_prefix_space\":false", "\"add_prefix_space\":true").contains("prefix"));
    assert!(refused("\"dropout\":null", "\"dropout\":0.5").contains("dropout"));
    assert!(refused("\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}").contains("NFC"));
    assert!(refused("\"content\":\"<|end|>\"", "\"content\":\"<eos>\"").contains("added token"));
    assert!(refused("\"!\":1,", "\"!\":100000,").contains("gaps"));
    assert!(refused("\"!\":1,", "\"no such token\":1,").contains("256 bytes"));
    // The crate's reader panics on this file, because the joined text is longer than any token.
    let long = "x".repeat(200);
    assert!(refused("\"merges\":[", &format!("\"merges\":[[\"{long}\",\"y\"],")).contains("merge"));
    assert!(refused("\"merges\":[", "\"merges\":[7,").contains("7 is not a merge"));
    assert!(file::parse(&good[..good.len() / 2]).is_err());
    assert!(Tokenizer::from_json("[]", Path::new("t.json")).is_err());
}

#[test]
fn oracle_special_tokens_change_nothing_but_ids() {
    // Merges are chosen by counts, then by ids, and special tokens shift all ids equally.
    let documents = documents();
    let specials = ["<pad>", "</s>"].map(String::from);
    let without = Tokenizer::train(&documents, 500).unwrap();
    let with = Tokenizer::train_with(&documents, 502, &specials).unwrap();
    for document in documents {
        let expected: Vec<u32> =
            without.encode(&document.text).unwrap().into_iter().map(|token| token + 2).collect();
        assert_eq!(with.encode(&document.text).unwrap(), expected);
    }
}

#[test]
fn fault_files_with_other_special_tokens_are_refused() {
    let specials = ["<pad>", "<de>"].map(String::from);
    let good = Tokenizer::train_with(&documents(), 400, &specials).unwrap().to_json().unwrap();
    assert_eq!(file::parse(&good).unwrap().unwrap().specials, ["<|end|>", "<pad>", "<de>"]);
    let refused = |from: &str, to: &str| {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from} is not in the file");
        file::parse(&bad).err().expect(from)
    };
    let added = |id: u32, content: &str, special: bool| {
        format!(
            "{{\"id\":{id},\"content\":\"{content}\",\"single_word\":false,\"lstrip\":false,\
             \"rstrip\":false,\"normalized\":false,\"special\":{special}}}"
        )
    };
    let tag = added(2, "<de>", true);
    assert!(refused(&tag, &added(3, "<de>", true)).contains("the id of its added token <de>"));
    assert!(refused(&tag, &added(2, "<fr>", true)).contains("the id of its added token <fr>"));
    assert!(refused(&tag, &added(2, "<de>", false)).contains("special of its added token <de>"));
    assert!(refused(&tag, &added(1, "<pad>", true)).contains("<pad> is there twice"));
    assert!(refused(&tag, &added(3, "!", true)).contains("its added token ! is not ASCII"));
    let strips = tag.replace("\"lstrip\":false", "\"lstrip\":true");
    assert!(refused(&tag, &strips).contains("lstrip of its added token <de> must be false"));
    let end = format!("{},", added(0, "<|end|>", true));
    assert!(refused(&end, "").contains("added tokens lack <|end|>"));
    // A merge that would produce a special token from text.
    let forged = "\"merges\":[[\"<d\",\"e>\"],";
    assert!(refused("\"merges\":[", forged).contains("does not fit its vocabulary"));
    let mut forged: serde_json::Value = serde_json::from_str(&good).unwrap();
    for (half, id) in [("<d", 400), ("e>", 401)] {
        forged["model"]["vocab"][half] = id.into();
    }
    forged["model"]["merges"].as_array_mut().unwrap().push(serde_json::json!(["<d", "e>"]));
    assert!(file::parse(&forged.to_string()).err().unwrap().contains("does not fit"));
}
