//! Llama and its family. `transparency_`: the same bits at every cut, schedule and policy.
//! `oracle_`: against itself without a cache. `fault_`: configurations that are refused.
//! `scripts/llama_parity.py` compares it with transformers.

use gpipe::{
    Adam, BalancedExperts, CrossEntropy, IntoTensors, Kernels, Pipeline, TensorSpec, Tensors,
    decode::GroupStep,
    layers::{ExpertNames, Rotary, RotaryScaling},
};
use gpipe_models::{
    Experts, Llama, Transformer,
    huggingface::{
        Network, config,
        names::{Found, Name},
        written,
    },
    transformer::Gelu,
};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::common::{Run, assert_same_bits};

pub const LENGTH: i64 = 9;

/// With everything: grouped queries, norms of heads, biases, a window in one block, a tied table.
pub fn model() -> Llama {
    let scaling = RotaryScaling::Llama3 { factor: 4.0, low: 1.0, high: 4.0, original: 8 };
    Llama {
        vocabulary: 31,
        features: 12,
        hidden: 20,
        windows: vec![None, Some(4), None],
        heads: 4,
        groups: 2,
        head_size: 6,
        rotary: Rotary { theta: 1e4, positions: 16, scaling },
        eps: 1e-6,
        qkv_bias: true,
        output_bias: false,
        mlp_bias: true,
        head_norms: true,
        experts: None,
        attention_dropout: 0.0,
        tied: true,
        padding: None,
        std: 0.3,
    }
}

/// Experts in two of three blocks.
pub fn experts(balance: f64) -> Llama {
    let experts = Experts {
        experts: 5,
        top_k: 2,
        hidden: 8,
        normalise: true,
        balance,
        names: ExpertNames::Qwen,
        blocks: vec![true, false, true],
    };
    Llama { experts: Some(experts), qkv_bias: false, mlp_bias: false, ..model() }
}

pub fn tokens(samples: i64, length: i64, seed: i64) -> Tensor {
    let position = Tensor::arange(samples * length, (Kind::Int64, tch::Device::Cpu));
    (position * 7 + seed * 13).remainder(31).reshape([samples, length])
}

pub fn inputs() -> Vec<TensorSpec> {
    vec![TensorSpec::new([2, LENGTH], Kind::Int64)]
}

/// Positions that the attention of the bridge computes, if heads are large enough.
const LONG: i64 = 20;

/// For the attention of the bridge, which lets heads of queries share keys.
fn with_large_heads() -> Llama {
    let rotary = Rotary { theta: 1e4, positions: 32, scaling: RotaryScaling::None };
    Llama { head_size: 16, rotary, ..model() }
}

fn trained(run: &Run, model: &Llama, kind: Kind, kernels: Kernels) -> Vec<(String, Tensor)> {
    let length = if *model == with_large_heads() { LONG } else { LENGTH };
    let inputs = vec![TensorSpec::new([2, length], Kind::Int64)];
    let builder = run.builder_of(model.build().unwrap(), inputs, 3).kernels(kernels);
    let builder = match &model.experts {
        Some(own) if own.balance > 0.0 => {
            let loss = CrossEntropy::default();
            builder.loss(BalancedExperts { loss, weight: own.balance, top_k: own.top_k })
        }
        _ => builder,
    };
    let pipeline = builder.kind(kind).clip_norm(1.0).build().unwrap();
    after_two_steps(pipeline, |step| {
        (tokens(7, length, step).into_tensors(), tokens(7, length, step + 5))
    })
}

/// Losses, gradients and parameters of two steps of training.
pub fn after_two_steps(
    mut pipeline: Pipeline,
    batch: impl Fn(i64) -> (Tensors, Tensor),
) -> Vec<(String, Tensor)> {
    let mut all = Vec::new();
    for step in 0..2 {
        let (inputs, targets) = batch(step);
        let report = pipeline.train_step(inputs, targets).unwrap();
        all.push((format!("{step} loss"), Tensor::from(report.loss)));
        let gradients = pipeline.gradients().unwrap().into_iter();
        all.extend(gradients.map(|(name, own)| (format!("{step} {name}"), own)));
    }
    all.extend(pipeline.parameters().unwrap());
    all
}

