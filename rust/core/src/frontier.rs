//! Appending one variable after the other: what a partial program keeps and what a further value costs.
//!
//! Variables are assigned in model order. A partial program of the first `k` variables is ranked by
//!
//! `f = Σ_{s<k} θ_s(x_s) + Σ_{edges inside} (f + f + w) + Σ_{edges across} min_b [f_es(c) + f_et(b) + w(c, b)]`.
//!
//! All terms are non-negative and a marginal is at most the cost that replaces it, so `f` never
//! decreases along a path: it is an admissible and consistent bound. Two partial programs with the same
//! classes on all edges across the cut have the same completions, so only the cheaper is needed (HAP
//! Fig. 10, lines 9-14).
//!
//! A partial program is stored as one representative value per open variable: the first of the values
//! with the same classes on the edges still open.

use crate::intern::Interner;
use crate::model::{HALF, Model};

/// An edge to an earlier variable.
struct Back<'a> {
    /// Slot of the earlier variable in the state before this step.
    slot: usize,
    /// Class of the earlier variable's value.
    slot_class: &'a [u16],
    /// Class of the new variable's value.
    class: &'a [u16],
    /// `[earlier class][new class]`: edge cost less the marginal counted before.
    extra: Vec<i64>,
    columns: usize,
}

/// Everything needed to append one variable.
pub struct Step<'a> {
    base: Vec<i64>,
    back: Vec<Back<'a>>,
    /// Per slot after the step that an earlier variable has: the slot before, and the representative of each value
    /// where an edge has closed (else the state has it already).
    kept: Vec<(usize, Option<Vec<u16>>)>,
    /// The representative of each value of the new variable, in the last slot; `None`: it is not open.
    new: Option<Vec<u16>>,
}

impl Step<'_> {
    /// The state after appending value `x` to `state`.
    pub fn append(&self, state: &[u16], x: usize, key: &mut Vec<u16>) {
        self.carry(state, key);
        key.extend(self.new.as_ref().map(|representative| representative[x]));
    }

    /// [`Self::append`] for all values alike, but for the value itself where it stays open ([`Self::representative`]).
    pub fn carry(&self, state: &[u16], key: &mut Vec<u16>) {
        key.clear();
        key.extend(self.kept.iter().map(|(source, representative)| {
            let value = state[*source];
            representative.as_ref().map_or(value, |representative| representative[value as usize])
        }));
    }

    /// What stands, behind all others, for each value of the new variable in the states after the step; `None`: it
    /// is not open.
    pub fn representative(&self) -> Option<&[u16]> {
        self.new.as_deref()
    }

    /// Number of open variables after the step.
    pub fn width(&self) -> usize {
        self.kept.len() + usize::from(self.new.is_some())
    }

    /// Cost of appending each value of the new variable to a state.
    pub fn costs(&self, state: &[u16], costs: &mut Vec<i64>) {
        costs.clear();
        costs.extend_from_slice(&self.base);
        for back in &self.back {
            let class = back.slot_class[state[back.slot] as usize] as usize;
            let extra = &back.extra[class * back.columns..(class + 1) * back.columns];
            for (cost, &class) in costs.iter_mut().zip(back.class) {
                *cost = (*cost + extra[class as usize]).min(HALF);
            }
        }
    }
}

/// The steps of a model, in its order.
pub fn plan(model: &Model) -> Vec<Step<'_>> {
    let mut live: Vec<usize> = Vec::new();
    let mut marginal = Vec::new();
    let mut steps = Vec::with_capacity(model.vars.len());
    for (s, var) in model.vars.iter().enumerate() {
        let mut base = var.theta.clone();
        let mut back = Vec::new();
        for &(e, side) in &model.incident[s] {
            let (edge, side) = (&model.edges[e as usize], side as usize);
            let other = edge.ends[1 - side] as usize;
            if other > s {
                edge.marginal(side, &mut marginal);
                for (base, &class) in base.iter_mut().zip(&edge.class[side]) {
                    let class = class as usize;
                    *base = (*base + edge.f[side][class] + marginal[class].min(HALF)).min(HALF);
                }
                continue;
            }
            let columns = edge.f[side].len();
            edge.marginal(1 - side, &mut marginal);
            let mut extra = Vec::with_capacity(marginal.len() * columns);
            for (a, &least) in marginal.iter().enumerate() {
                let costs = (0..columns).map(|b| edge.f[side][b] + edge.cost(1 - side, a, b));
                extra.extend(
                    costs.map(|cost| if least >= HALF || cost >= HALF { HALF } else { cost - least }),
                );
            }
            let slot = live.iter().position(|&live| live == other).unwrap_or(0);
            let (class, slot_class) = (&edge.class[side][..], &edge.class[1 - side][..]);
            back.push(Back { slot, slot_class, class, extra, columns });
        }
        let mut next = Vec::new();
        let mut kept = Vec::new();
        for (slot, &open) in live.iter().enumerate() {
            if !back.iter().any(|back: &Back| back.slot == slot) {
                next.push(open);
                kept.push((slot, None));
            } else if let Some(representative) = representatives(model, open, s) {
                next.push(open);
                kept.push((slot, Some(representative)));
            }
        }
        let new = representatives(model, s, s);
        next.extend(new.as_ref().map(|_| s));
        live = next;
        steps.push(Step { base, back, kept, new });
    }
    steps
}

/// For each value of `var` the first value with the same classes on its edges to variables after
/// `last`; `None` if there are no such edges.
fn representatives(model: &Model, var: usize, last: usize) -> Option<Vec<u16>> {
    let open: Vec<&[u16]> = model.incident[var]
        .iter()
        .map(|&(e, side)| (&model.edges[e as usize], side as usize))
        .filter(|(edge, side)| edge.ends[1 - side] as usize > last)
        .map(|(edge, side)| &edge.class[side][..])
        .collect();
    if open.is_empty() {
        return None;
    }
    let mut kinds = Interner::new(open.len());
    let mut first: Vec<u16> = Vec::new();
    let mut key = Vec::with_capacity(open.len());
    let representative = |x: usize| {
        key.clear();
        key.extend(open.iter().map(|class| class[x]));
        let kind = kinds.intern(&key);
        if kind == first.len() {
            first.push(x as u16);
        }
        first[kind]
    };
    Some((0..model.vars[var].theta.len()).map(representative).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ring;

    #[test]
    fn a_ring_keeps_two_variables_open_and_its_costs_add_up() {
        let mut ring = ring(5, 3);
        crate::trws::sweep(&mut ring, 1000, || true).unwrap();
        let steps = plan(&ring);
        assert_eq!(steps.iter().map(Step::width).collect::<Vec<_>>(), [1, 2, 2, 2, 0]);
        let values = [0, 1, 0, 1, 2];
        let (mut state, mut next, mut costs, mut f) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for (step, &x) in steps.iter().zip(&values) {
            step.costs(&state, &mut costs);
            assert!(costs[x] >= 0);
            f += costs[x];
            step.append(&state, x, &mut next);
            std::mem::swap(&mut state, &mut next);
        }
        assert_eq!(ring.constant + f, ring.evaluate(&values));
    }
}
