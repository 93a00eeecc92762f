//! Problems for tests and benches.
#![allow(dead_code, missing_docs)]

pub mod random;
pub mod transformer;

use hetspmd_search::{Assignment, Limits, Problem, Searcher, Solution};

/// Solves with default limits.
pub fn solve(problem: &Problem) -> Solution {
    solve_with(problem, Limits::default(), None)
}

/// Solves with the given limits.
pub fn solve_with(problem: &Problem, limits: Limits, incumbent: Option<&Assignment>) -> Solution {
    let mut tick = |_: &_| true;
    hetspmd_search::solve(problem, limits, incumbent, &mut tick).expect("a well-formed problem")
}

/// Sets all costs of a searcher, one after the other; the number of rows.
pub fn set_costs(searcher: &mut Searcher, mut next: impl Iterator<Item = i64>) -> usize {
    let problem = searcher.problem();
    let counts = [
        problem.instructions.iter().map(|i| i.rows.len()).sum(),
        problem.tensors.iter().map(|t| t.moves.len()).sum(),
        problem.tensors.iter().map(|t| t.keep.len()).sum(),
    ];
    let [rows, moves, keep] = counts.map(|count: usize| next.by_ref().take(count).collect::<Vec<i64>>());
    searcher.set_costs(&rows, &moves, &keep).expect("costs of the problem");
    rows.len()
}
