//! A problem that is searched again and again: at other costs, with some rows forbidden.
//!
//! What does not depend on costs is done once: the checks, the pairwise model ([`crate::build`]), its arc
//! consistency, order and compaction. Each search leaves its messages ([`crate::messages`]), from which the next one
//! starts.

use crate::build::{Built, build};
use crate::compact::reordered;
use crate::consistency::arc_consistency;
use crate::control::{Limits, Monitor, Tick};
use crate::messages::Messages;
use crate::model::{HALF, Model, Wipeout};
use crate::problem::Problem;
use crate::solution::{Assignment, Solution};
use crate::solve::Search;
use crate::validate::{ProblemError, total_cost, validate};
use crate::verify::verify;

/// A model is narrow if one in so many values lives, or fewer.
const NARROW: usize = 4;

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct Searcher {
    problem: Problem,
    /// No program costs more.
    total: i64,
    built: Built,
    /// The consistent part of the model, ordered, without costs.
    base: Result<Model, Wipeout>,
    messages: Option<Messages>,
}

impl Searcher {
    /// Prepares `problem`.
    ///
    /// # Errors
    /// A malformed problem.
    pub fn new(problem: Problem) -> Result<Self, ProblemError> {
        let checked = validate(&problem)?;
        let built = build(&checked)?;
        let total = checked.total_cost;
        let mut model = built.model.clone();
        let base = arc_consistency(&mut model, 0..built.model.vars.len(), |_| {}).map(|()| reordered(model));
        Ok(Self { problem, total, built, base, messages: None })
    }

    /// The problem at its present costs.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Replaces all costs: of the rows in the order of instructions, of the moves and of the prices of holding
    /// in the order of tensors.
    ///
    /// # Errors
    /// Another number of costs than the problem has, a negative one, or too large a sum; the costs are then
    /// undefined, but may be set again.
    pub fn set_costs(&mut self, rows: &[i64], moves: &[i64], keep: &[i64]) -> Result<(), ProblemError> {
        let counted = [
            ("rows", rows.len(), self.problem.instructions.iter().map(|i| i.rows.len()).sum::<usize>()),
            ("moves", moves.len(), self.problem.tensors.iter().map(|t| t.moves.len()).sum()),
            ("keep", keep.len(), self.problem.tensors.iter().map(|t| t.keep.len()).sum()),
        ];
        for (what, given, wanted) in counted {
            if given != wanted {
                return Err(ProblemError(format!("{what}: {given} costs given, the problem has {wanted}")));
            }
        }
        let cells = self.problem.instructions.iter_mut().flat_map(|i| &mut i.rows).map(|row| &mut row.cost);
        cells.zip(rows).for_each(|(cell, &cost)| *cell = cost);
        let cells = self.problem.tensors.iter_mut().flat_map(|t| &mut t.moves).map(|mv| &mut mv.3);
        cells.zip(moves).for_each(|(cell, &cost)| *cell = cost);
        let cells = self.problem.tensors.iter_mut().flat_map(|t| &mut t.keep).map(|keep| &mut keep.1);
        cells.zip(keep).for_each(|(cell, &cost)| *cell = cost);
        self.total = total_cost(&self.problem)?;
        self.built.price(self.total);
        Ok(())
    }

