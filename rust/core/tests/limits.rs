//! Every stop reason is reached; whatever struck, the program is checked and the bound is a bound.
#![allow(missing_docs)]

mod support;

use hetspmd_search::problem::{Problem, Requirement};
use hetspmd_search::verify::verify;
use hetspmd_search::{Assignment, Limits, Progress, Solution, StopReason, solve};
use support::random::dense;
use support::transformer::{Config, transformer};
use support::{solve as solve_fully, solve_with};

const ROOMY: Limits = Limits { time: 1e9, expansions: u64::MAX, memory: u64::MAX, sweeps: u64::MAX };

fn hard() -> Problem {
    dense(160, 8)
}

fn check(problem: &Problem, solution: &Solution) {
    let program = Assignment { rows: solution.rows.clone(), moves: solution.moves.clone() };
    let cost = verify(problem, &program).expect("a valid program");
    assert_eq!(solution.cost, Some(cost));
    assert!(solution.lower_bound <= cost);
    let gap = (cost - solution.lower_bound) as f64 / cost.max(1) as f64;
    assert!((solution.gap - gap).abs() < 1e-12);
}

#[test]
fn time_limit() {
    for time in [0.0, 0.05] {
        let problem = hard();
        let solution = solve_with(&problem, Limits { time, ..ROOMY }, None);
        assert_eq!(solution.stop_reason, StopReason::TimeLimit);
        check(&problem, &solution);
        assert!(solution.seconds < 5.0);
    }
}

#[test]
fn expansion_limit() {
    let problem = hard();
    let solution = solve_with(&problem, Limits { expansions: 1000, ..ROOMY }, None);
    assert_eq!(solution.stop_reason, StopReason::ExpansionLimit);
    assert!(solution.expansions <= 1000 + 256);
    assert!(solution.lower_bound > 0);
    check(&problem, &solution);
}

#[test]
fn a_hopeless_search_gives_up_with_the_same_result_every_time() {
    let problem = hard();
    let limits = Limits { time: 1e9, ..Limits::default() };
    let first = solve_with(&problem, limits, None);
    assert_eq!(first.stop_reason, StopReason::ExpansionLimit);
    check(&problem, &first);
    let again = solve_with(&problem, limits, None);
    assert_eq!(Solution { seconds: 0.0, ..first }, Solution { seconds: 0.0, ..again });
}

#[test]
fn memory_limit() {
    let problem = hard();
    let solution = solve_with(&problem, Limits { memory: 1000, ..ROOMY }, None);
    assert_eq!(solution.stop_reason, StopReason::MemoryLimit);
    check(&problem, &solution);
}

#[test]
fn sweep_limit() {
    let problem = hard();
    for sweeps in [0, 1, 20] {
        let solution = solve_with(&problem, Limits { sweeps, ..ROOMY }, None);
        assert_eq!((solution.stop_reason, solution.sweeps), (StopReason::SweepLimit, sweeps));
        check(&problem, &solution);
    }
}

#[test]
fn interrupted() {
    let problem = hard();
    let mut calls = 0;
    let mut tick = |progress: &Progress| {
        calls += 1;
        progress.cost.is_none()
    };
    let solution = solve(&problem, ROOMY, None, &mut tick).unwrap();
    assert_eq!(solution.stop_reason, StopReason::Interrupted);
    assert!(calls > 1);
    check(&problem, &solution);
}

#[test]
fn optimal_and_the_same_every_time() {
    for problem in [transformer(Config::base(2)), dense(14, 3)] {
        let first = solve_fully(&problem);
        assert_eq!(first.stop_reason, StopReason::Optimal);
        assert!(first.gap == 0.0);
        check(&problem, &first);
        let again = solve_fully(&problem);
        assert_eq!(Solution { seconds: 0.0, ..first }, Solution { seconds: 0.0, ..again });
    }
}

#[test]
fn infeasible_names_the_culprit() {
    let mut problem = transformer(Config::base(1));
    let tokens = problem.instructions.iter().position(|i| i.name == "tokens").unwrap();
    for row in &mut problem.instructions[tokens].rows {
        row.post = vec![12];
    }
    let solution = solve_fully(&problem);
    assert_eq!(solution.stop_reason, StopReason::Infeasible);
    assert!(solution.conflict.unwrap().contains("tokens"));
    let mut problem = transformer(Config::base(1));
    problem.requirements.push(Requirement { tensor: 0, any_of: vec![20] });
    problem.tensors[0].moves.clear();
    problem.instructions[0].rows.remove(0);
    let solution = solve_fully(&problem);
    assert_eq!(
        solution.conflict.as_deref(),
        Some("nothing is left for instruction 0 (tokens): requirement on tensor 0 (tokens)")
    );
    assert!(solution.rows.is_empty() && solution.cost.is_none());
}

#[test]
fn a_broken_incumbent_is_refused() {
    let problem = transformer(Config::base(1));
    let mut tick = |_: &Progress| true;
    let incumbent = Assignment::default();
    let error = solve(&problem, ROOMY, Some(&incumbent), &mut tick).unwrap_err();
    assert!(error.to_string().starts_with("incumbent: 0 rows"));
}
