//! The search as a whole.
//!
//! 1. Build the model; arc consistency and dominance ([`crate::dominance`]); order; compact; eliminate the
//!    variables with at most two neighbours ([`crate::eliminate`]).
//! 2. Sweeps of TRW-S raise the bound; dives find programs; values whose bound exceeds the best
//!    program die (which strengthens the next sweeps). Stop if bound and program meet.
//! 3. When the sweeps gain little: reduce, compact and eliminate what is left; a beam search on each
//!    connected component may find a better program or solve the component (`parts`); then join variables
//!    ([`crate::join`]), which makes the relaxation tighter, and sweep on. Without limits on the joined
//!    variables' size this alone would solve any problem: it ends in a model without variables, whose
//!    constant is the optimum.
//! 4. When no pair of variables is small enough to be joined: A* on each component with a budget; then sweep on
//!    with more patience and a larger budget.
//!
//! Only programs strictly better than the incumbent are kept in the model: when nothing is left, the
//! incumbent is optimal.

mod parts;
mod sweeps;

use crate::build::Built;
use crate::compact::{compact, reordered};
use crate::consistency::arc_consistency;
use crate::control::{Limits, Monitor, Tick};
use crate::dive::{PATIENCE, dive};
use crate::dominance::{reduce, reduce_consistent};
use crate::eliminate::{Trail, eliminate};
use crate::fold::Fold;
use crate::join::contract;
use crate::model::{Model, Wipeout};
use crate::problem::Problem;
use crate::reduced::Reduced;
use crate::searcher::{Asked, Searcher};
use crate::solution::{Assignment, Solution, StopReason};
use crate::validate::ProblemError;
use crate::verify::verify;

/// Expansions that A* may spend on a component in the first round; four times more in each further one.
const FIRST_BUDGET: u64 = 20_000;
/// The beam is this much narrower than the budget.
const BEAM_SHARE: u64 = 100;
/// A window of sweeps over what is left must gain more than this of the gap. Joins after too few sweeps keep what
/// the bound would have excluded, and grow beyond reach (ResNet-50 on 64 devices, six searches at prices of memory:
/// with 0.02 five end open, with 0.005 two, and with 0.002 none, in less time).
const PATIENCE_OF_REST: f64 = 0.002;
/// A gap above this part of the cost is wide.
const WIDE: f64 = 0.02;
/// States per layer of the beam search before each round of joins.
const BEAM_WIDTH: u64 = 100;
/// Values that a joined variable may have: in the first rounds, and at most.
const JOIN: [usize; 2] = [256, 4096];
/// Entries of an edge that an elimination may create.
const TABLE: usize = 1024;

/// Finds a program of least cost.
///
/// # Errors
/// A malformed problem or incumbent.
pub fn solve<'a>(
    problem: &'a Problem,
    limits: Limits,
    incumbent: Option<&Assignment>,
    tick: &'a mut Tick<'a>,
) -> Result<Solution, ProblemError> {
    Searcher::new(problem.clone())?.solve(limits, Asked { incumbent, ..Asked::default() }, tick)
}

/// The search is over: nothing better than the incumbent exists, or a limit struck.
enum End {
    Proven,
    Stop(StopReason),
}

impl From<Wipeout> for End {
    fn from(_: Wipeout) -> Self {
        Self::Proven
    }
}

impl From<StopReason> for End {
    fn from(reason: StopReason) -> Self {
        Self::Stop(reason)
    }
}

/// One search at given costs.
pub(crate) struct Search<'a, 't> {
    problem: &'a Problem,
    built: &'a Built,
    fold: Option<&'a Fold>,
    monitor: Monitor<'t>,
    best: Option<(i64, Assignment)>,
    /// No program costs more.
    worst: i64,
    /// Values after the first reduction.
    left: usize,
    /// It started with messages of an earlier one.
    warm: bool,
    /// A program that costs at most this more than the best one will do.
    tolerance: i64,
    /// What was eliminated and joined so far.
    trail: Trail,
    /// Messages that an earlier search left on its reduced model.
    earlier: Option<&'a Reduced>,
    /// Those that this one leaves: before joins, and what they and further eliminations make of the model.
    reduced: Option<Reduced>,
}

