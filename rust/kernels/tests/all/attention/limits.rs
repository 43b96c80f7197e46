//! Invisible positions, invalid blocks, non-finite values and extreme values.

use penstock_kernels::{Kernels, Pool};
use penstock_types::KvDtype;

use super::case::*;
use crate::common::*;

#[test]
fn later_positions_and_stale_bytes_do_not_affect_a_query() {
    let pool = Pool::new(2).unwrap();
    for window in [None, Some(37)] {
        for dtype in KvDtype::ALL {
            let mut case = Case::new(Spec { positions: 280, window, dtype: *dtype, ..PLAIN }, 6);
            let width = case.layout.kv_heads * case.layout.head_dim;
            for kernels in all_kernels() {
                let clean = case.outputs(&kernels, &pool, 0..280, 280);
                // Later positions and those before the window are overwritten with garbage.
                let mut cache = case.cache.clone();
                let (nan, inf) = (vec![f32::NAN; width], vec![f32::INFINITY; width]);
                for position in (200..280).rev() {
                    let (block, offset) = (case.blocks[position / 16], position % 16);
                    kernels.write_kv(&case.layout, &mut cache, block, offset, &nan, &inf);
                }
                for position in 0..window.map_or(0, |window| 190 + 1 - window) {
                    let (block, offset) = (case.blocks[position / 16], position % 16);
                    kernels.write_kv(&case.layout, &mut cache, block, offset, &inf, &nan);
                }
                std::mem::swap(&mut case.cache, &mut cache);
                // All in one chunk: garbage is visible to the later queries but not to the earlier ones.
                let got = case.outputs(&kernels, &pool, 190..280, 90);
                let own = 10 * case.width();
                assert_same_bits(
                    &got[..own],
                    &clean[190 * case.width()..][..own],
                    &format!("{dtype:?} {kernels:?}"),
                );
                std::mem::swap(&mut case.cache, &mut cache);
            }
        }
    }
}

#[test]
fn blocks_before_the_window_are_not_read() {
    let mut case = Case::new(Spec { positions: 500, window: Some(50), ..PLAIN }, 7);
    let pool = Pool::new(2).unwrap();
    for kernels in all_kernels() {
        let want = case.outputs(&kernels, &pool, 495..500, 5);
        let blocks = case.blocks.clone();
        case.blocks[..(495 + 1 - 50) / 16].fill(u32::MAX);
        assert_same_bits(&case.outputs(&kernels, &pool, 495..500, 5), &want, "freed blocks");
        case.blocks = blocks;
    }
}

#[test]
#[should_panic(expected = "block 4000000000 of")]
fn block_outside_the_cache_panics() {
    let mut case = Case::new(PLAIN, 8);
    case.blocks[3] = 4_000_000_000;
    case.outputs(&Kernels::best(), &Pool::new(1).unwrap(), 599..600, 1);
}

#[test]
#[should_panic(expected = "too few blocks")]
fn missing_block_panics() {
    let mut case = Case::new(PLAIN, 9);
    case.blocks.pop();
    case.outputs(&Kernels::best(), &Pool::new(1).unwrap(), 599..600, 1);
}

#[test]
fn many_heads_of_one_kv_head_are_several_jobs() {
    let case = Case::new(Spec { positions: 90, head_dim: 32, kv_heads: 1, group: 71, ..PLAIN }, 10);
    let pool = Pool::new(3).unwrap();
    for kernels in all_kernels() {
        assert_close(&case.outputs(&kernels, &pool, 0..90, 90), &case.reference(0..90), 3e-6, "71 heads");
    }
}

