//! Layer by layer over partial programs, keeping the best of each layer.
//!
//! Same states and ranking as A* ([`crate::frontier`]), but breadth first with at most `width` states a
//! layer: time and memory are linear in the number of variables. It finds good programs where the bound
//! leaves much open, and it is exact where no layer overflows. `min f` over the states dropped for lack
//! of room, and the cost found, bound the optimum from below.

use rustc_hash::FxHashMap;

use crate::control::Monitor;
use crate::frontier::plan;
use crate::model::Model;
use crate::solution::StopReason;

/// What a beam search found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beam {
    /// Best assignment with cost at most `slack` above the constant, and that cost.
    pub best: Option<(Vec<usize>, i64)>,
    /// No assignment costs less than this above the constant (`i64::MAX`: none costs at most `slack`).
    pub bound: i64,
}

impl Beam {
    /// Nothing was dropped that could be better than what was found.
    pub fn is_exact(&self) -> bool {
        self.best.as_ref().map_or(i64::MAX, |(_, cost)| *cost) <= self.bound
    }
}

struct State {
    f: i64,
    parent: u32,
    value: u16,
    key: Box<[u16]>,
}

/// Searches `model` with at most `width` states a layer.
///
/// # Errors
/// The limit that struck.
pub fn beam(model: &Model, slack: i64, width: usize, monitor: &mut Monitor<'_>) -> Result<Beam, StopReason> {
    let steps = plan(model);
    let mut layer = vec![State { f: 0, parent: 0, value: 0, key: Box::default() }];
    let mut history: Vec<Vec<(u32, u16)>> = Vec::with_capacity(steps.len());
    let mut dropped = i64::MAX;
    let (mut costs, mut key) = (Vec::new(), Vec::new());
    let mut expanded = 0usize;
    for step in &steps {
        let mut next: Vec<State> = Vec::new();
        let mut known: FxHashMap<Box<[u16]>, u32> = FxHashMap::default();
        for (parent, state) in layer.iter().enumerate() {
            expanded += 1;
            if expanded.is_multiple_of(1024) {
                monitor.check()?;
            }
            step.costs(&state.key, &mut costs);
            for (x, &cost) in costs.iter().enumerate() {
                if cost > slack - state.f {
                    continue;
                }
                let (f, parent, value) = (state.f + cost, parent as u32, x as u16);
                step.append(&state.key, x, &mut key);
                if let Some(&old) = known.get(&key[..]) {
                    let old = &mut next[old as usize];
                    if f < old.f {
                        (old.f, old.parent, old.value) = (f, parent, value);
                    }
                    continue;
                }
                let key: Box<[u16]> = key.as_slice().into();
                known.insert(key.clone(), next.len() as u32);
                next.push(State { f, parent, value, key });
            }
        }
        if next.len() > width {
            next.sort_by_key(|state| state.f);
            dropped = dropped.min(next[width].f);
            next.truncate(width);
        }
        history.push(next.iter().map(|state| (state.parent, state.value)).collect());
        layer = next;
    }
    let Some((index, last)) = layer.iter().enumerate().min_by_key(|(_, state)| state.f) else {
        return Ok(Beam { best: None, bound: dropped });
    };
    let (mut values, mut index) = (vec![0; steps.len()], index);
    for (value, layer) in values.iter_mut().zip(&history).rev() {
        let (parent, chosen) = layer[index];
        *value = chosen as usize;
        index = parent as usize;
    }
    Ok(Beam { best: Some((values, last.f)), bound: dropped.min(last.f) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Limits;
    use crate::testing::{minimum, ring, with_monitor};

    fn run(model: &Model, slack: i64, width: usize) -> Beam {
        with_monitor(Limits::default(), |monitor| beam(model, slack, width, monitor)).unwrap()
    }

    #[test]
    fn wide_beams_are_exact_and_narrow_ones_know_it() {
        let ring = ring(9, 5);
        let (least, _) = minimum(&ring).unwrap();
        let wide = run(&ring, 1000, 100);
        assert!(wide.is_exact());
        assert_eq!(wide.bound, least);
        let narrow = run(&ring, 1000, 1);
        assert!(narrow.bound <= least);
        assert!(narrow.best.is_none_or(|(values, cost)| ring.evaluate(&values) == cost && cost >= least));
        assert_eq!(run(&ring, least - 1, 100), Beam { best: None, bound: i64::MAX });
    }
}
