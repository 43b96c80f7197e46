//! The step between the fused product of q, k and v and attention: the norms of the heads, the rotation, and the write
//! of keys and values to the cache, as one parallel region.
//!
//! Tokens of one block share cache lines, and bytes where a value has 4 bits. So the rows are divided by their block,
//! and one worker processes all rows of a block. The results do not depend on the division.

use penstock_types::HeadShape;

use crate::kernels::{Kernels, num_shares};
use crate::kv::KvLayout;
use crate::pool::{Pool, SharedMut};
use crate::rows::Rows;

/// Parts per worker; some blocks have more rows than others.
const PARTS: usize = 4;

/// The inputs of [`Kernels::rope_write_kv`]; the slices and [`Rows`] have one entry for each row.
#[derive(Clone, Copy, Debug)]
pub struct RopeWriteKv<'a> {
    pub heads: HeadShape,
    /// The weights of the norms of query and key heads, `head_dim` each, and their epsilon.
    pub norms: Option<(&'a [f32], &'a [f32], f32)>,
    /// The rotation of each row, as for [`Kernels::rope`].
    pub cos: Rows<'a>,
    pub sin: Rows<'a>,
    /// Factors on the rotated queries, if any.
    pub query_scales: Option<&'a [f32]>,
    pub layout: &'a KvLayout,
    /// The block and the position inside it to which the keys and values of a row are written.
    pub blocks: &'a [u32],
    pub offsets: &'a [u32],
}

impl Kernels {
    /// Normalises the query and key heads of every row of `qkv` if `call` has norms, rotates them in place, multiplies
    /// the queries by the row's factor, and writes keys and values to `cache`, which has all blocks of the layer. The
    /// same as [`rms_norm_in_place`], [`rope`], the products and [`write_kv`], one after the other.
    ///
    /// [`rms_norm_in_place`]: Kernels::rms_norm_in_place
    /// [`rope`]: Kernels::rope
    /// [`write_kv`]: Kernels::write_kv
    pub fn rope_write_kv(&self, pool: &Pool, call: &RopeWriteKv<'_>, qkv: &mut [f32], cache: &mut [u8]) {
        let &RopeWriteKv { heads, norms, cos, sin, query_scales, layout, blocks, offsets } = call;
        let (stride, count, head_dim) = (heads.qkv_width(), blocks.len(), heads.head_dim);
        let (query, kv) = (heads.query_width(), heads.kv_width());
        assert_eq!((qkv.len(), offsets.len()), (count * stride, count), "floats of qkv, and offsets");
        assert_eq!((layout.kv_heads, layout.head_dim), (heads.kv_heads, head_dim), "heads of {layout:?}");
        assert!(
            head_dim > 0 && 2 * cos.width() <= head_dim,
            "{} angles for heads of {head_dim}",
            cos.width()
        );
        assert_eq!((cos.count(), sin.count(), sin.width()), (count, count, cos.width()), "rows of cos, sin");
        if let Some((query_norm, key_norm, _)) = norms {
            assert_eq!((query_norm.len(), key_norm.len()), (head_dim, head_dim), "weights of the head norms");
        }
        assert!(
            query_scales.is_none_or(|scales| scales.len() == count),
            "one factor for each of {count} rows"
        );
        let block_bytes = layout.block_bytes();
        let (rows, cache) = (SharedMut::new(qkv), SharedMut::new(cache));
        let parts = match num_shares(pool, count, stride) {
            1 => 1,
            _ => PARTS * pool.threads(),
        };
        pool.for_each(parts, &|part| {
            for (row, (block, offset)) in blocks.iter().zip(offsets).enumerate() {
                let block = *block as usize;
                if block % parts != part {
                    continue;
                }
                // SAFETY: one part has the row and all other rows of its block, and the parts are claimed once each.
                let (qkv, cache) = unsafe {
                    (rows.slice(row * stride, stride), cache.slice(block * block_bytes, block_bytes))
                };
                let at = qkv.as_mut_ptr();
                // SAFETY: the table's instruction set is available; query and key heads lie inside the row, and are
                // read and written through one pointer.
                unsafe {
                    if let Some((query_norm, key_norm, epsilon)) = norms {
                        (self.table.rms_norm)(at, query, query_norm, epsilon, at);
                        (self.table.rms_norm)(at.add(query), kv, key_norm, epsilon, at.add(query));
                    }
                    (self.table.rope)(at, query + kv, head_dim, cos.row(row), sin.row(row));
                }
                if let Some(scales) = query_scales {
                    qkv[..query].iter_mut().for_each(|value| *value *= scales[row]);
                }
                let (keys, values) = qkv[query..].split_at(kv);
                layout.write_to_block(cache, *offset as usize, keys, values);
            }
        });
    }
}
