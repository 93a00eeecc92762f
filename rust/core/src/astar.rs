//! A* over partial programs (HAP Fig. 10) with the reparametrised remainder as heuristic.
//!
//! Variables are assigned in model order. A partial program of the first `k` variables is ranked by
//!
//! `f = Σ_{s<k} θ_s(x_s) + Σ_{edges inside} (f + f + w) + Σ_{edges across} min_b [f_es(c) + f_et(b) + w(c, b)]`.
//!
//! All terms are non-negative and a marginal is at most the cost that replaces it, so `f` never
//! decreases along a path: it is an admissible and consistent bound. Two partial programs with the same
//! classes on all edges across the cut have the same completions; only the cheaper is kept (lines 9-14
//! of Fig. 10). Partial programs with `f > slack` cannot beat the incumbent and are never stored.
//!
//! A partial program is stored as one representative value per open variable: the first of the values
//! with the same classes on the edges still open.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

use crate::control::Monitor;
use crate::model::{HALF, Model};
use crate::solution::StopReason;

/// How a search over one component ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// An optimal assignment and its cost above the model's constant.
    Solved(Vec<usize>, i64),
    /// Nothing costs at most `slack`.
    Exhausted,
    /// The budget is spent; no assignment costs less than this above the constant.
    Budget(i64),
    /// A limit of the whole search struck; bound as above.
    Stopped(StopReason, i64),
}

/// An edge to an earlier variable.
struct Back {
    /// Slot of the earlier variable in the state before this step.
    slot: usize,
    /// Class of the earlier variable's value.
    slot_class: Vec<u16>,
    /// Class of the new variable's value.
    class: Vec<u16>,
    /// `[earlier class][new class]`: edge cost less the marginal counted before.
    extra: Vec<i64>,
    columns: usize,
}

/// Everything needed to append one variable.
struct Step {
    base: Vec<i64>,
    back: Vec<Back>,
    /// Per slot after the step: the slot before (or `usize::MAX`: the new variable) and the
    /// representative of each value.
    slots: Vec<(usize, Vec<u16>)>,
}

struct Node {
    parent: u32,
    depth: u32,
    value: u16,
    key: usize,
    f: i64,
}

/// Finds an optimal assignment of `model` with cost at most `slack` above its constant, expanding at
/// most `budget` partial programs.
pub fn search(model: &Model, slack: i64, budget: u64, monitor: &mut Monitor<'_>) -> Outcome {
    let count = model.vars.len();
    let steps = plan(model);
    let mut nodes = vec![Node { parent: 0, depth: 0, value: 0, key: 0, f: 0 }];
    let mut keys: Vec<u16> = Vec::new();
    let mut known: Vec<FxHashMap<Box<[u16]>, u32>> = (0..=count).map(|_| FxHashMap::default()).collect();
    known[0].insert(Box::default(), 0);
    let mut heap = BinaryHeap::from([(Reverse(0i64), 0u32, Reverse(0u32))]);
    let start = monitor.expansions;
    let (mut costs, mut key) = (Vec::new(), Vec::new());
    while let Some((Reverse(f), depth, Reverse(id))) = heap.pop() {
        let level = depth as usize;
        if level == count {
            return Outcome::Solved(trace(&nodes, id, count), f);
        }
        let width = if level == 0 { 0 } else { steps[level - 1].slots.len() };
        let offset = nodes[id as usize].key;
        if known[level].get(&keys[offset..offset + width]) != Some(&id) {
            continue;
        }
        if monitor.expansions - start >= budget {
            return Outcome::Budget(f);
        }
        monitor.expansions += 1;
        if (monitor.expansions - start).is_multiple_of(256) {
            monitor.bytes = nodes.len() as u64 * 160 + keys.len() as u64 * 4;
            if let Err(reason) = monitor.check() {
                return Outcome::Stopped(reason, f);
            }
        }
        let step = &steps[level];
        append_costs(step, &keys[offset..offset + width], &mut costs);
        for (x, &cost) in costs.iter().enumerate() {
            if cost > slack - f {
                continue;
            }
            key.clear();
            for (source, representative) in &step.slots {
                let value = if *source == usize::MAX { x as u16 } else { keys[offset + source] };
                key.push(representative[value as usize]);
            }
            let child = Node {
                parent: id,
                depth: depth + 1,
                value: x as u16,
                key: keys.len(),
                f: f + cost,
            };
            let new = nodes.len() as u32;
            match known[level + 1].get_mut(&key[..]) {
                Some(old) if nodes[*old as usize].f <= child.f => continue,
                Some(old) => *old = new,
                None => {
                    known[level + 1].insert(key.clone().into_boxed_slice(), new);
                }
            }
            keys.extend_from_slice(&key);
            heap.push((Reverse(child.f), child.depth, Reverse(new)));
            nodes.push(child);
        }
    }
    Outcome::Exhausted
}

