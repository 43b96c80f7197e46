//! The device thread of the asynchronous backend: jobs, tickets and the control of a test over both.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use penstock_device::cpu::Cpu;
use penstock_device::{DeviceError, Sampled};

/// Tokens are published when so many batches are complete, or when nothing was submitted for a while.
const BURST: usize = 3;
const LATENCY: Duration = Duration::from_micros(300);

/// A value that the host and the device thread use, the latter in the order of the calls.
pub type Shared<T> = Arc<Mutex<T>>;

pub fn shared<T>(value: T) -> Shared<T> {
    Arc::new(Mutex::new(value))
}

pub fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap()
}

pub type Command<T> = Box<dyn FnOnce(&mut Cpu) -> Result<T, DeviceError> + Send>;

/// The results of a batch.
pub type Results = Result<Vec<Sampled>, DeviceError>;

pub enum Job {
    Run(Command<()>),
    Sample(Arc<Ticket>, Command<Vec<Sampled>>),
    /// Answered when everything before it is complete.
    Barrier(Sender<()>),
}

/// Holds the device thread and counts what was submitted to it.
#[derive(Default)]
pub struct Control {
    pub held: Mutex<bool>,
    pub released: Condvar,
    /// Rows of all matrix products.
    pub num_rows: AtomicUsize,
    /// Steps whose inputs were uploaded.
    pub num_steps: AtomicUsize,
    /// Batches that were submitted, and those whose tokens were published.
    pub num_submitted: AtomicUsize,
    pub num_published: AtomicUsize,
    /// The next slot is not admitted.
    pub fails_admission: AtomicBool,
    /// Completed batches are lost with the device when this is set.
    pub lost: Mutex<Option<String>>,
}

impl Control {
    /// From now on the device thread does nothing.
    pub fn hold(&self) {
        *lock(&self.held) = true;
    }

    pub fn release(&self) {
        *lock(&self.held) = false;
        self.released.notify_all();
    }

    /// The admission of the next slot fails.
    pub fn fail_admission(&self) {
        self.fails_admission.store(true, SeqCst);
    }

    /// The device is lost for this reason.
    pub fn lose(&self, reason: &str) {
        *lock(&self.lost) = Some(reason.to_owned());
    }

    fn wait(&self) {
        let held = lock(&self.held);
        drop(self.released.wait_while(held, |held| *held).unwrap());
    }
}

/// The tokens of a batch, once they are published.
#[derive(Default)]
pub struct Ticket {
    pub results: Mutex<Option<Results>>,
    pub published: Condvar,
    pub waker: Mutex<Option<Waker>>,
}

/// The device thread.
pub fn run(queue: &Receiver<Job>, cpu: &Mutex<Cpu>, error: &Mutex<Option<DeviceError>>, control: &Control) {
    let mut complete: VecDeque<(Arc<Ticket>, Results)> = VecDeque::new();
    let publish = |complete: &mut VecDeque<(Arc<Ticket>, Results)>| {
        for (ticket, results) in complete.drain(..) {
            let lost = lock(&control.lost).clone().map(DeviceError::Lost);
            *lock(&ticket.results) = Some(lost.map_or(results, Err));
            control.num_published.fetch_add(1, SeqCst);
            ticket.published.notify_all();
            if let Some(waker) = lock(&ticket.waker).take() {
                waker.wake();
            }
        }
    };
    loop {
        let job = queue.recv_timeout(LATENCY);
        control.wait();
        match job {
            Ok(Job::Run(command)) => {
                if let Err(failure) = command(&mut lock(cpu)) {
                    lock(error).get_or_insert(failure);
                }
            }
            Ok(Job::Sample(ticket, command)) => {
                let results = command(&mut lock(cpu));
                complete.push_back((ticket, results));
                if complete.len() >= BURST {
                    publish(&mut complete);
                }
            }
            Ok(Job::Barrier(answer)) => {
                let _ = answer.send(());
            }
            Err(RecvTimeoutError::Timeout) => publish(&mut complete),
            Err(RecvTimeoutError::Disconnected) => return publish(&mut complete),
        }
    }
}
