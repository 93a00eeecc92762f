//! The pairwise model on which everything after [`crate::build`] works.
//!
//! Variables `s` take values `x`; the cost of an assignment is
//!
//! `constant + Σ_s θ_s(x_s) + Σ_e [ f_e0(c0(x)) + f_e1(c1(x)) + w_e(c0, c1) ]`
//!
//! where an edge `e` sees only the *class* of a value on either side (values that make the same forms
//! available, or need the same forms, share a class), so that a message costs `|C0| x |C1|` steps
//! whatever the number of values. `w` is 0 or [`DEAD`] at first (compatible or not) and may become a
//! general cost when edges are merged. `f` holds the messages of the reparametrisation: costs moved
//! between the ends of an edge, 0 at first.
//!
//! Invariant (kept by every operation): `θ_s(x) >= 0` and `f_e0 + f_e1 + w_e >= 0` everywhere. Hence
//! `constant` is a lower bound, exactly, in integers. A dead value has `θ >= HALF`; a dead class (one
//! without living values) has `f >= HALF`.

/// Cost of the impossible. Sums of three stay below `i64::MAX`.
pub const DEAD: i64 = 1 << 61;
/// Everything from here on counts as [`DEAD`].
pub const HALF: i64 = 1 << 60;

/// A variable: its living and dead values and where they come from.
#[derive(Clone, Debug, Default)]
pub struct Var {
    /// Index of the variable in the model as built.
    pub origin: u32,
    /// For each value its index in the model as built.
    pub labels: Vec<u32>,
    /// Cost of each value.
    pub theta: Vec<i64>,
    /// The number of living classes at the other ends of its edges ([`Model::facing`]) with which no value was
    /// dominated; `None`: not known, or its edges have changed since. See [`crate::dominance`].
    pub settled: Option<u32>,
}

impl Var {
    /// Indices of the living values.
    pub fn living(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.theta.len()).filter(|&x| self.theta[x] < HALF)
    }
}

/// An edge; see the module documentation.
#[derive(Clone, Debug, Default)]
pub struct Edge {
    /// The two variables.
    pub ends: [u32; 2],
    /// Class of each value, per side.
    pub class: [Vec<u16>; 2],
    /// Messages per class, per side.
    pub f: [Vec<i64>; 2],
    /// `w[0]` is row-major `[c0][c1]`, `w[1]` its transpose.
    pub w: [Vec<i64>; 2],
    /// Known: no two classes of a side have rows that are equal up to a constant, and each side has two or more.
    pub distinct: bool,
}

impl Edge {
    /// An edge from its classes and its table (row-major by class of side 0).
    pub fn new(ends: [u32; 2], class: [Vec<u16>; 2], f: [Vec<i64>; 2], table: Vec<i64>) -> Self {
        let (rows, columns) = (f[0].len(), f[1].len());
        let transposed = (0..columns).flat_map(|c| (0..rows).map(move |r| (r, c)));
        let transposed = transposed.map(|(r, c)| table[r * columns + c]).collect();
        Self { ends, class, f, w: [table, transposed], distinct: false }
    }

    /// The same edge with its sides exchanged.
    #[must_use]
    pub fn flipped(mut self) -> Self {
        self.ends.reverse();
        self.class.reverse();
        self.f.reverse();
        self.w.reverse();
        self
    }

    /// `w(own, other)` seen from `side`.
    #[inline]
    pub fn cost(&self, side: usize, own: usize, other: usize) -> i64 {
        self.w[side][own * self.f[1 - side].len() + other]
    }

    /// `into[c] = min over classes b of the other side of f_other(b) + w(c, b)`, for each own class.
    #[inline]
    pub fn marginal(&self, side: usize, into: &mut Vec<i64>) {
        let own = self.f[side].len();
        into.clear();
        into.resize(own, 2 * DEAD);
        for (row, &message) in self.w[1 - side].chunks_exact(own).zip(&self.f[1 - side]) {
            for (least, &cost) in into.iter_mut().zip(row) {
                *least = (*least).min(message + cost);
            }
        }
    }
}

/// The pairwise model.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// Variables, in search order after [`crate::compact`].
    pub vars: Vec<Var>,
    /// Edges.
    pub edges: Vec<Edge>,
    /// For each variable its `(edge, side)` pairs.
    pub incident: Vec<Vec<(u32, u8)>>,
    /// Lower bound, and cost shared by all assignments.
    pub constant: i64,
    /// Variables already decided: `(origin, label)`.
    pub fixed: Vec<(u32, u32)>,
}

/// A variable lost all its values; the index of the edge whose revision emptied it, if one did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wipeout {
    /// The variable.
    pub var: usize,
    /// The edge.
    pub edge: Option<usize>,
}

impl Model {
    /// Recomputes `incident` from `edges`.
    pub fn index(&mut self) {
        self.incident.iter_mut().for_each(Vec::clear);
        self.incident.resize_with(self.vars.len(), Vec::new);
        for (index, edge) in self.edges.iter().enumerate() {
            for side in 0..2 {
                self.incident[edge.ends[side] as usize].push((index as u32, side as u8));
            }
        }
    }

