//! Random requests to the allocator and its model.

use penstock_device::bfc::Placement;
use proptest::collection::vec;
use proptest::prelude::*;

use super::model::{Outcome, Pair};

#[derive(Clone, Debug)]
enum Request {
    Allocate(usize, Placement),
    Free(usize),
    Retire(usize, u64),
    Reclaim(u64),
    Extend(usize),
}

fn any_request() -> impl Strategy<Value = Request> {
    let placement = || prop_oneof![Just(Placement::Low), Just(Placement::High)];
    // Mostly small relative to the region, sometimes about its size, rarely near the largest integer.
    let bytes = prop_oneof![
        12 => 0..3_000_usize,
        3 => 3_000..40_000_usize,
        1 => prop_oneof![Just(usize::MAX), Just(usize::MAX - 4095), Just(isize::MAX as usize)],
    ];
    prop_oneof![
        10 => (bytes, placement()).prop_map(|(bytes, placement)| Request::Allocate(bytes, placement)),
        6 => any::<usize>().prop_map(Request::Free),
        3 => (any::<usize>(), 0..20_u64).prop_map(|(which, fence)| Request::Retire(which, fence)),
        2 => (0..20_u64).prop_map(Request::Reclaim),
        1 => (0..9_000_usize).prop_map(Request::Extend),
    ]
}

fn any_region() -> impl Strategy<Value = (usize, usize)> {
    prop_oneof![Just(64_usize), Just(256), Just(4096)]
        .prop_flat_map(|alignment| (alignment..40_000_usize, Just(alignment)))
}

/// Runs the requests and returns the outcomes of the allocations. The pair compares every step.
fn run(pair: &mut Pair, requests: &[Request]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for request in requests {
        match *request {
            Request::Allocate(bytes, placement) => outcomes.push(pair.allocate(bytes, placement)),
            Request::Free(which) => pair.free(which),
            Request::Retire(which, fence) => pair.retire(which, fence),
            Request::Reclaim(passed) => pair.reclaim(passed),
            Request::Extend(bytes) => pair.extend(bytes),
        }
    }
    outcomes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_step_matches_the_model((capacity, alignment) in any_region(), requests in vec(any_request(), 1..120)) {
        run(&mut Pair::new(capacity, alignment), &requests);
    }

    #[test]
    fn freeing_everything_in_any_order_leaves_one_free_chunk(
        (capacity, alignment) in any_region(),
        requests in vec(any_request(), 1..80),
        seed in any::<usize>(),
    ) {
        let mut pair = Pair::new(capacity, alignment);
        run(&mut pair, &requests);
        pair.free_everything(seed);
        prop_assert_eq!(pair.extents().len(), 1);
    }

    #[test]
    fn same_requests_get_the_same_offsets(
        (capacity, alignment) in any_region(),
        requests in vec(any_request(), 1..80),
    ) {
        let (mut one, mut other) = (Pair::new(capacity, alignment), Pair::new(capacity, alignment));
        prop_assert_eq!(run(&mut one, &requests), run(&mut other, &requests));
        prop_assert_eq!(one.extents(), other.extents());
    }
}
