//! The engine thread: a [`Core`], a mailbox to wait at, an executor to submit to, and what happens when it ends.
//!
//! It waits nowhere else, takes no lock, and is the only place in the engine that looks at the clock.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crate::core::Core;
use crate::executor::Executor;
use crate::mailbox::{Gate, Mailbox};
use crate::request::StopCause;

/// Starts the thread. It ends, with the executor dropped, after a `Shutdown` or a panic.
pub(crate) fn spawn(core: Core, mailbox: Mailbox, executor: Box<dyn Executor>) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("penstock-engine".into()).spawn(move || live(core, mailbox, executor))
}

/// The step, on one screen: take messages, let go of who is gone, plan and submit, ring. Prefixes that expire meanwhile
/// are a reason to take a turn as well.
fn run(mut core: Core, mailbox: &Mailbox, executor: &mut dyn Executor) {
    // A local, so dropped before `core`: who hears of the end finds the gate shut.
    let _closing = CloseOnDrop(mailbox.gate());
    while !core.is_stopped() {
        if cfg!(debug_assertions) && core.is_idle() {
            core.check_integrity();
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
        core.ring();
    }
}

/// The thread's edge: nothing that panics inside gets out, and nobody waits for what will not come.
fn live(core: Core, mailbox: Mailbox, mut executor: Box<dyn Executor>) {
    // Unwinding drops `core`, and with it every outbox: each open request hears that the engine has stopped. What
    // remains is not used again but to be dropped, so no broken invariant is looked at.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(core, &mailbox, &mut *executor))) {
        log::error!("the engine crashed: {}", text_of(&*panic));
    }
    // The mailbox first: it answers the starts left in it, and lets go of an executor thread that waits for a place to
    // put its last answer, which the executor's drop may in turn wait for.
    drop(mailbox);
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(executor))) {
        log::error!("the executor panicked while it was dropped: {}", text_of(&*panic));
    }
}

struct CloseOnDrop<'a>(&'a Gate);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close(if thread::panicking() { StopCause::Crashed } else { StopCause::Closed });
    }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without words")
}
