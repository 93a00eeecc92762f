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
    /// Per value of every variable; where those of each begin, and one more.
    alive: Vec<bool>,
    starts: Vec<usize>,
    /// Living values per variable.
    left: Vec<u32>,
    /// Living values per class of every side of every edge; where those of each begin.
    counts: Vec<u32>,
    places: Vec<[usize; 2]>,
    trail: Vec<(u32, u32)>,
    queue: Vec<(u32, u8)>,
    /// Kept for their memory.
    best: Vec<i64>,
    score: Vec<i64>,
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
    let chosen = |var| dive.alive(var).iter().position(|&alive| alive).unwrap_or(0);
    Ok(Some((0..model.vars.len()).map(chosen).collect()))
}

impl<'a> Dive<'a> {
    fn new(model: &'a Model) -> Self {
        let (mut alive, mut starts, mut left) = (Vec::new(), Vec::new(), Vec::new());
        for var in &model.vars {
            starts.push(alive.len());
            alive.extend(var.theta.iter().map(|&theta| theta < HALF));
            left.push(var.living().count() as u32);
        }
        starts.push(alive.len());
        let mut counts = Vec::new();
        let mut places = Vec::with_capacity(model.edges.len());
        for edge in &model.edges {
            places.push([0, 1].map(|side| {
                let place = counts.len();
                counts.resize(place + edge.f[side].len(), 0);
                let living = &alive[starts[edge.ends[side] as usize]..];
                for (&class, &alive) in edge.class[side].iter().zip(living) {
                    counts[place + class as usize] += u32::from(alive);
                }
                place
            }));
        }
        let (trail, queue, best, score) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { model, alive, starts, left, counts, places, trail, queue, best, score }
    }

    fn alive(&self, var: usize) -> &[bool] {
        &self.alive[self.starts[var]..self.starts[var + 1]]
    }

    /// Living values per class of a side of an edge.
    fn counts(&self, e: u32, side: usize) -> &[u32] {
        let place = self.places[e as usize][side];
        &self.counts[place..place + self.model.edges[e as usize].f[side].len()]
    }

    /// Living values of `var`, the cheapest last; equal scores: the lowest index last.
    fn candidates(&mut self, var: usize) -> Vec<u32> {
        if self.left[var] == 1 {
            return self.alive(var).iter().position(|&alive| alive).map(|x| x as u32).into_iter().collect();
        }
        let (mut score, mut best) = (std::mem::take(&mut self.score), std::mem::take(&mut self.best));
        score.clone_from(&self.model.vars[var].theta);
        for &(e, side) in &self.model.incident[var] {
            let (edge, side) = (&self.model.edges[e as usize], side as usize);
            let counts = self.counts(e, 1 - side);
            let others = counts.len();
            best.clear();
            best.extend(edge.f[side].iter().zip(edge.w[side].chunks_exact(others)).map(|(&own, row)| {
                let living =
                    counts.iter().zip(row).zip(&edge.f[1 - side]).filter(|&((&count, _), _)| count > 0);
                let least = living.map(|((_, &cost), &message)| message + cost).min();
                (own + least.unwrap_or(HALF)).min(HALF)
            }));
            for (score, &class) in score.iter_mut().zip(&edge.class[side]) {
                *score = (*score + best[class as usize]).min(HALF);
            }
        }
        let living = self.alive(var).iter().zip(0..).filter(|&(&alive, _)| alive);
        let mut candidates: Vec<u32> = living.map(|(_, x)| x).collect();
        candidates.sort_unstable_by_key(|&x| std::cmp::Reverse((score[x as usize], x)));
        (self.score, self.best) = (score, best);
        candidates
    }

    fn assign(&mut self, var: usize, x: usize) -> bool {
        for other in 0..self.alive(var).len() {
            if other != x && self.alive[self.starts[var] + other] {
                self.remove(var, other);
            }
        }
        self.propagate()
    }

    fn remove(&mut self, var: usize, x: usize) {
        self.alive[self.starts[var] + x] = false;
        self.left[var] -= 1;
        self.trail.push((var as u32, x as u32));
        for &(e, side) in &self.model.incident[var] {
            let class = self.model.edges[e as usize].class[side as usize][x];
            let count = &mut self.counts[self.places[e as usize][side as usize] + class as usize];
            *count -= 1;
            if *count == 0 {
                self.queue.push((e, side));
            }
        }
    }

    /// Removes values without support; false if a variable empties.
    fn propagate(&mut self) -> bool {
        let model = self.model;
        let (mut lost, mut doomed) = (Vec::new(), Vec::new());
        while let Some((e, side)) = self.queue.pop() {
            let (edge, other) = (&model.edges[e as usize], 1 - side as usize);
            let end = edge.ends[other] as usize;
            let support = self.counts(e, 1 - other);
            let rows = edge.w[other].chunks_exact(support.len());
            lost.clear();
            lost.extend(self.counts(e, other).iter().zip(rows).map(|(&count, row)| {
                count > 0 && !support.iter().zip(row).any(|(&count, &cost)| count > 0 && cost < HALF)
            }));
            if lost.contains(&true) {
                doomed.clear();
                let pairs = self.alive(end).iter().zip(&edge.class[other]).enumerate();
                doomed.extend(pairs.filter(|&(_, (&alive, &c))| alive && lost[c as usize]).map(|(x, _)| x));
                for &x in &doomed {
                    self.remove(end, x);
                }
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
            self.alive[self.starts[var as usize] + x as usize] = true;
            self.left[var as usize] += 1;
            for &(e, side) in &self.model.incident[var as usize] {
                let class = self.model.edges[e as usize].class[side as usize][x as usize];
                self.counts[self.places[e as usize][side as usize] + class as usize] += 1;
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
