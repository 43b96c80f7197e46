//! The plain values that more than one crate names: dtypes, block ids, head shapes, the resolved parameters of a request,
//! and the error for a field. No logic beyond their own conversions.

mod block;
mod dtype;
mod field_error;
mod head_shape;
mod outputs;
mod sampling;

pub use block::{BlockCopy, BlockId, HostBlockId};
pub use dtype::{Dtype, KvDtype};
pub use field_error::FieldError;
pub use head_shape::HeadShape;
pub use outputs::{LogprobsRequest, OutputScope, RequestedOutputs};
pub use sampling::{PenaltyScope, Sampling};
