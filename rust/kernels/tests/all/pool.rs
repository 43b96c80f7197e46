//! The worker pool: every worker once per run, panics resume in the caller, no CPU time when idle.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use penstock_kernels::{Pool, allowed_cpus};

fn message(result: std::thread::Result<()>) -> String {
    *result.expect_err("no panic").downcast::<String>().expect("a string")
}

#[test]
fn every_worker_runs_once_and_worker_zero_is_the_caller() {
    for threads in 1..=4 {
        let pool = Pool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads);
        let caller = std::thread::current().id();
        let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..1000 {
            pool.run(&|worker| {
                assert_eq!(worker == 0, std::thread::current().id() == caller);
                calls[worker].fetch_add(1, Ordering::Relaxed);
            });
        }
        assert!(calls.iter().all(|calls| calls.load(Ordering::Relaxed) == 1000));
    }
}

#[test]
fn for_each_visits_every_index_once() {
    let pool = Pool::new(3).unwrap();
    for count in [0, 1, 2, 100] {
        let seen: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
        pool.for_each(count, &|index| {
            seen[index].fetch_add(1, Ordering::Relaxed);
        });
        assert!(seen.iter().all(|seen| seen.load(Ordering::Relaxed) == 1));
    }
}

#[test]
fn panic_resumes_in_run_after_all_calls_and_pool_stays_usable() {
    let pool = Pool::new(3).unwrap();
    for panicking in 0..3 {
        let ended = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|worker| {
                if worker == panicking {
                    panic!("worker {worker} panicked");
                }
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }));
        assert_eq!(message(result), format!("worker {panicking} panicked"));
        assert_eq!(ended.load(Ordering::Relaxed), 2);
        let calls = AtomicUsize::new(0);
        pool.run(&|_| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(calls.load(Ordering::Relaxed), 3);
    }
}

