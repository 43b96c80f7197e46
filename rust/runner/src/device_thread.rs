//! The device thread: computes plans in the order they come, and answers each. A failure inside a step, a panic too, is that
//! step's result; the thread goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};
use penstock_device::Backend;
use penstock_engine::Completions;
use penstock_engine::executor::{DEPTH, Executor, StepDone, StepPlan};

use crate::guard::panic_text;
use crate::runner::Runner;

/// The engine's side of the device thread. Dropping it ends the thread once its plans are computed, and waits for that.
pub(crate) struct DeviceThread {
    plans: Option<Sender<Box<StepPlan>>>,
    completions: Sender<Completions>,
    thread: Option<thread::JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts the thread, which first waits to be connected.
    pub(crate) fn spawn<B: Backend>(runner: Runner<B>) -> std::io::Result<Self> {
        let (plans, incoming) = bounded(DEPTH);
        let (completions, connection) = bounded(1);
        let thread = thread::Builder::new()
            .name("penstock-device".to_owned())
            .spawn(move || serve(runner, &incoming, &connection))?;
        Ok(Self { plans: Some(plans), completions, thread: Some(thread) })
    }

    /// Says where answers go.
    pub(crate) fn connect(self, completions: Completions) -> Self {
        self.completions.send(completions).expect("the device thread waits to be connected; this is a bug");
        self
    }
}

impl Executor for DeviceThread {
    fn submit(&mut self, plan: Box<StepPlan>) {
        let plans = self.plans.as_ref().expect("the channel is open until the drop");
        plans.send(plan).expect("the device thread ends only when its channel is closed; this is a bug");
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        drop(self.plans.take());
        if let Some(thread) = self.thread.take() {
            // A panic there has already been reported as a step's result.
            let _ = thread.join();
        }
    }
}

fn serve<B: Backend>(
    mut runner: Runner<B>,
    incoming: &Receiver<Box<StepPlan>>,
    connection: &Receiver<Completions>,
) {
    let mut completions = None;
    for mut plan in incoming {
        let outcome = catch_unwind(AssertUnwindSafe(|| runner.run(&mut plan)));
        let result = match outcome {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(panic) => Err(format!("a defect in the step: {}", panic_text(panic.as_ref()))),
        };
        // Connected before the first plan can be submitted, so this waits for nothing.
        if completions.is_none() {
            completions = connection.recv().ok();
        }
        if let Some(completions) = &completions {
            completions.send(StepDone { plan, result });
        }
    }
}
