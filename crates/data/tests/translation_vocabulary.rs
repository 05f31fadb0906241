//! Tests of one vocabulary for many languages. Families: `property_`, `oracle_`, `regression_`,
//! `fault_`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use std::sync::LazyLock;

use gpipe_data::parallel::{
    BEGIN, END, Language, PAD, Pair, PairError, PairSet, ParallelCorpus, Side,
    TranslationVocabulary, VocabularyOptions,
};
use gpipe_data::{Document, END_OF_DOCUMENT, Error, Tokenizer};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// A text in each of more than ten scripts.
const SCRIPTS: [(&str, &str); 14] = [
    ("am", "ፋይሉ አልተገኘም፤ እንደገና ይሞክሩ።"),
    ("ar", "تعذّر فتح الملف ٤٢، حاول مرة أخرى."),
    ("de", "Die Datei »Übergröße« läßt sich nicht öffnen – schade!"),
    ("el", "Το αρχείο δεν βρέθηκε· δοκιμάστε ξανά."),
    ("he", "הקובץ לא נמצא, נא לנסות שוב."),
    ("hi", "फ़ाइल नहीं मिली, कृपया दोबारा कोशिश करें।"),
    ("hy", "Ֆայլը չի գտնվել։"),
    ("ja", "ファイルが見つかりませんでした。もう一度お試しください。"),
    ("ka", "ფაილი ვერ მოიძებნა."),
    ("ko", "파일을 찾을 수 없습니다. 다시 시도하십시오."),
    ("ru", "Не удалось открыть файл №7 — попробуйте ещё раз."),
    ("ta", "கோப்பு கிடைக்கவில்லை."),
    ("th", "ไม่พบแฟ้ม โปรดลองอีกครั้ง"),
    ("zh_CN", "找不到文件“😀”，请重试。"),
];

fn pair(source: &str, target: &str) -> Pair {
    Pair { source: source.into(), target: target.into() }
}

/// Languages with the number of pairs that `sizes` returns, made of words in their scripts.
fn corpus(sizes: impl Fn(usize) -> usize) -> ParallelCorpus {
    let language = |(at, (code, text)): (usize, &(&str, &str))| {
        let words: Vec<&str> = text.split_inclusive(' ').collect();
        let source = |i: usize| [words[i % words.len()], words[(i / 2 + 1) % words.len()]].concat();
        let make = |i| pair(&source(i), &format!("cannot open the file number {}", i % 9));
        let train = (0..sizes(at)).map(make).collect();
        Language { code: (*code).into(), train, validation: vec![pair(text, "not found")] }
    };
    ParallelCorpus { languages: SCRIPTS.iter().enumerate().map(language).collect() }
}

fn options(tokens: usize) -> VocabularyOptions {
    VocabularyOptions { tokens, ..VocabularyOptions::default() }
}

/// Trained only once, because proptest uses it hundreds of times.
fn vocabulary() -> &'static TranslationVocabulary {
    static VOCABULARY: LazyLock<TranslationVocabulary> =
        LazyLock::new(|| TranslationVocabulary::train(&corpus(|_| 40), &options(700)).unwrap());
    &VOCABULARY
}

#[test]
fn property_every_script_round_trips() {
    for (code, text) in SCRIPTS {
        let source = vocabulary().encode_source(code, text).unwrap();
        assert_eq!(source.first(), Some(&vocabulary().tag(code).unwrap()));
        assert_eq!(source.last(), Some(&vocabulary().end()));
        assert_eq!(vocabulary().decode(&source).unwrap(), text);
        let target = vocabulary().encode_target(text).unwrap();
        assert_eq!(source[1..], target);
        assert_eq!(vocabulary().decode(&target).unwrap(), text);
    }
}

#[test]
fn oracle_special_tokens_have_the_first_ids() {
    let codes: Vec<&str> = SCRIPTS.iter().map(|(code, _)| *code).collect();
    assert!(vocabulary().languages().eq(codes.iter().copied()));
    let tags = codes.iter().map(|code| format!("<{code}>"));
    let expected: Vec<String> =
        [END_OF_DOCUMENT, PAD, BEGIN, END].map(String::from).into_iter().chain(tags).collect();
    let tokenizer = vocabulary().tokenizer();
    assert!(tokenizer.specials().eq(expected.iter().map(String::as_str)));
    for (text, id) in expected.iter().zip(0..) {
        assert_eq!(tokenizer.special(text), Some(id));
        assert_eq!(tokenizer.token_bytes(id).unwrap(), text.as_bytes());
    }
    assert_eq!(
        (
            vocabulary().pad(),
            vocabulary().begin(),
            vocabulary().end(),
            vocabulary().tag("am").unwrap()
        ),
        (1, 2, 3, 4)
    );
    assert_eq!(tokenizer.special("a"), None);
    assert_eq!(tokenizer.special("<xx>"), None);
    assert_eq!(tokenizer.vocabulary(), 700);
}

