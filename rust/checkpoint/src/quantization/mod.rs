//! Quantised Hugging Face checkpoints. `quantization_config` names the method; the parts of each quantised matrix are
//! replaced by the matrix, under the name of its weight. Modules with a plain weight stay as they are.
//!
//! Options that change the values and are not supported are rejected, never ignored. Calibration options do not change
//! the values. Scales of activations and of the KV cache are not used: the engine computes them itself.

mod compressed_tensors;
mod fp8;
mod gptq;
mod parts;
mod scales;
mod settings;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use self::parts::Parts;
use self::settings::Settings;
use crate::error::CheckpointError;
use crate::json::{self, JsonObject};
use crate::mapped::MappedFile;
use crate::tensor::TensorEntry;

/// Supported methods, for error messages.
const METHODS: &str = "awq, gptq, auto-round, compressed-tensors, fp8, fbgemm_fp8, modelopt; use an unquantised or a GGUF file \
                       of the model instead";

/// Older file with the settings of GPTQ.
const GPTQ_FILE: &str = "quantize_config.json";

/// Replaces the parts of quantised matrices in `tensors`, and removes the settings from the configuration. Returns the
/// tensors and a description of the quantisation; `None` if there are no settings.
pub(crate) fn apply(
    directory: &Path,
    config: &mut JsonObject,
    files: &[MappedFile],
    tensors: BTreeMap<String, TensorEntry>,
) -> Result<(BTreeMap<String, TensorEntry>, Option<String>), CheckpointError> {
    let mut parts = Parts::new(directory, files, tensors);
    let keys = [("quantization_config", None), ("compression_config", Some("compressed-tensors"))];
    for (key, default_method) in keys {
        let object = config.typed(key, "an object", |value| match value {
            Value::Bool(false) => Some(None),
            value => value.as_object().map(Some),
        })?;
        let Some(object) = object.flatten() else { continue };
        let description = read(&Settings::new(&config.path, key, object), default_method, &mut parts)?;
        config.fields.remove(key);
        return Ok((parts.finish(), Some(description)));
    }
    if let Some(file) = json::read_object(&directory.join(GPTQ_FILE))? {
        let description = read(&Settings::new(&file.path, "", &file.fields), Some("gptq"), &mut parts)?;
        return Ok((parts.finish(), Some(description)));
    }
    parts.check_rest("a part of a quantised weight, but config.json has no quantization_config")?;
    Ok((parts.finish(), None))
}

fn read(
    settings: &Settings<'_>,
    default_method: Option<&str>,
    parts: &mut Parts<'_>,
) -> Result<String, CheckpointError> {
    let method = settings.text("quant_method")?.or(default_method);
    let description = match method {
        Some("gptq") => gptq::read_gptq(settings, parts)?,
        Some("awq") => gptq::read_awq(settings, parts)?,
        Some("auto-round" | "intel/auto-round") => gptq::read_auto_round(settings, parts)?,
        Some("compressed-tensors") => compressed_tensors::read(settings, parts)?,
        Some("fp8" | "fbgemm_fp8" | "modelopt") => fp8::read(settings, parts)?,
        Some(other) => return Err(settings.unsupported("quant_method", other, METHODS)),
        None => return Err(settings.malformed("quant_method", format!("missing; supported: {METHODS}"))),
    };
    let name = method.unwrap_or_default();
    parts.check_rest(&format!("no weight of the method {name} has this part"))?;
    if !parts.found_any() {
        let problem = format!("{name}; no tensor is quantised with this method");
        return Err(settings.malformed("quant_method", problem));
    }
    Ok(description)
}

/// "groups of 128", or "a group for each row".
fn describe_groups(width: Option<usize>) -> String {
    width.map_or_else(|| "a scale for each row".to_owned(), |width| format!("groups of {width}"))
}

type Fields = Map<String, Value>;