#[test]
fn transparency_of_llama() {
    let layers = model().build().unwrap().len();
    let plain = Llama { tied: false, head_norms: false, ..model() };
    for (model, kind, kernels) in [
        (model(), Kind::Float, Kernels::Aten),
        (model(), Kind::BFloat16, Kernels::Aten),
        (with_large_heads(), Kind::Float, Kernels::OneDnn),
        (Llama { attention_dropout: 0.2, ..plain }, Kind::Float, Kernels::Aten),
        (experts(0.5), Kind::Float, Kernels::Aten),
        (experts(0.5), Kind::BFloat16, Kernels::Aten),
        (experts(0.0), Kind::Float, Kernels::Aten),
    ] {
        let expected = trained(&Run::plain(), &model, kind, kernels);
        for run in Run::all(layers).into_iter().step_by(3) {
            let found = trained(&run, &model, kind, kernels);
            assert_same_bits(&found, &expected, &format!("{run:?} {kind:?} {kernels:?}"));
        }
    }
}

/// The bridge's attention shares heads of keys, and libtorch's gets each of them repeated.
#[test]
fn oracle_shared_heads_give_the_gradients_of_repeated_ones() {
    let run = |kernels| trained(&Run::plain(), &with_large_heads(), Kind::Float, kernels);
    let (own, plain) = (run(Kernels::OneDnn), run(Kernels::Aten));
    // The second step starts from updates in which Adam divides by small gradients.
    let first = own.iter().zip(&plain).filter(|((name, _), _)| name.starts_with("0 "));
    let mut compared = 0;
    for ((name, own), (_, plain)) in first {
        let difference = (own - plain).abs().max().double_value(&[]);
        let largest = plain.abs().max().double_value(&[]);
        // Exponentials are exact to 2.4e-6, and pass through three blocks and their norms.
        assert!(difference <= 1e-4 * largest, "{name}: {difference:e} of {largest:e}");
        compared += 1;
    }
    assert!(compared > 30, "{compared}");
}

/// An expert that no token chose had no gradient: its weights did not decay, and its momentum stood
/// still, unlike those of transformers, where the experts of a layer are one parameter.
#[test]
fn regression_experts_without_tokens_are_trained() {
    let model = experts(0.0);
    let rule = Adam { weight_decay: 0.5, decoupled: true, ..Adam::default() };
    let builder = Pipeline::builder(model.build().unwrap(), inputs()).optimizer(rule);
    let mut pipeline = builder.loss(CrossEntropy::default()).build().unwrap();
    let before = pipeline.parameters().unwrap();
    // One token alone: two of five experts.
    let token = Tensor::ones([1, 1], (Kind::Int64, tch::Device::Cpu));
    pipeline.train_step(&token, &token).unwrap();
    for ((name, old), (_, new)) in before.iter().zip(pipeline.parameters().unwrap()) {
        assert!(*old != new, "{name} stands still");
    }
}

#[test]
fn fault_experts_that_do_not_fit_are_refused() {
    let refused = |change: fn(&mut Experts), part: &str| {
        let mut model = experts(0.0);
        change(model.experts.as_mut().unwrap());
        let built = model.build().map_err(|error| error.to_string());
        let built = built.and_then(|sequence| {
            Pipeline::builder(sequence, inputs()).build().map_err(|error| error.to_string())
        });
        let error = built.err().unwrap();
        assert!(error.contains(part), "{error}");
    };
    refused(|own| own.top_k = 6, "a token goes through 6 of 5 experts: use 1 to 5");
    refused(|own| own.top_k = 0, "a token goes through 0 of 5 experts");
    refused(|own| own.experts = 5000, "5000 experts: use 1 to 4096");
    refused(|own| own.blocks.push(true), "experts are said of 4 blocks, and there are 3");
    // The loss takes the division of tokens, which only a balanced model has.
    let loss = BalancedExperts { loss: CrossEntropy::default(), weight: 0.1, top_k: 2 };
    let plain = experts(0.0).build().unwrap();
    let pipeline = Pipeline::builder(plain, inputs()).loss(loss);
    let mut pipeline = pipeline.optimizer(Adam::default()).build().unwrap();
    let error = pipeline.train_step(tokens(2, 9, 0), tokens(2, 9, 1)).unwrap_err().to_string();
    assert!(error.contains("takes two outputs, logits and the division of tokens"), "{error}");
}

