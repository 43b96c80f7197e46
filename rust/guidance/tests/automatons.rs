//! Memory of large automatons. The only test in its process, because it measures the process.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "this test uses a part")]
#[path = "all/common/mod.rs"]
mod common;

use common::{compiler, schema, words};

#[test]
fn grammars_with_large_automatons_are_counted() {
    let compiler = compiler(&words(1, 300));
    let mut resident = resident_bytes();
    for multiple in [49_999, 49_993, 49_991, 49_957] {
        let counted = compiler.cache_usage().bytes;
        compiler.compile(&schema(&format!(r#"{{"type":"integer","multipleOf":{multiple}}}"#))).unwrap();
        let counted = compiler.cache_usage().bytes - counted;
        let taken = resident_bytes().saturating_sub(std::mem::replace(&mut resident, resident_bytes()));
        assert!(2 * counted > taken, "{multiple}: {counted} of {taken} bytes");
        assert!(counted < 32 << 20, "{multiple}: {counted} bytes");
    }
}

/// The memory of the process.
fn resident_bytes() -> usize {
    let numbers = std::fs::read_to_string("/proc/self/statm").unwrap();
    4096 * numbers.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
}
