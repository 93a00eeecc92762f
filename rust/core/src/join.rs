//! Joining of two adjacent variables into one.
//!
//! The values of the new variable for `s`, `t` are the pairs `z = (x, y)` that are compatible, at the cost
//! `θ_z = θ_s(x) + θ_t(y) + e_st(x, y)`, `e` the whole cost of an edge, and keep the edges of their parts
//! (`Work::join`). Left out are
//!
//! - pairs in no program better than the incumbent: `r_s(x) + r_t(y) + e_st(x, y) > room`, where `r_s(x)` is
//!   `θ_s(x)` plus the least that every other edge at `s` can add, `Σ_u min_v e_su(x, v)` (`Look::rest`);
//! - of the pairs that look alike on all other edges (equal tuples of classes, `Look::kind`) all but the
//!   cheapest.
//!
//! A neighbour of both `s` and `t` has one neighbour less afterwards; so joining ([`contract`], which chooses
//! the pairs) and eliminating ([`crate::eliminate`]) in turn solve any model, at the price of its width.
//! All terms stay non-negative (sums of non-negative costs).

use std::collections::{BTreeMap, BTreeSet};

use crate::eliminate::{Trail, Work};
use crate::model::{Edge, HALF, Model, Var, Wipeout};
use crate::order::neighbours;

/// Entries of an edge that a join may create.
const LARGE_TABLE: usize = 1 << 18;

/// Joins disjoint pairs of adjacent variables, those first that leave few pairs and few neighbours, at most
/// a quarter of the variables; no joined variable gets more than `most` values. Stops early if `go_on` says no.
/// `None`: no pair fits; otherwise as [`crate::eliminate::eliminate`].
///
/// # Errors
/// A joined variable without values: no assignment costs at most `room` above the constant.
pub fn contract(
    model: &mut Model,
    trail: &mut Trail,
    room: i64,
    most: usize,
    mut go_on: impl FnMut() -> bool,
) -> Result<Option<Vec<usize>>, Wipeout> {
    let count = model.vars.len();
    let mut work = Work::new(model, trail);
    let adjacent = neighbours(work.model);
    let size: Vec<usize> = work.model.vars.iter().map(|var| var.theta.len()).collect();
    let mut pairs: Vec<(u64, usize, usize)> = Vec::new();
    for edge in &work.model.edges {
        let [s, t] = edge.ends.map(|end| end as usize);
        if size[s] * size[t] > 64 * most {
            continue;
        }
        let common = adjacent[s].iter().filter(|u| adjacent[t].binary_search(u).is_ok()).count();
        let degree = adjacent[s].len() + adjacent[t].len() - 2 - common;
        let score = ((size[s] * size[t]) as f64).log2() + 2.0 * degree as f64;
        pairs.push(((score * 1024.0) as u64, s.min(t), s.max(t)));
    }
    pairs.sort_unstable();
    let mut busy = vec![false; count];
    let mut joins = 0;
    for (_, s, t) in pairs {
        if joins * 4 > count || !go_on() {
            break;
        }
        if !busy[s] && !busy[t] && work.join(s, t, room, most)? {
            busy[s] = true;
            busy[t] = true;
            joins += 1;
        }
    }
    if joins > 0 { work.rest().map(Some) } else { Ok(None) }
}

impl Work<'_> {
    /// Joins `s` and `t` into a new variable. `false`: they are not adjacent, or the result would be too large.
    fn join(&mut self, s: usize, t: usize, room: i64, most: usize) -> Result<bool, Wipeout> {
        let model = &*self.model;
        let between = model.incident[s]
            .iter()
            .copied()
            .find(|&(e, side)| model.edges[e as usize].ends[1 - side as usize] as usize == t);
        let Some((st, side)) = between else { return Ok(false) };
        let side = side as usize;
        let edge = &model.edges[st as usize];
        let (look_s, look_t) = (Look::new(model, s, st), Look::new(model, t, st));
        if look_s.kinds * look_t.kinds > 64 * most {
            return Ok(false);
        }
        let mut best: Vec<(i64, u16, u16)> = vec![(i64::MAX, 0, 0); look_s.kinds * look_t.kinds];
        let (theta_s, theta_t) = (&model.vars[s].theta, &model.vars[t].theta);
        for x in 0..theta_s.len() {
            let class = edge.class[side][x] as usize;
            for y in 0..theta_t.len() {
                let other = edge.class[1 - side][y] as usize;
                let cost = edge.f[side][class] + edge.f[1 - side][other] + edge.cost(side, class, other);
                if cost >= HALF || look_s.rest[x] + look_t.rest[y] + cost > room {
                    continue;
                }
                let cost = cost + theta_s[x] + theta_t[y];
                let best = &mut best[look_s.kind[x] * look_t.kinds + look_t.kind[y]];
                if cost < best.0 {
                    *best = (cost, x as u16, y as u16);
                }
            }
        }
        best.retain(|best| best.0 < HALF);
        if best.is_empty() {
            return Err(Wipeout { var: s, edge: Some(st as usize) });
        }
        if best.len() > most {
            return Ok(false);
        }
        let neighbours = [self.neighbours(s), self.neighbours(t)];
        let shared = neighbours[0].iter().filter(|u| neighbours[1].contains(u));
        if shared.map(|&u| model.vars[u].theta.len()).any(|size| size * best.len() > LARGE_TABLE) {
            return Ok(false);
        }
        self.detach(st);
        let new = self.model.vars.len();
        let mut moved = Vec::new();
        for (old, second) in [(s, false), (t, true)] {
            for (e, side) in self.model.incident[old].clone() {
                let mut edge = self.detach(e);
                let side = side as usize;
                let value = |&(_, x, y): &(i64, u16, u16)| if second { y } else { x };
                let class = &edge.class[side];
                let class: Vec<u16> = best.iter().map(|z| class[value(z) as usize]).collect();
                edge.class[side] = class;
                edge.ends[side] = new as u32;
                moved.push(edge);
            }
        }
        let (first, second) = (self.remove(s), self.remove(t));
        let pairs =
            best.iter().map(|&(_, x, y)| [first.labels[x as usize], second.labels[y as usize]]).collect();
        let parts = [first.origin, second.origin];
        let origin = self.trail.joined(parts, pairs);
        self.gone.push(false);
        self.model.incident.push(Vec::new());
        let labels = (0..best.len() as u32).collect();
        self.model.vars.push(Var {
            origin,
            labels,
            theta: best.iter().map(|best| best.0).collect(),
            settled: None,
        });
        for edge in moved {
            self.connect(drop_empty_classes(edge, new as u32));
        }
        Ok(true)
    }
}

