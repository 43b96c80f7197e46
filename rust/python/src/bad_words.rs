//! `bad_words`: words as the token ids that spell them.

use penstock_text::{TextError, Tokenizer};

/// Most token ids of all spellings of a request's words.
pub const MAX_IDS: usize = 1024;

/// The spellings of `words`, unless they are too long together: each as the tokenizer writes it at the beginning of a text, and after a space.
///
/// A word within a word has other tokens more often than not, so it is not banned there.
pub fn spellings(words: &[String], tokenizer: &Tokenizer) -> Result<Option<Vec<Vec<u32>>>, TextError> {
    let (mut spellings, mut num_ids) = (Vec::new(), 0);
    for word in words {
        for text in [word.clone(), format!(" {}", word.trim_start())] {
            let ids = tokenizer.encode(&text, false)?;
            if !ids.is_empty() && !spellings.contains(&ids) {
                num_ids += ids.len();
                spellings.push(ids);
            }
            if num_ids > MAX_IDS {
                return Ok(None);
            }
        }
    }
    Ok(Some(spellings))
}
