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
            out.constant += var.theta[x];
        }
    }
    let mut parallel: BTreeMap<[usize; 2], Vec<(usize, usize)>> = BTreeMap::new();
    for (e, edge) in model.edges.iter().enumerate() {
        let ends = edge.ends.map(|end| end as usize);
        match [single[ends[0]], single[ends[1]]] {
            [Some(x), Some(y)] => out.constant += edge_cost(edge, x, y),
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
        let edge = join(model, *ends, list, &values);
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

/// The edges of `list` (each `(edge, side that is ends[0])`) as one, over living values.
fn join(model: &Model, ends: [usize; 2], list: &[(usize, usize)], values: &[Vec<usize>]) -> Edge {
    let mut class: [Vec<u16>; 2] = [Vec::new(), Vec::new()];
    let mut tuples: [Vec<Vec<u16>>; 2] = [Vec::new(), Vec::new()];
    for side in 0..2 {
        let tuple = |&x: &usize| -> Vec<u16> {
            list.iter().map(|&(e, first)| model.edges[e].class[side ^ first][x]).collect()
        };
        let keys: Vec<Vec<u16>> = values[ends[side]].iter().map(tuple).collect();
        let mut distinct = keys.clone();
        distinct.sort();
        distinct.dedup();
        class[side] = keys.iter().map(|key| distinct.partition_point(|other| other < key) as u16).collect();
        tuples[side] = distinct;
    }
    let message = |side: usize| -> Vec<i64> {
        let of = |tuple: &Vec<u16>| {
            let parts = list.iter().zip(tuple);
            parts.map(|(&(e, first), &c)| model.edges[e].f[side ^ first][c as usize]).sum()
        };
        tuples[side].iter().map(of).collect()
    };
    let f = [message(0), message(1)];
    let mut table = Vec::with_capacity(f[0].len() * f[1].len());
    for a in &tuples[0] {
        for b in &tuples[1] {
            let mut cost = 0;
            for ((&(e, first), &a), &b) in list.iter().zip(a).zip(b) {
                cost = (cost + model.edges[e].cost(first, a as usize, b as usize)).min(DEAD);
            }
            table.push(cost);
        }
    }
    Edge::new(ends.map(|end| end as u32), class, f, table)
}

/// Adds an edge to the model after merging equal classes; folds it if one side has a single class.
fn attach(out: &mut Model, mut edge: Edge) {
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

/// Merges the classes of `side` with equal rows.
fn merge_classes(out: &mut Model, edge: Edge, side: usize) -> Edge {
    let (own, other) = (edge.f[side].len(), edge.f[1 - side].len());
    let mut known: BTreeMap<&[i64], usize> = BTreeMap::new();
    let mut target = Vec::with_capacity(own);
    let mut rows: Vec<&[i64]> = Vec::new();
    for row in edge.w[side].chunks_exact(other) {
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
    let mut classes = edge.class;
    classes[side] = class;
    let mut messages = edge.f;
    messages[side] = f;
    if side == 0 {
        return Edge::new(edge.ends, classes, messages, merged);
    }
    let swapped = Edge::new(
        [edge.ends[1], edge.ends[0]],
        [classes[1].clone(), classes[0].clone()],
        [messages[1].clone(), messages[0].clone()],
        merged,
    );
    Edge::new(edge.ends, classes, messages, swapped.w[1].clone())
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
