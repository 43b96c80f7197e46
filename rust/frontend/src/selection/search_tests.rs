//! Tests of the beam search with table-driven models: results, expanded beams, termination, against exhaustive search.

use std::collections::HashSet;

use super::*;
use crate::output::StopReason;

const END: u32 = 0;

/// The log probabilities of the next token after a prefix.
type Model<'a> = &'a dyn Fn(&[u32]) -> Vec<f32>;

/// Ends at some tokens, and at a length.
#[derive(Clone)]
struct EndsAt {
    tokens: Vec<u32>,
    max_tokens: usize,
}

impl BeamStops for EndsAt {
    fn push(&mut self, generated: &[u32]) -> Option<Ending> {
        let last = *generated.last()?;
        if self.tokens.contains(&last) {
            return Some(stopped(last));
        }
        (generated.len() == self.max_tokens).then(|| Ending::without_stop("length"))
    }
}

fn stopped(token: u32) -> Ending {
    Ending { finish_reason: "stop", stop_reason: Some(StopReason::Token(token)) }
}

/// A model whose distributions depend on a hash of the prefix.
fn random_model(vocabulary_size: u32, seed: u64) -> impl Fn(&[u32]) -> Vec<f32> {
    move |token_ids| {
        let weights: Vec<f64> = (0..vocabulary_size)
            .map(|token| {
                let prefix = token_ids.iter().chain([&token]);
                let hash = prefix.fold(seed + 1, |hash, id| mix(hash ^ u64::from(*id + 1)));
                ((hash >> 11) as f64 / (1_u64 << 53) as f64).powi(3) + 1e-9
            })
            .collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| (weight / sum).ln() as f32).collect()
    }
}

/// SplitMix64.
fn mix(state: u64) -> u64 {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

fn logs(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|probability| probability.ln() as f32).collect()
}

fn top_of(logprobs: &[f32], count: usize) -> TopLogprobs {
    let mut top: TopLogprobs = (0..).zip(logprobs.iter().copied()).collect();
    top.sort_by(|one, other| other.1.total_cmp(&one.1));
    top.truncate(count);
    top
}

/// A finished search, and the beams that each step expanded.
struct Run {
    closed: Vec<ClosedBeam>,
    steps: Vec<Vec<Beam>>,
}

fn run(model: Model<'_>, num_beams: usize, length_penalty: f64, stops: EndsAt) -> Run {
    let mut search = Search::new(num_beams, length_penalty, stops);
    let mut steps = Vec::new();
    while search.running().len() > 0 {
        steps.push(search.running().cloned().collect());
        let tops = search.running().map(|beam| top_of(&model(&beam.token_ids), 2 * num_beams)).collect();
        search.advance(tops);
    }
    Run { closed: search.closed().to_vec(), steps }
}

fn ends(max_tokens: usize) -> EndsAt {
    EndsAt { tokens: vec![END], max_tokens }
}

fn never_ends(max_tokens: usize) -> EndsAt {
    EndsAt { tokens: Vec::new(), max_tokens }
}

/// All possible outputs with their scores, best first.
fn all_outputs(
    model: Model<'_>,
    vocabulary_size: u32,
    max_tokens: usize,
    length_penalty: f64,
) -> Vec<(f64, Vec<u32>)> {
    let mut outputs = Vec::new();
    let mut prefixes = vec![(0.0, Vec::new())];
    while let Some((total, ids)) = prefixes.pop() {
        let logprobs = model(&ids);
        for token in 0..vocabulary_size {
            let mut ids: Vec<u32> = ids.clone();
            ids.push(token);
            let total: f64 = total + f64::from(logprobs[token as usize]);
            if token == END || ids.len() == max_tokens {
                outputs.push((total / (ids.len() as f64).powf(length_penalty), ids));
            } else {
                prefixes.push((total, ids));
            }
        }
    }
    outputs.sort_by(|one, other| descending(one.0, other.0));
    outputs
}

