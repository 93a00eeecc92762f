//! What the search returns: a program, its exact cost, a proven lower bound and why it stopped.

use serde::{Deserialize, Serialize};

/// Why the search stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The lower bound met the cost.
    Optimal,
    /// The lower bound came as near to the cost as was asked for.
    Tolerance,
    /// The time limit struck.
    TimeLimit,
    /// The memory limit struck.
    MemoryLimit,
    /// The expansion limit struck, or would have long before a proof at the rate at which the bound rose.
    ExpansionLimit,
    /// The limit on sweeps struck.
    SweepLimit,
    /// The caller asked to stop.
    Interrupted,
    /// No program exists.
    Infeasible,
}

/// A program: one row per instruction, at most one move per tensor (-1: none).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// Row index per instruction.
    pub rows: Vec<usize>,
    /// Move index per tensor, -1 for none.
    pub moves: Vec<i64>,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Solution {
    /// Row index per instruction; empty without a program.
    pub rows: Vec<usize>,
    /// Move index per tensor, -1 for none; empty without a program.
    pub moves: Vec<i64>,
    /// Cost in picoseconds of the program, recomputed from the problem; null without a program.
    pub cost: Option<i64>,
    /// No program costs less.
    pub lower_bound: i64,
    /// `(cost - lower_bound) / max(cost, 1)`; 1 without a program.
    pub gap: f64,
    /// Why the search stopped.
    pub stop_reason: StopReason,
    /// Partial programs expanded by A*.
    pub expansions: u64,
    /// Message passing sweeps (forward and backward).
    pub sweeps: u64,
    /// Wall seconds.
    pub seconds: f64,
    /// Variables of the pairwise model.
    pub variables: usize,
    /// Values of the pairwise model.
    pub values: usize,
    /// Values left after the exact reductions.
    pub values_after_reduction: usize,
    /// For infeasible problems: what emptied.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub conflict: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn stop_reasons_are_snake_case_and_solutions_are_incumbents() {
        assert_eq!(serde_json::to_string(&StopReason::TimeLimit).ok().as_deref(), Some("\"time_limit\""));
        let text = r#"{"rows":[1],"moves":[-1],"cost":3}"#;
        let read: Assignment = serde_json::from_str(text).unwrap();
        assert_eq!(read, Assignment { rows: vec![1], moves: vec![-1] });
    }
}
