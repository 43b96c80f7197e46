//! The score of a text: log probabilities and perplexity from the output of a scoring request.

use crate::output::{RequestOutput, Score};

/// The text was not scored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScoreError {
    /// The engine was closed.
    #[error("the engine was closed before the text was scored")]
    Closed,
    /// The request ended early.
    #[error("{finish_reason}: {num_scored} of the text's {num_tokens} tokens were scored")]
    Incomplete { finish_reason: String, num_scored: usize, num_tokens: usize },
}

/// The score of the prompt, from its log probabilities.
pub fn score(output: &RequestOutput) -> Result<Score, ScoreError> {
    let finish_reason = output.choices.first().map_or("", |choice| &choice.finish_reason);
    if finish_reason == "cancelled" {
        return Err(ScoreError::Closed);
    }
    let logprobs = output.prompt_logprobs.clone().unwrap_or_default();
    let (num_scored, num_tokens) = (logprobs.len(), output.prompt_token_ids.len());
    if finish_reason != "length" || num_scored != num_tokens {
        return Err(ScoreError::Incomplete {
            finish_reason: finish_reason.to_owned(),
            num_scored,
            num_tokens,
        });
    }
    let known: Vec<f64> = logprobs.iter().flatten().copied().map(f64::from).collect();
    Ok(Score { token_ids: output.prompt_token_ids.to_vec(), logprobs, perplexity: perplexity(&known) })
}

/// `None` without log probabilities, as for a text of one token. Infinite beyond the range of doubles.
fn perplexity(logprobs: &[f64]) -> Option<f64> {
    (!logprobs.is_empty()).then(|| (-exact_sum(logprobs) / logprobs.len() as f64).exp())
}

/// The sum, rounded once: Shewchuk's algorithm, with partial sums that do not overlap.
fn exact_sum(values: &[f64]) -> f64 {
    if values.iter().any(|value| !value.is_finite()) {
        return values.iter().sum();
    }
    let mut partials: Vec<f64> = Vec::new();
    for value in values {
        let (mut sum, mut num_kept) = (*value, 0);
        for index in 0..partials.len() {
            let (large, small) = by_magnitude(sum, partials[index]);
            sum = large + small;
            let error = small - (sum - large);
            if error != 0.0 {
                partials[num_kept] = error;
                num_kept += 1;
            }
        }
        partials.truncate(num_kept);
        partials.push(sum);
    }
    let Some(mut sum) = partials.pop() else { return 0.0 };
    while let Some(partial) = partials.pop() {
        let before = sum;
        sum = before + partial;
        let error = partial - (sum - before);
        if error != 0.0 {
            // Half of a unit in the last place is rounded to even; the sign of what remains says which way is right.
            if partials.last().is_some_and(|rest| rest.signum() == error.signum()) {
                let rounded = sum + error * 2.0;
                if rounded - sum == error * 2.0 {
                    sum = rounded;
                }
            }
            break;
        }
    }
    sum
}

/// The value of larger magnitude first.
fn by_magnitude(one: f64, other: f64) -> (f64, f64) {
    if one.abs() < other.abs() { (other, one) } else { (one, other) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_sum_is_rounded_once() {
        assert_eq!(exact_sum(&[]), 0.0);
        assert_eq!(exact_sum(&[1e100, 1.0, -1e100]), 1.0);
        assert_eq!(exact_sum(&[0.1; 10]), 1.0);
        // Half of a unit in the last place of 1, and a little more.
        let half = f64::EPSILON / 2.0;
        assert_eq!(exact_sum(&[1.0, half]), 1.0);
        assert_eq!(exact_sum(&[1.0, half, 1e-40]), 1.0 + f64::EPSILON);
        assert_eq!(exact_sum(&[f64::NEG_INFINITY, -1.0]), f64::NEG_INFINITY);
    }

    #[test]
    fn perplexity_is_the_exponential_of_the_negated_mean() {
        assert_eq!(perplexity(&[]), None);
        assert_eq!(perplexity(&[-1.0, -3.0]), Some(2.0_f64.exp()));
        assert_eq!(perplexity(&[-1000.0]), Some(f64::INFINITY));
        assert_eq!(perplexity(&[f64::NEG_INFINITY]), Some(f64::INFINITY));
    }
}
