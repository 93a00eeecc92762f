//! Problems for tests and benches.
#![allow(dead_code, missing_docs)]

pub mod random;
pub mod transformer;

use hetspmd_search::{Assignment, Limits, Problem, Solution};

/// Solves with default limits.
pub fn solve(problem: &Problem) -> Solution {
    solve_with(problem, Limits::default(), None)
}

/// Solves with the given limits.
pub fn solve_with(problem: &Problem, limits: Limits, incumbent: Option<&Assignment>) -> Solution {
    let mut tick = |_: &_| true;
    hetspmd_search::solve(problem, limits, incumbent, &mut tick).expect("a well-formed problem")
}