#[test]
fn search_as_wide_as_the_tree_equals_exhaustive_search() {
    for seed in 0..20 {
        for length_penalty in [0.0, 1.0] {
            let model = random_model(4, seed);
            let best = all_outputs(&model, 4, 4, length_penalty);
            let found = run(&model, 256, length_penalty, ends(4)).closed;
            assert_eq!(found.len(), best.len());
            for (output, (score, ids)) in found.iter().zip(best) {
                assert_eq!((output.score, &output.beam.token_ids), (score, &ids));
            }
        }
    }
}

#[test]
fn narrow_search_finds_a_subset_of_the_exhaustive_search() {
    for seed in 0..20 {
        let model = random_model(5, seed);
        let all = all_outputs(&model, 5, 4, 1.0);
        for output in run(&model, 3, 1.0, ends(4)).closed {
            assert!(all.contains(&(output.score, output.beam.token_ids)));
        }
    }
}

#[test]
fn score_is_the_sum_over_length_to_the_penalty() {
    let model = random_model(8, 1);
    for length_penalty in [-1.0, 0.0, 0.5, 1.0, 2.0] {
        for output in run(&model, 3, length_penalty, ends(6)).closed {
            let ids = &output.beam.token_ids;
            let expected: Vec<_> =
                (0..ids.len()).map(|index| model(&ids[..index])[ids[index] as usize]).collect();
            assert_eq!(output.beam.logprobs(), expected);
            let sum: f64 = expected.iter().copied().map(f64::from).sum();
            assert_eq!(output.score, sum / (ids.len() as f64).powf(length_penalty));
        }
    }
}

#[test]
fn beams_are_sorted_by_score_and_distinct() {
    for seed in 0..20 {
        let closed = run(&random_model(6, seed), 5, 1.0, ends(5)).closed;
        assert_eq!(closed.len(), 5);
        assert!(closed.is_sorted_by(|one, other| one.score >= other.score));
        let distinct: HashSet<_> = closed.iter().map(|output| &output.beam.token_ids).collect();
        assert_eq!(distinct.len(), 5);
    }
}

#[test]
fn one_beam_is_greedy_decoding() {
    let model = random_model(50, 3);
    let closed = run(&model, 1, 1.0, never_ends(10)).closed;
    let mut ids = Vec::new();
    for _ in 0..10 {
        ids.push(top_of(&model(&ids), 1)[0].0);
    }
    assert_eq!(closed.len(), 1);
    assert_eq!(closed[0].beam.token_ids, ids);
    assert_eq!(closed[0].ending, Ending::without_stop("length"));
}

#[test]
fn more_beams_find_a_better_sequence_than_greedy() {
    let model = |ids: &[u32]| match ids {
        [] => logs(&[0.0001, 0.5, 0.4999]),
        [1] => logs(&[0.34, 0.33, 0.33]),
        _ => logs(&[0.98, 0.01, 0.01]),
    };
    let greedy = run(&model, 1, 1.0, ends(2)).closed;
    let best = run(&model, 2, 1.0, ends(2)).closed;
    assert_eq!(greedy[0].beam.token_ids, [1, END]);
    assert_eq!(best[0].beam.token_ids, [2, END]);
    assert!(best[0].score > greedy[0].score);
}

#[test]
fn first_step_expands_one_beam_and_later_steps_the_best() {
    let steps = run(&random_model(20, 5), 4, 1.0, never_ends(6)).steps;
    assert!(steps[0].iter().all(|beam| beam.token_ids.is_empty() && beam.total == 0.0));
    assert_eq!(steps.iter().map(Vec::len).collect::<Vec<_>>(), [1, 4, 4, 4, 4, 4]);
    for step in steps {
        assert!(step.is_sorted_by(|one, other| one.total >= other.total));
    }
}

#[test]
fn search_stops_when_no_running_beam_beats_the_worst_result() {
    let model = |_: &[u32]| logs(&[0.9, 0.06, 0.04]);
    let run = run(&model, 2, 0.0, ends(1000));
    let ids: Vec<_> = run.closed.iter().map(|output| output.beam.token_ids.as_slice()).collect();
    assert_eq!(ids, [&[END][..], &[1, END]]);
    assert_eq!(run.steps.len(), 2);
}

