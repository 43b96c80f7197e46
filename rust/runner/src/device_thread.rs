//! The device thread: launches plans in order and returns each when it is finished.
//!
//! Up to [`DEPTH`] steps are in flight. A queued plan is launched without waiting for the tokens of the step before it,
//! unless its sampling needs the host. A failure inside a step, a panic too, is that step's result; the thread flushes
//! the operations that the step has submitted and continues. Once the device is lost, every step ends with the loss,
//! and the backend is not called again.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded, select};
use penstock_device::{Backend, DeviceError};
use penstock_engine::Completions;
use penstock_engine::{DEPTH, Executor, StepDone, StepError, StepOutput, StepPlan};

use crate::flight::Flight;
use crate::runner::Runner;
use crate::user_code::panic_text;

/// A plan and the buffer of its output.
type Step = (Box<StepPlan>, Box<StepOutput>);

/// The engine's side of the device thread. Dropping it ends the thread after its plans are finished, and waits for
/// that.
pub(crate) struct DeviceThread {
    steps: Option<Sender<Step>>,
    completions: Sender<Completions>,
    thread: Option<thread::JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts the thread.
    pub(crate) fn spawn<B: Backend>(runner: Runner<B>) -> std::io::Result<Self> {
        let (steps, incoming) = bounded(DEPTH);
        let (completions, connection) = bounded(1);
        let thread = thread::Builder::new()
            .name("penstock-device".to_owned())
            .spawn(move || serve(runner, &incoming, &connection))?;
        Ok(Self { steps: Some(steps), completions, thread: Some(thread) })
    }

    /// Sets the destination of finished steps. Called before the first plan is submitted.
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
            // A panic has already been reported as a step's result.
            let _ = thread.join();
        }
    }
}

/// A step between its launch and its end.
struct InFlight<B: Backend> {
    plan: Box<StepPlan>,
    output: Box<StepOutput>,
    /// `Err` if the step has failed and waits for the steps before it.
    flight: Result<Flight<B>, StepError>,
}

impl<B: Backend> InFlight<B> {
    fn launch(device: &mut Device<Runner<B>>, (plan, mut output): Step, is_behind: bool) -> Self {
        let flight = device.run(|runner| runner.launch(&plan, &mut output, is_behind));
        if flight.is_err() {
            // An error of this call stays in the device, and is that of the next step.
            let _ = device.run(Runner::end_failed_step);
        }
        Self { plan, output, flight }
    }

    /// Whether another step may be launched behind this one.
    fn is_sampled(&self) -> bool {
        self.flight.as_ref().is_ok_and(Flight::is_sampled)
    }

    /// Submits what is left, and returns whether the step is ready to be finished. Called for the oldest step only.
    fn advance(&mut self, device: &mut Device<Runner<B>>, waker: &Waker) -> bool {
        let Ok(flight) = &mut self.flight else { return true };
        let advanced = device.run(|runner| {
            if !flight.is_sampled() {
                runner.resume(flight)?;
            }
            Ok(runner.poll(flight, waker).is_ready())
        });
        match advanced {
            Ok(is_ready) => is_ready,
            Err(error) => {
                if let Ok(flight) = std::mem::replace(&mut self.flight, Err(error)) {
                    device.runner.recycle(flight);
                }
                true
            }
        }
    }

    fn finish(self, device: &mut Device<Runner<B>>) -> StepDone {
        let Self { plan, mut output, flight } = self;
        let result = flight.and_then(|flight| device.run(|runner| runner.finish(flight, &plan, &mut output)));
        StepDone { plan, output, result }
    }
}

/// The runner, until its device is lost.
struct Device<R> {
    runner: R,
    /// The reason of the loss.
    lost: Option<String>,
}

impl<R> Device<R> {
    /// Runs a part of a step. Panics and errors become results; after a loss nothing is run.
    fn run<T>(&mut self, run: impl FnOnce(&mut R) -> Result<T, DeviceError>) -> Result<T, StepError> {
        if let Some(reason) = &self.lost {
            return Err(StepError::DeviceLost(reason.clone()));
        }
        match catch_unwind(AssertUnwindSafe(|| run(&mut self.runner))) {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(DeviceError::Lost(reason))) => {
                self.lost = Some(reason.clone());
                Err(StepError::DeviceLost(reason))
            }
            Ok(Err(error)) => Err(StepError::Failed(error.to_string())),
            Err(panic) => {
                Err(StepError::Failed(format!("the step panicked: {}", panic_text(panic.as_ref()))))
            }
        }
    }
}

/// Wakes the device thread when a step may have become ready.
struct Wakeup(Sender<()>);

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let _ = self.0.try_send(()); // full if it has been woken already
    }
}

fn serve<B: Backend>(mut runner: Runner<B>, incoming: &Receiver<Step>, connection: &Receiver<Completions>) {
    runner.bind_thread();
    let mut device = Device { runner, lost: None };
    let (wakeup, wakeups) = bounded(1);
    let waker = Waker::from(Arc::new(Wakeup(wakeup)));
    let mut completions = None;
    let mut is_open = true; // until the engine drops its side
    let mut in_flight: VecDeque<InFlight<B>> = VecDeque::with_capacity(DEPTH);
    loop {
        while in_flight.front_mut().is_some_and(|oldest| oldest.advance(&mut device, &waker)) {
            let Some(oldest) = in_flight.pop_front() else { break };
            let done = oldest.finish(&mut device);
            // Connected before the first plan is submitted, so this does not wait.
            if completions.is_none() {
                completions = connection.recv().ok();
            }
            if let Some(completions) = &completions {
                completions.send(done);
            }
        }
        let can_launch = in_flight.len() < DEPTH && in_flight.iter().all(InFlight::is_sampled);
        let step = if in_flight.is_empty() {
            match incoming.recv() {
                Ok(step) => Some(step),
                Err(_) => return,
            }
        } else if can_launch && is_open {
            select! {
                recv(incoming) -> step => {
                    is_open = step.is_ok();
                    step.ok()
                }
                recv(wakeups) -> _ => None,
            }
        } else {
            let _ = wakeups.recv();
            None
        };
        if let Some(step) = step {
            let launched = InFlight::launch(&mut device, step, !in_flight.is_empty());
            in_flight.push_back(launched);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_runs_after_the_device_is_lost() {
        let mut device = Device { runner: 0, lost: None };
        let mut run = |result: Result<(), DeviceError>| {
            let result = device.run(|num_runs: &mut u32| {
                *num_runs += 1;
                result
            });
            (result, device.runner)
        };
        let invalid = DeviceError::InvalidStep("a row".into());
        assert_eq!(run(Err(invalid.clone())), (Err(StepError::Failed(invalid.to_string())), 1));
        assert_eq!(run(Ok(())), (Ok(()), 2), "other errors concern one step");
        let lost = Err(StepError::DeviceLost("it is gone".into()));
        assert_eq!(run(Err(DeviceError::Lost("it is gone".into()))), (lost.clone(), 3));
        assert_eq!(run(Ok(())), (lost, 3));
    }
}
