//! Sampling against its slow twin, and draws against the probabilities they should have.

mod logprobs;
mod naive;
mod processors;

use super::*;
use crate::counts::TokenCounts;
use penstock_types::LogprobsRequest;

/// SplitMix64.
pub(super) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// One of `choices`.
    pub fn one<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// `count` ids, a few of them outside of the vocabulary.
    pub fn ids(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocabulary + 2) as u32).collect()
    }

    /// Quarters, so that many are equal, with minus infinities and NaN among them.
    pub fn logits(&mut self, vocabulary: usize) -> Vec<f32> {
        let logit = |random: &mut Self| match random.below(20) {
            0 => f32::NEG_INFINITY,
            1 => f32::NAN,
            2 => -0.0,
            _ => random.below(33) as f32 / 4.0 - 4.0,
        };
        (0..vocabulary).map(|_| logit(self)).collect()
    }
}

/// On both sides of the words of a mask and of spans.
pub(super) const VOCABULARIES: [usize; 10] = [1, 2, 31, 32, 33, 127, 128, 129, 300, 1000];

/// Draws, not yet cut.
pub(super) fn drawn() -> SampleParams<'static> {
    SampleParams { temperature: 1.0, seed: 7, ..SampleParams::greedy() }
}

/// One row alone.
pub(super) fn sample(logits: &[f32], params: &SampleParams<'_>) -> Sampled {
    let mut floats = vec![f32::NAN; Scratch::len(logits.len())];
    // What was there before must not matter.
    let mut out = Sampled { token: 9, logprob: 1.0, top: vec![(3, 0.5); 2], is_exhausted: true };
    sample_row(Kernels::best(), logits, params, &mut Scratch::new(&mut floats, logits.len()), &mut out);
    out
}

/// Panics unless the probabilities of `params` are those of the slow twin.
pub(super) fn check(logits: &[f32], params: &SampleParams<'_>) {
    let (got, want) = (probabilities_for_testing(logits, params), naive::probabilities(logits, params));
    for (id, (got, want)) in got.iter().zip(&want).enumerate() {
        let close = (f64::from(*got) - want).abs() <= 2e-6 && (*got > 0.0) == (*want > 0.0);
        assert!(close, "{id} has {got}, should have {want}; {logits:?} {params:?}");
    }
}

#[test]
fn cuts_keep_what_sorting_says() {
    let mut random = Random(1);
    for round in 0..4000 {
        let logits = {
            let vocabulary = random.one(&VOCABULARIES);
            random.logits(vocabulary)
        };
        let params = SampleParams {
            temperature: random.one(&[0.3, 1.0, 1.7]),
            top_k: random.one(&[0, 0, 1, 2, 7, 40, 200, 5000]),
            top_p: if random.below(2) == 0 { 1.0 } else { 0.02 + 0.97 * random.unit() },
            min_p: if random.below(2) == 0 { 0.0 } else { random.unit() },
            typical_p: if random.below(2) == 0 { 1.0 } else { 0.02 + 0.97 * random.unit() },
            ..drawn()
        };
        // Now one cut alone, now all together.
        let alone = SampleParams { temperature: params.temperature, ..drawn() };
        let params = match round % 5 {
            0 => SampleParams { top_k: params.top_k, ..alone },
            1 => SampleParams { top_p: params.top_p, ..alone },
            2 => SampleParams { min_p: params.min_p, ..alone },
            3 => SampleParams { typical_p: params.typical_p, ..alone },
            _ => params,
        };
        check(&logits, &params);
    }
}

#[test]
fn cuts_of_many_ids_of_any_spread_keep_what_sorting_says() {
    let mut random = Random(2);
    for deviation in [1e-6, 1e-3, 0.3, 3.0, 30.0] {
        // Not quarters: neighbours differ by less than any first digit shows.
        let logits: Vec<f32> = (0..5000).map(|_| deviation * (random.unit() + random.unit() - 1.0)).collect();
        for params in [
            SampleParams { top_k: 3, ..drawn() },
            SampleParams { top_k: 1234, ..drawn() },
            SampleParams { top_k: 4999, ..drawn() },
            SampleParams { min_p: 0.3, ..drawn() },
        ] {
            check(&logits, &params);
        }
        // Of equal weights the lowest ids stay, though their logits differ by what a weight does not show; so compare the
        // shares that are held, and how many hold them.
        for share in [0.1_f32, 0.5, 0.9, 0.999] {
            for params in
                [SampleParams { top_p: share, ..drawn() }, SampleParams { typical_p: share, ..drawn() }]
            {
                let all = naive::probabilities(&logits, &drawn());
                let kept = probabilities_for_testing(&logits, &params);
                let count = kept.iter().filter(|probability| **probability > 0.0).count();
                let want = naive::probabilities(&logits, &params);
                let expected = want.iter().filter(|probability| **probability > 0.0).count();
                assert!(count.abs_diff(expected) <= 1, "{count} ids, should be {expected}: {params:?}");
                let held = all.iter().zip(&kept).filter(|(_, kept)| **kept > 0.0).map(|(all, _)| *all);
                let (held, largest) = held.fold((0.0, 0.0_f64), |(sum, most), p| (sum + p, most.max(p)));
                let share = f64::from(share);
                assert!((share - 1e-6..share + largest + 1e-6).contains(&held), "{held} is held: {params:?}");
            }
        }
    }
}

