//! Messages on a reduced model as the start of the next search.
//!
//! Where the bound of the whole model is loose, most of a search's sweeps are over what reductions and eliminations
//! leave of it, and the messages of [`crate::messages`], which are on the edges of the whole model, say nothing of
//! that. Which values and variables are left depends on the costs, so that messages on a reduced model are known by
//! the variables and the labels that they are between. Of an edge that the other model has too, each class takes the
//! least message of its values; a class of which nothing is known takes the least that keeps the edge non-negative.
//! Any messages are valid ([`crate::messages`]); how good these are shows only after a few sweeps.

use rustc_hash::FxHashMap;

use crate::messages::{moved, normalise};
use crate::model::{Edge, HALF, Model, Var};

/// An edge's messages, by label on each side, ascending.
type Sides = [Vec<(u32, i64)>; 2];

/// Nothing is known of a class.
const UNKNOWN: i64 = i64::MAX;

/// Messages on the edges of a reduced model, at a scale of costs.
#[derive(Clone, Debug)]
pub struct Reduced {
    /// By the origins of the two variables, ascending.
    edges: FxHashMap<[u32; 2], Sides>,
    shift: u32,
}

impl Reduced {
    /// Those of `model`, whose costs are multiplied by `2^shift`.
    pub fn of(model: &Model, shift: u32) -> Self {
        let edges = model.edges.iter().map(|edge| {
            let (origins, sides) = sorted(edge, &model.vars);
            let [one, other] = sides.map(|side| labelled(edge, side, &model.vars));
            (origins, [one, other])
        });
        Self { edges: edges.collect(), shift }
    }

    /// Moves costs along those edges of `model` that are known; whether there are any, at this scale.
    pub fn load(&self, model: &mut Model, shift: u32) -> bool {
        if shift != self.shift {
            return false;
        }
        let mut any = false;
        for edge in &mut model.edges {
            let (origins, sides) = sorted(edge, &model.vars);
            let Some(stored) = self.edges.get(&origins) else { continue };
            any = true;
            let before = edge.f.clone();
            let mut known = [Vec::new(), Vec::new()];
            for (&side, stored) in sides.iter().zip(stored) {
                known[side] = by_class(edge, side, &model.vars, stored);
                for (message, &stored) in edge.f[side].iter_mut().zip(&known[side]) {
                    if *message < HALF && stored != UNKNOWN {
                        *message = stored;
                    }
                }
            }
            complete(edge, &known);
            moved(edge, &before, &mut model.vars);
        }
        any && normalise(model)
    }
}

/// The origins of an edge's ends, ascending, and the side that each is on.
fn sorted(edge: &Edge, vars: &[Var]) -> ([u32; 2], [usize; 2]) {
    let [a, b] = edge.ends.map(|end| vars[end as usize].origin);
    if a <= b { ([a, b], [0, 1]) } else { ([b, a], [1, 0]) }
}

/// The messages of a side, by label.
fn labelled(edge: &Edge, side: usize, vars: &[Var]) -> Vec<(u32, i64)> {
    let var = &vars[edge.ends[side] as usize];
    let messages = var.labels.iter().zip(&edge.class[side]).zip(&var.theta);
    let mut found: Vec<(u32, i64)> = messages
        .map(|((&label, &class), &theta)| (label, edge.f[side][class as usize], theta))
        .filter(|&(_, message, theta)| message < HALF && theta < HALF)
        .map(|(label, message, _)| (label, message))
        .collect();
    found.sort_unstable();
    found
}

/// For each class of a side the least of its values' messages.
fn by_class(edge: &Edge, side: usize, vars: &[Var], stored: &[(u32, i64)]) -> Vec<i64> {
    let mut found = vec![UNKNOWN; edge.f[side].len()];
    for (&label, &class) in vars[edge.ends[side] as usize].labels.iter().zip(&edge.class[side]) {
        if let Ok(place) = stored.binary_search_by_key(&label, |&(label, _)| label) {
            let least = &mut found[class as usize];
            *least = (*least).min(stored[place].1);
        }
    }
    found
}

/// Gives the classes of which nothing is known the least messages that keep the edge non-negative, and raises those
/// of side 1 that do not.
fn complete(edge: &mut Edge, known: &[Vec<i64>; 2]) {
    for side in 0..2 {
        for class in 0..known[side].len() {
            if edge.f[side][class] >= HALF {
                continue;
            }
            // Side 0 against the messages that are known; side 1 against all.
            let others = (0..known[1 - side].len()).filter(|&b| side == 1 || known[1][b] != UNKNOWN);
            let sums = others.map(|b| edge.f[1 - side][b].min(HALF) + edge.cost(side, class, b));
            let Some(least) = sums.min().filter(|&least| least < HALF) else { continue };
            if known[side][class] == UNKNOWN || (side == 1 && edge.f[1][class] < -least) {
                edge.f[side][class] = -least;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compact::compact;
    use crate::testing::{least_terms, minimum, ring};
    use crate::trws::sweep;

    fn swept(seed: i64, sweeps: usize) -> Model {
        let mut model = ring(7, seed);
        (0..sweeps).for_each(|_| assert!(sweep(&mut model, i64::MAX >> 4, || true).unwrap()));
        model
    }

    #[test]
    fn the_same_model_starts_where_the_last_one_ended() {
        let swept = swept(1 << 20, 20);
        let mut again = ring(7, 1 << 20);
        assert!(Reduced::of(&swept, 0).load(&mut again, 0));
        assert_eq!(again.constant, swept.constant);
    }

    #[test]
    fn other_costs_values_and_orders_keep_every_total() {
        for seed in 1..60 {
            let reduced = Reduced::of(&swept(seed << 16, 10), 0);
            let mut changed = ring(7, seed << 16);
            for (s, var) in changed.vars.iter_mut().enumerate() {
                for (x, theta) in var.theta.iter_mut().enumerate() {
                    *theta += ((s * 37 + x * 11) % 50) as i64;
                }
            }
            // Another order, and some variables without one of their values.
            let order: Vec<usize> = (0..7).map(|s| (s * 3 + seed as usize) % 7).collect();
            for s in (0..7).filter(|s| (s + seed as usize).is_multiple_of(3)) {
                changed.kill(s, seed as usize % 2);
                changed.refresh(s, |_| {});
            }
            let mut changed = compact(changed, &order);
            if changed.vars.is_empty() {
                continue;
            }
            let (least, values) = minimum(&changed).unwrap();
            reduced.load(&mut changed, 0);
            assert!(least_terms(&changed) >= 0);
            assert_eq!(changed.evaluate(&values), least);
            assert!(changed.constant <= least);
        }
    }

    #[test]
    fn another_scale_is_no_start() {
        let mut again = ring(7, 1 << 20);
        assert!(!Reduced::of(&swept(1 << 20, 20), 1).load(&mut again, 0));
        assert_eq!(again.constant, ring(7, 1 << 20).constant);
    }
}
