//! Extrapolation of messages.
//!
//! On joined variables the bound rises slowly but steadily: the messages drift in one direction for hundreds of
//! sweeps. Any messages that leave no negative term are valid ([`crate::messages`]), so the drift of a window of
//! sweeps may be continued at once: `f' = f + k (f − f_before)`, where an edge would become negative raised to
//! `f1'(c) = −min_b [f0'(b) + w(b, c)]`, `θ` and the constant recomputed from the costs. What overshoots is regained
//! by the next sweeps, or the messages as they were are kept ([`crate::solve`]).

use crate::model::{HALF, Model};

/// Messages beyond this are not continued: sums of a few must stay below [`HALF`].
const LARGE: i64 = HALF >> 4;

/// The messages of all edges of a model at some moment.
#[derive(Clone, Debug)]
pub struct Drift {
    before: Vec<[Vec<i64>; 2]>,
}

impl Drift {
    /// From those of `model`.
    pub fn from(model: &Model) -> Self {
        Self { before: model.edges.iter().map(|edge| edge.f.clone()).collect() }
    }

    /// `model`, of the same edges and classes, with messages moved on by `times` of what they have moved.
    /// `None`: a message would become too large, or a variable has no living value.
    pub fn onward(&self, model: &Model, times: i64) -> Option<Model> {
        let mut moved = model.clone();
        let mut least = Vec::new();
        for (edge, before) in moved.edges.iter_mut().zip(&self.before) {
            let now = edge.f.clone();
            for (f, before) in edge.f.iter_mut().zip(before) {
                for (f, &before) in f.iter_mut().zip(before) {
                    if *f < HALF && before < HALF {
                        let step = (*f - before).checked_mul(times).filter(|step| step.abs() < LARGE)?;
                        *f += step;
                        if f.abs() >= LARGE {
                            return None;
                        }
                    }
                }
            }
            edge.marginal(1, &mut least);
            for (f, &least) in edge.f[1].iter_mut().zip(&least) {
                if *f < HALF && least < HALF {
                    *f = (*f).max(-least);
                }
            }
            for (side, now) in now.iter().enumerate() {
                let var = &mut moved.vars[edge.ends[side] as usize];
                for (theta, &class) in var.theta.iter_mut().zip(&edge.class[side]) {
                    let class = class as usize;
                    if *theta < HALF && edge.f[side][class] < HALF {
                        *theta -= edge.f[side][class] - now[class];
                    }
                }
            }
        }
        for var in &mut moved.vars {
            let least = var.theta.iter().copied().filter(|&theta| theta < HALF).min()?;
            moved.constant += least;
            for theta in var.theta.iter_mut().filter(|theta| **theta < HALF) {
                *theta -= least;
            }
        }
        Some(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{minimum, model, ring};
    use crate::trws::Sweeper;

    fn least_terms(model: &Model) -> i64 {
        let edges = model.edges.iter().map(|edge| {
            let pairs = (0..edge.f[0].len()).flat_map(|a| (0..edge.f[1].len()).map(move |b| (a, b)));
            let living = pairs.filter(|&(a, b)| edge.f[0][a] < HALF && edge.f[1][b] < HALF);
            living.map(|(a, b)| edge.f[0][a] + edge.f[1][b] + edge.cost(0, a, b)).min().unwrap_or(0)
        });
        let unary = model.vars.iter().map(|var| var.theta.iter().copied().min().unwrap_or(0));
        edges.chain(unary).min().unwrap_or(0)
    }

    #[test]
    fn costs_stay_and_no_term_becomes_negative() {
        for seed in 1..40 {
            let mut model = ring(5, seed << 16);
            let (least, values) = minimum(&model).unwrap();
            let mut sweeper = Sweeper::default();
            let drift = Drift::from(&model);
            sweeper.sweep(&mut model, least, || true).unwrap();
            for times in [1, 2, 16, 1000] {
                let moved = drift.onward(&model, times).unwrap();
                assert_eq!(moved.evaluate(&values), least);
                assert!(moved.constant <= least);
                assert!(least_terms(&moved) >= 0);
            }
        }
    }

    #[test]
    fn messages_that_would_be_too_large_are_left() {
        let large: &[&[i64]] = &[&[0, HALF >> 5], &[HALF >> 5, 0]];
        let mut pair = model(&[&[0, HALF >> 6], &[HALF >> 6, 0]], &[(0, 1, large)]);
        let drift = Drift::from(&pair);
        Sweeper::default().sweep(&mut pair, HALF >> 2, || true).unwrap();
        assert!(drift.onward(&pair, 1 << 20).is_none());
    }
}
