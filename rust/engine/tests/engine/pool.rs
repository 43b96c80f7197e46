//! The block pool against a naive twin that counts everything anew each time.

use penstock_engine::BlockId;
use penstock_engine::kv::{BlockList, BlockPool};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Operation {
    Open { num_blocks: usize },
    Share { list: usize, num_shared: usize, num_more: usize },
    Grow { list: usize, by: usize },
    GiveBack { list: usize },
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        (0..6usize).prop_map(|num_blocks| Operation::Open { num_blocks }),
        (any::<usize>(), any::<usize>(), 0..4usize)
            .prop_map(|(list, num_shared, num_more)| Operation::Share { list, num_shared, num_more }),
        (any::<usize>(), 0..4usize).prop_map(|(list, by)| Operation::Grow { list, by }),
        any::<usize>().prop_map(|list| Operation::GiveBack { list }),
    ]
}

/// A list as the twin sees it: what it holds and what it may still take.
struct Twin {
    blocks: Vec<BlockId>,
    num_reserved: usize,
}

fn num_used(twins: &[Twin]) -> usize {
    let mut blocks: Vec<_> = twins.iter().flat_map(|twin| &twin.blocks).collect();
    blocks.sort_unstable();
    blocks.dedup();
    blocks.len()
}

fn num_available(num_blocks: usize, twins: &[Twin]) -> usize {
    num_blocks - num_used(twins) - twins.iter().map(|twin| twin.num_reserved).sum::<usize>()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_does_what_its_naive_twin_does(
        num_blocks in 1..24usize,
        operations in prop::collection::vec(operation(), 1..80),
    ) {
        let mut pool = BlockPool::new(num_blocks);
        let mut lists: Vec<BlockList> = Vec::new();
        let mut twins: Vec<Twin> = Vec::new();
        for operation in operations {
            let available = num_available(num_blocks, &twins);
            match operation {
                Operation::Open { num_blocks } => {
                    let list = pool.open(num_blocks);
                    assert_eq!(list.is_some(), num_blocks <= available);
                    if let Some(list) = list {
                        lists.push(list);
                        twins.push(Twin { blocks: vec![], num_reserved: num_blocks });
                    }
                }
                Operation::Share { list, num_shared, num_more } if !lists.is_empty() => {
                    let list = list % lists.len();
                    let num_shared = num_shared % (twins[list].blocks.len() + 1);
                    let shared = pool.open_sharing(&lists[list], num_shared, num_shared + num_more);
                    assert_eq!(shared.is_some(), num_more <= available);
                    if let Some(shared) = shared {
                        lists.push(shared);
                        twins.push(Twin { blocks: twins[list].blocks[..num_shared].to_vec(), num_reserved: num_more });
                    }
                }
                Operation::Grow { list, by } if !lists.is_empty() => {
                    let list = list % lists.len();
                    let by = by.min(twins[list].num_reserved);
                    let before = twins[list].blocks.len();
                    pool.grow(&mut lists[list], before + by);
                    for &block in &lists[list].blocks()[before..] {
                        assert!(twins.iter().all(|twin| !twin.blocks.contains(&block)), "{block:?} is not free");
                        twins[list].blocks.push(block);
                    }
                    twins[list].num_reserved -= by;
                }
                Operation::GiveBack { list } if !lists.is_empty() => {
                    let list = list % lists.len();
                    pool.give_back(lists.swap_remove(list));
                    twins.swap_remove(list);
                }
                _ => {}
            }
            pool.check_integrity(&lists);
            assert_eq!(pool.num_used(), num_used(&twins));
            assert!(lists.iter().zip(&twins).all(|(list, twin)| list.blocks() == twin.blocks));
        }
        lists.into_iter().for_each(|list| pool.give_back(list));
        pool.check_integrity([]);
        assert_eq!((pool.num_used(), pool.num_reserved()), (0, 0));
    }
}