#[test]
fn a_cut_that_ends_among_equals_keeps_the_lowest_ids() {
    let logits = [[2.0; 50], [1.0; 50], [2.0; 50], [0.0; 50]].concat();
    let kept = |params| {
        let probabilities = probabilities_for_testing(&logits, &params);
        (0..logits.len()).filter(|id| probabilities[*id] > 0.0).collect::<Vec<_>>()
    };
    assert_eq!(kept(SampleParams { top_k: 3, ..drawn() }), [0, 1, 2]);
    assert_eq!(
        kept(SampleParams { top_k: 52, ..drawn() }),
        [(0..50).collect::<Vec<_>>(), vec![100, 101]].concat()
    );
    assert_eq!(kept(SampleParams { top_p: 0.02, ..drawn() }), [0, 1, 2]);
    // The mean log weight is nearest to that of the likeliest, so they are the most typical.
    assert_eq!(kept(SampleParams { typical_p: 0.02, ..drawn() }), [0, 1, 2]);
}

#[test]
fn typical_ids_need_not_be_the_likeliest() {
    // A third of the probability on one id, the rest on 1000: the entropy is nearer to the surprise of the many.
    let mut logits = vec![0.0; 1001];
    logits[500] = 500_f32.ln();
    let probabilities = probabilities_for_testing(&logits, &SampleParams { typical_p: 0.3703, ..drawn() });
    assert_eq!(probabilities[500], 0.0, "the likeliest is not typical");
    assert_eq!(probabilities.iter().filter(|probability| **probability > 0.0).count(), 556);
}

/// 200,000 draws against the probabilities, by the chi-square statistic.
fn check_draws(logits: &[f32], params: &SampleParams<'_>) {
    const DRAWS: u32 = 200_000;
    let expected = naive::probabilities(logits, params);
    let mut floats = vec![f32::NAN; Scratch::len(logits.len())];
    let Scratch { row, mut room } = Scratch::new(&mut floats, logits.len());
    let scores = process(Kernels::best(), logits, params, row);
    let mut counts = vec![0_u32; logits.len()];
    match distribution(Kernels::best(), scores, params, &mut room) {
        Distribution::Certain(token) => counts[token.expect("nothing is banned but two") as usize] = DRAWS,
        Distribution::Kept(kept) => {
            for index in 0..DRAWS {
                counts[draw::draw(&kept, philox::uniform(params.seed, index)) as usize] += 1;
            }
        }
    }
    let (mut statistic, mut cells) = (0.0, 0);
    for (count, probability) in counts.iter().zip(&expected) {
        let wanted = probability * f64::from(DRAWS);
        if *probability == 0.0 {
            assert_eq!(*count, 0, "an id that was cut was drawn; {params:?}");
        } else if wanted >= 5.0 {
            statistic += (f64::from(*count) - wanted).powi(2) / wanted;
            cells += 1;
        }
    }
    // The statistic's mean is cells - 1 and its deviation sqrt(2 (cells - 1)); five deviations never happen by chance.
    let freedom = f64::from(cells - 1);
    let most = freedom + 5.0 * (2.0 * freedom).sqrt() + 1e-6;
    assert!(statistic <= most, "chi-square {statistic} of {freedom}; {params:?}");
}