#[test]
fn oracle_decoding_with_caches_gives_the_logits_of_the_whole_text() {
    let text = tokens(3, 14, 1);
    let dynamic = RotaryScaling::Dynamic { factor: 2.0 };
    let short = Rotary { theta: 1e4, positions: 32, scaling: dynamic };
    for (model, stages) in
        [(model(), 1), (model(), 3), (Llama { rotary: short, ..model() }, 2), (experts(0.5), 2)]
    {
        let builder = Pipeline::builder(model.build().unwrap(), inputs());
        let mut pipeline = builder.stages(stages).kind(Kind::Double).build().unwrap();
        let whole = pipeline.predict(&text).unwrap().remove(0);
        let mut decoding = pipeline.decoding();
        let mut step = |first: i64, count: i64| {
            let inputs = vec![text.narrow(1, first, count)];
            let step = GroupStep { group: 0, inputs, rows: None };
            decoding.step(vec![step]).unwrap().remove(0).remove(0)
        };
        let mut found = vec![step(0, 5)];
        found.extend((5..14).map(|position| step(position, 1)));
        let found = Tensor::cat(&found, 1);
        let apart = (&found - &whole).abs().max().double_value(&[]);
        assert!(apart < 1e-12 * whole.abs().max().double_value(&[]), "{stages}: {apart:e}");
        // With the last position alone.
        let mut decoding = pipeline.decoding().only_last();
        let mut step = |first: i64, count: i64| {
            let inputs = vec![text.narrow(1, first, count)];
            let step = GroupStep { group: 0, inputs, rows: None };
            decoding.step(vec![step]).unwrap().remove(0).remove(0)
        };
        let found = Tensor::cat(&[step(0, 5), step(5, 1)], 1);
        assert_eq!(found.size(), [3, 2, whole.size()[2]]);
        let wanted = whole.index_select(1, &Tensor::from_slice(&[4_i64, 5]));
        let apart = (&found - &wanted).abs().max().double_value(&[]);
        assert!(apart < 1e-12 * whole.abs().max().double_value(&[]), "{stages}: {apart:e}");
    }
}

/// Keys of a small Llama.
fn keys() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "rope_scaling": null,
    })
}

fn read_llama(text: &str) -> Llama {
    match config(text).unwrap().network {
        Network::Llama(model) => model,
        other => panic!("{other:?}"),
    }
}

fn with(more: &Value) -> Value {
    let mut keys = keys();
    let more = more.as_object().unwrap();
    keys.as_object_mut().unwrap().extend(more.iter().map(|(k, v)| (k.clone(), v.clone())));
    keys
}

#[test]
fn oracle_old_and_new_keys_of_rotary_positions_mean_the_same() {
    let read = |more: Value| read_llama(&with(&more).to_string());
    let old = read(json!({"rope_theta": 5e5, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}));
    let new = read(json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5,
        "factor": 4.0, "original_max_position_embeddings": 16}}));
    assert_eq!(old, new);
    assert_eq!(read(json!({})).rotary.theta, 1e4);
    // Each family's own defaults.
    let mistral = json!({"model_type": "mistral"});
    assert_eq!(read(mistral).windows, [Some(4096), Some(4096)]);
    let qwen = json!({"model_type": "qwen3", "use_sliding_window": true, "sliding_window": 7,
        "max_window_layers": 1});
    let qwen = read(qwen);
    assert_eq!((qwen.windows, qwen.head_size), (vec![None, Some(7)], 128));
}

