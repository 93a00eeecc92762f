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
//!
//! A sweep touches every class and every message twice and computes little with each, so its time is that of memory.
//! [`Sweeper`] therefore has a copy of what sweeps read and change, in the order in which they visit it: one array of
//! unary costs, one of classes, one of messages; and one table for all edges that have the same.
//!
//! Its tables hold costs plus [`BIAS`], so that no sum of a cost and a message is negative: the bits of such integers
//! are ordered as those of the floating-point numbers that they encode, of which two or more are compared by one
//! instruction on every processor (64-bit integers are not). Nothing is ever calculated with these numbers.

use rustc_hash::FxHashMap;

use crate::model::{DEAD, HALF, Model, Wipeout};

/// Entries of tables visited before the clock is looked at.
const WORK_BETWEEN_LOOKS: usize = 1 << 22;

/// Added to the costs in tables: messages of living classes are larger than `-BIAS`, and [`DEAD`] twice, with it, is
/// smaller than the encoding of infinity.
const BIAS: i64 = DEAD;
/// Classes whose marginals are found together.
const LANES: usize = 4;

/// Direction of a half-sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// Ascending variables; pushes to later ones.
    Forward,
    /// Descending variables; pushes to earlier ones.
    Backward,
}

/// An edge seen from one of its ends. Places are those of [`Sweeper`]'s arrays.
#[derive(Debug)]
struct Side {
    /// The other end comes later.
    up: bool,
    /// Class of each own value.
    class: usize,
    /// Messages of the own classes, and their number; the same of the other end's.
    own: usize,
    classes: usize,
    other: usize,
    others: usize,
    /// The costs, with [`BIAS`]: for [`LANES`] own classes after the other those with each class of the other end.
    table: usize,
}

/// The terms of a model, to be swept.
#[derive(Debug)]
pub struct Sweeper {
    /// Per variable, and one more: where its values and its sides begin.
    vars: Vec<[usize; 2]>,
    sides: Vec<Side>,
    theta: Vec<i64>,
    class: Vec<u16>,
    f: Vec<i64>,
    /// Per edge of the model: where its messages begin.
    edges: Vec<[usize; 2]>,
    tables: Vec<[i64; LANES]>,
    constant: i64,
    delta: Vec<[i64; LANES]>,
}

impl Sweeper {
    /// The terms of `model`.
    pub fn new(model: &Model) -> Self {
        let count = model.vars.len();
        let mut found = Self {
            vars: Vec::with_capacity(count + 1),
            sides: Vec::with_capacity(2 * model.edges.len()),
            theta: Vec::new(),
            class: Vec::new(),
            f: Vec::new(),
            edges: vec![[usize::MAX; 2]; model.edges.len()],
            tables: Vec::new(),
            constant: 0,
            delta: Vec::new(),
        };
        let mut known: FxHashMap<(usize, &[i64]), usize> = FxHashMap::default();
        let (mut values, mut messages) = (0, 0);
        for (s, var) in model.vars.iter().enumerate() {
            found.vars.push([values, found.sides.len()]);
            values += var.theta.len();
            for &(e, side) in &model.incident[s] {
                let (edge, side) = (&model.edges[e as usize], side as usize);
                let places = &mut found.edges[e as usize];
                if places[0] == usize::MAX {
                    *places = [messages, messages + edge.f[0].len()];
                    messages = places[1] + edge.f[1].len();
                }
                let (table, classes) = (&edge.w[1 - side][..], edge.f[side].len());
                let place = *known.entry((classes, table)).or_insert(found.tables.len());
                if place == found.tables.len() {
                    append_table(&mut found.tables, table, classes);
                }
                found.sides.push(Side {
                    up: edge.ends[1 - side] as usize > s,
                    class: found.class.len(),
                    own: places[side],
                    classes,
                    other: places[1 - side],
                    others: edge.f[1 - side].len(),
                    table: place,
                });
                found.class.extend_from_slice(&edge.class[side]);
            }
        }
        found.vars.push([values, found.sides.len()]);
        found.edges.iter_mut().filter(|places| places[0] == usize::MAX).for_each(|places| *places = [0; 2]);
        found.theta.reserve_exact(values);
        found.f.resize(messages, 0);
        found.load(model);
        found
    }

