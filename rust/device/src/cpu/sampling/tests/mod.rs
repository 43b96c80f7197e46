//! Sampling against its reference implementation, and sampled ids against the probabilities they should have.

mod logprobs;
mod processors;
mod reference;

use std::sync::LazyLock;

use super::*;

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

    /// `count` ids, a few of them outside the vocabulary.
    pub fn ids(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocabulary + 2) as u32).collect()
    }

    /// Multiples of a quarter, so that many are equal, with minus infinities and NaN among them.
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

/// On both sides of the words of a mask and of tiles.
pub(super) const VOCABULARIES: [usize; 10] = [1, 2, 31, 32, 33, 127, 128, 129, 300, 1000];

/// Random sampling without any filter.
pub(super) fn random_sampling() -> Sampling {
    Sampling { seed: 7, ..Sampling::default() }
}

pub(super) fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..Sampling::default() }
}

/// A first token without history, mask and log probabilities.
pub(super) fn input(sampling: &Sampling) -> Input<'_> {
    static NO_COUNTS: LazyLock<TokenCounts> = LazyLock::new(TokenCounts::default);
    Input {
        sampling,
        history: History { prompt: &[], generated: &[] },
        counts: &NO_COUNTS,
        suppressed: &[],
        mask: None,
        processed: None,
        index: 0,
        given: None,
        logprobs: None,
    }
}

pub(super) fn sample_one(logits: &[f32], input: &Input<'_>) -> Sampled {
    let mut floats = vec![f32::NAN; SamplingWorkspace::len(logits.len())];
    sample_row(Kernels::best(), logits, input, &mut SamplingWorkspace::new(&mut floats, logits.len()))
}

pub(super) fn sample_token(logits: &[f32], input: &Input<'_>) -> Token {
    sample_one(logits, input).token().expect("a row with candidates").clone()
}

/// Panics unless the probabilities are those of the reference.
pub(super) fn check(logits: &[f32], input: &Input<'_>) {
    let (got, want) = (probabilities(logits, input), reference::probabilities(logits, input));
    for (id, (got, want)) in got.iter().zip(&want).enumerate() {
        let close = (f64::from(*got) - want).abs() <= 2e-6 && (*got > 0.0) == (*want > 0.0);
        assert!(close, "{id} has {got}, should have {want}; {logits:?} {input:?}");
    }
}

#[test]
fn filters_match_reference() {
    let mut random = Random(1);
    for round in 0..4000 {
        let logits = {
            let vocabulary = random.one(&VOCABULARIES);
            random.logits(vocabulary)
        };
        let all = Sampling {
            temperature: random.one(&[0.3, 1.0, 1.7]),
            top_n_sigma: if random.below(2) == 0 { 0.0 } else { 3.0 * random.unit() },
            top_k: random.one(&[0, 0, 1, 2, 7, 40, 200, 5000]),
            top_p: if random.below(2) == 0 { 1.0 } else { 0.02 + 0.97 * random.unit() },
            min_p: if random.below(2) == 0 { 0.0 } else { random.unit() },
            typical_p: if random.below(2) == 0 { 1.0 } else { 0.02 + 0.97 * random.unit() },
            epsilon_cutoff: if random.below(2) == 0 { 0.0 } else { random.unit().powi(6) },
            ..random_sampling()
        };
        // One filter alone, then all together.
        let none = Sampling { temperature: all.temperature, ..random_sampling() };
        let sampling = match round % 7 {
            0 => Sampling { top_k: all.top_k, ..none },
            1 => Sampling { top_p: all.top_p, ..none },
            2 => Sampling { min_p: all.min_p, ..none },
            3 => Sampling { typical_p: all.typical_p, ..none },
            4 => Sampling { top_n_sigma: all.top_n_sigma, ..none },
            5 => Sampling { epsilon_cutoff: all.epsilon_cutoff, ..none },
            _ => all,
        };
        check(&logits, &input(&sampling));
    }
}

