//! A* over partial programs (HAP Fig. 10) with the reparametrised remainder as heuristic.
//!
//! What a partial program is and how it is ranked: [`crate::frontier`]. Partial programs with
//! `f > slack` cannot beat the incumbent and are never stored; of two with the same state the dearer is
//! dropped.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::control::Monitor;
use crate::frontier::plan;
use crate::intern::{self, Interner};
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

/// Expansions between looks at the limits.
const PULSE: u64 = 256;

/// The best way found to a state.
#[derive(Clone, Copy)]
struct Way {
    f: i64,
    parent: u32,
    value: u16,
    expanded: bool,
}

/// The states after `level` variables.
struct Level {
    keys: Interner,
    ways: Vec<Way>,
}

/// Finds an optimal assignment of `model` with cost at most `slack` above its constant, expanding at
/// most `budget` partial programs.
pub fn search(model: &Model, slack: i64, budget: u64, monitor: &mut Monitor<'_>) -> Outcome {
    let count = model.vars.len();
    let steps = plan(model);
    let width = |level: usize| if level == 0 { 0 } else { steps[level - 1].width() };
    let mut levels: Vec<Level> =
        (0..=count).map(|level| Level { keys: Interner::new(width(level)), ways: Vec::new() }).collect();
    levels[0].keys.intern(&[]);
    levels[0].ways.push(Way { f: 0, parent: 0, value: 0, expanded: false });
    let mut heap = BinaryHeap::from([(Reverse(0i64), 0u32, Reverse(0u32))]);
    let start = monitor.expansions;
    let mut stored = 1u64;
    let (mut costs, mut key) = (Vec::new(), Vec::new());
    while let Some((Reverse(f), depth, Reverse(number))) = heap.pop() {
        let (level, number) = (depth as usize, number as usize);
        if level == count {
            return Outcome::Solved(trace(&levels, number), f);
        }
        let way = &mut levels[level].ways[number];
        if way.expanded {
            continue;
        }
        way.expanded = true;
        let done = monitor.expansions - start;
        if done >= budget {
            return Outcome::Budget(f);
        }
        monitor.expansions += 1;
        if (done + 1).is_multiple_of(PULSE) {
            // A state: its key twice (the hash table is half empty), its way, its place in the heap.
            monitor.bytes = stored * 64 + levels.iter().map(|level| level.keys.bytes()).sum::<u64>();
            if let Err(reason) = monitor.check() {
                return Outcome::Stopped(reason, f);
            }
        }
        let (before, after) = levels.split_at_mut(level + 1);
        let (state, next) = (before[level].keys.key(number), &mut after[0]);
        let step = &steps[level];
        step.costs(state, &mut costs);
        step.append(state, 0, &mut key);
        let start = intern::start(&key);
        for (x, &cost) in costs.iter().enumerate() {
            if cost > slack - f {
                continue;
            }
            if let (Some(last), Some(representative)) = (key.last_mut(), step.representative()) {
                *last = representative[x];
            }
            let new = Way { f: f + cost, parent: number as u32, value: x as u16, expanded: false };
            let child = next.keys.intern_after(start, &key);
            if child == next.ways.len() {
                next.ways.push(new);
                stored += 1;
            } else if new.f < next.ways[child].f {
                // Not expanded yet: the bound is consistent, so nothing improves on an expanded state.
                next.ways[child] = new;
            } else {
                continue;
            }
            heap.push((Reverse(new.f), depth + 1, Reverse(child as u32)));
        }
    }
    Outcome::Exhausted
}

fn trace(levels: &[Level], mut number: usize) -> Vec<usize> {
    let mut values = vec![0; levels.len() - 1];
    for (value, level) in values.iter_mut().zip(&levels[1..]).rev() {
        let way = level.ways[number];
        *value = way.value as usize;
        number = way.parent as usize;
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
