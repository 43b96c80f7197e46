//! Which formats a model uses, judged by its chat template.

use super::{ReasoningFormat, ToolFormat};

/// The formats that a chat template writes and explains. None where it shows no format, one that is not known
/// here, or several.
pub fn detect(chat_template: &str) -> (Option<ReasoningFormat>, Option<ToolFormat>) {
    let reasoning = ["<think>", "</think>"]
        .iter()
        .any(|tag| chat_template.contains(tag))
        .then_some(ReasoningFormat::ThinkTags);
    let tools = [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral];
    // A template's strings may have their quotes escaped.
    let plain = chat_template.replace('\\', "");
    let mut shown = tools.into_iter().filter(|&format| shows(&plain, format));
    let tools = shown.next().filter(|_| shown.next().is_none());
    (reasoning, tools)
}

fn shows(template: &str, format: ToolFormat) -> bool {
    let has = |text: &str| template.contains(text);
    match format {
        // Others put tags of their own inside the same ones.
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