#[test]
fn filters_match_reference_for_any_spread_of_logits() {
    let mut random = Random(2);
    for deviation in [1e-6, 1e-3, 0.3, 3.0, 30.0] {
        // Not multiples of a quarter: neighbours differ by less than the first digit of a rank.
        let logits: Vec<f32> = (0..5000).map(|_| deviation * (random.unit() + random.unit() - 1.0)).collect();
        for sampling in [
            Sampling { top_k: 3, ..random_sampling() },
            Sampling { top_k: 1234, ..random_sampling() },
            Sampling { top_k: 4999, ..random_sampling() },
            Sampling { min_p: 0.3, ..random_sampling() },
            Sampling { epsilon_cutoff: 1e-4, ..random_sampling() },
            Sampling { top_n_sigma: 0.77, ..random_sampling() },
            Sampling { top_n_sigma: 1.5, top_k: 300, ..random_sampling() },
        ] {
            check(&logits, &input(&sampling));
        }
        // Of equal weights the lowest ids stay, though their logits differ by less than a weight shows. So compare the
        // shares that are held and the number of ids that hold them.
        for share in [0.1_f32, 0.5, 0.9, 0.999] {
            for sampling in [
                Sampling { top_p: share, ..random_sampling() },
                Sampling { typical_p: share, ..random_sampling() },
            ] {
                let all = reference::probabilities(&logits, &input(&random_sampling()));
                let kept = probabilities(&logits, &input(&sampling));
                let count = kept.iter().filter(|probability| **probability > 0.0).count();
                let want = reference::probabilities(&logits, &input(&sampling));
                let expected = want.iter().filter(|probability| **probability > 0.0).count();
                assert!(count.abs_diff(expected) <= 1, "{count} ids, should be {expected}: {sampling:?}");
                let held = all.iter().zip(&kept).filter(|(_, kept)| **kept > 0.0).map(|(all, _)| *all);
                let (held, largest) = held.fold((0.0, 0.0_f64), |(sum, most), p| (sum + p, most.max(p)));
                let share = f64::from(share);
                assert!(
                    (share - 1e-6..share + largest + 1e-6).contains(&held),
                    "{held} is held: {sampling:?}"
                );
            }
        }
    }
}

#[test]
fn filter_that_ends_among_equals_keeps_lowest_ids() {
    let logits = [[2.0; 50], [1.0; 50], [2.0; 50], [0.0; 50]].concat();
    let kept = |sampling: Sampling| {
        let probabilities = probabilities(&logits, &input(&sampling));
        (0..logits.len()).filter(|id| probabilities[*id] > 0.0).collect::<Vec<_>>()
    };
    assert_eq!(kept(Sampling { top_k: 3, ..random_sampling() }), [0, 1, 2]);
    assert_eq!(
        kept(Sampling { top_k: 52, ..random_sampling() }),
        [(0..50).collect::<Vec<_>>(), vec![100, 101]].concat()
    );
    assert_eq!(kept(Sampling { top_p: 0.02, ..random_sampling() }), [0, 1, 2]);
    // The mean log weight is nearest to that of the most likely ids, so they are the most typical.
    assert_eq!(kept(Sampling { typical_p: 0.02, ..random_sampling() }), [0, 1, 2]);
}

#[test]
fn top_n_sigma_keeps_logits_within_deviations_of_numbers() {
    // Deviation 2 around the mean 3; the masked logits do not count.
    let logits = [f32::NEG_INFINITY, 1.0, 5.0, f32::NAN, 5.0, 1.0, f32::NEG_INFINITY];
    let kept = |sampling: Sampling| {
        let probabilities = probabilities(&logits, &input(&sampling));
        (0..logits.len()).filter(|id| probabilities[*id] > 0.0).collect::<Vec<_>>()
    };
    for temperature in [0.1, 1.0, 2.0] {
        let sigma = |top_n_sigma| Sampling { temperature, top_n_sigma, ..random_sampling() };
        assert_eq!(kept(sigma(0.0)), [1, 2, 4, 5]);
        assert_eq!(kept(sigma(0.01)), [2, 4]);
        assert_eq!(kept(sigma(1.9)), [2, 4]);
        assert_eq!(kept(sigma(2.1)), [1, 2, 4, 5]);
        assert_eq!(kept(Sampling { top_k: 1, ..sigma(2.1) }), [2]);
        assert_eq!(kept(Sampling { top_k: 3, ..sigma(1.9) }), [2, 4]);
    }
    let equal = probabilities(&[2.0; 5], &input(&Sampling { top_n_sigma: 1.0, ..random_sampling() }));
    assert_eq!(equal, [0.2; 5], "the deviation is 0");
}