    /// Takes the present costs and messages of `model`, of which this was made and whose edges, values and classes
    /// are still the same.
    pub fn load(&mut self, model: &Model) {
        self.constant = model.constant;
        self.theta.clear();
        model.vars.iter().for_each(|var| self.theta.extend_from_slice(&var.theta));
        for (edge, places) in model.edges.iter().zip(&self.edges) {
            for (f, &place) in edge.f.iter().zip(places) {
                self.f[place..place + f.len()].copy_from_slice(f);
            }
        }
    }

    /// Gives `model` the costs and messages that sweeps have changed.
    pub fn store(&self, model: &mut Model) {
        model.constant = self.constant;
        for (var, place) in model.vars.iter_mut().zip(&self.vars) {
            let count = var.theta.len();
            var.theta.copy_from_slice(&self.theta[place[0]..place[0] + count]);
        }
        for (edge, places) in model.edges.iter_mut().zip(&self.edges) {
            for (f, &place) in edge.f.iter_mut().zip(places) {
                let count = f.len();
                f.copy_from_slice(&self.f[place..place + count]);
            }
        }
    }

    /// The lower bound.
    pub fn bound(&self) -> i64 {
        self.constant
    }

    /// Number of living values.
    pub fn living_values(&self) -> usize {
        self.theta.iter().filter(|&&theta| theta < HALF).count()
    }

    /// A forward and a backward half-sweep; false if `go_on`, asked now and then, said no (the bound is one even
    /// so).
    ///
    /// # Errors
    /// A variable without living values: no assignment costs at most `limit`.
    pub fn sweep(&mut self, limit: i64, mut go_on: impl FnMut() -> bool) -> Result<bool, Wipeout> {
        Ok(self.half_sweep(limit, Direction::Forward, &mut go_on)?
            && self.half_sweep(limit, Direction::Backward, &mut go_on)?)
    }

