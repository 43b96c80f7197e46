//! Memory use of many compilations. The only test in its process, because it measures the process.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "this test uses a part")]
#[path = "all/common/mod.rs"]
mod common;

use common::{bytes, compiler_with, schema, untimed_limits};
use penstock_guidance::{GrammarSpec, GuidanceLimits};

fn number(value: usize) -> GrammarSpec {
    schema(&format!(r#"{{"const":{value}}}"#))
}

/// Resident memory of this process in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn memory_stays_bounded_over_ten_thousand_grammars() {
    let limit = 16 << 20;
    let compiler = compiler_with(
        &bytes(),
        GuidanceLimits { cached_bytes: limit, cached_grammars: usize::MAX, ..untimed_limits() },
    );
    for value in 0..1_000 {
        compiler.compile(&number(value)).unwrap();
    }
    let before = resident();
    for value in 1_000..10_000 {
        compiler.compile(&number(value)).unwrap();
        assert!(compiler.cache_usage().bytes <= limit);
    }
    let (used, grown) = (compiler.cache_usage(), resident().saturating_sub(before));
    assert!(used.grammars > 10 && used.bytes > limit / 2, "{used:?}");
    assert!(grown < 3 * limit, "grew by {grown} bytes, at {used:?}");
}
