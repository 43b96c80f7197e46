//! Hugging Face directories: contents of each file, precedence between files, and errors.

use penstock_checkpoint::{
    AddedToken, Checkpoint, CheckpointError, FileFormat, GenerationConfig, TokenizerSource,
};
use penstock_types::Dtype;
use serde_json::json;

use crate::common::{Scratch, Tensors, f32_bytes, open_error, read, safetensors, warnings_of};

const CONFIG: &str = r#"{"model_type": "llama", "eos_token_id": 2, "bos_token_id": 1}"#;

/// Two tensors, `a` of 2x2 and `b` of 3, counting from 1.
fn two_tensors() -> Vec<u8> {
    safetensors(
        r#"{"__metadata__":{"format":"pt"},
            "a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},
            "b":{"dtype":"F32","shape":[3],"data_offsets":[16,28]}}  "#,
        &f32_bytes(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]),
    )
}

fn model() -> Scratch {
    let scratch = Scratch::new();
    scratch.write("config.json", CONFIG);
    scratch.write("model.safetensors", two_tensors());
    scratch
}

fn one_tensor(name: &str, value: f32) -> Vec<u8> {
    let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
    safetensors(&header, &value.to_le_bytes())
}

fn sharded(index: &str) -> Scratch {
    let scratch = Scratch::new();
    scratch.write("config.json", CONFIG);
    scratch.write("model.safetensors.index.json", index);
    scratch.write("one.safetensors", one_tensor("a", 1.0));
    scratch.write("two.safetensors", one_tensor("b", 2.0));
    scratch
}

#[test]
fn single_weight_file_is_read() {
    let checkpoint = model().open().unwrap();
    assert_eq!(checkpoint.config()["model_type"], json!("llama"));
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(checkpoint.tensor("a").unwrap().shape(), [2, 2]);
    assert_eq!(read(&checkpoint, "a"), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(read(&checkpoint, "b"), [5.0, 6.0, 7.0]);
    let description = checkpoint.description();
    assert_eq!(
        (description.format, description.tensors, description.bytes),
        (FileFormat::Safetensors, 2, 28)
    );
}

#[test]
fn half_precision_weights_convert_and_set_the_dtype() {
    for (dtype, expected, bytes) in
        [("F16", Dtype::F16, [0x00, 0x3c, 0x00, 0xc0]), ("BF16", Dtype::Bf16, [0x80, 0x3f, 0x00, 0xc0])]
    {
        let scratch = Scratch::new();
        scratch.write("config.json", "{}");
        let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":[1,2],"data_offsets":[0,4]}}}}"#);
        scratch.write("model.safetensors", safetensors(&header, &bytes));
        let checkpoint = scratch.open().unwrap();
        assert_eq!((checkpoint.dtype(), read(&checkpoint, "w")), (expected, vec![1.0, -2.0]));
    }
}

#[test]
fn unsupported_tensor_types_are_listed_but_not_read() {
    let scratch = model();
    let header = r#"{"ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},
        "none":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]}}"#;
    scratch.write("model.safetensors", safetensors(header, &[0; 8]));
    let checkpoint = scratch.open().unwrap();
    let error = checkpoint.tensor("ids").unwrap_err().to_string();
    assert!(error.contains("model.safetensors: ids is I64; supported: F32"), "{error}");
    assert!(read(&checkpoint, "none").is_empty());
}

#[test]
fn shards_are_read_from_the_index() {
    let scratch = sharded(
        r#"{"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#,
    );
    let checkpoint = scratch.open().unwrap();
    assert_eq!((read(&checkpoint, "a"), read(&checkpoint, "b")), (vec![1.0], vec![2.0]));
    assert_eq!(checkpoint.description().files.len(), 2);
}

