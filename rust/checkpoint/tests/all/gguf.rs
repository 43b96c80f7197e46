//! GGUF files: translation of configuration, names, layout and vocabulary, and errors.

use penstock_checkpoint::{
    Checkpoint, CheckpointError, FileFormat, GgufVocabulary, TextFiles, TokenType, TokenizerSource,
};
use penstock_types::Dtype;
use serde_json::json;

use crate::common::{
    Field, Gguf, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Scratch, VOCABULARY, open_error, read, warnings_of,
};

fn vocabulary(checkpoint: &Checkpoint) -> &GgufVocabulary {
    match checkpoint.text().tokenizer().unwrap() {
        TokenizerSource::Gguf(vocabulary) => vocabulary,
        TokenizerSource::Json(_) => panic!("a GGUF file has no tokenizer.json"),
    }
}

#[test]
fn metadata_translates_to_a_hugging_face_config() {
    let checkpoint = Gguf::model("llama").with("llama.rope.freq_base", Field::F32(5e5)).open().unwrap();
    assert_eq!(
        *checkpoint.config(),
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": true,
            "attention_bias": false,
            "mlp_bias": false,
            "rope_theta": 5e5,
            "rope_scaling": null,
        })
    );
    let description = checkpoint.description();
    assert_eq!(description.format, FileFormat::Gguf(3));
    assert_eq!((description.tensors, description.bytes), (11, description.elements * 4));
    assert_eq!(description.storage, [("F32".to_owned(), description.elements)]);
}

#[test]
fn architectures_differ_in_class_and_biases() {
    for (architecture, class) in [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")] {
        let checkpoint = Gguf::model(architecture).open().unwrap();
        let config = checkpoint.config();
        assert_eq!(config["architectures"], json!([class]));
        assert_eq!(config["model_type"], json!(architecture));
        assert_eq!(config.get("attention_bias").is_some(), architecture == "qwen3");
    }
    let mut file = Gguf::model("llama");
    file.f32_tensor("blk.0.attn_q.bias", &[8], &[0.0; 8]);
    assert_eq!(file.open().unwrap().config()["attention_bias"], json!(true));
}

#[test]
fn parts_of_the_header_have_limits() {
    let other = |field: Field| Gguf::model("llama").with("other", field);
    let strings = |count: u64| Field::Raw(9, [&8_u32.to_le_bytes()[..], &count.to_le_bytes()].concat());
    let templates = |count: usize| {
        (0..count).fold(Gguf::model("llama"), |file, index| {
            file.with(&format!("tokenizer.chat_template.{index}"), Field::Text("a".to_owned()))
        })
    };
    assert!(other(Field::Texts(vec![String::new(); 1 << 22])).open().is_ok());
    assert_eq!(templates(63).open().unwrap().text().chat_templates().len(), 64); // with that of the model
    for (file, expected) in [
        (other(strings((1 << 22) + 1)), "other: an array of 4194305 strings; the limit is 4194304"),
        (templates(64), "tokenizer.chat_template: more than 64 chat templates"),
    ] {
        let error = open_error(file.open());
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
    }
    let scratch = Scratch::new();
    let file = Gguf::empty().with("other", Field::Raw(8, (256_u64 << 20).to_le_bytes().to_vec()));
    let path = scratch.write("model.gguf", file.bytes());
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(257 << 20).unwrap(); // sparse
    let error = open_error(Checkpoint::open(&path));
    assert!(error.ends_with("; the limit of the header is 268435456 bytes"), "{error}");
}

#[test]
fn missing_keys_have_the_formats_defaults() {
    let checkpoint = Gguf::model("llama").without("llama.attention.head_count_kv").open();
    assert!(open_error(checkpoint).contains("attn_k.weight: shape [4, 8]; rows of 2 heads of 4"));
    let checkpoint = Gguf::model("qwen2").without("qwen2.attention.head_count_kv").open().unwrap();
    assert_eq!(checkpoint.config()["num_key_value_heads"], json!(HEADS));
    assert_eq!(checkpoint.config()["rope_theta"], json!(10_000.0));
}

