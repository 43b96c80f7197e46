//! Each step before temperature alone, and all of them together.

use penstock_types::PenaltyScope;

use super::*;

/// Random values for everything that changes logits.
struct Case {
    logits: Vec<f32>,
    processed: Vec<f32>,
    counts: TokenCounts,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    suppressed: Vec<u32>,
    mask: Vec<u32>,
    /// All of it set.
    sampling: Sampling,
}

impl Case {
    fn new(random: &mut Random) -> Self {
        let vocabulary = random.one(&VOCABULARIES);
        // Few distinct tokens, so that n-grams repeat.
        let token = |random: &mut Random| random.below(vocabulary.min(4)) as u32;
        let mut tokens = |limit| -> Vec<u32> { (0..random.below(limit)).map(|_| token(random)).collect() };
        let (prompt, generated) = (tokens(12), tokens(12));
        let mut counts = TokenCounts::default();
        counts.push_prompt(&prompt);
        generated.iter().for_each(|id| counts.push(*id));
        let mut ids = |limit: usize| {
            let count = random.below(limit);
            random.ids(count, vocabulary)
        };
        let mut allowed = ids(vocabulary + 1);
        allowed.sort_unstable();
        let (bad_token_ids, suppressed, biased) = (ids(4), ids(4), ids(6));
        let bad_token_sequences =
            (0..random.below(6)).map(|_| (0..random.below(4)).map(|_| token(random)).collect());
        let bad_token_sequences = bad_token_sequences.collect();
        let logit_bias = biased.into_iter().map(|id| (id, random.below(17) as f32 / 4.0 - 2.0)).collect();
        Self {
            // Sometimes too short and sometimes too long.
            mask: (0..vocabulary.div_ceil(32) + random.below(3) - 1).map(|_| random.next() as u32).collect(),
            logits: random.logits(vocabulary),
            processed: random.logits(vocabulary),
            counts,
            prompt,
            generated,
            suppressed,
            sampling: Sampling {
                repetition_penalty: random.one(&[0.8, 1.0, 1.3]),
                repetition_penalty_scope: random.one(&[PenaltyScope::All, PenaltyScope::Output]),
                presence_penalty: random.one(&[-0.5, 0.0, 1.5]),
                frequency_penalty: random.one(&[-0.25, 0.0, 0.75]),
                no_repeat_ngram_size: random.below(5) as u32,
                logit_bias,
                allowed_token_ids: Some(allowed),
                bad_token_ids,
                bad_token_sequences,
                ..random_sampling()
            },
        }
    }

    /// Everything but `sampling` set.
    fn input<'a>(&'a self, sampling: &'a Sampling) -> Input<'a> {
        Input {
            counts: &self.counts,
            history: History { prompt: &self.prompt, generated: &self.generated },
            suppressed: &self.suppressed,
            mask: Some(&self.mask),
            processed: Some(&self.processed),
            ..input(sampling)
        }
    }
}

#[test]
fn each_step_alone_matches_reference() {
    let mut random = Random(11);
    for _ in 0..1500 {
        let case = Case::new(&mut random);
        let all = case.sampling.clone();
        let none = random_sampling;
        for sampling in [
            Sampling { logit_bias: all.logit_bias, ..none() },
            Sampling { repetition_penalty: all.repetition_penalty, ..none() },
            Sampling {
                repetition_penalty: all.repetition_penalty,
                repetition_penalty_scope: PenaltyScope::Output,
                ..none()
            },
            Sampling { presence_penalty: all.presence_penalty, ..none() },
            Sampling { frequency_penalty: all.frequency_penalty, ..none() },
            Sampling { no_repeat_ngram_size: all.no_repeat_ngram_size, ..none() },
            Sampling { bad_token_sequences: all.bad_token_sequences, ..none() },
            Sampling { allowed_token_ids: all.allowed_token_ids, ..none() },
            Sampling { bad_token_ids: all.bad_token_ids, ..none() },
        ] {
            let alone = Input { suppressed: &[], mask: None, processed: None, ..case.input(&sampling) };
            check(&case.logits, &alone);
        }
        let plain = none();
        let none = input(&plain);
        check(&case.logits, &Input { suppressed: &case.suppressed, ..none });
        check(&case.logits, &Input { mask: Some(&case.mask), ..none });
        check(&case.logits, &Input { processed: Some(&case.processed), ..none });
    }
}

