//! Qwen2 and Qwen2.5: biases on q, k and v, a tied head in the small sizes, windows from a layer on if switched on.

use crate::config::{Family, ModelConfig, ModelError, qwen_windows};
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "Qwen2ForCausalLM", model_type: "qwen2", head_dim: None, refine };

fn refine(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    model.qkv_bias = true;
    qwen_windows(fields, model)
}