    fn half_sweep(
        &mut self,
        limit: i64,
        direction: Direction,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<bool, Wipeout> {
        let count = self.vars.len() - 1;
        let mut work = 0;
        for step in 0..count {
            let var = if direction == Direction::Forward { step } else { count - 1 - step };
            work += self.visit(var, limit, direction)?;
            if work > WORK_BETWEEN_LOOKS {
                work = 0;
                if !go_on() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Visits variable `s`; the entries of its tables.
    fn visit(&mut self, s: usize, limit: i64, direction: Direction) -> Result<usize, Wipeout> {
        let ([start, first], [end, last]) = (self.vars[s], self.vars[s + 1]);
        let theta = &mut self.theta[start..end];
        let sides = &self.sides[first..last];
        let (mut ahead, mut work) = (0, 0);
        for side in sides {
            ahead += usize::from(side.up == (direction == Direction::Forward));
            work += side.classes * side.others;
            side.marginal(&self.f, &self.tables, &mut self.delta);
            let delta = self.delta.as_flattened_mut();
            for (delta, message) in delta.iter_mut().zip(side.messages(&mut self.f)) {
                if *message >= HALF || *delta >= HALF {
                    *message = DEAD;
                    *delta = DEAD;
                } else {
                    let least = *delta;
                    *delta += *message;
                    *message = -least;
                }
            }
            for (theta, &class) in theta.iter_mut().zip(&self.class[side.class..]) {
                *theta = (*theta + delta[class as usize]).min(DEAD);
            }
        }
        let least = theta.iter().copied().min().unwrap_or(0);
        if least >= HALF {
            return Err(Wipeout { var: s, edge: None });
        }
        self.constant += least;
        let room = limit - self.constant;
        for theta in theta.iter_mut() {
            *theta -= least;
            if *theta > room {
                *theta = DEAD;
            }
        }
        if room < 0 {
            return Err(Wipeout { var: s, edge: None });
        }
        let behind = sides.len() - ahead;
        let mut share = ahead.max(behind) as i64;
        for side in sides {
            if side.up != (direction == Direction::Forward) {
                continue;
            }
            self.delta.clear();
            self.delta.resize(side.classes.div_ceil(LANES), [DEAD; LANES]);
            let delta = self.delta.as_flattened_mut();
            for (&theta, &class) in theta.iter().zip(&self.class[side.class..]) {
                let least = &mut delta[class as usize];
                *least = (*least).min(theta);
            }
            divide(delta, share);
            let dead = HALF / share;
            for (least, message) in delta.iter_mut().zip(side.messages(&mut self.f)) {
                if *least > dead {
                    *message = DEAD;
                    *least = 0;
                } else {
                    *message += *least;
                }
            }
            for (theta, &class) in theta.iter_mut().zip(&self.class[side.class..]) {
                if *theta < HALF {
                    *theta -= delta[class as usize];
                }
            }
            share -= 1;
        }
        Ok(work)
    }
}

impl Side {
    fn messages<'a>(&self, f: &'a mut [i64]) -> &'a mut [i64] {
        &mut f[self.own..self.own + self.classes]
    }

    /// `into[c] = min over classes b of the other end of f_other(b) + w(c, b)`, for each own class.
    fn marginal(&self, f: &[i64], tables: &[[i64; LANES]], into: &mut Vec<[i64; LANES]>) {
        let count = self.classes.div_ceil(LANES);
        let messages = &f[self.other..self.other + self.others];
        into.clear();
        for place in (0..count).map(|k| self.table + k * self.others) {
            let costs = &tables[place..place + self.others];
            let mut least = [f64::from_bits((2 * DEAD + BIAS) as u64); LANES];
            for (&message, costs) in messages.iter().zip(costs) {
                for (least, cost) in least.iter_mut().zip(costs) {
                    debug_assert!(message + cost > 0);
                    let sum = f64::from_bits((message + cost) as u64);
                    *least = if sum < *least { sum } else { *least };
                }
            }
            into.push(least.map(|least| least.to_bits() as i64 - BIAS));
        }
    }
}

/// Appends a table `[other class][own class]` as [`Side::table`] is laid out.
fn append_table(tables: &mut Vec<[i64; LANES]>, table: &[i64], classes: usize) {
    for first in (0..classes).step_by(LANES) {
        let lanes = first..classes.min(first + LANES);
        tables.extend(table.chunks_exact(classes).map(|row| {
            let mut costs = [DEAD + BIAS; LANES];
            costs.iter_mut().zip(&row[lanes.clone()]).for_each(|(cost, &own)| *cost = own + BIAS);
            costs
        }));
    }
}

/// Divides numbers, none of them negative, and rounds down; by small ones without instructions that divide.
fn divide(numbers: &mut [i64], by: i64) {
    match by {
        1 => {}
        2 => numbers.iter_mut().for_each(|number| *number >>= 1),
        3 => numbers.iter_mut().for_each(|number| *number = (*number as u64 / 3) as i64),
        4 => numbers.iter_mut().for_each(|number| *number >>= 2),
        5 => numbers.iter_mut().for_each(|number| *number = (*number as u64 / 5) as i64),
        _ => numbers.iter_mut().for_each(|number| *number /= by),
    }
}

/// Sweeps `model` once: [`Sweeper::sweep`].
///
/// # Errors
/// A variable without living values: no assignment costs at most `limit`. The model's terms are undefined then.
pub fn sweep(model: &mut Model, limit: i64, go_on: impl FnMut() -> bool) -> Result<bool, Wipeout> {
    let mut sweeper = Sweeper::new(model);
    let done = sweeper.sweep(limit, go_on)?;
    sweeper.store(model);
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{minimum, model, ring};

    #[test]
    fn a_chain_is_solved_by_one_sweep() {
        let differ: &[&[i64]] = &[&[-1, 0], &[0, -1]];
        let mut chain = model(&[&[0, 3], &[0, 5], &[0, 4]], &[(0, 1, differ), (1, 2, differ)]);
        sweep(&mut chain, 100, || true).unwrap();
        assert_eq!(chain.constant, 5);
    }

    #[test]
    fn the_bound_never_falls_and_never_lies() {
        let mut model = ring(5, 1 << 20);
        let (least, values) = minimum(&model).unwrap();
        for _ in 0..50 {
            let before = model.constant;
            sweep(&mut model, least, || true).unwrap();
            assert!(before <= model.constant && model.constant <= least);
            assert_eq!(model.evaluate(&values), least);
        }
    }

    #[test]
    fn nothing_is_left_below_the_optimum() {
        let differ: &[&[i64]] = &[&[-1, 0], &[0, -1]];
        let mut pair = model(&[&[0, 3], &[0, 5]], &[(0, 1, differ)]);
        assert!(sweep(&mut pair, 2, || true).is_err());
    }
}
