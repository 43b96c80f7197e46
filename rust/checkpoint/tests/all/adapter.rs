//! Adapters in PEFT's layout: modules, ranks and scales, and the reasons for which one is refused.

use penstock_checkpoint::AdapterFiles;
use serde_json::json;

use crate::common::{Scratch, f32_bytes, safetensors, warnings_of};

const Q: &str = "base_model.model.model.layers.0.self_attn.q_proj";

/// A file of float32 tensors with the values 0, 1, 2 and so on.
fn tensors(shapes: &[(&str, &[usize])]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in shapes {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|value| value as f32).collect();
        let start = data.len();
        data.extend(f32_bytes(&values));
        header.insert(
            (*name).to_owned(),
            json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]}),
        );
    }
    safetensors(&serde_json::Value::Object(header).to_string(), &data)
}

/// A directory of an adapter.
fn adapter(config: &str, shapes: &[(&str, &[usize])]) -> Scratch {
    let scratch = Scratch::new();
    scratch.write("adapter_config.json", config);
    scratch.write("adapter_model.safetensors", tensors(shapes));
    scratch
}

/// An adapter of the query of layer 0, of rank 2.
fn query(config: &str) -> Scratch {
    adapter(config, &[(&format!("{Q}.lora_A.weight"), &[2, 4]), (&format!("{Q}.lora_B.weight"), &[6, 2])])
}

fn error(scratch: &Scratch) -> String {
    AdapterFiles::open(scratch.path(), u64::MAX).err().expect("an error").to_string()
}

#[test]
fn modules_have_their_matrices_and_scales() {
    let scratch =
        query(r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "absent"]}"#);
    let adapter = AdapterFiles::open(scratch.path(), u64::MAX).unwrap();
    let modules: Vec<_> = adapter.modules().collect();
    assert_eq!(modules.len(), 1);
    let module = &modules[0];
    assert_eq!((module.name, module.rank(), module.scale), ("model.layers.0.self_attn.q_proj", 2, 2.5));
    let mut values = [0.0; 4];
    module.a.read_rows(1..2, &mut values);
    assert_eq!(values, [4.0, 5.0, 6.0, 7.0]);
    assert_eq!((module.b.rows(), module.b.columns()), (6, 2));
}

