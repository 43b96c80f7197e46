//! Writer of arguments as a JSON object, for calls that are not JSON.

use std::collections::HashSet;

use super::literal;
use super::visits::visit;

/// Writes an object member by member.
#[derive(Default)]
pub(super) struct ArgumentWriter {
    keys: HashSet<String>,
    /// Text that was not taken.
    json: String,
}

impl ArgumentWriter {
    /// Begins a member. Returns false if there is one with this key, which is then kept.
    pub(super) fn begin(&mut self, key: &str) -> bool {
        let is_first = self.keys.is_empty();
        if !self.keys.insert(key.to_owned()) {
            return false;
        }
        self.json.push(if is_first { '{' } else { ',' });
        self.json += &literal::quoted(key);
        self.json.push(':');
        true
    }

    /// Whether a member with this key was begun.
    pub(super) fn has(&self, key: &str) -> bool {
        self.keys.contains(key)
    }

    /// Begins or ends a string.
    pub(super) fn quote(&mut self) {
        self.json.push('"');
    }

    /// Adds to a string.
    pub(super) fn text(&mut self, text: &str) {
        visit(text.len());
        literal::escape(text, &mut self.json);
    }

    /// Adds JSON text.
    pub(super) fn json(&mut self, json: &str) {
        visit(json.len());
        self.json += json;
    }

    /// Ends the object.
    pub(super) fn finish(&mut self) {
        if self.keys.is_empty() {
            self.json.push('{');
        }
        self.json.push('}');
    }

    /// Takes the text written since the last call.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.json)
    }
}
