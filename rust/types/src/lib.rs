//! The plain values that more than one crate names: dtypes, block ids, head shapes, the inputs of attention, the
//! resolved parameters of a request, and the error for a field. No logic beyond their own conversions.

#[cfg(not(all(
    any(target_os = "linux", target_os = "macos", windows),
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!("Penstock supports Linux, macOS and Windows on 64-bit x86 and Arm CPUs");

mod attention;
mod block;
#[rustfmt::skip]
#[allow(missing_docs, reason = "the names say it")]
pub mod config_limits;
mod device;
mod dtype;
pub mod engine_config;
#[rustfmt::skip]
mod enums;
mod epilogue;
mod field_error;
mod formats;
mod generation;
mod head_shape;
mod json;
mod kv_events;
mod low_rank;
mod named;
mod outputs;
mod quantization;
#[rustfmt::skip]
mod sampling;
mod token;
mod weight;

pub use attention::{AttentionParams, AttentionRow};
pub use block::{BlockCopy, BlockId, HostBlockId};
pub use device::Device;
pub use dtype::f16_to_f32;
pub use engine_config::EngineConfig;
pub use enums::{
    Dtype, KvDtype, KvEventFormat, LogprobsMode, OutputScope, PenaltyScope, PreemptionMode, PreemptionVictim,
    ReasoningParser, Speculation, ToolParser, Unread, WeightType,
};
pub use epilogue::Epilogue;
pub use field_error::FieldError;
pub use formats::{
    CallForm, FormatSpec, Header, IdPlace, JsonCall, LiteralCall, ObjectKeys, ReasoningFormat, Spellings,
    TaggedCall, ToolFormat, ToolLiterals, Wrap,
};
pub use generation::GenerationConfig;
pub use head_shape::HeadShape;
pub use json::Json;
pub use kv_events::KvEvents;
pub use low_rank::{LowRankShape, LowRankUpdate, PackedAdapter};
pub use named::{Auto, Named};
pub use outputs::{LogprobsRequest, RequestedOutputs};
pub use quantization::{GROUP_SIZES, Quantization, WeightScheme};
pub use sampling::Sampling;
pub use token::{Token, TokenDetails};
pub use weight::{
    Activations, CodeBits, Grid, GridRows, MAX_E4M3_SCALE, Minimum, OUTER_GROUP, ScaleFormat, WeightFormat,
};
