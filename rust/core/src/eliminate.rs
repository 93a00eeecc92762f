//! Exact elimination of variables, and joining of two variables into one.
//!
//! - *Eliminate* `s` with at most two neighbours: `g(a, b) = min_x [θ_s(x) + e_a(a, x) + e_b(b, x)]`, `e` the
//!   whole cost of an edge, becomes an edge between the neighbours (joined with the one they may have), a
//!   unary cost, or a constant. Chains, trees and series-parallel parts vanish altogether. The remaining
//!   model is tighter for message passing: what was a cycle of three became one edge.
//! - *Join* adjacent `s`, `t`: the values are the pairs `z = (x, y)` that are compatible, and whose cost,
//!   plus what the messages prove about the other edges at `s` and `t`, is at most `room` (dearer pairs are
//!   in no program better than the incumbent). Of the pairs that look alike on all other edges only the
//!   cheapest is needed. A neighbour of both has one neighbour less; so joining and eliminating in turn
//!   solve any model, at the price of its width.
//!
//! Both keep all terms non-negative (a sum and a minimum of non-negative costs). [`Trail`] remembers how to
//! read an assignment of the remaining model as one of the model as built.

use std::collections::{BTreeMap, BTreeSet};

use crate::compact::{attach, join};
use crate::model::{DEAD, Edge, HALF, Model, Var, Wipeout};

/// Entries of an edge that elimination may always create.
const SMALL_TABLE: usize = 256;
/// Entries of an edge that a join may create.
const LARGE_TABLE: usize = 1 << 18;
/// Steps that one elimination may take.
const MOST_WORK: usize = 1 << 26;

/// What an eliminated variable needs to know of a neighbour.
#[derive(Clone, Debug)]
struct Link {
    neighbour: u32,
    /// The neighbour's labels, ascending, and the class of each.
    labels: Vec<u32>,
    class: Vec<u16>,
    /// Class of each own value.
    own: Vec<u16>,
    /// `[neighbour's class][own class]`.
    cost: Vec<i64>,
    columns: usize,
}

#[derive(Clone, Debug)]
enum Undo {
    Eliminated { origin: u32, labels: Vec<u32>, theta: Vec<i64>, links: Vec<Link> },
    Joined { origin: u32, parts: [u32; 2], labels: Vec<[u32; 2]> },
}

/// The eliminations and joins of a search, in order.
#[derive(Clone, Debug)]
pub struct Trail {
    steps: Vec<Undo>,
    origins: u32,
}

impl Trail {
    /// For a model as built with `origins` variables.
    pub fn new(origins: usize) -> Self {
        Self { steps: Vec::new(), origins: origins as u32 }
    }

    /// Origins in use: those as built and those of joined variables.
    pub fn origins(&self) -> usize {
        self.origins as usize
    }

    /// Extends labels (by origin) of the remaining variables to all.
    pub fn recover(&self, labels: &mut [u32]) {
        let mut costs: Vec<i64> = Vec::new();
        for step in self.steps.iter().rev() {
            match step {
                Undo::Joined { origin, parts, labels: pairs } => {
                    let pair = pairs[labels[*origin as usize] as usize];
                    for (&part, label) in parts.iter().zip(pair) {
                        labels[part as usize] = label;
                    }
                }
                Undo::Eliminated { origin, labels: own, theta, links } => {
                    costs.clone_from(theta);
                    for link in links {
                        let wanted = labels[link.neighbour as usize];
                        let place = link.labels.partition_point(|&label| label < wanted);
                        let class = link.class[place] as usize;
                        let row = &link.cost[class * link.columns..(class + 1) * link.columns];
                        for (cost, &class) in costs.iter_mut().zip(&link.own) {
                            *cost = (*cost + row[class as usize]).min(DEAD);
                        }
                    }
                    let best = (0..costs.len()).min_by_key(|&x| costs[x]).unwrap_or(0);
                    labels[*origin as usize] = own[best];
                }
            }
        }
    }
}

/// Eliminates variables with at most two neighbours while the new edges stay small (`most` entries, or no
/// larger than the edges they replace). `model` must have no parallel edges (as after compaction); its
/// eliminated variables are left without values: compact it over the variables returned.
///
/// # Errors
/// A variable without living values: there is no assignment.
pub fn eliminate(model: &mut Model, trail: &mut Trail, most: usize) -> Result<Vec<usize>, Wipeout> {
    let mut work = Work { gone: vec![false; model.vars.len()], model, trail };
    let mut queue: BTreeSet<(usize, usize)> =
        (0..work.gone.len()).map(|s| (work.model.incident[s].len(), s)).filter(|&(n, _)| n <= 2).collect();
    while let Some((_, s)) = queue.pop_first() {
        if work.gone[s] || work.model.incident[s].len() > 2 {
            continue;
        }
        let neighbours = work.neighbours(s);
        if work.eliminate(s, most)? {
            for other in neighbours {
                if work.model.incident[other].len() <= 2 {
                    queue.insert((work.model.incident[other].len(), other));
                }
            }
        }
    }
    work.rest()
}

