//! Tests of the tokenizer's public interface. Families: `oracle_`, `regression_`, `fault_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe_data::{Document, END_OF_DOCUMENT, Error, TokenSet, Tokenizer};

fn documents() -> Vec<Document> {
    let text = include_str!("../src/corpus/mod.rs");
    let half = text.floor_char_boundary(text.len() / 2);
    [&text[..half], &text[half..]]
        .iter()
        .map(|text| Document { name: "source".into(), text: (*text).into() })
        .collect()
}

#[test]
fn regression_save_and_load_keep_everything() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("a.json"), folder.path().join("b.json"));
    let trained = Tokenizer::train(&documents(), 400).unwrap();
    trained.save(&first).unwrap();
    let loaded = Tokenizer::load(&first).unwrap();
    loaded.save(&second).unwrap();

    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    assert_eq!(loaded.vocabulary(), trained.vocabulary());
    assert_eq!(loaded.end_of_document(), trained.end_of_document());
    let text = "a text with <|end|> in it\n";
    assert_eq!(loaded.encode(text).unwrap(), trained.encode(text).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2); // No partial file stays.
}

#[test]
fn oracle_the_library_reads_our_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let ours = Tokenizer::train(&documents(), 400).unwrap();
    ours.save(&path).unwrap();
    let theirs = tokenizers::Tokenizer::from_file(&path).unwrap();
    let text = &documents()[0].text;
    let encoding = theirs.encode(text.as_str(), false).unwrap();
    assert_eq!(encoding.get_ids(), ours.encode(text).unwrap());
    assert_eq!(theirs.token_to_id(END_OF_DOCUMENT), Some(ours.end_of_document()));
}

#[test]
fn regression_the_end_of_a_document_cannot_be_written_in_a_document() {
    let text = format!("before {END_OF_DOCUMENT} after {END_OF_DOCUMENT}{END_OF_DOCUMENT}\n");
    let document = Document { name: "tricky".into(), text: text.repeat(50) };
    let tokenizer = Tokenizer::train(&[document], 400).unwrap();
    let tokens = tokenizer.encode(&text).unwrap();
    assert!(!tokens.contains(&tokenizer.end_of_document()));
    assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
    assert_eq!(tokenizer.decode(&[tokenizer.end_of_document()]).unwrap(), END_OF_DOCUMENT);
}

#[test]
fn oracle_the_bytes_of_tokens_make_the_text() {
    let tokenizer = Tokenizer::train(&documents(), 400).unwrap();
    let text = format!("fn main() {{ \"naïve 漢字 🦀\" }}\n{}", documents()[0].text);
    let tokens = tokenizer.encode(&text).unwrap();
    let parts = tokens.iter().map(|&token| tokenizer.token_bytes(token).unwrap());
    assert_eq!(parts.collect::<Vec<_>>().concat(), text.as_bytes());
    let end = tokenizer.token_bytes(tokenizer.end_of_document()).unwrap();
    assert_eq!(end, END_OF_DOCUMENT.as_bytes());
    let beyond = tokenizer.vocabulary() as u32;
    assert!(matches!(tokenizer.token_bytes(beyond), Err(Error::UnknownToken { .. })));
}

#[test]
fn property_shuffling_keeps_every_document_and_is_a_function_of_the_seed() {
    let named =
        |i: usize| Document { name: format!("{i}"), text: format!("document {i}\n").repeat(i) };
    let documents: Vec<_> = (1..=30).map(named).collect();
    let tokenizer = Tokenizer::train(&documents, 300).unwrap();
    let end = tokenizer.end_of_document();
    let parts = |set: &TokenSet| -> Vec<Vec<u32>> {
        set.tokens.split_inclusive(|&token| token == end).map(<[u32]>::to_vec).collect()
    };
    let plain = TokenSet::encode(&tokenizer, &documents).unwrap();
    let shuffled = |seed| TokenSet::encode_shuffled(&tokenizer, &documents, seed).unwrap();
    for seed in (0..20).chain([u64::MAX]) {
        let set = shuffled(seed);
        assert_eq!(set, shuffled(seed), "the same seed, the same order");
        assert_ne!(
            set.tokens,
            shuffled(seed.wrapping_add(1)).tokens,
            "another seed, another order"
        );
        assert_ne!(set.tokens, plain.tokens);
        assert_eq!(set.bytes, plain.bytes);
        let (mut found, mut expected) = (parts(&set), parts(&plain));
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected, "each document once and whole");
    }
    // The shuffle is uniform. Over 1200 seeds, each of the 6 orders of 3 documents occurs 200
    // times, within 4.5 standard deviations.
    let mut counts = std::collections::BTreeMap::new();
    for seed in 0..1200 {
        let set = TokenSet::encode_shuffled(&tokenizer, &documents[..3], seed).unwrap();
        *counts.entry(set.tokens).or_insert(0) += 1;
    }
    assert_eq!(counts.len(), 6);
    assert!(counts.values().all(|count| (142..=258).contains(count)), "{:?}", counts.values());
    assert!(TokenSet::encode_shuffled(&tokenizer, &[], 0).unwrap().tokens.is_empty());
}

