//! The consistency check of the scheduler, for tests and for idle debug builds.

use super::scheduler::Scheduler;
use super::slots::Running;

impl Scheduler {
    /// Panics unless slots, queue, sequences and blocks agree.
    pub(crate) fn check_integrity(&self) {
        self.slots.check_integrity();
        for Running { sequence, table, .. } in self.slots.iter() {
            sequence.check_integrity(true);
            self.kv.check_table(table, sequence.num_kv_tokens(), sequence.max_kv_tokens);
        }
        self.queue.check_integrity(self.slots.iter().map(|running| &running.sequence));
        let num_clients = self.queue.clients.ids().count();
        let max_new = if num_clients > 1 { self.max_waiting.saturating_mul(2) } else { self.max_waiting };
        assert!(self.queue.num_new() <= max_new, "too many requests wait; this is a bug");
        assert!(self.num_paused() <= self.max_paused, "too many requests are paused; this is a bug");
        assert!(self.ended.is_empty(), "a request was left without its end; this is a bug");
        assert!(self.removed.is_empty(), "a removed adapter was not reported; this is a bug");
        let tables = self.slots.iter().map(|running| &running.table);
        let swapped = self.queue.iter().filter_map(|sequence| sequence.swapped.as_ref());
        self.kv.check_integrity(tables, swapped);
        let running = self.slots.iter().map(|running| (&running.sequence, true));
        let all = running.chain(self.queue.iter().map(|sequence| (sequence, false)));
        let adapters =
            all.filter_map(|(sequence, has_slot)| Some((sequence.request.adapter?, sequence.key, has_slot)));
        self.adapters.check_integrity(adapters);
        self.check_admission();
    }

    /// Panics if a sequence waits although it could certainly be admitted.
    fn check_admission(&self) {
        let Some(next) = self.next_admissible().map(|key| self.queue.get(key)) else { return };
        let fits = self.kv.can_hold(next.num_tokens(), self.slots.num_running());
        let could_run = self.slots.has_free() && fits && !self.is_staging;
        assert!(
            !could_run || self.admission_is_due(),
            "{} waits though it could run; this is a bug",
            next.id()
        );
    }
}
