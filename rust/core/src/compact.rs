//! Rebuilds a model without its dead values, decided variables and superfluous classes, in a given
//! variable order.
//!
//! All steps are exact and keep the invariant that every term is non-negative:
//! - a variable with one living value is folded: its edges become unary costs of the neighbours;
//! - parallel edges become one over pairs of classes, `w = w1 + w2`, `f = f1 + f2`;
//! - classes with equal rows of `w` become one with `f = min f_c`, the rest `f_c - f` goes to `θ`;
//! - an edge with a single class on one side becomes unary.

use std::borrow::Cow;

use rustc_hash::FxHashMap;

use crate::model::{DEAD, Edge, HALF, Model, Var};
use crate::order::small_frontier_order;

/// Rows of so many classes are compared each with each.
const FEW: usize = 16;

/// For each variable kept the old indices of its values.
#[derive(Default)]
struct Kept {
    values: Vec<usize>,
    /// Where those of each variable end.
    ends: Vec<usize>,
}

impl Kept {
    /// Appends a variable, of which the living values are left.
    fn add(&mut self, var: &mut Var) {
        let start = self.values.len();
        self.values.extend(var.living());
        let living = &self.values[start..];
        take_out(&mut var.labels, living);
        take_out(&mut var.theta, living);
        self.ends.push(self.values.len());
    }

    fn of(&self, var: usize) -> &[usize] {
        &self.values[if var == 0 { 0 } else { self.ends[var - 1] }..self.ends[var]]
    }
}

/// Leaves of `list` what is at `places` (ascending).
fn take_out<T: Copy>(list: &mut Vec<T>, places: &[usize]) {
    if places.len() < list.len() {
        for (new, &old) in places.iter().enumerate() {
            list[new] = list[old];
        }
        list.truncate(places.len());
    }
}

/// The compacted model over `keep` (in this order). Variables with one living value are always folded;
/// other variables outside `keep` must not be adjacent to any in it. `constant` carries over.
pub fn compact(mut model: Model, keep: &[usize]) -> Model {
    for s in 0..model.vars.len() {
        // What has changed is forgotten, so that what is left can be counted anew.
        if model.vars[s].settled.is_some_and(|settled| settled != model.facing(s)) {
            model.vars[s].settled = None;
        }
    }
    let mut position = vec![usize::MAX; model.vars.len()];
    let mut out = Model {
        constant: model.constant,
        fixed: std::mem::take(&mut model.fixed),
        incident: std::mem::take(&mut model.incident),
        ..Model::default()
    };
    let single: Vec<Option<usize>> = model.vars.iter().map(single_value).collect();
    let mut kept = Kept::default();
    out.vars.reserve(keep.len());
    for &old in keep {
        if single[old].is_none() {
            let mut var = std::mem::take(&mut model.vars[old]);
            kept.add(&mut var);
            position[old] = out.vars.len();
            out.vars.push(var);
        }
    }
    for (var, &value) in model.vars.iter().zip(&single) {
        if let Some(x) = value {
            out.fixed.push((var.origin, var.labels[x]));
            out.constant = (out.constant + var.theta[x]).min(DEAD);
        }
    }
    // Ends, index, and the side that is the first end.
    let mut rest: Vec<([usize; 2], usize, usize)> = Vec::with_capacity(model.edges.len());
    for (e, edge) in model.edges.iter().enumerate() {
        let ends = edge.ends.map(|end| end as usize);
        match [single[ends[0]], single[ends[1]]] {
            [Some(x), Some(y)] => out.constant = (out.constant + edge_cost(edge, x, y).min(DEAD)).min(DEAD),
            [Some(x), None] => fold(&mut out, edge, 1, x, position[ends[1]], &kept),
            [None, Some(y)] => fold(&mut out, edge, 0, y, position[ends[0]], &kept),
            [None, None] => {
                let [a, b] = ends.map(|end| position[end]);
                if a < b && b != usize::MAX {
                    rest.push(([a, b], e, 0));
                } else if b < a && a != usize::MAX {
                    rest.push(([b, a], e, 1));
                }
            }
        }
    }
    rest.sort_unstable();
    out.edges.reserve(rest.len());
    for list in rest.chunk_by(|one, other| one.0 == other.0) {
        connect(&mut out, &mut model.edges, list, &kept);
    }
    out.index();
    for s in 0..out.vars.len() {
        out.vars[s].settled = out.vars[s].settled.map(|_| out.facing(s));
    }
    out
}

