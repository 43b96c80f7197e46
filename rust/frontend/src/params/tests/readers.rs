//! Types and ranges of the parameters.

use penstock_types::Json;
use serde_json::json;

use super::super::{ResponseKind, ToolChoice};
use super::{params, read};
use crate::params::SamplingParams;
use crate::value::Value;

/// The names of the parameters.
fn names() -> impl Iterator<Item = &'static str> {
    let definitions = include_str!("../../../definitions/sampling_params.toml");
    let fields = definitions.split("[[field]]").skip(1);
    fields.filter_map(|field| field.split_once("name = \"")?.1.split_once('"')).map(|(name, _)| name)
}

/// Refused values, with the place and the limit that the error names.
#[test]
fn values_of_wrong_type_or_range_are_refused_with_the_limit() {
    let cases = [
        (json!({"n": 0}), "n: an integer from 1 to 128"),
        (json!({"n": 129}), "n: an integer from 1 to 128"),
        (json!({"n": true}), "n: an integer from 1 to 128"),
        (json!({"n": 1.0}), "n: an integer from 1 to 128"),
        (json!({"n": "1"}), "n: an integer from 1 to 128"),
        (json!({"seed": -1}), "seed: an integer from 0 to 18446744073709551615"),
        (json!({"priority": 2_147_483_648_u32}), "priority: an integer from -2147483648 to 2147483647"),
        (json!({"temperature": 2.001}), "temperature: a number from 0 to 2"),
        (json!({"temperature": -0.001}), "temperature: a number from 0 to 2"),
        (json!({"temperature": false}), "temperature: a number from 0 to 2"),
        (json!({"top_p": 0}), "top_p: a number above 0 and at most 1"),
        (json!({"top_p": 1e-60}), "top_p: a number above 0 and at most 1"),
        (json!({"epsilon_cutoff": 1}), "epsilon_cutoff: a number of at least 0 and below 1"),
        (json!({"epsilon_cutoff": 0.999_999_999_9}), "epsilon_cutoff: a number of at least 0 and below 1"),
        (json!({"top_k": -2}), "top_k: an integer from -1 to 4294967295; -1 and 0 keep all"),
        (json!({"repetition_penalty": 0}), "repetition_penalty: a finite number above 0"),
        (json!({"repetition_penalty": 1e39}), "repetition_penalty: a finite number above 0"),
        (json!({"repetition_penalty_scope": "prompt"}), "repetition_penalty_scope: one of 'all', 'output'"),
        (json!({"ignore_eos": 1}), "ignore_eos: True or False"),
        (json!({"logprobs": 5}), "logprobs: True or False; the number of most likely tokens is top_logprobs"),
        (json!({"regex": ""}), "regex: a string of 1 to 1048576 characters"),
        (json!({"regex": 7}), "regex: a string"),
        (json!({"cache_salt": "x".repeat(1025)}), "cache_salt: a string of 1 to 1024 characters"),
        (json!({"stop": ""}), "stop: a string of 1 to 1024 characters"),
        (json!({"stop": ["a", ""]}), "stop[1]: a string of 1 to 1024 characters"),
        (json!({"stop": vec!["\u{20ac}".repeat(100); 55]}), "stop: strings of at most 16384 bytes in all"),
        (json!({"stop": vec!["a"; 65]}), "stop: at most 64 strings"),
        (json!({"stop": 1}), "stop: a string or a sequence of strings"),
        (json!({"stop_token_ids": [1, -1]}), "stop_token_ids[1]: an integer from 0 to 4294967295"),
        (json!({"stop_token_ids": {"1": 2}}), "stop_token_ids: a sequence of token ids (integers from 0)"),
        (json!({"stop_token_ids": vec![1; 257]}), "stop_token_ids: at most 256 ids"),
        (json!({"stop_token_sequences": [[]]}), "stop_token_sequences[0]: a sequence of at least one id"),
        (
            json!({"stop_token_sequences": [[1], [2, "x"]]}),
            "stop_token_sequences[1][1]: an integer from 0 to 4294967295",
        ),
        (json!({"allowed_token_ids": []}), "allowed_token_ids: left out, or at least one id"),
        (json!({"choice": [""]}), "choice[0]: a string of 1 to 1048576 characters"),
        (json!({"choice": []}), "choice: left out, or at least one string"),
        (
            json!({"logit_bias": [1]}),
            "logit_bias: a mapping of token ids (integers from 0) to numbers from -100 to 100",
        ),
        (json!({"logit_bias": {"-1": 2}}), "logit_bias: token ids (integers from 0) as keys"),
        (json!({"logit_bias": {"one": 2}}), "logit_bias: token ids (integers from 0) as keys"),
        (json!({"logit_bias": {"": 2}}), "logit_bias: token ids (integers from 0) as keys"),
        (json!({"logit_bias": {"99999999999": 2}}), "logit_bias: token ids (integers from 0) as keys"),
        (json!({"logit_bias": {"1": 2, "01": 2}}), "logit_bias: a mapping that has token 1 once"),
    ];
    for (fields, error) in cases {
        assert_eq!(read(&fields).unwrap_err(), error, "{fields}");
    }
}

