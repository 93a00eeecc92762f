//! Layer by layer over partial programs, keeping the best of each layer.
//!
//! Same states and ranking as A* ([`crate::frontier`]), but breadth first with at most `width` states a
//! layer: time and memory are linear in the number of variables. It finds good programs where the bound
//! leaves much open, and it is exact where no layer overflows. `min f` over the states dropped for lack
//! of room, and the cost found, bound the optimum from below.

use crate::control::Monitor;
use crate::frontier::plan;
use crate::intern::{self, Interner};
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

/// A layer is cut back to its width when it has so many times more.
const OVERFLOW: usize = 8;

#[derive(Clone, Copy)]
struct State {
    f: i64,
    parent: u32,
    value: u16,
}

/// Of the values that lead from one state to the same state the cheapest, in the order of the first of them.
#[derive(Default)]
struct Cheapest {
    found: Vec<(u16, State)>,
    /// Per kind of value its place in `found` + 1, 0 for none.
    place: Vec<u32>,
}

impl Cheapest {
    /// Forgets what was found; kinds are less than `kinds` from now on.
    fn clear(&mut self, kinds: usize) {
        for (kind, _) in self.found.drain(..) {
            self.place[kind as usize] = 0;
        }
        if self.place.len() < kinds {
            self.place.resize(kinds, 0);
        }
    }

    fn add(&mut self, kind: u16, new: State) {
        let place = &mut self.place[kind as usize];
        if *place == 0 {
            self.found.push((kind, new));
            *place = self.found.len() as u32;
        } else {
            let known = &mut self.found[*place as usize - 1].1;
            if new.f < known.f {
                *known = new;
            }
        }
    }
}

/// Searches `model` with at most `width` states a layer.
///
/// # Errors
/// The limit that struck.
pub fn beam(model: &Model, slack: i64, width: usize, monitor: &mut Monitor<'_>) -> Result<Beam, StopReason> {
    let steps = plan(model);
    // A layer: its states, best first where some were dropped, and the number of the key of each.
    let mut layer = vec![(State { f: 0, parent: 0, value: 0 }, 0u32)];
    let mut keys = Interner::new(0);
    keys.intern(&[]);
    let (mut known, mut kept) = (Interner::new(0), Interner::new(0));
    let mut history: Vec<Vec<(u32, u16)>> = Vec::with_capacity(steps.len());
    let mut dropped = i64::MAX;
    let (mut costs, mut key, mut cheapest) = (Vec::new(), Vec::new(), Cheapest::default());
    let mut expanded = 0usize;
    for step in &steps {
        let mut next: Vec<(State, u32)> = Vec::new();
        // States from here on find no room.
        let mut cut = i64::MAX;
        known.reset(step.width());
        let representative = step.representative();
        for (parent, &(state, number)) in layer.iter().enumerate() {
            expanded += 1;
            if expanded.is_multiple_of(1024) {
                monitor.check()?;
            }
            let state_key = keys.key(number as usize);
            step.costs(state_key, &mut costs);
            cheapest.clear(costs.len());
            for (x, &cost) in costs.iter().enumerate() {
                if cost > slack - state.f {
                    continue;
                }
                if state.f + cost >= cut {
                    dropped = dropped.min(state.f + cost);
                    continue;
                }
                let new = State { f: state.f + cost, parent: parent as u32, value: x as u16 };
                let kind = representative.map_or(0, |representative| representative[x]);
                cheapest.add(kind, new);
            }
            step.carry(state_key, &mut key);
            key.extend(representative.map(|_| 0));
            let start = intern::start(&key);
            for &(kind, new) in &cheapest.found {
                if representative.is_some() {
                    key[step.width() - 1] = kind;
                }
                let number = known.intern_after(start, &key);
                if number == next.len() {
                    next.push((new, number as u32));
                } else if new.f < next[number].0.f {
                    next[number].0 = new;
                }
            }
            if next.len() > width.saturating_mul(OVERFLOW) {
                next.sort_by_key(|(state, _)| state.f);
                cut = next[width].0.f;
                dropped = dropped.min(cut);
                next.truncate(width);
                kept.reset(step.width());
                for (_, number) in &mut next {
                    *number = kept.intern(known.key(*number as usize)) as u32;
                }
                std::mem::swap(&mut known, &mut kept);
            }
        }
        if next.len() > width {
            next.sort_by_key(|(state, _)| state.f);
            dropped = dropped.min(next[width].0.f);
            next.truncate(width);
        }
        history.push(next.iter().map(|(state, _)| (state.parent, state.value)).collect());
        layer = next;
        std::mem::swap(&mut keys, &mut known);
    }
    let Some((index, (last, _))) = layer.iter().enumerate().min_by_key(|(_, (state, _))| state.f) else {
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