/// Renumbers the classes at `end` so that each has a value.
fn drop_empty_classes(edge: Edge, end: u32) -> Edge {
    let side = usize::from(edge.ends[1] == end);
    let used: BTreeSet<u16> = edge.class[side].iter().copied().collect();
    let used: Vec<u16> = used.into_iter().collect();
    let other = edge.f[1 - side].len();
    let rows = used.iter().flat_map(|&c| edge.w[side][c as usize * other..(c as usize + 1) * other].iter());
    let table: Vec<i64> = rows.copied().collect();
    let Edge { mut class, mut f, ends, .. } = edge;
    class[side] = class[side].iter().map(|c| used.partition_point(|other| other < c) as u16).collect();
    f[side] = used.iter().map(|&c| f[side][c as usize]).collect();
    // `table` has the classes of `end` as rows.
    if side == 1 {
        class.reverse();
        f.reverse();
    }
    let edge = Edge::new([ends[side], ends[1 - side]], class, f, table);
    if side == 0 { edge } else { edge.flipped() }
}

/// How a variable looks from all its edges but one.
struct Look {
    /// Number of distinct tuples of classes, and which one each value has.
    kinds: usize,
    kind: Vec<usize>,
    /// `θ(x)` and what the messages prove about those edges.
    rest: Vec<i64>,
}

impl Look {
    fn new(model: &Model, s: usize, without: u32) -> Self {
        let var = &model.vars[s];
        let mut rest = var.theta.clone();
        let mut tuples: Vec<Vec<u16>> = vec![Vec::new(); rest.len()];
        let mut marginal = Vec::new();
        for &(e, side) in model.incident[s].iter().filter(|&&(e, _)| e != without) {
            let (edge, side) = (&model.edges[e as usize], side as usize);
            edge.marginal(side, &mut marginal);
            for ((rest, tuple), &class) in rest.iter_mut().zip(&mut tuples).zip(&edge.class[side]) {
                let c = class as usize;
                *rest = (*rest + (edge.f[side][c] + marginal[c]).min(HALF)).min(HALF);
                tuple.push(class);
            }
        }
        let distinct: BTreeSet<&Vec<u16>> = tuples.iter().collect();
        let number: BTreeMap<&Vec<u16>, usize> = distinct.into_iter().zip(0..).collect();
        let kind = tuples.iter().map(|tuple| number[tuple]).collect();
        Self { kinds: number.len(), kind, rest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compact::compact;
    use crate::eliminate::eliminate;
    use crate::testing::{model, solved};

    /// Four variables, each pair different: three neighbours each, so nothing can be eliminated at first.
    fn clique(colours: usize) -> Model {
        let row = |x: usize| (0..colours).map(|y| if x == y { -1 } else { 0 }).collect::<Vec<i64>>();
        let rows: Vec<Vec<i64>> = (0..colours).map(row).collect();
        let table: Vec<&[i64]> = rows.iter().map(|row| &row[..]).collect();
        let costs: Vec<i64> = (0..colours as i64).map(|x| x * x).collect();
        let edges: Vec<_> = (0..4).flat_map(|a| (a + 1..4).map(move |b| (a, b))).collect();
        let edges: Vec<_> = edges.iter().map(|&(a, b)| (a, b, &table[..])).collect();
        model(&[&costs, &costs, &costs, &costs], &edges)
    }

    #[test]
    fn joins_open_the_way_for_eliminations() {
        let whole = clique(5);
        let (mut model, mut trail) = (whole.clone(), Trail::new(4));
        assert_eq!(eliminate(&mut model, &mut trail, 100).unwrap().len(), 4);
        let keep = contract(&mut model, &mut trail, 1000, 100, || true).unwrap().unwrap();
        model = compact(model, &keep);
        let keep = eliminate(&mut model, &mut trail, 1000).unwrap();
        model = compact(model, &keep);
        assert_eq!(solved(&whole, &model, &trail), (1 + 4 + 9, 14));
    }

    #[test]
    fn joins_respect_size_and_room() {
        let (mut model, mut trail) = (clique(5), Trail::new(4));
        assert_eq!(contract(&mut model, &mut trail, 1000, 19, || true), Ok(None));
        // A pair of different colours costs at least 1.
        assert!(contract(&mut model, &mut trail, 0, 100, || true).is_err());
        let (mut model, mut trail) = (clique(1), Trail::new(4));
        assert!(contract(&mut model, &mut trail, 1000, 100, || true).is_err());
    }
}
