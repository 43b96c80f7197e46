//! Compiling: once for all who ask, within its time, and kept within bounds.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use common::{bytes, compiler, compiler_with, patient, schema};
use penstock_guidance::{Compiled, Compiler, Grammar, GuidanceError, Guide, Limits, Vocabulary};

fn number(value: usize) -> Grammar {
    schema(&format!(r#"{{"const":{value}}}"#))
}

fn with(limits: Limits) -> Compiler {
    compiler_with(&bytes(), limits)
}

/// Takes a while.
fn slow() -> Grammar {
    let names: Vec<String> = (0..900).map(|index| format!(r#""p{index}":{{"type":"null"}}"#)).collect();
    schema(&format!(r#"{{"properties":{{{}}}}}"#, names.join(",")))
}

#[test]
fn a_compiler_is_shared_and_a_guide_moves_between_threads() {
    fn shared<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    shared::<(Compiler, Compiled, Vocabulary, Grammar, GuidanceError)>();
    moved::<Guide>();
}

#[test]
fn equal_grammars_compile_once_whoever_asks_and_when() {
    let compiler = compiler(&bytes());
    let barrier = Barrier::new(8);
    let compiled: Vec<Arc<Compiled>> = thread::scope(|scope| {
        let ask = || {
            barrier.wait();
            compiler.compile(&slow()).unwrap()
        };
        let asking: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let later = compiler.compile(&slow()).unwrap();
    assert!(compiled.iter().all(|one| Arc::ptr_eq(one, &later)));
    assert_eq!(compiler.cache_use().grammars, 1);
}

#[test]
fn an_error_reaches_all_who_wait_and_is_not_kept() {
    let compiler = compiler(&bytes());
    let barrier = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                barrier.wait();
                let error = compiler.compile(&schema(r#"{"not":{}}"#)).err().unwrap();
                assert!(matches!(error, GuidanceError::Invalid { .. }), "{error}");
            });
        }
    });
    assert_eq!(compiler.cache_use().grammars, 0);
}

#[test]
fn who_waits_too_long_gives_up_and_who_asks_later_finds_the_result() {
    let limit = Duration::from_millis(1);
    let compiler = with(Limits { compile_time: limit, workers: 1, ..Limits::default() });
    let mut given_up = 0;
    // Once a thread has taken it the compilation goes on, whoever waits.
    while let Err(error) = compiler.compile(&slow()) {
        match error {
            GuidanceError::TimedOut { limit: said, .. } if said == limit => given_up += 1,
            GuidanceError::Overloaded { .. } => {}
            _ => panic!("{error}"),
        }
    }
    assert!(given_up > 0);
    assert_eq!(compiler.cache_use().grammars, 1);
}

#[test]
fn a_slow_grammar_does_not_hold_up_the_others() {
    let compiler = with(Limits { workers: 2, ..patient() });
    thread::scope(|scope| {
        scope.spawn(|| compiler.compile(&slow()).unwrap());
        (0..20).for_each(|value| drop(compiler.compile(&number(value)).unwrap()));
    });
}

/// Another one that takes a while.
fn slow_too(number: usize) -> Grammar {
    let names: Vec<String> =
        (0..900).map(|index| format!(r#""p{index}_{number}":{{"type":"null"}}"#)).collect();
    schema(&format!(r#"{{"properties":{{{}}}}}"#, names.join(",")))
}

/// Runs `then` while the one thread of `compiler` is at work on a grammar.
fn while_busy(compiler: &Compiler, then: impl FnOnce()) {
    // It was taken when asking for it ends in no more than the time it may take.
    while let Err(error) = compiler.compile(&slow()) {
        if matches!(error, GuidanceError::TimedOut { .. }) {
            return then();
        }
    }
    panic!("it is compiled");
}

#[test]
fn a_grammar_that_waits_for_others_is_not_called_too_complex() {
    let limits = Limits { compile_time: Duration::from_millis(1), workers: 1, ..Limits::default() };
    let compiler = with(limits);
    while_busy(&compiler, || {
        let error = compiler.compile(&number(1)).err().unwrap();
        assert!(matches!(error, GuidanceError::Overloaded { .. }), "{error}");
    });
}

#[test]
fn a_full_queue_takes_no_more() {
    let limits =
        Limits { compile_time: Duration::from_millis(1), workers: 1, queued_grammars: 0, ..patient() };
    let compiler = with(limits);
    let error = compiler.compile(&number(1)).err().unwrap();
    assert!(matches!(error, GuidanceError::Overloaded { .. }), "{error}");
    assert!(error.to_string().contains("0 other grammars"), "{error}");
}

#[test]
fn who_gives_up_leaves_the_place_to_others() {
    let compiler = with(Limits { workers: 1, queued_grammars: 1, ..patient() });
    // The first ones are taken by the thread and go on; those behind them leave the queue.
    for number in 0..10 {
        if let Err(error) = compiler.compile_while(&slow_too(number), || false) {
            assert!(matches!(error, GuidanceError::Abandoned { .. }), "{error}");
        }
    }
    compiler.compile(&number(7)).unwrap();
}

#[test]
fn a_compiler_dropped_in_the_middle_of_its_work_is_no_harm_to_what_it_made() {
    let compiler = with(Limits { compile_time: Duration::ZERO, ..Limits::default() });
    drop(compiler.compile(&slow()));
    drop(compiler);
    let compiled = with(patient()).compile(&number(7)).unwrap();
    let mut guide = compiled.start().unwrap();
    drop(compiled);
    guide.accept(u32::from(b'7')).unwrap();
    assert!(guide.is_complete());
}

#[test]
fn what_was_not_asked_for_the_longest_goes_first() {
    let compiler = with(Limits { cached_grammars: 2, ..patient() });
    let [one, two] = [1, 2].map(|value| compiler.compile(&number(value)).unwrap());
    assert!(Arc::ptr_eq(&one, &compiler.compile(&number(1)).unwrap()));
    compiler.compile(&number(3)).unwrap();
    assert_eq!(compiler.cache_use().grammars, 2);
    assert!(Arc::ptr_eq(&one, &compiler.compile(&number(1)).unwrap()));
    assert!(!Arc::ptr_eq(&two, &compiler.compile(&number(2)).unwrap()));
}

#[test]
fn a_grammar_larger_than_the_cache_is_compiled_and_not_kept() {
    let compiler = with(Limits { cached_bytes: 10, ..patient() });
    compiler.compile(&number(1)).unwrap();
    assert_eq!((compiler.cache_use().grammars, compiler.cache_use().bytes), (0, 0));
}
