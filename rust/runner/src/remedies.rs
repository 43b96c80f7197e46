//! What would fit where something does not: each remedy is tried before it is told.

use penstock_device::Backend;
use penstock_models::ModelConfig;
use penstock_types::{Dtype, KvDtype};

use crate::memory::{Demand, HostShare, KvShare, divide, largest};
use crate::options::{Allowance, share};

/// Settings that would do, each by itself, such as `max_model_len=2048`.
pub(crate) fn remedies<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    demand: &Demand,
    allowance: Allowance,
) -> Vec<String> {
    let trial = Trial { backend, config, demand, allowance };
    let Demand { block_size, max_model_len, max_num_seqs, max_num_batched_tokens, .. } = *demand;
    let fewest_tokens = block_size.max(max_num_seqs);
    [
        trial.most("max_model_len", block_size..=max_model_len, |demand| &mut demand.max_model_len),
        trial.most("max_num_seqs", 1..=max_num_seqs, |demand| &mut demand.max_num_seqs),
        trial.most("max_num_batched_tokens", fewest_tokens..=max_num_batched_tokens, |demand| {
            &mut demand.max_num_batched_tokens
        }),
        trial.dtype(),
        trial.kv_dtype(),
        trial.memory_ratio(),
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
    allowance: Allowance,
}

impl<B: Backend> Trial<'_, B> {
    /// Whether it would with one change.
    fn fits(&self, change: impl FnOnce(&mut Demand)) -> bool {
        self.fits_into(self.allowance.limit, change)
    }

    fn fits_into(&self, limit: u64, change: impl FnOnce(&mut Demand)) -> bool {
        let mut changed = self.demand.clone();
        change(&mut changed);
        divide(self.backend, self.config, &changed, limit).is_ok()
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

    fn dtype(&self) -> Option<String> {
        let fits = |dtype: &&Dtype| self.fits(|demand| demand.dtype = **dtype);
        Dtype::ALL.iter().find(fits).map(|dtype| format!("dtype={}", dtype.name()))
    }

    fn kv_dtype(&self) -> Option<String> {
        let fits = |dtype: &&KvDtype| self.fits(|demand| demand.kv_dtype = Some(**dtype));
        KvDtype::ALL.iter().find(fits).map(|dtype| format!("kv_cache_dtype={}", dtype.name()))
    }

    /// The least that fits, in hundredths, where there is more to take. Whoever chooses it is no guest any more.
    fn memory_ratio(&self) -> Option<String> {
        let Allowance { most, limit } = self.allowance;
        let fits = |spared: u64| {
            self.fits_into(share(most, (100 - spared) as f64 / 100.0), |demand| {
                if demand.kv_share == KvShare::Guest {
                    demand.kv_share = KvShare::All;
                }
            })
        };
        let spared = if limit < most { largest(0, 99, fits) } else { None };
        spared.map(|spared| format!("memory_ratio={:.2}", (100 - spared) as f64 / 100.0))
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
        let fewest = self.demand.fewest_host_bytes(self.backend, self.config);
        largest(fewest, asked, fits).map(|bytes| format!("host_cache_bytes={bytes}"))
    }
}

#[cfg(test)]
mod tests {
    use penstock_device::cpu::Cpu;

    use super::*;
    use crate::memory::tests::{config, demand};

    /// Shows `look` what is told for a demand that may have all of `limit`, and with what to try it.
    fn told(demand: Demand, limit: u64, look: impl FnOnce(Vec<String>, Trial<'_, Cpu>)) {
        told_of(demand, Allowance { most: limit, limit }, look);
    }

    fn told_of(demand: Demand, allowance: Allowance, look: impl FnOnce(Vec<String>, Trial<'_, Cpu>)) {
        let (cpu, config) = (Cpu::new(1).expect("a thread"), config());
        let trial = Trial { backend: &cpu, config: &config, demand: &demand, allowance };
        look(remedies(&cpu, &config, &demand, allowance), trial);
    }

    fn number(remedy: &str, field: &str) -> usize {
        let (name, value) = remedy.split_once('=').expect("a setting");
        assert_eq!(name, field);
        value.parse().expect("a number")
    }

    #[test]
    fn a_cache_that_is_too_small_for_a_sequence_can_hold_a_shorter_one_or_half_as_wide_values() {
        told(Demand { kv_share: KvShare::All, ..demand() }, 20 << 20, |told, trial| {
            let len = number(&told[0], "max_model_len");
            assert!(trial.fits(|demand| demand.max_model_len = len));
            assert!(!trial.fits(|demand| demand.max_model_len = len + 1));
            assert_eq!(told[1..], ["dtype=float16", "kv_cache_dtype=float16"]);
        });
    }

    #[test]
    fn a_guest_is_told_how_large_a_cache_would_do() {
        told(demand(), 40 << 20, |told, trial| {
            let bytes = number(told.last().expect("remedies"), "kv_cache_bytes") as u64;
            assert!(trial.fits(|demand| demand.kv_share = KvShare::Bytes(bytes)));
            assert!(!trial.fits(|demand| demand.kv_share = KvShare::Bytes(bytes - 1)));
        });
    }

    #[test]
    fn a_workspace_that_is_too_large_can_be_for_fewer_tokens_or_sequences() {
        told(Demand { max_num_batched_tokens: 1 << 16, ..demand() }, 100 << 20, |told, trial| {
            assert_eq!(told.len(), 1);
            let tokens = number(&told[0], "max_num_batched_tokens");
            assert!(trial.fits(|demand| demand.max_num_batched_tokens = tokens));
            assert!(!trial.fits(|demand| demand.max_num_batched_tokens = tokens + 1));
        });
        let crowd = Demand { max_num_seqs: 1 << 15, max_num_batched_tokens: 1 << 15, ..demand() };
        told(crowd, 560 << 20, |told, trial| {
            let sequences = number(&told[0], "max_num_seqs");
            assert!(trial.fits(|demand| demand.max_num_seqs = sequences));
            assert!(!trial.fits(|demand| demand.max_num_seqs = sequences + 1));
        });
    }

    #[test]
    fn the_least_share_that_fits_is_told_where_there_is_more_to_take() {
        let ratio = |kv_share, most, limit| {
            let mut ratio = None;
            told_of(Demand { kv_share, ..demand() }, Allowance { most, limit }, |told, trial| {
                ratio =
                    told.iter().find_map(|remedy| remedy.strip_prefix("memory_ratio=").map(str::to_owned));
                let Some(ratio) = &ratio else { return };
                let ratio: f64 = ratio.parse().expect("a number");
                let fits = |ratio| {
                    let all = if kv_share == KvShare::Guest { KvShare::All } else { kv_share };
                    trial.fits_into(share(most, ratio), |demand| demand.kv_share = all)
                };
                assert!(fits(ratio) && !fits(ratio - 0.01), "{ratio}");
            });
            ratio
        };
        let (little, much) = (20 << 20, 100 << 20);
        for kv_share in [KvShare::All, KvShare::Guest, KvShare::Bytes(17 << 20)] {
            assert!(ratio(kv_share, much, little).is_some(), "{kv_share:?}");
            assert_eq!(ratio(kv_share, little, little), None, "there is no more");
        }
        assert_eq!(ratio(KvShare::All, little, little / 2), None, "all there is would not do");
    }

    #[test]
    fn where_nothing_helps_nothing_is_told() {
        told(demand(), 1 << 20, |told, _| assert_eq!(told, [""; 0]));
    }
}