#[test]
fn rope_scaling_translates_to_config() {
    let scaling = |fields: &[(&str, Field)]| {
        let file = fields.iter().fold(Gguf::model("qwen2"), |file, (key, field)| {
            file.with(&format!("qwen2.rope.{key}"), field.clone())
        });
        file.open().map(|checkpoint| checkpoint.config()["rope_scaling"].clone())
    };
    let kind = |kind: &str| ("scaling.type", Field::Text(kind.to_owned()));
    let factor = ("scaling.factor", Field::F32(4.0));
    assert_eq!(scaling(&[kind("none"), factor.clone()]).unwrap(), json!(null));
    let linear = json!({"rope_type": "linear", "factor": 4.0});
    assert_eq!(scaling(&[kind("linear"), factor.clone()]).unwrap(), linear);
    assert_eq!(scaling(&[("scale_linear", Field::F32(4.0))]).unwrap(), linear);
    assert_eq!(
        scaling(&[
            kind("yarn"),
            factor.clone(),
            ("scaling.original_context_length", Field::U32(16)),
            ("scaling.yarn_beta_fast", Field::F32(16.0)),
            ("scaling.attn_factor", Field::F32(0.5)),
        ])
        .unwrap(),
        json!({
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 16.0,
            "attention_factor": 0.5 * (0.1 * 4f64.ln() + 1.0),
        })
    );
    let error = scaling(&[kind("yarn")]).unwrap_err().to_string();
    assert!(error.contains("qwen2.rope.scaling.factor"), "{error}");
    let error = scaling(&[kind("longrope"), factor]).unwrap_err().to_string();
    assert!(error.contains("qwen2.rope.scaling.type is longrope; supported: none, linear, yarn"), "{error}");
}

#[test]
fn frequency_factors_move_from_tensor_to_config() {
    let mut file = Gguf::model("llama");
    file.f32_tensor("rope_freqs.weight", &[HEAD_DIM / 2], &[1.0, 8.1]);
    let checkpoint = file.open().unwrap();
    assert_eq!(checkpoint.config()["rope_frequency_factors"], json!([1.0, 8.1]));
    assert!(!checkpoint.has("rope_freqs.weight"));

    for (values, problem) in [
        (&[1.0f32, 0.0] as &[f32], "0; positive factors"),
        (&[1.0, f32::NAN], "NaN; positive factors"),
        (&[1.0; 3], "shape [3]; half of head_dim 4"),
    ] {
        let mut file = Gguf::model("llama");
        file.f32_tensor("rope_freqs.weight", &[values.len()], values);
        let error = open_error(file.open());
        assert!(error.contains("tensor rope_freqs.weight") && error.contains(problem), "{error}");
    }
}

/// The order in which a converter stores the rows of each head, for rotation of neighbouring pairs.
fn interleave<T: Copy>(rows: &[T], head_dim: usize) -> Vec<T> {
    let pairs = |head: &[T]| {
        let (first, second) = head.split_at(head_dim / 2);
        first.iter().zip(second).flat_map(|(&a, &b)| [a, b]).collect::<Vec<_>>()
    };
    rows.chunks_exact(head_dim).flat_map(pairs).collect()
}