#[test]
fn fault_configurations_that_are_not_supported_are_refused_by_name() {
    let cases = [
        (json!({"model_type": "gemma2"}), "model_type is gemma2: supported are llama, mistral"),
        (json!({"hidden_act": "gelu"}), "hidden_act is \"gelu\": only \"silu\" is supported"),
        (json!({"num_experts": 8}), "num_experts is 8: this key is not supported"),
        (json!({"model_type": "mixtral"}), "num_local_experts is missing"),
        (
            json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                "router_jitter_noise": 0.1}),
            "router_jitter_noise is 0.1: only 0.0 is supported",
        ),
        (
            json!({"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8,
                "mlp_only_layers": "all"}),
            "mlp_only_layers is \"all\": it is a list of numbers of blocks",
        ),
        (json!({"quantization_config": {"bits": 4}}), "quantization_config is"),
        (json!({"hidden_size": "big"}), "hidden_size is \"big\": it is a whole number"),
        (json!({"vocab_size": null}), "vocab_size is missing"),
        (json!({"rms_norm_eps": "small"}), "rms_norm_eps is \"small\": it is a number"),
        (json!({"tie_word_embeddings": 1}), "tie_word_embeddings is 1: it is true or false"),
        (json!({"hidden_size": 30}), "hidden_size 30 is no multiple of num_attention_heads 4"),
        (
            json!({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
            "rope_scaling.rope_type is \"longrope\": supported are default, linear",
        ),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "rope_scaling.factor is missing"),
        (
            json!({"rope_parameters": {"rope_type": "linear", "factor": -1}}),
            "rope_parameters.factor is -1: it is a number above 0",
        ),
        (
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
            "rope_parameters.partial_rotary_factor is 0.5: this key is not supported",
        ),
        (
            json!({"model_type": "qwen2", "layer_types": ["full_attention"]}),
            "layer_types is [\"full_attention\"]: it is a list of 2 types",
        ),
        (
            json!({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}),
            "there is no sliding_window",
        ),
        (json!({"sliding_window": 5}), "sliding_window is 5: this key is not supported"),
        (
            json!({"pad_token_id": 100}),
            "pad_token_id is 100: it is a token below vocab_size, which is 100",
        ),
        (
            json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                "router_aux_loss_coef": -0.5}),
            "router_aux_loss_coef is -0.5: it is a number of at least 0",
        ),
        (json!({"eos_token_id": "</s>"}), "eos_token_id is \"</s>\": it is a token's number"),
        (
            json!({"architectures": ["LlamaForSequenceClassification"]}),
            "only models ...ForCausalLM are supported",
        ),
    ];
    for (more, expected) in cases {
        let error = config(&with(&more).to_string()).unwrap_err().to_string();
        assert!(error.starts_with("config.json: ") && error.contains(expected), "{more}: {error}");
    }
    assert!(config("{").unwrap_err().to_string().contains("it is not JSON"));
    assert!(config("[]").unwrap_err().to_string().contains("not an object of keys"));
    // Readable, but no model: the layers say why.
    let odd = read_llama(&with(&json!({"num_key_value_heads": 3})).to_string());
    let error = Pipeline::builder(odd.build().unwrap(), inputs()).build().err().unwrap();
    assert!(error.to_string().contains("4 heads of queries for 3 of keys"), "{error}");
}

fn gpt2() -> Value {
    json!({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 24,
        "n_head": 3, "n_layer": 2, "n_positions": 16, "n_ctx": 16, "n_inner": null,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "bos_token_id": 99,
        "n_special": 0, "predict_special_tokens": true, "output_past": true,
        "eos_token_id": 99, "summary_type": "cls_index", "initializer_range": 0.02,
        "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.2,
        "task_specific_params": {"text-generation": {"do_sample": true}},
    })
}

/// The keys that the makers of models write, in the style of each.
#[test]
fn oracle_files_as_their_makers_write_them_are_read() {
    let all = [
        // SmolLM
        json!({"is_llama_config": true, "rope_interleaved": false, "pretraining_tp": 1,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "initializer_range": 0.041666666666666664, "tie_word_embeddings": true,
            "attention_bias": false, "mlp_bias": false, "use_cache": true, "rope_theta": 1e4}),
        // Llama 3.2
        json!({"head_dim": 8, "bos_token_id": 98, "eos_token_id": [97, 98, 99], "rope_theta": 5e5,
            "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 32, "rope_type": "llama3"}}),
        // Mistral 0.3
        json!({"model_type": "mistral", "architectures": ["MistralForCausalLM"],
            "sliding_window": null, "attention_dropout": 0.0, "rope_theta": 1e6}),
        // Qwen 2.5
        json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_mrope": false,
            "max_window_layers": 24, "sliding_window": 32768, "use_sliding_window": false}),
        // Qwen 3
        json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16,
            "attention_bias": false, "max_window_layers": 28, "sliding_window": null,
            "use_sliding_window": false, "rope_scaling": null, "tie_word_embeddings": true}),
        // Mixtral
        json!({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": false,
            "router_aux_loss_coef": 0.02, "router_jitter_noise": 0, "sliding_window": null}),
        // Qwen3-MoE
        json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16,
            "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [],
            "moe_intermediate_size": 24, "norm_topk_prob": true, "num_experts": 8,
            "num_experts_per_tok": 2, "output_router_logits": false,
            "router_aux_loss_coef": 0.001, "sliding_window": null, "use_sliding_window": false}),
        // Qwen3-Coder: what its family does anyway
        json!({"model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 8,
            "num_experts_per_tok": 2, "qkv_bias": false, "shared_expert_intermediate_size": 0,
            "use_qk_norm": true, "output_attentions": false, "tokenizer_class": "Qwen2Tokenizer"}),
    ];
    for more in all {
        let read = config(&with(&more).to_string()).unwrap();
        Pipeline::builder(read.network.build().unwrap(), inputs()).build().unwrap();
    }
}