    /// Finds a program of least cost among those that use allowed rows only (`allowed`: per row in the order of
    /// instructions; `None`: all). `incumbent` is a program to improve on.
    ///
    /// # Errors
    /// A broken incumbent; a wrong number of allowed rows.
    pub fn solve<'a>(
        &mut self,
        limits: Limits,
        incumbent: Option<&Assignment>,
        allowed: Option<&[bool]>,
        tick: &'a mut Tick<'a>,
    ) -> Result<Solution, ProblemError> {
        let mut monitor = Monitor::new(limits, tick);
        let forbidden = allowed.map(|allowed| self.forbidden(allowed)).transpose()?;
        let best = match incumbent {
            None => None,
            Some(assignment) => {
                let cost = verify(&self.problem, assignment)
                    .map_err(|why| ProblemError(format!("incumbent: {why}")))?;
                if forbidden.as_ref().is_some_and(|forbidden| {
                    assignment.rows.iter().zip(forbidden).any(|(&row, rows)| rows[row])
                }) {
                    return Err(ProblemError("incumbent: uses a row that is not allowed".to_owned()));
                }
                monitor.cost = Some(cost);
                Some((cost, assignment.clone()))
            }
        };
        let Self { problem, total, built, base, messages } = self;
        let start = || priced(base, built, problem, forbidden.as_deref());
        let mut search = Search::new(problem, built, monitor, best, *total);
        let Ok(mut model) = start() else {
            let conflict = conflict(built, problem, forbidden.as_deref());
            return Ok(search.infeasible(conflict));
        };
        if forbidden.is_some() && is_narrow(&model) {
            return Ok(search.run_narrow(model));
        }
        let shift = built.shift;
        let before = messages.as_ref().filter(|messages| messages.fit(shift));
        if let Some(before) = before {
            before.load(&mut model, shift);
        }
        let warm = before.is_some();
        // What a part of the rows leaves is no start for all of them.
        let keep = forbidden.is_none() || messages.is_none();
        let swept = |model: &Model| {
            if keep {
                *messages = Some(Messages::of(model, shift));
            }
        };
        Ok(search.run(model, start, warm, swept))
    }

    /// Per instruction and row: not allowed.
    fn forbidden(&self, allowed: &[bool]) -> Result<Vec<Vec<bool>>, ProblemError> {
        let count: usize = self.problem.instructions.iter().map(|i| i.rows.len()).sum();
        if allowed.len() != count {
            return Err(ProblemError(format!(
                "allowed: {} rows given, the problem has {count}",
                allowed.len()
            )));
        }
        let mut rest = allowed.iter();
        let taken = |count: usize| rest.by_ref().take(count).map(|allowed| !allowed).collect();
        Ok(self.problem.instructions.iter().map(|i| i.rows.len()).map(taken).collect())
    }
}

/// Whether so few values live that sweeps over the whole model cost more than reductions of what is left.
fn is_narrow(model: &Model) -> bool {
    let values: usize = model.vars.iter().map(|var| var.theta.len()).sum();
    model.living_values() * NARROW <= values
}

/// The model to search: `base` with the costs of `problem` and without forbidden rows, arc consistent.
fn priced(
    base: &Result<Model, Wipeout>,
    built: &Built,
    problem: &Problem,
    forbidden: Option<&[Vec<bool>]>,
) -> Result<Model, Wipeout> {
    let mut model = base.clone()?;
    for &(origin, label) in &model.fixed {
        if forbidden.is_some_and(|rows| built.forbids(rows, origin as usize, label as usize)) {
            return Err(Wipeout { var: origin as usize, edge: None });
        }
        let cost = built.costs(problem, origin as usize).nth(label as usize);
        model.constant += cost.unwrap_or(0);
    }
    let mut costs: Vec<i64> = Vec::new();
    let mut changed = Vec::new();
    for (s, var) in model.vars.iter_mut().enumerate() {
        let origin = var.origin as usize;
        costs.clear();
        costs.extend(built.costs(problem, origin));
        for (theta, &label) in var.theta.iter_mut().zip(&var.labels) {
            if *theta >= HALF {
                continue;
            }
            *theta = costs[label as usize];
            if forbidden.is_some_and(|rows| built.forbids(rows, origin, label as usize)) {
                *theta = crate::model::DEAD;
                changed.push(s);
            }
        }
    }
    if !changed.is_empty() {
        changed.dedup();
        for &s in &changed {
            model.refresh(s, |_| {});
        }
        let all = 0..model.vars.len();
        arc_consistency(&mut model, all, |_| {})?;
    }
    Ok(model)
}

/// Why there is no program, in words: from the model as built, whose edges have reasons.
fn conflict(built: &Built, problem: &Problem, forbidden: Option<&[Vec<bool>]>) -> String {
    let mut model = built.model.clone();
    for var in 0..model.vars.len() {
        for label in 0..model.vars[var].theta.len() {
            if forbidden.is_some_and(|rows| built.forbids(rows, var, label)) {
                model.kill(var, label);
            }
        }
        model.refresh(var, |_| {});
    }
    let all = 0..model.vars.len();
    let wipeout = arc_consistency(&mut model, all, |_| {}).err();
    wipeout.map_or_else(String::new, |wipeout| built.conflict(problem, wipeout))
}
