//! Memory of a process that compiles one grammar after another. Alone in its process, because it measures that.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{bytes, compiler_with, patient, schema};
use penstock_guidance::{Grammar, Limits};

fn number(value: usize) -> Grammar {
    schema(&format!(r#"{{"const":{value}}}"#))
}

/// Memory of this process that is in use, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn ten_thousand_grammars_leave_memory_bounded() {
    let limit = 16 << 20;
    let compiler =
        compiler_with(&bytes(), Limits { cached_bytes: limit, cached_grammars: usize::MAX, ..patient() });
    for value in 0..1_000 {
        compiler.compile(&number(value)).unwrap();
    }
    let before = resident();
    for value in 1_000..10_000 {
        compiler.compile(&number(value)).unwrap();
        assert!(compiler.cache_use().bytes <= limit);
    }
    let (used, grown) = (compiler.cache_use(), resident().saturating_sub(before));
    assert!(used.grammars > 10 && used.bytes > limit / 2, "{used:?}");
    assert!(grown < 3 * limit, "{grown} bytes more, at {used:?}");
}
