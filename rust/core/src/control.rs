//! Limits and the pulse of a search: one [`Monitor`] counts, watches the clock and asks the caller
//! whether to go on.

use std::time::{Duration, Instant};

use crate::solution::StopReason;

/// Limits of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Wall seconds.
    pub time: f64,
    /// Partial programs that A* may expand. A search that would spend them before a proof gives up early.
    pub expansions: u64,
    /// Bytes that the model's tables and A* may hold.
    pub memory: u64,
    /// Sweeps of message passing.
    pub sweeps: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { time: 60.0, expansions: 100_000, memory: 4 << 30, sweeps: u64::MAX }
    }
}

/// What the caller learns while the search runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Seconds since the start.
    pub seconds: f64,
    /// Proven lower bound in picoseconds.
    pub lower_bound: i64,
    /// Cost of the best program so far.
    pub cost: Option<i64>,
}

/// Called now and then with the progress; returning false interrupts the search.
pub type Tick<'a> = dyn FnMut(&Progress) -> bool + 'a;

/// Counts and limits of one search.
pub struct Monitor<'a> {
    start: Instant,
    deadline: Option<Instant>,
    next_tick: Instant,
    tick: &'a mut Tick<'a>,
    limits: Limits,
    /// The caller asked to stop: asked once, it stays so.
    interrupted: bool,
    /// Partial programs expanded.
    pub expansions: u64,
    /// Sweeps done.
    pub sweeps: u64,
    /// Bytes held.
    pub bytes: u64,
    /// Reported by [`Tick`].
    pub lower_bound: i64,
    /// Reported by [`Tick`].
    pub cost: Option<i64>,
}

const TICK: Duration = Duration::from_millis(50);

impl<'a> Monitor<'a> {
    /// Starts the clock.
    pub fn new(limits: Limits, tick: &'a mut Tick<'a>) -> Self {
        let start = Instant::now();
        let time = Duration::try_from_secs_f64(limits.time.max(0.0)).unwrap_or(Duration::MAX);
        Self {
            start,
            deadline: start.checked_add(time),
            next_tick: start,
            tick,
            limits,
            interrupted: false,
            expansions: 0,
            sweeps: 0,
            bytes: 0,
            lower_bound: 0,
            cost: None,
        }
    }

    /// Seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Checks every limit.
    ///
    /// # Errors
    /// The limit that struck.
    pub fn check(&mut self) -> Result<(), StopReason> {
        let now = Instant::now();
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            let progress =
                Progress { seconds: self.seconds(), lower_bound: self.lower_bound, cost: self.cost };
            self.interrupted |= !(self.tick)(&progress);
        }
        if self.interrupted {
            return Err(StopReason::Interrupted);
        }
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            return Err(StopReason::TimeLimit);
        }
        if self.expansions > self.limits.expansions {
            return Err(StopReason::ExpansionLimit);
        }
        if self.sweeps >= self.limits.sweeps {
            return Err(StopReason::SweepLimit);
        }
        if self.bytes > self.limits.memory {
            return Err(StopReason::MemoryLimit);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn each_limit_strikes() {
        let run = |limits: Limits, go_on: bool, expansions: u64, bytes: u64| {
            let mut tick = |_: &Progress| go_on;
            let mut monitor = Monitor::new(limits, &mut tick);
            (monitor.expansions, monitor.bytes) = (expansions, bytes);
            monitor.check()
        };
        let limits = Limits { time: 60.0, expansions: 5, memory: 5, sweeps: u64::MAX };
        assert_eq!(run(limits, true, 5, 5), Ok(()));
        assert_eq!(run(limits, true, 6, 5), Err(StopReason::ExpansionLimit));
        assert_eq!(run(limits, true, 5, 6), Err(StopReason::MemoryLimit));
        assert_eq!(run(limits, false, 0, 0), Err(StopReason::Interrupted));
        assert_eq!(run(Limits { time: 0.0, ..limits }, true, 0, 0), Err(StopReason::TimeLimit));
        assert_eq!(run(Limits { time: f64::INFINITY, ..limits }, true, 0, 0), Ok(()));
    }

    #[test]
    fn an_interruption_is_not_forgotten_before_the_next_tick() {
        let mut tick = |_: &Progress| false;
        let mut monitor = Monitor::new(Limits::default(), &mut tick);
        assert_eq!(monitor.check(), Err(StopReason::Interrupted));
        assert_eq!(monitor.check(), Err(StopReason::Interrupted));
    }
}