#[test]
fn scales_are_those_of_peft() {
    for (fields, scale) in [
        (r#""r": 2"#, 4.0),
        (r#""r": 2, "lora_alpha": 10, "use_rslora": true"#, 10.0 / 2f32.sqrt()),
        (r#""rank_pattern": {"q_proj": 2}, "lora_alpha": 3"#, 1.5),
        (r#""r": 2, "alpha_pattern": {"layers.0.self_attn.q_proj": 6, "q_proj": 4}"#, 3.0),
        (r#""r": 2, "alpha_pattern": {"q_proj": 4, "layers.0.self_attn.q_proj": 6}"#, 2.0),
        (r#""r": 2, "alpha_pattern": {"proj": 6}"#, 4.0),
        (r#""r": 2, "alpha_pattern": {"q.proj": 6}"#, 3.0),
        (r#""r": 2, "alpha_pattern": {"model.model.layers.0.self_attn.q_proj": 6}"#, 4.0),
        (r#""r": 2, "alpha_pattern": {"[qk]_proj": 6}"#, 3.0),
        (r#""r": 2, "alpha_pattern": {".*q_proj": 6}, "lora_alpha": 7"#, 3.0),
    ] {
        let scratch = query(&format!("{{{fields}}}"));
        let adapter = AdapterFiles::open(scratch.path(), u64::MAX).unwrap();
        assert_eq!(adapter.modules().map(|module| module.scale).collect::<Vec<_>>(), [scale], "{fields}");
    }
}

#[test]
fn settings_that_are_not_plain_lora_are_refused_by_name() {
    for (field, value) in [
        ("peft_type", r#""LOHA""#),
        ("bias", r#""all""#),
        ("bias", r#""lora_only""#),
        ("lora_bias", "true"),
        ("use_dora", "true"),
        ("init_lora_weights", r#""pissa_niter_16""#),
        ("init_lora_weights", r#""olora""#),
        ("init_lora_weights", r#""loftq""#),
        ("modules_to_save", r#"["lm_head"]"#),
        ("trainable_token_indices", "[1, 2]"),
        ("layer_replication", "[[0, 4]]"),
        ("target_parameters", r#"["experts"]"#),
        ("alora_invocation_tokens", "[5]"),
        ("use_qalora", "true"),
        ("rank_pattern.(?=q)", r#"{"(?=q)": 2}"#),
        ("rank_pattern.(?:a|bc){9000}", r#"{"(?:a|bc){9000}": 2}"#),
    ] {
        let name = field.split('.').next().unwrap();
        let message = error(&query(&format!(r#"{{"r": 2, "{name}": {value}}}"#)));
        assert!(message.contains(&format!("adapter_config.json: {field} is")), "{message}");
    }
}

#[test]
fn fields_without_meaning_here_are_accepted() {
    let config = r#"{"r": 2, "peft_type": "LORA", "bias": "none", "lora_dropout": 0.1, "megatron_core": "megatron.core",
        "qalora_group_size": 16, "loftq_config": {}, "revision": null, "use_dora": false, "some_future_field": null,
        "modules_to_save": [], "init_lora_weights": true, "base_model_name_or_path": "x", "inference_mode": true}"#;
    AdapterFiles::open(query(config).path(), u64::MAX).unwrap();
}

#[test]
fn unknown_field_is_a_warning_that_names_it() {
    let scratch = query(r#"{"r": 2, "some_future_field": true, "another": null, "third": -Infinity}"#);
    let (adapter, warnings) = warnings_of(|| AdapterFiles::open(scratch.path(), u64::MAX));
    assert_eq!(adapter.unwrap().modules().count(), 1);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    for (warning, field) in warnings.iter().zip(["some_future_field", "third"]) {
        let expected = format!("adapter_config.json: the field {field} is unknown and ignored");
        assert!(warning.ends_with(&expected), "{warning}");
    }
}

#[test]
fn invalid_numbers_are_errors_that_name_the_field() {
    for (field, value) in [
        ("r", "0"),
        ("r", "-1"),
        ("r", "1e9"),
        ("r", "2.5"),
        ("lora_alpha", "1e300"),
        ("lora_alpha", "NaN"),
        ("alpha_pattern.q_proj", r#"{"q_proj": Infinity}"#),
        ("lora_alpha", r#""8""#),
        ("rank_pattern.q_proj", r#"{"q_proj": 0}"#),
        ("alpha_pattern.q_proj", r#"{"q_proj": null}"#),
    ] {
        let name = field.split('.').next().unwrap();
        let message = error(&query(&format!(r#"{{"{name}": {value}}}"#)));
        assert!(message.contains(&format!("adapter_config.json: {field}: ")), "{message}");
    }
    let patterns: String = (0..5000).map(|key| format!(r#""{key}": 1,"#)).collect();
    let message = error(&query(&format!(r#"{{"rank_pattern": {{{patterns} "x": 1}}}}"#)));
    assert!(message.contains("more than 4096 patterns"), "{message}");
}

/// An adapter of this many modules, of rank 1, with names of 960 bytes and more.
fn many_modules(config: &str, count: usize) -> Scratch {
    let names: Vec<String> = (0..count)
        .flat_map(|index| ["A", "B"].map(|part| format!("{}{index}.lora_{part}.weight", "a.".repeat(480))))
        .collect();
    let shapes: Vec<(&str, &[usize])> = names.iter().map(|name| (&name[..], &[1, 1][..])).collect();
    adapter(config, &shapes)
}

#[test]
fn patterns_that_take_long_are_refused() {
    let names: Vec<String> = (0..4000).map(|index| format!("\"{}{index}\": 1", "a.".repeat(470))).collect();
    for pattern in [r#""(?:[^z]?){300}z": 1"#.to_owned(), names.join(", ")] {
        for field in ["rank_pattern", "alpha_pattern"] {
            let config = format!(r#"{{"peft_type": "LORA", "r": 1, "{field}": {{{pattern}}}}}"#);
            let expected = "adapter_config.json: rank_pattern, alpha_pattern: the patterns take more than";
            assert!(error(&many_modules(&config, 4096)).contains(expected), "{field}");
            assert!(AdapterFiles::open(many_modules(&config, 10).path(), u64::MAX).is_ok(), "{field}");
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_errors_that_name_them() {
    let (a, b) = (format!("{Q}.lora_A.weight"), format!("{Q}.lora_B.weight"));
    let long = format!("{}.lora_A.weight", "m".repeat(1_024));
    for (shapes, part) in [
        (vec![(a.as_str(), &[2, 4][..])], "there is no tensor lora_B"),
        (vec![(b.as_str(), &[6, 2])], "there is no tensor lora_A"),
        (vec![(&a, &[2, 4]), (&b, &[2, 6])], "lora_B.weight: shape [2, 6]; [_, 2] is expected"),
        (vec![(&a, &[3, 4]), (&b, &[6, 3])], "lora_A.weight: rank 3; the configuration has 2"),
        (vec![(&a, &[8]), (&b, &[6, 2])], "a matrix is expected"),
        (vec![(&a, &[2, 0]), (&b, &[6, 2])], "a matrix is expected"),
        (vec![("base_model.model.lm_head.weight", &[2, 2])], "modules_to_save"),
        (vec![("lora_A.weight", &[2, 2])], "neither lora_A nor lora_B"),
        (vec![(long.as_str(), &[2, 4])], "a name of 1038 bytes; the limit is 1024"),
        (vec![], "there are none"),
    ] {
        let message = error(&adapter(r#"{"r": 2}"#, &shapes));
        assert!(message.contains(part), "{message}");
    }
    let twice = [(a.as_str(), &[2, 4][..]), (&a[PREFIX..], &[2, 4]), (&b, &[6, 2])];
    assert!(error(&adapter(r#"{"r": 2}"#, &twice)).contains("second tensor for the same part"));
}

const PREFIX: usize = "base_model.model.".len();

#[test]
fn missing_and_pickled_files_are_errors_with_a_reason() {
    let scratch = Scratch::new();
    assert!(error(&scratch).contains("contains no adapter_config.json"));
    scratch.write("adapter_config.json", "{}");
    assert!(error(&scratch).contains("contains no adapter_model.safetensors"));
    scratch.write("adapter_model.bin", "pickle");
    assert!(error(&scratch).contains("pickled weights can execute code"));
    scratch.write("model.safetensors.index.json", "{}");
    assert!(error(&scratch).contains("in several files"));
    let scratch = query(r#"{"r": 2}"#);
    scratch.write("adapter_model.bin", "pickle");
    AdapterFiles::open(scratch.path(), u64::MAX).unwrap();
}