/// Cost of appending each value of the new variable to a state.
fn append_costs(step: &Step, state: &[u16], costs: &mut Vec<i64>) {
    costs.clear();
    costs.extend_from_slice(&step.base);
    for back in &step.back {
        let class = back.slot_class[state[back.slot] as usize] as usize;
        let extra = &back.extra[class * back.columns..(class + 1) * back.columns];
        for (cost, &class) in costs.iter_mut().zip(&back.class) {
            *cost = (*cost + extra[class as usize]).min(HALF);
        }
    }
}

fn trace(nodes: &[Node], mut id: u32, count: usize) -> Vec<usize> {
    let mut values = vec![0; count];
    while nodes[id as usize].depth > 0 {
        let node = &nodes[id as usize];
        values[node.depth as usize - 1] = node.value as usize;
        id = node.parent;
    }
    values
}

fn plan(model: &Model) -> Vec<Step> {
    let mut live: Vec<usize> = Vec::new();
    let mut marginal = Vec::new();
    let mut steps = Vec::with_capacity(model.vars.len());
    for (s, var) in model.vars.iter().enumerate() {
        let mut base = var.theta.clone();
        let mut back = Vec::new();
        for &(e, side) in &model.incident[s] {
            let (edge, side) = (&model.edges[e as usize], side as usize);
            let other = edge.ends[1 - side] as usize;
            if other > s {
                edge.marginal(side, &mut marginal);
                for (base, &class) in base.iter_mut().zip(&edge.class[side]) {
                    let class = class as usize;
                    *base = (*base + edge.f[side][class] + marginal[class].min(HALF)).min(HALF);
                }
                continue;
            }
            let columns = edge.f[side].len();
            edge.marginal(1 - side, &mut marginal);
            let mut extra = Vec::with_capacity(marginal.len() * columns);
            for (a, &least) in marginal.iter().enumerate() {
                let costs = (0..columns).map(|b| edge.f[side][b] + edge.cost(1 - side, a, b));
                extra.extend(costs.map(|cost| if least >= HALF || cost >= HALF { HALF } else { cost - least }));
            }
            let slot = live.iter().position(|&live| live == other).unwrap_or(0);
            let (class, slot_class) = (edge.class[side].clone(), edge.class[1 - side].clone());
            back.push(Back { slot, slot_class, class, extra, columns });
        }
        let mut next = Vec::new();
        let mut slots = Vec::new();
        for (slot, &open) in live.iter().enumerate().chain(std::iter::once((usize::MAX, &s))) {
            if let Some(representative) = representatives(model, open, s) {
                next.push(open);
                slots.push((slot, representative));
            }
        }
        live = next;
        steps.push(Step { base, back, slots });
    }
    steps
}

/// For each value of `var` the first value with the same classes on its edges to variables after
/// `last`; `None` if there are no such edges.
fn representatives(model: &Model, var: usize, last: usize) -> Option<Vec<u16>> {
    let open: Vec<&[u16]> = model.incident[var]
        .iter()
        .map(|&(e, side)| (&model.edges[e as usize], side as usize))
        .filter(|(edge, side)| edge.ends[1 - side] as usize > last)
        .map(|(edge, side)| &edge.class[side][..])
        .collect();
    if open.is_empty() {
        return None;
    }
    let same = |x: usize, y: usize| open.iter().all(|class| class[x] == class[y]);
    let first = |x: usize| (0..x).find(|&y| same(x, y)).unwrap_or(x) as u16;
    Some((0..model.vars[var].theta.len()).map(first).collect())
}
