//! `bad_words`: words as the token id sequences that are banned.

use penstock_text::{TextError, Tokenizer};

/// Maximum number of token ids of all sequences of a request together.
pub const MAX_IDS: usize = 1024;

/// The tokenisations of `words`: of each word at the beginning of a text, and after a space. `None` if they have more
/// than [`MAX_IDS`] ids in all.
///
/// A word inside another word usually has other tokens, so it is not banned there.
pub fn tokenisations(words: &[String], tokenizer: &Tokenizer) -> Result<Option<Vec<Vec<u32>>>, TextError> {
    let (mut sequences, mut num_ids) = (Vec::new(), 0);
    let max_bytes = MAX_IDS.saturating_mul(tokenizer.max_token_bytes());
    for word in words {
        if word.len() > max_bytes {
            return Ok(None);
        }
        for text in [word.clone(), format!(" {}", word.trim_start())] {
            let ids = tokenizer.encode(&text, false)?;
            if !ids.is_empty() && !sequences.contains(&ids) {
                num_ids += ids.len();
                sequences.push(ids);
            }
            if num_ids > MAX_IDS {
                return Ok(None);
            }
        }
    }
    Ok(Some(sequences))
}
