//! Right and wrong drafts: outputs have the bits of plain decoding.

use std::sync::Arc;

use penstock_engine::Request;
use penstock_types::EngineConfig;

use super::rules::{Fault, Thirds, with_everything};
use super::steps::{Row, Sequence, Steps, bits_of};
use crate::common::{VOCABULARY, request};

const TOKENS: usize = 40;

/// `count` drafts of a known output, of which the first `num_right` are right.
fn drafts(output: &[u32], num_tokens: usize, count: usize, num_right: usize) -> Vec<u32> {
    let ahead = output[num_tokens..].iter().take(count).enumerate();
    ahead.map(|(place, id)| if place < num_right { *id } else { (*id + 1) % VOCABULARY as u32 }).collect()
}

/// Runs a request without drafts, then with every mixture of right and wrong ones.
#[track_caller]
fn check(steps: &mut Steps, request: impl Fn() -> Request) {
    let plain = steps.run_plainly(request());
    assert_eq!(plain.tokens.len(), TOKENS);
    let output = plain.ids();
    for (count, num_right) in [(1, 1), (1, 0), (4, 4), (4, 0), (4, 2), (12, 12), (12, 7)] {
        let mut num_steps = 0;
        let drafted = steps.run(request(), usize::MAX, |sequence: &Sequence| {
            num_steps += 1;
            drafts(&output, sequence.tokens.len(), count, num_right)
        });
        assert_eq!(bits_of(&drafted), bits_of(&plain), "{num_right} of {count} drafts are right");
        assert_eq!(num_steps, TOKENS.div_ceil(num_right + 1), "{num_right} of {count} are accepted");
    }
}

#[test]
fn drafts_do_not_change_the_output() {
    let mut steps = Steps::of_four();
    check(&mut steps, || request(5, 30, TOKENS));
    check(&mut steps, || Request { stop_token_ids: vec![], ..with_everything(6, 50, TOKENS) });
    check(&mut steps, || Request { stop_token_ids: vec![], ..with_everything(7, 50, TOKENS) });
}

#[test]
fn drafts_do_not_change_the_output_of_a_grammar() {
    let grammar = || Some(Arc::new(Thirds(Fault::Never)) as _);
    let mut steps = Steps::of_four();
    check(&mut steps, || Request { grammar: grammar(), ..request(8, 30, TOKENS) });
}

#[test]
fn rows_with_drafts_can_span_tiles() {
    // Tiles of 32 rows, and four rows of eleven drafts and one.
    let config = EngineConfig {
        threads: Some(2),
        max_num_seqs: Some(4),
        max_num_batched_tokens: Some(100),
        ..EngineConfig::default()
    };
    let mut steps = Steps::new(config);
    let requests = || {
        (0..4).map(|number| {
            let grammar = (number % 2 == 0).then(|| Arc::new(Thirds(Fault::Never)) as _);
            let outputs = with_everything(number, 10, TOKENS).outputs;
            Request { grammar, outputs, ..request(number, 10, TOKENS) }
        })
    };
    let plain: Vec<Sequence> = requests().map(|request| steps.run_plainly(request)).collect();
    let outputs: Vec<Vec<u32>> = plain.iter().map(Sequence::ids).collect();
    let mut sequences: Vec<Sequence> =
        requests().enumerate().map(|(slot, request)| Sequence::new(request, slot as u32)).collect();
    let mut round = 0;
    while sequences.iter().any(|sequence| sequence.tokens.len() < TOKENS) {
        round += 1;
        let open = sequences.iter_mut().zip(&outputs).filter(|(sequence, _)| sequence.tokens.len() < TOKENS);
        let mut rows: Vec<Row<'_>> = open
            .map(|(sequence, output)| {
                let drafts = drafts(output, sequence.tokens.len(), 11, (round * 5 + output.len()) % 13);
                Row { sequence, chunk: usize::MAX, drafts }
            })
            .collect();
        steps.step(&mut rows);
    }
    for (mut drafted, plain) in sequences.into_iter().zip(plain) {
        drafted.tokens.truncate(TOKENS);
        assert_eq!(bits_of(&drafted), bits_of(&plain));
    }
}

#[test]
fn row_ends_with_stop_token_whatever_drafts_follow() {
    let mut steps = Steps::of_four();
    let output = steps.run_plainly(request(9, 30, 12)).ids();
    let stop_token_ids = vec![output[3]];
    assert!(!output[..3].contains(&output[3]));
    let mut sequence = Sequence::new(Request { stop_token_ids, ..request(9, 30, 12) }, 0);
    steps.step(&mut [Row { sequence: &mut sequence, chunk: usize::MAX, drafts: output[..8].to_vec() }]);
    assert_eq!(sequence.ids(), output[..4]);
}