/// Joins disjoint pairs of adjacent variables, those first that leave few pairs and few neighbours, at most
/// a quarter of the variables; no joined variable gets more than `most` values. Stops early if `go_on` says no.
/// `None`: no pair fits; otherwise as [`eliminate`].
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
    let mut work = Work { gone: vec![false; count], model, trail };
    let adjacent = crate::order::neighbours(work.model);
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

struct Work<'a> {
    model: &'a mut Model,
    trail: &'a mut Trail,
    gone: Vec<bool>,
}

impl Work<'_> {
    /// The variables left, and only their edges.
    fn rest(self) -> Result<Vec<usize>, Wipeout> {
        self.model.edges.retain(|edge| !edge.f[0].is_empty());
        self.model.index();
        let rest: Vec<usize> = (0..self.gone.len()).filter(|&s| !self.gone[s]).collect();
        match rest.iter().find(|&&s| self.model.vars[s].living().next().is_none()) {
            Some(&var) => Err(Wipeout { var, edge: None }),
            None => Ok(rest),
        }
    }

    fn neighbours(&self, s: usize) -> Vec<usize> {
        let ends = self.model.incident[s].iter();
        ends.map(|&(e, side)| self.model.edges[e as usize].ends[1 - side as usize] as usize).collect()
    }

    /// Takes edge `e` out of the model.
    fn detach(&mut self, e: u32) {
        let ends = self.model.edges[e as usize].ends;
        for end in ends {
            self.model.incident[end as usize].retain(|&(other, _)| other != e);
        }
        // Recognised by its lack of classes when the work is done.
        let empty = Edge::new([ends[0], ends[0]], [vec![], vec![]], [vec![], vec![]], vec![]);
        self.model.edges[e as usize] = empty;
    }

    /// Adds an edge, joined with one between the same ends.
    fn connect(&mut self, edge: Edge) {
        let [a, b] = edge.ends;
        let parallel = self.model.incident[a as usize]
            .iter()
            .copied()
            .find(|&(e, side)| self.model.edges[e as usize].ends[1 - side as usize] == b);
        let edge = match parallel {
            None => edge,
            Some((old, side)) => {
                let new = self.model.edges.len();
                self.model.edges.push(edge);
                let all = |end: u32| (0..self.model.vars[end as usize].theta.len()).collect::<Vec<_>>();
                let list = [(old as usize, side as usize), (new, 0)];
                let joined = join(self.model, [a as usize, b as usize], &list, [&all(a), &all(b)]);
                self.model.edges.pop();
                self.detach(old);
                joined
            }
        };
        let index = self.model.edges.len() as u32;
        attach(self.model, edge);
        if self.model.edges.len() > index as usize {
            for side in 0..2u8 {
                let end = self.model.edges[index as usize].ends[side as usize] as usize;
                self.model.incident[end].push((index, side));
            }
        }
    }

    fn remove(&mut self, s: usize) -> Var {
        self.gone[s] = true;
        let var = &mut self.model.vars[s];
        let empty = Var { origin: var.origin, labels: Vec::new(), theta: Vec::new() };
        std::mem::replace(var, empty)
    }

    fn eliminate(&mut self, s: usize, most: usize) -> Result<bool, Wipeout> {
        let incident = self.model.incident[s].clone();
        if let [(e, i), (g, j)] = incident[..] {
            let (e, g) = (&self.model.edges[e as usize], &self.model.edges[g as usize]);
            let size = e.f[1 - i as usize].len() * g.f[1 - j as usize].len();
            let work = size * self.model.vars[s].theta.len();
            if work > MOST_WORK || size > most.max(SMALL_TABLE).max(e.w[0].len() + g.w[0].len()) {
                return Ok(false);
            }
        }
        let edges: Vec<Edge> = incident
            .iter()
            .map(|&(e, _)| {
                let edge = self.model.edges[e as usize].clone();
                self.detach(e);
                edge
            })
            .collect();
        let var = self.remove(s);
        // Per neighbour: `[its class][own class]`, the cost of the edge.
        let mut tables = Vec::with_capacity(2);
        let mut links = Vec::with_capacity(2);
        for (edge, &(_, side)) in edges.iter().zip(&incident) {
            let (own, other) = (side as usize, 1 - side as usize);
            let columns = edge.f[own].len();
            let neighbour = &self.model.vars[edge.ends[other] as usize];
            let rows = edge.f[other].iter().zip(edge.w[other].chunks_exact(columns));
            let whole: Vec<i64> = rows
                .flat_map(|(&g, row)| row.iter().zip(&edge.f[own]).map(move |(&w, &f)| (g + w + f).min(DEAD)))
                .collect();
            links.push(Link {
                neighbour: neighbour.origin,
                labels: neighbour.labels.clone(),
                class: edge.class[other].clone(),
                own: edge.class[own].clone(),
                cost: whole.clone(),
                columns,
            });
            tables.push((whole, columns, edge.class[other].clone(), edge.ends[other]));
        }
        match &mut tables[..] {
            [] => {
                let least = var.theta.iter().copied().min().unwrap_or(DEAD);
                if least >= HALF {
                    return Err(Wipeout { var: s, edge: None });
                }
                self.model.constant += least;
            }
            [(table, columns, class, end)] => {
                let least = cheapest(&var.theta, &links[0].own, *columns);
                let marginal: Vec<i64> = table
                    .chunks_exact(*columns)
                    .map(|row| row.iter().zip(&least).map(|(&e, &l)| e + l).min().unwrap_or(DEAD).min(DEAD))
                    .collect();
                for (theta, &class) in self.model.vars[*end as usize].theta.iter_mut().zip(&*class) {
                    *theta = (*theta + marginal[class as usize]).min(DEAD);
                }
            }
            [(first, n, class_a, a), (second, m, class_b, b)] => {
                // Own values by the pair of classes that they have.
                let mut joint: BTreeMap<(u16, u16), i64> = BTreeMap::new();
                for (&theta, pair) in var.theta.iter().zip(links[0].own.iter().zip(&links[1].own)) {
                    let least = joint.entry((*pair.0, *pair.1)).or_insert(DEAD);
                    *least = (*least).min(theta);
                }
                let (rows, columns) = (first.len() / *n, second.len() / *m);
                let mut transposed = vec![0; second.len()];
                for b in 0..columns {
                    for c in 0..*m {
                        transposed[c * columns + b] = second[b * *m + c];
                    }
                }
                let mut table = vec![DEAD; rows * columns];
                for (row, into) in first.chunks_exact(*n).zip(table.chunks_exact_mut(columns)) {
                    for (&(x, y), &theta) in &joint {
                        let base = theta + row[x as usize];
                        if base >= HALF {
                            continue;
                        }
                        let other = &transposed[y as usize * columns..(y as usize + 1) * columns];
                        for (into, &cost) in into.iter_mut().zip(other) {
                            *into = (*into).min(base + cost);
                        }
                    }
                }
                for entry in &mut table {
                    if *entry >= HALF {
                        *entry = DEAD;
                    }
                }
                let class = [std::mem::take(class_a), std::mem::take(class_b)];
                self.connect(Edge::new([*a, *b], class, [vec![0; rows], vec![0; columns]], table));
            }
            _ => {}
        }
        self.trail.steps.push(Undo::Eliminated {
            origin: var.origin,
            labels: var.labels,
            theta: var.theta,
            links,
        });
        Ok(true)
    }

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
                let mut edge = self.model.edges[e as usize].clone();
                self.detach(e);
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
        let origin = self.trail.origins;
        self.trail.origins += 1;
        let pairs =
            best.iter().map(|&(_, x, y)| [first.labels[x as usize], second.labels[y as usize]]).collect();
        let parts = [first.origin, second.origin];
        self.trail.steps.push(Undo::Joined { origin, parts, labels: pairs });
        self.gone.push(false);
        self.model.incident.push(Vec::new());
        let labels = (0..best.len() as u32).collect();
        self.model.vars.push(Var { origin, labels, theta: best.iter().map(|best| best.0).collect() });
        for edge in moved {
            self.connect(drop_empty_classes(edge, new as u32));
        }
        Ok(true)
    }
}