#[test]
fn most_likely_id_can_be_untypical() {
    // A third of the probability on one id, the rest on 1000: the entropy is nearer to the surprise of the many.
    let mut logits = vec![0.0; 1001];
    logits[500] = 500_f32.ln();
    let sampling = Sampling { typical_p: 0.3703, ..random_sampling() };
    let probabilities = probabilities(&logits, &input(&sampling));
    assert_eq!(probabilities[500], 0.0, "the most likely id is not typical");
    assert_eq!(probabilities.iter().filter(|probability| **probability > 0.0).count(), 556);
}

#[test]
fn epsilon_cutoff_keeps_the_heaviest_that_are_left() {
    let mut logits = vec![0.0; 1001];
    logits[500] = 500_f32.ln();
    let kept = |sampling: Sampling| {
        let probabilities = probabilities(&logits, &input(&sampling));
        (0..logits.len()).filter(|id| probabilities[*id] > 0.0).collect::<Vec<_>>()
    };
    let epsilon = |epsilon_cutoff| Sampling { epsilon_cutoff, ..random_sampling() };
    // The best has a third of the probability, each of the others 1/1500.
    assert_eq!(kept(epsilon(1.0 / 1499.0)), [500]);
    assert_eq!(kept(epsilon(1.0 / 1501.0)).len(), 1001);
    assert_eq!(kept(epsilon(0.999)), [500]);
    // Of two candidates, the other one has 1/501.
    assert_eq!(kept(Sampling { top_k: 2, ..epsilon(1.0 / 501.1) }), [0, 500]);
    assert_eq!(kept(Sampling { top_k: 2, ..epsilon(1.0 / 500.9) }), [500]);
    // The most typical ids, without the best, are equal.
    let typical = Sampling { typical_p: 0.3703, ..epsilon(0.999) };
    assert_eq!(kept(typical.clone()), kept(Sampling { epsilon_cutoff: 0.0, ..typical }));
}

/// Compares 200,000 sampled ids with the probabilities, by the chi-square statistic.
fn check_sampled(logits: &[f32], input: &Input<'_>) {
    const SAMPLES: u32 = 200_000;
    let expected = reference::probabilities(logits, input);
    let mut floats = vec![f32::NAN; SamplingWorkspace::len(logits.len())];
    let SamplingWorkspace { row, mut tiles } = SamplingWorkspace::new(&mut floats, logits.len());
    let scores = process(Kernels::best(), logits, input, row);
    let mut counts = vec![0_u32; logits.len()];
    match distribution(Kernels::best(), scores, input.sampling, &mut tiles) {
        Distribution::Certain(token) => counts[token.expect("only two ids are masked") as usize] = SAMPLES,
        Distribution::Candidates(candidates) => {
            for index in 0..SAMPLES {
                let uniform = philox::uniform(input.sampling.seed, index);
                counts[sample::sample(&candidates, uniform) as usize] += 1;
            }
        }
    }
    let (mut statistic, mut cells) = (0.0, 0);
    for (count, probability) in counts.iter().zip(&expected) {
        let wanted = probability * f64::from(SAMPLES);
        if *probability == 0.0 {
            assert_eq!(*count, 0, "an id without probability was sampled; {input:?}");
        } else if wanted >= 5.0 {
            statistic += (f64::from(*count) - wanted).powi(2) / wanted;
            cells += 1;
        }
    }
    // The statistic's mean is cells - 1 and its deviation sqrt(2 (cells - 1)); five deviations never happen by chance.
    let freedom = f64::from(cells - 1);
    let most = freedom + 5.0 * (2.0 * freedom).sqrt() + 1e-6;
    assert!(statistic <= most, "chi-square {statistic} of {freedom}; {input:?}");
}