impl<'a, 't> Search<'a, 't> {
    pub(crate) fn new(
        problem: &'a Problem,
        built: &'a Built,
        fold: Option<&'a Fold>,
        monitor: Monitor<'t>,
        best: Option<(i64, Assignment)>,
        worst: i64,
        tolerance: i64,
    ) -> Self {
        let trail = Trail::new(built.model.vars.len());
        let (earlier, reduced) = (None, None);
        Self {
            problem,
            built,
            fold,
            monitor,
            best,
            worst,
            left: 0,
            warm: false,
            tolerance,
            trail,
            earlier,
            reduced,
        }
    }

    /// Starts from messages that an earlier search left on its reduced model, where the bound of the whole one is
    /// loose.
    pub(crate) fn begin_with(&mut self, earlier: Option<&'a Reduced>) {
        self.earlier = earlier;
    }

    /// The messages on the reduced model, if it was swept until the bound rose little.
    pub(crate) fn left_reduced(&mut self) -> Option<Reduced> {
        self.reduced.take()
    }

    /// The result where arc consistency alone shows that there is no program but the incumbent, which need not be
    /// folded.
    pub(crate) fn infeasible(&self, conflict: impl FnOnce() -> String) -> Solution {
        match self.best {
            Some(_) => self.finish(StopReason::Optimal, None),
            None => self.finish(StopReason::Infeasible, Some(conflict())),
        }
    }

    /// Searches `model`: consistent, ordered and compacted, with costs; `fresh` makes the same without messages.
    /// `warm`: it has messages of an earlier search. `swept` is given the model when the sweeps over all of it have ended.
    pub(crate) fn run(
        &mut self,
        mut model: Model,
        fresh: impl FnOnce() -> Result<Model, Wipeout>,
        warm: bool,
        swept: impl FnOnce(&Model),
    ) -> Solution {
        self.warm = warm;
        let end = self.search(&mut model, fresh, swept);
        self.conclude(&model, &end)
    }

    /// Searches a `model` of which few values live: it is reduced at once, without sweeps over all of it.
    pub(crate) fn run_narrow(&mut self, whole: Model) -> Solution {
        let order: Vec<usize> = (0..whole.vars.len()).collect();
        let mut model = compact(whole, &order);
        let end = self.reduce_all(&mut model).and_then(|()| self.search_reduced(&mut model));
        self.conclude(&model, &end)
    }

    fn conclude(&mut self, model: &Model, end: &Result<(), End>) -> Solution {
        let reason = match end {
            Ok(()) | Err(End::Proven) if self.best.is_some() => StopReason::Optimal,
            Ok(()) | Err(End::Proven) => StopReason::Infeasible,
            Err(End::Stop(reason)) => *reason,
        };
        if self.best.is_none() && !matches!(reason, StopReason::Infeasible | StopReason::Interrupted) {
            // A limit struck before the first dive: one short dive regardless.
            let found: Result<_, ()> = dive(model, PATIENCE, false, || Ok(()));
            if let Ok(Some(found)) = found {
                self.offer(model, &found);
            }
        }
        let conflict = (reason == StopReason::Infeasible).then(|| {
            "every choice of rows and moves breaks a precondition, requirement or tie (the search was exhaustive)"
                .to_owned()
        });
        self.finish(reason, conflict)
    }

