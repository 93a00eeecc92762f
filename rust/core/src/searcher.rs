//! A problem that is searched again and again: at other costs, with some rows forbidden.
//!
//! What does not depend on costs is done once: the checks, the pairwise model ([`crate::build`]), its arc
//! consistency, order and compaction. Each search leaves its messages ([`crate::messages`]), from which the next one
//! starts. The same for the problem with alike instructions folded ([`crate::fold`]), which is searched in less time.

use crate::build::{Built, build};
use crate::compact::reordered;
use crate::consistency::arc_consistency;
use crate::control::{Limits, Monitor, Tick};
use crate::fold::Fold;
use crate::messages::Messages;
use crate::model::{HALF, Model, Wipeout};
use crate::problem::Problem;
use crate::reduced::Reduced;
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
    whole: Prepared,
    folded: Option<(Fold, Prepared)>,
}

/// What the searches of a model have in common.
#[derive(Clone, Debug)]
struct Prepared {
    /// The consistent part of the model, ordered, without costs.
    base: Result<Model, Wipeout>,
    messages: Option<Messages>,
    reduced: Option<Reduced>,
}

impl Prepared {
    fn new(mut model: Model) -> Self {
        let all = 0..model.vars.len();
        let base = arc_consistency(&mut model, all, |_| {}).map(|()| reordered(model));
        Self { base, messages: None, reduced: None }
    }
}

/// What is searched for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked<'a> {
    /// A program to improve on.
    pub incumbent: Option<&'a Assignment>,
    /// Per row in the order of instructions, whether it may be used; `None`: all.
    pub allowed: Option<&'a [bool]>,
    /// Among the programs whose alike instructions are alike ([`Searcher::fold`]).
    pub folded: bool,
    /// A program that costs at most this more than the best one will do.
    pub tolerance: i64,
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
        let whole = Prepared::new(built.model.clone());
        Ok(Self { problem, total, built, whole, folded: None })
    }

    /// Prepares searches among the programs in which instructions are alike; `groups`: for each the one that it is
    /// like, which is like itself.
    ///
    /// # Errors
    /// Instructions that do not have the same rows and moves.
    pub fn fold(&mut self, groups: &[usize]) -> Result<(), ProblemError> {
        let fold = Fold::new(&self.problem, &self.built, groups)?;
        let prepared = Prepared::new(fold.model(&self.built.model));
        self.folded = Some((fold, prepared));
        Ok(())
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

    /// Finds a program of least cost among those that are asked for. Of folded ones the bound is of these alone.
    ///
    /// # Errors
    /// A broken incumbent; a wrong number of allowed rows; folded programs without [`Self::fold`].
    pub fn solve<'a>(
        &mut self,
        limits: Limits,
        asked: Asked<'_>,
        tick: &'a mut Tick<'a>,
    ) -> Result<Solution, ProblemError> {
        let mut monitor = Monitor::new(limits, tick);
        let forbidden = asked.allowed.map(|allowed| self.forbidden(allowed)).transpose()?;
        let best = match asked.incumbent {
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
        let Self { problem, total, built, whole, folded } = self;
        let (fold, Prepared { base, messages, reduced }) = match folded {
            _ if !asked.folded => (None, whole),
            Some((fold, prepared)) => (Some(&*fold), prepared),
            None => return Err(ProblemError("folded: no instructions are known to be alike".to_owned())),
        };
        let start = || priced(base, built, fold, problem, forbidden.as_deref());
        let mut search = Search::new(problem, built, fold, monitor, best, *total, asked.tolerance.max(0));
        let Ok(mut model) = start() else {
            return Ok(search.infeasible(|| conflict(built, problem, forbidden.as_deref())));
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
        let before = reduced.take();
        search.begin_with(before.as_ref());
        let found = search.run(model, start, warm, swept);
        *reduced = search.left_reduced().or(before);
        Ok(found)
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

/// The variables that `var` stands for.
fn members<'a>(fold: Option<&'a Fold>, var: &'a u32) -> &'a [u32] {
    fold.map_or(std::slice::from_ref(var), |fold| fold.members(*var as usize))
}

/// The model to search: `base` with the costs of `problem` and without forbidden rows, arc consistent.
fn priced(
    base: &Result<Model, Wipeout>,
    built: &Built,
    fold: Option<&Fold>,
    problem: &Problem,
    forbidden: Option<&[Vec<bool>]>,
) -> Result<Model, Wipeout> {
    let mut model = base.clone()?;
    let forbids = |var: u32, label: u32| {
        let one = |rows, &var: &u32| built.forbids(rows, var as usize, label as usize);
        forbidden.is_some_and(|rows| members(fold, &var).iter().any(|var| one(rows, var)))
    };
    for &(origin, label) in &model.fixed {
        if forbids(origin, label) {
            return Err(Wipeout { var: origin as usize, edge: None });
        }
        for &member in members(fold, &origin) {
            model.constant += built.costs(problem, member as usize).nth(label as usize).unwrap_or(0);
        }
    }
    let mut costs: Vec<i64> = Vec::new();
    let mut changed = Vec::new();
    for (s, var) in model.vars.iter_mut().enumerate() {
        costs.clear();
        for &member in members(fold, &var.origin) {
            if costs.is_empty() {
                costs.extend(built.costs(problem, member as usize));
            } else {
                let more = built.costs(problem, member as usize);
                costs.iter_mut().zip(more).for_each(|(cost, more)| *cost += more);
            }
        }
        for (theta, &label) in var.theta.iter_mut().zip(&var.labels) {
            if *theta >= HALF {
                continue;
            }
            *theta = costs[label as usize];
            if forbids(var.origin, label) {
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
