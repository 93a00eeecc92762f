//! Programs from the reparametrised costs: assign the variables in order, each to the value that
//! looks cheapest, and keep the rest arc consistent (so that a greedy choice rarely meets a dead end);
//! undo and try the next value where it does.
//!
//! The score of value `x` of `s` is `θ_s(x) + Σ_e min_b [f_es(c) + f_et(b) + w(c, b)]`, `b` over the
//! classes still possible: exact for assigned neighbours, an optimistic marginal for the others.

use crate::model::{HALF, Model};

/// Dead ends after which a dive gives up (unless it must not).
pub const PATIENCE: u64 = 1_000;

struct Dive<'a> {
    model: &'a Model,
    alive: Vec<Vec<bool>>,
    /// Living values per variable.
    left: Vec<u32>,
    /// Living values per class, per edge and side.
    counts: Vec<[Vec<u32>; 2]>,
    trail: Vec<(u32, u32)>,
    queue: Vec<(u32, u8)>,
}

/// A feasible assignment (value index per variable), or `None` if there is none or `patience` dead
/// ends were met (`Err`: `check` failed). `consistent`: the model is arc consistent.
///
/// # Errors
/// What `check` returns.
pub fn dive<E>(
    model: &Model,
    patience: u64,
    consistent: bool,
    mut check: impl FnMut() -> Result<(), E>,
) -> Result<Option<Vec<usize>>, E> {
    let mut dive = Dive::new(model);
    if !consistent {
        dive.queue.extend((0..model.edges.len() as u32).flat_map(|e| [(e, 0), (e, 1)]));
    }
    if !dive.propagate() {
        return Ok(None);
    }
    let mut failures = 0;
    // Per level: remaining candidates (best last) and the trail length before the assignment.
    let mut levels: Vec<(Vec<u32>, usize)> = Vec::new();
    let mut forward = true;
    while levels.len() < model.vars.len() || !forward {
        if forward {
            if levels.len() % 256 == 255 {
                check()?;
            }
            let candidates = dive.candidates(levels.len());
            levels.push((candidates, dive.trail.len()));
        }
        let Some((candidates, mark)) = levels.last_mut() else { return Ok(None) };
        let mark = *mark;
        dive.undo(mark);
        let Some(x) = candidates.pop() else {
            levels.pop();
            forward = false;
            continue;
        };
        forward = dive.assign(levels.len() - 1, x as usize);
        if !forward {
            failures += 1;
            check()?;
            if failures > patience {
                return Ok(None);
            }
        }
    }
    let chosen = |alive: &Vec<bool>| alive.iter().position(|&alive| alive).unwrap_or(0);
    Ok(Some(dive.alive.iter().map(chosen).collect()))
}

impl<'a> Dive<'a> {
    fn new(model: &'a Model) -> Self {
        let alive: Vec<Vec<bool>> =
            model.vars.iter().map(|var| var.theta.iter().map(|&theta| theta < HALF).collect()).collect();
        let left = alive
            .iter()
            .map(|alive: &Vec<bool>| alive.iter().filter(|&&alive| alive).count() as u32)
            .collect();
        let count = |edge: &crate::model::Edge| {
            [0, 1].map(|side| {
                let mut counts = vec![0; edge.f[side].len()];
                for (&class, &alive) in edge.class[side].iter().zip(&alive[edge.ends[side] as usize]) {
                    counts[class as usize] += u32::from(alive);
                }
                counts
            })
        };
        let counts = model.edges.iter().map(count).collect();
        Self { model, alive, left, counts, trail: Vec::new(), queue: Vec::new() }
    }

    /// Living values of `var`, the cheapest last; equal scores: the lowest index last.
    fn candidates(&self, var: usize) -> Vec<u32> {
        if self.left[var] == 1 {
            return self.alive[var].iter().position(|&alive| alive).map(|x| x as u32).into_iter().collect();
        }
        let mut score = self.model.vars[var].theta.clone();
        for &(e, side) in &self.model.incident[var] {
            let (edge, side) = (&self.model.edges[e as usize], side as usize);
            let counts = &self.counts[e as usize];
            let best: Vec<i64> = (0..edge.f[side].len())
                .map(|c| {
                    let living = (0..edge.f[1 - side].len()).filter(|&b| counts[1 - side][b] > 0);
                    let least = living.map(|b| edge.f[1 - side][b] + edge.cost(side, c, b)).min();
                    (edge.f[side][c] + least.unwrap_or(HALF)).min(HALF)
                })
                .collect();
            for (score, &class) in score.iter_mut().zip(&edge.class[side]) {
                *score = (*score + best[class as usize]).min(HALF);
            }
        }
        let mut candidates: Vec<u32> =
            (0..score.len() as u32).filter(|&x| self.alive[var][x as usize]).collect();
        candidates.sort_by_key(|&x| std::cmp::Reverse((score[x as usize], x)));
        candidates
    }

