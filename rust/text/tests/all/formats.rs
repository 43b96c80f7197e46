//! Output parsers: cases of every format, for every division of their text in two.

use std::sync::Arc;

use penstock_text::parsers::{Delta, OutputParser, ToolSchemas, reasoning_format, tool_format};
use penstock_types::{Named, ReasoningParser, ToolParser};
use serde_json::Value;

use crate::parser_support::merged;

/// The tools `w`, `f`, `s` and `p`.
const TOOLS: [(&str, &str); 4] = [
    (
        "w",
        r#"{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
            "unit": {"enum": ["c", "f"]}}, "required": ["city"]}"#,
    ),
    ("f", r#"{"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}"#),
    (
        "s",
        r##"{"type": "object", "properties": {"query": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "filter": {"$ref": "#/$defs/filter"}, "exact": {"type": "boolean"}},
            "$defs": {"filter": {"type": "object", "properties": {
                "min": {"type": "number"}, "max": {"type": ["number", "null"]}}}}}"##,
    ),
    ("p", r#"{"type": "object", "properties": {}}"#),
];

/// The parsed parts of an output.
#[derive(Debug, Default, PartialEq)]
struct Parsed {
    reasoning: String,
    content: String,
    calls: Vec<(String, String, Option<String>)>,
}

impl Parsed {
    fn of(deltas: Vec<Delta>) -> Self {
        let mut parsed = Self::default();
        for delta in deltas {
            match delta {
                Delta::Content(text) => parsed.content += &text,
                Delta::Reasoning(text) => parsed.reasoning += &text,
                Delta::ToolCall { index, name, id } => {
                    assert_eq!(index, parsed.calls.len());
                    parsed.calls.push((name, String::new(), id));
                }
                Delta::Arguments { index, text } => parsed.calls[index].1 += &text,
            }
        }
        parsed
    }

    /// Content, reasoning and calls in the notation of the cases.
    fn shown(&self) -> String {
        let mut parts = Vec::new();
        if !self.reasoning.is_empty() {
            parts.push(format!("R{:?}", self.reasoning));
        }
        if !self.content.is_empty() {
            parts.push(format!("C{:?}", self.content));
        }
        for (name, arguments, id) in &self.calls {
            let id = id.as_ref().map(|id| format!("#{id}")).unwrap_or_default();
            parts.push(format!("{name}{id}{arguments}"));
        }
        parts.join(" ")
    }
}

/// A parser of the formats with these names; `open` after that of the reasoning stands for one that the prompt opened.
fn parser(formats: &str) -> OutputParser {
    let mut names = formats.split(' ');
    let tools = ToolParser::from_name(names.next().unwrap_or_default()).expect("a tool parser");
    let reasoning = names.next().map(|name| ReasoningParser::from_name(name).expect("a reasoning parser"));
    let is_open = names.next() == Some("open");
    let reasoning = reasoning.and_then(reasoning_format).map(|format| (format, is_open));
    OutputParser::new(reasoning, tool_format(tools), &Arc::new(ToolSchemas::new(TOOLS.into_iter())))
}

/// Parses a text whole, by characters and in every two pieces, which gives the same.
fn parse(formats: &str, text: &str) -> Parsed {
    let whole = Parsed::of(merged(parser(formats), [text]));
    let characters = text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()]);
    assert_eq!(Parsed::of(merged(parser(formats), characters)), whole, "of {text:?}");
    for at in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
        let pieces = [&text[..at], &text[at..]];
        assert_eq!(Parsed::of(merged(parser(formats), pieces)), whole, "of {pieces:?}");
    }
    whole
}

/// Checks cases: formats, an output and its parts.
fn check(cases: &[(&str, &str, &str)]) {
    for (formats, text, expected) in cases {
        let parsed = parse(formats, text);
        assert_eq!(parsed.shown(), *expected, "{formats}: {text:?}");
        for (_, arguments, _) in &parsed.calls {
            let is_cut = expected.ends_with(arguments.as_str()) && !arguments.ends_with('}');
            assert!(is_cut || serde_json::from_str::<Value>(arguments).is_ok(), "{formats}: {arguments}");
        }
    }
}

