//! A* over partial programs (HAP Fig. 10) with the reparametrised remainder as heuristic.
//!
//! What a partial program is and how it is ranked: [`crate::frontier`]. Partial programs with
//! `f > slack` cannot beat the incumbent and are never stored; of two with the same state the dearer is
//! dropped.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

use crate::control::Monitor;
use crate::frontier::plan;
use crate::model::Model;
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
        let width = if level == 0 { 0 } else { steps[level - 1].width() };
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
        step.costs(&keys[offset..offset + width], &mut costs);
        for (x, &cost) in costs.iter().enumerate() {
            if cost > slack - f {
                continue;
            }
            step.append(&keys[offset..offset + width], x, &mut key);
            let child = Node { parent: id, depth: depth + 1, value: x as u16, key: keys.len(), f: f + cost };
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

fn trace(nodes: &[Node], mut id: u32, count: usize) -> Vec<usize> {
    let mut values = vec![0; count];
    while nodes[id as usize].depth > 0 {
        let node = &nodes[id as usize];
        values[node.depth as usize - 1] = node.value as usize;
        id = node.parent;
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Limits;
    use crate::testing::{minimum, ring, with_monitor};

    fn run(model: &Model, slack: i64, budget: u64, limits: Limits) -> Outcome {
        with_monitor(limits, |monitor| search(model, slack, budget, monitor))
    }

    #[test]
    fn finds_the_optimum_of_a_ring() {
        let ring = ring(9, 5);
        let (least, _) = minimum(&ring).unwrap();
        let outcome = run(&ring, i64::MAX >> 2, u64::MAX, Limits::default());
        assert!(
            matches!(outcome, Outcome::Solved(ref values, cost) if cost == least && ring.evaluate(values) == least)
        );
        assert_eq!(run(&ring, least - 1, u64::MAX, Limits::default()), Outcome::Exhausted);
    }

    #[test]
    fn budget_and_limits_leave_a_bound() {
        let ring = ring(9, 5);
        let (least, _) = minimum(&ring).unwrap();
        assert!(matches!(run(&ring, 1000, 5, Limits::default()), Outcome::Budget(bound) if bound <= least));
    }
}