    fn search(
        &mut self,
        model: &mut Model,
        fresh: impl FnOnce() -> Result<Model, Wipeout>,
        swept: impl FnOnce(&Model),
    ) -> Result<(), End> {
        self.sweep_all(model, swept)?;
        self.prune(model)?;
        let wide = (self.limit() - model.constant) as f64 > WIDE * self.limit() as f64;
        if wide {
            // Far from closed: the reduced model is swept from the start, since messages that have come to rest
            // on the whole model hold back those that eliminations would free. What died stays dead.
            let mut fresh = fresh()?;
            for (s, var) in model.vars.iter().enumerate() {
                for (theta, &swept) in fresh.vars[s].theta.iter_mut().zip(&var.theta) {
                    if swept >= crate::model::HALF {
                        *theta = crate::model::DEAD;
                    }
                }
                fresh.refresh(s, |_| {});
            }
            *model = fresh;
        }
        self.reduce_all(model)?;
        if let (true, Some(earlier)) = (wide, self.earlier) {
            self.warm_up(model, earlier)?;
        }
        self.search_reduced(model)
    }

    /// Reductions and eliminations of the whole model.
    fn reduce_all(&mut self, model: &mut Model) -> Result<(), End> {
        reduce(model)?;
        *model = reordered(std::mem::take(model));
        self.left = model.living_values();
        self.squeeze(model)
    }

    /// Rounds of sweeps and joins of what reductions have left.
    fn search_reduced(&mut self, model: &mut Model) -> Result<(), End> {
        let mut patience = PATIENCE_OF_REST;
        let mut budget = FIRST_BUDGET;
        let mut most = JOIN[0];
        loop {
            self.sweep(model, patience)?;
            self.leave(model);
            self.squeeze(model)?;
            self.finish_components(model, BEAM_WIDTH, 0)?;
            self.prune(model)?;
            loop {
                let room = self.limit() - model.constant;
                let go_on = || self.monitor.check().is_ok();
                if let Some(keep) = contract(model, &mut self.trail, room, most, go_on)? {
                    *model = compact(std::mem::take(model), &keep);
                    self.squeeze(model)?;
                    break;
                }
                self.monitor.check()?;
                if most < JOIN[1] {
                    most *= 4;
                    continue;
                }
                let (bound, done) = (model.constant, self.monitor.expansions);
                let reached = self.finish_components(model, budget / BEAM_SHARE, budget)?;
                if self.out_of_reach(reached - bound, done, self.limit() - bound) {
                    return Err(End::Stop(StopReason::ExpansionLimit));
                }
                patience /= 4.0;
                budget *= 4;
                break;
            }
        }
    }

    /// Whether A*, having expanded since `done` and raised the bound by `gain`, would spend the limit on
    /// expansions before it closes `room`, even if the bound went on to rise as fast (it only gets slower).
    fn out_of_reach(&self, gain: i64, done: u64, room: i64) -> bool {
        let (spent, all) = (self.monitor.expansions - done, self.monitor.limits().expansions);
        let left = all.saturating_sub(self.monitor.expansions);
        spent > 0 && (gain as f64) * (left as f64) < ((room - gain) as f64) * (spent as f64)
    }

    /// Exact reductions and eliminations to their common fixpoint. `Err(Proven)`: no variable is left.
    fn squeeze(&mut self, model: &mut Model) -> Result<(), End> {
        self.prune(model)?;
        reduce_consistent(model)?;
        loop {
            *model = reordered(std::mem::take(model));
            let before = model.vars.len();
            let keep = eliminate(model, &mut self.trail, TABLE)?;
            *model = compact(std::mem::take(model), &keep);
            if model.constant > self.limit() {
                return Err(End::Proven);
            }
            self.raise(model.constant);
            self.monitor.bytes = model.bytes();
            self.monitor.check()?;
            if model.vars.is_empty() {
                self.offer(model, &[]);
                return Err(End::Proven);
            }
            if keep.len() == before {
                return Ok(());
            }
            reduce(model)?;
        }
    }

