//! What is left, one connected component at a time.
//!
//! Components share no term: the optimum is the constant plus the sum of theirs, and so is a lower bound,
//! `bound = constant + Σ_p bound_p`. A component may thus cost `limit − (bound − bound_p)` in a program better
//! than the incumbent; a component that is solved is decided and leaves the model.

use crate::astar::{self, Outcome};
use crate::beam::beam;
use crate::compact::compact;
use crate::model::Model;
use crate::order::components;

use super::{End, Search};

/// A connected component of what is left.
struct Part {
    /// Its variables in the whole model.
    vars: Vec<usize>,
    /// With constant 0 and nothing fixed: each of its variables has several values.
    model: Model,
    /// An assignment and its cost.
    found: Option<(Vec<usize>, i64)>,
    /// Lower bound above the constant; the cost of what was found if `exact`.
    bound: i64,
    exact: bool,
}

impl Part {
    fn new(whole: &Model, vars: Vec<usize>) -> Self {
        let all: Vec<usize> = (0..vars.len()).collect();
        let mut model = compact(whole.part(&vars), &all);
        debug_assert!(model.fixed.is_empty() && model.constant == whole.constant);
        model.constant = 0;
        Self { vars, model, found: None, bound: 0, exact: false }
    }

    /// Appends its decisions.
    fn decide(&self, fixed: &mut Vec<(u32, u32)>) {
        let Some((values, _)) = &self.found else { return };
        let chosen = self.model.vars.iter().zip(values);
        fixed.extend(chosen.map(|(var, &x)| (var.origin, var.labels[x])));
    }
}

impl Search<'_, '_> {
    /// Beam search, then A* with a budget, on every connected component. `Ok`: some component was left open and
    /// `model` is what remains; the bound.
    pub(super) fn finish_components(
        &mut self,
        model: &mut Model,
        width: u64,
        budget: u64,
    ) -> Result<i64, End> {
        // A value that is the only one left is decided here, with its costs: a part knows nothing of the constant.
        while model.vars.iter().any(|var| var.living().count() == 1) {
            let all: Vec<usize> = (0..model.vars.len()).collect();
            *model = compact(std::mem::take(model), &all);
        }
        let mut parts: Vec<Part> = components(model).into_iter().map(|vars| Part::new(model, vars)).collect();
        // A layer keeps about 100 bytes per state while it lasts and 8 for good.
        let room = self.monitor.limits().memory / (200 + 16 * model.vars.len() as u64);
        let width = width.min(room).max(1) as usize;
        let mut bound = model.constant;
        for part in &mut parts {
            let beam = beam(&part.model, self.limit() - bound, width, &mut self.monitor)?;
            if beam.bound == i64::MAX {
                return Err(End::Proven);
            }
            part.exact = beam.is_exact();
            part.found = beam.best;
            part.bound = beam.bound;
            bound += part.bound;
            self.raise(bound);
        }
        let before = self.limit();
        self.offer_parts(model, &parts);
        // A better program strengthens the sweeps; A* only where the beam brought none.
        let improved = self.limit() < before;
        for index in 0..parts.len() {
            let part = &mut parts[index];
            if part.exact || improved || budget == 0 {
                continue;
            }
            if bound > self.limit() {
                return Err(End::Proven);
            }
            bound -= part.bound;
            let outcome = astar::search(&part.model, self.limit() - bound, budget, &mut self.monitor);
            self.monitor.bytes = 0;
            match outcome {
                Outcome::Solved(values, cost) => {
                    part.bound = cost;
                    part.found = Some((values, cost));
                    part.exact = true;
                }
                Outcome::Exhausted => return Err(End::Proven),
                Outcome::Budget(least) => part.bound = part.bound.max(least),
                Outcome::Stopped(reason, least) => {
                    self.raise(bound + part.bound.max(least));
                    return Err(End::Stop(reason));
                }
            }
            bound += part.bound;
            self.raise(bound);
            self.offer_parts(model, &parts);
        }
        if parts.iter().all(|part| part.exact) || bound > self.limit() {
            return Err(End::Proven);
        }
        // Decide the components that are solved; go on with the others.
        let open: Vec<usize> =
            parts.iter().filter(|part| !part.exact).flat_map(|part| part.vars.clone()).collect();
        let constant = model.constant;
        let mut rest = compact(std::mem::take(model), &open);
        rest.constant = constant;
        for part in parts.iter().filter(|part| part.exact) {
            rest.constant += part.bound;
            part.decide(&mut rest.fixed);
        }
        *model = rest;
        Ok(bound)
    }

    /// Offers the program that the parts make up, if each has one.
    fn offer_parts(&mut self, model: &Model, parts: &[Part]) {
        let costs = parts.iter().map(|part| part.found.as_ref().map(|&(_, cost)| cost));
        if let Some(cost) = costs.sum::<Option<i64>>() {
            let mut fixed = model.fixed.clone();
            for part in parts {
                part.decide(&mut fixed);
            }
            self.offer_at(model.constant + cost, &Model { fixed, ..Model::default() }, &[]);
        }
    }
}