#[test]
fn sampled_ids_follow_distribution_for_all_filter_combinations() {
    // Several tiles.
    let logits: Vec<f32> = (0..300).map(|id| ((id * 37 % 300) as f32 * 0.37).sin() * 3.0).collect();
    let mut counts = TokenCounts::default();
    counts.push_prompt(&[3, 4, 150]);
    (0..40).for_each(|id| counts.push(id * 7));
    for temperature in [0.7, 1.6] {
        for top_k in [0, 1, 20] {
            for top_p in [1.0, 0.85] {
                for min_p in [0.0, 0.1] {
                    for typical_p in [1.0, 0.8] {
                        for repetition_penalty in [1.0, 1.3] {
                            for bad_token_ids in [vec![], vec![8, 33]] {
                                let sampling = Sampling {
                                    temperature,
                                    top_k,
                                    top_p,
                                    min_p,
                                    typical_p,
                                    repetition_penalty,
                                    bad_token_ids,
                                    seed: 3,
                                    ..Sampling::default()
                                };
                                check_sampled(&logits, &Input { counts: &counts, ..input(&sampling) });
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn seed_and_index_determine_the_sampled_id() {
    let logits = vec![0.0; 5000];
    let sampling = Sampling { seed: 5, ..random_sampling() };
    for index in [0, 1, u32::MAX] {
        let token = sample_token(&logits, &Input { index, ..input(&sampling) });
        // All weights are equal, so the inverse of the cumulative distribution is a multiplication.
        assert_eq!(token.id, (philox::uniform(5, index) * 5000.0) as u32);
        assert!(token.logprob.is_nan() && token.details.is_none());
    }
}

#[test]
fn rounding_remainder_selects_the_last_candidate() {
    let logits = [vec![0.1; 200], vec![f32::NEG_INFINITY; 200]].concat();
    let mut floats = vec![f32::NAN; SamplingWorkspace::len(logits.len())];
    let SamplingWorkspace { mut tiles, .. } = SamplingWorkspace::new(&mut floats, logits.len());
    let sampling = random_sampling();
    let Distribution::Candidates(candidates) = distribution(Kernels::best(), &logits, &sampling, &mut tiles)
    else {
        panic!("no id is certain")
    };
    assert_eq!(sample::sample(&candidates, 1.0), 199);
    assert_eq!(sample::sample(&candidates, 0.0), 0);
}

#[test]
fn greedy_takes_lowest_id_among_equals_and_never_nan() {
    let logits = [1.0, 3.0, 3.0, f32::NAN, 2.0];
    let token = |sampling: Sampling, suppressed: &[u32]| {
        sample_token(&logits, &Input { suppressed, ..input(&sampling) }).id
    };
    assert_eq!(token(greedy(), &[]), 1);
    assert_eq!(token(greedy(), &[1, 2]), 4);
    assert_eq!(token(Sampling { temperature: 1e-6, ..greedy() }, &[]), 1);
    assert_eq!(token(Sampling { temperature: 2.0, top_k: 1, ..greedy() }, &[]), 1);
}

#[test]
fn nan_rows_give_a_token_and_masked_rows_no_candidates() {
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
                let sampling = Sampling { temperature, top_p, ..random_sampling() };
                let sampled = sample_one(&logits, &input(&sampling));
                assert_eq!(sampled.token().map(|token| token.id), token);
                assert_eq!(sampled == Sampled::NoCandidates, token.is_none());
            }
        }
    }
    // Masks that leave nothing, alone and together.
    let logits = [1.0, 2.0, f32::INFINITY, NONE];
    let even = [0b0101];
    let plain = random_sampling();
    let [none_allowed, last_allowed, one_allowed] = [vec![], vec![3, 77], vec![1]]
        .map(|ids| Sampling { allowed_token_ids: Some(ids), ..random_sampling() });
    let [first_and_third, third_and_first] =
        [vec![0, 2], vec![2, 0]].map(|bad_token_ids| Sampling { bad_token_ids, ..random_sampling() });
    let no_repeat = Sampling { no_repeat_ngram_size: 1, ..random_sampling() };
    let exhausting = [
        input(&none_allowed),
        input(&last_allowed),
        Input { mask: Some(&[]), ..input(&plain) },
        Input { mask: Some(&even), ..input(&first_and_third) },
        Input { mask: Some(&even), ..input(&one_allowed) },
        Input { suppressed: &[1], ..input(&third_and_first) },
        Input { history: History { prompt: &[0, 2], generated: &[1] }, ..input(&no_repeat) },
        Input { processed: Some(&[NONE; 4]), ..input(&plain) },
    ];
    for case in exhausting {
        for sampling in [case.sampling.clone(), Sampling { temperature: 0.0, ..case.sampling.clone() }] {
            let logprobs = Some(LogprobsRequest { top: 2, processed: true });
            let case = Input { sampling: &sampling, logprobs, ..case };
            assert_eq!(sample_one(&logits, &case), Sampled::NoCandidates, "{case:?}");
            assert_eq!(probabilities(&logits, &case), [0.0; 4]);
        }
    }
    // A bias does not bring a masked id back.
    let logit_bias = vec![(0, 1e30), (1, f32::INFINITY)];
    let biased = Sampling { allowed_token_ids: Some(vec![2]), logit_bias, ..random_sampling() };
    assert_eq!(sample_token(&logits, &input(&biased)).id, 2);
}
