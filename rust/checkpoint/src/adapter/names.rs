//! The names of an adapter's tensors.

/// A matrix of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    A,
    B,
}

/// PEFT's prefix, and the beginnings of names with those in a causal language model: of models in a wrapper, and of
/// models without a head.
const PREFIX: &str = "base_model.model.";
const WRAPPERS: [(&str, &str); 3] =
    [("model.language_model.", "model."), ("language_model.", ""), ("layers.", "model.layers.")];

/// Parts of adapters that are not supported, by a part of the name of a tensor.
const REFUSED: [(&str, &str); 6] = [
    ("lora_magnitude_vector", "belongs to DoRA, which is not supported"),
    ("lora_embedding_", "adapts an embedding, which is not supported"),
    ("trainable_tokens", "belongs to trainable tokens, which are not supported"),
    ("base_layer", "replaces a tensor of the base model, which is not supported"),
    (".lora_A.bias", "is the bias of an update, which is not supported"),
    (".lora_B.bias", "is the bias of an update, which is not supported"),
];

/// The name of a tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TensorName {
    /// The module in the base model.
    pub module: String,
    /// The name of the module that patterns match: with the prefix of a wrapper.
    pub wrapped: String,
    pub part: Part,
}

/// Reads the name of a tensor. The error completes a sentence about the tensor.
pub(super) fn parse(name: &str) -> Result<TensorName, &'static str> {
    if let Some((_, problem)) = REFUSED.iter().find(|(part, _)| name.contains(part)) {
        return Err(problem);
    }
    let unknown = "is neither lora_A nor lora_B of a linear layer; full tensors (modules_to_save, bias) are not supported";
    let found = [(".lora_A.", Part::A), (".lora_B.", Part::B)]
        .into_iter()
        .find_map(|(middle, part)| Some((name.split_once(middle)?, part)));
    let Some(((module, rest), part)) = found else { return Err(unknown) };
    // `weight`, or in a raw state dictionary the name of the adapter before it.
    let kind =
        rest.rsplit_once('.').map_or(rest, |(adapter, kind)| if adapter.contains('.') { "" } else { kind });
    if kind != "weight" {
        return Err(unknown);
    }
    let wrapped = module.strip_prefix(PREFIX).unwrap_or(module).to_owned();
    let wrapper = WRAPPERS.iter().find_map(|(from, to)| Some((to, wrapped.strip_prefix(from)?)));
    let module = wrapper.map_or_else(|| wrapped.clone(), |(to, rest)| format!("{to}{rest}"));
    Ok(TensorName { module, wrapped, part })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn prefixes_and_adapter_names_are_removed() {
        let module = "model.layers.0.self_attn.q_proj";
        for name in [
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
            "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
            "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight",
            "base_model.model.layers.0.self_attn.q_proj.lora_A.weight",
        ] {
            let parsed = parse(name).unwrap();
            assert_eq!((parsed.module.as_str(), parsed.part), (module, Part::A), "{name}");
            let wrapped = name.split(".lora_A").next().unwrap();
            assert_eq!(parsed.wrapped, wrapped.strip_prefix(PREFIX).unwrap_or(wrapped));
        }
        let parsed = parse("lm_head.lora_B.weight").unwrap();
        assert_eq!((parsed.module.as_str(), parsed.part), ("lm_head", Part::B));
    }

    #[test]
    fn other_tensors_are_refused() {
        for name in [
            "base_model.model.lm_head.weight",
            "base_model.model.model.embed_tokens.lora_embedding_A",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
            "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.a.b.weight",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.bias",
        ] {
            assert!(parse(name).is_err(), "{name}");
        }
    }
}