    fn assign(&mut self, var: usize, x: usize) -> bool {
        for other in 0..self.alive[var].len() {
            if other != x && self.alive[var][other] {
                self.remove(var, other);
            }
        }
        self.propagate()
    }

    fn remove(&mut self, var: usize, x: usize) {
        self.alive[var][x] = false;
        self.left[var] -= 1;
        self.trail.push((var as u32, x as u32));
        for &(e, side) in &self.model.incident[var] {
            let class = self.model.edges[e as usize].class[side as usize][x];
            let count = &mut self.counts[e as usize][side as usize][class as usize];
            *count -= 1;
            if *count == 0 {
                self.queue.push((e, side));
            }
        }
    }

    /// Removes values without support; false if a variable empties.
    fn propagate(&mut self) -> bool {
        let model = self.model;
        let mut doomed = Vec::new();
        while let Some((e, side)) = self.queue.pop() {
            let (edge, other) = (&model.edges[e as usize], 1 - side as usize);
            let counts = &self.counts[e as usize];
            let supported = |c: usize| {
                (0..counts[1 - other].len())
                    .any(|b| counts[1 - other][b] > 0 && edge.cost(other, c, b) < HALF)
            };
            let lost: Vec<bool> =
                (0..counts[other].len()).map(|c| counts[other][c] > 0 && !supported(c)).collect();
            let end = edge.ends[other] as usize;
            doomed.clear();
            let pairs = self.alive[end].iter().zip(&edge.class[other]).enumerate();
            doomed.extend(pairs.filter(|&(_, (&alive, &c))| alive && lost[c as usize]).map(|(x, _)| x));
            for &x in &doomed {
                self.remove(end, x);
            }
            if self.left[end] == 0 {
                self.queue.clear();
                return false;
            }
        }
        true
    }

    fn undo(&mut self, mark: usize) {
        while self.trail.len() > mark {
            let Some((var, x)) = self.trail.pop() else { return };
            self.alive[var as usize][x as usize] = true;
            self.left[var as usize] += 1;
            for &(e, side) in &self.model.incident[var as usize] {
                let class = self.model.edges[e as usize].class[side as usize][x as usize];
                self.counts[e as usize][side as usize][class as usize] += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{minimum, model, ring};

    #[allow(clippy::unnecessary_wraps)]
    fn always() -> Result<(), ()> {
        Ok(())
    }

    #[test]
    fn a_dive_is_feasible() {
        let ring = ring(7, 5);
        let values = dive(&ring, PATIENCE, false, always).unwrap().unwrap();
        assert!(ring.evaluate(&values) < HALF);
        assert!(ring.evaluate(&values) >= minimum(&ring).unwrap().0);
    }

    #[test]
    fn a_triangle_has_no_two_colouring() {
        let differ: &[&[i64]] = &[&[-1, 0], &[0, -1]];
        let triangle = model(&[&[0, 0], &[0, 0], &[0, 0]], &[(0, 1, differ), (1, 2, differ), (0, 2, differ)]);
        assert_eq!(dive(&triangle, PATIENCE, false, always), Ok(None));
    }

    #[test]
    fn no_patience_gives_up_and_check_is_heard() {
        let differ: &[&[i64]] = &[&[-1, 0], &[0, -1]];
        let triangle = model(&[&[0, 0], &[0, 0], &[0, 0]], &[(0, 1, differ), (1, 2, differ), (0, 2, differ)]);
        assert_eq!(dive(&triangle, 0, false, always), Ok(None));
        assert_eq!(dive(&triangle, 10, false, || Err("stop")), Err("stop"));
    }
}