#[test]
fn tensors_that_only_the_shards_list_are_read() {
    let scratch = sharded(r#"{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#);
    let mut tensors = Tensors::default();
    for (name, value) in [("a", 3.0), ("c", 4.0), ("b", 2.0)] {
        tensors.add(name, "F32", &[1], f32_bytes(&[value]));
    }
    scratch.write("two.safetensors", tensors.bytes());
    scratch.write("three.safetensors", one_tensor("d", 5.0));
    let checkpoint = scratch.open().unwrap();
    let values: Vec<_> = ["a", "b", "c"].map(|name| read(&checkpoint, name)).concat();
    assert_eq!(values, [1.0, 2.0, 4.0], "the index decides between two tensors of the same name");
    assert!(!checkpoint.has("d"), "the index lists no tensor of this shard");
}

#[test]
fn index_inconsistent_with_shards_is_rejected() {
    for (map, expected) in [
        (r#"{"a":"three.safetensors"}"#, "index.json: weight_map, shard three.safetensors: missing"),
        (
            r#"{"c":"one.safetensors"}"#,
            "weight_map, c: the shard one.safetensors does not contain this tensor",
        ),
        (r#"{"a":"../one.safetensors"}"#, "shard ../one.safetensors: is outside the model's directory"),
        (r#"{"a":"/etc/hostname"}"#, "shard /etc/hostname: is outside the model's directory"),
        (r#"{"a":"x/../../one.safetensors"}"#, "is outside the model's directory"),
        (r#"{"a":""}"#, "is outside the model's directory"),
        (r#"{"a":1}"#, "index: invalid type"),
    ] {
        let error = open_error(sharded(&format!(r#"{{"weight_map":{map}}}"#)).open());
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
    }
}

#[test]
fn headers_of_all_shards_have_one_limit() {
    // One file under several names, with a header that is padded.
    let scratch = Scratch::new();
    scratch.write("config.json", CONFIG);
    let header =
        format!("{}{}", r#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#, " ".repeat(33_999_946));
    scratch.write("s/m", safetensors(&header, &[]));
    let index = |count: usize| {
        let names: Vec<String> =
            (1..=count).map(|index| format!(r#""a{index}":"s{}m""#, "/".repeat(index))).collect();
        format!(r#"{{"weight_map":{{{}}}}}"#, names.join(","))
    };
    for (count, expected) in [
        (2, "weight_map, a1: the shard s/m does not contain this tensor"),
        (
            3,
            "header length: 102000000 bytes with the files before; the limit is 100000000 for all files of a model",
        ),
        (4097, "weight_map: 4097 shards; the limit is 4096"),
    ] {
        scratch.write("model.safetensors.index.json", index(count));
        let error = open_error(scratch.open());
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
    }
}

#[test]
fn description_of_a_converted_model_has_a_limit() {
    let scratch = Scratch::new();
    scratch.write("weights.safetensors", "{}");
    let graph = std::fs::File::create(scratch.path().join("model.penstock")).unwrap();
    graph.set_len((272 << 20) + 1).unwrap(); // sparse
    let error = open_error(scratch.open());
    assert!(error.ends_with("model.penstock: size: 285212673 bytes; the limit is 285212672"), "{error}");
}

#[cfg(unix)]
#[test]
fn symbolic_links_in_the_directory_are_followed() {
    let elsewhere = model();
    let scratch = Scratch::new();
    for name in ["config.json", "model.safetensors"] {
        std::os::unix::fs::symlink(elsewhere.path().join(name), scratch.path().join(name)).unwrap();
    }
    assert!(scratch.open().unwrap().has("a"));
}

#[test]
fn missing_weights_error_lists_other_files() {
    let cases: [(&[&str], &str); 5] = [
        (&[], "contains neither a config.json nor a .gguf file"),
        (&["config.json"], "contains neither model.safetensors nor model.safetensors.index.json"),
        (&["config.json", "pytorch_model.bin"], "only pytorch_model.bin: pickled weights can execute code"),
        (&["config.json", "model.gguf"], "open the file: model.gguf"),
        (&["config.json", "consolidated.safetensors"], "only consolidated.safetensors"),
    ];
    for (files, expected) in cases {
        let scratch = Scratch::new();
        files.iter().for_each(|name| drop(scratch.write(name, "{}")));
        let error = open_error(scratch.open());
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
    }
}

#[test]
fn generation_config_takes_precedence_over_config() {
    let scratch = model();
    let plain =
        GenerationConfig { eos_token_ids: vec![2], bos_token_id: Some(1), ..GenerationConfig::default() };
    assert_eq!(*scratch.open().unwrap().text().generation(), plain);
    let file = r#"{"eos_token_id":[7,8],"pad_token_id":-1,"do_sample":true,
        "temperature":0.6,"top_k":20,"top_p":0.95,"min_p":null}"#;
    scratch.write("generation_config.json", file);
    let expected = GenerationConfig {
        eos_token_ids: vec![7, 8],
        bos_token_id: Some(1),
        do_sample: Some(true),
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        ..GenerationConfig::default()
    };
    assert_eq!(*scratch.open().unwrap().text().generation(), expected);
}

#[test]
fn unfitting_values_of_generation_config_are_ignored() {
    for (field, value, expected) in [
        ("eos_token_id", r#""two""#, "\"two\"; a token id or a list of token ids is expected"),
        ("eos_token_id", "4294967296", "4294967296; a token id"),
        ("bos_token_id", "1.5", "1.5; a token id"),
        ("temperature", "1e300", "1e+300; a number within the range of 32 bits"),
        ("temperature", "NaN", "\"NaN\"; a number within the range of 32 bits"),
        ("top_k", "-5", "-5; a non-negative integer"),
        ("do_sample", "1", "1; true or false"),
        ("max_new_tokens", "Infinity", "\"Infinity\"; a non-negative integer"),
        ("temperature", "-0.5", "-0.5 is not allowed: it must be finite and at least 0"),
        ("top_p", "0", "0 is not allowed: it must be above 0 and at most 1"),
        ("typical_p", "1.5", "1.5 is not allowed: it must be above 0 and at most 1"),
        ("epsilon_cutoff", "1", "1 is not allowed: it must be at least 0 and below 1"),
        ("repetition_penalty", "0.0", "0 is not allowed: it must be finite and above 0"),
        ("no_repeat_ngram_size", "2000", "2000 is not allowed: it must be at most 1024"),
        ("max_new_tokens", "0", "0 is not allowed: it must be at least 1"),
        ("max_length", "0", "0 is not allowed: it must be at least 1"),
    ] {
        let scratch = model();
        scratch.write("generation_config.json", format!(r#"{{"{field}":{value},"min_p":0.5}}"#));
        let (checkpoint, warnings) = warnings_of(|| scratch.open().unwrap());
        let defaults = GenerationConfig {
            eos_token_ids: vec![2],
            bos_token_id: Some(1),
            min_p: Some(0.5),
            ..GenerationConfig::default()
        };
        assert_eq!(*checkpoint.text().generation(), defaults, "{field}");
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        let separator = if expected.contains("is not allowed") { "=" } else { ": " };
        let expected = format!("generation_config.json: {field}{separator}{expected}");
        assert!(warning.contains(&expected) && warning.ends_with("; the value is ignored"), "{warning}");
    }
}

#[test]
fn end_of_text_of_the_tokenizer_is_an_end_token() {
    let ends = |scratch: &Scratch| scratch.open().unwrap().text().generation().eos_token_ids.clone();
    let scratch = model();
    scratch.write("tokenizer_config.json", r#"{"eos_token":"<|im_end|>"}"#);
    assert_eq!(ends(&scratch), [2], "the token is in no file");
    scratch.write("tokenizer.json", r#"{"added_tokens":[{"id":7,"content":"<|im_end|>","special":true}]}"#);
    assert_eq!(ends(&scratch), [2, 7]);
    let config =
        r#"{"eos_token":{"content":"<|im_end|>"},"added_tokens_decoder":{"9":{"content":"<|im_end|>"}}}"#;
    scratch.write("tokenizer_config.json", config);
    assert_eq!(ends(&scratch), [2, 9]);
    scratch.write("generation_config.json", r#"{"temperature":0.5}"#);
    assert_eq!(ends(&scratch), [2, 9], "the file has no end tokens");
    scratch.write("config.json", "{}");
    assert_eq!(ends(&scratch), [9]);
    scratch.write("config.json", r#"{"eos_token_id":9}"#);
    assert_eq!(ends(&scratch), [9]);
    scratch.write("generation_config.json", r#"{"eos_token_id":3}"#);
    assert_eq!(ends(&scratch), [3]);
    scratch.write("generation_config.json", "{}");
    scratch.write("tokenizer_config.json", r#"{"eos_token":"<|im_end|>"}"#);
    scratch.write("tokenizer.json", r#"{"model":{"vocab":{"<|im_end|>":5}}}"#);
    assert_eq!(ends(&scratch), [9, 5]);
    scratch.write("tokenizer.json", r#"{"model":{"vocab":[["a",0.0],["<|im_end|>",-1.5]]}}"#);
    assert_eq!(ends(&scratch), [9, 1]);
    scratch.write("tokenizer.json", "not JSON");
    assert_eq!(ends(&scratch), [9]);
}

#[test]
fn non_finite_numbers_of_python_are_accepted_in_unused_fields() {
    let scratch = model();
    let config = r#"{"model_type": "llama", "a\\\"": [NaN, {"b": Infinity}],
        "limit": -Infinity, "text": "NaN \\\" NaN"}"#;
    scratch.write("config.json", config);
    let checkpoint = scratch.open().unwrap();
    assert_eq!(checkpoint.config()["limit"], json!("-Infinity"));
    assert_eq!(checkpoint.config()["a\\\""], json!(["NaN", {"b": "Infinity"}]));
    assert_eq!(checkpoint.config()["text"], json!("NaN \\\" NaN"));
    for text in
        ["{\"a\": NaNNaN}", "{\"a\": -NaN}", "{NaN: 1}}", "{\"a\": Inf}", "{\"a\": [NaN}", "{\"a\": NaN \"\\"]
    {
        scratch.write("config.json", text);
        assert!(open_error(scratch.open()).contains("config.json: JSON object: "), "{text}");
    }
}

#[test]
fn tensors_of_a_model_without_head_have_the_usual_names() {
    let names = [
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("normal.weight", "normal.weight"),
    ];
    let scratch = Scratch::new();
    scratch.write("config.json", "{}");
    let mut tensors = Tensors::default();
    for (number, (stored, _)) in names.iter().enumerate() {
        tensors.add(stored, "F32", &[1], f32_bytes(&[number as f32]));
    }
    scratch.write("model.safetensors", tensors.bytes());
    let checkpoint = scratch.open().unwrap();
    for (number, (_, name)) in names.iter().enumerate() {
        assert_eq!(read(&checkpoint, name), [number as f32], "{name}");
    }
    assert_eq!(checkpoint.description().tensors, names.len());
    tensors.add("model.norm.weight", "F32", &[1], f32_bytes(&[9.0]));
    scratch.write("model.safetensors", tensors.bytes());
    assert_eq!(
        read(&scratch.open().unwrap(), "model.norm.weight"),
        [9.0],
        "the complete name takes precedence"
    );
}

#[test]
fn quantised_matrices_of_a_model_without_head_have_its_names() {
    let mut tensors = Tensors::default();
    tensors.add("layers.0.mlp.up_proj.weight", "I8", &[8, 32], vec![1; 256]);
    tensors.add("layers.0.mlp.up_proj.weight_scale", "F32", &[8, 1], f32_bytes(&[0.5; 8]));
    let settings =
        r#"{"quant_method":"compressed-tensors","config_groups":{"g":{"weights":{"strategy":"channel"}}}}"#;
    let checkpoint = tensors.directory(settings).open().unwrap();
    assert_eq!(read(&checkpoint, "model.layers.0.mlp.up_proj.weight"), [0.5; 256]);
}

#[test]
fn double_precision_weights_are_rounded() {
    let scratch = Scratch::new();
    scratch.write("config.json", "{}");
    let doubles = |values: &[f64]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut tensors = Tensors::default();
    tensors.add("norm", "F64", &[3], doubles(&[1.5, 0.1, -1e300]));
    tensors.add("matrix", "F64", &[2, 1], doubles(&[2.0, 3.0]));
    scratch.write("model.safetensors", tensors.bytes());
    let checkpoint = scratch.open().unwrap();
    assert_eq!(read(&checkpoint, "norm"), [1.5, 0.1, f32::NEG_INFINITY]);
    assert_eq!(read(&checkpoint, "matrix"), [2.0, 3.0]);
    assert_eq!(checkpoint.dtype(), Dtype::F32);
}

#[test]
fn fields_of_the_wrong_type_are_rejected_by_name() {
    for (name, text, expected) in [
        ("config.json", r#"{"eos_token_id":"two"}"#, "eos_token_id: \"two\"; a token id or a list"),
        ("config.json", r#"{"eos_token_id":4294967296}"#, "eos_token_id: 4294967296; a token id"),
        ("config.json", r#"{"eos_token_id":Infinity}"#, "eos_token_id: \"Infinity\"; a token id"),
        ("config.json", r#"{"bos_token_id":[NaN]}"#, "bos_token_id: a list; a token id or a list"),
        ("tokenizer_config.json", r#"{"bos_token":[]}"#, "bos_token: a list; a token, as a string or"),
        (
            "tokenizer_config.json",
            r#"{"chat_template":[{"name":"x"}]}"#,
            "chat_template: a list; a string, or a list",
        ),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder":{"x":{}}}"#,
            "decoder.x: the key is not a token id",
        ),
        ("tokenizer_config.json", r#"{"added_tokens_decoder":{"1":{}}}"#, "decoder.1: has no content"),
        ("config.json", "[]", "config.json: JSON object: invalid type"),
        ("config.json", "{", "config.json: JSON object: EOF"),
        ("chat_template.jinja", "", ""),
    ] {
        let scratch = model();
        scratch.write(name, text);
        match scratch.open() {
            Ok(_) => assert!(expected.is_empty(), "{name} opened: {text}"),
            Err(error) => assert!(error.to_string().contains(expected), "{error}\nexpected: {expected}"),
        }
    }
}

#[test]
fn chat_templates_are_a_string_a_list_or_a_file() {
    let scratch = model();
    assert_eq!(scratch.open().unwrap().text().chat_template(), None);
    scratch.write("tokenizer_config.json", r#"{"chat_template":"plain"}"#);
    assert_eq!(scratch.open().unwrap().text().chat_template(), Some("plain"));
    let list = r#"{"chat_template":[{"name":"default","template":"listed"},{"name":"tool_use","template":"tools"}]}"#;
    scratch.write("tokenizer_config.json", list);
    assert_eq!(scratch.open().unwrap().text().chat_template(), Some("listed"));
    scratch.write("chat_template.jinja", "from the file");
    let checkpoint = scratch.open().unwrap();
    assert_eq!(checkpoint.text().chat_template(), Some("from the file"));
    assert_eq!(checkpoint.text().chat_templates()["tool_use"], "tools");
    scratch.write("tokenizer_config.json", r#"{"chat_template":{"default":"in an object","rag":"cite"}}"#);
    let checkpoint = scratch.open().unwrap();
    assert_eq!(checkpoint.text().chat_template(), Some("from the file"));
    assert_eq!(checkpoint.text().chat_templates()["rag"], "cite");
}

#[test]
fn additional_chat_templates_take_precedence() {
    let scratch = model();
    scratch.write("chat_template.json", r#"{"chat_template":"older"}"#);
    assert_eq!(scratch.open().unwrap().text().chat_template(), Some("older"));
    let list = r#"{"chat_template":[{"name":"default","template":"listed"},{"name":"tool_use","template":"listed"}]}"#;
    scratch.write("tokenizer_config.json", list);
    scratch.write("additional_chat_templates/tool_use.jinja", "tools");
    scratch.write("additional_chat_templates/rag.jinja", "cite");
    scratch.write("additional_chat_templates/README.md", "no template");
    let checkpoint = scratch.open().unwrap();
    let templates =
        checkpoint.text().chat_templates().iter().map(|(name, text)| (name.as_str(), text.as_str()));
    let expected = [("default", "listed"), ("rag", "cite"), ("tool_use", "tools")];
    assert_eq!(templates.collect::<Vec<_>>(), expected);
    for number in 0..63 {
        scratch.write(&format!("additional_chat_templates/{number}.jinja"), "too many");
    }
    let error = scratch.open().unwrap_err().to_string();
    assert!(error.contains("65 chat templates; the limit is 64"), "{error}");
}

#[test]
fn special_tokens_are_strings_or_objects_of_either_file() {
    let scratch = model();
    scratch.write(
        "tokenizer_config.json",
        r#"{"bos_token":{"content":"<s>"},"eos_token":"</s>","pad_token":null}"#,
    );
    scratch.write("special_tokens_map.json", r#"{"eos_token":"ignored","pad_token":{"content":"<pad>"}}"#);
    let checkpoint = scratch.open().unwrap();
    let tokens = checkpoint.text().special_tokens();
    assert_eq!((tokens.bos.as_deref(), tokens.eos.as_deref()), (Some("<s>"), Some("</s>")));
    assert_eq!((tokens.unk.as_deref(), tokens.pad.as_deref()), (None, Some("<pad>")));
}

#[test]
fn added_tokens_are_ordered_by_id() {
    let scratch = model();
    let config = r#"{"added_tokens_decoder":
        {"9":{"content":"<x>","special":true,"lstrip":true},"10":{"content":"<y>"}}}"#;
    scratch.write("tokenizer_config.json", config);
    scratch.write("added_tokens.json", r#"{"<old>":3,"<x>":9}"#);
    let checkpoint = scratch.open().unwrap();
    let token = |id, content: &str, special, lstrip| AddedToken {
        id,
        content: content.to_owned(),
        special,
        lstrip,
        rstrip: false,
        single_word: false,
        normalized: !special,
    };
    let expected =
        [token(3, "<old>", false, false), token(9, "<x>", true, true), token(10, "<y>", false, false)];
    assert_eq!(checkpoint.text().added_tokens(), expected);
}

#[test]
fn tokenizer_json_is_returned_unparsed() {
    let scratch = model();
    let error = scratch.open().unwrap().text().tokenizer().unwrap_err();
    assert!(
        matches!(&error, CheckpointError::NotAModel { .. }) && error.to_string().contains("tokenizer.json")
    );
    scratch.write("tokenizer.json", "anything");
    match scratch.open().unwrap().text().tokenizer().unwrap() {
        TokenizerSource::Json(bytes) => assert_eq!(bytes, b"anything"),
        TokenizerSource::Gguf(_) => panic!("there is no GGUF file"),
    }
}

#[test]
fn oversized_and_deeply_nested_files_are_rejected() {
    let scratch = model();
    scratch.write("config.json", "[".repeat(100_000));
    assert!(open_error(scratch.open()).contains("config.json: JSON object"));
    scratch.write("config.json", format!(r#"{{"a":{}"#, "[".repeat(100_000)));
    assert!(open_error(scratch.open()).contains("recursion limit"));
    scratch.write("config.json", &CONFIG[..20]);
    assert!(open_error(scratch.open()).contains("the file is truncated"));
    scratch.write("config.json", format!("{{}}{}", " ".repeat(5 << 20)));
    assert!(open_error(scratch.open()).contains("size: 5242882 bytes; the limit is 4194304"));
    scratch.write("config.json", CONFIG);
    std::fs::create_dir(scratch.path().join("tokenizer.json")).unwrap();
    assert!(open_error(scratch.open()).contains("tokenizer.json: is not a regular file"));
}

#[test]
fn git_lfs_pointer_error_names_the_file_and_the_remedy() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n";
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let scratch = model();
        scratch.write(name, pointer);
        let error = open_error(scratch.open());
        assert!(error.contains(&format!("{name}: is a git-lfs pointer")), "{error}");
        assert!(error.contains("`git lfs pull`"), "{error}");
    }
    let scratch = Scratch::new();
    let error = open_error(Checkpoint::open(scratch.write("model.gguf", pointer)));
    assert!(error.contains("model.gguf: is a git-lfs pointer"), "{error}");
}

#[test]
fn safetensors_errors_name_tensor_value_and_limit() {
    let entry = |dtype: &str, shape: &str, start: u64, end: u64| {
        format!(r#""t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    };
    let file =
        |entries: &[String], data: usize| safetensors(&format!("{{{}}}", entries.join(",")), &vec![0; data]);
    let good = entry("F32", "[2]", 0, 8);
    let other = good.replace("\"t\"", "\"u\"");
    for (bytes, expected) in [
        (vec![0; 3], "header length: needs 8 bytes; the file has 3; the file is truncated"),
        (
            u64::MAX.to_le_bytes().to_vec(),
            "header length: 18446744073709551615 bytes; the limit is 100000000",
        ),
        (
            [100u64.to_le_bytes().as_slice(), b"{}"].concat(),
            "header length: 100 bytes; the file has 2; the file is truncated",
        ),
        (safetensors("{]", &[]), "header: key must be a string"),
        (safetensors("\u{1}", &[]), "header: expected value"),
        (file(std::slice::from_ref(&good), 9), "data: 9 bytes; the tensors cover 8"),
        (
            file(&[entry("F32", "[2]", 0, 12)], 12),
            "tensor t: shape [2] of F32 needs 8 bytes; data_offsets specify 12",
        ),
        (
            file(&[entry("F32", "[2]", 0, 8)], 4),
            "tensor t: data_offsets 0..8; the data has 4 bytes; the file is truncated",
        ),
        (file(&[entry("F32", "[2]", 8, 0)], 8), "tensor t: data_offsets 8..0"),
        (
            file(&[entry("F32", "[2]", 4, 12)], 12),
            "tensor t: starts at byte 4 of the data; the previous tensors end at 0",
        ),
        (file(&[good.clone(), other], 8), "starts at byte 0 of the data; the previous tensors end at 8"),
        (file(&[good.clone(), good.clone()], 8), "two tensors have the name t"),
        (file(&[entry("F32", "[4294967296,4294967296,0]", 0, 0)], 0), "has no valid size"),
        (file(&[entry("F64", "[4611686018427387904]", 0, 0)], 0), "has no valid size"),
        (file(&[entry("F4", "[1]", 0, 0)], 0), "has no valid size"),
        (file(&[entry("F7", "[1]", 0, 1)], 1), "tensor t: unknown dtype F7"),
        (file(&[entry("F32", "[1,1,1,1,1,1,1,1,1]", 0, 4)], 4), "at most 8 dimensions"),
        (file(&[entry("F32", "[-1]", 0, 4)], 4), "header: invalid value: integer `-1`"),
    ] {
        let scratch = model();
        scratch.write("model.safetensors", bytes);
        let error = open_error(scratch.open());
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
        assert!(error.contains("model.safetensors"), "{error}");
    }
}

#[test]
fn pooling_of_modules_json_is_read() {
    let scratch = model();
    scratch.write(
        "modules.json",
        r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#,
    );
    let embedding = || scratch.open().unwrap().text().embedding().clone();
    assert_eq!((embedding().pooling, embedding().normalize), (None, Some(false)));
    std::fs::create_dir(scratch.path().join("1_Pooling")).unwrap();
    scratch.write("1_Pooling/config.json", r#"{"pooling_mode_lasttoken": true}"#);
    assert_eq!(embedding().pooling.as_deref(), Some("last"));
}

#[test]
fn long_list_of_modules_is_refused() {
    let scratch = model();
    let list = |num_modules| {
        format!("[{}]", vec![r#"{"type": "Pooling", "path": "1_Pooling"}"#; num_modules].join(","))
    };
    scratch.write("modules.json", list(16));
    assert!(scratch.open().is_ok());
    scratch.write("modules.json", list(17));
    assert!(open_error(scratch.open()).contains("modules.json: 17 modules: the limit is 16"));
}

#[test]
fn pooling_module_outside_of_the_directory_is_refused() {
    let scratch = model();
    scratch.write("modules.json", r#"[{"type": "models.Pooling", "path": "../1_Pooling"}]"#);
    assert!(open_error(scratch.open()).contains("outside"));
}
