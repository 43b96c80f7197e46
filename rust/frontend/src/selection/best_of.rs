//! `best_of`: of several candidates, the choices with the highest mean log probability.

use std::sync::Arc;

use super::search::descending;
use crate::output::{Choice, RequestOutput};
use crate::params::SamplingParams;

impl SamplingParams {
    /// The parameters of the request that generates the candidates.
    pub fn for_candidates(&self) -> Self {
        match self.best_of {
            Some(best_of) => Self { n: best_of, best_of: None, logprobs: true, ..self.clone() },
            None => self.clone(),
        }
    }
}

/// The `n` choices with the highest mean log probability, which becomes their score, best first. Without `best_of` the
/// output is returned unchanged. The usage counts the tokens of all candidates.
pub fn best_of(output: &Arc<RequestOutput>, params: &SamplingParams) -> Arc<RequestOutput> {
    if params.best_of.is_none() {
        return Arc::clone(output);
    }
    let mut candidates: Vec<_> =
        output.choices.iter().map(|choice| (mean_logprob(choice), &**choice)).collect();
    candidates.sort_by(|one, other| descending(one.0, other.0));
    let select = |(index, (score, choice)): (usize, (f64, &Choice))| {
        let mut choice = Choice { index, score: Some(score), ..choice.clone() };
        if !params.logprobs {
            (choice.logprobs, choice.cumulative_logprob) = (None, None);
        }
        Arc::new(choice)
    };
    let choices = candidates.into_iter().take(params.n).enumerate().map(select).collect();
    Arc::new(RequestOutput { choices, ..(**output).clone() })
}

/// The mean log probability of the tokens of a choice; negative infinity for an empty one.
fn mean_logprob(choice: &Choice) -> f64 {
    match choice.logprobs.as_deref() {
        Some(logprobs) if !logprobs.is_empty() => {
            logprobs.iter().fold(0.0, |sum, logprob| sum + f64::from(*logprob)) / logprobs.len() as f64
        }
        _ => f64::NEG_INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{Timings, Usage};

    fn choice(index: usize, logprobs: &[f32]) -> Arc<Choice> {
        Arc::new(Choice {
            index,
            text: "".into(),
            token_ids: vec![index as u32; logprobs.len()],
            logprobs: Some(logprobs.to_vec()),
            top_logprobs: None,
            cumulative_logprob: Some(logprobs.iter().copied().map(f64::from).sum()),
            finish_reason: "length".to_owned(),
            stop_reason: None,
            seed: 7,
            score: None,
            content: "".into(),
            reasoning: "".into(),
            tool_calls: Vec::new(),
            logits: None,
            hidden_states: None,
            embeddings: None,
        })
    }

    fn output(choices: Vec<Arc<Choice>>) -> Arc<RequestOutput> {
        Arc::new(RequestOutput {
            choices,
            prompt_token_ids: [1].into(),
            prompt_logprobs: None,
            prompt_top_logprobs: None,
            adapter: None,
            usage: Usage { prompt_tokens: 1, completion_tokens: 5, cached_tokens: 0, cached_host_tokens: 0 },
            timings: Timings { queued: 0.0, first_token: None, total: 0.0 },
        })
    }

    fn params(n: usize, best_of: Option<usize>, logprobs: bool) -> SamplingParams {
        SamplingParams { n, best_of, logprobs, ..SamplingParams::default() }
    }

    #[test]
    fn choices_are_ordered_by_mean_logprob() {
        let candidates = [&[-1.0, -3.0][..], &[-1.5], &[], &[-0.5, -1.0]];
        let candidates =
            candidates.iter().enumerate().map(|(index, logprobs)| choice(index, logprobs)).collect();
        let selected = best_of(&output(candidates), &params(3, Some(4), true));
        let found: Vec<_> = selected
            .choices
            .iter()
            .map(|choice| (choice.index, choice.score, choice.token_ids.clone()))
            .collect();
        assert_eq!(
            found,
            [(0, Some(-0.75), vec![3, 3]), (1, Some(-1.5), vec![1]), (2, Some(-2.0), vec![0, 0])]
        );
        assert_eq!(selected.usage.completion_tokens, 5);
    }

    #[test]
    fn an_empty_choice_ranks_last() {
        let selected = best_of(&output(vec![choice(0, &[]), choice(1, &[-90.0])]), &params(2, Some(2), true));
        let scores: Vec<_> = selected.choices.iter().map(|choice| choice.score).collect();
        assert_eq!(scores, [Some(-90.0), Some(f64::NEG_INFINITY)]);
    }

    #[test]
    fn equal_choices_keep_their_order() {
        let candidates = (0..4).map(|index| choice(index, &[-1.0])).collect();
        let selected = best_of(&output(candidates), &params(2, Some(4), true));
        let tokens: Vec<_> = selected.choices.iter().map(|choice| choice.token_ids[0]).collect();
        assert_eq!(tokens, [0, 1]);
    }

    #[test]
    fn logprobs_that_were_not_requested_are_removed() {
        let candidates = output(vec![choice(0, &[-1.0]), choice(1, &[-2.0])]);
        let selected = best_of(&candidates, &params(1, Some(2), false));
        assert_eq!(selected.choices[0].logprobs, None);
        assert_eq!(selected.choices[0].cumulative_logprob, None);
        assert_eq!(selected.choices[0].score, Some(-1.0));
    }

    #[test]
    fn an_output_without_best_of_is_unchanged() {
        let candidates = output(vec![choice(0, &[-2.0]), choice(1, &[-1.0])]);
        assert!(Arc::ptr_eq(&best_of(&candidates, &params(2, None, false)), &candidates));
    }

    #[test]
    fn candidates_are_generated_with_logprobs() {
        let candidates = params(2, Some(5), false).for_candidates();
        assert_eq!((candidates.n, candidates.best_of, candidates.logprobs), (5, None, true));
        let plain = params(2, None, false);
        assert_eq!(plain.for_candidates(), plain);
    }
}
