//! Extrapolation of messages.
//!
//! On joined variables the bound rises slowly but steadily: the messages drift in one direction for hundreds of
//! sweeps. Any messages that leave no negative term are valid ([`crate::messages`]), so the drift of a window of
//! sweeps may be continued at once: `f' = f + k (f − f_before)`, where an edge would become negative raised to
//! `f1'(c) = −min_b [f0'(b) + w(b, c)]`, `θ` and the constant recomputed from the costs. What overshoots is regained
//! by the next sweeps, or the messages as they were are kept ([`crate::solve`]).

use crate::messages::{moved, normalise};
use crate::model::{HALF, Model};

/// Messages beyond this are not continued: sums of a few must stay below [`HALF`].
const LARGE: i64 = HALF >> 4;

/// Messages, unary costs and constant of a model at some moment: what sweeps change.
#[derive(Clone, Debug)]
pub struct Moment {
    f: Vec<i64>,
    theta: Vec<i64>,
    constant: i64,
}

impl Moment {
    /// That of `model` now.
    pub fn of(model: &Model) -> Self {
        let f = model.edges.iter().flat_map(|edge| &edge.f).flatten().copied().collect();
        let theta = model.vars.iter().flat_map(|var| &var.theta).copied().collect();
        Self { f, theta, constant: model.constant }
    }

    /// The lower bound.
    pub fn bound(&self) -> i64 {
        self.constant
    }

    /// Puts `model`, which has the edges and classes that it had then, back to how it was.
    pub fn restore(&self, model: &mut Model) {
        let mut rest = &self.f[..];
        for f in model.edges.iter_mut().flat_map(|edge| &mut edge.f) {
            let (own, others) = rest.split_at(f.len());
            f.copy_from_slice(own);
            rest = others;
        }
        let mut rest = &self.theta[..];
        for var in &mut model.vars {
            let (own, others) = rest.split_at(var.theta.len());
            var.theta.copy_from_slice(own);
            rest = others;
        }
        model.constant = self.constant;
    }

    /// Moves the messages of `model`, of the same edges and classes, on by `times` of what they have moved since.
    /// False: a message would become too large, or a variable has no living value; the model is to be restored then.
    pub fn onward(&self, model: &mut Model, times: i64) -> bool {
        let mut rest = &self.f[..];
        let mut now = [Vec::new(), Vec::new()];
        let mut least = Vec::new();
        for edge in &mut model.edges {
            for (f, now) in edge.f.iter_mut().zip(&mut now) {
                now.clear();
                now.extend_from_slice(f);
                let (before, others) = rest.split_at(f.len());
                rest = others;
                for (f, &before) in f.iter_mut().zip(before) {
                    if *f < HALF && before < HALF {
                        let step = (*f - before).checked_mul(times).filter(|step| step.abs() < LARGE);
                        let Some(step) = step else { return false };
                        *f += step;
                        if f.abs() >= LARGE {
                            return false;
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
            moved(edge, &now, &mut model.vars);
        }
        normalise(model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{least_terms, minimum, model, ring};
    use crate::trws::sweep;

    #[test]
    fn costs_stay_and_no_term_becomes_negative() {
        for seed in 1..40 {
            let mut model = ring(5, seed << 16);
            let (least, values) = minimum(&model).unwrap();
            let before = Moment::of(&model);
            sweep(&mut model, least, || true).unwrap();
            let (now, bound) = (Moment::of(&model), model.constant);
            for times in [1, 2, 16, 1000] {
                assert!(before.onward(&mut model, times));
                assert_eq!(model.evaluate(&values), least);
                assert!(model.constant <= least);
                assert!(least_terms(&model) >= 0);
                now.restore(&mut model);
                assert_eq!((model.constant, model.evaluate(&values)), (bound, least));
            }
        }
    }

    #[test]
    fn messages_that_would_be_too_large_are_left() {
        let large: &[&[i64]] = &[&[0, HALF >> 5], &[HALF >> 5, 0]];
        let mut pair = model(&[&[0, HALF >> 6], &[HALF >> 6, 0]], &[(0, 1, large)]);
        let before = Moment::of(&pair);
        sweep(&mut pair, HALF >> 2, || true).unwrap();
        let now = Moment::of(&pair);
        assert!(!before.onward(&mut pair, 1 << 20));
        now.restore(&mut pair);
        assert_eq!(pair.edges[0].w[0][1], HALF >> 5);
        assert!(least_terms(&pair) >= 0);
    }
}