#[test]
fn values_at_the_limits_are_read() {
    let params = params(json!({
        "n": 128, "seed": u64::MAX, "priority": -2_147_483_648_i64, "temperature": 2, "top_p": 1, "top_k": -1,
        "repetition_penalty": 1e-30, "stop": vec!["x".repeat(256); 64], "max_tokens": u32::MAX,
    }));
    assert_eq!((params.n, params.seed, params.priority), (128, Some(u64::MAX), i32::MIN));
    assert_eq!((params.temperature, params.top_p, params.top_k), (Some(2.0), Some(1.0), Some(0)));
    assert_eq!((params.stop.len(), params.max_tokens), (64, Some(4_294_967_295)));
}

#[test]
fn null_sets_a_field_back_to_its_default() {
    let mut params = params(json!({"n": 3, "stop": "a", "tools": null}));
    for name in names().filter(|name| *name != "logits_processors") {
        assert!(params.set(name, None::<&serde_json::Value>).is_ok_and(|is_known| is_known), "{name}");
    }
    assert_eq!(params, SamplingParams::default());
}

#[test]
fn an_unknown_field_is_reported() {
    let set = SamplingParams::default().set("max_new_tokens", Some(&json!(1)));
    assert!(set.is_ok_and(|is_known| !is_known));
}

#[test]
fn one_stop_string_is_a_sequence_of_one() {
    assert_eq!(params(json!({"stop": "end"})).stop, ["end"]);
    assert_eq!(params(json!({"stop": ["a", "b"]})).stop, ["a", "b"]);
}

#[test]
fn every_field_has_a_quoted_value() {
    let params = SamplingParams::default();
    for name in names() {
        assert_ne!(params.quote(name), "", "{name}");
    }
}

