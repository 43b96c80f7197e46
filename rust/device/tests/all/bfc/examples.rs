//! One example of each rule of the allocator.

use penstock_device::bfc::{Bfc, Block, DEFAULT_ALIGNMENT, Extent, NamedUsage, Placement, StaleBlock};

use Placement::{High, Low};

fn bfc(capacity: usize) -> Bfc {
    Bfc::new(capacity, DEFAULT_ALIGNMENT).expect("a valid size")
}

fn take(bfc: &mut Bfc, bytes: usize, placement: Placement) -> Block {
    let block = bfc.allocate(bytes, placement, "test").expect("there is room");
    bfc.check_integrity();
    block
}

fn free<const N: usize>(bfc: &mut Bfc, blocks: [Block; N]) {
    for block in blocks {
        bfc.free(block.id).expect("a live block");
        bfc.check_integrity();
    }
}

/// The chunks of the region in units: positive sizes are in use, negative sizes free.
fn map(bfc: &Bfc) -> Vec<isize> {
    let units = |extent: Extent| {
        let units = (extent.size / DEFAULT_ALIGNMENT) as isize;
        if extent.name.is_some() { units } else { -units }
    };
    bfc.extents().map(units).collect()
}

#[test]
fn low_blocks_grow_from_the_bottom_and_high_ones_from_the_top() {
    let mut bfc = bfc(256 * 20);
    let offsets = [(1, Low), (2, High), (3, Low), (4, High)]
        .map(|(units, end)| take(&mut bfc, 256 * units, end).offset);
    assert_eq!(offsets, [0, 256 * 18, 256, 256 * 14]);
    assert_eq!(map(&bfc), [1, 3, -10, 4, 2]);
}

#[test]
fn smallest_sufficient_chunk_is_split_and_the_rest_stays_free() {
    let mut bfc = bfc(256 * 30);
    let blocks = [5, 1, 3, 1, 4, 1].map(|units| take(&mut bfc, 256 * units, Low));
    free(&mut bfc, [0, 2, 4].map(|index: usize| blocks[index]));
    assert_eq!(map(&bfc), [-5, 1, -3, 1, -4, 1, -15]);
    assert_eq!(take(&mut bfc, 256 * 2, Low).offset, blocks[2].offset);
    assert_eq!(map(&bfc), [-5, 1, 2, -1, 1, -4, 1, -15]);
    assert_eq!(take(&mut bfc, 256 * 4, Low).offset, blocks[4].offset);
    assert_eq!(map(&bfc), [-5, 1, 2, -1, 1, 4, 1, -15]);
}

#[test]
fn block_is_placed_on_its_side_while_there_is_room() {
    let mut bfc = bfc(256 * 10);
    let blocks =
        [(2, Low), (1, Low), (1, High), (3, High)].map(|(units, end)| take(&mut bfc, 256 * units, end));
    bfc.free(blocks[0].id).expect("a live block");
    assert_eq!(map(&bfc), [-2, 1, -3, 3, 1]);
    assert_eq!(take(&mut bfc, 256 * 2, High).offset, 256 * 4, "not the better fit on the other side");
    assert_eq!(take(&mut bfc, 256 * 2, High).offset, 0, "the gap has become too small");
}

#[test]
fn freed_block_is_joined_with_both_free_neighbours() {
    let mut bfc = bfc(256 * 8);
    let blocks = [1, 2, 3].map(|units| take(&mut bfc, 256 * units, Low));
    let mut maps = Vec::new();
    for index in [0, 2, 1] {
        bfc.free(blocks[index].id).expect("a live block");
        bfc.check_integrity();
        maps.push(map(&bfc));
    }
    assert_eq!(maps, [vec![-1, 2, 3, -2], vec![-1, 2, -5], vec![-8]]);
}

#[test]
fn offsets_are_aligned_and_sizes_rounded_up() {
    for alignment in [64, 128, 256, 512, 1024, 2048, 4096] {
        let mut bfc = Bfc::new(1 << 20, alignment).expect("a valid size");
        for bytes in [1, alignment - 1, alignment, alignment + 1] {
            for placement in [Low, High] {
                let block = take(&mut bfc, bytes, placement);
                assert_eq!((block.offset % alignment, block.size), (0, bytes.next_multiple_of(alignment)));
            }
        }
        let stats = bfc.stats();
        assert_eq!((stats.requested, stats.in_use), (2 * (3 * alignment + 1), 10 * alignment));
    }
}

#[test]
fn zero_byte_requests_get_distinct_blocks() {
    let mut bfc = bfc(1024);
    let (one, other) = (take(&mut bfc, 0, Low), take(&mut bfc, 0, Low));
    assert_eq!((one.offset, one.size, other.offset), (0, 256, 256));
    assert_eq!((bfc.stats().requested, bfc.stats().in_use), (0, 512));
}

#[test]
fn excessive_size_is_an_error_without_overflow() {
    let mut bfc = bfc(1024);
    for bytes in [1025, isize::MAX as usize, usize::MAX - 255, usize::MAX] {
        assert_eq!(bfc.allocate(bytes, Low, "test").expect_err("out of range").requested, bytes);
    }
    assert_eq!(map(&bfc), [-4]);
}

