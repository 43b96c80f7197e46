//! Translation of ggml's tensor names to Hugging Face's.

/// The Hugging Face name of a tensor, or `None` if no supported architecture has it.
pub(super) fn hugging_face(name: &str) -> Option<String> {
    let global = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(name) = global {
        return Some(name.to_owned());
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let canonical = layer.parse::<u32>().is_ok_and(|number| number.to_string() == layer);
    let (module, kind) = part.rsplit_once('.')?;
    if !canonical || !matches!(kind, "weight" | "bias") {
        return None;
    }
    let module = match module {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_norm" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{module}.{kind}"))
}

/// The projection of a query or key weight or bias of any layer.
pub(super) fn projection(name: &str) -> Option<Projection> {
    let (_, part) = name.strip_prefix("blk.")?.split_once('.')?;
    match part {
        "attn_q.weight" | "attn_q.bias" => Some(Projection::Query),
        "attn_k.weight" | "attn_k.bias" => Some(Projection::Key),
        _ => None,
    }
}

/// A projection whose rows are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Projection {
    Query,
    Key,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_to_hugging_face() {
        for (ggml, expected) in [
            ("token_embd.weight", Some("model.embed_tokens.weight")),
            ("output.weight", Some("lm_head.weight")),
            ("blk.0.attn_q.bias", Some("model.layers.0.self_attn.q_proj.bias")),
            ("blk.31.ffn_norm.weight", Some("model.layers.31.post_attention_layernorm.weight")),
            ("blk.007.ffn_norm.weight", None),
            ("blk.-1.ffn_norm.weight", None),
            ("blk.1.ffn_norm.scale", None),
            ("blk.1.ffn_gate_exps.weight", None),
            ("rope_freqs.weight", None),
        ] {
            assert_eq!(hugging_face(ggml).as_deref(), expected, "{ggml}");
        }
    }
}
