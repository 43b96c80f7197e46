//! Detection of a model's output formats from its chat template.
//!
//! It depends on the template files of the model or of the configuration, and runs once, when the model is opened:
//! neither a message nor a template of a request changes the formats. It looks for the tags that a format needs, because
//! most models have a template that no list of known ones has. A wrong answer costs parsed calls or reasoning, and the
//! engine's options `tool_parser` and `reasoning_parser` correct it.

use super::format::{ReasoningFormat, ToolFormat};

/// The formats of reasoning and of tool calls that a chat template writes and explains. Each is `None` if the template
/// has no known format; tool calls also if it has more than one.
pub fn detect(chat_template: &str) -> (Option<ReasoningFormat>, Option<ToolFormat>) {
    let reasoning = ["<think>", "</think>"]
        .iter()
        .any(|tag| chat_template.contains(tag))
        .then_some(ReasoningFormat::ThinkTags);
    let tools = [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral];
    // Quotes may be escaped in the template's strings.
    let plain = chat_template.replace('\\', "");
    let mut shown = tools.into_iter().filter(|&format| shows(&plain, format));
    let tools = shown.next().filter(|_| shown.next().is_none());
    (reasoning, tools)
}

fn shows(template: &str, format: ToolFormat) -> bool {
    let has = |text: &str| template.contains(text);
    match format {
        // Other formats use the same tags with tags of their own inside.
        ToolFormat::Hermes => {
            has("<tool_call>")
                && has("\"name\":")
                && has("\"arguments\":")
                && !["<function=", "<parameter=", "<arg_key>"].into_iter().any(has)
        }
        ToolFormat::Llama3Json => has("<|start_header_id|>") && has("\"name\":") && has("\"parameters\":"),
        ToolFormat::Mistral => has("[TOOL_CALLS]"),
    }
}
