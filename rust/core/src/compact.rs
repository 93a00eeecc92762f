//! Rebuilds a model without its dead values, decided variables and superfluous classes, in a given
//! variable order.
//!
//! All steps are exact and keep the invariant that every term is non-negative:
//! - a variable with one living value is folded: its edges become unary costs of the neighbours;
//! - parallel edges become one over pairs of classes, `w = w1 + w2`, `f = f1 + f2`;
//! - classes with equal rows of `w` become one with `f = min f_c`, the rest `f_c - f` goes to `θ`;
//! - an edge with a single class on one side becomes unary.

use std::collections::BTreeMap;

use crate::model::{DEAD, Edge, HALF, Model, Var};

/// The compacted model over `keep` (in this order). Variables with one living value are always folded;
/// other variables outside `keep` must not be adjacent to any in it. `constant` carries over.
pub fn compact(model: &Model, keep: &[usize]) -> Model {
    let mut position = vec![usize::MAX; model.vars.len()];
    let mut out = Model { constant: model.constant, fixed: model.fixed.clone(), ..Model::default() };
    let single: Vec<Option<usize>> = model.vars.iter().map(single_value).collect();
    // For each kept variable the old index of each value.
    let mut values: Vec<Vec<usize>> = Vec::new();
    for &old in keep {
        if single[old].is_some() {
            continue;
        }
        let var = &model.vars[old];
        let living: Vec<usize> = var.living().collect();
        position[old] = out.vars.len();
        out.vars.push(Var {
            origin: var.origin,
            labels: living.iter().map(|&x| var.labels[x]).collect(),
            theta: living.iter().map(|&x| var.theta[x]).collect(),
        });
        values.push(living);
    }
    for (var, &value) in model.vars.iter().zip(&single) {
        if let Some(x) = value {
            out.fixed.push((var.origin, var.labels[x]));
            out.constant = (out.constant + var.theta[x]).min(DEAD);
        }
    }
    let mut parallel: BTreeMap<[usize; 2], Vec<(usize, usize)>> = BTreeMap::new();
    for (e, edge) in model.edges.iter().enumerate() {
        let ends = edge.ends.map(|end| end as usize);
        match [single[ends[0]], single[ends[1]]] {
            [Some(x), Some(y)] => out.constant = (out.constant + edge_cost(edge, x, y).min(DEAD)).min(DEAD),
            [Some(x), None] => fold(&mut out, edge, 1, x, position[ends[1]], &values),
            [None, Some(y)] => fold(&mut out, edge, 0, y, position[ends[0]], &values),
            [None, None] => {
                let [a, b] = ends.map(|end| position[end]);
                if a < b && b != usize::MAX {
                    parallel.entry([a, b]).or_default().push((e, 0));
                } else if b < a && a != usize::MAX {
                    parallel.entry([b, a]).or_default().push((e, 1));
                }
            }
        }
    }
    for (ends, list) in &parallel {
        let edge = join(model, *ends, list, [&values[ends[0]], &values[ends[1]]]);
        attach(&mut out, edge);
    }
    out.index();
    out
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
fn fold(out: &mut Model, edge: &Edge, side: usize, z: usize, var: usize, values: &[Vec<usize>]) {
    if var == usize::MAX {
        return;
    }
    for (theta, &x) in out.vars[var].theta.iter_mut().zip(&values[var]) {
        let cost = if side == 0 { edge_cost(edge, x, z) } else { edge_cost(edge, z, x) };
        *theta = (*theta + cost.min(DEAD)).min(DEAD);
    }
}

/// The edges of `list` (each `(edge, side that is ends[0])`) as one, over `values` of the two ends.
pub fn join(model: &Model, ends: [usize; 2], list: &[(usize, usize)], values: [&[usize]; 2]) -> Edge {
    let mut class: [Vec<u16>; 2] = [Vec::new(), Vec::new()];
    // Per side, for each new class a value that has it.
    let mut sample: [Vec<usize>; 2] = [Vec::new(), Vec::new()];
    for side in 0..2 {
        let mut codes = vec![0u32; values[side].len()];
        for &(e, first) in list {
            let old = &model.edges[e].class[side ^ first];
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
        let edge = &model.edges[e];
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
    out.edges.push(edge);
}

/// Merges the classes of `side` whose rows are equal up to a constant.
fn merge_classes(out: &mut Model, mut edge: Edge, side: usize) -> Edge {
    let (own, other) = (edge.f[side].len(), edge.f[1 - side].len());
    let mut normal = edge.w[side].clone();
    let mut shift = vec![0; own];
    for (row, shift) in normal.chunks_exact_mut(other).zip(&mut shift) {
        let least = row.iter().copied().min().unwrap_or(0);
        if least != 0 && least < HALF {
            *shift = least;
            for cost in row.iter_mut().filter(|cost| **cost < HALF) {
                *cost -= least;
            }
        }
    }
    let mut known: BTreeMap<&[i64], usize> = BTreeMap::new();
    let mut target = Vec::with_capacity(own);
    let mut rows: Vec<&[i64]> = Vec::new();
    for row in normal.chunks_exact(other) {
        let next = rows.len();
        let class = *known.entry(row).or_insert(next);
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
    Edge { ends, class: classes, f: messages, w }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{minimum, model, ring};

    #[test]
    fn single_values_fold_into_their_neighbours() {
        let pair = model(&[&[3], &[1, 2]], &[(0, 1, &[&[10, 0]])]);
        let out = compact(&pair, &[0, 1]);
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
        let out = compact(&pair, &[1, 0]);
        assert_eq!(out.edges.len(), 1);
        assert_eq!(minimum(&out).map(|(cost, _)| cost), minimum(&pair).map(|(cost, _)| cost));
        let joined = compact(&model(&[&[0, 0, 0], &[0, 0]], &[(0, 1, free)]), &[0, 1]);
        assert_eq!(joined.edges[0].f.each_ref().map(Vec::len), [2, 2]);
    }

    #[test]
    fn a_new_order_changes_no_cost() {
        let whole = ring(5, 3);
        let out = compact(&whole, &[3, 1, 4, 0, 2]);
        assert_eq!(minimum(&out).map(|(cost, _)| cost), minimum(&whole).map(|(cost, _)| cost));
        let (cost, values) = minimum(&out).unwrap();
        let mut labels = vec![0; 5];
        out.labels(&values, &mut labels);
        let labels: Vec<usize> = labels.into_iter().map(|label: u32| label as usize).collect();
        assert_eq!(whole.evaluate(&labels), cost);
    }
}
