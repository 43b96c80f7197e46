//! Parameters that have no effect together, or that contradict each other. Most conflicts are declared with the
//! parameters; here are those that compare their values.

use super::SamplingParams;
use super::structured::ToolChoice;

/// A field, and the values that are allowed beside the other fields; completes the sentence "it must be ...".
pub type Conflict = (&'static str, String);

impl SamplingParams {
    /// The first conflict, if any.
    pub(super) fn find_conflict(&self) -> Option<Conflict> {
        let conflicts =
            [Self::declared_conflict, Self::token_conflict, Self::end_conflict, Self::tool_conflict];
        conflicts.into_iter().find_map(|conflict| conflict(self))
    }

    fn token_conflict(&self) -> Option<Conflict> {
        let allowed = self.allowed_token_ids.as_ref()?;
        let mut bad = self.bad_token_ids.clone();
        bad.sort_unstable();
        let is_bad = |id: &u32| bad.binary_search(id).is_ok();
        let limit = "at least one id that is not in bad_token_ids";
        allowed.iter().all(is_bad).then(|| ("allowed_token_ids", limit.to_owned()))
    }

    /// Structured output ends with an end token.
    fn end_conflict(&self) -> Option<Conflict> {
        self.eos_token_ids.as_ref().filter(|ids| ids.is_empty())?;
        let field = match self.tool_choice.as_ref().is_some_and(ToolChoice::requires_call) {
            true => "tool_choice",
            false => *self.constraints().first()?,
        };
        Some((
            "eos_token_ids",
            format!("at least one id when {field} is given: an end token ends the output"),
        ))
    }

    fn tool_conflict(&self) -> Option<Conflict> {
        let tools = self.tools.as_ref()?;
        let choice = self.tool_choice.as_ref();
        if self.ignore_eos && choice.is_some_and(ToolChoice::requires_call) {
            return Some(("ignore_eos", "False when tool_choice requires a call".to_owned()));
        }
        match choice {
            Some(ToolChoice::Function { name, .. }) if !tools.has(name) => {
                let names: Vec<_> = tools.functions.iter().map(|tool| format!("'{}'", tool.name)).collect();
                return Some(("tool_choice", format!("the name of one of the tools: {}", names.join(", "))));
            }
            Some(ToolChoice::None) => return None,
            _ => {}
        }
        let field = *self.constraints().first()?;
        Some((field, "left out when tools can be called: a call has its own format".to_owned()))
    }

    /// The fields that constrain the text of the output.
    pub(crate) fn constraints(&self) -> Vec<&'static str> {
        let given = [
            ("response_format", self.response_format.as_ref().is_some_and(|format| format.is_constraint())),
            ("regex", self.regex.is_some()),
            ("choice", self.choice.is_some()),
            ("grammar", self.grammar.is_some()),
        ];
        given.into_iter().filter_map(|(name, is_given)| is_given.then_some(name)).collect()
    }
}
