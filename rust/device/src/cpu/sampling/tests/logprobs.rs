//! Log probabilities: their values, and that an id has the same bits sampled, given or among the most likely.

use super::*;

/// Those of every id, each as the given token.
fn given(logits: &[f32], input: &Input<'_>) -> Vec<f32> {
    let of = |id| sample_token(logits, &Input { given: Some(id), ..*input }).logprob;
    (0..logits.len() as u32).map(of).collect()
}

fn bits(logprobs: &[f32]) -> Vec<u32> {
    logprobs.iter().map(|logprob| logprob.to_bits()).collect()
}

fn request(top: u32, processed: bool) -> Option<LogprobsRequest> {
    Some(LogprobsRequest { top, processed })
}

#[test]
fn logprobs_match_reference() {
    let mut random = Random(21);
    for _ in 0..60 {
        let mut logits = random.logits(200);
        logits[0] = 1.0;
        let temperature = random.one(&[0.0, 0.4, 1.3]);
        let sampling = Sampling {
            temperature,
            logit_bias: vec![(3, 2.5), (150, -1.0)],
            bad_token_ids: vec![7, 9],
            top_k: 3,
            seed: random.next(),
            ..Sampling::default()
        };
        let raw = reference::log_softmax(&logits, 1.0);
        let processed = reference::log_softmax(&reference::process(&logits, &input(&sampling)), temperature);
        for (is_processed, want) in [(false, raw), (true, processed)] {
            let logprobs = request(0, is_processed);
            let got = given(&logits, &Input { logprobs, ..input(&sampling) });
            for (id, (got, want)) in got.iter().zip(want).enumerate() {
                let is_number = !logits[id].is_nan() || is_processed && [7, 9].contains(&id);
                let close =
                    f64::from(*got) == want || (f64::from(*got) - want).abs() < 3e-6 * want.abs().max(1.0);
                assert!(close || !is_number && got.is_nan(), "{id} has {got}, should have {want}");
            }
        }
    }
}

#[test]
fn id_has_same_bits_sampled_given_or_among_most_likely() {
    let mut random = Random(22);
    for round in 0..200 {
        let vocabulary = random.one(&VOCABULARIES);
        let mut logits = random.logits(vocabulary);
        logits[vocabulary / 2] = 3.0;
        if round % 10 == 0 {
            logits.fill(f32::NEG_INFINITY);
            logits[vocabulary / 2] = -0.0; // certain: its log probability is a zero, which has two signs
        }
        for processed in [false, true] {
            let sampling = Sampling {
                temperature: random.one(&[0.0, 0.5, 1.5]),
                top_k: random.one(&[0, 1, 20]),
                top_p: random.one(&[1.0, 0.9]),
                seed: random.next(),
                logit_bias: vec![(1, 0.5)],
                ..Sampling::default()
            };
            let all = given(&logits, &Input { logprobs: request(0, processed), ..input(&sampling) });
            for top in [0, 1, 5, 2000] {
                let logprobs = request(top, processed);
                let token = sample_token(&logits, &Input { logprobs, ..input(&sampling) });
                assert_eq!(token.logprob.to_bits(), all[token.id as usize].to_bits());
                let listed: Vec<f32> = token.top().iter().map(|(_, logprob)| *logprob).collect();
                let expected: Vec<f32> = token.top().iter().map(|(id, _)| all[*id as usize]).collect();
                assert_eq!(bits(&listed), bits(&expected));
            }
        }
    }
}

#[test]
fn raw_logprobs_have_same_bits_for_any_other_parameters() {
    let logits = Random(23).logits(300);
    let counts = {
        let mut counts = TokenCounts::default();
        counts.push_prompt(&[1, 2, 3]);
        counts
    };
    let (mask, processed) = ([u32::MAX; 10], vec![0.5; 300]);
    let base = random_sampling;
    let plain = {
        let sampling = base();
        given(&logits, &Input { logprobs: request(0, false), ..input(&sampling) })
    };
    let samplings = [
        Sampling { temperature: 0.3, ..base() },
        Sampling { temperature: 0.0, ..base() },
        Sampling { top_k: 3, top_p: 0.2, min_p: 0.5, typical_p: 0.3, ..base() },
        Sampling { repetition_penalty: 1.5, logit_bias: vec![(4, 1.0)], ..base() },
        Sampling { bad_token_ids: vec![5], ..base() },
    ];
    for (number, sampling) in samplings.iter().enumerate() {
        let is_processed = number == 4;
        let params = Input {
            logprobs: request(if number == 1 { 4 } else { 0 }, false),
            counts: &counts,
            mask: is_processed.then_some(&mask[..3]),
            processed: is_processed.then_some(&processed),
            ..input(sampling)
        };
        assert_eq!(bits(&given(&logits, &params)), bits(&plain));
        let token = sample_token(&logits, &params);
        assert_eq!(token.logprob.to_bits(), plain[token.id as usize].to_bits());
    }
}

#[test]
fn most_likely_ids_are_ordered_and_possible() {
    let mut random = Random(24);
    for _ in 0..300 {
        let vocabulary = random.one(&VOCABULARIES);
        let logits = random.logits(vocabulary);
        let mask: Vec<u32> = (0..vocabulary.div_ceil(32)).map(|_| random.next() as u32).collect();
        for processed in [false, true] {
            let sampling = greedy();
            let params = Input { mask: Some(&mask), ..input(&sampling) };
            let scores = if processed { reference::process(&logits, &params) } else { logits.clone() };
            let mut order: Vec<u32> =
                (0..vocabulary as u32).filter(|id| scores[*id as usize] > f32::NEG_INFINITY).collect();
            order.sort_by(|a, b| {
                (scores[*b as usize] + 0.0).total_cmp(&(scores[*a as usize] + 0.0)).then(a.cmp(b))
            });
            for top in [0, 1, 3, 20, 400, vocabulary as u32 - 1, vocabulary as u32, u32::MAX] {
                let sampled = sample_one(&logits, &Input { logprobs: request(top, processed), ..params });
                let Some(token) = sampled.token() else { continue };
                let ids: Vec<u32> = token.top().iter().map(|(id, _)| *id).collect();
                assert_eq!(ids, order[..order.len().min(top as usize)]);
            }
        }
    }
}

#[test]
fn given_token_is_kept_whatever_is_masked() {
    let logits = [0.0, 1.0, 2.0];
    let sampling = Sampling { allowed_token_ids: Some(vec![]), ..random_sampling() };
    let params = Input { given: Some(0), logprobs: request(1, false), ..input(&sampling) };
    let token = sample_token(&logits, &params);
    assert_eq!(token.id, 0);
    assert_eq!(token.top().len(), 1);
    assert_eq!(token.top()[0].0, 2);
}
