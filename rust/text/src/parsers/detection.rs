//! Detection of a model's output formats from its chat template.
//!
//! It depends on the template files of the model or of the configuration, and runs once, when the model is opened:
//! neither a message nor a template of a request changes the formats. It looks for the tags that a format needs, because
//! most models have a template that no list of known ones has. A wrong answer costs parsed calls or reasoning, and the
//! engine's options `tool_parser` and `reasoning_parser` correct it.

use penstock_types::{FormatSpec, ReasoningParser, ToolParser};

use super::table::{reasoning_format, tool_format};

/// Text that only templates of one format of tool calls have, all of it; the first row that matches counts.
const TOOL_FINGERPRINTS: &[(&[&str], ToolParser)] = &[
    // Formats that are not parsed, some of which use the tags of others.
    (&["<|channel|>"], ToolParser::None),
    (&["]<]minimax[>["], ToolParser::None),
    (&[">>>all"], ToolParser::None),
    (&["<|open|>", "<|end_of_msg|>"], ToolParser::KimiK3),
    (&["<|tool_calls_section_begin|>"], ToolParser::KimiK2),
    (&["｜DSML｜", "function_calls"], ToolParser::Dsml32),
    (&["｜DSML｜", "tool_calls"], ToolParser::Dsml4),
    (&["<|tool_call>call:"], ToolParser::Gemma4),
    (&["<start_function_call>"], ToolParser::Functiongemma),
    (&["<|START_ACTION|>"], ToolParser::CohereJson),
    (&["<seed:tool_call>"], ToolParser::SeedXml),
    (&["<minimax:tool_call>"], ToolParser::MinimaxM2),
    (&["<steptml:invoke"], ToolParser::Step3),
    (&["<function=", "<parameter="], ToolParser::QwenXml),
    (&["<tool_sep", "<arg_key"], ToolParser::Hy3Xml),
    (&["<arg_key>"], ToolParser::GlmXml),
    (&["<|tool_call_start|>"], ToolParser::Lfm2),
    (&["<|tool_list_start|>"], ToolParser::Lfm2),
    (&["<param name=\""], ToolParser::Minicpm5),
    (&["<｜tool▁calls▁begin｜>", "function<｜tool▁sep｜>"], ToolParser::DeepseekV3),
    (&["<｜tool▁calls▁begin｜>", "'function' + '<｜tool▁sep｜>"], ToolParser::DeepseekV3),
    (&["<｜tool▁calls▁begin｜>"], ToolParser::DeepseekV31),
    (&["<|tool_call:begin|>"], ToolParser::Solar),
    (&["<|tools_prefix|>"], ToolParser::Apertus),
    (&["<|action_start|>", "<|plugin|>"], ToolParser::Internlm2),
    (&["<TOOLCALL>"], ToolParser::NemotronNano2),
    (&["<|python_start|>"], ToolParser::Llama4Pythonic),
    (&["<function_calls>"], ToolParser::Olmo3),
];

/// The same for reasoning.
const REASONING_FINGERPRINTS: &[(&[&str], ReasoningParser)] = &[
    (&["<|channel|>"], ReasoningParser::None),
    (&["<|open|>", "<|end_of_msg|>"], ReasoningParser::KimiK3),
    (&["<seed:think>"], ReasoningParser::Seed),
    (&["</mm:think>"], ReasoningParser::Mm),
    (&["</think:"], ReasoningParser::Hy3),
    (&["◁think▷"], ReasoningParser::KimiVl),
    (&["[THINK]"], ReasoningParser::Mistral),
    (&["<|channel>"], ReasoningParser::Gemma4),
    (&["<|START_THINKING|>"], ReasoningParser::Cohere),
    (&["<|inner_prefix|>"], ReasoningParser::Apertus),
    (&["<thought>"], ReasoningParser::Thought),
    (&["[BEGIN FINAL RESPONSE]"], ReasoningParser::Apriel),
    (&["my thought process:"], ReasoningParser::Granite32),
    (&["<|think|>", "<|begin|>"], ReasoningParser::Solar),
    (&["<think>"], ReasoningParser::Think),
    (&["</think>"], ReasoningParser::Think),
];

/// The formats of reasoning and of tool calls that a chat template writes and explains. Each is `None` if the template
/// has no known format; tool calls also if it has more than one of those that share their tags.
pub fn detect(chat_template: &str) -> FormatSpec {
    // Quotes may be escaped in the template's strings.
    let plain = chat_template.replace('\\', "");
    let reasoning = fingerprint(&plain, REASONING_FINGERPRINTS).and_then(reasoning_format);
    let tools = fingerprint(&plain, TOOL_FINGERPRINTS).or_else(|| {
        let shared = [ToolParser::Hermes, ToolParser::Llama3Json, ToolParser::Mistral];
        let mut shown = shared.into_iter().filter(|&parser| shows(&plain, parser));
        shown.next().filter(|_| shown.next().is_none())
    });
    FormatSpec { reasoning, tools: tools.and_then(tool_format) }
}

fn fingerprint<T: Copy>(template: &str, rows: &[(&[&str], T)]) -> Option<T> {
    let row = rows.iter().find(|(texts, _)| texts.iter().all(|text| template.contains(text)));
    row.map(|(_, parser)| *parser)
}

fn shows(template: &str, parser: ToolParser) -> bool {
    let has = |text: &str| template.contains(text);
    match parser {
        ToolParser::Hermes => has("<tool_call>") && has("\"name\":") && has("\"arguments\":"),
        ToolParser::Llama3Json => has("<|start_header_id|>") && has("\"name\":") && has("\"parameters\":"),
        ToolParser::Mistral => has("[TOOL_CALLS]"),
        _ => false,
    }
}
