//! The names of an adapter's tensors.

/// A matrix of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    A,
    B,
}

/// Prefixes that PEFT and wrappers of the base model add, and that are not in its own names.
const PREFIX: &str = "base_model.model.";
const WRAPPERS: [(&str, &str); 2] = [("model.language_model.", "model."), ("language_model.", "")];

/// Parts of adapters that are not supported, by a part of the name of a tensor.
const REFUSED: [(&str, &str); 6] = [
    ("lora_magnitude_vector", "belongs to DoRA, which is not supported"),
    ("lora_embedding_", "adapts an embedding, which is not supported"),
    ("trainable_tokens", "belongs to trainable tokens, which are not supported"),
    ("base_layer", "replaces a tensor of the base model, which is not supported"),
    (".lora_A.bias", "is the bias of an update, which is not supported"),
    (".lora_B.bias", "is the bias of an update, which is not supported"),
];

/// The module of a tensor in the base model, and the part. The error completes a sentence about the tensor.
pub(super) fn parse(name: &str) -> Result<(String, Part), &'static str> {
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
    let module = module.strip_prefix(PREFIX).unwrap_or(module);
    let wrapper = WRAPPERS.iter().find_map(|(from, to)| Some((to, module.strip_prefix(from)?)));
    Ok((wrapper.map_or_else(|| module.to_owned(), |(to, rest)| format!("{to}{rest}")), part))
}

#[cfg(test)]
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
        ] {
            assert_eq!(parse(name), Ok((module.to_owned(), Part::A)), "{name}");
        }
        assert_eq!(parse("lm_head.lora_B.weight"), Ok(("lm_head".to_owned(), Part::B)));
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