#[test]
fn llama_queries_and_keys_have_the_hugging_face_layout() {
    let rows: Vec<[f32; HIDDEN]> =
        (0..8).map(|row| std::array::from_fn(|column| (10 * row + column) as f32)).collect();
    let bias: Vec<f32> = (0..8).map(|row| row as f32 / 4.0).collect();
    for (architecture, permuted) in [("llama", true), ("qwen2", false)] {
        let mut file = Gguf::model(architecture);
        file.tensors.retain(|(name, ..)| name != "blk.0.attn_q.weight");
        let stored = if permuted { interleave(&rows, HEAD_DIM) } else { rows.clone() };
        file.f32_tensor("blk.0.attn_q.weight", &[HIDDEN, 8], stored.as_flattened());
        let stored = if permuted { interleave(&bias, HEAD_DIM) } else { bias.clone() };
        file.f32_tensor("blk.0.attn_q.bias", &[8], &stored);

        let checkpoint = file.open().unwrap();
        assert_eq!(
            read(&checkpoint, "model.layers.0.self_attn.q_proj.weight"),
            rows.as_flattened(),
            "{architecture}"
        );
        assert_eq!(read(&checkpoint, "model.layers.0.self_attn.q_proj.bias"), bias, "{architecture}");
        let mut part = [0.0; 3 * HIDDEN];
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").unwrap().read_rows(3..6, &mut part);
        assert_eq!(part, rows[3..6].as_flattened(), "{architecture}");
    }
}

#[test]
fn tensors_have_hugging_face_names_and_shapes() {
    let mut file = Gguf::model("qwen3");
    file.f32_tensor("output.weight", &[HIDDEN, VOCABULARY], &[1.0; HIDDEN * VOCABULARY]);
    file.f32_tensor("blk.0.attn_q_norm.weight", &[HEAD_DIM], &[1.0; HEAD_DIM]);
    let checkpoint = file.open().unwrap();
    assert_eq!(checkpoint.tensor("model.embed_tokens.weight").unwrap().shape(), [VOCABULARY, HIDDEN]);
    assert_eq!(checkpoint.tensor("model.norm.weight").unwrap().rows(), 1);
    assert_eq!(checkpoint.config()["tie_word_embeddings"], json!(false));
    assert!(checkpoint.has("lm_head.weight") && checkpoint.has("model.layers.0.self_attn.q_norm.weight"));
    let missing = checkpoint.tensor("lm_head.bias").unwrap_err();
    assert!(matches!(missing, CheckpointError::MissingTensor { .. }), "{missing}");
}

#[test]
fn dtype_is_that_of_most_plain_matrices() {
    let mut file = Gguf::model("qwen2");
    file.tensor("large", &[64, 64], 30, vec![0; 64 * 64 * 2]);
    assert_eq!(file.open().unwrap().dtype(), Dtype::Bf16);
    file.tensor("larger", &[64, 128], 1, vec![0; 64 * 128 * 2]);
    assert_eq!(file.open().unwrap().dtype(), Dtype::F16);
    file.tensor("quantised", &[32, 1024], 8, vec![0; 1024 * 34]);
    file.f32_tensor("vector", &[1 << 16], &[0.0; 1 << 16]);
    assert_eq!(file.open().unwrap().dtype(), Dtype::F16);
    file.f32_tensor("largest", &[64, 256], &[0.0; 64 * 256]);
    assert_eq!(file.open().unwrap().dtype(), Dtype::F32);
}

#[test]
fn vocabulary_and_special_tokens_are_read() {
    let checkpoint = Gguf::model("llama")
        .with("tokenizer.ggml.pre", Field::Text("smollm".to_owned()))
        .with("tokenizer.ggml.scores", Field::F32s(vec![0.5; VOCABULARY]))
        .with("tokenizer.ggml.add_bos_token", Field::Bool(true))
        .with("tokenizer.ggml.unknown_token_id", Field::U32(2))
        .with("tokenizer.ggml.padding_token_id", Field::U32(u32::MAX))
        .open()
        .unwrap();
    let vocabulary = vocabulary(&checkpoint);
    assert_eq!((vocabulary.model.as_str(), vocabulary.pre.as_str()), ("gpt2", "smollm"));
    assert_eq!(vocabulary.tokens, ["<s>", "</s>", "a", "b", "ab", "<|im_end|>"]);
    assert_eq!(vocabulary.merges, ["a b"]);
    assert_eq!(vocabulary.scores, [0.5; VOCABULARY]);
    assert_eq!(vocabulary.types[1..3], [TokenType::Control, TokenType::Normal]);
    assert_eq!(
        (vocabulary.bos, vocabulary.eos, vocabulary.unk, vocabulary.pad),
        (Some(0), Some(1), Some(2), None)
    );
    assert_eq!(
        (vocabulary.add_bos, vocabulary.add_eos, vocabulary.add_space_prefix),
        (Some(true), None, None)
    );
    let special = checkpoint.text().special_tokens();
    assert_eq!(
        (special.bos.as_deref(), special.eos.as_deref(), special.pad.as_deref()),
        (Some("<s>"), Some("</s>"), None)
    );
}

