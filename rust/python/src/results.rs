//! What an engine reports of itself: `Stats`, `ProfileRow`, `ModelInfo`.

use penstock_engine::Limits;

use crate::record::record;

record! {
    /// What the engine is doing.
    Stats {
        running: u64,
        waiting: u64,
        paused: u64,
        blocks_total: u64,
        blocks_used: u64,
        blocks_reserved: u64,
        requests_admitted: u64,
        requests_finished: u64,
        prompt_tokens: u64,
        generation_tokens: u64,
        drafted_tokens: u64,
        accepted_tokens: u64,
        steps: u64,
        blocks_cached: u64,
        host_blocks_total: u64,
        host_blocks_used: u64,
        prefix_query_tokens: u64,
        prefix_hit_tokens: u64,
        prefix_host_hit_tokens: u64,
        preemptions: u64,
        swaps: u64,
        recomputed_tokens: u64,
    }

    #[getter]
    fn prefix_hit_rate(&self) -> f64 {
        self.prefix_hit_tokens as f64 / self.prefix_query_tokens.max(1) as f64
    }
}

record! {
    /// Number of calls, time and work of an operation of the device.
    ProfileRow { operation: String, calls: u64, seconds: f64, bytes: u64, flops: Option<u64> }
}

record! {
    /// Where the memory is, in bytes.
    MemoryInfo { limit: u64, weights: u64, workspace: u64, inputs: u64, kv_cache: u64, host_cache: u64, peak: u64 }
}

record! {
    /// What the host tier costs, in seconds per block, and what that decided.
    HostTierInfo { save_seconds: f64, load_seconds: f64, recompute_seconds: f64, keeps_prefixes: bool }
}

record! {
    /// What was opened.
    ModelInfo {
        architecture: String,
        parameters: u64,
        vocabulary_size: usize,
        dtype: String,
        kv_cache_dtype: String,
        memory: MemoryInfo,
        host_tier: Option<HostTierInfo>,
        warm_up_seconds: f64,
        block_size: usize,
        num_blocks: usize,
        max_model_len: usize,
        max_num_seqs: usize,
        max_num_batched_tokens: usize,
        max_waiting: usize,
        threads: usize,
        isa: String,
    }
}

impl ModelInfo {
    /// Of a model and the sizes its engine runs with.
    pub fn of(info: &penstock_runner::ModelInfo, limits: &Limits) -> Self {
        Self {
            architecture: info.architecture.clone(),
            parameters: info.parameters,
            vocabulary_size: limits.vocabulary_size,
            dtype: info.dtype.name().to_owned(),
            kv_cache_dtype: info.kv_cache_dtype.name().to_owned(),
            memory: MemoryInfo::from(info.memory),
            host_tier: info.host_tier.map(HostTierInfo::from),
            warm_up_seconds: info.warm_up_seconds,
            block_size: limits.block_size,
            num_blocks: limits.num_blocks,
            max_model_len: limits.max_model_len,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_waiting: limits.max_waiting,
            threads: info.threads,
            isa: info.isa.to_owned(),
        }
    }
}

impl From<penstock_runner::MemoryInfo> for MemoryInfo {
    fn from(info: penstock_runner::MemoryInfo) -> Self {
        let penstock_runner::MemoryInfo { limit, weights, workspace, inputs, kv_cache, host_cache, peak } =
            info;
        Self { limit, weights, workspace, inputs, kv_cache, host_cache, peak }
    }
}

impl From<penstock_runner::HostTierInfo> for HostTierInfo {
    fn from(info: penstock_runner::HostTierInfo) -> Self {
        let penstock_runner::HostTierInfo { save, load, recompute, keeps_prefixes } = info;
        Self { save_seconds: save, load_seconds: load, recompute_seconds: recompute, keeps_prefixes }
    }
}

impl From<penstock_runner::ProfileRow> for ProfileRow {
    fn from(row: penstock_runner::ProfileRow) -> Self {
        let penstock_runner::ProfileRow { operation, calls, seconds, bytes, flops } = row;
        Self { operation: operation.to_owned(), calls, seconds, bytes, flops }
    }
}

impl From<penstock_engine::Stats> for Stats {
    fn from(stats: penstock_engine::Stats) -> Self {
        Self {
            running: stats.running,
            waiting: stats.waiting,
            paused: stats.paused,
            blocks_total: stats.blocks_total,
            blocks_used: stats.blocks_used,
            blocks_reserved: stats.blocks_reserved,
            requests_admitted: stats.requests_admitted,
            requests_finished: stats.requests_finished,
            prompt_tokens: stats.prompt_tokens,
            generation_tokens: stats.generation_tokens,
            drafted_tokens: stats.drafted_tokens,
            accepted_tokens: stats.accepted_tokens,
            steps: stats.steps,
            blocks_cached: stats.blocks_cached,
            host_blocks_total: stats.host_blocks_total,
            host_blocks_used: stats.host_blocks_used,
            prefix_query_tokens: stats.prefix_query_tokens,
            prefix_hit_tokens: stats.prefix_hit_tokens,
            prefix_host_hit_tokens: stats.prefix_host_hit_tokens,
            preemptions: stats.preemptions,
            swaps: stats.swaps,
            recomputed_tokens: stats.recomputed_tokens,
        }
    }
}