#[test]
fn oracle_gpt2_is_read_as_openai_distributes_it() {
    let read = config(&gpt2().to_string()).unwrap();
    assert_eq!((read.model_type.as_str(), &read.ends[..]), ("gpt2", &[99][..]));
    let expected = Transformer {
        vocabulary: 100,
        positions: 16,
        features: 24,
        heads: 3,
        hidden: 96,
        blocks: 2,
        dropout: 0.1,
        attention_dropout: 0.2,
        tied: true,
        split_blocks: true,
        gelu: Gelu::Tanh,
    };
    assert_eq!(read.network, Network::Gpt2(expected));
    for (key, value, expected) in [
        ("resid_pdrop", json!(0.3), "embd_pdrop and resid_pdrop differ"),
        ("activation_function", json!("relu"), "activation_function is \"relu\": supported are"),
        ("layer_norm_epsilon", json!(1e-6), "only 1e-5 is supported"),
        ("scale_attn_weights", json!(false), "scale_attn_weights is false: only true"),
    ] {
        let mut keys = gpt2();
        keys[key] = value;
        let error = config(&keys.to_string()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// A token of padding was trained by its lookups, which it is not in transformers.
#[test]
fn regression_padding_has_no_gradient_from_its_lookups() {
    const TABLE: &str = "model.embed_tokens.weight";
    let gradients = |padding: Option<i64>, tied: bool| {
        let network = Llama { padding, tied, ..model() }.build().unwrap();
        let builder = Pipeline::builder(network, inputs()).stages(2).seed(3).keep_gradients();
        let builder = builder.loss(CrossEntropy::default()).optimizer(Adam::default());
        let mut pipeline = builder.kind(Kind::Double).build().unwrap();
        pipeline.train_step(tokens(7, LENGTH, 1), tokens(7, LENGTH, 6)).unwrap();
        pipeline.gradients().unwrap()
    };
    let rows = |all: &[(String, Tensor)]| {
        let table = all.iter().find(|(name, _)| name == TABLE).unwrap();
        table.1.split(1, 0)
    };
    let (found, plain) = (gradients(Some(4), false), gradients(None, false));
    for ((name, own), (_, plain)) in found.iter().zip(&plain) {
        assert_eq!(own == plain, name != TABLE, "{name}");
    }
    for (token, (own, plain)) in rows(&found).iter().zip(rows(&plain)).enumerate() {
        assert_ne!(plain, plain.zeros_like(), "{token}: or nothing is tested");
        assert_eq!(*own, if token == 4 { plain.zeros_like() } else { plain }, "{token}");
    }
    let refused = Llama { padding: Some(31), ..model() }.build().unwrap();
    let error = Pipeline::builder(refused, inputs()).build().err().unwrap().to_string();
    assert!(error.contains("padding is token 31: use one from 0 to below 31"), "{error}");
    // A tied table still learns from the logits.
    let (found, plain) = (rows(&gradients(Some(4), true)), rows(&gradients(None, true)));
    assert!(found[4] != plain[4] && found[4] != found[4].zeros_like());
    assert!((0..31).all(|token| token == 4 || found[token] == plain[token]));
}

/// Every parameter has one name in a folder, and that name means this parameter.
#[test]
fn property_names_lead_there_and_back() {
    let read = |keys: &Value| config(&keys.to_string()).unwrap().network;
    let mut untied = gpt2();
    untied["tie_word_embeddings"] = json!(false);
    let qwen = with(&json!({"model_type": "qwen3", "attention_bias": true}));
    let mixtral = json!({"model_type": "mixtral", "num_local_experts": 4,
        "num_experts_per_tok": 2});
    let mixtral = with(&mixtral);
    for network in [&gpt2(), &untied, &qwen, &keys(), &mixtral].map(read) {
        let pipeline = Pipeline::builder(network.build().unwrap(), inputs()).build().unwrap();
        let mut seen = std::collections::HashSet::new();
        for layer in pipeline.outline() {
            for own in layer.parameters {
                let name = format!("{}.{}", layer.layer, own.name);
                let theirs = network.name_of(&name);
                assert!(seen.insert(theirs.name.clone()), "{name} and another: {theirs:?}");
                let back = network.parameter_of(&theirs.name);
                let expected = Name { name: name.clone(), transpose: theirs.transpose };
                assert_eq!(back, Found::Parameter(expected), "{name}");
                // Matrices are turned, and vectors are not.
                let is_gpt2 = matches!(network, Network::Gpt2(_));
                let is_turned = is_gpt2 && own.shape.len() == 2 && theirs.name.contains(".h.");
                assert_eq!(theirs.transpose, is_turned, "{name}");
            }
        }
    }
    let gpt2 = read(&gpt2());
    let of = |name: &str| gpt2.parameter_of(name);
    let tokens = Found::Parameter(Name { name: "embedding.tokens".into(), transpose: false });
    assert_eq!(of("wte.weight"), tokens, "without the prefix");
    assert_eq!(of("lm_head.weight"), Found::CopyOf("wte.weight".into()));
    assert_eq!(of("transformer.h.1.attn.masked_bias"), Found::Derived);
    assert_eq!(of("h.1.attn.bias"), Found::Derived);
}

/// What is written for a model is read as the same model.
#[test]
fn property_a_written_config_is_read_as_the_same_model() {
    let all = [
        json!({}),
        json!({"attention_bias": true, "mlp_bias": true, "head_dim": 10}),
        json!({"pad_token_id": 3}),
        json!({"pad_token_id": -1}),
        json!({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
        json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}),
        json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.8,
               "mscale_all_dim": 0.5, "truncate": false}}),
        json!({"model_type": "mistral", "sliding_window": 7}),
        json!({"model_type": "mistral", "sliding_window": null}),
        json!({"model_type": "qwen2", "tie_word_embeddings": true}),
        json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 5,
               "max_window_layers": 1}),
        json!({"model_type": "qwen3", "attention_bias": true, "attention_dropout": 0.25}),
        json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}),
        json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
               "moe_intermediate_size": 8, "decoder_sparse_step": 2, "output_router_logits": true,
               "router_aux_loss_coef": 0.25, "use_sliding_window": true, "sliding_window": 9}),
    ];
    for more in all {
        let network = config(&with(&more).to_string()).unwrap().network;
        let text = written(&network, 7, "bfloat16").unwrap();
        let read = config(&text).unwrap();
        assert_eq!((read.network, &read.ends[..]), (network, &[7][..]), "{more}");
        assert!(text.contains("\"torch_dtype\": \"bfloat16\""), "{text}");
    }
    // transformers refuses a Llama whose width is no multiple of its heads, but no Mistral.
    let narrow = with(&json!({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}));
    let narrow = config(&narrow.to_string()).unwrap().network;
    let text = written(&narrow, 7, "float32").unwrap();
    assert!(text.contains("MistralForCausalLM") && config(&text).unwrap().network == narrow);
    let gpt2 = config(&gpt2().to_string()).unwrap().network;
    let Network::Gpt2(own) = &gpt2 else { panic!("{gpt2:?}") };
    let whole = Network::Gpt2(Transformer { split_blocks: false, ..own.clone() });
    assert_eq!(written(&whole, 7, "float32"), written(&gpt2, 7, "float32"));
    assert_eq!(config(&written(&gpt2, 7, "float32").unwrap()).unwrap().network, gpt2);
    // Norms of heads with biases of queries, keys and values alone: nothing in transformers.
    let keys = with(&json!({"model_type": "qwen3"}));
    let odd = Llama { qkv_bias: true, ..read_llama(&keys.to_string()) };
    let error = written(&Network::Llama(odd), 7, "float32").unwrap_err().to_string();
    assert!(error.contains("no architecture of transformers"), "{error}");
}