/// The compacted model in an order with a small frontier.
pub fn reordered(model: Model) -> Model {
    let order = small_frontier_order(&model);
    compact(model, &order)
}

/// Gives the new model what parallel edges of the old one (ends, index, side of the first end) become.
fn connect(out: &mut Model, edges: &mut [Edge], list: &[([usize; 2], usize, usize)], kept: &Kept) {
    let ends = list[0].0;
    let values = ends.map(|end| kept.of(end));
    if let [(_, e, first)] = *list
        && edges[e].distinct
        && (0..2).all(|side| keeps_all(&edges[e], side ^ first, values[side]))
    {
        // Rows that were distinct are so still.
        let edge = std::mem::take(&mut edges[e]);
        let mut edge = if first == 0 { edge } else { edge.flipped() };
        edge.ends = ends.map(|end| end as u32);
        for (class, values) in edge.class.iter_mut().zip(values) {
            take_out(class, values);
        }
        out.edges.push(edge);
        return;
    }
    for side in 0..2 {
        if list.len() > 1 || list.iter().any(|&(_, e, first)| loses(&edges[e], side ^ first, values[side])) {
            out.vars[ends[1 - side]].settled = None;
        }
    }
    let list: Vec<(usize, usize)> = list.iter().map(|&(_, e, first)| (e, first)).collect();
    let edge = join(edges, ends, &list, values);
    attach(out, edge);
}

/// Whether a class of a side that was not known to be dead has none of `values`.
fn loses(edge: &Edge, side: usize, values: &[usize]) -> bool {
    let mut seen = vec![false; edge.f[side].len()];
    for &x in values {
        seen[edge.class[side][x] as usize] = true;
    }
    edge.f[side].iter().zip(seen).any(|(&message, seen)| message < HALF && !seen)
}

/// Whether every class of a side has one of `values`.
fn keeps_all(edge: &Edge, side: usize, values: &[usize]) -> bool {
    let mut missing = edge.f[side].len();
    let mut seen = vec![false; missing];
    for &x in values {
        let seen = &mut seen[edge.class[side][x] as usize];
        missing -= usize::from(!*seen);
        *seen = true;
        if missing == 0 {
            return true;
        }
    }
    missing == 0
}

fn single_value(var: &Var) -> Option<usize> {
    let mut living = var.living();
    living.next().filter(|_| living.next().is_none())
}

fn edge_cost(edge: &Edge, x: usize, y: usize) -> i64 {
    let (a, b) = (edge.class[0][x] as usize, edge.class[1][y] as usize);
    edge.f[0][a] + edge.f[1][b] + edge.cost(0, a, b)
}

/// Folds an edge whose end opposite to `side` has the single value `z` into the unary cost of `side`.
fn fold(out: &mut Model, edge: &Edge, side: usize, z: usize, var: usize, kept: &Kept) {
    if var == usize::MAX {
        return;
    }
    if loses(edge, 1 - side, &[z]) {
        out.vars[var].settled = None;
    }
    for (theta, &x) in out.vars[var].theta.iter_mut().zip(kept.of(var)) {
        let cost = if side == 0 { edge_cost(edge, x, z) } else { edge_cost(edge, z, x) };
        *theta = (*theta + cost.min(DEAD)).min(DEAD);
    }
}

