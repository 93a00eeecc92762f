//! Sequential tree-reweighted message passing (TRW-S: Kolmogorov 2006; in the formulation of SRMP,
//! Kolmogorov 2015), in integers.
//!
//! One half-sweep visits the variables in order (or in reverse). At variable `s`:
//! 1. *pull*: from every edge `e` at `s`, `δ(c) = f_es(c) + min_b [f_et(b) + w(c, b)]` moves to `θ_s`;
//! 2. *normalise*: `m = min θ_s` moves to `constant`;
//! 3. *fix by reduced cost*: a value with `constant + θ_s(x) > limit` cannot be part of a program
//!    better than the incumbent and dies;
//! 4. *push*: of what is left, a share `1/n` goes to each edge ahead, `n = max(#ahead, #behind)`,
//!    class by class: `f_es(c) += floor(min_{x in c} θ_s(x) / n')`, `n'` counting down, so that the
//!    next edge shares what the rounding kept back.
//!
//! Every step moves cost without creating any and leaves all terms non-negative, so `constant` is a
//! lower bound after every step and never falls; no rounding argument is needed.

use crate::model::{DEAD, HALF, Model, Wipeout};

/// Entries of tables visited before the clock is looked at.
const WORK_BETWEEN_LOOKS: usize = 1 << 22;

/// Direction of a half-sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Ascending variables; pushes to later ones.
    Forward,
    /// Descending variables; pushes to earlier ones.
    Backward,
}

/// Working memory of the sweeps.
#[derive(Debug, Default)]
pub struct Sweeper {
    delta: Vec<i64>,
    least: Vec<i64>,
}

impl Sweeper {
    /// A forward and a backward half-sweep; false if `go_on`, asked now and then, said no (the bound is one even
    /// so).
    ///
    /// # Errors
    /// A variable without living values: no assignment costs at most `limit`.
    pub fn sweep(
        &mut self,
        model: &mut Model,
        limit: i64,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<bool, Wipeout> {
        Ok(self.half_sweep(model, limit, Direction::Forward, &mut go_on)?
            && self.half_sweep(model, limit, Direction::Backward, &mut go_on)?)
    }

    /// One half-sweep.
    ///
    /// # Errors
    /// As [`Self::sweep`].
    pub fn half_sweep(
        &mut self,
        model: &mut Model,
        limit: i64,
        direction: Direction,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<bool, Wipeout> {
        let count = model.vars.len();
        let mut work = 0;
        for step in 0..count {
            let var = if direction == Direction::Forward { step } else { count - 1 - step };
            self.visit(model, var, limit, direction)?;
            let entries = |&(e, _): &(u32, u8)| model.edges[e as usize].w[0].len();
            work += model.incident[var].iter().map(entries).sum::<usize>();
            if work > WORK_BETWEEN_LOOKS {
                work = 0;
                if !go_on() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn visit(
        &mut self,
        model: &mut Model,
        s: usize,
        limit: i64,
        direction: Direction,
    ) -> Result<(), Wipeout> {
        let Model { vars, edges, incident, constant, .. } = model;
        let theta = &mut vars[s].theta[..];
        let mut ahead = 0;
        for &(e, side) in &incident[s] {
            let (edge, side) = (&mut edges[e as usize], side as usize);
            ahead += usize::from((edge.ends[1 - side] as usize > s) == (direction == Direction::Forward));
            edge.marginal(side, &mut self.delta);
            for (delta, message) in self.delta.iter_mut().zip(&mut edge.f[side]) {
                if *message >= HALF || *delta >= HALF {
                    *message = DEAD;
                    *delta = DEAD;
                } else {
                    let least = *delta;
                    *delta += *message;
                    *message = -least;
                }
            }
            for (theta, &class) in theta.iter_mut().zip(&edge.class[side]) {
                *theta = (*theta + self.delta[class as usize]).min(DEAD);
            }
        }
        let least = theta.iter().copied().min().unwrap_or(0);
        if least >= HALF {
            return Err(Wipeout { var: s, edge: None });
        }
        *constant += least;
        let room = limit - *constant;
        for theta in theta.iter_mut() {
            *theta -= least;
            if *theta > room {
                *theta = DEAD;
            }
        }
        if room < 0 {
            return Err(Wipeout { var: s, edge: None });
        }
        let behind = incident[s].len() - ahead;
        let mut share = ahead.max(behind) as i64;
        for &(e, side) in &incident[s] {
            let (edge, side) = (&mut edges[e as usize], side as usize);
            if (edge.ends[1 - side] as usize > s) != (direction == Direction::Forward) {
                continue;
            }
            self.least.clear();
            self.least.resize(edge.f[side].len(), DEAD);
            for (&theta, &class) in theta.iter().zip(&edge.class[side]) {
                let least = &mut self.least[class as usize];
                *least = (*least).min(theta);
            }
            for (least, message) in self.least.iter_mut().zip(&mut edge.f[side]) {
                if *least >= HALF {
                    *message = DEAD;
                    *least = 0;
                } else {
                    *least /= share;
                    *message += *least;
                }
            }
            for (theta, &class) in theta.iter_mut().zip(&edge.class[side]) {
                if *theta < HALF {
                    *theta -= self.least[class as usize];
                }
            }
            share -= 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{minimum, model, ring};

    #[test]
    fn a_chain_is_solved_by_one_sweep() {
        let differ: &[&[i64]] = &[&[-1, 0], &[0, -1]];
        let mut chain = model(&[&[0, 3], &[0, 5], &[0, 4]], &[(0, 1, differ), (1, 2, differ)]);
        Sweeper::default().sweep(&mut chain, 100, || true).unwrap();
        assert_eq!(chain.constant, 5);
    }

    #[test]
    fn the_bound_never_falls_and_never_lies() {
        let mut model = ring(5, 1 << 20);
        let (least, values) = minimum(&model).unwrap();
        let mut sweeper = Sweeper::default();
        for _ in 0..50 {
            let before = model.constant;
            sweeper.sweep(&mut model, least, || true).unwrap();
            assert!(before <= model.constant && model.constant <= least);
            assert_eq!(model.evaluate(&values), least);
        }
    }

    #[test]
    fn nothing_is_left_below_the_optimum() {
        let differ: &[&[i64]] = &[&[-1, 0], &[0, -1]];
        let mut pair = model(&[&[0, 3], &[0, 5]], &[(0, 1, differ)]);
        assert!(Sweeper::default().sweep(&mut pair, 2, || true).is_err());
    }
}
