//! Compilation: shared between callers, limited in time, cached within limits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use penstock_guidance::{
    Caller, CompiledGrammar, GrammarCompiler, GrammarMatcher, GrammarSpec, GuidanceError, GuidanceLimits,
    TokenText, Vocabulary,
};

use crate::common::{bytes, compiler, compiler_with, schema, untimed_limits};

fn number(value: usize) -> GrammarSpec {
    schema(&format!(r#"{{"const":{value}}}"#))
}

fn with(limits: GuidanceLimits) -> GrammarCompiler {
    compiler_with(&bytes(), limits)
}

/// A grammar whose compilation takes a while.
fn slow() -> GrammarSpec {
    let names: Vec<String> = (0..900).map(|index| format!(r#""p{index}":{{"type":"null"}}"#)).collect();
    schema(&format!(r#"{{"properties":{{{}}}}}"#, names.join(",")))
}

#[test]
fn compiler_is_sync_and_matcher_is_send() {
    fn shared<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    shared::<(GrammarCompiler, CompiledGrammar, Vocabulary, GrammarSpec, GuidanceError)>();
    moved::<GrammarMatcher>();
}

#[test]
fn equal_grammars_compile_once_for_concurrent_callers() {
    let compiler = compiler(&bytes());
    let barrier = Barrier::new(8);
    let compiled: Vec<Arc<CompiledGrammar>> = thread::scope(|scope| {
        let ask = || {
            barrier.wait();
            compiler.compile(&slow()).unwrap()
        };
        let asking: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let later = compiler.compile(&slow()).unwrap();
    assert!(compiled.iter().all(|one| Arc::ptr_eq(one, &later)));
    assert_eq!(compiler.cache_usage().grammars, 1);
}

#[test]
fn errors_reach_all_callers_and_are_not_cached() {
    let compiler = compiler(&bytes());
    let barrier = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                barrier.wait();
                let error = compiler.compile(&schema(r#"{"not":{}}"#)).err().unwrap();
                assert!(matches!(error, GuidanceError::Unsupported { .. }), "{error}");
            });
        }
    });
    assert_eq!(compiler.cache_usage().grammars, 0);
}

#[test]
fn timed_out_compilation_is_cached_for_later_callers() {
    let limit = Duration::from_millis(1);
    let compiler = with(GuidanceLimits { compile_time: limit, workers: 1, ..GuidanceLimits::default() });
    let mut timed_out = 0;
    // A started compilation continues without callers.
    while let Err(error) = compiler.compile(&slow()) {
        match error {
            GuidanceError::TimedOut { limit: said, .. } if said == limit => timed_out += 1,
            GuidanceError::Overloaded { .. } => {}
            _ => panic!("{error}"),
        }
    }
    assert!(timed_out > 0);
    assert_eq!(compiler.cache_usage().grammars, 1);
}

#[test]
fn slow_grammar_does_not_block_others() {
    let compiler = with(GuidanceLimits { workers: 2, ..untimed_limits() });
    thread::scope(|scope| {
        scope.spawn(|| compiler.compile(&slow()).unwrap());
        (0..20).for_each(|value| drop(compiler.compile(&number(value)).unwrap()));
    });
}

/// Other grammars whose compilation takes a while.
fn slow_variant(number: usize) -> GrammarSpec {
    let names: Vec<String> =
        (0..900).map(|index| format!(r#""p{index}_{number}":{{"type":"null"}}"#)).collect();
    schema(&format!(r#"{{"properties":{{{}}}}}"#, names.join(",")))
}

/// Runs `then` while `compiler` compiles a grammar.
fn while_compiling(compiler: &GrammarCompiler, grammar: &GrammarSpec, then: impl FnOnce()) {
    // Once a worker has started the job, the error is a timeout.
    while let Err(error) = compiler.compile(grammar) {
        if matches!(error, GuidanceError::TimedOut { .. }) {
            return then();
        }
    }
    panic!("the grammar is already compiled");
}

#[test]
fn queued_grammar_times_out_as_overloaded() {
    let limits =
        GuidanceLimits { compile_time: Duration::from_millis(1), workers: 1, ..GuidanceLimits::default() };
    let compiler = with(limits);
    while_compiling(&compiler, &slow(), || {
        while_compiling(&compiler, &slow_variant(1), || {
            let error = compiler.compile(&number(1)).err().unwrap();
            assert!(matches!(error, GuidanceError::Overloaded { .. }), "{error}");
        });
    });
}

/// A client that waits without an end.
struct Client(u64);

impl Caller for Client {
    fn client(&self) -> Option<u64> {
        Some(self.0)
    }

    fn is_wanted(&mut self) -> bool {
        true
    }
}

#[test]
fn late_grammar_of_a_client_holds_up_that_client_only() {
    let compile_time = Duration::from_millis(1);
    let compiler = with(GuidanceLimits { compile_time, workers: 1, ..GuidanceLimits::default() });
    while !matches!(compiler.compile_for(&slow(), &mut Client(1)), Err(GuidanceError::TimedOut { .. })) {}
    let error = compiler.compile_for(&number(1), &mut Client(1)).err().unwrap().to_string();
    assert!(
        error.contains("an earlier grammar of the client has taken 1ms and is not compiled yet"),
        "{error}"
    );
    while compiler.compile_for(&number(2), &mut Client(2)).is_err() {}
    assert_eq!(compiler.cache_usage().grammars, 1, "the slow one is not compiled yet");
    while compiler.compile_for(&slow(), &mut Client(1)).is_err() {}
    compiler.compile_for(&number(2), &mut Client(1)).unwrap();
}

/// A caller of a client, which is asked at intervals whether it waits on.
struct Waiting<'a>(u64, &'a dyn Fn() -> bool);

impl Caller for Waiting<'_> {
    fn client(&self) -> Option<u64> {
        Some(self.0)
    }

    fn is_wanted(&mut self) -> bool {
        self.1()
    }
}

#[test]
fn one_grammar_of_a_client_is_compiled_at_a_time() {
    // The compilation of a reference to a token that begins with `<held` does not go on before the gate is open.
    let gate = Arc::new(Mutex::new(()));
    let num_held = Arc::new(AtomicUsize::new(0));
    let (sender, held) = mpsc::channel();
    let encode = {
        let (gate, num_held) = (Arc::clone(&gate), Arc::clone(&num_held));
        move |text: &str| {
            if text.starts_with("<held") {
                num_held.fetch_add(1, Ordering::Relaxed);
                sender.send(()).unwrap();
                drop(gate.lock().unwrap());
            }
            Vec::new()
        }
    };
    let table = (0..=255).map(|byte| Some(TokenText { bytes: vec![byte], special: byte == 255 })).collect();
    let vocabulary = Vocabulary::new(table, &[255], Arc::new(encode)).unwrap();
    let limits = GuidanceLimits { workers: 2, ..untimed_limits() };
    let compiler = GrammarCompiler::new(Arc::new(vocabulary), limits).unwrap();
    let closed = gate.lock().unwrap();
    thread::scope(|scope| {
        let queued: Vec<_> = (0..2)
            .map(|index| {
                let (sender, queued) = mpsc::channel();
                let grammar = GrammarSpec::Gbnf(format!("root ::= <held{index}>"));
                let compiler = &compiler;
                scope.spawn(move || {
                    let is_wanted = || {
                        _ = sender.send(());
                        true
                    };
                    let mut caller = Waiting(1, &is_wanted);
                    assert!(compiler.compile_for(&grammar, &mut caller).is_err());
                });
                queued
            })
            .collect();
        queued.iter().for_each(|queued| queued.recv().unwrap());
        held.recv().unwrap();
        let has_worker = || num_held.load(Ordering::Relaxed) < 2;
        let other = compiler.compile_for(&number(1), &mut Waiting(2, &has_worker));
        drop(closed);
        assert!(other.is_ok(), "{:?}", other.err());
    });
    assert_eq!(num_held.load(Ordering::Relaxed), 2);
}

#[test]
fn full_queue_rejects_new_grammars() {
    let limits = GuidanceLimits {
        compile_time: Duration::from_millis(1),
        workers: 1,
        queued_grammars: 0,
        ..untimed_limits()
    };
    let compiler = with(limits);
    let error = compiler.compile(&number(1)).err().unwrap();
    assert!(matches!(error, GuidanceError::Overloaded { .. }), "{error}");
    assert!(error.to_string().contains("0 other grammars"), "{error}");
}

#[test]
fn cancelled_callers_free_their_queue_entries() {
    let compiler = with(GuidanceLimits { workers: 1, queued_grammars: 1, ..untimed_limits() });
    // The worker continues with the jobs it has started; the others leave the queue.
    for number in 0..10 {
        if let Err(error) = compiler.compile_for(&slow_variant(number), &mut || false) {
            assert!(matches!(error, GuidanceError::Cancelled { .. }), "{error}");
        }
    }
    compiler.compile(&number(7)).unwrap();
}

/// A caller that records what it is asked.
struct Recorded {
    num_waits: usize,
    may_wait: bool,
}

impl Caller for Recorded {
    fn begin_wait(&mut self) -> bool {
        self.num_waits += 1;
        self.may_wait
    }

    fn is_wanted(&mut self) -> bool {
        true
    }
}

#[test]
fn caller_is_told_before_it_waits() {
    let compiler = with(untimed_limits());
    let mut caller = Recorded { num_waits: 0, may_wait: false };
    let error = compiler.compile_for(&number(1), &mut caller).err().unwrap();
    assert!(matches!(error, GuidanceError::Cancelled { .. }), "{error}");
    caller.may_wait = true;
    compiler.compile_for(&number(1), &mut caller).unwrap();
    compiler.compile_for(&number(1), &mut caller).unwrap();
    assert_eq!(caller.num_waits, 2, "a cached grammar needs no wait");
}

#[test]
fn compiler_dropped_while_compiling_leaves_matchers_usable() {
    let compiler = with(GuidanceLimits { compile_time: Duration::ZERO, ..GuidanceLimits::default() });
    drop(compiler.compile(&slow()));
    drop(compiler);
    let compiled = with(untimed_limits()).compile(&number(7)).unwrap();
    let mut matcher = compiled.start().unwrap();
    drop(compiled);
    matcher.accept(u32::from(b'7')).unwrap();
    assert!(matcher.is_complete());
}

#[test]
fn cache_evicts_the_least_recently_used_grammar() {
    let compiler = with(GuidanceLimits { cached_grammars: 2, ..untimed_limits() });
    let [one, two] = [1, 2].map(|value| compiler.compile(&number(value)).unwrap());
    assert!(Arc::ptr_eq(&one, &compiler.compile(&number(1)).unwrap()));
    compiler.compile(&number(3)).unwrap();
    assert_eq!(compiler.cache_usage().grammars, 2);
    assert!(Arc::ptr_eq(&one, &compiler.compile(&number(1)).unwrap()));
    assert!(!Arc::ptr_eq(&two, &compiler.compile(&number(2)).unwrap()));
}

#[test]
fn grammar_larger_than_the_cache_is_not_cached() {
    let compiler = with(GuidanceLimits { cached_bytes: 10, ..untimed_limits() });
    compiler.compile(&number(1)).unwrap();
    assert_eq!((compiler.cache_usage().grammars, compiler.cache_usage().bytes), (0, 0));
}