    /// Number of living classes at the other ends of the edges of a variable.
    pub fn facing(&self, var: usize) -> u32 {
        let living = |&(e, side): &(u32, u8)| {
            let messages = &self.edges[e as usize].f[1 - side as usize];
            messages.iter().filter(|&&message| message < HALF).count() as u32
        };
        self.incident[var].iter().map(living).sum()
    }

    /// Number of living values.
    pub fn living_values(&self) -> usize {
        self.vars.iter().map(|var| var.living().count()).sum()
    }

    /// The model of `vars` (ascending) and the edges between them, with the same constant and nothing fixed.
    #[must_use]
    pub fn part(&self, vars: &[usize]) -> Self {
        let mut position = vec![u32::MAX; self.vars.len()];
        let mut part = Self { constant: self.constant, ..Self::default() };
        for (&old, new) in vars.iter().zip(0..) {
            position[old] = new;
            part.vars.push(self.vars[old].clone());
        }
        for &old in vars {
            for &(e, side) in &self.incident[old] {
                let edge = &self.edges[e as usize];
                let ends = edge.ends.map(|end| position[end as usize]);
                if side == 0 && !ends.contains(&u32::MAX) {
                    part.edges.push(Edge { ends, ..edge.clone() });
                }
            }
        }
        part.index();
        part
    }

    /// Bytes of its values and tables, about.
    pub fn bytes(&self) -> u64 {
        let var = |var: &Var| 12 * var.theta.len() as u64 + 64;
        let side = |edge: &Edge, side: usize| {
            8 * (edge.f[side].len() + edge.w[side].len()) as u64 + 2 * edge.class[side].len() as u64
        };
        let edge = |edge: &Edge| side(edge, 0) + side(edge, 1) + 200;
        self.vars.iter().map(var).sum::<u64>() + self.edges.iter().map(edge).sum::<u64>()
    }

    /// Kills value `x` of `var`; call [`Self::refresh`] afterwards.
    pub fn kill(&mut self, var: usize, x: usize) {
        self.vars[var].theta[x] = DEAD;
    }

    /// Marks classes of `var` that lost all their values as dead; reports the edges on which one did.
    pub fn refresh(&mut self, var: usize, mut changed: impl FnMut(usize)) {
        // Every class has a value.
        if self.vars[var].theta.iter().all(|&theta| theta < HALF) {
            return;
        }
        let mut seen: Vec<bool> = Vec::new();
        for &(e, side) in &self.incident[var] {
            let (edge, side) = (&mut self.edges[e as usize], side as usize);
            seen.clear();
            seen.resize(edge.f[side].len(), false);
            for (&class, &theta) in edge.class[side].iter().zip(&self.vars[var].theta) {
                seen[class as usize] |= theta < HALF;
            }
            let mut lost = false;
            for (message, &seen) in edge.f[side].iter_mut().zip(&seen) {
                if !seen && *message < HALF {
                    *message = DEAD;
                    lost = true;
                }
            }
            if lost {
                changed(e as usize);
            }
        }
    }

    /// Cost of a complete assignment (one value index per variable); [`HALF`] or more if impossible.
    pub fn evaluate(&self, values: &[usize]) -> i64 {
        let mut total = self.constant;
        for (var, &x) in self.vars.iter().zip(values) {
            total = (total + var.theta[x]).min(DEAD);
        }
        for edge in &self.edges {
            let [a, b] = [0, 1].map(|side| edge.class[side][values[edge.ends[side] as usize]] as usize);
            total = (total + edge.f[0][a].min(HALF) + edge.f[1][b].min(HALF) + edge.cost(0, a, b)).min(DEAD);
        }
        total
    }

    /// The labels of all variables (by origin) when the living ones take `values`.
    pub fn labels(&self, values: &[usize], into: &mut [u32]) {
        for &(origin, label) in &self.fixed {
            into[origin as usize] = label;
        }
        for (var, &x) in self.vars.iter().zip(values) {
            into[var.origin as usize] = var.labels[x];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::model;

    #[test]
    fn evaluation_adds_unary_and_edge_costs() {
        let model = model(&[&[1, 2], &[10, 20]], &[(0, 1, &[&[5, -1], &[0, 7]])]);
        assert_eq!(model.evaluate(&[0, 0]), 16);
        assert_eq!(model.evaluate(&[1, 1]), 29);
        assert!(model.evaluate(&[0, 1]) >= HALF);
    }

    #[test]
    fn marginals_see_both_sides() {
        let model = model(&[&[0, 0], &[0, 0]], &[(0, 1, &[&[5, -1], &[3, 7]])]);
        let mut marginal = Vec::new();
        model.edges[0].marginal(0, &mut marginal);
        assert_eq!(marginal, [5, 3]);
        model.edges[0].marginal(1, &mut marginal);
        assert_eq!(marginal, [3, 7]);
    }

    #[test]
    fn refresh_marks_classes_without_values() {
        let mut model = model(&[&[0, 0], &[0, 0]], &[(0, 1, &[&[0, 0], &[0, 0]])]);
        model.kill(0, 1);
        let mut changed = Vec::new();
        model.refresh(0, |edge| changed.push(edge));
        assert_eq!(changed, [0]);
        assert!(model.edges[0].f[0][1] >= HALF && model.edges[0].f[0][0] < HALF);
    }
}