#[test]
fn json_schema_is_kept_as_text_in_the_order_of_its_members() {
    let schema = json!({"type": "object", "properties": {"b": {"const": "ü\n\"\\"}, "a": {"minimum": 0.5}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let params = params(json!({"response_format": format}));
    let format = params.response_format.expect("it was given");
    let expected = r#"{"type":"object","properties":{"b":{"const":"ü\n\"\\"},"a":{"minimum":0.5}},"additionalProperties":false}"#;
    let schema = Json(expected.to_owned());
    assert_eq!(format.kind, ResponseKind::JsonSchema { schema, ignores_unsupported: false });
}

/// The schema that the grammar of a `response_format` is compiled from.
fn schema_of(format: serde_json::Value) -> serde_json::Value {
    let format = params(json!({"response_format": format})).response_format.expect("it was given");
    let ResponseKind::JsonSchema { schema, .. } = format.kind else { panic!("a schema was given") };
    serde_json::from_str(&schema.0).expect("it is JSON")
}

fn with_strict(schema: &serde_json::Value, strict: serde_json::Value) -> serde_json::Value {
    schema_of(json!({"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}))
}

#[test]
fn schema_is_closed_by_default_unless_it_combines_objects() {
    let object = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let mut closed = object.clone();
    closed["additionalProperties"] = json!(false);
    let extended =
        json!({"allOf": [{"$ref": "#/$defs/base"}, object], "$defs": {"base": object, "other": object}});
    let mut expected = extended.clone();
    expected["$defs"]["other"] = closed.clone();
    assert_eq!(with_strict(&extended, json!(null)), expected, "an extended object stays open");
    let optional = json!({"anyOf": [{"$ref": "#/$defs/base"}, {"type": "null"}], "$defs": {"base": object}});
    assert_eq!(with_strict(&optional, json!(null))["$defs"]["base"], closed);
    assert_eq!(with_strict(&optional, json!(false)), optional);
    for open in [
        json!({"properties": {"a": {}}, "required": ["b"]}),
        json!({"properties": {"a": {}}, "minProperties": 2}),
        json!({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}),
        json!({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}),
        json!({"$ref": "#/$defs/user", "required": ["b"], "$defs": {"user": {"properties": {"a": {}}}}}),
        json!({"patternProperties": {"^x": {}}, "anyOf": [{"properties": {"a": {}}}]}),
        json!({"allOf": [{"$ref": "#/$defs/shape"}, {"required": ["b"]}], "$defs": {
            "shape": {"anyOf": [{"$ref": "#/$defs/circle"}]}, "circle": {"properties": {"a": {}}},
        }}),
        json!({"properties": {"a": {"allOf": [{"$ref": "#"}, {"required": ["b"]}]}}}),
        json!({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"properties": {"a": {}}}}}),
        json!({"type": "object"}),
    ] {
        assert_eq!(with_strict(&open, json!(null)), open);
    }
}

#[test]
fn response_format_may_be_a_schema() {
    let object = json!({"type": "object", "properties": {"a": {}}});
    let mut closed = object.clone();
    closed["additionalProperties"] = json!(false);
    assert_eq!(schema_of(object), closed);
    for schema in [
        json!({"type": ["string", "null"]}),
        json!({"enum": [1, 2]}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {}}}),
        json!({"not": {}}),
        json!({"if": {}}),
        json!({"maximum": 3}),
    ] {
        assert_eq!(schema_of(schema.clone()), schema);
    }
}

#[test]
fn strict_schema_is_closed() {
    let schema = json!({"properties": {"a": {"properties": {}}, "b": {"additionalProperties": true}}});
    assert_eq!(
        with_strict(&schema, json!(true)),
        json!({
            "properties": {
                "a": {"properties": {}, "additionalProperties": false},
                "b": {"additionalProperties": true},
            },
            "additionalProperties": false,
        })
    );
}

#[test]
fn response_format_with_an_unknown_type_or_key_is_refused() {
    for format in [
        json!("json_object"),
        json!({"type": "xml"}),
        json!({"type": "json_object", "schema": {}}),
        json!({"type": "json_schema"}),
        json!({"type": "json_schema", "json_schema": {"name": "x"}}),
        json!({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}),
        json!({"type": "json_schema", "json_schema": {"schema": {}, "ignore_unsupported": "yes"}}),
        json!({"type": "json"}),
        json!({"schema": {}}),
    ] {
        assert!(read(&json!({"response_format": format})).is_err(), "{format}");
    }
}

#[test]
fn json_that_is_nested_too_deeply_is_refused() {
    let nested = |depth: usize| (0..depth).fold(json!(1), |inner, _| json!([inner]));
    let format = |depth| {
        let schema = json!({"enum": nested(depth)});
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    };
    assert!(read(&format(30)).is_ok());
    let error = read(&format(64)).unwrap_err();
    assert_eq!(error, "response_format: JSON of at most 64 nested arrays and objects");
}

#[test]
fn tools_are_read_with_their_schemas() {
    let tool = |name: &str, function: serde_json::Value| {
        let mut function = function;
        function["name"] = name.into();
        json!({"type": "function", "function": function})
    };
    let tools = params(json!({"tools": [
        tool("open", json!({"parameters": {"properties": {"path": {}}}, "strict": false})),
        tool("default", json!({"parameters": {"properties": {"path": {}}}})),
        tool("strict", json!({"parameters": {"properties": {"path": {}}}, "strict": true})),
        tool("empty", json!({"parameters": {"properties": {}}})),
        tool("none", json!({})),
    ]}))
    .tools
    .expect("they were given");
    let schemas: Vec<_> = tools.functions.iter().map(|function| function.parameters.as_str()).collect();
    assert_eq!(
        schemas,
        [
            r#"{"properties":{"path":{}}}"#,
            r#"{"properties":{"path":{}},"additionalProperties":false}"#,
            r#"{"properties":{"path":{}},"additionalProperties":false}"#,
            r#"{"properties":{},"additionalProperties":false}"#,
            r#"{"type":"object","properties":{},"additionalProperties":false}"#,
        ]
    );
    let twice = json!({"tools": [tool("a", json!({})), tool("a", json!({}))]});
    assert_eq!(read(&twice).unwrap_err(), "tools: tools with different names (a occurs twice)");
    assert!(read(&json!({"tools": []})).is_err());
}

#[test]
fn tool_choice_is_a_word_or_names_a_function() {
    let read = |choice: serde_json::Value| read(&json!({"tool_choice": choice})).map(|read| read.tool_choice);
    assert_eq!(read(json!("none")), Ok(Some(ToolChoice::None)));
    assert_eq!(read(json!("auto")), Ok(Some(ToolChoice::Auto)));
    assert_eq!(read(json!("required")), Ok(Some(ToolChoice::Required)));
    let named = read(json!({"type": "function", "function": {"name": "f"}}));
    assert!(matches!(named, Ok(Some(ToolChoice::Function { name, .. })) if name == "f"));
    assert!(read(json!("f")).is_err());
    assert!(read(json!({"type": "function"})).is_err());
}

/// A mapping from integers, which JSON does not have.
#[derive(Clone)]
struct Biases(Vec<(i64, f64)>);

#[test]
fn logit_bias_is_sorted_and_has_no_negative_zero() {
    let read = |biases: &[(i64, f64)]| {
        let mut params = SamplingParams::default();
        params.set("logit_bias", Some(&Entry::Map(Biases(biases.to_vec())))).map(|_| params.logit_bias)
    };
    let biases = read(&[(7, -0.0), (3, 100.0)]).ok().flatten().map(|bias| bias.0).unwrap_or_default();
    assert_eq!(biases, [(3, 100.0), (7, 0.0)]);
    assert!(biases[1].1.is_sign_positive());
    assert!(read(&[(3, 100.5)]).is_err());
    assert!(read(&[(-1, 0.0)]).is_err());
}

#[test]
fn logit_bias_takes_the_string_keys_of_json() {
    let biases = read(&json!({"logit_bias": {"12": 1, "3": -2.5}})).map(|params| params.logit_bias);
    assert_eq!(biases.ok().flatten().map(|bias| bias.0), Some(vec![(3, -2.5), (12, 1.0)]));
}

#[derive(Clone)]
enum Entry {
    Map(Biases),
    Integer(i64),
    Number(f64),
}

impl Value for Entry {
    type Raised = ();

    fn kind(&self) -> crate::value::Kind {
        match self {
            Entry::Map(_) => crate::value::Kind::Map,
            Entry::Integer(number) => crate::value::Kind::Integer((*number).into()),
            Entry::Number(number) => crate::value::Kind::Float(*number),
        }
    }

    fn integer(&self) -> Result<Option<i128>, ()> {
        Ok(if let Entry::Integer(number) = self { Some((*number).into()) } else { None })
    }

    fn number(&self) -> Result<Option<f64>, ()> {
        Ok(if let Entry::Number(number) = self { Some(*number) } else { None })
    }

    fn text_len(&self) -> Result<usize, ()> {
        Err(())
    }

    fn text(&self) -> Result<Option<String>, ()> {
        Err(())
    }

    fn items(&self) -> Result<Option<impl Iterator<Item = Result<Self, ()>>>, ()> {
        Ok(None::<std::iter::Empty<_>>)
    }

    fn array(&self) -> impl Iterator<Item = Self> {
        std::iter::empty()
    }

    fn map_len(&self) -> Result<usize, ()> {
        Ok(self.entries()?.len())
    }

    fn entries(&self) -> Result<Vec<(Self, Self)>, ()> {
        let Entry::Map(Biases(biases)) = self else { return Err(()) };
        Ok(biases.iter().map(|(id, bias)| (Entry::Integer(*id), Entry::Number(*bias))).collect())
    }

    fn get(&self, _key: &str) -> Result<Option<Self>, ()> {
        Ok(None)
    }

    fn quote(&self) -> String {
        String::new()
    }
}
