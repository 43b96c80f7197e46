//! The rows: the formats of reasoning and of tool calls, as data. The names are those of the options, in
//! `definitions/enums.toml` of `rust/frontend`.

use penstock_types::{
    CallForm, Header, IdPlace, JsonCall, LiteralCall, ObjectKeys, ReasoningFormat, ReasoningParser,
    Spellings, TaggedCall, ToolFormat, ToolLiterals, ToolParser, Wrap,
};

/// The format of this name.
pub fn tool_format(parser: ToolParser) -> Option<&'static ToolFormat> {
    Some(match parser {
        ToolParser::None => return None,
        ToolParser::Hermes => &HERMES,
        ToolParser::Llama3Json => &LLAMA3_JSON,
        ToolParser::Mistral => &MISTRAL,
        ToolParser::KimiK2 => &KIMI_K2,
        ToolParser::KimiK3 => &KIMI_K3,
        ToolParser::DeepseekV3 => &DEEPSEEK_V3,
        ToolParser::DeepseekV31 => &DEEPSEEK_V31,
        ToolParser::Dsml32 => &DSML32,
        ToolParser::Dsml4 => &DSML4,
        ToolParser::QwenXml => &QWEN_XML,
        ToolParser::SeedXml => &SEED_XML,
        ToolParser::GlmXml => &GLM_XML,
        ToolParser::Hy3Xml => &HY3_XML,
        ToolParser::MinimaxM1 => &MINIMAX_M1,
        ToolParser::MinimaxM2 => &MINIMAX_M2,
        ToolParser::Minicpm5 => &MINICPM5,
        ToolParser::Step3 => &STEP3,
        ToolParser::Pythonic => &PYTHONIC,
        ToolParser::Llama4Pythonic => &LLAMA4_PYTHONIC,
        ToolParser::Olmo3 => &OLMO3,
        ToolParser::Lfm2 => &LFM2,
        ToolParser::Gemma4 => &GEMMA4,
        ToolParser::Functiongemma => &FUNCTIONGEMMA,
        ToolParser::CohereJson => &COHERE_JSON,
        ToolParser::Apertus => &APERTUS,
        ToolParser::Internlm2 => &INTERNLM2,
        ToolParser::Granite3 => &GRANITE3,
        ToolParser::Granite20bFc => &GRANITE_20B_FC,
        ToolParser::Jamba => &JAMBA,
        ToolParser::HunyuanA13b => &HUNYUAN_A13B,
        ToolParser::NemotronNano2 => &NEMOTRON_NANO2,
        ToolParser::Phi4Mini => &PHI4_MINI,
        ToolParser::Xlam => &XLAM,
        ToolParser::FunctionaryV31 => &FUNCTIONARY_V31,
        ToolParser::Solar => &SOLAR,
    })
}

/// The format of this name.
pub fn reasoning_format(parser: ReasoningParser) -> Option<&'static ReasoningFormat> {
    Some(match parser {
        ReasoningParser::None => return None,
        ReasoningParser::Think => &THINK,
        ReasoningParser::Seed => &SEED,
        ReasoningParser::Mm => &MM,
        ReasoningParser::Hy3 => &HY3,
        ReasoningParser::KimiK3 => &KIMI_K3_THINK,
        ReasoningParser::KimiVl => &KIMI_VL,
        ReasoningParser::Mistral => &MISTRAL_THINK,
        ReasoningParser::Gemma4 => &GEMMA4_CHANNEL,
        ReasoningParser::Cohere => &COHERE,
        ReasoningParser::Apertus => &APERTUS_INNER,
        ReasoningParser::Thought => &THOUGHT,
        ReasoningParser::HunyuanA13b => &HUNYUAN_THINK,
        ReasoningParser::Ernie45 => &ERNIE45,
        ReasoningParser::Granite32 => &GRANITE32,
        ReasoningParser::Apriel => &APRIEL,
        ReasoningParser::Solar => &SOLAR_THINK,
    })
}

const fn wrap(open: Spellings, close: Spellings) -> Wrap {
    Wrap { open, close }
}

const NAMED: ObjectKeys =
    ObjectKeys { name: &["name"], arguments: &["arguments", "parameters"], id: &["id"] };