/// The least cost of the values of each class.
fn cheapest(theta: &[i64], class: &[u16], classes: usize) -> Vec<i64> {
    let mut least = vec![DEAD; classes];
    for (&theta, &class) in theta.iter().zip(class) {
        least[class as usize] = least[class as usize].min(theta);
    }
    least
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
    let flipped = Edge::new(
        [ends[side], ends[1 - side]],
        [class[side].clone(), class[1 - side].clone()],
        [f[side].clone(), f[1 - side].clone()],
        table,
    );
    if side == 0 { flipped } else { Edge { ends, class, f, w: [flipped.w[1].clone(), flipped.w[0].clone()] } }
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
    use crate::testing::{minimum, model, ring};

    /// The optimum and labels that the trail recovers from a model without variables.
    fn solved(whole: &Model, model: &Model, trail: &Trail) -> (i64, i64) {
        assert!(model.vars.is_empty());
        let mut labels = vec![0; trail.origins()];
        model.labels(&[], &mut labels);
        trail.recover(&mut labels);
        let values: Vec<usize> = labels[..whole.vars.len()].iter().map(|&label| label as usize).collect();
        (model.constant, whole.evaluate(&values))
    }

    #[test]
    fn a_ring_vanishes() {
        for length in 3..9 {
            let whole = ring(length, 7);
            let (mut model, mut trail) = (whole.clone(), Trail::new(length));
            let keep = eliminate(&mut model, &mut trail, 1).unwrap();
            let model = compact(&model, &keep);
            let (least, _) = minimum(&whole).unwrap();
            assert_eq!(solved(&whole, &model, &trail), (least, least));
        }
    }

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
        model = compact(&model, &keep);
        let keep = eliminate(&mut model, &mut trail, 1000).unwrap();
        model = compact(&model, &keep);
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