#[test]
fn idle_pool_sleeps_and_wakes_for_the_next_job() {
    let pool = Pool::new(3).unwrap();
    for _ in 0..3 {
        while pool.sleeping() < 2 {
            std::thread::yield_now();
        }
        let calls = AtomicUsize::new(0);
        pool.run(&|_| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(calls.load(Ordering::Relaxed), 3);
    }
}

#[test]
fn nested_job_runs_inline() {
    let pool = Pool::new(2).unwrap();
    let calls = AtomicUsize::new(0);
    pool.run(&|_| {
        pool.run(&|_| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        pool.for_each(5, &|_| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(calls.load(Ordering::Relaxed), 2 * (2 + 5));
}

#[test]
fn two_threads_can_use_one_pool() {
    let pool = Pool::new(2).unwrap();
    let calls = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..500 {
                    pool.run(&|_| {
                        calls.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(calls.load(Ordering::Relaxed), 2 * 500 * 2);
}

#[test]
fn dropping_a_pool_ends_spinning_and_sleeping_threads() {
    // Thread-local destructors run before a thread can be joined.
    struct Ends(Arc<AtomicUsize>);
    impl Drop for Ends {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    thread_local!(static ENDS: std::cell::RefCell<Option<Ends>> = const { std::cell::RefCell::new(None) });
    for asleep in [false, true] {
        let ended = Arc::new(AtomicUsize::new(0));
        let pool = Pool::new(3).unwrap();
        pool.run(&|worker| {
            if worker > 0 {
                ENDS.with(|ends| *ends.borrow_mut() = Some(Ends(Arc::clone(&ended))));
            }
        });
        while asleep && pool.sleeping() < 2 {
            std::thread::yield_now();
        }
        drop(pool);
        assert_eq!(ended.load(Ordering::SeqCst), 2);
    }
}

#[test]
fn shared_job_is_finished_when_share_returns() {
    for threads in 1..=4 {
        let pool = Pool::new(threads).unwrap();
        for round in 0..5000 {
            // The job is on this stack frame: a worker that joined late or stayed in it would use freed memory.
            let (next, count) = (AtomicUsize::new(0), round % 7);
            let parts: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            let inside = AtomicUsize::new(0);
            pool.share(&|worker| {
                inside.fetch_add(1, Ordering::SeqCst);
                calls[worker].fetch_add(1, Ordering::SeqCst);
                while let Some(part) = parts.get(next.fetch_add(1, Ordering::SeqCst)) {
                    part.fetch_add(1, Ordering::SeqCst);
                }
                inside.fetch_sub(1, Ordering::SeqCst);
            });
            assert_eq!(inside.into_inner(), 0);
            assert!(parts.into_iter().all(|part| part.into_inner() == 1));
            let calls: Vec<usize> = calls.into_iter().map(AtomicUsize::into_inner).collect();
            assert!(calls[0] == 1 && calls.iter().all(|calls| *calls <= 1), "{calls:?}");
        }
    }
}

#[test]
fn share_does_not_wait_for_workers_that_have_not_joined() {
    // More workers than CPUs, all asleep: the caller returns long before most of them have woken up. `run` must still
    // call every worker afterwards.
    let pool = Pool::new(8).unwrap();
    for _ in 0..500 {
        pool.share(&|_| {});
        let calls = AtomicUsize::new(0);
        pool.run(&|_| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(calls.into_inner(), 8);
    }
}

#[test]
fn panic_in_a_shared_job_resumes_and_pool_stays_usable() {
    let pool = Pool::new(2).unwrap();
    for _ in 0..100 {
        let result =
            catch_unwind(AssertUnwindSafe(|| pool.share(&|worker| panic!("worker {worker} panicked"))));
        assert!(message(result).ends_with("panicked"));
        pool.share(&|_| {});
    }
}

/// The CPUs of every worker of a pool, worker 0 (the caller) included.
#[cfg(target_os = "linux")]
fn cpus_of_workers(pool: &Pool) -> Vec<Vec<usize>> {
    let cpus = Mutex::new(vec![Vec::new(); pool.threads()]);
    pool.run(&|worker| cpus.lock().unwrap()[worker] = allowed_cpus().unwrap());
    cpus.into_inner().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn workers_run_on_their_node_and_the_caller_once_it_is_pinned() {
    let all = allowed_cpus().unwrap();
    let (first, last) = (vec![all[0]], vec![all[all.len() - 1]]);
    let pool = Pool::on_nodes(4, vec![first.clone(), last.clone()]).unwrap();
    assert_eq!((pool.num_nodes(), pool.pin_error().is_none()), (2, true));
    let expected = |caller: &[usize]| vec![caller.to_vec(), first.clone(), last.clone(), last.clone()];
    assert_eq!(cpus_of_workers(&pool), expected(&all), "the thread that makes a pool keeps its CPUs");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pool.pin_caller();
            assert_eq!(cpus_of_workers(&pool), expected(&first));
        });
    });
    assert_eq!(allowed_cpus().unwrap(), all);
}

#[test]
#[cfg(target_os = "linux")]
fn workers_of_a_refused_node_run_anywhere() {
    let all = allowed_cpus().unwrap();
    let (one, missing) = (vec![all[0]], vec![8000]);
    // A refused node has an effect on the workers of all nodes.
    for nodes in [
        vec![missing.clone()],
        vec![all.clone(), missing.clone()],
        vec![one.clone(), missing.clone()],
        vec![missing, one],
    ] {
        let pool = Pool::on_nodes(2, nodes).unwrap();
        assert!(pool.pin_error().is_some());
        pool.pin_caller();
        assert_eq!(cpus_of_workers(&pool), [all.clone(), all.clone()]);
    }
}

#[test]
fn turns_are_given_in_the_order_of_the_requests() {
    let pool = Pool::new(1).unwrap();
    let order = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let turn = pool.turn();
        for thread in 0..5 {
            let (pool, order) = (&pool, &order);
            scope.spawn(move || {
                let _turn = pool.turn();
                order.lock().unwrap().push(thread);
            });
            while pool.waiting() <= thread {
                std::thread::yield_now();
            }
        }
        drop(turn);
        // Behind the threads that wait already.
        let _turn = pool.turn();
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4]);
    });
    assert_eq!(pool.waiting(), 0);
}

#[test]
fn turn_ends_with_a_panic() {
    let pool = Pool::new(2).unwrap();
    let panicking = || {
        let _turn = pool.turn();
        pool.run(&|worker| assert_ne!(worker, 1, "a failure"));
    };
    assert!(catch_unwind(AssertUnwindSafe(panicking)).is_err());
    let _turn = pool.turn();
}
