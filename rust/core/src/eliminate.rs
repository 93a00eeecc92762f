//! Exact elimination of variables.
//!
//! A variable `s` with at most two neighbours goes: `g(a, b) = min_x [θ_s(x) + e_a(a, x) + e_b(b, x)]`, `e` the
//! whole cost of an edge, becomes an edge between the neighbours (joined with the one they may have), a
//! unary cost, or a constant ([`eliminate`]). Chains, trees and series-parallel parts vanish altogether. The
//! remaining model is tighter for message passing: what was a cycle of three became one edge.
//!
//! All terms stay non-negative (a sum and a minimum of non-negative costs). [`Trail`] remembers, for
//! eliminations and for joins ([`crate::join`]), how to read an assignment of the remaining model as one of the
//! model as built.

use std::collections::{BTreeMap, BTreeSet};

use crate::compact::{attach, join};
use crate::model::{DEAD, Edge, HALF, Model, Var, Wipeout};

/// Entries of an edge that elimination may always create.
const SMALL_TABLE: usize = 256;
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

    /// Records that two origins were joined, and the labels of both per label of the pair; its new origin.
    pub(crate) fn joined(&mut self, parts: [u32; 2], labels: Vec<[u32; 2]>) -> u32 {
        let origin = self.origins;
        self.origins += 1;
        self.steps.push(Undo::Joined { origin, parts, labels });
        origin
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
    let mut work = Work::new(model, trail);
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

/// A model whose variables are being replaced: edges are taken out and added in place.
pub(crate) struct Work<'a> {
    pub(crate) model: &'a mut Model,
    pub(crate) trail: &'a mut Trail,
    /// Per variable: replaced.
    pub(crate) gone: Vec<bool>,
}

impl<'a> Work<'a> {
    pub(crate) fn new(model: &'a mut Model, trail: &'a mut Trail) -> Self {
        Self { gone: vec![false; model.vars.len()], model, trail }
    }

    /// The variables left, and only their edges.
    pub(crate) fn rest(self) -> Result<Vec<usize>, Wipeout> {
        self.model.edges.retain(|edge| !edge.f[0].is_empty());
        self.model.index();
        let rest: Vec<usize> = (0..self.gone.len()).filter(|&s| !self.gone[s]).collect();
        match rest.iter().find(|&&s| self.model.vars[s].living().next().is_none()) {
            Some(&var) => Err(Wipeout { var, edge: None }),
            None => Ok(rest),
        }
    }

    pub(crate) fn neighbours(&self, s: usize) -> Vec<usize> {
        let ends = self.model.incident[s].iter();
        ends.map(|&(e, side)| self.model.edges[e as usize].ends[1 - side as usize] as usize).collect()
    }

    /// Takes edge `e` out of the model. What is left is recognised by its lack of classes when the work is done.
    pub(crate) fn detach(&mut self, e: u32) -> Edge {
        let ends = self.model.edges[e as usize].ends;
        for end in ends {
            self.model.incident[end as usize].retain(|&(other, _)| other != e);
        }
        std::mem::take(&mut self.model.edges[e as usize])
    }

    /// Adds an edge, joined with one between the same ends.
    pub(crate) fn connect(&mut self, edge: Edge) {
        let [a, b] = edge.ends;
        for end in edge.ends {
            self.model.vars[end as usize].settled = None;
        }
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
                let joined = join(&self.model.edges, [a as usize, b as usize], &list, [&all(a), &all(b)]);
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

    /// Takes out variable `s`, whose edges are gone.
    pub(crate) fn remove(&mut self, s: usize) -> Var {
        self.gone[s] = true;
        let var = &mut self.model.vars[s];
        let empty = Var { origin: var.origin, ..Var::default() };
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
        let edges: Vec<Edge> = incident.iter().map(|&(e, _)| self.detach(e)).collect();
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
                let neighbour = &mut self.model.vars[*end as usize];
                neighbour.settled = None;
                for (theta, &class) in neighbour.theta.iter_mut().zip(&*class) {
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
}

/// The least cost of the values of each class.
fn cheapest(theta: &[i64], class: &[u16], classes: usize) -> Vec<i64> {
    let mut least = vec![DEAD; classes];
    for (&theta, &class) in theta.iter().zip(class) {
        least[class as usize] = least[class as usize].min(theta);
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compact::compact;
    use crate::testing::{minimum, ring, solved};

    #[test]
    fn a_ring_vanishes() {
        for length in 3..9 {
            let whole = ring(length, 7);
            let (mut model, mut trail) = (whole.clone(), Trail::new(length));
            let keep = eliminate(&mut model, &mut trail, 1).unwrap();
            let model = compact(model, &keep);
            let (least, _) = minimum(&whole).unwrap();
            assert_eq!(solved(&whole, &model, &trail), (least, least));
        }
    }
}