#[test]
fn property_decoding_ends_at_the_end_and_leaves_special_tokens_out() {
    let vocabulary = vocabulary();
    let mut tokens = vec![vocabulary.begin()];
    tokens.extend(vocabulary.encode_source("de", "so <pad> weit").unwrap());
    tokens.push(vocabulary.pad());
    tokens.extend(vocabulary.encode_target("and no further").unwrap());
    assert_eq!(vocabulary.decode(&tokens).unwrap(), "so <pad> weit");
    assert_eq!(vocabulary.decode(&[]).unwrap(), "");
    let shown = vocabulary.tokenizer().decode(&tokens[..2]).unwrap();
    assert_eq!(shown, "<s><de>");
}

/// A corpus full of text that looks like special tokens, with a vocabulary large enough to memorize
/// it.
fn tricky() -> &'static TranslationVocabulary {
    static TRICKY: LazyLock<TranslationVocabulary> = LazyLock::new(|| {
        let line = "<pad><s></s><de> <|end|> <pad> x<s>y</s>z <de>";
        let train = vec![pair(line, line); 300];
        let language =
            |code: &str| Language { code: code.into(), train: train.clone(), validation: vec![] };
        let corpus = ParallelCorpus { languages: vec![language("de"), language("sr@latin")] };
        TranslationVocabulary::train(&corpus, &options(2000)).unwrap()
    });
    &TRICKY
}

proptest! {
    #![proptest_config(ProptestConfig {
        rng_seed: RngSeed::Fixed(31),
        failure_persistence: None,
        ..ProptestConfig::with_cases(300)
    })]

    #[test]
    fn property_no_text_becomes_a_special_token(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "<", ">", "/", "|", "pad", "s", "de", "end", " ", "<pad>", "</s>", "<s>", "<de>",
                "<|end|>", "<sr@latin>", "é", "\n",
            ]),
            0..24,
        ),
    ) {
        let text = parts.concat();
        let vocabulary = tricky();
        let specials = vocabulary.tokenizer().specials().len() as u32;
        let tokens = vocabulary.tokenizer().encode(&text).unwrap();
        prop_assert!(tokens.iter().all(|token| *token >= specials), "{} {:?}", text, tokens);
        prop_assert_eq!(
            vocabulary.decode(&vocabulary.encode_source("de", &text).unwrap()).unwrap(),
            text
        );
    }

    #[test]
    fn property_any_text_round_trips(text in any::<String>()) {
        let tokens = vocabulary().encode_source("th", &text).unwrap();
        prop_assert_eq!(vocabulary().decode(&tokens).unwrap(), text);
    }
}

#[test]
fn regression_a_saved_vocabulary_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("a.json"), folder.path().join("b.json"));
    vocabulary().tokenizer().save(&first).unwrap();
    let loaded = TranslationVocabulary::from_tokenizer(Tokenizer::load(&first).unwrap()).unwrap();
    loaded.tokenizer().save(&second).unwrap();
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    assert!(loaded.languages().eq(vocabulary().languages()));
    for (code, text) in SCRIPTS {
        let text = format!("{text}</s><{code}>");
        let tokens = loaded.encode_source(code, &text).unwrap();
        assert_eq!(tokens, vocabulary().encode_source(code, &text).unwrap());
        assert_eq!(loaded.decode(&tokens).unwrap(), text);
    }
    // The `tokenizers` library reads the same tokens from the file.
    let theirs = tokenizers::Tokenizer::from_file(&first).unwrap();
    assert_eq!(theirs.token_to_id("<zh_CN>"), vocabulary().tag("zh_CN").ok());
    let text = SCRIPTS[10].1;
    let ours = vocabulary().tokenizer().encode(text).unwrap();
    assert_eq!(theirs.encode(text, false).unwrap().get_ids(), ours);
}

#[test]
fn property_a_vocabulary_is_a_function_of_corpus_and_options() {
    let corpus = corpus(|at| 20 + 60 * (at % 4));
    // With so little text, only some of the pairs are used, and the seed selects them.
    let few = |seed| VocabularyOptions { text_bytes: 20_000, seed, ..options(500) };
    let json = |options| {
        let vocabulary = TranslationVocabulary::train(&corpus, &options).unwrap();
        vocabulary.tokenizer().to_json().unwrap()
    };
    assert_eq!(json(few(1)), json(few(1)));
    assert_ne!(json(few(1)), json(few(2)));
}

#[test]
fn property_temperature_helps_small_languages() {
    // Thai is 500 times smaller than the other languages, which need all merges for themselves.
    let corpus = corpus(|at| if SCRIPTS[at].0 == "th" { 4 } else { 2000 });
    let tokens = |temperature| {
        let options = VocabularyOptions { temperature, ..options(420) };
        let vocabulary = TranslationVocabulary::train(&corpus, &options).unwrap();
        vocabulary.encode_source("th", SCRIPTS[12].1).unwrap().len()
    };
    let (as_they_are, alike) = (tokens(1.0), tokens(5.0));
    assert!(alike < as_they_are, "{alike} tokens, {as_they_are} at temperature 1");
}