    /// Values that exceed the room left die.
    fn prune(&mut self, model: &mut Model) -> Result<(), End> {
        let room = self.limit() - model.constant;
        if room < 0 {
            return Err(End::Proven);
        }
        for var in 0..model.vars.len() {
            for theta in &mut model.vars[var].theta {
                if *theta > room {
                    *theta = crate::model::DEAD;
                }
            }
            model.refresh(var, |_| {});
        }
        arc_consistency(model, 0..model.vars.len(), |_| {})?;
        Ok(())
    }

    /// Whether a dive from `model` found a better program.
    fn dive(&mut self, model: &mut Model) -> Result<bool, End> {
        self.prune(model)?;
        let before = self.limit();
        let monitor = &mut self.monitor;
        if let Some(values) = dive(model, PATIENCE, true, || monitor.check())? {
            self.offer(model, &values);
        }
        Ok(self.limit() < before)
    }

    /// Keeps a complete assignment if it is better than the incumbent.
    fn offer(&mut self, model: &Model, values: &[usize]) {
        self.offer_at(model.evaluate(values), model, values);
    }

    /// [`Self::offer`] of an assignment whose scaled cost is known. Every step up to here kept all costs exactly, so
    /// that what does not cost less than the incumbent need not be read.
    fn offer_at(&mut self, scaled: i64, model: &Model, values: &[usize]) {
        if self.best.as_ref().is_some_and(|(least, _)| scaled >= *least << self.built.shift) {
            return;
        }
        let mut labels = vec![0; self.trail.origins()];
        model.labels(values, &mut labels);
        self.trail.recover(&mut labels);
        if let Some(fold) = self.fold {
            fold.expand(&mut labels);
        }
        let assignment = self.built.decode(self.problem, &labels);
        // A program that fails the check would be a defect of the search; it is never returned.
        let checked = verify(self.problem, &assignment);
        debug_assert!(checked.is_ok(), "{checked:?}");
        let Ok(cost) = checked else { return };
        debug_assert_eq!(cost << self.built.shift, scaled);
        if self.best.as_ref().is_none_or(|(least, _)| cost < *least) {
            self.best = Some((cost, assignment));
            self.monitor.cost = Some(cost);
        }
    }

    /// Scaled cost that a program may have which is better by more than the tolerance.
    fn limit(&self) -> i64 {
        let least = |(cost, _): &(i64, Assignment)| (cost - 1 - self.tolerance).max(-1);
        self.best.as_ref().map_or(self.worst, least) << self.built.shift
    }

    /// Records a scaled lower bound (of programs within the limit).
    fn raise(&mut self, scaled: i64) {
        let shift = self.built.shift;
        let bound = (scaled + (1 << shift) - 1) >> shift;
        let bound = self.best.as_ref().map_or(bound, |(cost, _)| bound.min(cost - self.tolerance));
        self.monitor.lower_bound = self.monitor.lower_bound.max(bound);
    }

    fn finish(&self, reason: StopReason, conflict: Option<String>) -> Solution {
        let vars = &self.built.model.vars;
        let (variables, values) = (vars.len(), vars.iter().map(|var| var.theta.len()).sum());
        let (cost, program) = match &self.best {
            Some((cost, program)) => (Some(*cost), program.clone()),
            None => (None, Assignment::default()),
        };
        let lower_bound = match (reason, cost) {
            (StopReason::Optimal, Some(cost)) => self.monitor.lower_bound.max(cost - self.tolerance),
            _ => self.monitor.lower_bound,
        };
        let reason = match reason {
            _ if cost == Some(lower_bound) => StopReason::Optimal,
            StopReason::Optimal => StopReason::Tolerance,
            _ => reason,
        };
        let gap = cost.map_or(1.0, |cost| (cost - lower_bound) as f64 / cost.max(1) as f64);
        Solution {
            rows: program.rows,
            moves: program.moves,
            cost,
            lower_bound,
            gap,
            stop_reason: reason,
            expansions: self.monitor.expansions,
            sweeps: self.monitor.sweeps,
            seconds: self.monitor.seconds(),
            variables,
            values,
            values_after_reduction: self.left,
            conflict,
        }
    }
}