#[test]
fn all_steps_together_match_reference() {
    let mut random = Random(12);
    for _ in 0..3000 {
        let case = Case::new(&mut random);
        let all = case.sampling.clone();
        // With both allowed ids and a mask, almost nothing would be left.
        let without_mask = random.below(2) == 1;
        let allowed_token_ids = if without_mask { all.allowed_token_ids } else { None };
        let all = Sampling { allowed_token_ids, ..all };
        let filtered = Sampling { top_k: 5, top_p: 0.9, min_p: 0.05, ..all.clone() };
        for sampling in [all.clone(), Sampling { temperature: 0.0, ..all }, filtered] {
            let input = case.input(&sampling);
            let mask = if without_mask { None } else { input.mask };
            check(&case.logits, &Input { mask, ..input });
        }
    }
}

/// The order matters for steps that do not commute.
#[test]
fn bias_precedes_penalties_and_masks_come_last() {
    let mut counts = TokenCounts::default();
    counts.push(0);
    let sampling = Sampling {
        logit_bias: vec![(0, 3.0)],
        repetition_penalty: 2.0,
        presence_penalty: 1.0,
        frequency_penalty: 0.5,
        bad_token_ids: vec![2],
        ..random_sampling()
    };
    // (-1 + 3) / 2 - 1 - 0.5, and not -1 * 2 + 3 - 1 - 0.5, for example.
    let probabilities = probabilities(&[-1.0, -0.5, 9.0], &Input { counts: &counts, ..input(&sampling) });
    assert_eq!(probabilities, [0.5, 0.5, 0.0]);
}

/// The ids that `sampling` excludes after these tokens.
fn excluded(sampling: &Sampling, prompt: &[u32], generated: &[u32]) -> Vec<usize> {
    let history = History { prompt, generated };
    let probabilities = probabilities(&[0.0; 10], &Input { history, ..input(sampling) });
    (0..10).filter(|id| probabilities[*id] == 0.0).collect()
}

#[test]
fn ngrams_are_found_across_the_end_of_the_prompt() {
    let excluded = |size, prompt: &[u32], generated: &[u32]| {
        excluded(&Sampling { no_repeat_ngram_size: size, ..random_sampling() }, prompt, generated)
    };
    assert_eq!(excluded(3, &[1, 2], &[3, 4, 1, 2]), [3]);
    assert_eq!(excluded(3, &[1, 2, 5, 1, 2, 6], &[1, 2]), [5, 6]);
    assert_eq!(excluded(2, &[7], &[7]), [7]);
    assert_eq!(excluded(2, &[7], &[]), [0; 0]);
    assert_eq!(excluded(1, &[4], &[2]), [2, 4]);
    assert_eq!(excluded(3, &[], &[]), [0; 0]);
    assert_eq!(excluded(100, &[1, 2], &[1]), [0; 0]);
}

#[test]
fn last_id_of_bad_word_is_masked_only_after_the_others() {
    let bad_token_sequences = vec![vec![1, 2, 3], vec![4], vec![], vec![2, 5]];
    let sampling = Sampling { bad_token_sequences, ..random_sampling() };
    let excluded = |prompt: &[u32], generated: &[u32]| excluded(&sampling, prompt, generated);
    assert_eq!(excluded(&[], &[]), [4]);
    assert_eq!(excluded(&[0, 1], &[2]), [3, 4, 5]);
    assert_eq!(excluded(&[2], &[1]), [4]);
    assert_eq!(excluded(&[2], &[]), [4, 5]);
}
