//! `describe`: a summary of a checkpoint, read without its weights; for `penstock info`.

use std::path::PathBuf;

use penstock_checkpoint::{Checkpoint, FileFormat};
use penstock_runner::{Inspection, NeededMemory, inspect};
use penstock_text::Tokenizer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::detach::detach_deep;
use crate::errors::Error;

/// The inspection, with the reasons why the engine cannot open the model with its own tokenizer.
fn inspect_with_tokenizer(checkpoint: &Checkpoint) -> Inspection {
    let mut found = inspect(checkpoint);
    let reasons = &mut found.unsupported;
    match checkpoint.text().tokenizer() {
        Ok(source) => {
            let tokenizer = Tokenizer::with_added_tokens(source, checkpoint.text().added_tokens());
            reasons.extend(tokenizer.err().map(|error| error.to_string()));
        }
        Err(error) => reasons.push(error.to_string()),
    }
    found
}

/// See `_core.pyi`.
#[pyfunction]
pub fn describe(py: Python<'_>, path: PathBuf) -> Result<Bound<'_, PyDict>, Error> {
    let read = || {
        let checkpoint = Checkpoint::open(&path)?;
        let found = inspect_with_tokenizer(&checkpoint);
        Ok::<_, Error>((checkpoint, found))
    };
    let (checkpoint, found) = detach_deep(py, read, || ())??;
    let description = checkpoint.description();
    let format = match description.format {
        FileFormat::Safetensors => "safetensors".to_owned(),
        FileFormat::Gguf(version) => format!("GGUF version {version}"),
        FileFormat::Converted(version) => format!("converted, version {version}"),
    };
    let result = PyDict::new(py);
    result.set_item("format", format)?;
    result.set_item("files", description.files)?;
    result.set_item("tensors", description.tensors)?;
    result.set_item("elements", description.elements)?;
    result.set_item("bytes", description.bytes)?;
    result.set_item("storage", description.storage)?;
    result.set_item("quantization", description.quantization)?;
    result.set_item("config", checkpoint.config().to_string())?;
    let generation =
        serde_json::to_string(checkpoint.text().generation()).expect("all values have a JSON form");
    result.set_item("generation_config", generation)?;
    result.set_item("writer_version", checkpoint.writer_version())?;
    result.set_item("has_tokenizer", checkpoint.text().tokenizer().is_ok())?;
    result.set_item("unsupported", found.unsupported)?;
    result.set_item("parameters", found.parameters)?;
    let memory = |memory: NeededMemory| {
        let sizes = PyDict::new(py);
        sizes.set_item("weights", memory.weights)?;
        sizes.set_item("workspace", memory.workspace)?;
        sizes.set_item("kv_cache", memory.kv_cache)?;
        sizes.set_item("max_model_len", memory.max_model_len)?;
        Ok::<_, PyErr>(sizes)
    };
    result.set_item("memory", found.memory.map(memory).transpose()?)?;
    result.set_item("has_chat_template", checkpoint.text().chat_template().is_some())?;
    Ok(result)
}