#[test]
fn exhausted_error_reports_request_free_bytes_and_usages() {
    let mut bfc = bfc(256 * 100);
    for (units, name) in
        [(40, "weights"), (10, "adapter"), (3, "logits"), (2, "image"), (1, "scales"), (10, "adapter")]
    {
        bfc.allocate(256 * units, Low, name).expect("there is room");
    }
    let retired = bfc.allocate(256 * 20, High, "workspace").expect("there is room");
    bfc.retire(retired.id, 3).expect("a live block");
    let error = bfc.allocate(256 * 14 + 1, High, "image").expect_err("14 units are free");
    let usage = |name, units: usize, num_blocks| NamedUsage { name, bytes: 256 * units, num_blocks };
    let most =
        [usage("weights", 40, 1), usage("adapter", 20, 2), usage("workspace", 20, 1), usage("logits", 3, 1)];
    assert_eq!(error.usages, most);
    assert_eq!(
        error.to_string(),
        "image needs 3585 bytes; 3584 of 25600 bytes are free, 3584 of them contiguous, and 5120 are in use by the \
         device; in use: weights 10240 (1 block), adapter 5120 (2 blocks), workspace 5120 (1 block), logits 768 (1 block)"
    );
    bfc.reclaim(3);
    bfc.allocate(256 * 14 + 1, High, "image").expect("the retired block is free");
}

#[test]
fn block_is_freed_once_and_only_by_its_own_allocator() {
    let (mut bfc, mut other) = (bfc(1024), bfc(1024));
    let (block, foreign) = (take(&mut bfc, 1, Low), take(&mut other, 1, Low));
    assert_eq!(bfc.free(foreign.id), Err(StaleBlock::Foreign));
    assert_eq!(bfc.retire(foreign.id, 0), Err(StaleBlock::Foreign));
    assert_eq!(bfc.free(block.id), Ok(()));
    assert_eq!(bfc.free(block.id), Err(StaleBlock::Freed));
    let next = take(&mut bfc, 1, Low);
    assert_eq!(next.offset, block.offset);
    assert_eq!(bfc.free(block.id), Err(StaleBlock::Freed), "its memory is in use again");
    assert_eq!(bfc.get(next.id), Ok(next));
}

#[test]
fn retired_block_is_not_reused_before_its_fence() {
    let mut bfc = bfc(1024);
    let (early, late) = (take(&mut bfc, 256, Low), take(&mut bfc, 768, Low));
    bfc.retire(late.id, 9).expect("a live block");
    bfc.retire(early.id, 8).expect("a live block");
    assert_eq!((bfc.reclaim(7), bfc.allocate(1, Low, "test").ok()), (0, None));
    assert_eq!((bfc.stats().retired, bfc.stats().num_live, bfc.stats().in_use), (1024, 0, 1024));
    assert_eq!((bfc.reclaim(8), take(&mut bfc, 1, High).offset), (1, early.offset));
    assert_eq!((bfc.reclaim(u64::MAX), map(&bfc)), (1, vec![1, -3]));
}

#[test]
fn extension_grows_the_free_chunk_at_the_top() {
    let mut bfc = bfc(1024 + 255);
    assert_eq!((bfc.capacity(), bfc.alignment()), (1024, 256), "whole units only");
    take(&mut bfc, 512, Low);
    assert_eq!(bfc.extend(511), Ok(256));
    assert_eq!(map(&bfc), [2, -3]);
    let top = take(&mut bfc, 768, High);
    assert_eq!(bfc.extend(512), Ok(512));
    assert_eq!((map(&bfc), bfc.get(top.id)), (vec![2, 3, -2], Ok(top)));
    bfc.free(top.id).expect("a live block");
    bfc.check_integrity();
    assert_eq!((map(&bfc), bfc.stats().capacity), (vec![2, -5], 1792));
}

#[test]
fn size_out_of_range_error_names_field_value_and_limit() {
    for alignment in [0, 32, 192, 8192] {
        let error = Bfc::new(1 << 20, alignment).expect_err("out of range");
        assert_eq!((error.field, error.value), ("alignment", alignment.to_string()));
        assert_eq!(error.limit, "a power of two from 64 to 4096");
    }
    let error = Bfc::new(255, 256).expect_err("less than one unit").to_string();
    assert_eq!(error, format!("capacity=255 is not allowed: it must be from 256 to {} bytes", isize::MAX));
    assert_eq!(Bfc::new(usize::MAX, 256).expect_err("out of range").field, "capacity");
    let mut bfc = bfc(1024);
    assert_eq!(bfc.extend(255).expect_err("less than one unit").field, "extension");
    assert_eq!(
        bfc.extend(usize::MAX).expect_err("out of range").limit,
        format!("from 256 to {} bytes", isize::MAX - 1024)
    );
    assert_eq!(map(&bfc), [-4]);
}

#[test]
fn fragmentation_is_the_free_share_outside_the_largest_chunk() {
    let mut bfc = bfc(256 * 8);
    assert_eq!(bfc.stats().fragmentation(), 0.0);
    let blocks = [1, 1, 3, 3].map(|units| take(&mut bfc, 256 * units, Low));
    assert_eq!((bfc.stats().free(), bfc.stats().fragmentation()), (0, 0.0));
    free(&mut bfc, [0, 2].map(|index: usize| blocks[index]));
    assert_eq!((bfc.stats().free(), bfc.stats().fragmentation()), (1024, 0.25));
}
