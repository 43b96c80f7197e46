//! Options of decoded text.

/// Options of decoding token ids to text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Leave out special tokens.
    pub skip_special_tokens: bool,
    /// Put one space between a special or added token and its neighbours, as the tokenizers written in Python do and
    /// those written in Rust do not. No effect while special tokens are skipped.
    pub spaces_between_special_tokens: bool,
    /// Keep the stop string at the end of the text. No effect without stop strings.
    pub include_stop_str_in_output: bool,
}

impl Default for TextOptions {
    /// Skips special tokens, adds no spaces, removes the stop string.
    fn default() -> Self {
        Self {
            skip_special_tokens: true,
            spaces_between_special_tokens: false,
            include_stop_str_in_output: false,
        }
    }
}