#[test]
fn calls_that_are_json_objects() {
    check(&[
        (
            "hermes",
            "Sure.\n<tool_call>\n{\"name\": \"w\", \"arguments\": {\"city\": \"Oslo\", \"days\": 2}}\n</tool_call>",
            r#"C"Sure." w{"city": "Oslo", "days": 2}"#,
        ),
        (
            "hermes",
            "<tool_call>\n{\"name\": \"p\"}\n</tool_call>\n<tool_call>\n{\"name\": \"p\"}\n</tool_call>\nDone.",
            r#"C"Done." p{} p{}"#,
        ),
        (
            "hermes",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"content\": \"</tool_call> <tool_call> \\\"}\"}}</tool_call>",
            r#"f{"content": "</tool_call> <tool_call> \"}"}"#,
        ),
        ("hermes", r#"<tool_call>{"name": "f", "arguments": {"path": "a"#, r#"f{"path": "a"#),
        ("hermes", r#"<tool_call>{"arguments": {"city": "Oslo"}, "name": "w"}"#, r#"w{"city": "Oslo"}"#),
        ("hermes think", "<think>\nR\n</think>\n\n<tool_call>{\"name\": \"p\"}</tool_call>", r#"R"R" p{}"#),
        ("hermes think", "Hi", r#"C"Hi""#),
        ("llama3_json", r#"{"name": "w", "parameters": {"city": "Oslo"}}"#, r#"w{"city": "Oslo"}"#),
        ("llama3_json", r#"{"city": "Oslo"}"#, r#"C"{\"city\": \"Oslo\"}""#),
        (
            "llama3_json",
            r#"{"type": "function", "function": {"name": "w", "parameters": {"city": "é"}}}; {"name": "p", "parameters": {}}"#,
            r#"w{"city": "é"} p{}"#,
        ),
        (
            "internlm2",
            "C<|action_start|><|plugin|>\n{\"name\": \"w\", \"parameters\": {\"city\": \"a\"}}<|action_end|>",
            r#"C"C" w{"city": "a"}"#,
        ),
        (
            "granite_20b_fc",
            r#"C <function_call> {"name": "p", "arguments": {}}<function_call> {"name": "p", "arguments": {}}"#,
            r#"C"C" p{} p{}"#,
        ),
        (
            "minimax_m1",
            "C\n<tool_calls>\n{\"name\": \"w\", \"arguments\": {\"city\": \"a\"}}\n{\"name\": \"p\", \"arguments\": {}}\n</tool_calls>",
            r#"C"C" w{"city": "a"} p{}"#,
        ),
    ]);
}

#[test]
fn calls_that_are_items_of_a_json_list() {
    let list = r#"[{"name": "w", "arguments": {"city": "a"}}, {"name": "p", "arguments": {}}]"#;
    for (format, open, close) in [
        ("granite3", "<|tool_call|>", ""),
        ("granite3", "<tool_call>", ""),
        ("jamba", "<tool_calls>", "</tool_calls>"),
        ("hunyuan_a13b", "<tool_calls>", "</tool_calls>"),
        ("nemotron_nano2", "<TOOLCALL>", "</TOOLCALL>"),
        ("phi4_mini", "functools", ""),
        ("phi4_mini", "<|tool_call|>", "<|/tool_call|>"),
        ("mistral", "[TOOL_CALLS] ", ""),
    ] {
        check(&[(format, &format!("C\n{open}{list}{close}"), r#"C"C" w{"city": "a"} p{}"#)]);
    }
    check(&[
        ("xlam", list, r#"w{"city": "a"} p{}"#),
        ("xlam", &format!("```json\n{list}\n```"), r#"w{"city": "a"} p{}"#),
        ("xlam", r#"[{"name": "Ada"}]"#, r#"C"[{\"name\": \"Ada\"}]""#),
        (
            "cohere_json cohere",
            "<|START_THINKING|>R<|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"p\", \"parameters\": {}}\n]<|END_ACTION|>",
            r#"R"R" p#0{}"#,
        ),
        ("cohere_json cohere open", "R<|END_THINKING|><|START_RESPONSE|>C<|END_RESPONSE|>", r#"R"R" C"C""#),
        (
            "apertus apertus",
            "<|inner_prefix|>R<|inner_suffix|>C<|tools_prefix|>[{\"w\": {\"city\": \"a\"}}, {\"p\": {}}]<|tools_suffix|>",
            r#"R"R" C"C" w{"city": "a"} p{}"#,
        ),
    ]);
}

#[test]
fn calls_with_a_header_before_json() {
    check(&[
        (
            "mistral mistral",
            r#"C[TOOL_CALLS]w[ARGS]{"city": "Oslo"}[TOOL_CALLS]p[ARGS]{}"#,
            r#"C"C" w{"city": "Oslo"} p{}"#,
        ),
        (
            "mistral",
            r#"[TOOL_CALLS]w[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}"#,
            r#"w#abcdefghi{"city": "Oslo"}"#,
        ),
        ("mistral mistral", "[THINK]R[/THINK]C", r#"R"R" C"C""#),
        ("mistral mistral", r#"[THINK]R[TOOL_CALLS]p[ARGS]{}"#, r#"R"R" p{}"#),
        (
            "kimi_k2",
            r#"C<|tool_calls_section_begin|><|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.p:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"#,
            r#"C"C" w#functions.w:0{"city": "Oslo"} p#functions.p:1{}"#,
        ),
        (
            "kimi_k2 think",
            r#"<think>R<|tool_calls_section_begin|><|tool_call_begin|>functions.p:0<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>"#,
            r#"R"R" p#functions.p:0{}"#,
        ),
        (
            "deepseek_v31",
            r#"C<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>w<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>p<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"#,
            r#"C"C" w{"city": "Oslo"} p{}"#,
        ),
        (
            "deepseek_v3 think",
            "<think>\nR\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>w\n```json\n{\"city\": \"Oslo\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>p\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            r#"R"R" w{"city": "Oslo"} p{}"#,
        ),
        (
            "functionary_v31",
            r#"C<function=w>{"city": "a"}</function><function=p>{}</function>"#,
            r#"C"C" w{"city": "a"} p{}"#,
        ),
        (
            "solar solar",
            r#"<|think|>R<|end|><|begin|>assistant<|content|>C<|tool_calls|><|tool_call:begin|>i1<|tool_call:name|>p<|tool_call:args|>{}<|tool_call:end|><|calls|>"#,
            r#"R"R" C"C" p#i1{}"#,
        ),
    ]);
}

#[test]
fn calls_with_tags_for_their_arguments() {
    let qwen = |body: &str| format!("<tool_call>\n{body}\n</function>\n</tool_call>");
    check(&[
        (
            "qwen_xml think open",
            "a\n</think>\n\nb\n\n<tool_call>\n<function=p>\n</function>\n</tool_call>",
            r#"R"a" C"b" p{}"#,
        ),
        (
            "qwen_xml think open",
            "plan\n<tool_call>\n<function=p>\n</function>\n</tool_call>",
            r#"R"plan" p{}"#,
        ),
        (
            "qwen_xml",
            &qwen(
                "<function=s>\n<parameter=query>\na < b && c\n</parameter>\n<parameter=tags>\n[\"x\", \"y\"]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>",
            ),
            r#"s{"query":"a < b && c","tags":["x", "y"],"exact":true}"#,
        ),
        (
            "qwen_xml",
            &qwen("<function=w>\n<parameter=city>\n12345\n</parameter>\n<parameter=days>\n3\n</parameter>"),
            r#"w{"city":"12345","days":3}"#,
        ),
        ("qwen_xml", &qwen("<function=w>\n<parameter=city>\nnull\n</parameter>"), r#"w{"city":"null"}"#),
        (
            "qwen_xml",
            &qwen("<function=f>\n<parameter=content>\n\n  a\n\n</parameter>"),
            r#"f{"content":"\n  a\n"}"#,
        ),
        ("qwen_xml", "<function=p>\n</function>\n</tool_call>", "p{}"),
        (
            "qwen_xml",
            &qwen(
                "<function=s>\n<parameter=filter>\n{\"min\": 1, \"max\": null}\n</parameter>\n<parameter=zz>\n7\n</parameter>",
            ),
            r#"s{"filter":{"min": 1, "max": null},"zz":"7"}"#,
        ),
        (
            "qwen_xml",
            "<tool_call>\n<function=f>\n<parameter=path>\na\n</parameter>\n<parameter=content>\nabc",
            r#"f{"path":"a","content":"abc"#,
        ),
        (
            "qwen_xml",
            &qwen("<function=f>\n<parameter=content>\na</parameter> b</function>c > d\n</parameter>"),
            r#"f{"content":"a</parameter> b</function>c > d"}"#,
        ),
        (
            "qwen_xml",
            "<tool_call>\n<function=w>\n<parameter=city>\nOslo\n</function>\n</tool_call> Done.",
            r#"C"Done." w{"city":"Oslo"}"#,
        ),
        (
            "qwen_xml",
            &qwen("<function=w>\n<parameter=city>\na\n</parameter>\n<parameter=city>\nb\n</parameter>"),
            r#"w{"city":"a"}"#,
        ),
        ("qwen_xml", "<tool_call>\nno", r#"C"<tool_call>\nno""#),
        (
            "seed_xml seed",
            "<seed:think>R<seed:cot_budget_reflect>x</seed:cot_budget_reflect></seed:think><seed:tool_call>\n<function=s>\n<parameter=filter>{'min': 1, 'max': None}</parameter>\n<parameter=exact>False</parameter>\n</function>\n</seed:tool_call>",
            r#"R"R<seed:cot_budget_reflect>x</seed:cot_budget_reflect>" s{"filter":{"min":1,"max":null},"exact":false}"#,
        ),
        (
            "glm_xml",
            "<tool_call>w\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>c</arg_value>\n</tool_call>",
            r#"w{"city":"Oslo","days":3,"unit":"c"}"#,
        ),
        ("glm_xml think open", "R</think><tool_call>p</tool_call>", r#"R"R" p{}"#),
        (
            "glm_xml think",
            "<tool_call>f<arg_key>content</arg_key><arg_value>  x </arg_value></tool_call>",
            r#"f{"content":"  x "}"#,
        ),
        ("glm_xml think", "Hi", r#"C"Hi""#),
        (
            "hy3_xml hy3",
            "<think:opensource>R</think:opensource><tool_calls:opensource>\n<tool_call:opensource>w<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>a</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
            r#"R"R" w{"city":"a"}"#,
        ),
        (
            "minimax_m2 think open",
            "R\n</think>\n\n<minimax:tool_call>\n<invoke name=\"s\">\n<parameter name=\"tags\">[\"a\"]</parameter>\n</invoke>\n<invoke name=\"p\">\n</invoke>\n</minimax:tool_call>",
            r#"R"R" s{"tags":["a"]} p{}"#,
        ),
        (
            "dsml32",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"s\">\n<｜DSML｜parameter name=\"query\" string=\"true\">5</｜DSML｜parameter>\n<｜DSML｜parameter name=\"exact\" string=\"false\">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            r#"s{"query":"5","exact":true}"#,
        ),
        (
            "dsml4",
            "C\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"p\">\n\n</｜DSML｜invoke>\n<|DSML|invoke name=\"p\">\n\n</|DSML|invoke>\n</｜DSML｜tool_calls>",
            r#"C"C" p{} p{}"#,
        ),
        (
            "kimi_k3 kimi_k3 open",
            "R<|close|>think<|sep|><|open|>response<|sep|>C<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"w\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>Oslo<|close|>argument<|sep|><|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
            r#"R"R" C"C" w{"city":"Oslo","days":3}"#,
        ),
        (
            "minicpm5",
            "<function name=\"w\"><param name=\"city\">a</param></function>\n<function name=\"p\"></function>",
            r#"w{"city":"a"} p{}"#,
        ),
        (
            "step3",
            "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"w\"><steptml:parameter name=\"city\">a</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
            r#"w{"city":"a"}"#,
        ),
    ]);
}

#[test]
fn calls_with_literals_as_arguments() {
    check(&[
        ("pythonic", r#"[w(city="Oslo")]"#, r#"w{"city":"Oslo"}"#),
        ("pythonic", r#"See [w(city="Oslo")]"#, r#"C"See [w(city=\"Oslo\")]""#),
        ("pythonic", "[1, 2, 3]", r#"C"[1, 2, 3]""#),
        (
            "pythonic",
            r#"[w(city='it\'s', days=-5), s(tags=["a", 'b'], filter={'max': None, "min": (1, 2.5)}, exact=True,), p()]"#,
            r#"w{"city":"it's","days":-5} s{"tags":["a","b"],"filter":{"max":null,"min":[1,2.5]},"exact":true} p{}"#,
        ),
        ("llama4_pythonic", "<|python_start|>[p()]<|python_end|>", "p{}"),
        ("llama4_pythonic", r#"{"name": "p", "parameters": {}}"#, "p{}"),
        (
            "olmo3",
            "<function_calls>s(query=\"q\", exact=true)\np()</function_calls>",
            r#"s{"query":"q","exact":true} p{}"#,
        ),
        (
            "lfm2",
            "C<|tool_call_start|>[w(city='Oslo', days=-5), ns.p()]<|tool_call_end|>",
            r#"C"C" w{"city":"Oslo","days":-5} ns.p{}"#,
        ),
        (
            "gemma4",
            "<|tool_call>call:s{filter:{max:null,min:1},query:<|\"|>a, {b}<|\"|>,tags:[<|\"|>x<|\"|>]}<tool_call|>",
            r#"s{"filter":{"max":null,"min":1},"query":"a, {b}","tags":["x"]}"#,
        ),
        ("gemma4 gemma4", "<|channel>thought\nR\n<channel|>C", r#"R"R" C"C""#),
        (
            "gemma4 gemma4",
            "<|channel>thought\n<channel|><|channel>thought\nR<channel|><|tool_call>call:p{}<tool_call|>",
            r#"R"R" p{}"#,
        ),
        (
            "functiongemma",
            "<start_function_call>call:w{city:<escape>a<escape>,days:2}<end_function_call>",
            r#"w{"city":"a","days":2}"#,
        ),
    ]);
}

#[test]
fn reasoning_of_every_format() {
    check(&[
        ("none mm", "</mm:think>Hi", r#"C"Hi""#),
        ("none mm", "<mm:think>R</mm:think>\nHi", r#"R"R" C"Hi""#),
        ("none kimi_vl", "◁think▷R◁/think▷C", r#"R"R" C"C""#),
        ("none thought", "<thought>\nR\n</thought>\nC", r#"R"R" C"C""#),
        ("none apertus", "<|inner_prefix|>R<|inner_suffix|>C", r#"R"R" C"C""#),
        ("none think open", "R\n</think>\nC", r#"R"R" C"C""#),
        ("none granite32", "Here's my thought process: R Here is my response: C", r#"R"R" C"C""#),
        ("none hunyuan_a13b", "<think>\nR\n</think>\n<answer>\nC\n</answer>", r#"R"R" C"C""#),
        ("none ernie45 open", "R\n</think>\n\n<response>\nC\n</response>\n", r#"R"R" C"C""#),
        ("none apriel open", "R\n[BEGIN FINAL RESPONSE]\nC\n[END FINAL RESPONSE]", r#"R"R" C"C""#),
        ("none cohere", "<|START_THINKING|>R<|END_THINKING|><|START_TEXT|>C<|END_TEXT|>", r#"R"R" C"C""#),
    ]);
}

#[test]
fn calls_inside_reasoning_count_only_at_the_end() {
    let call = "<tool_call>\n<function=p>\n</function>\n</tool_call>";
    check(&[
        ("qwen_xml think open", &format!("a\n{call}\n{call}\n"), r#"R"a" p{} p{}"#),
        (
            "qwen_xml think open",
            &format!("a {call} b</think>c"),
            &format!("R{:?} C\"c\"", format!("a {call} b")),
        ),
        ("qwen_xml think open", &format!("a {call}</think>c"), &format!("R{:?} C\"c\"", format!("a {call}"))),
        ("qwen_xml think open", &format!("a <tool_call> {call}"), r#"R"a <tool_call>" p{}"#),
        ("qwen_xml think open", "a <tool_call>\n<function=", &format!("R{:?}", "a <tool_call>\n<function=")),
    ]);
}

#[test]
fn unicode_of_raw_values_stays_whole() {
    let text = "é漢😀\u{2028}";
    for (format, before, after) in [
        ("qwen_xml", "<function=f>\n<parameter=content>\n", "\n</parameter>\n</function>"),
        ("glm_xml", "<tool_call>f<arg_key>content</arg_key><arg_value>", "</arg_value></tool_call>"),
        ("gemma4", "<|tool_call>call:f{content:<|\"|>", "<|\"|>}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[f(content='", "')]<|tool_call_end|>"),
    ] {
        check(&[(format, &format!("{before}{text}{after}"), &format!("f{{\"content\":\"{text}\"}}"))]);
    }
}

#[test]
fn schemas_that_refer_to_each_other_take_bounded_time() {
    let union = vec![r##"{"$ref": "#/$defs/a"}"##; 200].join(", ");
    let schema = format!(
        r##"{{"properties": {{"x": {{"$ref": "#/$defs/a"}}}}, "$defs": {{"a": {{"anyOf": [{union}]}}}}}}"##
    );
    let schemas = Arc::new(ToolSchemas::new([("f", schema.as_str())].into_iter()));
    let parser = OutputParser::new(None, tool_format(ToolParser::QwenXml), &schemas);
    let text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(Parsed::of(merged(parser, [text])).shown(), r#"f{"x":"1"}"#);
}