#[test]
fn non_finite_query_or_key_affects_only_rows_that_see_it() {
    let pool = Pool::new(2).unwrap();
    for dtype in KvDtype::ALL {
        let mut case = Case::new(Spec { positions: 300, dtype: *dtype, ..PLAIN }, 11);
        let (width, head_dim) = (case.width(), case.layout.head_dim);
        for kernels in all_kernels() {
            let clean = case.outputs(&kernels, &pool, 0..300, 300);
            // Head 3 at position 100.
            let bad = 100 * width + 3 * head_dim..100 * width + 4 * head_dim;
            for value in [f32::NAN, f32::INFINITY] {
                let kept = std::mem::replace(&mut case.q[bad.start + 5], value);
                let got = case.outputs(&kernels, &pool, 0..300, 300);
                assert!(got[bad.clone()].iter().all(|x| x.is_nan()), "{dtype:?} {value}");
                assert_same_bits(&got[..bad.start], &clean[..bad.start], "before the bad query");
                assert_same_bits(&got[bad.end..], &clean[bad.end..], "after the bad query");
                case.q[bad.start + 5] = kept;
            }
            // The keys and values of position 200.
            let kept = case.cache.clone();
            let nan = vec![f32::NAN; case.layout.kv_heads * head_dim];
            kernels.write_kv(&case.layout, &mut case.cache, case.blocks[200 / 16], 200 % 16, &nan, &nan);
            let got = case.outputs(&kernels, &pool, 0..300, 300);
            assert_same_bits(&got[..200 * width], &clean[..200 * width], "before the bad key");
            assert!(got[200 * width..].iter().all(|x| x.is_nan()), "{dtype:?}");
            case.cache = kept;
        }
    }
}

#[test]
fn many_small_weights_beside_a_large_one_are_kept() {
    let pool = Pool::new(1).unwrap();
    for dtype in [KvDtype::Int8, KvDtype::Uint4] {
        let spec = Spec { positions: 256, head_dim: 16, kv_heads: 1, group: 1, dtype, ..PLAIN };
        let mut case = Case::new(spec, 12);
        // Position 0 has weight 1, each other e^-11.5: less than half of a 16-bit step, and 0.26 % in total.
        case.q[255 * 16..].fill(0.0);
        case.q[255 * 16] = 11.5 * 4.0;
        case.k.fill(0.0);
        case.v.fill(0.0);
        case.k[0] = 1.0;
        for (position, v) in case.v.chunks_exact_mut(16).enumerate() {
            v[usize::from(position > 0)] = 1.0;
        }
        case.fill_cache();
        let want = case.reference(255..256);
        assert!(want[1] > 2e-3, "{want:?}");
        for kernels in all_kernels() {
            let got = case.outputs(&kernels, &pool, 255..256, 1);
            assert_close(&got, &want, tolerance(dtype, None), &format!("{dtype:?}"));
        }
    }
}

#[test]
fn sums_of_the_largest_quantised_values_do_not_overflow() {
    let pool = Pool::new(1).unwrap();
    for dtype in [KvDtype::Int8, KvDtype::Uint4] {
        for head_dim in [256, 512] {
            let spec = Spec { positions: 256, head_dim, kv_heads: 1, group: 1, dtype, ..PLAIN };
            let mut case = Case::new(spec, 13);
            case.q.fill(1.0);
            case.params.scale = 1.0 / (head_dim as f32 * 255.0);
            // Every quantised value is the largest, except one per row in every second key.
            case.k.fill(255.0);
            case.v.fill(255.0);
            for (position, (k, v)) in
                case.k.chunks_exact_mut(head_dim).zip(case.v.chunks_exact_mut(head_dim)).enumerate()
            {
                (k[0], v[0]) = (0.0, 0.0);
                if position % 2 == 0 {
                    k[1..].fill(0.0);
                    k[0] = 255.0;
                    v[2] = 50.0;
                }
            }
            case.fill_cache();
            let want = case.reference(255..256);
            for kernels in all_kernels() {
                let got = case.outputs(&kernels, &pool, 255..256, 1);
                assert_close(&got, &want, tolerance(dtype, None), &format!("{dtype:?} x {head_dim}"));
            }
        }
    }
}
