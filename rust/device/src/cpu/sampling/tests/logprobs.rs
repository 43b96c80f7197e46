//! Log probabilities: what they are, and that they are the same whichever way they come.

use super::*;

/// Those of every id, asked one by one.
fn given(logits: &[f32], params: &SampleParams<'_>) -> Vec<f32> {
    let of = |id| sample(logits, &SampleParams { given: Some(id), ..*params }).logprob;
    (0..logits.len() as u32).map(of).collect()
}

fn bits(logprobs: &[f32]) -> Vec<u32> {
    logprobs.iter().map(|logprob| logprob.to_bits()).collect()
}

fn asked(top: u32, processed: bool) -> Option<LogprobsRequest> {
    Some(LogprobsRequest { top, processed })
}

#[test]
fn they_are_the_log_softmax_of_what_they_were_asked_of() {
    let mut random = Random(21);
    for _ in 0..60 {
        let mut logits = random.logits(200);
        logits[0] = 1.0;
        let temperature = random.one(&[0.0, 0.4, 1.3]);
        let bias = [(3, 2.5), (150, -1.0)];
        let params = SampleParams {
            temperature,
            logit_bias: &bias,
            banned: &[7, 9],
            top_k: 3,
            seed: random.next(),
            ..drawn()
        };
        let raw = naive::log_softmax(&logits, 1.0);
        let processed = naive::log_softmax(&naive::process(&logits, &params), temperature);
        for (is_processed, want) in [(false, raw), (true, processed)] {
            let got = given(&logits, &SampleParams { logprobs: asked(0, is_processed), ..params });
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
fn an_id_has_the_same_bits_chosen_given_or_among_the_likeliest() {
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
            let params = SampleParams {
                temperature: random.one(&[0.0, 0.5, 1.5]),
                top_k: random.one(&[0, 1, 20]),
                top_p: random.one(&[1.0, 0.9]),
                seed: random.next(),
                logit_bias: &[(1, 0.5)],
                ..drawn()
            };
            let all = given(&logits, &SampleParams { logprobs: asked(0, processed), ..params });
            for top in [0, 1, 5, 2000] {
                let sampled = sample(&logits, &SampleParams { logprobs: asked(top, processed), ..params });
                assert_eq!(sampled.logprob.to_bits(), all[sampled.token as usize].to_bits());
                let listed: Vec<f32> = sampled.top.iter().map(|(_, logprob)| *logprob).collect();
                let expected: Vec<f32> = sampled.top.iter().map(|(id, _)| all[*id as usize]).collect();
                assert_eq!(bits(&listed), bits(&expected));
            }
        }
    }
}

#[test]
fn raw_ones_have_the_same_bits_whatever_else_is_asked() {
    let logits = Random(23).logits(300);
    let counts = {
        let mut counts = TokenCounts::new();
        counts.push_prompt(&[1, 2, 3]);
        counts
    };
    let (alone, mask, processed) =
        (SampleParams { logprobs: asked(0, false), ..drawn() }, [u32::MAX; 3], vec![0.5; 300]);
    let plain = given(&logits, &alone);
    for params in [
        SampleParams { temperature: 0.3, ..alone },
        SampleParams { temperature: 0.0, logprobs: asked(4, false), ..alone },
        SampleParams { top_k: 3, top_p: 0.2, min_p: 0.5, typical_p: 0.3, ..alone },
        SampleParams { repetition_penalty: 1.5, counts: &counts, logit_bias: &[(4, 1.0)], ..alone },
        SampleParams { mask: Some(&mask), banned: &[5], processed: Some(&processed), ..alone },
    ] {
        assert_eq!(bits(&given(&logits, &params)), bits(&plain));
        let sampled = sample(&logits, &params);
        assert_eq!(sampled.logprob.to_bits(), plain[sampled.token as usize].to_bits());
    }
}

#[test]
fn the_likeliest_come_in_order_and_only_those_that_are_possible() {
    let mut random = Random(24);
    for _ in 0..300 {
        let vocabulary = random.one(&VOCABULARIES);
        let logits = random.logits(vocabulary);
        let mask: Vec<u32> = (0..vocabulary.div_ceil(32)).map(|_| random.next() as u32).collect();
        for processed in [false, true] {
            let params = SampleParams { mask: Some(&mask), ..SampleParams::greedy() };
            let scores = if processed { naive::process(&logits, &params) } else { logits.clone() };
            let mut order: Vec<u32> =
                (0..vocabulary as u32).filter(|id| scores[*id as usize] > f32::NEG_INFINITY).collect();
            order.sort_by(|a, b| {
                (scores[*b as usize] + 0.0).total_cmp(&(scores[*a as usize] + 0.0)).then(a.cmp(b))
            });
            for top in [0, 1, 3, 20, 400] {
                let sampled = sample(&logits, &SampleParams { logprobs: asked(top, processed), ..params });
                if sampled.is_exhausted {
                    continue;
                }
                let ids: Vec<u32> = sampled.top.iter().map(|(id, _)| *id).collect();
                assert_eq!(ids, order[..order.len().min(top as usize)]);
            }
        }
    }
}

#[test]
fn nothing_is_chosen_where_the_token_is_given() {
    let logits = [0.0, 1.0, 2.0];
    let params = SampleParams { given: Some(0), allowed: Some(&[]), logprobs: asked(1, false), ..drawn() };
    let sampled = sample(&logits, &params);
    assert_eq!((sampled.token, sampled.is_exhausted), (0, false));
    assert_eq!(sampled.top.len(), 1);
    assert_eq!(sampled.top[0].0, 2);
}
