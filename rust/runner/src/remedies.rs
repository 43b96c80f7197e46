//! What would fit where something does not: each remedy is tried before it is told.

use penstock_device::{Backend, Element, KvElement};
use penstock_models::ModelConfig;

use crate::memory::{Demand, HostShare, KvShare, divide, largest};

/// The types as users spell them.
const ELEMENTS: [(Element, &str); 3] =
    [(Element::F32, "float32"), (Element::F16, "float16"), (Element::Bf16, "bfloat16")];

/// Settings that would do, each by itself, such as `max_model_len=2048`.
pub(crate) fn remedies<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    demand: &Demand,
    limit: u64,
) -> Vec<String> {
    let trial = Trial { backend, config, demand, limit };
    let Demand { block_size, max_model_len, max_num_seqs, max_num_batched_tokens, .. } = *demand;
    let fewest_tokens = block_size.max(max_num_seqs);
    [
        trial.most("max_model_len", block_size..=max_model_len, |demand| &mut demand.max_model_len),
        trial.most("max_num_seqs", 1..=max_num_seqs, |demand| &mut demand.max_num_seqs),
        trial.most("max_num_batched_tokens", fewest_tokens..=max_num_batched_tokens, |demand| {
            &mut demand.max_num_batched_tokens
        }),
        trial.element("dtype", |demand, element| demand.element = element),
        trial.element("kv_cache_dtype", |demand, element| demand.kv_element = Some(KvElement::from(element))),
        trial.kv_cache_bytes(),
        trial.host_cache_bytes(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What does not fit, and into what.
struct Trial<'a, B> {
    backend: &'a B,
    config: &'a ModelConfig,
    demand: &'a Demand,
    limit: u64,
}

impl<B: Backend> Trial<'_, B> {
    /// Whether it would with one change.
    fn fits(&self, change: impl FnOnce(&mut Demand)) -> bool {
        let mut changed = self.demand.clone();
        change(&mut changed);
        divide(self.backend, self.config, &changed, self.limit).is_ok()
    }

    /// The most of `sizes` that fits; less than they start with is of no use.
    fn most(
        &self,
        field: &str,
        sizes: std::ops::RangeInclusive<usize>,
        of: fn(&mut Demand) -> &mut usize,
    ) -> Option<String> {
        let fits = |size| self.fits(|demand| *of(demand) = size as usize);
        largest(*sizes.start() as u64, *sizes.end() as u64, fits).map(|size| format!("{field}={size}"))
    }

    fn element(&self, field: &str, set: fn(&mut Demand, Element)) -> Option<String> {
        let fits = |element| self.fits(|demand| set(demand, element));
        ELEMENTS.iter().find(|(element, _)| fits(*element)).map(|(_, name)| format!("{field}={name}"))
    }

    /// The most below what was asked for, or else what the longest sequence needs.
    fn kv_cache_bytes(&self) -> Option<String> {
        let fewest = self.demand.fewest_bytes(self.backend, self.config);
        let fits = |bytes| self.fits(|demand| demand.kv_share = KvShare::Bytes(bytes));
        let bytes = match self.demand.kv_share {
            KvShare::Bytes(asked) if asked >= fewest => largest(fewest, asked, fits),
            _ => fits(fewest).then_some(fewest),
        };
        bytes.map(|bytes| format!("kv_cache_bytes={bytes}"))
    }

    fn host_cache_bytes(&self) -> Option<String> {
        let HostShare::Bytes(asked @ 1..) = self.demand.host_share else { return None };
        let fits = |bytes| self.fits(|demand| demand.host_share = HostShare::Bytes(bytes));
        largest(1, asked, fits).map(|bytes| format!("host_cache_bytes={bytes}"))
    }
}