/// The `edges` of `list` (each `(edge, side that is ends[0])`) as one, over `values` of the two ends.
pub fn join(edges: &[Edge], ends: [usize; 2], list: &[(usize, usize)], values: [&[usize]; 2]) -> Edge {
    let mut class: [Vec<u16>; 2] = [Vec::new(), Vec::new()];
    // Per side, for each new class a value that has it.
    let mut sample: [Vec<usize>; 2] = [Vec::new(), Vec::new()];
    for side in 0..2 {
        let mut codes = vec![0u32; values[side].len()];
        for &(e, first) in list {
            let old = &edges[e].class[side ^ first];
            for (code, &x) in codes.iter_mut().zip(values[side]) {
                *code = *code << 16 | u32::from(old[x]);
            }
            let mut distinct = codes.clone();
            distinct.sort_unstable();
            distinct.dedup();
            for code in &mut codes {
                *code = distinct.partition_point(|other| other < code) as u32;
            }
        }
        let count = codes.iter().max().map_or(0, |&most| most as usize + 1);
        sample[side] = vec![usize::MAX; count];
        for (&code, &x) in codes.iter().zip(values[side]) {
            if sample[side][code as usize] == usize::MAX {
                sample[side][code as usize] = x;
            }
        }
        class[side] = codes.into_iter().map(|code| code as u16).collect();
    }
    let mut f = [vec![0i64; sample[0].len()], vec![0i64; sample[1].len()]];
    let columns = sample[1].len();
    let mut table = vec![0i64; sample[0].len() * columns];
    for &(e, first) in list {
        let edge = &edges[e];
        for side in 0..2 {
            for (f, &x) in f[side].iter_mut().zip(&sample[side]) {
                *f = (*f + edge.f[side ^ first][edge.class[side ^ first][x] as usize]).min(DEAD);
            }
        }
        let across: Vec<usize> = sample[1].iter().map(|&y| edge.class[1 ^ first][y] as usize).collect();
        let width = edge.f[1 ^ first].len();
        for (into, &x) in table.chunks_exact_mut(columns).zip(&sample[0]) {
            let class = edge.class[first][x] as usize;
            let row = &edge.w[first][class * width..(class + 1) * width];
            for (cost, &b) in into.iter_mut().zip(&across) {
                *cost = (*cost + row[b]).min(DEAD);
            }
        }
    }
    Edge::new(ends.map(|end| end as u32), class, f, table)
}

/// Adds an edge to the model after merging equal classes; folds it if one side has a single class.
pub fn attach(out: &mut Model, mut edge: Edge) {
    loop {
        let before = edge.f[0].len() + edge.f[1].len();
        edge = merge_classes(out, edge, 0);
        edge = merge_classes(out, edge, 1);
        if edge.f[0].len() + edge.f[1].len() == before {
            break;
        }
    }
    for side in 0..2 {
        if edge.f[1 - side].len() == 1 {
            let var = &mut out.vars[edge.ends[side] as usize];
            for (theta, &class) in var.theta.iter_mut().zip(&edge.class[side]) {
                let class = class as usize;
                let cost = edge.f[side][class] + edge.f[1 - side][0] + edge.cost(side, class, 0);
                *theta = (*theta + cost.min(DEAD)).min(DEAD);
            }
            return;
        }
    }
    edge.distinct = true;
    out.edges.push(edge);
}