#[test]
fn regression_the_order_of_a_seed_stays_as_it_is() {
    // A run resumed with a newer release must see its text in the same order.
    let documents: Vec<_> =
        ["a", "b", "c", "d", "e"].map(|c| Document { name: c.into(), text: c.into() }).into();
    let tokenizer = Tokenizer::train(&documents, 257).unwrap();
    let set = TokenSet::encode_shuffled(&tokenizer, &documents, 42).unwrap();
    assert_eq!(tokenizer.decode(&set.tokens).unwrap().replace(END_OF_DOCUMENT, ""), "cbdae");
}

#[test]
fn oracle_a_token_set_counts_bytes_and_ends() {
    let documents = documents();
    let tokenizer = Tokenizer::train(&documents, 400).unwrap();
    let set = TokenSet::encode(&tokenizer, &documents).unwrap();
    let bytes: usize = documents.iter().map(|document| document.text.len()).sum();
    assert_eq!(set.bytes, bytes as u64);
    let ends = set.tokens.iter().filter(|&&t| t == tokenizer.end_of_document());
    assert_eq!(ends.count(), 2);
    assert_eq!(set.tokens.last(), Some(&tokenizer.end_of_document()));
    let joined: String = documents.iter().map(|d| d.text.clone() + END_OF_DOCUMENT).collect();
    assert_eq!(tokenizer.decode(&set.tokens).unwrap(), joined);
}

#[test]
fn oracle_bits_per_byte_of_a_uniform_guess_over_bytes_is_eight() {
    let set = TokenSet { tokens: vec![0; 100], bytes: 100 };
    assert!((set.bits_per_byte(256f64.ln()) - 8.0).abs() < 1e-12);
}

#[test]
fn regression_small_corpora_give_small_vocabularies() {
    let empty = Tokenizer::train(&[], 4096).unwrap();
    assert_eq!(empty.vocabulary(), 257);
    assert_eq!(empty.encode("é").unwrap().len(), 2);
    assert!(empty.encode("").unwrap().is_empty());
    let small = Tokenizer::train(&documents(), 100_000).unwrap();
    assert!((300..100_000).contains(&small.vocabulary()));
}

#[test]
fn fault_vocabularies_out_of_range() {
    for asked in [0, 256, usize::MAX] {
        let error = Tokenizer::train(&documents(), asked).unwrap_err();
        assert!(matches!(error, Error::Vocabulary { asked: a, least: 257 } if a == asked));
        assert!(error.to_string().contains("257"), "{error}");
    }
}

#[test]
fn oracle_special_tokens_are_first_and_decode_as_they_are_asked_to() {
    let specials = ["<pad>", "<sr@latin>"].map(String::from);
    let tokenizer = Tokenizer::train_with(&documents(), 400, &specials).unwrap();
    assert!(tokenizer.specials().eq([END_OF_DOCUMENT, "<pad>", "<sr@latin>"]));
    let ids = [END_OF_DOCUMENT, "<pad>", "<sr@latin>", "pad"].map(|text| tokenizer.special(text));
    assert_eq!(ids, [Some(0), Some(1), Some(2), None]);
    assert_eq!(tokenizer.end_of_document(), 0);
    let text = "a <pad> and a <sr@latin> of text";
    let mut tokens = tokenizer.encode(text).unwrap();
    assert!(tokens.iter().all(|token| *token > 2), "{tokens:?}");
    tokens.extend([1, 2, 0]);
    assert_eq!(tokenizer.decode_text(&tokens).unwrap(), text);
    assert_eq!(
        tokenizer.decode(&tokens).unwrap(),
        format!("{text}<pad><sr@latin>{END_OF_DOCUMENT}")
    );
    assert!(tokenizer.decode_text(&[400]).is_err());
    let plain = Tokenizer::train(&[], 257).unwrap();
    assert!(plain.specials().eq([END_OF_DOCUMENT]));
    assert_eq!(plain.special("<pad>"), None);
}

