//! The plain values that more than one crate names: dtypes, block ids, head shapes, the inputs of attention, the resolved
//! parameters of a request, and the error for a field. No logic beyond their own conversions.

mod attention;
mod block;
mod dtype;
mod epilogue;
mod field_error;
mod head_shape;
mod outputs;
mod sampling;

pub use attention::{AttentionParams, AttentionRow};
pub use block::{BlockCopy, BlockId, HostBlockId};
pub use dtype::{Dtype, KvDtype};
pub use epilogue::Epilogue;
pub use field_error::FieldError;
pub use head_shape::HeadShape;
pub use outputs::{LogprobsRequest, OutputScope, RequestedOutputs};
pub use sampling::{PenaltyScope, Sampling};
