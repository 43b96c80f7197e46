//! The device thread: computes plans in the order they come, and answers each. A failure inside a step, a panic too, is that
//! step's result; the thread goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};
use penstock_device::Backend;
use penstock_engine::Completions;
use penstock_engine::executor::{DEPTH, Executor, StepDone, StepError, StepOutput, StepPlan};

use crate::guard::panic_text;
use crate::runner::Runner;

/// A plan and the buffer of its output.
type Step = (Box<StepPlan>, Box<StepOutput>);

/// The engine's side of the device thread. Dropping it ends the thread once its plans are computed, and waits for that.
pub(crate) struct DeviceThread {
    steps: Option<Sender<Step>>,
    completions: Sender<Completions>,
    thread: Option<thread::JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts the thread, which first waits to be connected.
    pub(crate) fn spawn<B: Backend>(runner: Runner<B>) -> std::io::Result<Self> {
        let (steps, incoming) = bounded(DEPTH);
        let (completions, connection) = bounded(1);
        let thread = thread::Builder::new()
            .name("penstock-device".to_owned())
            .spawn(move || serve(runner, &incoming, &connection))?;
        Ok(Self { steps: Some(steps), completions, thread: Some(thread) })
    }

    /// Says where answers go.
    pub(crate) fn connect(self, completions: Completions) -> Self {
        self.completions.send(completions).expect("the device thread waits to be connected; this is a bug");
        self
    }
}

impl Executor for DeviceThread {
    fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
        let steps = self.steps.as_ref().expect("the channel is open until the drop");
        steps
            .send((plan, output))
            .expect("the device thread ends only when its channel is closed; this is a bug");
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        drop(self.steps.take());
        if let Some(thread) = self.thread.take() {
            // A panic there has already been reported as a step's result.
            let _ = thread.join();
        }
    }
}

fn serve<B: Backend>(mut runner: Runner<B>, incoming: &Receiver<Step>, connection: &Receiver<Completions>) {
    let mut completions = None;
    for (plan, mut output) in incoming {
        let outcome = catch_unwind(AssertUnwindSafe(|| runner.run(&plan, &mut output)));
        let result = match outcome {
            Ok(result) => result.map_err(|error| StepError::Failed(error.to_string())),
            Err(panic) => {
                Err(StepError::Failed(format!("a defect in the step: {}", panic_text(panic.as_ref()))))
            }
        };
        // Connected before the first plan can be submitted, so this waits for nothing.
        if completions.is_none() {
            completions = connection.recv().ok();
        }
        if let Some(completions) = &completions {
            completions.send(StepDone { plan, output, result });
        }
    }
}
