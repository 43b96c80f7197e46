//! The ranges of a model's generation defaults.

use std::path::Path;

use penstock_types::{FieldError, GenerationConfig, Sampling};

/// Removes the values that no request may have, each with a warning that names the file and the field. Token ids are
/// checked where the vocabulary is known.
pub(crate) fn remove_unfitting(generation: &mut GenerationConfig, file: &Path) {
    let warn = |error: &FieldError| log::warn!("{}: {error}; the value is ignored", file.display());
    while let Err(error) = sampling(generation).check() {
        warn(&error);
        match error.field {
            "temperature" => generation.temperature = None,
            "top_p" => generation.top_p = None,
            "min_p" => generation.min_p = None,
            "typical_p" => generation.typical_p = None,
            "epsilon_cutoff" => generation.epsilon_cutoff = None,
            "repetition_penalty" => generation.repetition_penalty = None,
            "no_repeat_ngram_size" => generation.no_repeat_ngram_size = None,
            field => unreachable!("{field} has its default; this is a bug"),
        }
    }
    let lengths =
        [("max_length", &mut generation.max_length), ("max_new_tokens", &mut generation.max_new_tokens)];
    for (field, length) in lengths {
        if *length == Some(0) {
            warn(&FieldError::new(field, 0, "at least 1"));
            *length = None;
        }
    }
}

/// The parameters of a request without any.
fn sampling(generation: &GenerationConfig) -> Sampling {
    let default = Sampling::default();
    Sampling {
        temperature: generation.temperature.unwrap_or(default.temperature),
        top_p: generation.top_p.unwrap_or(default.top_p),
        min_p: generation.min_p.unwrap_or(default.min_p),
        typical_p: generation.typical_p.unwrap_or(default.typical_p),
        epsilon_cutoff: generation.epsilon_cutoff.unwrap_or(default.epsilon_cutoff),
        repetition_penalty: generation.repetition_penalty.unwrap_or(default.repetition_penalty),
        no_repeat_ngram_size: generation.no_repeat_ngram_size.unwrap_or(default.no_repeat_ngram_size),
        ..default
    }
}