#[test]
fn end_of_text_turn_and_message_end_generation() {
    let ends = |file: Gguf| file.open().unwrap().text().generation().eos_token_ids.clone();
    assert_eq!(ends(Gguf::model("llama")), [1, 5], "the end-of-turn token is found by its text");
    let named = Gguf::model("llama").with("tokenizer.ggml.eot_token_id", Field::U32(4));
    assert_eq!(ends(named.clone()), [1, 4, 5], "a named token does not replace those that are found");
    assert_eq!(ends(named.with("tokenizer.ggml.eom_token_id", Field::U32(3))), [1, 4, 3, 5]);
}

#[test]
fn every_known_text_ends_generation() {
    // The end tokens of a vocabulary with these texts, by their texts. The first one is that of end of text.
    let ends = |texts: &[&str]| -> Vec<String> {
        let tokens: Vec<String> = texts.iter().map(ToString::to_string).collect();
        let file = Gguf::empty()
            .with("general.architecture", Field::Text("none".to_owned()))
            .with("tokenizer.ggml.model", Field::Text("gpt2".to_owned()))
            .with("tokenizer.ggml.eos_token_id", Field::U32(0))
            .with("tokenizer.ggml.tokens", Field::Texts(tokens));
        let scratch = Scratch::new();
        let files = TextFiles::open(scratch.write("vocabulary.gguf", file.bytes())).unwrap();
        let ids = files.generation().eos_token_ids.iter();
        ids.map(|&id| texts[id as usize].to_owned()).collect()
    };
    for (vocabulary, expected) in [
        (&["<|im_end|>", "a", "<|im_start|>", "<|endoftext|>"][..], &["<|im_end|>", "<|endoftext|>"][..]),
        (&["<|endoftext|>", "<|im_end|>"], &["<|endoftext|>", "<|im_end|>"]),
        (
            &["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"],
            &["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
        ),
        (&["<|endoftext|>", "<|assistant|>", "<|end|>"], &["<|endoftext|>", "<|end|>"]),
        (&["<eos>", "<start_of_turn>", "<end_of_turn>"], &["<eos>", "<end_of_turn>"]),
        (&["own", "[EOT]", "[EOS]"], &["own", "[EOT]", "[EOS]"]),
        // Infilling: the padding, a repository, a file; of each the first.
        (
            &["own", "<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>"],
            &["own", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        ),
        // It separates channels.
        (&["<|return|>", "<|call|>", "<|end|>"], &["<|return|>", "<|call|>"]),
        (&["<|flush|>", "<|calls|>", "<|end|>"], &["<|flush|>", "<|calls|>"]),
        (&["<|return|>", "<|end|>"], &["<|return|>", "<|end|>"]),
        // It is a tag.
        (&["<eos>", "<|tool_response>", "</s>"], &["<eos>", "<|tool_response>"]),
        (&["<|plamo:eos|>", "</s>"], &["<|plamo:eos|>"]),
        (&["own", "</s>"], &["own", "</s>"]),
    ] {
        assert_eq!(ends(vocabulary), expected, "{vocabulary:?}");
    }
    assert_eq!(ends(&["</s>"; 100_000]).len(), 64, "each request compares its tokens with them");
    let infilling = |id| Gguf::model("llama").with("tokenizer.ggml.fim_sep_token_id", Field::U32(id));
    let ids = |file: Gguf| file.open().unwrap().text().generation().eos_token_ids.clone();
    assert_eq!(ids(infilling(2)), [1, 5, 2]);
    assert_eq!(ids(infilling(99)), [1, 5]);
}

#[test]
fn double_precision_tensors_are_rounded() {
    let mut file = Gguf::model("llama");
    file.tensors.retain(|(name, ..)| name != "output_norm.weight");
    let values = std::array::from_fn::<f64, HIDDEN, _>(|index| 0.1 * index as f64);
    file.tensor("output_norm.weight", &[HIDDEN], 28, values.map(f64::to_le_bytes).concat());
    assert_eq!(read(&file.open().unwrap(), "model.norm.weight"), values.map(|value| value as f32));
}

#[test]
fn sampling_defaults_and_chat_templates_are_read() {
    let checkpoint = Gguf::model("llama")
        .with("general.sampling.temp", Field::F32(0.7))
        .with("general.sampling.top_k", Field::I32(20))
        .with("tokenizer.chat_template.tool_use", Field::Text("tools".to_owned()))
        .with("tokenizer.chat_templates", Field::Texts(vec!["tool_use".to_owned()]))
        .open()
        .unwrap();
    assert_eq!(
        (checkpoint.text().generation().temperature, checkpoint.text().generation().top_k),
        (Some(0.7), Some(20))
    );
    let file = Gguf::model("llama").with("general.sampling.temp", Field::F32(-1.0));
    let (checkpoint_without, warnings) = warnings_of(|| file.open().unwrap());
    assert_eq!(checkpoint_without.text().generation().temperature, None);
    assert!(warnings[0].contains("model.gguf: temperature=-1 is not allowed"), "{warnings:?}");
    assert_eq!(checkpoint.text().chat_template(), Some("{{ messages }}"));
    assert_eq!(checkpoint.text().chat_templates().keys().collect::<Vec<_>>(), ["default", "tool_use"]);
}

#[test]
fn file_without_vocabulary_opens_without_tokenizer() {
    let checkpoint = Gguf::model("llama").without("tokenizer.ggml.tokens").open().unwrap();
    assert!(checkpoint.text().generation().eos_token_ids.is_empty());
    let error = checkpoint.text().tokenizer().unwrap_err().to_string();
    assert!(error.contains("tokenizer.ggml.tokens"), "{error}");
}

#[test]
fn version_2_and_other_alignments_are_read() {
    let mut file = Gguf::model("qwen2");
    file.version = 2;
    file.alignment = 64;
    file.set("general.alignment", Field::U32(64));
    let checkpoint = file.open().unwrap();
    assert_eq!(checkpoint.description().format, FileFormat::Gguf(2));
    assert_eq!(read(&checkpoint, "model.norm.weight"), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
}

#[test]
fn directory_with_one_gguf_file_opens_it() {
    let scratch = Scratch::new();
    scratch.write("model-q8.gguf", Gguf::model("llama").bytes());
    assert_eq!(scratch.open().unwrap().description().format, FileFormat::Gguf(3));
    scratch.write("model-q4.gguf", Gguf::model("llama").bytes());
    let error = open_error(scratch.open());
    assert!(
        error.contains("several .gguf files") && error.contains("model-q4.gguf, model-q8.gguf"),
        "{error}"
    );
}

#[test]
fn unsupported_features_are_rejected_by_name() {
    let with = |key: &str, field: Field| Gguf::model("llama").with(key, field);
    let mut iq3_s = Gguf::model("llama");
    iq3_s.tensor("blk.0.extra.weight", &[256], 21, vec![0; 110]);
    let mut version_one = Gguf::model("llama");
    version_one.version = 1;
    let mut big_endian = Gguf::model("llama");
    big_endian.version = 3u32.swap_bytes();
    for (file, expected) in [
        (Gguf::model("phi3"), "general.architecture is phi3; supported: llama, qwen2, qwen3"),
        (iq3_s, "tensor blk.0.extra.weight is IQ3_S; supported: F32, F16, BF16, Q4_0"),
        (version_one, "version is 1; supported: 2 and 3"),
        (big_endian, "version is big-endian; supported: 2 and 3, little-endian"),
        (with("llama.expert_count", Field::U32(8)), "llama.expert_count is 8; supported: 0"),
        (with("llama.rope.dimension_count", Field::U32(2)), "llama.rope.dimension_count is 2; supported: 4"),
        (
            with("llama.attention.value_length", Field::U32(8)),
            "llama.attention.value_length is 8; supported: 4",
        ),
        (
            with("llama.attention.causal", Field::Bool(false)),
            "llama.attention.causal is false; supported: true",
        ),
        (with("split.count", Field::I32(3)), "split.count is 3: the file is one part of a split model"),
    ] {
        let error = open_error(file.open());
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
    }
}

#[test]
fn malformed_file_errors_name_field_value_and_limit() {
    let with = |key: &str, field: Field| Gguf::model("llama").with(key, field);
    let tensor = |dimensions: &[u64], ggml_type: u32| {
        let mut file = Gguf::model("llama");
        file.tensors.push(("t".to_owned(), dimensions.to_vec(), ggml_type, vec![0; 4]));
        file
    };
    let array = |kind: u32, count: u64| {
        let bytes = [kind.to_le_bytes().as_slice(), &count.to_le_bytes()].concat();
        with("odd", Field::Raw(9, bytes))
    };
    let mut duplicate_key = Gguf::model("llama");
    duplicate_key.fields.push(duplicate_key.fields[0].clone());
    let mut duplicate_tensor = Gguf::model("llama");
    duplicate_tensor.tensors.push(duplicate_tensor.tensors[0].clone());
    let mut both_spellings = Gguf::model("llama");
    both_spellings.f32_tensor("model.norm.weight", &[1], &[0.0]);
    let mut no_embedding = Gguf::model("llama");
    no_embedding.tensors.retain(|(name, ..)| name != "token_embd.weight");

    for (file, expected) in [
        (Gguf::model("llama").without("general.architecture"), "general.architecture: missing"),
        (Gguf::model("llama").without("llama.block_count"), "llama.block_count: missing"),
        (with("llama.block_count", Field::U32(4_000_000)), "4000000; the file has 11 tensors"),
        (
            with("llama.block_count", Field::I32(-1)),
            "llama.block_count: -1; a non-negative integer is expected",
        ),
        (with("llama.attention.head_count", Field::U32(0)), "llama.attention.head_count: 0; 1 to"),
        (
            with("llama.attention.head_count", Field::U32(3)),
            "embedding_length 8 is not a multiple of 3 heads",
        ),
        (
            with("llama.attention.head_count_kv", Field::I32s(vec![1])),
            "an array of 1; a non-negative integer",
        ),
        (with("llama.embedding_length", Field::U64(1 << 40)), "llama.embedding_length: 1099511627776; 1 to"),
        (with("llama.attention.key_length", Field::U32(7)), "heads of 7 dimensions"),
        (with("llama.attention.layer_norm_rms_epsilon", Field::F32(f32::NAN)), "NaN; a finite number"),
        (with("llama.vocab_size", Field::U32(7)), "llama.vocab_size: 7; the embedding has 6 rows"),
        (no_embedding, "tensor token_embd.weight: missing"),
        (with("general.alignment", Field::U32(0)), "general.alignment: 0; a power of two"),
        (with("general.alignment", Field::U32(24)), "general.alignment: 24; a power of two"),
        (with("general.alignment", Field::U32(1 << 31)), "general.alignment: 2147483648; a power of two"),
        (with("general.alignment", Field::U32(128)), "is not a multiple of the alignment 128"),
        (with("tokenizer.ggml.eos_token_id", Field::U32(6)), "eos_token_id: 6; there are 6 tokens"),
        (with("tokenizer.ggml.scores", Field::F32s(vec![0.0])), "scores: an array of 1; there are 6 tokens"),
        (with("tokenizer.ggml.token_type", Field::I32s(vec![1, 1, 1, 9, 1, 1])), "9 of token 3; 1 to 6"),
        (
            with("tokenizer.ggml.merges", Field::I32s(vec![1])),
            "an array of 1; an array of strings is expected",
        ),
        (with("odd", Field::Raw(7, vec![2])), "odd: not a boolean"),
        (with("odd", Field::Raw(13, vec![])), "odd: unknown value type 13"),
        (array(4, u64::MAX), "odd: an array of 18446744073709551615 values of 4 bytes"),
        (array(0, 1 << 50), "odd: needs 1125899906842624 bytes"),
        (array(9, 1), "odd: an array of value type 9"),
        (duplicate_key, "general.architecture: the key occurs twice"),
        (duplicate_tensor, "tensor token_embd.weight: two tensors have this name"),
        (both_spellings, "contains this tensor under ggml's and under Hugging Face's name"),
        (tensor(&[0, 4], 0), "tensor t: shape [0, 4] of F32 has no valid size"),
        (tensor(&[1 << 33, 1 << 33], 0), "has no valid size"),
        (tensor(&[1 << 61, 4], 0), "has no valid size"),
        (tensor(&[33], 8), "tensor t: rows of 33 elements; the block size of Q8_0 is 32"),
        (tensor(&[1, 1, 1, 1, 1], 0), "tensor t: 5 dimensions; 1 to 4"),
        (tensor(&[], 0), "tensor t: 0 dimensions; 1 to 4"),
        (tensor(&[1 << 20], 0), "tensor t: 4194304 bytes at"),
    ] {
        let error = open_error(file.open());
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
        assert!(error.contains("model.gguf"), "{error}");
    }
}

#[test]
fn overlapping_and_out_of_range_tensors_are_rejected() {
    let file = Gguf::model("llama");
    let bytes = file.bytes();
    let name = b"output_norm.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    let offset_at = at + name.len() + 4 + 8 + 4;
    for (offset, expected) in [
        (32u64, "overlap"),
        (u64::MAX - 31, "tensor output_norm.weight: 32 bytes at"),
        (1 << 40, "tensor output_norm.weight: 32 bytes at"),
        (33, "offset 33 is not a multiple of the alignment 32"),
    ] {
        let mut bytes = bytes.clone();
        bytes[offset_at..offset_at + 8].copy_from_slice(&offset.to_le_bytes());
        let scratch = Scratch::new();
        let error = open_error(Checkpoint::open(scratch.write("model.gguf", bytes)));
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
    }
}

#[test]
fn invalid_utf8_error_names_the_index() {
    let mut bytes = Gguf::model("llama").bytes();
    let at = bytes.windows(4).position(|window| window == b"</s>").unwrap();
    bytes[at] = 0xff;
    let scratch = Scratch::new();
    let error = open_error(Checkpoint::open(scratch.write("model.gguf", bytes)));
    assert!(error.contains("tokenizer.ggml.tokens: string 1: invalid utf-8"), "{error}");
}

#[test]
fn files_of_other_formats_are_rejected() {
    let scratch = Scratch::new();
    let error = open_error(Checkpoint::open(scratch.write("model.gguf", "not a model")));
    assert!(error.contains("not a GGUF file: it does not start with GGUF"), "{error}");
    let error = open_error(Checkpoint::open(scratch.write("model.safetensors", "{}")));
    assert!(error.contains("open the directory that contains it"), "{error}");
    let error = open_error(Checkpoint::open(scratch.path().join("nowhere.gguf")));
    assert!(error.contains("nowhere.gguf"), "{error}");
}
