//! Exact search over SPMD programs.
//!
//! Given instructions with Hoare triples (*rows*: forms needed of the inputs, forms given to the outputs,
//! cost) and tensors with communications (*moves*), choose one row per instruction and at most one move
//! per tensor so that every precondition is available, at least total cost:
//!
//! `minimise Σ_i cost(row_i) + Σ_t cost(move_t)`.
//!
//! The way of the data: [`problem`] → [`validate`] → [`build`] (pairwise [`model`]) → [`consistency`],
//! [`dominance`] (exact reductions) → [`order`], [`compact`] → [`eliminate`] (chains and trees vanish; later,
//! variables [`join`]) → [`trws`] (lower bound), [`dive`] and [`beam`] (programs) → [`astar`] over [`frontier`] states
//! (what the bound leaves open) → [`verify`] → [`solution`]. [`solve()`] runs all.

pub mod astar;
pub mod beam;
pub mod brute;
pub mod build;
pub mod compact;
pub mod consistency;
pub mod control;
pub mod dive;
pub mod dominance;
pub mod eliminate;
pub mod extrapolate;
pub mod fold;
pub mod frontier;
pub mod intern;
pub mod join;
pub mod messages;
pub mod model;
pub mod order;
pub mod problem;
pub mod reduced;
pub mod searcher;
pub mod solution;
pub mod solve;
#[cfg(test)]
mod testing;
pub mod trws;
pub mod validate;
pub mod verify;

pub use control::{Limits, Progress};
pub use problem::Problem;
pub use searcher::{Asked, Searcher};
pub use solution::{Assignment, Solution, StopReason};
pub use solve::solve;
pub use validate::ProblemError;