/// Calls that are JSON objects.
const OBJECT: JsonCall = JsonCall { object: Some(NAMED), is_list: false, separator: None, header: None };

const JSON: ToolFormat = ToolFormat {
    section: Wrap::NONE,
    call: Wrap::NONE,
    form: CallForm::Json(OBJECT),
    at_start: false,
    alternative: None,
    ends_reasoning: false,
    literals: None,
};

/// Calls that are JSON objects in a list.
const LIST: ToolFormat = ToolFormat { form: CallForm::Json(JsonCall { is_list: true, ..OBJECT }), ..JSON };

const LITERALS: ToolLiterals = ToolLiterals {
    opening: "",
    call_opening: "",
    name_key: r#"{"name": "#,
    arguments_key: r#", "arguments": "#,
    call_closing: "}",
    separator: ", ",
    closing: "",
};

static HERMES: ToolFormat = ToolFormat {
    call: wrap(&["<tool_call>"], &["</tool_call>"]),
    literals: Some(ToolLiterals {
        call_opening: "<tool_call>\n",
        call_closing: "}\n</tool_call>",
        separator: "\n",
        ..LITERALS
    }),
    ..JSON
};

static LLAMA3_JSON: ToolFormat = ToolFormat {
    call: wrap(&["<|python_tag|>"], &[]),
    form: CallForm::Json(JsonCall { separator: Some(";"), ..OBJECT }),
    at_start: true,
    literals: Some(ToolLiterals { arguments_key: r#", "parameters": "#, separator: "; ", ..LITERALS }),
    ..JSON
};

static MISTRAL: ToolFormat = ToolFormat {
    call: wrap(&["[TOOL_CALLS]"], &[]),
    form: CallForm::Json(JsonCall {
        is_list: true,
        header: Some(Header {
            prefix: "",
            end: &["[ARGS]"],
            end_is_optional: true,
            is_word: true,
            id: IdPlace::After("[CALL_ID]"),
        }),
        ..OBJECT
    }),
    ends_reasoning: true,
    literals: Some(ToolLiterals { opening: "[TOOL_CALLS] [", closing: "]", ..LITERALS }),
    ..JSON
};

static KIMI_K2: ToolFormat = ToolFormat {
    section: wrap(
        &["<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"],
        &["<|tool_calls_section_end|>", "<|tool_call_section_end|>"],
    ),
    call: wrap(&["<|tool_call_begin|>"], &["<|tool_call_end|>"]),
    form: CallForm::Json(header(&["<|tool_call_argument_begin|>"], "", IdPlace::Kimi)),
    ends_reasoning: true,
    ..JSON
};

static DEEPSEEK_V3: ToolFormat = ToolFormat {
    call: wrap(&["<｜tool▁call▁begin｜>"], &["```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"]),
    form: CallForm::Json(header(&["```json"], "function<｜tool▁sep｜>", IdPlace::None)),
    section: wrap(&["<｜tool▁calls▁begin｜>"], &["<｜tool▁calls▁end｜>"]),
    ends_reasoning: true,
    ..JSON
};

static DEEPSEEK_V31: ToolFormat = ToolFormat {
    section: wrap(&["<｜tool▁calls▁begin｜>"], &["<｜tool▁calls▁end｜>"]),
    call: wrap(&["<｜tool▁call▁begin｜>"], &["<｜tool▁call▁end｜>"]),
    form: CallForm::Json(header(&["<｜tool▁sep｜>"], "", IdPlace::None)),
    ends_reasoning: true,
    ..JSON
};

static FUNCTIONARY_V31: ToolFormat = ToolFormat {
    call: wrap(&["<function="], &["</function>"]),
    form: CallForm::Json(header(&[">"], "", IdPlace::None)),
    ..JSON
};

static SOLAR: ToolFormat = ToolFormat {
    section: wrap(&["<|tool_calls|>"], &["<|calls|>"]),
    call: wrap(&["<|tool_call:begin|>"], &["<|tool_call:end|>"]),
    form: CallForm::Json(header(&["<|tool_call:args|>"], "", IdPlace::Before("<|tool_call:name|>"))),
    ends_reasoning: true,
    ..JSON
};

static MINIMAX_M1: ToolFormat = ToolFormat {
    call: wrap(&["<tool_calls>"], &["</tool_calls>"]),
    form: CallForm::Json(JsonCall { separator: Some(""), ..OBJECT }),
    ..JSON
};

static INTERNLM2: ToolFormat = ToolFormat {
    call: wrap(&["<|action_start|><|plugin|>"], &["<|action_end|>"]),
    ends_reasoning: true,
    ..JSON
};

static GRANITE_20B_FC: ToolFormat = ToolFormat { call: wrap(&["<function_call>"], &[]), ..JSON };

static GRANITE3: ToolFormat = ToolFormat { call: wrap(&["<|tool_call|>", "<tool_call>"], &[]), ..LIST };

static JAMBA: ToolFormat =
    ToolFormat { call: wrap(&["<tool_calls>"], &["</tool_calls>"]), ends_reasoning: true, ..LIST };

static HUNYUAN_A13B: ToolFormat = ToolFormat { call: wrap(&["<tool_calls>"], &["</tool_calls>"]), ..LIST };

static NEMOTRON_NANO2: ToolFormat = ToolFormat { call: wrap(&["<TOOLCALL>"], &["</TOOLCALL>"]), ..LIST };

static PHI4_MINI: ToolFormat =
    ToolFormat { call: wrap(&["functools", "<|tool_call|>"], &["<|/tool_call|>"]), ..LIST };

static XLAM: ToolFormat = ToolFormat {
    call: wrap(&["```json", "<tool_call>", "[TOOL_CALLS]"], &["```", "</tool_call>"]),
    at_start: true,
    ..LIST
};

static COHERE_JSON: ToolFormat = ToolFormat {
    call: wrap(&["<|START_ACTION|>"], &["<|END_ACTION|>"]),
    form: CallForm::Json(JsonCall {
        object: Some(ObjectKeys { name: &["tool_name"], arguments: &["parameters"], id: &["tool_call_id"] }),
        is_list: true,
        ..OBJECT
    }),
    ends_reasoning: true,
    ..JSON
};

static APERTUS: ToolFormat = ToolFormat {
    call: wrap(&["<|tools_prefix|>"], &["<|tools_suffix|>"]),
    form: CallForm::Json(JsonCall {
        object: Some(ObjectKeys { name: &[], arguments: &[], id: &[] }),
        is_list: true,
        ..OBJECT
    }),
    ends_reasoning: true,
    ..JSON
};

static QWEN_XML: ToolFormat = ToolFormat {
    section: wrap(&["<tool_call>"], &["</tool_call>"]),
    call: wrap(&["<function="], &["</function>"]),
    form: CallForm::Tagged(TaggedCall { trims_line: true, ..tagged(&["<parameter="], &["</parameter>"]) }),
    ..JSON
};

static SEED_XML: ToolFormat = ToolFormat {
    section: wrap(&["<seed:tool_call>"], &["</seed:tool_call>"]),
    call: wrap(&["<function="], &["</function>"]),
    form: CallForm::Tagged(tagged(&["<parameter="], &["</parameter>"])),
    ..JSON
};

static MINIMAX_M2: ToolFormat = ToolFormat {
    section: wrap(&["<minimax:tool_call>"], &["</minimax:tool_call>"]),
    call: wrap(&["<invoke name="], &["</invoke>"]),
    form: CallForm::Tagged(tagged(&["<parameter name="], &["</parameter>"])),
    ..JSON
};

static MINICPM5: ToolFormat = ToolFormat {
    call: wrap(&["<function name="], &["</function>"]),
    form: CallForm::Tagged(tagged(&["<param name="], &["</param>"])),
    ..JSON
};

static STEP3: ToolFormat = ToolFormat {
    section: wrap(&["<｜tool_calls_begin｜>"], &["<｜tool_calls_end｜>"]),
    call: wrap(
        &["<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="],
        &["</steptml:invoke><｜tool_call_end｜>"],
    ),
    form: CallForm::Tagged(tagged(&["<steptml:parameter name="], &["</steptml:parameter>"])),
    ends_reasoning: true,
    ..JSON
};

static GLM_XML: ToolFormat = ToolFormat {
    call: wrap(&["<tool_call>"], &["</tool_call>"]),
    form: CallForm::Tagged(TaggedCall { name_end: &[], ..GLM_CALL }),
    ..JSON
};

static HY3_XML: ToolFormat = ToolFormat {
    section: wrap(
        &["<tool_calls>", "<tool_calls:opensource>"],
        &["</tool_calls>", "</tool_calls:opensource>"],
    ),
    call: wrap(&["<tool_call>", "<tool_call:opensource>"], &["</tool_call>", "</tool_call:opensource>"]),
    form: CallForm::Tagged(TaggedCall {
        name_end: &["<tool_sep>", "<tool_sep:opensource>"],
        key: wrap(&["<arg_key>", "<arg_key:opensource>"], &["</arg_key>", "</arg_key:opensource>"]),
        value: wrap(&["<arg_value>", "<arg_value:opensource>"], &["</arg_value>", "</arg_value:opensource>"]),
        ..GLM_CALL
    }),
    ..JSON
};

static DSML32: ToolFormat = ToolFormat {
    section: wrap(
        &["<｜DSML｜function_calls>", "<|DSML|function_calls>"],
        &["</｜DSML｜function_calls>", "</|DSML|function_calls>"],
    ),
    ..DSML
};

static DSML4: ToolFormat = ToolFormat {
    section: wrap(
        &["<｜DSML｜tool_calls>", "<|DSML|tool_calls>"],
        &["</｜DSML｜tool_calls>", "</|DSML|tool_calls>"],
    ),
    ..DSML
};

/// The calls of DeepSeek, without a section.
const DSML: ToolFormat = ToolFormat {
    call: wrap(&["<｜DSML｜invoke name=", "<|DSML|invoke name="], &["</｜DSML｜invoke>", "</|DSML|invoke>"]),
    form: CallForm::Tagged(TaggedCall {
        attribute: "string=\"",
        ..tagged(
            &["<｜DSML｜parameter name=", "<|DSML|parameter name="],
            &["</｜DSML｜parameter>", "</|DSML|parameter>"],
        )
    }),
    ..JSON
};

static KIMI_K3: ToolFormat = ToolFormat {
    section: wrap(&["<|open|>tools<|sep|>"], &["<|close|>tools<|sep|>"]),
    call: wrap(&["<|open|>call tool="], &["<|close|>call<|sep|>"]),
    form: CallForm::Tagged(TaggedCall {
        name_end: &["<|sep|>"],
        key: wrap(&["<|open|>argument key="], &["<|sep|>"]),
        attribute: "type=\"",
        value: wrap(&[], &["<|close|>argument<|sep|>"]),
        trims_line: false,
    }),
    ends_reasoning: true,
    ..JSON
};

static PYTHONIC: ToolFormat = ToolFormat { form: CallForm::Literal(PYTHON_LIST), at_start: true, ..JSON };

static LLAMA4_PYTHONIC: ToolFormat = ToolFormat {
    call: wrap(&["<|python_start|>"], &["<|python_end|>"]),
    form: CallForm::Literal(PYTHON_LIST),
    at_start: true,
    alternative: Some(&LLAMA3_JSON),
    ..JSON
};

static OLMO3: ToolFormat = ToolFormat {
    call: wrap(&["<function_calls>"], &["</function_calls>"]),
    form: CallForm::Literal(LiteralCall { is_list: false, separator: Some(""), ..PYTHON_LIST }),
    ..JSON
};

static LFM2: ToolFormat = ToolFormat {
    call: wrap(&["<|tool_call_start|>"], &["<|tool_call_end|>"]),
    form: CallForm::Literal(PYTHON_LIST),
    ends_reasoning: true,
    ..JSON
};

static GEMMA4: ToolFormat = ToolFormat {
    call: wrap(&["<|tool_call>"], &["<tool_call|>"]),
    form: CallForm::Literal(LiteralCall { quote: "<|\"|>", ..GEMMA_CALL }),
    ends_reasoning: true,
    ..JSON
};

static FUNCTIONGEMMA: ToolFormat = ToolFormat {
    call: wrap(&["<start_function_call>"], &["<end_function_call>"]),
    form: CallForm::Literal(LiteralCall { quote: "<escape>", ..GEMMA_CALL }),
    ends_reasoning: true,
    ..JSON
};

/// A call of a name, with the arguments as a JSON object after it.
const fn header(end: Spellings, prefix: &'static str, id: IdPlace) -> JsonCall {
    let header = Header { prefix, end, end_is_optional: false, is_word: prefix.is_empty(), id };
    JsonCall { object: None, is_list: false, separator: None, header: Some(header) }
}

/// A call whose tags have names as attributes or after an equals sign.
const fn tagged(key: Spellings, value_end: Spellings) -> TaggedCall {
    TaggedCall {
        name_end: &[">"],
        key: wrap(key, &[">"]),
        attribute: "",
        value: wrap(&[], value_end),
        trims_line: false,
    }
}

const GLM_CALL: TaggedCall = TaggedCall {
    name_end: &[],
    key: wrap(&["<arg_key>"], &["</arg_key>"]),
    attribute: "",
    value: wrap(&["<arg_value>"], &["</arg_value>"]),
    trims_line: false,
};

/// A list of calls in Python.
const PYTHON_LIST: LiteralCall =
    LiteralCall { prefix: "", is_list: true, separator: None, open: '(', assign: '=', close: ')', quote: "" };

const GEMMA_CALL: LiteralCall = LiteralCall {
    prefix: "call:",
    is_list: false,
    separator: None,
    open: '{',
    assign: ':',
    close: '}',
    quote: "",
};

const fn block(open: Spellings, close: Spellings) -> ReasoningFormat {
    ReasoningFormat {
        block: wrap(open, close),
        label: "",
        answer: Wrap::NONE,
        has_bare_close: false,
        repeats: false,
    }
}

static THINK: ReasoningFormat = block(&["<think>"], &["</think>"]);

static SEED: ReasoningFormat = block(&["<seed:think>"], &["</seed:think>"]);

static MM: ReasoningFormat =
    ReasoningFormat { has_bare_close: true, ..block(&["<mm:think>"], &["</mm:think>"]) };

static HY3: ReasoningFormat = block(&["<think>", "<think:opensource>"], &["</think>", "</think:opensource>"]);

static KIMI_K3_THINK: ReasoningFormat = ReasoningFormat {
    answer: wrap(&["<|open|>response<|sep|>"], &["<|close|>response<|sep|>", "<|close|>message<|sep|>"]),
    ..block(&["<|open|>think<|sep|>"], &["<|close|>think<|sep|>"])
};

static KIMI_VL: ReasoningFormat = block(&["◁think▷"], &["◁/think▷"]);

static MISTRAL_THINK: ReasoningFormat = block(&["[THINK]", "<think>"], &["[/THINK]", "</think>"]);

static GEMMA4_CHANNEL: ReasoningFormat =
    ReasoningFormat { label: "thought", repeats: true, ..block(&["<|channel>"], &["<channel|>"]) };

static COHERE: ReasoningFormat = ReasoningFormat {
    answer: wrap(&["<|START_RESPONSE|>", "<|START_TEXT|>"], &["<|END_RESPONSE|>", "<|END_TEXT|>"]),
    ..block(&["<|START_THINKING|>"], &["<|END_THINKING|>"])
};

static APERTUS_INNER: ReasoningFormat = block(&["<|inner_prefix|>"], &["<|inner_suffix|>"]);

static THOUGHT: ReasoningFormat = block(&["<thought>"], &["</thought>"]);

static HUNYUAN_THINK: ReasoningFormat =
    ReasoningFormat { answer: wrap(&["<answer>"], &["</answer>"]), ..block(&["<think>"], &["</think>"]) };

static ERNIE45: ReasoningFormat =
    ReasoningFormat { answer: wrap(&["<response>"], &["</response>"]), ..block(&["<think>"], &["</think>"]) };

static GRANITE32: ReasoningFormat = block(
    &["Here is my thought process:", "Here's my thought process:"],
    &["Here is my response:", "Here's my response:"],
);

static APRIEL: ReasoningFormat = ReasoningFormat {
    answer: wrap(&[], &["[END FINAL RESPONSE]"]),
    ..block(&["Here are my reasoning steps:"], &["[BEGIN FINAL RESPONSE]"])
};

static SOLAR_THINK: ReasoningFormat = block(&["<|think|>"], &["<|end|><|begin|>assistant<|content|>"]);
