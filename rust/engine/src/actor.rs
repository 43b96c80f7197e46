//! The engine thread: runs an [`EngineCore`] with a mailbox and an executor, and handles the end of the engine.
//!
//! The thread waits only for the mailbox, takes no lock except those of a port's bell and list, and is the only part of
//! the engine that reads the clock.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crate::ending::Ending;
use crate::engine_core::EngineCore;
use crate::executor::Executor;
use crate::mailbox::{Gate, Mailbox};
use crate::request::StopCause;

static CHECKS_WHEN_IDLE: AtomicBool = AtomicBool::new(false);

/// Lets all engines of the process check their parts against each other whenever they are idle. That takes time for
/// each cached block.
#[cfg(feature = "testing")]
pub fn check_when_idle() {
    CHECKS_WHEN_IDLE.store(true, Ordering::Relaxed); // nothing else depends on it
}

/// Starts the thread. It ends after a `Shutdown`, a lost device or a panic, and completes `ending` when the executor is
/// dropped.
pub(crate) fn spawn(
    core: EngineCore,
    mailbox: Mailbox,
    executor: Box<dyn Executor>,
    ending: Arc<Ending>,
) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("penstock-engine".into()).spawn(move || {
        let _ending = CompleteOnDrop(ending);
        run_thread(core, mailbox, executor);
    })
}

/// The loop: take messages, end cancelled requests, plan and submit, ring. An iteration is also due when a prefix
/// expires.
fn run(mut core: EngineCore, mailbox: &Mailbox, executor: &mut dyn Executor) {
    // A local, so dropped before `core`: a consumer that sees its request end finds the gate closed.
    let _closing = CloseOnDrop(mailbox.gate());
    while !core.is_stopped() {
        if cfg!(feature = "testing") && CHECKS_WHEN_IDLE.load(Ordering::Relaxed) && core.is_idle() {
            core.check_integrity();
            log::debug!("all parts of the idle engine agree");
        }
        let message = mailbox.wait(core.next_expiry());
        let now = Instant::now();
        for message in message.into_iter().chain(mailbox.drain()) {
            core.handle(message, now);
        }
        core.attend(now);
        while let Some((plan, output)) = core.plan(now) {
            executor.submit(plan, output);
        }
        core.end_drain(now);
        core.ring();
    }
}

/// Runs the loop so that no panic leaves the thread and no caller waits forever.
fn run_thread(core: EngineCore, mailbox: Mailbox, mut executor: Box<dyn Executor>) {
    // Unwinding drops `core`, and with it every outbox: each open request ends as stopped. The rest is only dropped, so
    // broken invariants do not matter.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(core, &mailbox, &mut *executor))) {
        log::error!("the engine crashed: {}", panic_text(&*panic));
    }
    // The mailbox first: that rejects the starts left in it, and releases an executor thread that waits for room to
    // send its last step, which the drop of the executor may wait for.
    drop(mailbox);
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(executor))) {
        log::error!("the executor panicked while it was dropped: {}", panic_text(&*panic));
    }
}

struct CompleteOnDrop(Arc<Ending>);

impl Drop for CompleteOnDrop {
    fn drop(&mut self) {
        self.0.complete();
    }
}

struct CloseOnDrop<'a>(&'a Gate);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close(if thread::panicking() { StopCause::Crashed } else { StopCause::Closed });
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}
