//! Each processor alone, and all of them together.

use penstock_types::PenaltyScope;

use super::*;

/// Everything a request can bring along.
struct Request {
    logits: Vec<f32>,
    processed: Vec<f32>,
    counts: TokenCounts,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    bias: Vec<(u32, f32)>,
    allowed: Vec<u32>,
    banned: Vec<u32>,
    suppressed: Vec<u32>,
    bad_words: Vec<Vec<u32>>,
    mask: Vec<u32>,
}

impl Request {
    fn new(random: &mut Random) -> Self {
        let vocabulary = random.one(&VOCABULARIES);
        // Few distinct tokens, so that runs of them repeat.
        let token = |random: &mut Random| random.below(vocabulary.min(4)) as u32;
        let mut tokens = |limit| -> Vec<u32> { (0..random.below(limit)).map(|_| token(random)).collect() };
        let (prompt, generated) = (tokens(12), tokens(12));
        let mut counts = TokenCounts::new();
        counts.push_prompt(&prompt);
        generated.iter().for_each(|id| counts.push(*id));
        let mut ids = |limit: usize| {
            let count = random.below(limit);
            random.ids(count, vocabulary)
        };
        let mut allowed = ids(vocabulary + 1);
        allowed.sort_unstable();
        let (banned, suppressed, biased) = (ids(4), ids(4), ids(6));
        let bad_words = (0..random.below(6)).map(|_| (0..random.below(4)).map(|_| token(random)).collect());
        Self {
            bad_words: bad_words.collect(),
            bias: biased.into_iter().map(|id| (id, random.below(17) as f32 / 4.0 - 2.0)).collect(),
            // Sometimes too short and sometimes too long.
            mask: (0..vocabulary.div_ceil(32) + random.below(3) - 1).map(|_| random.next() as u32).collect(),
            logits: random.logits(vocabulary),
            processed: random.logits(vocabulary),
            counts,
            prompt,
            generated,
            allowed,
            banned,
            suppressed,
        }
    }

    /// All of it.
    fn params(&self, random: &mut Random) -> SampleParams<'_> {
        SampleParams {
            repetition_penalty: random.one(&[0.8, 1.0, 1.3]),
            repetition_penalty_scope: if random.below(2) == 0 {
                PenaltyScope::Output
            } else {
                PenaltyScope::All
            },
            presence_penalty: random.one(&[-0.5, 0.0, 1.5]),
            frequency_penalty: random.one(&[-0.25, 0.0, 0.75]),
            counts: &self.counts,
            no_repeat_ngram_size: random.below(5) as u32,
            prompt: &self.prompt,
            generated: &self.generated,
            logit_bias: &self.bias,
            allowed: Some(&self.allowed),
            banned: &self.banned,
            bad_words: &self.bad_words,
            suppressed: &self.suppressed,
            mask: Some(&self.mask),
            processed: Some(&self.processed),
            ..drawn()
        }
    }
}

#[test]
fn each_processor_alone_does_what_its_twin_does() {
    let mut random = Random(11);
    for _ in 0..1500 {
        let request = Request::new(&mut random);
        let all = request.params(&mut random);
        let none = SampleParams { counts: all.counts, ..drawn() };
        let history = SampleParams { prompt: all.prompt, generated: all.generated, ..none };
        for params in [
            SampleParams { logit_bias: all.logit_bias, ..none },
            SampleParams { repetition_penalty: all.repetition_penalty, ..none },
            SampleParams {
                repetition_penalty: all.repetition_penalty,
                repetition_penalty_scope: PenaltyScope::Output,
                ..none
            },
            SampleParams { presence_penalty: all.presence_penalty, ..none },
            SampleParams { frequency_penalty: all.frequency_penalty, ..none },
            SampleParams { no_repeat_ngram_size: all.no_repeat_ngram_size, ..history },
            SampleParams { bad_words: all.bad_words, ..history },
            SampleParams { allowed: all.allowed, ..none },
            SampleParams { banned: all.banned, ..none },
            SampleParams { suppressed: all.suppressed, ..none },
            SampleParams { mask: all.mask, ..none },
            SampleParams { processed: all.processed, ..none },
        ] {
            check(&request.logits, &params);
        }
    }
}

#[test]
fn all_processors_together_come_in_their_order() {
    let mut random = Random(12);
    for _ in 0..3000 {
        let request = Request::new(&mut random);
        let all = request.params(&mut random);
        // With both, next to nothing would be left.
        let params = if random.below(2) == 0 {
            SampleParams { allowed: None, ..all }
        } else {
            SampleParams { mask: None, ..all }
        };
        check(&request.logits, &params);
        check(&request.logits, &SampleParams { temperature: 0.0, ..params });
        check(&request.logits, &SampleParams { top_k: 5, top_p: 0.9, min_p: 0.05, ..params });
    }
}

/// The order shows where steps do not commute.
#[test]
fn bias_comes_before_penalties_and_bans_come_last() {
    let mut counts = TokenCounts::new();
    counts.push(0);
    let params = SampleParams {
        counts: &counts,
        logit_bias: &[(0, 3.0)],
        repetition_penalty: 2.0,
        presence_penalty: 1.0,
        frequency_penalty: 0.5,
        banned: &[2],
        ..drawn()
    };
    // (-1 + 3) / 2 - 1 - 0.5, and not -1 * 2 + 3 - 1 - 0.5 or whatever else.
    let probabilities = probabilities_for_testing(&[-1.0, -0.5, 9.0], &params);
    assert_eq!(probabilities, [0.5, 0.5, 0.0]);
}

#[test]
fn a_run_is_recognised_across_the_end_of_the_prompt() {
    let banned = |size, prompt: &[u32], generated: &[u32]| {
        let params = SampleParams { no_repeat_ngram_size: size, prompt, generated, ..drawn() };
        let probabilities = probabilities_for_testing(&[0.0; 10], &params);
        (0..10).filter(|id| probabilities[*id] == 0.0).collect::<Vec<_>>()
    };
    assert_eq!(banned(3, &[1, 2], &[3, 4, 1, 2]), [3]);
    assert_eq!(banned(3, &[1, 2, 5, 1, 2, 6], &[1, 2]), [5, 6]);
    assert_eq!(banned(2, &[7], &[7]), [7]);
    assert_eq!(banned(2, &[7], &[]), [0; 0]);
    assert_eq!(banned(1, &[4], &[2]), [2, 4]);
    assert_eq!(banned(3, &[], &[]), [0; 0]);
    assert_eq!(banned(100, &[1, 2], &[1]), [0; 0]);
}

#[test]
fn a_bad_word_is_banned_only_where_it_would_end() {
    let words = [vec![1, 2, 3], vec![4], vec![], vec![2, 5]];
    let banned = |prompt: &[u32], generated: &[u32]| {
        let params = SampleParams { bad_words: &words, prompt, generated, ..drawn() };
        let probabilities = probabilities_for_testing(&[0.0; 10], &params);
        (0..10).filter(|id| probabilities[*id] == 0.0).collect::<Vec<_>>()
    };
    assert_eq!(banned(&[], &[]), [4]);
    assert_eq!(banned(&[0, 1], &[2]), [3, 4, 5]);
    assert_eq!(banned(&[2], &[1]), [4]);
    assert_eq!(banned(&[2], &[]), [4, 5]);
}
