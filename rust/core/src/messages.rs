//! Messages of one search as the start of the next.
//!
//! The messages `f` on the edges of a model reparametrise whatever unary costs it has:
//!
//! `Σ_s c_s(x_s) = constant + Σ_s θ_s(x_s) + Σ_e [f_e0 + f_e1]` with `θ_s(x) = c_s(x) − Σ_e f_es(class(x)) − m_s`
//!
//! and `constant = Σ_s m_s`, `m_s` the least value of what is left for `s`. If the edges' terms are
//! non-negative, so are all, and the constant is a lower bound for the *new* costs, whatever the messages were made
//! for. Messages from similar costs (other sharding ratios, other prices of memory, some values forbidden) start the
//! sweeps close to where they would end.
//!
//! A class that had died has no message; it gets the least one that keeps its edge non-negative,
//! `f_es(c) = −min_b [f_et(b) + w(c, b)]`, as a sweep that pulls would leave it.

use crate::model::{Edge, HALF, Model, Var};

/// By so many bits messages may be scaled up.
const MOST_UP: u32 = 2;

/// The messages on all edges of a model, at a scale of costs.
#[derive(Clone, Debug)]
pub struct Messages {
    f: Vec<[Vec<i64>; 2]>,
    shift: u32,
}

impl Messages {
    /// Those of `model`, whose costs are multiplied by `2^shift`.
    pub fn of(model: &Model, shift: u32) -> Self {
        Self { f: model.edges.iter().map(|edge| edge.f.clone()).collect(), shift }
    }

    /// Whether they can start a search at `2^shift`. Costs that are smaller by orders of magnitude have a larger
    /// scale, at which these messages would be too large for the arithmetic, and worth nothing.
    pub fn fit(&self, shift: u32) -> bool {
        shift <= self.shift + MOST_UP
    }

    /// Moves costs along the edges of `model`, which has the edges of the model that these messages are of, none of
    /// them with messages yet, and living classes wherever it has living values.
    pub fn load(&self, model: &mut Model, shift: u32) {
        for (edge, f) in model.edges.iter_mut().zip(&self.f) {
            let dead = [0, 1].map(|side| f[side].iter().map(|&f| f >= HALF).collect::<Vec<_>>());
            for (side, (into, stored)) in edge.f.iter_mut().zip(f).enumerate() {
                for (message, &stored) in into.iter_mut().zip(stored) {
                    *message = rescaled(stored, self.shift, shift, side == 0);
                }
            }
            for side in 0..2 {
                for c in 0..dead[side].len() {
                    if !dead[side][c] {
                        continue;
                    }
                    // Side 0 against the messages there are; side 1 against all.
                    let others = (0..dead[1 - side].len()).filter(|&b| side == 1 || !dead[1][b]);
                    let least = others.map(|b| edge.f[1 - side][b] + edge.cost(side, c, b)).min();
                    edge.f[side][c] = least.filter(|&least| least < HALF).map_or(0, |least| -least);
                }
            }
            let none = [0, 1].map(|side| vec![0; edge.f[side].len()]);
            moved(edge, &none, &mut model.vars);
        }
        normalise(model);
        for s in 0..model.vars.len() {
            model.refresh(s, |_| {});
        }
    }
}

/// Takes what the messages of `edge` have grown by since they were `before` from the costs of its ends.
pub fn moved(edge: &Edge, before: &[Vec<i64>; 2], vars: &mut [Var]) {
    for side in 0..2 {
        let var = &mut vars[edge.ends[side] as usize];
        for (theta, &class) in var.theta.iter_mut().zip(&edge.class[side]) {
            let class = class as usize;
            if *theta < HALF && edge.f[side][class] < HALF {
                *theta -= edge.f[side][class] - before[side][class];
            }
        }
    }
}

/// Moves the least cost of each variable to the constant; false if a variable has no living value, which stops it.
pub fn normalise(model: &mut Model) -> bool {
    for var in &mut model.vars {
        let Some(least) = var.theta.iter().copied().filter(|&theta| theta < HALF).min() else {
            return false;
        };
        model.constant += least;
        for theta in var.theta.iter_mut().filter(|theta| **theta < HALF) {
            *theta -= least;
        }
    }
    true
}

/// A message at another scale: of two whose sum is not negative one is rounded down and one up, so that the sum of
/// the results is not either.
fn rescaled(message: i64, from: u32, to: u32, down: bool) -> i64 {
    if to >= from {
        return message << (to - from);
    }
    let by = from - to;
    if down { message >> by } else { -(-message >> by) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{least_terms, minimum, model, ring};
    use crate::trws::sweep;

    #[test]
    fn other_costs_start_with_a_bound_and_keep_every_total() {
        for limit in [i64::MAX >> 4, minimum(&ring(7, 1 << 20)).unwrap().0] {
            let mut swept = ring(7, 1 << 20);
            for _ in 0..20 {
                sweep(&mut swept, limit, || true).unwrap();
            }
            let messages = Messages::of(&swept, 0);
            for shift in 0..3 {
                let mut changed = ring(7, 1 << 20);
                for (s, var) in changed.vars.iter_mut().enumerate() {
                    for (x, theta) in var.theta.iter_mut().enumerate() {
                        *theta = (*theta << shift) + ((s * 37 + x * 11) % 50) as i64;
                    }
                }
                for edge in &mut changed.edges {
                    let cost = |&cost: &i64| if cost < HALF { cost << shift } else { cost };
                    for side in 0..2 {
                        edge.w[side] = edge.w[side].iter().map(cost).collect();
                    }
                }
                let (least, values) = minimum(&changed).unwrap();
                // The stored messages are for w at scale 0; at a larger scale they still fit.
                messages.load(&mut changed, shift);
                assert!(least_terms(&changed) >= 0, "{shift}");
                assert_eq!(changed.evaluate(&values), least);
                assert!(changed.constant <= least);
            }
        }
    }

    #[test]
    fn rounding_keeps_edges_non_negative() {
        for (a, b) in [(-7, 7), (-8, 9), (5, -5), (-1, 1)] {
            assert!(rescaled(a, 3, 1, true) + rescaled(b, 3, 1, false) >= 0);
        }
        assert_eq!(rescaled(-3, 1, 3, true), -12);
    }

    #[test]
    fn a_chain_starts_at_its_optimum() {
        let differ: &[&[i64]] = &[&[-1, 0], &[0, -1]];
        let chain = || model(&[&[0, 3], &[0, 5], &[0, 4]], &[(0, 1, differ), (1, 2, differ)]);
        let mut swept = chain();
        sweep(&mut swept, 100, || true).unwrap();
        let mut again = chain();
        Messages::of(&swept, 0).load(&mut again, 0);
        assert_eq!(again.constant, 5);
    }
}