/// Merges the classes of `side` whose rows are equal up to a constant.
fn merge_classes(out: &mut Model, mut edge: Edge, side: usize) -> Edge {
    let (own, other) = (edge.f[side].len(), edge.f[1 - side].len());
    let mut normal = Cow::Borrowed(&edge.w[side]);
    let mut shift = vec![0; own];
    for (c, shift) in shift.iter_mut().enumerate() {
        let row = c * other..(c + 1) * other;
        let least = edge.w[side][row.clone()].iter().copied().min().unwrap_or(0);
        if least != 0 && least < HALF {
            *shift = least;
            for cost in normal.to_mut()[row].iter_mut().filter(|cost| **cost < HALF) {
                *cost -= least;
            }
        }
    }
    let mut known: FxHashMap<&[i64], usize> = FxHashMap::default();
    let mut target = Vec::with_capacity(own);
    let mut rows: Vec<&[i64]> = Vec::with_capacity(own);
    for row in normal.chunks_exact(other) {
        let next = rows.len();
        let class = if own <= FEW {
            rows.iter().position(|known| *known == row).unwrap_or(next)
        } else {
            *known.entry(row).or_insert(next)
        };
        if class == next {
            rows.push(row);
        }
        target.push(class);
    }
    if rows.len() == own {
        return edge;
    }
    for (message, shift) in edge.f[side].iter_mut().zip(&shift) {
        *message = (*message + shift).min(DEAD);
    }
    let mut f = vec![DEAD; rows.len()];
    for (&class, &message) in target.iter().zip(&edge.f[side]) {
        f[class] = f[class].min(message);
    }
    let var = &mut out.vars[edge.ends[side] as usize];
    for (theta, &class) in var.theta.iter_mut().zip(&edge.class[side]) {
        if *theta < HALF {
            *theta = (*theta + edge.f[side][class as usize] - f[target[class as usize]]).min(DEAD);
        }
    }
    let merged = rows.concat();
    let class = edge.class[side].iter().map(|&class| target[class as usize] as u16).collect();
    let Edge { ends, class: mut classes, f: mut messages, .. } = edge;
    classes[side] = class;
    messages[side] = f;
    let mut transposed = Vec::with_capacity(merged.len());
    for column in 0..other {
        transposed.extend(merged.chunks_exact(other).map(|row| row[column]));
    }
    let w = if side == 0 { [merged, transposed] } else { [transposed, merged] };
    Edge { ends, class: classes, f: messages, w, distinct: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{minimum, model, ring};

    #[test]
    fn single_values_fold_into_their_neighbours() {
        let pair = model(&[&[3], &[1, 2]], &[(0, 1, &[&[10, 0]])]);
        let out = compact(pair, &[0, 1]);
        assert_eq!(out.fixed, [(0, 0)]);
        assert_eq!(out.constant, 3);
        assert_eq!(out.vars[0].theta, [11, 2]);
        assert!(out.edges.is_empty());
    }

    #[test]
    fn parallel_edges_join_and_equal_classes_merge() {
        let free: &[&[i64]] = &[&[0, -1], &[0, -1], &[0, 0]];
        let cost: &[&[i64]] = &[&[1, 0, 0], &[2, 2, 0]];
        let pair = model(&[&[0, 0, 0], &[0, 0]], &[(0, 1, free), (1, 0, cost)]);
        let out = compact(pair.clone(), &[1, 0]);
        assert_eq!(out.edges.len(), 1);
        assert_eq!(minimum(&out).map(|(cost, _)| cost), minimum(&pair).map(|(cost, _)| cost));
        let joined = compact(model(&[&[0, 0, 0], &[0, 0]], &[(0, 1, free)]), &[0, 1]);
        assert_eq!(joined.edges[0].f.each_ref().map(Vec::len), [2, 2]);
    }

    #[test]
    fn edges_that_keep_their_classes_are_taken_over_without_dead_values() {
        let table: &[&[i64]] = &[&[0, -1, 3], &[0, 5, -1]];
        let mut pair = model(&[&[0, 1], &[0, 2, 4]], &[(0, 1, table)]);
        pair.vars[0] = Var { origin: 0, labels: vec![0, 1, 2], theta: vec![0, 9, 1], settled: None };
        pair.edges[0].class[0] = vec![0, 0, 1];
        let mut once = compact(pair, &[0, 1]);
        assert!(once.edges[0].distinct);
        let before = once.edges[0].clone();
        once.kill(0, 0);
        let least = minimum(&once).map(|(cost, _)| cost);
        let again = compact(once, &[1, 0]);
        assert_eq!(minimum(&again).map(|(cost, _)| cost), least);
        assert_eq!(again.vars[1].labels, [1, 2]);
        assert_eq!(again.edges[0].class, [vec![0, 1, 2], vec![0, 1]]);
        assert_eq!((again.edges[0].ends, &again.edges[0].w[1]), ([0, 1], &before.w[0]));
    }

    #[test]
    fn a_new_order_changes_no_cost() {
        let whole = ring(5, 3);
        let out = compact(whole.clone(), &[3, 1, 4, 0, 2]);
        assert_eq!(minimum(&out).map(|(cost, _)| cost), minimum(&whole).map(|(cost, _)| cost));
        let (cost, values) = minimum(&out).unwrap();
        let mut labels = vec![0; 5];
        out.labels(&values, &mut labels);
        let labels: Vec<usize> = labels.into_iter().map(|label: u32| label as usize).collect();
        assert_eq!(whole.evaluate(&labels), cost);
    }
}