#[test]
fn draws_follow_the_distribution_for_every_combination_of_samplers() {
    // Several spans.
    let logits: Vec<f32> = (0..300).map(|id| ((id * 37 % 300) as f32 * 0.37).sin() * 3.0).collect();
    let mut counts = TokenCounts::new();
    counts.push_prompt(&[3, 4, 150]);
    (0..40).for_each(|id| counts.push(id * 7));
    let plain = SampleParams { seed: 3, counts: &counts, ..SampleParams::greedy() };
    for temperature in [0.7, 1.6] {
        for top_k in [0, 1, 20] {
            for top_p in [1.0, 0.85] {
                for min_p in [0.0, 0.1] {
                    for typical_p in [1.0, 0.8] {
                        for repetition_penalty in [1.0, 1.3] {
                            for banned in [&[][..], &[8, 33]] {
                                let cut = SampleParams { top_k, top_p, min_p, typical_p, ..plain };
                                let params = SampleParams { temperature, repetition_penalty, banned, ..cut };
                                check_draws(&logits, &params);
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_is_drawn_by_its_own_seed_and_index() {
    let logits = vec![0.0; 5000];
    for index in [0, 1, u32::MAX] {
        let sampled = sample(&logits, &SampleParams { seed: 5, index, ..drawn() });
        // All weigh the same, so the inverse of the cumulative distribution is a multiplication.
        assert_eq!(sampled.token, (philox::uniform(5, index) * 5000.0) as u32);
        assert!(!sampled.is_exhausted && sampled.logprob.is_nan() && sampled.top.is_empty());
    }
}

#[test]
fn the_last_id_of_weight_is_drawn_where_roundings_leave_something_over() {
    let logits = [vec![0.1; 200], vec![f32::NEG_INFINITY; 200]].concat();
    let mut floats = vec![f32::NAN; Scratch::len(logits.len())];
    let Scratch { mut room, .. } = Scratch::new(&mut floats, logits.len());
    let Distribution::Kept(kept) = distribution(Kernels::best(), &logits, &drawn(), &mut room) else {
        panic!("nothing is certain")
    };
    assert_eq!(draw::draw(&kept, 1.0), 199);
    assert_eq!(draw::draw(&kept, 0.0), 0);
}

#[test]
fn greedy_takes_the_lowest_id_among_equals_and_never_a_nan() {
    let logits = [1.0, 3.0, 3.0, f32::NAN, 2.0];
    let greedy = SampleParams::greedy();
    assert_eq!(sample(&logits, &greedy).token, 1);
    assert_eq!(sample(&logits, &SampleParams { suppressed: &[1, 2], ..greedy }).token, 4);
    assert_eq!(sample(&logits, &SampleParams { temperature: 1e-6, ..greedy }).token, 1);
    assert_eq!(sample(&logits, &SampleParams { temperature: 2.0, top_k: 1, ..greedy }).token, 1);
}

#[test]
fn rows_without_numbers_give_a_token_and_rows_without_ids_say_so() {
    const NONE: f32 = f32::NEG_INFINITY;
    let cases = [
        ([NONE; 4], None),
        ([f32::NAN; 4], Some(0)),
        ([NONE, f32::NAN, NONE, f32::NAN], Some(1)),
        ([1.0, f32::INFINITY, f32::INFINITY, f32::NAN], Some(1)),
        ([f32::NAN, 0.0, NONE, f32::NAN], Some(1)),
    ];
    for (logits, token) in cases {
        for temperature in [0.0, 1.0] {
            for top_p in [1.0, 0.5] {
                let sampled = sample(&logits, &SampleParams { temperature, top_p, ..drawn() });
                assert_eq!(sampled.is_exhausted, token.is_none());
                assert_eq!((!sampled.is_exhausted).then_some(sampled.token), token);
            }
        }
    }
    // Bans that leave nothing, on their own and together.
    let logits = [1.0, 2.0, f32::INFINITY, NONE];
    let even = [0b0101];
    let exhausting = [
        SampleParams { allowed: Some(&[]), ..drawn() },
        SampleParams { allowed: Some(&[3, 77]), ..drawn() },
        SampleParams { mask: Some(&[]), ..drawn() },
        SampleParams { mask: Some(&even), banned: &[0, 2], ..drawn() },
        SampleParams { mask: Some(&even), allowed: Some(&[1]), ..drawn() },
        SampleParams { banned: &[2, 0], suppressed: &[1], ..drawn() },
        SampleParams { no_repeat_ngram_size: 1, prompt: &[0, 2], generated: &[1], ..drawn() },
        SampleParams { processed: Some(&[NONE; 4]), ..drawn() },
    ];
    for params in exhausting {
        for params in [params, SampleParams { temperature: 0.0, ..params }] {
            let logprobs = Some(LogprobsRequest { top: 2, processed: true });
            let sampled = sample(&logits, &SampleParams { logprobs, ..params });
            assert!(sampled.is_exhausted && sampled.logprob.is_nan() && sampled.top.is_empty(), "{params:?}");
            assert_eq!(probabilities_for_testing(&logits, &params), [0.0; 4]);
        }
    }
    // A bias brings nothing back.
    let bias = [(0, 1e30), (1, f32::INFINITY)];
    let params = SampleParams { allowed: Some(&[2]), logit_bias: &bias, ..drawn() };
    assert_eq!(sample(&logits, &params).token, 2);
}