#[test]
fn finished_beam_ranked_below_num_beams_is_dropped() {
    // The end token ranks third: with two beams it never finishes a beam.
    let model = |_: &[u32]| logs(&[0.2, 0.45, 0.35]);
    let closed = run(&model, 2, 1.0, ends(2)).closed;
    let endings: Vec<_> = closed.iter().map(|output| output.ending.finish_reason).collect();
    assert_eq!(endings, ["length", "length"]);
}

#[test]
fn search_continues_when_all_top_tokens_finish() {
    let model = |_: &[u32]| logs(&[0.3, 0.3, 0.2, 0.1, 0.1]);
    let steps = run(&model, 3, 1.0, EndsAt { tokens: vec![0, 1], max_tokens: 2 }).steps;
    let ids: Vec<_> = steps[1].iter().map(|beam| beam.token_ids.as_slice()).collect();
    assert_eq!(ids, [[2], [3], [4]]);
}

#[test]
fn masked_tokens_are_excluded_and_results_can_be_fewer() {
    let model = |_: &[u32]| logs(&[0.0, 1.0, 0.0]);
    let closed = run(&model, 3, 1.0, ends(4)).closed;
    assert_eq!(closed.len(), 1);
    assert_eq!(closed[0].beam.token_ids, [1, 1, 1, 1]);
}

#[test]
fn equal_scores_keep_the_first_found() {
    let model = |_: &[u32]| logs(&[0.25; 4]);
    let closed = run(&model, 3, 1.0, never_ends(2)).closed;
    let ids: Vec<_> = closed.iter().map(|output| output.beam.token_ids.as_slice()).collect();
    assert_eq!(ids, [[0, 0], [0, 1], [0, 2]]);
}

#[test]
fn top_logprobs_are_kept_for_every_token() {
    let model = random_model(9, 7);
    for output in run(&model, 2, 1.0, ends(5)).closed {
        let ids = &output.beam.token_ids;
        let expected: Vec<_> =
            (0..ids.len()).map(|index| Arc::new(top_of(&model(&ids[..index]), 4))).collect();
        assert_eq!(output.beam.tops(), expected);
    }
}

#[test]
fn interrupted_search_returns_finished_and_running_beams() {
    let top = (0..).zip(logs(&[0.5, 0.3, 0.2])).collect();
    let mut search = Search::new(2, 1.0, ends(9));
    search.advance(vec![top]);
    let running: Vec<_> = search.running().map(|beam| beam.token_ids.as_slice()).collect();
    assert_eq!(running, [[1], [2]]);
    search.interrupt("interrupted");
    assert_eq!(search.running().len(), 0);
    let interrupted = || Ending::without_stop("interrupted");
    let expected = [(END, stopped(END)), (1, interrupted()), (2, interrupted())];
    for ((output, (token, ending)), logprob) in
        search.closed().iter().zip(expected).zip(logs(&[0.5, 0.3, 0.2]))
    {
        assert_eq!((output.beam.token_ids[0], &output.ending), (token, &ending));
        assert_eq!(output.score, f64::from(logprob));
    }
}

#[test]
fn step_copies_no_details_of_earlier_tokens() {
    let model = random_model(20, 5);
    let steps = run(&model, 4, 1.0, never_ends(50)).steps;
    for pair in steps.windows(2) {
        let parents: Vec<_> = pair[0].iter().map(|beam| beam.last.as_ref().map(Arc::as_ptr)).collect();
        for beam in &pair[1] {
            let last = beam.last.as_ref().expect("a token");
            assert!(
                parents.contains(&last.previous.as_ref().map(Arc::as_ptr)),
                "shared with the beam before"
            );
        }
    }
}

#[test]
fn very_long_beam_is_dropped_without_recursion() {
    let mut beam = Beam::default();
    let top = Arc::new(TopLogprobs::new());
    for token in 0..200_000 {
        let last = Position { logprob: -1.0, top: Arc::clone(&top), previous: beam.last.take() };
        beam = Beam { token_ids: vec![token], total: 0.0, last: Some(Arc::new(last)) };
    }
    assert_eq!(beam.logprobs().len(), 200_000);
    drop(beam);
}