#[test]
fn fault_special_tokens_that_text_could_become() {
    let long = format!("<{}>", "a".repeat(63));
    let names = ["", "pad", "<>", "<->", "a", "< pad>", "<é>", "<pad", END_OF_DOCUMENT, &long];
    for name in names {
        let error = Tokenizer::train_with(&[], 300, &[name.to_owned()]).unwrap_err();
        assert!(
            matches!(&error, Error::SpecialToken { special, .. } if special == name),
            "{error}"
        );
    }
    let twice = ["<a>", "<b>", "<a>"].map(String::from);
    let error = Tokenizer::train_with(&[], 300, &twice).unwrap_err().to_string();
    assert_eq!(error, "the special token `<a>` is there twice; name it otherwise");
    let one = ["<a>".to_owned()];
    let error = Tokenizer::train_with(&[], 257, &one).unwrap_err().to_string();
    assert!(error.contains("use 258 (256 bytes and the special tokens)"), "{error}");
    assert_eq!(Tokenizer::train_with(&[], 258, &one).unwrap().vocabulary(), 258);
}

#[test]
fn fault_unknown_tokens_are_named() {
    let tokenizer = Tokenizer::train(&[], 257).unwrap();
    let error = tokenizer.decode(&[1, 257, 2]).unwrap_err();
    assert!(matches!(error, Error::UnknownToken { token: 257, vocabulary: 257 }), "{error}");
}

#[test]
fn fault_files_that_are_missing_or_not_ours() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let missing = Tokenizer::load(&path).unwrap_err().to_string();
    assert!(missing.contains("tokenizer.json"), "{missing}");
    std::fs::write(&path, "{}").unwrap();
    let error = Tokenizer::load(&path).unwrap_err();
    assert!(matches!(error, Error::TokenizerFile { .. }), "{error}");
    let tokenizer = Tokenizer::train(&[], 257).unwrap();
    let nowhere = tokenizer.save(&folder.path().join("no/such/folder.json"));
    assert!(matches!(nowhere, Err(Error::Io { action: "write", .. })));
}

/// GPT-2's tokenizer file must be accepted although it spells the same settings differently. With a
/// new vocabulary, the embedding in GPT-2's weights would be meaningless.
#[test]
fn regression_gpt2_s_spelling_of_a_tokenizer_is_read() {
    let text = "the rain in Spain stays mainly in the plain\n".repeat(20);
    let documents = [Document { name: "rain".into(), text: text.clone() }];
    let ours = Tokenizer::train(&documents, 300).unwrap();
    let mut root: serde_json::Value = serde_json::from_str(&ours.to_json().unwrap()).unwrap();
    // As in the file published with GPT-2, the end of a document comes last and has another name.
    let last = ours.vocabulary() as u64 - 1;
    let vocabulary = root["model"]["vocab"].as_object_mut().unwrap();
    vocabulary.remove(END_OF_DOCUMENT);
    vocabulary.values_mut().for_each(|id| *id = (id.as_u64().unwrap() - 1).into());
    vocabulary.insert("<|endoftext|>".into(), last.into());
    root["added_tokens"][0]["content"] = "<|endoftext|>".into();
    root["added_tokens"][0]["id"] = last.into();
    root["added_tokens"][0]["normalized"] = true.into();
    root["post_processor"] = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false
    });
    let merges = root["model"]["merges"].as_array_mut().unwrap();
    for merge in merges {
        *merge = format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()).into();
    }
    let model = root["model"].as_object_mut().unwrap();
    model.remove("byte_fallback");
    model.remove("ignore_merges");
    model.insert("continuing_subword_prefix".into(), "".into());
    model.insert("end_of_word_suffix".into(), "".into());
    root["pre_tokenizer"].as_object_mut().unwrap().remove("use_regex");

    let read = |root: &serde_json::Value| {
        Tokenizer::from_json(&root.to_string(), std::path::Path::new("gpt2.json"))
    };
    let theirs = read(&root).unwrap();
    assert_eq!(u64::from(theirs.end_of_document()), last);
    let expected: Vec<u32> = ours.encode(&text).unwrap().iter().map(|token| token - 1).collect();
    assert_eq!(theirs.encode(&text).unwrap(), expected);
    // Settings that would change the encoding are still rejected.
    for (pointer, value) in [
        ("/normalizer", serde_json::json!({"type": "NFC"})),
        ("/post_processor", serde_json::json!({"type": "TemplateProcessing"})),
        ("/model/continuing_subword_prefix", "##".into()),
    ] {
        let mut other = root.clone();
        *other.pointer_mut(pointer).unwrap() = value;
        let error = read(&other).unwrap_err().to_string();
        assert!(error.contains(pointer) && error.contains("gpt2.json"), "{error}");
    }
}
