//! Selection of the best outputs: `best_of` and beam search; and the score and the embedding of a text.
//!
//! Both selections run ordinary requests and are complete only when all of them have finished. Nothing here waits.

mod beam_search;
mod best_of;
mod pooling;
mod score;
mod search;

pub use beam_search::{BeamSearch, BeamStep};
pub use best_of::best_of;
pub use pooling::{PoolingError, pool};
pub use score::{ScoreError, score};