#[test]
fn oracle_a_set_holds_the_pairs_and_counts_those_too_long() {
    let corpus = ParallelCorpus {
        languages: vec![
            Language {
                code: "de".into(),
                train: vec![
                    pair("Ja", "Yes"),
                    pair(&"lang ".repeat(50), "long"),
                    pair("Nein", "No"),
                ],
                validation: vec![],
            },
            Language {
                code: "th".into(),
                train: vec![],
                validation: vec![pair("ไม่", &"no ".repeat(99))],
            },
        ],
    };
    let set = PairSet::encode(vocabulary(), &corpus, Side::Train, 20).unwrap();
    assert!(set.languages().eq(["de", "th"]));
    assert_eq!((set.pairs(0), set.pairs(1), set.len()), (2, 0, 2));
    assert_eq!((set.left_out(0), set.left_out(1)), (1, 0));
    for (at, (source, target)) in [("Ja", "Yes"), ("Nein", "No")].into_iter().enumerate() {
        assert_eq!(set.source(0, at), vocabulary().encode_source("de", source).unwrap());
        assert_eq!(set.target(0, at), vocabulary().encode_target(target).unwrap());
    }
    assert_eq!(set.target_tokens(0), set.target(0, 0).len() + set.target(0, 1).len());
    assert_eq!(set.source_tokens(0), set.source(0, 0).len() + set.source(0, 1).len());
    assert!(
        set.source(0, 2).is_empty() && set.target(1, 0).is_empty() && set.source(7, 0).is_empty()
    );
    let held_out = PairSet::encode(vocabulary(), &corpus, Side::Validation, 20).unwrap();
    assert!(held_out.is_empty());
    assert_eq!((held_out.left_out(0), held_out.left_out(1)), (0, 1));
}

#[test]
fn fault_a_tokenizer_of_a_language_model() {
    let document = Document { name: "a".into(), text: "some text".into() };
    let tokenizer = Tokenizer::train(&[document], 300).unwrap();
    let error = TranslationVocabulary::from_tokenizer(tokenizer).unwrap_err();
    assert!(matches!(error, Error::Pairs(PairError::OfAnotherModel { .. })));
    assert_eq!(
        error.to_string(),
        "this tokenizer has no `<pad>`: it is of another model; name the one of a translation model"
    );
    let specials = [PAD, BEGIN, END].map(String::from);
    let tokenizer = Tokenizer::train_with(&[], 300, &specials).unwrap();
    let error = TranslationVocabulary::from_tokenizer(tokenizer).unwrap_err().to_string();
    assert!(error.contains("no tag of a language"), "{error}");
}

#[test]
fn fault_languages_that_the_vocabulary_does_not_have() {
    for error in [
        vocabulary().encode_source("zh_TW", "a").unwrap_err(),
        vocabulary().tag("zh_TW").unwrap_err(),
    ] {
        let Error::Pairs(PairError::UnknownLanguage { asked, known }) = &error else {
            panic!("{error}");
        };
        assert_eq!((asked.as_str(), known.len()), ("zh_TW", SCRIPTS.len()));
        assert_eq!(known[0], "zh_CN", "the most alike first");
        assert!(error.to_string().contains("such as zh_CN, "), "{error}");
        assert!(error.to_string().ends_with("(and 6 more)"), "{error}");
    }
    let unknown = Language { code: "tlh".into(), train: vec![], validation: vec![] };
    let corpus = ParallelCorpus { languages: vec![unknown] };
    let error = PairSet::encode(vocabulary(), &corpus, Side::Train, 50).unwrap_err();
    assert!(matches!(error, Error::Pairs(PairError::UnknownLanguage { .. })));
}

#[test]
fn fault_what_cannot_be_a_vocabulary() {
    let train = |corpus: &ParallelCorpus, options| {
        TranslationVocabulary::train(corpus, &options).unwrap_err().to_string()
    };
    let empty = corpus(|_| 0);
    assert!(train(&empty, options(500)).contains("no pairs to learn a vocabulary from"));
    assert!(train(&ParallelCorpus { languages: vec![] }, options(500)).contains("no pairs"));
    let some = corpus(|_| 3);
    // 257 tokens, 3 special tokens and 14 tags.
    assert!(train(&some, options(273)).contains("use 274 "));
    assert!(TranslationVocabulary::train(&some, &options(274)).is_ok());
    let cold = VocabularyOptions { temperature: 0.5, ..options(500) };
    assert!(train(&some, cold).contains("data.temperature = 0.5"));
    let mut twice = corpus(|_| 3);
    twice.languages[1].code = "am".into();
    assert!(train(&twice, options(500)).contains("`<am>` is there twice"));
    let mut blank = corpus(|_| 3);
    blank.languages[0].code = "a b".into();
    assert!(train(&blank, options(500)).contains("`<a b>` is not ASCII"));
    for tokens_max in [0, 2, usize::MAX] {
        let error = PairSet::encode(vocabulary(), &some, Side::Train, tokens_max).unwrap_err();
        assert!(matches!(error, Error::Pairs(PairError::TokensMax { .. })), "{error}");
    }
}
